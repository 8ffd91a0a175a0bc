package integration

import (
	"context"
	"math"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/writegate/writegate/fencedb"
	"github.com/writegate/writegate/internal/pgtest"
	"github.com/writegate/writegate/leasedb"
)

var (
	order1    = fencedb.Key{"id": 1}
	bothRules = []fencedb.Rule{fencedb.Once, fencedb.Term}
)

// factsOf returns a grant without the handle's own knowledge of it.
func factsOf(l *leasedb.Lease) grant { return grant{l.Name(), l.Token(), l.Holder(), l.Fence()} }

// A superseded holder whose statement waits for the very transaction that supersedes it. (C01)
func TestWriteThatWaitedForItsSuccessorIsRefused(t *testing.T) {
	for _, rule := range bothRules {
		for _, strength := range []fencedb.Strength{fencedb.Fenced, fencedb.Live} {
			for _, inTx := range []bool{false, true} {
				t.Run(string(rule)+"/"+string(strength)+map[bool]string{false: "/pool", true: "/tx"}[inTx], func(t *testing.T) {
					ctx := context.Background()
					b := newBed(t)
					table := b.table()
					a := b.acquire(b.client(leasedb.Config{Holder: "A", ManualRenewal: true}), "x")

					// B takes the lease over and writes, all in one transaction that stays open: who looks sees a lease that runs.
					session := b.session()
					_, err := session.Exec(ctx, `BEGIN`)
					require.NoError(t, err)
					_, err = session.Exec(ctx, ageSQL, "x", time.Hour)
					require.NoError(t, err)
					var fenceB int64
					err = session.QueryRow(ctx, `SELECT fence FROM fence.acquire('x', 'B', '30s', gen_random_uuid())`).Scan(&fenceB)
					require.NoError(t, err)
					_, err = session.Exec(ctx, `UPDATE app.orders SET v = 'B', last_fence = $1 WHERE id = 1`, fenceB)
					require.NoError(t, err)

					refused := make(chan error, 1)
					go func() {
						write := func(table *fencedb.Table) error {
							_, err := table.Update(ctx, factsOf(a), order1, fencedb.Set{"v": "A"},
								fencedb.WithRule(rule), fencedb.WithStrength(strength))
							return err
						}
						if !inTx {
							refused <- write(table)
							return
						}
						refused <- pgx.BeginFunc(ctx, b.pool, func(tx pgx.Tx) error {
							err := write(table.In(tx))
							// The refusal leaves the transaction usable.
							_, execErr := tx.Exec(ctx, `UPDATE app.orders SET v = 'unrelated' WHERE id = 3`)
							assert.NoError(t, execErr)
							return err
						})
					}()
					b.waitUntilBlocked()
					_, err = session.Exec(ctx, `COMMIT`)
					require.NoError(t, err)

					err = <-refused
					var e *fencedb.WriteError
					require.ErrorAs(t, err, &e)
					require.ErrorIs(t, err, fencedb.ErrStale)
					require.Equal(t, a.Fence(), e.Fence)
					require.Equal(t, fenceB, e.Current)
					require.Equal(t, "B", e.CurrentHolder)
					require.Contains(t, err.Error(), "seen 4, sent 2")
					require.Equal(t, "B", query[string](b, `SELECT v FROM app.orders WHERE id = 1`))
					// It is on record although the caller's transaction was rolled back with all that was in it.
					require.Equal(t, "first", query[string](b, `SELECT v FROM app.orders WHERE id = 3`))
					require.Equal(t, 1, query[int](b, `SELECT count(*) FROM fence.rejection
						WHERE fence = $1 AND current_fence = $2 AND reason = 'stale' AND verdict = 'stale' AND holder = 'A'`, a.Fence(), fenceB))
				})
			}
		}
	}
}

