package integration

import (
	"context"
	"database/sql"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/writegate/writegate/fencedb"
	"github.com/writegate/writegate/internal/pgtest"
	"github.com/writegate/writegate/leasedb"
)

// linkedThings is the table through a link, and the writes that its gate has told of.
func linkedThings(b *bed, l *link) (*fencedb.Gate, *fencedb.Table, chan fencedb.WriteEvent) {
	b.t.Helper()
	writes := make(chan fencedb.WriteEvent, 100)
	// Without preparing statements, whose answers would be the first to be lost.
	pool := l.pool(func(c *pgxpool.Config) { c.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeExec })
	gate := fencedb.New(pool, fencedb.Config{Observe: func(e fencedb.Event) {
		if w, ok := e.(fencedb.WriteEvent); ok {
			writes <- w
		}
	}})
	b.t.Cleanup(gate.Close)
	table, err := gate.Table(context.Background(), "app.things")
	require.NoError(b.t, err)
	return gate, table, writes
}

// await returns once the database says yes.
func (b *bed) await(sql string) {
	b.t.Helper()
	require.Eventually(b.t, func() bool { return query[bool](b, sql) }, 30*time.Second, 2*time.Millisecond)
}

// The answer to a write is lost after it was carried out: unknown, neither refused nor failed. The retry helper finds out
// that it was applied; one value is stored, and no refusal recorded. (C03 a)
func TestRetryResolvesALostAnswer(t *testing.T) {
	applied := map[string]string{
		"update": `SELECT v = 'A' FROM app.things WHERE a = 10`, "upsert": `SELECT v = 'A' FROM app.things WHERE a = 10`,
		"many": `SELECT v = 'A' FROM app.things WHERE a = 10`, "delete": `SELECT NOT EXISTS (SELECT 1 FROM app.things WHERE a = 10)`,
		"seal": `SELECT last_fence > 0 FROM app.things WHERE a = 10`, "insert": `SELECT EXISTS (SELECT 1 FROM app.things WHERE a = 99)`,
		"term with a request id": `SELECT n = 1 FROM app.things WHERE a = 10`,
	}
	for form, isApplied := range applied {
		t.Run(form, func(t *testing.T) {
			ctx := context.Background()
			b, _ := newThings(t)
			l := newLink(b, pgtest.Shared(t))
			gate, table, writes := linkedThings(b, l)
			lease := b.acquire(b.client(leasedb.Config{Holder: "A"}), "x")
			var first error
			outcome, err := fencedb.Retry(ctx, func(ctx context.Context) (outcome fencedb.Outcome, err error) {
				ctx, cancel := context.WithCancel(ctx)
				defer cancel()
				if first == nil {
					lose := l.loseReplies
					if form == "many" { // whose answer is that to its commit, for which it waits here
						b.exec(`CREATE FUNCTION app.hold() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_advisory_xact_lock(42); RETURN NULL; END $$;
							CREATE CONSTRAINT TRIGGER hold AFTER UPDATE ON app.things DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION app.hold()`)
						session := b.session()
						_, err := session.Exec(ctx, `SELECT pg_advisory_lock(42)`)
						require.NoError(t, err)
						lose = func() {
							b.waitUntilBlocked()
							l.loseReplies()
							_, err := session.Exec(context.Background(), `SELECT pg_advisory_unlock(42)`)
							assert.NoError(t, err)
						}
					} else {
						lose()
						lose = func() {}
					}
					go func() {
						lose()
						b.await(isApplied)
						cancel()
					}()
				}
				switch form {
				case "insert":
					outcome, err = table.Insert(ctx, lease, row(99, nil))
				case "term with a request id":
					outcome, err = table.Update(ctx, lease, key(10), fencedb.Set{"n": fencedb.Expr("n + 1")}, fencedb.WithRule(fencedb.Term), fencedb.WithRequestID("r"))
				default:
					outcome, err = forms[form](ctx, table, gate, lease, 10, "A")
				}
				if first == nil {
					require.Equal(t, fencedb.Unknown, outcome)
					require.ErrorIs(t, err, fencedb.ErrUnknown)
					require.NotErrorIs(t, err, fencedb.ErrStale)
					first = err
					l.mend()
				}
				return outcome, err
			})
			require.NoError(t, err)
			require.Equal(t, fencedb.AlreadyApplied, outcome)
			require.True(t, query[bool](b, isApplied))
			require.Equal(t, 0, query[int](b, `SELECT count(*) FROM fence.rejection`))
			w := <-writes
			require.Equal(t, fencedb.Unknown, w.Outcome)
			require.Equal(t, 1, w.Attempt)
			w = <-writes
			require.Equal(t, 2, w.Attempt)
			require.Positive(t, w.Left, "of the lease")
		})
	}
}

