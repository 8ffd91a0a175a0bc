package leasedb

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"
)

// These tests control time, so the database is a fake one; everything else is tested against PostgreSQL, in integration/.

// fakeStore grants whatever is free, by the bubble's clock, and does what a test puts in its way.
type fakeStore struct {
	mu       sync.Mutex
	fence    int64
	rows     map[string]*fakeRow
	acquires []acquireRequest
	renews   [][]string // names asked for
	releases []releaseRequest

	onAcquire  func(context.Context, acquireRequest) error // before it is carried out; its error is the answer
	onRenew    func(context.Context, []string) error
	afterwards func(context.Context) error // after an acquire has been carried out; its error is the answer
	onRelease  func(context.Context) error
	outcome    map[string]string // of a renewal, in place of the true one
}

type fakeRow struct {
	token, holder string
	fence         int64
	ttl           time.Duration
	expires       time.Time
	free          bool
}

func (s *fakeStore) acquire(ctx context.Context, req acquireRequest) (a acquireAnswer, err error) {
	s.mu.Lock()
	s.acquires = append(s.acquires, req)
	before, after := s.onAcquire, s.afterwards
	s.mu.Unlock()
	if before != nil {
		if err := before(ctx, req); err != nil {
			return a, err
		}
	}
	s.mu.Lock()
	row := s.rows[req.name]
	switch {
	case row != nil && !row.free && row.expires.After(time.Now()):
		a = acquireAnswer{granted: row.token == req.token, fence: row.fence, heldBy: row.holder, remaining: time.Until(row.expires), nextInLine: true}
	default:
		s.fence += 2
		row = &fakeRow{req.token, req.holder, s.fence, req.ttl, time.Now().Add(req.ttl), false}
		s.rows[req.name] = row
		a = acquireAnswer{granted: true, fence: row.fence, heldBy: req.holder, remaining: req.ttl}
	}
	s.mu.Unlock()
	if after != nil {
		if err := after(ctx); err != nil {
			return acquireAnswer{}, err
		}
	}
	return a, nil
}

