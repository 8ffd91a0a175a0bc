package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"os/exec"
	"os/signal"
	"strconv"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"

	"github.com/writegate/writegate/leasedb"
)

// Exit codes of run, where it is not the command's own. From 125 on they are those of env(1) and timeout(1).
const (
	exitHeld        = 75 // sysexits' EX_TEMPFAIL: try again later
	exitLost        = 76
	exitCannotRun   = 125 // nothing was started
	exitCannotExec  = 126
	exitNotFound    = 127
	exitSignalled   = 128 // plus the signal's number
	maxAppNameBytes = 63
)

// exitStatus ends run with a status that is not for main to choose. What there was to say has been said.
type exitStatus int

func (s exitStatus) Error() string { return fmt.Sprintf("exit status %d", int(s)) }

// heldRun is one use of run.
type heldRun struct {
	app      *app
	name     string
	argv     []string
	ttl      time.Duration
	wait     time.Duration
	grace    time.Duration
	maxHold  time.Duration
	holder   string
	in       io.Reader
	out, err io.Writer

	signals  chan os.Signal
	toldLost bool
}

func (a *app) runCommand() *cobra.Command {
	r := &heldRun{app: a}
	cmd := &cobra.Command{
		Use:   "run NAME [flags] -- COMMAND [ARGUMENT...]",
		Short: "Run a command while holding a lease, and tell it the fence",
		Long: `run acquires the lease NAME, runs the command, keeps the lease alive meanwhile, and releases it once nothing of the
command is left. The command finds FENCE, FENCE_TOKEN, FENCE_NAME and FENCE_HOLDER in its environment.

If the lease is lost, the command and what it has started get SIGTERM, and SIGKILL after --grace. Signals are passed on.

Exit status: the command's own, or 128+n if signal n ended it; 75 the lease is held by another; 76 the lease was lost while
the command ran; 125 the database cannot be reached or used, nothing was started; 126 the command cannot be executed;
127 it is not found; 2 called wrongly.`,
		Example:               `  fencecheck run nightly-report --ttl 1m --wait 10m -- ./report.sh --all`,
		DisableFlagsInUseLine: true,
		Args: usageArgs(func(cmd *cobra.Command, args []string) error {
			if cmd.ArgsLenAtDash() != 1 || len(args) < 2 {
				return errors.New("want the lease's name, then --, then the command: run NAME -- COMMAND [ARGUMENT...]")
			}
			return nil
		}),
		RunE: func(cmd *cobra.Command, args []string) error {
			r.name, r.argv = args[0], args[1:]
			r.in, r.out, r.err = cmd.InOrStdin(), cmd.OutOrStdout(), cmd.ErrOrStderr()
			if err := r.validate(); err != nil {
				return usageError{err}
			}
			// Not cancelled by signals: they come to us by a channel, which tells them apart and hands them to the command.
			status, err := r.run(context.WithoutCancel(cmd.Context()))
			if err == nil && status != exitClean {
				err = exitStatus(status)
			}
			return err
		},
	}
	f := cmd.Flags()
	f.DurationVar(&r.ttl, "ttl", 30*time.Second, "how long a grant lasts if it is not renewed; 100ms to 168h")
	f.DurationVar(&r.wait, "wait", 0, "how long to wait while another holds the lease; 0: try once")
	f.DurationVar(&r.grace, "grace", 10*time.Second, "time between SIGTERM and SIGKILL for what has to end")
	f.DurationVar(&r.maxHold, "max-hold", 0, "lose even a healthy lease after this time; 0: no limit")
	f.StringVar(&r.holder, "holder", "", "a label that others are shown (default host/process id/program)")
	return cmd
}

// validate says all that is wrong, in the words of whoever typed it, before anything is connected to. The database and
// package leasedb have the last word.
func (r *heldRun) validate() error {
	var errs []error
	wrong := func(bad bool, format string, args ...any) {
		if bad {
			errs = append(errs, fmt.Errorf(format, args...))
		}
	}
	wrong(r.ttl < 100*time.Millisecond || r.ttl > 7*24*time.Hour, "--ttl %v: want 100ms to 168h", r.ttl)
	wrong(r.wait < 0, "--wait %v: want 0 or more", r.wait)
	wrong(r.grace < 0, "--grace %v: want 0 or more", r.grace)
	wrong(r.maxHold < 0, "--max-hold %v: want 0 (no limit) or more", r.maxHold)
	wrong(len(r.holder) > 1024 || !utf8.ValidString(r.holder), "--holder: want valid UTF-8 of at most 1024 bytes")
	wrong(len(r.name) == 0 || len(r.name) > 255, "lease name of %d bytes: want 1 to 255", len(r.name))
	wrong(!utf8.ValidString(r.name), "lease name %q: want valid UTF-8", r.name)
	for _, c := range r.name {
		if unicode.IsControl(c) {
			wrong(true, "lease name %q: want no control characters", r.name)
			break
		}
	}
	wrong(r.argv[0] == "", "the command is empty")
	return errors.Join(errs...)
}

