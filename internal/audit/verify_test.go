package audit_test

import (
	"context"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/writegate/writegate/internal/audit"
	"github.com/writegate/writegate/internal/pgtest"
	"github.com/writegate/writegate/migrations"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// bed is a database with a lease that was granted and released, and a protected table whose rows it has written.
func bed(t *testing.T, more ...string) *pgx.ConnConfig {
	t.Helper()
	cfg := pgtest.New(t)
	pgtest.Exec(t, cfg, `CREATE SCHEMA app; CREATE TABLE app.orders (id int PRIMARY KEY, v text NOT NULL); INSERT INTO app.orders SELECT i, 'first' FROM generate_series(1, 3) i;
		SELECT fence.protect('app.orders');
		SELECT fence.acquire('x', 'A', '1 hour', '11111111-1111-4111-8111-111111111111');
		UPDATE app.orders SET last_fence = 2; SELECT fence.release('x', '11111111-1111-4111-8111-111111111111');`+strings.Join(more, ";"))
	return cfg
}

func connect(t *testing.T, cfg *pgx.ConnConfig) *pgx.Conn {
	t.Helper()
	cfg = cfg.Copy()
	cfg.DefaultQueryExecMode = pgx.QueryExecModeExec // as fencecheck has it
	conn, err := pgx.ConnectConfig(context.Background(), cfg)
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close(context.Background()) })
	return conn
}

// The throw-away server of these tests does not write through, and says so.
var testServer = []string{"fsync-off"}

func verify(t *testing.T, cfg *pgx.ConnConfig, opt audit.VerifyOptions) *audit.Verification {
	t.Helper()
	if len(opt.Only) == 0 {
		opt.Skip = append(opt.Skip, testServer...)
	}
	v, err := audit.Verify(context.Background(), audit.Bounded(connect(t, cfg), 30*time.Second), cfg.Database, opt)
	require.NoError(t, err)
	return v
}

