//go:build linux

package bench

import (
	"context"
	"fmt"
	"math"
	"runtime"
	"slices"
	"sync"
	"time"

	"github.com/stretchr/testify/require"
)

// side is one of the two that are compared: do is called over and over by each of the workers, which each have a connection.
type side struct {
	name string
	do   func(ctx context.Context, worker, i int) error
	// beside, if set, is called over and over by one more, and does not count.
	beside func(ctx context.Context)
	// calls is how often each worker has called do: the rows that it writes follow from that.
	calls []int
}

// run lets the workers work for the time of a slice and returns how many calls a second they made, and how long each took.
func (s *side) run(b *bench, workers int, slice time.Duration) (perSecond float64, took []time.Duration) {
	b.Helper()
	if s.calls == nil {
		s.calls = make([]int, workers)
	}
	each := make([][]time.Duration, workers)
	errs := make([]error, workers)
	var wait sync.WaitGroup
	began := time.Now()
	until := began.Add(slice)
	for w := range workers {
		wait.Go(func() {
			for now := time.Now(); now.Before(until) && errs[w] == nil; {
				errs[w] = s.do(b.ctx, w, s.calls[w])
				s.calls[w]++
				after := time.Now()
				each[w] = append(each[w], after.Sub(now))
				now = after
			}
		})
	}
	var beside sync.WaitGroup
	if s.beside != nil {
		beside.Go(func() {
			for time.Now().Before(until) {
				s.beside(b.ctx)
			}
		})
	}
	wait.Wait()
	passed := time.Since(began)
	beside.Wait()
	for _, err := range errs {
		require.NoError(b, err, s.name)
	}
	took = slices.Concat(each...)
	return float64(len(took)) / passed.Seconds(), took
}

// comparison is what came out of some pairs.
type comparison struct {
	plain, ours     string
	ratios          []float64 // of how many calls a second were made, in each pair; sorted
	plainRate, rate []float64
	plainTook, took []time.Duration
	pairs           int
	slice           time.Duration
}

// compare runs the two in turn, and each first as often as second: what the machine does besides falls on both.
func (b *bench) compare(workers int, plain, ours *side) *comparison {
	b.Helper()
	return b.compareFor(b.slice, workers, plain, ours)
}

func (b *bench) compareFor(slice time.Duration, workers int, plain, ours *side) *comparison {
	b.Helper()
	c := &comparison{plain: plain.name, ours: ours.name, pairs: b.pairs, slice: slice}
	// Connections are made, statements prepared and caches filled before anything counts.
	plain.run(b, workers, slice/2)
	ours.run(b, workers, slice/2)
	for i := range b.pairs {
		var plainRate, rate float64
		var plainTook, took []time.Duration
		if i%2 == 0 {
			plainRate, plainTook = plain.run(b, workers, slice)
			rate, took = ours.run(b, workers, slice)
		} else {
			rate, took = ours.run(b, workers, slice)
			plainRate, plainTook = plain.run(b, workers, slice)
		}
		c.ratios = append(c.ratios, rate/plainRate)
		c.plainRate, c.rate = append(c.plainRate, plainRate), append(c.rate, rate)
		c.plainTook, c.took = append(c.plainTook, plainTook...), append(c.took, took...)
	}
	slices.Sort(c.ratios)
	return c
}

// allocations counts what a call allocates, of memory, on both sides, one call at a time.
func (b *bench) allocations(plain, ours *side) (plainly, our float64) {
	b.Helper()
	count := func(s *side) float64 {
		n := sized(2000, 500)
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		for range n {
			require.NoError(b, s.do(b.ctx, 0, s.calls[0]))
			s.calls[0]++
		}
		runtime.ReadMemStats(&after)
		return float64(after.Mallocs-before.Mallocs) / float64(n)
	}
	return count(plain), count(ours)
}

func median[T ~float64 | ~int64](sorted []T) T { return quantile(sorted, 0.5) }

func quantile[T ~float64 | ~int64](sorted []T, q float64) T {
	if len(sorted) == 0 {
		return 0
	}
	return sorted[min(int(math.Ceil(q*float64(len(sorted))))-1, len(sorted)-1)]
}

func sorted[T ~float64 | ~int64](values []T) []T {
	values = slices.Clone(values)
	slices.Sort(values)
	return values
}

func (c *comparison) ratio() float64 { return median(c.ratios) }

func (c *comparison) p99Ratio() float64 {
	return float64(quantile(sorted(c.took), 0.99)) / float64(quantile(sorted(c.plainTook), 0.99))
}

// how says how the ratio came about.
func (c *comparison) how() string {
	return fmt.Sprintf("%.0f/s against %.0f/s of %s; %d pairs of %v, half of the ratios in %.2f to %.2f", median(sorted(c.rate)), median(sorted(c.plainRate)),
		c.plain, c.pairs, c.slice, quantile(c.ratios, 0.25), quantile(c.ratios, 0.75))
}

// judge makes a result of a comparison; goal is the least ratio, 0 for none.
func (b *bench) judge(work string, c *comparison, goal float64) {
	b.Helper()
	r := result{Work: work, Ratio: value(c.ratio()), How: c.how(), Goal: "-"}
	if len(c.plainTook) > 0 { // pgbench tells no times
		r.P99Ratio = value(c.p99Ratio())
	}
	if goal > 0 {
		r.Goal, r.Met = fmt.Sprintf("≥ %.2f", goal), value(c.ratio() >= goal)
	}
	b.add(r)
}

func connections(n int) string {
	if n == 1 {
		return "1 connection"
	}
	return fmt.Sprintf("%d connections", n)
}