func (s *fakeStore) renew(ctx context.Context, names, tokens []string) (answers map[string]string, err error) {
	s.mu.Lock()
	s.renews = append(s.renews, names)
	before := s.onRenew
	s.mu.Unlock()
	if before != nil {
		if err := before(ctx, names); err != nil {
			return nil, err
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	answers = make(map[string]string, len(names))
	for i, name := range names {
		row := s.rows[name]
		outcome := outcomeLost
		if row != nil && row.token == tokens[i] && !row.free && row.expires.After(time.Now()) {
			outcome = outcomeRenewed
		}
		if o := s.outcome[name]; o != "" {
			outcome = o
		}
		if outcome == outcomeRenewed {
			row.expires = time.Now().Add(row.ttl)
		}
		answers[name] = outcome
	}
	return answers, nil
}

func (s *fakeStore) release(ctx context.Context, req releaseRequest) (string, error) {
	s.mu.Lock()
	before := s.onRelease
	s.mu.Unlock()
	if before != nil {
		if err := before(ctx); err != nil {
			return "", err
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.releases = append(s.releases, req)
	row := s.rows[req.name]
	if row == nil || row.token != req.token {
		return "not_held", nil
	}
	row.free = true
	return outcomeReleased, nil
}

func (s *fakeStore) listen(ctx context.Context, _ func(), _ func(string)) error {
	<-ctx.Done()
	return ctx.Err()
}

func (s *fakeStore) database() string       { return "fake" }
func (s *fakeStore) highest() *atomic.Int64 { return new(atomic.Int64) }
func (s *fakeStore) close()                 {}

func (s *fakeStore) set(change func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	change()
}

func (s *fakeStore) count() (acquires, renews, releases int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.acquires), len(s.renews), len(s.releases)
}

// fixture is a client over a fake store inside a bubble.
type fixture struct {
	*testing.T
	store  *fakeStore
	client *Client
	began  time.Time

	mu   sync.Mutex
	lost []error // what OnLost was told
}

func (f *fixture) acquire(name string) *Lease {
	f.Helper()
	lease, err := f.client.TryAcquire(f.Context(), name)
	require.NoError(f, err)
	return lease
}

// at sleeps until so long after the start, and lets everything due until then happen.
func (f *fixture) at(d time.Duration) {
	time.Sleep(time.Until(f.began.Add(d)))
	synctest.Wait()
}

func (f *fixture) losses() []error {
	f.mu.Lock()
	defer f.mu.Unlock()
	return append([]error(nil), f.lost...)
}

// inBubble runs a test with a client of TTL 30 s: renewals every 10 s, a margin of 3 s, so a deadline 27 s after sending.
func inBubble(t *testing.T, cfg Config, test func(*fixture)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		f := &fixture{T: t, store: &fakeStore{rows: map[string]*fakeRow{}, outcome: map[string]string{}}, began: time.Now()}
		if cfg.TTL == 0 {
			cfg.TTL = 30 * time.Second
		}
		if cfg.Clock == nil { // the bubble's, without this machine's boot time
			cfg.Clock = func() Reading { return Reading{Time: time.Now()} }
		}
		cfg.Logger = slog.New(slog.DiscardHandler)
		cfg.OnLost = func(_ *Lease, err error) {
			f.mu.Lock()
			defer f.mu.Unlock()
			f.lost = append(f.lost, err)
		}
		cfg = cfg.withDefaults()
		require.NoError(t, cfg.validate())
		f.client = newClient(f.store, cfg)
		defer func() { _ = f.client.Close(context.Background()) }()
		test(f)
	})
}

var errNoAnswer = errors.New("read: connection reset by peer")

func TestLeasesAreRenewedTogether(t *testing.T) {
	inBubble(t, Config{}, func(f *fixture) {
		// Acquired at different times, they soon share a beat.
		leases := make([]*Lease, 0, 1000)
		for i := range 1000 {
			leases = append(leases, f.acquire(fmt.Sprintf("x-%04d", i)))
			time.Sleep(7 * time.Millisecond)
		}
		f.at(time.Minute)
		_, renews, _ := f.store.count()
		require.LessOrEqual(f, renews, 7, "one statement a beat of 10 s")
		require.Len(f, f.store.renews[renews-1], 1000)
		require.IsIncreasing(f, f.store.renews[renews-1], "in name order")
		for _, l := range leases {
			require.Equal(f, Active, l.State())
		}
	})
}

func TestUnknownIsLostAtTheDeadline(t *testing.T) {
	inBubble(t, Config{}, func(f *fixture) {
		l := f.acquire("x")
		f.at(15 * time.Second) // renewed at 10 s: the deadline is 37 s
		f.store.set(func() { f.store.onRenew = func(context.Context, []string) error { return errNoAnswer } })
		f.at(37*time.Second - time.Millisecond)
		require.Equal(f, Active, l.State())
		require.NoError(f, l.Check(0))
		require.NoError(f, l.Context().Err())
		f.at(37 * time.Second)
		require.Equal(f, Lost, l.State())
		var lost *LostError
		require.ErrorAs(f, context.Cause(l.Context()), &lost)
		require.ErrorIs(f, lost, ErrNotRenewed)
		require.ErrorIs(f, l.Check(0), ErrLost)
		_, renews, _ := f.store.count()
		require.Greater(f, renews, 10, "tried again and again until then")

		// For good, also when the database answers again and would renew it.
		f.store.set(func() { f.store.onRenew = nil })
		f.at(38 * time.Second)
		require.ErrorIs(f, l.Renew(f.Context()), ErrLost)
		f.at(5 * time.Minute)
		require.Equal(f, Lost, l.State())
		require.Len(f, f.losses(), 1, "said once")
		_, again, _ := f.store.count()
		require.Equal(f, renews, again, "nothing more is sent for it")
	})
}

func TestHungRenewalIsALoss(t *testing.T) {
	for _, obeys := range []bool{true, false} {
		t.Run(fmt.Sprintf("it obeys its context=%v", obeys), func(t *testing.T) {
			inBubble(t, Config{}, func(f *fixture) {
				l := f.acquire("x")
				hang := make(chan struct{})
				var tries []time.Duration
				f.store.set(func() {
					f.store.onRenew = func(ctx context.Context, _ []string) error {
						deadline, bounded := ctx.Deadline()
						require.True(f, bounded)
						f.mu.Lock()
						tries = append(tries, time.Until(deadline))
						f.mu.Unlock()
						if !obeys {
							<-hang
						}
						<-ctx.Done()
						return ctx.Err()
					}
				})
				f.at(27*time.Second - time.Millisecond)
				require.Equal(f, Active, l.State())
				f.at(27 * time.Second)
				require.Error(f, l.Context().Err(), "though the loop that renews it stands still")
				require.ErrorIs(f, l.Err(), ErrNotRenewed)
				f.mu.Lock()
				for i, try := range tries {
					require.LessOrEqual(f, try, 10*time.Second, "try %d fits an interval", i)
				}
				f.mu.Unlock()
				close(hang)
			})
		})
	}
}

func TestOneLostHeartbeatLeavesRoomForAnother(t *testing.T) {
	inBubble(t, Config{}, func(f *fixture) {
		l := f.acquire("x")
		failed := 0
		f.store.set(func() {
			f.store.onRenew = func(context.Context, []string) error {
				if failed++; failed == 1 {
					return errNoAnswer
				}
				return nil
			}
		})
		f.at(3 * time.Minute)
		require.Equal(f, Active, l.State())
		require.Greater(f, failed, 1)
		require.Empty(f, f.losses())
	})
}

func TestRenewalAnswers(t *testing.T) {
	t.Run("lost is final at once", func(t *testing.T) {
		inBubble(t, Config{}, func(f *fixture) {
			l, other := f.acquire("x"), f.acquire("y")
			f.store.set(func() { f.store.outcome["x"] = outcomeLost })
			f.at(10 * time.Second)
			require.ErrorIs(f, l.Err(), ErrSuperseded)
			require.Equal(f, Active, other.State())
			require.Len(f, f.losses(), 1)
		})
	})
	t.Run("locked is asked again soon", func(t *testing.T) {
		inBubble(t, Config{}, func(f *fixture) {
			l := f.acquire("x")
			f.store.set(func() { f.store.outcome["x"] = outcomeLocked })
			f.at(12 * time.Second)
			_, renews, _ := f.store.count()
			require.Equal(f, 2, renews)
			f.store.set(func() { delete(f.store.outcome, "x") })
			f.at(time.Minute)
			require.Equal(f, Active, l.State())
		})
	})
	t.Run("locked until the deadline is a loss", func(t *testing.T) {
		inBubble(t, Config{}, func(f *fixture) {
			l := f.acquire("x")
			f.store.set(func() { f.store.outcome["x"] = outcomeLocked })
			f.at(27 * time.Second)
			require.ErrorIs(f, l.Err(), ErrNotRenewed)
		})
	})
	t.Run("good news after the deadline comes too late", func(t *testing.T) {
		inBubble(t, Config{ManualRenewal: true}, func(f *fixture) {
			l := f.acquire("x")
			f.at(26 * time.Second)
			f.store.set(func() {
				f.store.onRenew = func(context.Context, []string) error { time.Sleep(2 * time.Second); return nil } // deaf to its context
			})
			require.ErrorIs(f, l.Renew(f.Context()), ErrLost)
			require.Equal(f, Lost, l.State())
			require.True(f, f.store.rows["x"].expires.After(time.Now()), "in the database it was renewed")
			require.ErrorIs(f, l.Release(f.Context()), ErrLost)
			require.True(f, f.store.rows["x"].free, "which releasing it takes back")
		})
	})
	t.Run("the deadline counts from sending", func(t *testing.T) {
		inBubble(t, Config{ManualRenewal: true}, func(f *fixture) {
			l := f.acquire("x")
			f.store.set(func() {
				f.store.onRenew = func(context.Context, []string) error { time.Sleep(8 * time.Second); return nil }
			})
			f.at(10 * time.Second)
			require.NoError(f, l.Renew(f.Context()))
			require.Equal(f, 19*time.Second, l.Remaining()) // 27 less 8
		})
	})
}

func TestMaxHold(t *testing.T) {
	inBubble(t, Config{MaxHold: time.Minute}, func(f *fixture) {
		l := f.acquire("x")
		f.at(time.Minute - time.Millisecond)
		require.Equal(f, Active, l.State())
		require.LessOrEqual(f, l.Remaining(), time.Millisecond)
		f.at(time.Minute)
		require.ErrorIs(f, context.Cause(l.Context()), ErrMaxHold)
		require.ErrorIs(f, l.Release(f.Context()), ErrLost)
		require.True(f, f.store.rows["x"].free, "given back: it was healthy")
	})
}

func TestGrantThatArrivesTooLate(t *testing.T) {
	inBubble(t, Config{}, func(f *fixture) {
		f.store.afterwards = func(context.Context) error { time.Sleep(28 * time.Second); return nil }
		_, err := f.client.TryAcquire(f.Context(), "x")
		require.ErrorIs(f, err, ErrTooLate)
		synctest.Wait()
		require.True(f, f.store.rows["x"].free, "nothing is left held")
	})
}

func TestLostReplyToAnAcquire(t *testing.T) {
	t.Run("is asked again under the same token", func(t *testing.T) {
		inBubble(t, Config{ManualRenewal: true}, func(f *fixture) {
			f.store.afterwards = func(context.Context) error {
				f.store.set(func() { f.store.afterwards = nil })
				time.Sleep(5 * time.Second)
				return errNoAnswer
			}
			l := f.acquire("x")
			require.EqualValues(f, 2, l.Fence(), "the grant of the first request")
			require.Len(f, f.store.acquires, 2)
			require.Equal(f, f.store.acquires[0].token, f.store.acquires[1].token)
			require.Less(f, l.Remaining(), 22*time.Second, "reckoned from the first request")
		})
	})
	t.Run("is given back if nobody answers in time", func(t *testing.T) {
		inBubble(t, Config{}, func(f *fixture) {
			f.store.afterwards = func(context.Context) error { return errNoAnswer }
			_, err := f.client.TryAcquire(f.Context(), "x")
			require.ErrorIs(f, err, ErrUnknown)
			require.Less(f, time.Since(f.began), 30*time.Second)
			synctest.Wait()
			require.True(f, f.store.rows["x"].free)
			require.True(f, f.store.releases[0].revoke)
		})
	})
	t.Run("and at once if the caller leaves", func(t *testing.T) {
		inBubble(t, Config{}, func(f *fixture) {
			ctx, cancel := context.WithTimeout(f.Context(), time.Second)
			defer cancel()
			f.store.afterwards = func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() }
			_, err := f.client.TryAcquire(ctx, "x")
			require.ErrorIs(f, err, ErrUnknown)
			require.Equal(f, time.Second, time.Since(f.began))
			synctest.Wait()
			require.True(f, f.store.rows["x"].free)
		})
	})
	t.Run("and given back too if the next try meets another error", func(t *testing.T) {
		for name, second := range map[string]error{
			"refused":   &pgconn.ConnectError{},
			"locked":    &pgconn.PgError{Severity: "ERROR", Code: "55P03"},
			"read-only": &pgconn.PgError{Severity: "ERROR", Code: "25006"},
		} {
			t.Run(name, func(t *testing.T) {
				inBubble(t, Config{}, func(f *fixture) {
					f.store.afterwards = func(context.Context) error {
						f.store.set(func() { f.store.onAcquire = func(context.Context, acquireRequest) error { return second } })
						return errNoAnswer
					}
					_, err := f.client.TryAcquire(f.Context(), "x")
					require.ErrorIs(f, err, ErrUnknown)
					synctest.Wait()
					require.True(f, f.store.rows["x"].free, "nothing is left held")
				})
			})
		}
	})
	t.Run("but the server's own no is final", func(t *testing.T) {
		inBubble(t, Config{}, func(f *fixture) {
			f.store.onAcquire = func(context.Context, acquireRequest) error {
				return &pgconn.PgError{Severity: "ERROR", Code: "55P03"}
			}
			_, err := f.client.TryAcquire(f.Context(), "x")
			require.ErrorIs(f, err, ErrBusy)
			synctest.Wait()
			acquires, _, releases := f.store.count()
			require.Equal(f, 1, acquires)
			require.Zero(f, releases, "there is nothing to give back")
		})
	})
}

