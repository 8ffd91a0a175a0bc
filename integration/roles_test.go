package integration

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/writegate/writegate/fencedb"
	"github.com/writegate/writegate/internal/audit"
	"github.com/writegate/writegate/internal/pgtest"
	"github.com/writegate/writegate/leasedb"
)

// as returns a pool whose sessions are a new role's, which has been allowed what is said.
func (b *bed) as(what string) (*pgxpool.Pool, string) {
	b.t.Helper()
	role := "wg_" + what + "_" + b.cfg.Database
	b.exec(`CREATE ROLE ` + role + `; SELECT fence.allow('` + role + `', '` + what + `')`)
	b.t.Cleanup(func() { b.exec(`DROP OWNED BY ` + role + `; DROP ROLE ` + role) })
	return pgtest.Pool(b.t, b.cfg, func(c *pgxpool.Config) {
		c.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
			_, err := conn.Exec(ctx, `SET SESSION AUTHORIZATION `+role)
			return err
		}
	}), role
}

// Every right that docs/security.md gives, and every one that it denies.
func TestRoles(t *testing.T) {
	ctx := context.Background()
	b := newBed(t)
	b.exec(`SELECT fence.protect('app.orders', guard => 'enforce', strength => 'live')`)
	holder, role := b.as("holder")
	b.exec(`GRANT USAGE ON SCHEMA app TO ` + role + `; GRANT SELECT, INSERT, UPDATE, DELETE ON app.orders TO ` + role)

	client, err := leasedb.New(ctx, holder, leasedb.Config{Holder: "A", ManualRenewal: true, TTL: time.Hour})
	require.NoError(t, err)
	defer func() { require.Error(t, client.Close(ctx), "it has no rights any more by then") }()
	gate := b.gateOf(fencedb.New(holder, fencedb.Config{}))
	table, err := gate.Table(ctx, "app.orders")
	require.NoError(t, err)
	lease := b.acquire(client, "x")
	require.NoError(t, lease.Renew(ctx))
	for what, write := range map[string]func() (fencedb.Outcome, error){
		"update": func() (fencedb.Outcome, error) {
			return table.Update(ctx, lease, order1, fencedb.Set{"v": "A"}, fencedb.WithRequestID("r"))
		},
		"insert": func() (fencedb.Outcome, error) { return table.Insert(ctx, lease, fencedb.Set{"id": 9, "v": "A"}) },
		"upsert": func() (fencedb.Outcome, error) {
			return table.Upsert(ctx, lease, fencedb.Key{"id": 8}, fencedb.Set{"v": "A"})
		},
		"delete": func() (fencedb.Outcome, error) { return table.Delete(ctx, lease, fencedb.Key{"id": 2}) },
		"seal":   func() (fencedb.Outcome, error) { return table.Seal(ctx, lease, fencedb.Key{"id": 3}) },
		"missing": func() (fencedb.Outcome, error) {
			_, err := table.Update(ctx, lease, fencedb.Key{"id": 77}, fencedb.Set{"v": "A"})
			require.ErrorIs(t, err, fencedb.ErrMissing)
			return fencedb.Missing, nil
		},
		"in_tx": func() (fencedb.Outcome, error) {
			return fencedb.Applied, gate.InTx(ctx, lease, func(ctx context.Context, tx pgx.Tx) error {
				_, err := tx.Exec(ctx, `UPDATE app.orders SET v = 'plain' WHERE id = 3`)
				return err
			})
		},
	} {
		_, err := write()
		require.NoError(t, err, what)
	}
	b.exec(`ALTER TABLE app.orders DISABLE TRIGGER ALL; UPDATE app.orders SET last_fence = 99 WHERE id = 1; ALTER TABLE app.orders ENABLE TRIGGER ALL`)
	_, err = table.Update(ctx, lease, order1, fencedb.Set{"v": "A"})
	var e *fencedb.WriteError
	require.ErrorAs(t, err, &e)
	require.ErrorIs(t, err, fencedb.ErrStale)
	require.NoError(t, e.AuditErr)

	auditor, _ := b.as("auditor")
	rejections, _, err := audit.Rejections(ctx, auditor, audit.Filter{})
	require.NoError(t, err)
	require.Len(t, rejections, 1)
	require.Equal(t, role, rejections[0].User)
	leases, _, err := audit.Leases(ctx, auditor, audit.LeaseFilter{})
	require.NoError(t, err)
	require.Len(t, leases, 1)
	tables, err := audit.Tables(ctx, auditor, b.cfg.Database)
	require.NoError(t, err)
	require.Equal(t, "enforce", tables[0].Guard)
	require.Empty(t, tables[0].Wrong)
	v, err := audit.Verify(ctx, auditor, b.cfg.Database, audit.VerifyOptions{})
	require.NoError(t, err)
	for _, u := range v.Unchecked {
		require.Equal(t, "app.orders", u.Object, "%v: it has no rights on the application's tables, and says so", u)
		require.Contains(t, u.Why, "GRANT SELECT (last_fence, ctid) ON app.orders TO ")
	}
	require.NotEmpty(t, v.Unchecked)
	_, err = auditor.Exec(ctx, `SELECT version_id FROM fence.goose_db_version`)
	require.NoError(t, err)

	everybody := []string{
		`SELECT token FROM fence.lease`, `SELECT revoked FROM fence.lease`, `SELECT key FROM fence.secret`, `UPDATE fence.lease SET fence = 99`,
		`SELECT nextval('fence.fence_seq')`, `SELECT setval('fence.fence_seq', 1)`, `ALTER SEQUENCE fence.fence_seq CACHE 10`, `SELECT fence.jump('x')`,
		`DELETE FROM fence.rejection`, `UPDATE fence.rejection SET count = 1`, `INSERT INTO fence.term (fence, name, holder, ttl, granted_at) VALUES (99, 'x', 'h', '1s', now())`,
		`DELETE FROM fence.epoch`, `SELECT fence.entered()`, `SELECT fence.signature(99)`, `SELECT fence.allow(session_user::text, 'holder')`, `SELECT fence.grant_allowed()`,
		`DROP TABLE fence.rejection`, `CREATE TABLE fence.mine ()`, `CREATE OR REPLACE FUNCTION fence.live(name text, token uuid, fence bigint) RETURNS boolean LANGUAGE sql AS 'SELECT true'`,
		`ALTER TABLE app.orders DISABLE TRIGGER ALL`,
	}
	notHolders := []string{`SELECT fence.acquire('y', 'h', '1s', gen_random_uuid())`, `SELECT fence.enter('x', gen_random_uuid(), 2)`, `SELECT fence.record_rejections('[]')`}
	notOwners := []string{`SELECT fence.protect('app.orders')`, `SELECT fence.unprotect('app.orders')`, `INSERT INTO fence.protected_table (relation) VALUES ('app.orders')`,
		`SELECT fence.prune()`, `DELETE FROM fence.tombstone`}
	for who, tries := range map[*pgxpool.Pool][]string{
		holder: append(notOwners, `SELECT * FROM fence.rejection`, `SELECT holder FROM fence.lease`, `SELECT * FROM fence.request`), auditor: append(notHolders, notOwners...),
	} {
		for _, sql := range append(tries, everybody...) {
			_, err := who.Exec(ctx, sql)
			require.Error(t, err, sql)
			if !strings.Contains(err.Error(), "42501") {
				t.Errorf("%s: %v, want 42501", sql, err)
			}
		}
	}

	// Nor by a fence that it was never granted, in a table that wants proof.
	_, err = holder.Exec(ctx, `UPDATE app.orders SET v = 'x', last_fence = 999 WHERE id = 3`)
	require.ErrorContains(t, err, "WG009")

	b.exec(`SELECT fence.disallow('` + role + `')`)
	_, err = client.TryAcquire(ctx, "z")
	require.ErrorContains(t, err, "42501")
	for _, bad := range []string{`fence.allow('nobody_of_that_name', 'holder')`, `fence.allow('` + role + `', 'everything')`} {
		_, err := b.pool.Exec(ctx, `SELECT `+bad)
		require.Error(t, err)
	}
}

