package leasedb

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/writegate/writegate/internal/pgerr"
)

// line is where the goroutines of this process queue for one name: the one whose turn it is asks the database, so a
// name costs one attempt at a time however many wait here.
type line struct {
	turn   chan struct{} // holds one; Go hands it to those who wait in the order in which they came
	wake   chan struct{} // a hint that the lease may be free
	queued int           // guarded by the client's mu; the line is forgotten at 0
}

// Acquire takes the lease, waiting for as long as ctx allows while somebody else holds it. ctx bounds the waiting alone:
// its end does not end a lease that has been granted.
//
// It looks again when the present grant expires, at most Config.PollEvery later, each time a little at random. A server
// that does not answer is waited for like a holder, but for no longer than a TTL at a time; what cannot be helped by
// waiting (a name that is not allowed, no schema, no permission, a read-only server) is returned at once. The error of
// an Acquire that ran out of time is ctx's, joined with that of the last attempt: a [HeldError] says who was in the way.
func (c *Client) Acquire(ctx context.Context, name string) (*Lease, error) {
	if err := validateName(name); err != nil {
		return nil, err
	}
	began := c.clock()
	lease, attempts, err := c.wait(ctx, name)
	c.observe(AcquireEvent{Name: name, Waited: c.clock().since(began), Attempts: attempts, Fence: lease.Fence(), Err: err})
	return lease, err
}

func (c *Client) wait(ctx context.Context, name string) (_ *Lease, attempts int, _ error) {
	line, leave, err := c.enter(ctx, name)
	if err != nil {
		return nil, 0, err
	}
	defer leave()

	waiter := c.id
	if c.cfg.PollOnly {
		waiter = "" // then nobody need notify
	}
	var failingSince Reading
	var inTheWay error
	for failures := 0; ; {
		if err := c.waitForOwn(ctx, name); err != nil {
			return nil, attempts, err
		}
		attempts++
		lease, answer, err := c.attempt(ctx, name, waiter)
		if err == nil {
			return lease, attempts, nil
		}
		var pause time.Duration
		switch {
		case errors.Is(err, ErrHeld):
			failures = 0
			pause = c.pollPause(answer)
		case errors.Is(err, ErrBusy):
			failures = 0 // the wait for the lock was a pause already
		case !worthRetrying(err):
			return nil, attempts, err
		default:
			if failures++; failures == 1 {
				failingSince = c.clock()
			} else if c.clock().since(failingSince) > c.cfg.TTL {
				return nil, attempts, fmt.Errorf("gave up after a TTL of %v without an answer: %w", c.cfg.TTL, err)
			}
			pause = jitter(min(50*time.Millisecond<<min(failures, 6), c.cfg.PollEvery))
		}
		c.listenOnce()
		if ctx.Err() == nil || inTheWay == nil {
			inTheWay = err // the last that says more than that time is up
		}
		if waitErr := c.pause(ctx, pause, line.wake); waitErr != nil {
			return nil, attempts, fmt.Errorf("%w; last: %w", waitErr, inTheWay)
		}
	}
}

func worthRetrying(err error) bool {
	return !errors.Is(err, ErrClosed) && !errors.Is(err, ErrSchema) && !errors.Is(err, ErrReadOnly) &&
		!errors.Is(err, ErrFence) && !pgerr.Refused(err)
}

// enter waits for this goroutine's turn to ask for the name.
func (c *Client) enter(ctx context.Context, name string) (l *line, leave func(), err error) {
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return nil, nil, ErrClosed
	}
	l = c.lines[name]
	if l == nil {
		l = &line{turn: make(chan struct{}, 1), wake: make(chan struct{}, 1)}
		c.lines[name] = l
	}
	l.queued++
	c.mu.Unlock()
	unqueue := func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		if l.queued--; l.queued == 0 {
			delete(c.lines, name)
		}
	}

	select {
	case l.turn <- struct{}{}:
		return l, func() { <-l.turn; unqueue() }, nil
	case <-ctx.Done():
		err = fmt.Errorf("waiting for lease %q behind others of this process: %w", name, ctx.Err())
	case <-c.stopping.Done():
		err = ErrClosed
	}
	unqueue()
	return nil, nil, err
}

// waitForOwn waits while this client itself holds the name: nobody needs to be asked.
func (c *Client) waitForOwn(ctx context.Context, name string) error {
	for {
		c.mu.Lock()
		own := c.leases[name]
		c.mu.Unlock()
		if own == nil {
			return nil
		}
		select {
		case <-own.gone:
		case <-ctx.Done():
			return fmt.Errorf("waiting for lease %q: %w; last: %w", name, ctx.Err(),
				&HeldError{Name: name, Holder: own.Holder(), Fence: own.Fence(), Remaining: own.Remaining()})
		case <-c.stopping.Done():
			return ErrClosed
		}
	}
}

// pollPause is how long to leave a holder alone: until its grant expires, but no longer than PollEvery. The one that is
// next in line comes at that very moment; the others come a little after, spread, and find its grant.
func (c *Client) pollPause(a acquireAnswer) time.Duration {
	poll := jitter(c.cfg.PollEvery)
	expiry := max(a.remaining, 0) + time.Millisecond
	if !a.nextInLine {
		expiry += rand.N(max(c.cfg.PollEvery/10, time.Millisecond))
	}
	return min(poll, expiry)
}

// pause returns after d, or sooner when woken; with an error when ctx ends or the client is closed.
func (c *Client) pause(ctx context.Context, d time.Duration, wake <-chan struct{}) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-c.stopping.Done():
		return ErrClosed
	case <-wake:
		return nil
	case <-timer.C:
		return nil
	}
}

// jitter returns between three quarters and all of d, at random.
func jitter(d time.Duration) time.Duration {
	if d < 4 {
		return d
	}
	return d - rand.N(d/4)
}
