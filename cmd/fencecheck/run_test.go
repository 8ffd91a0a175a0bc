//go:build unix

package main

import (
	"bufio"
	"context"
	"errors"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/creack/pty"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/writegate/writegate/internal/pgtest"
)

// patience bounds the wait for what is certain to come.
const patience = time.Minute

// runProcess is fencecheck run as a process of its own: the test binary, which is then fencecheck.
type runProcess struct {
	t      *testing.T
	cmd    *exec.Cmd
	stdin  *os.File
	lines  chan string
	said   string // a file
	ended  chan struct{}
	groups []int // ended with the test
}

// heedSignals begins this process anew where it was told to ignore signals, by nohup or a shell's &: what it starts would
// inherit that, and a command that is born ignoring a signal passes nothing of it on, as it should.
func heedSignals() {
	ignored := false
	for _, sig := range []os.Signal{syscall.SIGHUP, syscall.SIGINT} { // no Go program is born ignoring others
		if signal.Ignored(sig) {
			ignored = true
			signal.Notify(make(chan os.Signal, 1), sig) // what is handled is back to its default after exec
		}
	}
	if self, err := os.Executable(); ignored && err == nil {
		panic(syscall.Exec(self, os.Args, os.Environ())) //nolint:gosec // ourselves
	}
}

// startRun starts fencecheck run with these arguments, on the given database.
func startRun(t *testing.T, cfg *pgx.ConnConfig, args ...string) *runProcess {
	t.Helper()
	self, err := os.Executable()
	require.NoError(t, err)
	return startRunAs(t, cfg, exec.Command(self, append([]string{"run"}, args...)...))
}

func startRunAs(t *testing.T, cfg *pgx.ConnConfig, cmd *exec.Cmd) *runProcess {
	t.Helper()
	p := &runProcess{t: t, cmd: cmd, lines: make(chan string, 1000), ended: make(chan struct{}), said: filepath.Join(t.TempDir(), "stderr")}
	cmd.Env = append(os.Environ(), "DATABASE_URL="+url(t, cfg))
	in, stdin, err := os.Pipe()
	require.NoError(t, err)
	stdout, out, err := os.Pipe()
	require.NoError(t, err)
	said, err := os.Create(p.said)
	require.NoError(t, err)
	p.stdin, cmd.Stdin, cmd.Stdout = stdin, in, out
	if cmd.Stderr == nil {
		cmd.Stderr = said
	}
	require.NoError(t, cmd.Start())
	for _, f := range []*os.File{in, out, said} {
		require.NoError(t, f.Close())
	}
	go func() {
		for s := bufio.NewScanner(stdout); s.Scan(); {
			p.lines <- s.Text()
		}
		close(p.lines)
	}()
	go func() {
		_ = cmd.Wait()
		close(p.ended)
	}()
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		<-p.ended
		for _, g := range p.groups {
			_ = syscall.Kill(-g, syscall.SIGKILL)
		}
		_ = stdin.Close()
		_ = stdout.Close()
	})
	return p
}

// line returns the next line that the command prints.
func (p *runProcess) line() string {
	p.t.Helper()
	select {
	case s, ok := <-p.lines:
		require.True(p.t, ok, "it has ended: %s", p.stderr())
		return s
	case <-time.After(patience):
		require.Fail(p.t, "no line came", p.stderr())
	}
	return ""
}

// pid returns the process id that the command prints, of its own or of something in its group.
func (p *runProcess) pid() int {
	p.t.Helper()
	pid, err := strconv.Atoi(p.line())
	require.NoError(p.t, err)
	if group, err := syscall.Getpgid(pid); err == nil && group != syscall.Getpgrp() {
		p.groups = append(p.groups, group)
	}
	return pid
}

func (p *runProcess) signal(sig syscall.Signal) {
	p.t.Helper()
	require.NoError(p.t, p.cmd.Process.Signal(sig))
}

func (p *runProcess) write(s string) {
	p.t.Helper()
	_, err := p.stdin.WriteString(s)
	require.NoError(p.t, err)
}

// wait returns the exit status.
func (p *runProcess) wait() int {
	p.t.Helper()
	select {
	case <-p.ended:
	case <-time.After(patience):
		require.Fail(p.t, "it does not end", p.stderr())
	}
	return p.cmd.ProcessState.ExitCode()
}

