package integration

import (
	"context"
	"database/sql"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/stretchr/testify/require"

	"github.com/writegate/writegate/fencedb"
	"github.com/writegate/writegate/internal/pgtest"
	"github.com/writegate/writegate/leasedb"
)

// A zombie that writes as fast as it can leaves one row for each row that it tries to overwrite, up to a bound, and all its
// attempts are counted; and it is made to wait, so that it does not take the server from others. Those are what it is about; how many it
// makes does not matter, so it has no minute for it. (C40 a)
func TestZombieLeavesABoundedAudit(t *testing.T) {
	ctx := context.Background()
	b := newBed(t)
	b.exec(`INSERT INTO app.orders SELECT i, 'B', 40 FROM generate_series(4, 1500) i; UPDATE app.orders SET last_fence = 40`)
	var events, recorded atomic.Int64
	gate := b.gateOf(fencedb.New(b.pool, fencedb.Config{Observe: func(e fencedb.Event) {
		if a, ok := e.(fencedb.AuditEvent); ok {
			events.Add(1)
			recorded.Add(a.Recorded)
		}
	}}))
	table, err := gate.Table(ctx, "app.orders")
	require.NoError(t, err)
	zombie := fencedb.Static("x", 2, "A") // whose handle, if it has one, knows of nothing
	const loops = 300
	began := time.Now()
	for range loops {
		_, err := table.Update(ctx, zombie, order1, fencedb.Set{"v": "A"})
		require.ErrorIs(t, err, fencedb.ErrStale)
	}
	require.Greater(t, time.Since(began), 2*time.Second, "its repeats wait: 0.1 ms, 0.2 ms, and so on, up to 10 ms")
	require.NoError(t, gate.Flush(ctx))
	require.EqualValues(t, loops, query[int64](b, `SELECT count FROM fence.rejection`))
	require.Less(t, events.Load(), int64(loops/2), "repeats are written together")
	require.Equal(t, int64(loops), recorded.Load())

	var wait sync.WaitGroup
	for part := range 4 {
		wait.Go(func() {
			for id := 1 + part; id <= 1500; id += 4 {
				_, err := table.Update(ctx, zombie, fencedb.Key{"id": id}, fencedb.Set{"v": "A"})
				if err == nil {
					t.Error("not refused")
				}
			}
		})
	}
	wait.Wait()
	require.NoError(t, gate.Flush(ctx))
	require.EqualValues(t, loops+1500, query[int64](b, `SELECT sum(count)::bigint FROM fence.rejection`))
	require.Equal(t, 1001, query[int](b, `SELECT count(*) FROM fence.rejection`))
	require.EqualValues(t, 500, query[int64](b, `SELECT count FROM fence.rejection WHERE row_key = '"(other keys)"'`))
	require.Zero(t, gate.Unrecorded())
}

// After its first refusal as stale a handle refuses by itself, if the database says that the lease has been superseded; a
// lawful holder, whose row somebody wrote under a fence from nowhere, is not turned off by that.
func TestStaleWriteEndsASupersededLease(t *testing.T) {
	ctx := context.Background()
	b := newBed(t)
	table := b.table()
	lawful := b.acquire(b.client(leasedb.Config{}), "x")
	b.exec(`UPDATE app.orders SET last_fence = 40`)
	_, err := table.Update(ctx, lawful, order1, fencedb.Set{"v": "A"})
	require.ErrorIs(t, err, fencedb.ErrStale)
	require.Equal(t, leasedb.Active, lawful.State())
	b.age("x", time.Hour)
	b.acquire(b.client(leasedb.Config{Holder: "B"}), "x")
	_, err = table.Update(ctx, lawful, fencedb.Key{"id": 2}, fencedb.Set{"v": "A"})
	require.ErrorIs(t, err, fencedb.ErrStale)
	require.Equal(t, leasedb.Lost, lawful.State())
	for range 100 {
		_, err = table.Update(ctx, lawful, fencedb.Key{"id": 2}, fencedb.Set{"v": "A"})
		require.ErrorIs(t, err, fencedb.ErrLeaseLost)
	}
	require.NoError(t, b.gate.Flush(ctx))
	require.EqualValues(t, 2, query[int64](b, `SELECT sum(count)::bigint FROM fence.rejection`))
}

