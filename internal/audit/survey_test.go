package audit_test

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
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

// noon is when what these tests insert happened, long before any of it is read.
var noon = time.Date(2026, 1, 2, 12, 0, 0, 0, time.UTC)

const (
	insertTerm = `INSERT INTO fence.term (fence, name, holder, ttl, granted_at, renewals, ended_at, end_reason) `
	// insertRefusal takes number (its fence), table, key, lease, holder, application, reason, verdict, count, first, last.
	insertRefusal = `INSERT INTO fence.rejection (fence, table_name, row_key, row_key_hash, lease_name, holder, application_name, reason, verdict, count, first_at, last_at)
		SELECT n, t, k, sha256(k::text::bytea), l, h, a, r, v, c, f, x FROM (%s) i (n, t, k, l, h, a, r, v, c, f, x)`
)

// refuse inserts refusals of table app.t: number, lease, verdict, count and when.
func refuse(t *testing.T, cfg *pgx.ConnConfig, rows string) {
	t.Helper()
	pgtest.Exec(t, cfg, fmt.Sprintf(insertRefusal, `SELECT n, 'app.t', jsonb_build_object('id', n), l, 'h' || n, 'app' || n, CASE v WHEN 'expired' THEN 'expired' ELSE 'stale' END, v, c, x::timestamptz, x::timestamptz
		FROM (`+rows+`) s (n, l, v, c, x)`))
}

func sqlTime(at time.Time) string { return at.UTC().Format("'2006-01-02 15:04:05.000000Z'") }

func survey(t *testing.T, cfg *pgx.ConnConfig, opt audit.SurveyOptions) *audit.Overview {
	t.Helper()
	o, err := audit.Survey(context.Background(), connect(t, cfg), cfg.Database, opt)
	require.NoError(t, err)
	consistent(t, cfg, o, opt.Lease)
	return o
}

func ask(t *testing.T, cfg *pgx.ConnConfig, sql string, args []any, into ...any) {
	t.Helper()
	conn, err := pgx.ConnectConfig(context.Background(), cfg)
	require.NoError(t, err)
	defer func() { _ = conn.Close(context.Background()) }()
	require.NoError(t, conn.QueryRow(context.Background(), sql, args...).Scan(into...))
}

// consistent checks that everything an overview says is one and the same thing, and is what SQL says.
func consistent(t *testing.T, cfg *pgx.ConnConfig, o *audit.Overview, lease string) {
	t.Helper()
	window := []any{o.Since, o.Until, lease}
	var refusals, rows, stale, expired, lawful, unknown int64
	ask(t, cfg, `SELECT coalesce(sum(count), 0)::bigint, count(*), coalesce(sum(count) FILTER (WHERE verdict = 'stale'), 0)::bigint, coalesce(sum(count) FILTER (WHERE verdict = 'expired'), 0)::bigint,
		coalesce(sum(count) FILTER (WHERE verdict = 'lawful'), 0)::bigint, coalesce(sum(count) FILTER (WHERE verdict = 'unknown'), 0)::bigint
		FROM fence.rejection WHERE last_at >= $1 AND last_at < $2 AND $3 IN ('', lease_name)`, window, &refusals, &rows, &stale, &expired, &lawful, &unknown)
	assert.Equal(t, []int64{refusals, rows, stale, expired, lawful, unknown},
		[]int64{o.Refusals.Refusals, o.Refusals.Rows, o.Refusals.Stale, o.Refusals.Expired, o.Refusals.Lawful, o.Refusals.Unknown})
	var bins [4]int64
	for i, b := range o.Histogram {
		if i > 0 {
			assert.Equal(t, o.Histogram[i-1].To, b.From, "no gap")
		}
		for j, n := range []int64{b.Stale, b.Expired, b.Lawful, b.Unknown} {
			bins[j] += n
		}
	}
	assert.Equal(t, [4]int64{stale, expired, lawful, unknown}, bins)
	assert.Equal(t, o.Since, o.Histogram[0].From)
	assert.Equal(t, o.Until, o.Histogram[len(o.Histogram)-1].To)
	var inLanes, leases int64
	for _, l := range o.Lanes {
		var terms, refused, marked, rows int64
		ask(t, cfg, `SELECT count(*) FROM fence.term WHERE name = $3 AND granted_at < $2 AND (ended_at IS NULL OR ended_at >= $1)`, []any{o.Since, o.Until, l.Lease}, &terms)
		assert.Equal(t, terms, l.Terms, l.Lease)
		ask(t, cfg, `SELECT coalesce(sum(count), 0)::bigint, count(*) FROM fence.rejection WHERE lease_name = $3 AND last_at >= $1 AND last_at < $2`, []any{o.Since, o.Until, l.Lease}, &refused, &rows)
		assert.Equal(t, refused, l.Refusals, l.Lease)
		inLanes += refused
		for i, s := range l.Spans {
			terms -= s.Terms
			assert.False(t, i > 0 && s.From.Before(l.Spans[i-1].From), "in order")
			assert.Equal(t, s.Terms == 1, s.OldFence == s.Fence, "%+v", s)
		}
		for i, m := range l.Marks {
			marked += m.Refusals
			rows -= m.Rows
			assert.False(t, i > 0 && m.At.Before(l.Marks[i-1].At), "in order")
		}
		assert.Zero(t, terms, "terms of %s that no span stands for", l.Lease)
		assert.Zero(t, rows, "rows of %s that no mark stands for", l.Lease)
		assert.Equal(t, refused, marked, l.Lease)
	}
	ask(t, cfg, `SELECT count(*) FROM (SELECT name FROM fence.term WHERE granted_at < $2 AND (ended_at IS NULL OR ended_at >= $1) AND $3 IN ('', name)
		UNION SELECT lease_name FROM fence.rejection WHERE last_at >= $1 AND last_at < $2 AND $3 IN ('', lease_name)) x`, window, &leases)
	assert.Equal(t, leases, int64(len(o.Lanes))+o.LanesLeftOut)
	if o.LanesLeftOut == 0 {
		assert.Equal(t, refusals, inLanes)
	}
	for _, top := range o.Top {
		var sum int64
		for _, r := range top.Rows {
			sum += r.Refusals
		}
		if !top.Cut {
			assert.Equal(t, refusals, sum, top.By)
		}
	}
}

