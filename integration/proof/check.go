//go:build unix

package main

import (
	"context"
	"fmt"
	"slices"
	"sort"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
)

// The invariants. Each violation names one of them.
const (
	neverFalls    = "a row's fence never falls"
	oncePerGrant  = "under rule once a row takes one write of each grant"
	liveInTime    = "no live write is accepted after a newer grant"
	tombstone     = "a deleted row is not brought back by an older holder"
	durable       = "what was acknowledged is in the database"
	nothingLeft   = "a refused write leaves nothing"
	resolved      = "an unknown outcome is resolved by a repeat"
	onceOnly      = "a write is applied at most once"
	oneTerm       = "at most one live term for a name"
	ownLease      = "only the holder renews or releases"
	uniqueFences  = "no two grants share a fence"
	risingFences  = "a newer grant has a higher fence"
	clockLate     = "the clock is read after the lock"
	audited       = "every refusal is in the audit"
	lawful        = "a lawful holder is not refused"
	guarded       = "what goes around the gate is refused"
	linearizable  = "lease and rows are linearizable"
	lostAtTheEnd  = "a failover loses what came last, and nothing else"
	orderly       = "workers end in order"
	unexplained   = "every change was asked for"
	sealedReading = "what was read under a seal was there"
)

// violation is one thing that must not be.
type violation struct{ invariant, what string }

// writeRow is an entry of proof.write_log.
type writeRow struct {
	seq, xid   int64
	at, commit int64 // nanoseconds since 1970
	app        string
	table      string
	row        int
	op         string // INSERT, UPDATE, DELETE, BURY
	old, new   int64  // fences; -1: there is none
	oldValue   string
	value      string

	by    *op  // who has asked for it
	seal  bool // it is a seal of grant new + 1
	under int64
	rule  string
}

// leaseRow is an entry of proof.lease_log.
type leaseRow struct {
	seq, xid          int64
	at, commit        int64
	app, name         string
	old, new          int64
	granted           int64
	oldEnds, ends     int64
	wasFree, released bool
}

func (l leaseRow) grant() bool { return l.old != l.new }

func (l *logs) grants() (n int) {
	for _, r := range l.leases {
		if r.grant() {
			n++
		}
	}
	return n
}

// refusalRow is a row of fence.rejection.
type refusalRow struct {
	table, key, lease string
	fence             int64
	reason, verdict   string
	count             int64
}

// logs is what the database says of a round.
type logs struct {
	writes   []*writeRow
	leases   []*leaseRow
	refusals []refusalRow
	rows     map[string]finalRow // table/row
}

type finalRow struct {
	value string
	fence int64
}

func nanos(t *time.Time) int64 {
	if t == nil {
		return 0
	}
	return t.UnixNano()
}

