package fencedb

import (
	"errors"
	"fmt"

	"github.com/writegate/writegate/internal/pgerr"
)

// Outcome is what became of a protected write.
type Outcome int

// The outcomes. Applied and AlreadyApplied come with a nil error (or, if what [Returning] was to read could not be read, with a
// [WriteError] that says so), the others with a [WriteError].
const (
	// Failed: the database refused the statement for a reason of its own, or it was never sent. Nothing was written;
	// the error says why.
	Failed Outcome = iota
	// Applied: the row now holds what was written, and this fence.
	Applied
	// AlreadyApplied: under rule once this grant has written this row before, or the request has been applied. A repeat of
	// a write whose answer was lost ends here, and so does another write of the same row: use rule term, or request ids,
	// where a grant has several. It is no rejection.
	AlreadyApplied
	// Stale: the row has seen a newer fence. This holder has been superseded.
	Stale
	// LeaseLost: the lease is over, found by the holder itself before sending, or by the database for a Live write.
	LeaseLost
	// Missing: there is no such row, or a row security policy hides it.
	Missing
	// Unmatched: the row is there and would take this fence, but the write's own condition ([Where], or one in SQL of the
	// caller's) does not hold.
	Unmatched
	// Suppressed: the row would have taken this fence, and yet the statement changed nothing: a trigger or a rule of
	// the table drops updates without an error.
	Suppressed
	// Unknown: the statement was sent and its answer never came. Send the same write again, or have [Retry] do it: under
	// rule once, or with a request id, it is then Applied or AlreadyApplied.
	Unknown
)

func (o Outcome) String() string {
	switch o {
	case Applied:
		return "applied"
	case AlreadyApplied:
		return "already applied"
	case Stale:
		return "stale"
	case LeaseLost:
		return "lease lost"
	case Missing:
		return "missing"
	case Unmatched:
		return "unmatched"
	case Suppressed:
		return "suppressed"
	case Unknown:
		return "unknown"
	}
	return "failed"
}

// What errors.Is can ask of a [WriteError], one for each outcome that is an error.
var (
	ErrStale      = errors.New("write refused: the row has seen a newer fence")
	ErrLeaseLost  = errors.New("write refused: the lease is over")
	ErrMissing    = errors.New("no such row")
	ErrUnmatched  = errors.New("the row does not meet the write's condition")
	ErrSuppressed = errors.New("the table dropped the write without an error")
	ErrUnknown    = errors.New("outcome unknown: the answer was lost")
)

// What errors.Is can ask of a [WriteError] whose outcome is [Failed], beside the database's own errors.
var (
	// ErrExists: an Insert found a row of an older grant, or under rule term of this one, in its place.
	ErrExists = errors.New("the row exists already")
	// ErrOnce: rule once, and this grant has written the row before, by what was certainly another write. That the rule
	// cannot always tell; give writes request ids, or use rule term, where a grant writes a row more than once.
	ErrOnce = errors.New("rule once: this grant has written this row already, by another write")
	// ErrRequest: the request id has been used in this term for another row.
	ErrRequest = errors.New("the request id belongs to another write")
	// ErrSchema: schema fence is missing, of a version this program cannot use, or closed to this role.
	ErrSchema = pgerr.ErrSchema
)

// WriteError says why a protected write was not applied, or may not have been. errors.Is finds the sentinel of its
// outcome, and what it wraps.
type WriteError struct {
	Outcome       Outcome
	Table         string // schema.table; empty for a transaction, and for SQL of one's own without a target
	Key           Key
	Lease         string // name
	Fence         int64  // offered
	Current       int64  // found in the row; 0 if there was no row, or nobody looked
	Holder        string // who offered
	CurrentHolder string // who wrote last, or has the lease now, as far as this database knows
	// Reason is the audit's: stale, or what became of the lease: expired, superseded, released, wrong_fence, no_lease.
	// Empty for what is no rejection.
	Reason string
	// Verdict is the audit's judgement: stale, expired, lawful, unknown. Empty if it was not recorded.
	Verdict  string
	AuditErr error // why the refusal is not in the audit, if it should be and is not
	Err      error // the database's or the lease's own error, if any

	again bool // it may be sent again without being applied twice
}

func (e *WriteError) Error() string {
	where := fmt.Sprintf("lease %q, fence %d", e.Lease, e.Fence)
	if e.Key != nil {
		where = fmt.Sprintf("%s %s, %s", e.Table, e.Key, where)
	} else if e.Table != "" {
		where = e.Table + ", " + where
	}
	var what string
	switch e.Outcome {
	case Stale:
		what = fmt.Sprintf("%v (seen %d, sent %d)", ErrStale, e.Current, e.Fence)
		if e.CurrentHolder != "" {
			what += fmt.Sprintf(", of %q", e.CurrentHolder)
		}
	case LeaseLost:
		what = ErrLeaseLost.Error()
		if e.Reason != "" {
			what += " (" + e.Reason + ")"
		}
		if e.CurrentHolder != "" {
			what += fmt.Sprintf(", and is %q's", e.CurrentHolder)
		}
	case Applied, AlreadyApplied:
		what = e.Outcome.String() + ", and yet"
	default:
		what = e.Outcome.sentinel().Error()
	}
	if e.Err != nil {
		what += ": " + e.Err.Error()
	}
	if e.AuditErr != nil {
		what += "; " + e.AuditErr.Error()
	}
	return "fencedb: " + where + ": " + what
}

func (o Outcome) sentinel() error {
	switch o {
	case Stale:
		return ErrStale
	case LeaseLost:
		return ErrLeaseLost
	case Missing:
		return ErrMissing
	case Unmatched:
		return ErrUnmatched
	case Suppressed:
		return ErrSuppressed
	case Unknown:
		return ErrUnknown
	}
	return errFailed
}

var errFailed = errors.New("write failed")

// Is makes errors.Is find the sentinel of the outcome.
func (e *WriteError) Is(target error) bool { return target == e.Outcome.sentinel() }

func (e *WriteError) Unwrap() error { return e.Err }
