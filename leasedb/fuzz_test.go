package leasedb_test

import (
	"context"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/writegate/writegate/internal/pgtest"
	"github.com/writegate/writegate/leasedb"
)

// What the client takes for a lease's name or a holder's label, the database takes as well, and keeps as it is; what the client
// refuses, the database refuses too, whichever language asks it.
func FuzzNames(f *testing.F) {
	for _, seed := range [][2]string{
		{"report", "host/1/worker"}, {"", ""}, {"it's \"a\" \\ name", "$1 @x %s"}, {"tab\t", "tab\t\x1b"}, {"\u009f", "\u009f"}, {"\u00a0\u2028", "\u202e"}, {"nul\x00", "x"}, {"x", "nul\x00"},
		{"bad\xff", "x"}, {"x", "bad\xff"}, {strings.Repeat("n", 255), strings.Repeat("h", 1024)}, {strings.Repeat("n", 256), "h"}, {"x", strings.Repeat("é", 513)}, {"日本", "é"}, {"É", "e\u0301"},
	} {
		f.Add(seed[0], seed[1])
	}
	ctx := context.Background()
	cfg := pgtest.New(f)
	pool := pgtest.Pool(f, cfg, func(c *pgxpool.Config) { c.MaxConns = 1 })
	sendable := func(s string) bool { return utf8.ValidString(s) && !strings.ContainsRune(s, 0) }
	f.Fuzz(func(t *testing.T, name, holder string) {
		const token = "11111111-1111-4111-8111-111111111111"
		took := func() bool {
			var granted bool
			err := pool.QueryRow(ctx, `SELECT granted FROM fence.acquire($1, $2, '1 minute', $3::uuid)`, name, holder, token).Scan(&granted)
			if err == nil {
				require.True(t, granted)
				_, err := pool.Exec(ctx, `DELETE FROM fence.lease`)
				require.NoError(t, err)
				return true
			}
			var said *pgconn.PgError
			require.ErrorAs(t, err, &said)
			require.Contains(t, []string{"22023", "22021"}, said.Code, err)
			return false
		}
		client, err := leasedb.New(ctx, pool, leasedb.Config{Holder: holder, TTL: time.Minute, PollOnly: true})
		if err != nil {
			require.ErrorContains(t, err, "Holder")
			if sendable(name) && name == "x" {
				require.False(t, took(), "the database takes what the client does not: %q", holder)
			}
			return
		}
		defer func() { require.NoError(t, client.Close(ctx)) }()
		lease, err := client.TryAcquire(ctx, name)
		if err != nil {
			require.NotContains(t, err.Error(), name+"\n")
			require.False(t, took(), "the database takes what the client does not: %q: %v", name, err)
			return
		}
		require.Equal(t, name, lease.Name())
		if holder != "" {
			require.Equal(t, holder, lease.Holder())
		}
		var kept, label string
		require.NoError(t, pool.QueryRow(ctx, `SELECT l.name, t.holder FROM fence.lease l JOIN fence.term t ON t.name = l.name AND t.fence = l.fence WHERE l.fence = $1`, lease.Fence()).Scan(&kept, &label))
		require.Equal(t, name, kept)
		require.Equal(t, lease.Holder(), label)
		require.NoError(t, lease.Release(ctx))
		require.True(t, took())
	})
}