func readLogs(ctx context.Context, cfg *pgx.ConnConfig) (*logs, error) {
	conn, err := pgx.ConnectConfig(ctx, cfg)
	if err != nil {
		return nil, err
	}
	defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }()
	l := &logs{rows: map[string]finalRow{}}
	rows, err := conn.Query(ctx, `SELECT seq, xid, at, pg_xact_commit_timestamp(xid::text::xid), app, relation, id, op, coalesce(old_fence, -1),
		coalesce(new_fence, -1), coalesce(old_value, ''), coalesce(new_value, '') FROM proof.write_log ORDER BY seq`)
	if err != nil {
		return nil, err
	}
	l.writes, err = pgx.CollectRows(rows, func(r pgx.CollectableRow) (*writeRow, error) {
		var w writeRow
		var at, commit *time.Time
		err := r.Scan(&w.seq, &w.xid, &at, &commit, &w.app, &w.table, &w.row, &w.op, &w.old, &w.new, &w.oldValue, &w.value)
		w.at, w.commit = nanos(at), nanos(commit)
		return &w, err
	})
	if err != nil {
		return nil, err
	}
	rows, err = conn.Query(ctx, `SELECT seq, xid, at, pg_xact_commit_timestamp(xid::text::xid), app, name, old_fence, new_fence, granted_at,
		old_expires_at, new_expires_at, old_released, new_released FROM proof.lease_log ORDER BY seq`)
	if err != nil {
		return nil, err
	}
	l.leases, err = pgx.CollectRows(rows, func(r pgx.CollectableRow) (*leaseRow, error) {
		var w leaseRow
		var at, commit, granted, oldEnds, ends *time.Time
		err := r.Scan(&w.seq, &w.xid, &at, &commit, &w.app, &w.name, &w.old, &w.new, &granted, &oldEnds, &ends, &w.wasFree, &w.released)
		w.at, w.commit, w.granted, w.oldEnds, w.ends = nanos(at), nanos(commit), nanos(granted), nanos(oldEnds), nanos(ends)
		return &w, err
	})
	if err != nil {
		return nil, err
	}
	rows, err = conn.Query(ctx, `SELECT table_name, coalesce(row_key ->> 'id', row_key #>> '{}'), lease_name, fence, reason, verdict, count FROM fence.rejection`)
	if err != nil {
		return nil, err
	}
	l.refusals, err = pgx.CollectRows(rows, func(r pgx.CollectableRow) (f refusalRow, err error) {
		var key *string
		err = r.Scan(&f.table, &key, &f.lease, &f.fence, &f.reason, &f.verdict, &f.count)
		if key != nil {
			f.key = *key
		}
		return f, err
	})
	if err != nil {
		return nil, err
	}
	for _, table := range tables {
		rows, err := conn.Query(ctx, "SELECT id, v, last_fence FROM "+table)
		if err != nil {
			return nil, err
		}
		var id int
		var f finalRow
		if _, err := pgx.ForEachRow(rows, []any{&id, &f.value, &f.fence}, func() error {
			l.rows[table+"/"+strconv.Itoa(id)] = f
			return nil
		}); err != nil {
			return nil, err
		}
	}
	return l, nil
}

// checker holds a round's history against the database.
type checker struct {
	h     *history
	l     *logs
	locks []locked
	// after is when another server took over, 0 if there was but one; before is what the one before it knew.
	after  int64
	before *logs
	// tail says that what was acknowledged may be lost, but for grants: the server was told not to wait for its disk.
	tail bool
	// synchronous says that nothing may be lost by a failover.
	synchronous bool
	found       []violation
}

func (c *checker) violated(invariant, format string, args ...any) {
	c.found = append(c.found, violation{invariant, fmt.Sprintf(format, args...)})
}

// check looks for everything but linearizability, which is a matter of its own.
func (c *checker) check() {
	c.checkLogs()
	c.checkAcknowledged()
	c.checkOutcomes()
	if !c.tail {
		c.checkAudit()
	}
}

// checkLogs looks at what the database says of itself.
func (c *checker) checkLogs() {
	c.claim()
	c.checkRows()
	c.checkLeases()
	c.checkLive()
	c.checkClocks()
}

// worker of an id or an application name.
func workerOf(id string) string { return strings.SplitN(id, "/", 2)[0] }

// claim finds out who has asked for each change. Updates and inserts carry the op's id; a seal and a delete are known by
// their fences.
func (c *checker) claim() {
	buried := map[string]int64{} // by transaction and row
	for _, w := range c.l.writes {
		if w.op == "BURY" {
			buried[fmt.Sprint(w.xid, w.table, w.row)] = w.new
		}
	}
	type place struct {
		table string
		row   int
		fence int64
		kind  string
	}
	asked := map[place][]*op{}
	for _, o := range c.h.ops {
		for _, s := range o.Steps {
			if s.Kind == "delete" || s.Kind == "seal" {
				p := place{s.Table, s.Row, o.Fence, s.Kind}
				asked[p] = append(asked[p], o)
			}
		}
	}
	for _, w := range c.l.writes {
		switch {
		case w.op == "BURY":
			continue
		case w.op == "DELETE":
			f, ok := buried[fmt.Sprint(w.xid, w.table, w.row)]
			if !ok {
				// Gone without a tombstone; whose it was, only the worker can say.
				for _, o := range c.h.ops {
					if workerOf(o.ID) == w.app && o.Call <= w.at && slices.ContainsFunc(o.Steps, func(s step) bool {
						return s.Kind == "delete" && s.Table == w.table && s.Row == w.row
					}) {
						f = o.Fence
					}
				}
			}
			w.under = f
			w.by = likeliest(asked[place{w.table, w.row, f, "delete"}], w)
		case w.op == "UPDATE" && w.oldValue == w.value && w.new%2 == 1:
			w.seal, w.under = true, w.new+1
			w.by = likeliest(asked[place{w.table, w.row, w.under, "seal"}], w)
		default:
			w.under = w.new
			w.by = c.h.byID[w.value[:max(0, strings.LastIndex(w.value, "."))]]
		}
		if w.by == nil {
			c.violated(unexplained, "%s %s %d by %s under fence %d: nobody has asked for it (value %q)", w.op, w.table, w.row, w.app, w.under, w.value)
			continue
		}
		w.rule = w.by.Rule
		if w.under != w.by.Fence && w.by.Kind != "rogue" {
			c.violated(unexplained, "%s of %s %d under fence %d, but it was asked for under %d (%s)", w.op, w.table, w.row, w.under, w.by.Fence, w.by.ID)
		}
	}
}