func (p *runProcess) stderr() string {
	said, err := os.ReadFile(p.said)
	require.NoError(p.t, err)
	return string(said)
}

// gone reports whether a process has ended, whether or not anybody has asked for its status.
func gone(t *testing.T, pid int) bool {
	t.Helper()
	if stat, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat"); err == nil {
		return strings.HasPrefix(string(stat[strings.LastIndexByte(string(stat), ')')+1:]), " Z")
	}
	return errors.Is(syscall.Kill(pid, 0), syscall.ESRCH)
}

const heldSQL = `SELECT coalesce(bool_or(released_at IS NULL AND expires_at > clock_timestamp()), false) FROM fence.lease`

func held(t *testing.T, cfg *pgx.ConnConfig) bool { t.Helper(); return value[bool](t, cfg, heldSQL) }

// byAnother has the lease "job" be held.
func byAnother(t *testing.T, cfg *pgx.ConnConfig) {
	pgtest.Exec(t, cfg, `SELECT fence.acquire('job', 'somebody else', '1 hour', '11111111-1111-4111-8111-111111111111')`)
}

func TestRunTellsTheCommandItsGrant(t *testing.T) {
	cfg := pgtest.New(t)
	p := startRun(t, cfg, "job", "--holder", "cron on web-1", "--", "sh", "-c",
		`printf '%s\n' "$FENCE" "$FENCE_TOKEN" "$FENCE_NAME" "$FENCE_HOLDER" "$HOME"; read line; echo "$line"; echo aside >&2`)
	for _, column := range []string{"fence", "token", "name", "holder"} {
		told := p.line()
		require.Equal(t, value[string](t, cfg, `SELECT `+column+`::text FROM fence.lease`), told, column)
	}
	require.Equal(t, os.Getenv("HOME"), p.line(), "what it inherits")
	require.Equal(t, "cron on web-1", value[string](t, cfg, `SELECT holder FROM fence.lease`))
	require.True(t, held(t, cfg))
	require.Equal(t, "fencecheck run job", value[string](t, cfg, `SELECT DISTINCT application_name FROM pg_stat_activity
		WHERE datname = current_database() AND pid <> pg_backend_pid()`))
	p.write("through its stdin\n")
	require.Equal(t, "through its stdin", p.line())
	require.Equal(t, 0, p.wait())
	require.Equal(t, "aside\n", p.stderr(), "we have nothing to add, or cron would send a mail")
	require.False(t, held(t, cfg))
	require.Equal(t, "released", value[string](t, cfg, `SELECT end_reason FROM fence.term`))
}

func TestRunPassesOnTheCommandsStatus(t *testing.T) {
	cfg := pgtest.New(t)
	for command, status := range map[string]int{
		"exit 0": 0, "exit 7": 7, "exit 76": 76, "exit 255": 255, "kill -KILL $$": 128 + 9, "kill -TERM $$": 128 + 15,
	} {
		p := startRun(t, cfg, "job", "--", "sh", "-c", command)
		require.Equal(t, status, p.wait(), command)
		require.Empty(t, p.stderr())
		require.False(t, held(t, cfg))
	}
}

// Within the process, as other tests call it, its streams are no files.
func TestRunCopiesStreamsThatAreNoFiles(t *testing.T) {
	cfg := pgtest.New(t)
	r := fencecheck("run", "job", "--database-url", url(t, cfg), "--", "sh", "-c", "cat; echo out; echo err >&2; exit 4")
	require.Equal(t, result{4, "out\n", "err\n"}, r)
	require.False(t, held(t, cfg))
}

