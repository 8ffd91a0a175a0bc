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
	"github.com/writegate/writegate/internal/migrate"
	"github.com/writegate/writegate/internal/pgtest"
	"github.com/writegate/writegate/leasedb"
)

func TestLeaseConfigSaysAllThatIsWrong(t *testing.T) {
	pool := pgtest.Pool(t, pgtest.NewEmpty(t))
	_, err := leasedb.New(context.Background(), pool, leasedb.Config{})
	require.ErrorContains(t, err, "TTL 0s: want 100ms to 168h0m0s")
	_, err = leasedb.New(context.Background(), pool, leasedb.Config{
		TTL: time.Second, RenewEvery: 600 * time.Millisecond, Margin: 200 * time.Millisecond, MaxHold: -1, PollEvery: time.Microsecond,
		LockWait: -1, Conns: -1, Holder: "a\x00b",
	})
	for _, want := range []string{"RenewEvery 600ms: want at most half", "must leave a quarter", "MaxHold", "PollEvery", "LockWait", "Conns", "NUL"} {
		require.ErrorContains(t, err, want)
	}
}

func TestLeaseNames(t *testing.T) {
	ctx := context.Background()
	b := newBed(t)
	client := b.client(leasedb.Config{})
	for name, want := range map[string]string{
		"":                       "0 bytes: want 1 to 255",
		strings.Repeat("ä", 128): "256 bytes: want 1 to 255",
		"a\nb":                   "control characters",
		"a\u0085b":               "control characters",
		"a\x00b":                 "control characters",
		"a\xffb":                 "valid UTF-8",
	} {
		_, err := client.TryAcquire(ctx, name)
		require.ErrorContains(t, err, want)
		_, err = client.Acquire(ctx, name)
		require.ErrorContains(t, err, want)
	}
	require.Equal(t, 0, query[int](b, `SELECT count(*) FROM fence.lease`))

	// The database holds the same line for whoever calls it directly, for each of its arguments.
	for call, want := range map[string]string{
		`fence.acquire('', 'h', '1s', gen_random_uuid())`:                                           "0 bytes",
		`fence.acquire(NULL, 'h', '1s', gen_random_uuid())`:                                         "0 bytes",
		`fence.acquire(repeat('x', 256), 'h', '1s', gen_random_uuid())`:                             "256 bytes",
		`fence.acquire(E'a\tb', 'h', '1s', gen_random_uuid())`:                                      "control characters",
		`fence.acquire('x', 'h', '0', gen_random_uuid())`:                                           "ttl 00:00:00",
		`fence.acquire('x', 'h', '-1s', gen_random_uuid())`:                                         "ttl -00:00:01",
		`fence.acquire('x', 'h', NULL, gen_random_uuid())`:                                          "ttl NULL",
		`fence.acquire('x', 'h', '8 days', gen_random_uuid())`:                                      "at most 7 days",
		`fence.acquire('x', 'h', '-1 year 360 days 1 second', gen_random_uuid())`:                   "more than 0",
		`fence.acquire('x', repeat('h', 1025), '1s', gen_random_uuid())`:                            "holder of 1025",
		`fence.acquire('x', 'h', '1s', gen_random_uuid(), waiter => repeat('w', 8000))`:             "waiter of 8000",
		`fence.acquire('x', 'h', '1s', NULL)`:                                                       "token NULL",
		`fence.acquire('x', 'h', '1s', gen_random_uuid(), lock_wait => '0s')`:                       "lock_wait 00:00:00",
		`fence.acquire('x', 'h', '1s', gen_random_uuid(), '100 years')`:                             "lock_wait 100 years",
		`fence.release('x', NULL, revoke => true)`:                                                  "token NULL",
		`fence.release('', gen_random_uuid(), revoke => true)`:                                      "0 bytes",
		`fence.release('x', gen_random_uuid(), lock_wait => NULL)`:                                  "lock_wait NULL",
		`fence.release('x', gen_random_uuid(), lock_wait => '0')`:                                   "lock_wait 00:00:00",
		`fence.record_rejection('t', '{}', 'x', NULL, 2, 'stale', 4, times => 9223372036854775807)`: "want 1 to 1000000000",
	} {
		_, err := b.pool.Exec(ctx, `SELECT `+call)
		require.ErrorContains(t, err, want)
		require.ErrorContains(t, err, "22023")
	}

	// Names that only differ in what a locale may take for the same are different names, and odd ones work.
	names := []string{"Ä", "ä", "A\u0308", "a b", "'; DROP TABLE fence.lease; --", `"`, "%s", strings.Repeat("x", 255)}
	for _, name := range names {
		require.Equal(t, name, b.acquire(client, name).Name())
	}
	require.Equal(t, len(names), query[int](b, `SELECT count(*) FROM fence.lease`))
}

