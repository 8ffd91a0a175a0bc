package fencedb

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/writegate/writegate/internal/pgerr"
)

// WriteOption changes one write. One that a kind of write has no use for is refused.
type WriteOption func(*writeOptions)

type writeOptions struct {
	given     []string
	rule      Rule
	strength  Strength
	where     *expression
	into      *reader
	request   string
	inserting Set
	partial   bool
	target    *Table
	targetKey Key
}

func (o *writeOptions) set(name string) { o.given = append(o.given, name) }

// WithRule compares by another rule than the table's.
func WithRule(r Rule) WriteOption {
	return func(o *writeOptions) { o.set("WithRule"); o.rule = r }
}

// WithStrength writes with another strength than the table's.
func WithStrength(s Strength) WriteOption {
	return func(o *writeOptions) { o.set("WithStrength"); o.strength = s }
}

// Where makes the write depend on a condition beside the fence: SQL in which columns are those of the row as it is, and
// @name stands for an argument. Where it does not hold for a row that takes the fence, the outcome is [Unmatched]. The
// text is part of the statement: never make it out of what somebody else has written. In an Upsert, where there are two
// rows to speak of, the columns of the one that is there are written t.column.
func Where(sql string, args ...Args) WriteOption {
	return func(o *writeOptions) { o.set("Where"); o.where = &expression{sql, merge(args)} }
}

// WithRequestID names the request that the write carries out, by up to 255 bytes of the caller's choosing. A repeat with
// the same id under the same grant is not applied again, whatever the rule: it is [AlreadyApplied], and returns what the
// first returned. Applied and put on record in one statement; the record is kept until fence.prune. It needs schema
// fence in the table's database, and READ COMMITTED.
func WithRequestID(id string) WriteOption {
	return func(o *writeOptions) { o.set("WithRequestID"); o.request = id }
}

// Inserting gives an Upsert the values of columns for a row that is not there yet, where they differ from those that it
// updates one with, or beside them.
func Inserting(set Set) WriteOption {
	return func(o *writeOptions) { o.set("Inserting"); o.inserting = set }
}

// Partial lets an UpdateMany write what can be written, whatever becomes of the others.
func Partial() WriteOption {
	return func(o *writeOptions) { o.set("Partial"); o.partial = true }
}

// Target says which row a statement of one's own writes, so that the gate can find out why it changed nothing, and which
// rule and strength apply.
func Target(table *Table, key Key) WriteOption {
	return func(o *writeOptions) { o.set("Target"); o.target, o.targetKey = table, key }
}

// write is one protected write on its way.
type write struct {
	gate       *Gate
	table      *Table // nil for a statement of the caller's without a target
	kind       string
	grant      grant
	key        Key
	keyColumns []string
	options    writeOptions
	newRow     Set        // of an insert or upsert
	otherKeys  [][]string // that it has values for, beside key
	in         *caller
	pinned     bool // the transaction holds the lease already

	sql     string
	args    []any
	rows    bool     // it answers with rows, and their number is what it changed
	returns []string // columns that it returns
	serial  bool     // it calls what needs READ COMMITTED
	first   bool     // the lease has to be locked by a statement before it
	claimed bool     // it tells guards whose it is

	began   time.Time
	count   int   // rows written, for the signals
	repeats int64 // how often it has been refused before, just as it was now
}

