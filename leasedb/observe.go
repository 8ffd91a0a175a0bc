package leasedb

import "time"

// Event is something that Config.Observe is told: an [AcquireEvent], [RenewEvent], [LossEvent] or [EndEvent]. Later
// versions may add kinds; pass by those that you do not know.
type Event interface{ event() }

// AcquireEvent tells that a TryAcquire, Acquire or Do has a lease, or gave up.
type AcquireEvent struct {
	Name     string
	Waited   time.Duration // from the call to its end
	Attempts int           // requests made for it; above 1 there was contention, or trouble
	Fence    int64         // 0 if there was no grant
	Err      error         // nil for a grant
}

// RenewEvent tells that a request to renew was answered, or not.
type RenewEvent struct {
	Leases  int           // asked for in this one request
	Renewed int           // confirmed
	Locked  int           // skipped, because another session held their rows; asked for again soon
	Lost    int           // found to be over
	Took    time.Duration // from request to answer
	Left    time.Duration // what the one with the least time left had, when the request was sent
	Err     error         // why there was no answer; those it asked for are asked for again until their deadlines
}

// LossEvent tells that a lease was lost.
type LossEvent struct {
	Name  string
	Fence int64
	Held  time.Duration // from its grant
	Cause error         // as in [LostError]
}

// EndEvent tells that a holder is done with a lease: it has been released, or was lost and its holder has let go of it.
type EndEvent struct {
	Name  string
	Fence int64
	Held  time.Duration // from its grant
	Lost  bool
	// RanOn is how long the work of Do ran on after its lease was lost. Each second of it is one in which somebody
	// else may have been at work as well.
	RanOn time.Duration
	Err   error // of the release
}

func (AcquireEvent) event() {}
func (RenewEvent) event()   {}
func (LossEvent) event()    {}
func (EndEvent) event()     {}

func (c *Client) observe(e Event) {
	if c.cfg.Observe != nil {
		c.cfg.Observe(e)
	}
}
