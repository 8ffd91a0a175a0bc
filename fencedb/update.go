package fencedb

import (
	"context"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/writegate/writegate/internal/pgerr"
)

// Update writes the given columns of one row under the lease's fence: one statement, one round trip, and the row itself
// refuses a holder that has been superseded. Only a write that changed nothing costs a second statement, which finds
// out why, and the first time a third, which records a refusal.
//
// The error is nil for [Applied] and [AlreadyApplied], else a [WriteError], or, for arguments that cannot be, an error
// that says so before anything is sent. Errors of the database (serialization failures, lost connections, constraints)
// are wrapped and never reported as a refusal.
//
// Options: [WithRule], [WithStrength], [Where], [Returning], [WithRequestID].
func (t *Table) Update(ctx context.Context, lease Lease, key Key, set Set, options ...WriteOption) (Outcome, error) {
	var tried attempt
	if len(options) == 0 {
		if tried = t.updateAsUsual(ctx, lease, key, set); tried.applied {
			return Applied, nil
		}
	}
	// A copy, for errors to keep hold of: so that where there are none, what the caller has made for this one call is not
	// left to the collector.
	kept := make(Key, len(key))
	for c, v := range key {
		kept[c] = v
	}
	if !tried.sent {
		return t.update(ctx, lease, kept, set, options, nil)
	}
	return t.update(ctx, noted{lease, tried.grant}, kept, set, options, &tried)
}

func (t *Table) update(ctx context.Context, lease Lease, key Key, set Set, options []WriteOption, tried *attempt) (Outcome, error) {
	w, err := t.write(ctx, "update", lease, key, options, "Where", "Returning", "WithRequestID")
	if err != nil {
		return w.ended(ctx, err)
	}
	columns, err := t.checkSet(key, set)
	if err != nil {
		return Failed, err
	}
	if len(columns) == 0 {
		return Failed, w.invalid("nothing to set")
	}
	s := w.newStatement()
	s.add("UPDATE ", t.ident, " AS t SET ")
	computed := false
	for _, c := range columns {
		_, expr := set[c].(expression)
		computed = computed || expr
		s.add(quote(c), " = ", s.value(t.columns[c], set[c], w.grant.fence), ", ")
	}
	s.add(quote(t.fenceCol), " = ", s.theFence(w.grant.fence))
	s.add(" WHERE ", w.keyMatches(s), " AND ", w.fenceTaken(s), w.further(s))
	if err := w.assemble(s, nil); err != nil {
		return Failed, err
	}
	if tried != nil {
		w.began = tried.began
	} else {
		if t.usual != nil && t.in == nil && len(options) == 0 && !computed && !w.rows {
			t.usual.remember(&usualUpdate{sql: w.sql, key: w.keyColumns, set: columns, live: w.live(), claims: w.claimed})
		}
		tried = &attempt{claimed: w.claimed}
		tried.changed, tried.err = w.send(ctx)
	}
	if w.learns(tried.err, tried.claimed) {
		return t.update(ctx, lease, key, set, options, nil)
	}
	return w.went(ctx, tried.changed, tried.err)
}

// usualUpdate is the statement of an Update by values, without options, and what its arguments are: the set columns, the
// fence, the key, and of a live one the lease's name, its token, and what it may leave for guards. It is the same for all that name the same columns.
type usualUpdate struct {
	sql      string
	key, set []string
	live     bool
	claims   bool
}

// args are the arguments, nil if the call is for another statement.
func (u *usualUpdate) args(g *grant, key Key, set Set) []any {
	if len(key) != len(u.key) || len(set) != len(u.set) {
		return nil
	}
	args := make([]any, 0, len(u.set)+len(u.key)+4)
	for _, c := range u.set {
		v, ok := set[c]
		if _, computed := v.(expression); !ok || computed {
			return nil
		}
		args = append(args, v)
	}
	args = append(args, g.fence)
	for _, c := range u.key {
		v := key[c]
		if v == nil {
			return nil
		}
		args = append(args, v)
	}
	if u.live {
		args = append(args, g.name, g.token)
	}
	if u.claims {
		args = append(args, g.claim())
	}
	return args
}

