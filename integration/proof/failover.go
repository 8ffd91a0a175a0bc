//go:build unix

package main

import (
	"context"
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/writegate/writegate/internal/pgtest"
)

// kind of failover: who takes over, and what it does not know.
type kind string

const (
	asynchronous kind = "asynchronous standby"  // which has not received the last transactions
	synchronous  kind = "synchronous standby"   // without which nothing was acknowledged
	pointInTime  kind = "point-in-time restore" // to a moment before the last transactions
)

// failovers runs a round for each kind, and one on a server that loses its newest commits when it crashes.
func (r *run) failovers(s settings, binary string, out *result) {
	r.Helper()
	for i, k := range []kind{asynchronous, synchronous, pointInTime} {
		if r.ctx.Err() != nil || !strings.Contains(string(k), s.kind) {
			continue
		}
		r.failover(k, fmt.Sprintf("failover_%d", i), s.seed+uint64(i), binary, overtaken(), nil, out)
	}
	if s.kind != "" {
		return
	}
	r.scope(func(r *run) {
		b := newBed(r)
		p := everything()
		p.Length, p.Pooler, p.Faults, p.Pace = 6*time.Second, false, map[string]int{"crash": 2, "kill": 1, "lost replies": 1}, 600*time.Millisecond
		round := b.round("crash", s.seed, binary, p)
		b.exec("", "ALTER DATABASE crash SET synchronous_commit = off")
		c := round.play()
		c.tail = true
		c.check() // not against the model, which knows of no loss
		c.report(r, round.dir)
		out.add(round, c, "crashes without synchronous commit", "")
	})
}

// overtaken is the profile of rounds in which a server takes over from another.
func overtaken() profile {
	p := troubled()
	p.TTL, p.Zombies, p.Stubs, p.Pace = 400*time.Millisecond, 0.3, 0.5, 300*time.Millisecond
	p.Faults = map[string]int{"pause": 4, "kill": 2, "lost replies": 4, "terminate": 2, "lease lock": 3}
	return p
}

// failover runs a round in the middle of which another server takes over. The workers are led to it with all that they
// hold, lost grants among it.
func (r *run) failover(k kind, name string, seed uint64, binary string, p profile, broken *control, out *result) (c *checker) {
	r.Helper()
	r.scope(func(r *run) {
		b := newBed(r, "archive_mode = on", "wal_level = replica")
		primary := b.server
		round := b.round(name, seed, binary, p)
		if broken != nil {
			round.breakIt(*broken)
		}
		var began string
		r.must(queryRow(r.ctx, primary.Config(name), "SELECT pg_current_wal_insert_lsn()::text", &began))

		// Whoever is to take over gets there before the work begins.
		var standby *pgtest.Server
		var replication *link
		var archive, segment string
		switch k {
		case pointInTime:
			archive = primary.Archive(r)
			standby = primary.Backup(r)
		default:
			standby = primary.Standby(r)
			direct := primary.TCP("")
			replication = newLink(r, addressOf(direct))
			r.Cleanup(replication.proxy.Stop)
			host, port, err := net.SplitHostPort(replication.proxy.Listen)
			r.must(err)
			r.must(execOn(r.ctx, standby.Config(""), fmt.Sprintf(
				"ALTER SYSTEM SET primary_conninfo = 'host=%s port=%s user=%s password=%s application_name=standby'", host, port, direct.User, direct.Password)))
			r.must(execOn(r.ctx, standby.Config(""), "SELECT pg_reload_conf()"))
			// It hangs up, and comes back through the proxy.
			r.await(primary, "SELECT count(*) = 1 FROM pg_stat_replication WHERE application_name = 'standby' AND state = 'streaming'")
			if k == synchronous {
				r.must(execOn(r.ctx, primary.Config(""), "ALTER SYSTEM SET synchronous_standby_names = 'standby'"))
				r.must(execOn(r.ctx, primary.Config(""), "SELECT pg_reload_conf()"))
				r.await(primary, "SELECT count(*) = 1 FROM pg_stat_replication WHERE sync_state = 'sync'")
			}
		}

		round.start()
		round.atWork(0)
		round.troubleFor(p.Length / 2)
		// From here on the one that takes over learns nothing more, and the work goes on for a while.
		switch k {
		case pointInTime:
			r.must(queryRow(r.ctx, primary.Config(""), "SELECT pg_walfile_name(pg_create_restore_point('then'))", &segment))
		default:
			r.must(replication.toxic("timeout", "downstream", `"timeout":0`))
			r.must(replication.toxic("timeout", "upstream", `"timeout":0`))
		}
		if k == synchronous {
			round.troubleFor(p.Length / 6)
		} else {
			// Longer than the sequence is logged ahead.
			var fence int64
			r.must(queryRow(r.ctx, primary.Config(name), "SELECT last_value FROM fence.fence_seq", &fence))
			r.await(primary, "SELECT last_value > "+strconv.FormatInt(fence+100, 10)+" FROM fence.fence_seq", name)
		}
		if k == pointInTime {
			r.must(execOn(r.ctx, primary.Config(""), "SELECT pg_switch_wal()"))
			r.await(primary, "SELECT last_archived_wal >= '"+segment+"' FROM pg_stat_archiver")
		}
		r.killServer(primary)
		after := time.Now().UnixNano()
		if k == pointInTime {
			standby.Recover(r, archive, "then")
			r.await(standby, "SELECT NOT pg_is_in_recovery()")
		} else {
			standby.Promote(r)
		}
		round.moveTo(standby, string(k), p.Length/2)

		// The one that is gone is started once more, for nobody but us to read what it knew.
		primary.Restart(r, "fast")
		old, err := readLogs(r.ctx, primary.Config(name))
		r.must(err)
		c = round.checker()
		c.followed(old, after)
		c.synchronous = k == synchronous
		c.check()
		before := &checker{h: c.h, l: old, locks: round.locks}
		before.checkLogs()
		c.found = append(c.found, before.found...)
		c.checkLoss(r, primary, standby, name, began, k)
		if broken == nil {
			c.linear(round.dir, time.Minute)
			c.report(r, round.dir)
		}
		lost := 0
		for _, l := range old.leases {
			if l.grant() && !c.knows(l.new) {
				lost++
			}
		}
		out.add(round, c, string(k), fmt.Sprintf(" and %d that were lost", lost))
	})
	return c
}

