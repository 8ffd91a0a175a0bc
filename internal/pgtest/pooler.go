//go:build unix

package pgtest

import (
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

// poolerSupervisor is supervisor for a pooler.
const poolerSupervisor = `
umask 077
mkdir "$PGTEST_DIR" && cd "$PGTEST_DIR" || exit 1
printf '%s\n' "$PGTEST_SETTINGS" >pgbouncer.ini
"$PGTEST_BIN" pgbouncer.ini >log 2>&1 </dev/null &
pooler=$!
cat >/dev/null
kill -TERM "$pooler" 2>/dev/null
wait
cd / && rm -rf "$PGTEST_DIR"
`

// Pooler starts a PgBouncer in front of the server, with the given pool_mode and up to 40 connections to it, and returns
// how to connect to the database through it. It is gone when the test ends. Where PgBouncer is not installed the test is skipped, but fails in CI.
func Pooler(t testing.TB, database, mode string) *pgx.ConnConfig {
	t.Helper()
	return pooler(t, database, mode, 40)
}

// PoolerOfOne is Pooler with a single connection to the server, which all clients share.
func PoolerOfOne(t testing.TB, database, mode string) *pgx.ConnConfig {
	t.Helper()
	return pooler(t, database, mode, 1)
}

func pooler(t testing.TB, database, mode string, size int) *pgx.ConnConfig {
	t.Helper()
	cfg, err := startPooler(findPooler(t), Shared(t).TCP(database), mode, size, 0, func(stop func() error) {
		t.Cleanup(func() {
			if err := stop(); err != nil {
				t.Errorf("pgtest: %v", err)
			}
		})
	})
	if err != nil {
		t.Fatalf("pgtest: %v", err)
	}
	return cfg
}

func findPooler(t testing.TB) string {
	t.Helper()
	program, err := exec.LookPath("pgbouncer")
	if err != nil {
		program = "/usr/sbin/pgbouncer" // not on everybody's PATH
		if _, statErr := os.Stat(program); statErr != nil {
			if os.Getenv("CI") == "" {
				t.Skip("pgtest: PgBouncer is not installed")
			}
			t.Fatalf("pgtest: PgBouncer is not installed: %v", err)
		}
	}
	return program
}

// startPooler starts one, at a port that is free if none is given.
func startPooler(program string, server *pgx.ConnConfig, mode string, size, port int, onStop func(func() error)) (*pgx.ConnConfig, error) {
	owner, err := serverUser() // which PgBouncer too refuses to be root
	if err != nil {
		return nil, err
	}
	dir, err := newDir(owner)
	if err != nil {
		return nil, err
	}
	if port == 0 {
		if port, err = freePort(); err != nil {
			return nil, err
		}
	}
	conf := fmt.Sprintf(poolerConfig, server.Host, server.Port, server.User, server.Password, port, mode, size)
	cmd := exec.Command("/bin/sh", "-c", poolerSupervisor)
	cmd.Dir = "/"
	cmd.Env = append(cleanEnv(), "PGTEST_BIN="+program, "PGTEST_DIR="+dir, "PGTEST_SETTINGS="+conf)
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: owner, Setpgid: true}
	alive, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	onStop(func() error { return errors.Join(alive.Close(), cmd.Wait()) })

	through := server.Copy()
	through.Host, through.Port, through.Fallbacks = "127.0.0.1", uint16(port), nil
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	for {
		conn, err := net.Dial("tcp", net.JoinHostPort(through.Host, strconv.Itoa(port)))
		if err == nil {
			return through, conn.Close()
		}
		if ctx.Err() != nil {
			log, _ := os.ReadFile(filepath.Join(dir, "log"))
			return nil, fmt.Errorf("PgBouncer did not start: %w\n%s", err, log)
		}
		time.Sleep(10 * time.Millisecond) // there is no event to wait for
	}
}

// RestartablePooler is a PgBouncer that can be ended and started again, at the same address.
type RestartablePooler struct {
	program string
	server  *pgx.ConnConfig
	mode    string
	port    int
	stop    func() error
}

// Pooler starts a PgBouncer in front of the server, for any of its databases. It is gone when the test ends.
func (s *Server) Pooler(t testing.TB, mode string) *RestartablePooler {
	t.Helper()
	p := &RestartablePooler{program: findPooler(t), server: s.TCP(""), mode: mode}
	if err := p.start(); err != nil {
		t.Fatalf("pgtest: %v", err)
	}
	t.Cleanup(func() {
		if err := p.Stop(); err != nil {
			t.Errorf("pgtest: %v", err)
		}
	})
	return p
}

func (p *RestartablePooler) start() error {
	cfg, err := startPooler(p.program, p.server, p.mode, 40, p.port, func(stop func() error) { p.stop = stop })
	if err == nil {
		p.port = int(cfg.Port)
	}
	return err
}

// Config returns how to connect to a database through it.
func (p *RestartablePooler) Config(database string) *pgx.ConnConfig {
	cfg := p.server.Copy()
	cfg.Host, cfg.Port, cfg.Fallbacks, cfg.Database = "127.0.0.1", uint16(p.port), nil, database
	return cfg
}

// Restart ends it, its clients' connections with it, and starts it again.
func (p *RestartablePooler) Restart() error {
	if err := p.Stop(); err != nil {
		return err
	}
	return p.start()
}

// Stop ends it. A second call does nothing.
func (p *RestartablePooler) Stop() error {
	if p.stop == nil {
		return nil
	}
	stop := p.stop
	p.stop = nil
	return stop()
}
