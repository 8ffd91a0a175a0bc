package fencedb

import (
	"context"
	"database/sql"
	"errors"

	"github.com/jackc/pgx/v5"
)

// Exec runs a statement of the caller's own under the lease's fence, where none of the kinds of write fits. It has to
// compare the fence and to store it, as in
//
//	UPDATE app.jobs SET status = 'done', last_fence = @fence WHERE id = @id AND last_fence < @fence
//
// @name stands for an argument; @fence is the lease's, and a statement that does not use it is refused. @lease and
// @holder are the lease's name and holder, for those that want them. That the statement does compare the fence is the
// caller's part: the gate cannot read SQL.
//
// It is Applied if it changed a row, which PostgreSQL tells of the outer statement: that has to be the INSERT, UPDATE,
// DELETE or MERGE, not a SELECT around it. A DELETE leaves no tombstone; that takes [Table.Delete]. With [Target] the gate finds out why it did not, and records a refusal; without, that
// is [Unmatched]. With strength [Live] the lease is locked by a statement before it, in the same transaction, and under rule term a
// guard is told of the write by one: three more round trips on the pool. The text is part of the statement: never make it out of what somebody else has written.
//
// Options: [WithRule], [WithStrength], [Target], [Returning], [ReturningAll].
func (g *Gate) Exec(ctx context.Context, lease Lease, statement string, args Args, options ...WriteOption) (Outcome, error) {
	w, err := newWrite(ctx, g, nil, "exec", lease, options, "Target", "Returning")
	if err != nil {
		return w.ended(ctx, err)
	}
	if err := w.aim(); err != nil {
		return Failed, err
	}
	if w.live() || w.marks() && w.options.rule == Term {
		if w.in != nil && !w.in.ends {
			return Failed, w.invalid("strength live, or rule term, takes two statements in one transaction: give InSQL a *sql.Tx")
		}
		w.first = true
	}
	text, values, err := named(0, statement, args, Args{"fence": w.grant.fence, "lease": w.grant.name, "holder": w.grant.holder})
	if err != nil {
		return Failed, w.invalid("%w", err)
	}
	// Asked of the lexer once more, for another argument may have the fence's value.
	if _, _, err := named(0, statement, args, Args{"lease": "", "holder": ""}); err == nil {
		return Failed, w.invalid("the statement does not use @fence: one that compares no fence is not protected")
	}
	w.sql, w.args, w.rows = text, values, w.options.into != nil
	return w.run(ctx)
}

// Query is [Gate.Exec] for a statement that returns rows, which into ([Returning] or [ReturningAll]) says where to put.
func (g *Gate) Query(ctx context.Context, lease Lease, statement string, args Args, into WriteOption, options ...WriteOption) (Outcome, error) {
	if into == nil {
		return Failed, errors.New("fencedb: exec: Query without Returning or ReturningAll")
	}
	return g.Exec(ctx, lease, statement, args, append([]WriteOption{into}, options...)...)
}

// Classify tells what became of a protected write that somebody else has sent: generated code (sqlc's :execrows), an ORM.
// changed is the number of rows that it changed, and err its error; pgx.ErrNoRows and sql.ErrNoRows stand for 0. The statement has to be of the shape that [Gate.Exec]
// asks for, by the rule that the table or the options have. Where no row was changed it finds out why and records a
// refusal, through the same connection ([Table.In], [Table.InSQL]) as the statement, if that was in a transaction.
//
// A statement of strength Live has "AND (SELECT fence.live(@lease, @token, @fence))" in its condition.
//
// Options: [WithRule], [WithStrength].
func (t *Table) Classify(ctx context.Context, lease Lease, key Key, changed int64, err error, options ...WriteOption) (Outcome, error) {
	w, invalid := t.write(ctx, "classify", lease, key, options)
	if errors.Is(err, sql.ErrNoRows) || errors.Is(err, pgx.ErrNoRows) { // of an UPDATE … RETURNING that is read as one row
		changed, err = 0, nil
	}
	switch {
	case w == nil:
		return Failed, invalid
	case err != nil: // what the statement did, it did, whatever is known of the lease by now
		outcome, err := w.failed(err)
		return w.finish(ctx, outcome, err)
	case changed > 0:
		w.count = int(changed)
		return w.finish(ctx, Applied, nil)
	case invalid != nil:
		return w.ended(ctx, invalid)
	}
	outcome, err := w.explain(ctx)
	return w.finish(ctx, outcome, err)
}

// aim takes over what Target says.
func (w *write) aim() error {
	t := w.options.target
	if t == nil || w.options.targetKey == nil {
		return nil
	}
	columns, err := t.checkKey(w.options.targetKey)
	if err != nil {
		return err
	}
	w.key, w.keyColumns = w.options.targetKey, columns
	return nil
}

// explainWithoutTarget can tell what became of the lease, and no more.
func (w *write) explainWithoutTarget(ctx context.Context) (Outcome, error) {
	if w.live() {
		s := w.newStatement()
		s.add("SELECT ", w.leaseState(s))
		var state string
		if err := w.ask(ctx, s, &state); err != nil {
			return Failed, w.error(Failed, err)
		}
		if state != "held" {
			return w.refused(ctx, LeaseLost, state, 0, `"(a statement without a target)"`)
		}
	}
	return Unmatched, w.error(Unmatched, errors.New("it changed no row; why was not asked, for no Target was given"))
}
