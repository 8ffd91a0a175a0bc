package integration

import (
	"context"
	"fmt"
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

// Leases and rows that are spread over three primaries are protected on each as on one; what moves from one to another takes a
// jump along.
func TestShards(t *testing.T) {
	ctx := context.Background()
	var configs []*pgx.ConnConfig
	var pools []*pgxpool.Pool
	for range 3 {
		cfg := pgtest.Own(t).Config("")
		_, err := migrate.Up(ctx, cfg)
		require.NoError(t, err)
		pgtest.Exec(t, cfg, `CREATE SCHEMA app; CREATE TABLE app.jobs (id text PRIMARY KEY, v text NOT NULL DEFAULT ''); SELECT fence.protect('app.jobs', strength => 'live')`)
		configs, pools = append(configs, cfg), append(pools, pgtest.Pool(t, cfg))
	}
	open := func() shards {
		s, err := openShards(ctx, pools, leasedb.Config{TTL: time.Minute})
		require.NoError(t, err)
		t.Cleanup(func() {
			for _, one := range s {
				_ = one.leases.Close(ctx)
			}
		})
		return s
	}
	one, other := open(), open()

	const names = 60
	late := map[string]*leasedb.Lease{}
	used := map[*leasedb.Client]int{}
	for i := range names {
		name := fmt.Sprintf("job-%d", i)
		here := one.of(name)
		used[here.leases]++
		lease, err := here.leases.TryAcquire(ctx, name)
		require.NoError(t, err)
		_, err = here.jobs.Insert(ctx, lease, fencedb.Set{"id": name, "v": "one"})
		require.NoError(t, err)
		_, err = other.of(name).leases.TryAcquire(ctx, name)
		require.ErrorIs(t, err, leasedb.ErrHeld, "every program finds the same shard")
		late[name] = lease
	}
	require.Len(t, used, 3, "all of them are used")
	for _, cfg := range configs {
		pgtest.Exec(t, cfg, `UPDATE fence.lease SET expires_at = clock_timestamp() - interval '1 s'`)
	}
	for name, zombie := range late {
		there := other.of(name)
		lease, err := there.leases.TryAcquire(ctx, name)
		require.NoError(t, err)
		_, err = there.jobs.Update(ctx, lease, fencedb.Key{"id": name}, fencedb.Set{"v": "other"})
		require.NoError(t, err)
		_, err = one.of(name).jobs.Update(ctx, zombie, fencedb.Key{"id": name}, fencedb.Set{"v": "late"}, fencedb.WithStrength(fencedb.Fenced))
		require.ErrorIs(t, err, fencedb.ErrStale)
	}
	total := 0
	for _, cfg := range configs {
		var refused int
		require.NoError(t, pgtest.Conn(t, cfg).QueryRow(ctx, "SELECT count(*) FROM fence.rejection WHERE verdict = 'stale'").Scan(&refused))
		total += refused
	}
	require.Equal(t, names, total, "each shard has the refusals of its own rows")

	// A row that moves brings a fence along that is above all that its new shard has granted: refused are the lawful, until a jump.
	pgtest.Exec(t, configs[0], `SELECT setval('fence.fence_seq', 1000000)`)
	from, to := one[0], one[1]
	lease, err := from.leases.Acquire(ctx, "moving")
	require.NoError(t, err)
	_, err = from.jobs.Insert(ctx, lease, fencedb.Set{"id": "moving"})
	require.NoError(t, err)
	require.NoError(t, lease.Release(ctx))
	var fence int64
	require.NoError(t, pgtest.Conn(t, configs[0]).QueryRow(ctx, "DELETE FROM app.jobs WHERE id = 'moving' RETURNING last_fence").Scan(&fence))
	pgtest.Exec(t, configs[1], fmt.Sprintf("INSERT INTO app.jobs (id, last_fence) VALUES ('moving', %d)", fence))
	lease, err = to.leases.Acquire(ctx, "moving")
	require.NoError(t, err)
	_, err = to.jobs.Update(ctx, lease, fencedb.Key{"id": "moving"}, fencedb.Set{"v": "moved"})
	require.ErrorIs(t, err, fencedb.ErrStale)
	require.NoError(t, lease.Release(ctx))
	pgtest.Exec(t, configs[1], `SELECT fence.jump('rows have come from another shard')`)
	lease, err = to.leases.Acquire(ctx, "moving")
	require.NoError(t, err)
	_, err = to.jobs.Update(ctx, lease, fencedb.Key{"id": "moving"}, fencedb.Set{"v": "moved"})
	require.NoError(t, err)
}
