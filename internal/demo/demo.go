// Package demo shows the product at its job: two worker processes, one lease, and a late write that the row refuses.
package demo

import (
	"bufio"
	"context"
	"crypto/rand"
	"embed"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/pressly/goose/v3"

	"github.com/writegate/writegate/internal/audit"
	"github.com/writegate/writegate/internal/migrate"
	"github.com/writegate/writegate/internal/pgtest"
	"github.com/writegate/writegate/internal/show"
)

//go:embed jobrunner/*.sql
var jobrunner embed.FS

// Options say where and how to run.
type Options struct {
	DatabaseURL string   // "": a throw-away server
	Keep        bool     // leave the database, and a throw-away server, for looking at
	Worker      []string // the command that runs [Worker], to which --holder and --pause are added
	Program     string   // what to call fencecheck in what is printed
	Out         io.Writer
}

// Run tells the story as it happens and returns nil only if every step of it was found in the database.
func Run(ctx context.Context, o Options) (err error) {
	interrupted := ctx.Done()
	var leftBehind error
	kept := false
	defer func() {
		if kept { // to be interrupted is how a server that cannot be left behind ends
			err = errors.Join(err, leftBehind)
			return
		}
		select {
		case <-interrupted:
			err = errors.New("interrupted; everything that was started has been removed")
			if leftBehind != nil {
				err = fmt.Errorf("interrupted, and not everything could be removed: %w", leftBehind)
			}
		default:
			err = errors.Join(err, leftBehind)
		}
	}()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	s := &story{out: o.Out, began: time.Now()}
	s.headline("A worker that was stopped comes back and writes too late")

	server, err := start(ctx, o.DatabaseURL)
	if err != nil {
		return err
	}
	database := "writegate_demo_" + strings.ToLower(rand.Text()[:8])
	s.tell("demo", "using database %s on %s", database, server.Where)
	admin, err := pgx.ConnectConfig(ctx, server.Config(""))
	if err != nil {
		return errors.Join(err, server.Stop())
	}
	defer func() {
		// Also after an interrupt, which has ended ctx.
		end, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
		defer cancel()
		if o.Keep && err == nil {
			kept = true
			err = leave(ctx, s, server, database, o.Program)
		}
		if !kept && server.Kind == "url" {
			_, dropErr := admin.Exec(end, "DROP DATABASE IF EXISTS "+database+" WITH (FORCE)")
			leftBehind = dropErr
		}
		leftBehind = errors.Join(leftBehind, admin.Close(end))
		if !kept {
			leftBehind = errors.Join(leftBehind, server.Stop())
		}
	}()
	if _, err := admin.Exec(ctx, "CREATE DATABASE "+database); err != nil {
		return fmt.Errorf("creating database %s for the demo: %w", database, err)
	}

	config := server.Config(database)
	if err := prepare(ctx, s, config); err != nil {
		return err
	}
	conn, err := pgx.ConnectConfig(ctx, config)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, conn.Close(context.WithoutCancel(ctx))) }()
	s.conn = conn
	// PG* variables may complete what a borrowed server's URL leaves out; of a throw-away one they know nothing.
	return play(ctx, s, o.Worker, server.URL(database), server.Kind != "url")
}

func start(ctx context.Context, databaseURL string) (*pgtest.Server, error) {
	if databaseURL != "" {
		return pgtest.Borrow(ctx, databaseURL)
	}
	return pgtest.Start(ctx)
}

// prepare makes the job runner's schema with its own goose history, adds ours beside it, and protects one table.
func prepare(ctx context.Context, s *story, config *pgx.ConnConfig) error {
	if err := jobrunnerUpTo(ctx, config, 2); err != nil {
		return fmt.Errorf("the job runner's migrations: %w", err)
	}
	s.tell("job runner", "its own schema: app.report_state with 3 rows, at version 2 of its own goose history")
	steps, err := migrate.Up(ctx, config)
	if err != nil {
		return fmt.Errorf("writegate's migrations: %w", err)
	}
	s.tell("demo", "fencecheck migrate up: schema fence, %d migrations, history in %s", len(steps), migrate.VersionTable)
	if err := jobrunnerUpTo(ctx, config, 3); err != nil {
		return fmt.Errorf("the job runner's migrations: %w", err)
	}
	s.tell("job runner", "its migration 3: SELECT fence.protect('app.report_state')")
	return nil
}

