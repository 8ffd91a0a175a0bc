package integration

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/writegate/writegate/fencedb"
	"github.com/writegate/writegate/internal/pgtest"
	"github.com/writegate/writegate/leasedb"
)

// linkedClient returns a client whose connections pass the link; its events are sent on the channel.
func linkedClient(b *bed, l *link, cfg leasedb.Config) (*leasedb.Client, <-chan leasedb.Event) {
	b.t.Helper()
	events := make(chan leasedb.Event, 10000)
	cfg.Observe = func(e leasedb.Event) { events <- e }
	client, err := leasedb.New(context.Background(), l.pool(), cfg)
	require.NoError(b.t, err)
	b.t.Cleanup(func() {
		l.mend()
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		_ = client.Close(ctx)
	})
	return client, events
}

// awaitRenewal returns the next renewal event that fits.
func awaitRenewal(t *testing.T, events <-chan leasedb.Event, fits func(leasedb.RenewEvent) bool) leasedb.RenewEvent {
	t.Helper()
	timeout := time.After(30 * time.Second)
	for {
		select {
		case e := <-events:
			if r, ok := e.(leasedb.RenewEvent); ok && fits(r) {
				return r
			}
		case <-timeout:
			t.Fatal("no such renewal")
		}
	}
}

func failed(r leasedb.RenewEvent) bool    { return r.Err != nil }
func confirmed(r leasedb.RenewEvent) bool { return r.Renewed > 0 }

// Trouble of any kind on the way to the database is survived if it ends before the deadline, and is not taken for
// "not yours any more". (C11 c, d; C28 b)
func TestRenewalSurvivesTrouble(t *testing.T) {
	for name, trouble := range map[string]func(*bed, *link){
		"connection refused": func(_ *bed, l *link) { l.refuse() },
		"connection reset":   func(_ *bed, l *link) { l.reset() },
		"half-open":          func(_ *bed, l *link) { l.halfOpen() },
		"lost replies":       func(_ *bed, l *link) { l.loseReplies() },
		"57P01: sessions ended by the administrator": func(b *bed, l *link) {
			l.refuse() // so that it lasts
			b.exec(`SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()`)
		},
		"57014: the statement is cancelled": func(b *bed, _ *link) {
			b.exec(`CREATE OR REPLACE FUNCTION fence.renew(names text[], tokens uuid[]) RETURNS TABLE (name text, outcome text, expires_at timestamptz)
				LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'canceling statement' USING ERRCODE = '57014'; END $$`)
		},
		"25006: read-only": func(b *bed, _ *link) {
			b.exec(`CREATE OR REPLACE FUNCTION fence.renew(names text[], tokens uuid[]) RETURNS TABLE (name text, outcome text, expires_at timestamptz)
				LANGUAGE plpgsql AS $$ BEGIN PERFORM set_config('transaction_read_only', 'on', true); UPDATE fence.lease SET holder = 'x'; END $$`)
		},
		"53300: too many connections": func(b *bed, l *link) {
			b.exec(`ALTER DATABASE ` + b.cfg.Database + ` CONNECTION LIMIT 0; CREATE OR REPLACE FUNCTION fence.renew(names text[], tokens uuid[]) RETURNS TABLE (name text, outcome text, expires_at timestamptz)
				LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'too many' USING ERRCODE = '53300'; END $$`)
			l.reset()
		},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBed(t)
			b.exec(`CREATE SCHEMA kept; CREATE TABLE kept.renew AS SELECT pg_get_functiondef('fence.renew'::regproc) AS source`)
			l := newLink(b, pgtest.Shared(t))
			client, events := linkedClient(b, l, leasedb.Config{TTL: 20 * time.Second, RenewEvery: 100 * time.Millisecond})
			lease := b.acquire(client, "x")
			awaitRenewal(t, events, confirmed)
			trouble(b, l)
			for range 2 { // the first may have been on its way
				r := awaitRenewal(t, events, failed)
				require.Zero(t, r.Lost)
			}
			require.NoError(t, lease.Check(0), "that says nothing about whose the lease is")
			l.mend()
			b.exec(`ALTER DATABASE ` + b.cfg.Database + ` CONNECTION LIMIT -1;
				DO $$ BEGIN EXECUTE (SELECT source FROM kept.renew); END $$`)
			awaitRenewal(t, events, confirmed)
			require.NoError(t, lease.Check(0))
			require.NoError(t, lease.Release(context.Background()))
		})
	}
}

