package integration

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/writegate/writegate/fencedb"
	"github.com/writegate/writegate/leasedb"
)

// Plans that were made while next to nothing was in the tables, and are kept by a session, do not read all of them once they are
// full, although nobody has analyzed them.
func TestKeptPlansKeepToTheIndexes(t *testing.T) {
	ctx := context.Background()
	b := newBed(t)
	b.exec(`VACUUM ANALYZE`)
	lease := b.acquire(b.client(leasedb.Config{TTL: time.Hour, ManualRenewal: true}), "x")
	session := b.session()
	_, err := session.Exec(ctx, `PREPARE cycle (text, uuid) AS SELECT granted, fence.release($1, $2) FROM fence.acquire($1, 'A', '1 hour', $2)`)
	require.NoError(t, err)
	token := "00000000-0000-4000-8000-000000000000"
	everything := func(tx pgx.Tx) {
		t.Helper()
		outcome, err := b.table().In(tx).Update(ctx, lease, order1, fencedb.Set{"v": "A"}, fencedb.WithRule(fencedb.Term), fencedb.WithStrength(fencedb.Live))
		require.NoError(t, err)
		require.Equal(t, fencedb.Applied, outcome)
		token = query[string](b, `SELECT gen_random_uuid()::text`)
		_, err = tx.Exec(ctx, `EXECUTE cycle('y', '`+token+`')`)
		require.NoError(t, err)
		var renewed string
		require.NoError(t, tx.QueryRow(ctx, `SELECT outcome FROM fence.renew(ARRAY['x'], ARRAY[$1]::text[]::uuid[])`, lease.Token()).Scan(&renewed))
		require.Equal(t, "renewed", renewed)
		var state string
		require.NoError(t, tx.QueryRow(ctx, `SELECT state FROM fence.pin('x', $1::text::uuid, $2)`, lease.Token(), lease.Fence()).Scan(&state))
		require.Equal(t, "held", state)
	}
	inTx := func(work func(pgx.Tx)) {
		t.Helper()
		require.NoError(t, pgx.BeginFunc(ctx, session, func(tx pgx.Tx) error { work(tx); return nil }))
	}
	for range 8 { // after five PostgreSQL keeps a plan, if it likes it
		inTx(everything)
	}
	const many = 20_000
	b.exec(`INSERT INTO fence.lease (name, fence, token, holder, ttl, granted_at, expires_at)
	        SELECT 'lease-' || i, 2 * i, gen_random_uuid(), 'B', '1 hour', now(), now() + interval '1 hour' FROM generate_series(1000, 21000) i;
	        INSERT INTO fence.term (fence, name, holder, ttl, granted_at) SELECT l.fence, l.name, l.holder, l.ttl, l.granted_at FROM fence.lease l WHERE l.fence >= 2000;
	        SELECT setval('fence.fence_seq', 50000)`)
	inTx(func(tx pgx.Tx) {
		everything(tx)
		var read int
		require.NoError(t, tx.QueryRow(ctx, `SELECT coalesce(sum(seq_tup_read), 0) FROM pg_stat_xact_user_tables WHERE schemaname = 'fence' AND relname IN ('lease', 'term')`).Scan(&read))
		require.Less(t, read, many, "rows of leases and terms that were read without an index")
	})
}
