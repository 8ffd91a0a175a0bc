package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/rogpeppe/go-internal/testscript"
	"github.com/stretchr/testify/require"

	"github.com/writegate/writegate/internal/audit"
	"github.com/writegate/writegate/internal/migrate"
	"github.com/writegate/writegate/internal/pgtest"
	"github.com/writegate/writegate/migrations"
)

func TestMain(m *testing.M) {
	if len(os.Args) > 1 && !strings.HasPrefix(os.Args[1], "-") {
		main() // as a process of its own: tests get flags
	}
	heedSignals()
	// What the machine's own environment says must not reach the commands under test.
	for _, kv := range os.Environ() {
		if name, _, _ := strings.Cut(kv, "="); strings.HasPrefix(name, "PG") || name == "DATABASE_URL" {
			_ = os.Unsetenv(name)
		}
	}
	// What runs us as a process of its own need not wait for the second that the race detector grants other goroutines at the end.
	_ = os.Setenv("GORACE", strings.TrimSpace(os.Getenv("GORACE")+" atexit_sleep_ms=0"))
	testscript.Main(tests{m}, map[string]func(){"fencecheck": main})
}

// tests are the package's, with the server that they share.
type tests struct{ m *testing.M }

func (t tests) Run() int { return pgtest.Run(t.m) }

// result is what a command left behind.
type result struct {
	code           int
	stdout, stderr string
}

func fencecheck(args ...string) result {
	var out, err bytes.Buffer
	code := run(context.Background(), args, strings.NewReader(""), &out, &err)
	return result{code, out.String(), err.String()}
}

func url(t *testing.T, cfg *pgx.ConnConfig) string { return pgtest.Shared(t).URL(cfg.Database) }

func TestMigrateUpDownAndUpAgain(t *testing.T) {
	cfg := pgtest.NewEmpty(t)
	db := "--database-url=" + url(t, cfg)

	r := fencecheck("migrate", "status", db)
	require.Equal(t, exitClean, r.code, r.stderr)
	require.Equal(t, migrations.Version, strings.Count(r.stdout, "pending"))
	require.Equal(t, "none", value[string](t, cfg, `SELECT coalesce(to_regnamespace('fence')::text, 'none')`), "a status writes nothing")

	for range 2 {
		r = fencecheck("migrate", "up", db)
		require.Equal(t, exitClean, r.code, r.stderr)
		require.Contains(t, r.stdout, "applied 00001_leases.sql")
		r = fencecheck("migrate", "up", db)
		require.Equal(t, exitClean, r.code, r.stderr)
		require.Contains(t, r.stdout, "nothing to do")
		require.EqualValues(t, migrations.Version, value[int](t, cfg, `SELECT fence.schema_version()`))

		var list []migrate.Status
		r = fencecheck("migrate", "status", db, "-o", "json")
		require.NoError(t, json.Unmarshal([]byte(r.stdout), &list))
		require.Len(t, list, migrations.Version)
		for _, m := range list {
			require.False(t, m.AppliedAt.IsZero())
		}

		// One step, back, and all of it.
		r = fencecheck("migrate", "down", db)
		require.Equal(t, exitClean, r.code, r.stderr)
		require.EqualValues(t, migrations.Version-1, value[int](t, cfg, `SELECT fence.schema_version()`))
		require.Equal(t, exitClean, fencecheck("migrate", "up", db).code)
		r = fencecheck("migrate", "down", "--to", "0", db)
		require.Equal(t, exitClean, r.code, r.stderr)
		require.Equal(t, migrations.Version, strings.Count(r.stdout, "rolled back"))
		require.Equal(t, "none", value[string](t, cfg, `SELECT coalesce(to_regnamespace('fence')::text, 'none')`))
	}
	r = fencecheck("migrate", "down", db)
	require.Equal(t, exitCannotCheck, r.code)
	require.Contains(t, r.stderr, "nothing to roll back")
}

