package fencedb

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/writegate/writegate/internal/pgerr"
)

// Row is one row of an UpdateMany.
type Row struct {
	Key Key
	Set Set
}

// Result is what became of one row of an UpdateMany.
type Result struct {
	Key     Key
	Outcome Outcome
	Err     error // a [WriteError], nil for Applied and AlreadyApplied
}

// ManyError says why an UpdateMany was not applied, or, if it was [Partial], what of it was not. errors.Is and errors.As
// look into each row's.
type ManyError struct {
	Table   string
	Rows    int           // of the call
	Applied int           // of those, written now or before; 0 unless it was Partial
	Refused []*WriteError // why, for each row that stood in the way, or was not written
	Err     error         // what befell the statement as a whole, if that is what happened

	again bool
}

func (e *ManyError) Error() string {
	if e.Err != nil {
		return fmt.Sprintf("fencedb: %s, %d rows: none is known to be written: %v", e.Table, e.Rows, e.Err)
	}
	const shown = 3
	var why []string
	for _, r := range e.Refused[:min(shown, len(e.Refused))] {
		why = append(why, strings.TrimPrefix(r.Error(), "fencedb: "))
	}
	if more := len(e.Refused) - shown; more > 0 {
		why = append(why, fmt.Sprintf("and %d more", more))
	}
	return fmt.Sprintf("fencedb: %s: %d of %d rows written: %s", e.Table, e.Applied, e.Rows, strings.Join(why, "; "))
}

// Unwrap returns the errors of the rows, and that of the whole.
func (e *ManyError) Unwrap() []error {
	errs := make([]error, 0, len(e.Refused)+1)
	for _, r := range e.Refused {
		errs = append(errs, r)
	}
	if e.Err != nil {
		errs = append(errs, e.Err)
	}
	return errs
}

// UpdateMany updates many rows, all of the same key and the same columns, in one statement. Each is compared as in
// [Table.Update]. All of them are written or none: if one is refused or missing, the error, a [ManyError], names it and all
// others that are, and nothing is written. With [Partial] what can be written is, and the error names what was not; it is
// nil only if every row was written, now or before by this grant.
//
// The results are in the order of rows. Rows are locked in the order of their keys, so that two calls that share rows do
// not lock each other out. In a caller's transaction a row that a trigger drops ([Suppressed]) leaves the others written:
// roll back.
//
// Values are sent as text and cast to their columns' types; expressions ([Expr]) are not possible, for there is one value
// for each row. Options: [WithRule], [WithStrength], [Where], [Partial], [WithRequestID].
func (t *Table) UpdateMany(ctx context.Context, lease Lease, rows []Row, options ...WriteOption) ([]Result, error) {
	if len(rows) == 0 {
		return nil, nil
	}
	w, err := t.write(ctx, "update_many", lease, rows[0].Key, options, "Where", "Partial", "WithRequestID")
	if w != nil {
		w.key = nil
	}
	var over *WriteError
	if err != nil && !errors.As(err, &over) {
		return nil, err
	}
	m := &many{write: w, rows: rows}
	if err := m.check(); err != nil {
		return nil, err
	}
	if over != nil {
		over.Key = nil
		return m.end(ctx, over)
	}
	return m.run(ctx)
}

type many struct {
	*write
	rows       []Row
	setColumns []string
	arrays     []string // of the columns, those of the key first
	digest     [2]int64 // of all keys, in the place of one's hashes in the record of a request
	results    []Result
	quick      *statement // what does it where nothing is in the way; nil where only the other statement will do
}