func TestRunWhereAnotherHoldsTheLease(t *testing.T) {
	cfg := pgtest.New(t)
	byAnother(t, cfg)
	marker := filepath.Join(t.TempDir(), "ran")

	p := startRun(t, cfg, "job", "--", "touch", marker)
	require.Equal(t, exitHeld, p.wait())
	require.Regexp(t, `^fencecheck: lease "job" is held by "somebody else" under fence 2 for another (1h0m0|59m\d)`, p.stderr())

	p = startRun(t, cfg, "job", "--wait", "300ms", "--", "touch", marker)
	require.Equal(t, exitHeld, p.wait())
	require.Contains(t, p.stderr(), `waited 300ms: lease "job" is held by "somebody else"`)

	pgtest.Exec(t, cfg, `SELECT fence.release('job', '11111111-1111-4111-8111-111111111111')`)
	conn, err := pgx.ConnectConfig(context.Background(), cfg)
	require.NoError(t, err)
	defer func() { _ = conn.Close(context.Background()) }()
	_, err = conn.Exec(context.Background(), `BEGIN; SELECT 1 FROM fence.lease FOR UPDATE`)
	require.NoError(t, err)
	p = startRun(t, cfg, "job", "--ttl", "1s", "--", "touch", marker)
	require.Equal(t, exitHeld, p.wait())
	require.Contains(t, p.stderr(), "lease row is locked")
	require.NoFileExists(t, marker)
}

// waits returns once a process of run asks for the lease.
func waits(t *testing.T, cfg *pgx.ConnConfig) {
	t.Helper()
	require.Eventually(t, func() bool {
		return value[bool](t, cfg, `SELECT EXISTS (SELECT 1 FROM pg_stat_activity WHERE datname = current_database()
			AND application_name = 'fencecheck run job' AND query LIKE '%fence.acquire%')`)
	}, patience, 10*time.Millisecond)
}

func TestRunWaitsForTheLease(t *testing.T) {
	cfg := pgtest.New(t)
	byAnother(t, cfg)
	p := startRun(t, cfg, "job", "--wait", "1h", "--", "sh", "-c", `echo "$FENCE"`)
	waits(t, cfg)
	pgtest.Exec(t, cfg, `SELECT fence.release('job', '11111111-1111-4111-8111-111111111111')`)
	require.Equal(t, "4", p.line())
	require.Equal(t, 0, p.wait(), p.stderr())
}

func TestRunIsInterruptedWhileItWaits(t *testing.T) {
	cfg := pgtest.New(t)
	byAnother(t, cfg)
	for _, sig := range []syscall.Signal{syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT} {
		p := startRun(t, cfg, "job", "--wait", "1h", "--", "echo", "started")
		waits(t, cfg)
		p.signal(sig)
		require.Equal(t, 128+int(sig), p.wait())
		require.Contains(t, p.stderr(), `while waiting for lease "job"; nothing was started`)
		_, printed := <-p.lines
		require.False(t, printed)
		require.Eventually(t, func() bool {
			return value[bool](t, cfg, `SELECT NOT EXISTS (SELECT 1 FROM pg_stat_activity WHERE application_name = 'fencecheck run job' AND datname = current_database())`)
		}, patience, 10*time.Millisecond)
	}
	require.Equal(t, 1, value[int](t, cfg, `SELECT count(*) FROM fence.term`))
}

// family is a command with something that it has started. Both tell of a SIGTERM.
const family = `(trap 'echo grandchild; exit 0' TERM; echo ready; while :; do sleep 1; done) &
	trap 'echo command; wait; exit 0' TERM; while :; do sleep 1; done`

func TestRunEndsTheCommandWhenTheLeaseIsLost(t *testing.T) {
	for name, sql := range map[string]string{
		"it is another's": `UPDATE fence.lease SET token = gen_random_uuid()`,
		"it has expired":  `UPDATE fence.lease SET expires_at = clock_timestamp() - interval '1 minute'`,
		"it is deleted":   `DELETE FROM fence.lease`,
	} {
		t.Run(name, func(t *testing.T) {
			cfg := pgtest.New(t)
			p := startRun(t, cfg, "job", "--ttl", "6s", "--grace", "1m", "--", "sh", "-c", family)
			require.Equal(t, "ready", p.line())
			pgtest.Exec(t, cfg, sql)
			require.ElementsMatch(t, []string{"command", "grandchild"}, []string{p.line(), p.line()})
			require.Equal(t, exitLost, p.wait(), "although the command exits 0")
			require.Regexp(t, `^fencecheck: lease "job" \(fence 2\) is lost: .*; ending the command\n`, p.stderr())
			require.Equal(t, 1, strings.Count(p.stderr(), "fencecheck:"), "it is said once")
		})
	}
}