// likeliest is the op of those that ask for the same which says that it was the one, or could have been.
func likeliest(ops []*op, w *writeRow) *op {
	var best *op
	for _, o := range ops {
		if workerOf(o.ID) != w.app || o.Call > w.at {
			continue
		}
		if o.Return != 0 && o.Return < w.at && o.Outcome != unknown && !o.Doubt {
			continue
		}
		if best == nil || outcomeAt(o, w) == applied && outcomeAt(best, w) != applied {
			best = o
		}
	}
	return best
}

func outcomeAt(o *op, w *writeRow) string {
	for _, s := range o.Steps {
		if s.Table == w.table && s.Row == w.row {
			return s.Outcome
		}
	}
	return ""
}

// checkRows follows each row through its changes.
func (c *checker) checkRows() {
	type key struct {
		table string
		row   int
	}
	highest, buried, seen := map[key]int64{}, map[key]int64{}, map[string]int64{}
	now := map[key]*finalRow{} // nil: it is as it was filled, or gone
	gone := map[key]bool{}
	for _, w := range c.l.writes {
		k := key{w.table, w.row}
		if w.op == "BURY" {
			buried[k] = max(buried[k], w.new)
			highest[k] = max(highest[k], w.new)
			continue
		}
		from := w.new
		if w.op == "DELETE" { // whether it has left a tombstone or not
			from = w.under
			buried[k] = max(buried[k], from)
		}
		switch {
		case w.op == "INSERT" && (from < buried[k] || from == buried[k] && w.rule == "once"):
			c.violated(tombstone, "%s %d, deleted under fence %d, was inserted under %d by %s", w.table, w.row, buried[k], from, w.app)
		case from < highest[k]:
			c.violated(neverFalls, "%s of %s %d under fence %d by %s, which had seen %d", w.op, w.table, w.row, from, w.app, highest[k])
		case w.op == "UPDATE" && w.new < w.old:
			c.violated(neverFalls, "%s %d went from fence %d to %d by %s", w.table, w.row, w.old, w.new, w.app)
		case w.op != "INSERT" && w.rule == "once" && from == w.old && !w.seal:
			c.violated(oncePerGrant, "%s of %s %d under fence %d by %s (%s), which had written it already", w.op, w.table, w.row, from, w.app, w.by.ID)
		case w.seal && w.new <= w.old:
			c.violated(neverFalls, "%s %d was sealed under %d, below %d", w.table, w.row, w.under, w.old)
		}
		was := finalRow{value: "seed"}
		if now[k] != nil {
			was = *now[k]
		}
		if there := !gone[k]; there == (w.op == "INSERT") || there && (w.oldValue != was.value || w.old != was.fence) {
			c.violated(unexplained, "%s of %s %d by %s found %q under fence %d, where %q was under %d", w.op, w.table, w.row, w.app, w.oldValue, w.old, was.value, was.fence)
		}
		gone[k], now[k] = w.op == "DELETE", &finalRow{w.value, w.new}
		highest[k] = max(highest[k], from)
		if w.op != "DELETE" && !w.seal {
			if first, twice := seen[w.value]; twice {
				c.violated(onceOnly, "%s %d: %q was written twice, at %d and %d", w.table, w.row, w.value, first, w.seq)
			}
			seen[w.value] = w.seq
		}
		if w.by != nil && w.by.Kind == "rogue" {
			c.violated(guarded, "%s %d was written without entering by %s", w.table, w.row, w.by.ID)
		}
	}
	for k, last := range now {
		final, there := c.l.rows[k.table+"/"+strconv.Itoa(k.row)]
		if there == gone[k] || there && final != *last {
			c.violated(unexplained, "%s %d holds %+v, and was left as %+v", k.table, k.row, final, *last)
		}
	}
}

