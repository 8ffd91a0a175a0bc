package page

import (
	"fmt"
	"html/template"
	"strconv"
	"strings"

	"github.com/writegate/writegate/internal/audit"
)

// timeline is the chart of who held which lease when, and of what was refused meanwhile.
type timeline struct {
	Ticks   []tick
	Lanes   []lane
	Now     string // where the database's clock stood; "": not in the range
	Says    []string
	Terms   []termRow
	Marks   []markRow
	TermsOf string // what the tables leave out
	MarksOf string
}

type lane struct {
	ID     string
	Name   value
	Counts string
	Many   bool // worth a link past it
	Bars   []bar
	Marks  []mark
}

// bar is one span. Its label is both what a screen reader says and what the style sheet shows as its details.
type bar struct {
	// Start and Place are attributes made of numbers and of the package's own words alone. There are so many bars and marks that
	// it shows how many values the template has to escape.
	Start       template.HTMLAttr // id, and where the details open
	Place       template.HTMLAttr // class and place
	More        bool              // any of what follows but the label
	Class       string
	X, W        string
	AheadX      string // the part of a held term that is still to come
	AheadW      string
	LateX       string // since when it is overdue
	LateW       string
	Label       string
	Text        string
	Wide        bool // the text fits only where the chart is wide
	Past, Later bool // goes on outside the range
}

type mark struct {
	Start  template.HTMLAttr
	Place  template.HTMLAttr
	X      string
	Label  string
	Lawful bool
	Many   bool
	Text   string
	Wide   bool
}

type termRow struct {
	Lease, Terms, End, From, To, Held, Fence, Holder, Renewals string
}

type markRow struct {
	Lease, Refusals, Verdict, At, Reason, Table, Key, Fence, Found, Holder, Current, App string
}

const (
	thinnest = 0.12 // percent: what ended at once is still to be seen
	// What the track measures in pixels at least, on a desk and on a telephone.
	trackWide  = 680.0
	trackPhone = 320.0
	rowsMost   = 300 // of a chart told as a table
	linkPast   = 12
)

func newTimeline(o *audit.Overview, s scale, asks bool) timeline {
	t := timeline{Ticks: s.ticks()}
	if x := between(s.from, o.At); x >= 0 && x < s.seconds {
		t.Now = percent(s.at(o.At))
	}
	var spans, marks, terms, refusals int64
	for i, l := range o.Lanes {
		v := lane{
			ID: "lane" + strconv.Itoa(i), Name: newValue(hashed("n-", l.Lease), l.Lease),
			Counts: counted(l.Terms, "term", "terms") + ", " + counted(l.Refusals, "refusal", "refusals"),
			Many:   len(l.Spans)+len(l.Marks) > linkPast,
			Bars:   make([]bar, 0, len(l.Spans)), Marks: make([]mark, 0, len(l.Marks)),
		}
		for _, sp := range l.Spans {
			v.Bars = append(v.Bars, newBar(o, s, sp, asks))
		}
		for j := range l.Marks {
			v.Marks = append(v.Marks, newMark(s, l.Marks, j, asks))
		}
		t.Lanes = append(t.Lanes, v)
		spans, marks = spans+int64(len(l.Spans)), marks+int64(len(l.Marks))
		terms, refusals = terms+l.Terms, refusals+l.Refusals
	}
	if len(t.Lanes) > 0 {
		t.Says = append(t.Says, fmt.Sprintf("%s in %s, %s in %s, of %s.",
			counted(terms, "term", "terms"), counted(spans, "bar", "bars"),
			counted(refusals, "refusal", "refusals"), counted(marks, "mark", "marks"),
			counted(int64(len(t.Lanes)), "lease", "leases")))
	}
	switch {
	case o.LanesLeftOut > 0:
		t.Says = append(t.Says, fmt.Sprintf(
			"Left out: %s with terms or refusals in this time. Those shown are the ones with refusals, then those with the latest grants.",
			counted(o.LanesLeftOut, "more lease", "more leases")))
	case len(t.Lanes) > 0:
		t.Says = append(t.Says, "No lease is left out.")
	}
	t.tell(o, spans, marks)
	return t
}