func TestMigrateDownRefusesWhileFencesAreHeld(t *testing.T) {
	cfg := pgtest.New(t)
	db := "--database-url=" + url(t, cfg)
	pgtest.Exec(t, cfg, `CREATE TABLE "Odd name" (id int PRIMARY KEY); INSERT INTO "Odd name" VALUES (1), (2);
		SELECT fence.protect('"Odd name"'); UPDATE "Odd name" SET last_fence = 8 WHERE id = 2`)
	for _, args := range [][]string{{"migrate", "down", db}, {"migrate", "down", "--to", "0", db}} {
		r := fencecheck(args...)
		require.Equal(t, exitCannotCheck, r.code)
		require.Contains(t, r.stderr, `"Odd name" (up to 8)`)
		require.Contains(t, r.stderr, "--force")
		require.EqualValues(t, migrations.Version, value[int](t, cfg, `SELECT fence.schema_version()`), "nothing was rolled back")
	}
	// The file itself refuses too, whatever tool runs it.
	conn, err := pgx.ConnectConfig(context.Background(), cfg)
	require.NoError(t, err)
	defer func() { _ = conn.Close(context.Background()) }()
	refuses := func(version int64) {
		text, err := migrate.SQL(version)
		require.NoError(t, err)
		_, down, found := strings.Cut(text, "-- +goose Down")
		require.True(t, found)
		_, err = conn.PgConn().Exec(context.Background(), down).ReadAll()
		require.ErrorContains(t, err, "WG004")
	}
	refuses(2)
	refuses(3)

	// Without a row that holds one: a tombstone does.
	pgtest.Exec(t, cfg, `DELETE FROM "Odd name"; SELECT fence.bury('"Odd name"', 1, 2, '{"id": 2}', 8, 'x')`)
	refuses(3)
	r := fencecheck("migrate", "down", db)
	require.Equal(t, exitCannotCheck, r.code)
	require.Contains(t, r.stderr, `"Odd name" (tombstones of 1 deleted rows)`)

	r = fencecheck("migrate", "down", "--to", "0", "--force", db)
	require.Equal(t, exitClean, r.code, r.stderr)
	require.Equal(t, "none", value[string](t, cfg, `SELECT coalesce(to_regnamespace('fence')::text, 'none')`))
}

// Five deployers at once: each migration is applied once, and everybody is content.
func TestMigrateByManyAtOnce(t *testing.T) {
	cfg := pgtest.NewEmpty(t)
	db := "--database-url=" + url(t, cfg)
	results := make(chan result)
	for range 5 {
		go func() { results <- fencecheck("migrate", "up", db) }()
	}
	applied := 0
	for range 5 {
		r := <-results
		require.Equal(t, exitClean, r.code, r.stderr)
		applied += strings.Count(r.stdout, "applied 0")
	}
	require.Equal(t, migrations.Version, applied)
}

// Where another set has folded our migrations in, its tool upgrades them, and we say so.
func TestMigrateBesideASetThatFoldedOursIn(t *testing.T) {
	cfg := pgtest.NewEmpty(t)
	db := "--database-url=" + url(t, cfg)
	for v := int64(1); v <= migrations.Version; v++ {
		text, err := migrate.SQL(v)
		require.NoError(t, err)
		up, _, _ := strings.Cut(text, "-- +goose Down")
		pgtest.Exec(t, cfg, up)
	}
	r := fencecheck("migrate", "status", db)
	require.Equal(t, exitClean, r.code, r.stderr)
	require.Equal(t, migrations.Version, strings.Count(r.stdout, "applied by another tool"))
	for _, command := range []string{"up", "down"} {
		r = fencecheck("migrate", command, db)
		require.Equal(t, exitCannotCheck, r.code)
		require.Equal(t, "none", value[string](t, cfg, `SELECT coalesce(to_regclass('fence.goose_db_version')::text, 'none')`), "nothing was written")
	}
	require.Contains(t, fencecheck("migrate", "up", db).stderr, "another tool has applied it")
	require.Equal(t, exitClean, fencecheck("leases", db).code)
}

