package fencedb

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/writegate/writegate/internal/pgerr"
)

// Bounds of the recorder. What is beyond them is counted.
const (
	flushEvery  = time.Second      // how often repeats of a refusal are added to its count
	forgetAfter = time.Minute      // without a repeat, or, for what cannot be recorded, without success
	maxTracked  = 10_000           // refusals with a row of their own that are known at a time
	maxKeys     = 1000             // rows of one grant with a record each; those beyond share one
	otherKeys   = `"(other keys)"` // the key of the one that they share
	flushSize   = 500
	slowdown    = 100 * time.Microsecond // by which each repeat of a refusal waits longer than the one before
	slowest     = 10 * time.Millisecond
)

// recorder writes refusals into the audit, on a connection of its own. The first of its kind (same table, key, lease,
// fence and reason) is written at once, and whoever was refused waits for that, for up to Config.AuditTimeout; repeats
// are counted, and the count is written once a second. So a refusal is on record when it is returned, and a holder that
// is refused in a loop costs one row and one statement a second. Nothing but a refused write ever waits for it.
type recorder struct {
	gate    *Gate
	closing sync.Once

	mu      sync.Mutex
	tracked map[refusal]*entry
	keys    map[refusal]int // how many keys of a grant are tracked; by a refusal without key
	lost    int64           // in all
	untold  int64           // of those, what the database has not been told yet
	base    base            // its own
	hurry   bool            // there is something to write now
	busy    bool            // run is running
	timer   *time.Timer     // until it runs, if it is not running
	done    chan struct{}   // closed when the flush that is running, or comes next, has ended
	closed  bool
}

// refusal is what one row of the audit stands for.
type refusal struct {
	table, key, lease string
	fence             int64
	reason            string
}

type entry struct {
	refusal
	holder   string
	current  int64
	seen     int64     // refusals, in all
	pending  int64     // of those, not in the audit yet, nor lost
	firstAt  time.Time // of the pending
	lastAt   time.Time
	recorded bool // it is in the audit, and the fields below are from there
	err      error
	verdict  string
	byHolder string // as the database knows them
	nowBy    string
}

func newRecorder(g *Gate) *recorder {
	return &recorder{gate: g, tracked: map[refusal]*entry{}, keys: map[refusal]int{}}
}

var (
	errGateClosed = errors.New("the gate is closed")
	errAuditFull  = errors.New("too many different refusals are waiting to be recorded")
	errAuditLate  = errors.New("no answer in time; it is still being tried")
)

// refused puts a refusal on record and fills in what the database knows of the holders. Not being able to changes
// nothing about the refusal. It returns how often this very one is known to have been met before.
func (r *recorder) refused(e *WriteError, key string) (repeats int64) {
	now := time.Now()
	id := refusal{e.Table, key, label(e.Lease, 255), e.Fence, e.Reason}
	r.mu.Lock()
	if r.closed {
		r.lost++
		r.mu.Unlock()
		e.AuditErr = notRecorded(errGateClosed)
		r.gate.observe(AuditEvent{Lost: 1, Err: errGateClosed})
		return 0
	}
	known := r.track(id, now)
	if known == nil {
		r.lost++
		r.untold++
		r.mu.Unlock()
		e.AuditErr = notRecorded(errAuditFull)
		r.gate.observe(AuditEvent{Lost: 1, Err: errAuditFull})
		return 0
	}
	if known.pending == 0 {
		known.firstAt = now
	}
	if known.key == key { // and not what those beyond the bound share
		repeats = known.seen
	}
	known.seen++
	known.pending++
	known.lastAt = now
	known.holder = label(e.Holder, 1024)
	known.current = max(known.current, e.Current)
	if known.recorded {
		r.later()
		known.tell(e)
		r.mu.Unlock()
		return repeats
	}
	done := r.soon()
	r.mu.Unlock()

	// The caller's context may end at any moment, and often has: the lease that it follows is over.
	timer := time.NewTimer(r.gate.cfg.AuditTimeout)
	defer timer.Stop()
	select {
	case <-done:
	case <-timer.C:
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case known.recorded:
		known.tell(e)
	case known.err != nil:
		e.AuditErr = notRecorded(known.err)
	default:
		e.AuditErr = notRecorded(errAuditLate)
	}
	return repeats
}

func notRecorded(err error) error { return fmt.Errorf("the refusal could not be recorded: %w", err) }

func (k *entry) tell(e *WriteError) {
	e.Verdict, e.Holder, e.CurrentHolder = k.verdict, k.byHolder, k.nowBy
}

// track returns the entry for a refusal, nil if there is no room for one more.
func (r *recorder) track(id refusal, now time.Time) *entry {
	known := r.tracked[id]
	if known != nil {
		return known
	}
	grant := id
	grant.key = ""
	if r.keys[grant] >= maxKeys {
		id.key = otherKeys
		if known = r.tracked[id]; known != nil {
			return known
		}
	}
	if len(r.tracked) >= maxTracked {
		r.forget(now, 0)
		if len(r.tracked) >= maxTracked {
			return nil
		}
	}
	known = &entry{refusal: id}
	r.tracked[id] = known
	r.keys[grant]++
	return known
}

