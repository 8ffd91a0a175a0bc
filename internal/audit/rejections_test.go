package audit_test

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/writegate/writegate/internal/audit"
	"github.com/writegate/writegate/internal/pgtest"
)

// refused is a database with refusals that differ in everything, numbered by their fences.
func refused(t *testing.T) *pgx.ConnConfig {
	t.Helper()
	cfg := pgtest.New(t)
	pgtest.Exec(t, cfg, fmt.Sprintf(insertRefusal, `VALUES
		(1, 'app.orders', '{"id": 1}'::jsonb, 'x', 'A', 'web', 'stale', 'stale', 5, timestamptz '2026-01-02 11:50Z', timestamptz '2026-01-02 12:00Z'),
		(2, 'app.orders', '{"id": 1, "region": "eu"}', 'y', 'B', 'web', 'expired', 'expired', 1, '2026-01-02 11:00Z', '2026-01-02 12:00:00.000001Z'),
		(3, 'app.items', '{"id": "1"}', 'x', 'a', 'job', 'superseded', 'stale', 40, '2026-01-02 11:55Z', '2026-01-02 12:10Z'),
		(4, 'app.items', '{"id": {"a": [1, 2]}}', 'z', 'A', '', 'released', 'lawful', 1, '2026-01-02 12:10Z', '2026-01-02 12:10Z'),
		(5, 'other.orders', '"(other keys)"', 'X', '', 'job', 'wrong_fence', 'lawful', 2, '2026-01-02 12:20Z', '2026-01-02 12:20Z'),
		(6, 'app."orders', '{"id": null}', '%', '%', 'we_', 'no_lease', 'unknown', 3, '2026-01-02 12:30Z', '2026-01-02 12:30Z')`))
	return cfg
}

func fencesOf(found []audit.Rejection) []int64 {
	fences := []int64{}
	for _, r := range found {
		fences = append(fences, r.Fence)
	}
	return fences
}

