package integration

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/writegate/writegate/fencedb"
	"github.com/writegate/writegate/internal/migrate"
	"github.com/writegate/writegate/internal/pgtest"
	"github.com/writegate/writegate/leasedb"
	"github.com/writegate/writegate/migrations"
)

// Program and schema may differ by one version, either way, so that either can be upgraded first; beyond that both say what
// to do. What the schema of a version to come will hold cannot be known: it is this one under the next number.
func TestProgramAndSchemaMayDifferByOne(t *testing.T) {
	for difference, want := range map[int]string{-1: "", 0: "", 1: "", 2: "update the program"} {
		t.Run(fmt.Sprint(difference), func(t *testing.T) {
			ctx := context.Background()
			b := newBed(t)
			if difference < 0 {
				b.exec(`UPDATE app.orders SET last_fence = 0`)
				_, err := migrate.Down(ctx, b.cfg, migrations.Version-1, false)
				require.NoError(t, err)
			}
			if difference > 0 {
				b.exec(fmt.Sprintf(`CREATE OR REPLACE FUNCTION fence.schema_version() RETURNS integer LANGUAGE sql IMMUTABLE AS $$ SELECT %d $$`, migrations.Version+difference))
			}
			client, err := leasedb.New(ctx, b.pool, leasedb.Config{TTL: time.Hour})
			table, gateErr := b.gate.Table(ctx, "app.orders")
			if want != "" {
				require.ErrorContains(t, err, want)
				require.ErrorContains(t, gateErr, want)
				return
			}
			require.NoError(t, err)
			require.NoError(t, gateErr)
			defer func() { require.NoError(t, client.Close(ctx)) }()
			lease := b.acquire(client, "x")
			for i, strength := range []fencedb.Strength{fencedb.Fenced, fencedb.Live} {
				_, err = table.Update(ctx, lease, fencedb.Key{"id": 1 + i}, fencedb.Set{"v": "A"}, fencedb.WithStrength(strength))
				require.NoError(t, err)
			}
			_, err = table.Delete(ctx, lease, fencedb.Key{"id": 3})
			require.NoError(t, err)
			require.NoError(t, b.gate.InTx(ctx, lease, func(context.Context, pgx.Tx) error { return nil }))
			_, err = table.Update(ctx, fencedb.Static("x", 1, "Z"), order1, fencedb.Set{"v": "Z"})
			var e *fencedb.WriteError
			require.ErrorAs(t, err, &e)
			require.NoError(t, e.AuditErr)
		})
	}
}

// Up, down one, up again, with data in every table: nothing is lost that the older schema has room for.
func TestUpgradeInPlace(t *testing.T) {
	ctx := context.Background()
	cfg := pgtest.NewEmpty(t)
	_, err := migrate.Up(ctx, cfg)
	require.NoError(t, err)
	_, err = migrate.Down(ctx, cfg, 2, false) // as a deployment of long ago has it
	require.NoError(t, err)
	pgtest.Exec(t, cfg, `CREATE SCHEMA app; CREATE TABLE app.orders (id int PRIMARY KEY, v text NOT NULL); INSERT INTO app.orders VALUES (1, 'first');
		SELECT fence.protect('app.orders', 'term', 'live'); SELECT fence.acquire('x', 'A', '1 hour', gen_random_uuid());
		SELECT fence.record_rejection('app.orders', '{"id": 1}', 'x', NULL, 1, 'stale', 2)`)
	_, err = migrate.Up(ctx, cfg)
	require.NoError(t, err)
	b := bedOn(t, cfg)
	table := b.table()
	require.Equal(t, fencedb.Term, table.Rule())
	require.Equal(t, fencedb.Live, table.Strength())
	require.Equal(t, 1, query[int](b, `SELECT count(*) FROM fence.rejection`))
	require.Equal(t, "off refuse", query[string](b, `SELECT guard || ' ' || unfenced FROM fence.protected_table`))
	b.age("x", 2*time.Hour)
	lease := b.acquire(b.client(leasedb.Config{TTL: time.Hour}), "x")
	require.EqualValues(t, 4, lease.Fence(), "fences go on where they were")
	_, err = table.Update(ctx, lease, order1, fencedb.Set{"v": "A"})
	require.NoError(t, err)
}
