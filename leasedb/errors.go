package leasedb

import (
	"errors"
	"fmt"
	"time"

	"github.com/writegate/writegate/internal/pgerr"
)

// What errors.Is can ask of the errors of this package. [HeldError] and [LostError] carry more.
var (
	// ErrHeld: somebody else holds the lease.
	ErrHeld = errors.New("lease is held")
	// ErrBusy: the lease's row stayed locked by another session for longer than one may wait, often because that
	// session is idle in a transaction. Who holds the lease is not known.
	ErrBusy = errors.New("lease row is locked")
	// ErrLost: the lease is not this grant's any more, or can no longer be relied on. For good: acquire again.
	ErrLost = errors.New("lease is lost")
	// ErrReleased: the lease was given back by this handle.
	ErrReleased = errors.New("lease is released")
	// ErrNotHeld: a release came too late; the grant had ended before it, by expiry or by another's grant.
	ErrNotHeld = errors.New("lease was not held")
	// ErrTooLate: a grant arrived after it could still be used. It has been given back.
	ErrTooLate = errors.New("grant arrived too late")
	// ErrLittleTime: Check was asked for more time than the lease has left.
	ErrLittleTime = errors.New("lease has too little time left")
	// ErrUnknown: the request was sent and its answer never came. An acquire that ends so is given back in the
	// background; failing that it blocks the name until its TTL has passed.
	ErrUnknown = errors.New("outcome unknown")
	// ErrFence: a grant could not be trusted to be newer than all others. See the page on failover.
	ErrFence = errors.New("fence source is broken")
	// ErrReadOnly: the server takes no writes: a standby, or a demoted primary.
	ErrReadOnly = errors.New("server is read-only")
	// ErrSchema: schema fence is missing, of a version this program cannot use, or closed to this role.
	ErrSchema = pgerr.ErrSchema
	// ErrClosed: the client has been closed.
	ErrClosed = errors.New("lease client is closed")
	// ErrMaxHold: the lease was held for Config.MaxHold. It is the cause of a loss.
	ErrMaxHold = errors.New("held for the longest time allowed")
	// ErrNotRenewed: no renewal was confirmed before the deadline. It is the cause of a loss.
	ErrNotRenewed = errors.New("no renewal was confirmed in time")
	// ErrSuperseded: the database says that the grant is over. It is the cause of a loss.
	ErrSuperseded = errors.New("the database says that this grant is over")
)

// HeldError says who has a lease that was not granted. It is an [ErrHeld].
type HeldError struct {
	Name      string
	Holder    string        // the label given by the present holder
	Fence     int64         // its fence
	Remaining time.Duration // until its lease expires by the database's clock, unless it renews
}

func (e *HeldError) Error() string {
	return fmt.Sprintf("lease %q is held by %q under fence %d for another %v", e.Name, e.Holder, e.Fence, e.Remaining.Round(time.Millisecond))
}

// Is makes errors.Is(err, ErrHeld) hold.
func (e *HeldError) Is(target error) bool { return target == ErrHeld }

// LostError says that a lease was lost, and why. It is an [ErrLost]; Cause is one of [ErrNotRenewed], [ErrSuperseded],
// [ErrMaxHold], [ErrClosed], or what was given to [Lease.Lose], each possibly wrapped.
type LostError struct {
	Name  string
	Fence int64
	Cause error
}

func (e *LostError) Error() string {
	return fmt.Sprintf("lease %q (fence %d) is lost: %v", e.Name, e.Fence, e.Cause)
}

// Is makes errors.Is(err, ErrLost) hold.
func (e *LostError) Is(target error) bool { return target == ErrLost }

func (e *LostError) Unwrap() error { return e.Cause }

// explain turns what the store met into this package's errors.
func explain(err error, name, database string) error {
	switch {
	case err == nil:
		return nil
	case pgerr.LockTimeout(err):
		return fmt.Errorf("lease %q: %w by another session; look in pg_stat_activity for one idle in transaction: %w", name, ErrBusy, err)
	case pgerr.ReadOnly(err):
		return fmt.Errorf("lease %q: %w: connect to the primary: %w", name, ErrReadOnly, err)
	case pgerr.Code(err) == pgerr.FenceBehind, pgerr.Code(err) == "2200H":
		return fmt.Errorf("lease %q: %w: %w", name, ErrFence, err)
	}
	return fmt.Errorf("lease %q: %w", name, pgerr.ExplainSchema(err, database))
}