// endsWith ends a context when a statement that begins so has been answered.
type endsWith struct {
	prefix string
	cancel context.CancelFunc
	sql    string
}

func (e *endsWith) TraceQueryStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryStartData) context.Context {
	e.sql = data.SQL
	return ctx
}

func (e *endsWith) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {
	if strings.HasPrefix(e.sql, e.prefix) {
		e.cancel()
	}
}

// A context that follows the lease ends in the very moment in which a write is refused for it: that it was is found out all
// the same, and recorded.
func TestRefusalWhileTheContextEnds(t *testing.T) {
	b := newBed(t)
	b.exec(`UPDATE app.orders SET last_fence = 40`)
	for name, write := range map[string]func(context.Context, *fencedb.Table) error{
		"UPDATE": func(ctx context.Context, table *fencedb.Table) error {
			_, err := table.Update(ctx, fencedb.Static("x", 2, "A"), order1, fencedb.Set{"v": "A"})
			return err
		},
		"WITH w AS (DELETE": func(ctx context.Context, table *fencedb.Table) error {
			_, err := table.Delete(ctx, fencedb.Static("x", 4, "A"), order1)
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			ctx, cancel := context.WithCancel(context.Background())
			pool := pgtest.Pool(t, b.cfg, func(cfg *pgxpool.Config) { cfg.ConnConfig.Tracer = &endsWith{prefix: name, cancel: cancel} })
			gate := b.gateOf(fencedb.New(pool, fencedb.Config{}))
			table, err := gate.Table(ctx, "app.orders")
			require.NoError(t, err)
			require.ErrorIs(t, write(ctx, table), fencedb.ErrStale)
			require.Error(t, ctx.Err())
		})
	}
	require.EqualValues(t, 2, query[int64](b, `SELECT sum(count)::bigint FROM fence.rejection`))
}

// While the audit is locked, good writes go on at once, and a refused one is returned in the time that it is given; once it
// comes free what could be kept is recorded, and the rest counted, in the database too. (C39 c)
func TestLockedAudit(t *testing.T) {
	ctx := context.Background()
	b := newBed(t)
	gate := b.gateOf(fencedb.New(b.pool, fencedb.Config{AuditTimeout: 200 * time.Millisecond}))
	table, err := gate.Table(ctx, "app.orders")
	require.NoError(t, err)
	b.exec(`UPDATE app.orders SET last_fence = 40 WHERE id = 1`)
	session := b.session()
	_, err = session.Exec(ctx, `BEGIN; LOCK TABLE fence.rejection`)
	require.NoError(t, err)
	var e *fencedb.WriteError
	for range 3 {
		_, err = table.Update(ctx, fencedb.Static("x", 2, "A"), order1, fencedb.Set{"v": "A"})
		require.ErrorIs(t, err, fencedb.ErrStale)
		require.ErrorAs(t, err, &e)
		require.Error(t, e.AuditErr)
		_, err = table.Update(ctx, fencedb.Static("x", 2, "A"), fencedb.Key{"id": 2}, fencedb.Set{"v": "A"})
		require.NoError(t, err)
	}
	require.NoError(t, gate.Flush(ctx))
	require.EqualValues(t, 3, gate.Unrecorded(), "the answer never came: it must not be counted twice")
	b.await(`SELECT NOT EXISTS (SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock')`)
	_, err = session.Exec(ctx, `COMMIT`)
	require.NoError(t, err)
	_, err = table.Update(ctx, fencedb.Static("x", 2, "A"), order1, fencedb.Set{"v": "A"})
	require.ErrorAs(t, err, &e)
	require.NoError(t, e.AuditErr)
	require.EqualValues(t, 1, query[int64](b, `SELECT sum(count)::bigint FROM fence.rejection`))
	require.EqualValues(t, 3, query[int64](b, `SELECT count FROM fence.audit_loss`))
}

