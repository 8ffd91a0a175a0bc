//go:build linux

package bench

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/writegate/writegate/fencedb"
	"github.com/writegate/writegate/internal/pgtest"
	"github.com/writegate/writegate/leasedb"
)

const (
	rows      = 10_000
	workers   = 16
	rowsOfOne = rows / workers // a worker's
)

// writesSQL are tables that differ in nothing but their protection.
var writesSQL = func() string {
	var b strings.Builder
	b.WriteString("CREATE SCHEMA app;\n")
	for _, table := range []string{"bare", "once", "term", "live", "guarded", "proven"} {
		fmt.Fprintf(&b, "CREATE TABLE app.%s (id int PRIMARY KEY, v text NOT NULL, n int NOT NULL DEFAULT 0, last_fence bigint NOT NULL DEFAULT 0) WITH (fillfactor = 70);\n", table)
		fmt.Fprintf(&b, "INSERT INTO app.%s (id, v) SELECT i, 'as it was' FROM generate_series(0, %d) i;\n", table, rows-1)
	}
	b.WriteString(`
SELECT fence.protect('app.once');
SELECT fence.protect('app.term', rule => 'term');
SELECT fence.protect('app.live', strength => 'live');
SELECT fence.protect('app.guarded', guard => 'enforce', unfenced => 'refuse');
SELECT fence.protect('app.proven', strength => 'live', guard => 'enforce', unfenced => 'refuse');`)
	return b.String()
}()

// bed is a database to write to, with some connections to it.
type bed struct {
	*bench
	pool *pgxpool.Pool
	gate *fencedb.Gate
	cfg  *pgx.ConnConfig
}

var beds atomic.Int64

func (b *bench) bed(conns int, d durability) *bed {
	b.Helper()
	if beds.Load() == 0 {
		b.database("writes_0", writesSQL)
	}
	name := fmt.Sprintf("writes_%d", beds.Add(1))
	pgtest.Exec(b, b.server.Config(""), "CREATE DATABASE "+name+" TEMPLATE writes_0 STRATEGY file_copy")
	cfg := b.server.Config(name)
	pool := b.pool(cfg, conns, d)
	gate := fencedb.New(pool, fencedb.Config{Logger: quiet})
	b.Cleanup(gate.Close)
	return &bed{b, pool, gate, cfg}
}

func (b *bed) table(name string) *fencedb.Table {
	b.Helper()
	table, err := b.gate.Table(b.ctx, "app."+name)
	require.NoError(b, err)
	return table
}

// lease acquires one that is held to the end.
func (b *bed) lease(client *leasedb.Client, name string) *leasedb.Lease {
	b.Helper()
	lease, err := client.TryAcquire(b.ctx, name)
	require.NoError(b, err)
	return lease
}

func (b *bed) client() *leasedb.Client {
	b.Helper()
	return b.leaseClient(b.pool, leasedb.Config{TTL: 10 * time.Minute, PollOnly: true})
}

// rowOf gives each worker rows of its own, one after the other.
func rowOf(worker, i int) int {
	return worker*rowsOfOne + i%rowsOfOne
}

// bare is the write that a program would do without us.
func (b *bed) bare(row func(worker, i int) int) *side {
	return &side{name: "UPDATE … WHERE id = $1", do: func(ctx context.Context, worker, i int) error {
		_, err := b.pool.Exec(ctx, bareSQL, row(worker, i), "as it is now")
		return err
	}}
}

const bareSQL = "UPDATE app.bare SET v = $2 WHERE id = $1"

// through is the same through the gate.
func through(table *fencedb.Table, row func(worker, i int) int, lease func(worker, i int) fencedb.Lease) *side {
	return &side{name: "the gate, " + table.Name(), do: func(ctx context.Context, worker, i int) error {
		return applied(table.Update(ctx, lease(worker, i), fencedb.Key{"id": row(worker, i)}, fencedb.Set{"v": "as it is now"}))
	}}
}

// applied is an error for whatever else became of a write: one that changes nothing is quick.
func applied(outcome fencedb.Outcome, err error) error {
	if err == nil && outcome != fencedb.Applied {
		err = fmt.Errorf("the outcome is %v", outcome)
	}
	return err
}

// grants are leases with a fence that is higher for every write: a row takes one write of each under rule once.
func grants() func(worker, i int) fencedb.Lease {
	var fence atomic.Int64
	lease := fencedb.Callback("bench", "bench", func() (int64, error) { return fence.Add(2), nil })
	return func(int, int) fencedb.Lease { return lease }
}

func each(f func(conns int, d durability)) {
	for _, d := range durabilities {
		for _, conns := range []int{1, workers} {
			f(conns, d)
		}
	}
}