// What happened in an hour: every end of a term, every verdict, and a lease that is known by its refusals alone.
func hour(t *testing.T) *pgx.ConnConfig {
	t.Helper()
	cfg := pgtest.New(t)
	pgtest.Exec(t, cfg, insertTerm+`VALUES
		(2, 'busy', 'A', '1 min', '2026-01-02 12:00Z', 3, '2026-01-02 12:05Z', 'released'),
		(4, 'busy', 'B', '1 min', '2026-01-02 12:10Z', 1, '2026-01-02 12:20Z', 'expired'),
		(6, 'busy', 'C', '1 min', '2026-01-02 12:30Z', 0, NULL, NULL),
		(8, 'over', 'D', '1 min', '2026-01-02 12:15Z', 0, NULL, NULL),
		(10, 'free', 'E', '1 min', '2026-01-02 12:40Z', 2, '2026-01-02 12:41Z', 'released'),
		(12, 'gone', 'F', '90 s', '2026-01-02 12:50Z', 0, NULL, NULL),
		(14, 'past', 'G', '1 min', '2026-01-02 10:00Z', 0, '2026-01-02 11:00Z', 'released');
		INSERT INTO fence.lease (name, fence, holder, ttl, granted_at, renewed_at, renewals, expires_at, released_at) VALUES
		('busy', 6, 'C', '1 min', '2026-01-02 12:30Z', '2026-01-02 12:59Z', 29, '2100-01-01Z', NULL),
		('over', 8, 'D', '1 min', '2026-01-02 12:15Z', '2026-01-02 12:24Z', 9, '2026-01-02 12:25Z', NULL),
		('free', 10, 'E', '1 min', '2026-01-02 12:40Z', '2026-01-02 12:40Z', 2, '2026-01-02 12:42Z', '2026-01-02 12:41Z'),
		('past', 14, 'G', '1 min', '2026-01-02 10:00Z', '2026-01-02 10:00Z', 0, '2026-01-02 11:00Z', '2026-01-02 11:00Z');
		INSERT INTO fence.lease (name) VALUES ('never granted');
		INSERT INTO fence.audit_loss (application_name, db_user, count) VALUES ('a', 'u', 3), ('b', 'u', 4); SELECT setval('fence.guard_refused', 5)`)
	refuse(t, cfg, `VALUES (2, 'busy', 'stale', 7, '2026-01-02 12:31:00.000001Z'), (4, 'busy', 'lawful', 1, '2026-01-02 12:32Z'),
		(8, 'over', 'expired', 2, '2026-01-02 12:26Z'), (99, 'elsewhere', 'unknown', 40, '2026-01-02 12:59:59.999999Z')`)
	pgtest.Exec(t, cfg, `UPDATE fence.rejection SET current_fence = 6, current_holder = 'C', first_at = '2026-01-02 12:30:30Z' WHERE fence = 2`)
	return cfg
}

