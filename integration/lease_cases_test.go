package integration

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/writegate/writegate/leasedb"
)

// The end of a grant counts from after the wait for the lease's row, however long that was. (C04)
func TestExpiryIsReckonedAfterTheLock(t *testing.T) {
	ctx := context.Background()
	const acquire = `SELECT fence FROM fence.acquire('x', 'A', '2s', gen_random_uuid(), '1 minute')`

	for _, blocker := range []struct{ name, change string }{
		{"locked only", ``},
		{"locked and changed", `UPDATE fence.lease SET holder = 'somebody' WHERE name = 'x'`},
	} {
		for _, old := range []bool{false, true} {
			t.Run(fmt.Sprintf("acquire/%s/transaction opened before=%v", blocker.name, old), func(t *testing.T) {
				b := newBed(t)
				require.NoError(t, b.acquire(b.client(leasedb.Config{}), "x").Release(ctx))
				a := b.session()
				if old {
					_, err := a.Exec(ctx, `BEGIN; SELECT 1`)
					require.NoError(t, err)
				}
				c := b.session()
				_, err := c.Exec(ctx, `BEGIN; SELECT 1 FROM fence.lease WHERE name = 'x' FOR UPDATE; `+blocker.change)
				require.NoError(t, err)
				done := make(chan error, 1)
				go func() {
					var fence int64
					done <- a.QueryRow(ctx, acquire).Scan(&fence)
				}()
				b.waitUntilBlocked()
				unlocked := clockThenCommit(t, c)
				require.NoError(t, <-done)
				if old {
					_, err := a.Exec(ctx, `COMMIT`)
					require.NoError(t, err)
				}
				require.True(t, query[bool](b, `SELECT granted_at > $1 AND expires_at = granted_at + ttl AND ttl = '2s' FROM fence.lease WHERE name = 'x'`, unlocked),
					"the grant must not be older than the lock's release")
			})
		}

		t.Run("renew/"+blocker.name, func(t *testing.T) {
			b := newBed(t)
			a := b.acquire(b.client(leasedb.Config{TTL: time.Minute, ManualRenewal: true}), "x")
			c := b.session()
			_, err := c.Exec(ctx, `BEGIN; SELECT 1 FROM fence.lease WHERE name = 'x' FOR UPDATE; `+blocker.change)
			require.NoError(t, err)
			// It does not wait for the lock: it comes back for it.
			require.Equal(t, "locked", query[string](b, `SELECT outcome FROM fence.renew(ARRAY['x'], ARRAY[$1]::text[]::uuid[])`, a.Token()))
			done := make(chan error, 1)
			go func() { done <- a.Renew(ctx) }()
			unlocked := clockThenCommit(t, c)
			require.NoError(t, <-done)
			require.True(t, query[bool](b, `SELECT renewed_at > $1 AND expires_at = renewed_at + ttl FROM fence.lease WHERE name = 'x'`, unlocked))
		})
	}
}

// clockThenCommit returns the server's time from just before the session's commit.
func clockThenCommit(t *testing.T, session *pgx.Conn) (at time.Time) {
	t.Helper()
	ctx := context.Background()
	require.NoError(t, session.QueryRow(ctx, `SELECT clock_timestamp()`).Scan(&at))
	_, err := session.Exec(ctx, `COMMIT`)
	require.NoError(t, err)
	return at
}

// Only the newest grant's own token renews, and a renewal that fails so ends the handle. (C08, C09)
func TestRenewalNeedsTheGrant(t *testing.T) {
	ctx := context.Background()
	b := newBed(t)
	client := func() *leasedb.Client {
		return b.client(leasedb.Config{Holder: "worker-0", ManualRenewal: true}) // all under one label
	}
	a := b.acquire(client(), "x")
	b.age("x", time.Hour)
	owner := b.acquire(client(), "x")

	row := func() string { return query[string](b, `SELECT l::text FROM fence.lease l WHERE name = 'x'`) }
	before := row()
	require.ErrorIs(t, a.Renew(ctx), leasedb.ErrLost)
	renew := func(token string) string {
		return query[string](b, `SELECT outcome FROM fence.renew(ARRAY['x'], ARRAY[$1]::text[]::uuid[])`, token)
	}
	require.Equal(t, "lost", renew(a.Token()), "the right holder with its old token")
	require.Equal(t, "lost", renew("00000000-0000-4000-8000-000000000000"), "one that never held")
	require.Equal(t, before, row(), "B's lease is as it was, to the byte")

	<-a.Context().Done()
	var lost *leasedb.LostError
	require.ErrorAs(t, context.Cause(a.Context()), &lost)
	require.ErrorIs(t, lost, leasedb.ErrSuperseded)
	require.NoError(t, owner.Renew(ctx))

	// Also where the lease has been given back meanwhile: renewing is never acquiring.
	require.NoError(t, owner.Release(ctx))
	require.Equal(t, "lost", renew(a.Token()))
	require.Equal(t, "lost", renew(owner.Token()))
	require.False(t, query[bool](b, `SELECT released_at IS NULL FROM fence.lease WHERE name = 'x'`))
}

