//go:build unix

package main

import (
	"bufio"
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"log/slog"
	"maps"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"

	"github.com/writegate/writegate/fencedb"
	"github.com/writegate/writegate/internal/pgerr"
	"github.com/writegate/writegate/leasedb"
)

// orders is what a worker is told, by its environment.
type orders struct {
	Worker  string        `json:"worker"` // its name: who it is, and its how-manieth life
	DSN     string        `json:"dsn"`
	Pooled  bool          `json:"pooled"` // there is a pooler in between
	SQL     bool          `json:"sql"`    // write through database/sql
	Names   int           `json:"names"`
	Rows    int           `json:"rows"` // of each name in each table
	TTL     time.Duration `json:"ttl"`
	Lanes   int           `json:"lanes"` // goroutines
	Seed    uint64        `json:"seed"`
	History string        `json:"history"`
	habits
}

// habits are what workers of a round do, and how often.
type habits struct {
	Only    []string `json:"only"`    // kinds of writes; none: all of them
	Stubs   float64  `json:"stubs"`   // the part of writes that goes on whatever the holder knows of its lease
	Zombies float64  `json:"zombies"` // the part of leases that is neither released nor renewed, and written under later
	Linger  float64  `json:"linger"`  // the part of what is done with those that renews or releases them
	Live    float64  `json:"live"`    // the part of writes of strength Live
}

// What is passed to a worker: its orders, and, line by line on its standard input, what to do with its clock, and when to stop.
const (
	envOrders = "WRITEGATE_PROOF_WORKER"
	sayStop   = "stop"
	sayClock  = "clock" // clock RATE JUMP: how fast it runs from now on, and how far it is set
)

// tables that workers write; each has its own rule, and the last a guard that enforces it.
var tables = []string{"app.once", "app.term", "app.guarded"}

type worker struct {
	orders
	rec    *recorder
	pool   *pgxpool.Pool
	leases *leasedb.Client
	gate   *fencedb.Gate
	tables map[string]*fencedb.Table
	number atomic.Int64
	clock  clock
}

// clock is this machine's, disturbed.
type clock struct {
	mu    sync.Mutex
	since time.Time // real
	at    time.Time // what it showed then
	boot  time.Duration
	rate  float64
}

func (c *clock) now() leasedb.Reading {
	c.mu.Lock()
	defer c.mu.Unlock()
	passed := time.Duration(float64(time.Since(c.since)) * c.rate)
	return leasedb.Reading{Time: c.at.Add(passed), Boot: c.boot + passed}
}

func (c *clock) set(rate float64, jump time.Duration) {
	now := c.now()
	c.mu.Lock()
	defer c.mu.Unlock()
	// A wall clock that is set leaves the others alone; here all of them go astray, which is worse.
	c.since, c.at, c.boot, c.rate = time.Now(), now.Time.Add(jump), now.Boot+jump, rate
}

// workerMain is the whole of a worker process.
func workerMain(text string) error {
	var w worker
	if err := json.Unmarshal([]byte(text), &w.orders); err != nil {
		return err
	}
	var err error
	if w.rec, err = newRecorder(w.History); err != nil {
		return err
	}
	w.clock = clock{since: time.Now(), at: time.Now(), boot: time.Hour, rate: 1}
	ctx, stop := context.WithCancel(context.Background())
	go func() {
		for in := bufio.NewScanner(os.Stdin); in.Scan(); {
			words := strings.Fields(in.Text())
			switch words[0] {
			case sayStop:
				stop()
			case sayClock:
				rate, _ := strconv.ParseFloat(words[1], 64)
				jump, _ := time.ParseDuration(words[2])
				w.clock.set(rate, jump)
			}
		}
		os.Exit(3) // whoever started us is gone
	}()
	slog.SetDefault(slog.New(slog.DiscardHandler))
	if err := w.connect(ctx); err != nil {
		return err
	}
	var lanes sync.WaitGroup
	for i := range max(w.Lanes, 1) {
		lanes.Go(func() { (&lane{worker: &w, rng: rand.New(rand.NewPCG(w.Seed, uint64(i)))}).run(ctx) })
	}
	lanes.Wait()
	closing, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	_ = w.leases.Close(closing)
	_ = w.gate.Flush(closing)
	w.gate.Close()
	w.rec.write(line{End: &end{Unrecorded: w.gate.Unrecorded(), Clean: true}})
	return nil
}