func TestFenceThatGoesBackInTime(t *testing.T) {
	inBubble(t, Config{}, func(f *fixture) {
		f.store.fence = 100
		f.acquire("x")
		f.store.set(func() { f.store.fence = 10 }) // a failover to a server that has lost grants
		_, err := f.client.TryAcquire(f.Context(), "y")
		require.ErrorIs(f, err, ErrFence)
		require.ErrorContains(f, err, "fence 12 was granted, but this process has seen 102")
		synctest.Wait()
		require.True(f, f.store.rows["y"].free)
	})
}

// A suspended machine, and clocks that are stepped: believing too little is the only mistake allowed.
func TestClocks(t *testing.T) {
	for _, c := range []struct {
		name             string
		boot, wall, mono time.Duration // how each clock moves while the others see 5 s pass
		want             State
	}{
		{"all is well", 5 * time.Second, 5 * time.Second, 5 * time.Second, Active},
		{"suspended: only boot time went on", time.Hour, 5 * time.Second, 5 * time.Second, Lost},
		{"suspended, without boot time: the wall clock was set right", 0, time.Hour, 5 * time.Second, Lost},
		{"the wall clock is stepped back", 5 * time.Second, -time.Hour, 5 * time.Second, Active},
		{"the wall clock is stepped back and time is up", 27 * time.Second, -time.Hour, 27 * time.Second, Lost},
		{"the wall clock is stepped ahead", 5 * time.Second, time.Hour, 5 * time.Second, Lost},
		{"everything stands still", 0, 0, 0, Active},
	} {
		t.Run(c.name, func(t *testing.T) {
			var mu sync.Mutex
			start := Reading{Time: time.Now(), Boot: 1000 * time.Hour}
			now := start
			clock := func() Reading {
				mu.Lock()
				defer mu.Unlock()
				return now
			}
			inBubble(t, Config{Clock: clock, ManualRenewal: true}, func(f *fixture) {
				l := f.acquire("x")
				require.Equal(f, Active, l.State())
				mu.Lock()
				now = Reading{Time: start.Time.Add(c.mono), Boot: start.Boot + c.boot}
				if c.wall != c.mono { // a Time has one reading of each; without the monotonic one, the wall's counts
					now.Time = start.Time.Round(0).Add(c.wall)
					now.Boot = start.Boot + max(c.boot, c.mono)
				}
				mu.Unlock()
				require.Equal(f, c.want, l.State(), "asked, without any timer having fired")
				require.Equal(f, c.want == Lost, l.Check(0) != nil)
			})
		})
	}
}