// What cannot be repeated safely is not: the caller is told that it is unknown. In every mode: what pgx says of a
// statement in its simple protocol that lost its connection is that it was never sent.
func TestRetryDoesNotApplyTwice(t *testing.T) {
	for _, mode := range []pgx.QueryExecMode{pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol} {
		for name, lose := range map[string]func(l *link, cancel func()){
			"cancelled":       func(_ *link, cancel func()) { cancel() },
			"connection lost": func(l *link, _ func()) { l.refuse(); l.mend() },
		} {
			t.Run(mode.String()+"/"+name, func(t *testing.T) {
				ctx := context.Background()
				b, _ := newThings(t)
				l := newLink(b, pgtest.Shared(t))
				gate := b.gateOf(fencedb.New(l.pool(func(c *pgxpool.Config) { c.ConnConfig.DefaultQueryExecMode = mode }), fencedb.Config{}))
				table, err := gate.Table(ctx, "app.things")
				require.NoError(t, err)
				l.loseReplies()
				calls, lost := 0, make(chan struct{})
				_, err = fencedb.Retry(ctx, func(ctx context.Context) (fencedb.Outcome, error) {
					calls++
					ctx, cancel := context.WithCancel(ctx)
					defer cancel()
					go func() {
						defer close(lost)
						b.await(`SELECT n > 0 FROM app.things WHERE a = 10`)
						lose(l, cancel)
					}()
					return table.Update(ctx, fencedb.Static("x", 34, "A"), key(10), fencedb.Set{"n": fencedb.Expr("n + 1")}, fencedb.WithRule(fencedb.Term))
				})
				<-lost
				l.mend()
				require.ErrorIs(t, err, fencedb.ErrUnknown)
				require.Equal(t, 1, calls)
				require.Equal(t, 1, query[int](b, `SELECT n FROM app.things WHERE a = 10`))
			})
		}
	}
}

// An insert whose key the database makes has nothing to find its first attempt by.
func TestRetryDoesNotInsertTwice(t *testing.T) {
	ctx := context.Background()
	b, _ := newThings(t)
	b.exec(`CREATE TABLE app.made (id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY, v text); SELECT fence.protect('app.made')`)
	l := newLink(b, pgtest.Shared(t))
	gate, _, _ := linkedThings(b, l)
	for _, options := range [][]fencedb.WriteOption{nil, {fencedb.WithRequestID("r")}} {
		b.exec(`TRUNCATE app.made`)
		table, err := gate.Table(ctx, "app.made") // which opens a connection
		require.NoError(t, err)
		calls := 0
		_, err = fencedb.Retry(ctx, func(ctx context.Context) (fencedb.Outcome, error) {
			if calls++; calls > 1 {
				return table.Insert(ctx, fencedb.Static("x", 34, "A"), fencedb.Set{"v": "A"}, options...)
			}
			l.loseReplies()
			defer l.mend()
			ctx, cancel := context.WithCancel(ctx)
			defer cancel()
			go func() {
				b.await(`SELECT EXISTS (SELECT 1 FROM app.made)`)
				cancel()
			}()
			return table.Insert(ctx, fencedb.Static("x", 34, "A"), fencedb.Set{"v": "A"}, options...)
		})
		if options == nil {
			require.ErrorIs(t, err, fencedb.ErrUnknown)
			require.Equal(t, 1, calls)
		} else {
			require.NoError(t, err)
			require.Equal(t, 2, calls)
		}
		require.Equal(t, 1, query[int](b, `SELECT count(*) FROM app.made`))
	}
}

