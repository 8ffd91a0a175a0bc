package demo

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/writegate/writegate/fencedb"
	"github.com/writegate/writegate/leasedb"
)

const (
	leaseName = "monthly-report"
	report    = "2026-11"
	ttl       = 2 * time.Second
)

// event is one line that a worker says to the demo.
type event struct {
	Kind    string        `json:"kind"`
	Fence   int64         `json:"fence,omitempty"`
	Left    time.Duration `json:"left,omitempty"` // by the worker's own reckoning
	Outcome string        `json:"outcome,omitempty"`
	Text    string        `json:"text,omitempty"`
}

// Kinds of events.
const (
	eventWaiting  = "waiting"  // for the lease
	eventAcquired = "acquired" // the lease
	eventSending  = "sending"  // checked its lease; the write is about to leave
	eventWrote    = "wrote"    // or not: see Outcome
	eventLost     = "lost"     // learned that its lease is over
	eventReleased = "released"
	eventFailed   = "failed"
)

// WorkerOptions are what a worker process is started with.
type WorkerOptions struct {
	DatabaseURL string
	Holder      string
	// Pause makes the worker wait for a line on In between its last look at its lease and its write: the place where a
	// process can be stopped and nothing in it can notice.
	Pause bool
	In    io.Reader
	Out   io.Writer
}

// Worker is one worker process of the demo: it takes the lease, computes the report, writes it through the gate, and
// gives the lease back. It is written as a user's would be, but for telling the demo where it is.
func Worker(ctx context.Context, o WorkerOptions) error {
	var mu sync.Mutex
	tell := func(e event) {
		mu.Lock()
		defer mu.Unlock()
		_ = json.NewEncoder(o.Out).Encode(e) // without its reader the worker has nobody to work for, and is killed
	}
	err := work(ctx, o, tell)
	if err != nil {
		tell(event{Kind: eventFailed, Text: err.Error()})
	}
	return err
}

func work(ctx context.Context, o WorkerOptions, tell func(event)) error {
	config, err := pgxpool.ParseConfig(o.DatabaseURL)
	if err != nil {
		return err
	}
	config.ConnConfig.RuntimeParams["application_name"] = o.Holder
	gatePause := &pauseBeforeWrite{enabled: o.Pause, in: bufio.NewReader(o.In)}
	config.ConnConfig.Tracer = gatePause
	pool, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		return err
	}
	defer pool.Close()

	client, err := leasedb.New(ctx, pool, leasedb.Config{
		Holder: o.Holder, TTL: ttl, PollEvery: 200 * time.Millisecond, Logger: slog.New(slog.DiscardHandler),
		OnLost: func(l *leasedb.Lease, err error) { tell(event{Kind: eventLost, Fence: l.Fence(), Text: err.Error()}) },
	})
	if err != nil {
		return err
	}
	defer func() { _ = client.Close(context.WithoutCancel(ctx)) }()
	gate := fencedb.New(pool, fencedb.Config{Logger: slog.New(slog.DiscardHandler)})
	defer gate.Close()
	reports, err := gate.Table(ctx, "app.report_state")
	if err != nil {
		return err
	}

	tell(event{Kind: eventWaiting})
	lease, err := client.Acquire(ctx, leaseName)
	if err != nil {
		return err
	}
	tell(event{Kind: eventAcquired, Fence: lease.Fence()})

	body := "revenue 125, by " + o.Holder
	gatePause.before = func() { tell(event{Kind: eventSending, Fence: lease.Fence(), Left: lease.Remaining()}) }
	// On ctx and not on the lease's context: this worker means to finish its last step whatever happens. That is the
	// mistake that a fence is for.
	outcome, err := reports.Update(ctx, lease, fencedb.Key{"report": report},
		fencedb.Set{"status": "done", "body": body, "updated_by": o.Holder})
	e := event{Kind: eventWrote, Fence: lease.Fence(), Outcome: outcome.String()}
	if err != nil {
		e.Text = err.Error()
	}
	tell(e)

	switch err := lease.Release(ctx); {
	case err == nil:
		tell(event{Kind: eventReleased, Fence: lease.Fence()})
	case !errors.Is(err, leasedb.ErrLost) && !errors.Is(err, leasedb.ErrNotHeld):
		return err
	}
	return nil
}

// pauseBeforeWrite is a pgx tracer that stands between the gate's look at the lease and the wire.
type pauseBeforeWrite struct {
	enabled bool
	in      *bufio.Reader
	before  func()
}

func (p *pauseBeforeWrite) TraceQueryStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryStartData) context.Context {
	if strings.HasPrefix(data.SQL, "UPDATE ") && p.before != nil {
		p.before()
		if p.enabled {
			_, _ = p.in.ReadString('\n')
		}
	}
	return ctx
}

func (p *pauseBeforeWrite) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}