func TestMigrateSQL(t *testing.T) {
	r := fencecheck("migrate", "sql")
	require.Equal(t, exitClean, r.code)
	require.Equal(t, migrations.Version, strings.Count(r.stdout, "-- +goose Up"))
	one := fencecheck("migrate", "sql", "--version", "2")
	file, err := os.ReadFile("../../migrations/00002_gate.sql")
	require.NoError(t, err)
	require.Equal(t, string(file), one.stdout)
	r = fencecheck("migrate", "sql", "--version", "99")
	require.Equal(t, exitUsage, r.code)
	require.Contains(t, r.stderr, "there is no migration 99")
}

// seed leaves one held lease, one free, one expired, and two rejections, with names that try to break the output.
func seed(t *testing.T) *pgx.ConnConfig {
	cfg := pgtest.New(t)
	pgtest.Exec(t, cfg, `
		SELECT fence.acquire('held', E'evil\x1b[31m\nholder', '1 hour', gen_random_uuid());
		SELECT fence.acquire('free', 'B', '1 hour', '11111111-1111-4111-8111-111111111111');
		SELECT fence.release('free', '11111111-1111-4111-8111-111111111111');
		SELECT fence.acquire('over', 'C', '1 hour', gen_random_uuid());
		UPDATE fence.lease SET expires_at = clock_timestamp() - interval '90 minutes' WHERE name = 'over';
		SELECT fence.record_rejection('app.orders', '{"id": 1}', 'held', NULL, 9007199254740992, 'stale', 9007199254740993, E'two\tlines\n<b>');
		SELECT fence.record_rejection('app.orders', '{"id": 2}', 'held', NULL, 9007199254740993, 'stale', NULL, 'D', 5, '2020-01-01 00:00:00Z');
		UPDATE fence.rejection SET last_at = '2026-01-02 03:04:05.000006Z' WHERE fence = 9007199254740993`)
	return cfg
}

func TestLeases(t *testing.T) {
	db := "--database-url=" + url(t, seed(t))
	r := fencecheck("leases", db)
	require.Equal(t, exitClean, r.code, r.stderr)
	lines := strings.Split(strings.TrimSpace(r.stdout), "\n")
	require.Len(t, lines, 4)
	require.Regexp(t, `^free +free +B +4 +- `, lines[1])
	require.Regexp(t, `^held +held +evil\\u001b\[31m\\u000aholder +2 +(59m|1h0m)`, lines[2])
	require.Regexp(t, `^over +expired +C +6 +1h30m\d+s ago`, lines[3])

	var leases []audit.Lease
	r = fencecheck("leases", db, "--output", "json")
	require.NoError(t, json.Unmarshal([]byte(r.stdout), &leases))
	require.Len(t, leases, 3)
	require.Equal(t, "evil\x1b[31m\nholder", leases[1].Holder)
	require.NotContains(t, r.stdout, "\x1b")
	require.Contains(t, r.stdout, `"fence": "2"`)
	require.NotContains(t, r.stdout, "token")
}