// A lease that was lost without anybody's noticing is found to be over when it is released.
func TestRunIsToldThatItCameTooLate(t *testing.T) {
	cfg := pgtest.New(t)
	p := startRun(t, cfg, "job", "--ttl", "1h", "--", "sh", "-c", "echo ready; read line; exit 0")
	require.Equal(t, "ready", p.line())
	pgtest.Exec(t, cfg, `UPDATE fence.lease SET token = gen_random_uuid()`)
	p.write("\n")
	require.Equal(t, exitLost, p.wait())
	require.Contains(t, p.stderr(), "it belongs to a newer grant")
}

func TestRunKillsWhatDoesNotHeedTheLoss(t *testing.T) {
	cfg := pgtest.New(t)
	p := startRun(t, cfg, "job", "--max-hold", "1s", "--grace", "100ms", "--", "sh", "-c",
		`trap '' TERM; echo $$; sleep 1000 & echo $!; while :; do sleep 1; done`)
	command, grandchild := p.pid(), p.pid()
	require.Equal(t, exitLost, p.wait())
	require.True(t, gone(t, command))
	require.True(t, gone(t, grandchild))
	require.Contains(t, p.stderr(), "held for the longest time allowed")
	require.Contains(t, p.stderr(), "still there 100ms after SIGTERM; sending SIGKILL")
	require.False(t, held(t, cfg))
}

// Nobody reads what we say, and what has to be done is done.
func TestRunEndsTheCommandAlsoWhereStderrIsGone(t *testing.T) {
	cfg := pgtest.New(t)
	reader, writer, err := os.Pipe()
	require.NoError(t, err)
	require.NoError(t, reader.Close())
	self, err := os.Executable()
	require.NoError(t, err)
	cmd := exec.Command(self, "run", "job", "--max-hold", "1s", "--", "sh", "-c", "exec 2>&1; "+family) // the shells have things to say too
	cmd.Stderr = writer
	p := startRunAs(t, cfg, cmd)
	require.NoError(t, writer.Close())
	said := map[string]bool{}
	for !said["command"] || !said["grandchild"] {
		said[p.line()] = true
	}
	require.Equal(t, exitLost, p.wait())
}

func TestRunPassesSignalsOn(t *testing.T) {
	cfg := pgtest.New(t)
	// A shell that blocks in read may miss a signal that comes just before it does; in between two short naps it cannot. It
	// would say that the signals ended the naps too, on our standard error.
	end := filepath.Join(t.TempDir(), "end")
	p := startRun(t, cfg, "job", "--", "sh", "-c",
		`exec 2>/dev/null; for s in INT TERM HUP USR1 USR2 QUIT; do trap "echo $s" $s; done; echo ready; while [ ! -e "$0" ]; do sleep 0.01; done; exit 5`, end)
	require.Equal(t, "ready", p.line())
	for _, s := range []struct {
		sig  syscall.Signal
		name string
	}{
		{syscall.SIGHUP, "HUP"}, {syscall.SIGINT, "INT"}, {syscall.SIGTERM, "TERM"}, {syscall.SIGUSR1, "USR1"}, {syscall.SIGUSR2, "USR2"},
		{syscall.SIGQUIT, "QUIT"}, {syscall.SIGTERM, "TERM"},
	} {
		p.signal(s.sig)
		require.Equal(t, s.name, p.line())
		require.True(t, held(t, cfg), "it is the command's to decide what to do about it")
	}
	require.NoError(t, os.WriteFile(end, nil, 0o600))
	require.Equal(t, 5, p.wait())
	require.Empty(t, p.stderr())

	p = startRun(t, cfg, "job", "--", "sh", "-c", `echo ready; read line`)
	require.Equal(t, "ready", p.line())
	p.signal(syscall.SIGTERM)
	require.Equal(t, 128+15, p.wait())
	require.False(t, held(t, cfg))
}

