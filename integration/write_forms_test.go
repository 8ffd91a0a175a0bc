package integration

import (
	"context"
	"errors"
	"fmt"
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

// newThings is a bed with rows 10 to 29 in app.things, and the table.
func newThings(t *testing.T) (*bed, *fencedb.Table) {
	t.Helper()
	b := newBed(t)
	b.exec(thingsSQL)
	for a := 10; a < 30; a++ {
		_, err := b.pool.Exec(context.Background(), `INSERT INTO app.things (a, "b ""quoted"" Ü", v) VALUES ($1, $2, 'old')`, a, key(0)[oddKey])
		require.NoError(t, err)
	}
	table, err := b.gate.Table(context.Background(), "app.things")
	require.NoError(t, err)
	return b, table
}

// Every kind of write, sent by a superseded holder while its successor's transaction is under way, waits for it and is
// refused. (C01, C18)
func TestEveryFormThatWaitedForItsSuccessorIsRefused(t *testing.T) {
	for form, write := range forms {
		for _, strength := range []fencedb.Strength{fencedb.Fenced, fencedb.Live} {
			t.Run(form+"/"+string(strength), func(t *testing.T) {
				ctx := context.Background()
				b, table := newThings(t)
				a := factsOf(b.acquire(b.client(leasedb.Config{Holder: "A", ManualRenewal: true}), "x"))

				session := b.session()
				_, err := session.Exec(ctx, `BEGIN`)
				require.NoError(t, err)
				_, err = session.Exec(ctx, ageSQL, "x", time.Hour) // who looks sees a lease that runs
				require.NoError(t, err)
				var fenceB int64
				err = session.QueryRow(ctx, `SELECT fence FROM fence.acquire('x', 'B', '30s', gen_random_uuid())`).Scan(&fenceB)
				require.NoError(t, err)
				_, err = session.Exec(ctx, `UPDATE app.things SET v = 'B', last_fence = $1 WHERE a = 10`, fenceB)
				require.NoError(t, err)

				refused := make(chan error, 1)
				go func() {
					_, err := write(ctx, table, b.gate, a, 10, "A", fencedb.WithStrength(strength))
					refused <- err
				}()
				b.waitUntilBlocked()
				_, err = session.Exec(ctx, `COMMIT`)
				require.NoError(t, err)
				err = <-refused
				require.True(t, errors.Is(err, fencedb.ErrStale) || errors.Is(err, fencedb.ErrLeaseLost), err)
				require.Equal(t, "B", query[string](b, `SELECT v FROM app.things WHERE a = 10`))
				require.Equal(t, fenceB, query[int64](b, `SELECT last_fence FROM app.things WHERE a = 10`))
			})
		}
	}
}

// A row that its new holder is deleting is not brought back by an insert that waits for that. (C18, with the race)
func TestInsertThatWaitedForADeleteIsRefused(t *testing.T) {
	for _, form := range []string{"insert", "upsert"} {
		t.Run(form, func(t *testing.T) {
			ctx := context.Background()
			b, table := newThings(t)
			tx, err := b.pool.Begin(ctx)
			require.NoError(t, err)
			outcome, err := table.In(tx).Delete(ctx, fencedb.Static("x", 34, "B"), key(10))
			require.NoError(t, err)
			require.Equal(t, fencedb.Applied, outcome)

			refused := make(chan error, 1)
			go func() {
				var err error
				if form == "insert" {
					_, err = table.Insert(ctx, fencedb.Static("x", 32, "A"), row(10, nil))
				} else {
					_, err = table.Upsert(ctx, fencedb.Static("x", 32, "A"), key(10), fencedb.Set{"v": "A"})
				}
				refused <- err
			}()
			b.waitUntilBlocked()
			require.NoError(t, tx.Commit(ctx))
			err = <-refused
			var e *fencedb.WriteError
			require.ErrorAs(t, err, &e)
			require.ErrorIs(t, err, fencedb.ErrStale)
			require.EqualValues(t, 34, e.Current)
			require.Equal(t, 0, query[int](b, `SELECT count(*) FROM app.things WHERE a = 10`))
			// The holder that deleted it, or a later one, may put a new one there, in a later term.
			outcome, err = table.Insert(ctx, fencedb.Static("x", 36, "C"), row(10, nil))
			require.NoError(t, err)
			require.Equal(t, fencedb.Applied, outcome)
		})
	}
}

// Tombstones find their row however its key was given and whatever the session's settings, and only those of its own table.
func TestTombstonesOfOddKeys(t *testing.T) {
	ctx := context.Background()
	b := newBed(t)
	b.exec(`CREATE COLLATION app.ci (provider = icu, locale = 'und-u-ks-level2', deterministic = false);
		CREATE DOMAIN app.amount AS numeric; CREATE DOMAIN app.instant AS timestamptz`)
	elsewhere := b.gateOf(fencedb.New(pgtest.Pool(t, b.cfg, func(c *pgxpool.Config) {
		for name, value := range map[string]string{
			"timezone": "Pacific/Kiritimati", "datestyle": "SQL, DMY", "intervalstyle": "iso_8601", "bytea_output": "escape", "extra_float_digits": "-10",
		} {
			c.ConnConfig.RuntimeParams[name] = value
		}
	}), fencedb.Config{}))
	at := time.Date(2024, 3, 10, 1, 0, 0, 0, time.UTC)
	for kind, same := range map[string][2]any{
		"timestamptz": {at, at.In(time.FixedZone("", 3600))}, "numeric": {"1.50", 1.5}, "char(5)": {"ab", "ab  "}, "text": {"a", "a"},
		"text COLLATE app.ci": {"ABC", "abc"}, "app.amount": {"1.0", "1.00"}, "app.instant": {at, at.In(time.FixedZone("", -7200))},
		"numeric[]": {"{1.0}", "{1.00}"}, "numrange": {"[1.0,2]", "[1.00,2.0]"}, "jsonb": {`{"a": 1.0}`, `{"a": 1.00}`}, "interval": {"1 day", "24 hours"},
		"bytea": {[]byte{0, 200}, []byte{0, 200}}, "float8": {"-0", 0.0}, "tstzrange": {"[2024-03-10 01:00:00Z,)", "[2024-03-10 02:00:00+01,)"},
		"daterange": {"[2024-03-10,2024-04-01)", "[2024-03-10,2024-03-31]"}, "uuid": {[16]byte{15: 1}, "00000000-0000-0000-0000-000000000001"},
		"bit(3)": {"101", "101"}, "int[]": {[]int{1}, "{1}"},
	} {
		t.Run(kind, func(t *testing.T) {
			b.exec(`DROP TABLE IF EXISTS app.odd, app.other; DELETE FROM fence.protected_table; DELETE FROM fence.tombstone;
				CREATE TABLE app.odd (k ` + kind + ` PRIMARY KEY, v text); SELECT fence.protect('app.odd');
				CREATE TABLE app.other (k ` + kind + ` PRIMARY KEY); SELECT fence.protect('app.other')`)
			table, err := b.gate.Table(ctx, "app.odd")
			require.NoError(t, err)
			other, err := b.gate.Table(ctx, "app.other")
			require.NoError(t, err)
			there, err := elsewhere.Table(ctx, "app.odd")
			require.NoError(t, err)
			newer, older := fencedb.Static("x", 34, "B"), fencedb.Static("x", 32, "A")
			_, err = table.Insert(ctx, older, fencedb.Set{"k": same[0]})
			require.NoError(t, err)
			_, err = table.Delete(ctx, newer, fencedb.Key{"k": same[0]})
			require.NoError(t, err)
			for _, revive := range []*fencedb.Table{table, there} {
				_, err = revive.Insert(ctx, older, fencedb.Set{"k": same[1]})
				require.ErrorIs(t, err, fencedb.ErrStale)
				_, err = revive.Upsert(ctx, older, fencedb.Key{"k": same[1]}, fencedb.Set{"v": "x"})
				require.ErrorIs(t, err, fencedb.ErrStale)
			}
			_, err = other.Insert(ctx, older, fencedb.Set{"k": same[1]})
			require.NoError(t, err)
			// Nor are two of them taken for two rows of one batch.
			_, err = table.Insert(ctx, fencedb.Static("x", 36, "C"), fencedb.Set{"k": same[0]})
			require.NoError(t, err)
			for _, options := range [][]fencedb.WriteOption{nil, {fencedb.Partial()}} {
				_, err = table.UpdateMany(ctx, fencedb.Static("x", 38, "C"), []fencedb.Row{
					{Key: fencedb.Key{"k": same[0]}, Set: fencedb.Set{"v": "1"}}, {Key: fencedb.Key{"k": same[1]}, Set: fencedb.Set{"v": "2"}},
				}, options...)
				require.Error(t, err)
				require.Regexp(t, "same key|equal to the database", err.Error())
			}
			require.EqualValues(t, 36, query[int64](b, `SELECT last_fence FROM app.odd`))
		})
	}
}

// In a partitioned table whose rows are named by less than its primary key, too.
func TestTombstonesUnderClaimedKeys(t *testing.T) {
	ctx := context.Background()
	b := newBed(t)
	b.exec(`CREATE TABLE app.parted (id int, region text, v text, PRIMARY KEY (id, region)) PARTITION BY LIST (region);
		CREATE TABLE app.parted_a PARTITION OF app.parted DEFAULT; INSERT INTO app.parted VALUES (1, 'a'); SELECT fence.protect('app.parted')`)
	table, err := b.gate.Table(ctx, "app.parted", fencedb.KeyColumns("id"))
	require.NoError(t, err)
	_, err = table.Delete(ctx, fencedb.Static("x", 34, "B"), order1)
	require.NoError(t, err)
	for _, region := range []string{"a", "b"} {
		_, err = table.Insert(ctx, fencedb.Static("x", 32, "A"), fencedb.Set{"id": 1, "region": region})
		require.ErrorIs(t, err, fencedb.ErrStale)
		_, err = table.Upsert(ctx, fencedb.Static("x", 32, "A"), fencedb.Key{"id": 1, "region": region}, fencedb.Set{"v": "A"})
		require.ErrorIs(t, err, fencedb.ErrStale)
	}
}

// A row is known by each of its keys: deleted by one, it cannot be brought back by another, nor while it is being deleted.
func TestTombstonesUnderEveryKey(t *testing.T) {
	ctx := context.Background()
	b := newBed(t)
	b.exec(`CREATE TABLE app.two (id int PRIMARY KEY, mail text NOT NULL UNIQUE, v text); SELECT fence.protect('app.two')`)
	table, err := b.gate.Table(ctx, "app.two")
	require.NoError(t, err)
	older, newer := fencedb.Static("x", 32, "A"), fencedb.Static("x", 34, "B")
	for _, by := range []fencedb.Key{{"id": 1}, {"mail": "m"}} {
		for name, revive := range map[string]func(context.Context) (fencedb.Outcome, error){
			"insert, same id": func(ctx context.Context) (fencedb.Outcome, error) {
				return table.Insert(ctx, older, fencedb.Set{"id": 1, "mail": "other"})
			},
			"insert, same mail": func(ctx context.Context) (fencedb.Outcome, error) {
				return table.Insert(ctx, older, fencedb.Set{"id": 9, "mail": "m"})
			},
			"upsert by id": func(ctx context.Context) (fencedb.Outcome, error) {
				return table.Upsert(ctx, older, fencedb.Key{"id": 1}, fencedb.Set{"mail": "other"})
			},
			"upsert by mail": func(ctx context.Context) (fencedb.Outcome, error) {
				return table.Upsert(ctx, older, fencedb.Key{"mail": "m"}, fencedb.Set{"id": 9})
			},
			"upsert with mail": func(ctx context.Context) (fencedb.Outcome, error) {
				return table.Upsert(ctx, older, fencedb.Key{"id": 9}, fencedb.Set{"v": "x"}, fencedb.Inserting(fencedb.Set{"mail": "m"}))
			},
		} {
			t.Run(fmt.Sprint(by, name), func(t *testing.T) {
				b.exec(`TRUNCATE app.two, fence.tombstone; INSERT INTO app.two VALUES (1, 'm')`)
				tx, err := b.pool.Begin(ctx)
				require.NoError(t, err)
				var v struct {
					ID   int
					Mail string
				}
				_, err = table.In(tx).Delete(ctx, newer, by, fencedb.Returning(&v))
				require.NoError(t, err)
				require.Equal(t, "m", v.Mail)
				refused := make(chan error, 1)
				go func() {
					_, err := revive(ctx)
					refused <- err
				}()
				b.waitUntilBlocked()
				require.NoError(t, tx.Commit(ctx))
				err = <-refused
				require.ErrorIs(t, err, fencedb.ErrStale)
				var e *fencedb.WriteError
				require.ErrorAs(t, err, &e)
				require.EqualValues(t, 34, e.Current)
				require.Equal(t, 0, query[int](b, `SELECT count(*) FROM app.two`))
			})
		}
	}
}

// Pruning takes what is old, in batches, and nothing younger than a lease may last.
func TestPrune(t *testing.T) {
	ctx := context.Background()
	b, table := newThings(t)
	lease := fencedb.Static("x", 34, "B")
	for a := 10; a < 15; a++ {
		_, err := table.Delete(ctx, lease, key(a), fencedb.WithRequestID(fmt.Sprint(a)))
		require.NoError(t, err)
	}
	b.exec(`UPDATE fence.tombstone SET deleted_at = deleted_at - interval '31 days' WHERE row_key ->> 'a' <> '10';
		UPDATE fence.request SET applied_at = applied_at - interval '31 days' WHERE id <> '10'`)
	prune := func(keep string) (tombstones, requests int) {
		require.NoError(t, b.pool.QueryRow(ctx, `SELECT tombstones, requests FROM fence.prune($1::text::interval, 3)`, keep).Scan(&tombstones, &requests))
		return tombstones, requests
	}
	for _, want := range []int{3, 1, 0} {
		tombstones, requests := prune("30 days")
		require.Equal(t, want, tombstones)
		require.Equal(t, want, requests)
	}
	require.Equal(t, "10", query[string](b, `SELECT row_key ->> 'a' FROM fence.tombstone`))
	_, err := b.pool.Exec(ctx, `SELECT fence.prune('7 days')`)
	require.ErrorContains(t, err, "longer than any lease")
}

// Writes take no fences from the source, and an upsert that is refused leaves the row's as it is. (C16 b, d)
func TestWritesConsumeNoFences(t *testing.T) {
	ctx := context.Background()
	b, table := newThings(t)
	const drawn = `SELECT last_value FROM fence.fence_seq`
	before := query[int64](b, drawn)
	for i := range 100 {
		_, err := table.Upsert(ctx, fencedb.Static("x", int64(100+2*i), "B"), key(10), fencedb.Set{"v": "B"})
		require.NoError(t, err)
		_, err = table.Upsert(ctx, fencedb.Static("x", 50, "A"), key(10), fencedb.Set{"v": "A"})
		require.ErrorIs(t, err, fencedb.ErrStale)
	}
	require.Equal(t, before, query[int64](b, drawn))
	require.EqualValues(t, 298, query[int64](b, `SELECT last_fence FROM app.things WHERE a = 10`))
	require.NoError(t, b.gate.Flush(ctx))
	require.EqualValues(t, 100, query[int64](b, `SELECT sum(count) FROM fence.rejection`))
}

// The contract of a batch. (C15)
func TestUpdateManyIsAllOrNothing(t *testing.T) {
	ctx := context.Background()
	b := newBed(t)
	table := b.table()
	b.exec(`UPDATE app.orders SET last_fence = 40 WHERE id = 2`)
	lease := fencedb.Static("x", 36, "A")
	batch := []fencedb.Row{}
	for _, id := range []int{1, 2, 3, 99} {
		batch = append(batch, fencedb.Row{Key: fencedb.Key{"id": id}, Set: fencedb.Set{"v": "A"}})
	}
	outcomes := func(results []fencedb.Result) []fencedb.Outcome {
		var list []fencedb.Outcome
		for _, r := range results {
			require.Equal(t, r.Outcome == fencedb.Applied || r.Outcome == fencedb.AlreadyApplied, r.Err == nil)
			list = append(list, r.Outcome)
		}
		return list
	}

	results, err := table.UpdateMany(ctx, lease, batch)
	require.ErrorIs(t, err, fencedb.ErrStale)
	require.ErrorIs(t, err, fencedb.ErrMissing)
	var many *fencedb.ManyError
	require.ErrorAs(t, err, &many)
	require.Equal(t, 4, many.Rows)
	require.Zero(t, many.Applied)
	require.Len(t, many.Refused, 2, "those that stood in the way")
	require.Equal(t, fencedb.Key{"id": 2}, many.Refused[0].Key)
	require.EqualValues(t, 40, many.Refused[0].Current)
	require.Equal(t, fencedb.Key{"id": 99}, many.Refused[1].Key)
	require.ErrorContains(t, err, `0 of 4 rows written`)
	require.Equal(t, []fencedb.Outcome{fencedb.Failed, fencedb.Stale, fencedb.Failed, fencedb.Missing}, outcomes(results))
	require.Equal(t, 3, query[int](b, `SELECT count(*) FROM app.orders WHERE v = 'first'`))
	require.Equal(t, `{"id": 2}`, query[string](b, `SELECT string_agg(row_key::text, ',') FROM fence.rejection`), "one rejection, for row 2")

	results, err = table.UpdateMany(ctx, lease, batch, fencedb.Partial())
	require.ErrorAs(t, err, &many)
	require.Equal(t, 2, many.Applied)
	require.Equal(t, []fencedb.Outcome{fencedb.Applied, fencedb.Stale, fencedb.Applied, fencedb.Missing}, outcomes(results))
	require.Equal(t, 2, query[int](b, `SELECT count(*) FROM app.orders WHERE v = 'A'`))

	// Repeated: what is there counts, and the rest is written.
	b.exec(`UPDATE app.orders SET last_fence = 0 WHERE id = 3`)
	results, err = table.UpdateMany(ctx, lease, []fencedb.Row{batch[2], batch[0]})
	require.NoError(t, err)
	require.Equal(t, []fencedb.Outcome{fencedb.Applied, fencedb.AlreadyApplied}, outcomes(results))

	// A trigger that drops one of them undoes all of it.
	b.exec(`CREATE FUNCTION app.drop_it() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$;
		CREATE TRIGGER drop_it BEFORE UPDATE ON app.orders FOR EACH ROW WHEN (OLD.id = 3) EXECUTE FUNCTION app.drop_it();
		UPDATE app.orders SET last_fence = 0 WHERE id = 1`)
	results, err = table.UpdateMany(ctx, fencedb.Static("x", 38, "A"), []fencedb.Row{batch[0], batch[2]})
	require.ErrorIs(t, err, fencedb.ErrSuppressed)
	require.Equal(t, []fencedb.Outcome{fencedb.Failed, fencedb.Suppressed}, outcomes(results))
	require.EqualValues(t, 0, query[int64](b, `SELECT last_fence FROM app.orders WHERE id = 1`))

	for name, bad := range map[string][]fencedb.Row{
		"have the same key":         {batch[0], batch[1], batch[0]},
		"all of them need the same": {batch[0], {Key: fencedb.Key{"id": 2}, Set: fencedb.Set{"last": 1}}},
		"NULL":                      {batch[0], {Key: fencedb.Key{"id": nil}, Set: fencedb.Set{"v": 1}}},
		"expression":                {batch[0], {Key: fencedb.Key{"id": 2}, Set: fencedb.Set{"v": fencedb.Expr("v")}}},
	} {
		_, err := table.UpdateMany(ctx, lease, bad)
		require.ErrorContains(t, err, name)
	}
	results, err = table.UpdateMany(ctx, lease, nil)
	require.NoError(t, err)
	require.Empty(t, results)
}

// Two batches with the same rows in opposite orders do not lock each other out.
func TestUpdateManyLocksInOrder(t *testing.T) {
	ctx := context.Background()
	b := newBed(t)
	b.exec(`INSERT INTO app.orders SELECT i, 'first' FROM generate_series(4, 300) i`)
	table := b.table()
	var up, down []fencedb.Row
	for id := 1; id <= 300; id++ {
		up = append(up, fencedb.Row{Key: fencedb.Key{"id": id}, Set: fencedb.Set{"v": "up"}})
		down = append(down, fencedb.Row{Key: fencedb.Key{"id": 301 - id}, Set: fencedb.Set{"v": "down"}})
	}
	var wait sync.WaitGroup
	for _, rows := range [][]fencedb.Row{up, down, up, down} {
		wait.Go(func() {
			for range 15 {
				if _, err := table.UpdateMany(ctx, fencedb.Static("x", 2, "A"), rows, fencedb.WithRule(fencedb.Term)); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wait.Wait()
}

// A write to a row that a concurrent transaction is moving to another partition is an error of the database's own, and its
// repeat finds out. (C14)
func TestWriteMeetsAPartitionMove(t *testing.T) {
	for _, fence := range []int64{32, 36} {
		t.Run(fmt.Sprint(fence), func(t *testing.T) {
			ctx := context.Background()
			b := newBed(t)
			b.exec(`CREATE TABLE app.parted (id int, region text, v text) PARTITION BY LIST (region);
				CREATE TABLE app.parted_a PARTITION OF app.parted FOR VALUES IN ('a'); CREATE TABLE app.parted_b PARTITION OF app.parted FOR VALUES IN ('b');
				INSERT INTO app.parted VALUES (1, 'a', 'first'); SELECT fence.protect('app.parted')`)
			_, err := b.gate.Table(ctx, "app.parted")
			require.ErrorContains(t, err, "say which columns do with KeyColumns")
			table, err := b.gate.Table(ctx, "app.parted", fencedb.KeyColumns("id"))
			require.NoError(t, err)

			tx, err := b.pool.Begin(ctx)
			require.NoError(t, err)
			_, err = table.In(tx).Update(ctx, fencedb.Static("x", 34, "B"), order1, fencedb.Set{"region": "b", "v": "B"})
			require.NoError(t, err)

			type answer struct {
				outcome fencedb.Outcome
				err     error
			}
			first, attempts := make(chan error, 1), 0
			done := make(chan answer, 1)
			go func() {
				outcome, err := fencedb.Retry(ctx, func(ctx context.Context) (fencedb.Outcome, error) {
					outcome, err := table.Update(ctx, fencedb.Static("x", fence, "A"), order1, fencedb.Set{"v": "A"})
					if attempts++; attempts == 1 {
						first <- err
						require.Equal(t, fencedb.Failed, outcome)
					}
					return outcome, err
				})
				done <- answer{outcome, err}
			}()
			b.waitUntilBlocked()
			require.NoError(t, tx.Commit(ctx))
			err = <-first
			require.ErrorContains(t, err, "40001")
			require.NotErrorIs(t, err, fencedb.ErrStale)
			a := <-done
			if fence < 34 {
				require.ErrorIs(t, a.err, fencedb.ErrStale)
				require.EqualValues(t, 1, query[int64](b, `SELECT sum(count)::bigint FROM fence.rejection`))
				require.Equal(t, "B", query[string](b, `SELECT v FROM app.parted`))
			} else {
				require.NoError(t, a.err)
				require.Equal(t, "A", query[string](b, `SELECT v FROM app.parted`))
			}
		})
	}
}

// What a policy hides, and what a trigger drops, is told apart from a refusal, in every form. (C23)
func TestFormsThatChangeNothing(t *testing.T) {
	ctx := context.Background()
	b, table := newThings(t)
	lease := b.acquire(b.client(leasedb.Config{}), "x")
	b.exec(`CREATE FUNCTION app.drop_it() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$;
		CREATE TRIGGER drop_it BEFORE UPDATE OR DELETE OR INSERT ON app.things FOR EACH ROW EXECUTE FUNCTION app.drop_it()`)
	for form, write := range forms {
		_, err := write(ctx, table, b.gate, lease, 10, "x")
		if form == "exec" { // of whose own conditions the gate knows nothing
			require.ErrorIs(t, err, fencedb.ErrUnmatched, form)
			continue
		}
		require.ErrorIs(t, err, fencedb.ErrSuppressed, form)
	}
	_, err := table.Insert(ctx, lease, row(99, nil))
	require.ErrorIs(t, err, fencedb.ErrSuppressed)
	b.exec(`DROP TRIGGER drop_it ON app.things`)

	role := "wg_" + b.cfg.Database
	b.exec(`CREATE ROLE ` + role + ` LOGIN; GRANT USAGE ON SCHEMA app, fence TO ` + role + `; GRANT SELECT, INSERT, UPDATE, DELETE ON app.things TO ` + role + `;
		GRANT SELECT ON fence.protected_table TO ` + role + `; GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA fence TO ` + role + `;
		ALTER TABLE app.things ENABLE ROW LEVEL SECURITY; CREATE POLICY visible ON app.things USING (a >= 20)`)
	t.Cleanup(func() { b.exec(`DROP OWNED BY ` + role + `; DROP ROLE ` + role) })
	pool := pgtest.Pool(t, b.cfg, func(c *pgxpool.Config) {
		c.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
			_, err := conn.Exec(ctx, `SET SESSION AUTHORIZATION `+role)
			return err
		}
	})
	gate := fencedb.New(pool, fencedb.Config{})
	t.Cleanup(gate.Close)
	asRole, err := gate.Table(ctx, "app.things")
	require.NoError(t, err)
	for form, write := range forms {
		if form == "upsert" {
			continue // which the policy refuses with an error of its own
		}
		_, err := write(ctx, asRole, gate, lease, 10, "x")
		require.ErrorIs(t, err, fencedb.ErrMissing, form)
	}
	_, err = forms["upsert"](ctx, asRole, gate, lease, 10, "x")
	require.ErrorContains(t, err, "42501")
	require.Equal(t, 0, query[int](b, `SELECT count(*) FROM fence.rejection`))
	require.Equal(t, 0, query[int](b, `SELECT count(*) FROM fence.tombstone`))
}

// Requests with the same id at once are one, whichever rule; here all of them wait for the row.
func TestConcurrentRequestsAreAppliedOnce(t *testing.T) {
	ctx := context.Background()
	b, _ := newThings(t)
	const writers = 4
	gate := b.gateOf(fencedb.New(pgtest.Pool(t, b.cfg, func(c *pgxpool.Config) { c.MaxConns = writers + 1 }), fencedb.Config{}))
	table, err := gate.Table(ctx, "app.things")
	require.NoError(t, err)
	session := b.session()
	_, err = session.Exec(ctx, `BEGIN; SELECT 1 FROM app.things WHERE a = 10 FOR UPDATE`)
	require.NoError(t, err)

	var wait sync.WaitGroup
	outcomes := make(chan fencedb.Outcome, writers)
	for range writers {
		wait.Go(func() {
			var n int
			outcome, err := table.Update(ctx, fencedb.Static("x", 34, "A"), key(10), fencedb.Set{"n": fencedb.Expr("n + 1")},
				fencedb.WithRule(fencedb.Term), fencedb.WithRequestID("one"), fencedb.Returning(&n, "n"))
			if err != nil || n != 1 {
				t.Error(n, err)
			}
			outcomes <- outcome
		})
	}
	b.await(fmt.Sprintf(`SELECT count(*) = %d FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'`, writers))
	_, err = session.Exec(ctx, `COMMIT`)
	require.NoError(t, err)
	wait.Wait()
	close(outcomes)
	counted := map[fencedb.Outcome]int{}
	for o := range outcomes {
		counted[o]++
	}
	require.Equal(t, map[fencedb.Outcome]int{fencedb.Applied: 1, fencedb.AlreadyApplied: writers - 1}, counted)
	require.Equal(t, 1, query[int](b, `SELECT n FROM app.things WHERE a = 10`))
}

// Nor are two of an insert whose key the database makes, where no row would tell.
func TestConcurrentInsertsOfOneRequest(t *testing.T) {
	ctx := context.Background()
	b := newBed(t)
	b.exec(`CREATE TABLE app.made (id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY, v text); SELECT fence.protect('app.made')`)
	table, err := b.gate.Table(ctx, "app.made")
	require.NoError(t, err)
	insert := func(table *fencedb.Table) (id int, outcome fencedb.Outcome, err error) {
		outcome, err = table.Insert(ctx, fencedb.Static("x", 34, "A"), fencedb.Set{"v": "A"}, fencedb.WithRequestID("r"), fencedb.Returning(&id, "id"))
		return id, outcome, err
	}
	tx, err := b.pool.Begin(ctx)
	require.NoError(t, err)
	first, _, err := insert(table.In(tx))
	require.NoError(t, err)
	done := make(chan struct{})
	go func() {
		defer close(done)
		second, outcome, err := insert(table)
		if err != nil || outcome != fencedb.AlreadyApplied || second != first {
			t.Error(outcome, second, err)
		}
	}()
	b.waitUntilBlocked()
	require.NoError(t, tx.Commit(ctx))
	<-done
	require.Equal(t, 1, query[int](b, `SELECT count(*) FROM app.made`))
}

// A tombstone's fence does not fall either: not when a row that was put back around the gate is deleted by an older holder.
func TestTombstonesNeverFall(t *testing.T) {
	ctx := context.Background()
	b := newBed(t)
	table := b.table()
	_, err := table.Delete(ctx, fencedb.Static("x", 34, "B"), order1)
	require.NoError(t, err)
	b.exec(`INSERT INTO app.orders VALUES (1, 'around the gate')`)
	_, err = table.Delete(ctx, fencedb.Static("x", 32, "A"), order1)
	require.NoError(t, err, "the row knew nothing of a newer fence")
	require.EqualValues(t, 34, query[int64](b, `SELECT fence FROM fence.tombstone`))
	_, err = table.Insert(ctx, fencedb.Static("x", 33, "A"), fencedb.Set{"id": 1, "v": "A"})
	require.ErrorIs(t, err, fencedb.ErrStale)
}

// Where the default isolation is another than READ COMMITTED, what needs that gets it, on the pool; in a caller's
// transaction it is refused for what it is.
func TestFormsUnderAnotherDefaultIsolation(t *testing.T) {
	ctx := context.Background()
	b, _ := newThings(t)
	pool := pgtest.Pool(t, b.cfg, func(c *pgxpool.Config) {
		c.ConnConfig.RuntimeParams["default_transaction_isolation"] = "serializable"
	})
	gate := fencedb.New(pool, fencedb.Config{})
	t.Cleanup(gate.Close)
	table, err := gate.Table(ctx, "app.things")
	require.NoError(t, err)
	lease := b.acquire(b.client(leasedb.Config{}), "x")
	a := 10
	for form, write := range forms {
		for _, strength := range []fencedb.Strength{fencedb.Fenced, fencedb.Live} {
			_, err := write(ctx, table, gate, lease, a, "x", fencedb.WithStrength(strength))
			require.NoError(t, err, form)
			a++
		}
	}
	_, err = table.Insert(ctx, lease, row(99, nil))
	require.NoError(t, err)
	err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		_, err := table.In(tx).Delete(ctx, lease, key(29))
		return err
	})
	require.ErrorContains(t, err, "READ COMMITTED")
	require.NotErrorIs(t, err, fencedb.ErrStale)
	require.Equal(t, 0, query[int](b, `SELECT count(*) FROM fence.rejection`))

	// A refusal is told, and recorded, for what it is as well.
	over := factsOf(lease)
	b.age("x", time.Hour)
	for form, write := range forms {
		_, err := write(ctx, table, gate, over, a, "x", fencedb.WithStrength(fencedb.Live))
		require.ErrorIs(t, err, fencedb.ErrLeaseLost, form)
		a++
	}
	require.NoError(t, gate.Flush(ctx))
	require.Equal(t, len(forms), query[int](b, `SELECT count(*) FROM fence.rejection WHERE reason = 'expired'`))
}

// The transaction of InTx is READ COMMITTED whatever the default is, and has the timeouts of the lease, unless there are shorter ones.
func TestInTxSettings(t *testing.T) {
	ctx := context.Background()
	b, _ := newThings(t)
	pool := pgtest.Pool(t, b.cfg, func(c *pgxpool.Config) {
		c.ConnConfig.RuntimeParams["default_transaction_isolation"] = "serializable"
		c.ConnConfig.RuntimeParams["statement_timeout"] = "1234ms"
		c.ConnConfig.RuntimeParams["idle_in_transaction_session_timeout"] = "2h"
	})
	gate := b.gateOf(fencedb.New(pool, fencedb.Config{}))
	lease := b.acquire(b.client(leasedb.Config{TTL: time.Hour}), "x")
	require.NoError(t, gate.InTx(ctx, lease, func(ctx context.Context, tx pgx.Tx) error {
		var isolation, statement, idle string
		var shorter bool
		err := tx.QueryRow(ctx, `SELECT current_setting('transaction_isolation'), current_setting('statement_timeout'),
			current_setting('idle_in_transaction_session_timeout'), current_setting('idle_in_transaction_session_timeout')::interval <= '1h'`).Scan(&isolation, &statement, &idle, &shorter)
		require.Equal(t, "read committed", isolation)
		require.Equal(t, "1234ms", statement)
		require.True(t, shorter, idle)
		return err
	}))
}

// A zombie that waits for the lawful holder's transaction does not stand in its way. (No deadlock: everybody locks the row
// before its key.)
func TestZombieDoesNotDeadlockTheHolder(t *testing.T) {
	for _, form := range []string{"upsert", "delete"} {
		t.Run(form, func(t *testing.T) {
			ctx := context.Background()
			b, table := newThings(t)
			b.exec(`ALTER DATABASE ` + b.cfg.Database + ` SET deadlock_timeout = '10ms'`)
			holder, zombie := fencedb.Doubled(fencedb.Static("x", 34, "B")), fencedb.Doubled(fencedb.Static("x", 32, "A"))
			tx, err := pgtest.Pool(t, b.cfg).Begin(ctx)
			require.NoError(t, err)
			_, err = table.In(tx).Update(ctx, holder, key(10), fencedb.Set{"v": "B"}, fencedb.WithRule(fencedb.Term))
			require.NoError(t, err)
			refused := make(chan error, 1)
			go func() {
				_, err := forms[form](ctx, table, b.gate, zombie, 10, "A")
				refused <- err
			}()
			b.waitUntilBlocked()
			_, err = table.In(tx).Upsert(ctx, holder, key(10), fencedb.Set{"v": "B"}, fencedb.WithRule(fencedb.Term))
			require.NoError(t, err)
			_, err = table.In(tx).Delete(ctx, holder, key(10), fencedb.WithRule(fencedb.Term))
			require.NoError(t, err)
			require.NoError(t, tx.Commit(ctx))
			require.ErrorIs(t, <-refused, fencedb.ErrStale)
		})
	}
}

// A statement with effects of its own is sent once, whatever it changed; what a trigger drops of a partial batch does not
// have the rest written twice.
func TestNothingIsRunTwice(t *testing.T) {
	ctx := context.Background()
	b := newBed(t)
	table := b.table()
	b.exec(`CREATE TABLE app.log (id int); CREATE FUNCTION app.note() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
			IF OLD.id = 1 THEN RETURN NULL; END IF; INSERT INTO app.log VALUES (OLD.id); RETURN NEW; END $$;
		CREATE TRIGGER note BEFORE UPDATE ON app.orders FOR EACH ROW EXECUTE FUNCTION app.note()`)
	_, err := b.gate.Exec(ctx, fencedb.Static("x", 34, "A"), `WITH l AS (INSERT INTO app.log VALUES (9))
		UPDATE app.orders SET v = 'x', last_fence = @fence WHERE id = 2 AND last_fence < @fence AND v = 'nope'`, nil, fencedb.Target(table, fencedb.Key{"id": 2}))
	require.ErrorIs(t, err, fencedb.ErrUnmatched)
	require.Equal(t, 1, query[int](b, `SELECT count(*) FROM app.log`))
	b.exec(`DELETE FROM app.log; UPDATE app.orders SET last_fence = 40 WHERE id = 3; DELETE FROM app.log`)
	for _, rule := range bothRules {
		b.exec(`DELETE FROM app.log; DELETE FROM fence.rejection`)
		var batch []fencedb.Row
		for id := 1; id <= 3; id++ {
			batch = append(batch, fencedb.Row{Key: fencedb.Key{"id": id}, Set: fencedb.Set{"v": string(rule)}})
		}
		fence := map[fencedb.Rule]int64{fencedb.Once: 36, fencedb.Term: 38}[rule]
		results, err := table.UpdateMany(ctx, fencedb.Static("x", fence, "A"), batch, fencedb.WithRule(rule), fencedb.Partial())
		require.ErrorIs(t, err, fencedb.ErrSuppressed)
		require.Equal(t, []fencedb.Outcome{fencedb.Suppressed, fencedb.Applied, fencedb.Stale}, []fencedb.Outcome{results[0].Outcome, results[1].Outcome, results[2].Outcome})
		require.Equal(t, 1, query[int](b, `SELECT count(*) FROM app.log`))
		require.NoError(t, b.gate.Flush(ctx))
		require.EqualValues(t, 1, query[int64](b, `SELECT sum(count)::bigint FROM fence.rejection`))
	}
}

// A repeat of what was applied is no refusal, although the lease has ended since. (C03)
func TestRepeatAfterTheLeaseHasEnded(t *testing.T) {
	ctx := context.Background()
	b, table := newThings(t)
	lease := b.acquire(b.client(leasedb.Config{ManualRenewal: true}), "x")
	for i, form := range []string{"update", "upsert", "delete", "many", "exec", "seal"} {
		outcome, err := forms[form](ctx, table, b.gate, factsOf(lease), 10+i, "x", fencedb.WithStrength(fencedb.Live))
		require.NoError(t, err)
		require.Equal(t, fencedb.Applied, outcome)
	}
	b.age("x", time.Hour)
	for i, form := range []string{"update", "upsert", "delete", "many", "exec", "seal"} {
		outcome, err := forms[form](ctx, table, b.gate, factsOf(lease), 10+i, "x", fencedb.WithStrength(fencedb.Live))
		require.NoError(t, err, form)
		require.Equal(t, fencedb.AlreadyApplied, outcome, form)
	}
	// Of a batch, what the lease alone stands against is told from what the rows do.
	b.exec(`UPDATE app.things SET last_fence = 99 WHERE a = 20`)
	results, err := table.UpdateMany(ctx, factsOf(lease), []fencedb.Row{
		{Key: key(20), Set: fencedb.Set{"v": "x"}}, {Key: key(21), Set: fencedb.Set{"v": "x"}}, {Key: key(99), Set: fencedb.Set{"v": "x"}},
	}, fencedb.WithStrength(fencedb.Live), fencedb.Partial())
	require.Error(t, err)
	require.ErrorIs(t, results[0].Err, fencedb.ErrStale)
	require.ErrorIs(t, results[1].Err, fencedb.ErrLeaseLost)
	require.ErrorIs(t, results[2].Err, fencedb.ErrLeaseLost)
	require.NoError(t, b.gate.Flush(ctx))
	require.EqualValues(t, 2, query[int64](b, `SELECT sum(count)::bigint FROM fence.rejection`))
}

// What a request is repeated with has to be the same request; what it wants to read it gets, from the record or the row.
func TestRepeatedRequestsAnswerTruly(t *testing.T) {
	ctx := context.Background()
	b := newBed(t)
	b.exec(`CREATE DOMAIN app.filled AS text NOT NULL; CREATE TABLE app.req (id int PRIMARY KEY, v text, f app.filled DEFAULT 'f', j jsonb); SELECT fence.protect('app.req', 'term')`)
	b.exec(`INSERT INTO app.req VALUES (1, 'first', 'f', '{"a": 1}')`)
	table, err := b.gate.Table(ctx, "app.req")
	require.NoError(t, err)
	lease := fencedb.Static("x", 34, "A")
	var v, f string
	update := func(options ...fencedb.WriteOption) (fencedb.Outcome, error) {
		return table.Update(ctx, lease, order1, fencedb.Set{"v": "second"}, append(options, fencedb.WithRequestID("r"))...)
	}
	outcome, err := update(fencedb.Returning(&v, "v"))
	require.NoError(t, err)
	require.Equal(t, fencedb.Applied, outcome)
	b.exec(`UPDATE app.req SET v = 'third', f = 'new'`)
	outcome, err = update(fencedb.Returning(&v, "v"))
	require.NoError(t, err)
	require.Equal(t, fencedb.AlreadyApplied, outcome)
	require.Equal(t, "second", v, "as the first answered")
	outcome, err = update(fencedb.Returning(&f, "f"))
	require.NoError(t, err)
	require.Equal(t, fencedb.AlreadyApplied, outcome)
	require.Equal(t, "new", f, "which the first did not return: it is the row's")
	_, err = table.Delete(ctx, lease, order1, fencedb.WithRequestID("r"))
	require.ErrorIs(t, err, fencedb.ErrRequest)
	batch := []fencedb.Row{{Key: order1, Set: fencedb.Set{"v": "a"}}, {Key: fencedb.Key{"id": 2}, Set: fencedb.Set{"v": "b"}}}
	b.exec(`INSERT INTO app.req VALUES (2, 'first')`)
	_, err = table.UpdateMany(ctx, lease, batch, fencedb.WithRequestID("m"))
	require.NoError(t, err)
	results, err := table.UpdateMany(ctx, lease, []fencedb.Row{batch[1], batch[0]}, fencedb.WithRequestID("m"))
	require.NoError(t, err)
	require.Equal(t, fencedb.AlreadyApplied, results[0].Outcome)
	// A column of the user's may have any name.
	b.exec(`ALTER TABLE app.req ADD n int, ADD found int`)
	table, err = b.gate.Table(ctx, "app.req")
	require.NoError(t, err)
	_, err = table.UpdateMany(ctx, lease, []fencedb.Row{{Key: order1, Set: fencedb.Set{"n": 1, "found": 2}}}, fencedb.Where("n IS NULL AND found IS NULL"))
	require.NoError(t, err)
}

// Calls that cannot be meant are told so, and send nothing.
func TestInvalidWrites(t *testing.T) {
	ctx := context.Background()
	b, table := newThings(t)
	lease := b.acquire(b.client(leasedb.Config{}), "x")
	set := fencedb.Set{"v": "x"}
	for want, f := range map[string]func() (fencedb.Outcome, error){
		"has no use for option Partial":   func() (fencedb.Outcome, error) { return table.Update(ctx, lease, key(10), set, fencedb.Partial()) },
		"has no use for option Inserting": func() (fencedb.Outcome, error) { return table.Update(ctx, lease, key(10), set, fencedb.Inserting(set)) },
		"has no use for option Where":     func() (fencedb.Outcome, error) { return table.Insert(ctx, lease, row(1, nil), fencedb.Where("true")) },
		"is generated always":             func() (fencedb.Outcome, error) { return table.Update(ctx, lease, key(10), fencedb.Set{"doubled": 1}) },
		"has no column \"nope\"":          func() (fencedb.Outcome, error) { return table.Insert(ctx, lease, row(1, fencedb.Set{"nope": 1})) },
		"nothing to set":                  func() (fencedb.Outcome, error) { return table.Update(ctx, lease, key(10), nil) },
		"is the fence":                    func() (fencedb.Outcome, error) { return table.Insert(ctx, lease, row(1, fencedb.Set{"last_fence": 9})) },
		"names the row":                   func() (fencedb.Outcome, error) { return table.Upsert(ctx, lease, key(10), fencedb.Set{"a": 9}) },
		"say with Inserting": func() (fencedb.Outcome, error) {
			return table.Upsert(ctx, lease, key(10), fencedb.Set{"n": fencedb.Expr("t.n + 1")})
		},
		"argument @x is not used": func() (fencedb.Outcome, error) {
			return table.Update(ctx, lease, key(10), set, fencedb.Where("true", fencedb.Args{"x": 1}))
		},
		"argument y found in sql query but not present": func() (fencedb.Outcome, error) {
			return table.Update(ctx, lease, key(10), set, fencedb.Where("n = @y"))
		},
		"argument @fence is the gate's own": func() (fencedb.Outcome, error) {
			return table.Update(ctx, lease, key(10), set, fencedb.Where("n = @fence", fencedb.Args{"fence": 99}))
		},
		"request id of 0 bytes": func() (fencedb.Outcome, error) {
			return table.Update(ctx, lease, key(10), set, fencedb.WithRequestID(""))
		},
		"request id of 256 bytes": func() (fencedb.Outcome, error) {
			return table.Update(ctx, lease, key(10), set, fencedb.WithRequestID(string(make([]byte, 256))))
		},
		"does not use @fence": func() (fencedb.Outcome, error) {
			return b.gate.Exec(ctx, lease, `UPDATE app.things SET v = '@fence' -- @fence`, nil)
		},
		"Gate.InTx has pinned": func() (fencedb.Outcome, error) {
			return table.Update(ctx, lease, key(10), set, fencedb.WithStrength(fencedb.InTx))
		},
		"no column for field": func() (fencedb.Outcome, error) {
			var x struct{ Nope int }
			return table.Update(ctx, lease, key(10), set, fencedb.Returning(&x))
		},
		"say which column": func() (fencedb.Outcome, error) {
			var x time.Time
			return table.Update(ctx, lease, key(10), set, fencedb.Returning(&x))
		},
		"without Returning": func() (fencedb.Outcome, error) { return b.gate.Query(ctx, lease, `SELECT @fence`, nil, nil) },
		"use Doubled":       func() (fencedb.Outcome, error) { return table.Seal(ctx, fencedb.Static("x", 8, ""), key(10)) },
		"given one": func() (fencedb.Outcome, error) {
			b.exec(`CREATE TABLE app.made (id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY, v text); SELECT fence.protect('app.made')`)
			made, err := b.gate.Table(ctx, "app.made")
			require.NoError(t, err)
			return made.Upsert(ctx, lease, order1, set)
		},
	} {
		outcome, err := f()
		require.Equal(t, fencedb.Failed, outcome, want)
		require.ErrorContains(t, err, want)
		require.NotErrorIs(t, err, fencedb.ErrSchema)
	}
	// What the database has to say of the user's SQL is not called a fault of schema fence, nor of the connection.
	_, err := table.Update(ctx, lease, key(10), set, fencedb.Where("v < 1"))
	require.ErrorContains(t, err, "42883")
	require.NotErrorIs(t, err, fencedb.ErrSchema)
	calls := 0
	_, err = fencedb.Retry(ctx, func(ctx context.Context) (fencedb.Outcome, error) {
		calls++
		return table.Update(ctx, lease, key(10), fencedb.Set{"n": int64(1) << 40})
	})
	require.NotErrorIs(t, err, fencedb.ErrUnknown)
	require.Equal(t, 1, calls)
	outcome, err := b.gate.Exec(ctx, lease, `WITH w AS (UPDATE app.things SET last_fence = @fence WHERE a = 10 AND last_fence > @fence RETURNING 1) SELECT count(*) FROM w`, nil)
	require.Equal(t, fencedb.Unknown, outcome)
	require.ErrorContains(t, err, "make the INSERT, UPDATE, DELETE or MERGE the outer statement")
	other := fencedb.New(b.pool, fencedb.Config{})
	t.Cleanup(other.Close)
	_, err = other.Exec(ctx, lease, `UPDATE app.things SET last_fence = @fence WHERE last_fence < @fence`, nil, fencedb.Target(table, key(10)))
	require.ErrorContains(t, err, "another gate")
	require.Equal(t, 20, query[int](b, `SELECT count(*) FROM app.things WHERE last_fence = 0 AND v = 'old'`))
}

// A row that came back in a form that its destination does not take was written all the same, and the caller is told so.
func TestAnswerThatCannotBeRead(t *testing.T) {
	ctx := context.Background()
	b, table := newThings(t)
	var n int
	outcome, err := table.Update(ctx, fencedb.Static("x", 34, "A"), key(10), fencedb.Set{"v": "text"}, fencedb.Returning(&n, "v"))
	require.Equal(t, fencedb.Applied, outcome)
	require.ErrorContains(t, err, "applied, and yet")
	require.Equal(t, "text", query[string](b, `SELECT v FROM app.things WHERE a = 10`))
	// A constraint that is checked at the end is not hidden behind it.
	b.exec(`CREATE TABLE app.parent (id int PRIMARY KEY); CREATE TABLE app.child (id int PRIMARY KEY, parent int REFERENCES app.parent DEFERRABLE INITIALLY DEFERRED);
		SELECT fence.protect('app.child')`)
	b.exec(`INSERT INTO app.child VALUES (1)`)
	child, err := b.gate.Table(ctx, "app.child")
	require.NoError(t, err)
	var text time.Time
	outcome, err = child.Update(ctx, fencedb.Static("x", 34, "A"), order1, fencedb.Set{"parent": 7}, fencedb.Returning(&text, "parent"))
	require.Equal(t, fencedb.Failed, outcome)
	require.ErrorContains(t, err, "23503")
}

// counter is a pgx tracer that counts what is sent, of statements that are sent together the first.
type counter struct{ sent []string }

func (c *counter) TraceQueryStart(ctx context.Context, _ *pgx.Conn, q pgx.TraceQueryStartData) context.Context {
	c.sent = append(c.sent, q.SQL)
	return ctx
}
func (*counter) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}
func (c *counter) TraceBatchStart(ctx context.Context, _ *pgx.Conn, b pgx.TraceBatchStartData) context.Context {
	c.sent = append(c.sent, b.Batch.QueuedQueries[0].SQL)
	return ctx
}
func (*counter) TraceBatchQuery(context.Context, *pgx.Conn, pgx.TraceBatchQueryData) {}
func (*counter) TraceBatchEnd(context.Context, *pgx.Conn, pgx.TraceBatchEndData)     {}

// The table in docs/writes.md: what each kind of write sends.
func TestWhatWritesCost(t *testing.T) {
	ctx := context.Background()
	b, _ := newThings(t)
	count := &counter{}
	pool := pgtest.Pool(t, b.cfg, func(c *pgxpool.Config) { c.ConnConfig.Tracer = count; c.MaxConns = 1 })
	gate := b.gateOf(fencedb.New(pool, fencedb.Config{}))
	table, err := gate.Table(ctx, "app.things")
	require.NoError(t, err)
	lease := b.acquire(b.client(leasedb.Config{}), "x")
	sent := func(f func() error) int {
		t.Helper()
		count.sent = nil
		require.NoError(t, f())
		return len(count.sent)
	}
	a := 10
	for form, write := range forms {
		for _, strength := range []fencedb.Strength{fencedb.Fenced, fencedb.Live} {
			want := 1
			switch {
			case form == "many":
				want = 3
			case form == "exec" && strength == fencedb.Live:
				want = 4
			}
			require.Equal(t, want, sent(func() error {
				_, err := write(ctx, table, gate, lease, a, "x", fencedb.WithStrength(strength))
				return err
			}), "%s %s: %s", form, strength, count.sent)
			a++
		}
	}
	require.Equal(t, 1, sent(func() error { _, err := table.Insert(ctx, lease, row(99, nil)); return err }))
	require.Equal(t, 2, sent(func() error { _, err := table.Insert(ctx, lease, row(99, nil)); return err }), "it asks why")
	require.Equal(t, 2, sent(func() error {
		return gate.InTx(ctx, lease, func(context.Context, pgx.Tx) error { return nil })
	}), "its beginning and the pin go together")
}
