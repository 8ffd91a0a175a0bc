//go:build unix

package main

import (
	"context"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/writegate/writegate/internal/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// scene is a small history, and what the database says of it, both as they should be: two holders, one after the other, a
// stale write that is refused and recorded, a seal, a delete and an insert.
type scene struct {
	t    int64
	seq  int64
	h    *history
	l    *logs
	next int
}

func newScene() *scene {
	s := &scene{t: 1e18, h: &history{byID: map[string]*op{}, ends: map[string]end{}}, l: &logs{rows: map[string]finalRow{}}}
	for _, table := range tables {
		for i := range names * rowsOfOne {
			s.l.rows[table+"/"+strconv.Itoa(i)] = finalRow{value: "seed"}
		}
	}
	return s
}

func (s *scene) tick() int64 { s.t += int64(10 * time.Millisecond); return s.t }

func (s *scene) op(worker, kind string, fence int64, outcome string) *op {
	s.next++
	o := &op{ID: worker + "/" + strconv.Itoa(s.next), Kind: kind, Name: "name-0", Fence: fence, Rule: "once", Strength: "live", Outcome: outcome}
	o.Call, o.Return = s.tick(), s.tick()+int64(5*time.Millisecond)
	s.tick()
	s.h.ops = append(s.h.ops, o)
	s.h.byID[o.ID] = o
	return o
}

func (s *scene) lease(worker string, old, fence, ends int64, free, released bool) {
	s.seq++
	l := &leaseRow{
		seq: s.seq, xid: s.seq, at: s.t - int64(7*time.Millisecond), app: worker, name: "name-0", old: old, new: fence, wasFree: free, released: released,
		ends: ends,
	}
	l.commit, l.granted = l.at+int64(time.Millisecond), l.at
	if n := len(s.l.leases); n > 0 {
		l.oldEnds = s.l.leases[n-1].ends
	}
	s.l.leases = append(s.l.leases, l)
}

func (s *scene) acquire(worker string, old, fence int64) {
	s.op(worker, "acquire", fence, ok)
	s.lease(worker, old, fence, s.t+int64(time.Second), true, false)
}

func (s *scene) release(worker string, fence int64) {
	s.op(worker, "release", fence, ok)
	s.lease(worker, fence, fence, s.t, false, true)
}

// write is one row's, as it went.
func (s *scene) write(worker, kind string, fence, before int64, outcome string) *op {
	o := s.op(worker, kind, fence, outcome)
	value := o.ID + ".0"
	o.Steps = []step{{Kind: kind, Table: "app.once", Row: 0, Value: value, Outcome: outcome}}
	if outcome != applied {
		return o
	}
	s.seq++
	w := &writeRow{
		seq: s.seq, xid: s.seq, at: o.Call + 1e6, commit: o.Call + 2e6, app: worker, table: "app.once", row: 0, op: "UPDATE",
		old: before, new: fence, oldValue: s.l.rows["app.once/0"].value, value: value,
	}
	switch kind {
	case "seal":
		w.new, w.value = fence-1, w.oldValue
		o.Steps[0].Read = w.value
	case "insert":
		w.op, w.old, w.oldValue = "INSERT", -1, ""
	case "delete":
		w.op, w.new, w.value = "DELETE", -1, ""
	}
	s.l.writes = append(s.l.writes, w)
	if kind == "delete" {
		s.seq++
		s.l.writes = append(s.l.writes, &writeRow{seq: s.seq, xid: w.xid, at: w.at, commit: w.commit, app: worker, table: w.table, row: w.row, op: "BURY", old: -1, new: fence})
		delete(s.l.rows, "app.once/0")
	} else {
		s.l.rows["app.once/0"] = finalRow{w.value, w.new}
	}
	return o
}

func (s *scene) refused(worker string, fence, current int64) *op {
	o := s.write(worker, "update", fence, 0, stale)
	o.Steps[0].Current, o.Steps[0].Reason = current, "stale"
	s.l.refusals = append(s.l.refusals, refusalRow{"app.once", "0", "name-0", fence, "stale", "stale", 1})
	return o
}

// good plays the scene.
func good() *scene {
	s := newScene()
	s.acquire("a", 0, 2)
	s.write("a", "update", 2, 0, applied)
	s.release("a", 2)
	s.acquire("b", 2, 4)
	s.write("b", "seal", 4, 2, applied)
	s.write("b", "update", 4, 3, applied)
	s.refused("a", 2, 4)
	s.release("b", 4)
	s.acquire("a", 4, 6)
	s.write("a", "delete", 6, 4, applied)
	s.release("a", 6)
	s.acquire("b", 6, 8)
	s.write("b", "insert", 8, 6, applied)
	s.h.ends["a"], s.h.ends["b"] = end{Clean: true}, end{Clean: true}
	return s
}

func (s *scene) judge(t *testing.T, change func(*checker)) []string {
	t.Helper()
	c := &checker{h: s.h, l: s.l}
	if change != nil {
		change(c)
	}
	c.check()
	c.linear(t.TempDir(), time.Minute)
	return invariantsOf(c.found)
}

func TestAHistoryThatIsAsItShouldBe(t *testing.T) {
	require.Empty(t, good().judge(t, nil))
}

// Each invariant is violated in a history that is as it should be but for one thing, and that is found.
func TestEachInvariantIsWatched(t *testing.T) {
	for invariant, spoil := range map[string]func(*scene, *checker){
		neverFalls:   func(s *scene, _ *checker) { s.write("a", "update", 2, 8, applied) },
		oncePerGrant: func(s *scene, _ *checker) { s.write("b", "update", 8, 8, applied) },
		liveInTime: func(s *scene, _ *checker) { // locked before, committed after
			s.l.writes[0].commit = s.l.leases[2].commit + 1
		},
		tombstone: func(s *scene, _ *checker) { s.l.writes[len(s.l.writes)-1].new, s.h.ops[len(s.h.ops)-1].Fence = 4, 4 },
		durable:   func(s *scene, _ *checker) { s.l.writes = s.l.writes[1:] },
		nothingLeft: func(s *scene, _ *checker) {
			s.h.ops[len(s.h.ops)-1].Outcome, s.h.ops[len(s.h.ops)-1].Steps[0].Outcome = failed, failed
		},
		resolved: func(s *scene, _ *checker) {
			s.h.ops[len(s.h.ops)-1].Outcome, s.h.ops[len(s.h.ops)-1].Steps[0].Outcome = unknown, unknown
		},
		onceOnly: func(s *scene, _ *checker) {
			again := *s.l.writes[0]
			again.seq = 1000
			s.l.writes = append(s.l.writes, &again)
		},
		oneTerm: func(s *scene, _ *checker) {
			s.l.leases[2].wasFree, s.l.leases[2].oldEnds = false, s.l.leases[2].granted+1
		},
		ownLease:     func(s *scene, _ *checker) { s.l.leases[1].app = "b" },
		uniqueFences: func(s *scene, _ *checker) { s.op("c", "acquire", 4, ok) },
		risingFences: func(s *scene, _ *checker) { s.lease("a", 8, 4, s.t, true, false) },
		clockLate: func(s *scene, c *checker) {
			o := s.h.ops[0]
			c.locks = []locked{{"name-0", o.Call - 1, s.l.leases[0].at}}
			s.l.leases[0].granted = o.Call - int64(time.Second)
		},
		audited: func(s *scene, _ *checker) { s.l.refusals = nil },
		lawful:  func(s *scene, _ *checker) { s.l.refusals[0].verdict = "lawful" },
		guarded: func(s *scene, _ *checker) { s.h.ops[len(s.h.ops)-1].Kind = "rogue" },
		linearizable: func(s *scene, _ *checker) { // told of a fence that the row did not have yet
			for _, o := range s.h.ops {
				if len(o.Steps) > 0 && o.Steps[0].Outcome == stale {
					o.Steps[0].Current = 8
				}
			}
		},
		unexplained: func(s *scene, _ *checker) { s.l.writes[0].value = "nobody/1.0" },
		sealedReading: func(s *scene, _ *checker) {
			for _, o := range s.h.ops {
				if o.Kind == "seal" {
					o.Steps[0].Read = "another"
				}
			}
		},
	} {
		t.Run(invariant, func(t *testing.T) {
			s := good()
			require.Contains(t, s.judge(t, func(c *checker) { spoil(s, c) }), invariant)
		})
	}
}

// What is after the last newline was never sent; what is before it counts.
func TestAHistoryThatWasCutShort(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "w1.1.history")
	r, err := newRecorder(path)
	require.NoError(t, err)
	o := &op{ID: "w1.1/1", Kind: "update"}
	r.call(o)
	o.Outcome = applied
	r.done(o)
	r.call(&op{ID: "w1.1/2"})
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(path, append(text, `{"op":{"id":"w1.1/3"`...), 0o600))
	h, err := readHistory(dir)
	require.NoError(t, err)
	require.Len(t, h.ops, 2)
	require.Equal(t, applied, h.byID["w1.1/1"].Outcome)
	require.Zero(t, h.byID["w1.1/2"].Return)
}

// What the controls break is there to be broken, each names an invariant, and the page says which.
func TestControlsFitTheCode(t *testing.T) {
	cfg := pgtest.New(t)
	conn, err := pgx.ConnectConfig(context.Background(), cfg)
	require.NoError(t, err)
	defer func() { _ = conn.Close(context.Background()) }()
	page, err := os.ReadFile("../../docs/proof.md")
	require.NoError(t, err)
	for _, c := range controls {
		for _, f := range c.functions {
			var text string
			require.NoError(t, conn.QueryRow(context.Background(),
				"SELECT pg_get_functiondef(p.oid) FROM pg_proc p WHERE p.pronamespace = 'fence'::regnamespace AND p.proname = $1", f.in).Scan(&text))
			require.Contains(t, text, f.old, c.name)
		}
		for _, f := range c.source {
			text, err := os.ReadFile(filepath.Join("../../fencedb", f.in))
			require.NoError(t, err)
			require.Equal(t, 1, strings.Count(string(text), f.old), c.name)
		}
		require.Contains(t, string(page), "| "+c.name+" | "+c.what+" | "+c.caught+" |")
	}
}