// Every check finds what it is there for, names what it is about, and finds nothing where nothing is wrong.
func TestEveryCheckFindsItsFault(t *testing.T) {
	role := func(name string) string { return "wgrole_" + name }
	enforce := `SELECT fence.protect('app.orders', guard => 'enforce')`
	for _, c := range []struct {
		id     string
		object string // app.orders if empty
		says   string
		sql    string
	}{
		{"schema-old", "schema fence", "version 6", `CREATE OR REPLACE FUNCTION fence.schema_version() RETURNS integer LANGUAGE sql IMMUTABLE AS 'SELECT 6'`},
		{"schema-new", "schema fence", "version 8", `CREATE OR REPLACE FUNCTION fence.schema_version() RETURNS integer LANGUAGE sql IMMUTABLE AS 'SELECT 8'`},
		{"schema-unlogged", "fence.rejection", "unlogged", `ALTER TABLE fence.rejection SET UNLOGGED`},
		{"sequence-definition", "fence.fence_seq", "caches 10 values", `ALTER SEQUENCE fence.fence_seq CACHE 10`},
		{"sequence-definition", "fence.fence_seq", "cycles", `ALTER SEQUENCE fence.fence_seq CYCLE`},
		{"sequence-definition", "fence.fence_seq", "increments by 1", `ALTER SEQUENCE fence.fence_seq INCREMENT 1`},
		{"sequence-definition", "fence.fence_seq", "is integer", `ALTER SEQUENCE fence.fence_seq AS integer MAXVALUE 2147483647`},
		{"sequence-definition", "fence.fence_seq", "greatest value", `ALTER SEQUENCE fence.fence_seq NO MAXVALUE`},
		{"sequence-definition", "fence.fence_seq", "least value", `ALTER SEQUENCE fence.fence_seq MINVALUE 1`},
		{"sequence-definition", "fence.fence_seq", "column owns it", `CREATE TABLE fence.t (i bigint); ALTER SEQUENCE fence.fence_seq OWNED BY fence.t.i`},
		{"sequence-behind", "", "up to 90, and the next that is granted is 4", `UPDATE app.orders SET last_fence = 90 WHERE id = 2`},
		{"sequence-behind", "fence.lease", "up to 90", `UPDATE fence.lease SET fence = 90`},
		{"sequence-behind", "fence.term", "up to 2, and the next that is granted is 2", `SELECT setval('fence.fence_seq', 2, false)`},
		{"sequence-behind", "fence.tombstone of app.orders", "up to 90", `INSERT INTO fence.tombstone (relation, key_hash, key_check, row_key, fence, lease_name) VALUES ('app.orders', 1, 1, '{}', 90, 'x')`},
		{"sequence-headroom", "fence.fence_seq", "ends at 9007199254740990", `SELECT setval('fence.fence_seq', 9000000000000000)`},
		{"sequence-ahead", "fence.fence_seq", "the clock's microseconds", `SELECT setval('fence.fence_seq', 4000000000000000)`},
		{"epoch-missing", "fence.epoch", "empty", `DELETE FROM fence.epoch`},
		{"epoch-changed", "fence.epoch", "was started at", `UPDATE fence.epoch SET server_started_at = server_started_at - interval '1 day'`},
		{"epoch-changed", "fence.epoch", "restarted or made anew", `ALTER SEQUENCE fence.fence_seq RESTART`},
		{"timeline-unreadable", "fence.epoch", "timeline", `UPDATE fence.epoch SET timeline = NULL`},
		{"fence-unknown", "", "1 row holds a fence that was never granted here, like 8 at (0,", `SELECT setval('fence.fence_seq', 20); UPDATE app.orders SET last_fence = 8 WHERE id = 2`},
		{"fence-unknown", "", "like 7 at", `SELECT setval('fence.fence_seq', 20); UPDATE app.orders SET last_fence = 7 WHERE id = 2`},
		{"fence-negative", "", "2 rows", `UPDATE app.orders SET last_fence = -1 WHERE id > 1`},
		{"fence-null", "", "1 row holds no fence", `ALTER TABLE app.orders ALTER last_fence DROP NOT NULL; UPDATE app.orders SET last_fence = NULL WHERE id = 1`},
		{"table-gone", "*", "gone", `DROP TABLE app.orders`},
		{"fence-column-missing", "", "has no column last_fence", `ALTER TABLE app.orders RENAME last_fence TO other`},
		{"fence-column-type", "", "is integer, not bigint", `ALTER TABLE app.orders ALTER last_fence TYPE int`},
		{"fence-column-nullable", "", "may be NULL", `ALTER TABLE app.orders ALTER last_fence DROP NOT NULL`},
		{"fence-column-default", "", "the default 7", `ALTER TABLE app.orders ALTER last_fence SET DEFAULT 7`},
		{"fence-column-default", "", "no default", `ALTER TABLE app.orders ALTER last_fence DROP DEFAULT`},
		{"table-unlogged", "", "unlogged", `ALTER TABLE app.orders SET UNLOGGED`},
		{"table-inherited", "", "inherit", `CREATE TABLE app.child () INHERITS (app.orders)`},
		{"guard-missing", "", "missing", enforce + `; DROP TRIGGER "~writegate_guard" ON app.orders`},
		{"guard-disabled", "", "disabled", enforce + `; ALTER TABLE app.orders DISABLE TRIGGER "~writegate_guard"`},
		{"guard-disabled", "", "replication alone", enforce + `; ALTER TABLE app.orders ENABLE REPLICA TRIGGER "~writegate_guard"`},
		{"guard-disabled", "", "guard of keys", enforce + `; ALTER TABLE app.orders DISABLE TRIGGER "~writegate_guard_keys"`},
		{"guard-differs", "", "observe", enforce + `; UPDATE fence.protected_table SET guard = 'observe'`},
		{"guard-differs", "", `["code"]`, enforce + `; ALTER TABLE app.orders ADD code text NOT NULL DEFAULT gen_random_uuid()::text; CREATE UNIQUE INDEX ON app.orders (code)`},
		{"guard-missing", "", "guard of keys", enforce + `; DROP TRIGGER "~writegate_guard_keys" ON app.orders`},
		{"guard-disabled", "app.p", "disabled in app.p1", `CREATE TABLE app.p (id int PRIMARY KEY) PARTITION BY LIST (id); CREATE TABLE app.p1 PARTITION OF app.p DEFAULT; SELECT fence.protect('app.p', guard => 'enforce');
			ALTER TABLE app.p1 DISABLE TRIGGER "~writegate_guard"`},
		{"guard-differs", "", "it has another condition", enforce + `; DO $$ BEGIN EXECUTE replace(
			replace(pg_get_triggerdef((SELECT oid FROM pg_trigger WHERE tgname = '~writegate_guard')), 'CREATE TRIGGER', 'CREATE OR REPLACE TRIGGER'), ' OR (current_setting', ' OR false AND (current_setting'); END $$`},
		{"guard-differs", "", "its guard of rows that come and go is not the one that was installed: it has another condition", enforce + `; DO $$ BEGIN EXECUTE replace(
			replace(pg_get_triggerdef((SELECT oid FROM pg_trigger WHERE tgname = '~writegate_guard_rows')), 'CREATE TRIGGER', 'CREATE OR REPLACE TRIGGER'), 'EXECUTE FUNCTION', 'WHEN (false) EXECUTE FUNCTION'); END $$`},
		{"guard-missing", "", "come and go is missing", enforce + `; DROP TRIGGER "~writegate_guard_rows" ON app.orders`},
		{"guard-differs", "", "it calls app.f()", enforce + `; CREATE FUNCTION app.f() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN coalesce(NEW, OLD); END'; DO $$ BEGIN EXECUTE replace(
			replace(pg_get_triggerdef((SELECT oid FROM pg_trigger WHERE tgname = '~writegate_guard')), 'CREATE TRIGGER', 'CREATE OR REPLACE TRIGGER'), 'fence.guard(', 'app.f('); END $$`},
		{"guard-differs", "", "fires at other times", enforce + `; DO $$ BEGIN EXECUTE replace(
			replace(pg_get_triggerdef((SELECT oid FROM pg_trigger WHERE tgname = '~writegate_guard')), 'CREATE TRIGGER', 'CREATE OR REPLACE TRIGGER'), 'BEFORE UPDATE', 'AFTER UPDATE'); END $$`},
		{"guard-differs", "", "looks at changes of (id), the keys are of (code, id)", enforce + `; ALTER TABLE app.orders ADD code text NOT NULL DEFAULT 'x'; ALTER TABLE app.orders DROP CONSTRAINT orders_pkey, ADD PRIMARY KEY (id, code); ` + enforce + `;
			DO $$ BEGIN EXECUTE replace(replace(pg_get_triggerdef((SELECT oid FROM pg_trigger WHERE tgname = '~writegate_guard_keys')), 'CREATE TRIGGER', 'CREATE OR REPLACE TRIGGER'), 'UPDATE OF code, id', 'UPDATE OF id'); END $$`},
		{"schema-changed", "fence.guard()", "not as the migrations make it", `CREATE OR REPLACE FUNCTION fence.guard() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN coalesce(NEW, OLD); END'`},
		{"schema-changed", "fence.live(text,uuid,bigint)", "not as the migrations make it", `ALTER FUNCTION fence.live SECURITY INVOKER`},
		{"schema-changed", "fence.pin(text,uuid,bigint)", "not as the migrations make it", `ALTER FUNCTION fence.pin RESET search_path`},
		{"schema-changed", "fence.may(regclass,text)", "missing", `DROP FUNCTION fence.may`},
		{"schema-changed", "fence.mine()", "none of ours", `CREATE FUNCTION fence.mine() RETURNS int LANGUAGE sql AS 'SELECT 1'`},
		{"table-rules", "", "r on app.orders", `CREATE RULE r AS ON UPDATE TO app.orders DO INSTEAD NOTHING`},
		{"guard-later-trigger", "app.p", `"~~z"`, `CREATE TABLE app.p (id int PRIMARY KEY) PARTITION BY LIST (id); CREATE TABLE app.p1 PARTITION OF app.p DEFAULT; SELECT fence.protect('app.p', guard => 'enforce');
			CREATE FUNCTION app.f() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END'; CREATE TRIGGER "~~z" BEFORE UPDATE ON app.p1 FOR EACH ROW EXECUTE FUNCTION app.f()`},
		{"guard-outdated", "app.other", "older version", `CREATE TABLE app.other (id int PRIMARY KEY); SELECT fence.protect('app.other', fence_column => 'f', guard => 'enforce');
			DO $$ BEGIN EXECUTE replace(pg_get_functiondef(to_regprocedure('fence.guard_' || md5('f') || '()')), 'v_finding', 'v_found'); END $$`},
		{"guard-truncate", "", "truncated", enforce + `; ALTER TABLE app.orders DISABLE TRIGGER "~writegate_guard_truncate"`},
		{"guard-truncate", "app.p", "it may be truncated in app.p1", `CREATE TABLE app.p (id int PRIMARY KEY) PARTITION BY LIST (id); SELECT fence.protect('app.p', guard => 'enforce'); CREATE TABLE app.p1 PARTITION OF app.p DEFAULT`},
		{"guard-later-trigger", "", `"~zz"`, enforce + `; CREATE FUNCTION app.f() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END'; CREATE TRIGGER "~zz" BEFORE UPDATE ON app.orders FOR EACH ROW EXECUTE FUNCTION app.f()`},
		{"guard-bypass", "role " + role("bypass"), "no guard fires", `CREATE ROLE wgrole_bypass; ALTER ROLE wgrole_bypass SET session_replication_role = 'REPLICA'`},
		{"guard-bypass", "", "can disable its guard", `CREATE ROLE wgrole_owner; ` + enforce + `; ALTER TABLE app.orders OWNER TO wgrole_owner; SELECT fence.allow('wgrole_owner', 'holder')`},
		{"unfenced-writes", "", "UPDATE unfenced by ", `SELECT fence.protect('app.orders', guard => 'observe'); UPDATE app.orders SET v = 'x'`},
		{"rejection-lawful", "app.orders", "refusals of lawful holders: 3, of rows: 1", `SELECT fence.record_rejection('app.orders', '{"id": 1}', 'x', NULL, 2, 'stale', 9, 'A', 3); UPDATE fence.rejection SET verdict = 'lawful'`},
		{"audit-loss", "some app as postgres", "could not be recorded: 7", `SET application_name = 'some app'; SELECT fence.record_rejections('[]', 7)`},
		{"lease-overdue", "lease y", `held by "B" under fence 4`, `SELECT fence.acquire('y', 'B', '1 hour', gen_random_uuid()); UPDATE fence.lease SET expires_at = clock_timestamp() - interval '5 minutes' WHERE name = 'y'`},
		{"lease-late", "lease y", "has not renewed", `SELECT fence.acquire('y', 'B', '1 hour', gen_random_uuid()); UPDATE fence.lease SET renewed_at = renewed_at - interval '50 minutes' WHERE name = 'y'`},
		{"lease-index", "fence.lease_expires_at_idx", "expires_at", `CREATE INDEX ON fence.lease (expires_at)`},
		{"role-gone", "role wgrole_gone", "does not exist", `INSERT INTO fence.allowed (role, what) VALUES ('wgrole_gone', 'holder')`},
		{"privilege-missing", "role " + role("poor"), "EXECUTE ON FUNCTION fence.renew", `CREATE ROLE wgrole_poor; SELECT fence.allow('wgrole_poor', 'holder'); REVOKE EXECUTE ON FUNCTION fence.renew FROM wgrole_poor`},
		{"privilege-missing", "role " + role("blind"), "SELECT ON fence.rejection", `CREATE ROLE wgrole_blind; SELECT fence.allow('wgrole_blind', 'auditor'); REVOKE SELECT ON fence.rejection FROM wgrole_blind`},
		{"privilege-excess", "role PUBLIC", "INSERT on fence.rejection", `GRANT INSERT ON fence.rejection TO PUBLIC`},
		{"privilege-excess", "role " + role("greedy"), "UPDATE, USAGE on fence.fence_seq", `CREATE ROLE wgrole_greedy; GRANT ALL ON fence.fence_seq TO wgrole_greedy`},
		{"privilege-excess", "role " + role("nosy"), "SELECT on fence.lease", `CREATE ROLE wgrole_nosy; GRANT SELECT (token) ON fence.lease TO wgrole_nosy`},
		{"privilege-excess", "role PUBLIC", "it may call fence.jump(text)", `GRANT EXECUTE ON FUNCTION fence.jump TO PUBLIC`},
		{"privilege-excess", "role PUBLIC", "it may call fence.may(regclass,text)", `CREATE FUNCTION fence.x() RETURNS int LANGUAGE sql AS 'SELECT 1'; DROP FUNCTION fence.x; UPDATE pg_proc SET proacl = NULL WHERE oid = 'fence.may'::regproc`},
		{"privilege-excess", "role " + role("maker"), "it may create objects", `CREATE ROLE wgrole_maker; GRANT CREATE ON SCHEMA fence TO wgrole_maker`},
		{"privilege-excess", "role " + role("member"), "as a member of another role it may write", `CREATE ROLE wgrole_member LOGIN; GRANT pg_write_all_data TO wgrole_member; GRANT USAGE ON SCHEMA fence TO wgrole_member`},
		{"privilege-excess", "role " + role("reader"), "read the tokens in fence.lease", `CREATE ROLE wgrole_reader LOGIN; GRANT pg_read_all_data TO wgrole_reader`},
		{"synchronous-commit", "role " + role("sloppy"), "synchronous_commit is FALSE", `CREATE ROLE wgrole_sloppy; ALTER ROLE wgrole_sloppy SET synchronous_commit = 'FALSE'`},
		{"isolation-default", "database *", "repeatable read", `DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET default_transaction_isolation = ''repeatable read''', current_database()); END $$`},
		{"synchronous-commit", "role " + role("hasty"), "synchronous_commit is off", `CREATE ROLE wgrole_hasty; ALTER ROLE wgrole_hasty SET synchronous_commit = off`},
	} {
		t.Run(c.id+" "+c.says, func(t *testing.T) {
			cfg := bed(t)
			own := strings.NewReplacer("wgrole_", "wg_"+cfg.Database+"_") // roles are the whole server's
			require.Empty(t, verify(t, cfg, audit.VerifyOptions{Only: []string{c.id}}).Findings, "before")
			pgtest.Exec(t, cfg, own.Replace(c.sql))
			if i := strings.Index(c.sql, "CREATE ROLE wgrole_"); i >= 0 {
				name := own.Replace(strings.TrimRight(strings.Fields(c.sql[i:])[2], ";"))
				t.Cleanup(func() {
					pgtest.Exec(t, cfg, `REASSIGN OWNED BY `+name+` TO CURRENT_USER; DROP OWNED BY `+name+`; DROP ROLE `+name)
				})
			}
			v := verify(t, cfg, audit.VerifyOptions{Only: []string{c.id}})
			require.Empty(t, v.Unchecked)
			require.Equal(t, []string{c.id}, v.Checks)
			object := own.Replace(c.object)
			if object == "" {
				object = "app.orders"
			}
			var found []string
			for _, f := range v.Findings {
				require.Equal(t, c.id, f.ID)
				require.NotEmpty(t, f.Fix)
				if (f.Object == object || strings.HasSuffix(object, "*")) && strings.Contains(f.Finding, c.says) {
					return
				}
				found = append(found, f.Object+": "+f.Finding)
			}
			t.Fatalf("%s: %s was not found, but %q", object, c.says, found)
		})
	}
}