// A release ends its own grant and nobody else's, once. (C12 a, b)
func TestReleaseIsForItsOwnGrantOnly(t *testing.T) {
	ctx := context.Background()
	b := newBed(t)
	clientA, clientB := b.client(leasedb.Config{Holder: "A", ManualRenewal: true}), b.client(leasedb.Config{Holder: "B"})
	row := func() string { return query[string](b, `SELECT l::text FROM fence.lease l WHERE name = 'x'`) }

	a := b.acquire(clientA, "x")
	b.age("x", time.Hour)
	owner := b.acquire(clientB, "x")
	before := row()
	for range 2 {
		require.ErrorIs(t, a.Release(ctx), leasedb.ErrNotHeld, "visible, and the same each time")
	}
	require.Equal(t, before, row())
	require.NoError(t, owner.Release(ctx))
	require.NoError(t, owner.Release(ctx), "the second is a no-op with the same answer")
	require.ErrorIs(t, owner.Err(), leasedb.ErrReleased)
	require.ErrorIs(t, owner.Renew(ctx), leasedb.ErrReleased)

	// The same over SQL, for a reply that was lost: also once somebody else has the lease.
	release := func() string {
		return query[string](b, `SELECT fence.release('x', $1::text::uuid, $2)`, owner.Token(), owner.Fence())
	}
	require.Equal(t, "released", release())
	again := b.acquire(clientB, "x")
	require.Equal(t, "released", release())
	require.NoError(t, again.Check(0))

	// Expired and nobody's yet: it was not held when it was released, and is free now.
	late := b.acquire(clientA, "late")
	b.age("late", time.Hour)
	require.ErrorIs(t, late.Release(ctx), leasedb.ErrNotHeld)
	require.Equal(t, "expired", query[string](b, `SELECT end_reason FROM fence.term WHERE name = 'late'`))
}

// Acquire, renew and release racing each other leave nothing held and nothing running. (C12 c)
func TestRenewalNeverOutlivesRelease(t *testing.T) {
	const workers, rounds = 8, 250
	ctx := context.Background()
	b := newBed(t)
	client := b.client(leasedb.Config{TTL: 10 * time.Second, RenewEvery: time.Millisecond})
	var wait sync.WaitGroup
	errs := make(chan error, workers*rounds)
	for w := range workers {
		name := fmt.Sprintf("x-%d", w)
		wait.Go(func() {
			for range rounds {
				acquireCtx, cancel := context.WithCancel(ctx)
				lease, err := client.TryAcquire(acquireCtx, name)
				if err != nil {
					cancel()
					errs <- fmt.Errorf("nobody else wants %s: %w", name, err)
					continue
				}
				go func() {
					time.Sleep(rand.N(2 * time.Millisecond)) // the point is that it comes at any moment
					cancel()
				}()
				if err := lease.Release(acquireCtx); err != nil {
					errs <- err
				}
				cancel()
			}
		})
	}
	wait.Wait()
	close(errs)
	for err := range errs {
		t.Error(err)
	}
	require.NoError(t, client.Close(ctx))
	require.Equal(t, 0, query[int](b, `SELECT count(*) FROM fence.lease WHERE expires_at > clock_timestamp() OR released_at IS NULL`))
	require.Equal(t, workers*rounds, query[int](b, `SELECT count(*) FROM fence.term WHERE end_reason = 'released'`))
	other := b.client(leasedb.Config{})
	for w := range workers {
		b.acquire(other, fmt.Sprintf("x-%d", w))
	}
}

// A name that nobody has ever held has one winner, and everybody else an answer. (C22 a)
func TestFirstAcquireHasOneWinner(t *testing.T) {
	const sessions = 20
	b := newBed(t)
	clients := make([]*leasedb.Client, sessions)
	for i := range clients {
		clients[i] = b.client(leasedb.Config{LockWait: 30 * time.Second, TTL: 5 * time.Minute})
	}
	results := make(chan error, sessions)
	start := make(chan struct{})
	for _, client := range clients {
		go func() {
			<-start
			_, err := client.TryAcquire(context.Background(), "never seen before")
			results <- err
		}()
	}
	close(start)
	won := 0
	for range sessions {
		err := <-results
		if err == nil {
			won++
			continue
		}
		require.ErrorIs(t, err, leasedb.ErrHeld)
	}
	require.Equal(t, 1, won)
	require.Equal(t, 1, query[int](b, `SELECT count(*) FROM fence.term`))
}