func TestServersThatCannotServe(t *testing.T) {
	ctx := context.Background()
	cfg := leasedb.Config{TTL: time.Minute}

	t.Run("unreachable", func(t *testing.T) {
		poolConfig, err := pgxpool.ParseConfig("postgres://me:s3cret@127.0.0.1:1/db?connect_timeout=5")
		require.NoError(t, err)
		pool, err := pgxpool.NewWithConfig(ctx, poolConfig)
		require.NoError(t, err)
		defer pool.Close()
		_, err = leasedb.New(ctx, pool, cfg)
		require.ErrorContains(t, err, "127.0.0.1:1")
		require.NotContains(t, err.Error(), "s3cret")
		gate := fencedb.New(pool, fencedb.Config{})
		defer gate.Close()
		_, err = gate.Table(ctx, "app.orders")
		require.ErrorContains(t, err, "127.0.0.1:1")
		require.NotContains(t, err.Error(), "s3cret")
	})

	t.Run("without the schema", func(t *testing.T) {
		_, err := leasedb.New(ctx, pgtest.Pool(t, pgtest.NewEmpty(t)), cfg)
		require.ErrorIs(t, err, leasedb.ErrSchema)
		require.ErrorContains(t, err, "fencecheck migrate up")
	})

	t.Run("an older schema", func(t *testing.T) {
		b := newBed(t)
		b.exec(`SELECT fence.unprotect('app.orders')`)
		_, err := migrate.Down(ctx, b.cfg, 1, false)
		require.NoError(t, err)
		_, err = b.gate.Table(ctx, "app.orders")
		require.ErrorIs(t, err, fencedb.ErrSchema)
		require.ErrorContains(t, err, "at version 1, this program needs 4: run `fencecheck migrate up`")
		// The leases need no more than that version has.
		b.acquire(b.client(leasedb.Config{}), "x")
	})

	t.Run("a newer schema", func(t *testing.T) {
		b := newBed(t)
		b.exec(`CREATE OR REPLACE FUNCTION fence.schema_version() RETURNS integer LANGUAGE sql IMMUTABLE AS 'SELECT 99'`)
		_, err := leasedb.New(ctx, b.pool, cfg)
		require.ErrorIs(t, err, leasedb.ErrSchema)
		require.ErrorContains(t, err, "update the program")
		_, err = b.gate.Table(ctx, "app.orders")
		require.ErrorIs(t, err, fencedb.ErrSchema)
	})

	t.Run("read-only", func(t *testing.T) {
		b := newBed(t)
		b.exec(`ALTER DATABASE ` + b.cfg.Database + ` SET default_transaction_read_only = on`)
		b.pool.Reset()
		client := b.client(leasedb.Config{})
		_, err := client.TryAcquire(ctx, "x")
		require.ErrorIs(t, err, leasedb.ErrReadOnly)
		require.NotErrorIs(t, err, leasedb.ErrHeld)
		_, err = client.Acquire(ctx, "x")
		require.ErrorIs(t, err, leasedb.ErrReadOnly, "waiting does not help")
		outcome, err := b.table().Update(ctx, fencedb.Static("x", 2, "me"), order1, fencedb.Set{"v": "x"})
		require.Equal(t, fencedb.Failed, outcome)
		require.ErrorContains(t, err, "25006")
		require.NotErrorIs(t, err, fencedb.ErrStale)
	})

	t.Run("another default isolation level", func(t *testing.T) {
		b := newBed(t)
		b.exec(`ALTER DATABASE ` + b.cfg.Database + ` SET default_transaction_isolation = serializable`)
		b.pool.Reset()
		client := b.client(leasedb.Config{})
		for range 3 {
			lease := b.acquire(client, "x")
			require.NoError(t, lease.Renew(ctx))
			require.NoError(t, lease.Release(ctx))
		}
		lease := b.acquire(client, "x")
		for id, strength := range map[int]fencedb.Strength{1: fencedb.Fenced, 2: fencedb.Live, 3: fencedb.Live} {
			outcome, err := b.table().Update(ctx, lease, fencedb.Key{"id": id}, fencedb.Set{"v": "x"}, fencedb.WithStrength(strength))
			require.NoError(t, err)
			require.Equal(t, fencedb.Applied, outcome)
		}
		// Called by hand, the functions say what they need.
		_, err := b.pool.Exec(ctx, `SELECT fence.acquire('y', 'h', '1s', gen_random_uuid())`)
		require.ErrorContains(t, err, "WG002")
	})
}