// None of many refusals at once goes missing from the count, and the database hears of it although nothing more is refused.
func TestLostRefusalsAreCounted(t *testing.T) {
	ctx := context.Background()
	b := newBed(t)
	gate := b.gateOf(fencedb.New(pgtest.Pool(t, b.cfg, func(c *pgxpool.Config) { c.MaxConns = 20 }), fencedb.Config{AuditTimeout: 300 * time.Millisecond}))
	table, err := gate.Table(ctx, "app.orders")
	require.NoError(t, err)
	b.exec(`UPDATE app.orders SET last_fence = 40 WHERE id = 1`)
	session := b.session()
	_, err = session.Exec(ctx, `BEGIN; LOCK TABLE fence.rejection`)
	require.NoError(t, err)
	var wait sync.WaitGroup
	for range 20 {
		wait.Go(func() { _, _ = table.Update(ctx, fencedb.Static("x", 2, "A"), order1, fencedb.Set{"v": "A"}) })
	}
	wait.Wait()
	require.NoError(t, gate.Flush(ctx))
	require.EqualValues(t, 20, gate.Unrecorded())
	b.await(`SELECT NOT EXISTS (SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock')`)
	_, err = session.Exec(ctx, `COMMIT`)
	require.NoError(t, err)
	require.NoError(t, gate.Flush(ctx))
	require.EqualValues(t, 20, query[int64](b, `SELECT count FROM fence.audit_loss`))
	require.Equal(t, 0, query[int](b, `SELECT count(*) FROM fence.rejection`))
}

// One refusal that the database will not have does not take the others of its batch along.
func TestAuditOfOneBadRefusal(t *testing.T) {
	ctx := context.Background()
	b := newBed(t)
	gate := b.gateOf(fencedb.New(pgtest.Pool(t, b.cfg, func(c *pgxpool.Config) { c.MaxConns = 20 }), fencedb.Config{}))
	table, err := gate.Table(ctx, "app.orders")
	require.NoError(t, err)
	b.exec(`UPDATE app.orders SET last_fence = 40; ALTER TABLE fence.rejection ADD CHECK (lease_name <> 'bad')`)
	session := b.session()
	_, err = session.Exec(ctx, `BEGIN; LOCK TABLE fence.rejection`) // while the first is written, the others gather
	require.NoError(t, err)
	var wait sync.WaitGroup
	write := func(name string, id int) { // each in a transaction of its own, so that the server shows how far it is
		tx, err := b.session().Begin(ctx)
		require.NoError(t, err)
		wait.Go(func() {
			_, _ = table.In(tx).Update(ctx, fencedb.Static(name, 2, "A"), fencedb.Key{"id": id}, fencedb.Set{"v": "A"})
		})
	}
	write("first", 1)
	b.waitUntilBlocked()
	for _, name := range []string{"good 1", "bad", "good 2"} {
		write(name, 2)
	}
	b.await(`SELECT count(*) = 4 FROM pg_stat_activity WHERE datname = current_database() AND state = 'idle in transaction' AND query LIKE '%CASE WHEN t.%'`)
	_, err = session.Exec(ctx, `COMMIT`)
	require.NoError(t, err)
	wait.Wait()
	require.NoError(t, gate.Flush(ctx))
	require.Equal(t, 3, query[int](b, `SELECT count(*) FROM fence.rejection`))
	require.EqualValues(t, 1, gate.Unrecorded())
	_, err = table.Update(ctx, fencedb.Static(string(make([]byte, 300)), 2, "A"), order1, fencedb.Set{"v": "A"})
	require.ErrorContains(t, err, "want at most 255")
}

// Flush waits for what was refused before it was called, and not for ever for what comes after.
func TestFlushWhileAZombieRuns(t *testing.T) {
	ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
	defer cancel()
	b := newBed(t)
	table := b.table()
	b.exec(`UPDATE app.orders SET last_fence = 40`)
	stop := make(chan struct{})
	var wait sync.WaitGroup
	for range 3 {
		wait.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
					_, _ = table.Update(ctx, fencedb.Static("x", 2, "A"), order1, fencedb.Set{"v": "A"})
				}
			}
		})
	}
	b.await(`SELECT EXISTS (SELECT 1 FROM fence.rejection)`)
	for range 5 {
		require.NoError(t, b.gate.Flush(ctx))
	}
	close(stop)
	wait.Wait()
}