func TestRejectionsAreFiltered(t *testing.T) {
	ctx := context.Background()
	cfg := refused(t)
	conn := connect(t, cfg)
	at := func(minute int) time.Time { return noon.Add(time.Duration(minute) * time.Minute) }
	us := time.Microsecond
	var third int64
	require.NoError(t, conn.QueryRow(ctx, `SELECT id FROM fence.rejection WHERE fence = 3`).Scan(&third))
	for name, c := range map[string]struct {
		f    audit.Filter
		want []int64
	}{
		"nothing":                  {audit.Filter{}, []int64{6, 5, 4, 3, 2, 1}},
		"since is in it":           {audit.Filter{Since: at(20)}, []int64{6, 5}},
		"since a moment later":     {audit.Filter{Since: at(20).Add(us)}, []int64{6}},
		"until is not in it":       {audit.Filter{Until: at(0)}, []int64{}},
		"until a moment later":     {audit.Filter{Until: at(0).Add(us)}, []int64{1}},
		"a window of a moment":     {audit.Filter{Since: at(0).Add(us), Until: at(0).Add(2 * us)}, []int64{2}},
		"an empty window":          {audit.Filter{Since: at(10), Until: at(10)}, []int64{}},
		"in another zone":          {audit.Filter{Since: at(20).In(time.FixedZone("", 5*3600+1800))}, []int64{6, 5}},
		"table":                    {audit.Filter{Table: "app.orders"}, []int64{2, 1}},
		"table with a quote":       {audit.Filter{Table: `app."orders`}, []int64{6}},
		"table, not its beginning": {audit.Filter{Table: "app"}, []int64{}},
		"lease":                    {audit.Filter{Lease: "x"}, []int64{3, 1}},
		"lease that is no pattern": {audit.Filter{Lease: "%"}, []int64{6}},
		"key":                      {audit.Filter{Key: `{"id": 1}`}, []int64{2, 1}},
		"key of another type":      {audit.Filter{Key: `{"id": "1"}`}, []int64{3}},
		"key of two columns":       {audit.Filter{Key: `{"region": "eu"}`}, []int64{2}},
		"key in a key":             {audit.Filter{Key: `{"id": {"a": [2]}}`}, []int64{4}},
		"key that is null":         {audit.Filter{Key: `{"id": null}`}, []int64{6}},
		"key that is text":         {audit.Filter{Key: `"(other keys)"`}, []int64{5}},
		"any key that has columns": {audit.Filter{Key: `{}`}, []int64{6, 4, 3, 2, 1}},
		"holder":                   {audit.Filter{Holder: "A"}, []int64{4, 1}},
		"holder that is no pattern": {audit.Filter{
			Holder: "%",
		}, []int64{6}},
		"application":                {audit.Filter{Application: "job"}, []int64{5, 3}},
		"application, not a pattern": {audit.Filter{Application: "we_"}, []int64{6}},
		"verdict":                    {audit.Filter{Verdict: "lawful"}, []int64{5, 4}},
		"after an id":                {audit.Filter{AfterID: third}, []int64{6, 5, 4}},
		"several":                    {audit.Filter{Lease: "x", Application: "web", Reason: "stale", Since: at(0)}, []int64{1}},
		"several that no row has":    {audit.Filter{Lease: "x", Application: "web", Verdict: "lawful"}, []int64{}},
		"the latest first":           {audit.Filter{Sort: "last"}, []int64{6, 5, 4, 3, 2, 1}},
		"the latest begun first":     {audit.Filter{Sort: "first"}, []int64{6, 5, 4, 3, 1, 2}},
		"the most first":             {audit.Filter{Sort: "count"}, []int64{3, 1, 6, 5, 4, 2}},
	} {
		t.Run(name, func(t *testing.T) {
			found, cut, err := audit.Rejections(ctx, conn, c.f)
			require.NoError(t, err)
			assert.Equal(t, c.want, fencesOf(found))
			assert.False(t, cut)
			for limit := 1; limit <= len(c.want)+1; limit++ {
				f := c.f
				f.Limit = limit
				some, cut, err := audit.Rejections(ctx, conn, f)
				require.NoError(t, err)
				assert.Equal(t, c.want[:min(limit, len(c.want))], fencesOf(some))
				assert.Equal(t, limit < len(c.want), cut)
			}
			for _, by := range audit.TopBy() {
				top, err := audit.TopRejections(ctx, conn, by, c.f)
				require.NoError(t, err)
				rows := map[bool]int64{}
				for _, r := range top.Rows {
					rows[true] += r.Rows
				}
				assert.EqualValues(t, len(c.want), rows[true], by)
			}
		})
	}
	for i, reason := range audit.Reasons {
		found, _, err := audit.Rejections(ctx, conn, audit.Filter{Reason: reason})
		require.NoError(t, err)
		assert.Equal(t, []int64{[]int64{1, 2, 3, 4, 5, 6}[i]}, fencesOf(found), reason)
	}
	all := 0
	for _, verdict := range audit.Verdicts {
		found, _, err := audit.Rejections(ctx, conn, audit.Filter{Verdict: verdict})
		require.NoError(t, err)
		all += len(found)
	}
	assert.Equal(t, 6, all)
	_, _, err := audit.Rejections(ctx, conn, audit.Filter{Sort: "id; DROP TABLE x"})
	require.ErrorContains(t, err, "want one of last, first, count")
	_, _, err = audit.Rejections(ctx, conn, audit.Filter{Key: `{"id": `})
	require.ErrorContains(t, err, "22P02")

	r, err := audit.RejectionByID(ctx, conn, third)
	require.NoError(t, err)
	assert.Equal(t, audit.Rejection{ID: third, Table: "app.items", Key: `{"id": "1"}`, Lease: "x", Fence: 3, Reason: "superseded", Verdict: "stale", Holder: "a", Count: 40,
		FirstAt: at(-5), LastAt: at(10), Application: "job", User: r.User}, r)
	_, err = audit.RejectionByID(ctx, conn, 999)
	require.ErrorIs(t, err, audit.ErrNoRejection)
	require.ErrorContains(t, err, "999")
}

