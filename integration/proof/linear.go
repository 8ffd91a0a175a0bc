//go:build unix

package main

import (
	"fmt"
	"path/filepath"
	"slices"
	"time"

	"github.com/anishathalye/porcupine"
)

// What one lease and the rows that are written under it look like to everybody: the model that histories are held
// against. That a lease has expired is not in it, for only the database's clock says when; that no term begins before
// the one before it has ended, and no live write comes after, is checked against the database's own log.
type state struct {
	fence int64 // of the newest grant
	free  bool  // it was released
	rows  [3 * rowsOfOne]rowState
}

type rowState struct {
	there bool
	fence int64 // of a row that is gone, that under which it was deleted
	value string
}

// step of the model: what somebody did to, or was told of, the lease or one of its rows, at one moment.
type input struct {
	what    string
	fence   int64
	live    bool
	changes []change // of one transaction
	row     int
	outcome string
	current int64
	op      string
}

type change struct {
	row   int
	op    string // INSERT, UPDATE, DELETE, SEAL
	once  bool
	value string
	read  string
}

func model(initial state) porcupine.Model {
	return porcupine.Model{
		Init: func() any { return initial },
		Step: func(s, in, _ any) (bool, any) {
			next := s.(state)
			ok := next.step(in.(input))
			return ok, next
		},
		DescribeOperation: func(in, _ any) string { return in.(input).String() },
		DescribeState:     func(s any) string { return fmt.Sprintf("%+v", s) },
	}
}

func (in input) String() string {
	return fmt.Sprintf("%s %s fence %d row %d %s %d %v", in.op, in.what, in.fence, in.row, in.outcome, in.current, in.changes)
}

// step says whether it can be, and takes it.
func (s *state) step(in input) bool {
	switch in.what {
	case "acquire":
		if in.fence <= s.fence {
			return false
		}
		s.fence, s.free = in.fence, false
		return true
	case "held", "renew":
		return s.fence == in.fence && !s.free
	case "release":
		if s.fence != in.fence {
			return false
		}
		s.free = true
		return true
	case "write":
		if in.live && (s.fence != in.fence || s.free) {
			return false
		}
		for _, c := range in.changes {
			if !s.change(in.fence, c) {
				return false
			}
		}
		return true
	}
	r := s.rows[in.row]
	switch in.outcome {
	case stale:
		return r.fence == in.current && r.fence > in.fence-1 // a tombstone of one's own refuses an insert under rule once
	case missing:
		return !r.there
	case exists:
		return r.there
	}
	return true
}

func (s *state) change(fence int64, c change) bool {
	r := &s.rows[c.row]
	if c.op == "SEAL" {
		if !r.there || r.fence >= fence-1 || c.read != "" && c.read != r.value {
			return false
		}
		r.fence = fence - 1
		return true
	}
	if r.there == (c.op == "INSERT") || r.fence > fence || c.once && r.fence == fence {
		return false
	}
	r.fence, r.there, r.value = fence, c.op != "DELETE", c.value
	return true
}

// linear holds the round's history against the model, one lease after the other, and keeps a picture of what does not fit.
func (c *checker) linear(dir string, limit time.Duration) {
	end := time.Now().UnixNano()
	for i := range names {
		name := nameOf(i)
		ops := c.operations(name, i, end)
		initial := c.initial(i)
		m := model(initial)
		result, info := porcupine.CheckOperationsVerbose(m, ops, limit)
		if result == porcupine.Ok {
			continue
		}
		picture := filepath.Join(dir, name+".html")
		if err := porcupine.VisualizePath(m, info, picture); err != nil {
			picture = err.Error()
		}
		what := "no order explains its operations"
		if result == porcupine.Unknown {
			what = fmt.Sprintf("no order was found within %v that explains its operations", limit)
		}
		c.violated(linearizable, "%s: %s, %d of %d are as far as it goes, and then comes %s; see %s", name, what, len(longest(info)), len(ops),
			stuck(m, initial, ops, longest(info)), picture)
	}
}

// longest is the longest order that was found.
func longest(info porcupine.LinearizationInfo) []porcupine.Operation {
	var best []porcupine.Operation
	for _, partition := range info.PartialLinearizationsOperations() {
		for _, order := range partition {
			if len(order) > len(best) {
				best = order
			}
		}
	}
	return best
}

// stuck names the operation that should have come next, and the state that it does not fit.
func stuck(m porcupine.Model, s state, all, order []porcupine.Operation) string {
	placed := map[string]int{}
	var now any = s
	for _, o := range order {
		placed[fmt.Sprint(o.Call, o.Input)]++
		_, now = m.Step(now, o.Input, nil)
	}
	var next *porcupine.Operation
	for _, o := range all {
		if key := fmt.Sprint(o.Call, o.Input); placed[key] > 0 {
			placed[key]--
			continue
		}
		if next == nil || o.Return < next.Return {
			next = &o
		}
	}
	if next == nil {
		return "nothing"
	}
	return fmt.Sprintf("%v, in %+v", next.Input, now)
}