// An application's role cannot bury rows or record requests of tables on which it has no rights. (C31)
func TestRolesCannotForgeTombstones(t *testing.T) {
	ctx := context.Background()
	b := newBed(t)
	role := "wg_" + b.cfg.Database
	b.exec(strings.ReplaceAll(readmeGrants(t), "app_role", role) + `; CREATE TABLE app.secret (id int PRIMARY KEY); SELECT fence.protect('app.secret');
		GRANT USAGE ON SCHEMA app TO ` + role + `; GRANT SELECT, UPDATE ON app.orders TO ` + role + `; GRANT ` + role + ` TO CURRENT_USER`)
	t.Cleanup(func() { b.exec(`DROP OWNED BY ` + role + `; DROP ROLE ` + role) })
	for _, how := range []string{"SESSION AUTHORIZATION", "ROLE"} {
		conn := b.session()
		_, err := conn.Exec(ctx, `SET `+how+` `+role)
		require.NoError(t, err)
		for forged, code := range map[string]string{
			`SELECT fence.bury('app.secret', 1, 2, '{"id": 1}', 9223372036854775807, 'evil')`:      "42501",
			`SELECT fence.bury('app.orders', 1, 2, '{"id": 1}', 9223372036854775807, 'evil')`:      "42501", // it may update, not delete
			`SELECT fence.request_applied('x', 2, 'r', 'update', 'app.secret', 1, 2, '{}', NULL)`:  "42501",
			`SELECT fence.request_applied('x', 2, 'r', 'update', 'fence.lease', 1, 2, '{}', NULL)`: "42501",
			`SELECT fence.prune()`: "42501", `SELECT fence.may('app.orders', 'UPDATE')`: "42501",
		} {
			_, err := conn.Exec(ctx, forged)
			require.ErrorContains(t, err, code, forged)
		}
		_, err = conn.Exec(ctx, `SELECT fence.request_applied('x', 2, '`+how+`', 'update', 'app.orders', 1, 2, '{}', NULL)`)
		require.NoError(t, err, "its own it may")
	}
}

// Where the database cannot be reached for the audit, the refusal waits and is recorded when it can: nothing was sent, so
// nothing can be counted twice.
func TestAuditThatCannotConnect(t *testing.T) {
	ctx := context.Background()
	b := newBed(t)
	l := newLink(b, pgtest.Shared(t))
	audit := b.sqlDB(stdlib.OpenDB(*l.cfg))
	gate := b.gateOf(fencedb.NewSQL(b.sqlDB(stdlib.OpenDB(*b.cfg)), fencedb.Config{AuditDB: audit}))
	table, err := gate.Table(ctx, "app.orders")
	require.NoError(t, err)
	b.exec(`UPDATE app.orders SET last_fence = 40 WHERE id = 1`)
	l.refuse()
	_, err = table.Update(ctx, fencedb.Static("x", 2, "A"), order1, fencedb.Set{"v": "A"})
	var e *fencedb.WriteError
	require.ErrorAs(t, err, &e)
	require.ErrorIs(t, err, fencedb.ErrStale)
	require.ErrorContains(t, e.AuditErr, "could not be recorded")
	l.mend()
	require.NoError(t, gate.Flush(ctx))
	require.EqualValues(t, 1, query[int64](b, `SELECT sum(count)::bigint FROM fence.rejection`))
	require.Zero(t, gate.Unrecorded())
}

// A gate of database/sql without a connection of its own for the audit does not wait for ever for the one that the refused
// work holds. (C39 e)
func TestAuditThroughTheOnlyConnection(t *testing.T) {
	ctx := context.Background()
	b := newBed(t)
	db := b.sqlDB(stdlib.OpenDB(*b.cfg))
	db.SetMaxOpenConns(1)
	gate := b.gateOf(fencedb.NewSQL(db, fencedb.Config{AuditTimeout: 50 * time.Millisecond}))
	table, err := gate.Table(ctx, "app.orders")
	require.NoError(t, err)
	b.exec(`UPDATE app.orders SET last_fence = 40 WHERE id = 1`)
	tx, err := db.BeginTx(ctx, nil)
	require.NoError(t, err)
	_, err = table.InSQL(tx).Update(ctx, fencedb.Static("x", 2, "A"), order1, fencedb.Set{"v": "A"})
	require.ErrorIs(t, err, fencedb.ErrStale)
	var e *fencedb.WriteError
	require.ErrorAs(t, err, &e)
	require.Error(t, e.AuditErr)
	_, err = table.InSQL(tx).Update(ctx, fencedb.Static("x", 2, "A"), fencedb.Key{"id": 2}, fencedb.Set{"v": "A"})
	require.NoError(t, err, "the refusal leaves the transaction usable")
	require.NoError(t, tx.Commit())
	require.NoError(t, gate.Flush(ctx))
	require.EqualValues(t, 1, query[int64](b, `SELECT count FROM fence.rejection`), "once the connection is free")
}

