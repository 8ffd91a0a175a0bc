// Package audit reads what writegate's tables have to tell: who holds which lease, and which writes were refused. The
// command line, the reports and the demo all show what it returns. It only ever reads, with SELECT rights alone.
package audit

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/writegate/writegate/internal/pgerr"
)

// Querier is a connection, a pool or a transaction.
type Querier interface {
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}

// Fences are strings in JSON: a bigint outgrows the numbers that many readers of JSON can hold.

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
	// Remaining is what a held lease has left, negative for how long ago an expired one ended, in seconds.
	Remaining float64 `json:"remaining_seconds"`
	Wanted    bool    `json:"wanted"` // somebody waits for it
}

// Rejection is one row of fence.rejection.
type Rejection struct {
	ID            int64     `json:"id,string"`
	Table         string    `json:"table"`
	Key           string    `json:"key"` // JSON
	Lease         string    `json:"lease"`
	Fence         int64     `json:"fence,string"`
	CurrentFence  *int64    `json:"current_fence,string"`
	Reason        string    `json:"reason"`
	Verdict       string    `json:"verdict"`
	Holder        string    `json:"holder"`
	CurrentHolder string    `json:"current_holder"`
	Count         int64     `json:"count,string"`
	FirstAt       time.Time `json:"first_at"`
	LastAt        time.Time `json:"last_at"`
	Application   string    `json:"application"`
	ClientAddr    *string   `json:"client_addr"` // null: over a Unix socket
	User          string    `json:"user"`
}

// Filter says which rejections to return. Zero fields do not filter.
type Filter struct {
	Since, Until time.Time // half-open [Since, Until), by when it was last refused
	Table, Lease string
	Limit        int // 0: no limit
}

// schemaOldest is the first version of the schema that has what is read here.
const schemaOldest = 2

// CheckSchema returns an error that says what to do where schema fence is missing or does not fit.
func CheckSchema(ctx context.Context, q Querier, database string) (version int, err error) {
	if err := q.QueryRow(ctx, `SELECT fence.schema_version()`).Scan(&version); err != nil {
		return 0, pgerr.ExplainSchema(err, database)
	}
	return version, pgerr.CheckSchema(version, schemaOldest)
}

const leasesSQL = `
SELECT l.name, s.state, l.holder, l.fence, l.granted_at, l.renewed_at, l.expires_at, l.renewals,
       CASE WHEN s.state = 'free' THEN 0 ELSE extract(epoch FROM l.expires_at - n.now)::float8 END, l.wanted_by IS NOT NULL
  FROM fence.lease l
 CROSS JOIN (SELECT clock_timestamp() AS now) n
 CROSS JOIN LATERAL (SELECT CASE WHEN l.released_at IS NOT NULL OR l.fence = 0 THEN 'free'
                                 WHEN l.expires_at > n.now THEN 'held' ELSE 'expired' END AS state) s
 WHERE l.fence > 0
 ORDER BY l.name`

// Leases returns all leases that were ever granted, by name.
func Leases(ctx context.Context, q Querier) ([]Lease, error) {
	rows, err := q.Query(ctx, leasesSQL)
	if err != nil {
		return nil, fmt.Errorf("reading fence.lease: %w", err)
	}
	leases, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (l Lease, err error) {
		err = row.Scan(&l.Name, &l.State, &l.Holder, &l.Fence, &l.GrantedAt, &l.RenewedAt, &l.ExpiresAt, &l.Renewals,
			&l.Remaining, &l.Wanted)
		utc(l.GrantedAt, l.RenewedAt, l.ExpiresAt)
		return l, err
	})
	if err != nil {
		return nil, fmt.Errorf("reading fence.lease: %w", err)
	}
	return leases, nil
}

const rejectionsSQL = `
SELECT id, table_name, row_key::text, lease_name, fence, current_fence, reason, verdict, holder, current_holder, count,
       first_at, last_at, application_name, host(client_addr), db_user::text
  FROM fence.rejection
 WHERE ($1::timestamptz IS NULL OR last_at >= $1) AND ($2::timestamptz IS NULL OR last_at < $2)
   AND ($3 = '' OR table_name = $3) AND ($4 = '' OR lease_name = $4)
 ORDER BY last_at DESC, id DESC
 LIMIT $5`

// Rejections returns refused writes, the latest first, and whether the limit cut some off.
func Rejections(ctx context.Context, q Querier, f Filter) (found []Rejection, cut bool, err error) {
	var limit *int
	if f.Limit > 0 {
		oneMore := f.Limit + 1
		limit = &oneMore
	}
	rows, err := q.Query(ctx, rejectionsSQL, orNil(f.Since), orNil(f.Until), f.Table, f.Lease, limit)
	if err != nil {
		return nil, false, fmt.Errorf("reading fence.rejection: %w", err)
	}
	found, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (r Rejection, err error) {
		err = row.Scan(&r.ID, &r.Table, &r.Key, &r.Lease, &r.Fence, &r.CurrentFence, &r.Reason, &r.Verdict, &r.Holder,
			&r.CurrentHolder, &r.Count, &r.FirstAt, &r.LastAt, &r.Application, &r.ClientAddr, &r.User)
		utc(&r.FirstAt, &r.LastAt)
		return r, err
	})
	if err != nil {
		return nil, false, fmt.Errorf("reading fence.rejection: %w", err)
	}
	if f.Limit > 0 && len(found) > f.Limit {
		return found[:f.Limit], true, nil
	}
	return found, false, nil
}

// CheckTable returns an error unless there is a table of that name, written as schema.table without quotes.
func CheckTable(ctx context.Context, q Querier, name string) error {
	var exists bool
	err := q.QueryRow(ctx, `SELECT EXISTS (SELECT 1 FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
		WHERE n.nspname || '.' || c.relname = $1)`, name).Scan(&exists)
	if err != nil {
		return err
	}
	if !exists {
		return fmt.Errorf("there is no table %s here, and no rejection of one: want schema.table", name)
	}
	return nil
}

func orNil(t time.Time) *time.Time {
	if t.IsZero() {
		return nil
	}
	return &t
}

// utc shows times the same whatever zone the reader's machine is in.
func utc(times ...*time.Time) {
	for _, t := range times {
		if t != nil {
			*t = t.UTC()
		}
	}
}

// Printable returns s as one line of text that a terminal shows and does not obey: control characters, and the marks
// that turn the direction of writing, are escaped.
func Printable(s string) string {
	var b strings.Builder
	for _, r := range s {
		switch {
		case r < 0x20, r >= 0x7f && r < 0xa0, r >= 0x200b && r <= 0x200f, r >= 0x2028 && r <= 0x202e, r >= 0x2060 && r <= 0x2069, r == 0xfeff:
			fmt.Fprintf(&b, "\\u%04x", r)
		default:
			b.WriteRune(r)
		}
	}
	return b.String()
}