// A machine that was suspended: the context ends within an interval of its resuming, and nothing spins until then.
func TestSuspendIsNoticed(t *testing.T) {
	for _, manual := range []bool{false, true} {
		var mu sync.Mutex
		var boot time.Duration
		reads := 0
		clock := func() Reading {
			mu.Lock()
			defer mu.Unlock()
			reads++
			return Reading{Time: time.Now(), Boot: boot}
		}
		inBubble(t, Config{Clock: clock, ManualRenewal: manual}, func(f *fixture) {
			l := f.acquire("x")
			f.at(time.Second)
			mu.Lock()
			boot, reads = time.Hour, 0
			mu.Unlock()
			<-l.Context().Done()
			require.LessOrEqual(f, time.Since(f.began), 11*time.Second)
			require.ErrorIs(f, context.Cause(l.Context()), ErrNotRenewed)
			mu.Lock()
			defer mu.Unlock()
			require.Less(f, reads, 100)
		})
	}
}

// A lease that is about to end does not cost the others their renewal.
func TestShortLivedLeaseCostsTheOthersNothing(t *testing.T) {
	inBubble(t, Config{MaxHold: 10*time.Second + 20*time.Millisecond}, func(f *fixture) {
		f.store.onRenew = func(ctx context.Context, _ []string) error { // a database that takes its time
			select {
			case <-ctx.Done():
				return ctx.Err()
			case <-time.After(300 * time.Millisecond):
				return nil
			}
		}
		ends := f.acquire("ends")
		f.at(5 * time.Second)
		stays := f.acquire("stays")
		f.at(11 * time.Second)
		require.ErrorIs(f, ends.Err(), ErrMaxHold)
		require.Equal(f, Active, stays.State())
		_, renews, _ := f.store.count()
		require.Equal(f, 1, renews, "and it did not have to be asked again")
	})
}