// checkLeases follows each lease through its grants, renewals and releases.
func (c *checker) checkLeases() {
	grants := map[int64]*leaseRow{}
	newest := map[string]*leaseRow{}
	for _, l := range c.l.leases {
		if l.grant() {
			if other := grants[l.new]; other != nil {
				c.violated(uniqueFences, "fence %d was granted for %s to %s and for %s to %s", l.new, other.name, other.app, l.name, l.app)
			}
			if l.new <= l.old {
				c.violated(risingFences, "%s was granted under fence %d after %d", l.name, l.new, l.old)
			}
			// A restart of the server makes no difference: the row says until when.
			if !l.wasFree && l.old > 0 && (l.oldEnds > l.granted || l.oldEnds > l.at) {
				c.violated(oneTerm, "%s was granted under fence %d to %s %v before the term of %d had ended", l.name, l.new, l.app,
					time.Duration(l.oldEnds-min(l.granted, l.at)), l.old)
			}
			if l.granted > l.at {
				c.violated(oneTerm, "%s was granted under fence %d as of %v later", l.name, l.new, time.Duration(l.granted-l.at))
			}
			if !slices.ContainsFunc(c.h.ops, func(o *op) bool {
				return o.Kind == "acquire" && o.Name == l.name && workerOf(o.ID) == l.app && o.Call <= l.at
			}) {
				c.violated(unexplained, "%s was granted under fence %d to %s, which has not asked for it", l.name, l.new, l.app)
			}
			grants[l.new] = l
			newest[l.name] = l
			continue
		}
		g := newest[l.name]
		if g == nil || g.new != l.new {
			c.violated(unexplained, "%s changed under fence %d, which was not its newest", l.name, l.new)
			continue
		}
		if g.app != l.app {
			what := "renewed"
			if l.released {
				what = "released"
			}
			c.violated(ownLease, "%s, granted under fence %d to %s, was %s by %s", l.name, l.new, g.app, what, l.app)
		}
		// What it is extended to is the clock's time plus the TTL of the grant.
		if !l.released && (l.wasFree || l.oldEnds <= l.ends-(g.ends-g.granted)) {
			c.violated(oneTerm, "%s was renewed under fence %d although it was over", l.name, l.new)
		}
	}
	if c.before == nil {
		return
	}
	// What the server before had granted was granted, whether it is known here or not.
	known := map[int64]bool{}
	top := map[string]int64{}
	for _, l := range c.before.leases {
		if l.grant() {
			known[l.new] = true
			top[l.name] = max(top[l.name], l.new)
		}
	}
	for _, l := range c.l.leases {
		if !l.grant() || l.commit <= c.after {
			continue
		}
		if known[l.new] {
			c.violated(uniqueFences, "fence %d was granted again after the failover, for %s to %s", l.new, l.name, l.app)
		}
		if l.new <= top[l.name] {
			c.violated(risingFences, "%s was granted under fence %d after the failover, and under %d before it", l.name, l.new, top[l.name])
		}
	}
}

