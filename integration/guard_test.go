package integration

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/writegate/writegate/fencedb"
	"github.com/writegate/writegate/leasedb"
)

// guarded is a bed whose table has a guard.
func guarded(t *testing.T, how string) *bed {
	t.Helper()
	b := newBed(t)
	b.exec(`SELECT fence.protect('app.orders', ` + how + `)`)
	return b
}

// refusedWith runs sql on a connection of its own and expects it to be refused with the SQLSTATE.
func (b *bed) refusedWith(code, sql string) {
	b.t.Helper()
	require.NotNil(b.t, b.refusal(code, sql))
}

// refusal is refusedWith, and what was said.
func (b *bed) refusal(code, sql string) *pgconn.PgError {
	b.t.Helper()
	_, err := b.session().Exec(context.Background(), sql)
	var e *pgconn.PgError
	require.ErrorAs(b.t, err, &e, sql)
	require.Equal(b.t, code, e.Code, "%s: %v", sql, err)
	require.NotEmpty(b.t, e.Hint)
	return e
}

const fenceOf1 = `SELECT last_fence FROM app.orders WHERE id = 1`

// Whatever goes around the gate, no row's fence falls, and none is forgotten. (C16, C17)
func TestGuardKeepsFencesFromFalling(t *testing.T) {
	for _, unfenced := range []string{"refuse", "count", "allow"} {
		t.Run(unfenced, func(t *testing.T) {
			ctx := context.Background()
			b := guarded(t, `guard => 'enforce', unfenced => '`+unfenced+`'`)
			table := b.table()
			_, err := table.Update(ctx, fencedb.Static("x", 34, "B"), order1, fencedb.Set{"v": "B"})
			require.NoError(t, err)
			for what, sql := range map[string]string{
				"an upsert that writes the column's default": `INSERT INTO app.orders (id, v, last_fence) VALUES (1, 'x', 1) ON CONFLICT (id) DO UPDATE SET v = excluded.v, last_fence = excluded.last_fence`,
				"a full-row save from a stale struct":        `UPDATE app.orders SET v = 'x', last_fence = 20 WHERE id = 1`,
				"MERGE":                                      `UPDATE app.orders SET last_fence = 0 WHERE id = 1`,
			} {
				e := b.refusal("WG007", sql)
				require.Contains(t, e.Message, "fall from 34", what)
				require.Equal(t, "orders", e.TableName)
			}
			b.refusedWith("WG010", `TRUNCATE app.orders`)
			plain := []string{
				`UPDATE app.orders SET v = 'plain' WHERE id = 1`,
				`UPDATE app.orders SET v = 'plain', last_fence = 34 WHERE id = 1`, // as an ORM saves what it has just read
				`INSERT INTO app.orders (id, v) VALUES (1, 'plain') ON CONFLICT (id) DO UPDATE SET v = excluded.v`,
				`DELETE FROM app.orders WHERE id = 1`,
				`INSERT INTO app.orders (id, v) VALUES (1, 'again')`,
			}
			for _, sql := range plain {
				if unfenced == "refuse" {
					b.refusedWith("WG008", sql)
				} else {
					b.exec(sql)
				}
			}
			require.EqualValues(t, 34, query[int64](b, fenceOf1), "also of a row that was deleted and put back around the gate")
			_, err = table.Update(ctx, fencedb.Static("x", 32, "A"), order1, fencedb.Set{"v": "A"})
			require.ErrorIs(t, err, fencedb.ErrStale)
			_, err = table.Update(ctx, fencedb.Static("x", 36, "C"), order1, fencedb.Set{"v": "C"})
			require.NoError(t, err)

			refused := query[int64](b, `SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM fence.guard_refused`)
			observed := query[int64](b, `SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM fence.guard_observed`)
			require.EqualValues(t, 4+map[string]int{"refuse": len(plain)}[unfenced], refused)
			if unfenced == "count" {
				require.GreaterOrEqual(t, observed, int64(len(plain)))
				require.Equal(t, "DELETE,INSERT,UPDATE", query[string](b, `SELECT string_agg(operation, ',' ORDER BY operation) FROM fence.observation WHERE finding = 'unfenced'`))
			} else {
				require.Zero(t, observed)
			}
		})
	}
}