func jobrunnerUpTo(ctx context.Context, config *pgx.ConnConfig, version int64) (err error) {
	db := stdlib.OpenDB(*config)
	defer func() { err = errors.Join(err, db.Close()) }()
	files, err := fs.Sub(jobrunner, "jobrunner")
	if err != nil {
		return err
	}
	provider, err := goose.NewProvider(goose.DialectPostgres, db, files,
		goose.WithDisableGlobalRegistry(true), goose.WithLogger(goose.NopLogger()))
	if err != nil {
		return err
	}
	_, err = provider.UpTo(ctx, version)
	return err
}

func play(ctx context.Context, s *story, worker []string, databaseURL string, ownServer bool) error {
	a, err := startProcess(ctx, worker, databaseURL, "worker-a", ownServer, true)
	if err != nil {
		return err
	}
	defer a.kill()
	granted, err := a.await(eventAcquired)
	if err != nil {
		return err
	}
	fenceA := granted.Fence
	s.tell("worker-a", "has the lease %q for %v, renewed as long as it lives: fence %d", leaseName, ttl, fenceA)
	sending, err := a.await(eventSending)
	if err != nil {
		return err
	}
	s.tell("worker-a", "has computed the report and looked at its lease: %v left. It is about to write …", sending.Left.Round(10*time.Millisecond))
	if err := a.suspend(); err != nil {
		return err
	}
	stopped := time.Now()
	s.tell("demo", "SIGSTOP to worker-a (process %d), between that look and the write", a.pid())

	b, err := startProcess(ctx, worker, databaseURL, "worker-b", ownServer, false)
	if err != nil {
		return err
	}
	defer b.kill()
	if _, err := b.await(eventWaiting); err != nil {
		return err
	}
	s.tell("worker-b", "started, and waits for the lease")
	if granted, err = b.await(eventAcquired); err != nil {
		return err
	}
	fenceB := granted.Fence
	s.tell("worker-b", "has the lease: worker-a's expired. Fence %d", fenceB)
	wrote, err := b.await(eventWrote)
	if err != nil {
		return err
	}
	if wrote.Outcome != "applied" {
		return fmt.Errorf("worker-b's write: %s: %s", wrote.Outcome, wrote.Text)
	}
	s.tell("worker-b", "writes the report under fence %d: %s", fenceB, wrote.Outcome)
	if _, err := b.await(eventReleased); err != nil {
		return err
	}
	s.tell("worker-b", "has released the lease")
	if err := b.wait(); err != nil {
		return err
	}
	before, err := s.row(ctx)
	if err != nil {
		return err
	}

	if err := a.resume(); err != nil {
		return err
	}
	s.tell("demo", "SIGCONT to worker-a, %.1fs later. For it no time has passed: its statement leaves now", time.Since(stopped).Seconds())
	if wrote, err = a.await(eventWrote); err != nil {
		return err
	}
	if wrote.Outcome != "stale" {
		return fmt.Errorf("worker-a's late write under fence %d: %s %s; want it refused as stale", fenceA, wrote.Outcome, wrote.Text)
	}
	s.tell("worker-a", "REFUSED by the row: %s", wrote.Text)
	if err := a.wait(); err != nil {
		return err
	}
	return s.verify(ctx, fenceA, fenceB, before)
}

// story prints what happens and looks it up in the database.
type story struct {
	out   io.Writer
	began time.Time
	conn  *pgx.Conn
}