// A session that sits on the lease's row idle in its transaction costs a bounded wait and a clear error. (C22 b)
func TestRowLockedByAnIdleTransaction(t *testing.T) {
	ctx := context.Background()
	b := newBed(t)
	client := b.client(leasedb.Config{LockWait: 50 * time.Millisecond, PollEvery: 10 * time.Millisecond})
	require.NoError(t, b.acquire(client, "x").Release(ctx))
	c := b.session()
	_, err := c.Exec(ctx, `BEGIN; SELECT 1 FROM fence.lease WHERE name = 'x' FOR UPDATE`)
	require.NoError(t, err)

	for range 20 { // more often than there are connections: none leaks
		_, err = client.TryAcquire(ctx, "x")
		require.ErrorIs(t, err, leasedb.ErrBusy)
		require.NotErrorIs(t, err, leasedb.ErrHeld)
	}
	waiting, cancel := context.WithTimeout(ctx, 300*time.Millisecond)
	defer cancel()
	_, err = client.Acquire(waiting, "x")
	require.ErrorIs(t, err, context.DeadlineExceeded)

	_, err = c.Exec(ctx, `ROLLBACK`)
	require.NoError(t, err)
	// The last attempt may have been granted after nobody waited for it, and is being given back.
	_, err = client.Acquire(ctx, "x")
	require.NoError(t, err)

	// The bound is the transaction's alone.
	_, err = c.Exec(ctx, `SELECT fence.acquire('y', 'A', '2s', gen_random_uuid(), '50ms')`)
	require.NoError(t, err)
	var timeout, synchronous string
	require.NoError(t, c.QueryRow(ctx, `SELECT current_setting('lock_timeout'), current_setting('synchronous_commit')`).Scan(&timeout, &synchronous))
	require.Equal(t, "0", timeout)
	require.Equal(t, "on", synchronous)
}

// An acquire that nobody waits for any more leaves nothing held: neither when its statement still waits for the row on
// the server, nor when it gets there after all that was left to do about it has been done.
func TestAbandonedAcquireLeavesNothingHeld(t *testing.T) {
	ctx := context.Background()
	for _, first := range []bool{true, false} {
		t.Run(fmt.Sprintf("the name's first=%v", first), func(t *testing.T) {
			b := newBed(t)
			client := b.client(leasedb.Config{LockWait: 30 * time.Second, TTL: time.Minute})
			c := b.session()
			if first {
				_, err := c.Exec(ctx, `BEGIN; INSERT INTO fence.lease (name) VALUES ('x')`)
				require.NoError(t, err)
			} else {
				require.NoError(t, b.acquire(client, "x").Release(ctx))
				_, err := c.Exec(ctx, `BEGIN; SELECT 1 FROM fence.lease WHERE name = 'x' FOR UPDATE`)
				require.NoError(t, err)
			}
			waiting, cancel := context.WithCancel(ctx)
			done := make(chan error, 1)
			go func() {
				_, err := client.TryAcquire(waiting, "x")
				done <- err
			}()
			b.waitUntilBlocked()
			cancel()
			require.ErrorIs(t, <-done, leasedb.ErrUnknown)
			_, err := c.Exec(ctx, `COMMIT`)
			require.NoError(t, err)
			require.NoError(t, client.Close(ctx)) // waits for that
			require.Equal(t, 0, query[int](b, `SELECT count(*) FROM fence.lease WHERE released_at IS NULL AND expires_at > clock_timestamp()`))
		})
	}

	b := newBed(t)
	const token = "11111111-1111-4111-8111-111111111111"
	require.Equal(t, "not_held", query[string](b, `SELECT fence.release('x', $1::text::uuid, revoke => true)`, token))
	_, err := b.pool.Exec(ctx, `SELECT fence.acquire('x', 'A', '1s', $1::text::uuid)`, token)
	require.ErrorContains(t, err, "given up")
	b.acquire(b.client(leasedb.Config{}), "x")
}