// check takes the values of all rows together, column by column.
func (m *many) check() error {
	t, w := m.table, m.write
	var err error
	if m.setColumns, err = t.checkSet(m.rows[0].Key, m.rows[0].Set); err != nil {
		return err
	}
	if len(m.setColumns) == 0 {
		return m.invalid("nothing to set")
	}
	if w.options.partial && w.options.request != "" {
		return m.invalid("Partial and WithRequestID: a repeat could not tell which rows the first had written")
	}
	columns := m.columns()
	values := make([]textArray, len(columns))
	for i, row := range m.rows {
		same := len(row.Key) == len(w.keyColumns) && len(row.Set) == len(m.setColumns)
		for j, c := range columns {
			of := map[string]any(row.Set)
			if j < len(w.keyColumns) {
				of = row.Key
			}
			value, there := of[c]
			if !there || !same {
				return m.invalid("row %d has key %v and columns %v; the first has %v and %v: all of them need the same",
					i, sortedKeys(row.Key), sortedKeys(row.Set), w.keyColumns, m.setColumns)
			}
			if value == nil && j < len(w.keyColumns) {
				return m.invalid("row %d: key column %q is NULL, which names no row", i, c)
			}
			if _, computed := value.(expression); computed {
				return m.invalid("row %d: column %q is set by an expression: use Update, or a statement of your own", i, c)
			}
			if err := values[j].add(t.columns[c].OID, value); err != nil {
				return m.invalid("column %q: value %d, %w", c, i, err)
			}
		}
	}
	for _, v := range values {
		m.arrays = append(m.arrays, v.String())
	}
	// Without a record of it, and where the key is known to find its rows by an index. In a caller's transaction what was
	// written of a part could not be taken back.
	if m.in == nil && !w.options.partial && w.options.request == "" && slices.ContainsFunc(t.keys, func(k []string) bool { return slices.Equal(k, w.keyColumns) }) {
		if err := m.buildQuick(); err != nil {
			return err
		}
	}
	return nil
}

// columns are those of the key, and then those that are set.
func (m *many) columns() []string { return append(slices.Clone(m.keyColumns), m.setColumns...) }

// given is SQL that has the rows of the call as a table, as far as the types of their columns allow.
func (m *many) given(s *statement) (unnest string, names, casts []string) {
	columns := m.columns()
	arrays := make([]string, len(columns))
	names, casts = make([]string, len(columns)), make([]string, len(columns))
	for j, c := range columns {
		column := m.table.columns[c]
		// As text and cast one by one: an array of arrays would be taken apart by unnest.
		arrays[j] = s.arg(m.arrays[j]) + "::pg_catalog.text::pg_catalog._text"
		names[j] = "writegate_" + strconv.Itoa(j)
		casts[j] = "g." + names[j] + "::" + column.Type + " AS " + names[j]
		if column.Collation != "" {
			casts[j] = "g." + names[j] + "::" + column.Type + " COLLATE " + column.Collation + " AS " + names[j]
		}
	}
	return "unnest(" + strings.Join(arrays, ", ") + ")", names, casts
}

// buildQuick makes the statement for when every row takes the write. It tells how many did, and no more. Rows come, and so are
// locked, in the order of their keys, since that is the order of what is looked for; but see quickSettings.
func (m *many) buildQuick() error {
	t, w := m.table, m.write
	s := w.newStatement()
	unnest, names, casts := m.given(s)
	keys := len(w.keyColumns)
	s.add("UPDATE ", t.ident, " AS t SET ")
	for j, c := range m.setColumns {
		s.add(quote(c), " = g.", names[keys+j], ", ")
	}
	s.add(quote(t.fenceCol), " = ", s.theFence(w.grant.fence), " FROM (SELECT ", strings.Join(casts, ", "), " FROM ", unnest, " AS g (", strings.Join(names, ", "), ")",
		" ORDER BY ", strings.Join(names[:keys], ", "), ") AS g WHERE ")
	for j, c := range w.keyColumns {
		s.add("t.", quote(c), " = g.", names[j], " AND ")
	}
	s.add(w.fenceTaken(s))
	if w.options.where != nil {
		s.add(" AND " + s.fragment(*w.options.where, w.grant.fence))
	}
	s.add(w.allowed(s))
	if s.err != nil {
		return m.invalid("%w", s.err)
	}
	m.quick = s
	return nil
}

