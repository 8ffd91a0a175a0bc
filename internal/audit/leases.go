package audit

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
)

// Lease is one row of fence.lease, and what it comes to by the database's clock.
type Lease struct {
	Name      string     `json:"name"`
	State     string     `json:"state"` // held; expired: not released, and nobody has followed; free: released
	Holder    string     `json:"holder"`
	Fence     int64      `json:"fence,string"`
	GrantedAt *time.Time `json:"granted_at"`
	RenewedAt *time.Time `json:"renewed_at"`
	ExpiresAt *time.Time `json:"expires_at"`
	Renewals  int64      `json:"renewals,string"`
	TTL       float64    `json:"ttl_seconds"`
	// Remaining is what a held lease has left, negative for how long ago an expired one ended, in seconds.
	Remaining float64 `json:"remaining_seconds"`
	// RenewalAge is how long ago a held or expired lease was granted or last renewed, in seconds. Holders renew every third of
	// the TTL.
	RenewalAge float64 `json:"renewal_age_seconds"`
	Overdue    bool    `json:"overdue"` // expired: whoever held it crashed, is stopped, or has lost touch, and nobody wanted it since
	Late       bool    `json:"late"`    // held, and two thirds of the TTL have gone by without a renewal
	Wanted     bool    `json:"wanted"`  // somebody waits for it
}

// LeaseFilter says which leases to return. Zero fields do not filter.
type LeaseFilter struct {
	Name, Holder string
	State        string // held, expired or free
	Overdue      bool   // only those that are overdue or late
	Limit        int    // 0: no limit
}

// leaseStateSQL is what a row l of fence.lease comes to at the time n.now.
const leaseStateSQL = `CASE WHEN l.released_at IS NOT NULL OR l.fence = 0 THEN 'free' WHEN l.expires_at > n.now THEN 'held' ELSE 'expired' END`

const leasesSQL = `
SELECT l.name, s.state, l.holder, l.fence, l.granted_at, l.renewed_at, l.expires_at, l.renewals, extract(epoch FROM l.ttl)::float8,
       CASE WHEN s.state = 'free' THEN 0 ELSE extract(epoch FROM l.expires_at - n.now)::float8 END,
       CASE WHEN s.state = 'free' THEN 0 ELSE coalesce(extract(epoch FROM n.now - l.renewed_at)::float8, 0) END,
       s.state = 'expired', s.late, l.wanted_by IS NOT NULL
  FROM fence.lease l
 CROSS JOIN (SELECT clock_timestamp() AS now) n
 CROSS JOIN LATERAL (SELECT ` + leaseStateSQL + ` AS state, l.released_at IS NULL AND l.expires_at > n.now
                            AND extract(epoch FROM n.now - l.renewed_at) > extract(epoch FROM l.ttl) * 2 / 3 AS late) s
 WHERE l.fence > 0 AND ($1 = '' OR l.name = $1) AND ($2 = '' OR l.holder = $2) AND ($3 = '' OR s.state = $3)
   AND (NOT $4 OR s.state = 'expired' OR s.late)
 ORDER BY l.name
 LIMIT $5`

// Leases returns leases that were ever granted, by name, and whether the limit cut some off.
func Leases(ctx context.Context, q Querier, f LeaseFilter) (leases []Lease, cut bool, err error) {
	rows, err := q.Query(ctx, leasesSQL, f.Name, f.Holder, f.State, f.Overdue, oneMore(f.Limit))
	if err != nil {
		return nil, false, fmt.Errorf("reading fence.lease: %w", err)
	}
	leases, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (l Lease, err error) {
		err = row.Scan(&l.Name, &l.State, &l.Holder, &l.Fence, &l.GrantedAt, &l.RenewedAt, &l.ExpiresAt, &l.Renewals, &l.TTL,
			&l.Remaining, &l.RenewalAge, &l.Overdue, &l.Late, &l.Wanted)
		utc(l.GrantedAt, l.RenewedAt, l.ExpiresAt)
		return l, err
	})
	if err != nil {
		return nil, false, fmt.Errorf("reading fence.lease: %w", err)
	}
	leases, cut = cutTo(leases, f.Limit)
	return leases, cut, nil
}

const leaseCountsSQL = `
SELECT count(*) FILTER (WHERE s.state = 'held'), count(*) FILTER (WHERE s.state = 'expired'), count(*) FILTER (WHERE s.state = 'free')
  FROM fence.lease l CROSS JOIN (SELECT clock_timestamp() AS now) n CROSS JOIN LATERAL (SELECT ` + leaseStateSQL + ` AS state) s
 WHERE l.fence > 0`

// CountLeases returns how many leases there are in each state.
func CountLeases(ctx context.Context, q Querier) (c LeaseCounts, err error) {
	if err := q.QueryRow(ctx, leaseCountsSQL).Scan(&c.Held, &c.Overdue, &c.Free); err != nil {
		return c, fmt.Errorf("reading fence.lease: %w", err)
	}
	return c, nil
}
