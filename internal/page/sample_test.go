package page_test

import (
	"fmt"
	"math"
	"strings"
	"time"

	"github.com/writegate/writegate/internal/audit"
)

var noon = time.Date(2026, 11, 29, 12, 0, 0, 0, time.UTC)

func ago(d time.Duration) time.Time { return noon.Add(-d) }

func ptr[T any](v T) *T { return &v }

// sample is an overview with one of everything: each end of a term, each verdict, single and merged.
func sample() *audit.Overview {
	const f = int64(1764417600000000)
	minute := time.Minute
	o := &audit.Overview{
		Database: "orders", Server: "db1.example.net:5432", Schema: 7, At: noon, Since: ago(60 * minute), Until: noon,
		Leases: audit.LeaseCounts{Held: 2, Overdue: 1, Free: 5},
		Lanes: []audit.Lane{
			{Lease: "billing", Terms: 40, Refusals: 46, Spans: []audit.Span{
				{From: ago(70 * minute), To: ago(48 * minute), Fence: f + 2, Holder: "worker-1.eu/4711", End: "expired", Renewals: 66, Terms: 1, OldFence: f + 2, Lapsed: 1, AllLapsed: true, Held: 22 * 60},
				{From: ago(46 * minute), To: ago(30 * minute), Fence: f + 4, Holder: "worker-2.eu/812", End: "released", Renewals: 48, Terms: 1, OldFence: f + 4, Held: 16 * 60},
				{From: ago(29 * minute), To: ago(17 * minute), Fence: f + 78, Holder: "worker-3.eu/9", End: "released", Renewals: 3, Terms: 37, OldFence: f + 6, Lapsed: 12, Held: 11 * 60},
				{From: ago(15 * minute), To: noon.Add(20 * time.Second), Fence: f + 80, Holder: "worker-2.eu/812", End: "held", Renewals: 45, Terms: 1, OldFence: f + 80, Held: 15 * 60},
			}, Marks: []audit.Mark{
				{From: ago(45 * minute), At: ago(45 * minute), Refusals: 1, Rows: 1, Verdict: "stale", ID: 11, Table: "app.invoice", Key: `{"id": 17}`, Reason: "stale", Fence: f + 2, CurrentFence: ptr(f + 4), Holder: "worker-1.eu/4711", CurrentHolder: "worker-2.eu/812", Application: "billing"},
				{From: ago(28 * minute), At: ago(25 * minute), Refusals: 37, Rows: 5, Verdict: "stale", ID: 12, Table: "app.invoice", Key: `{"id": 18}`, Reason: "superseded", Fence: f + 4, CurrentFence: ptr(f + 9), Holder: "worker-2.eu/812", CurrentHolder: "worker-3.eu/9", Application: "billing"},
				{From: ago(10 * minute), At: ago(10 * minute), Refusals: 8, Rows: 1, Verdict: "lawful", ID: 13, Table: "app.invoice", Key: `{"id": 19}`, Reason: "stale", Fence: f + 80, CurrentFence: ptr(f + 4000), Holder: "worker-2.eu/812", Application: "billing"},
			}},
			{Lease: "nightly-report", Terms: 1, Refusals: 1, Spans: []audit.Span{
				{From: ago(40 * minute), To: ago(22 * minute), Fence: f + 60, Holder: "cron@host-9", End: "overdue", Renewals: 12, Terms: 1, OldFence: f + 60, Lapsed: 1, AllLapsed: true, Held: 18 * 60},
			}, Marks: []audit.Mark{
				{From: ago(20 * minute), At: ago(20 * minute), Refusals: 1, Rows: 1, Verdict: "expired", ID: 14, Table: "app.report", Key: `{"day": "2026-11-28"}`, Reason: "expired", Fence: f + 60, Holder: "cron@host-9", Application: "psql"},
			}},
			{Lease: "elsewhere", Refusals: 2, Marks: []audit.Mark{
				{From: ago(5 * minute), At: ago(5 * minute), Refusals: 2, Rows: 1, Verdict: "unknown", ID: 15, Table: "app.report", Key: `{"day": "2026-11-27"}`, Reason: "no_lease", Fence: 42},
			}},
			{Lease: "cleanup", Terms: 1, Spans: []audit.Span{
				{From: ago(33 * minute), To: ago(33*minute - 2*time.Second), Fence: f + 70, Holder: "cleaner", End: "released", Terms: 1, OldFence: f + 70, Held: 2},
			}},
		},
		LanesLeftOut: 3,
		Refusals:     audit.RefusalCounts{Refusals: 1049, Rows: 9, Stale: 1038, Expired: 1, Lawful: 8, Unknown: 2, Lost: 3, GuardOnly: 4},
		Top: []audit.TopList{
			{By: "table", Rows: []audit.Top{
				{Value: "app.invoice", Refusals: 1046, Rows: 7, Lawful: 8, LastAt: ago(10 * minute)},
				{Value: "app.report", Refusals: 3, Rows: 2, LastAt: ago(5 * minute)},
			}},
			{By: "holder", Rows: []audit.Top{
				{Value: "worker-2.eu/812", Refusals: 1045, Rows: 6, Lawful: 8, LastAt: ago(10 * minute)},
				{Value: "worker-1.eu/4711", Refusals: 1, Rows: 1, LastAt: ago(45 * minute)},
				{Value: "cron@host-9", Refusals: 1, Rows: 1, LastAt: ago(20 * minute)},
				{Value: "", Refusals: 2, Rows: 1, LastAt: ago(5 * minute)},
			}, Cut: true},
			{By: "lease", Rows: []audit.Top{{Value: "billing", Refusals: 46, Rows: 7, Lawful: 8, LastAt: ago(10 * minute)}}},
			{By: "reason"},
		},
		Latest: []audit.Rejection{
			{ID: 15, Table: "app.report", Key: `{"day": "2026-11-27"}`, Lease: "elsewhere", Fence: 42, Reason: "no_lease", Verdict: "unknown", Count: 2, FirstAt: ago(6 * minute), LastAt: ago(5 * minute)},
			{ID: 13, Table: "app.invoice", Key: `{"id": 19}`, Lease: "billing", Fence: f + 80, CurrentFence: ptr(f + 4000), Reason: "stale", Verdict: "lawful", Holder: "worker-2.eu/812", Count: 8, FirstAt: ago(10*minute + 3*time.Second), LastAt: ago(10 * minute), Application: "billing"},
			{ID: 14, Table: "app.report", Key: `{"day": "2026-11-28"}`, Lease: "nightly-report", Fence: f + 60, Reason: "expired", Verdict: "expired", Holder: "cron@host-9", Count: 1, FirstAt: ago(20 * minute), LastAt: ago(20 * minute), Application: "psql"},
			{ID: 12, Table: "app.invoice", Key: `{"id": 18, "tenant": "a tenant whose name is longer than a column of a table is wide"}`, Lease: "billing", Fence: f + 4, CurrentFence: ptr(f + 9), Reason: "superseded", Verdict: "stale", Holder: "worker-2.eu/812", CurrentHolder: "worker-3.eu/9", Count: 1033, FirstAt: ago(29 * minute), LastAt: ago(25 * minute), Application: "billing"},
		},
		LatestCut: true,
		Tables: []audit.Table{
			{Name: "app.invoice", FenceColumn: "last_fence", Rule: "once", Strength: "live", Guard: "enforce", Unfenced: "refuse"},
			{Name: "app.report", FenceColumn: "last_fence", Rule: "term", Strength: "fenced", Guard: "observe", Unfenced: "allow", Observed: []string{"UPDATE unfenced by psql (alice), first at 2026-11-28 09:00:00Z"}, Wrong: []string{"its guard is disabled"}},
			{Name: "app.note", FenceColumn: "last_fence", Rule: "once", Strength: "fenced", Guard: "off", Unfenced: "allow"},
		},
		Verify: &audit.Verification{
			Checks: []string{"sequence-bigint", "sequence-cache", "guard-enabled", "epoch-stamp", "clock-steps", "role-grants"},
			Findings: []audit.Finding{
				{ID: "guard-enabled", Severity: audit.SeverityError, Object: "app.report", Finding: "the guard of app.report is disabled", Fix: "ALTER TABLE app.report ENABLE TRIGGER \"~writegate_guard\""},
				{ID: "role-grants", Severity: audit.SeverityWarning, Object: "role alice", Finding: "alice may write fence.rejection", Fix: "REVOKE it", Accepted: "she restores backups"},
			},
			Unchecked: []audit.Unchecked{{ID: "row-fences", Object: "app.huge", Why: "statement timeout after 5 s"}},
			Notes:     []string{"rows of app.invoice were sampled: 10,000 of 2,113,004"},
		},
	}
	for i := range 30 {
		b := audit.Bin{From: o.Since.Add(time.Duration(i) * 2 * minute), To: o.Since.Add(time.Duration(i+1) * 2 * minute)}
		switch i {
		case 7:
			b.Stale = 1
		case 17:
			b.Stale = 520
		case 18:
			b.Stale = 517
		case 20:
			b.Expired = 1
		case 25:
			b.Lawful = 8
		case 27:
			b.Unknown = 2
		}
		o.Histogram = append(o.Histogram, b)
	}
	return o
}

