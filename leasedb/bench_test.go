package leasedb_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/writegate/writegate/internal/pgtest"
	"github.com/writegate/writegate/leasedb"
)

// For comparing two versions with each other, by scripts/benchcmp; what it costs beside others is integration/bench's.

func BenchmarkAcquireRelease(b *testing.B) {
	client, err := leasedb.New(b.Context(), pgtest.Pool(b, pgtest.New(b)), leasedb.Config{TTL: time.Minute, PollOnly: true})
	require.NoError(b, err)
	defer func() { _ = client.Close(b.Context()) }()
	b.ReportAllocs()
	for b.Loop() {
		lease, err := client.TryAcquire(b.Context(), "bench")
		require.NoError(b, err)
		require.NoError(b, lease.Release(b.Context()))
	}
}

// BenchmarkRenew is a beat of a thousand leases, as the server sees it.
func BenchmarkRenew(b *testing.B) {
	const leases = 1000
	cfg := pgtest.New(b)
	conn := pgtest.Conn(b, cfg)
	names, tokens := make([]string, leases), make([]string, leases)
	for i := range names {
		names[i], tokens[i] = fmt.Sprintf("bench-%d", i), fmt.Sprintf("00000000-0000-4000-8000-%012d", i)
	}
	_, err := conn.Exec(b.Context(), "SELECT a.granted FROM unnest($1::text[], $2::text[]) u (name, token), fence.acquire(u.name, 'bench', '1 hour', u.token::uuid) a", names, tokens)
	require.NoError(b, err)
	b.ReportAllocs()
	for b.Loop() {
		var renewed int
		require.NoError(b, conn.QueryRow(b.Context(), "SELECT count(*) FROM fence.renew($1::text[], $2::text[]::uuid[]) WHERE outcome = 'renewed'", names, tokens).Scan(&renewed))
		require.Equal(b, leases, renewed)
	}
}

func BenchmarkCheck(b *testing.B) {
	client, err := leasedb.New(b.Context(), pgtest.Pool(b, pgtest.New(b)), leasedb.Config{TTL: time.Hour, PollOnly: true})
	require.NoError(b, err)
	defer func() { _ = client.Close(b.Context()) }()
	lease, err := client.TryAcquire(b.Context(), "bench")
	require.NoError(b, err)
	b.ReportAllocs()
	for b.Loop() {
		require.NoError(b, lease.Check(0))
	}
}
