//go:build unix

package main

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
)

// control is a writegate that is broken in one way. The same campaign, run on it, has to find that out, and by the
// invariant that is there for it.
type control struct {
	name   string
	what   string // is broken, and what of its second lines of defence had to go too
	caught string // the invariant
	// The change: of functions of schema fence, of the gate's source, and of the database.
	functions []edit
	source    []edit
	database  string
	failover  bool // it takes one
	profile   func(*profile)
}

// edit replaces text in a function or a file. Each has to be there, or the control controls nothing any more.
type edit struct{ in, old, new string }

func only(kinds ...string) func(*profile) { return func(p *profile) { p.Only = kinds } }

func faultsOf(weights map[string]int, then ...func(*profile)) func(*profile) {
	return func(p *profile) {
		p.Faults = weights
		for _, f := range then {
			f(p)
		}
	}
}

func live(p *profile) { p.Live = 1 }
func one(p *profile)  { p.Names = 1 }

// liveLease is the view in another form.
func liveLease(expiresAt, end string) string {
	return "CREATE OR REPLACE VIEW fence.live_lease AS SELECT l.name, l.fence, uuid_hash_extended(l.token, 0) AS proof, " + expiresAt +
		" FROM fence.lease l WHERE l.released_at IS NULL " + end
}

var unchecked = edit{"acquire", "IF fence <= coalesce(s.granted, r.fence) OR", "IF"}

