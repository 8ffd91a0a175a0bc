package audit

import (
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"
)

// timeLayout always shows the offset: a time without one is a guess.
const timeLayout = "2006-01-02 15:04:05.000Z07:00"

// When is a time as people are shown it.
func When(t time.Time) string { return t.UTC().Format(timeLayout) }

// String says in a few words what the row holds now.
func (n *RowNow) String() string {
	switch {
	case n == nil:
		return "-"
	case n.State == "present" && n.Fence == nil:
		return "no fence (NULL)"
	case n.State == "present":
		text := number(*n.Fence)
		if n.Holder != "" {
			text += " of " + n.Holder
		}
		if *n.Fence%2 != 0 {
			text += " (sealed)"
		}
		return text
	case n.State == "missing":
		return "no such row"
	}
	return "unknown: " + n.Note
}

// Duration is seconds as people are shown them.
func Duration(seconds float64) string {
	if math.IsNaN(seconds) {
		return "-"
	}
	d := time.Duration(math.MaxInt64)
	switch nanos := seconds * float64(time.Second); {
	case nanos <= -math.MaxInt64: // what is more than a Duration holds is shown as the most that it does
		d = math.MinInt64
	case nanos < math.MaxInt64:
		d = time.Duration(nanos)
	}
	if d >= time.Minute || d <= -time.Minute {
		return d.Round(time.Second).String()
	}
	if d >= time.Second || d <= -time.Second {
		return d.Round(100 * time.Millisecond).String()
	}
	return d.Round(time.Millisecond).String()
}

func number(n int64) string { return strconv.FormatInt(n, 10) }

func numberOrDash(n *int64) string {
	if n == nil {
		return "-"
	}
	return number(*n)
}

// Explain says in a sentence or two what happened, and whether it is as it should be.
func (r Rejection) Explain() string {
	who := r.Holder
	if who == "" {
		who = "a holder that is not known here"
	}
	of, by := "", "somebody else"
	if r.CurrentHolder != "" {
		of, by = " of "+r.CurrentHolder, r.CurrentHolder
	}
	times := ""
	if r.Count > 1 {
		times = " " + number(r.Count) + " times"
	}
	what := who + ", with fence " + number(r.Fence) + " of lease " + strconv.Quote(r.Lease) + ", was refused" + times + " at " + r.Table + " " + r.Key
	switch r.Reason {
	case "stale":
		what += ": the row had seen fence " + numberOrDash(r.CurrentFence) + of + "."
	case "expired":
		what += ": its lease had expired."
	case "superseded":
		what += ": its lease had been granted to " + by + "."
	case "released":
		what += ": it had released its lease."
	case "wrong_fence":
		what += ": the lease was held under another fence."
	default:
		what += ": there is no such lease."
	}
	switch r.Verdict {
	case "stale":
		return what + " It had been superseded: the gate did what it is there for."
	case "expired":
		return what + " Nobody had taken over: the work was late, not lost. A longer TTL, or shorter work, avoids it."
	case "lawful":
		return what + " NOBODY HAD SUPERSEDED IT: it was the lawful holder. The source of fences went back in time, or the row is written under two leases: fencecheck explain rejection-lawful."
	}
	return what + " Whether it had been superseded is not known here: its lease is kept elsewhere."
}

// Printable returns s as one line of text that a terminal shows and does not obey: control characters, and the marks
// that turn the direction of writing, are escaped.
func Printable(s string) string {
	var b strings.Builder
	for _, r := range s {
		switch {
		case r < 0x20, r >= 0x7f && r < 0xa0, r >= 0x200b && r <= 0x200f, r >= 0x2028 && r <= 0x202e, r >= 0x2060 && r <= 0x2069, r == 0xfeff, r == 0x061c:
			fmt.Fprintf(&b, "\\u%04x", r)
		default:
			b.WriteRune(r)
		}
	}
	return b.String()
}