// A whole transaction that lost against another is tried again; one that failed for a reason of its own is not. (C14)
func TestRetryOfATransaction(t *testing.T) {
	ctx := context.Background()
	b, table := newThings(t)
	lease := b.acquire(b.client(leasedb.Config{}), "x")
	for code, again := range map[string]bool{"40001": true, "40P01": true, "23505": false} {
		calls := 0
		_, err := fencedb.Retry(ctx, func(ctx context.Context) (struct{}, error) {
			return struct{}{}, b.gate.InTx(ctx, lease, func(ctx context.Context, tx pgx.Tx) error {
				if calls++; calls > 1 {
					return nil
				}
				_, err := tx.Exec(ctx, `DO $$ BEGIN RAISE EXCEPTION 'made up' USING ERRCODE = '`+code+`'; END $$`)
				return err
			})
		})
		if again {
			require.NoError(t, err)
			require.Equal(t, 2, calls)
		} else {
			require.ErrorContains(t, err, code)
			require.Equal(t, 1, calls)
		}
	}
	calls := 0
	_, err := fencedb.Retry(ctx, func(ctx context.Context) (struct{}, error) {
		return struct{}{}, b.gate.InTx(ctx, lease, func(ctx context.Context, tx pgx.Tx) error {
			calls++
			_, _ = tx.Exec(ctx, `SELECT 1 / 0`)
			return nil
		})
	})
	require.ErrorContains(t, err, "a statement in it had failed")
	require.Equal(t, 1, calls)

	// A savepoint within is as pinned as the transaction, and a COMMIT of one's own is found out.
	require.NoError(t, b.gate.InTx(ctx, lease, func(ctx context.Context, tx pgx.Tx) error {
		return pgx.BeginFunc(ctx, tx, func(tx pgx.Tx) error {
			return pgx.BeginFunc(ctx, tx, func(tx pgx.Tx) error {
				_, err := table.In(tx).Update(ctx, lease, key(10), fencedb.Set{"v": "A"}, fencedb.WithStrength(fencedb.InTx))
				return err
			})
		})
	}))
	for _, result := range []error{nil, context.Canceled} {
		err := b.gate.InTx(ctx, lease, func(ctx context.Context, tx pgx.Tx) error {
			_, err := tx.Exec(ctx, `COMMIT`)
			require.NoError(t, err)
			return result
		})
		require.ErrorIs(t, err, fencedb.ErrUnknown)
		require.ErrorContains(t, err, "by a statement of its own")
	}
}

// A request that never arrived is unknown as well, and the retry applies it. (C03 b)
func TestRetryAppliesWhatNeverArrived(t *testing.T) {
	ctx := context.Background()
	b, _ := newThings(t)
	l := newLink(b, pgtest.Shared(t))
	_, table, _ := linkedThings(b, l)
	l.halfOpen()
	attempts := 0
	outcome, err := fencedb.Retry(ctx, func(ctx context.Context) (fencedb.Outcome, error) {
		attempts++
		if attempts > 1 {
			return table.Update(ctx, fencedb.Static("x", 34, "A"), key(10), fencedb.Set{"v": "A"})
		}
		ctx, cancel := context.WithTimeout(ctx, 200*time.Millisecond) // nothing can be awaited: nothing happens
		defer cancel()
		outcome, err := table.Update(ctx, fencedb.Static("x", 34, "A"), key(10), fencedb.Set{"v": "A"})
		require.ErrorIs(t, err, fencedb.ErrUnknown)
		l.refuse() // what was under way is gone
		l.mend()
		return outcome, err
	})
	require.NoError(t, err)
	require.Equal(t, fencedb.Applied, outcome)
	require.Equal(t, 2, attempts)
	require.Equal(t, "A", query[string](b, `SELECT v FROM app.things WHERE a = 10`))
}