// While a Live write is under way no newer grant can come into being, however late the write is: here it waits for
// somebody's lock on the row until after its lease has expired. (C01, the other side)
func TestNoNewGrantBeforeALiveWriteHasCommitted(t *testing.T) {
	ctx := context.Background()
	b := newBed(t)
	table := b.table()
	a := b.acquire(b.client(leasedb.Config{Holder: "A", ManualRenewal: true}), "x")
	clientB := b.client(leasedb.Config{Holder: "B", LockWait: 50 * time.Millisecond})

	session := b.session()
	_, err := session.Exec(ctx, `BEGIN; UPDATE app.orders SET v = 'somebody' WHERE id = 1`)
	require.NoError(t, err)
	written := make(chan error, 1)
	go func() {
		_, err := table.Update(ctx, a, order1, fencedb.Set{"v": "A"}, fencedb.WithStrength(fencedb.Live))
		written <- err
	}()
	b.waitUntilBlocked()
	require.NoError(t, a.Renew(ctx), "the holder's own heartbeat passes by")
	b.age("x", time.Hour)
	_, err = clientB.TryAcquire(ctx, "x")
	require.ErrorIs(t, err, leasedb.ErrBusy)
	_, err = session.Exec(ctx, `COMMIT`)
	require.NoError(t, err)
	require.NoError(t, <-written)
	require.Greater(t, b.acquire(clientB, "x").Fence(), a.Fence())
}

// The live holder's second write, and fences that were never granted. (C02)
func TestEqualFence(t *testing.T) {
	ctx := context.Background()
	set := func(v string) fencedb.Set { return fencedb.Set{"v": v} }

	t.Run("once: one write a grant, and a repeat is told so", func(t *testing.T) {
		b := newBed(t)
		table, client := b.table(), b.client(leasedb.Config{})
		a := b.acquire(client, "x")
		outcome, err := table.Update(ctx, a, order1, set("w1"))
		require.NoError(t, err)
		require.Equal(t, fencedb.Applied, outcome)
		for range 2 { // a renewal between changes nothing
			outcome, err = table.Update(ctx, a, order1, set("w2"))
			require.NoError(t, err)
			require.Equal(t, fencedb.AlreadyApplied, outcome)
			require.NoError(t, a.Renew(ctx))
		}
		require.Equal(t, "w1", query[string](b, `SELECT v FROM app.orders WHERE id = 1`))
		require.Equal(t, 0, query[int](b, `SELECT count(*) FROM fence.rejection`), "being told so is no rejection")
		// A sealed row, one under the fence, still takes the write.
		b.exec(`UPDATE app.orders SET last_fence = 1 WHERE id = 2`)
		outcome, err = table.Update(ctx, a, fencedb.Key{"id": 2}, set("w1"))
		require.NoError(t, err)
		require.Equal(t, fencedb.Applied, outcome)
	})

	t.Run("term: any number of writes a grant", func(t *testing.T) {
		b := newBed(t)
		b.exec(`SELECT fence.protect('app.orders', 'term')`)
		table := b.table()
		a := b.acquire(b.client(leasedb.Config{}), "x")
		for _, v := range []string{"w1", "w2", "w3"} {
			outcome, err := table.Update(ctx, a, order1, set(v))
			require.NoError(t, err)
			require.Equal(t, fencedb.Applied, outcome)
			require.Equal(t, v, query[string](b, `SELECT v FROM app.orders WHERE id = 1`))
			require.NoError(t, a.Renew(ctx))
		}
	})

	for _, rule := range bothRules {
		t.Run(string(rule)+": what was never granted is refused before any SQL", func(t *testing.T) {
			b := newBed(t)
			table, client := b.table(), b.client(leasedb.Config{})
			released := b.acquire(client, "x")
			require.NoError(t, released.Release(ctx))
			b.exec(`CREATE FUNCTION app.no_write() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'a statement came through'; END $$;
				CREATE TRIGGER no_write BEFORE UPDATE ON app.orders FOR EACH STATEMENT EXECUTE FUNCTION app.no_write()`)
			for name, lease := range map[string]fencedb.Lease{
				"a zero lease":     &leasedb.Lease{},
				"a nil lease":      (*leasedb.Lease)(nil),
				"a released lease": released,
				"fence 0":          fencedb.Static("x", 0, "me"),
				"fence -1":         fencedb.Static("x", -1, "me"),
			} {
				for _, strength := range []fencedb.Strength{fencedb.Fenced, fencedb.Live} {
					outcome, err := table.Update(ctx, lease, order1, set("bad"), fencedb.WithRule(rule), fencedb.WithStrength(strength))
					require.ErrorIs(t, err, fencedb.ErrLeaseLost, name)
					require.Equal(t, fencedb.LeaseLost, outcome)
				}
			}
			_, err := table.Update(ctx, nil, order1, set("bad"))
			require.ErrorIs(t, err, fencedb.ErrLeaseLost)
		})
	}

	t.Run("the statement itself refuses fences that were never granted", func(t *testing.T) {
		b := newBed(t)
		for _, fence := range []int64{0, -1} {
			require.False(t, query[bool](b, `SELECT fence.live('x', gen_random_uuid(), $1)`, fence))
		}
	})

	t.Run("after a loss only the new grant writes", func(t *testing.T) {
		b := newBed(t)
		table, client := b.table(), b.client(leasedb.Config{Holder: "A", ManualRenewal: true})
		old := b.acquire(client, "x")
		b.age("x", time.Hour)
		again := b.acquire(client, "x")
		require.Greater(t, again.Fence(), old.Fence())
		require.Equal(t, leasedb.Lost, old.State(), "never two live handles")
		_, err := table.Update(ctx, again, order1, set("new"))
		require.NoError(t, err)
		_, err = table.Update(ctx, factsOf(old), order1, set("leftover"))
		require.ErrorIs(t, err, fencedb.ErrStale)
		require.Equal(t, "new", query[string](b, `SELECT v FROM app.orders WHERE id = 1`))
	})
}