// quickSettings keep PostgreSQL from hashing what it looks for, and then going through the table in whatever order that is in:
// two calls that share rows would lock each other out. What else it may do, merge or look up row by row, goes by the keys; should
// it ever not, then what ends as a deadlock is done again in order. A plan for any number of rows would be one for few.
const quickSettings = "SET LOCAL enable_hashjoin = off; SET LOCAL plan_cache_mode = force_custom_plan"

// build makes the statement that answers with a row for each that was not written, with what it found there, and writes
// nothing if one was not.
func (m *many) build() error {
	t, w := m.table, m.write
	seen := make(map[string]int, len(m.rows))
	var key []byte
	for i, row := range m.rows {
		key = key[:0]
		for _, c := range w.keyColumns {
			key = fmt.Appendf(key, "%q,", asText(t.columns[c].OID, row.Key[c]))
		}
		if other, twice := seen[string(key)]; twice {
			return m.invalid("rows %d and %d have the same key %s", other, i, row.Key)
		}
		seen[string(key)] = i
	}
	if w.options.request != "" {
		digest := sha256.New()
		for _, key := range slices.Sorted(maps.Keys(seen)) {
			_, _ = digest.Write([]byte(key))
		}
		sum := digest.Sum(nil)
		m.digest = [2]int64{int64(binary.BigEndian.Uint64(sum)), int64(binary.BigEndian.Uint64(sum[8:]))}
	}
	s := w.newStatement()
	unnest, names, casts := m.given(s)

	fence, column := s.theFence(w.grant.fence), quote(t.fenceCol)
	var join, order []string
	for j, c := range w.keyColumns {
		join = append(join, "t."+quote(c)+" = g."+names[j])
		order = append(order, "t."+quote(c))
	}
	matches := "true"
	if w.options.where != nil {
		matches = "coalesce(" + s.fragment(*w.options.where, w.grant.fence) + ", false)"
	}
	done := "false"
	if w.options.rule == Once && w.options.request == "" {
		done = "t." + column + " = " + fence
	}
	// Whether two keys are equal is the types' to say, where their texts do not.
	twice := "false"
	for _, c := range w.keyColumns {
		if !plainTypes[t.columns[c].OID] || t.columns[c].Collation != "" {
			twice = "count(*) OVER (PARTITION BY g." + strings.Join(names[:len(w.keyColumns)], ", g.") + ") > 1"
		}
	}
	all := "true"
	if !w.options.partial {
		all = "(SELECT count(*) FROM locked l WHERE l.passes OR l.done) = " + s.arg(len(m.rows)) + "::bigint"
	}
	unless := ""
	if twice != "false" {
		unless = " AND NOT EXISTS (SELECT 1 FROM given g GROUP BY g." + strings.Join(names[:len(w.keyColumns)], ", g.") + " HAVING count(*) > 1)"
	}
	given := func(c string) string { return "g." + names[slices.Index(w.keyColumns, c)] }
	shown := t.keyJSON(w.keyColumns, given)
	buried := "0::bigint"
	if t.leases {
		buried = "CASE WHEN l.writegate_n IS NULL THEN fence.buried(" + w.relation() + ", " + t.identity(w.keyColumns, given) + ") ELSE 0 END"
	}
	s.add("WITH given AS MATERIALIZED (SELECT g.writegate_n, ", strings.Join(casts, ", "),
		" FROM ", unnest, " WITH ORDINALITY AS g (", strings.Join(names, ", "), ", writegate_n)),",
		// In the order of the keys. What is found is the row as it is once it is locked, whoever had it before.
		" locked AS MATERIALIZED (SELECT g.writegate_n, t.", column, " AS found, ", matches, " AS matches, ",
		w.fenceTaken(s), " AND ", matches, " AS passes, ", done, " AS done",
		" FROM given g JOIN ", t.ident, " AS t ON ", strings.Join(join, " AND "),
		" ORDER BY ", strings.Join(order, ", "), " FOR NO KEY UPDATE OF t),",
		" verdict AS MATERIALIZED (SELECT ", all, unless, w.allowed(s), " AS ok),",
		" written AS (UPDATE ", t.ident, " AS t SET ")
	for j, c := range m.setColumns {
		s.add(quote(c), " = g.", names[len(w.keyColumns)+j], ", ")
	}
	s.add(column, " = ", fence, " FROM given g JOIN locked l ON l.writegate_n = g.writegate_n WHERE (SELECT v.ok FROM verdict v) AND l.passes AND ",
		strings.Join(join, " AND "), " AND ", w.fenceTaken(s), " RETURNING g.writegate_n)")
	list := "g.writegate_n, l.found, coalesce(l.matches, true), " + buried + ", " + shown + "::text, " + twice
	from := " FROM given g LEFT JOIN locked l ON l.writegate_n = g.writegate_n WHERE NOT EXISTS (SELECT 1 FROM written w WHERE w.writegate_n = g.writegate_n)"
	if w.options.request != "" {
		// It is asked for by the rows that were written, and so carried out with them.
		s.add(", noted AS MATERIALIZED (SELECT fence.request_applied(", w.requestArgs(s), ", 'update_many', ", w.relation(), ", ",
			s.arg(m.digest[0]), "::bigint, ", s.arg(m.digest[1]), "::bigint, '{}', NULL) AS ok FROM verdict v WHERE v.ok)")
		from += " OR NOT (SELECT coalesce(bool_and(noted.ok), true) FROM noted)"
	}
	s.add(" SELECT ", list, from, " ORDER BY g.writegate_n")
	if s.err != nil {
		return m.invalid("%w", s.err)
	}
	w.sql, w.args, w.rows = s.String(), s.args, true
	return nil
}

