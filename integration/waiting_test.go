package integration

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/writegate/writegate/internal/pgtest"
	"github.com/writegate/writegate/leasedb"
)

// waiterFor starts an Acquire and returns once the database knows that somebody waits.
func waiterFor(b *bed, client *leasedb.Client, name string) <-chan *leasedb.Lease {
	b.t.Helper()
	got := make(chan *leasedb.Lease, 1)
	go func() {
		lease, err := client.Acquire(context.Background(), name)
		if err != nil {
			b.t.Error(err)
		}
		got <- lease
	}()
	require.Eventually(b.t, func() bool {
		return query[bool](b, `SELECT wanted_by IS NOT NULL FROM fence.lease WHERE name = $1`, name)
	}, 30*time.Second, 2*time.Millisecond)
	return got
}

func awaitListener(b *bed) {
	b.t.Helper()
	require.Eventually(b.t, func() bool {
		return query[int](b, `SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND query = 'LISTEN fence_release'`) == 1
	}, 30*time.Second, 2*time.Millisecond)
}

// A release wakes the one that waits, long before its next look.
func TestReleaseWakesTheWaiter(t *testing.T) {
	ctx := context.Background()
	b := newBed(t)
	holder := b.client(leasedb.Config{Holder: "A", TTL: 24 * time.Hour})
	waiter := b.client(leasedb.Config{Holder: "B", TTL: 24 * time.Hour, PollEvery: 24 * time.Hour})
	for range 20 {
		lease := b.acquire(holder, "x")
		got := waiterFor(b, waiter, "x")
		awaitListener(b)
		require.NoError(t, lease.Release(ctx))
		next := <-got
		require.NotNil(t, next)
		require.Greater(t, next.Fence(), lease.Fence())
		require.NoError(t, next.Release(ctx))
	}
}

// A waiter whose listener is cut off, or never hears anything, gets the lease all the same. (C38 a, b, c)
func TestWaitingNeedsNoNotification(t *testing.T) {
	for name, cut := range map[string]func(*bed, *link){
		"listener's session ended": func(b *bed, _ *link) {
			b.exec(`SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND query = 'LISTEN fence_release'`)
		},
		"lost replies, then refused": func(_ *bed, l *link) { l.loseReplies(); l.refuse(); l.mend() },
	} {
		t.Run(name, func(t *testing.T) {
			ctx := context.Background()
			b := newBed(t)
			l := newLink(b, pgtest.Shared(t))
			holder := b.client(leasedb.Config{Holder: "A", TTL: 24 * time.Hour})
			waiter, _ := linkedClient(b, l, leasedb.Config{Holder: "B", TTL: 24 * time.Hour, PollEvery: 50 * time.Millisecond})
			lease := b.acquire(holder, "x")
			got := waiterFor(b, waiter, "x")
			awaitListener(b)
			cut(b, l)
			require.NoError(t, lease.Release(ctx))
			require.NotNil(t, <-got)
		})
	}

	t.Run("a listener that comes back looks again", func(t *testing.T) {
		ctx := context.Background()
		b := newBed(t)
		holder := b.client(leasedb.Config{Holder: "A", TTL: 24 * time.Hour})
		waiter := b.client(leasedb.Config{Holder: "B", TTL: 24 * time.Hour, PollEvery: 24 * time.Hour})
		lease := b.acquire(holder, "x")
		got := waiterFor(b, waiter, "x")
		awaitListener(b)
		// In one statement, so that nobody listens when it is released.
		b.exec(`CREATE TABLE app.ended AS SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity
			WHERE datname = current_database() AND query = 'LISTEN fence_release'`)
		require.NoError(t, lease.Release(ctx))
		require.NotNil(t, <-got)
	})

	t.Run("without a listener", func(t *testing.T) {
		ctx := context.Background()
		b := newBed(t)
		lease := b.acquire(b.client(leasedb.Config{Holder: "A", TTL: 24 * time.Hour}), "x")
		waiter := b.client(leasedb.Config{Holder: "B", TTL: 24 * time.Hour, PollEvery: 20 * time.Millisecond, PollOnly: true})
		got := make(chan *leasedb.Lease, 1)
		go func() {
			l, err := waiter.Acquire(ctx, "x")
			if err != nil {
				t.Error(err)
			}
			got <- l
		}()
		require.NoError(t, lease.Release(ctx))
		require.NotNil(t, <-got)
		require.Equal(t, 0, query[int](b, `SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND query = 'LISTEN fence_release'`))
		require.True(t, query[bool](b, `SELECT wanted_by IS NULL FROM fence.lease`), "nobody need notify it")
	})
}