func TestTablesThatCannotBeProtected(t *testing.T) {
	ctx := context.Background()
	b := newBed(t)
	b.exec(`
		CREATE TABLE app.bare (id int PRIMARY KEY);
		CREATE TABLE app.narrow (id int PRIMARY KEY, last_fence int NOT NULL DEFAULT 0);
		CREATE TABLE app.nullable (id int PRIMARY KEY, last_fence bigint DEFAULT 0);
		CREATE TABLE app.unregistered (id int PRIMARY KEY, last_fence bigint NOT NULL DEFAULT 0);
		CREATE TABLE app.keyless (id int, last_fence bigint NOT NULL DEFAULT 0); SELECT fence.protect('app.keyless');
		CREATE UNLOGGED TABLE app.unlogged (id int PRIMARY KEY, last_fence bigint NOT NULL DEFAULT 0);
		CREATE VIEW app.view AS SELECT id, last_fence FROM app.orders;
		CREATE TABLE app.parent (id int PRIMARY KEY, last_fence bigint NOT NULL DEFAULT 0); CREATE TABLE app.child () INHERITS (app.parent);
		CREATE TABLE app.parted (id int PRIMARY KEY, last_fence bigint NOT NULL DEFAULT 0) PARTITION BY RANGE (id);
		CREATE TABLE app.part PARTITION OF app.parted FOR VALUES FROM (0) TO (10);
		CREATE TABLE app.risky (id int PRIMARY KEY) PARTITION BY RANGE (id);
		CREATE UNLOGGED TABLE app.risky_part PARTITION OF app.risky FOR VALUES FROM (0) TO (10);
		CREATE TABLE app.identity (id int PRIMARY KEY, last_fence bigint GENERATED ALWAYS AS IDENTITY);
		CREATE TABLE app.computed (id int PRIMARY KEY, last_fence bigint NOT NULL GENERATED ALWAYS AS (id) STORED);
		CREATE TABLE app.defaulted (id int PRIMARY KEY, last_fence bigint NOT NULL DEFAULT 1000);
		CREATE TABLE app.huge (id int PRIMARY KEY, last_fence bigint NOT NULL DEFAULT '0'); INSERT INTO app.huge VALUES (1, 9223372036854775807);
		CREATE TABLE app.dropped (id int PRIMARY KEY); SELECT fence.protect('app.dropped'); ALTER TABLE app.dropped DROP COLUMN last_fence`)
	for table, want := range map[string]string{
		"app.bare":         `no fence column "last_fence" (bigint NOT NULL DEFAULT 0): add it with SELECT fence.protect('"app"."bare"')`,
		"app.dropped":      "no fence column",
		"app.narrow":       "is integer, want bigint",
		"app.nullable":     "may be NULL",
		"app.unregistered": `not registered in fence.protected_table: SELECT fence.protect('"app"."unregistered"')`,
		"app.keyless":      "neither a primary key nor a unique index",
		"app.unlogged":     "unlogged",
		"app.view":         "not a table",
		"app.parent":       "other tables inherit from",
		"app.nonesuch":     "there is no table app.nonesuch",
		"orders":           "not on the search_path",
	} {
		_, err := b.gate.Table(ctx, table)
		require.ErrorContains(t, err, want)
	}
	for table, want := range map[string]string{
		"app.parent": "other tables inherit", "app.part": "it is a partition", "app.risky": "a partition of it is unlogged", "app.identity": "is generated",
		"app.computed": "is generated", "app.defaulted": "has the default 1000, want 0",
		"app.narrow": "is integer, a fence needs bigint", "app.nullable": "may be NULL", "app.unlogged": "unlogged or temporary", "app.view": "not a table",
		"fence.lease": "belongs to the system", "pg_catalog.pg_class": "belongs to the system",
	} {
		_, err := b.pool.Exec(ctx, `SELECT fence.protect($1::text::regclass)`, table)
		require.ErrorContains(t, err, want)
		require.ErrorContains(t, err, "WG003")
	}
	_, err := b.pool.Exec(ctx, `SELECT fence.protect('app.huge')`)
	require.ErrorContains(t, err, "fences are used up: 9223372036854775807 is known here")
	_, err = b.pool.Exec(ctx, `SELECT fence.protect('app.bare', fence_column => '')`)
	require.ErrorContains(t, err, "want a column name")
	b.exec(`SELECT fence.protect('app.parted')`)
	_, err = b.pool.Exec(ctx, `SELECT fence.protect('app.bare', 'twice')`)
	require.ErrorContains(t, err, "want once or term")
	_, err = b.pool.Exec(ctx, `SELECT fence.protect('app.bare', strength => 'strong')`)
	require.ErrorContains(t, err, "want fenced, live or in_tx")
	require.Equal(t, 0, query[int](b, `SELECT count(*) FROM pg_attribute WHERE attrelid = 'app.bare'::regclass AND attname = 'last_fence'`))
}

