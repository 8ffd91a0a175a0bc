package audit

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
)

// Bounded returns a Querier that runs each statement in a read-only transaction of its own, in which the server ends it after
// the given time: what audits a server must not be what it suffers from. The limit is the transaction's, so that nobody
// inherits it through a pooler, and nothing is held between two statements, so that vacuum is not kept waiting. The isolation
// level is said, for a standby knows no SERIALIZABLE, which may be the default. Names are PostgreSQL's own,
// whatever the role's search_path is. Nothing is compiled: of tables that were never analyzed the server expects so much that
// it would spend seconds on that, for milliseconds of work. 0: no limit.
func Bounded(db Beginner, limit time.Duration) Querier { return bounded{db, limit} }

type bounded struct {
	db    Beginner
	limit time.Duration
}

func (b bounded) begin(ctx context.Context) (pgx.Tx, error) {
	return b.db.BeginTx(ctx, pgx.TxOptions{BeginQuery: fmt.Sprintf("BEGIN ISOLATION LEVEL READ COMMITTED READ ONLY; SET LOCAL search_path = pg_catalog, pg_temp; SET LOCAL jit = off; SET LOCAL statement_timeout = %d", b.limit.Milliseconds())})
}

func (b bounded) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	tx, err := b.begin(ctx)
	if err != nil {
		return nil, err
	}
	rows, err := tx.Query(ctx, sql, args...)
	if err != nil {
		_ = tx.Rollback(context.WithoutCancel(ctx))
		return nil, err
	}
	return &boundedRows{Rows: rows, end: func() { _ = tx.Rollback(context.WithoutCancel(ctx)) }}, nil
}

func (b bounded) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	rows, err := b.Query(ctx, sql, args...)
	return &boundedRow{rows, err}
}

// boundedRows ends the transaction with the rows.
type boundedRows struct {
	pgx.Rows
	end func()
}

func (r *boundedRows) Next() bool {
	if r.Rows.Next() {
		return true
	}
	r.Close()
	return false
}

func (r *boundedRows) Close() {
	r.Rows.Close()
	if r.end != nil {
		r.end()
		r.end = nil
	}
}

type boundedRow struct {
	rows pgx.Rows
	err  error
}

func (r *boundedRow) Scan(dest ...any) error {
	if r.err != nil {
		return r.err
	}
	defer r.rows.Close()
	if !r.rows.Next() {
		if err := r.rows.Err(); err != nil {
			return err
		}
		return pgx.ErrNoRows
	}
	if err := r.rows.Scan(dest...); err != nil {
		return err
	}
	r.rows.Close()
	return r.rows.Err()
}
