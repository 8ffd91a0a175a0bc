package integration

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/lib/pq"
	"github.com/stretchr/testify/require"

	"github.com/writegate/writegate/fencedb"
	"github.com/writegate/writegate/internal/pgtest"
	"github.com/writegate/writegate/leasedb"
)

// way is a way of reaching the database that a gate supports.
type way struct {
	name string
	open func(b *bed) *fencedb.Gate
	sql  bool
}

func pgxWay(mode pgx.QueryExecMode) way {
	return way{name: "pgx " + mode.String(), open: func(b *bed) *fencedb.Gate {
		pool := pgtest.Pool(b.t, b.cfg, func(c *pgxpool.Config) { c.ConnConfig.DefaultQueryExecMode = mode })
		return b.gateOf(fencedb.New(pool, fencedb.Config{}))
	}}
}

func (b *bed) gateOf(g *fencedb.Gate) *fencedb.Gate {
	b.t.Cleanup(g.Close)
	return g
}

func stdlibWay(mode pgx.QueryExecMode) way {
	return way{name: "database/sql pgx " + mode.String(), sql: true, open: func(b *bed) *fencedb.Gate {
		cfg := b.cfg.Copy()
		cfg.DefaultQueryExecMode = mode
		return b.gateOf(fencedb.NewSQL(b.sqlDB(stdlib.OpenDB(*cfg)), fencedb.Config{AuditDB: b.sqlDB(stdlib.OpenDB(*cfg))}))
	}}
}

func (b *bed) sqlDB(db *sql.DB) *sql.DB {
	b.t.Cleanup(func() { _ = db.Close() })
	return db
}

func (b *bed) openPQ() *sql.DB {
	connector, err := pq.NewConnector(pgtest.Shared(b.t).URL(b.cfg.Database))
	require.NoError(b.t, err)
	return b.sqlDB(sql.OpenDB(connector))
}

var ways = []way{
	pgxWay(pgx.QueryExecModeCacheStatement), pgxWay(pgx.QueryExecModeCacheDescribe), pgxWay(pgx.QueryExecModeDescribeExec),
	pgxWay(pgx.QueryExecModeExec), pgxWay(pgx.QueryExecModeSimpleProtocol),
	stdlibWay(pgx.QueryExecModeCacheStatement), stdlibWay(pgx.QueryExecModeExec), stdlibWay(pgx.QueryExecModeSimpleProtocol),
	{name: "database/sql lib/pq", sql: true, open: func(b *bed) *fencedb.Gate {
		return b.gateOf(fencedb.NewSQL(b.openPQ(), fencedb.Config{AuditDB: b.openPQ()}))
	}},
}

const thingsSQL = `
	CREATE TYPE app.mood AS ENUM ('calm', 'cross');
	CREATE TABLE app.things (
		a int, "b ""quoted"" Ü" text,
		v text, n int NOT NULL DEFAULT 0, j jsonb, u uuid, at timestamptz, list int[], words text[], mood app.mood, moods app.mood[],
		amount numeric(20,4), bytes bytea, "Odd 'Column'" text, doubled int GENERATED ALWAYS AS (n * 2) STORED,
		short varchar(3), id bigint GENERATED ALWAYS AS IDENTITY,
		PRIMARY KEY (a, "b ""quoted"" Ü"));
	SELECT fence.protect('app.things')`

const oddKey = `b "quoted" Ü`

// thing is what a test reads back; the names of its fields meet the columns' in other spellings.
type thing struct {
	A       int
	V       *string
	N       int
	Doubled int
	Fence   int64    `db:"last_fence"`
	secret  int      //nolint:unused // unexported fields are nobody's column
	Skipped chan int `db:"-"`
}

// op is a write that a trial makes, with its options.
type op = func(ctx context.Context, table *fencedb.Table, options ...fencedb.WriteOption) (fencedb.Outcome, error)

// trial is one combination under test.
type trial struct {
	*bed
	gate     *fencedb.Gate
	way      way
	rule     fencedb.Rule
	strength fencedb.Strength
}

