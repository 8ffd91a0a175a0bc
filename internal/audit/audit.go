// Package audit reads what writegate's tables have to tell: who holds which lease, which writes were refused, which tables
// are protected, and what is wrong. The command line, the report, the dashboard and the demo all show what it returns. It
// only ever reads, with SELECT rights alone, on a standby as well.
package audit

import (
	"context"
	"errors"
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

// Fences, and other numbers that may outgrow what many readers of JSON can hold, are strings in JSON.

// schemaOldest is the first version of the schema that has what is read here, but for what says otherwise.
const schemaOldest = 2

// leaseColumns are those of fence.lease that are read here: all but the token.
const leaseColumns = "name,fence,holder,ttl,granted_at,renewed_at,renewals,expires_at,released_at,wanted_by"

// CheckSchema returns an error that says what to do where schema fence is missing, does not fit, or where the role that asks
// may not read the relations of it that are named.
func CheckSchema(ctx context.Context, q Querier, database string, reads ...string) (version int, err error) {
	err = attempt(ctx, q, func(q Querier) error { return q.QueryRow(ctx, `SELECT fence.schema_version()`).Scan(&version) })
	if err != nil {
		if pgerr.Code(err) == "42501" {
			return 0, missingGrants(ctx, q, err, "GRANT USAGE ON SCHEMA fence")
		}
		return 0, pgerr.ExplainSchema(err, database)
	}
	if err := pgerr.CheckSchema(version, schemaOldest); err != nil {
		return 0, err
	}
	return version, mayRead(ctx, q, reads...)
}

const unreadableSQL = `
SELECT coalesce(array_agg('GRANT SELECT' || CASE WHEN c.relname = 'lease' THEN ' (' || replace($2::text, ',', ', ') || ')' ELSE '' END || ' ON fence.' || c.relname ORDER BY c.relname), '{}')
  FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
 WHERE n.nspname = 'fence' AND c.relname = ANY ($1::text[])
   AND NOT CASE WHEN c.relkind = 'S' THEN pg_catalog.has_sequence_privilege(c.oid, 'SELECT')
                WHEN c.relname = 'lease' THEN (SELECT bool_and(pg_catalog.has_column_privilege(c.oid, x, 'SELECT')) FROM pg_catalog.unnest(pg_catalog.string_to_array($2::text, ',')) x)
                ELSE pg_catalog.has_table_privilege(c.oid, 'SELECT') END`

// mayRead returns an error that names the grants which are missing: a list that is empty for want of rights must not pass
// for an empty list.
func mayRead(ctx context.Context, q Querier, reads ...string) error {
	if len(reads) == 0 {
		return nil
	}
	var missing []string
	if err := q.QueryRow(ctx, unreadableSQL, reads, leaseColumns).Scan(&missing); err != nil {
		return fmt.Errorf("looking up what this role may read: %w", err)
	}
	if len(missing) > 0 {
		return missingGrants(ctx, q, errors.New("permission denied"), missing...)
	}
	return nil
}

// ErrPrivilege says that the role that asks lacks a right to read.
var ErrPrivilege = errors.New("this role may not read that")

func missingGrants(ctx context.Context, q Querier, cause error, grants ...string) error {
	role := currentRole(ctx, q)
	for i := range grants {
		grants[i] += " TO " + role
	}
	return fmt.Errorf("%w: role %s lacks: %s; the owner of schema fence can give all that an auditor needs by SELECT fence.allow('%s', 'auditor'): %w",
		ErrPrivilege, role, strings.Join(grants, "; "), strings.ReplaceAll(strings.Trim(role, `"`), "'", "''"), cause)
}

// currentRole is the role that asks, quoted as SQL wants it, for saying what to grant it.
func currentRole(ctx context.Context, q Querier) string {
	role := `"?"`
	_ = q.QueryRow(ctx, `SELECT pg_catalog.quote_ident(current_user)`).Scan(&role)
	return role
}

// attempt runs what may fail without spoiling the transaction that it is run in, if it is.
func attempt(ctx context.Context, q Querier, read func(Querier) error) error {
	tx, ok := q.(pgx.Tx)
	if !ok {
		return read(q)
	}
	return pgx.BeginFunc(ctx, tx, func(savepoint pgx.Tx) error { return read(savepoint) })
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

// oneMore is a LIMIT that tells whether there is more than limit, 0 for none.
func oneMore(limit int) *int {
	if limit <= 0 {
		return nil
	}
	limit++
	return &limit
}

// cutTo returns the first of found, and whether there are more.
func cutTo[T any](found []T, limit int) ([]T, bool) {
	if limit > 0 && len(found) > limit {
		return found[:limit], true
	}
	return found, false
}

// prunedOldest is the first version of the schema that keeps count of what was pruned.
const prunedOldest = 7