func TestSurveyIsWhatTheDatabaseHas(t *testing.T) {
	cfg := hour(t)
	check := &audit.Verification{}
	o := survey(t, cfg, audit.SurveyOptions{Since: noon, Until: noon.Add(time.Hour), Server: "here", Verify: check, Bins: 6, Timeout: time.Minute})
	at := func(minute int) time.Time { return noon.Add(time.Duration(minute) * time.Minute) }
	assert.Equal(t, []any{cfg.Database, "here", false, 7}, []any{o.Database, o.Server, o.Standby, o.Schema})
	assert.Same(t, check, o.Verify)
	assert.Equal(t, audit.LeaseCounts{Held: 1, Overdue: 1, Free: 2}, o.Leases, "as they are now, whatever the window, and none that was never granted")
	assert.Equal(t, audit.RefusalCounts{Refusals: 50, Rows: 4, Stale: 7, Expired: 2, Lawful: 1, Unknown: 40, Lost: 7, GuardOnly: 5}, o.Refusals)

	six := int64(6)
	first := at(31).Add(time.Microsecond)
	mark := func(id, n, count int64, verdict string, at time.Time) audit.Mark {
		reason := "stale"
		if verdict == "expired" {
			reason = verdict
		}
		return audit.Mark{From: at, At: at, Refusals: count, Rows: 1, Verdict: verdict, ID: id, Table: "app.t", Key: fmt.Sprintf(`{"id": %d}`, n), Reason: reason, Fence: n,
			Holder: fmt.Sprint("h", n), Application: fmt.Sprint("app", n)}
	}
	ids := map[int64]int64{}
	for _, r := range o.Latest {
		ids[r.Fence] = r.ID
	}
	stale := mark(ids[2], 2, 7, "stale", first)
	stale.CurrentFence, stale.CurrentHolder = &six, "C"
	for i := range o.Lanes { // what is held is held until the clock of the database
		for j := range o.Lanes[i].Spans {
			if s := &o.Lanes[i].Spans[j]; s.End == "held" {
				assert.InDelta(t, o.At.Sub(s.From).Seconds(), s.Held, 0.001)
				s.Held = 0
			}
		}
	}
	assert.Equal(t, []audit.Lane{
		{Lease: "busy", Terms: 3, Refusals: 8, Marks: []audit.Mark{stale, mark(ids[4], 4, 1, "lawful", at(32))}, Spans: []audit.Span{
			{From: at(0), To: at(5), Fence: 2, Holder: "A", End: "released", Renewals: 3, Terms: 1, OldFence: 2, Held: 300},
			{From: at(10), To: at(20), Fence: 4, Holder: "B", End: "expired", Renewals: 1, Terms: 1, OldFence: 4, AllLapsed: true, Lapsed: 1, Held: 600},
			{From: at(30), To: time.Date(2100, 1, 1, 0, 0, 0, 0, time.UTC), Fence: 6, Holder: "C", End: "held", Renewals: 29, Terms: 1, OldFence: 6},
		}},
		{Lease: "elsewhere", Refusals: 40, Marks: []audit.Mark{mark(ids[99], 99, 40, "unknown", at(60).Add(-time.Microsecond))}},
		{Lease: "over", Terms: 1, Refusals: 2, Marks: []audit.Mark{mark(ids[8], 8, 2, "expired", at(26))}, Spans: []audit.Span{
			{From: at(15), To: at(25), Fence: 8, Holder: "D", End: "overdue", Renewals: 9, Terms: 1, OldFence: 8, AllLapsed: true, Lapsed: 1, Held: 600},
		}},
		{Lease: "gone", Terms: 1, Spans: []audit.Span{ // its lease was deleted: what is known is its TTL
			{From: at(50), To: at(50).Add(90 * time.Second), Fence: 12, Holder: "F", End: "overdue", Terms: 1, OldFence: 12, AllLapsed: true, Lapsed: 1, Held: 90},
		}},
		{Lease: "free", Terms: 1, Spans: []audit.Span{
			{From: at(40), To: at(41), Fence: 10, Holder: "E", End: "released", Renewals: 2, Terms: 1, OldFence: 10, Held: 60},
		}},
	}, o.Lanes, "those with lawful refusals first, then those with others, then those with the latest grants; and none of another time")
	assert.Zero(t, o.LanesLeftOut)
	assert.Equal(t, []audit.Bin{
		{From: at(0), To: at(10)}, {From: at(10), To: at(20)}, {From: at(20), To: at(30), Expired: 2},
		{From: at(30), To: at(40), Stale: 7, Lawful: 1}, {From: at(40), To: at(50)}, {From: at(50), To: at(60), Unknown: 40},
	}, o.Histogram)

	require.Len(t, o.Top, 5)
	assert.Equal(t, audit.TopList{By: "lease", Rows: []audit.Top{
		{Value: "elsewhere", Refusals: 40, Rows: 1, LastAt: at(60).Add(-time.Microsecond)}, {Value: "busy", Refusals: 8, Rows: 2, Lawful: 1, LastAt: at(32)},
		{Value: "over", Refusals: 2, Rows: 1, LastAt: at(26)},
	}}, o.Top[2])
	var latest []int64
	for _, r := range o.Latest {
		latest = append(latest, r.Fence)
		assert.Equal(t, &audit.RowNow{State: "unknown", Note: "the table is not protected any more"}, r.Now)
	}
	assert.Equal(t, []int64{99, 4, 2, 8}, latest)
	assert.False(t, o.LatestCut)
	assert.Equal(t, noon.Add(30*time.Minute+30*time.Second), o.Latest[2].FirstAt)
	assert.WithinDuration(t, time.Now(), o.At, time.Hour)

	o = survey(t, cfg, audit.SurveyOptions{Latest: 3})
	assert.Len(t, o.Latest, 3)
	assert.True(t, o.LatestCut)
	assert.Equal(t, time.Date(2026, 1, 2, 12, 0, 0, 0, time.UTC), o.Since, "from the grant of the lowest fence on")
	assert.Equal(t, o.At.Add(time.Microsecond), o.Until)
	_, err := json.Marshal(o)
	require.NoError(t, err)
}