// checkAcknowledged holds what holders were told of their leases against the log.
func (c *checker) checkAcknowledged() {
	grants := map[int64]*leaseRow{}
	for _, l := range c.l.leases {
		if l.grant() {
			grants[l.new] = l
		}
	}
	fences := map[int64]*op{}
	for _, o := range c.h.ops {
		if o.Kind != "acquire" || o.Outcome != ok {
			continue
		}
		if other := fences[o.Fence]; other != nil {
			c.violated(uniqueFences, "%s and %s were both granted fence %d", other.ID, o.ID, o.Fence)
		}
		fences[o.Fence] = o
		g := grants[o.Fence]
		if (g == nil || g.name != o.Name) && !c.excused(func(l *logs) bool {
			return slices.ContainsFunc(l.leases, func(r *leaseRow) bool { return r.grant() && r.new == o.Fence })
		}) {
			c.violated(durable, "%s was granted fence %d for %s, of which the database knows nothing", o.ID, o.Fence, o.Name)
		}
	}
	released := map[int64]bool{}
	for _, l := range c.l.leases {
		released[l.new] = released[l.new] || l.released
	}
	for _, o := range c.h.ops {
		switch {
		case o.Outcome != ok:
		case o.Kind == "release":
			if !released[o.Fence] && !c.tail && !c.excused(func(l *logs) bool {
				return slices.ContainsFunc(l.leases, func(r *leaseRow) bool { return r.released && r.new == o.Fence })
			}) {
				c.violated(durable, "%s was told that fence %d of %s was released, and it was not", o.ID, o.Fence, o.Name)
			}
		case o.Kind == "renew":
			if !c.tail && !renewedIn(c.l, o) && !c.excused(func(l *logs) bool { return renewedIn(l, o) }) {
				c.violated(durable, "%s was told that fence %d of %s was renewed, and it was not", o.ID, o.Fence, o.Name)
			}
			// A confirmed renewal was made while the grant was the newest.
			for _, l := range c.l.leases {
				if l.grant() && l.name == o.Name && l.new > o.Fence && l.commit < o.Call && l.commit > c.after {
					c.violated(ownLease, "%s renewed fence %d of %s, which had been granted under %d by then", o.ID, o.Fence, o.Name, l.new)
					break
				}
			}
		}
	}
}

// renewedIn looks for a renewal at the time at which it was asked for.
func renewedIn(l *logs, o *op) bool {
	return slices.ContainsFunc(l.leases, func(r *leaseRow) bool {
		return !r.grant() && !r.released && r.new == o.Fence && r.name == o.Name && r.at > o.Call-int64(time.Millisecond) && r.at < o.Return+int64(time.Millisecond)
	})
}

// excused says that what was acknowledged may be gone: by the loss of what was not replicated.
func (c *checker) excused(was func(*logs) bool) bool {
	return c.before != nil && !c.synchronous && was(c.before)
}

// checkLive holds live writes against the grants.
func (c *checker) checkLive() {
	grants := map[string][]*leaseRow{}
	for _, l := range c.l.leases {
		if l.grant() {
			grants[l.name] = append(grants[l.name], l)
		}
	}
	for _, w := range c.l.writes {
		if w.by == nil || w.op == "BURY" || w.by.Strength == "fenced" || w.by.Kind == "rogue" {
			continue
		}
		list := grants[w.by.Name]
		if !slices.ContainsFunc(list, func(g *leaseRow) bool { return g.new == w.under }) {
			c.violated(liveInTime, "%s of %s %d by %s was committed under fence %d, which %s does not have here", w.op, w.table, w.row, w.by.ID, w.under, w.by.Name)
		}
		if ends := c.endsAt(w.by.Name, w.under, w.seq); ends != 0 && ends < w.by.Call && !w.by.Doubt {
			c.violated(liveInTime, "%s of %s %d under fence %d by %s was asked for %v after its lease had ended", w.op, w.table, w.row, w.under, w.by.ID,
				time.Duration(w.by.Call-ends))
		}
		for _, g := range list {
			if g.new > w.under && (g.seq < w.seq || g.commit < w.commit) {
				c.violated(liveInTime, "%s of %s %d under fence %d by %s was committed after %s had been granted under %d", w.op, w.table, w.row,
					w.under, w.by.ID, w.by.Name, g.new)
				break
			}
		}
	}
}

// checkClocks looks at what had to wait for a lock that the nemesis held: what it read of the clock has to be from after.
func (c *checker) checkClocks() {
	const slack = int64(time.Millisecond) // one clock, read in two ways
	for _, k := range c.locks {
		for _, g := range c.l.leases {
			if !g.grant() || g.name != k.name || g.at < k.until {
				continue
			}
			o := c.acquireOf(g)
			if o != nil && o.Call > k.from && o.Call < k.until && g.granted < k.until-slack {
				c.violated(clockLate, "%s waited for the row of %s until %d and was granted it as of %v before", o.ID, g.name, k.until,
					time.Duration(k.until-g.granted))
			}
		}
		for _, w := range c.l.writes {
			o := w.by
			if o == nil || o.Name != k.name || o.Strength == "fenced" || o.Doubt || w.op == "BURY" || o.Call < k.from || o.Call > k.until || w.at < k.until {
				continue
			}
			if ends := c.endsAt(o.Name, w.under, w.seq); ends != 0 && ends < k.until-slack {
				c.violated(clockLate, "%s waited for the row of %s until %v after its lease had ended, and was accepted", o.ID, o.Name,
					time.Duration(k.until-ends))
			}
		}
	}
}

