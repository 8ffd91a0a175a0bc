package leasedb

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/writegate/writegate/internal/pgerr"
)

// Config says how a client holds its leases. TTL has to be chosen; all else may be left zero.
type Config struct {
	// Holder is a label for people: it is shown to whoever finds the lease held, and in the audit. It proves nothing,
	// and two clients may share one. Default: host/process id/program.
	Holder string
	// TTL is how long a grant lasts without renewal, by the database's clock; for that long a crashed holder blocks
	// the others. It has no default: 30 s suits many, and a short one is lost to a short outage. From 100 ms to 7 days.
	TTL time.Duration
	// RenewEvery is the time between renewals. Default TTL/3, so that one that is lost leaves room for another.
	// At most TTL/2.
	RenewEvery time.Duration
	// Margin is how much sooner than the database this process considers a lease expired. It pays for the difference in
	// pace of two clocks, and for what takes time between deciding to stop and having stopped. Default TTL/10.
	// RenewEvery and Margin together must leave a quarter of the TTL, the time for a renewal to be answered.
	Margin time.Duration
	// MaxHold ends even a healthy lease after this time: it is then Lost with cause [ErrMaxHold]. Default 0: no limit.
	MaxHold time.Duration
	// PollEvery is the longest time between two looks at a lease that is waited for. A waiter also looks when the
	// present grant expires. Default 1 s; at least 10 ms.
	PollEvery time.Duration
	// LockWait bounds the wait for the lease's row when another session has locked it. Default a third of the TTL, at
	// most 1 s; from 1 ms to 1 h.
	LockWait time.Duration
	// Conns is how many connections acquires and releases may use; renewals have two more to themselves. Default 4.
	Conns int32
	// ManualRenewal leaves renewing to calls of Lease.Renew.
	ManualRenewal bool
	// OnLost, if set, is called once for each lease that is lost, on a goroutine of its own. Close waits for it, so it must
	// not call Close.
	OnLost func(*Lease, error)
	// PollOnly does without the one connection that listens for releases, for a database behind a pooler that pools
	// transactions or statements, where no notification arrives. A waiter then looks every PollEvery.
	PollOnly bool
	// Observe, if set, is told what happens, on the goroutine on which it does: it must be quick, and safe for
	// concurrent use. Package fenceotel makes one that feeds OpenTelemetry metrics.
	Observe func(Event)
	// Logger receives losses and failed renewals as warnings. Default slog.Default().
	Logger *slog.Logger
	// Clock, if set, is read in place of this machine's clocks, for tests.
	Clock func() Reading
}

// withDefaults fills in what was left zero.
func (c Config) withDefaults() Config {
	if c.Holder == "" {
		host, err := os.Hostname()
		if err != nil {
			host = "unknown-host"
		}
		c.Holder = fmt.Sprintf("%s/%d/%s", host, os.Getpid(), filepath.Base(os.Args[0]))
	}
	orDefault(&c.RenewEvery, c.TTL/3)
	orDefault(&c.Margin, c.TTL/10)
	orDefault(&c.PollEvery, time.Second)
	orDefault(&c.LockWait, max(min(c.TTL/3, time.Second), time.Millisecond))
	if c.Conns == 0 {
		c.Conns = 4
	}
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	if c.Clock == nil {
		c.Clock = systemClock
	}
	return c
}

func orDefault(d *time.Duration, value time.Duration) {
	if *d == 0 {
		*d = value
	}
}

// Bounds of Config.
const (
	minTTL       = 100 * time.Millisecond
	maxTTL       = 7 * 24 * time.Hour
	maxNameBytes = 255
)

