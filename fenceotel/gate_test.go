package fenceotel_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel/sdk/metric"

	"github.com/writegate/writegate/fencedb"
	"github.com/writegate/writegate/fenceotel"
)

func TestGate(t *testing.T) {
	reader := metric.NewManualReader()
	observe, err := fenceotel.Gate(metric.NewMeterProvider(metric.WithReader(reader)).Meter("test"))
	require.NoError(t, err)
	for _, e := range []fencedb.Event{
		fencedb.WriteEvent{Kind: "update", Table: "app.jobs", Outcome: fencedb.Applied, Rows: 1, Attempt: 1, Took: 2 * time.Second, Left: 20 * time.Second},
		fencedb.WriteEvent{Kind: "update_many", Table: "app.jobs", Outcome: fencedb.Applied, Rows: 30, Attempt: 3, Took: 5 * time.Second},
		fencedb.WriteEvent{Kind: "update", Table: "app.jobs", Outcome: fencedb.Stale, Reason: "stale", Verdict: "lawful", Refused: 3, Attempt: 1, Took: time.Second},
		fencedb.WriteEvent{Kind: "in_tx", Outcome: fencedb.Unknown, Attempt: 2, Took: 3 * time.Second},
		fencedb.AuditEvent{Recorded: 7, Lost: 2},
	} {
		observe(e)
	}
	require.Equal(t, map[string]float64{
		"writegate.write.duration{kind=update,outcome=applied,table=app.jobs}":            2,
		"writegate.write.duration{kind=update_many,outcome=applied,table=app.jobs}":       5,
		"writegate.write.duration{kind=update,outcome=stale,reason=stale,table=app.jobs}": 1,
		"writegate.write.duration{kind=in_tx,outcome=unknown,table=}":                     3,
		"writegate.write.left{kind=update,table=app.jobs}":                                20,
		"writegate.write.rows{kind=update,table=app.jobs}":                                1,
		"writegate.write.rows{kind=update_many,table=app.jobs}":                           30,
		"writegate.write.retries{kind=update_many,table=app.jobs}":                        1,
		"writegate.write.retries{kind=in_tx,table=}":                                      1,
		"writegate.write.rejections{reason=stale,table=app.jobs,verdict=lawful}":          3,
		"writegate.audit.recorded{}":                                                      7,
		"writegate.audit.lost{}":                                                          2,
	}, collect(t, reader))
}