var controls = []control{
	{
		name: "predicate removed", what: "the gate's statements do not compare fences", caught: neverFalls,
		source: []edit{{"write.go", "\tif w.options.rule == Term {\n\t\t// 0 <= 0", "\tif true {\n\t\treturn fence + \" OPERATOR(pg_catalog.>) 0\"\n\t}\n\tif w.options.rule == Term {\n\t\t// 0 <= 0"}},
	},
	{
		name: "comparison turned round", what: "the gate accepts a fence that is lower than the row's, and no other", caught: neverFalls,
		source: []edit{
			{"write.go", "less        = \" OPERATOR(pg_catalog.<) \"", "less        = \" OPERATOR(pg_catalog.>) \""},
			{"write.go", "lessOrEqual = \" OPERATOR(pg_catalog.<=) \"", "lessOrEqual = \" OPERATOR(pg_catalog.>=) \""},
		},
		profile: only("update", "exec", "exec", "many"),
	},
	{
		name: "equal fences accepted", what: "under rule once the gate compares by <=", caught: oncePerGrant,
		source: []edit{{"write.go", "less        = \" OPERATOR(pg_catalog.<) \"", "less        = \" OPERATOR(pg_catalog.<=) \""}},
	},
	{
		name: "lease read by EXISTS", what: "a live write looks at the lease in its own snapshot, and locks nothing", caught: liveInTime,
		source: []edit{{"write.go", "	live := \"(SELECT CASE",
			"	live := \"EXISTS (SELECT 1 FROM fence.lease l WHERE (l.name, l.token, l.fence) = (\" + name + \", \" + token + \", \" + fence + \") AND l.released_at IS NULL AND l.expires_at > pg_catalog.clock_timestamp())\"\n	_ = \"(SELECT CASE"}},
		// Writes that wait for a row while their process stands still, and its lease goes.
		profile: faultsOf(map[string]int{"row lock": 5, "pause": 5}, only("update"), live, one, func(p *profile) { p.Pace, p.Lanes = 50*time.Millisecond, 4 }),
	},
	{
		name: "lease not locked", what: "fence.live_lease reads the lease without FOR KEY SHARE", caught: liveInTime,
		database: liveLease("l.expires_at", "AND l.expires_at > clock_timestamp()"),
		profile:  faultsOf(map[string]int{"row lock": 6, "pause": 4}, only("update"), live, one),
	},
	{
		name: "expiry not asked", what: "a live write does not ask whether the lease has expired", caught: liveInTime,
		database: liveLease("'infinity'::timestamptz AS expires_at", "FOR KEY SHARE"),
		// On many names, so that a lease which has expired stays nobody's for a while.
		profile: faultsOf(map[string]int{"pause": 4}, only("update"), live, func(p *profile) { p.Names, p.Zombies, p.Stubs = 0, 1, 1 }),
	},
	{
		name: "now() for clock_timestamp()", what: "grants and live writes take the time at which their transaction began", caught: clockLate,
		functions: []edit{{"live", "clock_timestamp()", "now()"}, {"acquire", "clock_timestamp()", "now()"}},
		source:    []edit{{"write.go", "pg_catalog.clock_timestamp()", "pg_catalog.now()"}},
		database:  liveLease("l.expires_at", "AND l.expires_at > now() FOR KEY SHARE"),
		profile:   faultsOf(map[string]int{"lease lock": 10}, only("update"), live),
	},
	{
		name: "renewal by name", what: "fence.renew does not ask for the token", caught: ownLease,
		functions: []edit{
			{"renew", "ON l.name = u.name COLLATE \"C\" AND l.token = u.token\n               FOR NO KEY", "ON l.name = u.name COLLATE \"C\"\n               FOR NO KEY"},
		},
		profile: func(p *profile) { p.Linger = 0.6 },
	},
	{
		name: "release by name", what: "fence.release does not ask for the token", caught: ownLease,
		functions: []edit{
			{"release", "AND (l.token = release.token OR release.revoke)", ""},
			{"release", "(r.token = release.token) IS NOT TRUE", "r.fence IS NULL"},
		},
		profile: func(p *profile) { p.Linger = 0.6 },
	},
	{
		name: "fence drawn before the lock", what: "fence.acquire draws from the sequence, is held up for up to half a second, as a process may be, and then waits for the row; that it refuses a fence below one granted before is off too", caught: risingFences,
		functions: []edit{
			unchecked,
			{"acquire", "    fence := nextval('fence.fence_seq');\n", "    fence := v_drawn;\n"},
			{"acquire", "    v_same boolean;\n", "    v_same boolean;\n    v_drawn bigint;\n"},
			{"acquire", "    next_in_line := false;\n", "    next_in_line := false;\n    v_drawn := nextval('fence.fence_seq');\n    PERFORM pg_sleep(random() / 2);\n"},
		},
		profile: faultsOf(map[string]int{"terminate": 1}, only("update"), func(p *profile) { p.Zombies, p.TTL, p.Names = 0, time.Second, 1 }),
	},
	{
		name: "sequence with CACHE 10", what: "each session takes ten fences at a time; that the grant refuses such a sequence, and a fence below one granted before, is off too", caught: risingFences,
		functions: []edit{unchecked, {"sequence_wrong", "WHEN s.seqcache <> 1", "WHEN false"}},
		database:  "ALTER SEQUENCE fence.fence_seq CACHE 10",
	},
	{
		name: "asynchronous commit", what: "synchronous_commit is off by default, and grants do not turn it on; the server crashes", caught: durable,
		functions: []edit{{"acquire", "IN ('off', 'local', 'remote_write')", "IN ('none')"}},
		database:  "ALTER DATABASE %s SET synchronous_commit = off",
		profile:   faultsOf(map[string]int{"crash": 1}, func(p *profile) { p.Pace = 800 * time.Millisecond }),
	},
	{
		name: "no jump", what: "after a failover grants go on where the sequence stands", caught: risingFences, failover: true,
		functions: []edit{{"check_source", "    FOR attempt IN 1..2 LOOP\n", "    RETURN;\n    FOR attempt IN 1..2 LOOP\n"}},
	},
	{
		name: "no tombstones", what: "a delete leaves none", caught: tombstone,
		functions: []edit{{"bury", "    PERFORM fence.may(bury.relation, 'DELETE');\n", "    RETURN true;\n"}},
		profile:   only("insert", "delete", "upsert"),
	},
	{
		name: "audit in the caller's transaction", what: "a refusal is recorded in the transaction that was refused, which then rolls back", caught: audited,
		source: []edit{{"write.go", "\t\tw.repeats = max(w.repeats, g.recorder.refused(e, key))\n", `		if w.in == nil {
			g.recorder.refused(e, key)
		} else {
			s := w.newStatement()
			s.add("SELECT r.verdict FROM fence.record_rejection(", s.arg(e.Table), "::text, ", s.arg(key), "::text::jsonb, ", s.arg(e.Lease), "::text, NULL, ",
				s.arg(e.Fence), "::bigint, ", s.arg(e.Reason), "::text, ", s.arg(e.Current), "::bigint) r")
			e.AuditErr = w.ask(ctx, s, &e.Verdict)
		}
`}},
		profile: only("tx", "update"),
	},
	{
		name: "grants without a lock", what: "fence.acquire reads the lease's row without FOR UPDATE", caught: oneTerm,
		functions: []edit{
			{"acquire", "FOR UPDATE SKIP LOCKED;", ";"},
			{"acquire", "WHERE l.name = acquire.name FOR UPDATE;", "WHERE l.name = acquire.name;"},
			{"acquire", "WHERE l.ctid = r.at)", "WHERE l.name = acquire.name)"}, // which finds a row that has moved meanwhile
		},
		profile: faultsOf(map[string]int{"lease lock": 10}, only("update")),
	},
	{
		name: "take-over before the expiry", what: "fence.acquire counts a lease as over half a TTL too soon", caught: oneTerm,
		functions: []edit{
			{"acquire", "l.expires_at <= clock_timestamp()", "l.expires_at - acquire.ttl / 2 <= clock_timestamp()"},
			{"acquire", "r.expires_at > v_now", "r.expires_at - acquire.ttl / 2 > v_now"},
		},
		profile: faultsOf(map[string]int{"pause": 10}),
	},
	{
		name: "guard off", what: "the triggers of the guarded table are disabled", caught: guarded,
		database: "ALTER TABLE app.guarded DISABLE TRIGGER USER; ALTER TABLE app.guarded ENABLE ALWAYS TRIGGER zz_log",
		profile:  only("enter", "update"),
	},
}

