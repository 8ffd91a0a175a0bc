package leasedb

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"
)

// keeper renews all of a client's leases, in one statement a beat, from one goroutine. It decides no loss by itself but
// the one that the database states: deadlines are watched by each lease's own timer, so that a keeper that hangs, or
// dies, is a loss like any other.
type keeper struct {
	wake chan struct{} // there is a lease that is due sooner than planned
	next time.Time     // when the next beat is planned, guarded by the client's mu
}

// never is later than any renewal can be due.
var never = time.Unix(1<<40, 0)

// keepLocked has the lease renewed from now on. The caller holds c.mu.
func (c *Client) keepLocked(l *Lease) {
	if c.keeper == nil {
		k := &keeper{wake: make(chan struct{}, 1), next: never}
		c.keeper = k
		c.work.Go(func() { k.run(c) })
	}
	if l.renewDue.Before(c.keeper.next) {
		select {
		case c.keeper.wake <- struct{}{}:
		default: // it is about to look anyway
		}
	}
}

func (k *keeper) run(c *Client) {
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		timer.Reset(k.plan(c))
		select {
		case <-c.stopping.Done():
			return
		case <-k.wake:
			continue
		case <-timer.C:
		}
		k.beat(c)
	}
}

// plan returns how long there is nothing to renew.
func (k *keeper) plan(c *Client) time.Duration {
	now := c.clock().Time
	c.mu.Lock()
	defer c.mu.Unlock()
	k.next = never
	for _, l := range c.leases {
		l.mu.Lock()
		if l.state == Active && l.renewDue.Before(k.next) {
			k.next = l.renewDue
		}
		l.mu.Unlock()
	}
	return k.next.Sub(now)
}

// beat renews what is due, and what will be within half an interval: so leases acquired at different times soon share
// one beat.
func (k *keeper) beat(c *Client) {
	sent := c.clock()
	soon := sent.Time.Add(c.cfg.RenewEvery / 2)
	// What the lease with the most time has left bounds the try: one that is about to end must not cost the others their
	// renewal, and does not believe an answer that comes too late for it.
	var left time.Duration
	var leases, over []*Lease

	c.mu.Lock()
	for _, l := range c.leases {
		l.mu.Lock()
		remaining := l.remainingLocked(sent)
		switch {
		case l.state != Active:
		case remaining <= 0:
			over = append(over, l)
		case !l.renewDue.After(soon):
			leases = append(leases, l)
			left = max(left, remaining)
		}
		l.mu.Unlock()
	}
	c.mu.Unlock()
	for _, l := range over { // their timers have not noticed: the machine was suspended, or a clock was stepped
		l.expireIfDue()
	}
	if len(leases) == 0 {
		return
	}

	ctx, cancel := context.WithTimeout(c.stopping, c.cfg.tryFor(left))
	_, err := c.renew(ctx, leases)
	cancel()
	if err == nil {
		return
	}
	// Nothing is lost by an error, of whatever kind: it says nothing about whose the leases are. They are lost at their
	// deadlines if no try before these succeeds.
	retry := c.clock().Time.Add(jitter(c.cfg.retryPause()))
	for _, l := range leases {
		l.mu.Lock()
		l.renewDue = retry
		l.mu.Unlock()
	}
	if c.stopping.Err() == nil {
		c.cfg.Logger.Warn("writegate: renewal failed, trying again until the leases' deadlines",
			"leases", len(leases), "took", c.clock().since(sent), "error", err)
	}
}

// renew asks for all of these leases at once, and has each take in its own answer, which it returns by name.
func (c *Client) renew(ctx context.Context, leases []*Lease) (map[string]string, error) {
	slices.SortFunc(leases, func(a, b *Lease) int { return strings.Compare(a.name, b.name) })
	names, tokens := make([]string, len(leases)), make([]string, len(leases))
	sent := c.clock()
	e := RenewEvent{Leases: len(leases), Left: c.cfg.TTL}
	for i, l := range leases {
		names[i], tokens[i] = l.name, l.token
		l.mu.Lock()
		e.Left = min(e.Left, l.remainingLocked(sent))
		l.mu.Unlock()
	}
	outcomes, err := c.store.renew(ctx, names, tokens)
	e.Took, e.Err = c.clock().since(sent), err
	if err != nil {
		c.observe(e)
		return nil, err
	}
	for _, l := range leases {
		switch outcome := outcomes[l.name]; outcome {
		case outcomeRenewed:
			e.Renewed++
		case outcomeLocked:
			e.Locked++
		case outcomeLost:
			e.Lost++
		default:
			return nil, fmt.Errorf("fence.renew answered %q for lease %q", outcome, l.name)
		}
		l.settle(sent, outcomes[l.name])
	}
	c.observe(e)
	return outcomes, nil
}