// plainTypes are those of which equal values have equal texts.
var plainTypes = map[uint32]bool{
	16: true, 18: true, 20: true, 21: true, 23: true, 25: true, 26: true, 1043: true, 1082: true, 2950: true, // bool, "char", int8, int2, int4, text, oid, varchar, date, uuid
}

// left is a row that was not written.
type left struct {
	n       int
	found   *int64
	matches bool
	buried  int64
	key     string
	twice   bool // another row of the call has the same key
}

func (m *many) run(ctx context.Context) ([]Result, error) {
	if m.quick != nil {
		done, err := m.sendQuick(ctx)
		if err != nil {
			_, err := m.failed(err)
			return m.end(ctx, err)
		}
		if done {
			m.results = make([]Result, len(m.rows))
			for i, row := range m.rows {
				m.results[i] = Result{Key: row.Key, Outcome: Applied}
			}
			return m.end(ctx, nil)
		}
	}
	if err := m.build(); err != nil {
		return nil, err
	}
	again := false
	for {
		unwritten, err := m.sendMany(ctx)
		var held *suppressedError
		if err != nil && !errors.As(err, &held) {
			_, err := m.failed(err)
			return m.end(ctx, err)
		}
		suppressed, err := m.judge(ctx, unwritten)
		if suppressed && !again && m.in == nil && !m.options.partial {
			again = true // nothing is written; rows may have come into being between the snapshot and the locks
			continue
		}
		return m.end(ctx, err)
	}
}

// errNotAll rolls back what was written of a part.
var errNotAll = errors.New("not all of the rows were written")

// sendQuick writes all of the rows, or none of them: then it is to be found out why.
func (m *many) sendQuick(ctx context.Context) (done bool, err error) {
	err = m.inTransaction(ctx, quickSettings, func(tx transaction) error {
		n, err := tx.exec(ctx, m.quick.String(), m.quick.args)
		if err == nil && n < int64(len(m.rows)) {
			err = errNotAll
		}
		return err
	})
	switch {
	case errors.Is(err, errNotAll), pgerr.Code(err) == "40P01", m.learns(err, m.claimed):
		return false, nil
	}
	return err == nil, err
}

// inTransaction runs f in a transaction of the pool's, and again on another connection where it never got to the server.
func (m *many) inTransaction(ctx context.Context, settings string, f func(transaction) error) error {
	for attempt := 0; ; attempt++ {
		s, err := m.gate.base.session(ctx)
		if err == nil {
			_, err = inOwnTransaction(ctx, s, settings, func(tx transaction) (int64, error) { return 0, f(tx) })
			s.release()
		}
		if !pgerr.Stale(err) || ctx.Err() != nil || attempt > m.gate.base.spares() {
			return err
		}
	}
}