func TestTopRejections(t *testing.T) {
	ctx := context.Background()
	cfg := refused(t)
	conn := connect(t, cfg)
	for by, want := range map[string]string{
		"holder":      "a 40 1 0, A 6 2 1, % 3 1 0,  2 1 2, B 1 1 0",
		"table":       `app.items 41 2 1, app.orders 6 2 0, app."orders 3 1 0, other.orders 2 1 2`,
		"lease":       "x 45 2 0, % 3 1 0, X 2 1 2, y 1 1 0, z 1 1 1",
		"reason":      "superseded 40 1 0, stale 5 1 0, no_lease 3 1 0, wrong_fence 2 1 2, expired 1 1 0, released 1 1 1",
		"verdict":     "stale 45 2 0, lawful 3 2 3, unknown 3 1 0, expired 1 1 0",
		"application": "job 42 2 2, web 6 2 0, we_ 3 1 0,  1 1 1",
		"user":        "* 52 6 3",
		"key": `app.items {"id": "1"} 40 1 0, app.orders {"id": 1} 5 1 0, app."orders {"id": null} 3 1 0, other.orders "(other keys)" 2 1 2,` +
			` app.items {"id": {"a": [1, 2]}} 1 1 1, app.orders {"id": 1, "region": "eu"} 1 1 0`,
	} {
		line := func(list audit.TopList) string {
			var rows []string
			for _, r := range list.Rows {
				if by == "user" {
					r.Value = "*"
				}
				rows = append(rows, fmt.Sprint(r.Value, " ", r.Refusals, " ", r.Rows, " ", r.Lawful))
			}
			return strings.Join(rows, ", ")
		}
		top, err := audit.TopRejections(ctx, conn, by, audit.Filter{})
		require.NoError(t, err)
		// Equal numbers are in the order of the names, which is the database's.
		assert.ElementsMatch(t, strings.Split(want, ", "), strings.Split(line(top), ", "), by)
		assert.True(t, slices.IsSortedFunc(top.Rows, func(a, b audit.Top) int { return int(b.Refusals - a.Refusals) }), by)
		assert.Equal(t, by, top.By)
		assert.False(t, top.Cut)
		first, err := audit.TopRejections(ctx, conn, by, audit.Filter{Limit: 1})
		require.NoError(t, err)
		assert.Equal(t, top.Rows[:1], first.Rows)
		assert.Equal(t, by != "user", first.Cut)
	}
	assert.Len(t, audit.TopBy(), 8)
	top, err := audit.TopRejections(ctx, conn, "lease", audit.Filter{Lease: "x"})
	require.NoError(t, err)
	assert.Equal(t, noon.Add(10*time.Minute), top.Rows[0].LastAt)
	_, err = audit.TopRejections(ctx, conn, "nonesuch", audit.Filter{})
	require.ErrorContains(t, err, "want one of application, holder")

	require.NoError(t, audit.CheckTable(ctx, conn, "fence.lease"))
	require.ErrorContains(t, audit.CheckTable(ctx, conn, "lease"), "no table lease here")
}

