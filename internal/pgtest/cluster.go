//go:build unix

package pgtest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
)

// files says where a local server lives.
type files struct {
	bin, dir string
	owner    *syscall.Credential
}

// Own starts a server that is the test's alone, for what would disturb others: restarts, failovers, settings of the
// whole server. It needs installed binaries; where there are none the test is skipped, but fails in CI.
func Own(t testing.TB, settings ...string) *Server {
	t.Helper()
	server, err := startLocal(context.Background(), settings...)
	if errors.Is(err, errNoBinaries) && os.Getenv("CI") == "" {
		t.Skipf("pgtest: %v", err)
	}
	if err != nil {
		t.Fatalf("pgtest: %v", err)
	}
	t.Cleanup(func() {
		if err := server.Stop(); err != nil {
			t.Errorf("pgtest: %v", err)
		}
	})
	return server
}

// Configure adds lines to the server's configuration; they count from the next start or reload.
func (s *Server) Configure(t testing.TB, lines ...string) {
	t.Helper()
	for _, line := range lines {
		if err := appendFile(filepath.Join(s.files.dir, "data", "postgresql.conf"), line+"\n"); err != nil {
			t.Fatalf("pgtest: %v", err)
		}
	}
}

// Restart stops the server, fast or immediate (a crash), and starts it again.
func (s *Server) Restart(t testing.TB, mode string) {
	t.Helper()
	s.command(t, "pg_ctl", "-D", filepath.Join(s.files.dir, "data"), "-m", mode, "-w", "-l", filepath.Join(s.files.dir, "log"), "restart")
}

// Halt stops the server for good, fast or immediate.
func (s *Server) Halt(t testing.TB, mode string) {
	t.Helper()
	s.command(t, "pg_ctl", "-D", filepath.Join(s.files.dir, "data"), "-m", mode, "-w", "stop")
}

// Standby starts a streaming standby of the server.
func (s *Server) Standby(t testing.TB) *Server {
	t.Helper()
	standby := s.Backup(t, "-R")
	standby.start(t)
	return standby
}

// Backup copies the server, while it runs, into one that can be started: as a standby, or by [Server.Recover].
func (s *Server) Backup(t testing.TB, options ...string) *Server {
	t.Helper()
	dir, err := newDir(s.files.owner)
	if err != nil {
		t.Fatalf("pgtest: %v", err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) }) // of what is not started, or fails below
	backup := &Server{
		Kind: "local", Where: "a copy in " + dir, admin: s.admin.Copy(), tcpHost: s.tcpHost,
		files: &files{bin: s.files.bin, dir: dir, owner: s.files.owner},
	}
	port, err := FreePort()
	if err != nil {
		t.Fatalf("pgtest: %v", err)
	}
	backup.admin.Host, backup.admin.Port = dir, uint16(port)
	s.command(t, "mkdir", "-m", "700", dir)
	s.command(t, "pg_basebackup", append([]string{
		"-h", s.admin.Host, "-p", fmt.Sprint(s.admin.Port), "-U", "postgres",
		"-D", filepath.Join(dir, "data"), "--checkpoint=fast", "--no-sync",
	}, options...)...)
	if err := appendFile(filepath.Join(dir, "data", "postgresql.conf"), fmt.Sprintf(settings, dir, port)); err != nil {
		t.Fatalf("pgtest: %v", err)
	}
	return backup
}

// Archive has the server, which needs archive_mode = on, keep its WAL, and returns the directory.
func (s *Server) Archive(t testing.TB) string {
	t.Helper()
	archive := filepath.Join(s.files.dir, "archive")
	s.command(t, "mkdir", "-m", "700", archive)
	s.Configure(t, fmt.Sprintf("archive_command = 'cp %%p %s/%%f'", archive))
	s.command(t, "pg_ctl", "-D", filepath.Join(s.files.dir, "data"), "reload")
	return archive
}

// Recover starts a backup and replays the archive up to the named restore point, where it becomes a primary.
func (s *Server) Recover(t testing.TB, archive, restorePoint string) {
	t.Helper()
	s.Configure(t, fmt.Sprintf("restore_command = 'cp %s/%%f %%p'", archive), "archive_mode = off",
		fmt.Sprintf("recovery_target_name = '%s'", restorePoint), "recovery_target_action = 'promote'")
	s.command(t, "touch", filepath.Join(s.files.dir, "data", "recovery.signal"))
	s.start(t)
}

// start starts what has been copied.
func (s *Server) start(t testing.TB) {
	t.Helper()
	stop, _, err := supervise(s.files.bin, s.files.dir, s.files.owner)
	if err != nil {
		t.Fatalf("pgtest: %v", err)
	}
	s.stop = stop
	t.Cleanup(func() {
		if err := stop(); err != nil {
			t.Errorf("pgtest: %v", err)
		}
	})
	if err := waitReady(context.Background(), s.admin, filepath.Join(s.files.dir, "exited")); err != nil {
		t.Fatalf("pgtest: %v", err)
	}
}

// Promote makes a standby a primary.
func (s *Server) Promote(t testing.TB) {
	t.Helper()
	s.command(t, "pg_ctl", "-D", filepath.Join(s.files.dir, "data"), "-w", "promote")
}

// Program returns where one of the server's programs is, such as pgbench, or the name itself where it is not among them.
func (s *Server) Program(name string) string {
	if program := filepath.Join(s.files.bin, name); isExecutable(program) {
		return program
	}
	return name
}

// command runs one of the server's programs as its user.
func (s *Server) command(t testing.TB, name string, args ...string) {
	t.Helper()
	cmd := exec.Command(s.Program(name), args...)
	cmd.Dir = s.files.dir
	cmd.Env = cleanEnv()
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: s.files.owner}
	log, err := os.CreateTemp(s.files.dir, name) // not a pipe: a server that it starts would keep that open
	if err != nil {
		t.Fatalf("pgtest: %v", err)
	}
	defer func() { _ = log.Close() }()
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Run(); err != nil {
		said, _ := os.ReadFile(log.Name())
		t.Fatalf("pgtest: %s: %v\n%s", name, err, bytes.TrimSpace(said))
	}
}