// suppressedError rolls a whole statement back of which a trigger dropped a part.
type suppressedError struct{}

func (*suppressedError) Error() string { return "a trigger dropped rows" }

// sendMany runs the statement. On the pool that is a transaction, so that it can still be undone once it is known what of
// it was not written.
func (m *many) sendMany(ctx context.Context) ([]left, error) {
	var unwritten []left
	once := func(l link) (int64, error) {
		unwritten = nil
		return l.query(ctx, m.sql, m.args, func(r row) error {
			var x left
			if err := r.scan(&x.n, &x.found, &x.matches, &x.buried, &x.key, &x.twice); err != nil {
				return err
			}
			unwritten = append(unwritten, x)
			return nil
		})
	}
	if m.in != nil {
		_, err := once(m.in.link)
		return unwritten, err
	}
	err := m.inTransaction(ctx, "", func(tx transaction) error {
		n, err := once(tx)
		if err == nil && n > 0 && n < int64(len(m.rows)) && !m.options.partial && m.anySuppressed(unwritten) {
			err = &suppressedError{}
		}
		return err
	})
	return unwritten, err
}

// anySuppressed reports whether a row that would have taken the write was not written although others were.
func (m *many) anySuppressed(unwritten []left) bool {
	for _, x := range unwritten {
		if m.outcomeOf(x) == Suppressed {
			return true
		}
	}
	return false
}

// outcomeOf tells what a row that was not written says by itself.
func (m *many) outcomeOf(x left) Outcome {
	fence := m.grant.fence
	switch {
	case x.found == nil && x.buried > fence, x.found != nil && *x.found > fence:
		return Stale
	case x.found == nil:
		return Missing
	case *x.found == fence && m.options.rule == Once:
		return AlreadyApplied
	case !x.matches:
		return Unmatched
	}
	return Suppressed
}

// judge fills in the results. suppressed says that rows were left out which nothing accounts for.
func (m *many) judge(ctx context.Context, unwritten []left) (suppressed bool, err error) {
	m.results = make([]Result, len(m.rows))
	for i, row := range m.rows {
		m.results[i] = Result{Key: row.Key, Outcome: Applied}
	}
	if len(unwritten) == 0 {
		return false, nil
	}
	for _, x := range unwritten {
		if x.twice {
			return false, m.invalid("two rows have keys that are equal to the database, %s and another", m.rows[x.n-1].Key)
		}
	}
	state := "held"
	if len(unwritten) == len(m.rows) && (m.options.request != "" || m.live()) {
		var done bool
		longer, cancel := m.gate.afterwards(ctx)
		defer cancel()
		if done, state, err = m.explainWhole(longer); done || err != nil {
			return false, err
		}
	}
	e := &ManyError{Table: m.table.name, Rows: len(m.rows)}
	var spared []int
	applied := len(m.rows) - len(unwritten)
	for _, x := range unwritten {
		i := x.n - 1
		outcome := m.outcomeOf(x)
		if state != "held" && (outcome == Missing || outcome == Unmatched) {
			outcome = Suppressed // what the lease says comes first, as for a single row
		}
		m.results[i].Outcome = outcome
		we := m.error(outcome, nil)
		we.Key = m.rows[i].Key
		if x.found != nil {
			we.Current = *x.found
		}
		switch outcome {
		case AlreadyApplied:
			if m.options.request != "" {
				m.results[i].Outcome, we.Outcome, we.Err = Failed, Failed, ErrOnce
				break
			}
			applied++
			continue
		case Suppressed:
			spared = append(spared, i)
			continue
		case Stale:
			we.Reason, we.Current = "stale", max(we.Current, x.buried)
			m.gate.refuse(ctx, m.write, we, x.key)
		}
		m.results[i].Err = we
		e.Refused = append(e.Refused, we)
	}
	// Rows that nothing in them speaks against: the lease is over, or they were held back because of others, or dropped.
	var lost *WriteError
	for _, i := range spared {
		we := m.error(Suppressed, nil)
		if state != "held" {
			we = m.error(LeaseLost, nil)
			we.Reason = state
			if lost == nil {
				lost = m.error(LeaseLost, nil) // one refusal, of all that the lease alone stands against
				lost.Reason = state
				m.gate.refuse(ctx, m.write, lost, `"(many rows)"`)
			}
			we.Verdict, we.CurrentHolder, we.AuditErr = lost.Verdict, lost.CurrentHolder, lost.AuditErr
			we.Key = m.rows[i].Key
			m.results[i].Outcome, m.results[i].Err = LeaseLost, we
			e.Refused = append(e.Refused, we)
			continue
		}
		if !m.options.partial && len(e.Refused) > 0 {
			we = m.error(Failed, errHeldBack)
		}
		we.Key = m.rows[i].Key
		m.results[i].Outcome, m.results[i].Err = we.Outcome, we
		if we.Outcome == Suppressed {
			suppressed = true
			e.Refused = append(e.Refused, we)
		}
	}
	if len(e.Refused) == 0 {
		return false, nil
	}
	if m.options.partial || m.in != nil && suppressed {
		e.Applied = applied
	} else {
		for i := range m.results {
			if m.results[i].Outcome == Applied {
				we := m.error(Failed, errHeldBack)
				we.Key = m.rows[i].Key
				m.results[i].Outcome, m.results[i].Err = Failed, we
			}
		}
	}
	return suppressed, e
}