// connect goes on until it has reached the database: there may be trouble from the start.
func (w *worker) connect(ctx context.Context) error {
	cfg, err := pgxpool.ParseConfig(w.DSN)
	if err != nil {
		return err
	}
	cfg.MaxConns = 4
	cfg.ConnConfig.ConnectTimeout = 2 * time.Second
	cfg.ConnConfig.RuntimeParams["application_name"] = w.Worker
	if w.Pooled {
		cfg.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeCacheDescribe
	}
	for {
		err := w.open(ctx, cfg.Copy())
		if err == nil || errors.Is(err, leasedb.ErrSchema) {
			return err
		}
		if ctx.Err() != nil { // stopped before it began
			w.rec.write(line{End: &end{Clean: true}})
			os.Exit(0)
		}
		time.Sleep(20 * time.Millisecond)
	}
}

func (w *worker) open(ctx context.Context, cfg *pgxpool.Config) (err error) {
	if w.pool == nil {
		if w.pool, err = pgxpool.NewWithConfig(ctx, cfg); err != nil {
			return err
		}
	}
	if w.leases == nil {
		w.leases, err = leasedb.New(ctx, w.pool, leasedb.Config{
			Holder: w.Worker, TTL: w.TTL, PollEvery: 50 * time.Millisecond, PollOnly: w.Pooled, Clock: w.clock.now, Conns: 2,
		})
		if err != nil {
			w.leases = nil
			return err
		}
	}
	if w.gate == nil {
		cfg := fencedb.Config{AuditTimeout: 500 * time.Millisecond}
		if w.SQL {
			cfg.AuditDB = stdlib.OpenDBFromPool(w.pool)
			db := stdlib.OpenDBFromPool(w.pool)
			db.SetMaxIdleConns(0)
			w.gate = fencedb.NewSQL(db, cfg)
		} else {
			w.gate = fencedb.New(w.pool, cfg)
		}
		w.tables = map[string]*fencedb.Table{}
	}
	for _, name := range tables {
		if w.tables[name] == nil {
			t, err := w.gate.Table(ctx, name)
			if err != nil {
				return err
			}
			w.tables[name] = t
		}
	}
	return nil
}

// lane is one goroutine's work.
type lane struct {
	*worker
	rng     *rand.Rand
	zombies []grant // leases that are nobody's any more, or soon will be

	unsettled []unsettled
}

// grant is a lease as the gate sees it. A stubborn one passes every check of its own, as would that of a process which was
// stopped between its check and its write: what is left to refuse it is the database.
type grant struct {
	*leasedb.Lease
	fence int64
}

type stubborn struct{ l *leasedb.Lease }

func (s stubborn) Name() string              { return s.l.Name() }
func (s stubborn) Fence() int64              { return s.l.Fence() }
func (s stubborn) Token() string             { return s.l.Token() }
func (s stubborn) Holder() string            { return s.l.Holder() }
func (s stubborn) Check(time.Duration) error { return nil }

func (l *lane) chance(p float64) bool { return l.rng.Float64() < p }

func (l *lane) nap(ctx context.Context, longest time.Duration) {
	timer := time.NewTimer(time.Duration(l.rng.Float64() * float64(longest)))
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
}

func (l *lane) newOp(kind, name string, fence int64) *op {
	return &op{ID: l.Worker + "/" + strconv.FormatInt(l.number.Add(1), 10), Kind: kind, Name: name, Fence: fence}
}