// newWrite checks all that can be checked before a statement is built. The options that this kind of write takes beside
// rule and strength are in takes.
func newWrite(ctx context.Context, gate *Gate, table *Table, kind string, lease Lease, options []WriteOption, takes ...string) (*write, error) {
	w := &write{gate: gate, table: table, kind: kind, began: time.Now()}
	for _, option := range options {
		option(&w.options)
	}
	if table == nil {
		w.table = w.options.target
	}
	o := &w.options
	for _, name := range o.given {
		if name != "WithRule" && name != "WithStrength" && !slices.Contains(takes, name) {
			return nil, w.invalid("%s has no use for option %s", kind, name)
		}
	}
	if t := w.table; t != nil {
		if t.gate != gate {
			return nil, w.invalid("the table belongs to another gate")
		}
		w.in = t.in
		if o.rule == "" {
			o.rule = t.rule
		}
		if o.strength == "" {
			o.strength = t.strength
		}
	} else {
		if o.rule == "" {
			o.rule = Once
		}
		if o.strength == "" {
			o.strength = Fenced
		}
	}
	if o.rule != Once && o.rule != Term {
		return nil, w.invalid("rule %q: want %q or %q", o.rule, Once, Term)
	}
	if o.strength != Fenced && o.strength != Live && o.strength != InTx {
		return nil, w.invalid("strength %q: want %q, %q or %q", o.strength, Fenced, Live, InTx)
	}
	schema := w.table == nil || w.table.leases
	if o.strength == Live && !schema {
		return nil, w.invalid("strength live needs the leases in the same database, and it has no schema fence: %w", ErrSchema)
	}
	if slices.Contains(o.given, "WithRequestID") {
		if len(o.request) < 1 || len(o.request) > 255 || storable(o.request) != o.request {
			return nil, w.invalid("request id of %d bytes: want 1 to 255 bytes of UTF-8 without NUL", len(o.request))
		}
		if !schema {
			return nil, w.invalid("a request id needs schema fence in the database, to be kept in: %w", ErrSchema)
		}
	}
	if o.into != nil && w.table != nil && kind != "exec" {
		columns, err := o.into.of(w.table)
		if err != nil {
			return nil, err
		}
		w.returns = columns
	}
	var err error
	if w.grant, err = grantOf(lease); err != nil {
		if lease == nil {
			return w, &WriteError{Outcome: LeaseLost, Table: w.tableName(), Err: err}
		}
		return w, w.error(LeaseLost, err)
	}
	if p := w.in.pinned(ctx); p != nil && p.fence == w.grant.fence && p.name == w.grant.name {
		w.pinned = true
	}
	if o.strength == InTx && !w.pinned && kind != "classify" {
		return nil, w.invalid("strength in_tx: this write has to be in a transaction that Gate.InTx has pinned to lease %q (fence %d)",
			w.grant.name, w.grant.fence)
	}
	if o.strength == Live && w.grant.token == "" {
		return w, w.error(LeaseLost, errors.New("strength live needs the grant's token, and this lease has none"))
	}
	return w, nil
}

func (w *write) tableName() string {
	if w.table == nil {
		return ""
	}
	return w.table.name
}

// invalid is the error of a call that cannot be carried out, whatever the database holds.
func (w *write) invalid(format string, args ...any) error {
	what := w.kind
	if w.table != nil {
		what = "table " + w.table.name + ": " + w.kind
	}
	return fmt.Errorf("fencedb: %s: "+format, append([]any{what}, args...)...)
}

func (w *write) error(outcome Outcome, err error) *WriteError {
	return &WriteError{
		Outcome: outcome, Table: w.tableName(), Key: w.key,
		Lease: w.grant.name, Fence: w.grant.fence, Holder: w.grant.holder, Err: err,
	}
}

// write prepares a write of the row that key names.
func (t *Table) write(ctx context.Context, kind string, lease Lease, key Key, options []WriteOption, takes ...string) (*write, error) {
	columns, err := t.checkKey(key)
	if err != nil {
		return nil, err
	}
	w, err := newWrite(ctx, t.gate, t, kind, lease, options, takes...)
	if w != nil {
		w.key, w.keyColumns = key, columns
	}
	var e *WriteError
	if errors.As(err, &e) {
		e.Key = key
	}
	return w, err
}

// ended is how a write that newWrite has turned down ends: refused for its lease, or invalid.
func (w *write) ended(ctx context.Context, err error) (Outcome, error) {
	var e *WriteError
	if errors.As(err, &e) {
		return w.finish(ctx, LeaseLost, err)
	}
	return Failed, err
}

// finish tells the observer.
func (w *write) finish(ctx context.Context, outcome Outcome, err error) (Outcome, error) {
	w.gate.observeWrite(ctx, w, outcome, err)
	if w.repeats > 0 && w.in == nil { // in a caller's transaction, others may be waiting for its locks
		// Whoever is told the same again and again, and goes on, must not take the server from those who do not.
		sleep(ctx, min(time.Duration(w.repeats)*slowdown, slowest))
	}
	return outcome, err
}

