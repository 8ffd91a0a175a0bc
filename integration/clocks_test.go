package integration

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/writegate/writegate/fencedb"
	"github.com/writegate/writegate/internal/pgtest"
	"github.com/writegate/writegate/leasedb"
)

// skewed is a clock that is off by so much, and can be stopped.
type skewed struct {
	mu      sync.Mutex
	off     time.Duration
	stopped *leasedb.Reading
}

func (s *skewed) read() leasedb.Reading {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stopped != nil {
		return *s.stopped
	}
	return leasedb.Reading{Time: time.Now().Add(s.off)}
}

func (s *skewed) stop() {
	now := s.read()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stopped = &now
}

// Whose clock says what makes no difference to who is granted: only the database's counts. (C06 a)
func TestSkewedApplicationClocks(t *testing.T) {
	ctx := context.Background()
	b := newBed(t)
	ahead, behind := &skewed{off: 5 * time.Minute}, &skewed{off: -5 * time.Minute}
	clientA := b.client(leasedb.Config{Holder: "ahead", TTL: time.Minute, ManualRenewal: true, Clock: ahead.read})
	clientB := b.client(leasedb.Config{Holder: "behind", TTL: time.Minute, ManualRenewal: true, Clock: behind.read})
	for _, c := range []struct{ holder, other *leasedb.Client }{{clientA, clientB}, {clientB, clientA}} {
		lease := b.acquire(c.holder, "x")
		_, err := c.other.TryAcquire(ctx, "x")
		require.ErrorIs(t, err, leasedb.ErrHeld)
		require.NoError(t, lease.Renew(ctx))
		require.True(t, query[bool](b, `SELECT expires_at BETWEEN clock_timestamp() AND clock_timestamp() + interval '1 minute' FROM fence.lease`))
		require.NoError(t, lease.Check(0))
		b.age("x", 2*time.Minute)
		next := b.acquire(c.other, "x")
		require.Greater(t, next.Fence(), lease.Fence())
		require.ErrorIs(t, lease.Renew(ctx), leasedb.ErrLost)
		require.NoError(t, next.Release(ctx))
	}
}

// Nor does the time zone of a session. (C06 b)
func TestSessionTimeZones(t *testing.T) {
	ctx := context.Background()
	b := newBed(t)
	for _, zone := range []string{"UTC", "America/New_York", "Pacific/Kiritimati"} {
		pool := pgtest.Pool(t, b.cfg, func(c *pgxpool.Config) { c.ConnConfig.RuntimeParams["timezone"] = zone })
		client, err := leasedb.New(ctx, pool, leasedb.Config{Holder: zone, TTL: time.Minute})
		require.NoError(t, err)
		lease, err := client.TryAcquire(ctx, "x")
		require.NoError(t, err)
		_, err = b.client(leasedb.Config{}).TryAcquire(ctx, "x")
		var held *leasedb.HeldError
		require.ErrorAs(t, err, &held)
		require.Equal(t, zone, held.Holder)
		require.Positive(t, held.Remaining)
		require.LessOrEqual(t, held.Remaining, time.Minute)
		require.NoError(t, lease.Renew(ctx))
		require.NoError(t, client.Close(ctx))
	}
	require.Equal(t, 0, query[int](b, `SELECT count(*) FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid
		WHERE c.relnamespace = 'fence'::regnamespace AND c.relname NOT LIKE 'goose%' AND a.atttypid IN ('timestamp'::regtype, 'time'::regtype, 'date'::regtype)`))
}

// A process whose clock stood still while time passed believes in its lease. The row does not, the refusal is on record,
// and ends the belief: nothing more is sent. (C07)
func TestProcessThatTimePassedBy(t *testing.T) {
	ctx := context.Background()
	b := newBed(t)
	table := b.table()
	clock := &skewed{}
	clientA := b.client(leasedb.Config{Holder: "A", TTL: 5 * time.Second, ManualRenewal: true, Clock: clock.read})
	a := b.acquire(clientA, "x")
	clock.stop()
	b.age("x", 20*time.Second)
	owner := b.acquire(b.client(leasedb.Config{Holder: "B"}), "x")
	_, err := table.Update(ctx, owner, order1, fencedb.Set{"v": "B"})
	require.NoError(t, err)

	require.NoError(t, a.Check(time.Second), "so it believes")
	_, err = table.Update(ctx, a, order1, fencedb.Set{"v": "A"})
	require.ErrorIs(t, err, fencedb.ErrStale)
	require.Equal(t, "B", query[string](b, `SELECT v FROM app.orders WHERE id = 1`))
	require.ErrorIs(t, a.Renew(ctx), fencedb.ErrStale, "the loss is final, and says why")
	require.ErrorIs(t, context.Cause(a.Context()), leasedb.ErrLost)
	_, err = table.Update(ctx, a, order1, fencedb.Set{"v": "A"})
	require.ErrorIs(t, err, fencedb.ErrLeaseLost)
	require.Equal(t, int64(1), query[int64](b, `SELECT count FROM fence.rejection`), "the second was never sent")
}

// One label for two processes, and for one that was restarted: the grant counts, not the label. (C09 b)
func TestSameLabelTwice(t *testing.T) {
	ctx := context.Background()
	b := newBed(t)
	table := b.table()
	first := b.client(leasedb.Config{Holder: "worker-0", ManualRenewal: true})
	old := b.acquire(first, "x")
	_, err := first.TryAcquire(ctx, "x")
	require.ErrorIs(t, err, leasedb.ErrHeld, "leases are not re-entrant")
	second := b.client(leasedb.Config{Holder: "worker-0"})
	_, err = second.TryAcquire(ctx, "x")
	require.ErrorIs(t, err, leasedb.ErrHeld)

	b.age("x", time.Hour) // the process died, and is back under its name
	restarted := b.acquire(second, "x")
	_, err = table.Update(ctx, restarted, order1, fencedb.Set{"v": "restarted"})
	require.NoError(t, err)
	_, err = table.Update(ctx, old, order1, fencedb.Set{"v": "a leftover of the old process"})
	require.ErrorIs(t, err, fencedb.ErrStale)
	require.ErrorIs(t, old.Renew(ctx), leasedb.ErrLost)
	require.ErrorIs(t, old.Release(ctx), leasedb.ErrLost)
	require.NoError(t, restarted.Renew(ctx))
}