// validate says all that is wrong with it.
func (c Config) validate() error {
	var errs []error
	wrong := func(bad bool, format string, args ...any) {
		if bad {
			errs = append(errs, fmt.Errorf(format, args...))
		}
	}
	wrong(c.TTL < minTTL || c.TTL > maxTTL, "TTL %v: want %v to %v", c.TTL, minTTL, maxTTL)
	wrong(c.RenewEvery < 0, "RenewEvery %v: want more than 0", c.RenewEvery)
	wrong(c.Margin < 0, "Margin %v: want more than 0", c.Margin)
	if len(errs) == 0 { // else these would only repeat it
		wrong(c.RenewEvery > c.TTL/2, "RenewEvery %v: want at most half the TTL of %v, or one lost renewal loses the lease",
			c.RenewEvery, c.TTL)
		wrong(c.RenewEvery+c.Margin > c.TTL*3/4, "RenewEvery %v and Margin %v: together they must leave a quarter of the TTL of %v "+
			"for a renewal to be answered", c.RenewEvery, c.Margin, c.TTL)
	}
	wrong(c.MaxHold < 0, "MaxHold %v: want 0 (no limit) or more", c.MaxHold)
	wrong(c.PollEvery < 10*time.Millisecond, "PollEvery %v: want at least 10ms", c.PollEvery)
	wrong(c.LockWait < time.Millisecond || c.LockWait > time.Hour, "LockWait %v: want 1ms to 1h", c.LockWait)
	wrong(c.Conns < 1, "Conns %d: want at least 1", c.Conns)
	wrong(!utf8.ValidString(c.Holder) || len(c.Holder) > 1024, "Holder: want valid UTF-8 of at most 1024 bytes, got %d bytes", len(c.Holder))
	for _, r := range c.Holder {
		if r == 0 {
			errs = append(errs, errors.New("Holder: contains a NUL, which PostgreSQL cannot store"))
			break
		}
	}
	if len(errs) > 0 {
		return fmt.Errorf("leasedb: invalid Config: %w", errors.Join(errs...))
	}
	return nil
}

// budget is how long after its sending a confirmed request may be relied on.
func (c Config) budget() time.Duration { return c.TTL - c.Margin }

// tryFor is how long one renewal may take where so much time is left: an interval, so that one that hangs leaves room for
// another; where intervals are short, longer, so that a slow database can answer at all.
func (c Config) tryFor(left time.Duration) time.Duration {
	return min(left, max(c.RenewEvery, min(left/3, 10*time.Second)))
}

// retryPause is the time between a renewal that failed and the next try.
func (c Config) retryPause() time.Duration {
	return max(c.RenewEvery/8, 5*time.Millisecond)
}

func validateName(name string) error {
	if len(name) == 0 || len(name) > maxNameBytes {
		return fmt.Errorf("leasedb: lease name of %d bytes: want 1 to %d", len(name), maxNameBytes)
	}
	if !utf8.ValidString(name) {
		return fmt.Errorf("leasedb: lease name %q: want valid UTF-8", name)
	}
	for _, r := range name {
		if unicode.IsControl(r) {
			return fmt.Errorf("leasedb: lease name %q: want no control characters", name)
		}
	}
	return nil
}

// Client acquires leases and keeps them alive. Make one for each database and share it: it renews all its leases in one
// statement, on connections of its own. All methods are safe for concurrent use.
type Client struct {
	cfg   Config
	store store
	clock func() Reading
	id    string // tells this client from others that wait for the same name

	stopping context.Context // ends when the client is being closed
	stop     context.CancelFunc
	highest  *atomic.Int64   // the newest fence that this process was granted by this database
	hurrying context.Context // ends when whoever closes the client has no more time for what is being given back
	hurry    context.CancelFunc
	work     sync.WaitGroup // everything that runs on in the background

	mu     sync.Mutex
	closed bool
	leases map[string]*Lease // Active, by name: the database grants a name to one at a time
	lines  map[string]*line  // who waits in this process, by name
	keeper *keeper
	// listening is set once the listener has been started.
	listening bool
}