func (s *story) headline(text string) { _, _ = fmt.Fprintf(s.out, "%s\n\n", text) }

func (s *story) tell(who, format string, args ...any) {
	_, _ = fmt.Fprintf(s.out, "%6.2fs  %-10s  %s\n", time.Since(s.began).Seconds(), who, fmt.Sprintf(format, args...))
}

type reportRow struct {
	body, updatedBy string
	fence           int64
}

func (s *story) row(ctx context.Context) (r reportRow, err error) {
	err = s.conn.QueryRow(ctx, `SELECT body, updated_by, last_fence FROM app.report_state WHERE report = $1`, report).
		Scan(&r.body, &r.updatedBy, &r.fence)
	return r, err
}

// verify finds every step of the story in the database.
func (s *story) verify(ctx context.Context, fenceA, fenceB int64, before reportRow) error {
	_, _ = fmt.Fprintf(s.out, "\nWhat the database says\n\n")
	var failed []error
	check := func(ok bool, format string, args ...any) {
		text := fmt.Sprintf(format, args...)
		mark := "ok"
		if !ok {
			mark = "NOT SO"
			failed = append(failed, errors.New("not so: "+text))
		}
		_, _ = fmt.Fprintf(s.out, "  %-6s  %s\n", mark, text)
	}

	row, err := s.row(ctx)
	if err != nil {
		return err
	}
	check(fenceB > fenceA, "worker-b's fence %d is above worker-a's %d", fenceB, fenceA)
	check(row == before && row.updatedBy == "worker-b" && row.fence == fenceB,
		"the row is worker-b's, before and after worker-a's write: %q, last_fence %d", row.body, row.fence)
	var endA, endB string
	err = s.conn.QueryRow(ctx, `SELECT coalesce(max(end_reason) FILTER (WHERE fence = $1), ''), coalesce(max(end_reason) FILTER (WHERE fence = $2), '')
		FROM fence.term`, fenceA, fenceB).Scan(&endA, &endB)
	if err != nil {
		return err
	}
	check(endA == "expired" && endB == "released", "worker-a's term has %s, worker-b's was %s", endA, endB)
	var untouched, theirs, ours int64
	err = s.conn.QueryRow(ctx, `SELECT (SELECT count(*) FROM app.report_state WHERE last_fence = 0),
		(SELECT max(version_id) FROM public.goose_db_version), (SELECT max(version_id) FROM fence.goose_db_version)`).
		Scan(&untouched, &theirs, &ours)
	if err != nil {
		return err
	}
	check(untouched == 2, "the other %d rows were never written", untouched)
	check(theirs == 3 && ours > 0, "the job runner's goose history is at its own %d, writegate's at %d", theirs, ours)
	rejections, _, err := audit.Rejections(ctx, s.conn, audit.Filter{})
	if err != nil {
		return err
	}
	found := len(rejections) == 1
	if found {
		r := rejections[0]
		found = r.Fence == fenceA && r.CurrentFence != nil && *r.CurrentFence == fenceB && r.Holder == "worker-a" &&
			r.CurrentHolder == "worker-b" && r.Reason == "stale" && r.Verdict == "stale" && r.Table == "app.report_state"
	}
	check(found, "the audit has one rejection: worker-a's write, and whose row it would have overwritten")

	_, _ = fmt.Fprintf(s.out, "\nThe audit (fencecheck rejections)\n\n")
	if err := show.Rejections(rejections).Write(s.out, show.Screen{}); err != nil {
		return err
	}
	leases, _, err := audit.Leases(ctx, s.conn, audit.LeaseFilter{})
	if err != nil {
		return err
	}
	_, _ = fmt.Fprintf(s.out, "\nThe leases (fencecheck leases)\n\n")
	if err := show.Leases(leases).Write(s.out, show.Screen{}); err != nil {
		return err
	}
	if len(failed) > 0 {
		return errors.Join(failed...)
	}
	_, _ = fmt.Fprintf(s.out, "\nThe late write was stopped at the row, and is on record. %.1fs\n", time.Since(s.began).Seconds())
	return nil
}