func TestRejections(t *testing.T) {
	db := "--database-url=" + url(t, seed(t))
	r := fencecheck("rejections", db)
	require.Equal(t, exitClean, r.code, r.stderr)
	require.Contains(t, r.stdout, `two\u0009lines\u000a<b>`)
	require.Contains(t, r.stdout, "2026-01-02 03:04:05.000Z")
	require.Empty(t, r.stderr)

	r = fencecheck("rejections", db, "-o", "json", "--fail")
	require.Equal(t, exitFindings, r.code)
	var found []audit.Rejection
	require.NoError(t, json.Unmarshal([]byte(r.stdout), &found))
	require.Len(t, found, 2)
	require.EqualValues(t, 9007199254740992, found[0].Fence)
	require.EqualValues(t, 9007199254740993, *found[0].CurrentFence)
	require.Contains(t, r.stdout, `"fence": "9007199254740992"`, "a string: a double would make one of two")
	require.EqualValues(t, 5, found[1].Count)
	require.Equal(t, "2020-01-01T00:00:00Z", found[1].FirstAt.Format("2006-01-02T15:04:05Z07:00"))

	count := func(args ...string) int {
		t.Helper()
		r := fencecheck(append(args, "rejections", db, "-o", "json")...)
		require.Equal(t, exitClean, r.code, r.stderr)
		var found []audit.Rejection
		require.NoError(t, json.Unmarshal([]byte(r.stdout), &found))
		return len(found)
	}
	// Half-open, to the microsecond, and the same moment in any zone.
	require.Equal(t, 2, count("--since", "2026-01-02T03:04:05.000006Z"))
	require.Equal(t, 1, count("--since", "2026-01-02T03:04:05.000007Z"))
	require.Equal(t, 0, count("--until", "2026-01-02T04:04:05.000006+01:00"))
	require.Equal(t, 1, count("--until", "2026-01-02 03:04:05.000007Z"))
	require.Equal(t, 1, count("--since", "1h"))
	require.Equal(t, 0, count("--table", "fence.lease"))
	require.Equal(t, 2, count("--table", "app.orders", "--lease", "held"))
	require.Equal(t, 2, count("--limit", "2"))
	r = fencecheck("rejections", db, "--limit", "1")
	require.Equal(t, exitClean, r.code)
	require.Contains(t, r.stderr, "more than these 1")
	require.Equal(t, exitClean, fencecheck("rejections", db, "--since", "2026-01-02T03:04:05Z", "--table", "fence.lease", "--fail").code)
}

func TestBadCalls(t *testing.T) {
	const secret = "s3cr3t-of-mine"
	older := pgtest.New(t)
	_, err := migrate.Down(context.Background(), older, 1, false)
	require.NoError(t, err)
	newer := pgtest.New(t)
	pgtest.Exec(t, newer, `CREATE OR REPLACE FUNCTION fence.schema_version() RETURNS integer LANGUAGE sql IMMUTABLE AS 'SELECT 99'`)
	noAudit := pgtest.New(t)
	pgtest.Exec(t, noAudit, `ALTER TABLE fence.rejection RENAME TO gone`)
	readOnly := pgtest.NewEmpty(t)
	pgtest.Exec(t, readOnly, `ALTER DATABASE `+readOnly.Database+` SET default_transaction_read_only = on`)

	for _, c := range []struct {
		name string
		args []string
		code int
		says string
	}{
		{"no such command", []string{"audit"}, exitUsage, `unknown command "audit"`},
		{"no such flag", []string{"leases", "--all"}, exitUsage, "unknown flag"},
		{"an argument too many", []string{"leases", "x", "y"}, exitUsage, "accepts at most 1"},
		{"migrate what", []string{"migrate"}, exitUsage, "up, down, status or sql"},
		{"no such output", []string{"leases", "-o", "yaml"}, exitUsage, "want table, json, jsonl or csv"},
		{"a time without a zone", []string{"rejections", "--since", "2024-03-10 02:30"}, exitUsage, "with its offset"},
		{"a negative limit", []string{"rejections", "--limit", "-1"}, exitUsage, "0 (all) or more"},
		{"an unreachable server", []string{"leases", "--database-url", "postgres://me:" + secret + "@127.0.0.1:1/db"}, exitCannotCheck, "127.0.0.1:1"},
		{"a bad port", []string{"leases", "--database-url", "postgres://me:" + secret + "@host:port/db"}, exitUsage, "invalid port"},
		{"a bad word", []string{"leases", "--database-url", "host=h pass word=" + secret}, exitUsage, "key=value"},
		{"an @ in the password", []string{"leases", "--database-url", "postgres://me:x@" + secret + "@h:x/db"}, exitUsage, "write / as %2F"},
		{"a # in the password", []string{"demo", "--database-url", "postgres://me:x#" + secret + "@h/db"}, exitUsage, "%23"},
		{"a demo on a bad URL", []string{"demo", "--database-url", "postgres://me:x@" + secret + "@h:x/db"}, exitUsage, "write / as %2F"},
		{"a demo on an unreachable server", []string{"demo", "--database-url", "postgres://me:" + secret + "@127.0.0.1:1/db"}, exitCannotCheck, "127.0.0.1:1"},
		{"a database that is not there", []string{"leases", "--database-url", pgtest.Shared(t).URL("nonesuch")}, exitCannotCheck, "nonesuch"},
		{"no schema", []string{"leases", "--database-url", url(t, pgtest.NewEmpty(t))}, exitCannotCheck, "fencecheck migrate up"},
		{"an older schema", []string{"rejections", "--database-url", url(t, older)}, exitCannotCheck, "at version 1, this program needs 2"},
		{"a newer schema", []string{"rejections", "--database-url", url(t, newer)}, exitCannotCheck, "update the program"},
		{"no audit table", []string{"rejections", "--database-url", url(t, noAudit)}, exitCannotCheck, "fence.rejection"},
		{"migrating a read-only server", []string{"migrate", "up", "--database-url", url(t, readOnly)}, exitCannotCheck, "25006"},
		{"an empty URL", []string{"leases", "--database-url", ""}, exitUsage, "--database-url is empty"},
		{"an empty window", []string{"rejections", "--since", "1h", "--until", "2h"}, exitUsage, "nothing can lie between"},
		{"a table that is not there", []string{"rejections", "--fail", "--table", "app.nonesuch", "--database-url", url(t, pgtest.New(t))}, exitCannotCheck, "no table app.nonesuch"},
		{"down to above", []string{"migrate", "down", "--to", "9", "--database-url", url(t, noAudit)}, exitCannotCheck, "cannot go down to 9"},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := fencecheck(c.args...)
			require.Equal(t, c.code, r.code, r.stderr)
			require.Contains(t, r.stderr, c.says)
			require.NotContains(t, r.stdout+r.stderr, secret)
		})
	}
}