func TestSurveyOfOneLease(t *testing.T) {
	cfg := hour(t)
	o := survey(t, cfg, audit.SurveyOptions{Lease: "over"})
	require.Len(t, o.Lanes, 1)
	assert.Equal(t, noon.Add(15*time.Minute), o.Since, "its first grant")
	assert.EqualValues(t, 2, o.Refusals.Refusals)
	assert.Len(t, o.Latest, 1)
	for _, top := range o.Top {
		assert.Len(t, top.Rows, 1, top.By)
	}
	for _, name := range []string{"nonesuch", "busy' OR ''='", "%"} {
		o = survey(t, cfg, audit.SurveyOptions{Lease: name})
		assert.Empty(t, o.Lanes)
		assert.Zero(t, o.Refusals.Refusals)
	}
}

// The window is [Since, Until) to the microsecond, for refusals; a term is in it if it was under way at some time of it.
func TestSurveyWindow(t *testing.T) {
	cfg := pgtest.New(t)
	until := noon.Add(time.Hour)
	us := time.Microsecond
	refuse(t, cfg, fmt.Sprintf(`VALUES (1, 'l', 'stale', 1, %s), (2, 'l', 'stale', 1, %s), (3, 'l', 'stale', 1, %s), (4, 'l', 'stale', 1, %s)`,
		sqlTime(noon.Add(-us)), sqlTime(noon), sqlTime(until.Add(-us)), sqlTime(until)))
	for i, x := range [][2]time.Time{{noon.Add(-time.Hour), noon.Add(-us)}, {noon.Add(-time.Hour), noon}, {noon.Add(-time.Hour), until.Add(time.Hour)}, {until.Add(-us), until.Add(us)}, {until, until.Add(us)}} {
		pgtest.Exec(t, cfg, insertTerm+fmt.Sprintf(`VALUES (%d, 't%d', 'h', '1 s', %s, 0, %s, 'released')`, i+1, i, sqlTime(x[0]), sqlTime(x[1])))
	}
	o := survey(t, cfg, audit.SurveyOptions{Since: noon, Until: until})
	require.Len(t, o.Lanes, 4)
	var fences, leases []string
	for _, m := range o.Lanes[0].Marks {
		fences = append(fences, fmt.Sprint(m.Fence))
	}
	assert.Equal(t, []string{"2", "3"}, fences)
	assert.Len(t, o.Latest, 2)
	assert.EqualValues(t, 1, o.Histogram[0].Stale)
	assert.EqualValues(t, 1, o.Histogram[59].Stale)
	for _, l := range o.Lanes[1:] {
		leases = append(leases, l.Lease)
	}
	assert.Equal(t, []string{"t3", "t2", "t1"}, leases)

	// What has no length is shown with a second before it; and before the first event there is nothing, and no error.
	o = survey(t, cfg, audit.SurveyOptions{Since: until, Until: until})
	assert.Equal(t, until.Add(-time.Second), o.Since)
	early := noon.AddDate(-1, 0, 0)
	for _, opt := range []audit.SurveyOptions{{Until: early}, {Since: early.Add(-time.Minute), Until: early}, {Since: early, Until: early.Add(-time.Hour)}} {
		o = survey(t, cfg, opt)
		assert.Empty(t, o.Lanes)
		assert.Zero(t, o.Refusals)
		assert.Equal(t, opt.Until, o.Until)
		assert.True(t, o.Since.Before(o.Until))
	}
}