// What changed nothing is told apart, and only what was refused is on record.
func TestOutcomesThatAreNoRejection(t *testing.T) {
	ctx := context.Background()
	b := newBed(t)
	table := b.table()
	a := b.acquire(b.client(leasedb.Config{}), "x")

	outcome, err := table.Update(ctx, a, fencedb.Key{"id": 99}, fencedb.Set{"v": "x"})
	require.ErrorIs(t, err, fencedb.ErrMissing)
	require.Equal(t, fencedb.Missing, outcome)

	b.exec(`CREATE FUNCTION app.drop_it() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$;
		CREATE TRIGGER drop_it BEFORE UPDATE ON app.orders FOR EACH ROW WHEN (OLD.id = 2) EXECUTE FUNCTION app.drop_it()`)
	outcome, err = table.Update(ctx, a, fencedb.Key{"id": 2}, fencedb.Set{"v": "x"})
	require.ErrorIs(t, err, fencedb.ErrSuppressed)
	require.Equal(t, fencedb.Suppressed, outcome)

	b.exec(`ALTER TABLE app.orders ADD CONSTRAINT short CHECK (length(v) < 10)`)
	outcome, err = table.Update(ctx, a, order1, fencedb.Set{"v": "much too long for it"})
	require.Equal(t, fencedb.Failed, outcome)
	require.ErrorContains(t, err, "23514")
	for _, refusal := range []error{fencedb.ErrStale, fencedb.ErrLeaseLost, fencedb.ErrUnknown, fencedb.ErrMissing} {
		require.NotErrorIs(t, err, refusal)
	}

	// REPEATABLE READ: the row was written after the snapshot. No refusal: the database's own error.
	tx, err := b.pool.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.RepeatableRead})
	require.NoError(t, err)
	_, err = tx.Exec(ctx, `SELECT 1 FROM app.orders`)
	require.NoError(t, err)
	b.exec(`UPDATE app.orders SET last_fence = 40 WHERE id = 1`)
	outcome, err = table.In(tx).Update(ctx, a, order1, fencedb.Set{"v": "x"})
	require.Equal(t, fencedb.Failed, outcome)
	require.ErrorContains(t, err, "40001")
	require.NoError(t, tx.Rollback(ctx))

	require.Equal(t, 0, query[int](b, `SELECT count(*) FROM fence.rejection`))
	require.Zero(t, b.gate.Unrecorded())
}