func (c *checker) acquireOf(g *leaseRow) *op {
	for _, o := range c.h.ops {
		if o.Kind == "acquire" && o.Outcome == ok && o.Fence == g.new {
			return o
		}
	}
	return nil
}

// endsAt is until when the lease was held under the fence, as of an entry of the log.
func (c *checker) endsAt(name string, fence, seq int64) (ends int64) {
	for _, l := range c.l.leases {
		if l.name == name && l.new == fence && l.seq < seq && !l.released {
			ends = l.ends
		}
	}
	return ends
}

// checkOutcomes holds what each op was told against what it did.
func (c *checker) checkOutcomes() {
	type place struct {
		o     *op
		table string
		row   int
	}
	did := map[place]*writeRow{}
	for _, w := range c.l.writes {
		if w.op != "BURY" && w.by != nil {
			did[place{w.by, w.table, w.row}] = w
		}
	}
	didBefore := map[string]bool{}
	if c.before != nil {
		for _, w := range c.before.writes {
			didBefore[w.value] = true
			if w.op == "BURY" || w.new%2 == 1 {
				didBefore[fmt.Sprint(w.table, w.row, w.new, w.op == "BURY")] = true
			}
		}
	}
	type write struct {
		table string
		row   int
		fence int64
	}
	wrote := map[write]bool{}
	for _, w := range c.l.writes {
		wrote[write{w.table, w.row, w.under}] = true
	}
	for _, o := range c.h.ops {
		if o.Outcome == unknown && o.repeatable() && c.h.ends[workerOf(o.ID)].Clean {
			c.violated(resolved, "what became of %s, a %s under fence %d, is not known in the end", o.ID, o.Kind, o.Fence)
		}
		for _, s := range o.Steps {
			w := did[place{o, s.Table, s.Row}]
			if s.Outcome == already && o.Outcome != unknown && c.before == nil && !c.tail && (!wrote[write{s.Table, s.Row, o.Fence}] || o.Request && s.Kind != "delete" && w == nil) { // a row that this grant has deleted is gone, whoever asks
				c.violated(durable, "%s was told that its %s of %s %d under fence %d had been applied already, and nothing was", o.ID, s.Kind, s.Table, s.Row, o.Fence)
			}
			settled := o.Return != 0 && (!o.Doubt || s.Outcome == applied) && o.Outcome != unknown
			effective := s.Outcome == applied && (o.Outcome == applied || o.Kind == "many")
			switch {
			case effective && settled && w == nil:
				excuse := c.excused(func(*logs) bool {
					return didBefore[s.Value] || s.Kind == "seal" && didBefore[fmt.Sprint(s.Table, s.Row, o.Fence-1, false)] ||
						s.Kind == "delete" && didBefore[fmt.Sprint(s.Table, s.Row, o.Fence, true)]
				})
				if !excuse && !c.tail {
					c.violated(durable, "%s was told that its %s of %s %d under fence %d was applied, and it was not", o.ID, s.Kind, s.Table, s.Row, o.Fence)
				}
			case !effective && settled && w != nil && s.Outcome != already && s.Outcome != "":
				c.violated(nothingLeft, "%s was told %q of its %s of %s %d under fence %d, which ended %q, and it was applied (%s)", o.ID, s.Outcome,
					s.Kind, s.Table, s.Row, o.Fence, o.Outcome, s.Err)
			case s.Kind == "seal" && s.Outcome == applied && settled && w != nil && s.Read != w.value:
				c.violated(sealedReading, "%s sealed %s %d under fence %d and read %q, where %q was", o.ID, s.Table, s.Row, o.Fence, s.Read, w.value)
			}
			if s.Outcome == suppressed {
				c.violated(lawful, "%s was told that %s drops writes of %d, which it does not: %s", o.ID, s.Table, s.Row, s.Err)
			}
		}
		if o.Kind == "rogue" && o.Outcome == committed && len(o.Steps) == 1 && o.Steps[0].Outcome == applied {
			c.violated(guarded, "%s wrote %s %d without entering", o.ID, o.Steps[0].Table, o.Steps[0].Row)
		}
	}
}

