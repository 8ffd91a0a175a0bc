package integration

import (
	"context"
	"fmt"
	"hash/fnv"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/writegate/writegate/fencedb"
	"github.com/writegate/writegate/leasedb"
)

// shard is one primary of several, each of which has the leases of some names, and the rows that are written under them.
type shard struct {
	leases *leasedb.Client
	jobs   *fencedb.Table
}

type shards []shard

// of returns where a lease's name belongs: always the same shard, in every program, for as long as there are as many.
func (s shards) of(name string) shard {
	h := fnv.New64a()
	_, _ = h.Write([]byte(name))
	return s[h.Sum64()%uint64(len(s))]
}

func openShards(ctx context.Context, pools []*pgxpool.Pool, cfg leasedb.Config) (shards, error) {
	var all shards
	for i, pool := range pools {
		leases, err := leasedb.New(ctx, pool, cfg)
		if err != nil {
			return nil, fmt.Errorf("shard %d: %w", i, err)
		}
		jobs, err := fencedb.New(pool, fencedb.Config{}).Table(ctx, "app.jobs")
		if err != nil {
			return nil, fmt.Errorf("shard %d: %w", i, err)
		}
		all = append(all, shard{leases, jobs})
	}
	return all, nil
}