// New returns a client that uses the same database as pool, on a few connections of its own made from pool's
// configuration; pool itself is not used, and may be closed before or after. It asks the database once whether schema
// fence is there and fits: the error is an [ErrSchema] if not.
func New(ctx context.Context, pool *pgxpool.Pool, cfg Config) (*Client, error) {
	cfg = cfg.withDefaults()
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	// The pools outlive ctx, which bounds the question below alone.
	s, err := openStore(context.WithoutCancel(ctx), pool.Config(), cfg.Conns, cfg.Logger)
	if err != nil {
		return nil, err
	}
	if err := s.checkSchema(ctx); err != nil {
		s.close()
		return nil, fmt.Errorf("leasedb: %w", err)
	}
	return newClient(s, cfg), nil
}

func newClient(s store, cfg Config) *Client {
	stopping, stop := context.WithCancel(context.Background())
	hurrying, hurry := context.WithCancel(context.Background())
	return &Client{
		hurrying: hurrying,
		highest:  s.highest(),
		hurry:    hurry,
		cfg:      cfg,
		store:    s,
		clock:    cfg.Clock,
		id:       rand.Text(),
		stopping: stopping,
		stop:     stop,
		leases:   make(map[string]*Lease),
		lines:    make(map[string]*line),
	}
}

// TryAcquire takes the lease if it is free, and never waits for its holder: that is a [HeldError], also when the holder
// is this very client, for leases are not re-entrant. ctx bounds the attempt, not the lease.
//
// Other errors: [ErrBusy], [ErrTooLate], [ErrUnknown], [ErrFence], [ErrReadOnly], [ErrSchema], [ErrClosed]. After each
// of them nothing is held, or it is being given back.
func (c *Client) TryAcquire(ctx context.Context, name string) (*Lease, error) {
	if err := validateName(name); err != nil {
		return nil, err
	}
	began := c.clock()
	lease, _, err := c.attempt(ctx, name, "")
	c.observe(AcquireEvent{Name: name, Waited: c.clock().since(began), Attempts: 1, Fence: lease.Fence(), Err: err})
	return lease, err
}

// attempt makes one try for a lease: one request, repeated under the same token only to learn what became of it.
func (c *Client) attempt(ctx context.Context, name, waiter string) (*Lease, acquireAnswer, error) {
	if !c.begin() {
		return nil, acquireAnswer{}, ErrClosed
	}
	defer c.work.Done()

	highest := c.highest.Load()
	req := acquireRequest{
		name: name, holder: c.cfg.Holder, token: newToken(), ttl: c.cfg.TTL, lockWait: c.cfg.LockWait, waiter: waiter,
	}
	// The lease can be granted no sooner than this, so it expires no sooner than TTL from here.
	sent := c.clock()
	answer, unanswered, err := c.ask(ctx, req, sent)
	if err != nil && c.stopping.Err() != nil {
		err = fmt.Errorf("%w: %w", ErrClosed, err)
	}
	switch {
	case errors.Is(err, errNotReplicated):
		c.giveBack(ctx, req)
		return nil, answer, fmt.Errorf("lease %q: %w: %w", name, ErrFence, err)
	case err != nil && unanswered:
		c.giveBack(ctx, req)
		return nil, answer, fmt.Errorf("lease %q: %w; it is being given back: %w", name, ErrUnknown, err)
	case err != nil:
		return nil, answer, explain(err, name, c.store.database())
	case !answer.granted:
		return nil, answer, &HeldError{Name: name, Holder: answer.heldBy, Fence: answer.fence, Remaining: answer.remaining}
	case answer.fence <= highest || answer.fence%2 != 0:
		// Seen by this process before the request was sent: the database has gone back in time.
		c.giveBack(ctx, req)
		return nil, answer, fmt.Errorf("lease %q: %w: fence %d was granted, but this process has seen %d", name, ErrFence, answer.fence, highest)
	case c.clock().since(sent) >= c.cfg.budget():
		c.giveBack(ctx, req)
		return nil, answer, fmt.Errorf("lease %q (fence %d): %w: the answer took %v of a TTL of %v",
			name, answer.fence, ErrTooLate, c.clock().since(sent).Round(time.Millisecond), c.cfg.TTL)
	}
	lease, err := c.adopt(ctx, req, answer.fence, sent)
	return lease, answer, err
}