// Each refusal is in the bin whose bounds it lies between, also where a bin is no whole number of microseconds long.
func TestSurveyBins(t *testing.T) {
	for _, c := range []struct {
		length time.Duration
		bins   int
	}{{time.Second, 60}, {time.Second, 7}, {24 * time.Hour, 60}, {time.Hour + time.Microsecond, 59}, {30*24*time.Hour + 12345*time.Microsecond, 61}} {
		t.Run(fmt.Sprint(c.length, " in ", c.bins), func(t *testing.T) {
			cfg := pgtest.New(t)
			width := c.length / time.Duration(c.bins)
			var rows []string
			want := make([]int64, c.bins)
			add := func(off time.Duration) {
				if off = off.Truncate(time.Microsecond); off < 0 || off >= c.length {
					return
				}
				i := min(int(off/width), c.bins-1)
				want[i] += int64(len(rows) + 1)
				rows = append(rows, fmt.Sprintf(`(%d, 'l', 'stale', %d, %s)`, len(rows)+1, len(rows)+1, sqlTime(noon.Add(off))))
			}
			for i := range c.bins + 1 {
				edge := time.Duration(i) * width
				add(edge - 2*time.Microsecond)
				add(edge + 2*time.Microsecond)
				add(edge + width/2)
				if edge%time.Microsecond == 0 {
					add(edge)
				}
			}
			for range 200 {
				off := time.Duration(rand.Int64N(int64(c.length))).Truncate(time.Microsecond)
				if near := off % width; near > time.Microsecond && width-near > time.Microsecond {
					add(off)
				}
			}
			refuse(t, cfg, `VALUES `+strings.Join(rows, ", "))
			o := survey(t, cfg, audit.SurveyOptions{Since: noon, Until: noon.Add(c.length), Bins: c.bins})
			var got []int64
			for _, b := range o.Histogram {
				got = append(got, b.Stale)
			}
			assert.Equal(t, want, got)
		})
	}
}