// The commit of a pinned transaction whose answer is lost: the gate asks the server what became of it. (C03)
func TestInTxLearnsWhatBecameOfItsCommit(t *testing.T) {
	t.Run("on the only connection of the pool", func(t *testing.T) {
		ctx := context.Background()
		b, _ := newThings(t)
		b.exec(`CREATE FUNCTION app.slow() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(60); RETURN NULL; END $$;
			CREATE CONSTRAINT TRIGGER slow AFTER UPDATE ON app.things DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION app.slow()`)
		gate := b.gateOf(fencedb.New(pgtest.Pool(t, b.cfg, func(c *pgxpool.Config) { c.MaxConns = 1 }), fencedb.Config{}))
		lease := b.acquire(b.client(leasedb.Config{TTL: 10 * time.Minute}), "x")
		ended := make(chan struct{})
		err := gate.InTx(ctx, lease, func(ctx context.Context, tx pgx.Tx) error {
			go func() {
				defer close(ended)
				b.await(`SELECT coalesce(bool_or(pg_terminate_backend(pid)), false) FROM pg_stat_activity WHERE datname = current_database() AND wait_event = 'PgSleep'`)
			}()
			_, err := tx.Exec(ctx, `UPDATE app.things SET v = 'A' WHERE a = 10`)
			return err
		})
		<-ended
		require.ErrorContains(t, err, "it was rolled back")
		require.NotErrorIs(t, err, fencedb.ErrUnknown)
	})
	for name, disturb := range map[string]struct {
		when func(b *bed, l *link) // before the commit is sent
		then func(b *bed, l *link) // while it is under way
		want fencedb.Outcome
	}{
		"committed, and the answer lost": {
			when: func(_ *bed, l *link) { l.loseReplies() },
			then: func(b *bed, l *link) {
				b.await(`SELECT v = 'A' FROM app.things WHERE a = 10`)
				l.refuse()
				l.mend()
			},
			want: fencedb.Applied,
		},
		"never arrived": {
			when: func(_ *bed, l *link) { l.halfOpen() },
			then: func(b *bed, l *link) {
				b.await(`SELECT EXISTS (SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND state = 'idle in transaction')`)
				l.refuse()
				l.mend()
			},
			want: fencedb.Failed,
		},
		"on a server that knows nothing of it": {
			when: func(b *bed, l *link) {
				l.loseReplies()
				b.exec(`CREATE OR REPLACE FUNCTION fence.transaction_fate(transaction xid8, timeline text) RETURNS text LANGUAGE sql AS $$ SELECT 'unknown' $$`)
			},
			then: func(b *bed, l *link) {
				b.await(`SELECT v = 'A' FROM app.things WHERE a = 10`)
				l.refuse()
				l.mend()
			},
			want: fencedb.Unknown,
		},
	} {
		t.Run(name, func(t *testing.T) {
			ctx := context.Background()
			b, _ := newThings(t)
			l := newLink(b, pgtest.Shared(t))
			gate, table, writes := linkedThings(b, l)
			lease := b.acquire(b.client(leasedb.Config{Holder: "A", TTL: 10 * time.Minute}), "x")
			done := make(chan struct{})
			err := gate.InTx(ctx, lease, func(ctx context.Context, tx pgx.Tx) error {
				if _, err := table.In(tx).Update(ctx, lease, key(10), fencedb.Set{"v": "A"}); err != nil {
					return err
				}
				disturb.when(b, l)
				go func() {
					defer close(done)
					disturb.then(b, l)
				}()
				return nil
			})
			<-done
			for w := range writes {
				if w.Kind == "in_tx" {
					require.Equal(t, disturb.want, w.Outcome, "%v", err)
					break
				}
			}
			switch disturb.want {
			case fencedb.Applied:
				require.NoError(t, err)
				require.Equal(t, "A", query[string](b, `SELECT v FROM app.things WHERE a = 10`))
			case fencedb.Failed:
				require.ErrorContains(t, err, "it was rolled back")
				require.NotErrorIs(t, err, fencedb.ErrUnknown)
				require.Equal(t, "old", query[string](b, `SELECT v FROM app.things WHERE a = 10`))
			case fencedb.Unknown:
				require.ErrorIs(t, err, fencedb.ErrUnknown)
			}
			require.Equal(t, 0, query[int](b, `SELECT count(*) FROM fence.rejection`))
		})
	}
}