func nameOf(i int) string { return "name-" + strconv.Itoa(i) }

func (l *lane) run(ctx context.Context) {
	defer l.settle()
	for ctx.Err() == nil {
		if len(l.zombies) > 0 && l.chance(0.3) {
			g := l.zombies[l.rng.IntN(len(l.zombies))]
			if l.chance(l.Linger) {
				l.linger(ctx, g)
			} else {
				l.write(ctx, g, 1)
			}
			continue
		}
		g, granted := l.acquire(ctx, nameOf(l.rng.IntN(l.Names)))
		if !granted {
			l.nap(ctx, l.TTL/10)
			continue
		}
		for range 1 + l.rng.IntN(20) {
			l.write(ctx, g, l.Stubs)
			if l.chance(0.05) {
				l.renew(ctx, g)
			}
			if l.chance(0.1) {
				l.nap(ctx, l.TTL/8)
			}
		}
		if l.chance(l.Zombies) {
			g.Lose(errors.New("forgotten")) // sends nothing: the database learns of it by the expiry
			l.zombies = append(l.zombies, g)
			if len(l.zombies) > 6 {
				// Some of them try to give back, or to keep, what is not theirs any more.
				l.release(ctx, l.zombies[0])
				l.zombies = l.zombies[1:]
			}
			continue
		}
		if l.chance(0.1) {
			l.nap(ctx, l.TTL*3/2)
		}
		l.release(ctx, g)
		if l.chance(0.2) {
			l.zombies = append(l.zombies, g)
		}
	}
}

// patience is how long a call may take. A server that is gone, or a link, is not waited for any longer.
const patience = 2 * time.Second

func (l *lane) acquire(ctx context.Context, name string) (grant, bool) {
	o := l.newOp("acquire", name, 0)
	l.rec.call(o)
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	var lease *leasedb.Lease
	var err error
	if l.chance(0.5) {
		lease, err = l.leases.TryAcquire(ctx, name)
	} else {
		waiting, cancel := context.WithTimeout(ctx, l.TTL)
		defer cancel()
		lease, err = l.leases.Acquire(waiting, name)
	}
	var h *leasedb.HeldError
	switch {
	case err == nil:
		o.Outcome, o.Fence = ok, lease.Fence()
	case errors.As(err, &h) && ctx.Err() == nil:
		// Of one that waited, the last look: when that was is not known.
		o.Outcome, o.By, o.Err = held, h.Fence, err.Error()
	default:
		o.Outcome, o.Err = failed, err.Error()
	}
	l.rec.done(o)
	if err != nil {
		return grant{}, false
	}
	return grant{lease, lease.Fence()}, true
}

func (l *lane) renew(ctx context.Context, g grant) {
	o := l.newOp("renew", g.Name(), g.fence)
	l.rec.call(o)
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	o.Outcome = ok
	if err := g.Renew(ctx); err != nil {
		o.Outcome, o.Err = failed, err.Error()
	}
	l.rec.done(o)
}

// linger does as a client of another language would that has not noticed the loss of its lease: it renews, or releases, by
// the token that it has.
func (l *lane) linger(ctx context.Context, g grant) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	o := l.newOp("renew", g.Name(), g.fence)
	sql, good := "SELECT outcome FROM fence.renew(ARRAY[$1::text], ARRAY[$2::text::uuid])", "renewed"
	if l.chance(0.3) {
		o.Kind, sql, good = "release", "SELECT fence.release($1::text, $2::text::uuid)", "released"
	}
	l.rec.call(o)
	o.Outcome = ok
	var answer string
	if err := l.pool.QueryRow(ctx, sql, g.Name(), g.Token()).Scan(&answer); err != nil {
		o.Outcome, o.Err = failed, err.Error()
	} else if answer != good {
		o.Outcome, o.Err = failed, answer
	}
	l.rec.done(o)
}