// write runs one write with the trial's rule and strength, in a pinned transaction if that is the strength.
func (tr *trial) write(lease fencedb.Lease, f op) (fencedb.Outcome, error) {
	tr.t.Helper()
	ctx := context.Background()
	table, err := tr.gate.Table(ctx, "app.things")
	require.NoError(tr.t, err)
	options := []fencedb.WriteOption{fencedb.WithRule(tr.rule), fencedb.WithStrength(tr.strength)}
	if tr.strength != fencedb.InTx {
		return f(ctx, table, options...)
	}
	var outcome fencedb.Outcome
	var writeErr error
	if tr.way.sql {
		err = tr.gate.InSQLTx(ctx, lease, func(ctx context.Context, tx *sql.Tx) error {
			outcome, writeErr = f(ctx, table.InSQL(tx), options...)
			return writeErr
		})
	} else {
		err = tr.gate.InTx(ctx, lease, func(ctx context.Context, tx pgx.Tx) error {
			outcome, writeErr = f(ctx, table.In(tx), options...)
			return writeErr
		})
	}
	if writeErr == nil && err != nil {
		var e *fencedb.WriteError
		require.ErrorAs(tr.t, err, &e)
		return e.Outcome, err
	}
	require.Equal(tr.t, writeErr, err, "the work's error comes back as it is")
	return outcome, err
}

// want makes a write that ends with the given outcome, and returns its error.
func (tr *trial) want(want fencedb.Outcome, lease fencedb.Lease, f op) error {
	tr.t.Helper()
	got, err := tr.write(lease, f)
	require.Equal(tr.t, want, got, "%v", err)
	if want == fencedb.Applied || want == fencedb.AlreadyApplied {
		require.NoError(tr.t, err)
	} else {
		require.Error(tr.t, err)
	}
	return err
}

func key(a int) fencedb.Key { return fencedb.Key{"a": a, oddKey: `it's "odd" \ Ü`} }

func row(a int, more fencedb.Set) fencedb.Set {
	set := fencedb.Set{}
	for c, v := range key(a) {
		set[c] = v
	}
	for c, v := range more {
		set[c] = v
	}
	return set
}

// forms are all kinds of write, each of one row, on rows that are there with n = 0 (and, for an insert, on one that is not).
var forms = map[string]func(ctx context.Context, table *fencedb.Table, gate *fencedb.Gate, lease fencedb.Lease, a int, v string, options ...fencedb.WriteOption) (fencedb.Outcome, error){
	"update": func(ctx context.Context, table *fencedb.Table, _ *fencedb.Gate, lease fencedb.Lease, a int, v string, options ...fencedb.WriteOption) (fencedb.Outcome, error) {
		return table.Update(ctx, lease, key(a), fencedb.Set{"v": v}, options...)
	},
	"upsert": func(ctx context.Context, table *fencedb.Table, _ *fencedb.Gate, lease fencedb.Lease, a int, v string, options ...fencedb.WriteOption) (fencedb.Outcome, error) {
		return table.Upsert(ctx, lease, key(a), fencedb.Set{"v": v}, options...)
	},
	"delete": func(ctx context.Context, table *fencedb.Table, _ *fencedb.Gate, lease fencedb.Lease, a int, _ string, options ...fencedb.WriteOption) (fencedb.Outcome, error) {
		return table.Delete(ctx, lease, key(a), options...)
	},
	"many": func(ctx context.Context, table *fencedb.Table, _ *fencedb.Gate, lease fencedb.Lease, a int, v string, options ...fencedb.WriteOption) (fencedb.Outcome, error) {
		results, err := table.UpdateMany(ctx, lease, []fencedb.Row{{Key: key(a), Set: fencedb.Set{"v": v}}}, options...)
		return results[0].Outcome, err
	},
	"exec": func(ctx context.Context, table *fencedb.Table, gate *fencedb.Gate, lease fencedb.Lease, a int, v string, options ...fencedb.WriteOption) (fencedb.Outcome, error) {
		return gate.Exec(ctx, lease, `UPDATE app.things SET v = @v, last_fence = @fence WHERE a = @a AND last_fence < @fence`,
			fencedb.Args{"v": v, "a": a}, append(options, fencedb.Target(table, key(a)))...)
	},
	"seal": func(ctx context.Context, table *fencedb.Table, _ *fencedb.Gate, lease fencedb.Lease, a int, _ string, options ...fencedb.WriteOption) (fencedb.Outcome, error) {
		return table.Seal(ctx, lease, key(a), options...)
	},
}

