package fencedb

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/writegate/writegate/internal/pgerr"
)

// WriteOption changes one write.
type WriteOption func(*writeOptions)

type writeOptions struct {
	rule     Rule
	strength Strength
}

// WithRule compares by another rule than the table's.
func WithRule(r Rule) WriteOption { return func(o *writeOptions) { o.rule = r } }

// WithStrength writes with another strength than the table's.
func WithStrength(s Strength) WriteOption { return func(o *writeOptions) { o.strength = s } }

// Update writes the given columns of one row under the lease's fence: one statement, one round trip, and the row itself
// refuses a holder that has been superseded. Only a write that changed nothing costs a second statement, which finds
// out why, and a third, which records a refusal.
//
// The error is nil for [Applied] and [AlreadyApplied], else a [WriteError], or, for arguments that cannot be, an error
// that says so before anything is sent. Errors of the database (serialization failures, lost connections, constraints)
// are wrapped and never reported as a refusal.
func (t *Table) Update(ctx context.Context, lease Lease, key Key, set Set, options ...WriteOption) (Outcome, error) {
	o := writeOptions{rule: t.rule, strength: t.strength}
	for _, option := range options {
		option(&o)
	}
	keyColumns, err := t.checkKey(key)
	if err != nil {
		return Failed, err
	}
	setColumns, err := t.checkSet(key, set)
	if err != nil {
		return Failed, err
	}
	if err := o.validate(t, lease); err != nil {
		return Failed, err
	}
	w := &write{table: t, lease: lease, key: key, keyColumns: keyColumns, options: o}
	if err := w.checkLease(); err != nil {
		return LeaseLost, err
	}
	sql, args := w.updateSQL(setColumns, set)
	return w.run(ctx, sql, args)
}

func (o writeOptions) validate(t *Table, lease Lease) error {
	if o.rule != Once && o.rule != Term {
		return fmt.Errorf("fencedb: table %s: rule %q: want %q or %q", t.name, o.rule, Once, Term)
	}
	if o.strength != Fenced && o.strength != Live {
		return fmt.Errorf("fencedb: table %s: strength %q: want %q or %q", t.name, o.strength, Fenced, Live)
	}
	if lease == nil {
		return fmt.Errorf("fencedb: table %s: no lease: %w", t.name, ErrLeaseLost)
	}
	if o.strength == Live && !t.leases {
		return fmt.Errorf("fencedb: table %s: strength live needs the leases in the same database, and it has no schema fence: %w", t.name, ErrSchema)
	}
	return nil
}

// write is one protected write on its way.
type write struct {
	table      *Table
	lease      Lease
	key        Key
	keyColumns []string
	options    writeOptions
}

func (w *write) error(outcome Outcome, err error) *WriteError {
	return &WriteError{
		Outcome: outcome, Table: w.table.name, Key: w.key,
		Lease: w.lease.Name(), Fence: w.lease.Fence(), Holder: w.lease.Holder(), Err: err,
	}
}

// checkLease refuses what the holder can know to be over. Nothing has been sent, so there is nothing to audit.
func (w *write) checkLease() error {
	if err := w.lease.Check(0); err != nil {
		return w.error(LeaseLost, err)
	}
	if w.lease.Fence() <= 0 {
		return w.error(LeaseLost, errors.New("a fence of 0 or less was never granted"))
	}
	if w.options.strength == Live && w.lease.Token() == "" {
		return w.error(LeaseLost, errors.New("strength live needs the grant's token, and this lease has none"))
	}
	return nil
}

// updateSQL builds a text that depends on nothing but the columns, so that it is prepared once.
func (w *write) updateSQL(setColumns []string, set Set) (string, []any) {
	var b sqlBuilder
	b.text("UPDATE ", w.table.ident, " AS t SET ")
	for _, c := range setColumns {
		b.text(quote(c), " = ", b.arg(set[c]), ", ")
	}
	fence := b.arg(w.lease.Fence()) + "::bigint"
	b.text(quote(w.table.fenceCol), " = ", fence, " WHERE ")
	w.keyCondition(&b)
	b.text(" AND t.", quote(w.table.fenceCol))
	if w.options.rule == Term {
		b.text(" <= ", fence, " AND ", fence, " > 0") // 0 <= 0 would let an ungranted fence write a fresh row
	} else {
		b.text(" < ", fence)
	}
	if w.options.strength == Live {
		// As a scalar subquery it is evaluated once, before the row is looked for: the lease is locked first. It has to
		// be this function, which locks; see there why reading the table would not do.
		b.text(" AND (SELECT fence.live(", b.arg(w.lease.Name()), ", ", b.arg(w.lease.Token()), "::text::uuid, ", fence, "))")
	}
	return b.String(), b.args
}