// Observing refuses nothing, keeps fences where they are, and says what enforcing would refuse, and of whom.
func TestGuardObserves(t *testing.T) {
	ctx := context.Background()
	b := guarded(t, `guard => 'observe'`)
	_, err := b.table().Update(ctx, fencedb.Static("x", 34, "B"), order1, fencedb.Set{"v": "B"})
	require.NoError(t, err)
	session := b.session()
	_, err = session.Exec(ctx, `SET application_name = 'legacy'`)
	require.NoError(t, err)
	for range 3 {
		_, err = session.Exec(ctx, `UPDATE app.orders SET v = 'plain' WHERE id = 1`)
		require.NoError(t, err)
		_, err = session.Exec(ctx, `UPDATE app.orders SET last_fence = 2 WHERE id = 1`)
		require.NoError(t, err)
	}
	require.EqualValues(t, 34, query[int64](b, fenceOf1))
	require.Equal(t, "UPDATE lowered legacy,UPDATE unfenced legacy", query[string](b,
		`SELECT string_agg(concat_ws(' ', operation, finding, application_name), ',' ORDER BY finding) FROM fence.observation`))
	require.EqualValues(t, 6, query[int64](b, `SELECT last_value FROM fence.guard_observed`))
	_, err = session.Exec(ctx, `TRUNCATE app.orders`)
	require.NoError(t, err)
	require.Equal(t, 1, query[int](b, `SELECT count(*) FROM fence.observation WHERE finding = 'truncated'`))
}

// An entered transaction is stamped, whatever sends its statements; a stale one is refused at the row. This is all that
// another language needs.
func TestEnteredTransactions(t *testing.T) {
	for _, strength := range []string{"fenced", "live"} {
		t.Run(strength, func(t *testing.T) {
			ctx := context.Background()
			b := guarded(t, `strength => '`+strength+`', guard => 'enforce'`)
			a := b.acquire(b.client(leasedb.Config{Holder: "A", ManualRenewal: true, TTL: time.Hour}), "x")
			enter := fmt.Sprintf(`BEGIN; SELECT fence.enter('x', '%s', %d); `, a.Token(), a.Fence())
			b.exec(enter + `UPDATE app.orders SET v = 'A' WHERE id = 1; UPDATE app.orders SET v = 'A again' WHERE id = 1;
				INSERT INTO app.orders (id, v) VALUES (4, 'A'); DELETE FROM app.orders WHERE id = 2; COMMIT`)
			require.Equal(t, a.Fence(), query[int64](b, `SELECT min(last_fence) FROM app.orders WHERE id IN (1, 4)`))
			require.Equal(t, a.Fence(), query[int64](b, `SELECT fence FROM fence.tombstone`))

			// Outside of a transaction it is over at once; with what is not this grant's it is refused.
			b.refusedWith("WG008", `UPDATE app.orders SET v = 'x'`)
			session := b.session()
			_, err := session.Exec(ctx, `SELECT fence.enter('x', $1, $2)`, a.Token(), a.Fence())
			require.NoError(t, err)
			_, err = session.Exec(ctx, `UPDATE app.orders SET v = 'x'`)
			require.ErrorContains(t, err, "WG008")
			e := b.refusal("WG005", fmt.Sprintf(`BEGIN; SELECT fence.enter('x', gen_random_uuid(), %d)`, a.Fence()))
			require.Equal(t, "superseded", e.Detail)
			b.refusedWith("WG005", fmt.Sprintf(`BEGIN; SELECT fence.enter('x', '%s', %d)`, a.Token(), a.Fence()+2))

			// The next holder writes; the old one is refused, and what is refused is refused as a whole.
			b.age("x", 2*time.Hour)
			next := b.acquire(b.client(leasedb.Config{Holder: "B", ManualRenewal: true, TTL: time.Hour}), "x")
			enterB := fmt.Sprintf(`BEGIN; SELECT fence.enter('x', '%s', %d); `, next.Token(), next.Fence())
			b.exec(enterB + `UPDATE app.orders SET v = 'B' WHERE id = 1; DELETE FROM app.orders WHERE id = 4; COMMIT`)
			e = b.refusal("WG005", enter+`UPDATE app.orders SET v = 'late' WHERE id = 1`)
			require.Contains(t, e.Message, "superseded")
			// A lease of another name with an older fence meets a row that has seen a newer one.
			b.exec(`UPDATE fence.protected_table SET strength = strength`)
			other := b.acquire(b.client(leasedb.Config{TTL: time.Hour, ManualRenewal: true}), "y")
			b.exec(fmt.Sprintf(`BEGIN; SELECT fence.enter('y', '%s', %d); UPDATE app.orders SET v = 'y' WHERE id = 1; COMMIT`, other.Token(), other.Fence()))
			b.refusedWith("WG006", enterB+`UPDATE app.orders SET v = 'B' WHERE id = 1`)
			b.refusedWith("WG006", enterB+`DELETE FROM app.orders WHERE id = 1`)
			b.exec(`DELETE FROM fence.tombstone; ` + fmt.Sprintf(`BEGIN; SELECT fence.enter('y', '%s', %d); DELETE FROM app.orders WHERE id = 1; COMMIT`, other.Token(), other.Fence()))
			b.refusedWith("WG006", enterB+`INSERT INTO app.orders (id, v) VALUES (1, 'B')`)
		})
	}
}