// A role that may only read sees the audit, and one that may not is an error and not an empty list.
func TestReadingNeedsSelectAlone(t *testing.T) {
	cfg := seed(t)
	role := "wg_" + cfg.Database // roles are the whole server's
	pgtest.Exec(t, cfg, `CREATE ROLE `+role+` LOGIN PASSWORD 'x'; GRANT USAGE ON SCHEMA fence TO `+role)
	t.Cleanup(func() { pgtest.Exec(t, cfg, `DROP OWNED BY `+role+`; DROP ROLE `+role) })
	as := cfg.Copy()
	as.User, as.Password = role, "x"
	reads := func() (int, error) {
		conn, err := pgx.ConnectConfig(context.Background(), as)
		require.NoError(t, err)
		defer func() { _ = conn.Close(context.Background()) }()
		found, _, err := audit.Rejections(context.Background(), conn, audit.Filter{})
		return len(found), err
	}
	_, err := reads()
	require.ErrorContains(t, err, "permission denied for table rejection")
	pgtest.Exec(t, cfg, `GRANT SELECT ON fence.rejection TO `+role)
	n, err := reads()
	require.NoError(t, err)
	require.Equal(t, 2, n)
}

func TestVersion(t *testing.T) {
	r := fencecheck("version")
	require.Equal(t, exitClean, r.code)
	require.Contains(t, r.stdout, "schema 7")
	var v versionInfo
	r = fencecheck("version", "--output", "json")
	require.NoError(t, json.Unmarshal([]byte(r.stdout), &v))
	require.Equal(t, migrations.Version, v.Schema)
}

// runDemo runs the demo as a process of its own: the test binary, which is then fencecheck.
func runDemo(t *testing.T, args ...string) result {
	t.Helper()
	self, err := os.Executable()
	require.NoError(t, err)
	cmd := exec.Command(self, append([]string{"demo"}, args...)...)
	cmd.Env = append(os.Environ(), "WRITEGATE_TEST_SERVER=", "WRITEGATE_TEST_DATABASE_URL=")
	var out, errOut bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errOut
	_ = cmd.Run()
	return result{cmd.ProcessState.ExitCode(), out.String(), errOut.String()}
}

