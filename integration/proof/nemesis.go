//go:build unix

package main

import (
	"cmp"
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
)

// fault is a kind of trouble. It ends what it has begun before it returns.
type fault func(r *round, ctx context.Context, p *process, rng *rand.Rand) error

var faults = map[string]fault{
	"pause": func(r *round, ctx context.Context, p *process, rng *rand.Rand) error { // SIGSTOP beyond the TTL
		p.signal(syscall.SIGSTOP)
		r.wait(ctx, between(rng, r.ttl, 3*r.ttl))
		p.signal(syscall.SIGCONT)
		return nil
	},
	"kill": func(_ *round, _ context.Context, p *process, _ *rand.Rand) error { return p.kill() }, // kill -9
	"reset": func(r *round, ctx context.Context, p *process, rng *rand.Rand) error { // RST instead of whatever is sent
		return r.disturb(ctx, p, between(rng, 0, r.ttl/2), toxic{"reset_peer", "upstream", `"timeout":0`})
	},
	"half-open": func(r *round, ctx context.Context, p *process, rng *rand.Rand) error { // nothing gets through, nothing is closed
		return r.disturb(ctx, p, between(rng, r.ttl/2, 2*r.ttl), toxic{"timeout", "upstream", `"timeout":0`}, toxic{"timeout", "downstream", `"timeout":0`})
	},
	"lost replies": func(r *round, ctx context.Context, p *process, rng *rand.Rand) error { // of whatever is sent, COMMIT among it
		return r.disturb(ctx, p, between(rng, 10*time.Millisecond, r.ttl/2), toxic{"timeout", "downstream", `"timeout":0`})
	},
	"latency": func(r *round, ctx context.Context, p *process, rng *rand.Rand) error {
		late := fmt.Sprintf(`"latency":%d,"jitter":%d`, 5+rng.IntN(60), rng.IntN(30))
		return r.disturb(ctx, p, between(rng, r.ttl, 3*r.ttl), toxic{"latency", "downstream", late}, toxic{"latency", "upstream", late})
	},
	"clock": func(r *round, ctx context.Context, p *process, rng *rand.Rand) error { // of a worker: slow, fast, or set
		switch rng.IntN(3) {
		case 0:
			p.say(sayClock, "0.1", "0s")
		case 1:
			p.say(sayClock, "1", "-5m")
		default:
			p.say(sayClock, "3", "0s")
		}
		r.wait(ctx, between(rng, r.ttl, 3*r.ttl))
		p.say(sayClock, "1", "0s")
		return nil
	},
	"crash": func(r *round, _ context.Context, _ *process, _ *rand.Rand) error { // of the server
		r.server.Restart(r.t, "immediate")
		return nil
	},
	"terminate": func(r *round, ctx context.Context, p *process, _ *rand.Rand) error { // backends
		return r.command(ctx, `SELECT count(*) FROM (
			SELECT pg_terminate_backend(a.pid) FROM pg_stat_activity a
			 WHERE a.datname = current_database() AND a.application_name LIKE $1 ORDER BY random() LIMIT 3) x`, p.Worker+".%")
	},
	"lease lock": func(r *round, ctx context.Context, _ *process, rng *rand.Rand) error {
		name := nameOf(rng.IntN(cmp.Or(r.profile.Names, names)))
		return r.lock(ctx, "SELECT name FROM fence.lease WHERE name = $1 FOR UPDATE", name, name, between(rng, r.ttl/2, 2*r.ttl))
	},
	"row lock": func(r *round, ctx context.Context, _ *process, rng *rand.Rand) error {
		table := tables[rng.IntN(len(tables))]
		return r.lock(ctx, "SELECT id FROM "+table+" WHERE id = $1 FOR UPDATE", rng.IntN(cmp.Or(r.profile.Names, names)*rowsOfOne), "", between(rng, r.ttl/2, 2*r.ttl))
	},
	"pooler": func(r *round, _ context.Context, _ *process, _ *rand.Rand) error {
		if r.pooler == nil {
			return nil
		}
		return r.pooler.Restart()
	},
}

type toxic struct{ kind, stream, attributes string }

// between returns a time by chance.
func between(rng *rand.Rand, from, to time.Duration) time.Duration {
	return from + time.Duration(rng.Int64N(int64(max(to-from, 1))))
}

// wait returns after d, or when the round is over.
func (r *round) wait(ctx context.Context, d time.Duration) {
	select {
	case <-time.After(d):
	case <-ctx.Done():
	}
}

func (r *round) disturb(ctx context.Context, p *process, d time.Duration, toxics ...toxic) error {
	p.link.mu.Lock()
	defer p.link.mu.Unlock()
	for _, x := range toxics {
		if err := p.link.toxic(x.kind, x.stream, x.attributes); err != nil {
			return err
		}
	}
	r.wait(ctx, d)
	p.link.mend()
	return p.link.cut()
}

func (r *round) command(ctx context.Context, sql string, args ...any) error {
	conn, err := pgx.ConnectConfig(ctx, r.server.Config(r.name))
	if err != nil {
		return nil // the server is down just now, which is trouble enough
	}
	defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }()
	_, _ = conn.Exec(ctx, sql, args...)
	return nil
}

// lock holds a row's lock for a while, and keeps in mind when, if it is a lease's.
func (r *round) lock(ctx context.Context, sql string, arg any, name string, d time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, d+patience)
	defer cancel()
	conn, err := pgx.ConnectConfig(ctx, r.server.Config(r.name))
	if err != nil {
		return nil
	}
	defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }()
	tx, err := conn.Begin(ctx)
	if err != nil {
		return nil
	}
	tag, err := tx.Exec(ctx, sql, arg)
	if err != nil || tag.RowsAffected() == 0 {
		return nil
	}
	from := time.Now().UnixNano()
	r.wait(ctx, d)
	// Not if it was lost meanwhile, by a crash: then nobody knows until when it was held.
	if _, err := tx.Exec(ctx, "SELECT"); err != nil {
		return nil
	}
	until := time.Now().UnixNano()
	if err := tx.Rollback(ctx); err == nil && name != "" {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.locks = append(r.locks, locked{name, from, until})
	}
	return nil
}

// trouble makes trouble until the round is over. A fault that is slow does not keep others waiting; one that takes the
// whole server down is alone of its kind.
func (r *round) trouble(ctx context.Context) {
	r.t.Helper()
	if len(r.profile.Faults) == 0 {
		return
	}
	var wg sync.WaitGroup
	defer wg.Wait()
	busy := make(chan struct{}, 6)
	var down sync.Mutex
	for {
		r.wait(ctx, between(r.rng, 0, 2*r.profile.Pace))
		if ctx.Err() != nil {
			return
		}
		name := pick(r.rng, r.profile.Faults)
		p := r.workers[r.rng.IntN(len(r.workers))]
		rng := rand.New(rand.NewPCG(r.rng.Uint64(), 1))
		r.faults++
		r.kinds[name]++
		select {
		case busy <- struct{}{}:
		case <-ctx.Done():
			return
		}
		wg.Go(func() {
			defer func() { <-busy }()
			if name == "crash" || name == "pooler" {
				down.Lock()
				defer down.Unlock()
			}
			if err := try(func() error { return faults[name](r, ctx, p, rng) }); err != nil && r.t.ctx.Err() == nil {
				r.mu.Lock()
				defer r.mu.Unlock()
				r.problems = append(r.problems, fmt.Sprintf("fault %q: %v", name, err))
			}
		})
	}
}

// try turns what would end a run into an error.
func try(what func() error) (err error) {
	defer func() {
		err = caught(recover(), err)
	}()
	return what()
}
