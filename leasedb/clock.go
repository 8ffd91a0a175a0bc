package leasedb

import "time"

// Reading is one look at this machine's clocks.
type Reading struct {
	// Time carries both the wall clock and, as time.Now gives it, the monotonic clock.
	Time time.Time
	// Boot is the time since boot with the time spent suspended, where the system tells (Linux); else 0.
	Boot time.Duration
}

// since returns how long ago earlier was, by the clock that says longest. Each of them can stand still while time
// passes: the monotonic clock in a suspended machine, the wall clock when it is set back. Believing too little only
// costs a lease; believing too much costs the promise.
func (r Reading) since(earlier Reading) time.Duration {
	return max(
		r.Time.Sub(earlier.Time),                   // monotonic, if both have it
		r.Time.Round(0).Sub(earlier.Time.Round(0)), // wall
		r.Boot-earlier.Boot,
	)
}

func systemClock() Reading {
	return Reading{Time: time.Now(), Boot: bootTime()}
}