// config renews twice as often as the default, for the command learns of a grant that is over from a renewal alone. The
// margin is what the command is given to end, as far as the TTL has room for it: when the database is out of reach, the
// command is gone before anybody else can be granted the lease.
func (r *heldRun) config() leasedb.Config {
	return leasedb.Config{
		Holder:     r.holder,
		TTL:        r.ttl,
		RenewEvery: r.ttl / 6,
		Margin:     max(r.ttl/10, min(r.grace+r.ttl/20, r.ttl/2)),
		MaxHold:    r.maxHold,
		Conns:      1,
		// A LISTEN would cost a connection for as long as the command runs, and behind a pooler stay in somebody else's.
		PollOnly: true,
		Logger:   slog.New(slog.DiscardHandler), // what it says of losses is said here
	}
}

func (r *heldRun) say(format string, args ...any) {
	fmt.Fprintf(r.err, "fencecheck: "+format+"\n", args...)
}

// run returns the status to exit with, or an error that main maps to one.
func (r *heldRun) run(ctx context.Context) (int, error) {
	pool, err := r.pool()
	if err != nil {
		return 0, err
	}
	defer pool.Close()
	// Before the acquire: a typo need not keep others from the lease.
	path, err := exec.LookPath(r.argv[0])
	if err != nil && !errors.Is(err, exec.ErrDot) {
		r.say("%v", err)
		if errors.Is(err, exec.ErrNotFound) || errors.Is(err, fs.ErrNotExist) {
			return exitNotFound, nil
		}
		return exitCannotExec, nil
	}
	r.signals = make(chan os.Signal, 32)
	catchSignals(r.signals)
	defer signal.Stop(r.signals)

	client, lease, status := r.acquire(ctx, pool)
	if client != nil {
		defer func() { _ = client.Close(ctx) }() // whose only lease has been dealt with
	}
	if lease == nil {
		return status, nil
	}
	cmd := &exec.Cmd{
		Path: path, Args: r.argv, Stdin: r.in, Stdout: r.out, Stderr: r.err,
		Env: append(os.Environ(),
			"FENCE="+strconv.FormatInt(lease.Fence(), 10),
			"FENCE_TOKEN="+lease.Token(),
			"FENCE_NAME="+lease.Name(),
			"FENCE_HOLDER="+lease.Holder()),
	}
	group, err := startGroup(cmd)
	if err != nil {
		r.say("%v", err)
		status = exitCannotExec
	} else {
		var gone bool
		status, gone = r.attend(lease, group)
		group.close()
		if !gone {
			r.say("what is left of the command cannot be ended; lease %q is not released, it expires within %v", r.name, r.ttl)
			if lost := lease.Err(); lost != nil {
				status = exitLost
			}
			_ = client.Abandon()
			return status, nil
		}
	}
	switch err := lease.Release(ctx); {
	case errors.Is(err, leasedb.ErrLost), errors.Is(err, leasedb.ErrNotHeld):
		if !errors.Is(err, leasedb.ErrLost) || !r.toldLost {
			r.say("%v", err)
		}
		status = exitLost
	case err != nil:
		r.say("warning: %v", err)
	}
	return status, nil
}

// pool makes what leasedb takes its configuration from; nothing connects through it.
func (r *heldRun) pool() (*pgxpool.Pool, error) {
	conn, err := r.app.connConfig()
	if err != nil {
		return nil, err
	}
	if conn.RuntimeParams["application_name"] == "fencecheck" { // connConfig's own, and not the user's
		conn.RuntimeParams["application_name"] = cut("fencecheck run "+r.name, maxAppNameBytes)
	}
	cfg, err := pgxpool.ParseConfig("host=localhost sslmode=disable") // all of which is replaced
	if err != nil {
		return nil, err
	}
	cfg.ConnConfig = conn
	return pgxpool.NewWithConfig(context.Background(), cfg)
}

// cut returns the beginning of s, of at most n bytes and whole characters.
func cut(s string, n int) string {
	if len(s) <= n {
		return s
	}
	for n > 0 && !utf8.RuneStart(s[n]) {
		n--
	}
	return s[:n]
}