func TestCloseAndAbandon(t *testing.T) {
	for _, release := range []bool{true, false} {
		t.Run(fmt.Sprintf("release=%v", release), func(t *testing.T) {
			inBubble(t, Config{}, func(f *fixture) {
				var leases []*Lease
				for i := range 20 {
					leases = append(leases, f.acquire(fmt.Sprintf("x-%d", i)))
				}
				waited := make(chan error)
				f.store.set(func() { f.store.rows["held"] = &fakeRow{expires: time.Now().Add(time.Hour)} })
				go func() {
					_, err := f.client.Acquire(context.Background(), "held")
					waited <- err
				}()
				synctest.Wait()
				if release {
					require.NoError(f, f.client.Close(f.Context()))
				} else {
					require.NoError(f, f.client.Abandon())
				}
				require.ErrorIs(f, <-waited, ErrClosed)
				_, _, releases := f.store.count()
				for _, l := range leases {
					require.Error(f, l.Context().Err())
					require.Equal(f, release, f.store.rows[l.Name()].free)
				}
				if release {
					require.Equal(f, 20, releases)
					require.Empty(f, f.losses(), "a release is no loss")
				} else {
					require.Zero(f, releases)
					require.Len(f, f.losses(), 20, "Abandon waits until all have been told")
					require.ErrorIs(f, f.losses()[0], ErrClosed)
				}
				_, err := f.client.TryAcquire(f.Context(), "x")
				require.ErrorIs(f, err, ErrClosed)
				require.NoError(f, f.client.Close(f.Context()), "a second time does nothing")
			})
		})
	}
}