// A guard runs with the rights of the schema's owner, on tables and with types that are somebody else's: nothing of theirs runs
// with those rights.
func TestGuardRunsNothingOfTheTableOwners(t *testing.T) {
	ctx := context.Background()
	b := newBed(t)
	role := "wg_own_" + b.cfg.Database
	b.exec(`CREATE ROLE ` + role + `; CREATE SCHEMA own AUTHORIZATION ` + role)
	t.Cleanup(func() { b.exec(`DROP OWNED BY ` + role + ` CASCADE; DROP ROLE ` + role) })
	owner := b.session()
	_, err := owner.Exec(ctx, `SET SESSION AUTHORIZATION `+role+`; CREATE TABLE own.mine (id int PRIMARY KEY)`)
	require.NoError(t, err)
	b.exec(`SELECT fence.protect('own.mine', guard => 'observe', strength => 'live')`)
	_, err = owner.Exec(ctx, `CREATE TABLE own.loot (who text, what text); CREATE TYPE own.trap AS ENUM ('a');
		CREATE FUNCTION own.evil() RETURNS text LANGUAGE plpgsql AS $$ BEGIN INSERT INTO own.loot VALUES (current_user, 'x'); RETURN 'x'; END $$;
		CREATE FUNCTION own.evil(own.trap) RETURNS json LANGUAGE plpgsql AS $$ BEGIN PERFORM own.evil(); RETURN '1'; END $$;
		CREATE FUNCTION own.evil_text(own.trap) RETURNS text LANGUAGE plpgsql AS $$ BEGIN RETURN own.evil(); END $$;
		CREATE FUNCTION own.evil_bigint(own.trap) RETURNS bigint LANGUAGE plpgsql AS $$ BEGIN PERFORM own.evil(); RETURN 1; END $$;
		CREATE CAST (own.trap AS json) WITH FUNCTION own.evil(own.trap); CREATE CAST (own.trap AS text) WITH FUNCTION own.evil_text(own.trap) AS IMPLICIT;
		CREATE CAST (own.trap AS bigint) WITH FUNCTION own.evil_bigint(own.trap) AS IMPLICIT;
		ALTER TABLE own.mine ADD c own.trap; INSERT INTO own.mine VALUES (1, 0, 'a'); UPDATE own.mine SET last_fence = 4; DELETE FROM own.mine;
		INSERT INTO own.mine VALUES (1, 0, 'a'), (2, 0, 'a')`)
	require.NoError(t, err)
	_, err = owner.Exec(ctx, `ALTER TABLE own.mine ALTER last_fence DROP DEFAULT, ALTER last_fence TYPE own.trap USING 'a'`)
	require.NoError(t, err)
	_, err = b.session().Exec(ctx, `SET SESSION AUTHORIZATION `+role+`; UPDATE own.mine SET c = 'a'`) // without a plan from before
	require.ErrorContains(t, err, "is not bigint any more")
	// The trigger is not theirs to make, with arguments of their choosing.
	_, err = owner.Exec(ctx, `CREATE TRIGGER t BEFORE DELETE ON own.mine FOR EACH ROW EXECUTE FUNCTION fence.guard('observe', 'allow', '', 'last_fence', '', 'ROW(own.evil())')`)
	require.ErrorContains(t, err, "42501")
	require.Equal(t, 0, query[int](b, `SELECT count(*) FROM own.loot WHERE who <> '`+role+`'`))
	b.exec(`SELECT fence.unprotect('own.mine')`)
}

