package fencedb

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/writegate/writegate/internal/pgerr"
)

// pin is the grant that a transaction is pinned to.
type pin struct {
	name  string
	fence int64
	tx    any // what the caller sees of the transaction
}

type pinKey struct{}

// pinnedTx is a pgx transaction that the gate began and will end.
type pinnedTx struct {
	pgx.Tx
	pin pin
}

var errEndedByGate = errors.New("fencedb: the gate ends this transaction: return nil to commit, an error to roll back")

func (*pinnedTx) Commit(context.Context) error   { return errEndedByGate }
func (*pinnedTx) Rollback(context.Context) error { return errEndedByGate }

// Begin makes a savepoint, which is the caller's to end, and within which the transaction is as pinned as outside.
func (t *pinnedTx) Begin(ctx context.Context) (pgx.Tx, error) {
	tx, err := t.Tx.Begin(ctx)
	if err != nil {
		return nil, err
	}
	return &pinnedSavepoint{tx, t.pin}, nil
}

type pinnedSavepoint struct {
	pgx.Tx
	pin pin
}

// Begin makes another within.
func (t *pinnedSavepoint) Begin(ctx context.Context) (pgx.Tx, error) {
	tx, err := t.Tx.Begin(ctx)
	if err != nil {
		return nil, err
	}
	return &pinnedSavepoint{tx, t.pin}, nil
}

// InTx runs work in a transaction that is pinned to the lease: from its first statement on no newer grant can exist until
// it has ended, so that everything in it, any statements on any tables, is this holder's. It commits when work returns
// nil and rolls back when that returns an error, which InTx then returns as it is.
//
// The transaction has the time that the lease has left at its beginning, and no more, however often the lease is renewed
// meanwhile: work's context ends then, or earlier with ctx or with the lease, and the server ends a transaction whose
// client stands still (idle_in_transaction_session_timeout, statement_timeout, and transaction_timeout on PostgreSQL 17
// and newer are set for it). A stalled client so keeps the next holder waiting for at most that long; on servers before 17
// counted from its last statement.
//
// The error is nil once the commit was confirmed. If its answer was lost, the gate asks the server what became of the
// transaction; only if that cannot be learned either is it an [ErrUnknown]. It is an [ErrLeaseLost] if the lease was over,
// at the beginning or before the commit: then nothing was done. The isolation level is READ COMMITTED, which the pin
// needs. Writes of the gate in it go through [Table.In] with the transaction that work is given; tables and writes of
// strength [InTx] take nothing else. Not to be nested; with a gate of [NewSQL] use [Gate.InSQLTx].
func (g *Gate) InTx(ctx context.Context, lease Lease, work func(ctx context.Context, tx pgx.Tx) error) error {
	return g.inTx(ctx, lease, func(ctx context.Context, tx transaction, p pin) error {
		t, ok := tx.(pgxTransaction)
		if !ok {
			return errors.New("fencedb: InTx: this gate was made by NewSQL: use InSQLTx")
		}
		return work(ctx, &pinnedTx{t.tx, p})
	})
}

// InSQLTx is [Gate.InTx] for a gate of [NewSQL]. Writes of the gate in it go through [Table.InSQL] with the transaction
// and the context that work is given. The transaction is not work's to commit or roll back.
func (g *Gate) InSQLTx(ctx context.Context, lease Lease, work func(ctx context.Context, tx *sql.Tx) error) error {
	return g.inTx(ctx, lease, func(ctx context.Context, tx transaction, p pin) error {
		t, ok := tx.(*sqlTransaction)
		if !ok {
			return errors.New("fencedb: InSQLTx: this gate was made by New: use InTx")
		}
		p.tx = t.tx
		return work(context.WithValue(ctx, pinKey{}, &p), t.tx)
	})
}

func (g *Gate) inTx(ctx context.Context, lease Lease, work func(context.Context, transaction, pin) error) error {
	w, err := newWrite(ctx, g, nil, "in_tx", lease, []WriteOption{WithStrength(Live)})
	w.options.strength = InTx
	if err != nil {
		_, err = w.ended(ctx, err)
		return err
	}
	outcome, err := w.inPinned(ctx, work)
	_, err = w.finish(ctx, outcome, err)
	return err
}