// troubled is the profile that controls start from: short terms, stubborn holders, and what makes them late.
func troubled() profile {
	return profile{
		Workers: 5, Names: 6, Length: 2500 * time.Millisecond, TTL: 250 * time.Millisecond, Pace: 100 * time.Millisecond,
		habits: habits{Stubs: 0.9, Zombies: 0.6, Live: 0.3, Linger: 0.15},
		Faults: map[string]int{"pause": 4, "clock": 3, "lease lock": 2, "row lock": 2, "terminate": 1},
	}
}

// controlRounds is how many rounds a control may take to be caught.
const controlRounds = 16

func (r *run) controls(s settings, binary string, out *result) {
	r.Helper()
	r.scope(func(r *run) {
		b := newBed(r)
		// What is not broken passes the same.
		for i, p := range []profile{troubled(), func() profile { p := troubled(); live(&p); one(&p); return p }()} {
			round := b.round(fmt.Sprintf("unbroken_%d", i), s.seed, binary, p)
			round.lively = true
			c := round.play()
			round.judge(c)
			out.Violations += len(c.found)
			r.say("nothing broken: %d writes, of which %d were applied, %d violations", c.h.attempted(), len(c.l.writes), len(c.found))
		}
		for i, c := range controls {
			if !strings.Contains(c.name, s.controls) || r.ctx.Err() != nil {
				continue
			}
			out.Controls++
			began := time.Now()
			by, rounds := b.control(i, c, s.seed, binary)
			if slices.Contains(by, c.caught) {
				out.Caught++
				r.say("control %q: caught in round %d, %v: %s", c.name, rounds, time.Since(began).Round(100*time.Millisecond), strings.Join(by, "; "))
			} else {
				r.say("control %q: NOT CAUGHT in %d rounds; want %q, found %q", c.name, rounds, c.caught, by)
			}
		}
	})
}

