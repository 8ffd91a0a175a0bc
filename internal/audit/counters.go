package audit

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
)

// Counters are the numbers that are worth watching over time. Those of refusals never fall: what has been pruned stays counted.
type Counters struct {
	Schema        int
	Leases        LeaseCounts
	Late          int64
	OldestOverdue float64 // for how long the lease that has been overdue the longest has been, in seconds
	Refusals      []RefusalCounter
	Losses        int64
	GuardRefused  int64
	GuardObserved int64
	LastFence     int64
}

// RefusalCounter counts the refusals of one table for one reason.
type RefusalCounter struct {
	Table, Reason string
	Count, Lawful int64
	LastAt        time.Time
}

// FenceCeiling is the highest fence that there can be.
const FenceCeiling int64 = maxFence

var countersReads = []string{"lease", "rejection", "audit_loss", "guard_refused", "guard_observed", "fence_seq"}

const leaseTroubleSQL = `
SELECT count(*) FILTER (WHERE l.expires_at > n.now AND extract(epoch FROM n.now - l.renewed_at) > extract(epoch FROM l.ttl) * 2 / 3),
       coalesce(max(extract(epoch FROM n.now - l.expires_at)) FILTER (WHERE l.expires_at <= n.now), 0)::float8
  FROM fence.lease l CROSS JOIN (SELECT clock_timestamp() AS now) n
 WHERE l.fence > 0 AND l.released_at IS NULL`

const refusalCountersSQL = `
SELECT r.table_name, r.reason, sum(r.count)::bigint, coalesce(sum(r.count) FILTER (WHERE r.lawful), 0)::bigint, max(r.last_at)
  FROM (SELECT x.table_name, x.reason, x.verdict = 'lawful' AS lawful, x.count, x.last_at FROM fence.rejection x%s) r
 GROUP BY 1, 2 ORDER BY 1, 2`

// Count reads the counters.
func Count(ctx context.Context, q Querier, database string) (c Counters, err error) {
	if c.Schema, err = CheckSchema(ctx, q, database, countersReads...); err != nil {
		return c, err
	}
	if c.Leases, err = CountLeases(ctx, q); err != nil {
		return c, err
	}
	if err := q.QueryRow(ctx, leaseTroubleSQL).Scan(&c.Late, &c.OldestOverdue); err != nil {
		return c, fmt.Errorf("reading fence.lease: %w", err)
	}
	pruned := ""
	if c.Schema >= prunedOldest {
		if err := mayRead(ctx, q, "pruned"); err != nil {
			return c, err
		}
		pruned = ` UNION ALL SELECT p.table_name, p.reason, p.lawful, p.count, p.last_at FROM fence.pruned p WHERE p.what = 'rejection'`
	}
	rows, err := q.Query(ctx, fmt.Sprintf(refusalCountersSQL, pruned))
	if err != nil {
		return c, fmt.Errorf("reading fence.rejection: %w", err)
	}
	c.Refusals, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (r RefusalCounter, err error) {
		return r, row.Scan(&r.Table, &r.Reason, &r.Count, &r.Lawful, &r.LastAt)
	})
	if err != nil {
		return c, fmt.Errorf("reading fence.rejection: %w", err)
	}
	if c.Losses, c.GuardRefused, err = beyondRecord(ctx, q, c.Schema); err != nil {
		return c, err
	}
	if c.Schema >= prunedOldest {
		var lost int64
		if err := q.QueryRow(ctx, `SELECT coalesce(sum(p.count), 0)::bigint FROM fence.pruned p WHERE p.what = 'audit_loss'`).Scan(&lost); err != nil {
			return c, fmt.Errorf("reading fence.pruned: %w", err)
		}
		c.Losses += lost
	}
	observed := `0`
	if c.Schema >= 4 {
		observed = `(SELECT CASE WHEN g.is_called THEN g.last_value ELSE 0 END FROM fence.guard_observed g)`
	}
	if err := q.QueryRow(ctx, `SELECT CASE WHEN s.is_called THEN s.last_value ELSE 0 END, `+observed+` FROM fence.fence_seq s`).Scan(&c.LastFence, &c.GuardObserved); err != nil {
		return c, fmt.Errorf("reading fence.fence_seq: %w", err)
	}
	return c, nil
}