var errHeldBack = errors.New("not written, because others of the same call were not")

// explainWhole asks what may have kept the whole statement from writing: the request was applied, or the lease is over.
func (m *many) explainWhole(ctx context.Context) (done bool, state string, err error) {
	s := m.newStatement()
	state, request := "'held'", "NULL::text"
	if m.live() {
		state = m.leaseState(s)
	}
	if m.options.request != "" {
		request = "(SELECT CASE WHEN (r.kind, r.relation, r.key_hash, r.key_check) = ('update_many', " + m.relation() + ", " +
			s.arg(m.digest[0]) + "::bigint, " + s.arg(m.digest[1]) + "::bigint) THEN 'this' ELSE 'another' END FROM fence.request_result(" + m.requestArgs(s) + ") r)"
	}
	s.add("SELECT ", state, ", ", request)
	var applied *string
	if err := m.ask(ctx, s, &state, &applied); err != nil {
		return false, "", m.error(Failed, fmt.Errorf("rows were not written, and asking why failed: %w", err))
	}
	switch {
	case applied != nil && *applied == "this":
		for i := range m.results {
			m.results[i].Outcome = AlreadyApplied
		}
		return true, state, nil
	case applied != nil:
		return false, state, m.error(Failed, ErrRequest)
	}
	return false, state, nil
}

// end gives every result its outcome, and tells the observer.
func (m *many) end(ctx context.Context, err error) ([]Result, error) {
	outcome := Applied
	var whole *WriteError
	var part *ManyError
	switch {
	case errors.As(err, &part):
		outcome = part.Refused[0].Outcome
		m.count = part.Applied
	case err != nil && !errors.As(err, &whole): // the call was invalid, as the database alone could tell
		return nil, err
	case errors.As(err, &whole):
		outcome = whole.Outcome
		m.results = make([]Result, len(m.rows))
		for i, row := range m.rows {
			we := *whole
			we.Key = row.Key
			m.results[i] = Result{row.Key, outcome, &we}
		}
		err = &ManyError{Table: m.table.name, Rows: len(m.rows), Err: whole, again: whole.again}
	case err == nil:
		m.count = len(m.rows)
		if !slices.ContainsFunc(m.results, func(r Result) bool { return r.Outcome == Applied }) {
			outcome = AlreadyApplied
		}
	}
	_, _ = m.finish(ctx, outcome, err)
	return m.results, err
}