func (l *lane) release(ctx context.Context, g grant) {
	o := l.newOp("release", g.Name(), g.fence)
	l.rec.call(o)
	o.Outcome = ok
	if err := g.Release(ctx); err != nil {
		o.Outcome, o.Err = failed, err.Error()
	}
	l.rec.done(o)
}

// kinds of writes, and how often each is made.
var kinds = map[string]int{
	"update": 30, "upsert": 12, "insert": 8, "delete": 7, "many": 9, "seal": 9, "exec": 6, "tx": 6, "intx": 8, "enter": 8,
}

// write makes one write of a kind by chance, and goes on until what became of it is known, where that can be.
func (l *lane) write(ctx context.Context, g grant, stubs float64) {
	kind := l.kind()
	o := l.newOp(kind, g.Name(), g.fence)
	o.Rule, o.Strength = string(fencedb.Once), string(fencedb.Fenced)
	table := tables[l.rng.IntN(len(tables))]
	if table == "app.term" {
		o.Rule = string(fencedb.Term)
	}
	if l.chance(0.2) {
		o.Rule = []string{string(fencedb.Once), string(fencedb.Term)}[l.rng.IntN(2)]
	}
	if l.chance(l.Live) {
		o.Strength = string(fencedb.Live)
	}
	n := 1
	switch kind {
	case "many":
		n = 1 + l.rng.IntN(l.Rows)
		o.Request = l.chance(0.2)
	case "tx", "intx":
		n = 1 + l.rng.IntN(3)
		o.Rollback = l.chance(0.2)
	case "enter":
		table = "app.guarded"
	case "update", "upsert", "insert", "delete":
		o.Request = l.chance(0.2)
	case "seal":
		o.Rule = string(fencedb.Once)
	}
	if kind == "intx" || kind == "enter" {
		o.Strength = string(fencedb.InTx)
	}
	if kind == "enter" {
		o.Rule = string(fencedb.Term) // any number of statements is what it is for
	}
	if kind == "enter" && l.chance(0.1) { // one who does not even enter
		o.Kind = "rogue"
	}
	first := l.rng.IntN(l.Rows)
	for i := range n {
		s := step{Kind: kind, Table: table, Row: l.rowOf(g, (first+i)%l.Rows), Value: o.ID + "." + strconv.Itoa(i)}
		if kind == "tx" || kind == "intx" {
			s.Kind = []string{"update", "update", "upsert", "delete", "insert"}[l.rng.IntN(5)]
			if s.Kind == "delete" && l.chance(0.5) {
				s.Kind = "update"
			}
		}
		if s.Table == "app.guarded" && s.Kind == "delete" {
			// The tombstone that a guard leaves shows no key, which the log of this campaign goes by.
			s.Kind = "update"
		}
		o.Steps = append(o.Steps, s)
	}
	var lease fencedb.Lease = g.Lease
	if l.chance(stubs) {
		lease = stubborn{g.Lease}
	}
	l.rec.call(o)
	if l.until(ctx, o, lease, 3*patience); o.Outcome == unknown && o.repeatable() {
		l.unsettled = append(l.unsettled, unsettled{o, lease})
	}
	l.rec.done(o)
}

// until repeats a write for as long as its outcome is unknown, where a repeat is safe, and it is of use.
func (l *lane) until(ctx context.Context, o *op, lease fencedb.Lease, limit time.Duration) {
	for began := time.Now(); ; {
		sending, cancel := context.WithTimeout(ctx, patience)
		l.send(sending, o, lease)
		cancel()
		if o.Doubt && o.Outcome == failed { // which says nothing of the attempt before
			o.Outcome = unknown
		}
		if o.Outcome != unknown || !o.repeatable() || time.Since(began) > limit || ctx.Err() != nil {
			return
		}
		o.Doubt = true
		if own, ok := lease.(*leasedb.Lease); ok { // which would not send a repeat once its lease is over
			lease = stubborn{own}
		}
		time.Sleep(time.Duration(1+l.rng.IntN(50)) * time.Millisecond)
	}
}