func newBar(o *audit.Overview, s scale, sp audit.Span, asks bool) bar {
	end := ending(sp.End)
	b := bar{Class: end, Label: spanLabel(sp)}
	to := sp.To
	if to.IsZero() {
		to = s.to
	}
	x1, x2 := s.at(sp.From), s.at(to)
	b.Past = sp.From.Before(s.from)
	b.Later = to.After(s.to)
	if end == "held" && sp.From.Before(o.At) && o.At.Before(to) && x2 > s.at(o.At) {
		now := s.at(o.At)
		b.AheadX, b.AheadW = percent(now), percent(x2-now)
		x2 = now
	}
	if end == "overdue" && to.Before(o.At) && s.at(o.At) > x2 {
		b.LateX, b.LateW = percent(x2), percent(s.at(o.At)-x2)
	}
	w := max(x2-x1, thinnest)
	x1 = min(x1, 100-w)
	b.X, b.W = percent(x1), percent(w)
	b.Start = start(asks, "t", sp.Fence, zone(x1+w/2))
	b.Place = template.HTMLAttr("class=" + end + " x=" + b.X + "% width=" + b.W + "% ")
	if sp.Terms > 1 {
		b.Place = template.HTMLAttr(`class="` + end + ` many" x=` + b.X + "% width=" + b.W + "% ")
		b.Text, b.Wide = fitting(w, counted(sp.Terms, "term", "terms"), count(sp.Terms))
	} else {
		b.Text, b.Wide = fitting(w, text(sp.Holder), "")
	}
	b.More = b.AheadX != "" || b.LateX != "" || b.Past || b.Later || b.Text != ""
	return b
}

// start gives an element an id where the page is going to be replaced by a newer one, to find it again.
func start(asks bool, kind string, id int64, class string) template.HTMLAttr {
	if asks {
		return template.HTMLAttr("id=" + kind + strconv.FormatInt(id, 10) + " class=" + class + " ")
	}
	return template.HTMLAttr("class=" + class + " ")
}

// fitting returns what fits into w percent of the track: long, or short, or long's beginning, or nothing.
func fitting(w float64, long, short string) (fits string, wide bool) {
	const padding = 14
	room := func(track float64) float64 { return w/100*track - padding }
	switch {
	case long == "-":
		return "", false
	case textWidth(long) <= room(trackPhone):
		return long, false
	case textWidth(long) <= room(trackWide):
		return long, true
	case short != "" && textWidth(short) <= room(trackPhone):
		return short, false
	case short != "" && textWidth(short) <= room(trackWide):
		return short, true
	case short == "":
		if n := int(room(trackWide) / 7); n >= 6 {
			return cut(long, n), true
		}
	}
	return "", false
}

// textWidth estimates the pixels that s takes at 12 px, rather too many than too few; the chart clips what is wider still.
func textWidth(s string) float64 {
	w := 0.0
	for _, r := range s {
		switch {
		case r >= 0x1100:
			w += 13
		case strings.ContainsRune("iljtf.,:;|!'()[]-/ ", r):
			w += 4.5
		case strings.ContainsRune("mwMW@%", r):
			w += 11
		default:
			w += 7.2
		}
	}
	return w
}

// zone is where along the track the details of what is at x open: each tenth has its place in the style sheet.
func zone(x float64) string {
	return "z" + strconv.Itoa(min(max(int(x/10), 0), 9))
}

func spanLabel(sp audit.Span) string {
	var b strings.Builder
	holder := apart(sp.Holder)
	if sp.Terms > 1 {
		fmt.Fprintf(&b, "%s, ", counted(sp.Terms, "term", "terms"))
		if sp.AllLapsed {
			b.WriteString("all expired")
		} else {
			fmt.Fprintf(&b, "%s of them expired", count(sp.Lapsed))
		}
		fmt.Fprintf(&b, "\n%s\nheld %s together, %s", stretch(sp.From, sp.To), human(sp.Held), renewals(sp))
		fmt.Fprintf(&b, "\nnewest fence %d of %s: %s\noldest fence %d", sp.Fence, holder, ending(sp.End), sp.OldFence)
		return b.String()
	}
	fmt.Fprintf(&b, "%s, ", holder)
	switch end := ending(sp.End); end {
	case "held":
		fmt.Fprintf(&b, "holds it now\nfence %d\nsince %s, until %s unless it renews (%s so far)", sp.Fence, stamp(sp.From), stamp(sp.To), renewals(sp))
	case "overdue":
		fmt.Fprintf(&b, "overdue: expired, not released, nobody followed\nfence %d\n%s (%s, %s)", sp.Fence, stretch(sp.From, sp.To), human(between(sp.From, sp.To)), renewals(sp))
	default:
		fmt.Fprintf(&b, "%s\nfence %d\n%s (%s, %s)", end, sp.Fence, stretch(sp.From, sp.To), human(between(sp.From, sp.To)), renewals(sp))
	}
	return b.String()
}

func renewals(sp audit.Span) string { return counted(sp.Renewals, "renewal", "renewals") }

