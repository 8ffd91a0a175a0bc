package fencedb

import (
	"context"
	"errors"
	"time"
)

// Event is something that Config.Observe is told: a [WriteEvent] or an [AuditEvent]. Later versions may add kinds; pass by
// those that you do not know.
type Event interface{ event() }

// WriteEvent tells how a write, or a transaction of [Gate.InTx], has ended.
type WriteEvent struct {
	Kind     string // update, seal, insert, upsert, delete, update_many, exec, classify, in_tx
	Table    string // schema.table; empty for a transaction, and for SQL of one's own without a target
	Rule     Rule
	Strength Strength
	Outcome  Outcome
	Reason   string        // of a refusal, as in [WriteError]
	Verdict  string        // of a refusal, as in [WriteError]
	Rows     int           // written
	Refused  int           // rows refused, which the audit has, or will have; 1 for a transaction that was
	Attempt  int           // of [Retry]: above 1 it is a repeat
	Took     time.Duration // from the call to its end, with finding out why and recording it
	Left     time.Duration // what the lease had left at that end; 0 if it is over, or does not know
	Err      error
}

// AuditEvent tells that refusals were recorded, or lost.
type AuditEvent struct {
	Recorded int64 // refusals now in the audit
	Lost     int64 // refusals that will not be
	Took     time.Duration
	Err      error // why they were lost
}

func (WriteEvent) event() {}
func (AuditEvent) event() {}

func (g *Gate) observe(e Event) {
	if g.cfg.Observe != nil {
		g.cfg.Observe(e)
	}
}

func (g *Gate) observeWrite(ctx context.Context, w *write, outcome Outcome, err error) {
	if g.cfg.Observe == nil {
		return
	}
	e := WriteEvent{
		Kind: w.kind, Table: w.tableName(), Rule: w.options.rule, Strength: w.options.strength,
		Outcome: outcome, Rows: w.count, Attempt: attemptOf(ctx), Took: time.Since(w.began), Err: err,
	}
	var many *ManyError
	var refused []*WriteError
	if errors.As(err, &many) {
		refused = many.Refused
	}
	if whole := (*WriteError)(nil); len(refused) == 0 && errors.As(err, &whole) {
		refused = []*WriteError{whole}
	}
	for _, r := range refused {
		if r.Reason != "" {
			e.Reason, e.Verdict = r.Reason, r.Verdict
			e.Refused++
		}
	}
	if k, ok := handle(w.grant.lease).(keeper); ok {
		e.Left = k.Remaining()
	}
	g.observe(e)
}