// What rows hold now is found by the keys that are on record, whatever they and their tables look like; what cannot be found
// out is said, and spoils nothing.
func TestLookAtRows(t *testing.T) {
	ctx := context.Background()
	cfg := pgtest.New(t)
	pgtest.Exec(t, cfg, `CREATE SCHEMA app; CREATE SCHEMA "Odd ""schema.x";
		CREATE TABLE app.orders (id int PRIMARY KEY, v text); SELECT fence.protect('app.orders');
		INSERT INTO app.orders VALUES (1, 'one', 2), (2, 'two', 3), (3, 'three', 0), (4, 'four', 98);
		CREATE TABLE "Odd ""schema.x"."T'a%s""b$1" ("k ""1"" %d" int, "É;--" text, "last fence" bigint NOT NULL DEFAULT 0, PRIMARY KEY ("k ""1"" %d", "É;--"));
		SELECT fence.protect('"Odd ""schema.x"."T''a%s""b$1"', fence_column => 'last fence');
		INSERT INTO "Odd ""schema.x"."T'a%s""b$1" VALUES (1, '''; DROP', 2), (1, 'b', 3);
		CREATE TABLE app.was (id int PRIMARY KEY); SELECT fence.protect('app.was'); ALTER TABLE app.was RENAME TO "is"; INSERT INTO app.is VALUES (1);
		CREATE TABLE app.free (id int PRIMARY KEY); SELECT fence.protect('app.free'); SELECT fence.unprotect('app.free');
		CREATE TABLE app.dropped (id int PRIMARY KEY); SELECT fence.protect('app.dropped'); DROP TABLE app.dropped;
		CREATE TABLE app.nulls (id int PRIMARY KEY); SELECT fence.protect('app.nulls'); ALTER TABLE app.nulls ALTER last_fence DROP NOT NULL; INSERT INTO app.nulls VALUES (1, NULL);
		CREATE TABLE app.lost (id int PRIMARY KEY); SELECT fence.protect('app.lost'); ALTER TABLE app.lost RENAME last_fence TO f; INSERT INTO app.lost VALUES (1);
		CREATE TABLE app.twice (id int, last_fence bigint NOT NULL DEFAULT 0); CREATE UNIQUE INDEX one ON app.twice (id); SELECT fence.protect('app.twice'); DROP INDEX app.one; INSERT INTO app.twice VALUES (1, 2), (1, 4), (1, 0);
		CREATE DOMAIN app.some AS text NOT NULL CHECK (value <> ''); CREATE TABLE app.domains (id int PRIMARY KEY, v app.some); SELECT fence.protect('app.domains'); INSERT INTO app.domains VALUES (1, 'v', 2);`+
		insertTerm+`VALUES (2, 'l', 'A', '1 s', '2026-01-02 12:00Z', 0, '2026-01-02 12:01Z', 'released'), (4, 'm', 'B', '1 s', '2026-01-02 12:02Z', 0, NULL, NULL)`)
	odd := `Odd "schema.x.T'a%s"b$1`
	fence := func(n int64) *int64 { return &n }
	cases := []struct {
		what, table, key string
		now              audit.RowNow
		row              string
	}{
		{"a row that was written", "app.orders", `{"id": 1}`, audit.RowNow{State: "present", Fence: fence(2), Lease: "l", Holder: "A"}, `{"v": "one", "id": 1, "last_fence": 2}`},
		{"one that is sealed: it holds the fence below the sealer's", "app.orders", `{"id": 2}`, audit.RowNow{State: "present", Fence: fence(3), Lease: "m", Holder: "B"}, `{"v": "two", "id": 2, "last_fence": 3}`},
		{"one that never was", "app.orders", `{"id": 3}`, audit.RowNow{State: "present", Fence: fence(0)}, ``},
		{"a fence that nobody knows", "app.orders", `{"id": 4}`, audit.RowNow{State: "present", Fence: fence(98)}, ``},
		{"no row", "app.orders", `{"id": 77}`, audit.RowNow{State: "missing"}, ``},
		{"the number as text", "app.orders", `{"id": "1"}`, audit.RowNow{State: "present", Fence: fence(2), Lease: "l", Holder: "A"}, ``},
		{"null is no key", "app.orders", `{"id": null}`, audit.RowNow{State: "missing"}, ``},
		{"a key of another type", "app.orders", `{"id": "x"}`, audit.RowNow{State: "unknown", Note: "the table cannot be read by this key: SQLSTATE 22P02"}, ``},
		{"odd names", odd, `{"k \"1\" %d": 1, "É;--": "'; DROP"}`, audit.RowNow{State: "present", Fence: fence(2), Lease: "l", Holder: "A"}, `{"É;--": "'; DROP", "k \"1\" %d": 1, "last fence": 2}`},
		{"another row of the same", odd, `{"É;--": "b", "k \"1\" %d": 1}`, audit.RowNow{State: "present", Fence: fence(3), Lease: "m", Holder: "B"}, ``},
		{"a part of a key finds one of several", odd, `{"k \"1\" %d": 1}`, audit.RowNow{State: "present", Fence: fence(3), Lease: "m", Holder: "B"}, ``},
		{"renamed", "app.was", `{"id": 1}`, audit.RowNow{State: "unknown", Note: "the table is not protected any more"}, ``},
		{"by its new name", "app.is", `{"id": 1}`, audit.RowNow{State: "present", Fence: fence(0)}, ``},
		{"not protected any more", "app.free", `{"id": 1}`, audit.RowNow{State: "unknown", Note: "the table is not protected any more"}, ``},
		{"dropped", "app.dropped", `{"id": 1}`, audit.RowNow{State: "unknown", Note: "the table is not protected any more"}, ``},
		{"never was", "app.nonesuch", `{"id": 1}`, audit.RowNow{State: "unknown", Note: "the table is not protected any more"}, ``},
		{"no fence", "app.nulls", `{"id": 1}`, audit.RowNow{State: "present"}, `{"id": 1, "last_fence": null}`},
		{"the fence column is gone", "app.lost", `{"id": 1}`, audit.RowNow{State: "unknown", Note: "the table cannot be read by this key: SQLSTATE 42703"}, ``},
		{"a key of a column that is gone", "app.orders", `{"gone": 1}`, audit.RowNow{State: "unknown", Note: "the table has no such columns any more as its key has"}, ``},
		{"a key of no column that ever was", "app.orders", `{"id\") OR true --": 1}`, audit.RowNow{State: "unknown", Note: "the table has no such columns any more as its key has"}, ``},
		{"several rows: the highest fence", "app.twice", `{"id": 1}`, audit.RowNow{State: "present", Fence: fence(4), Lease: "m", Holder: "B"}, ``},
		{"other keys", "app.orders", `"(other keys)"`, audit.RowNow{State: "unknown", Note: "its key is not on record"}, ``},
		{"no columns", "app.orders", `{}`, audit.RowNow{State: "unknown", Note: "its key is not on record"}, ``},
		{"null", "app.orders", `null`, audit.RowNow{State: "unknown", Note: "its key is not on record"}, ``},
		{"a list", "app.orders", `[1]`, audit.RowNow{State: "unknown", Note: "its key is not on record"}, ``},
		{"a column that may not be null", "app.domains", `{"id": 1}`, audit.RowNow{State: "present", Fence: fence(2), Lease: "l", Holder: "A"}, ``},
	}
	var found []audit.Rejection
	for _, c := range cases {
		found = append(found, audit.Rejection{Table: c.table, Key: c.key})
	}
	check := func(found []audit.Rejection, whole bool) {
		t.Helper()
		for i, c := range cases {
			require.NotNil(t, found[i].Now, c.what)
			now := *found[i].Now
			switch {
			case whole && c.row != "":
				assert.JSONEq(t, c.row, string(now.Row), c.what)
			case whole && now.State == "present":
				assert.True(t, json.Valid(now.Row), c.what)
			default:
				assert.Nil(t, now.Row, c.what)
			}
			now.Row = nil
			assert.Equal(t, c.now, now, c.what)
		}
	}
	// The same on a connection, in transactions of its own, and inside one, which goes on afterwards.
	conn := connect(t, cfg)
	bounded := audit.Bounded(conn, time.Minute)
	tx := func() pgx.Tx {
		tx, err := connect(t, cfg).BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.RepeatableRead, AccessMode: pgx.ReadOnly})
		require.NoError(t, err)
		return tx
	}()
	for name, q := range map[string]audit.Querier{"connection": conn, "bounded": bounded, "transaction": tx} {
		for _, whole := range []bool{false, true} {
			again := slices.Clone(found)
			require.NoError(t, audit.LookAtRows(ctx, q, again, whole), name)
			check(again, whole)
		}
	}
	var n int
	require.NoError(t, tx.QueryRow(ctx, `SELECT count(*) FROM fence.term`).Scan(&n))
	assert.Equal(t, 2, n)
	require.NoError(t, tx.Commit(ctx))
	require.NoError(t, audit.LookAtRows(ctx, conn, nil, true))

	// What is not the table's fault is an error, and not an unknown row.
	ended, cancel := context.WithCancel(ctx)
	cancel()
	require.Error(t, audit.LookAtRows(ended, bounded, slices.Clone(found), false))
}

