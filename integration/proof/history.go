//go:build unix

package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sync"
	"time"
)

// op is one call of a worker, as its history has it: written down before anything is sent, and again when it has
// returned. One that was never written down again ended with its process.
type op struct {
	ID       string `json:"id"` // worker/number; rows that it writes carry it
	Kind     string `json:"kind"`
	Name     string `json:"name"` // of the lease
	Fence    int64  `json:"fence,omitempty"`
	Strength string `json:"strength,omitempty"`
	Rule     string `json:"rule,omitempty"`
	Request  bool   `json:"request,omitempty"`  // it has a request id
	Rollback bool   `json:"rollback,omitempty"` // the caller means to roll back
	Call     int64  `json:"call"`               // nanoseconds since 1970
	Return   int64  `json:"return,omitempty"`
	Outcome  string `json:"outcome,omitempty"`
	Err      string `json:"err,omitempty"`
	By       int64  `json:"by,omitempty"`    // of an acquire that found the lease held: under which fence
	Doubt    bool   `json:"doubt,omitempty"` // an attempt before the last had no answer: it may have been applied
	Steps    []step `json:"steps,omitempty"`
}

// step is one row of a write.
type step struct {
	Kind    string `json:"kind"`
	Table   string `json:"table"`
	Row     int    `json:"row"`
	Value   string `json:"value"`
	Outcome string `json:"outcome,omitempty"`
	Current int64  `json:"current,omitempty"`
	Reason  string `json:"reason,omitempty"` // of a refusal by the database, as it is to be found in the audit
	Lost    bool   `json:"lost,omitempty"`   // the gate says that it could not record it
	Read    string `json:"read,omitempty"`   // by a seal
	Err     string `json:"err,omitempty"`
}

// Outcomes beside those of the gate.
const (
	ok         = "ok"
	held       = "held"
	committed  = "applied" // of a transaction
	rolledBack = "rolled back"
	applied    = "applied"
	already    = "already applied"
	stale      = "stale"
	leaseLost  = "lease lost"
	missing    = "missing"
	unmatched  = "unmatched"
	suppressed = "suppressed"
	failed     = "failed"
	exists     = "exists"
	another    = "written by another write of this grant"
	refused    = "refused"
	unknown    = "unknown"
)

// end is what a worker says last.
type end struct {
	Unrecorded int64 `json:"unrecorded"` // refusals that its gates could not record
	Clean      bool  `json:"clean"`      // it ended because it was asked to, and its gates were closed
}

type line struct {
	Op  *op  `json:"op,omitempty"`
	End *end `json:"end,omitempty"`
}

// recorder appends to a worker's history. Each line is one write to the file, so that what was written down before the
// process was killed is there.
type recorder struct {
	mu   sync.Mutex
	file *os.File
}

func newRecorder(path string) (*recorder, error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	return &recorder{file: f}, err
}

func (r *recorder) write(l line) {
	text, err := json.Marshal(l)
	if err != nil {
		panic(err)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if _, err := r.file.Write(append(text, '\n')); err != nil {
		panic(err) // a history with holes proves nothing
	}
}

func (r *recorder) call(o *op) {
	o.Call = time.Now().UnixNano()
	r.write(line{Op: o})
}

func (r *recorder) done(o *op) {
	o.Return = time.Now().UnixNano()
	r.write(line{Op: o})
}

// history is what all workers of a round have written down.
type history struct {
	ops  []*op
	byID map[string]*op
	ends map[string]end // by worker
}

func readHistory(dir string) (*history, error) {
	h := &history{byID: map[string]*op{}, ends: map[string]end{}}
	files, err := filepath.Glob(filepath.Join(dir, "*.history"))
	if err != nil {
		return nil, err
	}
	for _, name := range files {
		if err := h.read(name); err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
	}
	return h, nil
}

func (h *history) read(name string) error {
	f, err := os.Open(name)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	worker := filepath.Base(name)
	worker = worker[:len(worker)-len(".history")]
	for r := bufio.NewReader(f); ; {
		text, err := r.ReadBytes('\n')
		if err == io.EOF {
			return nil // what is after the last newline was cut short with its process, before it was sent
		}
		if err != nil {
			return err
		}
		var l line
		if err := json.Unmarshal(text, &l); err != nil {
			return err
		}
		if l.End != nil {
			h.ends[worker] = *l.End
			continue
		}
		if old := h.byID[l.Op.ID]; old != nil {
			*old = *l.Op
			continue
		}
		h.byID[l.Op.ID] = l.Op
		h.ops = append(h.ops, l.Op)
	}
}
