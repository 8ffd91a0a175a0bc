package leasedb

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"
)

// State is where a lease stands, as far as this process can know. It only ever leaves Active, once.
type State int

// The states of a lease. A zero Lease is Released: it was never granted.
const (
	Released State = iota // given back, or never granted
	Active                // granted, and not past the deadline that this process allows itself
	Lost                  // not ours any more, or not to be relied on; acquire again
)

func (s State) String() string {
	switch s {
	case Active:
		return "ACTIVE"
	case Lost:
		return "LOST"
	}
	return "RELEASED"
}

// Lease is one grant: the right to write under its fence for as long as the lease is Active. It is kept alive in the
// background unless Config.ManualRenewal is set.
//
// Active is this process's belief, never a proof: the process may be stopped between looking and writing. What refuses
// a late write is the fence, at the row, through a gate of package fencedb, which a *Lease is handed to as it is.
//
// All methods are safe for concurrent use.
type Lease struct {
	client  *Client
	name    string
	token   string
	fence   int64
	granted Reading
	ctx     context.Context
	cancel  context.CancelCauseFunc
	gone    chan struct{} // closed when the lease has left Active and its release, if any, has been answered

	mu       sync.Mutex
	state    State
	cause    error     // of the loss
	sent     Reading   // when the newest confirmed request was sent: the lease cannot expire before sent + TTL
	renewDue time.Time // when to ask again
	ended    Reading   // when it left Active
	ranOn    time.Duration
	timer    *time.Timer // looks at the deadline, whatever the renewals are doing

	forgotten sync.Once
	release   releaseOnce
}

// Name returns the lease's name.
func (l *Lease) Name() string {
	if l.zero() {
		return ""
	}
	return l.name
}

// zero reports whether the lease was never granted: a zero Lease, or a nil one.
func (l *Lease) zero() bool { return l == nil || l.client == nil }

// Fence returns the grant's fence: above 0, even, and above that of every earlier grant. It is 0 for a zero Lease.
func (l *Lease) Fence() int64 {
	if l.zero() {
		return 0
	}
	return l.fence
}

// Token returns the uuid that proves to the database that this grant is ours. It is a secret of sorts: who has it can
// renew and release. It orders nothing; that is what the fence is for.
func (l *Lease) Token() string {
	if l.zero() {
		return ""
	}
	return l.token
}

// Holder returns the label under which the lease is held, from Config.Holder.
func (l *Lease) Holder() string {
	if l.zero() {
		return ""
	}
	return l.client.cfg.Holder
}

// Context is cancelled once the lease leaves Active, with the [LostError] or [ErrReleased] as its cause. It carries the
// values of the context that was given to Acquire, and none of its deadlines.
func (l *Lease) Context() context.Context {
	if l.zero() {
		ctx, cancel := context.WithCancelCause(context.Background())
		cancel(ErrReleased)
		return ctx
	}
	return l.ctx
}

// State returns where the lease stands now. It looks at the clocks, so a lease past its deadline is Lost even if
// nothing else in the process has noticed yet.
func (l *Lease) State() State {
	if l.zero() {
		return Released
	}
	l.expireIfDue()
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.state
}

// Err returns nil while the lease is Active, [ErrReleased] after its release, and the [LostError] after its loss.
func (l *Lease) Err() error {
	if l.zero() {
		return ErrReleased
	}
	l.expireIfDue()
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.errLocked()
}

func (l *Lease) errLocked() error {
	switch l.state {
	case Active:
		return nil
	case Lost:
		return &LostError{Name: l.name, Fence: l.fence, Cause: l.cause}
	}
	return ErrReleased
}

// Check returns nil if the lease is Active and has at least need left by this process's careful reckoning. Ask it before
// the last step that cannot be cancelled; need is how long that step takes at worst. Otherwise the error is an
// [ErrLittleTime], a [LostError] or [ErrReleased].
func (l *Lease) Check(need time.Duration) error {
	if l.zero() {
		return ErrReleased
	}
	now := l.client.clock() // once: every protected write asks
	l.mu.Lock()
	left := time.Duration(0)
	if l.state == Active {
		left = l.remainingLocked(now)
	}
	l.mu.Unlock()
	if left <= 0 {
		if err := l.Err(); err != nil {
			return err
		}
	}
	if left < need {
		return fmt.Errorf("lease %q (fence %d): %w: %v of the %v asked for", l.name, l.fence, ErrLittleTime, left.Round(time.Millisecond), need)
	}
	return nil
}