// A refusal repeated is one row with a count, and a missing audit changes nothing about refusals and good writes.
func TestAudit(t *testing.T) {
	ctx := context.Background()
	b := newBed(t)
	table := b.table()
	b.exec(`UPDATE app.orders SET last_fence = 40 WHERE id = 1`)
	a := b.acquire(b.client(leasedb.Config{Holder: "A"}), "x")

	var e *fencedb.WriteError
	for range 3 {
		_, err := table.Update(ctx, a, order1, fencedb.Set{"v": "x"})
		require.ErrorAs(t, err, &e)
		require.NoError(t, e.AuditErr)
		// The holder is lawful, its lease is alive, and the row has seen a fence that nobody was granted.
		require.Equal(t, "lawful", e.Verdict)
	}
	require.Equal(t, 1, query[int](b, `SELECT count(*) FROM fence.rejection`))
	require.NoError(t, b.gate.Flush(ctx))
	require.Equal(t, int64(3), query[int64](b, `SELECT sum(count)::bigint FROM fence.rejection`))

	b.exec(`ALTER TABLE fence.rejection RENAME TO gone; UPDATE app.orders SET last_fence = 40 WHERE id = 3`)
	_, err := table.Update(ctx, a, fencedb.Key{"id": 3}, fencedb.Set{"v": "x"})
	require.ErrorIs(t, err, fencedb.ErrStale)
	require.ErrorAs(t, err, &e)
	require.ErrorContains(t, e.AuditErr, "could not be recorded")
	require.EqualValues(t, 1, b.gate.Unrecorded())
	outcome, err := table.Update(ctx, a, fencedb.Key{"id": 2}, fencedb.Set{"v": "good"})
	require.NoError(t, err)
	require.Equal(t, fencedb.Applied, outcome)
}

// A refusal inside a caller's transaction that holds the pool's only connection is recorded all the same.
func TestAuditNeedsNoConnectionOfThePool(t *testing.T) {
	ctx := context.Background()
	b := newBed(t)
	small := pgtest.Pool(t, b.cfg, func(c *pgxpool.Config) { c.MaxConns = 1 })
	gate := fencedb.New(small, fencedb.Config{})
	t.Cleanup(gate.Close)
	table, err := gate.Table(ctx, "app.orders")
	require.NoError(t, err)
	b.exec(`UPDATE app.orders SET last_fence = 40 WHERE id = 1`)
	err = pgx.BeginFunc(ctx, small, func(tx pgx.Tx) error {
		_, err := table.In(tx).Update(ctx, fencedb.Static("elsewhere", 2, "A"), order1, fencedb.Set{"v": "x"})
		return err
	})
	var e *fencedb.WriteError
	require.ErrorAs(t, err, &e)
	require.NoError(t, e.AuditErr)
	require.Equal(t, "unknown", e.Verdict, "this database knows no such lease")
	require.Equal(t, 1, query[int](b, `SELECT count(*) FROM fence.rejection`))
}

// A lease whose end the database has told the gate refuses by itself from then on.
func TestLeaseLearnsFromARefusedWrite(t *testing.T) {
	ctx := context.Background()
	b := newBed(t)
	table := b.table()
	a := b.acquire(b.client(leasedb.Config{Holder: "A", ManualRenewal: true}), "x")
	b.age("x", time.Hour)
	require.Equal(t, leasedb.Active, a.State(), "it cannot know")
	_, err := table.Update(ctx, a, order1, fencedb.Set{"v": "x"}, fencedb.WithStrength(fencedb.Live))
	require.ErrorIs(t, err, fencedb.ErrLeaseLost)
	require.Equal(t, leasedb.Lost, a.State())
	require.ErrorIs(t, context.Cause(a.Context()), leasedb.ErrLost)
	_, err = table.Update(ctx, a, order1, fencedb.Set{"v": "x"}, fencedb.WithStrength(fencedb.Live))
	require.ErrorIs(t, err, fencedb.ErrLeaseLost)
	require.ErrorIs(t, err, leasedb.ErrLost)
	require.Equal(t, int64(1), query[int64](b, `SELECT sum(count)::bigint FROM fence.rejection`), "the second was not sent")
}

