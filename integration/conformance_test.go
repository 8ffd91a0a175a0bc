package integration

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/writegate/writegate/fencedb"
	"github.com/writegate/writegate/leasedb"
)

// A grant as a timeline sees it: the facts, without a handle whose own knowledge would stop a late call before it
// reaches the database.
type grant struct {
	name, token, holder string
	fence               int64
}

func (g grant) Name() string              { return g.name }
func (g grant) Fence() int64              { return g.fence }
func (g grant) Token() string             { return g.token }
func (g grant) Holder() string            { return g.holder }
func (g grant) Check(time.Duration) error { return nil }

// The conformance timeline: strength Live, rule Term. A tick is an hour, and time passes by moving the lease's term
// into the past, so the test waits for nothing and no slow machine can bend it. Fences are even: 1, 2, 3 read 2, 4, 6.
func TestConformanceTimeline(t *testing.T) {
	const tick = time.Hour
	ctx := context.Background()
	b := newBed(t)
	b.exec(`SELECT fence.protect('app.orders', 'term', 'live')`)
	table := b.table()

	now := 0
	at := func(tm int) {
		t.Helper()
		require.GreaterOrEqual(t, tm, now)
		b.age("resource", time.Duration(tm-now)*tick)
		now = tm
	}
	// deadline is expires_at on the timeline's own clock.
	deadline := func() int {
		left := query[float64](b, `SELECT extract(epoch FROM expires_at - clock_timestamp()) FROM fence.lease WHERE name = 'resource'`)
		return now + int((time.Duration(left*float64(time.Second))+tick/2).Truncate(tick)/tick)
	}
	newHolder := func(name string) *leasedb.Client {
		return b.client(leasedb.Config{Holder: name, TTL: 5 * tick, ManualRenewal: true})
	}
	write := func(g grant, value string) error {
		_, err := table.Update(ctx, g, fencedb.Key{"id": 1}, fencedb.Set{"v": value})
		return err
	}
	facts := func(l *leasedb.Lease) grant { return grant{l.Name(), l.Token(), l.Holder(), l.Fence()} }
	refused := func(err error, outcome fencedb.Outcome, reason string, current int64) {
		t.Helper()
		var e *fencedb.WriteError
		require.ErrorAs(t, err, &e)
		require.Equal(t, outcome, e.Outcome, "%v", err)
		require.Equal(t, reason, e.Reason)
		require.Equal(t, current, e.Current)
		require.NoError(t, e.AuditErr)
	}
	clientA, clientB, clientC := newHolder("A"), newHolder("B"), newHolder("C")

	a := b.acquire(clientA, "resource") // t=0
	require.EqualValues(t, 2, a.Fence())
	require.Equal(t, 5, deadline())

	at(2)
	require.NoError(t, write(facts(a), "a-1"))

	at(4)
	require.NoError(t, a.Renew(ctx))
	require.Equal(t, 9, deadline())

	at(8)
	require.NoError(t, write(facts(a), "a-2"))

	at(10)
	refused(write(facts(a), "a-stale"), fencedb.LeaseLost, "expired", 2)
	require.ErrorIs(t, a.Renew(ctx), leasedb.ErrLost)
	require.ErrorIs(t, a.Renew(ctx), leasedb.ErrLost, "for good")
	require.Equal(t, leasedb.Lost, a.State())
	lease := b.acquire(clientB, "resource")
	require.EqualValues(t, 4, lease.Fence())

	at(11)
	require.NoError(t, write(facts(lease), "b-1"))

	at(12)
	wrong := facts(lease)
	wrong.fence = a.Fence()
	refused(write(wrong, "b with A's fence"), fencedb.Stale, "stale", 4)
	require.Equal(t, "wrong_fence", query[string](b, `SELECT fence.lease_state($1, $2::text::uuid, $3)`, wrong.name, wrong.token, wrong.fence))
	refused(write(facts(a), "a again"), fencedb.Stale, "stale", 4)
	require.Equal(t, "superseded", query[string](b, `SELECT fence.lease_state($1, $2::text::uuid, $3)`, a.Name(), a.Token(), a.Fence()))
	_, err := clientC.TryAcquire(ctx, "resource")
	var held *leasedb.HeldError
	require.ErrorAs(t, err, &held)
	require.Equal(t, "B", held.Holder)
	require.EqualValues(t, 4, held.Fence)
	require.Equal(t, "not_held", query[string](b, `SELECT fence.release($1, $2::text::uuid, $3)`, a.Name(), a.Token(), a.Fence()))
	require.ErrorIs(t, a.Release(ctx), leasedb.ErrLost)
	require.NoError(t, lease.Check(0), "B's lease is untouched by A's release")
	require.NoError(t, lease.Release(ctx))

	at(13)
	c := b.acquire(clientC, "resource")
	require.EqualValues(t, 6, c.Fence())

	at(14)
	require.NoError(t, write(facts(c), "c-1"))
	require.Equal(t, "c-1", query[string](b, `SELECT v FROM app.orders WHERE id = 1`))

	// On rows that no newer holder has written, the lease alone refuses, and says which of the two it was.
	wrong = facts(c)
	wrong.fence = 2
	_, err = table.Update(ctx, wrong, fencedb.Key{"id": 2}, fencedb.Set{"v": "x"})
	refused(err, fencedb.LeaseLost, "wrong_fence", 0)
	_, err = table.Update(ctx, facts(a), fencedb.Key{"id": 2}, fencedb.Set{"v": "x"})
	refused(err, fencedb.LeaseLost, "superseded", 0)
	require.Equal(t, "first", query[string](b, `SELECT v FROM app.orders WHERE id = 2`))
}