// acquire returns a lease, or the status to exit with. The client, if there is one, has to be closed in either case.
func (r *heldRun) acquire(ctx context.Context, pool *pgxpool.Pool) (*leasedb.Client, *leasedb.Lease, int) {
	ctx, interrupt := context.WithCancel(ctx)
	defer interrupt()
	type answer struct {
		client *leasedb.Client
		lease  *leasedb.Lease
		status int
		err    error
	}
	done := make(chan answer, 1)
	go func() {
		var a answer
		if a.client, a.err = leasedb.New(ctx, pool, r.config()); a.err != nil {
			a.status, a.err = exitCannotRun, r.app.explainConnect(a.err)
		} else {
			a.lease, a.status, a.err = r.grant(ctx, a.client)
		}
		done <- a
	}()
	var ended os.Signal
	for {
		select {
		case sig := <-r.signals:
			switch {
			case endsWaiting(sig):
				ended = sig
				interrupt()
			case stops(sig):
				stopSelf()
			}
			continue
		case a := <-done:
			if ended == nil {
				select { // one that came with the answer
				case sig := <-r.signals:
					if endsWaiting(sig) {
						ended = sig
					}
				default:
				}
			}
			if ended != nil {
				if a.lease != nil {
					if err := a.lease.Release(context.WithoutCancel(ctx)); err != nil {
						r.say("warning: %v", err)
					}
				}
				r.say("%v while waiting for lease %q; nothing was started", ended, r.name)
				return a.client, nil, exitSignalled + signalNumber(ended)
			}
			if a.err != nil {
				r.say("%v", a.err)
			}
			return a.client, a.lease, a.status
		}
	}
}

// grant asks for the lease.
func (r *heldRun) grant(ctx context.Context, client *leasedb.Client) (*leasedb.Lease, int, error) {
	if r.wait == 0 {
		lease, err := client.TryAcquire(ctx, r.name)
		switch {
		case err == nil:
			return lease, exitClean, nil
		case errors.Is(err, leasedb.ErrHeld), errors.Is(err, leasedb.ErrBusy):
			return nil, exitHeld, err
		}
		return nil, exitCannotRun, err
	}
	waiting, cancel := context.WithTimeout(ctx, r.wait)
	defer cancel()
	lease, err := client.Acquire(waiting, r.name)
	var held *leasedb.HeldError
	switch {
	case err == nil:
		return lease, exitClean, nil
	case errors.As(err, &held):
		return nil, exitHeld, fmt.Errorf("waited %v: %w", r.wait, held)
	case waiting.Err() != nil:
		return nil, exitHeld, fmt.Errorf("waited %v: %w", r.wait, err)
	}
	return nil, exitCannotRun, err
}

// leftoverSettle is how long what the command has left behind may take to end unasked: the tee at the end of its output is
// still writing when the shell before it is gone.
const leftoverSettle = 200 * time.Millisecond

// attend waits until the command has ended and nothing of its group is left, and passes on signals and the lease's loss.
// gone is false if something could not be ended.
func (r *heldRun) attend(lease *leasedb.Lease, group *group) (status int, gone bool) {
	lost := lease.Context().Done()
	look := time.NewTicker(5 * time.Millisecond) // there is no event for the end of a grandchild
	look.Stop()
	defer look.Stop()
	var deadline <-chan time.Time // of the present stage
	const (
		running  = iota // the command is left alone
		settling        // it has ended; the others may
		asked           // SIGTERM was sent
		killed          // SIGKILL was
	)
	stage, ended := running, false
	ask := func() {
		group.terminate()
		stage, deadline = asked, time.After(r.grace)
	}
	for {
		select {
		case sig := <-r.signals:
			group.pass(sig)
		case <-lost:
			lost = nil
			r.toldLost = true
			r.say("%v; ending the command", lease.Err())
			if stage < asked {
				ask()
			}
		case e := <-group.events:
			if !e.ended {
				group.suspended(e)
				continue
			}
			ended, status = true, e.status
			if !group.alive() {
				return status, true
			}
			look.Reset(5 * time.Millisecond)
			if stage == running {
				stage, deadline = settling, time.After(leftoverSettle)
			}
		case <-look.C:
			if !group.alive() {
				return status, true
			}
		case <-deadline:
			switch stage {
			case settling:
				r.say("the command has ended, but not all that it has started; ending that before lease %q is released", r.name)
				ask()
			case asked:
				r.say("still there %v after SIGTERM; sending SIGKILL", r.grace)
				group.kill()
				stage, deadline = killed, time.After(max(r.grace, 10*time.Second))
			case killed:
				if ended {
					return status, false
				}
				// Not even SIGKILL has ended the command itself: it hangs in the kernel, and so does whoever waits for it.
				deadline = nil
			}
		}
	}
}