// Only a release that somebody waits for notifies: the others would pay for it in their commits. (F15b)
func TestOnlyAWantedReleaseNotifies(t *testing.T) {
	ctx := context.Background()
	b := newBed(t)
	session := b.session()
	_, err := session.Exec(ctx, `LISTEN fence_release`)
	require.NoError(t, err)
	client := b.client(leasedb.Config{Holder: "A"})
	for range 10 {
		require.NoError(t, b.acquire(client, "x").Release(ctx))
	}
	lease := b.acquire(client, `odd "name"`)
	got := waiterFor(b, b.client(leasedb.Config{Holder: "B", PollEvery: time.Hour, TTL: 24 * time.Hour}), `odd "name"`)
	require.NoError(t, lease.Release(ctx))
	require.NotNil(t, <-got)
	note, err := session.WaitForNotification(ctx)
	require.NoError(t, err)
	require.Contains(t, note.Payload, `"name" : "odd \"name\""`, "the first one is this")
}

// A crashed holder's lease is taken over when it expires, and the time until then is spent asleep.
func TestTakeOverAfterACrash(t *testing.T) {
	b := newBed(t)
	crashed, err := leasedb.New(context.Background(), b.pool, leasedb.Config{Holder: "A", TTL: 2 * time.Second})
	require.NoError(t, err)
	b.acquire(crashed, "x")
	require.NoError(t, crashed.Abandon())
	events := make(chan leasedb.Event, 100)
	waiter := b.client(leasedb.Config{Holder: "B", PollEvery: time.Hour, Observe: func(e leasedb.Event) { events <- e }})
	_, err = waiter.Acquire(context.Background(), "x")
	require.NoError(t, err)
	e := (<-events).(leasedb.AcquireEvent)
	require.LessOrEqual(t, e.Attempts, 4)
	require.Equal(t, "expired", query[string](b, `SELECT end_reason FROM fence.term WHERE fence = 2`))
}

// Five hundred waiters on one name, in fifty clients: each gets it once, and a hand-over costs a few attempts.
func TestManyWaiters(t *testing.T) {
	const clients, each = 50, 10
	ctx := context.Background()
	b := newBed(t)
	var attempts, grants atomic.Int64
	observe := func(e leasedb.Event) {
		if a, ok := e.(leasedb.AcquireEvent); ok {
			attempts.Add(int64(a.Attempts))
			grants.Add(1)
		}
	}
	holder := b.client(leasedb.Config{Holder: "A", TTL: time.Hour})
	lease := b.acquire(holder, "x")
	var wait sync.WaitGroup
	var mu sync.Mutex
	var fences []int64 // in the order of the work done under them
	for i := range clients {
		// One connection for acquiring, and what renews and listens: a server has only so many.
		client := b.client(leasedb.Config{
			Holder: fmt.Sprintf("w-%d", i), TTL: time.Hour, Conns: 1, LockWait: time.Minute, Observe: observe, ManualRenewal: true,
		})
		for range each {
			wait.Go(func() {
				err := client.Do(ctx, "x", func(_ context.Context, l *leasedb.Lease) error {
					mu.Lock()
					defer mu.Unlock()
					fences = append(fences, l.Fence())
					return nil
				})
				if err != nil {
					t.Error(err)
				}
			})
		}
	}
	require.Eventually(t, func() bool { return query[bool](b, `SELECT wanted_by IS NOT NULL FROM fence.lease`) }, 30*time.Second, 2*time.Millisecond)
	require.NoError(t, lease.Release(ctx))
	wait.Wait()
	require.Len(t, fences, clients*each)
	require.IsIncreasing(t, fences)
	t.Logf("%d grants, %.1f attempts for each", grants.Load(), float64(attempts.Load())/float64(grants.Load()))
	require.Less(t, attempts.Load(), 10*grants.Load(), "no stampede: every waiter at every hand-over would be 50")
}
