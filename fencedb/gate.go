package fencedb

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/writegate/writegate/internal/pgerr"
)

// Lease is what a gate asks of the grant that a write is made under. *leasedb.Lease is one; [Static] makes one of a
// fence that comes from elsewhere.
type Lease interface {
	// Name is the lease's name, for the audit.
	Name() string
	// Fence is the grant's fence; 0 or less is refused.
	Fence() int64
	// Token is the uuid that proves the grant to the database; "" if there is none, and then Live cannot be used.
	Token() string
	// Holder is a label for people.
	Holder() string
	// Check returns an error if the holder itself knows that the lease is over, or has less than need left. It is asked
	// before anything is sent, and must not wait.
	Check(need time.Duration) error
}

// loser is implemented by leases that want to hear that the database has found them over.
type loser interface{ Lose(cause error) }

// Static returns a Lease with a fence of which nothing more is known: one that was handed to this process, or that
// comes from another lock service, whose numbers only ever grow. It passes every check of its own, so all that stands
// between it and the row is the fence. It has no token, so it cannot be used with [Live].
func Static(name string, fence int64, holder string) Lease {
	return static{name, holder, fence}
}

type static struct {
	name, holder string
	fence        int64
}

func (s static) Name() string              { return s.name }
func (s static) Fence() int64              { return s.fence }
func (s static) Token() string             { return "" }
func (s static) Holder() string            { return s.holder }
func (s static) Check(time.Duration) error { return nil }

// Config says how a gate works. The zero value is ready to use.
type Config struct {
	// AuditTimeout bounds how long a refused write takes to be recorded before it is returned. Default 2 s.
	AuditTimeout time.Duration
	// Logger receives refusals and what could not be recorded, as warnings. Default slog.Default().
	Logger *slog.Logger
}

// Gate runs protected writes. Make one for each database and share it; it is safe for concurrent use.
type Gate struct {
	pool *pgxpool.Pool
	cfg  Config

	unrecorded atomic.Int64
	// explicit is set once the session's default isolation level has turned out not to be READ COMMITTED: each Live
	// write on the pool then opens a transaction that is, at the price of two round trips.
	explicit atomic.Bool

	mu     sync.Mutex
	audit  *pgxpool.Pool // made at the first refusal
	closed bool
}

// New returns a gate that writes through pool, or through a caller's transaction. It sends nothing; [Gate.Table] does.
// Refusals are recorded on one more connection, made from pool's configuration when the first is met: not on pool, all
// of whose connections may be waiting for this very write. Close the gate to close it.
func New(pool *pgxpool.Pool, cfg Config) *Gate {
	if cfg.AuditTimeout == 0 {
		cfg.AuditTimeout = 2 * time.Second
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.Default()
	}
	return &Gate{pool: pool, cfg: cfg}
}

// Close closes the connection for the audit. A refusal after that is still refused, and counted as unrecorded.
func (g *Gate) Close() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.closed = true
	if g.audit != nil {
		g.audit.Close()
		g.audit = nil
	}
}

// Unrecorded returns how many refusals could not be recorded since the gate was made.
func (g *Gate) Unrecorded() int64 { return g.unrecorded.Load() }

// querier is what questions are asked through: the pool, or a caller's transaction.
type querier interface {
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}

// exec runs a write, in the caller's transaction or in one of its own, and reports whether it changed a row.
func (t *Table) exec(ctx context.Context, strength Strength, sql string, args []any) (changed bool, err error) {
	if t.tx != nil {
		tag, err := t.tx.Exec(ctx, sql, args...)
		return tag.RowsAffected() > 0, err
	}
	pool := t.gate.pool
	for attempt := 0; ; attempt++ {
		changed, err = t.execOnce(ctx, strength, sql, args)
		if !pgerr.Stale(err) || ctx.Err() != nil || attempt > int(pool.Stat().MaxConns()) {
			return changed, err
		}
		// Never sent, on a connection that had died in the pool, which may have more of them.
	}
}

func (t *Table) execOnce(ctx context.Context, strength Strength, sql string, args []any) (changed bool, err error) {
	conn, err := t.gate.pool.Acquire(ctx)
	if err != nil {
		return false, pgerr.BeforeSending(err)
	}
	defer conn.Release()
	if strength != Live || !t.gate.explicit.Load() {
		tag, err := conn.Exec(ctx, sql, args...)
		if pgerr.Code(err) != pgerr.Isolation {
			return tag.RowsAffected() > 0, err
		}
		t.gate.explicit.Store(true)
	}
	tx, err := conn.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.ReadCommitted})
	if err != nil {
		return false, pgerr.BeforeSending(err)
	}
	tag, err := tx.Exec(ctx, sql, args...)
	if err != nil {
		// The server has undone it, or will when it finds the connection gone. The pool closes one that cannot roll back.
		_ = tx.Rollback(context.WithoutCancel(ctx))
		return false, pgerr.BeforeCommit(err)
	}
	return tag.RowsAffected() > 0, tx.Commit(ctx)
}

const recordSQL = `SELECT verdict, holder, current_holder
	FROM fence.record_rejection($1, $2::text::jsonb, $3, $4::text::uuid, $5, $6, $7, $8)`

// record writes a refusal into the audit, in a transaction of its own, and fills in what the database knows of the
// holders. Not being able to record changes nothing about the refusal.
func (g *Gate) record(ctx context.Context, e *WriteError, key string, token string) {
	// The caller's context may end at any moment, and often has: the lease that it follows is over.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), g.cfg.AuditTimeout)
	defer cancel()
	var tokenArg *string
	if token != "" {
		tokenArg = &token
	}
	var current *int64
	if e.Current > 0 {
		current = &e.Current
	}
	pool, err := g.auditPool(ctx)
	if err == nil {
		err = pool.QueryRow(ctx, recordSQL, e.Table, key, storable(e.Lease), tokenArg, e.Fence, e.Reason, current, storable(e.Holder)).
			Scan(&e.Verdict, &e.Holder, &e.CurrentHolder)
	}
	if err != nil {
		g.unrecorded.Add(1)
		e.AuditErr = fmt.Errorf("the refusal could not be recorded: %w", err)
	}
	attrs := []any{"table", e.Table, "key", key, "lease", e.Lease, "fence", e.Fence, "current", e.Current,
		"reason", e.Reason, "verdict", e.Verdict}
	if e.AuditErr != nil {
		attrs = append(attrs, "audit_error", e.AuditErr)
	}
	g.cfg.Logger.WarnContext(ctx, "writegate: write refused", attrs...)
}

// storable is text as PostgreSQL can store it: a label that cannot be must not cost the record of a refusal.
func storable(s string) string {
	return strings.ReplaceAll(strings.ToValidUTF8(s, "\uFFFD"), "\x00", "\uFFFD")
}

func (g *Gate) auditPool(ctx context.Context) (*pgxpool.Pool, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed {
		return nil, errors.New("the gate is closed")
	}
	if g.audit == nil {
		cfg := g.pool.Config()
		cfg.MaxConns, cfg.MinConns, cfg.MinIdleConns = 1, 0, 0
		pool, err := pgxpool.NewWithConfig(context.WithoutCancel(ctx), cfg)
		if err != nil {
			return nil, err
		}
		g.audit = pool
	}
	return g.audit, nil
}