// What the checks find is told by the catalogue, and every check is in some test: those that need a server of their own are below.
func TestEveryCheckIsExplainedAndTested(t *testing.T) {
	text, err := os.ReadFile("verify_test.go")
	require.NoError(t, err)
	seen := map[string]bool{}
	for _, c := range audit.Checks() {
		require.False(t, seen[c.ID], c.ID)
		seen[c.ID] = true
		for _, field := range []string{c.Title, c.Meaning, c.Cause, c.Action} {
			require.NotEmpty(t, field, c.ID)
		}
		require.Contains(t, audit.Severities, c.Severity)
		require.Contains(t, string(text), `"`+c.ID+`"`, "no test")
	}
}

// functions.txt is what the migrations make. -update writes it, when a migration changes a function.
func TestFunctionsAreKnown(t *testing.T) {
	cfg := pgtest.New(t)
	conn := connect(t, cfg)
	rows, err := audit.Bounded(conn, time.Minute).Query(context.Background(), audit.FunctionsSQL)
	require.NoError(t, err)
	text := fmt.Sprintln(migrations.Version)
	var signature, hash string
	_, err = pgx.ForEachRow(rows, []any{&signature, &hash}, func() error {
		text += signature + "\t" + hash + "\n"
		return nil
	})
	require.NoError(t, err)
	if *update {
		require.NoError(t, os.WriteFile("functions.txt", []byte(text), 0o600))
	}
	known, err := os.ReadFile("functions.txt")
	require.NoError(t, err)
	require.Equal(t, text, string(known), "go test ./internal/audit -run Functions -update")
}

