package audit

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
)

// Term is one grant of a lease, from fence.term.
type Term struct {
	Lease     string     `json:"lease"`
	Fence     int64      `json:"fence,string"`
	Holder    string     `json:"holder"`
	GrantedAt time.Time  `json:"granted_at"`
	EndedAt   *time.Time `json:"ended_at"`   // null while it lasts; of one that expired, when it did
	ExpiresAt *time.Time `json:"expires_at"` // of one that nobody has ended or followed: when its lease expires, or did
	// End is why it ended: released, expired; or held, if it has not; overdue, if it has expired and nobody has followed; or
	// gone, if its lease was deleted.
	End         string  `json:"end"`
	Renewals    int64   `json:"renewals,string"`
	TTL         float64 `json:"ttl_seconds"`
	Application string  `json:"application"`
	ClientAddr  *string `json:"client_addr"` // null: over a Unix socket
	User        string  `json:"user"`
}

// TermFilter says which terms to return. Zero fields do not filter.
type TermFilter struct {
	Lease, Holder string
	Since, Until  time.Time // those that were under way at some time of [Since, Until)
	Fences        []int64   // only these, if any
	Limit         int       // 0: no limit
}

const termsSQL = `
SELECT t.name, t.fence, t.holder, t.granted_at, t.ended_at, CASE WHEN t.ended_at IS NULL THEN l.expires_at END,
       coalesce(t.end_reason, CASE WHEN l.fence IS NULL THEN 'gone' WHEN l.expires_at > n.now THEN 'held' ELSE 'overdue' END),
       coalesce(l.renewals, t.renewals), extract(epoch FROM t.ttl)::float8, t.application_name, host(t.client_addr), t.db_user::text
  FROM fence.term t
  LEFT JOIN fence.lease l ON l.name = t.name AND l.fence = t.fence
 CROSS JOIN (SELECT clock_timestamp() AS now) n
 WHERE ($1 = '' OR t.name = $1) AND ($2 = '' OR t.holder = $2)
   AND ($3::timestamptz IS NULL OR coalesce(t.ended_at, 'infinity') >= $3) AND ($4::timestamptz IS NULL OR t.granted_at < $4)
   AND ($5::bigint[] IS NULL OR t.fence = ANY ($5))
 ORDER BY t.fence DESC
 LIMIT $6`

// Terms returns terms, the newest first, and whether the limit cut some off.
func Terms(ctx context.Context, q Querier, f TermFilter) (terms []Term, cut bool, err error) {
	rows, err := q.Query(ctx, termsSQL, f.Lease, f.Holder, orNil(f.Since), orNil(f.Until), f.Fences, oneMore(f.Limit))
	if err != nil {
		return nil, false, fmt.Errorf("reading fence.term: %w", err)
	}
	terms, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (t Term, err error) {
		err = row.Scan(&t.Lease, &t.Fence, &t.Holder, &t.GrantedAt, &t.EndedAt, &t.ExpiresAt, &t.End, &t.Renewals, &t.TTL,
			&t.Application, &t.ClientAddr, &t.User)
		utc(&t.GrantedAt, t.EndedAt, t.ExpiresAt)
		return t, err
	})
	if err != nil {
		return nil, false, fmt.Errorf("reading fence.term: %w", err)
	}
	terms, cut = cutTo(terms, f.Limit)
	return terms, cut, nil
}

const termsAroundSQL = `
SELECT y.fence, (SELECT count(*) FROM fence.term t WHERE t.name = $1 AND t.fence BETWEEN y.lowest AND y.highest)
  FROM (SELECT x.fence, min(x.fence) OVER () AS lowest, max(x.fence) OVER () AS highest
  FROM ((SELECT t.fence FROM fence.term t WHERE t.name = $1 AND t.fence < $2 ORDER BY t.fence DESC LIMIT 1)
        UNION (SELECT t.fence FROM fence.term t WHERE t.name = $1 AND t.fence >= $2 ORDER BY t.fence LIMIT 4)
        UNION (SELECT t.fence FROM fence.term t WHERE t.name = $1 AND t.fence <= $3 ORDER BY t.fence DESC LIMIT 2)
        UNION (SELECT t.fence FROM fence.term t WHERE t.name = $1 AND t.fence > $3 ORDER BY t.fence LIMIT 1)) x) y`

// TermsAround returns the terms of a lease that explain a refusal, the newest first: the refused one's own, the one before it,
// some after it, and those around the fence that was found in the row. leftOut is how many lie between these.
func TermsAround(ctx context.Context, q Querier, r Rejection) (terms []Term, leftOut int64, err error) {
	current := r.Fence
	if r.CurrentFence != nil {
		current = max(current, *r.CurrentFence)
	}
	rows, err := q.Query(ctx, termsAroundSQL, r.Lease, r.Fence, current)
	if err != nil {
		return nil, 0, fmt.Errorf("reading fence.term: %w", err)
	}
	f := TermFilter{Lease: r.Lease}
	var fence, all int64
	if _, err := pgx.ForEachRow(rows, []any{&fence, &all}, func() error { f.Fences = append(f.Fences, fence); return nil }); err != nil {
		return nil, 0, fmt.Errorf("reading fence.term: %w", err)
	}
	if len(f.Fences) == 0 {
		return nil, 0, nil
	}
	terms, _, err = Terms(ctx, q, f)
	return terms, all - int64(len(terms)), err
}