// quiet is an overview without anything in it.
func quiet() *audit.Overview {
	return &audit.Overview{Database: "orders", Server: "/run/postgresql", Standby: true, Schema: 7, At: noon, Since: ago(time.Hour), Until: noon}
}

// large is an overview with as much in it as there may be.
func large() *audit.Overview {
	o := &audit.Overview{Database: "orders", Server: "db1:5432", Schema: 7, At: noon, Since: ago(24 * time.Hour), Until: noon, LanesLeftOut: 1234}
	f := int64(1764417600000000)
	for l := range 50 {
		lane := audit.Lane{Lease: fmt.Sprintf("tenant-%03d/invoices", l), Terms: 8000, Refusals: 2400}
		for i := range 400 {
			from := o.Since.Add(time.Duration(i) * 216 * time.Second)
			end := []string{"released", "released", "expired"}[(i+l)%3]
			f += 2
			lane.Spans = append(lane.Spans, audit.Span{
				From: from, To: from.Add(time.Duration(60+(i*37+l*11)%150) * time.Second), Fence: f, OldFence: f,
				Holder: fmt.Sprintf("worker-%d.eu-west/%d", i%7, 1000+i), End: end, Renewals: int64(i % 20), Terms: 1, Held: 100,
			})
			if i%5 == 0 {
				lane.Spans[i].Terms, lane.Spans[i].OldFence, lane.Spans[i].Lapsed = 96, f-192, 3
			}
		}
		for i := range 120 {
			at := o.Since.Add(time.Duration(i)*720*time.Second + time.Duration(l)*time.Second)
			lane.Marks = append(lane.Marks, audit.Mark{
				From: at, At: at, Refusals: int64(1 + i%3*7), Rows: 1, Verdict: []string{"stale", "stale", "stale", "expired", "unknown"}[(i+l)%5], ID: int64(l*1000 + i),
				Table: "app.invoice", Key: fmt.Sprintf(`{"id": %d}`, 100000+i), Reason: "superseded", Fence: f - int64(i)*2, CurrentFence: ptr(f),
				Holder: fmt.Sprintf("worker-%d.eu-west/%d", i%7, 1000+i), CurrentHolder: "worker-3.eu-west/1003", Application: "billing",
			})
		}
		o.Lanes = append(o.Lanes, lane)
	}
	for i := range 96 {
		from := o.Since.Add(time.Duration(i) * 15 * time.Minute)
		o.Histogram = append(o.Histogram, audit.Bin{From: from, To: from.Add(15 * time.Minute), Stale: int64(900 + 400*math.Sin(float64(i)/6)), Expired: int64(i * 3), Unknown: int64(i % 7)})
	}
	return o
}