// What nohup, or a shell's &, has us ignore, the command ignores too.
func TestRunLeavesIgnoredSignalsIgnored(t *testing.T) {
	cfg := pgtest.New(t)
	self, err := os.Executable()
	require.NoError(t, err)
	p := startRunAs(t, cfg, exec.Command("/bin/sh", "-c", `trap '' HUP; exec "$0" run job -- sh -c 'trap "echo USR1; exit 6" USR1; echo $$; while :; do sleep 1; done'`, self))
	command := p.pid()
	p.signal(syscall.SIGHUP)
	require.NoError(t, syscall.Kill(command, syscall.SIGHUP))
	p.signal(syscall.SIGUSR1)
	require.Equal(t, "USR1", p.line())
	require.Equal(t, 6, p.wait())
}

func TestRunEndsWhatTheCommandLeavesBehind(t *testing.T) {
	dir := t.TempDir()
	fifo := filepath.Join(dir, "go")
	require.NoError(t, syscall.Mkfifo(fifo, 0o600))
	cfg := pgtest.New(t)
	p := startRun(t, cfg, "job", "--grace", "1h", "--", "sh", "-c",
		`(trap 'echo asked; read x < "$0/go"; exit 0' TERM; : > "$0/ready"; while :; do sleep 1; done) & echo $!
		until [ -e "$0/ready" ]; do sleep 0.01; done; exit 3`, dir)
	left := p.pid()
	require.Equal(t, "asked", p.line())
	require.True(t, held(t, cfg), "the lease is not released while it goes on")
	require.False(t, gone(t, left))
	require.NoError(t, os.WriteFile(fifo, []byte("now\n"), 0o600))
	require.Equal(t, 3, p.wait())
	require.True(t, gone(t, left))
	require.False(t, held(t, cfg))
	require.Contains(t, p.stderr(), `not all that it has started; ending that before lease "job" is released`)

	// One that does not care.
	p = startRun(t, cfg, "job", "--grace", "100ms", "--", "sh", "-c", `trap '' TERM; sleep 1000 & echo $!; exit 3`)
	left = p.pid()
	require.Equal(t, 3, p.wait())
	require.True(t, gone(t, left))
	require.Contains(t, p.stderr(), "sending SIGKILL")
	require.False(t, held(t, cfg))

	// One that is about to end is left alone.
	p = startRun(t, cfg, "job", "--", "sh", "-c", `sh -c 'echo last' & exit 3`)
	require.Equal(t, "last", p.line())
	require.Equal(t, 3, p.wait())
}

func TestRunIsKilledAndSoIsTheCommand(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("only Linux can do that")
	}
	cfg := pgtest.New(t)
	p := startRun(t, cfg, "job", "--", "sh", "-c", `trap '' TERM HUP; echo $$; while :; do sleep 1; done`)
	command := p.pid()
	p.signal(syscall.SIGKILL)
	require.Eventually(t, func() bool { return gone(t, command) }, patience, 5*time.Millisecond)
	require.True(t, held(t, cfg), "until it expires")
}

func TestRunOfWhatCannotBeRun(t *testing.T) {
	cfg := pgtest.New(t)
	dir := t.TempDir()
	plain, garbage := filepath.Join(dir, "plain"), filepath.Join(dir, "garbage")
	require.NoError(t, os.WriteFile(plain, []byte("#!/bin/sh\n"), 0o600))
	require.NoError(t, os.WriteFile(garbage, []byte("neither a program nor a script"), 0o700)) //nolint:gosec // to be executed
	for command, status := range map[string]int{"no-such-command": exitNotFound, dir + "/none": exitNotFound, plain: exitCannotExec, dir: exitCannotExec} {
		p := startRun(t, cfg, "job", "--", command, "argument")
		require.Equal(t, status, p.wait(), "%s: %s", command, p.stderr())
		require.Contains(t, p.stderr(), command)
	}
	require.Equal(t, 0, value[int](t, cfg, `SELECT count(*) FROM fence.lease`), "nothing was acquired for them")
	p := startRun(t, cfg, "job", "--", garbage)
	require.Equal(t, exitCannotExec, p.wait())
	require.Contains(t, p.stderr(), "exec format error")
	require.False(t, held(t, cfg))
}

