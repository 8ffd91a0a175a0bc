package fencedb

import "context"

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
	for _, c := range columns {
		s.add(quote(c), " = ", s.value(t.columns[c], set[c], w.grant.fence), ", ")
	}
	s.add(quote(t.fenceCol), " = ", s.theFence(w.grant.fence))
	s.add(" WHERE ", w.keyMatches(s), " AND ", w.fenceTaken(s), w.further(s))
	if err := w.assemble(s, nil); err != nil {
		return Failed, err
	}
	return w.run(ctx)
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