// followed says which server was there before, and until when at least it was. Its last transactions may have ended, and have
// been replicated, a little later: processes of a server outlive its being killed.
func (c *checker) followed(old *logs, after int64) {
	type entry struct{ seq, xid, at int64 } // the first two are handed out again
	known := map[entry]bool{}
	for _, l := range old.leases {
		known[entry{l.seq, l.xid, l.at}] = true
	}
	for _, w := range old.writes {
		known[entry{w.seq, w.xid, w.at}] = true
	}
	for _, l := range c.l.leases {
		if known[entry{l.seq, l.xid, l.at}] {
			after = max(after, l.commit)
		}
	}
	for _, w := range c.l.writes {
		if known[entry{w.seq, w.xid, w.at}] {
			after = max(after, w.commit)
		}
	}
	c.after, c.before = after, old
}

func (c *checker) knows(fence int64) bool {
	for _, l := range c.l.leases {
		if l.grant() && l.new == fence && l.commit <= c.after {
			return true
		}
	}
	return false
}

// checkLoss compares what two servers know, by the positions of the commits in the log of the one that is gone: the other
// has to know all before the point at which it took over, and nothing after it.
func (c *checker) checkLoss(r *run, primary, standby *pgtest.Server, name, began string, k kind) {
	r.Helper()
	var history string
	r.must(queryRow(r.ctx, standby.Config(name), "SELECT pg_read_file('pg_wal/' || substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8) || '.history')", &history))
	fields := strings.Fields(strings.TrimSpace(history[strings.LastIndex(strings.TrimSpace(history), "\n")+1:]))
	if len(fields) < 2 {
		r.Fatalf("the history of the new timeline is %q", history)
	}
	r.must(execOn(r.ctx, primary.Config(name), "SET synchronous_commit = local; CREATE EXTENSION IF NOT EXISTS pg_walinspect"))
	conn, err := pgx.ConnectConfig(r.ctx, primary.Config(name))
	r.must(err)
	defer func() { _ = conn.Close(r.ctx) }()
	rows, err := conn.Query(r.ctx, `SELECT w.xid::text::bigint, w.end_lsn <= $1::text::pg_lsn
		FROM pg_get_wal_records_info($2::text::pg_lsn, pg_current_wal_lsn()) w
		WHERE w.resource_manager = 'Transaction' AND w.record_type LIKE 'COMMIT%'`, fields[1], began)
	r.must(err)
	kept := map[int64]bool{}
	var xid int64
	var before bool
	_, err = pgx.ForEachRow(rows, []any{&xid, &before}, func() error { kept[xid] = before; return nil })
	r.must(err)
	known := map[int64]bool{}
	for _, w := range c.l.writes {
		known[w.xid] = known[w.xid] || w.commit <= c.after
	}
	for _, l := range c.l.leases {
		known[l.xid] = known[l.xid] || l.commit <= c.after
	}
	seen := map[int64]bool{}
	lost := 0
	look := func(xid, commit int64, what string) {
		if seen[xid] || commit > c.after {
			return
		}
		seen[xid] = true
		kept, logged := kept[xid]
		switch {
		case !logged:
			c.violated(lostAtTheEnd, "transaction %d (%s) is not in the log of the server that is gone", xid, what)
		case kept && !known[xid]:
			c.violated(lostAtTheEnd, "transaction %d (%s) was committed before the point of the failover, and is lost", xid, what)
		case !kept && known[xid]:
			c.violated(lostAtTheEnd, "transaction %d (%s) was committed after the point of the failover, and is known", xid, what)
		case !kept:
			lost++
		}
	}
	for _, w := range c.before.writes {
		look(w.xid, w.commit, w.by.describe())
	}
	for _, l := range c.before.leases {
		look(l.xid, l.commit, l.name)
	}
	if lost == 0 && k != synchronous {
		c.violated(lostAtTheEnd, "nothing was lost: the failover has tested nothing")
	}
}

