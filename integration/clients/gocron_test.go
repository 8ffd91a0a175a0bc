//go:build unix

package clients

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/go-co-op/gocron/v2"
	"github.com/google/uuid"
	"github.com/jonboulle/clockwork"
	"github.com/stretchr/testify/require"

	"github.com/writegate/writegate/fencedb"
	"github.com/writegate/writegate/internal/pgtest"
	"github.com/writegate/writegate/leasedb"
)

// leaseLocker has gocron run a job on one instance at a time. gocron keeps the lock to itself, so a run asks here for its lease.
type leaseLocker struct {
	leases  *leasedb.Client
	mu      sync.Mutex
	granted map[string]*leasedb.Lease // by the job's name
}

// Lock is gocron's, before a run. An error means no run: another instance is at it.
func (l *leaseLocker) Lock(ctx context.Context, job string) (gocron.Lock, error) {
	lease, err := l.leases.TryAcquire(ctx, job)
	if err != nil {
		return nil, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.granted == nil {
		l.granted = map[string]*leasedb.Lease{}
	}
	l.granted[job] = lease
	return leaseLock{lease}, nil
}

// Lease hands out each grant once, so that no two runs ever write under one fence.
func (l *leaseLocker) Lease(job string) (*leasedb.Lease, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	lease := l.granted[job]
	if lease == nil {
		return nil, fmt.Errorf("job %s has no lease", job)
	}
	delete(l.granted, job)
	return lease, nil
}

type leaseLock struct{ lease *leasedb.Lease }

func (l leaseLock) Unlock(ctx context.Context) error { return l.lease.Release(ctx) }

// reporter is a job for gocron as a user writes it.
type reporter struct {
	locker  *leaseLocker
	reports *fencedb.Table
	clock   clockwork.Clock
	compute func(context.Context) string
}

func (r *reporter) run(ctx context.Context) error {
	lease, err := r.locker.Lease("report")
	if err != nil {
		return err
	}
	tick := r.clock.Now().Truncate(time.Minute)
	body := r.compute(lease.Context()) // the long part, which ends if the lease is lost
	_, err = r.reports.Update(ctx, lease, fencedb.Key{"name": "monthly"}, fencedb.Set{"body": body, "tick": tick},
		fencedb.Where("tick < @tick", fencedb.Args{"tick": tick}))
	return err
}

func (r *reporter) schedule(scheduler gocron.Scheduler, every gocron.JobDefinition) (gocron.Job, error) {
	return scheduler.NewJob(every, gocron.NewTask(r.run), gocron.WithName("report"), gocron.WithDistributedJobLocker(r.locker))
}

// Two instances tick at the same time, and one of them runs. An instance that comes to the same tick when the other has done
// with it gets the lease, and finds the tick in the row.
func TestGocronRunsEachTickOnOneInstance(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	cfg := pgtest.New(t)
	pgtest.Exec(t, cfg, reportsSQL)
	pool := pgtest.Pool(t, cfg)
	gate := fencedb.New(pool, fencedb.Config{})
	defer gate.Close()
	table, err := gate.Table(ctx, "app.reports")
	require.NoError(t, err)
	clock := clockwork.NewFakeClockAt(time.Date(2026, 11, 30, 2, 0, 0, 0, time.UTC))

	type run struct{ holder, how string }
	ran := make(chan run, 10)
	computing, finish := make(chan string, 10), make(chan struct{})
	jobs := map[string]gocron.Job{}
	for _, holder := range []string{"A", "B"} {
		leases, err := leasedb.New(ctx, pool, leasedb.Config{TTL: time.Hour, Holder: holder})
		require.NoError(t, err)
		defer func() { _ = leases.Close(ctx) }()
		r := &reporter{locker: &leaseLocker{leases: leases}, reports: table, clock: clock, compute: func(context.Context) string {
			computing <- holder
			<-finish
			return "by " + holder
		}}
		report := func(how string) func(uuid.UUID, string, error) {
			return func(_ uuid.UUID, _ string, err error) {
				for _, known := range []error{leasedb.ErrHeld, fencedb.ErrUnmatched} {
					if errors.Is(err, known) {
						err = known
					}
				}
				ran <- run{holder, fmt.Sprint(how, ": ", err)}
			}
		}
		scheduler, err := gocron.NewScheduler(gocron.WithClock(clock), gocron.WithGlobalJobOptions(gocron.WithEventListeners(
			gocron.AfterLockError(report("not run")), gocron.AfterJobRunsWithError(report("failed")),
			gocron.AfterJobRuns(func(uuid.UUID, string) { ran <- run{holder, "ran"} }))))
		require.NoError(t, err)
		defer func() { require.NoError(t, scheduler.Shutdown()) }()
		jobs[holder], err = r.schedule(scheduler, gocron.DurationJob(time.Minute))
		require.NoError(t, err)
		scheduler.Start()
	}

	bounded, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	other := map[string]string{"A": "B", "B": "A"}
	const released = `SELECT released_at IS NOT NULL FROM fence.lease` // which gocron does not tell of
	for tick := 1; tick <= 3; tick++ {
		require.NoError(t, clock.BlockUntilContext(bounded, 2)) // both wait for it
		clock.Advance(time.Minute)
		one := receive(t, computing)
		require.Equal(t, run{other[one], "not run: " + leasedb.ErrHeld.Error()}, receive(t, ran))
		finish <- struct{}{}
		require.Equal(t, run{one, "ran"}, receive(t, ran))
		const row = `SELECT format('%s at %s', body, to_char(tick AT TIME ZONE 'UTC', 'HH24:MI')) FROM app.reports`
		require.Equal(t, fmt.Sprintf("by %s at 02:%02d", one, tick), query[string](t, pool, row))
		eventually(t, pool, released)

		require.NoError(t, jobs[other[one]].RunNow()) // as if its clock were behind
		require.Equal(t, other[one], receive(t, computing))
		finish <- struct{}{}
		require.Equal(t, run{other[one], "failed: " + fencedb.ErrUnmatched.Error()}, receive(t, ran))
		require.Equal(t, fmt.Sprintf("by %s at 02:%02d", one, tick), query[string](t, pool, row))
		eventually(t, pool, released)
	}
	require.Equal(t, 6, query[int](t, pool, `SELECT count(*) FROM fence.term WHERE end_reason = 'released'`))
	require.Equal(t, 0, query[int](t, pool, `SELECT count(*) FROM fence.rejection`))
}

func receive[T any](t *testing.T, from chan T) T {
	t.Helper()
	select {
	case v := <-from:
		return v
	case <-time.After(patience):
		require.Fail(t, "nothing came")
	}
	panic("not reached")
}

// gocronWorker is a process with a scheduler, which ticks until its turn comes, and runs once.
func gocronWorker(ctx context.Context, w *worker) error {
	defer w.close(ctx)
	r := &reporter{locker: &leaseLocker{leases: w.leases}, reports: w.reports, clock: clockwork.NewRealClock(),
		compute: func(context.Context) string { return "by " + w.holder }}
	ran := make(chan error, 1)
	var runs atomic.Int32
	scheduler, err := gocron.NewScheduler(gocron.WithGlobalJobOptions(gocron.WithEventListeners(
		gocron.AfterLockError(func(_ uuid.UUID, _ string, err error) { say("waits", err) }),
		gocron.BeforeJobRunsSkipIfBeforeFuncErrors(func(uuid.UUID, string) error {
			if runs.Add(1) > 1 {
				return errors.New("it has run")
			}
			return nil
		}),
		gocron.AfterJobRunsWithError(func(_ uuid.UUID, _ string, err error) { ran <- err }),
		gocron.AfterJobRuns(func(uuid.UUID, string) { ran <- nil }))))
	if err != nil {
		return err
	}
	if _, err := r.schedule(scheduler, gocron.DurationJob(50*time.Millisecond)); err != nil {
		return err
	}
	scheduler.Start()
	w.ended(<-ran, w.control(ctx, "by "+w.holder))
	<-w.done
	return scheduler.Shutdown()
}

// An instance is stopped in its run for longer than the lease lasts. Another takes over and writes, and then the first goes on.
func TestGocronInstanceIsStopped(t *testing.T) {
	t.Parallel()
	cfg := pgtest.New(t)
	pgtest.Exec(t, cfg, reportsSQL)
	pool := pgtest.Pool(t, cfg)

	a := startWorker(t, cfg, "gocron", "A", true)
	a.await("sending")
	a.signal(syscall.SIGSTOP)
	b := startWorker(t, cfg, "gocron", "B", false)
	require.Contains(t, b.await("waits"), `held by "A"`)
	b.await("wrote")
	require.Zero(t, b.wait(), &b.err)
	require.Equal(t, "by B", query[string](t, pool, `SELECT body FROM app.ungated`))

	a.signal(syscall.SIGCONT)
	a.goOn()
	late := a.await("refused")
	require.Zero(t, a.wait(), &a.err)
	requireLateWriteRefused(t, pool, late)
}