func TestRunWithoutADatabase(t *testing.T) {
	marker := filepath.Join(t.TempDir(), "ran")
	r := fencecheck("run", "job", "--database-url", "postgres://me:s3cret@127.0.0.1:1/x", "--wait", "1h", "--", "touch", marker)
	require.Equal(t, exitCannotRun, r.code)
	require.Contains(t, r.stderr, "fencecheck: ")
	require.Contains(t, r.stderr, "127.0.0.1")
	require.NotContains(t, r.stderr, "s3cret")

	r = fencecheck("run", "job", "--database-url", url(t, pgtest.NewEmpty(t)), "--", "touch", marker)
	require.Equal(t, exitCannotRun, r.code)
	require.Contains(t, r.stderr, "migrate up")

	r = fencecheck("run", "job", "--database-url", "postgres://me:s3cret@[/x", "--", "touch", marker)
	require.Equal(t, exitUsage, r.code)
	require.NotContains(t, r.stderr, "s3cret")
	require.NoFileExists(t, marker)
}

// The database goes away while the command runs, and the command ends well before that matters.
func TestRunWarnsOfAReleaseThatIsNotConfirmed(t *testing.T) {
	cfg := pgtest.New(t)
	p := startRun(t, cfg, "job", "--ttl", "9s", "--", "sh", "-c", "echo ready; read line; exit 3")
	require.Equal(t, "ready", p.line())
	pgtest.Exec(t, pgtest.Shared(t).Config(""), `ALTER DATABASE `+cfg.Database+` ALLOW_CONNECTIONS false;
		SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '`+cfg.Database+`'`)
	p.write("\n")
	require.Equal(t, 3, p.wait(), p.stderr())
	require.Contains(t, p.stderr(), "fencecheck: warning: release not confirmed, the lease expires by itself within 9s")
}

func TestRunCalledWrongly(t *testing.T) {
	db := "--database-url=postgres://127.0.0.1:1/x" // where nobody answers: it must not come to that
	for want, args := range map[string][]string{
		"--ttl 99ms":           {"job", "--ttl", "99ms", "--", "true"},
		"--ttl 168h0m1s":       {"job", "--ttl", "168h1s", "--", "true"},
		"invalid argument":     {"job", "--ttl", "soon", "--", "true"},
		"--wait -1s":           {"job", "--wait", "-1s", "--", "true"},
		"--grace -1s":          {"job", "--grace", "-1s", "--", "true"},
		"--max-hold -1s":       {"job", "--max-hold", "-1s", "--", "true"},
		"--holder":             {"job", "--holder", strings.Repeat("x", 1025), "--", "true"},
		"run NAME -- COMMAND":  {"job", "true"},
		"want the lease's":     {"job"},
		"then the command":     {"job", "--"},
		"then --":              {"--", "job", "true"},
		"the command is empty": {"job", "--", ""},
		"name of 0 bytes":      {"", "--", "true"},
		"name of 256 bytes":    {strings.Repeat("é", 128), "--", "true"},
		"control characters":   {"two\nlines", "--", "true"},
		`"\u0085"`:             {"\u0085", "--", "true"},
		"valid UTF-8":          {"\xff", "--", "true"},
		"unknown flag":         {"job", "--ttk", "1s", "--", "true"},
	} {
		r := fencecheck(append([]string{"run", db}, args...)...)
		require.Equal(t, exitUsage, r.code, "%q: %s", args, r.stderr)
		require.Contains(t, r.stderr, want)
	}
	// What we let pass, package leasedb does too.
	cfg := pgtest.New(t)
	for _, args := range [][]string{{"--ttl", "168h"}, {"--ttl", "100ms"}, {"--ttl", "100ms", "--grace", "0s"}, {"--ttl", "1s", "--grace", "1000h"},
		{"--holder", strings.Repeat("x", 1024)}} {
		r := fencecheck(append(append([]string{"run", "job", "--database-url", url(t, cfg)}, args...), "--", "true")...)
		require.NotContains(t, r.stderr, "invalid Config", args)
	}
}