func (w *write) live() bool { return w.options.strength == Live && !w.pinned }

func (w *write) newStatement() *statement {
	if w.in != nil {
		return &statement{text: w.in.text()}
	}
	return &statement{text: w.gate.base.text()}
}

// keyMatches is the condition that finds the row.
func (w *write) keyMatches(s *statement) string {
	var parts []string
	for _, c := range w.keyColumns {
		parts = append(parts, "t."+quote(c)+" = "+s.typed(w.table.columns[c], w.key[c]))
	}
	return strings.Join(parts, " AND ")
}

// keyJSON is the key as people are shown it: of the usual types the same however its values were given.
func (w *write) keyJSON(s *statement) string {
	return w.table.keyJSON(w.keyColumns, func(c string) string { return s.typed(w.table.columns[c], w.key[c]) })
}

// keyJSON is a key whose columns have the values that are SQL.
func (t *Table) keyJSON(columns []string, value func(string) string) string {
	var parts []string
	for _, c := range columns {
		parts = append(parts, literal(c)+", "+canonical(t.columns[c].OID, value(c)))
	}
	return "pg_catalog.jsonb_build_object(" + strings.Join(parts, ", ") + ")"
}

// identity are the two hashes by which tombstones and requests know a key: the same for values that are equal.
func (w *write) identity(s *statement) string {
	return w.table.identity(w.keyColumns, func(c string) string { return s.typed(w.table.columns[c], w.key[c]) })
}

// identity hashes a key whose columns have the values that are SQL.
func (t *Table) identity(columns []string, value func(string) string) string {
	var parts []string
	for _, c := range columns {
		column, v := t.columns[c], value(c)
		if column.unhashed {
			v = "(" + v + ")::pg_catalog.text"
		} else if column.Collation != "" {
			v = "(" + v + ") COLLATE " + column.Collation
		}
		parts = append(parts, v)
	}
	row := "ROW(" + strings.Join(parts, ", ") + ")"
	return "pg_catalog.hash_record_extended(" + row + ", 0), pg_catalog.hash_record_extended(" + row + ", 1)"
}

// canonical is a value as the audit shows it: of the usual types equal ones look the same, in every session.
func canonical(oid uint32, value string) string {
	switch oid {
	case 1184: // timestamptz
		return "(" + value + " AT TIME ZONE 'UTC')"
	case 1700: // numeric
		return "pg_catalog.trim_scale(" + value + ")"
	case 1042: // char(n)
		return value + "::pg_catalog.text"
	}
	return value
}

