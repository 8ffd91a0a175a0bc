//go:build unix

package pgtest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
)

const poolerConfig = `
[databases]
* = host=%[1]s port=%[2]d user=%[3]s password='%[4]s'
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = %[5]d
unix_socket_dir =
auth_type = any
pool_mode = %[6]s
default_pool_size = %[7]d
max_client_conn = 500
`

// poolerSupervisor is supervisor for a pooler, which it starts again should it end by itself, as whatever runs a pooler would:
// PgBouncer 1.18 does end, now and then, when a client cancels ("bad client state"). What it said then it says on its standard error.
const poolerSupervisor = `
umask 077
mkdir "$PGTEST_DIR" && cd "$PGTEST_DIR" || exit 1
printf '%s\n' "$PGTEST_SETTINGS" >pgbouncer.ini
while [ ! -e stopping ]; do
	"$PGTEST_BIN" pgbouncer.ini >>log 2>&1 </dev/null &
	echo $! >pid
	wait $!
	[ -e stopping ] || tail -n 1 log >&2
	sleep 0.02
done &
cat >/dev/null
: >stopping
while [ ! -s pid ]; do sleep 0.02; done
while kill -TERM "$(cat pid)" 2>/dev/null; do sleep 0.02; done
wait
cd / && rm -rf "$PGTEST_DIR"
`

// Pooler starts a PgBouncer in front of the server, with the given pool_mode and up to 40 connections to it, and returns
// how to connect to the database through it. It is gone when the test ends. Where PgBouncer is not installed the test is skipped, but fails in CI.
func Pooler(t testing.TB, database, mode string) *pgx.ConnConfig {
	t.Helper()
	return Shared(t).Pooler(t, mode).Config(database)
}

// PoolerOfOne is Pooler with a single connection to the server, which all clients share.
func PoolerOfOne(t testing.TB, database, mode string) *pgx.ConnConfig {
	t.Helper()
	return Shared(t).pooler(t, mode, 1).Config(database)
}

// RunningPooler is a PgBouncer that can be ended and started again, at the same address.
type RunningPooler struct {
	program string
	server  *pgx.ConnConfig
	mode    string
	size    int
	port    int
	stop    func() error // nil while it does not run
	fell    string
}

// Pooler is as the function Pooler, for all databases of this server.
func (s *Server) Pooler(t testing.TB, mode string) *RunningPooler {
	t.Helper()
	return s.pooler(t, mode, 40)
}

func (s *Server) pooler(t testing.TB, mode string, size int) *RunningPooler {
	t.Helper()
	program, err := PoolerProgram()
	if err != nil {
		if os.Getenv("CI") == "" {
			t.Skip("pgtest: PgBouncer is not installed")
		}
		t.Fatalf("pgtest: PgBouncer is not installed: %v", err)
	}
	p := &RunningPooler{program: program, server: s.TCP(""), mode: mode, size: size}
	t.Cleanup(func() {
		if err := p.Stop(); err != nil {
			t.Errorf("pgtest: %v", err)
		}
	})
	if p.port, err = FreePort(); err == nil {
		err = p.start()
	}
	if err != nil {
		t.Fatalf("pgtest: %v", err)
	}
	return p
}

// PoolerProgram returns where PgBouncer is installed.
func PoolerProgram() (string, error) {
	program, err := exec.LookPath("pgbouncer")
	if err != nil {
		program = "/usr/sbin/pgbouncer" // not on everybody's PATH
		_, err = os.Stat(program)
	}
	return program, err
}

func (p *RunningPooler) start() error {
	owner, err := serverUser() // which PgBouncer too refuses to be root
	if err != nil {
		return err
	}
	dir, err := newDir(owner)
	if err != nil {
		return err
	}
	conf := fmt.Sprintf(poolerConfig, p.server.Host, p.server.Port, p.server.User, p.server.Password, p.port, p.mode, p.size)
	cmd := exec.Command("/bin/sh", "-c", poolerSupervisor)
	cmd.Dir = "/"
	cmd.Env = append(cleanEnv(), "PGTEST_BIN="+p.program, "PGTEST_DIR="+dir, "PGTEST_SETTINGS="+conf)
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: owner, Setpgid: true}
	var said bytes.Buffer
	cmd.Stderr = &said
	alive, err := cmd.StdinPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	p.stop = func() error {
		err := errors.Join(alive.Close(), cmd.Wait())
		p.fell += said.String()
		return err
	}

	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	for {
		conn, err := net.Dial("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(p.port)))
		if err == nil {
			return conn.Close()
		}
		if ctx.Err() != nil {
			log, _ := os.ReadFile(filepath.Join(dir, "log"))
			return fmt.Errorf("PgBouncer did not start: %w\n%s", err, log)
		}
		time.Sleep(10 * time.Millisecond) // there is no event to wait for
	}
}

// Config returns how to connect to a database through it.
func (p *RunningPooler) Config(database string) *pgx.ConnConfig {
	cfg := p.server.Copy()
	cfg.Host, cfg.Port, cfg.Fallbacks, cfg.Database = "127.0.0.1", uint16(p.port), nil, database
	return cfg
}

// Restart ends it, its clients' connections with it, and starts it again.
func (p *RunningPooler) Restart() error {
	if err := p.Stop(); err != nil {
		return err
	}
	return p.start()
}

// Fell returns what it said each time it ended by itself, and was started again. It is known once it has been stopped.
func (p *RunningPooler) Fell() string { return p.fell }

// Stop ends it. A second call does nothing.
func (p *RunningPooler) Stop() error {
	if p.stop == nil {
		return nil
	}
	stop := p.stop
	p.stop = nil
	return stop()
}
