//go:build unix

package clients

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/writegate/writegate/fencedb"
	"github.com/writegate/writegate/internal/pgtest"
	"github.com/writegate/writegate/leasedb"
)

// The tests of other people's schedulers tell one story. Process A is at work on a report, and is held up between the gate's
// look at its lease and the wire. The scheduler, or the lease's expiry, gives the work to process B, which writes. Then A goes
// on. Each of them writes the report through the gate, and in the same moment to a table without one: the control, which
// shows what the scheduler alone lets happen.
const reportsSQL = `
	CREATE SCHEMA app;
	CREATE TABLE app.reports (name text PRIMARY KEY, body text NOT NULL, tick timestamptz NOT NULL DEFAULT '-infinity');
	CREATE TABLE app.ungated (LIKE app.reports INCLUDING ALL);
	INSERT INTO app.reports VALUES ('monthly', 'first');
	INSERT INTO app.ungated VALUES ('monthly', 'first');
	SELECT fence.protect('app.reports')`

const (
	ttl = 2 * time.Second
	// patience bounds the wait for what is certain to come.
	patience = time.Minute
)

// A is too late: the row is B's, the refusal is on record, and without the gate B's report is gone.
func requireLateWriteRefused(t *testing.T, pool *pgxpool.Pool, late string) {
	t.Helper()
	require.Contains(t, late, fencedb.ErrStale.Error())
	require.Equal(t, "by B", query[string](t, pool, `SELECT body FROM app.reports`))
	require.Equal(t, "by A", query[string](t, pool, `SELECT body FROM app.ungated`), "the control: the update that was lost")
	require.Equal(t, `app.reports {"name": "monthly"}: stale, A 2, row is B 4; verdict stale, 1`, query[string](t, pool, rejectionsSQL))
}

const rejectionsSQL = `SELECT string_agg(format('%s %s: %s, %s %s, row is %s %s; verdict %s, %s',
	table_name, row_key, reason, holder, fence, current_holder, current_fence, verdict, count), E'\n') FROM fence.rejection`

func query[T any](t *testing.T, pool *pgxpool.Pool, sql string, args ...any) T {
	t.Helper()
	var v T
	require.NoError(t, pool.QueryRow(context.Background(), sql, args...).Scan(&v))
	return v
}

// eventually waits for what the database comes to say, of which it sends no event.
func eventually(t *testing.T, pool *pgxpool.Pool, sql string) {
	t.Helper()
	require.Eventually(t, func() bool { return query[bool](t, pool, sql) }, patience, 10*time.Millisecond, sql)
}

// worker is the inside of a process of its own: this test binary, which the environment tells what to be.
type worker struct {
	holder  string
	heldUp  bool          // before its first write through the gate, until it is told to go on
	goOn    chan struct{} // gets a line on standard input
	done    chan struct{} // closed with standard input: nobody needs this process any more
	pool    *pgxpool.Pool
	leases  *leasedb.Client
	gate    *fencedb.Gate
	reports *fencedb.Table
}

const (
	beVariable     = "WRITEGATE_TEST_BE" // a key of workers
	holderVariable = "WRITEGATE_TEST_HOLDER"
	heldUpVariable = "WRITEGATE_TEST_HELD_UP"
)

func init() {
	workers["river"] = asWorker(riverWorker)
	workers["gocron"] = asWorker(gocronWorker)
}

func asWorker(work func(context.Context, *worker) error) func() {
	return func() {
		w := &worker{holder: os.Getenv(holderVariable), heldUp: os.Getenv(heldUpVariable) != "", goOn: make(chan struct{}, 1), done: make(chan struct{})}
		go func() {
			for lines := bufio.NewScanner(os.Stdin); lines.Scan(); {
				w.goOn <- struct{}{}
			}
			close(w.done)
		}()
		ctx := context.Background()
		err := w.connect(ctx)
		if err == nil {
			err = work(ctx, w)
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, w.holder+":", err)
			os.Exit(1)
		}
	}
}

func (w *worker) connect(ctx context.Context) error {
	config, err := pgxpool.ParseConfig(os.Getenv("DATABASE_URL"))
	if err != nil {
		return err
	}
	config.ConnConfig.Tracer = w
	if w.pool, err = pgxpool.NewWithConfig(ctx, config); err != nil {
		return err
	}
	pool := w.pool
	leases, err := leasedb.New(ctx, pool, leasedb.Config{TTL: ttl, MaxHold: rescueAfter, Holder: w.holder})
	if err != nil {
		return err
	}
	w.leases, w.gate = leases, fencedb.New(pool, fencedb.Config{})
	w.reports, err = w.gate.Table(ctx, "app.reports")
	return err
}