func TestRunUnderAnyName(t *testing.T) {
	cfg := pgtest.New(t)
	for _, name := range []string{`two words`, `O'Brien "the" $(name) \n`, `%s%d; DROP TABLE fence.lease; --`, "夜間バッチ 🔒", strings.Repeat("é", 127), "a/b=c"} {
		p := startRun(t, cfg, name, "--", "sh", "-c", `printf '%s\n' "$FENCE_NAME"`)
		require.Equal(t, name, p.line())
		require.Equal(t, 0, p.wait(), p.stderr())
		conn, err := pgx.ConnectConfig(context.Background(), cfg)
		require.NoError(t, err)
		var n int
		require.NoError(t, conn.QueryRow(context.Background(), `SELECT count(*) FROM fence.lease WHERE name = $1 AND released_at IS NOT NULL`, name).Scan(&n))
		require.NoError(t, conn.Close(context.Background()))
		require.Equal(t, 1, n)
	}
}

func TestRunThroughAPooler(t *testing.T) {
	cfg := pgtest.New(t)
	byAnother(t, cfg)
	through := pgtest.Pooler(t, cfg.Database, "transaction")
	p := startRun(t, cfg, "job", "--database-url", "host="+through.Host+" port="+strconv.Itoa(int(through.Port))+" user="+through.User+
		" password='"+through.Password+"' dbname="+through.Database+" sslmode=disable", "--ttl", "6s", "--wait", "1h", "--", "sh", "-c", family)
	require.Eventually(t, func() bool {
		return value[bool](t, cfg, `SELECT EXISTS (SELECT 1 FROM pg_stat_activity WHERE query LIKE '%fence.acquire%' AND pid <> pg_backend_pid())`)
	}, patience, 10*time.Millisecond)
	pgtest.Exec(t, cfg, `SELECT fence.release('job', '11111111-1111-4111-8111-111111111111')`)
	require.Equal(t, "ready", p.line())
	require.Eventually(t, func() bool { return value[int64](t, cfg, `SELECT renewals FROM fence.lease`) > 0 }, patience, 10*time.Millisecond)
	p.signal(syscall.SIGTERM)
	require.ElementsMatch(t, []string{"command", "grandchild"}, []string{p.line(), p.line()})
	require.Equal(t, 0, p.wait(), p.stderr())
	require.False(t, held(t, cfg))
}

// screen is a terminal with a shell, or fencecheck itself, at it.
type screen struct {
	t        *testing.T
	terminal *os.File
	shows    chan string
	shown    string
	ended    chan int
}

func openScreen(t *testing.T, cfg *pgx.ConnConfig, command ...string) *screen {
	t.Helper()
	self, err := os.Executable()
	require.NoError(t, err)
	cmd := exec.Command(command[0], command[1:]...)
	cmd.Env = append(os.Environ(), "DATABASE_URL="+url(t, cfg), "FENCECHECK="+self, "PS1=prompt> ", "ENV=", "TERM=dumb")
	terminal, err := pty.Start(cmd)
	require.NoError(t, err)
	s := &screen{t: t, terminal: terminal, shows: make(chan string, 1000), ended: make(chan int, 1)}
	read := make(chan struct{})
	go func() {
		defer close(read)
		for buf := make([]byte, 4096); ; {
			n, err := terminal.Read(buf)
			s.shows <- string(buf[:n])
			if err != nil {
				return
			}
		}
	}()
	waited := make(chan struct{})
	go func() {
		_ = cmd.Wait()
		s.ended <- cmd.ProcessState.ExitCode()
		close(waited)
	}()
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		<-waited
		_ = terminal.Close()
		for {
			select {
			case <-s.shows: // it may be full
			case <-read:
				return
			}
		}
	})
	return s
}

func (s *screen) types(text string) {
	s.t.Helper()
	_, err := io.WriteString(s.terminal, text)
	require.NoError(s.t, err)
}

// until waits for the text to be shown, after what was waited for before.
func (s *screen) until(text string) {
	s.t.Helper()
	timeout := time.After(patience)
	for !strings.Contains(s.shown, text) {
		select {
		case more := <-s.shows:
			s.shown += more
		case <-timeout:
			require.Fail(s.t, "not shown: "+text, s.shown)
		}
	}
	_, s.shown, _ = strings.Cut(s.shown, text)
}

func (s *screen) wait() int {
	s.t.Helper()
	select {
	case status := <-s.ended:
		return status
	case <-time.After(patience):
		require.Fail(s.t, "it does not end", s.shown)
	}
	return -1
}

