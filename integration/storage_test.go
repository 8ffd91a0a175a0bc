package integration

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// A hundred thousand renewals of fifty leases leave a small table, because each is a HOT update whose predecessor is
// pruned away; while a long transaction keeps old versions alive it grows, and shrinks to nothing new once that is over.
// (C40 b)
func TestRenewalsStayHot(t *testing.T) {
	const leases = 50
	ctx := context.Background()
	for _, held := range []bool{false, true} {
		t.Run(fmt.Sprintf("while a snapshot is held=%v", held), func(t *testing.T) {
			b := newBed(t)
			beats := 2000
			if held {
				beats = 300 // each has to pass all the versions that those before it have left
			}
			require.Equal(t, 1, query[int](b, `SELECT count(*) FROM pg_index WHERE indrelid = 'fence.lease'::regclass`), "the primary key alone")
			b.exec(fmt.Sprintf(`SELECT count(fence.acquire('lease ' || i, 'A', '1 hour', gen_random_uuid())) FROM generate_series(1, %d) i`, leases))
			if held {
				snapshot := b.session()
				_, err := snapshot.Exec(ctx, `BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM fence.lease`)
				require.NoError(t, err)
			}
			session := b.session()
			var names, tokens []string
			require.NoError(t, session.QueryRow(ctx, `SELECT array_agg(name), array_agg(token::text) FROM fence.lease`).Scan(&names, &tokens))
			began := time.Now()
			var slowest time.Duration
			for range beats {
				beat := time.Now()
				_, err := session.Exec(ctx, `SELECT count(*) FROM fence.renew($1::text[], $2::text[]::uuid[]) WHERE outcome = 'renewed'`, names, tokens)
				require.NoError(t, err)
				slowest = max(slowest, time.Since(beat))
			}
			took := time.Since(began)
			require.NoError(t, session.Close(ctx)) // which reports its statistics
			require.EqualValues(t, beats, query[int64](b, `SELECT min(renewals) FROM fence.lease`))

			var updates, hot, size int64
			require.Eventually(t, func() bool {
				err := b.pool.QueryRow(ctx, `SELECT n_tup_upd, n_tup_hot_upd, pg_table_size(relid) FROM pg_stat_user_tables WHERE relid = 'fence.lease'::regclass`).
					Scan(&updates, &hot, &size)
				require.NoError(t, err)
				return updates >= int64(leases*beats)
			}, 30*time.Second, 10*time.Millisecond)
			t.Logf("%d renewals: %.1f%% HOT, table %d KiB, %.2f ms a beat of %d, the slowest %.1f ms", updates, 100*float64(hot)/float64(updates),
				size>>10, float64(took.Microseconds())/1000/float64(beats), leases, float64(slowest.Microseconds())/1000)
			if !held {
				require.GreaterOrEqual(t, float64(hot), 0.99*float64(updates))
				require.Less(t, size, int64(1<<20))
			}
		})
	}
}