// usualUpdates are those that a table has seen. Safe for concurrent use.
type usualUpdates struct {
	base pgxBase
	mu   sync.Mutex // of who adds to it
	list atomic.Pointer[[]*usualUpdate]
}

func (u *usualUpdates) all() []*usualUpdate {
	if list := u.list.Load(); list != nil {
		return *list
	}
	return nil
}

func (u *usualUpdates) remember(one *usualUpdate) {
	u.mu.Lock()
	defer u.mu.Unlock()
	const enough = 32 // programs write a table in few ways; one that makes up its columns is served as ever
	old := u.all()
	if len(old) == enough {
		return
	}
	for _, have := range old {
		if have.sql == one.sql {
			return
		}
	}
	list := slices.Concat(old, []*usualUpdate{one})
	u.list.Store(&list)
}

// attempt is what came of an Update that was sent as usual.
type attempt struct {
	sent, applied bool
	claimed       bool
	changed       int64
	err           error
	grant         grant
	began         time.Time
}

// updateAsUsual does what nearly every Update is with nothing made for it but its arguments. What it has not sent, and what it
// was not simply told to be applied, is for [Table.update] to do, or to judge. It keeps nothing of key and set.
func (t *Table) updateAsUsual(ctx context.Context, lease Lease, key Key, set Set) (a attempt) {
	if t.usual == nil || t.in != nil {
		return a
	}
	list := t.usual.all()
	if len(list) == 0 {
		return a
	}
	if t.gate.cfg.Observe != nil {
		a.began = time.Now()
	}
	var err error
	if a.grant, err = grantOf(lease); err != nil {
		return a
	}
	for _, u := range list {
		args := u.args(&a.grant, key, set)
		if args == nil {
			continue
		}
		if u.live && (a.grant.token == "" || t.gate.explicit.Load()) {
			return a
		}
		a.claimed = u.claims
		a.changed, a.err = t.usual.base.exec(ctx, u.sql, args)
		switch {
		case a.err == nil && a.changed > 0:
			a.applied = true
			if t.gate.cfg.Observe != nil {
				w := &write{gate: t.gate, table: t, kind: "update", grant: a.grant, options: writeOptions{rule: t.rule, strength: t.strength}, began: a.began, count: int(a.changed)}
				t.gate.observeWrite(ctx, w, Applied, nil)
			}
		case pgerr.Stale(a.err), pgerr.Code(a.err) == pgerr.Isolation: // not sent, or refused before it did anything
		default:
			a.sent = true
		}
		return a
	}
	return a
}

// Seal raises the row's fence to just under the lease's, and with [Returning] reads the row as it then is. No older
// holder can write it any more, so that what has been read stays true until this grant writes, which under rule once it
// still can. A row that is sealed already, or written by this grant, is [AlreadyApplied]; it is read all the same.
//
// It needs a number free below the fence: leases of leasedb have one, for others see [Doubled].
//
// Options: [WithStrength], [Returning].
func (t *Table) Seal(ctx context.Context, lease Lease, key Key, options ...WriteOption) (Outcome, error) {
	w, err := t.write(ctx, "seal", lease, key, options, "Returning")
	if err != nil {
		return w.ended(ctx, err)
	}
	if !w.grant.even {
		return Failed, w.invalid("fence %d is not known to have a number free below it: use Doubled for fences from elsewhere", w.grant.fence)
	}
	s := w.newStatement()
	fence := s.theFence(w.grant.fence)
	column := quote(t.fenceCol)
	s.add("UPDATE ", t.ident, " AS t SET ", column, " = ", fence, " - 1 WHERE ", w.keyMatches(s),
		" AND t.", column, less, "(", fence, " - 1)", w.allowed(s))
	if err := w.assemble(s, nil); err != nil {
		return Failed, err
	}
	return w.run(ctx)
}