func (b *bench) fenced() {
	each(func(conns int, d durability) {
		b := b.bed(conns, d)
		plain, ours := b.bare(rowOf), through(b.table("once"), rowOf, grants())
		c := b.compare(conns, plain, ours)
		b.judge(fmt.Sprintf("Fenced, %s, %s", connections(conns), d.name), c, 0.97)
		last := &b.results[len(b.results)-1]
		last.Goal += ", p99 ≤ 1.1"
		last.Met = value(c.ratio() >= 0.97 && c.p99Ratio() <= 1.1)
		if conns == 1 && d == withoutFsync {
			plainly, our := b.allocations(plain, ours)
			require.Less(b, our/plainly, 1.4, "allocations, which are no matter of time")
			b.add(result{Work: "Fenced, allocations", Ratio: value(our / plainly), Goal: "≤ 1.30", Met: value(our/plainly <= 1.3),
				How: fmt.Sprintf("%.1f against %.1f a call, both with what the caller makes of its arguments", our, plainly)})
		}
	})
}

// live are writes of strength Live under rule once: a lease is good for one round of the worker's rows.
func (b *bed) live(table string, workers, leases int) *side {
	b.Helper()
	client, held := b.client(), make([][]fencedb.Lease, workers)
	var wait sync.WaitGroup
	for w := range workers {
		held[w] = make([]fencedb.Lease, leases)
		wait.Go(func() {
			for i := range leases {
				held[w][i] = b.lease(client, fmt.Sprintf("%s-%d-%d", table, w, i))
			}
		})
	}
	wait.Wait()
	// In the order of their fences, which a row takes in no other.
	for _, list := range held {
		slices.SortFunc(list, func(a, b fencedb.Lease) int { return cmp.Compare(a.Fence(), b.Fence()) })
	}
	return through(b.table(table), rowOf, func(worker, i int) fencedb.Lease {
		return held[worker][i/rowsOfOne] // out of range: more leases are needed for so many writes
	})
}

func (b *bench) live() {
	each(func(conns int, d durability) {
		b := b.bed(conns, d)
		goal := 0.0
		if conns == workers {
			goal = map[durability]float64{withFsync: 0.87, withoutFsync: 0.80}[d]
		}
		b.judge(fmt.Sprintf("Live, %s, %s", connections(conns), d.name), b.compare(conns, b.bare(rowOf), b.live("live", conns, sized(1600/conns, 2))), goal)
	})
}

// liveOneLease has everybody write under one and the same lease, whose row they share. Under rule once a row takes one write of
// it, so that it takes many rows.
func (b *bench) liveOneLease() {
	for _, d := range durabilities {
		b := b.bed(workers, d)
		many := sized(400_000, 48_000) // more than a worker gets through, were it the only one
		for _, table := range []string{"bare", "live"} {
			pgtest.Exec(b, b.cfg, fmt.Sprintf("INSERT INTO app.%s (id, v) SELECT i, 'as it was' FROM generate_series(%d, %d) i", table, rows, rows+many-1))
			pgtest.Exec(b, b.cfg, "VACUUM ANALYZE app."+table)
		}
		lease, table := b.lease(b.client(), "live"), b.table("live")
		rowOf := func(worker, i int) int { return rows + worker*(many/workers) + i%(many/workers) }
		plain := b.bare(rowOf)
		ours := through(table, rowOf, func(int, int) fencedb.Lease { return lease })
		before := b.multixacts()
		c := b.compare(workers, plain, ours)
		made := b.multixacts() - before
		b.judge(fmt.Sprintf("Live, one and the same lease, %s, %s", connections(workers), d.name), c,
			map[durability]float64{withFsync: 0.90, withoutFsync: 0.65}[d])
		b.results[len(b.results)-1].How += fmt.Sprintf("; %.0f multixacts in a million writes", float64(made)/float64(len(c.took))*1e6)
	}
}

func (b *bed) multixacts() (next int64) {
	b.Helper()
	require.NoError(b, b.pool.QueryRow(b.ctx, "SELECT mxid_age('1'::xid)::bigint").Scan(&next))
	return next
}

func (b *bench) guard() {
	each(func(conns int, d durability) {
		b := b.bed(conns, d)
		plain, ours := through(b.table("once"), rowOf, grants()), through(b.table("guarded"), rowOf, grants())
		goal := 0.0
		if conns == workers {
			goal = map[durability]float64{withFsync: 0.87, withoutFsync: 0.82}[d]
		}
		b.judge(fmt.Sprintf("guarded table, %s, %s", connections(conns), d.name), b.compare(conns, plain, ours), goal)
	})
	// Where the guard wants proof, it costs more; for comparison.
	proven := b.bed(workers, withoutFsync)
	b.judge(fmt.Sprintf("guarded table, strength live, %s, %s", connections(workers), withoutFsync.name),
		b.compare(workers, proven.live("live", workers, sized(100, 2)), proven.live("proven", workers, sized(100, 2))), 0)
}