// What anybody may write into the settings enters nothing, and nothing is left behind in a session. (C31, C37)
func TestForgedEntry(t *testing.T) {
	ctx := context.Background()
	b := guarded(t, `strength => 'live', guard => 'enforce'`)
	a := b.acquire(b.client(leasedb.Config{ManualRenewal: true}), "x")
	for _, setting := range []string{"999", "999:abc", "999:" + strings.Repeat("0", 64), "", "99999999999999999999:" + strings.Repeat("0", 64), "x"} {
		b.refusedWith("WG008", `SET fence.entered = '`+setting+`'; UPDATE app.orders SET v = 'x' WHERE id = 1`)
	}
	b.refusedWith("WG009", `UPDATE app.orders SET v = 'x', last_fence = 999 WHERE id = 1`)
	b.refusedWith("WG009", `INSERT INTO app.orders (id, v, last_fence) VALUES (9, 'x', 999)`)
	b.refusedWith("WG008", `SET fence.marked = '999'; DELETE FROM app.orders WHERE id = 1; UPDATE app.orders SET v = 'x' WHERE id = 2`)

	b.refusedWith("WG008", `SET fence.marked = '2'; UPDATE app.orders SET v = 'x' WHERE id = 1`)
	b.exec(`ALTER TABLE app.orders DISABLE TRIGGER USER; UPDATE app.orders SET last_fence = 2 WHERE id = 3; ALTER TABLE app.orders ENABLE TRIGGER USER`)
	b.refusedWith("WG008", `SET fence.marked = '2'; UPDATE app.orders SET v = 'x' WHERE id = 3`)
	b.refusedWith("WG008", `SET fence.marked = '2'; DELETE FROM app.orders WHERE id = 3`)

	// What enters is the grant, by its token, for as long as it is held; nothing of it is left behind in the session.
	session := b.session()
	_, err := session.Exec(ctx, fmt.Sprintf(`BEGIN; SELECT fence.enter('x', '%s', %d)`, a.Token(), a.Fence()))
	require.NoError(t, err)
	var kept string
	require.NoError(t, session.QueryRow(ctx, `SELECT current_setting('fence.entered')`).Scan(&kept))
	_, err = session.Exec(ctx, `UPDATE app.orders SET v = 'A' WHERE id = 1; COMMIT`)
	require.NoError(t, err)
	_, err = session.Exec(ctx, `UPDATE app.orders SET v = 'x' WHERE id = 1`)
	require.ErrorContains(t, err, "WG008", "the setting reads '' now")
	for _, forged := range []string{
		strings.Replace(kept, fmt.Sprint(":", a.Fence(), ":"), fmt.Sprint(":", a.Fence()+2, ":"), 1), strings.TrimSuffix(kept, "x") + "y", "0" + kept[1:], kept + " ",
		strings.Replace(kept, ":", "::", 1), strings.ToUpper(kept[:36]) + kept[36:], kept[:36], kept[:37] + "0" + kept[37:],
	} {
		if forged != kept {
			b.refusedWith("WG008", `SET fence.entered = '`+forged+`'; UPDATE app.orders SET v = 'x' WHERE id = 1`)
		}
	}
	enter := `SET fence.entered = '` + kept + `'; `
	b.exec(enter + `UPDATE app.orders SET v = 'A' WHERE id = 1`)
	// Nor does going back behind the entry leave anything of it: the guard takes the lock itself.
	_, err = session.Exec(ctx, `BEGIN; SAVEPOINT s; SELECT fence.enter('x', '`+a.Token()+fmt.Sprintf(`', %d); ROLLBACK TO SAVEPOINT s; `, a.Fence())+enter+`UPDATE app.orders SET v = 'A' WHERE id = 1`)
	require.NoError(t, err)
	_, err = b.session().Exec(ctx, `SELECT 1 FROM fence.lease WHERE name = 'x' FOR UPDATE NOWAIT`)
	require.ErrorContains(t, err, "55P03")
	_, err = session.Exec(ctx, `ROLLBACK; RESET fence.entered`)
	require.NoError(t, err)
	_, err = b.session().Exec(ctx, `BEGIN ISOLATION LEVEL REPEATABLE READ; `+enter+`UPDATE app.orders SET v = 'x' WHERE id = 1`)
	require.ErrorContains(t, err, "WG008", "a snapshot may be older than the lock")
	b.age("x", 2*time.Hour)
	_, err = b.session().Exec(ctx, enter+`UPDATE app.orders SET v = 'x' WHERE id = 1`)
	require.ErrorContains(t, err, "WG008", "it has expired")
	var pgErr *pgconn.PgError
	require.ErrorAs(t, err, &pgErr)
	require.Contains(t, pgErr.Hint, "is over")
	b.acquire(b.client(leasedb.Config{ManualRenewal: true}), "x")
	b.refusedWith("WG008", enter+`UPDATE app.orders SET v = 'x' WHERE id = 1`)
}

