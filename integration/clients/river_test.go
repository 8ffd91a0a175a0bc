//go:build unix

package clients

import (
	"context"
	"fmt"
	"log/slog"
	"syscall"
	"testing"
	"time"

	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivermigrate"
	"github.com/stretchr/testify/require"

	"github.com/writegate/writegate/fencedb"
	"github.com/writegate/writegate/internal/pgtest"
	"github.com/writegate/writegate/leasedb"
)

// rescueAfter is when River gives a job that still runs to a second attempt. It is an hour unless set; here it is short, but no
// shorter than what a lease may need to expire, which the second attempt waits for.
const rescueAfter = 3 * time.Second

type reportArgs struct{ Report string }

func (reportArgs) Kind() string { return "report" }

// reportWorker is a River worker as a user writes it.
type reportWorker struct {
	river.WorkerDefaults[reportArgs]
	leases  *leasedb.Client
	reports *fencedb.Table
	compute func(ctx context.Context, report string) string
}

func (w *reportWorker) Work(ctx context.Context, job *river.Job[reportArgs]) error {
	report := job.Args.Report
	return w.leases.Do(ctx, "report/"+report, func(working context.Context, lease *leasedb.Lease) error {
		body := w.compute(working, report) // the long part, which ends if the lease is lost
		_, err := w.reports.Update(ctx, lease, fencedb.Key{"name": report}, fencedb.Set{"body": body})
		return err
	})
}

// reportWorkerAndControl does the same without the gate besides, and is tried again at once.
type reportWorkerAndControl struct {
	reportWorker
	*worker
}

func (w *reportWorkerAndControl) Work(ctx context.Context, job *river.Job[reportArgs]) error {
	err := w.reportWorker.Work(ctx, job)
	w.ended(err, w.control(ctx, w.compute(ctx, job.Args.Report)))
	return err
}

func (*reportWorkerAndControl) NextRetry(*river.Job[reportArgs]) time.Time { return time.Now() }

// riverWorker is a process that works River's jobs.
func riverWorker(ctx context.Context, w *worker) error {
	defer w.close(ctx)
	reports := &reportWorkerAndControl{reportWorker{leases: w.leases, reports: w.reports, compute: func(context.Context, string) string { return "by " + w.holder }}, w}
	config := &river.Config{
		Queues:  map[string]river.QueueConfig{river.QueueDefault: {MaxWorkers: 1}},
		Workers: river.NewWorkers(), Logger: slog.New(slog.DiscardHandler),
		JobTimeout: rescueAfter, RescueStuckJobsAfter: rescueAfter,
	}
	if w.heldUp {
		// Its context says nothing, and its leadership, which outlasts it by a quarter of a minute, does not keep B waiting.
		config.JobTimeout, config.LeaderElectionDisabled = -1, true
	}
	river.AddWorker(config.Workers, reports)
	client, err := river.NewClient(riverpgxv5.New(w.pool), config)
	if err != nil {
		return err
	}
	if err := client.Start(ctx); err != nil {
		return err
	}
	<-w.done
	return client.Stop(ctx)
}

// River's rescuer gives the job to a second attempt while the first one still runs. The first one's late write is refused at
// the row; without the gate it overwrites the second one's.
func TestRiverRescuesAJobThatStillRuns(t *testing.T) {
	for name, stopped := range map[string]bool{"its process is stopped": true, "its statement is held up on the way": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ctx := context.Background()
			cfg := pgtest.New(t)
			pgtest.Exec(t, cfg, reportsSQL)
			pool := pgtest.Pool(t, cfg)
			driver := riverpgxv5.New(pool)
			migrator, err := rivermigrate.New(driver, &rivermigrate.Config{Logger: slog.New(slog.DiscardHandler)})
			require.NoError(t, err)
			_, err = migrator.Migrate(ctx, rivermigrate.DirectionUp, nil)
			require.NoError(t, err)
			client, err := river.NewClient(driver, &river.Config{})
			require.NoError(t, err)
			_, err = client.Insert(ctx, reportArgs{Report: "monthly"}, nil)
			require.NoError(t, err)

			a := startWorker(t, cfg, "river", "A", true)
			a.await("sending")
			if stopped {
				a.signal(syscall.SIGSTOP)
			}
			// River looks for stuck jobs when it becomes the leader, and then twice a minute.
			eventually(t, pool, fmt.Sprintf(`SELECT attempted_at < clock_timestamp() - interval '%v' FROM river_job`, rescueAfter))
			b := startWorker(t, cfg, "river", "B", false)
			b.await("wrote")
			require.Zero(t, b.wait(), &b.err)
			const job = `SELECT format('%s after %s attempts, 1st: %s', state, attempt, errors[1] ->> 'error') FROM river_job`
			require.Equal(t, "completed after 2 attempts, 1st: Stuck job rescued by JobRescuer", query[string](t, pool, job))
			require.Equal(t, "by B", query[string](t, pool, `SELECT body FROM app.ungated`))

			if stopped {
				a.signal(syscall.SIGCONT)
			}
			a.goOn()
			late := a.await("refused")
			require.Zero(t, a.wait(), &a.err)
			requireLateWriteRefused(t, pool, late)
		})
	}
}
