package audit

import "time"

// Overview is what a report or the dashboard shows: one reading of the database, in one snapshot, of the time [Since, Until).
type Overview struct {
	Database string    `json:"database"`
	Server   string    `json:"server"` // host:port, or the socket; never a user or a password
	Standby  bool      `json:"standby"`
	Schema   int       `json:"schema"`
	At       time.Time `json:"at"` // the database's clock when it was read
	Since    time.Time `json:"since"`
	Until    time.Time `json:"until"`

	Leases LeaseCounts `json:"leases"`
	// Lanes are the timelines, one a lease: those with refusals of lawful holders first, then those with the most, then those with the latest grants.
	Lanes        []Lane `json:"lanes"`
	LanesLeftOut int64  `json:"lanes_left_out"` // leases with terms or refusals in this time that have no lane here

	Refusals  RefusalCounts `json:"refusals"`
	Histogram []Bin         `json:"histogram"` // of equal width, without gaps, over [Since, Until)
	Top       []TopList     `json:"top"`
	Latest    []Rejection   `json:"latest"` // the latest first
	LatestCut bool          `json:"latest_cut"`

	Tables []Table       `json:"tables"`
	Verify *Verification `json:"verify"` // nil: not asked for
}

// LeaseCounts are how many leases there are now, in each state.
type LeaseCounts struct {
	Held    int64 `json:"held,string"`
	Overdue int64 `json:"overdue,string"` // expired, not released, and nobody has followed
	Free    int64 `json:"free,string"`
}

// RefusalCounts sums up the refusals of some time. One row of the audit stands for a write that was tried again and again; it
// counts wholly at the time of its last refusal.
type RefusalCounts struct {
	Refusals  int64 `json:"refusals,string"`
	Rows      int64 `json:"rows,string"`
	Stale     int64 `json:"stale,string"`
	Expired   int64 `json:"expired,string"`
	Lawful    int64 `json:"lawful,string"`
	Unknown   int64 `json:"unknown,string"`
	Lost      int64 `json:"lost,string"`          // refusals of which only the number is known, of all time
	GuardOnly int64 `json:"guard_refused,string"` // refused by guards, which can record nothing, of all time
}

// Lane is the timeline of one lease.
type Lane struct {
	Lease string `json:"lease"`
	Spans []Span `json:"spans"` // in the order of time
	Marks []Mark `json:"marks"` // in the order of time
	// Terms and Refusals are how many there are in this time, however many spans and marks stand for them.
	Terms    int64 `json:"terms,string"`
	Refusals int64 `json:"refusals,string"`
}

// Span is one term, or several that are too short and too many to be shown each.
type Span struct {
	From      time.Time `json:"from"`
	To        time.Time `json:"to"`           // the latest end; of one that is held, when it is going to expire
	Fence     int64     `json:"fence,string"` // the newest
	Holder    string    `json:"holder"`       // of the newest
	End       string    `json:"end"`          // of the newest: released, expired, held, or overdue (expired, and nobody has followed)
	Renewals  int64     `json:"renewals,string"`
	Terms     int64     `json:"terms,string"`     // 1, or how many it stands for
	OldFence  int64     `json:"old_fence,string"` // the oldest that it stands for; Fence if it is one
	AllLapsed bool      `json:"all_lapsed"`       // every one of them ended by expiry
	Lapsed    int64     `json:"lapsed,string"`    // how many ended by expiry
	Held      float64   `json:"held_seconds"`     // for how long they were held, together
}

// Mark is one row of the audit at the time of its last refusal, or several that are too close to be shown each.
type Mark struct {
	From     time.Time `json:"from"` // of the earliest last refusal that it stands for
	At       time.Time `json:"at"`   // of the latest
	Refusals int64     `json:"refusals,string"`
	Rows     int64     `json:"rows,string"`
	Verdict  string    `json:"verdict"` // the worst: lawful, stale, expired, unknown, in this order
	// Of the latest that it stands for:
	ID            int64  `json:"id,string"`
	Table         string `json:"table"`
	Key           string `json:"key"` // JSON
	Reason        string `json:"reason"`
	Fence         int64  `json:"fence,string"`
	CurrentFence  *int64 `json:"current_fence,string"`
	Holder        string `json:"holder"`
	CurrentHolder string `json:"current_holder"`
	Application   string `json:"application"`
}

// Bin counts the refusals of [From, To) by verdict.
type Bin struct {
	From    time.Time `json:"from"`
	To      time.Time `json:"to"`
	Stale   int64     `json:"stale,string"`
	Expired int64     `json:"expired,string"`
	Lawful  int64     `json:"lawful,string"`
	Unknown int64     `json:"unknown,string"`
}

// TopList says which holders, tables or others have the most refusals.
type TopList struct {
	By   string `json:"by"` // holder, table, lease, reason, application or key
	Rows []Top  `json:"rows"`
	Cut  bool   `json:"cut"` // there are more
}

// Top is one line of a TopList.
type Top struct {
	Value    string    `json:"value"`
	Refusals int64     `json:"refusals,string"`
	Rows     int64     `json:"rows,string"`
	Lawful   int64     `json:"lawful,string"`
	LastAt   time.Time `json:"last_at"`
}
