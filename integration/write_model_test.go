package integration

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/writegate/writegate/fencedb"
	"github.com/writegate/writegate/internal/pgtest"
)

// modelRow is what the rules of the gate say of one key.
type modelRow struct {
	exists bool
	fence  int64
	v      string
	buried int64
}

// stale, once and the like are what a write of the model ends with.
type modelEnd struct {
	outcome fencedb.Outcome
	err     error
}

var (
	applied = modelEnd{fencedb.Applied, nil}
	already = modelEnd{fencedb.AlreadyApplied, nil}
	stale   = modelEnd{fencedb.Stale, fencedb.ErrStale}
	missing = modelEnd{fencedb.Missing, fencedb.ErrMissing}
	exists  = modelEnd{fencedb.Failed, fencedb.ErrExists}
	onceErr = modelEnd{fencedb.Failed, fencedb.ErrOnce}
)

// write is the specification of every kind of write, in a few lines.
func (r *modelRow) write(form string, fence int64, once bool, v string) modelEnd {
	switch {
	case r.exists && r.fence > fence, !r.exists && r.buried > fence:
		return stale
	case form == "seal" && !r.exists:
		return missing
	case form == "seal" && r.fence >= fence-1:
		return already
	case form == "seal":
		r.fence = fence - 1
		return applied
	case form == "delete" && r.exists && r.fence == fence && once:
		return onceErr
	case form == "delete" && r.exists:
		*r = modelRow{buried: fence}
		return applied
	case form == "delete" && r.buried == fence:
		return already
	case r.exists && r.fence == fence && once:
		return already
	case r.exists && form == "insert":
		return exists
	case r.exists:
		r.fence, r.v = fence, v
		return applied
	case (form == "insert" || form == "upsert") && r.buried == fence && once:
		return onceErr
	case form == "insert" || form == "upsert":
		*r = modelRow{true, fence, v, r.buried}
		return applied
	}
	return missing
}

// Random interleavings of several holders' writes of every kind, against the model: every outcome is the model's, and so is
// every row; in particular no row's fence ever falls, and no older holder overwrites a newer one.
func TestRandomWrites(t *testing.T) {
	ctx := context.Background()
	b := newBed(t)
	table := b.table()
	rapid.Check(t, func(rt *rapid.T) {
		b.exec(`TRUNCATE app.orders, fence.tombstone, fence.rejection`)
		model := map[int]*modelRow{1: {}, 2: {}, 3: {}}
		n := 0
		rt.Repeat(map[string]func(*rapid.T){
			"write": func(rt *rapid.T) {
				n++
				form := rapid.SampledFrom([]string{"update", "insert", "upsert", "delete", "seal", "many", "exec"}).Draw(rt, "form")
				id := rapid.IntRange(1, 3).Draw(rt, "id")
				fence := rapid.Int64Range(1, 5).Draw(rt, "fence")
				once := rapid.Bool().Draw(rt, "once") || form == "exec"
				lease := fencedb.Doubled(fencedb.Static("x", fence, "holder"))
				fence *= 2
				v := fmt.Sprint(n)
				rule := fencedb.WithRule(fencedb.Term)
				if once {
					rule = fencedb.WithRule(fencedb.Once)
				}
				key, set := fencedb.Key{"id": id}, fencedb.Set{"v": v}
				var outcome fencedb.Outcome
				var err error
				switch form {
				case "update":
					outcome, err = table.Update(ctx, lease, key, set, rule)
				case "insert":
					outcome, err = table.Insert(ctx, lease, fencedb.Set{"id": id, "v": v}, rule)
				case "upsert":
					outcome, err = table.Upsert(ctx, lease, key, set, rule)
				case "delete":
					outcome, err = table.Delete(ctx, lease, key, rule)
				case "seal":
					outcome, err = table.Seal(ctx, lease, key)
				case "exec":
					outcome, err = b.gate.Exec(ctx, lease, `UPDATE app.orders SET v = @v, last_fence = @fence WHERE id = @id AND last_fence < @fence`,
						fencedb.Args{"id": id, "v": v}, fencedb.Target(table, key), rule)
				case "many":
					other := id%3 + 1
					results, manyErr := table.UpdateMany(ctx, lease, []fencedb.Row{{Key: key, Set: set}, {Key: fencedb.Key{"id": other}, Set: set}}, rule, fencedb.Partial())
					end := model[other].write("update", fence, once, v)
					if results[1].Outcome != end.outcome || !errors.Is(results[1].Err, end.err) {
						rt.Fatalf("many, id %d, fence %d: %v, want %v", other, fence, results[1], end)
					}
					if (manyErr == nil) != (results[0].Err == nil && results[1].Err == nil) {
						rt.Fatalf("%v with %v", manyErr, results)
					}
					outcome, err = results[0].Outcome, results[0].Err
				}
				if form == "exec" || form == "many" {
					form = "update"
				}
				end := model[id].write(form, fence, once, v)
				if outcome != end.outcome || !errors.Is(err, end.err) {
					rt.Fatalf("%s, id %d, fence %d, once %v: %v, %v; want %v", form, id, fence, once, outcome, err, end)
				}
			},
			"": func(rt *rapid.T) {
				rows, err := b.pool.Query(ctx, `SELECT id, v, last_fence FROM app.orders`)
				require.NoError(rt, err)
				type found struct {
					ID    int
					V     string
					Fence int64 `db:"last_fence"`
				}
				list, err := pgx.CollectRows(rows, pgx.RowToStructByName[found])
				require.NoError(rt, err)
				seen := map[int]modelRow{}
				for _, f := range list {
					seen[f.ID] = modelRow{true, f.Fence, f.V, model[f.ID].buried}
				}
				for id, want := range model {
					got, ok := seen[id]
					if ok != want.exists || ok && (got.fence != want.fence || want.v != "" && got.v != want.v) {
						rt.Fatalf("row %d is %v, want %v", id, got, *want)
					}
				}
			},
		})
	})
}