func TestDemoOnAServerOfOnesOwn(t *testing.T) {
	server := pgtest.Shared(t)
	r := runDemo(t, "--database-url", server.URL("postgres"))
	require.Equal(t, exitClean, r.code, r.stdout+r.stderr)
	require.NotContains(t, r.stdout, "NOT SO")
	for _, step := range []string{
		`worker-a\s+has the lease "monthly-report" .*fence 2`,
		`SIGSTOP to worker-a`,
		`worker-b\s+has the lease: worker-a's expired. Fence 4`,
		`worker-b\s+writes the report under fence 4: applied`,
		`SIGCONT to worker-a`,
		`worker-a\s+REFUSED by the row: .*seen 4, sent 2.*of "worker-b"`,
		`1 +stale +stale +app.report_state +\{"report": "2026-11"\} +monthly-report +2 +worker-a +4 +worker-b`,
	} {
		require.Regexp(t, regexp.MustCompile(step), r.stdout)
	}
	cfg := server.Config("")
	used := regexp.MustCompile(`using database (writegate_demo_\w+)`).FindStringSubmatch(r.stdout)
	require.NotNil(t, used, r.stdout)
	require.Equal(t, 0, value[int](t, cfg, `SELECT count(*) FROM pg_database WHERE datname = '`+used[1]+`'`), "nothing is left of it")

	r = runDemo(t, "--keep", "--database-url", server.URL("postgres"))
	require.Equal(t, exitClean, r.code, r.stdout+r.stderr)
	name := regexp.MustCompile(`DROP DATABASE (writegate_demo_\w+)`).FindStringSubmatch(r.stdout)
	require.NotNil(t, name, r.stdout)
	kept := server.Config(name[1])
	require.Equal(t, "revenue 125, by worker-b", value[string](t, kept, `SELECT body FROM app.report_state WHERE report = '2026-11'`))
	pgtest.Exec(t, cfg, `DROP DATABASE `+name[1]+` WITH (FORCE)`)
}

// Where the server starts from installed binaries, it is gone afterwards; kept, it answers until it is ended as told.
func TestDemoOnAThrowAwayServer(t *testing.T) {
	where := regexp.MustCompile(`on a throw-away (?:server from \S+ in (\S+)|container)`)
	r := runDemo(t)
	require.Equal(t, exitClean, r.code, r.stdout+r.stderr)
	found := where.FindStringSubmatch(r.stdout)
	require.NotNil(t, found, r.stdout)
	if found[1] == "" {
		return // a container, whose end is the engine's business
	}
	require.NoDirExists(t, found[1])

	r = runDemo(t, "--keep")
	require.Equal(t, exitClean, r.code, r.stdout+r.stderr)
	dir := where.FindStringSubmatch(r.stdout)[1]
	dsn := regexp.MustCompile(`psql '([^']+)'`).FindStringSubmatch(r.stdout)
	require.NotNil(t, dsn, r.stdout)
	got := fencecheck("rejections", "--database-url", dsn[1], "--fail")
	require.Equal(t, exitFindings, got.code, got.stderr)
	end := regexp.MustCompile(`kill -QUIT .*; rm -r \S+`).FindString(r.stdout)
	require.NotEmpty(t, end, r.stdout)
	require.NoError(t, exec.Command("/bin/sh", "-c", end).Run())
	require.NoDirExists(t, filepath.Join(dir, "data"))
}

func value[T any](t *testing.T, cfg *pgx.ConnConfig, sql string) (v T) {
	t.Helper()
	ctx := context.Background()
	conn, err := pgx.ConnectConfig(ctx, cfg)
	require.NoError(t, err)
	defer func() { _ = conn.Close(ctx) }()
	require.NoError(t, conn.QueryRow(ctx, sql).Scan(&v))
	return v
}