// Decoys in schemas of a tenant's, in front of ours and of the system's, change nothing. (C30)
func TestDecoys(t *testing.T) {
	ctx := context.Background()
	b := newBed(t)
	b.exec(`SELECT fence.protect('app.orders', guard => 'enforce', strength => 'live'); CREATE SCHEMA tenant;
		CREATE TABLE tenant.lease (name text, token uuid, fence bigint, expires_at timestamptz, released_at timestamptz);
		CREATE TABLE tenant.rejection (id int); CREATE TABLE tenant.tombstone (relation regclass); CREATE TABLE tenant.orders (id int PRIMARY KEY, v text, last_fence bigint);
		CREATE FUNCTION tenant.clock_timestamp() RETURNS timestamptz LANGUAGE sql AS $$ SELECT 'infinity'::timestamptz $$;
		CREATE FUNCTION tenant.set_config(text, text, boolean) RETURNS text LANGUAGE sql AS $$ SELECT 'decoy' $$;
		CREATE FUNCTION tenant.jsonb_build_object(VARIADIC "any") RETURNS jsonb LANGUAGE internal AS 'jsonb_build_object_noargs';
		CREATE FUNCTION tenant.never(bigint, bigint) RETURNS boolean LANGUAGE sql AS $$ SELECT true $$;
		CREATE OPERATOR tenant.< (leftarg = bigint, rightarg = bigint, function = tenant.never);
		-- All that a live write could be led astray by.
		CREATE FUNCTION tenant.current_setting(text) RETURNS text LANGUAGE plpgsql AS 'BEGIN RAISE ''a decoy was called''; END';
		CREATE FUNCTION tenant.uuid_hash_extended(uuid, bigint) RETURNS bigint LANGUAGE plpgsql AS 'BEGIN RAISE ''a decoy was called''; END';
		CREATE FUNCTION tenant.uuid_hash_extended(uuid, int) RETURNS bigint LANGUAGE plpgsql AS 'BEGIN RAISE ''a decoy was called''; END';
		CREATE COLLATION tenant."C" (provider = icu, locale = 'und', deterministic = true);
		DO $do$
		DECLARE t text; o text;
		BEGIN
		    FOREACH t IN ARRAY ARRAY['text', 'uuid', 'bigint', 'timestamptz'] LOOP
		        EXECUTE format('CREATE FUNCTION tenant.decoy(%1$s, %1$s) RETURNS boolean LANGUAGE plpgsql AS ''BEGIN RAISE ''''a decoy was called''''; END''', t);
		        FOREACH o IN ARRAY ARRAY['=', '<>', '>', '<=', '>='] LOOP
		            EXECUTE format('CREATE OPERATOR tenant.%1$s (leftarg = %2$s, rightarg = %2$s, function = tenant.decoy)', o, t);
		        END LOOP;
		    END LOOP;
		END $do$`)
	pool := pgtest.Pool(t, b.cfg, func(c *pgxpool.Config) {
		c.ConnConfig.RuntimeParams["search_path"] = "tenant, pg_temp, app, pg_catalog"
	})
	client, err := leasedb.New(ctx, pool, leasedb.Config{TTL: time.Hour, ManualRenewal: true})
	require.NoError(t, err)
	defer func() { require.ErrorIs(t, client.Close(ctx), leasedb.ErrNotHeld) }()
	gate := b.gateOf(fencedb.New(pool, fencedb.Config{}))
	table, err := gate.Table(ctx, "app.orders")
	require.NoError(t, err)
	lease := b.acquire(client, "x")
	_, err = table.Update(ctx, lease, order1, fencedb.Set{"v": "A"})
	require.NoError(t, err)
	_, err = table.Delete(ctx, lease, fencedb.Key{"id": 2})
	require.NoError(t, err)
	require.NoError(t, gate.InTx(ctx, lease, func(ctx context.Context, tx pgx.Tx) error {
		_, err := tx.Exec(ctx, `UPDATE app.orders SET v = 'plain' WHERE id = 3`)
		return err
	}))
	_, err = table.Update(ctx, fencedb.Static("y", 1, "Z"), order1, fencedb.Set{"v": "stale"}, fencedb.WithStrength(fencedb.Fenced))
	require.ErrorIs(t, err, fencedb.ErrStale)
	b.age("x", 2*time.Hour)
	_, err = table.Update(ctx, factsOf(lease), fencedb.Key{"id": 3}, fencedb.Set{"v": "late"}, fencedb.WithRule(fencedb.Term))
	require.ErrorIs(t, err, fencedb.ErrLeaseLost)
	require.Equal(t, 2, query[int](b, `SELECT count(*) FROM fence.rejection`))
	require.Equal(t, 1, query[int](b, `SELECT count(*) FROM fence.tombstone`))
	require.Equal(t, 0, query[int](b, `SELECT (SELECT count(*) FROM tenant.rejection) + (SELECT count(*) FROM tenant.tombstone) + (SELECT count(*) FROM tenant.lease)`))
	// Every function of ours pins its path.
	require.Equal(t, "", query[string](b, `SELECT coalesce(string_agg(p.oid::regprocedure::text, ', '), '') FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace
		WHERE n.nspname = 'fence' AND p.proname <> 'schema_version' AND NOT coalesce('search_path=pg_catalog, pg_temp' = ANY (p.proconfig), false)`))
}

// A role that may not read the view, as one whose rights are from before it, pins by the function, also when many find that out
// at the same time.
func TestInTxWithoutTheView(t *testing.T) {
	ctx := context.Background()
	b := newBed(t)
	holder, role := b.as("holder")
	b.exec(`REVOKE SELECT ON fence.live_lease FROM ` + role)
	lease := b.acquire(b.client(leasedb.Config{ManualRenewal: true}), "x")
	for range 5 {
		gate := b.gateOf(fencedb.New(holder, fencedb.Config{}))
		together(t, 4, func(int) error {
			return gate.InTx(ctx, lease, func(ctx context.Context, tx pgx.Tx) error {
				_, err := tx.Exec(ctx, "SELECT 1")
				return err
			})
		})
	}
}