// What is given up may be just about to be committed: then it is released, and not taken for released already.
func TestRevokeMeetsAGrantUnderWay(t *testing.T) {
	ctx := context.Background()
	for _, first := range []bool{true, false} {
		b := newBed(t)
		const token = "11111111-1111-4111-8111-111111111111"
		if !first {
			require.NoError(t, b.acquire(b.client(leasedb.Config{}), "x").Release(ctx))
		}
		c := b.session()
		_, err := c.Exec(ctx, `BEGIN; SELECT fence.acquire('x', 'A', '1 hour', '`+token+`')`)
		require.NoError(t, err)
		done := make(chan string, 1)
		go func() {
			var outcome string
			if err := b.pool.QueryRow(ctx, `SELECT fence.release('x', $1::text::uuid, lock_wait => '1 minute', revoke => true)`, token).Scan(&outcome); err != nil {
				t.Error(err)
			}
			done <- outcome
		}()
		b.waitUntilBlocked()
		_, err = c.Exec(ctx, `COMMIT`)
		require.NoError(t, err)
		require.Equal(t, "released", <-done)
		require.Equal(t, 0, query[int](b, `SELECT count(*) FROM fence.lease WHERE released_at IS NULL`))
		require.Equal(t, "released", query[string](b, `SELECT end_reason FROM fence.term ORDER BY fence DESC LIMIT 1`))
		require.Equal(t, "released", query[string](b, `SELECT fence.release('x', $1::text::uuid)`, token), "asked again")

		// And a token serves one grant.
		_, err = b.pool.Exec(ctx, `SELECT fence.acquire('x', 'A', '1s', $1::text::uuid)`, token)
		require.ErrorContains(t, err, "a token serves one grant only")
	}
}

// Whatever an acquire or a release has to wait for, it waits no longer than it was told to.
func TestLockWaitBoundsEveryWait(t *testing.T) {
	ctx := context.Background()
	for _, locked := range []string{
		`SELECT 1 FROM fence.lease WHERE name = 'x' FOR UPDATE`,
		`ALTER SEQUENCE fence.fence_seq OWNED BY NONE`,
		`LOCK TABLE fence.epoch`,
		`LOCK TABLE fence.lease`,
		`LOCK TABLE fence.term`,
		`UPDATE fence.epoch SET server_started_at = server_started_at - interval '1s'; LOCK TABLE fence.epoch IN SHARE MODE`,
	} {
		b := newBed(t)
		lease := b.acquire(b.client(leasedb.Config{ManualRenewal: true, TTL: time.Hour}), "x")
		b.age("x", 2*time.Hour)
		c := b.session()
		_, err := c.Exec(ctx, `BEGIN; `+locked)
		require.NoError(t, err)
		bounded, cancel := context.WithTimeout(ctx, 30*time.Second)
		if locked[:6] != "UPDATE" { // which only shows once it is committed
			_, err = b.pool.Exec(bounded, `SELECT fence.acquire('x', 'B', '1 hour', gen_random_uuid(), lock_wait => '20 ms')`)
			require.ErrorContains(t, err, "55P03", locked)
		}
		if strings.Contains(locked, "fence.lease") || strings.Contains(locked, "fence.term") {
			_, err = b.pool.Exec(bounded, `SELECT fence.release('x', $1::text::uuid, lock_wait => '20 ms')`, lease.Token())
			require.ErrorContains(t, err, "55P03", locked)
		}
		cancel()
	}
}

// A grant inside a savepoint that is rolled back never was. (C22 c)
func TestGrantInARolledBackSavepoint(t *testing.T) {
	ctx := context.Background()
	b := newBed(t)
	c := b.session()
	_, err := c.Exec(ctx, `BEGIN; SAVEPOINT s`)
	require.NoError(t, err)
	const token = "11111111-1111-4111-8111-111111111111"
	var fence int64
	require.NoError(t, c.QueryRow(ctx, `SELECT fence FROM fence.acquire('x', 'A', '1 hour', $1::text::uuid)`, token).Scan(&fence))
	_, err = c.Exec(ctx, `ROLLBACK TO s; COMMIT`)
	require.NoError(t, err)
	require.Equal(t, "lost", query[string](b, `SELECT outcome FROM fence.renew(ARRAY['x'], ARRAY[$1]::text[]::uuid[])`, token))
	require.Equal(t, "not_held", query[string](b, `SELECT fence.release('x', $1::text::uuid, $2)`, token, fence))
	require.Greater(t, b.acquire(b.client(leasedb.Config{}), "x").Fence(), fence, "its fence is not issued again")
}