// Closing records what is pending; what is refused afterwards is counted.
func TestCloseRecordsWhatIsPending(t *testing.T) {
	ctx := context.Background()
	b := newBed(t)
	gate := fencedb.New(b.pool, fencedb.Config{})
	table, err := gate.Table(ctx, "app.orders")
	require.NoError(t, err)
	b.exec(`UPDATE app.orders SET last_fence = 40 WHERE id = 1`)
	for range 50 {
		_, err = table.Update(ctx, fencedb.Static("x", 2, "A"), order1, fencedb.Set{"v": "A"})
		require.ErrorIs(t, err, fencedb.ErrStale)
	}
	gate.Close()
	require.EqualValues(t, 50, query[int64](b, `SELECT count FROM fence.rejection`))
	_, err = table.Update(ctx, fencedb.Static("x", 2, "A"), order1, fencedb.Set{"v": "A"})
	require.ErrorIs(t, err, fencedb.ErrStale)
	require.EqualValues(t, 1, gate.Unrecorded())
	gate.Close()
}

// Fences from elsewhere, in a database with and without our schema: everything works but what needs the lease itself. (R16)
func TestFencesFromElsewhere(t *testing.T) {
	for _, schema := range []bool{true, false} {
		t.Run(fmt.Sprint(schema), func(t *testing.T) {
			ctx := context.Background()
			cfg := pgtest.NewEmpty(t)
			if schema {
				cfg = pgtest.New(t)
			}
			pgtest.Exec(t, cfg, `CREATE SCHEMA app; CREATE TABLE app.orders (id int PRIMARY KEY, v text, last_fence bigint NOT NULL DEFAULT 0);
				INSERT INTO app.orders SELECT i, 'first' FROM generate_series(1, 9) i`)
			if schema {
				pgtest.Exec(t, cfg, `SELECT fence.protect('app.orders')`)
			}
			b := bedOn(t, cfg)
			table := b.table()
			var revision int64 = 7
			var lost error
			lease := fencedb.Doubled(fencedb.Callback("etcd", "A", func() (int64, error) { return revision, lost }))
			older := fencedb.Doubled(fencedb.Static("etcd", 6, "Z"))
			id := func(id int) fencedb.Key { return fencedb.Key{"id": id} }
			v := fencedb.Set{"v": "A"}

			var sealed struct {
				ID int
				V  string
			}
			for what, f := range map[string]func() (fencedb.Outcome, error){
				"update": func() (fencedb.Outcome, error) { return table.Update(ctx, lease, id(1), v) },
				"upsert": func() (fencedb.Outcome, error) { return table.Upsert(ctx, lease, id(2), v) },
				"insert": func() (fencedb.Outcome, error) { return table.Insert(ctx, lease, fencedb.Set{"id": 20, "v": "A"}) },
				"seal":   func() (fencedb.Outcome, error) { return table.Seal(ctx, lease, id(3), fencedb.Returning(&sealed)) },
				"exec": func() (fencedb.Outcome, error) {
					return b.gate.Exec(ctx, lease, `UPDATE app.orders SET v = 'A', last_fence = @fence WHERE id = 4 AND last_fence < @fence`, nil, fencedb.Target(table, id(4)))
				},
				"many": func() (fencedb.Outcome, error) {
					results, err := table.UpdateMany(ctx, lease, []fencedb.Row{{Key: id(5), Set: v}, {Key: id(6), Set: v}})
					return results[0].Outcome, err
				},
			} {
				outcome, err := f()
				require.NoError(t, err, what)
				require.Equal(t, fencedb.Applied, outcome, what)
			}
			require.Equal(t, 3, sealed.ID)
			for i := 1; i <= 6; i++ {
				_, err := table.Update(ctx, older, id(i), fencedb.Set{"v": "Z"})
				require.ErrorIs(t, err, fencedb.ErrStale)
			}
			require.EqualValues(t, 13, query[int64](b, `SELECT last_fence FROM app.orders WHERE id = 3`), "sealed just under 14")
			_, err := table.Update(ctx, lease, id(3), v)
			require.NoError(t, err, "a sealed row still takes the sealer's write")

			_, deleted := table.Delete(ctx, lease, id(7))
			_, requested := table.Update(ctx, lease, id(8), v, fencedb.WithRequestID("r"))
			if schema {
				require.NoError(t, deleted)
				require.NoError(t, requested)
			} else {
				require.ErrorIs(t, deleted, fencedb.ErrSchema)
				require.ErrorIs(t, requested, fencedb.ErrSchema)
			}
			_, err = table.Update(ctx, lease, id(9), v, fencedb.WithStrength(fencedb.Live))
			require.Error(t, err)
			require.Error(t, b.gate.InTx(ctx, lease, func(context.Context, pgx.Tx) error { return nil }))

			// The callback is asked anew, and what it cannot tell refuses.
			revision = 8
			_, err = table.Update(ctx, lease, id(1), fencedb.Set{"v": "again"})
			require.NoError(t, err)
			require.EqualValues(t, 16, query[int64](b, `SELECT last_fence FROM app.orders WHERE id = 1`))
			lost = context.DeadlineExceeded
			_, err = table.Update(ctx, lease, id(1), v)
			require.ErrorIs(t, err, fencedb.ErrLeaseLost)
			require.ErrorIs(t, err, context.DeadlineExceeded)
			lost, revision = nil, 1<<62
			_, err = table.Update(ctx, lease, id(1), v)
			require.ErrorContains(t, err, "cannot be doubled")
		})
	}
}

