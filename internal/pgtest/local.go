//go:build unix

package pgtest

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"sort"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
)

var errNoBinaries = errors.New("no PostgreSQL server binaries found (initdb, postgres)")

// supervisor makes and starts the server, waits until its standard input closes, which happens when this process ends in
// whatever way, and then ends the server and removes its directory; unless it is told to keep it. It does all of that, so
// that there is no moment at which something is there and nobody would remove it. It runs as the server's user, in a
// process group of its own, so that an interrupt from the terminal reaches it through us only.
//
// SIGQUIT: nobody will need these data again, so the server need not write them down.
const supervisor = `
umask 077
mkdir -p "$PGTEST_DIR" && cd "$PGTEST_DIR" || exit 1
if [ ! -d data ]; then
	printf '%s\n' "$PGTEST_PASSWORD" >password
	"$PGTEST_BIN/initdb" --pgdata data --username postgres --auth-local trust --auth-host scram-sha-256 \
		--pwfile password --encoding UTF8 --locale C --no-sync >log 2>&1 || : >exited
	printf '%s\n' "$PGTEST_SETTINGS" >>data/postgresql.conf
fi
if [ ! -e exited ]; then
	{
		"$PGTEST_BIN/postgres" -D "$PGTEST_DIR/data" >>log 2>&1 </dev/null &
		echo $! >pid
		wait $!
		: >exited
	} &
	while [ ! -s pid ]; do sleep 0.02; done
fi
if read -r order && [ "$order" = keep ]; then exit 0; fi
for file in pid data/postmaster.pid; do # the latter differs after a restart
	# Again and again: until the server has set itself up it ignores the signal, as what a shell has put into the background does.
	[ -s "$file" ] && read -r server <"$file" && while kill -QUIT "$server" 2>/dev/null; do sleep 0.02; done
done
wait # for what notes down that the server has ended, in the directory that goes
cd / && rm -rf "$PGTEST_DIR"
`

// settings make a server that is quick to start and forgets on a crash of the machine, which no test here causes; a
// test that needs durability starts a server of its own. Tables that were never analyzed look large enough for
// just-in-time compilation, which then takes seconds for a query of milliseconds.
const settings = `
listen_addresses = '127.0.0.1'
unix_socket_directories = '%[1]s'
port = %[2]d
fsync = off
max_connections = 200
shared_buffers = 64MB
max_prepared_transactions = 10
jit = off
log_min_messages = warning
log_line_prefix = '%%m [%%p] %%a '
`

// startLocal makes a server with these lines in its configuration besides our own, and starts it.
func startLocal(ctx context.Context, more ...string) (*Server, error) {
	bin, err := findBinaries(ctx)
	if err != nil {
		return nil, err
	}
	owner, err := serverUser()
	if err != nil {
		return nil, err
	}
	// A TCP port can be taken by somebody else between our asking for a free one and the server's binding it: then
	// another is tried. Any other reason not to start is an error at once.
	for attempt := 1; ; attempt++ {
		server, err := initAndStart(ctx, bin, owner, more)
		if err == nil || attempt == 5 || !errors.Is(err, errPortTaken) {
			return server, err
		}
	}
}

var errPortTaken = errors.New("its TCP port was taken")

func initAndStart(ctx context.Context, bin string, owner *syscall.Credential, more []string) (*Server, error) {
	dir, err := newDir(owner)
	if err != nil {
		return nil, err
	}
	port, err := FreePort()
	if err != nil {
		return nil, err
	}
	// The socket trusts: its directory is closed to everybody else. TCP asks for a password made for this server.
	password := rand.Text()
	stop, alive, err := supervise(bin, dir, owner, "PGTEST_PASSWORD="+password, "PGTEST_SETTINGS="+fmt.Sprintf(settings, dir, port)+strings.Join(more, "\n"))
	if err != nil {
		return nil, err
	}
	cfg, err := withoutEnvironment(fmt.Sprintf("host=%s port=%d user=postgres dbname=postgres sslmode=disable", dir, port))
	if err != nil {
		return nil, errors.Join(err, stop())
	}
	cfg.Password = password
	if err := waitReady(ctx, cfg, filepath.Join(dir, "exited")); err != nil {
		log, _ := os.ReadFile(filepath.Join(dir, "log"))
		if ctx.Err() != nil {
			return nil, errors.Join(ctx.Err(), stop())
		}
		if bytes.Contains(log, []byte("could not create any TCP/IP sockets")) {
			err = errPortTaken
		}
		return nil, errors.Join(fmt.Errorf("PostgreSQL did not start: %w\n%s", err, bytes.TrimSpace(log)), stop())
	}
	keep := func() (string, error) {
		pid, err := os.ReadFile(filepath.Join(dir, "pid"))
		if err != nil {
			return "", err
		}
		if _, err := io.WriteString(alive, "keep\n"); err != nil {
			return "", err
		}
		return fmt.Sprintf("kill -QUIT %[1]s; while kill -0 %[1]s; do sleep 0.1; done 2>/dev/null; rm -r %[2]s",
			bytes.TrimSpace(pid), dir), stop()
	}
	return &Server{
		files:   &files{bin: bin, dir: dir, owner: owner},
		keep:    keep,
		Kind:    "local",
		Where:   fmt.Sprintf("a throw-away server from %s in %s", bin, dir),
		admin:   cfg,
		tcpHost: "127.0.0.1",
		stop:    stop,
	}, nil
}

