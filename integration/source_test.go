package integration

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/writegate/writegate/fencedb"
	"github.com/writegate/writegate/internal/migrate"
	"github.com/writegate/writegate/internal/pgtest"
	"github.com/writegate/writegate/leasedb"
)

// A sequence that somebody has tampered with grants nothing, and says what is wrong with it. (C24, C27)
func TestTamperedSequenceGrantsNothing(t *testing.T) {
	ctx := context.Background()
	for change, want := range map[string]string{
		`ALTER SEQUENCE fence.fence_seq CACHE 10`:                                                                          "caches 10 values a session",
		`ALTER SEQUENCE fence.fence_seq CYCLE`:                                                                             "cycles",
		`ALTER SEQUENCE fence.fence_seq INCREMENT BY 1`:                                                                    "increments by 1",
		`ALTER SEQUENCE fence.fence_seq AS integer MAXVALUE 1000`:                                                          "is not bigint",
		`ALTER SEQUENCE fence.fence_seq SET UNLOGGED`:                                                                      "is not logged", // from PostgreSQL 15 on
		`ALTER SEQUENCE fence.fence_seq CACHE 20; SELECT fence.jump('which does not mend it')`:                             "caches 20 values a session",
		`ALTER SEQUENCE fence.fence_seq OWNED BY fence.lease.fence`:                                                        "is owned by a table's column",
		`ALTER SEQUENCE fence.fence_seq CACHE 5 CYCLE`:                                                                     "caches 5 values a session, not 1, cycles",
		`SELECT setval('fence.fence_seq', 2)`:                                                                              "is not an even number above the last one granted, 10",
		`SELECT setval('fence.fence_seq', 33)`:                                                                             "fence 35 drawn",
		`SELECT setval('fence.fence_seq', 9007199254740990)`:                                                               "2200H",
		`DROP SEQUENCE fence.fence_seq; CREATE SEQUENCE fence.fence_seq INCREMENT BY 2 MINVALUE 2 START 9007199254740990;`: "fences are used up",
	} {
		t.Run(want, func(t *testing.T) {
			b := newBed(t)
			client := b.client(leasedb.Config{})
			for range 5 {
				require.NoError(t, b.acquire(client, "x").Release(ctx))
			}
			if want == "fences are used up" {
				b.exec(`UPDATE fence.lease SET fence = 9007199254740000`)
			}
			b.exec(change)
			_, err := client.TryAcquire(ctx, "x")
			require.ErrorIs(t, err, leasedb.ErrFence)
			require.ErrorContains(t, err, want)
			require.NotErrorIs(t, err, leasedb.ErrHeld)
			_, err = client.Acquire(ctx, "x")
			require.ErrorIs(t, err, leasedb.ErrFence, "waiting does not help")
		})
	}
}

// Whatever shows that fences may come from elsewhere than they did, or once more, makes the next grant jump, and the one after it go on
// from there. (C24)
func TestChangedSourceJumps(t *testing.T) {
	ctx := context.Background()
	for change, want := range map[string]string{
		`ALTER SEQUENCE fence.fence_seq RESTART`: "the sequence is base/",
		`DROP SEQUENCE fence.fence_seq; CREATE SEQUENCE fence.fence_seq INCREMENT BY 2 MINVALUE 2 MAXVALUE 9007199254740990`: "the sequence is base/",
		`UPDATE fence.epoch SET timeline = '000000FF'`:                                    "the timeline changed",
		`UPDATE fence.epoch SET server_started_at = server_started_at - interval '1 day'`: "the server was started",
		`UPDATE fence.epoch SET sequence_file = 'base/1/1', server_started_at = now()`:    "the server was started, the sequence is base/",
	} {
		t.Run(change, func(t *testing.T) {
			b := newBed(t)
			client := b.client(leasedb.Config{})
			last := b.acquire(client, "x")
			b.exec(change)
			next := b.acquire(client, "y")
			require.Greater(t, next.Fence(), last.Fence()+1<<20)
			require.Contains(t, query[string](b, `SELECT reason FROM fence.epoch ORDER BY id DESC LIMIT 1`), want)
			require.Equal(t, next.Fence()+2, b.acquire(client, "z").Fence(), "one jump a change")
			require.NoError(t, last.Renew(ctx))
		})
	}
}