// pinSQL does what fence.pin does, in a transaction that is READ COMMITTED, and leaves word for guards, so that they stamp whatever
// the work sends. A function takes several times as long. OFFSET 0 has ms computed once. No row: the lease is over.
var pinSQL = `SELECT 'held', r.ms::bigint, pg_catalog.pg_current_xact_id()::pg_catalog.text, pg_catalog.substr(pg_catalog.pg_walfile_name(pg_catalog.pg_current_wal_lsn()), 1, 8),
       pg_catalog.set_config('fence.entered', $4::pg_catalog.text, true), ` +
	noLonger("statement_timeout") + ", " + noLonger("idle_in_transaction_session_timeout") + ", " + noLonger("transaction_timeout") + `
  FROM (SELECT pg_catalog.ceil(pg_catalog.date_part('epoch', l.expires_at OPERATOR(pg_catalog.-) pg_catalog.clock_timestamp()) OPERATOR(pg_catalog.*) 1000)::bigint::pg_catalog.text AS ms` +
	fromLiveLease("$1::pg_catalog.text", "$2::pg_catalog.text::pg_catalog.uuid", "$3::bigint") + ` OFFSET 0) AS r
 WHERE r.ms::bigint OPERATOR(pg_catalog.>) 0`

// noLonger has the server end what takes longer than the lease has left, unless it is to end sooner already. 0 means never; null
// is a setting that this server does not have.
func noLonger(setting string) string {
	current := "pg_catalog.current_setting('" + setting + "', true)"
	return "CASE WHEN " + current + " OPERATOR(pg_catalog.=) '0' THEN pg_catalog.set_config('" + setting + "', r.ms, true)" +
		" WHEN " + current + " IS NOT NULL THEN fence.no_longer('" + setting + "', r.ms) END"
}

// pinByFunctionSQL is for servers that do not show everybody their timeline, and roles that may not read the view.
const pinByFunctionSQL = `SELECT p.state, (extract(epoch FROM p.remaining) * 1000)::bigint, p.transaction::text, p.timeline, pg_catalog.set_config('fence.entered', $4::text, true)
  FROM fence.pin($1::text, $2::text::uuid, $3::bigint) p`

// pinnedTo is what the database says of a pin.
type pinnedTo struct {
	state     string
	remaining *int64 // milliseconds
	xid       *string
	timeline  *string
}

func (w *write) inPinned(ctx context.Context, work func(context.Context, transaction, pin) error) (Outcome, error) {
	s, tx, at, sent, err := w.beginPinned(ctx)
	if err != nil {
		return w.failedUncommitted(err)
	}
	defer s.release()
	if at.state != "held" {
		w.rollback(ctx, tx)
		return w.refused(ctx, LeaseLost, at.state, 0, `"(a transaction)"`)
	}

	until := sent.Add(time.Duration(*at.remaining) * time.Millisecond)
	ending, cancel := w.lifetime(ctx, until)
	defer cancel()
	finished := false
	defer func() {
		if !finished { // work has panicked, or ended its goroutine
			w.rollback(ctx, tx)
		}
	}()
	err = work(ending, tx, pin{name: w.grant.name, fence: w.grant.fence})
	finished = true
	if tx.over() {
		if err == nil {
			err = errEndedByGate
		}
		return Unknown, w.error(Unknown, fmt.Errorf("the work has ended the transaction by a statement of its own: %w", err))
	}
	if err != nil {
		w.rollback(ctx, tx)
		if cause := context.Cause(ending); ctx.Err() == nil && cause != nil && !errors.Is(err, ErrLeaseLost) {
			return LeaseLost, w.error(LeaseLost, fmt.Errorf("%w; the work ended with: %w", cause, err))
		}
		return Failed, err
	}
	// The last look before what cannot be taken back. No newer grant can exist whatever it says; but a lease that is
	// over is over.
	if ending.Err() != nil {
		w.rollback(ctx, tx)
		if ctx.Err() != nil {
			return Failed, w.error(Failed, context.Cause(ctx))
		}
		return LeaseLost, w.error(LeaseLost, context.Cause(ending))
	}
	if err := w.grant.lease.Check(0); err != nil {
		w.rollback(ctx, tx)
		return LeaseLost, w.error(LeaseLost, err)
	}
	return w.commit(ctx, s, tx, at, until)
}

// beginPinned begins a transaction and pins it.
func (w *write) beginPinned(ctx context.Context) (s session, tx transaction, at pinnedTo, sent time.Time, err error) {
	for attempt := 0; ; attempt++ {
		byFunction := w.gate.pinsByFunction.Load()
		if s, err = w.gate.base.session(ctx); err != nil {
			return nil, nil, at, sent, err
		}
		sent = time.Now()
		if tx, at, err = w.pin(ctx, s, byFunction); err == nil {
			return s, tx, at, sent, nil
		}
		if tx != nil {
			w.rollback(ctx, tx)
			err = pgerr.BeforeCommit(err)
		}
		s.release()
		if code := pgerr.Code(err); !byFunction && (code == "42501" || code == "42883" || code == "42P01") {
			w.gate.pinsByFunction.Store(true)
			continue
		}
		if !pgerr.Stale(err) || ctx.Err() != nil || attempt > w.gate.base.spares() {
			return nil, nil, at, sent, err
		}
	}
}

