package integration

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/writegate/writegate/fencedb"
	"github.com/writegate/writegate/internal/pgtest"
	"github.com/writegate/writegate/leasedb"
)

var execModes = []pgx.QueryExecMode{
	pgx.QueryExecModeCacheStatement, pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeDescribeExec, pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol,
}

// Leases and the gate work in every one of pgx's modes, directly and through a pooler that pools transactions; there only
// prepared statements do not, which belong to a session. (F16, C38 b)
func TestModesAndPoolers(t *testing.T) {
	for _, through := range []string{"direct", "session", "transaction"} {
		for _, mode := range execModes {
			if through == "transaction" && mode == pgx.QueryExecModeCacheStatement {
				continue // PgBouncer before 1.21 cannot
			}
			t.Run(through+"/"+mode.String(), func(t *testing.T) {
				b := newBed(t)
				cfg := b.cfg
				if through != "direct" {
					cfg = pgtest.Pooler(t, b.cfg.Database, through)
				}
				pool := pgtest.Pool(t, cfg, func(c *pgxpool.Config) { c.ConnConfig.DefaultQueryExecMode = mode })
				leaseAndWrite(t, b, pool, through == "transaction")
			})
		}
	}
}

// leaseAndWrite does with the pool what a program does.
func leaseAndWrite(t *testing.T, b *bed, pool *pgxpool.Pool, pollOnly bool) {
	t.Helper()
	ctx := context.Background()
	client := func(holder string) *leasedb.Client {
		c, err := leasedb.New(ctx, pool, leasedb.Config{
			Holder: holder, TTL: time.Minute, RenewEvery: 20 * time.Millisecond, PollEvery: 20 * time.Millisecond, PollOnly: pollOnly, Conns: 1,
		})
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, c.Close(ctx)) })
		return c
	}
	gate := fencedb.New(pool, fencedb.Config{})
	t.Cleanup(gate.Close)
	table, err := gate.Table(ctx, "app.orders")
	require.NoError(t, err)

	lease := b.acquire(client("A"), "x")
	for i, strength := range []fencedb.Strength{fencedb.Fenced, fencedb.Live} {
		outcome, err := table.Update(ctx, lease, fencedb.Key{"id": i + 1}, fencedb.Set{"v": "A"}, fencedb.WithStrength(strength))
		require.NoError(t, err)
		require.Equal(t, fencedb.Applied, outcome)
	}
	require.Eventually(t, func() bool { return query[int64](b, `SELECT renewals FROM fence.lease`) >= 3 }, 30*time.Second, 5*time.Millisecond)

	waiters := client("B")
	var wait sync.WaitGroup
	for range 5 {
		wait.Go(func() {
			err := waiters.Do(ctx, "x", func(ctx context.Context, l *leasedb.Lease) error {
				_, err := table.Update(ctx, l, order1, fencedb.Set{"v": "B"})
				return err
			})
			if err != nil {
				t.Error(err)
			}
		})
	}
	require.NoError(t, lease.Release(ctx))
	wait.Wait()
	_, err = table.Update(ctx, factsOf(lease), order1, fencedb.Set{"v": "late"})
	require.ErrorIs(t, err, fencedb.ErrStale)
	_, err = table.Update(ctx, factsOf(lease), fencedb.Key{"id": 3}, fencedb.Set{"v": "late"}, fencedb.WithStrength(fencedb.Live))
	require.ErrorIs(t, err, fencedb.ErrLeaseLost)
	require.Equal(t, "B", query[string](b, `SELECT v FROM app.orders WHERE id = 1`))
	require.Equal(t, 2, query[int](b, `SELECT count(*) FROM fence.rejection WHERE verdict = 'stale'`))
}