// Nobody is ever granted a fence twice, whatever many sessions do at once, also while the source of fences changes.
func TestNeverTwoGrantsWithOneFence(t *testing.T) {
	const workers, rounds = 10, 40
	ctx := context.Background()
	b := newBed(t)
	var wait sync.WaitGroup
	fences := make(chan int64, workers*rounds)
	for w := range workers {
		client := b.client(leasedb.Config{LockWait: 30 * time.Second, TTL: 5 * time.Minute, Conns: 1})
		wait.Go(func() {
			for r := range rounds {
				if w == 0 && r%10 == 5 {
					b.exec(`UPDATE fence.epoch SET server_started_at = server_started_at - interval '1s'`) // as a restart looks
				}
				lease, err := client.Acquire(ctx, fmt.Sprintf("x-%d", r%3))
				if err != nil {
					t.Error(err)
					return
				}
				fences <- lease.Fence()
				if err := lease.Release(ctx); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wait.Wait()
	close(fences)
	seen := map[int64]bool{}
	for f := range fences {
		require.False(t, seen[f], "fence %d was granted twice", f)
		require.Zero(t, f%2)
		seen[f] = true
	}
	require.Len(t, seen, workers*rounds)
	require.Equal(t, 5, query[int](b, `SELECT count(*) FROM fence.epoch`), "each change makes one jump, however many notice it at once")
}

// A database that went back in time without noticing is noticed by whatever client of a process that has seen more.
func TestHighWaterMarkIsTheProcesss(t *testing.T) {
	ctx := context.Background()
	b := newBed(t)
	one, other := b.client(leasedb.Config{}), b.client(leasedb.Config{})
	for range 5 {
		require.NoError(t, b.acquire(one, "x").Release(ctx))
	}
	b.exec(`TRUNCATE fence.lease, fence.term; SELECT setval('fence.fence_seq', 2, false)`) // all that it knew is gone
	_, err := other.TryAcquire(ctx, "x")
	require.ErrorIs(t, err, leasedb.ErrFence)
	require.ErrorContains(t, err, "fence 2 was granted, but this process has seen 10")
}

// Many who notice a change at the same moment make one jump.
func TestOneJumpForAChange(t *testing.T) {
	const sessions = 5
	ctx := context.Background()
	b := newBed(t)
	client := b.client(leasedb.Config{LockWait: time.Minute, TTL: time.Hour, Conns: sessions})
	b.acquire(client, "first")
	b.exec(`UPDATE fence.epoch SET server_started_at = server_started_at - interval '1s'`) // as a restart looks
	c := b.session()
	_, err := c.Exec(ctx, `BEGIN; LOCK TABLE fence.epoch IN EXCLUSIVE MODE`) // which still lets it be read
	require.NoError(t, err)
	done := make(chan error, sessions)
	for i := range sessions {
		go func() {
			_, err := client.TryAcquire(ctx, fmt.Sprintf("x-%d", i))
			done <- err
		}()
	}
	require.Eventually(t, func() bool {
		return query[int](b, `SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'`) == sessions
	}, 30*time.Second, 5*time.Millisecond)
	_, err = c.Exec(ctx, `COMMIT`)
	require.NoError(t, err)
	for range sessions {
		require.NoError(t, <-done)
	}
	require.Equal(t, 2, query[int](b, `SELECT count(*) FROM fence.epoch`))
}

// Leases that were copied to another server without their sequence: the first grant there is above them. (C24)
func TestSequenceBehindTheLeases(t *testing.T) {
	b := newBed(t)
	b.exec(`INSERT INTO fence.lease (name, fence) VALUES ('x', 80); INSERT INTO fence.term (fence, name, holder, ttl, granted_at) VALUES (80, 'x', 'A', '1s', now());
		UPDATE app.orders SET last_fence = 80 WHERE id = 1`)
	lease := b.acquire(b.client(leasedb.Config{}), "another name")
	require.Greater(t, lease.Fence(), int64(80))
	_, err := b.table().Update(context.Background(), lease, order1, fencedb.Set{"v": "x"})
	require.NoError(t, err)
	require.Contains(t, query[string](b, `SELECT reason FROM fence.epoch`), "behind the leases")
}

// A fence column that came with fences of another source: ours are above them from then on.
func TestAdoptedFenceColumn(t *testing.T) {
	b := newBed(t)
	b.exec(`CREATE TABLE app.adopted (id int PRIMARY KEY, v text, last_fence bigint NOT NULL); INSERT INTO app.adopted VALUES (1, 'old', 5000);
		SELECT fence.protect('app.adopted')`)
	lease := b.acquire(b.client(leasedb.Config{}), "x")
	require.Greater(t, lease.Fence(), int64(5000))
	table, err := b.gate.Table(context.Background(), "app.adopted")
	require.NoError(t, err)
	_, err = table.Update(context.Background(), lease, order1, fencedb.Set{"v": "x"})
	require.NoError(t, err)
}

// own returns a bed on a server that is the test's alone.
func own(t *testing.T, settings ...string) (*bed, *pgtest.Server) {
	t.Helper()
	server := pgtest.Own(t, settings...)
	cfg := server.Config("")
	_, err := migrate.Up(context.Background(), cfg)
	require.NoError(t, err)
	pgtest.Exec(t, cfg, ordersSQL)
	return bedOn(t, cfg), server
}

// A crash loses what was not on disk; a grant always is, whatever the role's defaults say, and what comes after the
// crash is above anything that was out there before. (C25)
func TestCrash(t *testing.T) {
	ctx := context.Background()
	b, server := own(t, "synchronous_commit = off", "wal_writer_delay = 10s")
	client := b.client(leasedb.Config{TTL: time.Hour})
	require.EqualValues(t, 2, b.acquire(client, "warm-up").Fence())
	last := b.acquire(client, "x")
	server.Restart(t, "immediate")
	require.NoError(t, b.pool.Ping(ctx)) // the first one on a dead connection may fail; a pool replaces it
	require.Equal(t, last.Fence(), query[int64](b, `SELECT fence FROM fence.lease WHERE name = 'x'`), "the grant survived")
	require.NoError(t, last.Renew(ctx), "and its holder goes on")

	next := b.acquire(client, "y")
	require.Greater(t, next.Fence(), last.Fence()+1<<20)
	require.Equal(t, "the server was started", query[string](b, `SELECT reason FROM fence.epoch ORDER BY id DESC LIMIT 1`))
	require.Equal(t, next.Fence()+2, b.acquire(client, "z").Fence(), "one jump a start")
}

// A failover before the first grant has got there: whoever takes over believes that nothing was ever granted. That it is another
// server than the one that the schema was installed on tells it otherwise.
func TestFailoverThatLosesEveryGrant(t *testing.T) {
	ctx := context.Background()
	b, primary := own(t)
	standby := primary.Standby(t)
	waitForReplay(t, b, standby)
	cutOff(t, b, standby)
	lost := factsOf(b.acquire(b.client(leasedb.Config{TTL: time.Hour}), "x"))
	require.EqualValues(t, 2, lost.Fence(), "nothing jumps where nothing has happened")
	primary.Halt(t, "immediate")
	standby.Promote(t)
	after := bedOn(t, standby.Config(""))
	lawful := after.acquire(after.client(leasedb.Config{TTL: time.Hour}), "x")
	require.Greater(t, lawful.Fence(), lost.Fence())
	_, err := after.table().Update(ctx, lawful, order1, fencedb.Set{"v": "lawful"})
	require.NoError(t, err)
	_, err = after.table().Update(ctx, lost, order1, fencedb.Set{"v": "lost"})
	require.ErrorIs(t, err, fencedb.ErrStale)
}

// An asynchronous failover: the new primary has not heard of the last grants, whose holders live on. None of their
// writes wins over the lawful holders' there, and no fence is granted twice. (F1, F2)
func TestFailoverThatLosesGrants(t *testing.T) {
	ctx := context.Background()
	b, primary := own(t)
	client := b.client(leasedb.Config{Holder: "before", TTL: time.Hour, ManualRenewal: true})
	require.NoError(t, b.acquire(client, "x").Release(ctx))
	standby := primary.Standby(t)
	waitForReplay(t, b, standby)
	cutOff(t, b, standby)
	var lostGrant *leasedb.Lease
	for range 60 { // more than the 32 values that a sequence logs ahead
		lostGrant = b.acquire(client, "x")
		if err := lostGrant.Release(ctx); err != nil {
			t.Fatal(err)
		}
	}
	lost := factsOf(b.acquire(client, "x"))

	primary.Halt(t, "immediate")
	standby.Promote(t)
	after := bedOn(t, standby.Config(""))
	clientAfter := after.client(leasedb.Config{Holder: "after", TTL: time.Hour})
	lawful := after.acquire(clientAfter, "x")
	require.Greater(t, lawful.Fence(), lost.Fence())
	table := after.table()
	_, err := table.Update(ctx, lawful, order1, fencedb.Set{"v": "lawful"})
	require.NoError(t, err)
	_, err = table.Update(ctx, lost, order1, fencedb.Set{"v": "lost"})
	require.ErrorIs(t, err, fencedb.ErrStale)
	_, err = table.Update(ctx, lost, fencedb.Key{"id": 2}, fencedb.Set{"v": "lost"}, fencedb.WithStrength(fencedb.Live))
	require.ErrorIs(t, err, fencedb.ErrLeaseLost)
	require.Equal(t, "lawful", query[string](after, `SELECT v FROM app.orders WHERE id = 1`))
	require.Contains(t, query[string](after, `SELECT reason FROM fence.epoch ORDER BY id DESC LIMIT 1`), "the timeline changed")
}

// A standby says that it is read-only, to whoever acquires and to whoever writes. (C28)
func TestStandbyIsReadOnly(t *testing.T) {
	ctx := context.Background()
	b, primary := own(t)
	standby := primary.Standby(t)
	waitForReplay(t, b, standby)
	onStandby := bedOn(t, standby.Config(""))
	client := onStandby.client(leasedb.Config{})
	_, err := client.TryAcquire(ctx, "x")
	require.ErrorIs(t, err, leasedb.ErrReadOnly)
	outcome, err := onStandby.table().Update(ctx, fencedb.Static("x", 2, "me"), order1, fencedb.Set{"v": "x"})
	require.Equal(t, fencedb.Failed, outcome)
	require.ErrorContains(t, err, "25006")
}

// A synchronous wait that is cancelled leaves the grant on this server alone; it is not handed out. (F7)
func TestGrantThatWasNotReplicated(t *testing.T) {
	ctx := context.Background()
	// Commits of a default kind do not wait for the standby that never comes; a grant does.
	b, _ := own(t, "synchronous_standby_names = 'nobody'", "synchronous_commit = local")
	client := b.client(leasedb.Config{TTL: time.Hour})
	done := make(chan error, 1)
	go func() {
		_, err := client.TryAcquire(ctx, "x")
		done <- err
	}()
	require.Eventually(t, func() bool {
		return query[bool](b, `SELECT coalesce(bool_or(pg_cancel_backend(pid)), false) FROM pg_stat_activity WHERE wait_event = 'SyncRep'`)
	}, 30*time.Second, 5*time.Millisecond)
	err := <-done
	require.ErrorIs(t, err, leasedb.ErrFence)
	require.ErrorContains(t, err, "synchronous standby was cancelled")
	require.NoError(t, client.Close(ctx)) // waits until it has been given back
	require.Equal(t, 0, query[int](b, `SELECT count(*) FROM fence.lease WHERE released_at IS NULL AND expires_at > clock_timestamp()`))
	require.Equal(t, 1, query[int](b, `SELECT count(*) FROM fence.term`), "it had been committed here")
}

// Where the functions that tell the timeline are revoked, as on some managed services, grants go on, and say so once.
func TestTimelineThatCannotBeRead(t *testing.T) {
	b, server := own(t)
	b.exec(`REVOKE EXECUTE ON FUNCTION pg_walfile_name(pg_lsn), pg_control_system() FROM PUBLIC;
		CREATE ROLE plain; GRANT ALL ON SCHEMA fence TO plain; GRANT ALL ON ALL TABLES IN SCHEMA fence TO plain; GRANT ALL ON SEQUENCE fence.fence_seq TO plain;
		ALTER FUNCTION fence.acquire OWNER TO plain; ALTER FUNCTION fence.check_source OWNER TO plain; ALTER FUNCTION fence.jump OWNER TO plain;
		ALTER FUNCTION fence.timeline OWNER TO plain; ALTER FUNCTION fence.add_lease OWNER TO plain; ALTER FUNCTION fence.sequence_wrong OWNER TO plain`)
	var notices []string
	cfg := b.cfg.Copy()
	cfg.OnNotice = func(_ *pgconn.PgConn, n *pgconn.Notice) { notices = append(notices, n.Message) }
	conn, err := pgx.ConnectConfig(context.Background(), cfg)
	require.NoError(t, err)
	defer func() { _ = conn.Close(context.Background()) }()
	acquire := func(name string) (fence int64) {
		err := conn.QueryRow(context.Background(), `SELECT fence FROM fence.acquire($1, 'A', '1 hour', gen_random_uuid())`, name).Scan(&fence)
		require.NoError(t, err)
		return fence
	}
	first := acquire("x") // after a jump: it could be read when the schema was installed
	require.Equal(t, first+2, acquire("y"))
	require.Len(t, notices, 1)
	require.Contains(t, notices[0], "the WAL timeline cannot be read")
	require.True(t, query[bool](b, `SELECT timeline IS NULL FROM fence.epoch ORDER BY id DESC LIMIT 1`))

	// What can be read from one grant on is looked at, and may be revoked once more.
	b.exec(`GRANT EXECUTE ON FUNCTION pg_walfile_name(pg_lsn) TO plain`)
	readable := acquire("u")
	require.Greater(t, readable, first+1<<20)
	require.Equal(t, readable+2, acquire("v"))
	b.exec(`REVOKE EXECUTE ON FUNCTION pg_walfile_name(pg_lsn) FROM plain`)
	first = acquire("w")
	require.Greater(t, first, readable+1<<20)

	// A restart is noticed all the same.
	require.NoError(t, conn.Close(context.Background()))
	server.Restart(t, "fast")
	conn, err = pgx.ConnectConfig(context.Background(), cfg)
	require.NoError(t, err)
	require.Greater(t, acquire("z"), first+1<<20)
}

// cutOff has nothing reach the standby any more.
func cutOff(t *testing.T, b *bed, standby *pgtest.Server) {
	t.Helper()
	pgtest.Exec(t, standby.Config(""), `ALTER SYSTEM SET primary_conninfo = ''`) // by itself: not in a transaction
	pgtest.Exec(t, standby.Config(""), `SELECT pg_reload_conf()`)
	require.Eventually(t, func() bool {
		return query[int](b, `SELECT count(*) FROM pg_stat_replication`) == 0
	}, 30*time.Second, 10*time.Millisecond)
}

// waitForReplay returns once the standby has all that the primary has written so far.
func waitForReplay(t *testing.T, b *bed, standby *pgtest.Server) {
	t.Helper()
	ctx := context.Background()
	conn, err := pgx.ConnectConfig(ctx, standby.Config(""))
	require.NoError(t, err)
	defer func() { _ = conn.Close(ctx) }()
	lsn := query[string](b, `SELECT pg_current_wal_lsn()::text`)
	require.Eventually(t, func() bool {
		var there bool
		require.NoError(t, conn.QueryRow(ctx, `SELECT coalesce(pg_last_wal_replay_lsn() >= $1::pg_lsn, false)`, lsn).Scan(&there))
		return there
	}, 30*time.Second, 5*time.Millisecond)
}
