package page

import (
	"math"
	"strconv"
	"time"

	"github.com/writegate/writegate/internal/audit"
)

// scale places times on the width of a chart. Widths are in percent, so that a chart fits a desk and a telephone alike.
type scale struct {
	from, to time.Time
	seconds  float64
}

// newScale returns the overview's range or, where that has no beginning, no end or no length, that of what there is to show.
func newScale(o *audit.Overview) scale {
	from, to := o.Since, o.Until
	if to.IsZero() {
		to = o.At
	}
	if from.IsZero() || !to.After(from) {
		first, last := extent(o)
		if to.IsZero() {
			to = last
		}
		if to.IsZero() {
			to = time.Unix(3600, 0)
		}
		from = first
		if from.IsZero() || !to.After(from) {
			from = to.Add(-time.Hour)
		}
	}
	return scale{from: from.UTC(), to: to.UTC(), seconds: between(from, to)}
}

// extent returns the first and the last time of all that is drawn; zero if nothing is.
func extent(o *audit.Overview) (first, last time.Time) {
	add := func(times ...time.Time) {
		for _, t := range times {
			if t.IsZero() {
				continue
			}
			if first.IsZero() || t.Before(first) {
				first = t
			}
			if t.After(last) {
				last = t
			}
		}
	}
	for _, l := range o.Lanes {
		for _, s := range l.Spans {
			add(s.From, s.To)
		}
		for _, m := range l.Marks {
			add(m.From, m.At)
		}
	}
	for _, b := range o.Histogram {
		add(b.From, b.To)
	}
	return first, last
}

// at returns where t is, from 0 to 100 and no further.
func (s scale) at(t time.Time) float64 {
	return min(max(between(s.from, t)/s.seconds*100, 0), 100)
}

// percent writes a place on the scale, to a tenth of a pixel of most screens. It is written often.
func percent(x float64) string {
	return strconv.FormatFloat(math.Round(x*100)/100, 'f', -1, 64)
}

// tick is a time that the axis names.
type tick struct {
	X      string
	Label  string
	Date   string // where it is another one than at the tick before
	Anchor string
	Minor  bool // left out where there is little room
}

const (
	ticksMost  = 9
	ticksPhone = 4
	day        = 24 * time.Hour
)

var steps = []time.Duration{
	time.Millisecond, 2 * time.Millisecond, 5 * time.Millisecond, 10 * time.Millisecond, 20 * time.Millisecond,
	50 * time.Millisecond, 100 * time.Millisecond, 200 * time.Millisecond, 500 * time.Millisecond,
	time.Second, 2 * time.Second, 5 * time.Second, 10 * time.Second, 15 * time.Second, 30 * time.Second,
	time.Minute, 2 * time.Minute, 5 * time.Minute, 10 * time.Minute, 15 * time.Minute, 30 * time.Minute,
	time.Hour, 2 * time.Hour, 3 * time.Hour, 6 * time.Hour, 12 * time.Hour, day, 2 * day, 7 * day, 14 * day,
}

// ticks returns round times in UTC, at most ticksMost of them.
func (s scale) ticks() []tick {
	times, label, date := s.round()
	var ticks []tick
	every := (len(times) + ticksPhone - 1) / ticksPhone
	last := ""
	for i, t := range times {
		x := s.at(t)
		k := tick{X: percent(x), Label: t.Format(label), Anchor: "middle", Minor: i%every != 0}
		if date != "" {
			if d := t.Format(date); d != last {
				k.Date, last = d, d
			}
		}
		if x < 4 {
			k.Anchor = "start"
		} else if x > 96 {
			k.Anchor = "end"
		}
		ticks = append(ticks, k)
	}
	return ticks
}

// round returns the times, and the layouts of what is written at each and, where it changes, below it.
func (s scale) round() (times []time.Time, label, date string) {
	const most = ticksMost - 1 // one more fits when both ends are round
	for _, step := range steps {
		if s.seconds/step.Seconds() > most {
			continue
		}
		for t := s.from.Truncate(step); !t.After(s.to) && len(times) < ticksMost; t = t.Add(step) {
			if !t.Before(s.from) {
				times = append(times, t)
			}
		}
		switch {
		case step < time.Second:
			return times, "15:04:05.000Z", "2 Jan 2006"
		case step < time.Minute:
			return times, "15:04:05Z", "2 Jan 2006"
		case step < day:
			return times, "15:04Z", "2 Jan 2006"
		default:
			return times, "2 Jan", "2006"
		}
	}
	for _, months := range []int{1, 2, 3, 6} {
		if s.seconds/(float64(months)*30*86400) <= most {
			t := time.Date(s.from.Year(), 1, 1, 0, 0, 0, 0, time.UTC)
			for range 12/months*4 + ticksMost { // a range of so few months touches no more years than these
				if t.After(s.to) || len(times) == ticksMost {
					break
				}
				if !t.Before(s.from) {
					times = append(times, t)
				}
				t = t.AddDate(0, months, 0)
			}
			return times, "Jan 2006", ""
		}
	}
	for years := 1; years < 1e9; years *= 10 {
		for _, n := range []int{years, 2 * years, 5 * years} {
			if s.seconds/(float64(n)*365*86400) > most {
				continue
			}
			for y := s.from.Year() - s.from.Year()%n; len(times) < ticksMost; y += n {
				t := time.Date(y, 1, 1, 0, 0, 0, 0, time.UTC)
				if t.After(s.to) {
					break
				}
				if !t.Before(s.from) {
					times = append(times, t)
				}
			}
			return times, "2006", ""
		}
	}
	return nil, "2006", ""
}