// Close waits for nothing that does not end: not for an acquire that hangs, nor for releases that nobody answers.
func TestCloseIsBounded(t *testing.T) {
	inBubble(t, Config{TTL: time.Hour}, func(f *fixture) {
		f.acquire("x")
		f.store.set(func() {
			f.store.afterwards = func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() }
			f.store.onRelease = func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() }
		})
		acquired := make(chan error, 1)
		go func() {
			_, err := f.client.TryAcquire(f.Context(), "y")
			acquired <- err
		}()
		synctest.Wait()
		ctx, cancel := context.WithTimeout(f.Context(), 3*time.Second)
		defer cancel()
		began := time.Now()
		err := f.client.Close(ctx)
		require.ErrorContains(f, err, "release not confirmed")
		require.Equal(f, 3*time.Second, time.Since(began))
		require.ErrorIs(f, <-acquired, ErrClosed)
	})
}

// Work that releases its lease itself has done nothing wrong.
func TestDoWhoseWorkReleases(t *testing.T) {
	inBubble(t, Config{}, func(f *fixture) {
		require.NoError(f, f.client.Do(f.Context(), "x", func(ctx context.Context, l *Lease) error { return l.Release(ctx) }))
	})
}

func TestWaitingAsksSeldom(t *testing.T) {
	inBubble(t, Config{PollEvery: 10 * time.Second}, func(f *fixture) {
		f.store.rows["x"] = &fakeRow{token: "other", holder: "other", fence: 2, expires: time.Now().Add(25 * time.Second)}
		f.store.fence = 2
		got := make(chan *Lease, 100)
		for range cap(got) {
			go func() {
				l, err := f.client.Acquire(f.Context(), "x")
				require.NoError(f, err)
				got <- l
			}()
		}
		f.at(25*time.Second - time.Millisecond)
		acquires, _, _ := f.store.count()
		require.LessOrEqual(f, acquires, 4, "one of a hundred asks, every 10 s")
		require.Empty(f, got)
		f.at(25*time.Second + 2*time.Millisecond)
		require.Len(f, got, 1, "at the very moment at which the other's lease expires")

		// One after the other, without asking the database while we hold it ourselves.
		before, _, _ := f.store.count()
		for i := range cap(got) {
			l := <-got
			require.EqualValues(f, 4+2*i, l.Fence())
			time.Sleep(time.Minute)
			require.NoError(f, l.Release(f.Context()))
			synctest.Wait()
		}
		acquires, _, _ = f.store.count()
		require.Equal(f, 99, acquires-before)
	})
}