// Remaining returns for how much longer the lease may be relied on without another renewal: from the moment before the
// newest confirmed request was sent, TTL less margin. Never negative; 0 when not Active.
func (l *Lease) Remaining() time.Duration {
	if l.zero() {
		return 0
	}
	now := l.client.clock()
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.state != Active {
		return 0
	}
	return l.remainingLocked(now)
}

func (l *Lease) remainingLocked(now Reading) time.Duration {
	left := l.client.cfg.budget() - now.since(l.sent)
	if hold := l.client.cfg.MaxHold; hold > 0 {
		left = min(left, hold-now.since(l.granted))
	}
	return max(left, 0)
}

// Renew asks the database to extend the lease now, and returns nil only once it has confirmed. "Not yours any more" is
// a [LostError] at once. Any other error leaves the lease as it was: Active until its deadline, during which another
// try may succeed. A program needs this only with Config.ManualRenewal.
func (l *Lease) Renew(ctx context.Context) error {
	if err := l.Err(); err != nil {
		return err
	}
	// An answer that comes after the deadline is of no use to anybody.
	ctx, cancel := context.WithTimeout(ctx, l.Remaining())
	defer cancel()
	ctx, cancel = l.client.untilClosed(ctx)
	defer cancel()
	for pause := lockedRetry; ; pause *= 2 {
		outcomes, err := l.client.renew(ctx, []*Lease{l})
		if lost := l.Err(); lost != nil {
			return lost
		}
		if err != nil {
			return explain(err, l.name, l.client.store.database())
		}
		if outcomes[l.name] != outcomeLocked {
			return nil
		}
		if sleep(ctx, pause) != nil {
			if lost := l.Err(); lost != nil {
				return lost
			}
			return fmt.Errorf("lease %q: %w: no renewal within its time: %w", l.name, ErrBusy, ctx.Err())
		}
	}
}

// Outcomes of fence.renew and fence.release.
const (
	outcomeRenewed  = "renewed"
	outcomeLocked   = "locked"
	outcomeLost     = "lost"
	outcomeReleased = "released"
	outcomeExpired  = "expired"
)

// lockedRetry is the first pause after a renewal that skipped a locked row.
const lockedRetry = 10 * time.Millisecond

// settle takes in the database's answer to a renewal that was sent at the given time.
func (l *Lease) settle(sent Reading, outcome string) {
	switch outcome {
	case outcomeRenewed:
		l.mu.Lock()
		// Lost stays lost: an answer that arrives after the deadline comes too late even if it is good news.
		if l.state == Active && l.remainingLocked(l.client.clock()) > 0 {
			l.sent = sent
			l.renewDue = sent.Time.Add(l.client.cfg.RenewEvery)
			l.timer.Reset(l.nextLookLocked(l.client.clock()))
		}
		l.mu.Unlock()
	case outcomeLocked:
		l.mu.Lock()
		l.renewDue = l.client.clock().Time.Add(l.client.cfg.retryPause())
		l.mu.Unlock()
	case outcomeLost:
		l.Lose(ErrSuperseded)
	}
}

// Lose makes an Active lease Lost, for the given reason: the context is cancelled, nothing is renewed any more, and
// Config.OnLost runs. Gates call it when the database refuses a write because the lease is over. It sends nothing.
// On a lease that is not Active it does nothing.
func (l *Lease) Lose(cause error) {
	if l.zero() {
		return
	}
	l.mu.Lock()
	if l.state != Active {
		l.mu.Unlock()
		return
	}
	l.state, l.cause = Lost, cause
	err := l.errLocked()
	l.endLocked(err)
	l.mu.Unlock()
	// Also if an observer panics: Close must not wait for ever.
	defer l.client.work.Done()
	defer l.client.forget(l)
	l.client.lost(l, err)
}

// endLocked does what every way out of Active has in common. The caller has set the state.
func (l *Lease) endLocked(cause error) {
	l.timer.Stop()
	l.ended = l.client.clock()
	l.cancel(cause)
}