var update = flag.Bool("update", false, "write functions.txt")

func TestACleanDatabaseHasNoFindings(t *testing.T) {
	cfg := bed(t, `SELECT fence.protect('app.orders', 'once', 'live', guard => 'enforce')`,
		`CREATE TABLE app.p (id int, region text, PRIMARY KEY (id, region)) PARTITION BY LIST (region)`, `CREATE TABLE app.p1 PARTITION OF app.p DEFAULT`,
		`CREATE TABLE app.q (id int PRIMARY KEY)`, `SELECT fence.protect('app.p', guard => 'observe')`, `SELECT fence.protect('app.q', fence_column => 'Odd "name"', guard => 'enforce')`)
	role := "wg_" + cfg.Database
	pgtest.Exec(t, cfg, fmt.Sprintf(`CREATE ROLE %[1]s_h; CREATE ROLE %[1]s_a; SELECT fence.allow('%[1]s_h', 'holder'); SELECT fence.allow('%[1]s_a', 'auditor')`, role))
	t.Cleanup(func() {
		pgtest.Exec(t, cfg, fmt.Sprintf(`DROP OWNED BY %[1]s_h, %[1]s_a; DROP ROLE %[1]s_h, %[1]s_a`, role))
	})
	v := verify(t, cfg, audit.VerifyOptions{})
	require.Empty(t, v.Findings)
	require.Empty(t, v.Unchecked)
	require.Len(t, v.Checks, len(audit.Checks())-len(testServer))
	require.Equal(t, []string{"not asked for: fsync-off"}, v.Notes)

	_, err := audit.Verify(context.Background(), connect(t, cfg), cfg.Database, audit.VerifyOptions{Skip: []string{"lease-over"}})
	require.ErrorContains(t, err, `there is no check "lease-over"`)
}