// Keys are found by the type of their column, as the database writes them in JSON.
func TestLookAtRowsByKeysOfAnyType(t *testing.T) {
	ctx := context.Background()
	cfg := pgtest.New(t)
	conn := connect(t, cfg)
	for kind, values := range map[string][]string{
		"bigint": {"9007199254740993", "-1"}, "text": {"", `a"b\n`, "1", " x"}, "uuid": {"11111111-1111-4111-8111-111111111111"},
		"timestamptz": {"2026-01-02 12:00:00.000001Z", "infinity"}, "numeric": {"1.50", "12345678901234567890.000000001"}, "boolean": {"true"}, "date": {"2026-01-02"},
		"jsonb": {`{"a": 1}`}, "int[]": {"{1,2}"}, "bytea": {`\xdeadbeef`}, "interval": {"1 day 02:00"}, "char(5)": {"ab"}, "double precision": {"0.1"},
	} {
		table := "k_" + strings.NewReplacer(" ", "", "[", "", "]", "", "(", "", ")", "").Replace(kind)
		pgtest.Exec(t, cfg, `CREATE TABLE `+table+` (k `+kind+` PRIMARY KEY); SELECT fence.protect('`+table+`')`)
		var found []audit.Rejection
		for i, v := range values {
			var key string
			require.NoError(t, conn.QueryRow(ctx, `INSERT INTO `+table+` VALUES ($1::text::`+kind+`, $2) RETURNING jsonb_build_object('k', k)::text`, v, int64(i+1)*2).Scan(&key), kind)
			found = append(found, audit.Rejection{Table: "public." + table, Key: key})
		}
		require.NoError(t, audit.LookAtRows(ctx, conn, found, false))
		for i, r := range found {
			require.Equal(t, "present", r.Now.State, "%s %s: %s", kind, r.Key, r.Now.Note)
			assert.EqualValues(t, (i+1)*2, *r.Now.Fence, "%s %s", kind, r.Key)
		}
	}
}