// However much there is, what is returned is bounded, and nothing of it is lost.
func TestSurveyOfVeryMuch(t *testing.T) {
	cfg := pgtest.New(t)
	pgtest.Exec(t, cfg, insertTerm+`SELECT i * 2, 'many', 'h' || i, '1 s', timestamptz '2026-01-02 12:00Z' + i * interval '180 ms', i % 3,
		timestamptz '2026-01-02 12:00Z' + i * interval '180 ms' + interval '100 ms', CASE WHEN i % 4 = 0 THEN 'expired' ELSE 'released' END FROM generate_series(0, 19999) i WHERE i > 0;`+
		insertTerm+`VALUES (2 * 20000, 'many', 'the last', '1 s', '2026-01-02 12:59:59.9Z', 0, NULL, NULL), (50001, 'many', 'before', '1 s', '2026-01-02 11:59Z', 0, '2026-01-02 12:00:01Z', 'expired');`+
		insertTerm+`SELECT 60000 + i, 'few', 'h' || i, '1 s', timestamptz '2026-01-02 12:00Z' + i * interval '1 ms', 0, timestamptz '2026-01-02 12:00Z' + i * interval '1 ms', 'released' FROM generate_series(1, 300) i;`+
		insertTerm+`SELECT 70000 + i, 'more', 'h' || i, '1 s', timestamptz '2026-01-02 12:00Z' + i * interval '1 ms', 0, timestamptz '2026-01-02 12:00Z' + i * interval '1 ms', 'expired' FROM generate_series(1, 301) i;`)
	refuse(t, cfg, `SELECT i, 'many', CASE WHEN i = 77777 THEN 'lawful' WHEN i <= 2000 THEN 'unknown' WHEN i % 2 = 0 AND i > 50000 THEN 'stale' ELSE 'expired' END, i % 5 + 1,
		timestamptz '2026-01-02 12:00Z' + i * interval '35 ms' FROM generate_series(1, 100000) i`)
	refuse(t, cfg, `SELECT i, 'few', 'stale', 1, timestamptz '2026-01-02 12:00Z' + i * interval '1 ms' FROM generate_series(1, 100) i`)
	refuse(t, cfg, `SELECT i, 'more', 'stale', 1, timestamptz '2026-01-02 12:00Z' + i * interval '1 ms' FROM generate_series(1, 101) i`)
	o := survey(t, cfg, audit.SurveyOptions{Since: noon, Until: noon.Add(time.Hour)})
	lanes := map[string]audit.Lane{}
	for _, l := range o.Lanes {
		lanes[l.Lease] = l
	}
	many := lanes["many"]
	assert.EqualValues(t, 20001, many.Terms)
	assert.EqualValues(t, 300000, many.Refusals)
	assert.LessOrEqual(t, len(many.Spans), 302)
	assert.Greater(t, len(many.Spans), 250)
	assert.LessOrEqual(t, len(many.Marks), 102)
	assert.Greater(t, len(many.Marks), 80)
	assert.Len(t, lanes["few"].Spans, 300, "as many as there may be are kept apart")
	assert.Len(t, lanes["few"].Marks, 100)
	assert.Len(t, lanes["more"].Spans, 1, "of a third of a second in an hour")
	assert.Len(t, lanes["more"].Marks, 1)
	assert.True(t, lanes["more"].Spans[0].AllLapsed)
	assert.Len(t, o.Latest, 50)
	for _, top := range o.Top {
		assert.LessOrEqual(t, len(top.Rows), 10)
		assert.Equal(t, slices.Contains([]string{"holder", "application"}, top.By), top.Cut, top.By)
	}

	// Each mark has the worst of what it stands for, and each span what its terms have.
	worst := map[string]int{"lawful": 0, "stale": 0, "expired": 0, "unknown": 0}
	for _, m := range many.Marks {
		worst[m.Verdict]++
		var want string
		var refusals, id int64
		ask(t, cfg, `SELECT CASE WHEN bool_or(verdict = 'lawful') THEN 'lawful' WHEN bool_or(verdict = 'stale') THEN 'stale' WHEN bool_or(verdict = 'expired') THEN 'expired' ELSE 'unknown' END,
			sum(count)::bigint, (array_agg(id ORDER BY last_at DESC))[1] FROM fence.rejection WHERE lease_name = 'many' AND last_at BETWEEN $1 AND $2`, []any{m.From, m.At}, &want, &refusals, &id)
		require.Equal(t, want, m.Verdict)
		require.Equal(t, refusals, m.Refusals)
		require.Equal(t, id, m.ID)
	}
	assert.Equal(t, 1, worst["lawful"])
	for verdict, n := range worst {
		assert.Positive(t, n, verdict)
	}
	var held float64
	for _, s := range many.Spans[1:] {
		var terms, lapsed, renewals, newest, oldest int64
		var holder string
		ask(t, cfg, `SELECT count(*), count(*) FILTER (WHERE end_reason = 'expired' OR end_reason IS NULL), sum(renewals)::bigint, max(fence), min(fence), (array_agg(holder ORDER BY fence DESC))[1]
			FROM fence.term WHERE name = 'many' AND fence BETWEEN $1 AND $2`, []any{s.OldFence, s.Fence}, &terms, &lapsed, &renewals, &newest, &oldest, &holder)
		require.Equal(t, []any{terms, lapsed, renewals, newest, oldest, holder, terms == lapsed}, []any{s.Terms, s.Lapsed, s.Renewals, s.Fence, s.OldFence, s.Holder, s.AllLapsed})
		held += s.Held
	}
	assert.InDelta(t, 1999.9+1, held, 0.01)
	last := many.Spans[len(many.Spans)-1]
	assert.Equal(t, []any{"overdue", "the last", int64(40000)}, []any{last.End, last.Holder, last.Fence})
	assert.Equal(t, noon.Add(-time.Minute), many.Spans[0].From, "what began before the window is a span of its own")
	assert.EqualValues(t, 1, many.Spans[0].Terms)

	small := survey(t, cfg, audit.SurveyOptions{Since: noon, Until: noon.Add(time.Hour), Spans: 10, Marks: 5, Bins: 3, Latest: 2, Lanes: 1})
	assert.Len(t, small.Lanes, 1)
	assert.EqualValues(t, 2, small.LanesLeftOut)
	assert.LessOrEqual(t, len(small.Lanes[0].Spans), 12)
	assert.LessOrEqual(t, len(small.Lanes[0].Marks), 7)
	assert.Len(t, small.Histogram, 3)
}

func TestSurveyLeavesLanesOut(t *testing.T) {
	cfg := pgtest.New(t)
	pgtest.Exec(t, cfg, insertTerm+`SELECT i * 2, 'l' || i, 'h', '1 s', '2026-01-02 12:00Z', 0, '2026-01-02 12:01Z', 'released' FROM generate_series(1, 70) i`)
	refuse(t, cfg, `VALUES (2, 'l1', 'stale', 1, '2026-01-02 12:00Z'), (4, 'l2', 'stale', 5, '2026-01-02 12:00Z'), (5, 'x', 'unknown', 2, '2026-01-02 12:00Z')`)
	o := survey(t, cfg, audit.SurveyOptions{Since: noon, Until: noon.Add(time.Hour)})
	require.Len(t, o.Lanes, 50)
	assert.EqualValues(t, 21, o.LanesLeftOut)
	assert.Equal(t, []string{"l2", "x", "l1", "l70"}, []string{o.Lanes[0].Lease, o.Lanes[1].Lease, o.Lanes[2].Lease, o.Lanes[3].Lease})
	assert.Equal(t, "l24", o.Lanes[49].Lease)
}

