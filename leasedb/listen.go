package leasedb

import (
	"context"
	"encoding/json"
	"time"
)

// releaseChannel is where fence.release notifies, if somebody has said that it waits.
const releaseChannel = "fence_release"

// release is what it says there.
type releaseNote struct {
	Name string `json:"name"`
	Next string `json:"next"` // the client that was the first to wait
}

// listenOnce starts the client's one listener, when the first of its goroutines has to wait.
func (c *Client) listenOnce() {
	if c.cfg.PollOnly {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.listening || c.closed {
		return
	}
	c.listening = true
	c.work.Go(c.listen)
}

// listen takes in hints until the client is closed. They only ever save time: a waiter that gets none, because the
// connection is down or a pooler in between swallows it, looks again when its pause is over.
func (c *Client) listen() {
	for failures := 0; c.stopping.Err() == nil; failures++ {
		connected := c.clock()
		err := c.store.listen(c.stopping, func() {
			failures = 0
			c.wake("") // something may have been released while nobody was listening
		}, c.heard)
		if c.stopping.Err() != nil {
			return
		}
		c.cfg.Logger.Debug("writegate: not listening for releases, polling goes on", "after", c.clock().since(connected), "error", err)
		_ = c.pause(c.stopping, jitter(min(100*time.Millisecond<<min(failures, 8), 15*time.Second)), nil)
	}
}

func (c *Client) heard(payload string) {
	var note releaseNote
	if json.Unmarshal([]byte(payload), &note) == nil && note.Next == c.id {
		c.wake(note.Name) // the others stay where they are: one attempt is enough
	}
}

// wake ends the pause of whoever waits for the name, or of all for "".
func (c *Client) wake(name string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for n, l := range c.lines {
		if name == "" || n == name {
			select {
			case l.wake <- struct{}{}:
			default:
			}
		}
	}
}

func (s *pgStore) listen(ctx context.Context, ready func(), heard func(payload string)) error {
	// From the pool, because its configuration may say how connections are made and prepared; out of the pool, because
	// it stays busy for good.
	pooled, err := s.grants.Acquire(ctx)
	if err != nil {
		return err
	}
	conn := pooled.Hijack()
	defer func() {
		closing, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
		defer cancel()
		_ = conn.Close(closing)
	}()
	if _, err := conn.Exec(ctx, "LISTEN "+releaseChannel); err != nil {
		return err
	}
	ready()
	for {
		note, err := conn.WaitForNotification(ctx)
		if err != nil {
			return err
		}
		heard(note.Payload)
	}
}
