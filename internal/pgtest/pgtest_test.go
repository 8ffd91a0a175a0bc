package pgtest

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"os/exec"
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
		select {} // until a signal
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
	for _, how := range []string{"stop", "panic", "interrupt", "kill"} {
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

// A borrowed server is rid of what dead runs left on it, and of nothing else.
func TestSweep(t *testing.T) {
	ctx := context.Background()
	server := Shared(t)
	admin, err := pgx.ConnectConfig(ctx, server.Config(""))
	require.NoError(t, err)
	defer func() { _ = admin.Close(ctx) }()
	for _, name := range []string{"writegate_deaddeaddead_1", "writegate_deaddeaddead_template", "writegate_mine"} {
		_, err := admin.Exec(ctx, `CREATE DATABASE `+name)
		require.NoError(t, err)
	}
	alive := New(t)
	_, err = Borrow(ctx, server.URL("postgres"))
	require.NoError(t, err)
	rows, err := admin.Query(ctx, `SELECT datname::text FROM pg_database WHERE starts_with(datname, 'writegate_')`)
	require.NoError(t, err)
	names, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	require.Contains(t, names, "writegate_mine")
	require.Contains(t, names, alive.Database)
	require.NotContains(t, names, "writegate_deaddeaddead_1")
	require.NotContains(t, names, "writegate_deaddeaddead_template")
	_, err = admin.Exec(ctx, `DROP DATABASE writegate_mine`)
	require.NoError(t, err)
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