func TestProtect(t *testing.T) {
	ctx := context.Background()
	b := newBed(t)
	b.exec(`CREATE TABLE app."Odd ""table" ("the id" text, part int, v text, PRIMARY KEY ("the id", part));
		INSERT INTO app."Odd ""table" VALUES ('a', 1, 'first')`)
	before := query[uint32](b, `SELECT relfilenode FROM pg_class WHERE oid = 'app."Odd ""table"'::regclass`)
	b.exec(`SELECT fence.protect('app."Odd ""table"', fence_column => 'the "fence"')`)
	require.Equal(t, before, query[uint32](b, `SELECT relfilenode FROM pg_class WHERE oid = 'app."Odd ""table"'::regclass`), "no rewrite")
	b.exec(`SELECT fence.protect('app."Odd ""table"', 'term', 'live', 'the "fence"')`)

	table, err := b.gate.Table(ctx, `app."Odd ""table"`)
	require.NoError(t, err)
	require.Equal(t, fencedb.Term, table.Rule())
	require.Equal(t, fencedb.Live, table.Strength())
	lease := b.acquire(b.client(leasedb.Config{}), "x")
	key := fencedb.Key{"the id": "a", "part": 1}
	for _, v := range []string{"w1", "w2"} {
		outcome, err := table.Update(ctx, lease, key, fencedb.Set{"v": v})
		require.NoError(t, err)
		require.Equal(t, fencedb.Applied, outcome)
	}
	require.Equal(t, "w2", query[string](b, `SELECT v FROM app."Odd ""table"`))
	_, err = table.Update(ctx, fencedb.Static("x", 2, "me"), key, fencedb.Set{"v": "x"})
	require.ErrorContains(t, err, "needs the grant's token")

	require.True(t, query[bool](b, `SELECT fence.unprotect('app."Odd ""table"')`))
	require.False(t, query[bool](b, `SELECT fence.unprotect('app."Odd ""table"')`))
	_, err = b.gate.Table(ctx, `app."Odd ""table"`)
	require.Error(t, err)
}

func TestWritesThatCannotBe(t *testing.T) {
	ctx := context.Background()
	b := newBed(t)
	table := b.table()
	lease := b.acquire(b.client(leasedb.Config{}), "x")
	for _, c := range []struct {
		key     fencedb.Key
		set     fencedb.Set
		options []fencedb.WriteOption
		want    string
	}{
		{fencedb.Key{"id": 1}, fencedb.Set{}, nil, "nothing to set"},
		{fencedb.Key{"id": 1}, fencedb.Set{"w": 1}, nil, `no column "w"`},
		{fencedb.Key{"id": 1}, fencedb.Set{"last_fence": 99}, nil, "which the gate alone writes"},
		{fencedb.Key{"id": 1}, fencedb.Set{"id": 2}, nil, "names the row"},
		{fencedb.Key{}, fencedb.Set{"v": "x"}, nil, "not a key of the table"},
		{fencedb.Key{"v": "first"}, fencedb.Set{"v": "x"}, nil, "want the columns of one of [[id]]"},
		{fencedb.Key{"id": 1, "v": "first"}, fencedb.Set{"v": "x"}, nil, "not a key of the table"},
		{fencedb.Key{"id": nil}, fencedb.Set{"v": "x"}, nil, "NULL, which names no row"},
		{fencedb.Key{"id": 1}, fencedb.Set{"v": "x"}, []fencedb.WriteOption{fencedb.WithRule("twice")}, `rule "twice"`},
		{fencedb.Key{"id": 1}, fencedb.Set{"v": "x"}, []fencedb.WriteOption{fencedb.WithStrength("strong")}, `strength "strong"`},
		{fencedb.Key{"id": "one"}, fencedb.Set{"v": "x"}, nil, "id"},
	} {
		outcome, err := table.Update(ctx, lease, c.key, c.set, c.options...)
		require.ErrorContains(t, err, c.want)
		require.Equal(t, fencedb.Failed, outcome)
	}
	require.Equal(t, 3, query[int](b, `SELECT count(*) FROM app.orders WHERE v = 'first' AND last_fence = 0`))
}

