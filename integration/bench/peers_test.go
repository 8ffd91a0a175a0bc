//go:build linux

package bench

import (
	"context"
	"database/sql"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"cirello.io/pglock"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/pressly/goose/v3/lock"
	"github.com/stretchr/testify/require"
)

// peer is another library with leases in a table of PostgreSQL.
type peer struct {
	name      string
	openEager func(b *bench, cfg *pgx.ConnConfig, conns int, eager bool) leases
}

// open makes it as it comes.
func (p peer) open(b *bench, cfg *pgx.ConnConfig, conns int) leases {
	b.Helper()
	return p.openEager(b, cfg, conns, false)
}

// leases is what a peer can do.
type leases interface {
	acquire(ctx context.Context, name string) (release func(context.Context) error, err error)
}

// heartbeat is goose's and pglock's own interval: the one by default, for the other as it says for its lease of 20 s.
const heartbeat = 5 * time.Second

// They come with the module proxy; other libraries that it has keep locks for as long as a session lasts, which is no lease.
var peers = []peer{
	{"goose's table locker", openGoose},
	{"pglock", openPglock},
}

func (b *bench) sqlDB(cfg *pgx.ConnConfig, conns int) *sql.DB {
	b.Helper()
	cfg = cfg.Copy()
	cfg.Tracer = &sent
	db := stdlib.OpenDB(*cfg)
	db.SetMaxOpenConns(conns)
	db.SetMaxIdleConns(conns)
	b.Cleanup(func() { require.NoError(b, db.Close()) })
	return db
}

// sent counts statements.
var sent counter

type counter struct{ atomic.Int64 }

func (c *counter) TraceQueryStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	c.Add(1)
	return ctx
}

func (*counter) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

type gooseLeases struct {
	db    *sql.DB
	eager bool
	mu    sync.Mutex
	ids   map[string]int64
}

func openGoose(b *bench, cfg *pgx.ConnConfig, conns int, eager bool) leases {
	b.Helper()
	return &gooseLeases{db: b.sqlDB(cfg, conns), eager: eager, ids: map[string]int64{}}
}

func (g *gooseLeases) locker(name string) (lock.Locker, error) {
	g.mu.Lock()
	id, ok := g.ids[name]
	if !ok {
		id = int64(len(g.ids) + 1)
		g.ids[name] = id
	}
	g.mu.Unlock()
	options := []lock.TableLockerOption{lock.WithTableLockID(id), lock.WithTableHeartbeatInterval(heartbeat), lock.WithTableLogger(quiet)}
	if g.eager {
		options = append(options, lock.WithTableLockTimeout(time.Millisecond, 60_000))
	}
	return lock.NewPostgresTableLocker(options...)
}

func (g *gooseLeases) acquire(ctx context.Context, name string) (func(context.Context) error, error) {
	l, err := g.locker(name)
	if err != nil {
		return nil, err
	}
	if err := l.Lock(ctx, g.db); err != nil {
		return nil, err
	}
	return func(ctx context.Context) error { return l.Unlock(ctx, g.db) }, nil
}

type pglockLeases struct{ client *pglock.Client }

func openPglock(b *bench, cfg *pgx.ConnConfig, conns int, eager bool) leases {
	b.Helper()
	options := []pglock.ClientOption{pglock.WithLogger(silent{})}
	if eager { // it waits for as long as a heartbeat between two looks
		options = append(options, pglock.WithLeaseDuration(20*time.Millisecond), pglock.WithHeartbeatFrequency(10*time.Millisecond))
	}
	client, err := pglock.UnsafeNew(b.sqlDB(cfg, conns), options...)
	require.NoError(b, err)
	require.NoError(b, client.TryCreateTable())
	return &pglockLeases{client}
}

type silent struct{}

func (silent) Println(...any) {}

func (p *pglockLeases) acquire(ctx context.Context, name string) (func(context.Context) error, error) {
	l, err := p.client.AcquireContext(ctx, name)
	if err != nil {
		return nil, err
	}
	return func(ctx context.Context) error { return p.client.ReleaseContext(ctx, l) }, nil
}

// keepOthers holds n leases for one of their heartbeats, of which there are twelve in a minute, and returns what a whole minute of
// that costs the server.
func keepOthers(b *bench, cfg *pgx.ConnConfig, l leases, n int) (time.Duration, int) {
	b.Helper()
	var mu sync.Mutex
	var releases []func(context.Context) error
	share(n, func(i int) {
		release, err := l.acquire(b.ctx, fmt.Sprintf("kept-%d", i))
		if err != nil {
			b.Error(err)
			return
		}
		mu.Lock()
		releases = append(releases, release)
		mu.Unlock()
	})
	before, count := b.backends(cfg), sent.Load()
	span := time.Duration(sized(int(heartbeat), int(10*time.Millisecond)))
	time.Sleep(span) // it is a span of time that is measured
	spent, statements := spentBetween(before, b.backends(cfg)), sent.Load()-count
	share(len(releases), func(i int) { _ = releases[i](b.ctx) })
	times := time.Minute / heartbeat
	return spent * times, int(statements) * int(times)
}

// peerHandOvers has two hand a lease to each other, so many times, each under a name of its own.
func (b *bench) peerHandOvers(l leases, n int) []time.Duration {
	b.Helper()
	took := make([]time.Duration, n)
	var wait sync.WaitGroup
	for i := range n {
		name := fmt.Sprintf("hand-%d", i)
		release, err := l.acquire(b.ctx, name)
		require.NoError(b, err)
		asked := make(chan struct{})
		var released time.Time
		done := make(chan time.Time, 1)
		go func() {
			close(asked)
			next, err := l.acquire(b.ctx, name)
			done <- time.Now()
			if err != nil {
				b.Error(err)
				return
			}
			_ = next(b.ctx)
		}()
		wait.Go(func() {
			<-asked
			time.Sleep(50 * time.Millisecond) // until it waits; what is measured begins below
			released = time.Now()
			if err := release(b.ctx); err != nil {
				b.Error(err)
			}
			took[i] = (<-done).Sub(released)
		})
	}
	wait.Wait()
	return sorted(took)
}