// unsettled is a write of which nobody has said yet what became of it.
type unsettled struct {
	o     *op
	lease fencedb.Lease
}

// settle finds that out at the end, when nothing is in the way any more.
func (l *lane) settle() {
	for _, u := range l.unsettled {
		u.o.Doubt = true
		if own, ok := u.lease.(*leasedb.Lease); ok {
			u.lease = stubborn{own}
		}
		l.until(context.Background(), u.o, u.lease, 10*patience)
		l.rec.done(u.o)
	}
}

// repeatable says that a repeat cannot be applied twice.
func (o *op) repeatable() bool {
	switch o.Kind {
	case "tx", "intx", "enter", "rogue":
		return false
	}
	return o.Rule == string(fencedb.Once) || o.Request
}

func (l *lane) kind() string {
	if len(l.Only) > 0 {
		return l.Only[l.rng.IntN(len(l.Only))]
	}
	return pick(l.rng, kinds)
}

// pick returns one by chance, each as often as its weight says.
func pick(rng *rand.Rand, weights map[string]int) string {
	total := 0
	for _, w := range weights {
		total += w
	}
	at := rng.IntN(total)
	for _, name := range slices.Sorted(maps.Keys(weights)) { // in an order that a seed repeats
		if at -= weights[name]; at < 0 {
			return name
		}
	}
	panic("unreachable")
}

func (l *lane) rowOf(g grant, i int) int {
	n, err := strconv.Atoi(strings.TrimPrefix(g.Name(), "name-"))
	if err != nil {
		panic(err)
	}
	return n*l.Rows + i
}

// send makes one attempt.
func (l *lane) send(ctx context.Context, o *op, lease fencedb.Lease) {
	options := []fencedb.WriteOption{fencedb.WithStrength(fencedb.Strength(o.Strength))}
	if o.Kind != "seal" {
		options = append(options, fencedb.WithRule(fencedb.Rule(o.Rule)))
	}
	if o.Request {
		options = append(options, fencedb.WithRequestID(o.ID))
	}
	switch o.Kind {
	case "many":
		l.sendMany(ctx, o, lease, options)
	case "tx":
		l.sendTx(ctx, o, lease, options)
	case "intx":
		l.sendInTx(ctx, o, lease)
	case "enter", "rogue":
		l.sendEntered(ctx, o, lease)
	default:
		s := &o.Steps[0]
		outcome, err := l.one(ctx, l.tables[s.Table], o.Rule, s, lease, options)
		s.note(outcome, err)
		o.Outcome, o.Err = s.Outcome, s.Err
	}
}

// one writes one row.
func (l *lane) one(ctx context.Context, t *fencedb.Table, rule string, s *step, lease fencedb.Lease, options []fencedb.WriteOption) (fencedb.Outcome, error) {
	key, set := fencedb.Key{"id": s.Row}, fencedb.Set{"v": s.Value}
	switch s.Kind {
	case "update":
		return t.Update(ctx, lease, key, set, options...)
	case "upsert":
		return t.Upsert(ctx, lease, key, set, options...)
	case "insert":
		return t.Insert(ctx, lease, fencedb.Set{"id": s.Row, "v": s.Value}, options...)
	case "delete":
		return t.Delete(ctx, lease, key, options...)
	case "seal":
		return t.Seal(ctx, lease, key, append(options, fencedb.Returning(&s.Read, "v"))...)
	case "exec":
		return l.gate.Exec(ctx, lease, "UPDATE "+s.Table+" AS t SET v = @v, last_fence = @fence WHERE t.id = @id AND t.last_fence "+
			map[string]string{"once": "<", "term": "<="}[rule]+" @fence",
			fencedb.Args{"v": s.Value, "id": s.Row}, append(options, fencedb.Target(t, key))...)
	}
	panic("unknown kind of write " + s.Kind)
}