// HOT updates are counted by the server, which tells about them a little later.
func TestLeaseHot(t *testing.T) {
	cfg := bed(t, `CREATE INDEX ON fence.lease (renewals)`, `INSERT INTO fence.lease (name) SELECT 'l' || i FROM generate_series(1, 12000) i`, `UPDATE fence.lease SET renewals = renewals + 1`)
	q := audit.Bounded(connect(t, cfg), time.Minute)
	require.Eventually(t, func() bool {
		v, err := audit.Verify(context.Background(), q, cfg.Database, audit.VerifyOptions{Only: []string{"lease-hot"}})
		require.NoError(t, err)
		return len(v.Findings) == 1 && strings.Contains(v.Findings[0].Finding, "updates were HOT (0 %)")
	}, 60*time.Second, 200*time.Millisecond)
}

// What a server is set to, and who follows it.
func TestServerSettings(t *testing.T) {
	server := pgtest.Own(t, "synchronous_commit = off", "default_transaction_isolation = 'serializable'", "max_wal_senders = 5")
	cfg := server.Config("postgres")
	pgtest.Exec(t, cfg, `SELECT 1`)
	migrated(t, cfg)
	only := []string{"synchronous-commit", "isolation-default", "fsync-off", "synchronous-standby", "synchronous-missing"}
	ids := func(cfg *pgx.ConnConfig) (found []string, unchecked []string) {
		v := verify(t, cfg, audit.VerifyOptions{Only: only})
		for _, f := range v.Findings {
			found = append(found, f.ID)
		}
		for _, u := range v.Unchecked {
			require.Contains(t, u.Why, "ask the primary")
			unchecked = append(unchecked, u.ID)
		}
		return found, unchecked
	}
	found, unchecked := ids(cfg)
	require.ElementsMatch(t, []string{"fsync-off", "synchronous-commit", "isolation-default"}, found)
	require.Empty(t, unchecked)

	standby := server.Standby(t)
	found, _ = ids(cfg)
	require.ElementsMatch(t, []string{"fsync-off", "synchronous-commit", "isolation-default", "synchronous-standby"}, found)

	// A standby tells what it has from the primary, and says what it cannot tell.
	there := audit.Bounded(connect(t, standby.Config("postgres")), time.Minute)
	require.Eventually(t, func() bool {
		_, err := audit.CheckSchema(context.Background(), there, "postgres")
		return err == nil
	}, 30*time.Second, 20*time.Millisecond)
	v := verify(t, standby.Config("postgres"), audit.VerifyOptions{})
	var unable []string
	for _, u := range v.Unchecked {
		unable = append(unable, u.ID)
	}
	require.ElementsMatch(t, []string{"epoch-changed", "timeline-unreadable", "lease-hot", "synchronous-standby", "synchronous-missing"}, unable)
	require.Equal(t, len(audit.Checks())-len(unable)-len(testServer), len(v.Checks))

	pgtest.Exec(t, cfg, `ALTER SYSTEM SET synchronous_standby_names = 'nobody'`)
	pgtest.Exec(t, cfg, `SELECT pg_reload_conf()`)
	require.Eventually(t, func() bool {
		found, _ := ids(cfg)
		return strings.Contains(strings.Join(found, " "), "synchronous-missing")
	}, 30*time.Second, 20*time.Millisecond)
}