// A refusal is an error of the whole statement: no cascade leaves an orphan behind, and no fence falls by one. (C32)
func TestGuardAndCascades(t *testing.T) {
	for action, unfenced := range map[string]string{"CASCADE": "refuse", "SET NULL": "refuse", "CASCADE ": "count", "SET NULL ": "count"} {
		t.Run(action+unfenced, func(t *testing.T) {
			ctx := context.Background()
			b := guarded(t, `guard => 'enforce', unfenced => '`+unfenced+`'`)
			b.exec(`CREATE TABLE app.parents (id int PRIMARY KEY); INSERT INTO app.parents VALUES (1);
				ALTER TABLE app.orders ADD parent int REFERENCES app.parents ON DELETE ` + action + ` ON UPDATE CASCADE`)
			_, err := b.gate.Exec(ctx, fencedb.Static("x", 34, "B"), `UPDATE app.orders SET parent = 1, last_fence = @fence WHERE id = 1 AND last_fence < @fence`, nil,
				fencedb.Target(b.table(), order1))
			require.NoError(t, err)
			for _, sql := range []string{`UPDATE app.parents SET id = 2`, `DELETE FROM app.parents`} {
				if unfenced == "refuse" {
					b.refusedWith("WG008", sql)
				} else {
					b.exec(sql)
				}
			}
			require.Equal(t, 0, query[int](b, `SELECT count(*) FROM app.orders o WHERE parent IS NOT NULL AND NOT EXISTS (SELECT 1 FROM app.parents p WHERE p.id = o.parent)`))
			_, err = b.table().Upsert(ctx, fencedb.Static("x", 32, "A"), order1, fencedb.Set{"v": "late"})
			require.ErrorIs(t, err, fencedb.ErrStale)
		})
	}
}