// However the demo's reader or terminal goes away, the database that it made on somebody's server is dropped.
func TestDemoCleansUpBehindItself(t *testing.T) {
	server := pgtest.Shared(t)
	self, err := os.Executable()
	require.NoError(t, err)
	for _, how := range []string{"the reader leaves", "interrupt", "hangup"} {
		t.Run(how, func(t *testing.T) {
			cmd := exec.Command(self, "demo", "--database-url", server.URL("postgres"))
			var errOut bytes.Buffer
			cmd.Stderr = &errOut
			out, err := cmd.StdoutPipe()
			require.NoError(t, err)
			require.NoError(t, cmd.Start())
			lines := bufio.NewScanner(out)
			var database string
			for lines.Scan() {
				if m := regexp.MustCompile(`using database (writegate_demo_\w+)`).FindStringSubmatch(lines.Text()); m != nil {
					database = m[1]
				}
				if strings.Contains(lines.Text(), "SIGSTOP") {
					break
				}
			}
			require.NotEmpty(t, database)
			switch how {
			case "the reader leaves":
				require.NoError(t, out.Close())
			case "interrupt":
				require.NoError(t, cmd.Process.Signal(os.Interrupt))
			case "hangup":
				require.NoError(t, cmd.Process.Signal(syscall.SIGHUP))
			}
			for lines.Scan() { //nolint:revive // lets it end
			}
			require.Error(t, cmd.Wait())
			require.Equal(t, exitCannotCheck, cmd.ProcessState.ExitCode(), errOut.String())
			if how != "the reader leaves" {
				require.Equal(t, "fencecheck: interrupted; everything that was started has been removed\n", errOut.String())
			}
			require.Equal(t, 0, value[int](t, server.Config(""), `SELECT count(*) FROM pg_database WHERE datname = '`+database+`'`))
		})
	}
}

// A table is protected while others use it: nobody queues behind the command for longer than its lock_timeout, the table
// is not rewritten, and it is told what is wrong.
func TestProtect(t *testing.T) {
	ctx := context.Background()
	cfg := pgtest.New(t)
	db := "--database-url=" + url(t, cfg)
	pgtest.Exec(t, cfg, `CREATE SCHEMA app; CREATE TABLE app.big AS SELECT i AS id, i % 7 AS v FROM generate_series(1, 200000) i; ALTER TABLE app.big ADD PRIMARY KEY (id);
		CREATE TABLE app.small (id int PRIMARY KEY); CREATE VIEW app.seen AS SELECT 1 AS id`)
	before := value[string](t, cfg, `SELECT pg_relation_filenode('app.big')::text`)
	connect := func() *pgx.Conn {
		conn, err := pgx.ConnectConfig(ctx, cfg)
		require.NoError(t, err)
		t.Cleanup(func() { _ = conn.Close(ctx) })
		return conn
	}
	sitting, passing := connect(), connect()
	_, err := sitting.Exec(ctx, `BEGIN; SELECT 1 FROM app.big LIMIT 1`)
	require.NoError(t, err)
	done := make(chan result, 1)
	go func() {
		done <- fencecheck("protect", "app.big", "app.small", "--guard", "observe", "--rule", "term", db)
	}()
	require.Eventually(t, func() bool {
		return value[bool](t, cfg, `SELECT EXISTS (SELECT 1 FROM pg_locks WHERE NOT granted AND relation = 'app.big'::regclass)`)
	}, 30*time.Second, 5*time.Millisecond)
	var n int
	require.NoError(t, passing.QueryRow(ctx, `SELECT count(*) FROM app.big WHERE id < 10`).Scan(&n), "a reader passes although the other sits there still")
	require.Equal(t, 9, n)
	_, err = sitting.Exec(ctx, `COMMIT`)
	require.NoError(t, err)
	r := <-done
	require.Equal(t, exitClean, r.code, r.stderr)
	require.Equal(t, "app.big: protected\napp.small: protected\n", r.stdout)
	require.Equal(t, before, value[string](t, cfg, `SELECT pg_relation_filenode('app.big')::text`), "not rewritten")

	_, err = sitting.Exec(ctx, `BEGIN; SELECT 1 FROM app.big LIMIT 1`)
	require.NoError(t, err)
	r = fencecheck("protect", "app.big", "--guard", "enforce", "--patience", "1ms", db)
	require.Equal(t, exitCannotCheck, r.code)
	require.Contains(t, r.stderr, "app.big: it is in use")
	_, err = sitting.Exec(ctx, `COMMIT`)
	require.NoError(t, err)

	r = fencecheck("tables", "--fail", db)
	require.Equal(t, exitClean, r.code, r.stderr)
	require.Regexp(t, `app.big +last_fence +term +fenced +observe +refuse +-`, r.stdout)
	pgtest.Exec(t, cfg, `UPDATE app.big SET v = 1 WHERE id = 1; ALTER TABLE app.big DISABLE TRIGGER "~writegate_guard"; DROP TRIGGER "~writegate_guard" ON app.small;
		CREATE FUNCTION app.f() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NEW; END $$; CREATE TRIGGER "~zz" BEFORE UPDATE ON app.big FOR EACH ROW EXECUTE FUNCTION app.f()`)
	r = fencecheck("tables", "--fail", db)
	require.Equal(t, exitFindings, r.code, r.stderr)
	require.Contains(t, r.stdout, "its guard is disabled")
	require.Contains(t, r.stdout, "triggers look at a row after its guard, and may change it: \"~zz\"")
	require.Contains(t, r.stdout, "its guard is missing")
	require.Contains(t, r.stdout, "app.big: UPDATE unfenced by")
	r = fencecheck("tables", "-o", "json", db)
	require.Equal(t, exitClean, r.code)
	require.Contains(t, r.stdout, `"wrong": [`)

	r = fencecheck("unprotect", "app.big", "app.small", db)
	require.Equal(t, exitClean, r.code, r.stderr)
	for _, bad := range [][]string{
		{"protect", "app.seen"}, {"protect", "app.nothing"}, {"unprotect", "app.big"}, {"protect", "app.small", "--rule", "often"}, {"protect", "app.small", "--guard", "maybe"},
	} {
		r := fencecheck(append(bad, db)...)
		require.Equal(t, exitCannotCheck, r.code, bad)
		require.Contains(t, r.stderr, bad[1]+": ", "which table it was")
	}
	require.Equal(t, exitUsage, fencecheck("protect", db).code)
}