// Rows are read in batches: all of them, whatever partition they are in, also those that come meanwhile; an interrupted scan
// goes on from where it was; and a role from which rows are hidden is told.
func TestScan(t *testing.T) {
	ctx := context.Background()
	cfg := bed(t, `CREATE TABLE app.big (id int, region int, pad text, last_fence bigint NOT NULL DEFAULT 0, PRIMARY KEY (id, region)) PARTITION BY LIST (region)`,
		`CREATE TABLE app.big1 PARTITION OF app.big FOR VALUES IN (1)`, `CREATE TABLE app.big2 PARTITION OF app.big FOR VALUES IN (2)`, `CREATE TABLE app."B ig3" PARTITION OF app.big DEFAULT`,
		`INSERT INTO app.big SELECT i, i % 3, repeat('x', 500), 2 FROM generate_series(1, 60000) i`, `SELECT fence.protect('app.big')`, `SELECT setval('fence.fence_seq', 100)`,
		`UPDATE app.big SET last_fence = 50 WHERE id IN (59999, 60000)`, `UPDATE app.big SET last_fence = -4 WHERE id = 30000`)
	opt := audit.VerifyOptions{Only: []string{"sequence-behind", "fence-unknown", "fence-negative", "fence-null"}}
	summary := func(v *audit.Verification) (s []string) {
		require.Empty(t, v.Unchecked)
		for _, f := range v.Findings {
			s = append(s, strings.Join([]string{f.ID, f.Object, strings.SplitN(f.Finding, ",", 2)[0]}, " "))
		}
		return s
	}
	want := []string{"fence-negative app.big 1 row holds a fence below 0", "fence-unknown app.big 2 rows hold a fence that was never granted here"}
	var passed []int64
	opt.Scan.Progress = func(_ string, done, total int64) {
		require.LessOrEqual(t, done, total)
		passed = append(passed, done)
	}
	require.Equal(t, want, summary(verify(t, cfg, opt)))
	require.Greater(t, len(passed), 5, "in batches")
	require.IsIncreasing(t, passed)

	// Interrupted in the middle, it goes on, and says so.
	opt.Scan.State = filepath.Join(t.TempDir(), "state")
	stop, cancel := context.WithCancel(ctx)
	opt.Scan.Progress = func(_ string, done, total int64) {
		if done > total/2 {
			cancel()
		}
	}
	_, err := audit.Verify(stop, audit.Bounded(connect(t, cfg), time.Minute), cfg.Database, opt)
	require.ErrorIs(t, err, context.Canceled)
	require.FileExists(t, opt.Scan.State)
	passed = nil
	opt.Scan.Progress = func(_ string, done, total int64) { passed = append(passed, done*100/total) }
	v := verify(t, cfg, opt)
	require.Equal(t, want, summary(v))
	require.Contains(t, strings.Join(v.Notes, " "), "went on where")
	require.GreaterOrEqual(t, passed[0], int64(49), "what was read is not read again")
	require.NoFileExists(t, opt.Scan.State)

	require.NoError(t, os.WriteFile(opt.Scan.State, []byte(`{"database": "other"}`), 0o600))
	v = verify(t, cfg, opt)
	require.Contains(t, v.Unchecked[0].Why, `is the state of a scan of database "other"`)
	opt.Scan = audit.ScanLimit{Sample: 10}
	v = verify(t, cfg, opt)
	require.Regexp(t, `\d+ of \d{4} pages of app.big, app.orders were read`, strings.Join(v.Notes, " "))

	// Whoever sees some rows only must not say that all is well.
	role := "wg_" + cfg.Database
	pgtest.Exec(t, cfg, `CREATE ROLE `+role+` LOGIN PASSWORD 'x'; GRANT USAGE ON SCHEMA app TO `+role+`; GRANT SELECT ON app.orders TO `+role+`;
		GRANT SELECT ON app.big, app.big1, app.big2 TO `+role+`; ALTER TABLE app.big1 ENABLE ROW LEVEL SECURITY; SELECT fence.allow('`+role+`', 'auditor')`)
	t.Cleanup(func() { pgtest.Exec(t, cfg, `DROP OWNED BY `+role+`; DROP ROLE `+role) })
	as := cfg.Copy()
	as.User, as.Password = role, "x"
	v, err = audit.Verify(ctx, connect(t, as), cfg.Database, audit.VerifyOptions{Only: []string{"fence-null"}})
	require.NoError(t, err)
	why := ""
	for _, u := range v.Unchecked {
		require.Equal(t, "app.big", u.Object)
		why += u.Why + "\n"
	}
	require.Contains(t, why, "row security")
	require.Contains(t, why, `GRANT SELECT (last_fence, ctid) ON app."B ig3" TO `+role)
	require.Empty(t, v.Checks)

	// A statement that takes too long is a check that did not run.
	v, err = audit.Verify(ctx, audit.Bounded(slow{connect(t, cfg)}, 50*time.Millisecond), cfg.Database, audit.VerifyOptions{Only: []string{"lease-index"}})
	require.NoError(t, err)
	require.Contains(t, v.Unchecked[0].Why, "57014")
}