func (b *bench) inTx() {
	const statements = 10
	each(func(conns int, d durability) {
		b := b.bed(conns, d)
		client := b.client()
		leases := make([]fencedb.Lease, conns)
		for i := range leases {
			leases[i] = b.lease(client, fmt.Sprintf("tx-%d", i))
		}
		work := func(ctx context.Context, tx pgx.Tx, worker, i int) error {
			for s := range statements {
				if _, err := tx.Exec(ctx, bareSQL, rowOf(worker, i*statements+s), "as it is now"); err != nil {
					return err
				}
			}
			return nil
		}
		plain := &side{name: "a transaction of 10 statements", do: func(ctx context.Context, worker, i int) error {
			return pgx.BeginFunc(ctx, b.pool, func(tx pgx.Tx) error { return work(ctx, tx, worker, i) })
		}}
		ours := &side{name: "InTx", do: func(ctx context.Context, worker, i int) error {
			return b.gate.InTx(ctx, leases[worker], func(ctx context.Context, tx pgx.Tx) error { return work(ctx, tx, worker, i) })
		}}
		b.judge(fmt.Sprintf("InTx of 10 statements, %s, %s", connections(conns), d.name), b.compare(conns, plain, ours), 0.85)
	})
}

func (b *bench) updateMany() {
	many := sized(rows, 100)
	for _, d := range durabilities {
		b := b.bed(1, d)
		b.slice *= 3
		ids, values := make([]int, many), make([]string, many)
		given := make([]fencedb.Row, many)
		for i := range ids {
			ids[i], values[i] = i, "as it is now"
			given[i] = fencedb.Row{Key: fencedb.Key{"id": i}, Set: fencedb.Set{"v": "as it is now"}}
		}
		plain := &side{name: "UPDATE … FROM unnest", do: func(ctx context.Context, _, _ int) error {
			_, err := b.pool.Exec(ctx, "UPDATE app.bare AS t SET v = u.v FROM unnest($1::int[], $2::text[]) AS u (id, v) WHERE t.id = u.id", ids, values)
			return err
		}}
		table, lease := b.table("once"), grants()
		ours := &side{name: "UpdateMany", do: func(ctx context.Context, _, _ int) error {
			_, err := table.UpdateMany(ctx, lease(0, 0), given)
			return err
		}}
		b.judge(fmt.Sprintf("UpdateMany of %d rows, %s", many, d.name), b.compare(1, plain, ours), 0.85)
	}
}

// zombie has somebody who has been superseded write as fast as it can, beside those who hold their leases.
func (b *bench) zombie() {
	for _, d := range durabilities {
		b := b.bed(workers+1, d)
		table, free := b.table("once"), rows-1
		_, err := table.Update(b.ctx, fencedb.Static("zombie", 1<<50, "the newer"), fencedb.Key{"id": free}, fencedb.Set{"v": "newer"})
		require.NoError(b, err)
		stale := fencedb.Static("zombie", 2, "zombie")
		of := grants()
		alone, besideZombie, besideWriter := through(table, rowOf, of), through(table, rowOf, of), through(table, rowOf, of)
		alone.name = "the same without a zombie"
		besideZombie.beside = func(ctx context.Context) {
			_, err := table.Update(ctx, stale, fencedb.Key{"id": free}, fencedb.Set{"v": "late"})
			require.ErrorIs(b, err, fencedb.ErrStale)
		}
		besideWriter.name = "the same beside one more bare UPDATE"
		besideWriter.beside = func(ctx context.Context) {
			_, err := b.pool.Exec(ctx, bareSQL, free, "as it is now")
			require.NoError(b, err)
		}
		b.judge(fmt.Sprintf("writers beside a zombie, %s", d.name), b.compare(workers-1, alone, besideZombie), 0.95)
		require.NoError(b, b.gate.Flush(b.ctx))
		var audited, refused int64
		require.NoError(b, b.pool.QueryRow(b.ctx, "SELECT count(*), coalesce(sum(count), 0) FROM fence.rejection").Scan(&audited, &refused))
		require.EqualValues(b, 1, audited, "rows of the audit")
		b.results[len(b.results)-1].How += fmt.Sprintf("; %d refusals in one row of the audit", refused)
		b.judge(fmt.Sprintf("writers beside a zombie, or one more writer, %s", d.name), b.compare(workers-1, besideWriter, besideZombie), 0)
	}
}