// One suite for every way to the database, strength and rule.
func TestGateConformance(t *testing.T) {
	for _, w := range ways {
		t.Run(w.name, func(t *testing.T) { conformInEveryWay(t, w, "") })
	}
}

// And the same where a guard looks on, which lets all that is the gate's pass.
func TestGateConformanceUnderAGuard(t *testing.T) {
	for _, w := range []way{ways[0], ways[4], ways[len(ways)-1]} {
		t.Run(w.name, func(t *testing.T) {
			conformInEveryWay(t, w, `SELECT fence.protect('app.things', guard => 'enforce', unfenced => 'allow')`)
		})
	}
}

func conformInEveryWay(t *testing.T, w way, further string) {
	t.Helper()
	b := newBed(t)
	b.exec(thingsSQL + "; " + further)
	gate := w.open(b)
	for _, strength := range []fencedb.Strength{fencedb.Fenced, fencedb.Live, fencedb.InTx} {
		for _, rule := range bothRules {
			t.Run(fmt.Sprintf("%s/%s", strength, rule), func(t *testing.T) {
				b.t = t
				b.exec(`DELETE FROM app.things; DELETE FROM fence.rejection; DELETE FROM fence.tombstone; DELETE FROM fence.request`)
				conform(&trial{b, gate, w, rule, strength})
			})
		}
	}
}