// workReturned notes how long the work of Do ran on after a loss.
func (l *Lease) workReturned() {
	now := l.client.clock()
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.state == Lost {
		l.ranOn = now.since(l.ended)
	}
}

// expireIfDue makes the lease Lost if its deadline has passed.
func (l *Lease) expireIfDue() {
	now := l.client.clock()
	l.mu.Lock()
	due := l.state == Active && l.remainingLocked(now) <= 0
	l.mu.Unlock()
	if !due {
		return
	}
	if hold := l.client.cfg.MaxHold; hold > 0 && now.since(l.granted) >= hold {
		l.Lose(ErrMaxHold)
		return
	}
	l.Lose(ErrNotRenewed)
}

// nextLookLocked is when to look at the clocks again: at the deadline, but at least once an interval, because a timer stands
// still with the machine while the deadline does not.
func (l *Lease) nextLookLocked(now Reading) time.Duration {
	return min(l.remainingLocked(now), l.client.cfg.RenewEvery)
}

// onTimer is what makes a loss happen at the deadline even if the database never answers and nobody asks.
func (l *Lease) onTimer() {
	l.expireIfDue()
	now := l.client.clock()
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.state == Active { // the deadline has moved, or the timer's clock runs ahead of ours
		l.timer.Reset(max(l.nextLookLocked(now), time.Millisecond))
	}
}

// releaseOnce lets every caller of Release have the one answer.
type releaseOnce struct {
	once sync.Once
	err  error
}

// Release gives the lease back, so that the next holder need not wait for it to expire. Call it once the guarded work
// has stopped. The lease leaves Active at once, whatever the database says to it; ctx lends its values, and its end does
// not keep the release from being sent: it is tried for up to the TTL (at most 10 seconds), after which waiting for
// the expiry is no slower.
//
// nil: the grant was ours until now, and is over. [ErrNotHeld]: it had ended before, by expiry or by a newer grant,
// whose lease is untouched. A [LostError]: it was Lost; what may still stand of it in the database has been given back
// as well, if that could be reached. Other errors: not confirmed; the lease expires by itself.
// Every further call returns what the first returned.
func (l *Lease) Release(ctx context.Context) error {
	if l.zero() {
		return ErrReleased
	}
	l.release.once.Do(func() {
		l.release.err = l.doRelease(ctx)
		l.mu.Lock()
		e := EndEvent{Name: l.name, Fence: l.fence, Held: l.ended.since(l.granted), Lost: l.state == Lost, RanOn: l.ranOn, Err: l.release.err}
		l.mu.Unlock()
		l.client.observe(e)
	})
	return l.release.err
}

func (l *Lease) doRelease(ctx context.Context) error {
	l.expireIfDue()
	l.mu.Lock()
	lost := error(nil)
	if l.state == Active {
		l.state = Released
		l.endLocked(ErrReleased)
		defer l.client.work.Done()
	} else {
		lost = l.errLocked()
		if errors.Is(l.cause, ErrSuperseded) || !l.client.begin() {
			l.mu.Unlock()
			return lost // nothing of it stands in the database, or there is no connection left to say so on
		}
		defer l.client.work.Done()
	}
	l.mu.Unlock()

	// Until this is answered the name stays ours, and others of this process wait for that.
	defer l.client.forget(l)
	outcome, err := l.client.sendRelease(context.WithoutCancel(ctx), releaseRequest{name: l.name, token: l.token, fence: l.fence})
	if lost != nil {
		return lost
	}
	switch {
	case err != nil:
		return fmt.Errorf("release not confirmed, the lease expires by itself within %v: %w",
			l.client.cfg.TTL, explain(err, l.name, l.client.store.database()))
	case outcome == outcomeReleased:
		return nil
	case outcome == outcomeExpired:
		return fmt.Errorf("lease %q (fence %d): %w: it had expired; nobody had taken it", l.name, l.fence, ErrNotHeld)
	}
	return fmt.Errorf("lease %q (fence %d): %w: it belongs to a newer grant", l.name, l.fence, ErrNotHeld)
}

// sleep waits for d, or returns ctx's error if that ends first.
func sleep(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-timer.C:
		return nil
	}
}
