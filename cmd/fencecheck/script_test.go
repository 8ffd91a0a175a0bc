package main

import (
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/rogpeppe/go-internal/testscript"
	"github.com/stretchr/testify/require"

	"github.com/writegate/writegate/internal/pgtest"
)

// The command line as a user meets it: testdata/script/*.txtar, each on a database of its own, which DATABASE_URL names. A file
// setup.sql in it is run first, and `sql` runs more. ROLE is a role that may log in with the password secret-of-role and has no
// rights; AS is the database's URL for it.
func TestScripts(t *testing.T) {
	testscript.Run(t, testscript.Params{
		Dir:                 "testdata/script",
		RequireExplicitExec: true,
		UpdateScripts:       *update,
		Setup: func(env *testscript.Env) error {
			cfg := pgtest.New(t)
			role := "wg_" + cfg.Database
			pgtest.Exec(t, cfg, `CREATE ROLE `+role+` LOGIN PASSWORD 'secret-of-role'`)
			t.Cleanup(func() { pgtest.Exec(t, cfg, `DROP OWNED BY `+role+`; DROP ROLE `+role) })
			if setup, err := os.ReadFile(filepath.Join(env.WorkDir, "setup.sql")); err == nil {
				pgtest.Exec(t, cfg, strings.ReplaceAll(string(setup), "$ROLE", role))
			}
			env.Values["database"] = cfg
			server := pgtest.Shared(t)
			as := server.TCP(cfg.Database)
			as.User, as.Password = role, "secret-of-role"
			env.Setenv("ROLE", role)
			env.Setenv("DATABASE", cfg.Database)
			env.Setenv("AS", urlAs(as))
			env.Setenv("DATABASE_URL", server.URL(cfg.Database))
			env.Setenv("HOME", env.WorkDir)
			env.Setenv("GORACE", os.Getenv("GORACE"))
			return nil
		},
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			// status N COMMAND…: the command ends with that status.
			"status": func(ts *testscript.TestScript, neg bool, args []string) {
				if neg || len(args) < 2 {
					ts.Fatalf("usage: status N command…")
				}
				err := ts.Exec(args[1], args[2:]...)
				got := "0"
				if err != nil {
					got = strings.TrimPrefix(err.Error(), "exit status ")
				}
				if got != args[0] {
					ts.Fatalf("status %s, want %s\n%s%s", got, args[0], ts.ReadFile("stdout"), ts.ReadFile("stderr"))
				}
				// What the role's password is must not be anybody's to read.
				if strings.Contains(ts.ReadFile("stdout")+ts.ReadFile("stderr"), "secret-of-role") {
					ts.Fatalf("the password was printed")
				}
			},
			// sql STATEMENT
			"sql": func(ts *testscript.TestScript, _ bool, args []string) {
				pgtest.Exec(t, ts.Value("database").(*pgx.ConnConfig), strings.ReplaceAll(strings.Join(args, " "), "$ROLE", ts.Getenv("ROLE")))
			},
		},
	})
}

var update = flag.Bool("update", false, "write what commands print now into the files that it is compared with")

func urlAs(cfg *pgx.ConnConfig) string {
	return "postgres://" + cfg.User + ":" + cfg.Password + "@" + serverName(cfg) + "/" + cfg.Database + "?sslmode=disable"
}

func TestScriptsAreThere(t *testing.T) {
	files, err := filepath.Glob("testdata/script/*.txtar")
	require.NoError(t, err)
	require.GreaterOrEqual(t, len(files), 8)
}