// ask sends the request, and again after a lost reply (the same token gets the same grant), or when the connection turns
// out to have been dead before. With an error, unanswered says that one of the requests may have been granted all the same,
// whatever became of the last.
func (c *Client) ask(ctx context.Context, req acquireRequest, sent Reading) (_ acquireAnswer, unanswered bool, _ error) {
	ctx, cancel := c.untilClosed(ctx)
	defer cancel()
	for pause := 10 * time.Millisecond; ; pause *= 2 {
		left := c.cfg.budget() - c.clock().since(sent)
		tryCtx, cancel := context.WithTimeout(ctx, left)
		answer, err := c.store.acquire(tryCtx, req)
		cancel()
		if err == nil || pgerr.Answered(err) || errors.Is(err, errNotReplicated) {
			return answer, unanswered, err
		}
		if !pgerr.NotSent(err) {
			unanswered = true
		}
		if pgerr.NotSent(err) && !pgerr.Stale(err) && !unanswered {
			return answer, false, err
		}
		if ctx.Err() != nil || c.clock().since(sent)+pause >= c.cfg.budget() || sleep(ctx, pause) != nil {
			return answer, unanswered, err
		}
	}
}

// untilClosed returns a context that also ends when the client is being closed.
func (c *Client) untilClosed(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancel(ctx)
	unhook := context.AfterFunc(c.stopping, cancel)
	return ctx, func() { unhook(); cancel() }
}

// adopt makes a handle of a grant.
func (c *Client) adopt(ctx context.Context, req acquireRequest, fence int64, sent Reading) (*Lease, error) {
	l := &Lease{
		client: c, name: req.name, token: req.token, fence: fence,
		granted: sent, sent: sent, state: Active, gone: make(chan struct{}),
		renewDue: sent.Time.Add(c.cfg.RenewEvery),
	}
	l.ctx, l.cancel = context.WithCancelCause(context.WithoutCancel(ctx))

	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		l.cancel(ErrClosed)
		c.giveBack(ctx, req)
		return nil, ErrClosed
	}
	c.work.Add(1) // until the lease has left Active and that has been dealt with
	for seen := c.highest.Load(); fence > seen && !c.highest.CompareAndSwap(seen, fence); seen = c.highest.Load() {
	}
	old := c.leases[req.name]
	c.leases[req.name] = l
	l.mu.Lock()
	l.timer = time.AfterFunc(l.nextLookLocked(c.clock()), l.onTimer)
	l.mu.Unlock()
	if !c.cfg.ManualRenewal {
		c.keepLocked(l)
	}
	c.mu.Unlock()
	if old != nil {
		// The database would not have granted the name again had it still been the old handle's.
		old.Lose(fmt.Errorf("%w: this client was granted the lease again under fence %d", ErrSuperseded, fence))
	}
	return l, nil
}

// Do acquires the lease, waiting for it if need be, runs work, and releases the lease when work has returned. The
// context that work gets ends when ctx does, and when the lease is lost: then work must stop, and Do's error is a
// [LostError] even if work returned nil, joined with what work returned. A panic in work releases the lease too.
func (c *Client) Do(ctx context.Context, name string, work func(context.Context, *Lease) error) (err error) {
	lease, err := c.Acquire(ctx, name)
	if err != nil {
		return err
	}
	workCtx, cancel := context.WithCancelCause(ctx)
	unhook := context.AfterFunc(lease.Context(), func() { cancel(context.Cause(lease.Context())) })
	defer func() {
		lease.workReturned()
		unhook()
		cancel(nil)
		err = errors.Join(err, lease.Release(ctx)) // which says so if it was lost
	}()
	return work(workCtx, lease)
}

// Close releases all leases and waits for everything the client runs. Stop the guarded work before: the leases' contexts
// are cancelled, but Close cannot wait for code that it does not know. Acquires under way end with [ErrClosed]. ctx bounds
// what is still sent; leases whose release it cuts short expire by themselves, and are in the error. Later calls of any
// method return [ErrClosed]; a second Close does nothing. Not to be called by OnLost, for which it waits.
func (c *Client) Close(ctx context.Context) error { return c.close(ctx, true) }