// Partitioned tables, whose updates may be deletes and inserts, columns of other names, COPY, MERGE, several keys.
func TestGuardOfOddTables(t *testing.T) {
	ctx := context.Background()
	b := newBed(t)
	b.exec(`CREATE TABLE app.parted (id int, region text, v text, "Fence It" bigint NOT NULL DEFAULT 0, PRIMARY KEY (id, region)) PARTITION BY LIST (region);
		CREATE TABLE app.parted_a PARTITION OF app.parted FOR VALUES IN ('a'); CREATE TABLE app.parted_b PARTITION OF app.parted FOR VALUES IN ('b');
		INSERT INTO app.parted VALUES (1, 'a', 'first'), (2, 'a', 'first');
		SELECT fence.protect('app.parted', fence_column => 'Fence It', guard => 'enforce')`)
	table, err := b.gate.Table(ctx, "app.parted", fencedb.KeyColumns("id"))
	require.NoError(t, err)
	for i, rule := range bothRules {
		_, err = table.Update(ctx, fencedb.Static("x", 34, "B"), order1, fencedb.Set{"v": "B", "region": []string{"b", "a"}[i]}, fencedb.WithRule(rule))
		require.NoError(t, err)
	}
	require.EqualValues(t, 34, query[int64](b, `SELECT "Fence It" FROM app.parted WHERE id = 1 AND region = 'a'`))
	require.LessOrEqual(t, query[int64](b, `SELECT max(fence) FROM fence.tombstone`), int64(34), "of the keys that it had on its way")
	b.exec(`UPDATE app.parted SET region = 'b', "Fence It" = 36 WHERE id = 1 AND "Fence It" < 36; UPDATE app.parted SET region = 'a', "Fence It" = 38 WHERE id = 1 AND "Fence It" < 38`)
	require.EqualValues(t, 38, query[int64](b, `SELECT "Fence It" FROM app.parted WHERE id = 1 AND region = 'a'`), "by the same statement from elsewhere")
	b.refusedWith("WG008", `UPDATE app.parted SET region = 'b' WHERE id = 1`)
	b.refusedWith("WG007", `UPDATE app.parted SET "Fence It" = 3 WHERE id = 1`)
	b.refusedWith("WG008", `DELETE FROM app.parted_a WHERE id = 1`)
	b.refusedWith("WG010", `TRUNCATE app.parted_a`)

	// What replication brings passes by, so that a subscriber can apply what its publisher has accepted. (C29)
	b.exec(`SET session_replication_role = replica; UPDATE app.parted SET v = 'applied', "Fence It" = 2 WHERE id = 2`)

	// Renamed, it is the same table.
	b.exec(`ALTER TABLE app.parted RENAME TO moved`)
	b.refusedWith("WG008", `UPDATE app.moved SET v = 'x'`)

	b.exec(`SELECT fence.protect('app.orders', guard => 'enforce', unfenced => 'count')`)
	orders := b.table()
	_, err = orders.Delete(ctx, fencedb.Static("x", 34, "B"), order1)
	require.NoError(t, err)
	session := b.session()
	_, err = session.CopyFrom(ctx, pgx.Identifier{"app", "orders"}, []string{"id", "v", "last_fence"}, pgx.CopyFromRows([][]any{{1, "copied", 20}}))
	require.ErrorContains(t, err, "WG007", "with an old fence")
	_, err = session.CopyFrom(ctx, pgx.Identifier{"app", "orders"}, []string{"id", "v"}, pgx.CopyFromRows([][]any{{1, "copied"}}))
	require.NoError(t, err)
	require.EqualValues(t, 34, query[int64](b, fenceOf1), "without one it takes the tombstone's")
	_, err = orders.Update(ctx, fencedb.Static("x", 32, "A"), order1, fencedb.Set{"v": "A"})
	require.ErrorIs(t, err, fencedb.ErrStale)
	if query[int](b, `SELECT current_setting('server_version_num')::int`) >= 150000 {
		b.refusedWith("WG007", `MERGE INTO app.orders o USING (VALUES (1)) s (id) ON o.id = s.id WHEN MATCHED THEN UPDATE SET last_fence = 1`)
	}

	// A guard comes, changes and goes as it is told, and stays where nothing is said of it.
	const guards = `SELECT count(*) - count(*) FILTER (WHERE tgname LIKE '%_keys') FROM pg_trigger WHERE tgname LIKE '~writegate%' AND tgrelid = 'app.orders'::regclass`
	b.exec(`SELECT fence.protect('app.orders', 'term')`)
	require.Equal(t, 3, query[int](b, guards))
	b.refusedWith("WG010", `TRUNCATE app.orders`)
	b.exec(`SELECT fence.protect('app.orders', guard => 'off')`)
	require.Equal(t, 0, query[int](b, guards))
	b.exec(`SELECT fence.protect('app.orders', guard => 'observe'); SELECT fence.unprotect('app.orders')`)
	require.Equal(t, 0, query[int](b, guards))
	for _, bad := range []string{`guard => 'on'`, `unfenced => 'maybe'`} {
		_, err := b.pool.Exec(ctx, `SELECT fence.protect('app.orders', `+bad+`)`)
		require.ErrorContains(t, err, "22023")
	}
}

// In a transaction of Gate.InTx any statement is stamped, and the gate's own pass. Beside it the same connection's others
// are not taken for entered.
func TestInTxIsEntered(t *testing.T) {
	ctx := context.Background()
	for _, strength := range []string{"fenced", "live", "in_tx"} {
		b := guarded(t, `strength => '`+strength+`', guard => 'enforce'`)
		table := b.table()
		lease := b.acquire(b.client(leasedb.Config{TTL: time.Hour}), "x")
		require.NoError(t, b.gate.InTx(ctx, lease, func(ctx context.Context, tx pgx.Tx) error {
			if _, err := tx.Exec(ctx, `UPDATE app.orders SET v = 'plain SQL' WHERE id = 1`); err != nil {
				return err
			}
			if _, err := table.In(tx).Update(ctx, lease, fencedb.Key{"id": 2}, fencedb.Set{"v": "the gate"}); err != nil {
				return err
			}
			if _, err := table.In(tx).Seal(ctx, lease, fencedb.Key{"id": 3}); err != nil {
				return err
			}
			_, err := table.In(tx).Delete(ctx, lease, fencedb.Key{"id": 2}, fencedb.WithRule(fencedb.Term))
			return err
		}))
		require.Equal(t, lease.Fence(), query[int64](b, fenceOf1))
		require.Equal(t, lease.Fence()-1, query[int64](b, `SELECT last_fence FROM app.orders WHERE id = 3`), "a seal stays one")
		_, err := b.pool.Exec(ctx, `UPDATE app.orders SET v = 'x'`)
		require.ErrorContains(t, err, "WG008")
	}
}

