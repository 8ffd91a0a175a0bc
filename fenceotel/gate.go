package fenceotel

import (
	"context"
	"errors"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"github.com/writegate/writegate/fencedb"
)

// Gate returns a function for fencedb.Config.Observe. It is safe for concurrent use, and never waits.
//
// The metrics, durations in seconds:
//
//	writegate.write.duration    histogram  of a write or a transaction, by table, kind, outcome and, for a refusal, reason
//	writegate.write.left        histogram  what the lease had left when it had been applied, by table and kind
//	writegate.write.rows        counter    rows written, by table and kind
//	writegate.write.retries     counter    repeats that fencedb.Retry sent, by table and kind
//	writegate.write.rejections  counter    rows refused, by table, reason and verdict; verdict lawful is worth an alarm
//	writegate.audit.recorded    counter    refusals put on record
//	writegate.audit.lost        counter    refusals that could not be
//
// Names of leases and keys are no attributes: there can be any number of them.
func Gate(meter metric.Meter) (func(fencedb.Event), error) {
	var errs []error
	histogram := func(name, description string) metric.Float64Histogram {
		h, err := meter.Float64Histogram(name, metric.WithUnit("s"), metric.WithDescription(description))
		errs = append(errs, err)
		return h
	}
	counter := func(name, description string) metric.Int64Counter {
		c, err := meter.Int64Counter(name, metric.WithDescription(description))
		errs = append(errs, err)
		return c
	}
	duration := histogram("writegate.write.duration", "From the call of a protected write to its end.")
	left := histogram("writegate.write.left", "What the lease had left when a write under it had been applied.")
	rows := counter("writegate.write.rows", "Rows written.")
	retries := counter("writegate.write.retries", "Writes sent again.")
	rejections := counter("writegate.write.rejections", "Writes refused.")
	recorded := counter("writegate.audit.recorded", "Refusals put on record.")
	lost := counter("writegate.audit.lost", "Refusals that could not be put on record.")
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}

	return func(event fencedb.Event) {
		ctx := context.Background()
		switch e := event.(type) {
		case fencedb.WriteEvent:
			what := []attribute.KeyValue{attribute.String("table", e.Table), attribute.String("kind", e.Kind)}
			by := metric.WithAttributes(what...)
			ended := append([]attribute.KeyValue{attribute.String("outcome", e.Outcome.String())}, what...)
			if e.Reason != "" {
				ended = append(ended, attribute.String("reason", e.Reason))
				rejections.Add(ctx, int64(e.Refused), metric.WithAttributes(attribute.String("table", e.Table),
					attribute.String("reason", e.Reason), attribute.String("verdict", e.Verdict)))
			}
			duration.Record(ctx, e.Took.Seconds(), metric.WithAttributes(ended...))
			if e.Outcome == fencedb.Applied && e.Left > 0 {
				left.Record(ctx, e.Left.Seconds(), by)
			}
			if e.Rows > 0 {
				rows.Add(ctx, int64(e.Rows), by)
			}
			if e.Attempt > 1 {
				retries.Add(ctx, 1, by)
			}
		case fencedb.AuditEvent:
			recorded.Add(ctx, e.Recorded)
			lost.Add(ctx, e.Lost)
		}
	}, nil
}
