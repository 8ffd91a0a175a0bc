package integration

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/writegate/writegate/fencedb"
	"github.com/writegate/writegate/internal/audit"
	"github.com/writegate/writegate/internal/migrate"
	"github.com/writegate/writegate/internal/pgtest"
	"github.com/writegate/writegate/leasedb"
)

// In a database whose encoding is not UTF-8 a name is the same name for everybody: ours, psql's, and the gate's on a pool that says
// that it talks UTF-8.
func TestOneNameInAnyEncoding(t *testing.T) {
	ctx := context.Background()
	server := pgtest.Shared(t)
	name := pgtest.NewEmpty(t).Database + "_latin1"
	pgtest.Exec(t, server.Config("postgres"), `CREATE DATABASE `+name+` ENCODING LATIN1 LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE template0`)
	t.Cleanup(func() { pgtest.Exec(t, server.Config("postgres"), `DROP DATABASE `+name+` WITH (FORCE)`) })
	cfg := server.Config(name)
	_, err := migrate.Up(ctx, cfg)
	require.NoError(t, err)
	pgtest.Exec(t, cfg, ordersSQL)
	b := bedOn(t, cfg)
	client := b.client(leasedb.Config{Holder: "José", TTL: time.Hour})
	lease := b.acquire(client, "café")

	utf8 := cfg.Copy()
	utf8.RuntimeParams["client_encoding"] = "UTF8"
	conn, err := pgx.ConnectConfig(ctx, utf8)
	require.NoError(t, err)
	defer func() { _ = conn.Close(ctx) }()
	var granted bool
	var by string
	require.NoError(t, conn.QueryRow(ctx, `SELECT granted, held_by FROM fence.acquire('café', 'psql', '1 hour', gen_random_uuid())`).Scan(&granted, &by))
	require.False(t, granted, "it is the same lease")
	require.Equal(t, "José", by)
	leases, _, err := audit.Leases(ctx, conn, audit.LeaseFilter{Name: "café"})
	require.NoError(t, err)
	require.Len(t, leases, 1)
	require.Equal(t, "José", leases[0].Holder)

	gate := fencedb.New(pgtest.Pool(t, utf8), fencedb.Config{})
	defer gate.Close()
	table, err := gate.Table(ctx, "app.orders")
	require.NoError(t, err)
	_, err = table.Update(ctx, lease, order1, fencedb.Set{"v": "crème"}, fencedb.WithStrength(fencedb.Live))
	require.NoError(t, err)
	require.Equal(t, "6372e86d65", query[string](b, `SELECT encode(convert_to(v, 'LATIN1'), 'hex') FROM app.orders WHERE id = 1`))
}