// What generated code has sent, classified. This is the shape that sqlc's :execrows makes of the statement in docs/writes.md.
func TestClassify(t *testing.T) {
	ctx := context.Background()
	b := newBed(t)
	table := b.table()
	lease := b.acquire(b.client(leasedb.Config{Holder: "A"}), "x")
	finish := func(db fencedb.Conn, l fencedb.Lease, id int, v string) (int64, error) {
		result, err := db.ExecContext(ctx, `UPDATE app.orders SET v = $1, last_fence = $2 WHERE id = $3 AND last_fence < $2`, v, l.Fence(), id)
		if err != nil {
			return 0, err
		}
		return result.RowsAffected()
	}
	db := b.sqlDB(stdlib.OpenDB(*b.cfg))
	write := func(id int, v string) (fencedb.Outcome, error) {
		n, err := finish(db, lease, id, v)
		return table.InSQL(db).Classify(ctx, lease, fencedb.Key{"id": id}, n, err)
	}
	outcome, err := write(1, "A")
	require.NoError(t, err)
	require.Equal(t, fencedb.Applied, outcome)
	outcome, err = write(1, "A")
	require.NoError(t, err)
	require.Equal(t, fencedb.AlreadyApplied, outcome)
	_, err = write(99, "A")
	require.ErrorIs(t, err, fencedb.ErrMissing)
	b.exec(`ALTER TABLE app.orders ADD CHECK (v <> 'bad')`)
	outcome, err = write(2, "bad")
	require.Equal(t, fencedb.Failed, outcome)
	require.ErrorContains(t, err, "23514")
	b.exec(`UPDATE app.orders SET last_fence = 40 WHERE id = 2`)
	_, err = write(2, "A")
	require.ErrorIs(t, err, fencedb.ErrStale)
	require.Equal(t, 1, query[int](b, `SELECT count(*) FROM fence.rejection WHERE holder = 'A'`))

	// In a transaction of the caller's, and of a lease that has ended meanwhile: what was done was done.
	tx, err := db.BeginTx(ctx, nil)
	require.NoError(t, err)
	n, err := finish(tx, lease, 3, "A")
	require.NoError(t, lease.Release(ctx))
	outcome, err = table.InSQL(tx).Classify(ctx, lease, fencedb.Key{"id": 3}, n, err)
	require.NoError(t, err)
	require.Equal(t, fencedb.Applied, outcome)
	outcome, err = table.InSQL(tx).Classify(ctx, lease, fencedb.Key{"id": 3}, 0, nil)
	require.ErrorIs(t, err, fencedb.ErrLeaseLost)
	require.Equal(t, fencedb.LeaseLost, outcome)
	require.NoError(t, tx.Commit())
}

