package page

import (
	"cmp"
	"fmt"
	"html/template"
	"strings"
	"time"

	"github.com/writegate/writegate/internal/audit"
)

// view is what the templates print: texts that are ready, in the order of the page.
type view struct {
	Title   string
	Program string
	Policy  string       // "": it is in the response's header
	Style   template.CSS // the package's own, the only text that is not escaped
	Script  string       // "": none
	Every   int64        // milliseconds

	Database string
	Server   string
	Role     string
	Schema   int
	Range    string
	Length   string
	At       string

	Alarms []alarm
	Calm   string
	Tiles  []tile

	Time     timeline
	Counts   histogram
	Top      []topList
	Latest   []refusal
	LatestOf string
	HasNow   bool // of some of the latest it is known what their rows hold now
	Tables   []protected
	Verify   *verification

	Ends     []legend
	Verdicts []legend
}

type legend struct{ Name, Means string }

// alarm is a reason to wake somebody, and what to do then.
type alarm struct {
	What     string
	Do       string
	Commands []string
	See      string // the section that has more
}

type tile struct {
	ID    string
	Label string
	Value string
	Note  string
	Tone  string // bad, warn, or nothing
}

type topList struct {
	By   string
	Rows []topRow
	Cut  bool
}

type topRow struct {
	Value    value
	Share    string // of the largest of its list
	Lawful   string // of the same
	Refusals string
	Rows     string
	Bad      string // how many are lawful, if any
	Last     string
}

type refusal struct {
	ID      string
	Last    string
	First   string // where it was refused more than once
	Count   string
	Verdict string
	Reason  string
	Table   value
	Key     value
	Lease   value
	Fence   string
	Found   string
	Holder  value
	Current value
	App     value
	Now     value // what the row holds now
	HasNow  bool
}

type protected struct {
	Name, Column              value
	Rule, Strength            string
	Guard, Unfenced, ID       string
	Wrong, Observed           []string
	ObservedCount             string
	GuardOff, GuardOnlyLooked bool
}

type verification struct {
	Findings  []finding
	Unchecked []unchecked
	Checks    []string
	Notes     []string
	Summary   string
}

type finding struct {
	Severity, ID         string
	Object               value
	Finding, Fix         string
	Accepted             string
	Tone                 string
	IsAccepted, IsSevere bool
}

type unchecked struct {
	ID     string
	Object value
	Why    string
}

func newView(o *audit.Overview, opt Options, asks bool) *view {
	s := newScale(o)
	v := &view{
		Title:    opt.Title,
		Program:  printable(opt.Program),
		Style:    template.CSS(style),
		Database: text(o.Database),
		Server:   text(o.Server),
		Role:     "primary",
		Schema:   o.Schema,
		Range:    stamp(s.from) + " to " + stamp(s.to),
		Length:   human(s.seconds),
		At:       stamp(o.At),
	}
	if o.Standby {
		v.Role = "standby"
	}
	v.Title = printable(cmp.Or(v.Title, "writegate: "+v.Database))
	if asks {
		every := cmp.Or(opt.Every, 5*time.Second)
		v.Script, v.Every = ScriptPath, max(every, 100*time.Millisecond).Milliseconds()
	} else {
		v.Policy = reportPolicy
	}
	for _, e := range ends {
		v.Ends = append(v.Ends, legend(e))
	}
	for _, e := range verdicts {
		v.Verdicts = append(v.Verdicts, legend(e))
	}
	v.alarms(o)
	v.tiles(o)
	v.Time = newTimeline(o, s, asks)
	v.Counts = newHistogram(o, s, asks)
	for _, l := range o.Top {
		v.Top = append(v.Top, newTopList(l))
	}
	for _, r := range o.Latest {
		v.Latest = append(v.Latest, newRefusal(r))
		v.HasNow = v.HasNow || r.Now != nil
	}
	if o.LatestCut {
		v.LatestOf = fmt.Sprintf("These are the latest %s; there are more: fencecheck rejections shows them all.",
			counted(int64(len(o.Latest)), "row of the audit", "rows of the audit"))
	}
	for _, t := range o.Tables {
		v.Tables = append(v.Tables, newProtected(t))
	}
	if o.Verify != nil {
		v.Verify = newVerification(o.Verify)
	}
	return v
}