func TestRowNowInWords(t *testing.T) {
	f, sealed := int64(4), int64(5)
	for want, now := range map[string]*audit.RowNow{
		"-": nil, "no such row": {State: "missing"}, "no fence (NULL)": {State: "present"}, "4 of A": {State: "present", Fence: &f, Holder: "A"},
		"5 of B (sealed)": {State: "present", Fence: &sealed, Holder: "B"}, "4": {State: "present", Fence: &f}, "unknown: why": {State: "unknown", Note: "why"},
	} {
		assert.Equal(t, want, now.String())
	}
}

func termFences(terms []audit.Term) []int64 {
	fences := []int64{}
	for _, x := range terms {
		fences = append(fences, x.Fence)
	}
	return fences
}

func TestTermsAround(t *testing.T) {
	ctx := context.Background()
	cfg := pgtest.New(t)
	pgtest.Exec(t, cfg, insertTerm+`SELECT i * 2, 'l', 'h' || i, '1 s', '2026-01-02 12:00Z', 0, '2026-01-02 12:01Z', 'released' FROM generate_series(1, 20) i;`+
		insertTerm+`SELECT 1000 + i, 'other', 'h', '1 s', '2026-01-02 12:00Z', 0, '2026-01-02 12:01Z', 'released' FROM generate_series(1, 20) i;`+insertTerm+`VALUES (11, 'between', 'h', '1 s', '2026-01-02 12:00Z', 0, NULL, NULL)`)
	conn := connect(t, cfg)
	for _, c := range []struct {
		lease   string
		fence   int64
		current int64 // 0: none
		want    []int64
		leftOut int64
	}{
		{"l", 10, 30, []int64{32, 30, 28, 16, 14, 12, 10, 8}, 5},
		{"l", 10, 12, []int64{16, 14, 12, 10, 8}, 0},
		{"l", 10, 0, []int64{16, 14, 12, 10, 8}, 0},
		{"l", 2, 40, []int64{40, 38, 8, 6, 4, 2}, 14},
		{"l", 11, 29, []int64{30, 28, 26, 18, 16, 14, 12, 10}, 3},
		{"l", 40, 5000, []int64{40, 38}, 0},
		{"l", 7000, 6000, []int64{40, 38}, 0},
		{"l", 30, 10, []int64{36, 34, 32, 30, 28}, 0},
		{"nonesuch", 10, 30, []int64{}, 0},
		{"between", 11, 0, []int64{11}, 0},
	} {
		r := audit.Rejection{Lease: c.lease, Fence: c.fence}
		if c.current != 0 {
			r.CurrentFence = &c.current
		}
		terms, leftOut, err := audit.TermsAround(ctx, conn, r)
		require.NoError(t, err)
		assert.Equal(t, c.want, termFences(terms), "%+v", c)
		assert.Equal(t, c.leftOut, leftOut, "%+v", c)
		for _, x := range terms {
			assert.Equal(t, c.lease, x.Lease)
		}
	}
}