// A gate where no leases are: fences come from elsewhere, and all but Live works.
func TestGateInADatabaseWithoutLeases(t *testing.T) {
	ctx := context.Background()
	cfg := pgtest.NewEmpty(t)
	pgtest.Exec(t, cfg, `CREATE TABLE orders (id int PRIMARY KEY, v text, last_fence bigint NOT NULL DEFAULT 0); INSERT INTO orders VALUES (1, 'first')`)
	gate := fencedb.New(pgtest.Pool(t, cfg), fencedb.Config{})
	t.Cleanup(gate.Close)
	table, err := gate.Table(ctx, "orders")
	require.NoError(t, err)
	_, err = table.Update(ctx, fencedb.Static("etcd", 7, "B"), order1, fencedb.Set{"v": "B"})
	require.NoError(t, err)
	_, err = table.Update(ctx, fencedb.Static("etcd", 6, "A"), order1, fencedb.Set{"v": "A"})
	require.ErrorIs(t, err, fencedb.ErrStale)
	pgtest.Exec(t, cfg, `CREATE TABLE bare (id int PRIMARY KEY)`)
	_, err = gate.Table(ctx, "bare")
	require.ErrorContains(t, err, "fencecheck migrate up")
	require.ErrorContains(t, err, `ALTER TABLE "public"."bare" ADD COLUMN last_fence bigint NOT NULL DEFAULT 0`)
	_, err = table.Update(ctx, fencedb.Static("etcd", 8, "C"), order1, fencedb.Set{"v": "C"}, fencedb.WithStrength(fencedb.Live))
	require.ErrorIs(t, err, fencedb.ErrSchema)
}

// The role that an application needs can do its work, is audited, and can do no more. (C31, as far as it goes here)
func TestLeastPrivilegedRole(t *testing.T) {
	ctx := context.Background()
	b := newBed(t)
	role := "wg_" + b.cfg.Database // roles are the whole server's
	b.exec(strings.ReplaceAll(readmeGrants(t), "app_role", role) + `; GRANT USAGE ON SCHEMA app TO ` + role + `; GRANT SELECT, UPDATE ON app.orders TO ` + role)
	t.Cleanup(func() { b.exec(`DROP OWNED BY ` + role + `; DROP ROLE ` + role) })
	pool := pgtest.Pool(t, b.cfg, func(c *pgxpool.Config) {
		c.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
			_, err := conn.Exec(ctx, `SET SESSION AUTHORIZATION `+role)
			return err
		}
	})
	client, err := leasedb.New(ctx, pool, leasedb.Config{TTL: time.Minute, Holder: "A"})
	require.NoError(t, err)
	defer func() { require.NoError(t, client.Close(ctx)) }()
	gate := fencedb.New(pool, fencedb.Config{})
	defer gate.Close()
	table, err := gate.Table(ctx, "app.orders")
	require.NoError(t, err)

	lease := b.acquire(client, "x")
	require.NoError(t, lease.Renew(ctx))
	_, err = table.Update(ctx, lease, order1, fencedb.Set{"v": "A"}, fencedb.WithStrength(fencedb.Live))
	require.NoError(t, err)
	b.exec(`UPDATE app.orders SET last_fence = 40 WHERE id = 2`)
	_, err = table.Update(ctx, lease, fencedb.Key{"id": 2}, fencedb.Set{"v": "A"})
	var e *fencedb.WriteError
	require.ErrorAs(t, err, &e)
	require.NoError(t, e.AuditErr)
	require.Equal(t, role, query[string](b, `SELECT db_user::text FROM fence.rejection`))
	require.Equal(t, role, query[string](b, `SELECT db_user::text FROM fence.term`))

	for _, forbidden := range []string{
		`SELECT token FROM fence.lease`, `UPDATE fence.lease SET fence = 99`, `SELECT nextval('fence.fence_seq')`,
		`SELECT setval('fence.fence_seq', 1)`, `DELETE FROM fence.rejection`, `UPDATE fence.rejection SET count = 1`,
		`INSERT INTO fence.term (fence, name, holder, ttl, granted_at) VALUES (99, 'x', 'h', '1s', now())`,
		`INSERT INTO fence.protected_table (relation) VALUES ('app.orders')`, `SELECT fence.protect('app.orders')`,
	} {
		_, err := pool.Exec(ctx, forbidden)
		require.ErrorContains(t, err, "42501", forbidden)
	}
}