// Any name that PostgreSQL takes for a table or a column, any key and any value that it takes as text, is written and found
// again as it is; what it does not take is its error and not ours.
func FuzzNamesAndValues(f *testing.F) {
	for _, seed := range [][4]string{
		{"orders", "v", "k", "x"}, {`a"b`, `c'd`, "it's", `\`}, {"Ünï.cöde", "select", "日本", "\u202e"}, {"t", "$1", "@fence", "@x -- "},
		{strings.Repeat("n", 63), strings.Repeat("c", 63), strings.Repeat("k", 2000), strings.Repeat("v", 100000)},
		{"tab\tle", "new\nline", "\x01", "'; DROP TABLE x; --"}, {"t", "v", "nul\x00", "v"}, {"t", "v", "k", "bad\xff"}, {"a.b", "t", `{"k":1}`, "{1,2}"},
		{"x", "writegate_0", "", "NULL"}, {"g", "n", `"`, `,`}, {"w", "one", `{}`, `\N`}, {"t", "id\\", "E'x'", "$$"},
	} {
		f.Add(seed[0], seed[1], seed[2], seed[3])
	}
	ctx := context.Background()
	cfg := pgtest.New(f)
	pool := pgtest.Pool(f, cfg)
	f.Fuzz(func(t *testing.T, name, column, key, value string) {
		pgtest.Exec(t, cfg, `DROP SCHEMA IF EXISTS fuzz CASCADE; CREATE SCHEMA fuzz; DELETE FROM fence.rejection; DELETE FROM fence.tombstone; DELETE FROM fence.request;
			DELETE FROM fence.protected_table`)
		ident := pgx.Identifier{"fuzz", name}.Sanitize()
		_, err := pool.Exec(ctx, `CREATE TABLE `+ident+` (id text PRIMARY KEY, `+pgx.Identifier{column}.Sanitize()+` text, note text)`)
		if err != nil || strings.ContainsRune(name+column, 0) || column == "id" || column == "note" || column == "last_fence" {
			return // not a table
		}
		// A name that is too long is cut off by PostgreSQL, with a notice; ours must not be another.
		if len(name) > 63 || len(column) > 63 {
			return
		}
		_, err = pool.Exec(ctx, `SELECT fence.protect($1::text::regclass)`, ident)
		require.NoError(t, err)
		gate := fencedb.New(pool, fencedb.Config{})
		defer gate.Close()
		table, err := gate.Table(ctx, ident)
		require.NoError(t, err)
		storable := func(s string) bool { return utf8.ValidString(s) && !strings.ContainsRune(s, 0) }
		good := storable(key) && storable(value)
		k := fencedb.Key{"id": key}
		held := func(fence int64) fencedb.Lease {
			return fencedb.Doubled(fencedb.Static("lease "+key[:min(len(key), 200)], fence, value))
		}
		lease, older := held(8), held(6)
		check := func(outcome fencedb.Outcome, err error) {
			t.Helper()
			if good {
				require.NoError(t, err)
				require.Equal(t, fencedb.Applied, outcome)
			} else {
				require.Equal(t, fencedb.Failed, outcome)
				require.Error(t, err)
			}
		}
		var back string
		check(table.Insert(ctx, older, fencedb.Set{"id": key, column: value}, fencedb.Returning(&back, column)))
		if good {
			require.Equal(t, value, back)
			back = ""
		}
		check(table.Upsert(ctx, lease, k, fencedb.Set{column: value, "note": "n"}, fencedb.Returning(&back, column), fencedb.WithRequestID("r")))
		if !good {
			return
		}
		require.Equal(t, value, back)
		_, err = table.Update(ctx, older, k, fencedb.Set{column: "stale"})
		var e *fencedb.WriteError
		require.ErrorAs(t, err, &e)
		require.ErrorIs(t, err, fencedb.ErrStale)
		require.NoError(t, e.AuditErr)
		newest := held(9)
		results, err := table.UpdateMany(ctx, newest, []fencedb.Row{{Key: k, Set: fencedb.Set{column: value, "note": nil}}})
		require.NoError(t, err)
		require.Equal(t, fencedb.Applied, results[0].Outcome)
		check(table.Delete(ctx, held(10), k, fencedb.Returning(&back, column)))
		require.Equal(t, value, back)
		_, err = table.Insert(ctx, newest, fencedb.Set{"id": key})
		require.ErrorIs(t, err, fencedb.ErrStale)
	})
}

// Keys and guards are made of names alone, whatever these are: of a table whose schema, key columns and fence column may be called
// anything, the guard finds the tombstone under the key that the gate has hashed, and the gate what the guard has left, in whatever
// form values travel.
func FuzzKeysUnderGuard(f *testing.F) {
	for _, seed := range [][5]string{
		{"app", "tenant", "id", "last_fence", "x"}, {`a"b`, `c'd`, "it's", `f\`, `\`}, {"Ünï.cöde", "select", "日本", "Fence", "\u202e"}, {"t", "$1", "@fence", "%I", "@x -- "},
		{"pg", "NEW", "old", "TG_ARGV", "'; DROP TABLE x; --"}, {strings.Repeat("s", 63), strings.Repeat("é", 31), strings.Repeat("c", 63), strings.Repeat("f", 63), strings.Repeat("v", 2000)},
		{"a.b", "writegate_0", "writegate_1", "c.d", ""}, {"%s", "$$", "n", "{}", `\N`}, {"tab\t", "new\nline", "\x01", "\x7f", "\x1b"},
	} {
		f.Add(seed[0], seed[1], seed[2], seed[3], seed[4])
	}
	ctx := context.Background()
	cfg := pgtest.New(f)
	pool := pgtest.Pool(f, cfg)
	db := stdlib.OpenDBFromPool(pool)
	f.Cleanup(func() { _ = db.Close() })
	conn := pgtest.Conn(f, cfg)
	storable := func(s string) bool { return utf8.ValidString(s) && !strings.ContainsRune(s, 0) }
	f.Fuzz(func(t *testing.T, schema, one, two, fence, value string) {
		names := map[string]bool{}
		for _, name := range []string{one, two, fence, "note"} {
			names[name] = true
			if name == "" || len(name) > 63 || !storable(name) {
				return // no name, or another than it says
			}
		}
		if schema == "" || len(schema) > 63 || !storable(schema) || !storable(value) || len(names) < 4 || schema == "fence" || schema == "public" || schema == "information_schema" || strings.HasPrefix(schema, "pg_") {
			return
		}
		for _, name := range []string{"tableoid", "xmin", "cmin", "xmax", "cmax", "ctid"} {
			if names[name] {
				return // the system's own
			}
		}
		quote := func(name string) string { return `"` + strings.ReplaceAll(name, `"`, `""`) + `"` }
		ident := quote(schema) + ".t"
		_, err := conn.Exec(ctx, `TRUNCATE fence.rejection, fence.tombstone, fence.request, fence.protected_table; CREATE SCHEMA `+quote(schema)+`; CREATE TABLE `+ident+` (`+
			quote(one)+` text, `+quote(two)+` int, note text, PRIMARY KEY (`+quote(one)+`, `+quote(two)+`), UNIQUE (`+quote(two)+`))`)
		require.NoError(t, err)
		defer func() {
			_, err := conn.Exec(ctx, `DROP SCHEMA `+quote(schema)+` CASCADE`)
			require.NoError(t, err)
		}()
		_, err = conn.Exec(ctx, `SELECT fence.protect($1::text::regclass, fence_column => $2::text::name, guard => 'enforce')`, ident, fence)
		require.NoError(t, err)
		gate := fencedb.New(pool, fencedb.Config{})
		defer gate.Close()
		table, err := gate.Table(ctx, ident)
		require.NoError(t, err)
		require.Equal(t, schema+".t", table.Name())
		held := func(fence int64) fencedb.Lease { return fencedb.Doubled(fencedb.Static("x", fence, value)) }
		key := fencedb.Key{one: value, two: 1}
		applied := func(outcome fencedb.Outcome, err error) {
			t.Helper()
			require.NoError(t, err)
			require.Equal(t, fencedb.Applied, outcome)
		}
		applied(table.Insert(ctx, held(5), fencedb.Set{one: value, two: 1, "note": "n"}))
		_, err = conn.Exec(ctx, `UPDATE `+ident+` SET note = 'around'`)
		require.ErrorContains(t, err, "WG008", "the guard looks at it")
		applied(table.InSQL(db).Update(ctx, held(6), key, fencedb.Set{"note": value}))
		var note string
		applied(table.InSQL(db).Upsert(ctx, held(7), key, fencedb.Set{"note": value}, fencedb.Returning(&note, "note"), fencedb.WithRequestID("r")))
		require.Equal(t, value, note)
		_, err = table.Update(ctx, held(6), key, fencedb.Set{"note": "stale"})
		require.ErrorIs(t, err, fencedb.ErrStale)
		var recorded bool
		require.NoError(t, conn.QueryRow(ctx, `SELECT row_key = jsonb_build_object($1::text, $2::text, $3::text, 1) FROM fence.rejection WHERE table_name = $4`, one, value, two, schema+".t").Scan(&recorded))
		require.True(t, recorded, "with the key that it has")
		results, err := table.UpdateMany(ctx, held(8), []fencedb.Row{{Key: key, Set: fencedb.Set{"note": nil}}})
		require.NoError(t, err)
		require.Equal(t, fencedb.Applied, results[0].Outcome)

		// Deleted around the gate, in a transaction that was entered, the row leaves a tombstone under each of its keys.
		var granted int64
		require.NoError(t, conn.QueryRow(ctx, `SELECT setval('fence.fence_seq', 1000)`).Scan(&granted))
		require.NoError(t, conn.QueryRow(ctx, `SELECT a.fence FROM fence.acquire('e', 'h', '1 minute', '11111111-1111-4111-8111-111111111111') a`).Scan(&granted))
		_, err = conn.Exec(ctx, `DO $do$ BEGIN PERFORM fence.enter('e', '11111111-1111-4111-8111-111111111111', `+fmt.Sprint(granted)+`); DELETE FROM `+ident+`; END $do$`)
		if strings.Contains(ident, "$do$") {
			return
		}
		require.NoError(t, err)
		_, err = table.Insert(ctx, held(granted/2-1), fencedb.Set{one: value, two: 1})
		require.ErrorIs(t, err, fencedb.ErrStale, "its key is buried")
		_, err = table.InSQL(db).Insert(ctx, held(granted/2-1), fencedb.Set{one: value + "x", two: 1})
		require.ErrorIs(t, err, fencedb.ErrStale, "and so is the other")
		applied(table.Insert(ctx, held(granted), fencedb.Set{one: value, two: 1}))
		// And the other way about: what the gate has deleted, nobody older brings back around it.
		applied(table.Delete(ctx, held(granted+1), key))
		_, err = conn.Exec(ctx, `INSERT INTO `+ident+` (`+quote(one)+`, `+quote(two)+`, `+quote(fence)+`) VALUES ($1, 1, $2)`, value, granted)
		require.ErrorContains(t, err, "WG007")
	})
}