func TestTermsAreFiltered(t *testing.T) {
	ctx := context.Background()
	cfg := hour(t)
	conn := connect(t, cfg)
	at := func(minute int) time.Time { return noon.Add(time.Duration(minute) * time.Minute) }
	for name, c := range map[string]struct {
		f    audit.TermFilter
		want []int64
	}{
		"nothing":               {audit.TermFilter{}, []int64{14, 12, 10, 8, 6, 4, 2}},
		"lease":                 {audit.TermFilter{Lease: "busy"}, []int64{6, 4, 2}},
		"holder":                {audit.TermFilter{Holder: "B"}, []int64{4}},
		"ended at since":        {audit.TermFilter{Since: at(20), Lease: "busy"}, []int64{6, 4}},
		"ended before since":    {audit.TermFilter{Since: at(20).Add(time.Microsecond), Lease: "busy"}, []int64{6}},
		"granted at until":      {audit.TermFilter{Until: at(10), Lease: "busy"}, []int64{2}},
		"granted before until":  {audit.TermFilter{Until: at(10).Add(time.Microsecond), Lease: "busy"}, []int64{4, 2}},
		"under way in a window": {audit.TermFilter{Since: at(12), Until: at(13)}, []int64{4}},
		"nobody":                {audit.TermFilter{Holder: "nobody"}, []int64{}},
	} {
		terms, cut, err := audit.Terms(ctx, conn, c.f)
		require.NoError(t, err)
		assert.Equal(t, c.want, termFences(terms), name)
		assert.False(t, cut)
		if len(c.want) > 1 {
			c.f.Limit = len(c.want) - 1
			terms, cut, err = audit.Terms(ctx, conn, c.f)
			require.NoError(t, err)
			assert.Equal(t, c.want[:c.f.Limit], termFences(terms), name)
			assert.True(t, cut)
		}
	}
	terms, _, err := audit.Terms(ctx, conn, audit.TermFilter{})
	require.NoError(t, err)
	ends := map[int64]string{}
	for _, x := range terms {
		ends[x.Fence] = x.End
		assert.Equal(t, x.End == "held" || x.End == "overdue", x.ExpiresAt != nil, "%+v", x)
		assert.Equal(t, x.End == "released" || x.End == "expired", x.EndedAt != nil, "%+v", x)
	}
	assert.Equal(t, map[int64]string{2: "released", 4: "expired", 6: "held", 8: "overdue", 10: "released", 12: "gone", 14: "released"}, ends)
	assert.Equal(t, []int64{29, 9}, []int64{terms[4].Renewals, terms[3].Renewals}, "of one that nobody has followed: from its lease")
	assert.Equal(t, 90.0, terms[1].TTL)
}