// If the trouble outlasts the deadline the lease is lost by then, whatever the link does, and released where it can be.
func TestTroubleUntilTheDeadlineIsALoss(t *testing.T) {
	for name, trouble := range map[string]func(*link){
		"connection refused": (*link).refuse, "half-open": (*link).halfOpen, "lost replies": (*link).loseReplies,
	} {
		t.Run(name, func(t *testing.T) {
			ctx := context.Background()
			b := newBed(t)
			l := newLink(b, pgtest.Shared(t))
			var told atomic.Int32
			client, _ := linkedClient(b, l, leasedb.Config{TTL: 2 * time.Second, OnLost: func(*leasedb.Lease, error) { told.Add(1) }})
			lease := b.acquire(client, "x")
			trouble(l)
			<-lease.Context().Done()
			require.ErrorIs(t, context.Cause(lease.Context()), leasedb.ErrNotRenewed)
			require.Equal(t, leasedb.Lost, lease.State())
			l.mend()
			require.ErrorIs(t, lease.Renew(ctx), leasedb.ErrLost, "for good")
			require.ErrorIs(t, lease.Release(ctx), leasedb.ErrLost)
			require.False(t, query[bool](b, `SELECT released_at IS NULL AND expires_at > clock_timestamp() FROM fence.lease WHERE name = 'x'`))
			require.NoError(t, client.Close(ctx))
			require.EqualValues(t, 1, told.Load())
			next := b.acquire(b.client(leasedb.Config{}), "x")
			require.Greater(t, next.Fence(), lease.Fence())
		})
	}
}

// warmUp has the client's one connection prepare its statements, so that what a test loses is the reply to one of them.
func warmUp(b *bed, client *leasedb.Client) {
	b.t.Helper()
	require.NoError(b.t, b.acquire(client, "warm-up").Release(context.Background()))
}

// The reply to an acquire is lost: the same grant is read back, or, if it comes too late, given back. (C05)
func TestLostReplyToAnAcquire(t *testing.T) {
	ctx := context.Background()

	t.Run("read back", func(t *testing.T) {
		b := newBed(t)
		l := newLink(b, pgtest.Shared(t))
		client, _ := linkedClient(b, l, leasedb.Config{TTL: time.Minute, Conns: 1})
		warmUp(b, client)
		l.loseReplies()
		acquired := make(chan *leasedb.Lease, 1)
		go func() {
			lease, err := client.TryAcquire(ctx, "x")
			if err != nil {
				t.Error(err)
			}
			acquired <- lease
		}()
		require.Eventually(t, func() bool { return query[int](b, `SELECT count(*) FROM fence.term WHERE name = 'x'`) == 1 }, 30*time.Second, 5*time.Millisecond)
		l.refuse() // ends the connection that waits for its answer
		l.mend()
		lease := <-acquired
		require.NotNil(t, lease)
		require.Equal(t, 1, query[int](b, `SELECT count(*) FROM fence.term WHERE name = 'x'`), "one grant")
		require.Equal(t, lease.Fence(), query[int64](b, `SELECT fence FROM fence.lease WHERE name = 'x'`))
		require.NoError(t, lease.Renew(ctx))
	})

	t.Run("too late", func(t *testing.T) {
		b := newBed(t)
		l := newLink(b, pgtest.Shared(t))
		client, _ := linkedClient(b, l, leasedb.Config{TTL: time.Second, Conns: 1})
		warmUp(b, client)
		l.loseReplies()
		_, err := client.TryAcquire(ctx, "x")
		require.ErrorIs(t, err, leasedb.ErrUnknown)
		l.mend()
		require.NoError(t, client.Close(ctx))
		require.Equal(t, 0, query[int](b, `SELECT count(*) FROM fence.lease WHERE released_at IS NULL AND expires_at > clock_timestamp()`))
	})
}

// The reply to a release is lost: it is sent again, and has the same answer although another has the lease by then.
func TestLostReplyToARelease(t *testing.T) {
	ctx := context.Background()
	b := newBed(t)
	l := newLink(b, pgtest.Shared(t))
	client, _ := linkedClient(b, l, leasedb.Config{TTL: time.Minute, ManualRenewal: true, Conns: 1})
	warmUp(b, client)
	lease := b.acquire(client, "x")
	l.loseReplies()
	released := make(chan error, 1)
	go func() { released <- lease.Release(ctx) }()
	require.Eventually(t, func() bool { return query[bool](b, `SELECT released_at IS NOT NULL FROM fence.lease WHERE name = 'x'`) }, 30*time.Second, 5*time.Millisecond)
	next := b.acquire(b.client(leasedb.Config{}), "x")
	l.refuse()
	l.mend()
	require.NoError(t, <-released)
	require.NoError(t, next.Renew(ctx))
}

