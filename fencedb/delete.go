package fencedb

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// Delete removes the row that key names, and leaves a tombstone with the lease's fence: no older holder can bring the row
// back by [Table.Insert] or [Table.Upsert], and under rule once this grant itself cannot. A repeat is [AlreadyApplied].
// The tombstone is kept until fence.prune, which by default spares those younger than 30 days: whoever could still be
// about to write has to be gone by then. A row that was never there, or was removed around the gate, is [Missing] and
// leaves none.
//
// It needs schema fence in the table's database, for its tombstone, and READ COMMITTED. [Returning] reads the row as it
// was; not for a repeat, which has no row to read. Under rule once a row that this grant has written is [ErrOnce].
//
// Options: [WithRule], [WithStrength], [Where], [Returning], [WithRequestID].
func (t *Table) Delete(ctx context.Context, lease Lease, key Key, options ...WriteOption) (Outcome, error) {
	w, err := t.write(ctx, "delete", lease, key, options, "Where", "Returning", "WithRequestID")
	if err != nil {
		return w.ended(ctx, err)
	}
	if !t.leases {
		return Failed, fmt.Errorf("fencedb: table %s: a delete needs schema fence in the database, for its tombstone; or set a column that says the row is gone: %w",
			t.name, ErrSchema)
	}
	w.serial = true
	s := w.newStatement()
	s.add("DELETE FROM ", t.ident, " AS t WHERE ", w.keyMatches(s), " AND ", w.fenceTaken(s), w.further(s))
	// Under every key that the row has, in the table's order of keys: whoever brings it back may name it by another.
	var keep, bury []string
	for i, columns := range t.everyKey() {
		// The row first, as its own writes do, and then its keys.
		s.add(" AND coalesce((SELECT fence.floor(", w.relation(), ", ", t.identity(columns, func(c string) string { return "r." + quote(c) }),
			") FROM (SELECT t.", quotedList(columns, ", t."), " FROM ", t.ident, " AS t WHERE ", w.keyMatches(s), " LIMIT 1 FOR UPDATE) r), 0) IS NOT NULL")
		gone := func(c string) string {
			return "w.writegate_" + strconv.Itoa(i) + "_" + strconv.Itoa(slices.Index(columns, c))
		}
		for _, c := range columns {
			keep = append(keep, "t."+quote(c)+" AS "+strings.TrimPrefix(gone(c), "w."))
		}
		bury = append(bury, "fence.bury("+w.relation()+", "+t.identity(columns, gone)+", "+t.keyJSON(columns, gone)+", "+
			s.theFence(w.grant.fence)+", "+s.arg(w.grant.name)+"::text)")
	}
	if err := w.assemble(s, keep, bury...); err != nil {
		return Failed, err
	}
	return w.run(ctx)
}