// Live SQL of one's own through something that may be no transaction cannot be made safe, and is refused.
func TestLiveNeedsATransaction(t *testing.T) {
	ctx := context.Background()
	b := newBed(t)
	gate := b.gateOf(fencedb.NewSQL(b.sqlDB(stdlib.OpenDB(*b.cfg)), fencedb.Config{}))
	table, err := gate.Table(ctx, "app.orders")
	require.NoError(t, err)
	db := b.sqlDB(stdlib.OpenDB(*b.cfg))
	lease := b.acquire(b.client(leasedb.Config{}), "x")
	write := func(conn fencedb.Conn) (fencedb.Outcome, error) {
		return gate.Exec(ctx, lease, `UPDATE app.orders SET v = 'A', last_fence = @fence WHERE id = 1 AND last_fence < @fence`, nil,
			fencedb.Target(table.InSQL(conn), order1), fencedb.WithStrength(fencedb.Live))
	}
	_, err = write(db)
	require.ErrorContains(t, err, "give InSQL a *sql.Tx")
	tx, err := db.BeginTx(ctx, &sql.TxOptions{Isolation: sql.LevelReadCommitted})
	require.NoError(t, err)
	outcome, err := write(tx)
	require.NoError(t, err)
	require.Equal(t, fencedb.Applied, outcome)
	require.NoError(t, tx.Commit())
	require.ErrorContains(t, gate.InTx(ctx, lease, nil), "use InSQLTx")
}

// What the observer hears of a write.
func TestWriteEvents(t *testing.T) {
	ctx := context.Background()
	b := newBed(t)
	var events []fencedb.WriteEvent
	pool := pgtest.Pool(t, b.cfg, func(c *pgxpool.Config) { c.MaxConns = 2 })
	gate := b.gateOf(fencedb.New(pool, fencedb.Config{Observe: func(e fencedb.Event) {
		if w, ok := e.(fencedb.WriteEvent); ok {
			events = append(events, w)
		}
	}}))
	table, err := gate.Table(ctx, "app.orders")
	require.NoError(t, err)
	lease := b.acquire(b.client(leasedb.Config{TTL: time.Minute}), "x")
	_, err = table.Update(ctx, lease, order1, fencedb.Set{"v": "A"})
	require.NoError(t, err)
	_, err = table.UpdateMany(ctx, lease, []fencedb.Row{{Key: fencedb.Key{"id": 2}, Set: fencedb.Set{"v": "A"}}, {Key: fencedb.Key{"id": 3}, Set: fencedb.Set{"v": "A"}}})
	require.NoError(t, err)
	require.NoError(t, gate.InTx(ctx, lease, func(context.Context, pgx.Tx) error { return nil }))
	b.exec(`UPDATE app.orders SET last_fence = 0 WHERE id = 1`)
	_, err = table.Update(ctx, lease, order1, fencedb.Set{"v": "A"}) // as the first, which it now knows how to
	require.NoError(t, err)
	b.exec(`UPDATE app.orders SET last_fence = 40`)
	_, err = table.Update(ctx, lease, order1, fencedb.Set{"v": "A"})
	require.Error(t, err)
	require.NoError(t, lease.Release(ctx))
	_, err = table.Update(ctx, lease, order1, fencedb.Set{"v": "A"})
	require.Error(t, err)

	require.Len(t, events, 6)
	for i, want := range []fencedb.WriteEvent{
		{Kind: "update", Table: "app.orders", Strength: fencedb.Fenced, Outcome: fencedb.Applied, Rows: 1},
		{Kind: "update_many", Table: "app.orders", Strength: fencedb.Fenced, Outcome: fencedb.Applied, Rows: 2},
		{Kind: "in_tx", Strength: fencedb.InTx, Outcome: fencedb.Applied},
		{Kind: "update", Table: "app.orders", Strength: fencedb.Fenced, Outcome: fencedb.Applied, Rows: 1},
		{Kind: "update", Table: "app.orders", Strength: fencedb.Fenced, Outcome: fencedb.Stale, Reason: "stale", Verdict: "lawful", Refused: 1},
		{Kind: "update", Table: "app.orders", Strength: fencedb.Fenced, Outcome: fencedb.LeaseLost},
	} {
		got := events[i]
		require.Positive(t, got.Took)
		require.Equal(t, i < 5, got.Left > 50*time.Second && got.Left < time.Minute, "%v", got.Left)
		require.Equal(t, i >= 4, got.Err != nil)
		got.Took, got.Left, got.Err = 0, 0, nil
		want.Rule, want.Attempt = fencedb.Once, 1
		require.Equal(t, want, got)
	}
}