// leave keeps the server up, and says how to look at it.
func leave(ctx context.Context, s *story, server *pgtest.Server, database, program string) error {
	// Without a password where it is not needed, or known to whoever gave us a URL.
	url := server.PublicURL(database)
	_, _ = fmt.Fprintf(s.out, "\nKept. Look at it with\n\n  psql '%s'\n  %s rejections --database-url '%s'\n\n", url, program, url)
	if server.Kind == "url" {
		_, _ = fmt.Fprintf(s.out, "and remove it with\n\n  DROP DATABASE %s\n", database)
		return nil
	}
	end, err := server.Keep()
	if errors.Is(err, errors.ErrUnsupported) {
		_, _ = fmt.Fprintln(s.out, "It lasts until you interrupt this program.")
		<-ctx.Done()
		return server.Stop()
	}
	if err != nil {
		return err
	}
	_, _ = fmt.Fprintf(s.out, "and end it with\n\n  %s\n", end)
	return nil
}

// process is a worker process, seen through what it says.
type process struct {
	holder string
	cmd    *exec.Cmd
	in     io.WriteCloser
	events chan event
	stderr *strings.Builder
	ended  chan error // holds the exit once, for wait
}

func startProcess(ctx context.Context, worker []string, databaseURL, holder string, ownServer, pause bool) (*process, error) {
	environ := os.Environ()
	if ownServer {
		environ = slices.DeleteFunc(environ, func(kv string) bool { return strings.HasPrefix(kv, "PG") })
	}
	args := slices.Concat(worker[1:], []string{"--holder", holder})
	if pause {
		args = append(args, "--pause")
	}
	cmd := exec.CommandContext(ctx, worker[0], args...)
	// In the environment, which only its owner can read; arguments are for everybody.
	cmd.Env = slices.Concat(environ, []string{"DATABASE_URL=" + databaseURL})
	p := &process{holder: holder, cmd: cmd, events: make(chan event, 16), stderr: &strings.Builder{}, ended: make(chan error, 1)}
	cmd.Stderr = p.stderr
	cmd.SysProcAttr = dieWithUs()
	var err error
	if p.in, err = cmd.StdinPipe(); err != nil {
		return nil, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	go func() {
		lines := bufio.NewScanner(out)
		for lines.Scan() {
			var e event
			if json.Unmarshal(lines.Bytes(), &e) == nil {
				p.events <- e
			}
		}
		p.ended <- cmd.Wait()
		close(p.events)
	}()
	return p, nil
}

func (p *process) pid() int { return p.cmd.Process.Pid }

// await returns the next event of that kind, passing by others.
func (p *process) await(kind string) (event, error) {
	timeout := time.After(30 * time.Second)
	for {
		select {
		case e, ok := <-p.events:
			switch {
			case !ok:
				return event{}, fmt.Errorf("%s ended before it said %q: %s", p.holder, kind, strings.TrimSpace(p.stderr.String()))
			case e.Kind == kind:
				return e, nil
			case e.Kind == eventFailed:
				return event{}, fmt.Errorf("%s failed: %s", p.holder, e.Text)
			}
		case <-timeout:
			return event{}, fmt.Errorf("%s did not say %q within 30s", p.holder, kind)
		}
	}
}

// wait returns once the process has ended by itself.
func (p *process) wait() error {
	for range p.events { //nolint:revive // what else it says is not part of the story
	}
	if err := <-p.ended; err != nil {
		return fmt.Errorf("%s: %w: %s", p.holder, err, strings.TrimSpace(p.stderr.String()))
	}
	return nil
}

// kill makes sure that the process is gone.
func (p *process) kill() {
	_ = p.cmd.Process.Kill()
	for range p.events { //nolint:revive // closed once the process has been waited for
	}
}