func newMark(s scale, marks []audit.Mark, i int, asks bool) mark {
	m := marks[i]
	x := s.at(m.At)
	shape, class := verdict(m.Verdict), zone(x)
	v := mark{X: percent(x), Label: markLabel(m), Lawful: shape == "lawful", Many: m.Rows > 1 || m.Refusals > 1}
	if v.Lawful {
		class = `"` + class + ` lawful"`
	}
	v.Start = start(asks, "r", m.ID, class)
	v.Place = template.HTMLAttr("href=#k-" + shape + " x=" + v.X + "% ")
	if v.Many {
		// The number stands to the right of the mark, if nothing else does.
		gap := 100 - x
		if i+1 < len(marks) {
			gap = s.at(marks[i+1].At) - x
		}
		const around = 12 // of this mark and the next, in pixels, less the padding that fitting keeps
		v.Text, v.Wide = fitting(gap-around/trackPhone*100, count(m.Refusals), "")
		if v.Text != count(m.Refusals) { // part of a number is another number
			v.Text = ""
		}
	}
	return v
}

func markLabel(m audit.Mark) string {
	var b strings.Builder
	kind := verdict(m.Verdict)
	if kind == "lawful" {
		kind = "LAWFUL"
	}
	fmt.Fprintf(&b, "%s: %s\n", kind, verdictMeans(verdict(m.Verdict)))
	switch {
	case m.Rows > 1:
		fmt.Fprintf(&b, "%s in %s of the audit, %s\nthe latest: ", counted(m.Refusals, "refusal", "refusals"), counted(m.Rows, "row", "rows"), stretch(m.From, m.At))
	case m.Refusals > 1:
		fmt.Fprintf(&b, "refused %s times, last %s\n", count(m.Refusals), stamp(m.At))
	default:
		fmt.Fprintf(&b, "%s\n", stamp(m.At))
	}
	fmt.Fprintf(&b, "%s %s\nreason %s, fence %d", apart(m.Table), apart(m.Key), text(m.Reason), m.Fence)
	if m.Holder != "" {
		fmt.Fprintf(&b, " of %s", apart(m.Holder))
	}
	if m.CurrentFence != nil {
		fmt.Fprintf(&b, "\nfound fence %d", *m.CurrentFence)
		if m.CurrentHolder != "" {
			fmt.Fprintf(&b, " of %s", apart(m.CurrentHolder))
		}
	}
	if m.Application != "" {
		fmt.Fprintf(&b, "\napplication %s", apart(m.Application))
	}
	return b.String()
}

// tell fills the tables that say what the chart shows: the latest of every lease, so that none is crowded out.
func (t *timeline) tell(o *audit.Overview, spans, marks int64) {
	if len(o.Lanes) == 0 {
		return
	}
	each := max(rowsMost/len(o.Lanes), 1)
	for _, l := range o.Lanes {
		if len(t.Terms) >= rowsMost {
			break
		}
		lease := text(l.Lease)
		for _, s := range l.Spans[max(len(l.Spans)-each, 0):] {
			end := ending(s.End)
			if s.Terms > 1 {
				end = fmt.Sprintf("%s expired; the newest %s", count(s.Lapsed), end)
			}
			t.Terms = append(t.Terms, termRow{
				Lease: lease, Terms: count(s.Terms), End: end, From: stamp(s.From), To: stamp(s.To), Held: human(s.Held),
				Fence: fence(s.Fence), Holder: text(s.Holder), Renewals: count(s.Renewals),
			})
		}
	}
	for _, l := range o.Lanes {
		if len(t.Marks) >= rowsMost {
			break
		}
		lease := text(l.Lease)
		for _, m := range l.Marks[max(len(l.Marks)-each, 0):] {
			t.Marks = append(t.Marks, markRow{
				Lease: lease, Refusals: count(m.Refusals), Verdict: verdict(m.Verdict), At: stamp(m.At), Reason: text(m.Reason),
				Table: text(m.Table), Key: text(m.Key), Fence: fence(m.Fence), Found: fenceOrDash(m.CurrentFence),
				Holder: text(m.Holder), Current: text(m.CurrentHolder), App: text(m.Application),
			})
		}
	}
	if n := int64(len(t.Terms)); n < spans {
		t.TermsOf = fmt.Sprintf("%s of %s bars: the latest %d of each lease. All: fencecheck terms.", count(n), count(spans), each)
	}
	if n := int64(len(t.Marks)); n < marks {
		t.MarksOf = fmt.Sprintf("%s of %s marks: the latest %d of each lease. All: fencecheck rejections.", count(n), count(marks), each)
	}
}
