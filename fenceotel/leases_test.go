package fenceotel_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"

	"github.com/writegate/writegate/fenceotel"
	"github.com/writegate/writegate/internal/pgtest"
	"github.com/writegate/writegate/leasedb"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// collect returns each data point as "name{attributes}" and its sum.
func collect(t *testing.T, reader metric.Reader) map[string]float64 {
	t.Helper()
	var data metricdata.ResourceMetrics
	require.NoError(t, reader.Collect(context.Background(), &data))
	points := map[string]float64{}
	key := func(name string, set attribute.Set) string {
		return name + "{" + set.Encoded(attribute.DefaultEncoder()) + "}"
	}
	for _, scope := range data.ScopeMetrics {
		for _, m := range scope.Metrics {
			switch d := m.Data.(type) {
			case metricdata.Sum[int64]:
				for _, p := range d.DataPoints {
					points[key(m.Name, p.Attributes)] = float64(p.Value)
				}
			case metricdata.Histogram[int64]:
				for _, p := range d.DataPoints {
					points[key(m.Name, p.Attributes)] = float64(p.Sum)
				}
			case metricdata.Histogram[float64]:
				for _, p := range d.DataPoints {
					points[key(m.Name, p.Attributes)] = p.Sum
				}
			default:
				t.Fatalf("metric %s is a %T", m.Name, d)
			}
		}
	}
	return points
}

func TestLeases(t *testing.T) {
	reader := metric.NewManualReader()
	observe, err := fenceotel.Leases(metric.NewMeterProvider(metric.WithReader(reader)).Meter("test"))
	require.NoError(t, err)
	for _, e := range []leasedb.Event{
		leasedb.AcquireEvent{Waited: 2 * time.Second, Attempts: 3, Fence: 2},
		leasedb.AcquireEvent{Attempts: 1, Err: &leasedb.HeldError{}},
		leasedb.AcquireEvent{Attempts: 1, Err: fmt.Errorf("x: %w", leasedb.ErrBusy)},
		leasedb.AcquireEvent{Attempts: 1, Err: fmt.Errorf("x: %w", leasedb.ErrUnknown)},
		leasedb.AcquireEvent{Attempts: 1, Err: errors.New("no route")},
		leasedb.RenewEvent{Leases: 6, Renewed: 3, Locked: 2, Lost: 1, Took: time.Second, Left: 20 * time.Second},
		leasedb.RenewEvent{Leases: 6, Took: 3 * time.Second, Left: 10 * time.Second, Err: errors.New("reset")},
		leasedb.LossEvent{Cause: leasedb.ErrNotRenewed},
		leasedb.LossEvent{Cause: fmt.Errorf("x: %w", leasedb.ErrSuperseded)},
		leasedb.LossEvent{Cause: leasedb.ErrMaxHold},
		leasedb.LossEvent{Cause: leasedb.ErrClosed},
		leasedb.LossEvent{Cause: errors.New("a gate's refusal")},
		leasedb.EndEvent{Held: 40 * time.Second},
		leasedb.EndEvent{Held: 50 * time.Second, Lost: true, RanOn: 4 * time.Second},
	} {
		observe(e)
	}
	require.Equal(t, map[string]float64{
		"writegate.lease.acquire.wait{outcome=granted}":     2,
		"writegate.lease.acquire.wait{outcome=held}":        0,
		"writegate.lease.acquire.wait{outcome=busy}":        0,
		"writegate.lease.acquire.wait{outcome=unknown}":     0,
		"writegate.lease.acquire.wait{outcome=error}":       0,
		"writegate.lease.acquire.attempts{outcome=granted}": 3,
		"writegate.lease.acquire.attempts{outcome=held}":    1,
		"writegate.lease.acquire.attempts{outcome=busy}":    1,
		"writegate.lease.acquire.attempts{outcome=unknown}": 1,
		"writegate.lease.acquire.attempts{outcome=error}":   1,
		"writegate.lease.renew.duration{outcome=answered}":  1,
		"writegate.lease.renew.duration{outcome=error}":     3,
		"writegate.lease.renew.left{}":                      30,
		"writegate.lease.renewals{outcome=renewed}":         3,
		"writegate.lease.renewals{outcome=locked}":          2,
		"writegate.lease.renewals{outcome=lost}":            1,
		"writegate.lease.renewals{outcome=error}":           6,
		"writegate.lease.losses{cause=not_renewed}":         1,
		"writegate.lease.losses{cause=superseded}":          1,
		"writegate.lease.losses{cause=max_hold}":            1,
		"writegate.lease.losses{cause=closed}":              1,
		"writegate.lease.losses{cause=other}":               1,
		"writegate.lease.held{lost=false}":                  40,
		"writegate.lease.held{lost=true}":                   50,
		"writegate.lease.ran_on{}":                          4,
	}, collect(t, reader))
}

// With a real client: what it does is what is counted.
func TestLeasesOfAClient(t *testing.T) {
	ctx := context.Background()
	reader := metric.NewManualReader()
	observe, err := fenceotel.Leases(metric.NewMeterProvider(metric.WithReader(reader)).Meter("test"))
	require.NoError(t, err)
	client, err := leasedb.New(ctx, pgtest.Pool(t, pgtest.New(t)), leasedb.Config{TTL: time.Minute, Observe: observe})
	require.NoError(t, err)
	require.NoError(t, client.Do(ctx, "x", func(ctx context.Context, l *leasedb.Lease) error {
		_, err := client.TryAcquire(ctx, "x")
		require.ErrorIs(t, err, leasedb.ErrHeld)
		return l.Renew(ctx)
	}))
	require.NoError(t, client.Close(ctx))
	points := collect(t, reader)
	require.InDelta(t, 1, points["writegate.lease.acquire.attempts{outcome=granted}"], 0)
	require.InDelta(t, 1, points["writegate.lease.acquire.attempts{outcome=held}"], 0)
	require.InDelta(t, 1, points["writegate.lease.renewals{outcome=renewed}"], 0)
	require.Contains(t, points, "writegate.lease.held{lost=false}")
	require.NotContains(t, points, "writegate.lease.ran_on{}")
}
