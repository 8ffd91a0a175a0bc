package page

import (
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"

	"github.com/writegate/writegate/internal/audit"
)

// histogram is the chart of how many writes were refused when.
type histogram struct {
	Ticks  []tick
	Counts []yTick
	Bins   []column
	Rows   []binRow
	RowsOf string
	Width  string // of a bin
}

type yTick struct {
	Y     int
	Label string
}

// column is one bin with refusals in it.
type column struct {
	ID    string
	Zone  string
	Label string
	X, W  string
	Parts []part
}

type part struct {
	Class string
	Y, H  string
}

type binRow struct {
	From, To, Lawful, Stale, Expired, Unknown, All string
}

const (
	columnsTop    = 8   // pixels of air above the highest
	columnsHeight = 140 // of the highest that the axis has room for
	leastPart     = 2.0 // pixels: one lawful refusal among a million is still to be seen
)

func newHistogram(o *audit.Overview, s scale, asks bool) histogram {
	h := histogram{}
	most := 0.0
	for _, b := range o.Histogram {
		most = max(most, sum(b))
	}
	if most == 0 {
		return h
	}
	top := niceTop(most)
	h.Ticks = s.ticks()
	for _, f := range []float64{0, 0.5, 1} {
		if n := top * f; n == math.Trunc(n) {
			h.Counts = append(h.Counts, yTick{Y: columnsTop + int(columnsHeight*(1-f)), Label: count(int64(min(n, math.MaxInt64/2)))})
		}
	}
	for i, b := range o.Histogram {
		if i == 0 {
			h.Width = human(between(b.From, b.To))
		}
		all := sum(b)
		if all == 0 {
			continue
		}
		x1, x2 := s.at(b.From), s.at(b.To)
		w := max((x2-x1)*0.86, thinnest)
		x := min(x1+(x2-x1)*0.07, 100-w)
		c := column{Zone: zone(x + w/2), X: percent(x), W: percent(w), Label: binLabel(b, all)}
		if asks {
			c.ID = "b" + strconv.FormatInt(b.From.UnixMilli(), 10)
		}
		y := float64(columnsTop + columnsHeight)
		for _, p := range []struct {
			class string
			n     int64
		}{{"lawful", b.Lawful}, {"stale", b.Stale}, {"expired", b.Expired}, {"unknown", b.Unknown}} {
			if p.n <= 0 {
				continue
			}
			height := max(float64(p.n)/top*columnsHeight, leastPart)
			y = max(y-height, 0)
			c.Parts = append(c.Parts, part{Class: p.class, Y: pixels(y), H: pixels(height)})
		}
		h.Bins = append(h.Bins, c)
		if len(h.Rows) < rowsMost {
			h.Rows = append(h.Rows, binRow{
				From: stamp(b.From), To: stamp(b.To), Lawful: count(b.Lawful), Stale: count(b.Stale),
				Expired: count(b.Expired), Unknown: count(b.Unknown), All: count(int64(min(all, math.MaxInt64/2))),
			})
		}
	}
	h.RowsOf = fmt.Sprintf("%s without refusals are left out.", counted(int64(len(o.Histogram)-len(h.Bins)), "time", "times"))
	if len(h.Rows) < len(h.Bins) {
		h.RowsOf = fmt.Sprintf("The first %s of %s; %s", count(int64(len(h.Rows))), count(int64(len(h.Bins))), h.RowsOf)
	}
	return h
}

// sum is a float since four bigints may be too much for one.
func sum(b audit.Bin) float64 {
	return float64(max(b.Lawful, 0)) + float64(max(b.Stale, 0)) + float64(max(b.Expired, 0)) + float64(max(b.Unknown, 0))
}

// niceTop returns the next 1, 2, 4, 5 or 10 times a power of ten.
func niceTop(n float64) float64 {
	power := math.Pow(10, math.Floor(math.Log10(n)))
	for _, f := range []float64{1, 2, 4, 5, 10} {
		if n <= f*power {
			return f * power
		}
	}
	return 10 * power
}

func pixels(y float64) string { return strconv.FormatFloat(math.Round(y*10)/10, 'f', -1, 64) }

func binLabel(b audit.Bin, all float64) string {
	var parts []string
	for _, p := range []struct {
		n    int64
		name string
	}{{b.Lawful, "LAWFUL"}, {b.Stale, "stale"}, {b.Expired, "expired"}, {b.Unknown, "unknown"}} {
		if p.n > 0 {
			parts = append(parts, count(p.n)+" "+p.name)
		}
	}
	to := b.To
	if to.IsZero() {
		to = b.From.Add(time.Nanosecond)
	}
	return fmt.Sprintf("%s\n%s\n%s", counted(int64(min(all, math.MaxInt64/2)), "refusal", "refusals"), strings.Join(parts, ", "), stretch(b.From, to))
}