// The fate of a transaction is known where it was, and on its own timeline alone. (F4)
func TestTransactionFate(t *testing.T) {
	ctx := context.Background()
	b := newBed(t)
	fate := func(xid, timeline string) (fate string) {
		require.NoError(t, b.pool.QueryRow(ctx, `SELECT fence.transaction_fate($1::text::xid8, $2::text)`, xid, timeline).Scan(&fate))
		return fate
	}
	timeline := query[string](b, `SELECT fence.timeline()`)
	run := func(end string) (xid string) {
		tx, err := b.pool.Begin(ctx)
		require.NoError(t, err)
		require.NoError(t, tx.QueryRow(ctx, `SELECT pg_current_xact_id()::text`).Scan(&xid))
		require.Equal(t, "in progress", fate(xid, timeline))
		_, err = tx.Exec(ctx, end)
		require.NoError(t, err)
		_ = tx.Rollback(ctx)
		return xid
	}
	committed := run(`COMMIT`)
	require.Equal(t, "committed", fate(committed, timeline))
	require.Equal(t, "aborted", fate(run(`ROLLBACK`), timeline))
	require.Equal(t, "unknown", fate(committed, "00000099"), "another server's, by now")
	require.Equal(t, "unknown", fate("9999999999", timeline), "from the future")
}

// A commit that fails, or does not end in time, is known as that. (C03)
func TestInTxWhoseCommitFails(t *testing.T) {
	ctx := context.Background()
	b, table := newThings(t)
	b.exec(`CREATE FUNCTION app.slow() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
			IF NEW.v = 'slow' THEN PERFORM pg_sleep(60); ELSE RAISE EXCEPTION 'not this one'; END IF; RETURN NULL; END $$;
		CREATE CONSTRAINT TRIGGER slow AFTER UPDATE ON app.things DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION app.slow()`)
	lease := b.acquire(b.client(leasedb.Config{TTL: time.Second}), "x") // which the commit may take
	for v, want := range map[string]string{
		"slow":  "it was rolled back|25P04", // from 17 on the server itself ends it
		"fails": "not this one",
	} {
		err := b.gate.InTx(ctx, lease, func(ctx context.Context, tx pgx.Tx) error {
			_, err := table.In(tx).Update(ctx, lease, key(10), fencedb.Set{"v": v})
			return err
		})
		require.Error(t, err)
		require.Regexp(t, want, err.Error())
		require.NotErrorIs(t, err, fencedb.ErrUnknown)
	}
	// A statement that failed and was ignored.
	err := b.gate.InTx(ctx, lease, func(ctx context.Context, tx pgx.Tx) error {
		_, _ = tx.Exec(ctx, `SELECT 1 / 0`)
		return nil
	})
	require.ErrorContains(t, err, "a statement in it had failed")
	require.Equal(t, "old", query[string](b, `SELECT v FROM app.things WHERE a = 10`))
}