// A claim is good for as long as the lease is held by the clock after the wait for its lock, not before. (C04)
func TestClaimThatWaitsForTheLease(t *testing.T) {
	ctx := context.Background()
	b := guarded(t, `guard => 'enforce'`)
	lease := b.acquire(b.client(leasedb.Config{TTL: time.Hour, ManualRenewal: true}), "x")
	blocker, session := b.session(), b.session()
	b.exec(`UPDATE fence.lease SET expires_at = clock_timestamp() + interval '500 ms'`)
	_, err := blocker.Exec(ctx, `BEGIN; SELECT 1 FROM fence.lease FOR UPDATE`)
	require.NoError(t, err)
	done := make(chan error, 1)
	go func() {
		_, err := session.Exec(ctx, fmt.Sprintf(`BEGIN; SELECT set_config('fence.entered', '%s:%d:x', true); UPDATE app.orders SET v = 'late' WHERE id = 1; COMMIT`, lease.Token(), lease.Fence()))
		done <- err
	}()
	b.waitUntilBlocked()
	b.await(`SELECT expires_at < clock_timestamp() FROM fence.lease`)
	_, err = blocker.Exec(ctx, `COMMIT`)
	require.NoError(t, err)
	require.ErrorContains(t, <-done, "WG008")
	require.Equal(t, "first", query[string](b, `SELECT v FROM app.orders WHERE id = 1`))
}

// A token counts as what it is, however it is written.
func TestTokenInAnotherForm(t *testing.T) {
	ctx := context.Background()
	b := guarded(t, `strength => 'live', guard => 'enforce'`)
	lease := factsOf(b.acquire(b.client(leasedb.Config{TTL: time.Hour}), "x"))
	for _, form := range []func(string) string{strings.ToUpper, func(s string) string { return "{" + s + "}" }, func(s string) string { return strings.ReplaceAll(s, "-", "") }} {
		written := lease
		written.token = form(lease.token)
		_, err := b.table().Update(ctx, written, order1, fencedb.Set{"v": "A"}, fencedb.WithRule(fencedb.Term))
		require.NoError(t, err)
		require.NoError(t, b.gate.InTx(ctx, written, func(ctx context.Context, tx pgx.Tx) error {
			_, err := tx.Exec(ctx, `UPDATE app.orders SET v = 'plain SQL' WHERE id = 1`)
			return err
		}))
	}
}

// Processes that run on while a guard is installed, removed and changed notice nothing of it; and what is not said of a table
// when it is protected again stays as it was.
func TestGuardIsInstalledUnderRunningProcesses(t *testing.T) {
	for _, strength := range []fencedb.Strength{fencedb.Fenced, fencedb.Live} {
		t.Run(string(strength), func(t *testing.T) {
			ctx := context.Background()
			b := newBed(t)
			b.exec(`SELECT fence.protect('app.orders', 'term', '` + string(strength) + `')`)
			table := b.table()
			lease := b.acquire(b.client(leasedb.Config{TTL: time.Hour}), "x")
			for _, guard := range []string{"off", "observe", "enforce"} {
				b.exec(`SELECT fence.protect('app.orders', guard => '` + guard + `')`)
				for _, id := range []int{1, 2} {
					_, err := table.Update(ctx, lease, fencedb.Key{"id": id}, fencedb.Set{"v": guard})
					require.NoError(t, err, guard)
				}
				_, err := table.UpdateMany(ctx, lease, []fencedb.Row{{Key: order1, Set: fencedb.Set{"v": "many"}}})
				require.NoError(t, err)
				_, err = table.Upsert(ctx, lease, order1, fencedb.Set{"v": "upsert"})
				require.NoError(t, err)
				_, err = b.gate.Exec(ctx, lease, `UPDATE app.orders SET v = 'exec', last_fence = @fence WHERE id = 1 AND last_fence <= @fence`, nil, fencedb.Target(table, order1))
				require.NoError(t, err)
				_, err = table.Delete(ctx, lease, fencedb.Key{"id": 3})
				require.NoError(t, err)
				_, err = table.Insert(ctx, lease, fencedb.Set{"id": 3, "v": "back"})
				require.NoError(t, err)
			}
			require.Equal(t, 0, query[int](b, `SELECT count(*) FROM fence.observation`))
			require.Equal(t, "term "+string(strength)+" last_fence enforce", query[string](b, `SELECT concat_ws(' ', rule, strength, fence_column, guard) FROM fence.protected_table`))
			_, err := b.pool.Exec(ctx, `SELECT fence.protect('app.orders', fence_column => 'another')`)
			require.ErrorContains(t, err, "column last_fence holds fences up to")
		})
	}
}

