package main

import (
	"context"
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/writegate/writegate/internal/pgtest"
	"github.com/writegate/writegate/migrations"
)

// A deployer that is killed in the middle of a migration leaves that one undone, the others as they are, and nobody locked
// out. (C33 c)
func TestMigrateKilledInTheMiddle(t *testing.T) {
	ctx := context.Background()
	cfg := pgtest.NewEmpty(t)
	db := "--database-url=" + url(t, cfg)
	require.Equal(t, exitClean, fencecheck("migrate", "up", db).code)
	require.Equal(t, exitClean, fencecheck("migrate", "down", "--to", "2", db).code)

	conn, err := pgx.ConnectConfig(ctx, cfg)
	require.NoError(t, err)
	defer func() { _ = conn.Close(ctx) }()
	_, err = conn.Exec(ctx, `BEGIN; SELECT 1 FROM fence.protected_table`) // which migration 4 wants to alter
	require.NoError(t, err)
	deployer := exec.Command(os.Args[0], "migrate", "up", db)
	require.NoError(t, deployer.Start())
	require.Eventually(t, func() bool {
		return value[bool](t, cfg, `SELECT EXISTS (SELECT 1 FROM pg_locks WHERE NOT granted AND relation = 'fence.protected_table'::regclass)`)
	}, 30*time.Second, 5*time.Millisecond)
	require.NoError(t, deployer.Process.Kill())
	require.Error(t, deployer.Wait())
	_, err = conn.Exec(ctx, `COMMIT`)
	require.NoError(t, err)

	r := fencecheck("migrate", "up", db)
	require.Equal(t, exitClean, r.code, r.stderr)
	require.EqualValues(t, migrations.Version, value[int](t, cfg, `SELECT fence.schema_version()`))
	require.EqualValues(t, migrations.Version, value[int64](t, cfg, `SELECT count(*) FROM fence.goose_db_version WHERE version_id > 0 AND is_applied`), "each of them once")
}

// The histories of other tools in the same database, before ours and after, are nobody's business but theirs. (C35)
func TestMigrateBesideOtherTools(t *testing.T) {
	others := `
		CREATE TABLE public.goose_db_version (id serial PRIMARY KEY, version_id bigint NOT NULL, is_applied boolean NOT NULL, tstamp timestamp DEFAULT now());
		INSERT INTO public.goose_db_version (version_id, is_applied) VALUES (0, true), (1, true), (20250108161825, true);
		CREATE TABLE public.schema_migrations (version bigint NOT NULL PRIMARY KEY, dirty boolean NOT NULL); INSERT INTO public.schema_migrations VALUES (7, false);
		CREATE TABLE public.flyway_schema_history (installed_rank int PRIMARY KEY, version varchar(50), success boolean); INSERT INTO public.flyway_schema_history VALUES (1, '1.2', true)`
	const history = `SELECT (SELECT string_agg(version_id::text, ',' ORDER BY id) FROM public.goose_db_version) || ' ' ||
		(SELECT string_agg(version::text, ',') FROM public.schema_migrations) || ' ' || (SELECT string_agg(version, ',') FROM public.flyway_schema_history)`
	for _, oursFirst := range []bool{false, true} {
		cfg := pgtest.NewEmpty(t)
		db := "--database-url=" + url(t, cfg)
		ok := func(args ...string) {
			t.Helper()
			r := fencecheck(append(args, db)...)
			require.Equal(t, exitClean, r.code, r.stderr)
		}
		if oursFirst {
			ok("migrate", "up")
			ok("migrate", "down")
			pgtest.Exec(t, cfg, others)
		} else {
			pgtest.Exec(t, cfg, others)
		}
		ok("migrate", "up")
		require.Equal(t, "0,1,20250108161825 7 1.2", value[string](t, cfg, history))
		// They go on, and so do we.
		pgtest.Exec(t, cfg, `INSERT INTO public.goose_db_version (version_id, is_applied) VALUES (2, true); UPDATE public.schema_migrations SET version = 8`)
		ok("migrate", "down")
		ok("migrate", "up")
		require.Equal(t, "0,1,20250108161825,2 8 1.2", value[string](t, cfg, history))
		ok("migrate", "down", "--to", "0")
		require.Equal(t, "0,1,20250108161825,2 8 1.2", value[string](t, cfg, history))
	}
}
