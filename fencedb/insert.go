package fencedb

import (
	"context"
	"slices"
	"strings"
)

// Insert adds a row under the lease's fence. If row names a key of the table, a row of an older grant in its place is
// [ErrExists], a repeat under rule once is [AlreadyApplied], and a fence below that under which the row was deleted
// ([Table.Delete]) is [Stale]. A row whose key the database makes (identity columns, defaults) has nothing to be compared
// with: there nothing but [Live], or [WithRequestID], keeps a superseded holder or a repeat from adding another. A conflict
// with another unique index than that key's is the database's error 23505, as ever.
//
// It needs READ COMMITTED where schema fence is in the database. Options: [WithRule], [WithStrength], [Returning],
// [WithRequestID].
func (t *Table) Insert(ctx context.Context, lease Lease, row Set, options ...WriteOption) (Outcome, error) {
	w, err := newWrite(ctx, t.gate, t, "insert", lease, options, "Returning", "WithRequestID")
	if w != nil {
		w.key, w.keyColumns = t.keyOf(row)
		w.newRow, w.otherKeys = row, t.otherKeysOf(row, w.keyColumns)
	}
	if err != nil {
		return w.ended(ctx, err)
	}
	columns, err := t.checkSet(nil, row)
	if err != nil {
		return Failed, err
	}
	s := w.newStatement()
	w.insertInto(s, columns, row)
	if w.keyColumns != nil {
		s.add(" ON CONFLICT (", quotedList(w.keyColumns, ", "), ") DO NOTHING")
	}
	if err := w.assemble(s, nil); err != nil {
		return Failed, err
	}
	return w.run(ctx)
}

// Upsert updates the row that key names as [Table.Update] does, or adds it as [Table.Insert] does, in one statement. The
// row's fence never falls by it: a row that has seen a newer fence is left as it is, and so is its fence. In an expression
// of set the columns of the row that is there are written t.column; such a column needs a value in [Inserting] for a row
// that is not.
//
// Options: [WithRule], [WithStrength], [Where], [Inserting], [Returning], [WithRequestID]. [Where] applies to a row that is
// there.
func (t *Table) Upsert(ctx context.Context, lease Lease, key Key, set Set, options ...WriteOption) (Outcome, error) {
	w, err := t.write(ctx, "upsert", lease, key, options, "Where", "Inserting", "Returning", "WithRequestID")
	if err != nil {
		return w.ended(ctx, err)
	}
	columns, err := t.checkSet(key, set)
	if err != nil {
		return Failed, err
	}
	if _, err := t.checkSet(key, w.options.inserting); err != nil {
		return Failed, err
	}
	for _, c := range w.keyColumns {
		if t.columns[c].Always {
			return Failed, w.invalid("column %q is generated always, by the database: a row that is not there cannot be given one", c)
		}
	}
	if !slices.ContainsFunc(t.keys, func(k []string) bool { return slices.Equal(k, w.keyColumns) }) {
		return Failed, w.invalid("key %v has no unique index, and so the database cannot tell whether the row is there", w.keyColumns)
	}
	row := Set{}
	for c, value := range key {
		row[c] = value
	}
	for _, c := range columns {
		_, computed := set[c].(expression)
		if _, ok := w.options.inserting[c]; computed && !ok {
			return Failed, w.invalid("column %q is set by an expression: say with Inserting what it is in a new row", c)
		}
		row[c] = set[c]
	}
	for c, value := range w.options.inserting {
		row[c] = value
	}
	w.newRow, w.otherKeys = row, t.otherKeysOf(row, w.keyColumns)
	s := w.newStatement()
	w.insertInto(s, sortedKeys(row), row)
	s.add(" ON CONFLICT (", quotedList(w.keyColumns, ", "), ") DO UPDATE SET ")
	for _, c := range columns {
		if _, differs := w.options.inserting[c]; differs {
			s.add(quote(c), " = ", s.value(t.columns[c], set[c], w.grant.fence), ", ")
		} else {
			s.add(quote(c), " = excluded.", quote(c), ", ")
		}
	}
	s.add(quote(t.fenceCol), " = excluded.", quote(t.fenceCol), " WHERE ", w.fenceTaken(s))
	if w.options.where != nil {
		s.add(" AND ", s.fragment(*w.options.where, w.grant.fence))
	}
	if err := w.assemble(s, nil); err != nil {
		return Failed, err
	}
	return w.run(ctx)
}

// keyOf returns the first key of the table that the row has values for and that the database keeps unique.
func (t *Table) keyOf(row Set) (Key, []string) {
	for _, columns := range t.keys {
		if key := valuesOf(row, columns); key != nil {
			return key, columns
		}
	}
	return nil, nil
}

// otherKeysOf returns the keys that the row has values for, but for one.
func (t *Table) otherKeysOf(row Set, but []string) [][]string {
	var others [][]string
	for _, columns := range t.everyKey() {
		if !slices.Equal(columns, but) && valuesOf(row, columns) != nil {
			others = append(others, columns)
		}
	}
	return others
}

// valuesOf returns the values that row gives for columns, nil if it does not give all of them.
func valuesOf(row Set, columns []string) Key {
	key := Key{}
	for _, c := range columns {
		value, ok := row[c]
		if _, computed := value.(expression); !ok || value == nil || computed {
			return nil
		}
		key[c] = value
	}
	return key
}

// insertInto adds the part that both have: a new row, if the key's floor, the lease and the request allow one.
func (w *write) insertInto(s *statement, columns []string, row Set) {
	t := w.table
	names, values := make([]string, 0, len(columns)+1), make([]string, 0, len(columns)+1)
	for _, c := range columns {
		names = append(names, quote(c))
		values = append(values, s.value(t.columns[c], row[c], w.grant.fence))
	}
	fence := s.theFence(w.grant.fence)
	names, values = append(names, quote(t.fenceCol)), append(values, fence)
	s.add("INSERT INTO ", t.ident, " AS t (", strings.Join(names, ", "), ") SELECT ", strings.Join(values, ", "),
		" WHERE ", fence, " > 0", w.allowed(s))
	if !t.leases {
		return
	}
	than := less
	if w.options.rule == Term {
		than = lessOrEqual
	}
	// In the table's order of keys, as a delete does.
	for _, columns := range t.everyKey() {
		if slices.Equal(columns, w.keyColumns) || slices.ContainsFunc(w.otherKeys, func(k []string) bool { return slices.Equal(k, columns) }) {
			w.serial = true
			key := t.identity(columns, func(c string) string { return s.typed(t.columns[c], row[c]) })
			floor := "fence.floor(" + w.relation() + ", " + key + ")"
			if w.kind == "upsert" && slices.Equal(columns, w.keyColumns) {
				// The row first, if it is there: whoever has it, perhaps to delete it next, must not find us holding its floor.
				floor += " FROM (SELECT count(*) AS n FROM (SELECT 1 FROM " + t.ident + " AS t WHERE " + w.keyMatches(s) + " FOR NO KEY UPDATE) x) r WHERE r.n >= 0"
			}
			s.add(" AND (SELECT ", floor, ")", than, fence)
		}
	}
}