// checkAudit looks for every refusal that a worker was told of.
func (c *checker) checkAudit() {
	type kind struct {
		table, key, lease string
		fence             int64
		reason            string
	}
	recorded := map[kind]int64{}
	for _, f := range c.l.refusals {
		recorded[kind{f.table, f.key, f.lease, f.fence, f.reason}] += f.count
		if f.verdict == "lawful" && c.after == 0 {
			c.violated(lawful, "the holder of %s under fence %d was refused %s %s: %s", f.lease, f.fence, f.table, f.key, f.reason)
		}
	}
	told, all, partly := map[kind]int64{}, map[kind]int64{}, map[kind]bool{}
	manyRows, more := map[string]bool{}, map[string]bool{}
	for _, o := range c.h.ops {
		if o.Return == 0 || o.Doubt || o.Outcome == unknown || o.Outcome == failed {
			more[o.Name+strconv.FormatInt(o.Fence, 10)] = true
		}
	}
	for _, o := range c.h.ops {
		if o.Return == 0 || o.Call < c.after {
			continue // of one that was lost with the server nobody knows
		}
		for i, s := range o.Steps {
			if s.Reason == "" {
				if s.Outcome == stale {
					c.violated(audited, "%s was refused %s %d as stale, for no reason that the audit knows", o.ID, s.Table, s.Row)
				}
				continue
			}
			k := kind{s.Table, strconv.Itoa(s.Row), o.Name, o.Fence, s.Reason}
			switch {
			case o.Outcome == leaseLost && i == 0 && s.Outcome == "":
				k.table, k.key = "", "(a transaction)"
			case o.Kind == "many" && s.Outcome == leaseLost: // one refusal, of all that the lease alone stands against
				if k.key = "(many rows)"; manyRows[o.ID] {
					continue
				}
				manyRows[o.ID] = true
			}
			all[k]++
			if s.Lost { // as far as the gate knew then: it may have gone on trying
				continue
			}
			told[k]++
			if end, ended := c.h.ends[workerOf(o.ID)]; !ended || !end.Clean || end.Unrecorded > 0 {
				partly[k] = true // its repeats need not all be there
			}
		}
	}
	for k, n := range recorded {
		// Of one that was killed, or of an op whose answer was lost, more may be there than anybody was told.
		if all[k] < n && !more[k.lease+strconv.FormatInt(k.fence, 10)] && k.key != "(other keys)" && c.after == 0 {
			c.violated(audited, "%d refusals of %s %s under fence %d of %s (%s) are in the audit, and %d were made", n, k.table, k.key, k.fence, k.lease, k.reason, all[k])
		}
	}
	for k, n := range told {
		switch {
		case recorded[k] == 0 && partly[k] && c.after != 0:
			// Repeats of one that was on record before the failover, by a worker that was killed before they were written.
		case recorded[k] == 0:
			c.violated(audited, "%d refusals of %s %s under fence %d of %s (%s) are not in the audit", n, k.table, k.key, k.fence, k.lease, k.reason)
		case recorded[k] < n && !partly[k]:
			c.violated(audited, "%d refusals of %s %s under fence %d of %s (%s) are in the audit as %d", n, k.table, k.key, k.fence, k.lease, k.reason, recorded[k])
		}
	}
	// What is not in it was counted, by the worker that was told so.
	var missing, counted int64
	for k, n := range all {
		missing += max(0, n-recorded[k])
	}
	complete := true
	for _, o := range c.h.ops {
		end, ended := c.h.ends[workerOf(o.ID)]
		complete = complete && ended && end.Clean
	}
	for _, end := range c.h.ends {
		counted += end.Unrecorded
	}
	if complete && missing > counted {
		c.violated(audited, "%d refusals are not in the audit, and %d were counted", missing, counted)
	}
}

// attempted counts the rows that workers tried to write.
func (h *history) attempted() (n int) {
	for _, o := range h.ops {
		n += len(o.Steps)
	}
	return n
}

// invariantsOf names what was violated, each once.
func invariantsOf(found []violation) []string {
	var names []string
	for _, v := range found {
		if !slices.Contains(names, v.invariant) {
			names = append(names, v.invariant)
		}
	}
	sort.Strings(names)
	return names
}