// note keeps what became of a row's write.
func (s *step) note(outcome fencedb.Outcome, err error) {
	s.Outcome, s.Current, s.Reason, s.Lost, s.Err = outcome.String(), 0, "", false, ""
	if err == nil {
		return
	}
	s.Err = err.Error()
	switch {
	case errors.Is(err, fencedb.ErrExists):
		s.Outcome = exists
	case errors.Is(err, fencedb.ErrOnce), errors.Is(err, fencedb.ErrRequest): // an answer, and a clear one
		s.Outcome = another
	}
	var e *fencedb.WriteError
	if errors.As(err, &e) {
		s.Current, s.Reason, s.Lost = e.Current, e.Reason, e.AuditErr != nil
	}
}

func (l *lane) sendMany(ctx context.Context, o *op, lease fencedb.Lease, options []fencedb.WriteOption) {
	rows := make([]fencedb.Row, len(o.Steps))
	for i, s := range o.Steps {
		rows[i] = fencedb.Row{Key: fencedb.Key{"id": s.Row}, Set: fencedb.Set{"v": s.Value}}
	}
	results, err := l.tables[o.Steps[0].Table].UpdateMany(ctx, lease, rows, options...)
	o.Outcome, o.Err = applied, ""
	if err != nil {
		o.Outcome, o.Err = failed, err.Error()
		if errors.Is(err, fencedb.ErrUnknown) {
			o.Outcome = unknown
		}
	}
	for i := range o.Steps {
		if i < len(results) {
			o.Steps[i].note(results[i].Outcome, results[i].Err)
		} else {
			o.Steps[i].note(fencedb.Failed, err)
			o.Steps[i].Outcome, o.Steps[i].Reason = o.Outcome, "" // no row has an answer of its own
		}
	}
	if o.Outcome == failed && !slices.ContainsFunc(o.Steps, func(s step) bool { return s.Outcome == failed || s.Outcome == unknown }) {
		o.Outcome = refused
	}
}

// steps writes all rows of a transaction, as long as they can be.
func (l *lane) steps(ctx context.Context, in func(*fencedb.Table) *fencedb.Table, o *op, lease fencedb.Lease, options []fencedb.WriteOption) error {
	for i := range o.Steps {
		s := &o.Steps[i]
		outcome, err := l.one(ctx, in(l.tables[s.Table]), o.Rule, s, lease, options)
		s.note(outcome, err)
		if err != nil && !errors.Is(err, fencedb.ErrStale) && !errors.Is(err, fencedb.ErrLeaseLost) && !errors.Is(err, fencedb.ErrMissing) &&
			!errors.Is(err, fencedb.ErrExists) {
			return err
		}
	}
	return nil
}

var errRollback = errors.New("rolled back on purpose")

// sendTx writes in a transaction of the caller's own.
func (l *lane) sendTx(ctx context.Context, o *op, lease fencedb.Lease, options []fencedb.WriteOption) {
	o.Outcome, o.Err = failed, ""
	var err, commitErr error
	var rollback bool
	if l.SQL {
		db := stdlib.OpenDBFromPool(l.pool)
		defer func() { _ = db.Close() }()
		tx, beginErr := db.BeginTx(ctx, nil)
		if beginErr != nil {
			o.Err = beginErr.Error()
			return
		}
		err = l.steps(ctx, func(t *fencedb.Table) *fencedb.Table { return t.InSQL(tx) }, o, lease, options)
		if rollback = err != nil || o.Rollback; rollback {
			_ = tx.Rollback()
		} else {
			commitErr = tx.Commit()
		}
	} else {
		tx, beginErr := l.pool.Begin(ctx)
		if beginErr != nil {
			o.Err = beginErr.Error()
			return
		}
		defer func() {
			ending, cancel := context.WithTimeout(context.Background(), patience)
			defer cancel()
			_ = tx.Rollback(ending)
		}()
		err = l.steps(ctx, func(t *fencedb.Table) *fencedb.Table { return t.In(tx) }, o, lease, options)
		if rollback = err != nil || o.Rollback; !rollback {
			commitErr = tx.Commit(ctx)
		}
	}
	o.ended(rollback, err, commitErr)
}