// Waiting: whoever waits gets the lease when it is released and when it expires, and only for as long as it cares to.
func TestAcquireWaits(t *testing.T) {
	ctx := context.Background()
	b := newBed(t)
	clientA := b.client(leasedb.Config{Holder: "A"})
	clientB := b.client(leasedb.Config{Holder: "B", PollEvery: 20 * time.Millisecond})
	a := b.acquire(clientA, "x")

	brief, cancel := context.WithTimeout(ctx, 50*time.Millisecond)
	defer cancel()
	_, err := clientB.Acquire(brief, "x")
	require.ErrorIs(t, err, context.DeadlineExceeded)
	var held *leasedb.HeldError
	require.ErrorAs(t, err, &held)
	require.Equal(t, "A", held.Holder)

	// Ten in one process, each in turn.
	fences := make(chan int64, 10)
	var wait sync.WaitGroup
	for range cap(fences) {
		wait.Go(func() {
			err := clientB.Do(ctx, "x", func(_ context.Context, l *leasedb.Lease) error {
				fences <- l.Fence()
				return nil
			})
			if err != nil {
				t.Error(err)
			}
		})
	}
	require.NoError(t, a.Release(ctx))
	wait.Wait()
	close(fences)
	last := a.Fence()
	for f := range fences {
		require.Greater(t, f, last)
		last = f
	}
}

// Do: what work gets, and what becomes of it.
func TestDo(t *testing.T) {
	ctx := context.Background()
	b := newBed(t)
	client := b.client(leasedb.Config{TTL: time.Hour})
	free := func() bool {
		return query[bool](b, `SELECT released_at IS NOT NULL FROM fence.lease WHERE name = 'x'`)
	}

	require.NoError(t, client.Do(ctx, "x", func(ctx context.Context, l *leasedb.Lease) error {
		require.NoError(t, l.Check(time.Minute))
		require.ErrorIs(t, l.Check(2*time.Hour), leasedb.ErrLittleTime)
		require.NoError(t, ctx.Err())
		return nil
	}))
	require.True(t, free())

	oops := errors.New("oops")
	require.ErrorIs(t, client.Do(ctx, "x", func(context.Context, *leasedb.Lease) error { return oops }), oops)
	require.True(t, free())

	require.PanicsWithValue(t, "boom", func() {
		_ = client.Do(ctx, "x", func(context.Context, *leasedb.Lease) error { panic("boom") })
	})
	require.True(t, free())

	// The loss reaches work through its context, and the caller even though work returned nil.
	err := client.Do(ctx, "x", func(ctx context.Context, l *leasedb.Lease) error {
		b.age("x", 2*time.Hour)
		require.ErrorIs(t, l.Renew(ctx), leasedb.ErrLost)
		<-ctx.Done()
		require.ErrorIs(t, context.Cause(ctx), leasedb.ErrLost)
		return nil
	})
	require.ErrorIs(t, err, leasedb.ErrLost)
	require.ErrorIs(t, err, leasedb.ErrSuperseded)

	// The caller's own end reaches it too, and the lease is given back all the same.
	ctx2, cancel := context.WithCancel(ctx)
	err = client.Do(ctx2, "x", func(ctx context.Context, _ *leasedb.Lease) error {
		cancel()
		<-ctx.Done()
		return ctx.Err()
	})
	require.ErrorIs(t, err, context.Canceled)
	require.True(t, free())
}

// A lease is renewed in the background, all of a client's in one statement, and lost at the deadline when the
// database cannot be reached.
func TestBackgroundRenewal(t *testing.T) {
	ctx := context.Background()
	b := newBed(t)
	lost := make(chan error, 10)
	client := b.client(leasedb.Config{
		TTL: 3 * time.Second, RenewEvery: 20 * time.Millisecond,
		OnLost: func(_ *leasedb.Lease, err error) { lost <- err },
	})
	leases := make([]*leasedb.Lease, 5)
	for i := range leases {
		leases[i] = b.acquire(client, fmt.Sprintf("x-%d", i))
	}
	require.Eventually(t, func() bool {
		return query[int64](b, `SELECT min(renewals) FROM fence.lease`) >= 5
	}, 30*time.Second, 5*time.Millisecond)
	// A row that somebody sits on is skipped, and costs the others nothing.
	c := b.session()
	_, err := c.Exec(ctx, `BEGIN; SELECT 1 FROM fence.lease WHERE name = 'x-2' FOR UPDATE`)
	require.NoError(t, err)
	<-leases[2].Context().Done()
	require.ErrorIs(t, <-lost, leasedb.ErrNotRenewed)
	for i, l := range leases {
		if i != 2 {
			require.NoError(t, l.Check(0))
		}
	}
	_, err = c.Exec(ctx, `ROLLBACK`)
	require.NoError(t, err)
	require.ErrorIs(t, leases[2].Renew(ctx), leasedb.ErrLost, "lost stays lost")
	require.NoError(t, client.Close(ctx))
	require.Empty(t, lost, "a release is no loss")
}