// Deletes keep the row's fence whoever makes them, and whatever waits for them; NULL is no way around it.
func TestGuardedDeletes(t *testing.T) {
	ctx := context.Background()
	b := guarded(t, `guard => 'enforce', unfenced => 'allow'`)
	newer, older := fencedb.Static("x", 34, "B"), fencedb.Static("x", 32, "A")
	table := b.table()
	_, err := table.Update(ctx, newer, order1, fencedb.Set{"v": "B"})
	require.NoError(t, err)
	tx, err := b.pool.Begin(ctx)
	require.NoError(t, err)
	_, err = tx.Exec(ctx, `DELETE FROM app.orders WHERE id = 1`)
	require.NoError(t, err)
	refused := make(chan error, 1)
	go func() {
		_, err := table.Insert(ctx, older, fencedb.Set{"id": 1, "v": "A"})
		refused <- err
	}()
	b.waitUntilBlocked()
	require.NoError(t, tx.Commit(ctx))
	require.ErrorIs(t, <-refused, fencedb.ErrStale)
	_, err = b.pool.Exec(ctx, `INSERT INTO app.orders (id, v, last_fence) VALUES (1, 'x', NULL)`)
	require.NoError(t, err)
	require.EqualValues(t, 34, query[int64](b, fenceOf1), "a NULL is no fence, and the tombstone's is taken")

	// A row that goes under another key leaves its old one as a deleted row does, and does not get below a tombstone's.
	b.exec(`UPDATE app.orders SET id = 11 WHERE id = 1`)
	_, err = table.Insert(ctx, older, fencedb.Set{"id": 1, "v": "A"})
	require.ErrorIs(t, err, fencedb.ErrStale)
	_, err = table.Update(ctx, fencedb.Static("y", 30, "Z"), fencedb.Key{"id": 2}, fencedb.Set{"v": "Z"})
	require.NoError(t, err)
	e := b.refusal("WG006", `UPDATE app.orders SET id = 1 WHERE id = 2`)
	require.Contains(t, e.Message, "seen 34, sent 30")
	b.exec(`UPDATE app.orders SET id = 1 WHERE id = 11`)

	// A gate's write in the transaction does not make its other deletes the gate's.
	b.exec(`CREATE TABLE app.lines (id int PRIMARY KEY, parent int REFERENCES app.orders ON DELETE CASCADE); SELECT fence.protect('app.lines', guard => 'enforce')`)
	lines, err := b.gate.Table(ctx, "app.lines")
	require.NoError(t, err)
	_, err = lines.Insert(ctx, fencedb.Static("x", 30, "Z"), fencedb.Set{"id": 7, "parent": 1})
	require.NoError(t, err)
	_, err = table.Delete(ctx, fencedb.Static("x", 36, "C"), order1)
	require.NoError(t, err)
	_, err = lines.Insert(ctx, fencedb.Static("x", 28, "Y"), fencedb.Set{"id": 7})
	require.ErrorIs(t, err, fencedb.ErrStale, "of the child as well")
}

// Observing refuses nothing: under any isolation level, whatever a row holds, whatever somebody has written into the settings,
// and without anybody waiting for another.
func TestObservingRefusesNothing(t *testing.T) {
	ctx := context.Background()
	b := newBed(t)
	b.exec(`ALTER TABLE app.orders ADD j json DEFAULT '"\u0000"'; SELECT fence.protect('app.orders', guard => 'observe', strength => 'live')`)
	for _, level := range []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable} {
		var txs []pgx.Tx
		for id := range 3 {
			tx, err := b.pool.BeginTx(ctx, pgx.TxOptions{IsoLevel: level})
			require.NoError(t, err)
			_, err = tx.Exec(ctx, `SET LOCAL fence.entered = '999999999999999999:`+strings.Repeat("0", 64)+`'; SET LOCAL fence.marked = '9999999999999999999'`)
			require.NoError(t, err)
			_, err = tx.Exec(ctx, fmt.Sprintf(`SET LOCAL lock_timeout = '5s'; UPDATE app.orders SET v = 'plain' WHERE id = %d`, id+1))
			require.NoError(t, err)
			txs = append(txs, tx) // all at once
		}
		for _, tx := range txs {
			require.NoError(t, tx.Commit(ctx))
		}
		for _, sql := range []string{`DELETE FROM app.orders WHERE id = 3`, `INSERT INTO app.orders VALUES (3, 'back')`, `UPDATE app.orders SET last_fence = 999 WHERE id = 2`, `UPDATE app.orders SET last_fence = 1 WHERE id = 2`} {
			tx, err := b.pool.BeginTx(ctx, pgx.TxOptions{IsoLevel: level})
			require.NoError(t, err)
			_, err = tx.Exec(ctx, sql)
			require.NoError(t, err, sql)
			require.NoError(t, tx.Commit(ctx))
		}
	}
	b.exec(`ALTER TABLE app.orders RENAME id TO number; DELETE FROM app.orders WHERE number = 3; INSERT INTO app.orders VALUES (3, 'back')`)
	require.Positive(t, query[int](b, `SELECT count(*) FROM fence.observation`))
}