// ended says what became of a transaction.
func (o *op) ended(rollback bool, err, commitErr error) {
	switch {
	case rollback && err != nil:
		o.Outcome, o.Err = failed, err.Error()
	case rollback:
		o.Outcome = rolledBack
	case commitErr == nil:
		o.Outcome = committed
	case errors.Is(commitErr, pgx.ErrTxCommitRollback), errors.Is(commitErr, sql.ErrTxDone), pgerr.Answered(commitErr):
		o.Outcome, o.Err = failed, commitErr.Error()
	default:
		o.Outcome, o.Err = unknown, commitErr.Error()
	}
}

// sendInTx writes in a transaction that is pinned to the lease.
func (l *lane) sendInTx(ctx context.Context, o *op, lease fencedb.Lease) {
	options := []fencedb.WriteOption{fencedb.WithStrength(fencedb.InTx), fencedb.WithRule(fencedb.Rule(o.Rule))}
	var err error
	work := func(ctx context.Context, in func(*fencedb.Table) *fencedb.Table) error {
		if err := l.steps(ctx, in, o, lease, options); err != nil {
			return err
		}
		if o.Rollback {
			return errRollback
		}
		return nil
	}
	if l.SQL {
		err = l.gate.InSQLTx(ctx, lease, func(ctx context.Context, tx *sql.Tx) error {
			return work(ctx, func(t *fencedb.Table) *fencedb.Table { return t.InSQL(tx) })
		})
	} else {
		err = l.gate.InTx(ctx, lease, func(ctx context.Context, tx pgx.Tx) error {
			return work(ctx, func(t *fencedb.Table) *fencedb.Table { return t.In(tx) })
		})
	}
	o.Outcome, o.Err = committed, ""
	var e *fencedb.WriteError
	switch {
	case err == nil:
	case errors.Is(err, errRollback):
		o.Outcome = rolledBack
	case errors.Is(err, fencedb.ErrUnknown):
		o.Outcome, o.Err = unknown, err.Error()
	case errors.As(err, &e) && errors.Is(err, fencedb.ErrLeaseLost):
		o.Outcome, o.Err = leaseLost, err.Error()
		if o.Steps[0].Outcome == "" { // refused before any row was
			o.Steps[0].Reason, o.Steps[0].Lost = e.Reason, e.AuditErr != nil
		}
	default:
		o.Outcome, o.Err = failed, err.Error()
	}
}

// sendEntered writes as psql, an ORM or another language would: fence.enter, and a statement that knows nothing of fences.
func (l *lane) sendEntered(ctx context.Context, o *op, lease fencedb.Lease) {
	o.Outcome, o.Err = failed, ""
	s := &o.Steps[0]
	tx, err := l.pool.Begin(ctx)
	if err != nil {
		o.Err = err.Error()
		return
	}
	defer func() {
		ending, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		_ = tx.Rollback(ending)
	}()
	if o.Kind == "enter" {
		if _, err = tx.Exec(ctx, "SELECT fence.enter($1::text, $2::text::uuid, $3::bigint)", lease.Name(), lease.Token(), lease.Fence()); err != nil {
			o.Err = err.Error()
			return
		}
	}
	tag, err := tx.Exec(ctx, "UPDATE app.guarded SET v = $1 WHERE id = $2", s.Value, s.Row)
	if err != nil {
		o.Err, s.Outcome = err.Error(), failed
		var answer *pgconn.PgError
		if errors.As(err, &answer) && strings.HasPrefix(answer.Code, "WG") {
			s.Outcome = "guarded"
		}
		return
	}
	s.Outcome = applied
	if tag.RowsAffected() == 0 {
		s.Outcome = missing
	}
	o.ended(false, nil, tx.Commit(ctx))
}