var environment sync.Mutex

// withoutEnvironment parses a connection string as if no PG* variable were set: they speak of other servers than ours.
func withoutEnvironment(dsn string) (*pgx.ConnConfig, error) {
	environment.Lock()
	defer environment.Unlock()
	for _, kv := range os.Environ() {
		if name, value, _ := strings.Cut(kv, "="); strings.HasPrefix(name, "PG") {
			if err := os.Unsetenv(name); err != nil {
				return nil, err
			}
			defer func() { _ = os.Setenv(name, value) }()
		}
	}
	return pgx.ParseConfig(dsn)
}

// supervise makes a server in dir, unless there is one, and starts it; stop ends it and removes dir, and so does the end
// of this process.
func supervise(bin, dir string, owner *syscall.Credential, env ...string) (stop func() error, alive io.Writer, err error) {
	cmd := exec.Command("/bin/sh", "-c", supervisor)
	cmd.Dir = "/"
	cmd.Env = append(cleanEnv(), append(env, "PGTEST_BIN="+bin, "PGTEST_DIR="+dir)...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: owner, Setpgid: true}
	pipe, err := cmd.StdinPipe() // closed by the kernel if we die
	if err != nil {
		return nil, nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, nil, err
	}
	return sync.OnceValue(func() error { return errors.Join(pipe.Close(), cmd.Wait()) }), pipe, nil
}

// waitReady waits until the server takes connections, or has ended.
func waitReady(ctx context.Context, cfg *pgx.ConnConfig, exited string) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	for {
		conn, err := pgx.ConnectConfig(ctx, cfg)
		if err == nil {
			return conn.Close(ctx)
		}
		if _, statErr := os.Stat(exited); statErr == nil {
			return errors.New("it ended at once")
		}
		select {
		case <-ctx.Done():
			return err
		case <-time.After(20 * time.Millisecond): // there is no event to wait for
		}
	}
}

// findBinaries returns the directory of initdb and postgres: on PATH, as pg_config says, or where packages put them,
// the newest version first.
func findBinaries(ctx context.Context) (string, error) {
	var dirs []string
	if path, err := exec.LookPath("initdb"); err == nil {
		if target, err := filepath.EvalSymlinks(path); err == nil {
			dirs = append(dirs, filepath.Dir(target))
		}
		dirs = append(dirs, filepath.Dir(path))
	}
	if out, err := exec.CommandContext(ctx, "pg_config", "--bindir").Output(); err == nil {
		dirs = append(dirs, strings.TrimSpace(string(out)))
	}
	var packaged []string
	for _, pattern := range []string{
		"/usr/lib/postgresql/*/bin",          // Debian, Ubuntu
		"/usr/pgsql-*/bin",                   // PGDG's RPMs
		"/opt/homebrew/opt/postgresql@*/bin", // Homebrew on Apple silicon
		"/usr/local/opt/postgresql@*/bin",    // Homebrew on Intel
		"/Applications/Postgres.app/Contents/Versions/*/bin",
		"/usr/local/pgsql/bin", "/usr/libexec/postgresql*", "/usr/lib/postgresql*/bin",
	} {
		found, _ := filepath.Glob(pattern)
		packaged = append(packaged, found...)
	}
	sort.SliceStable(packaged, func(i, j int) bool { return versionIn(packaged[i]) > versionIn(packaged[j]) })
	dirs = append(dirs, packaged...)
	for _, dir := range dirs {
		if isExecutable(filepath.Join(dir, "initdb")) && isExecutable(filepath.Join(dir, "postgres")) {
			return dir, nil
		}
	}
	return "", errNoBinaries
}

