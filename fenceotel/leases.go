// Package fenceotel feeds OpenTelemetry metrics from what writegate's packages tell of themselves. It is apart from them
// so that a program which does not want OpenTelemetry does not get it.
//
//	observe, err := fenceotel.Leases(meter)
//	client, err := leasedb.New(ctx, pool, leasedb.Config{TTL: 30 * time.Second, Observe: observe})
//
//	observe, err := fenceotel.Gate(meter)
//	gate := fencedb.New(pool, fencedb.Config{Observe: observe})
package fenceotel

import (
	"context"
	"errors"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"github.com/writegate/writegate/fencedb"
	"github.com/writegate/writegate/leasedb"
)

// Leases returns a function for leasedb.Config.Observe. It is safe for concurrent use, and never waits.
//
// The metrics, durations in seconds:
//
//	writegate.lease.acquire.wait       histogram  from the call to the grant or the giving up, by outcome
//	writegate.lease.acquire.attempts   histogram  requests it took, by outcome; above 1 there was contention or trouble
//	writegate.lease.renew.duration     histogram  of a request to renew, by outcome (answered, error)
//	writegate.lease.renew.left         histogram  what the lease with the least time left had when a request was sent
//	writegate.lease.renewals           counter    leases asked for, by outcome (renewed, locked, lost, error)
//	writegate.lease.losses             counter    by cause (not_renewed, superseded, refused, max_hold, closed, other)
//	writegate.lease.held               histogram  from the grant to the end, by whether the lease was lost
//	writegate.lease.ran_on             histogram  how long the work of Do ran on after its lease was lost
//
// Names of leases are no attributes: there can be any number of them.
func Leases(meter metric.Meter) (func(leasedb.Event), error) {
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
	wait := histogram("writegate.lease.acquire.wait", "From the call of an acquire to its end.")
	attempts, err := meter.Int64Histogram("writegate.lease.acquire.attempts", metric.WithDescription("Requests that an acquire took."))
	errs = append(errs, err)
	duration := histogram("writegate.lease.renew.duration", "From a request to renew to its answer.")
	left := histogram("writegate.lease.renew.left", "The least time left when a request to renew was sent.")
	renewals := counter("writegate.lease.renewals", "Leases asked to be renewed.")
	losses := counter("writegate.lease.losses", "Leases lost.")
	held := histogram("writegate.lease.held", "From the grant of a lease to its end.")
	ranOn := histogram("writegate.lease.ran_on", "How long work ran on after its lease was lost.")
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}

	return func(event leasedb.Event) {
		ctx := context.Background()
		switch e := event.(type) {
		case leasedb.AcquireEvent:
			outcome := with("outcome", acquireOutcome(e.Err))
			wait.Record(ctx, e.Waited.Seconds(), outcome)
			attempts.Record(ctx, int64(e.Attempts), outcome)
		case leasedb.RenewEvent:
			left.Record(ctx, e.Left.Seconds())
			if e.Err != nil {
				duration.Record(ctx, e.Took.Seconds(), with("outcome", "error"))
				renewals.Add(ctx, int64(e.Leases), with("outcome", "error"))
				return
			}
			duration.Record(ctx, e.Took.Seconds(), with("outcome", "answered"))
			renewals.Add(ctx, int64(e.Renewed), with("outcome", "renewed"))
			renewals.Add(ctx, int64(e.Locked), with("outcome", "locked"))
			renewals.Add(ctx, int64(e.Lost), with("outcome", "lost"))
		case leasedb.LossEvent:
			losses.Add(ctx, 1, with("cause", lossCause(e.Cause)))
		case leasedb.EndEvent:
			held.Record(ctx, e.Held.Seconds(), metric.WithAttributes(attribute.Bool("lost", e.Lost)))
			if e.Lost {
				ranOn.Record(ctx, e.RanOn.Seconds())
			}
		}
	}, nil
}

func with(key, value string) metric.MeasurementOption {
	return metric.WithAttributes(attribute.String(key, value))
}

func acquireOutcome(err error) string {
	switch {
	case err == nil:
		return "granted"
	case errors.Is(err, leasedb.ErrHeld):
		return "held"
	case errors.Is(err, leasedb.ErrBusy):
		return "busy"
	case errors.Is(err, leasedb.ErrUnknown):
		return "unknown"
	}
	return "error"
}

func lossCause(err error) string {
	switch {
	case errors.Is(err, leasedb.ErrNotRenewed):
		return "not_renewed"
	case errors.Is(err, leasedb.ErrSuperseded):
		return "superseded"
	case errors.Is(err, leasedb.ErrMaxHold):
		return "max_hold"
	case errors.Is(err, leasedb.ErrClosed):
		return "closed"
	case errors.Is(err, fencedb.ErrStale), errors.Is(err, fencedb.ErrLeaseLost):
		return "refused"
	}
	return "other"
}