func TestLeasesAreFiltered(t *testing.T) {
	ctx := context.Background()
	cfg := hour(t)
	// Of a TTL of an hour, 41 minutes are more than two thirds, and 39 are less.
	pgtest.Exec(t, cfg, `INSERT INTO fence.lease (name, fence, holder, ttl, granted_at, renewed_at, expires_at, wanted_by)
		SELECT n, f, 'H', '1 hour', clock_timestamp() - m * interval '1 minute', clock_timestamp() - m * interval '1 minute', clock_timestamp() + (60 - m) * interval '1 minute', 'W'
		  FROM (VALUES ('late', 20, 41), ('punctual', 22, 39)) v (n, f, m); UPDATE fence.lease SET ttl = '1000 years' WHERE name = 'busy'`)
	conn := connect(t, cfg)
	for name, c := range map[string]struct {
		f    audit.LeaseFilter
		want []string
	}{
		"nothing": {audit.LeaseFilter{}, []string{"busy", "free", "late", "over", "past", "punctual"}},
		"name":    {audit.LeaseFilter{Name: "over"}, []string{"over"}},
		"holder":  {audit.LeaseFilter{Holder: "H"}, []string{"late", "punctual"}},
		"held":    {audit.LeaseFilter{State: "held"}, []string{"busy", "late", "punctual"}},
		"expired": {audit.LeaseFilter{State: "expired"}, []string{"over"}},
		"free":    {audit.LeaseFilter{State: "free"}, []string{"free", "past"}},
		"overdue": {audit.LeaseFilter{Overdue: true}, []string{"late", "over"}},
		"late":    {audit.LeaseFilter{Overdue: true, State: "held"}, []string{"late"}},
	} {
		for limit := range len(c.want) + 1 {
			c.f.Limit = limit
			leases, cut, err := audit.Leases(ctx, conn, c.f)
			require.NoError(t, err)
			names := []string{}
			for _, l := range leases {
				names = append(names, l.Name)
				assert.Equal(t, l.Name == "over", l.Overdue, l.Name)
				assert.Equal(t, l.Name == "late", l.Late, l.Name)
				assert.Equal(t, l.Holder == "H", l.Wanted, l.Name)
				assert.Equal(t, l.State == "free", l.Remaining == 0 && l.RenewalAge == 0, l.Name)
				assert.Equal(t, l.State == "held", l.Remaining > 0, l.Name)
			}
			want := c.want
			if limit > 0 {
				want = want[:limit]
			}
			assert.Equal(t, want, names, name)
			assert.Equal(t, limit > 0 && limit < len(c.want), cut, name)
		}
	}
	counts, err := audit.CountLeases(ctx, conn)
	require.NoError(t, err)
	assert.Equal(t, audit.LeaseCounts{Held: 3, Overdue: 1, Free: 2}, counts)
}

// The counters are what the tables have; what has been pruned stays in them.
func TestCount(t *testing.T) {
	ctx := context.Background()
	cfg := hour(t)
	pgtest.Exec(t, cfg, `SELECT setval('fence.guard_observed', 11), setval('fence.fence_seq', 99998)`)
	count := func() audit.Counters {
		t.Helper()
		c, err := audit.Count(ctx, audit.Bounded(connect(t, cfg), time.Minute), cfg.Database)
		require.NoError(t, err)
		return c
	}
	before := count()
	assert.Equal(t, []any{7, int64(7), int64(5), int64(11), int64(99998), audit.LeaseCounts{Held: 1, Overdue: 1, Free: 2}, int64(1)},
		[]any{before.Schema, before.Losses, before.GuardRefused, before.GuardObserved, before.LastFence, before.Leases, before.Late})
	assert.InDelta(t, time.Since(noon.Add(25*time.Minute)).Seconds(), before.OldestOverdue, 3600)
	require.Len(t, before.Refusals, 2)
	expired, stale := before.Refusals[0], before.Refusals[1]
	assert.Equal(t, []any{"app.t", "expired", int64(2), int64(0)}, []any{expired.Table, expired.Reason, expired.Count, expired.Lawful})
	assert.Equal(t, []any{"app.t", "stale", int64(48), int64(1)}, []any{stale.Table, stale.Reason, stale.Count, stale.Lawful})
	assert.WithinDuration(t, noon.Add(time.Hour-time.Microsecond), stale.LastAt, 0)
	pgtest.Exec(t, cfg, `UPDATE fence.audit_loss SET last_at = '2026-01-02Z' WHERE application_name = 'a'`)
	for range 3 {
		pgtest.Exec(t, cfg, `SELECT fence.prune_audit('1 day', 1)`)
		after := count()
		assert.Equal(t, before.Losses, after.Losses)
		require.Len(t, after.Refusals, 2)
		for i, r := range after.Refusals {
			assert.Equal(t, []int64{before.Refusals[i].Count, before.Refusals[i].Lawful}, []int64{r.Count, r.Lawful})
			assert.False(t, r.LastAt.Before(before.Refusals[i].LastAt))
		}
	}
	refuse(t, cfg, `VALUES (3, 'busy', 'stale', 2, clock_timestamp()::text)`)
	assert.EqualValues(t, 50, count().Refusals[1].Count)

	empty, err := audit.Count(ctx, connect(t, pgtest.New(t)), "")
	require.NoError(t, err)
	assert.Equal(t, audit.Counters{Schema: 7, Refusals: []audit.RefusalCounter{}}, empty)
}