// pin begins a transaction that is pinned, or finds out why it cannot be.
func (w *write) pin(ctx context.Context, s session, byFunction bool) (tx transaction, at pinnedTo, err error) {
	args := []any{w.grant.name, w.grant.token, w.grant.fence, w.grant.claim()}
	var entered, ignored *string
	if byFunction {
		tx, err = s.beginWith(ctx, pinByFunctionSQL, args, &at.state, &at.remaining, &at.xid, &at.timeline, &entered)
		return tx, at, err
	}
	tx, err = s.beginWith(ctx, pinSQL, args, &at.state, &at.remaining, &at.xid, &at.timeline, &entered, &ignored, &ignored, &ignored)
	if errors.Is(err, errNoRow) {
		s := w.newStatement()
		s.add("SELECT ", w.leaseState(s))
		if err = one(ctx, tx, s.String(), s.args, &at.state); at.state == "held" {
			at.state = "expired" // between one look and the next
		}
	}
	return tx, at, err
}

// lifetime is the context of the work: it ends with the lease, and with the time that the lease had.
func (w *write) lifetime(ctx context.Context, until time.Time) (context.Context, context.CancelFunc) {
	ending, cancel := context.WithCancelCause(ctx)
	stop := func() bool { return true }
	if e, ok := handle(w.grant.lease).(ender); ok {
		over := e.Context()
		stop = context.AfterFunc(over, func() { cancel(context.Cause(over)) })
	}
	timer := time.AfterFunc(time.Until(until), func() { cancel(errNoTimeLeft) })
	return ending, func() {
		timer.Stop()
		stop()
		cancel(context.Canceled)
	}
}

var errNoTimeLeft = errors.New("the transaction has used up the time that the lease had left when it began")

const (
	rollbackTime  = 2 * time.Second
	commitTime    = 10 * time.Second // at most, and what the lease has left
	commitAtLeast = time.Second
	resolveTime   = 5 * time.Second
)

func (w *write) rollback(ctx context.Context, tx transaction) {
	// Not with ctx, which may have ended: that would cost the connection.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), rollbackTime)
	defer cancel()
	tx.rollback(ctx)
}

func (w *write) failedUncommitted(err error) (Outcome, error) {
	if pgerr.NoSuchFunction(err) {
		err = pgerr.ExplainSchema(err, w.gate.base.database())
	}
	e := w.error(Failed, err)
	e.again = pgerr.Again(err)
	return Failed, e
}

// commit commits, and finds out what became of it if it is not told.
func (w *write) commit(ctx context.Context, s session, tx transaction, at pinnedTo, until time.Time) (Outcome, error) {
	// Not with ctx: ending it while the COMMIT is under way would only make the outcome unknown.
	bounded, cancel := context.WithTimeout(context.WithoutCancel(ctx), min(max(time.Until(until), commitAtLeast), commitTime))
	defer cancel()
	err := tx.commit(bounded)
	switch {
	case err == nil:
		return Applied, nil
	case pgerr.EndedIdle(err):
		return w.failedUncommitted(pgerr.RolledBack(err))
	case pgerr.Answered(err), pgerr.NotSent(err):
		return w.failedUncommitted(err)
	}
	s.release() // it may be the only connection that the pool has room for
	status, asked := w.fate(ctx, at)
	switch status {
	case "committed":
		return Applied, nil
	case "aborted":
		return w.failedUncommitted(pgerr.LostAndRolledBack(fmt.Errorf("it was rolled back: %w", err)))
	}
	if asked != nil {
		err = fmt.Errorf("%w; asking what became of it: %w", err, asked)
	}
	return Unknown, w.error(Unknown, err)
}

const fateSQL = `SELECT fence.transaction_fate($1::text::xid8, $2::text)`

// fate asks the server what became of the transaction.
func (w *write) fate(ctx context.Context, at pinnedTo) (string, error) {
	if at.timeline == nil {
		return "unknown", errors.New("this server does not show its timeline")
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), resolveTime)
	defer cancel()
	var last error
	for pause := 5 * time.Millisecond; ; pause = min(2*pause, 250*time.Millisecond) {
		var fate string
		s, err := w.gate.base.session(ctx)
		if err == nil {
			err = one(ctx, s, fateSQL, []any{*at.xid, *at.timeline}, &fate)
			s.release()
		}
		switch {
		case err != nil:
			last = err
		case fate == "in progress":
			last = errors.New("it is still under way")
		case fate == "unknown":
			return fate, errors.New("the server has been replaced by another since, or has forgotten")
		default:
			return fate, nil
		}
		if !sleep(ctx, pause) {
			return "unknown", last
		}
	}
}