// While a transaction is pinned no newer grant can exist, however long ago the lease expired, and renewals pass.
func TestPinnedTransactionKeepsTheNextGrantWaiting(t *testing.T) {
	ctx := context.Background()
	b, _ := newThings(t)
	lease := b.acquire(b.client(leasedb.Config{Holder: "A", TTL: 10 * time.Minute, ManualRenewal: true}), "x")
	clientB := b.client(leasedb.Config{Holder: "B", LockWait: 50 * time.Millisecond})
	err := b.gate.InTx(ctx, lease, func(ctx context.Context, tx pgx.Tx) error {
		require.NoError(t, lease.Renew(ctx))
		b.age("x", time.Hour)
		_, err := clientB.TryAcquire(ctx, "x")
		require.ErrorIs(t, err, leasedb.ErrBusy)
		_, err = tx.Exec(ctx, `UPDATE app.things SET v = 'any statement'`)
		return err
	})
	require.NoError(t, err)
	b.acquire(clientB, "x")
	err = b.gate.InTx(ctx, factsOf(lease), func(context.Context, pgx.Tx) error {
		t.Error("the work of a superseded holder is not even begun")
		return nil
	})
	var e *fencedb.WriteError
	require.ErrorAs(t, err, &e)
	require.ErrorIs(t, err, fencedb.ErrLeaseLost)
	require.Equal(t, "superseded", e.Reason)
	require.Equal(t, "B", e.CurrentHolder)
	require.Equal(t, `"(a transaction)"`, query[string](b, `SELECT row_key::text FROM fence.rejection`))
}

// A client that stands still in a pinned transaction loses it to the server when its lease has run out, and the next
// holder gets the lease.
func TestStalledTransactionFreesTheLease(t *testing.T) {
	for _, through := range []string{"pgx", "database/sql"} {
		t.Run(through, func(t *testing.T) {
			ctx := context.Background()
			b, table := newThings(t)
			lease := b.acquire(b.client(leasedb.Config{Holder: "A", TTL: time.Second, ManualRenewal: true}), "x")
			clientB := b.client(leasedb.Config{Holder: "B"})
			stall := func(check func(statement string) string) {
				for _, setting := range []string{"idle_in_transaction_session_timeout", "statement_timeout"} {
					require.Regexp(t, `^[0-9]+ms$|^1s$`, check("SELECT current_setting('"+setting+"')"))
				}
				// This client stands still, and the next holder waits for the lease: it comes.
				next, err := clientB.Acquire(ctx, "x")
				require.NoError(t, err)
				_, err = table.Update(ctx, next, key(10), fencedb.Set{"v": "B"})
				require.NoError(t, err)
			}
			var err error
			if through == "pgx" {
				err = b.gate.InTx(ctx, factsOf(lease), func(_ context.Context, tx pgx.Tx) error {
					stall(func(statement string) (value string) {
						require.NoError(t, tx.QueryRow(ctx, statement).Scan(&value))
						return value
					})
					_, err := tx.Exec(ctx, `UPDATE app.things SET v = 'A'`)
					return err
				})
			} else {
				gate := fencedb.NewSQL(b.sqlDB(stdlib.OpenDB(*b.cfg)), fencedb.Config{})
				defer gate.Close()
				err = gate.InSQLTx(ctx, factsOf(lease), func(_ context.Context, tx *sql.Tx) error {
					stall(func(statement string) (value string) {
						require.NoError(t, tx.QueryRowContext(ctx, statement).Scan(&value))
						return value
					})
					_, err := tx.ExecContext(ctx, `UPDATE app.things SET v = 'A'`)
					return err
				})
			}
			require.ErrorIs(t, err, fencedb.ErrLeaseLost)
			require.ErrorContains(t, err, "used up the time")
			require.Equal(t, 0, query[int](b, `SELECT count(*) FROM app.things WHERE v = 'A'`))
			require.Equal(t, "B", query[string](b, `SELECT v FROM app.things WHERE a = 10`))
		})
	}
}