func TestSurveyOfAnEmptyDatabase(t *testing.T) {
	cfg := pgtest.New(t)
	o := survey(t, cfg, audit.SurveyOptions{})
	assert.Empty(t, o.Lanes)
	assert.Zero(t, o.Refusals)
	assert.Zero(t, o.Leases)
	assert.Empty(t, o.Latest)
	assert.Empty(t, o.Tables)
	assert.Len(t, o.Histogram, 60)
	assert.Equal(t, time.Hour, o.Until.Sub(o.Since))

	_, err := audit.Survey(context.Background(), connect(t, pgtest.NewEmpty(t)), "x", audit.SurveyOptions{})
	require.ErrorContains(t, err, "fencecheck migrate up")
}

// All of it is read at one moment: what is committed meanwhile is in all of it or in none.
func TestSurveyIsOneMoment(t *testing.T) {
	cfg := hour(t)
	db := &meddler{Beginner: connect(t, cfg), between: func() {
		refuse(t, cfg, `VALUES (1000, 'new', 'lawful', 1000, '2026-01-02 12:30Z')`)
	}}
	o, err := audit.Survey(context.Background(), db, cfg.Database, audit.SurveyOptions{Since: noon, Until: noon.Add(time.Hour)})
	require.NoError(t, err)
	require.True(t, db.done)
	assert.EqualValues(t, 50, o.Refusals.Refusals)
	assert.Len(t, o.Lanes, 5)
	assert.Len(t, o.Latest, 4)
	_, err = audit.Survey(context.Background(), connect(t, cfg), cfg.Database, audit.SurveyOptions{Timeout: time.Minute})
	require.NoError(t, err)
}

// meddler does something after the refusals have been counted and before the lanes are read.
type meddler struct {
	audit.Beginner
	between func()
	done    bool
}

func (m *meddler) BeginTx(ctx context.Context, opt pgx.TxOptions) (pgx.Tx, error) {
	tx, err := m.Beginner.BeginTx(ctx, opt)
	return &meddlersTx{tx, m}, err
}

type meddlersTx struct {
	pgx.Tx
	m *meddler
}

func (x *meddlersTx) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	if !x.m.done && strings.Contains(sql, "FULL JOIN") {
		x.m.done = true
		x.m.between()
	}
	return x.Tx.Query(ctx, sql, args...)
}

// A statement that takes too long ends, and so does the reading.
func TestSurveyIsBoundedInTime(t *testing.T) {
	cfg := hour(t)
	conn := connect(t, cfg)
	tx, err := conn.Begin(context.Background())
	require.NoError(t, err)
	_, err = tx.Exec(context.Background(), `LOCK TABLE fence.term IN ACCESS EXCLUSIVE MODE`)
	require.NoError(t, err)
	_, err = audit.Survey(context.Background(), connect(t, cfg), cfg.Database, audit.SurveyOptions{Timeout: 20 * time.Millisecond})
	require.ErrorContains(t, err, "57014")
	require.NoError(t, tx.Rollback(context.Background()))
	o := survey(t, cfg, audit.SurveyOptions{})
	assert.Len(t, o.Lanes, 5)
}

func TestSurveyOnAStandby(t *testing.T) {
	server := pgtest.Own(t)
	cfg := server.Config("postgres")
	migrated(t, cfg)
	pgtest.Exec(t, cfg, `SELECT fence.acquire('x', 'A', '1 hour', gen_random_uuid()); CREATE TABLE orders (id int PRIMARY KEY); INSERT INTO orders VALUES (1); SELECT fence.protect('orders'); UPDATE orders SET last_fence = 2;
		SELECT fence.record_rejection('public.orders', '{"id": 1}', 'x', NULL, 1, 'stale', 2, 'B')`)
	standby := server.Standby(t).Config("postgres")
	require.Eventually(t, func() bool {
		var there bool
		err := connect(t, standby).QueryRow(context.Background(), `SELECT EXISTS (SELECT 1 FROM fence.rejection)`).Scan(&there)
		return err == nil && there
	}, time.Minute, 20*time.Millisecond)
	o := survey(t, standby, audit.SurveyOptions{Timeout: time.Minute})
	assert.True(t, o.Standby)
	assert.Equal(t, audit.LeaseCounts{Held: 1}, o.Leases)
	require.Len(t, o.Lanes, 1)
	require.Len(t, o.Latest, 1)
	two := int64(2)
	assert.Equal(t, &audit.RowNow{State: "present", Fence: &two, Holder: "A", Lease: "x"}, o.Latest[0].Now)
	assert.False(t, survey(t, cfg, audit.SurveyOptions{}).Standby)
}