// Whoever has each partition, protecting gives up once and for all, and a caller who has less patience is not made to wait.
func TestProtectDoesNotWaitForEachPartition(t *testing.T) {
	ctx := context.Background()
	b := newBed(t)
	b.exec(`CREATE TABLE app.parted (id int PRIMARY KEY) PARTITION BY RANGE (id); CREATE TABLE app.p1 PARTITION OF app.parted FOR VALUES FROM (0) TO (10);
		CREATE TABLE app.p2 PARTITION OF app.parted FOR VALUES FROM (10) TO (20)`)
	sitting := b.session()
	_, err := sitting.Exec(ctx, `BEGIN; SELECT FROM app.p2`)
	require.NoError(t, err)
	_, err = b.session().Exec(ctx, `SET lock_timeout = '10ms'; SELECT fence.protect('app.parted')`)
	require.ErrorContains(t, err, "55P03")
	_, err = sitting.Exec(ctx, `COMMIT`)
	require.NoError(t, err)
	session := b.session()
	_, err = session.Exec(ctx, `SET lock_timeout = '10s'; BEGIN; SELECT fence.protect('app.parted', guard => 'observe')`)
	require.NoError(t, err)
	var setting string
	require.NoError(t, session.QueryRow(ctx, `SELECT current_setting('lock_timeout')`).Scan(&setting))
	require.Equal(t, "10s", setting, "it is the caller's again")
	_, err = session.Exec(ctx, `COMMIT`)
	require.NoError(t, err)
}

// A guard that comes while programs run, which know of none, refuses none of their lawful writes, and finds nothing wrong with
// them; rule once alone shows it what it needs to see.
func TestGuardThatComesWhileProgramsRun(t *testing.T) {
	ctx := context.Background()
	b := newBed(t)
	b.exec(`SELECT fence.protect('app.orders', strength => 'live')`)
	open := func() *fencedb.Table {
		table, err := b.gateOf(fencedb.New(b.pool, fencedb.Config{})).Table(ctx, "app.orders")
		require.NoError(t, err)
		return table
	}
	client := b.client(leasedb.Config{ManualRenewal: true})
	write := func(table *fencedb.Table, id int) {
		t.Helper()
		lease := b.acquire(client, "x")
		outcome, err := table.Update(ctx, lease, fencedb.Key{"id": id}, fencedb.Set{"v": "A"})
		require.NoError(t, err)
		require.Equal(t, fencedb.Applied, outcome)
		require.NoError(t, lease.Release(ctx))
	}
	writeMany := func(table *fencedb.Table) {
		t.Helper()
		lease := b.acquire(client, "x")
		results, err := table.UpdateMany(ctx, lease, []fencedb.Row{{Key: fencedb.Key{"id": 1}, Set: fencedb.Set{"v": "B"}}, {Key: fencedb.Key{"id": 2}, Set: fencedb.Set{"v": "B"}}})
		require.NoError(t, err)
		for _, r := range results {
			require.Equal(t, fencedb.Applied, r.Outcome)
		}
		require.NoError(t, lease.Release(ctx))
	}
	one, many, first := open(), open(), open()
	for range 2 { // the second is sent as the first was
		write(one, 1)
	}
	writeMany(many)
	b.exec(`SELECT fence.protect('app.orders', guard => 'observe')`)
	write(one, 1)
	writeMany(many)
	require.Equal(t, 0, query[int](b, `SELECT count(*) FROM fence.observation`))
	b.exec(`SELECT fence.protect('app.orders', guard => 'enforce', unfenced => 'refuse')`)
	for range 2 {
		write(one, 1)
		write(first, 2)
		writeMany(many)
	}
	for range 5 { // and when several writes of one table find out at the same time
		b.exec(`SELECT fence.protect('app.orders', guard => 'off')`)
		table := open()
		write(table, 1)
		b.exec(`SELECT fence.protect('app.orders', guard => 'enforce')`)
		lease := b.acquire(client, "x")
		together(t, 3, func(i int) error {
			_, err := table.Update(ctx, lease, fencedb.Key{"id": i + 1}, fencedb.Set{"v": "A"})
			return err
		})
		require.NoError(t, lease.Release(ctx))
	}
	require.Equal(t, 0, query[int](b, `SELECT count(*) FROM fence.rejection`))
	require.Equal(t, 0, query[int](b, `SELECT count(*) FROM fence.observation`))
	b.refusedWith("WG009", `UPDATE app.orders SET v = 'x', last_fence = last_fence + 2 WHERE id = 1`)
}
