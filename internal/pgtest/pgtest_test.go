package pgtest

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/writegate/writegate/internal/pgerr"
	"github.com/writegate/writegate/migrations"
)

// endEnv makes the test binary a program that starts a server and then ends as told.
const endEnv = "WRITEGATE_TEST_END"

func TestMain(m *testing.M) {
	if how := os.Getenv(endEnv); how != "" {
		server, err := startLocal(context.Background())
		if err != nil {
			fmt.Println("error:", err)
			os.Exit(1)
		}
		fmt.Println(server.admin.Host)
		switch how {
		case "panic":
			panic("as asked")
		case "stop":
			if err := server.Stop(); err != nil {
				panic(err)
			}
			return
		}
		ended := make(chan os.Signal, 1)
		for _, s := range []os.Signal{syscall.SIGHUP, os.Interrupt} {
			if signal.Ignored(s) { // as what runs under nohup inherits it
				signal.Notify(ended, s)
			}
		}
		<-ended // else the signal itself ends it
		os.Exit(1)
	}
	Main(m)
}

func TestEachTestHasItsOwnMigratedDatabase(t *testing.T) {
	ctx := context.Background()
	a, b := New(t), New(t)
	require.NotEqual(t, a.Database, b.Database)
	Exec(t, a, `INSERT INTO fence.lease (name) VALUES ('only in a')`)
	for cfg, want := range map[*pgx.ConnConfig]int{a: 1, b: 0} {
		conn, err := pgx.ConnectConfig(ctx, cfg)
		require.NoError(t, err)
		var n, version int
		require.NoError(t, conn.QueryRow(ctx, `SELECT count(*), fence.schema_version() FROM fence.lease`).Scan(&n, &version))
		require.Equal(t, want, n)
		require.Equal(t, migrations.Version, version)
		require.NoError(t, conn.Close(ctx))
	}
	require.Equal(t, migrations.Version, pgerr.SchemaVersion)
}

// However the process that started a server ends, the server and its files end with it.
func TestNothingOutlivesTheProcess(t *testing.T) {
	if _, err := findBinaries(context.Background()); err != nil {
		return // nothing is started from binaries that are not there
	}
	for _, how := range []string{"stop", "panic", "interrupt", "hangup", "kill"} {
		t.Run(how, func(t *testing.T) {
			cmd := exec.Command(os.Args[0])
			cmd.Env = append(os.Environ(), endEnv+"="+how)
			out, err := cmd.StdoutPipe()
			require.NoError(t, err)
			require.NoError(t, cmd.Start())
			line, err := bufio.NewReader(out).ReadString('\n')
			require.NoError(t, err)
			dir := strings.TrimSpace(line)
			require.Contains(t, dir, "writegate-pg-", "the directory")
			switch how {
			case "hangup":
				require.NoError(t, cmd.Process.Signal(syscall.SIGHUP))
			case "interrupt":
				require.NoError(t, cmd.Process.Signal(os.Interrupt))
			case "kill":
				require.NoError(t, cmd.Process.Signal(syscall.SIGKILL))
			}
			_ = cmd.Wait()
			require.Eventually(t, func() bool {
				_, err := os.Stat(dir)
				return os.IsNotExist(err)
			}, 30*time.Second, 10*time.Millisecond)
		})
	}
}

// Killed before there is a server, too.
func TestNothingOutlivesAnEarlyEnd(t *testing.T) {
	if _, err := findBinaries(context.Background()); err != nil {
		return
	}
	for _, after := range []time.Duration{0, 20, 50, 100, 200, 400} {
		dir := t.TempDir()
		require.NoError(t, os.Chmod(dir, 0o777))
		if !reachable(dir) { // another user's server could not work there, and would go elsewhere
			var err error
			dir, err = os.MkdirTemp("/tmp", "early-end-")
			require.NoError(t, err)
			require.NoError(t, os.Chmod(dir, 0o777))
			defer func() { _ = os.RemoveAll(dir) }()
		}
		cmd := exec.Command(os.Args[0])
		cmd.Env = append(os.Environ(), endEnv+"=kill", "TMPDIR="+dir)
		require.NoError(t, cmd.Start())
		time.Sleep(after * time.Millisecond) // the point is that it may come at any moment
		require.NoError(t, cmd.Process.Kill())
		_ = cmd.Wait()
		require.Eventually(t, func() bool {
			left, err := os.ReadDir(dir)
			require.NoError(t, err)
			return len(left) == 0
		}, 30*time.Second, 10*time.Millisecond)
	}
}

// What the environment says of other servers, and an odd directory for temporary files, are no concern of ours.
func TestOddEnvironment(t *testing.T) {
	if _, err := findBinaries(context.Background()); err != nil {
		return
	}
	for name, value := range map[string]string{
		"PGCONNECT_TIMEOUT": "abc", "PGSERVICE": "x", "PGTARGETSESSIONATTRS": "standby", "PGTZ": "Mars", "PGPORT": "x",
		"PGOPTIONS": "-c default_transaction_read_only=on", "PGSSLMODE": "verify-full", "PGHOST": "elsewhere", "PGPASSWORD": "other",
	} {
		t.Setenv(name, value)
	}
	for _, tmp := range []string{"/tmp/a space", "/tmp/a,comma", "relative", "/nonexistent", "/tmp/" + strings.Repeat("x", 150)} {
		t.Setenv("TMPDIR", tmp)
		server, err := startLocal(context.Background())
		require.NoError(t, err)
		conn, err := pgx.ConnectConfig(context.Background(), server.TCP(""))
		require.NoError(t, err)
		require.NoError(t, conn.Close(context.Background()))
		require.NoError(t, server.Stop())
	}
	require.Equal(t, "abc", os.Getenv("PGCONNECT_TIMEOUT"), "left as it was")
}

// A borrowed server is rid of what dead runs left on it, and of nothing else.
func TestSweep(t *testing.T) {
	ctx := context.Background()
	server := Shared(t)
	admin, err := pgx.ConnectConfig(ctx, server.Config(""))
	require.NoError(t, err)
	defer func() { _ = admin.Close(ctx) }()
	dead := []string{"writegate_deaddeaddead_1", "writegate_deaddeaddead_template"}
	others := []string{"writegate_mine", "writegate_transactions_eu", "writegate_organization_1"}
	for _, name := range append(dead, others...) {
		_, err := admin.Exec(ctx, `CREATE DATABASE `+name)
		require.NoError(t, err)
	}
	for _, name := range dead {
		_, err := admin.Exec(ctx, `COMMENT ON DATABASE `+name+` IS '`+comment+`'`)
		require.NoError(t, err)
	}
	alive := New(t)
	require.NoError(t, sweep(ctx, admin))
	rows, err := admin.Query(ctx, `SELECT datname::text FROM pg_database WHERE starts_with(datname, 'writegate_')`)
	require.NoError(t, err)
	names, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	require.Subset(t, names, others)
	require.Contains(t, names, alive.Database)
	require.NotContains(t, names, "writegate_deaddeaddead_1")
	require.NotContains(t, names, "writegate_deaddeaddead_template")
	for _, name := range others {
		_, err = admin.Exec(ctx, `DROP DATABASE `+name)
		require.NoError(t, err)
	}
}

func TestBadChoiceOfServer(t *testing.T) {
	t.Setenv(EnvServer, "cloud")
	_, err := Start(context.Background())
	require.ErrorContains(t, err, "want url, local or container")
	t.Setenv(EnvServer, "url")
	t.Setenv(EnvURL, "")
	_, err = Start(context.Background())
	require.ErrorContains(t, err, EnvURL+" is not set")
}