func (w *write) keyCondition(b *sqlBuilder) {
	for i, c := range w.keyColumns {
		if i > 0 {
			b.text(" AND ")
		}
		b.text("t.", quote(c), " = ", b.arg(w.key[c]))
	}
}

// run sends the write, and where it changed nothing finds out why.
func (w *write) run(ctx context.Context, sql string, args []any) (Outcome, error) {
	suppressed := false
	for {
		changed, err := w.table.exec(ctx, w.options.strength, sql, args)
		if err != nil {
			return w.failed(err)
		}
		if changed {
			return Applied, nil
		}
		outcome, err := w.explain(ctx)
		if outcome != Suppressed || suppressed {
			return outcome, err
		}
		// The row accepts this fence now and did not then: it may have come into being between the two statements.
		suppressed = true
	}
}

func (w *write) failed(err error) (Outcome, error) {
	if w.table.tx != nil || pgerr.Answered(err) || pgerr.NotSent(err) {
		// In the caller's transaction a lost answer means that there will be no commit either.
		if w.options.strength == Live && pgerr.NoSuchFunction(err) {
			err = pgerr.ExplainSchema(err, w.table.gate.pool.Config().ConnConfig.Database)
		}
		return Failed, w.error(Failed, err)
	}
	return Unknown, w.error(Unknown, err)
}

// explain finds out why a write changed nothing. A row's fence never falls and an ended grant never comes back, so what
// it finds later was so then.
func (w *write) explain(ctx context.Context) (Outcome, error) {
	var b sqlBuilder
	b.text("SELECT t.", quote(w.table.fenceCol))
	if w.options.strength == Live {
		b.text(", fence.lease_state(", b.arg(w.lease.Name()), ", ", b.arg(w.lease.Token()), "::text::uuid, ",
			b.arg(w.lease.Fence()), "::bigint)")
	} else {
		b.text(", 'held'")
	}
	b.text(" FROM (VALUES (1)) AS one LEFT JOIN ", w.table.ident, " AS t ON ")
	w.keyCondition(&b)

	var found *int64
	var state string
	err := w.table.db.QueryRow(ctx, b.String(), b.args...).Scan(&found, &state)
	if err != nil {
		// The write itself was answered: nothing was changed. Why, is what we could not learn.
		return Failed, w.error(Failed, fmt.Errorf("the write changed nothing, and asking why failed: %w", err))
	}
	fence := w.lease.Fence()
	switch {
	case found != nil && *found == fence && w.options.rule == Once:
		return AlreadyApplied, nil
	case found != nil && *found > fence:
		return w.refused(ctx, Stale, "stale", *found)
	case state != "held":
		var current int64
		if found != nil {
			current = *found
		}
		return w.refused(ctx, LeaseLost, state, current)
	case found == nil:
		return Missing, w.error(Missing, nil)
	}
	e := w.error(Suppressed, nil)
	e.Current = *found
	return Suppressed, e
}

func (w *write) refused(ctx context.Context, outcome Outcome, reason string, current int64) (Outcome, error) {
	e := w.error(outcome, nil)
	e.Reason, e.Current = reason, current
	if w.table.leases {
		w.table.gate.record(ctx, e, w.key.String(), w.lease.Token())
	}
	if l, ok := w.lease.(loser); ok && outcome == LeaseLost && reason != "wrong_fence" {
		l.Lose(e) // the database has said so; the handle need not wait until its own deadline to believe it
	}
	return outcome, e
}

// sqlBuilder collects a statement and its arguments.
type sqlBuilder struct {
	strings.Builder
	args []any
}

func (b *sqlBuilder) text(parts ...string) {
	for _, p := range parts {
		b.WriteString(p)
	}
}

func (b *sqlBuilder) arg(value any) string {
	b.args = append(b.args, value)
	return fmt.Sprintf("$%d", len(b.args))
}

func quote(name string) string { return pgx.Identifier{name}.Sanitize() }