func conform(tr *trial) {
	t, ctx := tr.t, context.Background()
	clients := map[string]*leasedb.Client{}
	for _, holder := range []string{"A", "B"} {
		client, err := leasedb.New(ctx, tr.pool, leasedb.Config{TTL: time.Minute, Holder: holder, ManualRenewal: true})
		require.NoError(t, err)
		defer func() { _ = client.Close(ctx) }()
		clients[holder] = client
	}
	name := "x " + t.Name()
	held := tr.acquire(clients["A"], name)
	a := factsOf(held)
	once := tr.rule == fencedb.Once

	// A row with every type of value, read back as it is.
	at := time.Date(2024, 3, 10, 2, 30, 0, 123456000, time.FixedZone("odd", 5400))
	all := row(1, fencedb.Set{
		"v": "it's \\ \"v\"", "n": 21, "j": map[string]any{"k": []int{1, 2}}, "u": [16]byte{15: 7}, "at": at, "list": []int32{3, 4},
		"words": []string{`a "b"`, "c,d", ""}, "mood": "cross", "moods": []string{"calm", "cross"}, "amount": "12345678901234.5000",
		"bytes": []byte{0, 1, '\\', 255}, "Odd 'Column'": nil, "short": "abc",
	})
	var got thing
	insert := func(set fencedb.Set, more ...fencedb.WriteOption) op {
		return func(ctx context.Context, table *fencedb.Table, options ...fencedb.WriteOption) (fencedb.Outcome, error) {
			return table.Insert(ctx, a, set, append(options, more...)...)
		}
	}
	tr.ok(fencedb.Applied, a, insert(all, fencedb.Returning(&got)))
	require.Equal(t, 42, got.Doubled)
	require.Equal(t, a.Fence(), got.Fence)
	require.Equal(t, `it's \ "v"`, *got.V)
	const whole = `SELECT format('%s|%s|%s|%s|%s|%s|%s|%s|%s|%s|%s', a, n, j, u, at AT TIME ZONE 'UTC', list, words, mood, moods, amount, bytes) || coalesce("Odd 'Column'", '|NULL') FROM app.things WHERE a = 1`
	require.Equal(t, `1|21|{"k": [1, 2]}|00000000-0000-0000-0000-000000000007|2024-03-10 01:00:00.123456|{3,4}|{"a \"b\"","c,d",""}|cross|{calm,cross}|12345678901234.5000|\x00015cff|NULL`,
		query[string](tr.bed, whole))
	// Again: told apart from a row that somebody else put there only where that is certain.
	if once {
		tr.ok(fencedb.AlreadyApplied, a, insert(all))
	} else {
		require.ErrorIs(t, tr.want(fencedb.Failed, a, insert(all)), fencedb.ErrExists)
	}
	// A value that does not fit is an error, and not cut off.
	require.ErrorContains(t, tr.want(fencedb.Failed, a, insert(row(98, fencedb.Set{"short": "abcd"}))), "22001")
	// A key that the database makes, or none of which all is given.
	require.ErrorContains(t, tr.want(fencedb.Failed, a, insert(fencedb.Set{"a": 99})), "23502")

	rows := make([]fencedb.Set, 0, 20)
	for i := 10; i < 30; i++ {
		rows = append(rows, row(i, fencedb.Set{"v": "old"}))
	}
	fill := func() { // around the gate, as rows that have been there for long
		tr.exec(`DELETE FROM app.things WHERE a >= 10; DELETE FROM fence.tombstone`)
		for i := range rows {
			_, err := tr.pool.Exec(ctx, `INSERT INTO app.things (a, "b ""quoted"" Ü", v) VALUES ($1, $2, 'old')`, 10+i, key(0)[oddKey])
			require.NoError(t, err)
		}
	}
	fill()

	// Expressions, conditions, and what comes back.
	var n int
	update := func(a0 int, set fencedb.Set, more ...fencedb.WriteOption) op {
		return func(ctx context.Context, table *fencedb.Table, options ...fencedb.WriteOption) (fencedb.Outcome, error) {
			return table.Update(ctx, a, key(a0), set, append(options, more...)...)
		}
	}
	plus := fencedb.Expr("t.n + @by /* it's @commented -- */", fencedb.Args{"by": 5})
	tr.ok(fencedb.Applied, a, update(10, fencedb.Set{"n": plus, "v": "new"}, fencedb.Returning(&n, "n"),
		fencedb.Where("v = @was AND @fence::bigint > 0", fencedb.Args{"was": "old"})))
	require.Equal(t, 5, n)
	n = 0
	again := update(10, fencedb.Set{"n": plus}, fencedb.Returning(&n, "n"), fencedb.Where("v = 'old'"))
	if once {
		tr.ok(fencedb.AlreadyApplied, a, again)
		require.Equal(t, 5, n, "what is there is read all the same")
	} else {
		require.ErrorIs(t, tr.want(fencedb.Unmatched, a, again), fencedb.ErrUnmatched)
		tr.ok(fencedb.Applied, a, update(10, fencedb.Set{"n": plus}, fencedb.Returning(&n, "n")))
		require.Equal(t, 10, n)
	}
	require.ErrorIs(t, tr.want(fencedb.Unmatched, a, update(11, fencedb.Set{"v": "x"}, fencedb.Where("v = 'other'"))), fencedb.ErrUnmatched)
	require.ErrorIs(t, tr.want(fencedb.Missing, a, update(77, fencedb.Set{"v": "x"})), fencedb.ErrMissing)
	require.ErrorContains(t, tr.want(fencedb.Failed, a, update(12, fencedb.Set{"n": fencedb.Expr("1 / (t.n - t.n)")})), "22012")

	// Upsert.
	upsert := func(a0 int, set fencedb.Set, more ...fencedb.WriteOption) op {
		return func(ctx context.Context, table *fencedb.Table, options ...fencedb.WriteOption) (fencedb.Outcome, error) {
			return table.Upsert(ctx, a, key(a0), set, append(options, more...)...)
		}
	}
	tr.ok(fencedb.Applied, a, upsert(50, fencedb.Set{"v": "fresh", "n": 1}, fencedb.Returning(&n, "n")))
	count := fencedb.Set{"n": fencedb.Expr("t.n + 1"), "v": "counted"}
	tr.ok(fencedb.Applied, a, upsert(51, count, fencedb.Inserting(fencedb.Set{"n": 100, "short": "ins"}), fencedb.Returning(&n, "n")))
	require.Equal(t, 100, n)
	tr.ok(fencedb.Applied, a, upsert(13, count, fencedb.Inserting(fencedb.Set{"n": 100}), fencedb.Returning(&n, "n")))
	require.Equal(t, 1, n)
	if once {
		tr.ok(fencedb.AlreadyApplied, a, upsert(50, fencedb.Set{"v": "twice"}))
	} else {
		tr.ok(fencedb.Applied, a, upsert(50, fencedb.Set{"v": "twice"}))
	}

	// Many at once.
	many := func(partial bool, keys ...int) op {
		return func(ctx context.Context, table *fencedb.Table, options ...fencedb.WriteOption) (fencedb.Outcome, error) {
			var batch []fencedb.Row
			for i, k := range keys {
				batch = append(batch, fencedb.Row{Key: key(k), Set: fencedb.Set{"v": fmt.Sprintf("many \"%d\"", k), "n": i, "list": []int{k, i}, "words": []string{"a", "b"}, "j": nil, "moods": []string{}}})
			}
			if partial {
				options = append(options, fencedb.Partial())
			}
			results, err := table.UpdateMany(ctx, a, batch, options...)
			require.Len(t, results, len(batch))
			for i, r := range results {
				require.Equal(t, batch[i].Key, r.Key)
			}
			return results[0].Outcome, err
		}
	}
	tr.ok(fencedb.Applied, a, many(false, 16, 15, 14))
	require.Equal(t, 3, query[int](tr.bed, `SELECT count(*) FROM app.things WHERE v LIKE 'many%' AND list[1] = a AND words = '{a,b}' AND last_fence = $1 AND moods = '{}'`, a.Fence()))
	err := tr.want(fencedb.Failed, a, many(false, 17, 76, 18))
	require.ErrorIs(t, err, fencedb.ErrMissing)
	require.ErrorContains(t, err, `"a":76`)
	require.Equal(t, 2, query[int](tr.bed, `SELECT count(*) FROM app.things WHERE a IN (17, 18) AND v = 'old'`), "all or nothing")
	if tr.strength != fencedb.InTx { // there the error rolls everything back
		require.ErrorIs(t, tr.want2(fencedb.Applied, a, many(true, 17, 76, 18)), fencedb.ErrMissing)
		require.Equal(t, 0, query[int](tr.bed, `SELECT count(*) FROM app.things WHERE a IN (17, 18) AND v = 'old'`))
	}

	// Request ids: once, whatever the rule, and with the answer of the first.
	var first, repeat thing
	request := func(a0 int, into *thing, id string) op {
		return update(a0, fencedb.Set{"n": fencedb.Expr("t.n + 1"), "v": "requested"}, fencedb.WithRequestID(id), fencedb.Returning(into))
	}
	tr.ok(fencedb.Applied, a, request(19, &first, "r1"))
	tr.exec(`UPDATE app.things SET v = 'meanwhile' WHERE a = 19`)
	tr.ok(fencedb.AlreadyApplied, a, request(19, &repeat, "r1"))
	require.Equal(t, first, repeat)
	require.Equal(t, 1, query[int](tr.bed, `SELECT n FROM app.things WHERE a = 19`))
	require.ErrorIs(t, tr.want(fencedb.Failed, a, request(20, &repeat, "r1")), fencedb.ErrRequest)
	if once {
		require.ErrorIs(t, tr.want(fencedb.Failed, a, request(19, &repeat, "r2")), fencedb.ErrOnce)
	} else {
		tr.ok(fencedb.Applied, a, request(19, &repeat, "r2"))
		require.Equal(t, 2, repeat.N)
	}
	for range 2 {
		outcome := fencedb.Applied
		if query[int](tr.bed, `SELECT count(*) FROM fence.request WHERE id = 'del'`) > 0 {
			outcome = fencedb.AlreadyApplied
		}
		var deleted thing
		tr.ok(outcome, a, func(ctx context.Context, table *fencedb.Table, options ...fencedb.WriteOption) (fencedb.Outcome, error) {
			return table.Delete(ctx, a, key(21), append(options, fencedb.WithRequestID("del"), fencedb.Returning(&deleted))...)
		})
		require.Equal(t, 21, deleted.A)
		var inserted int64
		tr.ok(outcome, a, func(ctx context.Context, table *fencedb.Table, options ...fencedb.WriteOption) (fencedb.Outcome, error) {
			return table.Insert(ctx, a, row(60, nil), append(options, fencedb.WithRequestID("ins"), fencedb.Returning(&inserted, "id"))...)
		})
		require.Positive(t, inserted)
		tr.ok(outcome, a, func(ctx context.Context, table *fencedb.Table, options ...fencedb.WriteOption) (fencedb.Outcome, error) {
			results, err := table.UpdateMany(ctx, a, []fencedb.Row{
				{Key: key(22), Set: fencedb.Set{"v": "m"}}, {Key: key(23), Set: fencedb.Set{"v": "m"}},
			},
				append(options, fencedb.WithRequestID("many"))...)
			if len(results) == 0 {
				return fencedb.Failed, err
			}
			return results[1].Outcome, err
		})
	}

	// Deleted, and not to be brought back by whoever is older.
	del := func(lease fencedb.Lease, a0 int) op {
		return func(ctx context.Context, table *fencedb.Table, options ...fencedb.WriteOption) (fencedb.Outcome, error) {
			return table.Delete(ctx, lease, key(a0), options...)
		}
	}
	tr.ok(fencedb.Applied, a, del(a, 24))
	tr.ok(fencedb.AlreadyApplied, a, del(a, 24))
	if once {
		require.ErrorIs(t, tr.want(fencedb.Failed, a, insert(row(24, nil))), fencedb.ErrOnce)
		require.ErrorIs(t, tr.want(fencedb.Failed, a, upsert(24, fencedb.Set{"v": "x"})), fencedb.ErrOnce)
		require.ErrorIs(t, tr.want(fencedb.Failed, a, del(a, 10)), fencedb.ErrOnce, "its one write of row 10 was another")
	} else {
		tr.ok(fencedb.Applied, a, insert(row(24, nil)))
		tr.ok(fencedb.Applied, a, del(a, 24))
	}

	// SQL of one's own.
	var texts []string
	own := func(lease fencedb.Lease, a0 int, more ...fencedb.WriteOption) op {
		return func(ctx context.Context, table *fencedb.Table, options ...fencedb.WriteOption) (fencedb.Outcome, error) {
			return tr.gate.Query(ctx, lease, `UPDATE app.things SET v = @v || ' by ' || @holder::text, last_fence = @fence
				WHERE a = @a AND last_fence < @fence RETURNING v`, fencedb.Args{"v": "own", "a": a0},
				fencedb.ReturningAll(&texts), append(append(options, fencedb.Target(table, key(a0))), more...)...)
		}
	}
	tr.ok(fencedb.Applied, a, own(a, 25))
	require.Equal(t, []string{"own by A"}, texts)

	require.Equal(t, 0, query[int](tr.bed, `SELECT count(*) FROM fence.rejection`), "none of that was a refusal")

	// B takes over. Every form of write by A is refused at what B has written, and on record.
	tr.age(name, time.Hour)
	fenceB := factsOf(tr.acquire(clients["B"], name))
	fill()
	for i := range rows {
		tr.ok(fencedb.Applied, fenceB, func(ctx context.Context, table *fencedb.Table, options ...fencedb.WriteOption) (fencedb.Outcome, error) {
			return table.Update(ctx, fenceB, key(10+i), fencedb.Set{"v": "B"}, options...)
		})
	}
	i := 0
	for form, write := range forms {
		err := tr.want(map[bool]fencedb.Outcome{true: fencedb.LeaseLost, false: fencedb.Stale}[tr.strength == fencedb.InTx], a,
			func(ctx context.Context, table *fencedb.Table, options ...fencedb.WriteOption) (fencedb.Outcome, error) {
				if form == "seal" {
					options = options[1:]
				}
				return write(ctx, table, tr.gate, a, 10+i, "A", options...)
			})
		var e *fencedb.WriteError
		require.ErrorAs(t, err, &e, form)
		if tr.strength != fencedb.InTx {
			require.Equal(t, fenceB.Fence(), e.Current, form)
		} else {
			require.Equal(t, "superseded", e.Reason)
		}
		require.Equal(t, "B", e.CurrentHolder, form)
		require.Equal(t, "stale", e.Verdict, form)
		require.NoError(t, e.AuditErr, form)
		i++
	}
	require.Equal(t, len(rows), query[int](tr.bed, `SELECT count(*) FROM app.things WHERE a >= 10 AND v = 'B'`))
	tr.ok(fencedb.Applied, fenceB, func(ctx context.Context, table *fencedb.Table, options ...fencedb.WriteOption) (fencedb.Outcome, error) {
		return table.Delete(ctx, fenceB, key(11), append(options, fencedb.WithRule(fencedb.Term))...)
	})
	if tr.strength != fencedb.InTx {
		for _, revive := range []op{insert(row(11, nil)), upsert(11, fencedb.Set{"v": "A"}), update(11, fencedb.Set{"v": "A"})} {
			err := tr.want2(fencedb.Stale, a, revive)
			require.True(t, errors.Is(err, fencedb.ErrStale) || errors.Is(err, fencedb.ErrLeaseLost), err)
		}
		require.NoError(t, tr.gate.Flush(ctx))
		require.LessOrEqual(t, len(forms), query[int](tr.bed, `SELECT count(*) FROM fence.rejection WHERE holder = 'A' AND current_holder = 'B' AND verdict = 'stale'`))
	}
	require.Equal(t, 0, query[int](tr.bed, `SELECT count(*) FROM app.things WHERE a = 11`))

	// B's lease ends with nobody after it. What B has not written yet is refused if the lease counts.
	tr.age(name, time.Hour)
	fill()
	i = 0
	for form, write := range forms {
		outcome := fencedb.Applied
		if tr.strength != fencedb.Fenced {
			outcome = fencedb.LeaseLost
		}
		err := tr.wantAny(outcome, fenceB, func(ctx context.Context, table *fencedb.Table, options ...fencedb.WriteOption) (fencedb.Outcome, error) {
			if form == "seal" {
				options = options[1:]
			}
			return write(ctx, table, tr.gate, fenceB, 10+i, "late", options...)
		})
		if outcome == fencedb.LeaseLost {
			var e *fencedb.WriteError
			require.ErrorAs(t, err, &e, form)
			require.Equal(t, "expired", e.Reason, form)
			require.Equal(t, "expired", e.Verdict, form)
		}
		i++
	}
	if tr.strength != fencedb.Fenced {
		require.Equal(t, len(rows), query[int](tr.bed, `SELECT count(*) FROM app.things WHERE a >= 10 AND v = 'old' AND last_fence = 0`))
	}
	require.NoError(t, tr.gate.Flush(ctx)) // what is on record later would be among the refusals of whoever looks next
	require.Zero(t, tr.gate.Unrecorded())
}

// ok is want for an outcome that is no error.
func (tr *trial) ok(want fencedb.Outcome, lease fencedb.Lease, f op) {
	tr.t.Helper()
	require.NoError(tr.t, tr.want(want, lease, f))
}

// wantAny is want for a write whose outcome comes with an error or not.
func (tr *trial) wantAny(want fencedb.Outcome, lease fencedb.Lease, f op) error {
	tr.t.Helper()
	got, err := tr.write(lease, f)
	require.Equal(tr.t, want, got, "%v", err)
	return err
}

// want2 is want for an error whatever the outcome of the first row.
func (tr *trial) want2(_ fencedb.Outcome, lease fencedb.Lease, f op) error {
	tr.t.Helper()
	_, err := tr.write(lease, f)
	require.Error(tr.t, err)
	return err
}
