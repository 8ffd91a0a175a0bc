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
			if through == "transaction" && mode == pgx.QueryExecModeDescribeExec {
				continue // sends a statement and runs it in two trips, between which another's may take its place
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

// One connection to the server for everybody: what one client enters or sets is not another's, in any order. (C37)
func TestPoolerOfOneLeaksNothing(t *testing.T) {
	ctx := context.Background()
	b := newBed(t)
	b.exec(`SELECT fence.protect('app.orders', guard => 'enforce', strength => 'live')`)
	lease := b.acquire(b.client(leasedb.Config{TTL: time.Hour, ManualRenewal: true}), "x")
	cfg := pgtest.PoolerOfOne(t, b.cfg.Database, "transaction")
	connect := func() *pgx.Conn {
		c := cfg.Copy()
		c.DefaultQueryExecMode = pgx.QueryExecModeExec
		conn, err := pgx.ConnectConfig(ctx, c)
		require.NoError(t, err)
		t.Cleanup(func() { _ = conn.Close(ctx) })
		return conn
	}
	a, c := connect(), connect()
	settings := func() (s string) {
		require.NoError(t, c.QueryRow(ctx, `SELECT concat_ws(' ', current_setting('statement_timeout'), current_setting('lock_timeout'),
			current_setting('idle_in_transaction_session_timeout'), current_setting('transaction_timeout', true), nullif(current_setting('fence.entered', true), ''),
			nullif(current_setting('fence.marked', true), ''))`).Scan(&s))
		return s
	}
	before := settings()
	for range 3 {
		tx, err := a.Begin(ctx)
		require.NoError(t, err)
		_, err = tx.Exec(ctx, `SELECT fence.enter($1, $2::text::uuid, $3)`, lease.Name(), lease.Token(), lease.Fence())
		require.NoError(t, err)
		_, err = tx.Exec(ctx, `UPDATE app.orders SET v = 'A' WHERE id = 1`)
		require.NoError(t, err)
		require.NoError(t, tx.Commit(ctx))
		require.Equal(t, before, settings())
		for _, conn := range []*pgx.Conn{c, a, connect()} {
			_, err = conn.Exec(ctx, `UPDATE app.orders SET v = 'unfenced' WHERE id = 1`)
			require.ErrorContains(t, err, "WG008")
			_, err = conn.Exec(ctx, `INSERT INTO app.orders (id, v) VALUES (9, 'unfenced')`)
			require.ErrorContains(t, err, "WG008")
		}
		// Entered outside of a transaction, it is nobody's by the next statement.
		_, err = a.Exec(ctx, `SELECT fence.enter($1, $2::text::uuid, $3)`, lease.Name(), lease.Token(), lease.Fence())
		require.NoError(t, err)
		_, err = a.Exec(ctx, `UPDATE app.orders SET v = 'late' WHERE id = 1`)
		require.ErrorContains(t, err, "WG008")
	}
	// The gate through it, with a guard.
	pool := pgtest.Pool(t, cfg, func(p *pgxpool.Config) { p.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeExec })
	gate := b.gateOf(fencedb.New(pool, fencedb.Config{}))
	table, err := gate.Table(ctx, "app.orders")
	require.NoError(t, err)
	_, err = table.Update(ctx, lease, fencedb.Key{"id": 2}, fencedb.Set{"v": "A"})
	require.NoError(t, err)
	require.NoError(t, gate.InTx(ctx, lease, func(ctx context.Context, tx pgx.Tx) error {
		_, err := tx.Exec(ctx, `UPDATE app.orders SET v = 'A' WHERE id = 3`)
		return err
	}))
	require.Equal(t, before, settings())
}

// A mode that cannot work behind a pooler is told so at the beginning. (F16; PgBouncer before 1.21, which does not keep what
// is prepared for the client that has)
func TestPreparedStatementsBehindAPooler(t *testing.T) {
	ctx := context.Background()
	b := newBed(t)
	for mode, works := range map[string]bool{"transaction": false, "session": true} {
		gate := b.gateOf(fencedb.New(pgtest.Pool(t, pgtest.Pooler(t, b.cfg.Database, mode)), fencedb.Config{})) // pgx's default mode prepares
		_, err := gate.Table(ctx, "app.orders")
		if works {
			require.NoError(t, err)
		} else {
			require.ErrorContains(t, err, "set pgx's DefaultQueryExecMode to QueryExecModeCacheDescribe or QueryExecModeExec")
		}
	}
	one := b.gateOf(fencedb.New(pgtest.Pool(t, b.cfg, func(c *pgxpool.Config) { c.MaxConns = 1 }), fencedb.Config{}))
	_, err := one.Table(ctx, "app.orders")
	require.NoError(t, err)
}