// versionIn returns the last number in a path, 0 if it has none.
func versionIn(path string) int {
	digits := strings.FieldsFunc(path, func(r rune) bool { return r < '0' || r > '9' })
	if len(digits) == 0 {
		return 0
	}
	n, _ := strconv.Atoi(digits[len(digits)-1])
	return n
}

func isExecutable(path string) bool {
	info, err := os.Stat(path)
	return err == nil && !info.IsDir() && info.Mode()&0o111 != 0
}

// serverUser returns whom to run the server as: nil for ourselves, or another user where we are root, whom PostgreSQL
// refuses to run as.
func serverUser() (*syscall.Credential, error) {
	if os.Geteuid() != 0 {
		return nil, nil
	}
	for _, name := range []string{"postgres", "nobody"} {
		u, err := user.Lookup(name)
		if err != nil {
			continue
		}
		uid, err := strconv.ParseUint(u.Uid, 10, 32)
		if err != nil {
			continue
		}
		gid, err := strconv.ParseUint(u.Gid, 10, 32)
		if err != nil {
			continue
		}
		return &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}, nil
	}
	return nil, errors.New("running as root, and there is neither a user postgres nor nobody to run the server as")
}

// newDir returns the name of a directory for a server to make, where its user can, and where a socket's path stays short
// enough (107 bytes) and needs no quoting by anybody.
func newDir(owner *syscall.Credential) (string, error) {
	var tried []string
	for _, base := range []string{os.TempDir(), "/tmp", "/var/tmp"} {
		plain := strings.IndexFunc(base, func(r rune) bool {
			return (r < 'a' || r > 'z') && (r < 'A' || r > 'Z') && (r < '0' || r > '9') && !strings.ContainsRune("/._-", r)
		}) < 0
		if plain && filepath.IsAbs(base) && len(base) <= 60 && writable(base, owner) {
			return filepath.Join(base, "writegate-pg-"+strings.ToLower(rand.Text()[:12])), nil
		}
		tried = append(tried, strconv.Quote(base))
	}
	return "", fmt.Errorf("no directory for a throw-away server: tried %s; want one with a short plain name, in which %s may write",
		strings.Join(tried, ", "), map[bool]string{true: "we", false: "everybody"}[owner == nil])
}

// writable reports whether the server's user may make a directory there.
func writable(dir string, owner *syscall.Credential) bool {
	if owner == nil {
		const write, search = 2, 1
		return syscall.Access(dir, write|search) == nil
	}
	info, err := os.Stat(dir)
	return err == nil && info.Mode()&0o002 != 0 && reachable(dir)
}

// reachable reports whether every user may enter the directory.
func reachable(dir string) bool {
	for {
		info, err := os.Stat(dir)
		if err != nil || info.Mode()&0o001 == 0 {
			return false
		}
		parent := filepath.Dir(dir)
		if parent == dir {
			return true
		}
		dir = parent
	}
}

// cleanEnv keeps PG* variables of the caller from reaching a server that is none of theirs.
func cleanEnv() []string {
	env := []string{"LC_ALL=C", "TZ=UTC"}
	for _, kv := range os.Environ() {
		if !strings.HasPrefix(kv, "PG") && !strings.HasPrefix(kv, "LC_") && !strings.HasPrefix(kv, "TZ=") {
			env = append(env, kv)
		}
	}
	return env
}

func appendFile(path, text string) error {
	f, err := os.OpenFile(path, os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = io.WriteString(f, text)
	return errors.Join(err, f.Close())
}

// FreePort returns a TCP port of this machine's own that nobody listened at just now; somebody else may be faster.
func FreePort() (int, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return 0, err
	}
	port := l.Addr().(*net.TCPAddr).Port
	return port, l.Close()
}

// Scratch returns what a server needs that somebody else starts: a directory of its user's, who that is (nil: we), and
// where the programs are. The directory is the caller's to remove.
func Scratch(ctx context.Context) (dir string, owner *syscall.Credential, bin string, err error) {
	if bin, err = findBinaries(ctx); err != nil {
		return "", nil, "", err
	}
	if owner, err = serverUser(); err != nil {
		return "", nil, "", err
	}
	if dir, err = newDir(owner); err != nil {
		return "", nil, "", err
	}
	if err = os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
		return "", nil, "", err
	}
	if owner != nil {
		err = os.Chown(dir, int(owner.Uid), int(owner.Gid))
	}
	return dir, owner, bin, err
}
