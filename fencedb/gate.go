package fencedb

import (
	"context"
	"database/sql"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
)

// Config says how a gate works. The zero value is ready to use.
type Config struct {
	// AuditTimeout bounds how long a refused write takes to be recorded before it is returned, and each statement that
	// records. Default 2 s.
	AuditTimeout time.Duration
	// AuditDB is what a gate made by [NewSQL] records refusals through. Give it one connection of its own: with the
	// default, the gate's own *sql.DB, a refusal waits for a connection that the refused work may be holding.
	AuditDB *sql.DB
	// Logger receives refusals and what could not be recorded. Default slog.Default().
	Logger *slog.Logger
	// Observe is told of every write and of the audit, for metrics; package fenceotel makes one for OpenTelemetry. It is
	// called by the goroutine that writes, must not wait, and must be safe for concurrent use.
	Observe func(Event)
}

// Gate runs protected writes. Make one for each database and share it; it is safe for concurrent use.
type Gate struct {
	base     base
	cfg      Config
	recorder *recorder
	// explicit is set once the session's default isolation level has turned out not to be READ COMMITTED: each write
	// that needs it then opens a transaction that is, at the price of two round trips.
	explicit atomic.Bool
	checked  atomic.Bool // the base has been found fit
	// pinsByFunction is set once pinSQL has turned out to ask for what this server, or this role, does not have.
	pinsByFunction atomic.Bool
}

// New returns a gate that writes through pool, or through a caller's transaction ([Table.In]). It sends nothing;
// [Gate.Table] does. Refusals are recorded on one more connection, made from pool's configuration when the first is met:
// not on pool, all of whose connections may be waiting for this very write. Close the gate to close it.
func New(pool *pgxpool.Pool, cfg Config) *Gate {
	return newGate(newPgxBase(pool), cfg)
}

// NewSQL returns a gate that writes through db, or through a caller's connection or transaction ([Table.InSQL]), with any
// driver for PostgreSQL whose errors have a method SQLState: pgx/v5/stdlib and lib/pq are tested. Values are sent as
// text, as pgx's types know them, so that maps, slices, uuids and the like work with every driver; what such a driver
// reads back into is up to it.
func NewSQL(db *sql.DB, cfg Config) *Gate {
	if cfg.AuditDB == nil {
		cfg.AuditDB = db
	}
	return newGate(sqlBase{db, cfg.AuditDB}, cfg)
}

func newGate(b base, cfg Config) *Gate {
	if cfg.AuditTimeout <= 0 {
		cfg.AuditTimeout = 2 * time.Second
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.Default()
	}
	g := &Gate{base: b, cfg: cfg}
	g.recorder = newRecorder(g)
	return g
}

// Close records what has not been yet and closes the connection for the audit. It takes AuditTimeout at most for every
// 500 different refusals. A refusal after that is still refused, and counted as unrecorded.
func (g *Gate) Close() { g.recorder.close() }

// Flush waits until all refusals so far are in the audit, or lost. Repeats of a refusal are written once a second.
func (g *Gate) Flush(ctx context.Context) error { return g.recorder.wait(ctx) }

// Unrecorded returns how many refusals could not be recorded since the gate was made. Those of one that could are also
// told to the database when it can next be reached: fence.audit_loss counts them.
func (g *Gate) Unrecorded() int64 { return g.recorder.unrecorded() }

func (g *Gate) log(ctx context.Context, e *WriteError, key string) {
	attrs := []any{"table", e.Table, "key", key, "lease", e.Lease, "fence", e.Fence, "current", e.Current,
		"reason", e.Reason, "verdict", e.Verdict}
	if e.AuditErr != nil {
		attrs = append(attrs, "audit_error", e.AuditErr)
	}
	g.cfg.Logger.WarnContext(context.WithoutCancel(ctx), "writegate: write refused", attrs...)
}
