package page

import (
	"fmt"
	"hash/fnv"
	"math"
	"strconv"
	"strings"
	"time"

	"github.com/writegate/writegate/internal/audit"
)

// printable shows what could turn the text around it, or hide in it.
var printable = audit.Printable

const (
	stampLayout = "2006-01-02 15:04:05.000Z07:00"
	clockLayout = "15:04:05.000Z07:00"
	// textMost is how much of one value a page has. A row's key may be a megabyte; the audit has it all.
	textMost = 2000
	// labelMost is how much of one value the details of a bar or a mark show. There are thousands of them in a page.
	labelMost = 200
	// shortMost is how much of a value a cell shows before it is asked for the rest.
	shortMost = 44
)

// text returns what a page shows of a value from the database: one line, never empty.
func text(s string) string {
	if s == "" {
		return "-"
	}
	return printable(cut(s, textMost))
}

// apart is text amid other text of a label, which has no elements to keep them apart: a name in Hebrew would pull the fence that
// follows it to its other side.
func apart(s string) string {
	s = text(cut(s, labelMost))
	for _, r := range s {
		if r >= 0x0590 && r <= 0x08ff || r >= 0xfb1d && r <= 0xfefc || r >= 0x10800 && r <= 0x10fff || r >= 0x1e800 && r <= 0x1efff {
			return "\u2068" + s + "\u2069"
		}
	}
	return s
}

// cut returns at most n characters of s.
func cut(s string, n int) string {
	if len(s) <= n {
		return s
	}
	seen := 0
	for i := range s {
		if seen == n-1 {
			if len([]rune(s[i:])) <= 1 {
				return s
			}
			return s[:i] + "…"
		}
		seen++
	}
	return s
}

// stamp is a time with its offset, which is always UTC's.
func stamp(t time.Time) string {
	if t.IsZero() {
		return "-"
	}
	return t.UTC().Format(stampLayout)
}

// stretch is from one time to another, without saying the date twice.
func stretch(from, to time.Time) string {
	if from.IsZero() || to.IsZero() {
		return stamp(from) + " to " + stamp(to)
	}
	from, to = from.UTC(), to.UTC()
	if from.Format(time.DateOnly) == to.Format(time.DateOnly) {
		return stamp(from) + " to " + to.Format(clockLayout)
	}
	return stamp(from) + " to " + stamp(to)
}

// between is how many seconds lie between two times, centuries apart or not, as time.Duration cannot say.
func between(from, to time.Time) float64 {
	return float64(to.Unix()-from.Unix()) + float64(to.Nanosecond()-from.Nanosecond())/1e9
}

// human is a length of time in at most two units.
func human(seconds float64) string {
	if math.IsNaN(seconds) || math.IsInf(seconds, 0) {
		return "-"
	}
	if seconds < 0 {
		return "-" + human(-seconds)
	}
	switch {
	case seconds == 0:
		return "0 s"
	case seconds < 0.9995:
		return strconv.FormatFloat(seconds*1000, 'f', 0, 64) + " ms"
	case seconds < 9.95:
		return strconv.FormatFloat(seconds, 'f', 1, 64) + " s"
	}
	whole := math.Round(seconds)
	units := []struct {
		name    string
		seconds float64
	}{{"y", 365 * 86400}, {"d", 86400}, {"h", 3600}, {"min", 60}, {"s", 1}}
	for i, u := range units {
		if whole < u.seconds {
			continue
		}
		n := math.Floor(whole / u.seconds)
		s := fmt.Sprintf("%.0f %s", n, u.name)
		if i+1 < len(units) {
			next := units[i+1]
			if rest := math.Floor((whole - n*u.seconds) / next.seconds); rest > 0 {
				s += fmt.Sprintf(" %.0f %s", rest, next.name)
			}
		}
		return s
	}
	return "0 s"
}

// count writes a number with its thousands set apart. Fences are no counts: they are for copying.
func count(n int64) string {
	s := strconv.FormatInt(n, 10)
	sign := ""
	if s[0] == '-' {
		sign, s = "-", s[1:]
	}
	for i := len(s) - 3; i > 0; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return sign + s
}

// counted writes a number of things.
func counted(n int64, one, more string) string {
	if n == 1 {
		return "1 " + one
	}
	return count(n) + " " + more
}

func fence(f int64) string { return strconv.FormatInt(f, 10) }

func fenceOrDash(f *int64) string {
	if f == nil {
		return "-"
	}
	return fence(*f)
}

// value is a text from the database in a cell, with the rest of it on request.
type value struct {
	Short string
	Full  string // "": Short is all
	ID    string // the same each time the page is made, so that what is open stays open
}

func newValue(id, s string) value {
	full := text(s)
	short := cut(full, shortMost)
	if short == full {
		return value{Short: full}
	}
	return value{Short: short, Full: full, ID: id}
}

// hashed makes an id of texts that can be anything.
func hashed(prefix string, parts ...string) string {
	h := fnv.New64a()
	h.Write([]byte(strings.Join(parts, "\x00"))) // never fails
	return prefix + strconv.FormatUint(h.Sum64(), 36)
}

// verdicts in the order in which charts stack and legends list them: the worst first.
var verdicts = []struct{ Name, Means string }{
	{"lawful", "refused although it held the lease: wake somebody"},
	{"stale", "superseded by a newer grant"},
	{"expired", "its lease had expired, and nobody had followed"},
	{"unknown", "this database has no such lease"},
}

// verdict returns one of the four: it becomes part of class names and addresses in the page.
func verdict(s string) string {
	for _, v := range verdicts {
		if v.Name == s {
			return s
		}
	}
	return "unknown"
}

func verdictMeans(s string) string {
	for _, v := range verdicts {
		if v.Name == s {
			return v.Means
		}
	}
	return ""
}

// ends are the ways in which a term can end, or not.
var ends = []struct{ Name, Means string }{
	{"held", "now, and not expired"},
	{"released", "given back"},
	{"expired", "not renewed in time"},
	{"overdue", "expired, and nobody has followed"},
}

func ending(s string) string {
	for _, e := range ends {
		if e.Name == s {
			return s
		}
	}
	return "released"
}