// The results of these sums are not in what is typed, which the terminal shows too.
const dialogue = `echo "ready $((40+2))"; read x; echo "read:$x"; trap 'echo "ctrl-c $((40+2))"; exit 4' INT; echo "trapped $((40+2))"; while :; do sleep 1; done`

func TestRunAtATerminal(t *testing.T) {
	cfg := pgtest.New(t)
	self, err := os.Executable()
	require.NoError(t, err)
	converse := func(s *screen) {
		t.Helper()
		s.until("ready 42")
		s.types("hello\n")
		s.until("read:hello")
		s.until("trapped 42")
		s.types("\x03")
		s.until("ctrl-c 42")
	}
	t.Run("alone", func(t *testing.T) {
		s := openScreen(t, cfg, self, "run", "job", "--", "sh", "-c", dialogue)
		converse(s)
		require.Equal(t, 4, s.wait())
		require.False(t, held(t, cfg))
	})
	t.Run("it has the terminal before it asks", func(t *testing.T) {
		if runtime.GOOS != "linux" {
			t.Skip("there is no /proc to look at")
		}
		// Its process group, and the one that the terminal listens to: some programs show no progress in the background.
		s := openScreen(t, cfg, self, "run", "job", "--", "sh", "-c", `set -- $(cat /proc/$$/stat); [ "$5" = "$8" ] && exit 8`)
		require.Equal(t, 8, s.wait())
	})
	t.Run("the shell gets the terminal back", func(t *testing.T) {
		s := openScreen(t, cfg, "/bin/sh", "-c", `"$FENCECHECK" run job -- sh -c "$0"; echo "status $?"; read y; echo "shell:$y"`, dialogue)
		converse(s)
		s.until("status 4")
		s.types("bye\n")
		s.until("shell:bye")
		require.Equal(t, 0, s.wait())
	})
	t.Run("of a command that cannot be executed too", func(t *testing.T) {
		garbage := filepath.Join(t.TempDir(), "garbage")
		require.NoError(t, os.WriteFile(garbage, []byte("neither a program nor a script"), 0o700)) //nolint:gosec // to be executed
		s := openScreen(t, cfg, "/bin/sh", "-c", `"$FENCECHECK" run job -- "$0"; echo "status $?"; read y; echo "shell:$y"`, garbage)
		s.until("status 126")
		s.types("bye\n")
		s.until("shell:bye")
		require.Equal(t, 0, s.wait())
	})
	t.Run("in a pipeline it gets it when it reads", func(t *testing.T) {
		s := openScreen(t, cfg, "/bin/sh", "-c", `"$FENCECHECK" run job -- sh -c "$0" | cat; read y; echo "shell:$y"`, dialogue)
		converse(s)
		s.types("bye\n")
		s.until("shell:bye")
		require.Equal(t, 0, s.wait())
	})
	t.Run("nobody could resume it", func(t *testing.T) {
		s := openScreen(t, cfg, self, "run", "job", "--", "sh", "-c", dialogue)
		s.until("ready 42")
		s.types("\x1a") // as without us, where the system ignores it
		s.types("hello\n")
		s.until("read:hello")
		s.until("trapped 42")
		s.types("\x03")
		require.Equal(t, 4, s.wait())
	})
	for name, pipe := range map[string]string{"job control": "", "job control in a pipeline": " | cat"} {
		t.Run(name, func(t *testing.T) {
			s := openScreen(t, cfg, "/bin/sh", "-i")
			s.until("prompt> ")
			s.types(`"$FENCECHECK" run job --ttl 1h -- sh -c '` + strings.ReplaceAll(dialogue, "'", `'"'"'`) + `'` + pipe + "\n")
			s.until("ready 42")
			s.types("\x1a")
			s.until("prompt> ")
			s.types("echo \"shell $((40+3))\"\n")
			s.until("shell 43")
			require.True(t, held(t, cfg), "until it expires")
			s.types("fg\n")
			s.types("hello\n")
			s.until("read:hello")
			s.until("trapped 42")
			s.types("\x03")
			s.until("ctrl-c 42")
			s.until("prompt> ")
			s.types("exit 9\n")
			require.Equal(t, 9, s.wait())
			require.False(t, held(t, cfg))
		})
	}
}