// forget drops what is on record and has not been repeated for that long.
func (r *recorder) forget(now time.Time, after time.Duration) {
	for id, known := range r.tracked {
		if known.pending == 0 && now.Sub(known.lastAt) >= after {
			delete(r.tracked, id)
		}
	}
	// The number of a grant's keys is kept as long as any of them: it bounds the rows, not the memory.
	alive := map[refusal]bool{}
	for id := range r.tracked {
		id.key = ""
		alive[id] = true
	}
	for grant := range r.keys {
		if !alive[grant] {
			delete(r.keys, grant)
		}
	}
}

// soon has what is pending written now, and returns what is closed when that is done.
func (r *recorder) soon() <-chan struct{} {
	r.hurry = true
	if r.busy {
		return r.done // it looks again before it ends
	}
	if r.timer != nil && !r.timer.Stop() {
		return r.done // it has just begun
	}
	r.timer = nil
	r.start()
	return r.done
}

// later has it written in a while.
func (r *recorder) later() {
	if r.busy || r.timer != nil {
		return
	}
	if r.done == nil {
		r.done = make(chan struct{})
	}
	r.timer = time.AfterFunc(flushEvery, func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		if r.timer == nil || r.busy {
			return
		}
		r.timer, r.hurry = nil, true
		r.start()
	})
}

func (r *recorder) start() {
	r.busy = true
	if r.done == nil {
		r.done = make(chan struct{})
	}
	go r.run()
}

// run writes until there is no hurry any more.
func (r *recorder) run() {
	for stop := false; ; {
		r.mu.Lock()
		tell := r.hurry && r.untold > 0
		batch := r.take()
		if stop || len(batch) == 0 && !tell {
			r.rest()
			r.mu.Unlock()
			return
		}
		r.mu.Unlock()
		stop = r.flush(batch)
	}
}

// rest ends a run: those who wait for it look at what became of theirs.
func (r *recorder) rest() {
	r.busy, r.hurry = false, false
	close(r.done)
	r.done = nil
	r.forget(time.Now(), forgetAfter)
	if r.closed {
		return
	}
	pending := r.untold > 0
	for _, known := range r.tracked {
		pending = pending || known.pending > 0
	}
	if pending {
		r.later()
	}
}

// taken is what a flush writes of an entry.
type taken struct {
	*entry
	times   int64
	firstAt time.Time
	current int64
	holder  string
}

// take returns what is to be written now, what is not in the audit yet first, as far as it fits.
func (r *recorder) take() []taken {
	if !r.hurry {
		return nil
	}
	var batch []taken
	for _, known := range r.tracked {
		if known.pending > 0 {
			batch = append(batch, taken{known, known.pending, known.firstAt, known.current, known.holder})
		}
	}
	slices.SortFunc(batch, func(a, b taken) int {
		if a.recorded != b.recorded {
			if a.recorded {
				return 1
			}
			return -1
		}
		return a.firstAt.Compare(b.firstAt)
	})
	r.hurry = len(batch) > flushSize
	return batch[:min(len(batch), flushSize)]
}

const recordSQL = `SELECT r.n, r.verdict, r.holder, r.current_holder FROM fence.record_rejections($1::text::jsonb, $2::bigint) r`

type recordEntry struct {
	Table   string          `json:"table"`
	Key     json.RawMessage `json:"key"`
	Lease   string          `json:"lease"`
	Fence   int64           `json:"fence"`
	Reason  string          `json:"reason"`
	Current *int64          `json:"current"`
	Holder  string          `json:"holder"`
	Times   int64           `json:"times"`
	FirstAt time.Time       `json:"first_at"`
}

// flush writes one batch, and how many were lost before. stop says that the rest should wait: this one did not work.
func (r *recorder) flush(batch []taken) (stop bool) {
	err := r.flushOnce(batch)
	if pgerr.Answered(err) && len(batch) > 1 {
		// One that the database will not have must not take the others along.
		for _, k := range batch {
			if one := r.flushOnce([]taken{k}); one == nil {
				err = nil
			}
		}
	}
	return err != nil
}