func (v *view) alarms(o *audit.Overview) {
	if n := o.Refusals.Lawful; n > 0 {
		v.Alarms = append(v.Alarms, alarm{
			What: counted(n, "write was", "writes were") + " refused although the writer held the lease.",
			Do: "Wake somebody. The source of fences or a clock is broken, or one row is written under two leases; " +
				"lawful work is being turned away. Begin with",
			Commands: []string{"fencecheck rejections --verdict lawful", "fencecheck explain rejection-lawful"},
			See:      "latest",
		})
	}
	if o.Verify != nil {
		severe := 0
		for _, f := range o.Verify.Findings {
			if f.Severity == audit.SeverityError && f.Accepted == "" {
				severe++
			}
		}
		if severe > 0 {
			v.Alarms = append(v.Alarms, alarm{
				What:     counted(int64(severe), "finding", "findings") + " of severity error.",
				Do:       "The promise does not hold somewhere, or lawful holders are refused. What to do stands with each finding; see",
				Commands: []string{"fencecheck verify"}, See: "verify",
			})
		}
		if n := len(o.Verify.Unchecked); n > 0 {
			v.Alarms = append(v.Alarms, alarm{
				What:     counted(int64(n), "check", "checks") + " did not run.",
				Do:       "What they would have found is not known: this is not a clean result. Remove what hindered them, then run",
				Commands: []string{"fencecheck verify"}, See: "verify",
			})
		}
	}
	if len(v.Alarms) > 0 {
		return
	}
	switch {
	case o.Refusals.Refusals > 0:
		v.Calm = "No lawful holder was refused: every refusal did what it is for."
	default:
		v.Calm = "No write was refused in this time."
	}
	if o.Verify == nil {
		v.Calm += " The checks of fencecheck verify were not asked for."
	} else {
		v.Calm += " No check found an error."
	}
}

func (v *view) tiles(o *audit.Overview) {
	tone := func(n int64, tone string) string {
		if n > 0 {
			return tone
		}
		return ""
	}
	l, r := o.Leases, o.Refusals
	v.Tiles = []tile{
		{ID: "held", Label: "leases held", Value: count(l.Held), Note: "now"},
		{ID: "overdue", Label: "leases overdue", Value: count(l.Overdue), Note: "expired, nobody followed", Tone: tone(l.Overdue, "warn")},
		{ID: "free", Label: "leases free", Value: count(l.Free), Note: "released"},
		{ID: "refusals", Label: "writes refused", Value: count(r.Refusals), Note: "in " + counted(r.Rows, "row of the audit", "rows of the audit")},
		{ID: "lawful", Label: "lawful", Value: count(r.Lawful), Note: "should be none", Tone: tone(r.Lawful, "bad")},
		{ID: "stale", Label: "stale", Value: count(r.Stale), Note: "superseded"},
		{ID: "expired", Label: "expired", Value: count(r.Expired), Note: "nobody followed"},
		{ID: "unknown", Label: "unknown", Value: count(r.Unknown), Note: "no such lease here"},
		{ID: "lost", Label: "audit lost", Value: count(r.Lost), Note: "refusals not recorded, of all time", Tone: tone(r.Lost, "warn")},
		{ID: "guard", Label: "guard refused", Value: count(r.GuardOnly), Note: "only counted, of all time"},
	}
}

var plurals = map[string]string{
	"holder": "Holders", "table": "Tables", "lease": "Leases", "reason": "Reasons", "application": "Applications", "key": "Keys",
}