func (w *worker) close(ctx context.Context) {
	_ = w.leases.Close(ctx) // which may have lost one, and says so
	w.gate.Close()
	w.pool.Close()
}

// TraceQueryStart stands between the gate's look at the lease and the wire.
func (w *worker) TraceQueryStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryStartData) context.Context {
	if w.heldUp && strings.HasPrefix(data.SQL, `UPDATE "app"."reports"`) {
		w.heldUp = false
		say("sending")
		<-w.goOn
	}
	return ctx
}

// TraceQueryEnd makes the worker a tracer.
func (w *worker) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

// control is the write as it would be without the gate.
func (w *worker) control(ctx context.Context, body string) error {
	_, err := w.pool.Exec(ctx, `UPDATE app.ungated SET body = $1 WHERE name = 'monthly'`, body)
	return err
}

// ended tells the test how a run has ended.
func (w *worker) ended(written, control error) {
	switch {
	case control != nil:
		say("failed", control)
	case written != nil:
		say("refused", strings.ReplaceAll(written.Error(), "\n", "; "))
	default:
		say("wrote")
	}
}

// say writes a line in one piece, whichever goroutine does.
func say(what ...any) { fmt.Print(strings.TrimSpace(fmt.Sprintln(what...)) + "\n") }

// process is another process, from the outside: in a process group of its own, so that all of it can be stopped. Should this
// one die meanwhile, a stopped group without a parent is ended by the system, and a running one sees its input end.
type process struct {
	t     *testing.T
	cmd   *exec.Cmd
	in    io.WriteCloser
	lines chan string
	err   strings.Builder
	ended chan struct{}
}

func startWorker(t *testing.T, cfg *pgx.ConnConfig, be, holder string, heldUp bool) *process {
	t.Helper()
	self, err := os.Executable()
	require.NoError(t, err)
	cmd := exec.Command(self)
	cmd.Env = append(os.Environ(), beVariable+"="+be, holderVariable+"="+holder)
	if heldUp {
		cmd.Env = append(cmd.Env, heldUpVariable+"=yes")
	}
	return start(t, cfg, cmd)
}

func start(t *testing.T, cfg *pgx.ConnConfig, cmd *exec.Cmd) *process {
	t.Helper()
	p := &process{t: t, cmd: cmd, lines: make(chan string, 100), ended: make(chan struct{})}
	if cmd.Env == nil {
		cmd.Env = os.Environ()
	}
	cmd.Env = append(cmd.Env, "DATABASE_URL="+pgtest.Shared(t).URL(cfg.Database))
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Stderr = &p.err
	var err error
	p.in, err = cmd.StdinPipe()
	require.NoError(t, err)
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	go func() {
		for s := bufio.NewScanner(out); s.Scan(); {
			p.lines <- s.Text()
		}
		_ = cmd.Wait()
		close(p.lines)
		close(p.ended)
	}()
	t.Cleanup(func() {
		select {
		case <-p.ended:
		default:
			p.signal(syscall.SIGKILL)
			<-p.ended
		}
	})
	return p
}

// signal goes to the whole group.
func (p *process) signal(sig syscall.Signal) {
	p.t.Helper()
	if err := syscall.Kill(-p.cmd.Process.Pid, sig); !errors.Is(err, syscall.ESRCH) {
		require.NoError(p.t, err)
	}
}

// await returns what is said with the word, passing by what is said before.
func (p *process) await(word string) string {
	p.t.Helper()
	timeout := time.After(patience)
	for {
		select {
		case line, ok := <-p.lines:
			require.True(p.t, ok, "it ended before it said %q: %s", word, &p.err)
			if said, rest, _ := strings.Cut(line, " "); said == word {
				return rest
			}
		case <-timeout:
			require.Fail(p.t, "it did not say "+word)
		}
	}
}

func (p *process) goOn() {
	p.t.Helper()
	_, err := io.WriteString(p.in, "\n")
	require.NoError(p.t, err)
}

// wait returns the status with which it ends, which a worker does once its input has.
func (p *process) wait() int {
	p.t.Helper()
	_ = p.in.Close()
	select {
	case <-p.ended:
	case <-time.After(patience):
		require.Fail(p.t, "it does not end")
	}
	return p.cmd.ProcessState.ExitCode()
}