// Everything works through a pooler that pools transactions, twice in a row, and leaves nothing behind for those who share
// its connections. (C33 b, C37)
func TestThroughAPooler(t *testing.T) {
	for _, mode := range []string{"transaction", "session"} {
		t.Run(mode, func(t *testing.T) {
			cfg := pgtest.NewEmpty(t)
			pgtest.Exec(t, cfg, `CREATE SCHEMA app; CREATE TABLE app.orders (id int PRIMARY KEY, v text); INSERT INTO app.orders VALUES (1, 'first')`)
			through := pgtest.Pooler(t, cfg.Database, mode)
			db := fmt.Sprintf("--database-url=host=%s port=%d user=%s password='%s' dbname=%s sslmode=disable", through.Host, through.Port, through.User, through.Password, through.Database)
			ok := func(args ...string) string {
				t.Helper()
				r := fencecheck(append(args, db)...)
				require.Equal(t, exitClean, r.code, "%v: %s", args, r.stderr)
				return r.stdout
			}
			for range 2 {
				ok("migrate", "up")
			}
			ok("migrate", "status")
			ok("protect", "app.orders", "--guard", "enforce")
			require.Contains(t, ok("tables"), "enforce")
			ok("leases")
			ok("rejections")
			pgtest.Exec(t, cfg, `UPDATE app.orders SET last_fence = 8`)
			r := fencecheck("migrate", "down", db)
			require.Equal(t, exitCannotCheck, r.code)
			ok("migrate", "down", "--force")
			r = fencecheck("migrate", "down", "--to", "0", db)
			require.Equal(t, exitCannotCheck, r.code, "nobody has inherited the force")
			ok("unprotect", "app.orders")
			ok("migrate", "down", "--to", "0")
			ok("migrate", "up")
			require.Equal(t, "", value[string](t, cfg, `SELECT coalesce(string_agg(l.pid::text, ','), '') FROM pg_locks l JOIN pg_database d ON d.oid = l.database
				WHERE l.locktype = 'advisory' AND d.datname = current_database()`), "no lock is stranded")
		})
	}
}