func newTopList(l audit.TopList) topList {
	t := topList{By: cmp.Or(plurals[l.By], text(l.By)), Cut: l.Cut}
	most := int64(1)
	for _, r := range l.Rows {
		most = max(most, r.Refusals)
	}
	share := func(n int64) string { return percent(min(max(float64(n)/float64(most)*100, 0), 100)) }
	for _, r := range l.Rows {
		row := topRow{
			Value: newValue(hashed("top-", l.By, r.Value), r.Value), Share: share(r.Refusals), Lawful: share(r.Lawful),
			Refusals: count(r.Refusals), Rows: count(r.Rows), Last: stamp(r.LastAt),
		}
		if r.Lawful > 0 {
			row.Bad = count(r.Lawful)
		}
		t.Rows = append(t.Rows, row)
	}
	return t
}

func newRefusal(r audit.Rejection) refusal {
	id := fmt.Sprintf("l%d-", r.ID)
	v := refusal{
		ID: id, Last: stamp(r.LastAt), Count: count(r.Count), Verdict: verdict(r.Verdict), Reason: text(r.Reason),
		Table: newValue(id+"t", r.Table), Key: newValue(id+"k", r.Key), Lease: newValue(id+"l", r.Lease),
		Fence: fence(r.Fence), Found: fenceOrDash(r.CurrentFence),
		Holder: newValue(id+"h", r.Holder), Current: newValue(id+"c", r.CurrentHolder), App: newValue(id+"a", r.Application),
	}
	if r.Now != nil {
		v.Now, v.HasNow = newValue(id+"n", r.Now.String()), true
	}
	if r.Count > 1 && !r.FirstAt.IsZero() {
		v.First = stamp(r.FirstAt)
	}
	return v
}

func newProtected(t audit.Table) protected {
	id := hashed("p-", t.Name)
	p := protected{
		ID: id, Name: newValue(id+"n", t.Name), Column: newValue(id+"c", t.FenceColumn), Rule: text(t.Rule),
		Strength: text(t.Strength), Guard: text(t.Guard), Unfenced: text(t.Unfenced),
		GuardOff: t.Guard == "off", GuardOnlyLooked: t.Guard == "observe",
	}
	if p.GuardOff {
		p.Unfenced = "-" // nothing looks at it
	}
	for _, w := range t.Wrong {
		p.Wrong = append(p.Wrong, text(w))
	}
	for _, s := range t.Observed {
		p.Observed = append(p.Observed, text(s))
	}
	if n := len(t.Observed); n > 0 {
		p.ObservedCount = counted(int64(n), "observation", "observations")
	}
	return p
}

var tones = map[audit.Severity]string{audit.SeverityError: "bad", audit.SeverityWarning: "warn"}

func newVerification(a *audit.Verification) *verification {
	v := &verification{}
	open := 0
	for _, f := range a.Findings {
		if f.Accepted == "" {
			open++
		}
		v.Findings = append(v.Findings, finding{
			Severity: text(string(f.Severity)), ID: text(f.ID),
			Object:  newValue(hashed("f-", f.ID, f.Object), f.Object),
			Finding: text(f.Finding), Fix: text(f.Fix), Accepted: printable(cut(f.Accepted, textMost)),
			Tone: tones[f.Severity], IsAccepted: f.Accepted != "", IsSevere: f.Severity == audit.SeverityError,
		})
	}
	for _, u := range a.Unchecked {
		v.Unchecked = append(v.Unchecked, unchecked{
			ID: text(u.ID), Object: newValue(hashed("u-", u.ID, u.Object), u.Object), Why: text(u.Why),
		})
	}
	for _, c := range a.Checks {
		v.Checks = append(v.Checks, text(c))
	}
	for _, n := range a.Notes {
		v.Notes = append(v.Notes, text(n))
	}
	parts := []string{counted(int64(len(a.Checks)), "check ran", "checks ran") + " to the end"}
	if len(a.Unchecked) > 0 {
		parts = append(parts, count(int64(len(a.Unchecked)))+" did not")
	}
	parts = append(parts, counted(int64(open), "finding", "findings"))
	if accepted := len(a.Findings) - open; accepted > 0 {
		parts = append(parts, count(int64(accepted))+" more accepted")
	}
	v.Summary = strings.Join(parts, ", ") + "."
	return v
}