// Abandon is Close without releasing: each lease blocks its name until its TTL has passed. For a program that cannot be
// sure that its guarded work has stopped.
func (c *Client) Abandon() error {
	ctx, cancel := context.WithCancel(context.Background())
	cancel() // nothing is sent
	return c.close(ctx, false)
}

func (c *Client) close(ctx context.Context, release bool) error {
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return nil
	}
	c.closed = true
	leases := make([]*Lease, 0, len(c.leases))
	for _, l := range c.leases {
		leases = append(leases, l)
	}
	c.mu.Unlock()
	c.stop()
	defer context.AfterFunc(ctx, c.hurry)()

	errs := make([]error, len(leases))
	if release {
		var releases sync.WaitGroup
		room := make(chan struct{}, c.cfg.Conns)
		for i, l := range leases {
			room <- struct{}{}
			releases.Go(func() {
				defer func() { <-room }()
				if err := l.Release(ctx); !errors.Is(err, ErrLost) { // which was reported when it happened
					errs[i] = err
				}
			})
		}
		releases.Wait()
	} else {
		for _, l := range leases {
			l.Lose(ErrClosed)
		}
	}
	c.work.Wait()
	c.store.close()
	c.hurry()
	return errors.Join(errs...)
}

// begin counts one more piece of work that Close has to wait for; false when there must be none any more.
func (c *Client) begin() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return false
	}
	c.work.Add(1)
	return true
}

// giveBack releases, in the background, a grant that may exist and that nobody will use.
func (c *Client) giveBack(ctx context.Context, req acquireRequest) {
	c.work.Go(func() { // the caller is counted itself, so the count is above zero
		if _, err := c.sendRelease(context.WithoutCancel(ctx), releaseRequest{name: req.name, token: req.token, revoke: true}); err != nil {
			c.cfg.Logger.WarnContext(ctx, "writegate: a grant that nobody uses could not be given back; it expires by itself",
				"lease", req.name, "within", c.cfg.TTL, "error", err)
		}
	})
}

// sendRelease tells the database that a grant is over, and asks again while the answer is lost. After a TTL there is
// nothing left to give back.
func (c *Client) sendRelease(ctx context.Context, req releaseRequest) (string, error) {
	req.lockWait = c.cfg.LockWait
	ctx, cancel := context.WithTimeout(ctx, min(c.cfg.TTL, 10*time.Second))
	defer cancel()
	defer context.AfterFunc(c.hurrying, cancel)()
	for pause := 10 * time.Millisecond; ; pause = min(pause*2, time.Second) {
		outcome, err := c.store.release(ctx, req)
		if err == nil || pgerr.Refused(err) || ctx.Err() != nil || sleep(ctx, pause) != nil {
			return outcome, err
		}
	}
}

// lost is called once for each lease that becomes Lost.
func (c *Client) lost(l *Lease, err error) {
	c.cfg.Logger.Warn("writegate: lease lost", "lease", l.name, "fence", l.fence, "holder", c.cfg.Holder, "error", err)
	c.observe(LossEvent{Name: l.name, Fence: l.fence, Held: c.clock().since(l.granted), Cause: l.cause})
	if c.cfg.OnLost == nil {
		return
	}
	c.work.Go(func() { c.cfg.OnLost(l, err) }) // the lease itself is still counted, so the count is above zero
}

// forget ends a lease's time as one of the client's, once.
func (c *Client) forget(l *Lease) {
	l.forgotten.Do(func() {
		c.mu.Lock()
		if c.leases[l.name] == l {
			delete(c.leases, l.name)
		}
		c.mu.Unlock()
		close(l.gone)
	})
}

// newToken returns a random uuid, version 4.
func newToken() string {
	var b [16]byte
	_, _ = rand.Read(b[:]) // never fails: crypto/rand
	b[6] = b[6]&0x0f | 0x40
	b[8] = b[8]&0x3f | 0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", b[:4], b[4:6], b[6:8], b[8:10], b[10:])
}