// The reply to a write is lost. Outcome unknown is said so, and the same write sent again is told that it was applied.
// (C03)
func TestLostReplyToAWrite(t *testing.T) {
	ctx := context.Background()
	b := newBed(t)
	l := newLink(b, pgtest.Shared(t))
	gate := fencedb.New(l.pool(func(c *pgxpool.Config) { c.MaxConns = 1 }), fencedb.Config{})
	t.Cleanup(gate.Close)
	table, err := gate.Table(ctx, "app.orders")
	require.NoError(t, err)
	lease := b.acquire(b.client(leasedb.Config{}), "x")
	// Prepared already, so that it is the write itself whose reply is lost.
	_, err = table.Update(ctx, lease, fencedb.Key{"id": 3}, fencedb.Set{"v": "w1"})
	require.NoError(t, err)
	l.loseReplies()
	wrote := make(chan error, 1)
	go func() {
		outcome, err := table.Update(ctx, lease, order1, fencedb.Set{"v": "w1"})
		if outcome != fencedb.Unknown {
			err = fmt.Errorf("outcome %v: %w", outcome, err)
		}
		wrote <- err
	}()
	require.Eventually(t, func() bool { return query[string](b, `SELECT v FROM app.orders WHERE id = 1`) == "w1" }, 30*time.Second, 5*time.Millisecond)
	l.refuse()
	err = <-wrote
	require.ErrorIs(t, err, fencedb.ErrUnknown)
	for _, other := range []error{fencedb.ErrStale, fencedb.ErrLeaseLost, fencedb.ErrMissing} {
		require.NotErrorIs(t, err, other)
	}
	l.mend()
	outcome, err := table.Update(ctx, lease, order1, fencedb.Set{"v": "w1"})
	require.NoError(t, err)
	require.Equal(t, fencedb.AlreadyApplied, outcome)
	require.Equal(t, 0, query[int](b, `SELECT count(*) FROM fence.rejection`))
}

// A program that uses up its own pool, and every connection for acquiring, does not cost itself its leases. (C11 a)
func TestRenewalIsNotStarvedByWork(t *testing.T) {
	ctx := context.Background()
	b := newBed(t)
	pool := pgtest.Pool(t, b.cfg, func(c *pgxpool.Config) { c.MaxConns = 2 })
	events := make(chan leasedb.Event, 10000)
	client, err := leasedb.New(ctx, pool, leasedb.Config{
		TTL: time.Minute, RenewEvery: 20 * time.Millisecond, LockWait: 30 * time.Second, Conns: 2,
		Observe: func(e leasedb.Event) { events <- e },
	})
	require.NoError(t, err)
	lease := b.acquire(client, "x")
	for range 2 {
		conn, err := pool.Acquire(ctx)
		require.NoError(t, err)
		defer conn.Release()
	}
	// Two acquires that wait for a row's lock, on the two connections there are for that.
	c := b.session()
	_, err = c.Exec(ctx, `BEGIN; INSERT INTO fence.lease (name) VALUES ('y')`)
	require.NoError(t, err)
	stuck := make(chan error, 2)
	for range 2 {
		go func() {
			_, err := client.TryAcquire(ctx, "y")
			stuck <- err
		}()
	}
	require.Eventually(t, func() bool {
		return query[int](b, `SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'`) == 2
	}, 30*time.Second, 5*time.Millisecond)
	for len(events) > 0 {
		<-events
	}
	for range 3 {
		awaitRenewal(t, events, confirmed)
	}
	require.NoError(t, lease.Check(0))
	_, err = c.Exec(ctx, `ROLLBACK`)
	require.NoError(t, err)
	first, second := <-stuck, <-stuck
	require.True(t, (first == nil) != (second == nil), "one of them was granted it: %v, %v", first, second)
	require.NoError(t, client.Close(ctx))
}

// A server that is restarted under a holder, a waiter and a writer. (C28)
func TestServerRestart(t *testing.T) {
	ctx := context.Background()
	b, server := own(t)
	holder := b.client(leasedb.Config{Holder: "A", TTL: 5 * time.Minute, RenewEvery: 50 * time.Millisecond})
	waiter := b.client(leasedb.Config{Holder: "B", TTL: 5 * time.Minute, PollEvery: 20 * time.Millisecond})
	table := b.table()
	lease := b.acquire(holder, "x")
	waited := make(chan *leasedb.Lease, 1)
	go func() {
		l, err := waiter.Acquire(ctx, "x")
		if err != nil {
			t.Error(err)
		}
		waited <- l
	}()
	require.Eventually(t, func() bool { return query[bool](b, `SELECT wanted_by IS NOT NULL FROM fence.lease`) }, 30*time.Second, 5*time.Millisecond)
	for _, mode := range []string{"fast", "immediate"} {
		server.Restart(t, mode)
		outcome, err := table.Update(ctx, lease, fencedb.Key{"id": map[string]int{"fast": 1, "immediate": 2}[mode]}, fencedb.Set{"v": mode})
		require.NoError(t, err, "the pool's connections are dead, and nothing was sent on them")
		require.Equal(t, fencedb.Applied, outcome)
		before := query[int64](b, `SELECT renewals FROM fence.lease`)
		require.Eventually(t, func() bool { return query[int64](b, `SELECT renewals FROM fence.lease`) > before }, 30*time.Second, 5*time.Millisecond)
	}
	require.NoError(t, lease.Release(ctx))
	next := <-waited
	require.NotNil(t, next)
	require.Greater(t, next.Fence(), lease.Fence())
}