// The settings end with the transaction, and shorter ones of the caller's stay.
func TestPinLeavesNothingBehind(t *testing.T) {
	ctx := context.Background()
	b := newBed(t)
	lease := b.acquire(b.client(leasedb.Config{TTL: time.Minute}), "x")
	conn := b.session()
	_, err := conn.Exec(ctx, `SET statement_timeout = '123ms'`)
	require.NoError(t, err)
	read := func() (a, b, c string) {
		require.NoError(t, conn.QueryRow(ctx, `SELECT current_setting('statement_timeout'), current_setting('idle_in_transaction_session_timeout'),
			coalesce(current_setting('transaction_timeout', true), 'none')`).Scan(&a, &b, &c))
		return a, b, c
	}
	statement, idle, transaction := read()
	_, err = conn.Exec(ctx, `BEGIN`)
	require.NoError(t, err)
	var state string
	require.NoError(t, conn.QueryRow(ctx, `SELECT state FROM fence.pin($1, $2, $3)`, lease.Name(), lease.Token(), lease.Fence()).Scan(&state))
	require.Equal(t, "held", state)
	pinnedStatement, pinnedIdle, pinnedTransaction := read()
	require.Equal(t, "123ms", pinnedStatement)
	require.NotEqual(t, idle, pinnedIdle)
	if transaction != "none" {
		require.NotEqual(t, transaction, pinnedTransaction, "PostgreSQL 17 and newer have it")
	}
	_, err = conn.Exec(ctx, `COMMIT`)
	require.NoError(t, err)
	afterStatement, afterIdle, afterTransaction := read()
	require.Equal(t, []string{statement, idle, transaction}, []string{afterStatement, afterIdle, afterTransaction})
}

// The work ends with the lease, and is not committed once that is over, whatever it returns.
func TestWorkInTxEndsWithTheLease(t *testing.T) {
	ctx := context.Background()
	b, table := newThings(t)
	lease := b.acquire(b.client(leasedb.Config{TTL: time.Minute}), "x")
	lose := func(result func(context.Context) error) error {
		return b.gate.InTx(ctx, lease, func(ctx context.Context, tx pgx.Tx) error {
			if _, err := table.In(tx).Update(ctx, lease, key(10), fencedb.Set{"v": "A"}); err != nil {
				return err
			}
			lease.Lose(leasedb.ErrNotRenewed)
			<-ctx.Done()
			return result(ctx)
		})
	}
	err := lose(func(ctx context.Context) error { return ctx.Err() })
	require.ErrorIs(t, err, fencedb.ErrLeaseLost)
	require.ErrorIs(t, err, leasedb.ErrNotRenewed)
	lease = b.acquire(b.client(leasedb.Config{TTL: time.Minute}), "y")
	err = lose(func(context.Context) error { return nil })
	require.ErrorIs(t, err, fencedb.ErrLeaseLost)
	require.Equal(t, "old", query[string](b, `SELECT v FROM app.things WHERE a = 10`))

	// A panic rolls back and goes on; the connection comes back.
	lease = b.acquire(b.client(leasedb.Config{TTL: time.Minute}), "z")
	require.PanicsWithValue(t, "work", func() {
		_ = b.gate.InTx(ctx, lease, func(ctx context.Context, tx pgx.Tx) error {
			_, err := tx.Exec(ctx, `UPDATE app.things SET v = 'A'`)
			require.NoError(t, err)
			panic("work")
		})
	})
	require.Zero(t, b.pool.Stat().AcquiredConns())
	require.Equal(t, "old", query[string](b, `SELECT v FROM app.things WHERE a = 10`))

	// The transaction is the gate's to end.
	err = b.gate.InTx(ctx, lease, func(ctx context.Context, tx pgx.Tx) error { return tx.Commit(ctx) })
	require.ErrorContains(t, err, "return nil to commit")
	// The pin is for its own lease.
	other := b.acquire(b.client(leasedb.Config{TTL: time.Minute}), "other")
	err = b.gate.InTx(ctx, lease, func(ctx context.Context, tx pgx.Tx) error {
		_, err := table.In(tx).Update(ctx, other, key(10), fencedb.Set{"v": "A"}, fencedb.WithStrength(fencedb.InTx))
		return err
	})
	require.ErrorContains(t, err, `pinned to lease "other"`)
	require.ErrorContains(t, b.gate.InSQLTx(ctx, lease, nil), "use InTx")
}