func (o *op) describe() string {
	if o == nil {
		return "nobody's"
	}
	return o.ID
}

// troubleFor makes trouble for a while.
func (r *round) troubleFor(d time.Duration) {
	ctx, cancel := context.WithTimeout(r.t.ctx, d)
	defer cancel()
	r.trouble(ctx)
	<-ctx.Done()
}

func queryRow(ctx context.Context, cfg *pgx.ConnConfig, sql string, into any) error {
	conn, err := pgx.ConnectConfig(ctx, cfg)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }()
	return conn.QueryRow(ctx, sql).Scan(into)
}

// await waits until the server answers yes.
func (r *run) await(server *pgtest.Server, sql string, database ...string) {
	r.Helper()
	ctx, cancel := context.WithTimeout(r.ctx, time.Minute)
	defer cancel()
	for {
		yes := false
		err := queryRow(ctx, server.Config(strings.Join(database, "")), sql, &yes)
		if err == nil && yes {
			return
		}
		select {
		case <-time.After(20 * time.Millisecond): // there is nothing that would tell us
		case <-ctx.Done():
			r.Fatalf("not within a minute: %s (%v)", sql, err)
		}
	}
}

// killServer ends a server as the loss of its machine would: all of it at once.
func (r *run) killServer(server *pgtest.Server) {
	r.Helper()
	conn, err := pgx.ConnectConfig(r.ctx, server.Config(""))
	r.must(err)
	defer func() { _ = conn.Close(r.ctx) }()
	rows, err := conn.Query(r.ctx, "SELECT split_part(pg_read_file('postmaster.pid'), chr(10), 1)::int, 0 UNION SELECT pid, 1 FROM pg_stat_activity ORDER BY 2")
	r.must(err)
	var pids []int
	var pid, order int
	_, err = pgx.ForEachRow(rows, []any{&pid, &order}, func() error { pids = append(pids, pid); return nil })
	r.must(err)
	for _, pid := range pids { // the one first that would start others
		_ = syscall.Kill(pid, syscall.SIGKILL)
	}
	for _, pid := range pids {
		for began := time.Now(); isAlive(pid); time.Sleep(5 * time.Millisecond) { // they are not ours to wait for
			if time.Since(began) > time.Minute {
				r.Fatalf("process %d of the server outlives SIGKILL", pid)
			}
		}
	}
}

// isAlive says whether there is such a process, and it is not just waiting to be buried.
func isAlive(pid int) bool {
	if syscall.Kill(pid, 0) != nil {
		return false
	}
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return false
	}
	_, rest, _ := strings.Cut(string(stat), ") ")
	return !strings.HasPrefix(rest, "Z")
}