// slow makes every statement that asks for an index take long.
type slow struct{ audit.Beginner }

func (s slow) BeginTx(ctx context.Context, opt pgx.TxOptions) (pgx.Tx, error) {
	tx, err := s.Beginner.BeginTx(ctx, opt)
	return slowTx{tx}, err
}

type slowTx struct{ pgx.Tx }

func (s slowTx) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	if strings.Contains(sql, "pg_get_indexdef") {
		sql = `SELECT 'a', 'b', pg_sleep(60)::text`
	}
	return s.Tx.Query(ctx, sql, args...)
}

func TestBaseline(t *testing.T) {
	v := &audit.Verification{Findings: []audit.Finding{
		{ID: "lease-overdue", Object: "lease a\nb", Severity: audit.SeverityWarning}, {ID: "lease-overdue", Object: "lease c", Severity: audit.SeverityWarning},
		{ID: "fsync-off", Object: "the server", Severity: audit.SeverityError},
	}}
	var b strings.Builder
	require.NoError(t, audit.BaselineOf(v, "for now").Write(&b))
	read, err := audit.ReadBaseline(strings.NewReader(b.String()))
	require.NoError(t, err)
	require.Len(t, read, 3)
	read.Apply(v)
	require.Empty(t, v.Open(audit.SeverityInfo))
	require.Empty(t, v.Notes)

	fresh := &audit.Verification{Checks: []string{"lease-late"}, Findings: append([]audit.Finding{{ID: "table-gone", Object: "x", Severity: audit.SeverityWarning}}, v.Findings[1:]...)}
	for i := range fresh.Findings {
		fresh.Findings[i].Accepted = ""
	}
	some, err := audit.ReadBaseline(strings.NewReader("# a comment\n\nlease-overdue\t*\tknown\nlease-late\tlease z\tnot any more\n"))
	require.NoError(t, err)
	some.Apply(fresh)
	require.Len(t, fresh.Open(audit.SeverityWarning), 2)
	require.Len(t, fresh.Open(audit.SeverityError), 1)
	require.Equal(t, []string{"the baseline accepts lease-late of lease z, which is not found any more: take it out"}, fresh.Notes)

	for text, says := range map[string]string{"lease-overdue\tx": "want an id", "nonesuch\tx\ty": "no check", "lease-overdue\tx\t": "want an id"} {
		_, err := audit.ReadBaseline(strings.NewReader(text))
		require.ErrorContains(t, err, says)
	}
}