func literal(text string) string {
	text = strings.ReplaceAll(text, "'", "''")
	if strings.Contains(text, `\`) {
		return "E'" + strings.ReplaceAll(text, `\`, `\\`) + "'"
	}
	return "'" + text + "'"
}

func literals(texts []string) string {
	list := make([]string, len(texts))
	for i, text := range texts {
		list[i] = literal(text)
	}
	return strings.Join(list, ", ")
}

func (w *write) relation() string { return literal(w.table.ident) + "::pg_catalog.regclass" }

// The comparisons that it is all about are PostgreSQL's own, whatever a search_path holds.
const (
	less        = " OPERATOR(pg_catalog.<) "
	lessOrEqual = " OPERATOR(pg_catalog.<=) "
)

// fenceTaken is the condition under which a row takes the fence.
func (w *write) fenceTaken(s *statement) string {
	fence := s.theFence(w.grant.fence)
	column := "t." + quote(w.table.fenceCol)
	if w.options.rule == Term {
		// 0 <= 0 would let an ungranted fence write a fresh row
		return column + lessOrEqual + fence + " AND " + fence + " OPERATOR(pg_catalog.>) 0"
	}
	return column + less + fence
}

// further adds what a write depends on beside the row's fence. As scalar subqueries these are evaluated once, before
// the row is looked for: the lease is locked first. It has to be these functions, which lock; see there why reading the
// tables would not do.
func (w *write) further(s *statement) string {
	var b strings.Builder
	if w.options.where != nil {
		b.WriteString(" AND " + s.fragment(*w.options.where, w.grant.fence))
	}
	b.WriteString(w.allowed(s))
	return b.String()
}

func (w *write) allowed(s *statement) string {
	var b strings.Builder
	if w.live() {
		w.serial = true
		b.WriteString(" AND " + w.liveCall(s))
	} else if w.marks() {
		b.WriteString(" AND (SELECT " + w.mark(s) + ")")
	}
	if w.options.request != "" {
		w.serial = true
		b.WriteString(" AND (SELECT fence.request_is_new(" + w.requestArgs(s) + "))")
	}
	return b.String()
}

// marks says that a guard, should there be one, has to be told that this is the gate's write, because it may not show, as a
// second one of a row under rule term does not. Whether there is one now, only the table knows. An entered transaction, which
// a Live write makes of its own, tells it already.
func (w *write) marks() bool {
	return w.table != nil && w.table.leases && !w.pinned && !w.live() && (w.kind != "update" || w.options.rule == Term)
}

func (w *write) mark(s *statement) string {
	return "pg_catalog.set_config('fence.marked', " + s.theFence(w.grant.fence) + "::text, true) IS NOT NULL"
}

// liveCall is true if the lease is this grant's, and keeps it that way until the transaction ends: see fence.live_lease, and
// fence.live, which has the better words for an isolation level that will not do. Where there may be a guard it leaves it word.
func (w *write) liveCall(s *statement) string {
	name, token, fence := w.grantValues(s)
	live := "(SELECT CASE WHEN pg_catalog.current_setting('transaction_isolation') OPERATOR(pg_catalog.=) 'read committed'" +
		" THEN l.expires_at OPERATOR(pg_catalog.>) pg_catalog.clock_timestamp() ELSE fence.live(" + name + ", " + token + ", " + fence + ") END" +
		fromLiveLease(name, token, fence) + ")"
	if w.claimed = w.claims(); w.claimed {
		live += " AND (SELECT pg_catalog.set_config('fence.entered', " + s.arg(w.grant.claim()) + "::pg_catalog.text, true) IS NOT NULL)"
	}
	return live
}

// fromLiveLease finds the grant's lease, as l, if it is held, and locks it.
func fromLiveLease(name, token, fence string) string {
	return " FROM fence.live_lease AS l WHERE l.name OPERATOR(pg_catalog.=) " + name + " AND l.fence OPERATOR(pg_catalog.=) " + fence +
		" AND l.proof OPERATOR(pg_catalog.=) pg_catalog.uuid_hash_extended(" + token + ", 0)"
}

// claims says that a guard, should there be one, has to be told whose the transaction is. A write that raises the row's fence is left
// to find that out by being refused, which changes nothing, for telling costs as much as asking.
func (w *write) claims() bool {
	raises := (w.kind == "update" || w.kind == "update_many") && w.options.rule == Once
	return w.in != nil || w.table == nil || !raises || w.table.guarded.Load()
}

// learns reports whether a write was refused because it had claimed nothing, and has those that follow do so. What the table is known
// to be by now says nothing about what was sent.
func (w *write) learns(err error, claimed bool) bool {
	if pgerr.Code(err) != pgerr.Unproven || !w.live() || claimed {
		return false
	}
	w.table.guarded.Store(true)
	if w.table.usual != nil {
		w.table.usual.list.Store(nil)
	}
	return true
}

// leaseState asks what became of the grant; it explains, and decides nothing. In a caller's transaction whose isolation level will not
// do it may be what an old snapshot shows: then fence.live says so.
func (w *write) leaseState(s *statement) string {
	name, token, fence := w.grantValues(s)
	args := "(" + name + ", " + token + ", " + fence + ")"
	if w.in == nil {
		return "fence.lease_state" + args
	}
	return "CASE WHEN pg_catalog.current_setting('transaction_isolation') OPERATOR(pg_catalog.=) 'read committed' THEN fence.lease_state" + args +
		" ELSE fence.live" + args + "::pg_catalog.text END"
}

func (w *write) grantValues(s *statement) (name, token, fence string) {
	return s.arg(w.grant.name) + "::pg_catalog.text", s.arg(w.grant.token) + "::pg_catalog.text::pg_catalog.uuid", s.theFence(w.grant.fence)
}

func (w *write) requestArgs(s *statement) string {
	return s.arg(w.grant.name) + "::text, " + s.theFence(w.grant.fence) + ", " + s.arg(w.options.request) + "::text"
}

// assemble finishes the statement, which so far is what changes the row, with what it returns and what has to go with
// it, in the same statement, and is handed columns of the changed row by the names that keep has for them.
func (w *write) assemble(s *statement, keep []string, with ...string) error {
	if w.options.request != "" {
		result := "NULL"
		if w.returns != nil {
			result = "pg_catalog.to_jsonb(w)"
		}
		with = append(with, "fence.request_applied("+w.requestArgs(s)+", "+literal(w.kind)+", "+w.relation()+", "+w.identity(s)+", "+
			"ARRAY["+literals(w.returns)+"]::pg_catalog._text, "+result+")")
	}
	w.sql, w.args = s.String(), s.args
	w.rows = len(with) > 0 || w.returns != nil
	switch {
	case len(with) > 0 && w.returns == nil:
		// A condition with a volatile function in it is evaluated for each row, and only if there is one.
		w.sql = "WITH w AS (" + w.sql + " RETURNING " + strings.Join(append(keep, "1 AS writegate_done"), ", ") + ") SELECT writegate_done FROM w WHERE " +
			strings.Join(with, " AND ")
	case len(with) > 0:
		w.sql = "WITH w AS (" + w.sql + " RETURNING " + strings.Join(append(keep, "t."+quotedList(w.returns, ", t.")), ", ") + ") SELECT " + quotedList(w.returns, ", ") +
			" FROM w WHERE " + strings.Join(with, " AND ")
	case w.returns != nil:
		w.sql += " RETURNING t." + quotedList(w.returns, ", t.")
	}
	if s.err != nil {
		return w.invalid("%w", s.err)
	}
	return nil
}

// run sends the write, and where it changed nothing finds out why.
func (w *write) run(ctx context.Context) (Outcome, error) {
	changed, err := w.send(ctx)
	return w.went(ctx, changed, err)
}

// went judges what came of sending the write.
func (w *write) went(ctx context.Context, changed int64, err error) (Outcome, error) {
	for again := false; ; again = true {
		if again {
			changed, err = w.send(ctx)
		}
		var unread readError
		switch {
		case errors.As(err, &unread):
			w.count = int(changed)
			return w.finish(ctx, Applied, w.error(Applied, fmt.Errorf("its answer could not be read: %w", unread.error)))
		case err != nil:
			outcome, err := w.failed(err)
			return w.finish(ctx, outcome, err)
		case changed > 0:
			w.count = int(changed)
			return w.finish(ctx, Applied, nil)
		}
		outcome, err := w.explain(ctx)
		if outcome != Suppressed || again || w.kind == "exec" { // whose statement may have done something else
			return w.finish(ctx, outcome, err)
		}
		// The row takes this fence now and did not then: it may have come into being, or have gone, between the two
		// statements.
	}
}

// send runs the write, in the caller's transaction or in one of its own, and reports how many rows it changed.
func (w *write) send(ctx context.Context) (changed int64, err error) {
	if w.options.into != nil {
		w.options.into.reset()
	}
	if w.in != nil {
		return w.through(ctx, w.in.link)
	}
	for attempt := 0; ; attempt++ {
		changed, err = w.sendOnce(ctx)
		if !pgerr.Stale(err) || ctx.Err() != nil || attempt > w.gate.base.spares() {
			return changed, err
		}
		// Never sent, on a connection that had died in the pool, which may have more of them.
	}
}

func (w *write) sendOnce(ctx context.Context) (int64, error) {
	s, err := w.gate.base.session(ctx)
	if err != nil {
		return 0, err
	}
	defer s.release()
	if !w.first && (!w.serial || !w.gate.explicit.Load()) {
		changed, err := w.through(ctx, s)
		if pgerr.Code(err) != pgerr.Isolation {
			return changed, err
		}
		w.gate.explicit.Store(true)
	}
	return inOwnTransaction(ctx, s, "", func(tx transaction) (int64, error) { return w.through(ctx, tx) })
}

// inOwnTransaction commits what f has done, unless it failed.
func inOwnTransaction(ctx context.Context, s session, settings string, f func(transaction) (int64, error)) (int64, error) {
	tx, err := s.begin(ctx, settings)
	if err != nil {
		return 0, err
	}
	n, err := f(tx)
	var unread readError
	if err != nil && !errors.As(err, &unread) {
		tx.rollback(context.WithoutCancel(ctx))
		return 0, pgerr.BeforeCommit(err)
	}
	if commitErr := tx.commit(ctx); commitErr != nil {
		return 0, commitErr
	}
	return n, err
}

func (w *write) through(ctx context.Context, l link) (int64, error) {
	if w.first {
		s := &statement{text: l.text()}
		if w.live() {
			s.add("SELECT coalesce(", w.liveCall(s), ", false)")
		} else {
			s.add("SELECT ", w.mark(s))
		}
		var live bool
		if err := one(ctx, l, s.String(), s.args, &live); err != nil || !live {
			return 0, err
		}
	}
	if !w.rows {
		return l.exec(ctx, w.sql, w.args)
	}
	var each func(row) error
	if w.options.into != nil {
		each = w.options.into.read
	}
	return l.query(ctx, w.sql, w.args, each)
}

func (w *write) failed(err error) (Outcome, error) {
	if w.in != nil && w.in.ends || pgerr.Answered(err) || pgerr.NotSent(err) {
		// In the caller's transaction a lost answer means that there will be no commit either.
		if pgerr.NoSuchFunction(err) || pgerr.Misrouted(err) {
			err = pgerr.ExplainSchema(err, w.gate.base.database())
		}
		e := w.error(Failed, err)
		e.again = pgerr.Again(err) && w.in == nil
		return Failed, e
	}
	e := w.error(Unknown, err)
	e.again = w.repeatable() && w.in == nil && !errors.Is(err, errAnswersAsSelect)
	return Unknown, e
}

// repeatable says whether the same write, sent again, is certain not to be applied twice.
func (w *write) repeatable() bool {
	switch w.kind {
	case "exec", "classify":
		return false // of which nobody knows what they do
	case "seal", "delete":
		return true
	case "insert":
		return w.options.request != "" || w.options.rule == Once && w.keyColumns != nil
	}
	return w.options.rule == Once || w.options.request != ""
}

// finding is what became of a row that a write did not change.
type finding struct {
	found    *int64  // its fence
	matches  bool    // the write's own condition holds for it
	state    string  // of the lease: "held", or as fence.lease_state says
	buried   int64   // the fence of its tombstone
	key      string  // as the audit shows it
	request  *string // "this" or "another" write that the request id was applied for
	result   *string // what that returned
	returned *string // the columns of it, as a JSON array
}

// explain finds out why a write changed nothing. A row's fence never falls and an ended grant never comes back, so what
// it finds later was so then.
func (w *write) explain(ctx context.Context) (Outcome, error) {
	ctx, cancel := w.gate.afterwards(ctx)
	defer cancel()
	if w.kind == "exec" && w.keyColumns == nil {
		return w.explainWithoutTarget(ctx)
	}
	f, err := w.look(ctx)
	if err != nil {
		// The write itself was answered: nothing was changed. Why, is what we could not learn.
		return Failed, w.error(Failed, fmt.Errorf("the write changed nothing, and asking why failed: %w", err))
	}
	fence := w.grant.fence
	inserts := w.kind == "insert" || w.kind == "upsert"
	var current int64
	if f.found != nil {
		current = *f.found
	}
	switch {
	case f.request != nil && *f.request == "this":
		return w.alreadyApplied(ctx, f)
	case f.request != nil:
		return Failed, w.error(Failed, ErrRequest)
	case f.found != nil && *f.found > fence:
		return w.refused(ctx, Stale, "stale", *f.found, f.key)
	case f.found != nil && w.kind == "seal" && *f.found >= fence-1:
		return w.alreadyApplied(ctx, f)
	case f.found != nil && *f.found == fence && w.options.rule == Once && w.kind != "seal":
		if w.kind == "delete" || w.options.request != "" {
			e := w.error(Failed, ErrOnce)
			e.Current = *f.found
			return Failed, e
		}
		return w.alreadyApplied(ctx, f)
	case f.found == nil && f.buried > fence:
		return w.refused(ctx, Stale, "stale", f.buried, f.key)
	case f.found == nil && f.buried == fence && w.kind == "delete":
		return AlreadyApplied, nil
	case f.state != "held":
		return w.refused(ctx, LeaseLost, f.state, current, f.key)
	case f.found == nil && f.buried == fence && inserts && w.options.rule == Once:
		e := w.error(Failed, ErrOnce)
		e.Current = f.buried
		return Failed, e
	case f.found == nil && !inserts:
		return Missing, w.error(Missing, nil)
	case f.found != nil && w.kind == "insert":
		e := w.error(Failed, ErrExists)
		e.Current = *f.found
		return Failed, e
	case f.found != nil && !f.matches:
		e := w.error(Unmatched, nil)
		e.Current = *f.found
		return Unmatched, e
	case w.kind == "exec", w.kind == "classify":
		e := w.error(Unmatched, errors.New("the row is there and takes the fence: some other condition of the statement does not hold, or a trigger has dropped the change"))
		e.Current = current
		return Unmatched, e
	}
	e := w.error(Suppressed, nil)
	e.Current = current
	return Suppressed, e
}

// look asks for the finding, in one statement.
func (w *write) look(ctx context.Context) (finding, error) {
	s := w.newStatement()
	matches, state, buried, request, result, returned := "true", "'held'", "0::bigint", "NULL::text", "NULL::text", "NULL::text"
	if w.options.where != nil && w.kind != "insert" {
		matches = "coalesce(" + s.fragment(*w.options.where, w.grant.fence) + ", false)"
	}
	key := w.keyJSON(s)
	if w.live() {
		state = w.leaseState(s)
	}
	if w.table.leases {
		tombstones := []string{"fence.buried(" + w.relation() + ", " + w.identity(s) + ")"}
		for _, columns := range w.otherKeys {
			other := w.table.identity(columns, func(c string) string { return s.typed(w.table.columns[c], w.newRow[c]) })
			tombstones = append(tombstones, "fence.buried("+w.relation()+", "+other+")")
		}
		buried = "CASE WHEN t." + quote(w.table.fenceCol) + " IS NULL THEN greatest(" + strings.Join(tombstones, ", ") + ") ELSE 0 END"
	}
	if w.options.request != "" {
		call := "fence.request_result(" + w.requestArgs(s) + ") r"
		request = "(SELECT CASE WHEN (r.kind, r.relation, r.key_hash, r.key_check) = (" + literal(w.kind) + ", " + w.relation() + ", " + w.identity(s) +
			") THEN 'this' ELSE 'another' END FROM " + call + ")"
		result = "(SELECT r.result::text FROM " + call + ")"
		returned = "(SELECT pg_catalog.array_to_json(r.returned)::text FROM " + call + ")"
	}
	column, from := "t."+quote(w.table.fenceCol), ""
	if w.keyColumns == nil {
		column, buried = "NULL::bigint", "0::bigint" // an insert whose key the database makes
	} else {
		from = " FROM (SELECT) AS one LEFT JOIN " + w.table.ident + " AS t ON " + w.keyMatches(s)
	}
	s.add("SELECT ", column, ", ", matches, ", ", state, ", ", buried, ", ", key, "::text, ", request, ", ", result, ", ", returned,
		from, " ORDER BY 1 DESC NULLS LAST LIMIT 1")
	var f finding
	if s.err != nil {
		return f, s.err
	}
	return f, w.ask(ctx, s, &f.found, &f.matches, &f.state, &f.buried, &f.key, &f.request, &f.result, &f.returned)
}

// ask reads one row of an answer, where the write was sent.
func (w *write) ask(ctx context.Context, s *statement, dest ...any) error {
	if w.in != nil {
		return one(ctx, w.in.link, s.String(), s.args, dest...)
	}
	session, err := w.gate.base.session(ctx)
	if err != nil {
		return err
	}
	defer session.release()
	return one(ctx, session, s.String(), s.args, dest...)
}

// alreadyApplied reads what the write would have returned.
func (w *write) alreadyApplied(ctx context.Context, f finding) (Outcome, error) {
	if w.options.into == nil {
		return AlreadyApplied, nil
	}
	s := w.newStatement()
	list := "t." + quotedList(w.returns, ", t.")
	if kept, err := w.keptResult(f); err != nil {
		return AlreadyApplied, w.error(AlreadyApplied, err)
	} else if kept {
		var columns []string
		for _, c := range w.returns {
			columns = append(columns, quote(c)+" "+w.table.columns[c].Type)
		}
		s.add("SELECT ", list, " FROM pg_catalog.jsonb_to_record(", s.arg(f.result), "::text::jsonb) AS t (", strings.Join(columns, ", "), ")")
	} else {
		s.add("SELECT ", list, " FROM ", w.table.ident, " AS t WHERE ", w.keyMatches(s))
	}
	read := &write{gate: w.gate, in: w.in, sql: s.String(), args: s.args, rows: true, options: writeOptions{into: w.options.into}}
	n, err := read.send(ctx)
	if err == nil && n == 0 {
		err = errNoRow
	}
	if err != nil {
		return AlreadyApplied, w.error(AlreadyApplied, fmt.Errorf("the row could not be read: %w", err))
	}
	return AlreadyApplied, nil
}

// keptResult reports whether the record of a request has what the repeat wants to read; else that is read from the row.
func (w *write) keptResult(f finding) (bool, error) {
	if f.request == nil {
		return false, nil
	}
	var returned []string
	if err := json.Unmarshal([]byte(*f.returned), &returned); err != nil {
		return false, fmt.Errorf("the record of the request: %w", err)
	}
	for _, c := range w.returns {
		if !slices.Contains(returned, c) {
			if w.keyColumns == nil || w.kind == "delete" {
				return false, fmt.Errorf("the request has been applied, and did not return column %q, which this repeat wants to read", c)
			}
			return false, nil
		}
	}
	return true, nil
}

func quotedList(columns []string, separator string) string {
	quoted := make([]string, len(columns))
	for i, c := range columns {
		quoted[i] = quote(c)
	}
	return strings.Join(quoted, separator)
}

func (w *write) refused(ctx context.Context, outcome Outcome, reason string, current int64, key string) (Outcome, error) {
	e := w.error(outcome, nil)
	e.Reason, e.Current = reason, current
	w.gate.refuse(ctx, w, e, key)
	return outcome, e
}

// afterwards is a context for finding out why a write changed nothing: it goes on for as long as a refusal may take to be
// recorded after the caller's has ended, which that often does in just this moment, with the lease that it follows. A refusal
// must not pass for a failure, nor be missing in the audit, because of that.
func (g *Gate) afterwards(ctx context.Context) (context.Context, context.CancelFunc) {
	longer, cancel := context.WithCancel(context.WithoutCancel(ctx))
	stop := context.AfterFunc(ctx, func() {
		timer := time.AfterFunc(g.cfg.AuditTimeout, cancel)
		context.AfterFunc(longer, func() { timer.Stop() })
	})
	return longer, func() { stop(); cancel() }
}

// refuse records a refusal where there is an audit, and lets the lease know of what it did not know.
func (g *Gate) refuse(ctx context.Context, w *write, e *WriteError, key string) {
	if w.table == nil || w.table.leases {
		w.repeats = max(w.repeats, g.recorder.refused(e, key))
	}
	g.log(ctx, e, key)
	l, ok := handle(w.grant.lease).(loser)
	if !ok {
		return
	}
	// The handle need not wait until its own deadline to believe it. A stale row alone does not say so: it may have been
	// written under another lease.
	over := e.Outcome == LeaseLost && e.Reason != "wrong_fence" || e.Outcome == Stale && (e.Verdict == "stale" || e.Verdict == "expired")
	if over {
		l.Lose(e)
	}
}