func (r *recorder) flushOnce(batch []taken) error {
	began := time.Now()
	r.mu.Lock()
	lost := r.untold
	r.mu.Unlock()
	entries := make([]recordEntry, len(batch))
	for i, k := range batch {
		entries[i] = recordEntry{
			k.table, json.RawMessage(k.key), k.lease, k.fence, k.reason, nil, k.holder, k.times, k.firstAt,
		}
		if k.current > 0 {
			entries[i].Current = &batch[i].current
		}
	}
	text, err := json.Marshal(entries)
	type answer struct{ verdict, holder, current string }
	answers := make([]answer, len(batch))
	if err == nil {
		ctx, cancel := context.WithTimeout(context.Background(), r.gate.cfg.AuditTimeout)
		defer cancel()
		err = r.send(ctx, []any{string(text), lost}, func(row row) error {
			var n int
			var a answer
			if err := row.scan(&n, &a.verdict, &a.holder, &a.current); err != nil {
				return err
			}
			answers[n-1] = a
			return nil
		})
	}

	if pgerr.Answered(err) && len(batch) > 1 {
		return err // flush tries them one by one
	}
	event := AuditEvent{Took: time.Since(began), Err: err}
	r.mu.Lock()
	if err == nil {
		r.untold -= lost
	}
	for i, k := range batch {
		switch {
		case err == nil:
			k.settle(k.times)
			k.recorded, k.err = true, nil
			k.verdict, k.byHolder, k.nowBy = answers[i].verdict, answers[i].holder, answers[i].current
			event.Recorded += k.times
		case pgerr.NotSent(err) && !r.closed && time.Since(k.firstAt) < forgetAfter:
			k.err = err // nothing was written: it is tried again
		default:
			// Not again: it may have been written, and must not be counted twice.
			k.settle(k.times)
			k.err = err
			r.lost += k.times
			r.untold += k.times
			event.Lost += k.times
			if !k.recorded && k.pending == 0 {
				delete(r.tracked, k.refusal) // the next of its kind waits, and is told
			}
		}
	}
	r.mu.Unlock()
	if event.Lost > 0 {
		r.gate.cfg.Logger.Error("writegate: refusals could not be recorded", "refusals", event.Lost, "error", err)
	}
	if len(batch) > 0 {
		r.gate.observe(event)
	}
	return err
}

func (k *entry) settle(times int64) {
	k.pending -= times
	if k.pending > 0 {
		k.firstAt = time.Now() // as near as is known
	}
}

func (r *recorder) send(ctx context.Context, args []any, each func(row) error) error {
	r.mu.Lock()
	own := r.base
	r.mu.Unlock()
	if own == nil {
		made, err := r.gate.base.audit(context.WithoutCancel(ctx))
		if err != nil {
			return pgerr.BeforeSending(err)
		}
		own = made
		r.mu.Lock()
		r.base = own
		r.mu.Unlock()
	}
	for attempt := 0; ; attempt++ {
		s, err := own.session(ctx)
		if err != nil {
			return err
		}
		_, err = s.query(ctx, recordSQL, args, each)
		s.release()
		if !pgerr.Stale(err) || ctx.Err() != nil || attempt > own.spares() {
			return err
		}
	}
}

// wait returns once all that was refused before the call is recorded or lost.
func (r *recorder) wait(ctx context.Context) error {
	type goal struct {
		*entry
		seen int64
	}
	r.mu.Lock()
	var goals []goal
	for _, known := range r.tracked {
		goals = append(goals, goal{known, known.seen})
	}
	told := r.untold == 0
	for pause := false; ; pause = true {
		missing := int64(0)
		for _, g := range goals {
			missing += max(0, g.seen-(g.entry.seen-g.pending))
		}
		if missing == 0 && told {
			r.mu.Unlock()
			return nil
		}
		told = true // once is enough: the number alone keeps
		done := r.soon()
		r.mu.Unlock()
		if pause {
			select {
			case <-time.After(100 * time.Millisecond): // it did not work, and so will not at once
			case <-ctx.Done():
			}
		}
		select {
		case <-done:
		case <-ctx.Done():
			return fmt.Errorf("fencedb: %d refusals are not recorded yet: %w", missing, ctx.Err())
		}
		r.mu.Lock()
	}
}

// close writes what is pending, once, and closes the connection.
// A second call waits for the first.
func (r *recorder) close() { r.closing.Do(r.closeOnce) }

func (r *recorder) closeOnce() {
	r.mu.Lock()
	r.closed = true
	for tell := r.untold > 0; ; tell = false {
		pending := tell
		for _, known := range r.tracked {
			pending = pending || known.pending > 0
		}
		if !pending && !r.busy {
			break
		}
		done := r.soon()
		r.mu.Unlock()
		<-done // bounded by AuditTimeout for each batch
		r.mu.Lock()
	}
	if r.timer != nil {
		r.timer.Stop()
		r.timer = nil
	}
	own := r.base
	r.base = nil
	r.mu.Unlock()
	if own != nil {
		own.close()
	}
}

func (r *recorder) unrecorded() int64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.lost
}

// label is a text that people read, of at most so many bytes.
func label(s string, limit int) string {
	s = storable(s)
	if len(s) > limit {
		s = strings.ToValidUTF8(s[:limit], "")
	}
	return s
}

// storable is text as PostgreSQL can store it: a label that cannot be must not cost the record of a refusal.
func storable(s string) string {
	return strings.ReplaceAll(strings.ToValidUTF8(s, "\uFFFD"), "\x00", "\uFFFD")
}