// A Live write under a snapshot that does not move is refused, whatever became of the lease: there it cannot be checked.
func TestLiveNeedsReadCommitted(t *testing.T) {
	ctx := context.Background()
	for _, level := range []pgx.TxIsoLevel{pgx.RepeatableRead, pgx.Serializable} {
		b := newBed(t)
		table := b.table()
		lease := b.acquire(b.client(leasedb.Config{}), "x")
		tx, err := b.pool.BeginTx(ctx, pgx.TxOptions{IsoLevel: level})
		require.NoError(t, err)
		_, err = tx.Exec(ctx, `SELECT 1 FROM app.orders`)
		require.NoError(t, err)
		require.NoError(t, lease.Release(ctx))
		outcome, err := table.In(tx).Update(ctx, factsOf(lease), order1, fencedb.Set{"v": "x"}, fencedb.WithStrength(fencedb.Live))
		require.Equal(t, fencedb.Failed, outcome)
		require.ErrorContains(t, err, "a live write needs READ COMMITTED")
		require.NoError(t, tx.Rollback(ctx))
	}
}

// Fences from elsewhere mean nothing to this database's own terms, though the numbers may be the same.
func TestHoldersOfFencesFromElsewhere(t *testing.T) {
	ctx := context.Background()
	b := newBed(t)
	table := b.table()
	client := b.client(leasedb.Config{Holder: "somebody local"})
	for range 10 {
		require.NoError(t, b.acquire(client, "local").Release(ctx)) // fences 2 to 20
	}
	_, err := table.Update(ctx, fencedb.Static("etcd", 10, "B"), order1, fencedb.Set{"v": "B"})
	require.NoError(t, err)
	_, err = table.Update(ctx, fencedb.Static("etcd", 8, "A"), order1, fencedb.Set{"v": "A"})
	var e *fencedb.WriteError
	require.ErrorAs(t, err, &e)
	require.NoError(t, e.AuditErr)
	require.Equal(t, "A", e.Holder)
	require.Empty(t, e.CurrentHolder, "unknown, and not guessed")
	require.Equal(t, "unknown", e.Verdict)
	require.Equal(t, "A", query[string](b, `SELECT holder FROM fence.rejection`))
}

// What is wrong with the user's own table, or right, is not called a fault of schema fence.
func TestErrorsOfTheTableItself(t *testing.T) {
	ctx := context.Background()
	b := newBed(t)
	table := b.table()
	lease := b.acquire(b.client(leasedb.Config{}), "x")
	role := "wg_" + b.cfg.Database
	b.exec(`CREATE ROLE ` + role + `; GRANT USAGE ON SCHEMA app, fence TO ` + role + `; GRANT SELECT ON app.orders, fence.protected_table TO ` + role)
	t.Cleanup(func() { b.exec(`DROP OWNED BY ` + role + `; DROP ROLE ` + role) })
	asRole := func(strength fencedb.Strength) error {
		return pgx.BeginFunc(ctx, b.pool, func(tx pgx.Tx) error {
			_, err := tx.Exec(ctx, `SET LOCAL ROLE `+role)
			require.NoError(t, err)
			_, err = table.In(tx).Update(ctx, lease, order1, fencedb.Set{"v": "x"}, fencedb.WithStrength(strength))
			return err
		})
	}
	err := asRole(fencedb.Fenced)
	require.ErrorContains(t, err, "permission denied for table orders")
	require.NotErrorIs(t, err, fencedb.ErrSchema)
	b.exec(`GRANT UPDATE ON app.orders TO ` + role)
	err = asRole(fencedb.Live)
	require.ErrorIs(t, err, fencedb.ErrSchema, "here it is")
	require.ErrorContains(t, err, "EXECUTE on its functions")

	b.exec(`ALTER TABLE app.orders RENAME COLUMN v TO w`)
	for _, strength := range []fencedb.Strength{fencedb.Fenced, fencedb.Live} {
		_, err = table.Update(ctx, lease, order1, fencedb.Set{"v": "x"}, fencedb.WithStrength(strength))
		require.ErrorContains(t, err, "42703")
		require.NotErrorIs(t, err, fencedb.ErrSchema)
	}
	b.exec(`REVOKE USAGE ON SCHEMA fence FROM ` + role)
	pool := pgtest.Pool(t, b.cfg, func(c *pgxpool.Config) {
		c.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
			_, err := conn.Exec(ctx, `SET SESSION AUTHORIZATION `+role)
			return err
		}
	})
	gate := fencedb.New(pool, fencedb.Config{})
	t.Cleanup(gate.Close)
	_, err = gate.Table(ctx, "app.orders")
	require.ErrorIs(t, err, fencedb.ErrSchema)
	require.ErrorContains(t, err, "USAGE on schema fence")
}

