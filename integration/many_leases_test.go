package integration

import (
	"context"
	"fmt"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/writegate/writegate/leasedb"
)

// Ten thousand leases of one client are renewed in one statement, and released when it closes.
func TestTenThousandLeases(t *testing.T) {
	const leases, conns = 10_000, 8
	ctx := context.Background()
	b := newBed(t)
	events := make(chan leasedb.RenewEvent, 10_000)
	client := b.client(leasedb.Config{
		TTL: time.Hour, RenewEvery: time.Second, Conns: conns,
		Observe: func(e leasedb.Event) {
			if r, ok := e.(leasedb.RenewEvent); ok {
				events <- r
			}
		},
	})
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	var wait sync.WaitGroup
	for w := range conns {
		wait.Go(func() {
			for i := w; i < leases; i += conns {
				if _, err := client.TryAcquire(ctx, fmt.Sprintf("lease-%05d", i)); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	wait.Wait()
	runtime.GC()
	runtime.ReadMemStats(&after)
	timeout := time.After(2 * time.Minute)
	for {
		select {
		case r := <-events:
			require.Zero(t, r.Lost)
			if r.Renewed < leases {
				continue
			}
			t.Logf("%d leases in one beat of %v; %d bytes of memory each", r.Renewed, r.Took, (after.HeapAlloc-before.HeapAlloc)/leases)
		case <-timeout:
			t.Fatal("no beat has renewed them all")
		}
		break
	}
	require.NoError(t, client.Close(ctx))
	require.Equal(t, 0, query[int](b, `SELECT count(*) FROM fence.lease WHERE released_at IS NULL`))
	require.Equal(t, leases, query[int](b, `SELECT count(*) FROM fence.term WHERE end_reason = 'released'`))
}

// One statement answers for each of them, whatever has become of it, once.
func TestRenewalAnswersForEach(t *testing.T) {
	ctx := context.Background()
	b := newBed(t)
	client := b.client(leasedb.Config{TTL: time.Hour, ManualRenewal: true})
	var names, tokens []string
	for _, name := range []string{"held", "held-too", "locked", "expired", "released", "another's"} {
		names, tokens = append(names, name), append(tokens, b.acquire(client, name).Token())
	}
	names, tokens = append(names, "never granted", "held"), append(tokens, tokens[0], tokens[0])
	b.exec(`UPDATE fence.lease SET expires_at = now() - interval '1s' WHERE name = 'expired';
		UPDATE fence.lease SET released_at = now() WHERE name = 'released';
		UPDATE fence.lease SET token = gen_random_uuid() WHERE name = 'another''s'`)
	_, err := b.session().Exec(ctx, `BEGIN; SELECT 1 FROM fence.lease WHERE name = 'locked' FOR UPDATE`)
	require.NoError(t, err)

	rows, err := b.pool.Query(ctx, `SELECT name, outcome, expires_at > now() + interval '59m' FROM fence.renew($1, $2::text[]::uuid[])`, names, tokens)
	require.NoError(t, err)
	type answer struct {
		Name, Outcome string
		Extended      *bool
	}
	answers, err := pgx.CollectRows(rows, pgx.RowToStructByPos[answer])
	require.NoError(t, err)
	yes := true
	require.ElementsMatch(t, []answer{
		{"held", "renewed", &yes}, {"held-too", "renewed", &yes}, {"locked", "locked", nil}, {"expired", "lost", nil},
		{"released", "lost", nil}, {"another's", "lost", nil}, {"never granted", "lost", nil},
	}, answers)
}