// control runs rounds until the control is caught, and returns all that was violated.
func (b *bed) control(n int, c control, seed uint64, binary string) (by []string, rounds int) {
	b.t.Helper()
	if c.source != nil {
		binary = b.t.build(fmt.Sprintf("control-%d", n), b.t.mutate(n, c.source))
	}
	for rounds = 1; rounds <= controlRounds && b.t.ctx.Err() == nil; rounds++ {
		p := troubled()
		if c.profile != nil {
			c.profile(&p)
		}
		name := fmt.Sprintf("control_%d_%d", n, rounds)
		var check *checker
		if c.failover {
			check = b.t.failover(asynchronous, name, seed+uint64(100*n+rounds), binary, p, &c, &result{})
		} else {
			r := b.round(name, seed+uint64(100*n+rounds), binary, p)
			r.breakIt(c)
			check = r.play()
			check.tail = c.name == "asynchronous commit"
			check.check()
			b.exec("", "DROP DATABASE "+r.name+" WITH (FORCE)")
		}
		for _, name := range invariantsOf(check.found) {
			if slices.Contains(by, name) {
				continue
			}
			by = append(by, name)
			if name != c.caught {
				i := slices.IndexFunc(check.found, func(v violation) bool { return v.invariant == name })
				b.t.say("  beside it: %s", check.found[i].what)
			}
		}
		if slices.Contains(by, c.caught) {
			return by, rounds
		}
	}
	return by, rounds - 1
}

// breakIt breaks the round's database.
func (r *round) breakIt(c control) {
	r.t.Helper()
	conn, err := pgx.ConnectConfig(r.t.ctx, r.server.Config(r.name))
	r.t.must(err)
	defer func() { _ = conn.Close(r.t.ctx) }()
	for _, f := range c.functions {
		var text string
		r.t.must(conn.QueryRow(r.t.ctx, "SELECT pg_get_functiondef(p.oid) FROM pg_proc p WHERE p.pronamespace = 'fence'::regnamespace AND p.proname = $1", f.in).Scan(&text))
		if !strings.Contains(text, f.old) {
			r.t.Fatalf("control %q: fence.%s does not have %q any more", c.name, f.in, f.old)
		}
		_, err := conn.Exec(r.t.ctx, strings.ReplaceAll(text, f.old, f.new))
		r.t.must(err)
	}
	if c.database != "" {
		sql := c.database
		if strings.Contains(sql, "%s") {
			sql = fmt.Sprintf(sql, r.name)
		}
		_, err := conn.Exec(r.t.ctx, sql, pgx.QueryExecModeSimpleProtocol)
		r.t.must(err)
	}
}

// mutate writes changed copies of the gate's source files, and returns which stand for which.
func (r *run) mutate(n int, changes []edit) map[string]string {
	r.Helper()
	dir := filepath.Join(r.module(), "fencedb")
	overlay := map[string]string{}
	for _, c := range changes {
		original := filepath.Join(dir, c.in)
		from := original
		if overlay[original] != "" {
			from = overlay[original]
		}
		text, err := os.ReadFile(from)
		r.must(err)
		if strings.Count(string(text), c.old) != 1 {
			r.Fatalf("control %d: %s has %q %d times, not once", n, c.in, c.old, strings.Count(string(text), c.old))
		}
		overlay[original] = filepath.Join(r.dir, "bin", fmt.Sprintf("control-%d-%s", n, c.in))
		r.must(os.MkdirAll(filepath.Dir(overlay[original]), 0o700))
		r.must(os.WriteFile(overlay[original], []byte(strings.Replace(string(text), c.old, c.new, 1)), 0o600))
	}
	return overlay
}