// A write that never left is not called unknown.
func TestWriteThatWasNeverSent(t *testing.T) {
	b := newBed(t)
	lease := b.acquire(b.client(leasedb.Config{}), "x")
	pool := pgtest.Pool(t, b.cfg, func(c *pgxpool.Config) { c.MaxConns = 1 })
	gate := fencedb.New(pool, fencedb.Config{})
	t.Cleanup(gate.Close)
	table, err := gate.Table(context.Background(), "app.orders")
	require.NoError(t, err)
	cancelled, cancel := context.WithCancel(context.Background())
	cancel()
	outcome, err := table.Update(cancelled, lease, order1, fencedb.Set{"v": "x"})
	require.ErrorIs(t, err, context.Canceled)
	require.Equal(t, fencedb.Failed, outcome)

	conn, err := pool.Acquire(context.Background())
	require.NoError(t, err)
	defer conn.Release()
	brief, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
	defer cancel()
	outcome, err = table.Update(brief, lease, order1, fencedb.Set{"v": "x"})
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.Equal(t, fencedb.Failed, outcome)
	require.NotErrorIs(t, err, fencedb.ErrUnknown)
}

// Whatever a key or a label is made of, the refusal is recorded, and a key is the same however its value was given.
func TestAuditOfOddKeys(t *testing.T) {
	ctx := context.Background()
	b := newBed(t)
	b.exec(`CREATE TABLE app.odd (f float8 PRIMARY KEY, u uuid UNIQUE NOT NULL, v text); SELECT fence.protect('app.odd');
		INSERT INTO app.odd VALUES ('NaN', '00000000-0000-0000-0000-000000000001', 'first', 40)`)
	table, err := b.gate.Table(ctx, "app.odd")
	require.NoError(t, err)
	for _, key := range []fencedb.Key{
		{"f": math.NaN()},
		{"u": [16]byte{15: 1}},
		{"u": "00000000-0000-0000-0000-000000000001"},
	} {
		_, err := table.Update(ctx, fencedb.Static("bad \xff name", 2, "a \x00 holder"), key, fencedb.Set{"v": "x"})
		var e *fencedb.WriteError
		require.ErrorAs(t, err, &e)
		require.ErrorIs(t, err, fencedb.ErrStale)
		require.NoError(t, e.AuditErr)
	}
	require.NoError(t, b.gate.Flush(ctx))
	require.Equal(t, 2, query[int](b, `SELECT count(*) FROM fence.rejection`))
	require.Equal(t, `{"f": "NaN"}`, query[string](b, `SELECT row_key::text FROM fence.rejection WHERE row_key ? 'f'`))
	require.Equal(t, int64(2), query[int64](b, `SELECT count FROM fence.rejection WHERE row_key ? 'u'`))
}