// initial is the state before the first operation: as the rows were filled, and, after a failover, as they were taken over.
func (c *checker) initial(n int) state {
	var s state
	for i := range s.rows {
		s.rows[i] = rowState{there: true, value: "seed"}
	}
	for _, w := range c.l.writes {
		if w.commit > c.after || w.row/rowsOfOne != n {
			continue
		}
		r := &s.rows[slot(w.table, w.row)]
		switch w.op {
		case "BURY":
			r.fence = max(r.fence, w.new)
		case "DELETE":
			r.there, r.value = false, ""
		default:
			*r = rowState{true, w.new, w.value}
		}
	}
	for _, l := range c.l.leases {
		if l.commit > c.after || l.name != nameOf(n) {
			continue
		}
		s.fence, s.free = l.new, l.released
	}
	return s
}

func slot(table string, row int) int {
	return slices.Index(tables, table)*rowsOfOne + row%rowsOfOne
}

// operations are the history of a lease and its rows. What changed anything is taken from the database's log, with the
// times of whoever asked for it; what was merely told, from the workers.
func (c *checker) operations(name string, n int, end int64) []porcupine.Operation {
	var ops []porcupine.Operation
	clients := map[string]int{}
	add := func(worker string, in input, call, ret int64) {
		if _, known := clients[worker]; !known {
			clients[worker] = len(clients)
		}
		ops = append(ops, porcupine.Operation{ClientId: clients[worker], Input: in, Call: call, Return: max(ret, call+1)})
	}
	// A change takes effect after its row was locked, when it was logged, and before the next change of the same row, which
	// had to wait for its commit. That of the last one may be visible a little after the time that it bears.
	const seconds5 = int64(5 * time.Second)
	until := map[int64]int64{} // by seq
	last := map[string]int64{}
	follow := func(what string, seq, at, commit int64) {
		if before, ok := last[what]; ok {
			until[before] = min(until[before], at)
		}
		last[what], until[seq] = seq, min(commit+seconds5, end)
	}
	for _, l := range c.l.leases {
		follow(l.name, l.seq, l.at, l.commit)
	}
	for _, w := range c.l.writes {
		if w.op != "BURY" {
			follow(fmt.Sprint(w.table, w.row), w.seq, w.at, w.commit)
		}
	}
	const slack = int64(100 * time.Microsecond) // one clock, read in two ways

	granted := map[int64]*leaseRow{}
	for _, l := range c.l.leases {
		if l.name != name || l.commit <= c.after {
			continue
		}
		switch {
		case l.grant():
			granted[l.new] = l
			call, ret := l.at-slack, until[l.seq]
			if o := c.acquireOf(l); o != nil {
				ret = min(ret, o.Return)
			}
			add(l.app, input{what: "acquire", fence: l.new, op: l.app}, call, ret)
		case l.released && !l.wasFree:
			add(l.app, input{what: "release", fence: l.new, op: l.app}, l.at-slack, until[l.seq])
		}
	}

	type transaction struct {
		by  *op
		xid int64
	}
	changes := map[transaction][]*writeRow{}
	var order []transaction
	for _, w := range c.l.writes {
		if w.op == "BURY" || w.by == nil || w.by.Name != name || w.commit <= c.after {
			continue
		}
		t := transaction{w.by, w.xid}
		if changes[t] == nil {
			order = append(order, t)
		}
		changes[t] = append(changes[t], w)
	}
	for _, t := range order {
		in := input{what: "write", fence: t.by.Fence, live: t.by.Strength != "fenced", op: t.by.ID}
		call, ret := int64(0), end
		if t.by.Return != 0 && t.by.Outcome == applied && !t.by.Doubt {
			ret = t.by.Return
		}
		for _, w := range changes[t] {
			ch := change{row: slot(w.table, w.row), op: w.op, once: w.rule == "once", value: w.value}
			if w.seal {
				ch.op = "SEAL"
				for _, s := range t.by.Steps {
					if s.Outcome == applied && !t.by.Doubt {
						ch.read = s.Read
					}
				}
			}
			in.changes = append(in.changes, ch)
			call, ret = max(call, w.at-slack), min(ret, until[w.seq])
		}
		add(workerOf(t.by.ID), in, call, ret)
	}

	for _, o := range c.h.ops {
		if o.Name != name || o.Return == 0 || o.Call <= c.after {
			continue
		}
		switch {
		case o.Kind == "acquire" && o.Outcome == held:
			// Its own client answers for a lease that it has itself.
			if g := granted[o.By]; g != nil && g.app != workerOf(o.ID) {
				add(workerOf(o.ID), input{what: "held", fence: o.By, op: o.ID}, o.Call, o.Return)
			}
		case o.Kind == "renew" && o.Outcome == ok:
			add(workerOf(o.ID), input{what: "renew", fence: o.Fence, op: o.ID}, o.Call, o.Return)
		}
		for _, s := range o.Steps {
			if s.Outcome == stale || s.Outcome == missing || s.Outcome == exists {
				add(workerOf(o.ID), input{what: "told", fence: o.Fence, row: slot(s.Table, s.Row), outcome: s.Outcome, current: s.Current, op: o.ID}, o.Call, o.Return)
			}
		}
	}
	// What the rows hold at last is read by us.
	for table := range tables {
		for row := n * rowsOfOne; row < (n+1)*rowsOfOne; row++ {
			final, there := c.l.rows[fmt.Sprint(tables[table], "/", row)]
			in := input{what: "told", row: slot(tables[table], row), outcome: missing, op: "the end"}
			if there {
				in.outcome, in.current, in.fence = stale, final.fence, 0
			}
			add("the end", in, end, end+1)
		}
	}
	return ops
}