// role makes a role, and returns its name and how to connect as it.
func role(t *testing.T, cfg *pgx.ConnConfig, rights string) (string, *pgx.ConnConfig) {
	t.Helper()
	name := "wg_" + cfg.Database // roles are the whole server's
	pgtest.Exec(t, cfg, `CREATE ROLE `+name+` LOGIN PASSWORD 'x'`)
	t.Cleanup(func() { pgtest.Exec(t, cfg, `DROP OWNED BY `+name+`; DROP ROLE `+name) })
	pgtest.Exec(t, cfg, strings.ReplaceAll(rights, "ROLE", name))
	as := cfg.Copy()
	as.User, as.Password = name, "x"
	return name, as
}

func TestSurveyNeedsRights(t *testing.T) {
	cfg := hour(t)
	name, as := role(t, cfg, "")
	fails := func(grants ...string) {
		t.Helper()
		_, err := audit.Survey(context.Background(), connect(t, as), cfg.Database, audit.SurveyOptions{})
		require.ErrorIs(t, err, audit.ErrPrivilege)
		for _, g := range grants {
			require.ErrorContains(t, err, g+" TO "+name)
		}
		require.ErrorContains(t, err, "SELECT fence.allow('"+name+"', 'auditor')")
	}
	fails("GRANT USAGE ON SCHEMA fence")
	pgtest.Exec(t, cfg, `GRANT USAGE ON SCHEMA fence TO `+name)
	fails("GRANT SELECT (name, fence, holder, ttl, granted_at, renewed_at, renewals, expires_at, released_at, wanted_by) ON fence.lease", "GRANT SELECT ON fence.term", "GRANT SELECT ON fence.rejection",
		"GRANT SELECT ON fence.protected_table", "GRANT SELECT ON fence.observation", "GRANT SELECT ON fence.audit_loss", "GRANT SELECT ON fence.guard_refused")
	pgtest.Exec(t, cfg, `SELECT fence.allow('`+name+`', 'auditor')`)
	for _, relation := range []string{"term", "rejection", "observation", "guard_refused"} {
		pgtest.Exec(t, cfg, `REVOKE SELECT ON fence.`+relation+` FROM `+name)
		fails("GRANT SELECT ON fence." + relation)
		pgtest.Exec(t, cfg, `GRANT SELECT ON fence.`+relation+` TO `+name)
	}
	survey(t, as, audit.SurveyOptions{})
}

// An auditor sees all but the rows of tables, which it is told, and nothing else suffers from it.
func TestSurveyByAnAuditor(t *testing.T) {
	cfg := pgtest.New(t)
	pgtest.Exec(t, cfg, `CREATE SCHEMA app; CREATE SCHEMA seen; CREATE TABLE app.hidden (id int PRIMARY KEY); CREATE TABLE seen.t (id int PRIMARY KEY); INSERT INTO seen.t VALUES (1); SELECT fence.protect('app.hidden'), fence.protect('seen.t');
		SELECT fence.acquire('x', 'A', '1 hour', gen_random_uuid()); UPDATE seen.t SET last_fence = 2;
		SELECT fence.record_rejection('seen.t', '{"id": 1}', 'x', NULL, 1, 'stale', 2, 'B');
		SELECT fence.record_rejection('app.hidden', '{"id": 1}', 'x', NULL, 1, 'stale', 4, 'B')`)
	_, as := role(t, cfg, `SELECT fence.allow('ROLE', 'auditor'); GRANT USAGE ON SCHEMA seen TO ROLE; GRANT SELECT ON seen.t TO ROLE`)
	o := survey(t, as, audit.SurveyOptions{})
	require.Len(t, o.Latest, 2)
	now := map[string]*audit.RowNow{}
	for _, r := range o.Latest {
		now[r.Table] = r.Now
	}
	two := int64(2)
	assert.Equal(t, &audit.RowNow{State: "unknown", Note: "this role may not read the table"}, now["app.hidden"])
	assert.Equal(t, &audit.RowNow{State: "present", Fence: &two, Holder: "A", Lease: "x"}, now["seen.t"])
	require.Len(t, o.Tables, 2, "which are read after that, in the same transaction")
	assert.Empty(t, o.Tables[0].Wrong)
}