// hostiles are texts that somebody may have put where a name belongs.
var hostiles = []string{
	`<script>alert(1)</script>`,
	`"><img src=x onerror=alert(1)>`,
	`' onmouseover='alert(1)`,
	`</style></title></svg></main>`,
	`{{.}} ${x} javascript:alert(1)`,
	"\x1b[31mred\x1b[0m",
	"two\nlines\ttab\x00nul\x7f",
	"right\u202eto left\u2066 and\u200b hidden\ufeff",
	"<!-- --> ]]> &amp; &#60;",
	"שלום עולם 42",
	strings.Repeat("long ", 205),
	"",
	"\xff\xfe not UTF-8",
}

// hostile is an overview in which every text is one of them.
func hostile() *audit.Overview {
	o := sample()
	n := 0
	put := func(texts ...*string) {
		for _, s := range texts {
			*s = hostiles[n%len(hostiles)]
			n++
		}
	}
	put(&o.Database, &o.Server)
	for i := range o.Lanes {
		put(&o.Lanes[i].Lease)
		for j := range o.Lanes[i].Spans {
			put(&o.Lanes[i].Spans[j].Holder, &o.Lanes[i].Spans[j].End)
		}
		for j := range o.Lanes[i].Marks {
			m := &o.Lanes[i].Marks[j]
			put(&m.Verdict, &m.Table, &m.Key, &m.Reason, &m.Holder, &m.CurrentHolder, &m.Application)
		}
	}
	for i := range o.Top {
		put(&o.Top[i].By)
		for j := range o.Top[i].Rows {
			put(&o.Top[i].Rows[j].Value)
		}
	}
	for i := range o.Latest {
		r := &o.Latest[i]
		put(&r.Table, &r.Key, &r.Lease, &r.Reason, &r.Verdict, &r.Holder, &r.CurrentHolder, &r.Application)
	}
	for i := range o.Tables {
		t := &o.Tables[i]
		put(&t.Name, &t.FenceColumn, &t.Rule, &t.Strength, &t.Guard, &t.Unfenced)
		t.Wrong, t.Observed = hostiles, hostiles
	}
	for i := range o.Verify.Findings {
		f := &o.Verify.Findings[i]
		var severity string
		put(&f.ID, &severity, &f.Object, &f.Finding, &f.Fix, &f.Accepted)
		f.Severity = audit.Severity(severity)
	}
	for i := range o.Verify.Unchecked {
		u := &o.Verify.Unchecked[i]
		put(&u.ID, &u.Object, &u.Why)
	}
	o.Verify.Checks, o.Verify.Notes = hostiles, hostiles
	return o
}