func TestWaitingOutlastsTroubleForATTL(t *testing.T) {
	refused := &pgconn.ConnectError{}
	inBubble(t, Config{}, func(f *fixture) {
		f.store.onAcquire = func(context.Context, acquireRequest) error { return refused }
		go func() {
			time.Sleep(20 * time.Second)
			f.store.set(func() { f.store.onAcquire = nil })
		}()
		_, err := f.client.Acquire(f.Context(), "x")
		require.NoError(f, err)
		acquires, _, _ := f.store.count()
		require.Less(f, acquires, 40, "backing off")

		f.store.set(func() { f.store.onAcquire = func(context.Context, acquireRequest) error { return refused } })
		began := time.Now()
		_, err = f.client.Acquire(f.Context(), "y")
		require.ErrorContains(f, err, "gave up")
		require.Less(f, time.Since(began), time.Minute)
	})
}

func TestEvents(t *testing.T) {
	var mu sync.Mutex
	var events []Event
	observe := func(e Event) {
		mu.Lock()
		defer mu.Unlock()
		events = append(events, e)
	}
	inBubble(t, Config{Observe: observe}, func(f *fixture) {
		err := f.client.Do(f.Context(), "x", func(ctx context.Context, l *Lease) error {
			time.Sleep(15 * time.Second)
			f.store.set(func() { f.store.outcome["x"] = outcomeLost })
			<-ctx.Done()
			time.Sleep(4 * time.Second) // cannot stop at once
			return nil
		})
		require.ErrorIs(f, err, ErrLost)
		l := f.acquire("y")
		require.NoError(f, l.Release(f.Context()))
	})
	mu.Lock()
	defer mu.Unlock()
	require.Len(t, events, 7)
	require.Equal(t, AcquireEvent{Name: "x", Attempts: 1, Fence: 2}, events[0])
	require.Equal(t, RenewEvent{Leases: 1, Renewed: 1, Left: 17 * time.Second}, events[1])
	loss := events[2].(LossEvent)
	require.Equal(t, 20*time.Second, loss.Held)
	require.ErrorIs(t, loss.Cause, ErrSuperseded)
	require.Equal(t, RenewEvent{Leases: 1, Lost: 1, Left: 17 * time.Second}, events[3])
	end := events[4].(EndEvent)
	require.True(t, end.Lost)
	require.Equal(t, 4*time.Second, end.RanOn)
	require.Equal(t, 20*time.Second, end.Held)
	require.Equal(t, "y", events[5].(AcquireEvent).Name)
	require.Equal(t, EndEvent{Name: "y", Fence: 4}, events[6])
}
