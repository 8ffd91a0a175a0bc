package audit

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
)

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
	Now           *RowNow   `json:"now,omitempty"` // what the row holds now; null: not asked for
}

// RowNow is what a row that a write was refused for holds now.
type RowNow struct {
	// State is present; missing: there is none with this key, or it is hidden from this role; or unknown, and Note says why.
	State  string          `json:"state"`
	Fence  *int64          `json:"fence,string"`
	Holder string          `json:"holder"` // whose fence that is, if its term is known here
	Lease  string          `json:"lease"`  // likewise
	Row    json.RawMessage `json:"row,omitempty"`
	Note   string          `json:"note,omitempty"`
}

// Filter says which rejections to return. Zero fields do not filter.
type Filter struct {
	Since, Until        time.Time // half-open [Since, Until), by when it was last refused
	Table, Lease        string
	Key                 string // JSON that the key contains
	Holder, Application string // of the refused
	Reason, Verdict     string
	AfterID             int64
	Sort                string // last (the default), first or count: the latest, or the most, first
	Limit               int    // 0: no limit
}

// Reasons and Verdicts are what a rejection can have.
var (
	Reasons  = []string{"stale", "expired", "superseded", "released", "wrong_fence", "no_lease"}
	Verdicts = []string{"stale", "expired", "lawful", "unknown"}
)

const rejectionColumns = `id, table_name, row_key::text, lease_name, fence, current_fence, reason, verdict, holder, current_holder, count,
       first_at, last_at, application_name, host(client_addr), db_user::text`

const rejectionsWhere = `
 WHERE ($1::timestamptz IS NULL OR last_at >= $1) AND ($2::timestamptz IS NULL OR last_at < $2)
   AND ($3 = '' OR table_name = $3) AND ($4 = '' OR lease_name = $4) AND ($5 = '' OR row_key @> $5::jsonb)
   AND ($6 = '' OR holder = $6) AND ($7 = '' OR application_name = $7) AND ($8 = '' OR reason = $8) AND ($9 = '' OR verdict = $9)
   AND ($10::bigint = 0 OR id > $10)`

func (f Filter) arguments(more ...any) []any {
	return append([]any{orNil(f.Since), orNil(f.Until), f.Table, f.Lease, f.Key, f.Holder, f.Application, f.Reason, f.Verdict, f.AfterID}, more...)
}

var rejectionOrders = map[string]string{
	"": "last_at DESC, id DESC", "last": "last_at DESC, id DESC", "first": "first_at DESC, id DESC", "count": "count DESC, id DESC",
}

// Sorts are what Filter.Sort can be.
var Sorts = []string{"last", "first", "count"}

// Rejections returns refused writes, and whether the limit cut some off.
func Rejections(ctx context.Context, q Querier, f Filter) (found []Rejection, cut bool, err error) {
	order, ok := rejectionOrders[f.Sort]
	if !ok {
		return nil, false, fmt.Errorf("sort %q: want one of %s", f.Sort, strings.Join(Sorts, ", "))
	}
	found, err = rejections(ctx, q, `SELECT `+rejectionColumns+` FROM fence.rejection`+rejectionsWhere+` ORDER BY `+order+` LIMIT $11`, f.arguments(oneMore(f.Limit))...)
	if err != nil {
		return nil, false, err
	}
	found, cut = cutTo(found, f.Limit)
	return found, cut, nil
}

// ErrNoRejection says that there is no rejection of that number.
var ErrNoRejection = errors.New("no such rejection")

// RejectionByID returns one, or ErrNoRejection.
func RejectionByID(ctx context.Context, q Querier, id int64) (Rejection, error) {
	found, err := rejections(ctx, q, `SELECT `+rejectionColumns+` FROM fence.rejection WHERE id = $1`, id)
	if err != nil {
		return Rejection{}, err
	}
	if len(found) == 0 {
		return Rejection{}, fmt.Errorf("%w: %d; it may have been pruned", ErrNoRejection, id)
	}
	return found[0], nil
}

func rejections(ctx context.Context, q Querier, sql string, args ...any) ([]Rejection, error) {
	rows, err := q.Query(ctx, sql, args...)
	if err != nil {
		return nil, fmt.Errorf("reading fence.rejection: %w", err)
	}
	found, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (r Rejection, err error) {
		err = row.Scan(&r.ID, &r.Table, &r.Key, &r.Lease, &r.Fence, &r.CurrentFence, &r.Reason, &r.Verdict, &r.Holder,
			&r.CurrentHolder, &r.Count, &r.FirstAt, &r.LastAt, &r.Application, &r.ClientAddr, &r.User)
		utc(&r.FirstAt, &r.LastAt)
		return r, err
	})
	if err != nil {
		return nil, fmt.Errorf("reading fence.rejection: %w", err)
	}
	return found, nil
}

// topBy is what refusals can be summed up by.
var topBy = map[string]string{
	"holder": "holder", "table": "table_name", "lease": "lease_name", "reason": "reason", "verdict": "verdict",
	"application": "application_name", "user": "db_user::text", "key": "table_name || ' ' || row_key::text",
}

// TopBy returns what TopRejections can sum up by.
func TopBy() []string {
	var all []string
	for by := range topBy {
		all = append(all, by)
	}
	slices.Sort(all)
	return all
}

// TopRejections sums refusals up by what they have in common, the most first. Sort is not looked at.
func TopRejections(ctx context.Context, q Querier, by string, f Filter) (list TopList, err error) {
	what, ok := topBy[by]
	if !ok {
		return list, fmt.Errorf("by %q: want one of %s", by, strings.Join(TopBy(), ", "))
	}
	rows, err := q.Query(ctx, `SELECT `+what+`, sum(count)::bigint, count(*), coalesce(sum(count) FILTER (WHERE verdict = 'lawful'), 0)::bigint, max(last_at)
		FROM fence.rejection`+rejectionsWhere+` GROUP BY 1 ORDER BY 2 DESC, 1 LIMIT $11`, f.arguments(oneMore(f.Limit))...)
	if err != nil {
		return list, fmt.Errorf("reading fence.rejection: %w", err)
	}
	list.By = by
	list.Rows, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (t Top, err error) {
		err = row.Scan(&t.Value, &t.Refusals, &t.Rows, &t.Lawful, &t.LastAt)
		utc(&t.LastAt)
		return t, err
	})
	if err != nil {
		return list, fmt.Errorf("reading fence.rejection: %w", err)
	}
	list.Rows, list.Cut = cutTo(list.Rows, f.Limit)
	return list, nil
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
