package integration

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/writegate/writegate/fencedb"
	"github.com/writegate/writegate/leasedb"
)

// Random schedules of acquiring, renewing, releasing, writing, of time that passes and of processes that do not notice,
// against a model that knows who is entitled to what. Time passes by moving terms into the past.
func TestRandomSchedules(t *testing.T) {
	ctx := context.Background()
	b := newBed(t)
	table := b.table()
	const ttl = time.Hour
	var clients []*leasedb.Client
	for i := range 3 {
		clients = append(clients, b.client(leasedb.Config{Holder: fmt.Sprint(i), TTL: ttl, ManualRenewal: true}))
	}

	rapid.Check(t, func(rt *rapid.T) {
		b.exec(`TRUNCATE fence.lease, fence.term, fence.rejection; UPDATE app.orders SET v = 'first', last_fence = 0`)
		type granted struct {
			lease  *leasedb.Lease
			client int
			left   time.Duration // by the database
			over   bool
		}
		var (
			grants  []*granted
			current *granted // who is entitled, if anybody
			highest int64
			rows    = map[int]int64{1: 0, 2: 0} // fences in the rows
		)
		defer func() {
			for _, g := range grants {
				g.lease.Lose(errors.New("the schedule is over"))
			}
		}()
		pick := func() *granted {
			if len(grants) == 0 {
				rt.Skip("nobody has acquired yet")
			}
			return grants[rapid.IntRange(0, len(grants)-1).Draw(rt, "grant")]
		}
		alive := func(g *granted) bool { return g == current && g.left > 0 }

		rt.Repeat(map[string]func(*rapid.T){
			"acquire": func(rt *rapid.T) {
				i := rapid.IntRange(0, len(clients)-1).Draw(rt, "client")
				lease, err := clients[i].TryAcquire(ctx, "x")
				if current != nil && alive(current) {
					require.ErrorIs(rt, err, leasedb.ErrHeld)
					return
				}
				require.NoError(rt, err)
				require.Greater(rt, lease.Fence(), highest)
				highest = lease.Fence()
				current = &granted{lease: lease, client: i, left: ttl}
				grants = append(grants, current)
			},
			"renew": func(rt *rapid.T) {
				g := pick()
				before := g.lease.State()
				err := g.lease.Renew(ctx)
				if alive(g) && before == leasedb.Active {
					require.NoError(rt, err)
					g.left = ttl
					return
				}
				require.Error(rt, err)
				require.NotEqual(rt, leasedb.Active, g.lease.State())
			},
			"release": func(rt *rapid.T) {
				g := pick()
				wasAlive, first := alive(g), !g.over && g.lease.State() == leasedb.Active
				err := g.lease.Release(ctx)
				g.over = true
				if g == current {
					// Whatever the handle believed, nothing of its grant stands afterwards, unless it had been told
					// by the database itself that it was over.
					if first || !errors.Is(err, leasedb.ErrSuperseded) {
						g.left = 0
					}
				}
				if wasAlive && first {
					require.NoError(rt, err)
				}
			},
			"time passes": func(rt *rapid.T) {
				d := time.Duration(rapid.IntRange(10, 70).Draw(rt, "minutes")) * time.Minute
				b.age("x", d)
				if current != nil {
					current.left -= d
				}
			},
			"write": func(rt *rapid.T) {
				g := pick()
				id := rapid.IntRange(1, 2).Draw(rt, "row")
				rule := rapid.SampledFrom(bothRules).Draw(rt, "rule")
				strength := rapid.SampledFrom([]fencedb.Strength{fencedb.Fenced, fencedb.Live}).Draw(rt, "strength")
				fence := g.lease.Fence()
				value := fmt.Sprintf("%d-%d", fence, id)
				// The facts alone: a process that has noticed nothing.
				outcome, err := table.Update(ctx, factsOf(g.lease), fencedb.Key{"id": id}, fencedb.Set{"v": value},
					fencedb.WithRule(rule), fencedb.WithStrength(strength))
				accepts := fence > rows[id] || (rule == fencedb.Term && fence == rows[id])
				switch {
				case accepts && (strength == fencedb.Fenced || alive(g)):
					require.NoError(rt, err)
					require.Equal(rt, fencedb.Applied, outcome)
					rows[id] = fence
				case rule == fencedb.Once && fence == rows[id]:
					require.NoError(rt, err)
					require.Equal(rt, fencedb.AlreadyApplied, outcome)
				case fence < rows[id]:
					require.ErrorIs(rt, err, fencedb.ErrStale)
				default:
					require.ErrorIs(rt, err, fencedb.ErrLeaseLost)
				}
			},
			"": func(rt *rapid.T) {
				for id, want := range rows {
					require.Equal(rt, want, query[int64](b, `SELECT last_fence FROM app.orders WHERE id = $1`, id), "a row's fence never falls")
				}
				active := 0
				for _, g := range grants {
					if g.lease.State() == leasedb.Active && alive(g) {
						active++
					}
				}
				require.LessOrEqual(rt, active, 1)
				require.LessOrEqual(rt, query[int](b, `SELECT count(*) FROM fence.term WHERE ended_at IS NULL`), 1, "one open term a name")
				require.Equal(rt, 0, query[int](b, `SELECT count(*) FROM fence.rejection WHERE verdict = 'lawful'`))
			},
		})
	})
}
