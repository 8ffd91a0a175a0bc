package integration

import (
	"context"
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/writegate/writegate/fencedb"
	"github.com/writegate/writegate/internal/audit"
	"github.com/writegate/writegate/internal/migrate"
	"github.com/writegate/writegate/internal/pgtest"
	"github.com/writegate/writegate/leasedb"
)

func (b *bed) findings() string {
	b.t.Helper()
	v, err := audit.Verify(context.Background(), b.pool, b.cfg.Database, audit.VerifyOptions{Only: []string{"sequence-definition", "sequence-behind"}})
	require.NoError(b.t, err)
	require.Empty(b.t, v.Unchecked)
	var ids []string
	for _, f := range v.Findings {
		require.NotEmpty(b.t, f.Fix)
		ids = append(ids, f.ID)
	}
	return strings.Join(ids, ",")
}

// lawfulHolderWrites checks what it is all about after a move: the next holder is not refused, and those of before are.
func (b *bed) lawfulHolderWrites(before int64) {
	b.t.Helper()
	ctx := context.Background()
	table := b.table()
	lease := b.acquire(b.client(leasedb.Config{Holder: "new", TTL: time.Hour}), "after the move")
	require.Greater(b.t, lease.Fence(), before)
	_, err := table.Update(ctx, lease, order1, fencedb.Set{"v": "new"})
	require.NoError(b.t, err)
	_, err = table.Update(ctx, fencedb.Static("x", before, "old"), order1, fencedb.Set{"v": "old"}, fencedb.WithRule(fencedb.Term))
	require.ErrorIs(b.t, err, fencedb.ErrStale)
	require.Empty(b.t, b.findings())
}

// work grants some leases and writes a row under the last.
func (b *bed) work() (fence int64) {
	b.t.Helper()
	client, err := leasedb.New(context.Background(), b.pool, leasedb.Config{Holder: "old", TTL: time.Hour})
	require.NoError(b.t, err)
	defer func() { require.NoError(b.t, client.Close(context.Background())) }()
	for range 40 {
		lease := b.acquire(client, "x")
		fence = lease.Fence()
		_, err := b.table().Update(context.Background(), lease, order1, fencedb.Set{"v": "old"})
		require.NoError(b.t, err)
		require.NoError(b.t, lease.Release(context.Background()))
	}
	return fence
}

// Cutting over by logical replication, with our schema among what is replicated and without. (C24)
func TestCutOverByLogicalReplication(t *testing.T) {
	for _, ours := range []bool{true, false} {
		t.Run(fmt.Sprint(ours), func(t *testing.T) {
			ctx := context.Background()
			old, next := pgtest.Own(t, "wal_level = logical"), pgtest.Own(t)
			setUp := func(s *pgtest.Server) *bed {
				cfg := s.TCP("postgres")
				_, err := migrate.Up(ctx, cfg)
				require.NoError(t, err)
				pgtest.Exec(t, cfg, `CREATE SCHEMA app; CREATE TABLE app.orders (id int PRIMARY KEY, v text NOT NULL); SELECT fence.protect('app.orders')`)
				return bedOn(t, cfg)
			}
			a, b := setUp(old), setUp(next)
			a.exec(`INSERT INTO app.orders VALUES (1, 'first')`)
			fence := a.work()
			tables := "app.orders"
			if ours {
				tables += ", fence.lease, fence.term, fence.tombstone"
			}
			a.exec(`CREATE PUBLICATION moving FOR TABLE ` + tables)
			from := old.TCP("postgres")
			b.exec(fmt.Sprintf(`CREATE SUBSCRIPTION moving CONNECTION 'host=%s port=%d user=%s password=%s dbname=postgres' PUBLICATION moving`,
				from.Host, from.Port, from.User, from.Password))
			b.await(fmt.Sprintf(`SELECT EXISTS (SELECT 1 FROM app.orders WHERE last_fence = %d) AND NOT EXISTS (SELECT 1 FROM pg_subscription_rel WHERE srsubstate <> 'r')`, fence))
			b.exec(`ALTER SUBSCRIPTION moving DISABLE; ALTER SUBSCRIPTION moving SET (slot_name = NONE); DROP SUBSCRIPTION moving`)
			a.pool.Close()
			old.Halt(t, "fast")

			require.Contains(t, b.findings(), "sequence-behind")
			if !ours { // where nobody notices by himself
				_, err := b.pool.Exec(ctx, `SELECT fence.repair('cut over')`)
				require.NoError(t, err)
			}
			b.lawfulHolderWrites(fence)
		})
	}
}

// A dump, whole or of some tables, restored elsewhere; and a guard that comes along. (C24, C30)
func TestCutOverByDump(t *testing.T) {
	for _, selected := range []bool{false, true} {
		t.Run(fmt.Sprint(selected), func(t *testing.T) {
			ctx := context.Background()
			server := pgtest.Own(t) // as old as the pg_dump that is installed with it
			from, next := server.TCP("postgres"), server.TCP("next")
			_, err := migrate.Up(ctx, from)
			require.NoError(t, err)
			pgtest.Exec(t, from, `CREATE DATABASE next`)
			pgtest.Exec(t, from, ordersSQL)
			a := bedOn(t, from)
			fence := a.work()
			a.exec(`SELECT fence.protect('app.orders', guard => 'enforce')`)
			args := []string{"--no-owner", "-d", server.URL(a.cfg.Database)}
			if selected {
				args = append(args, "-t", "app.orders")
				_, err := migrate.Up(ctx, next)
				require.NoError(t, err)
				pgtest.Exec(t, next, `CREATE SCHEMA app`)
			}
			dump := exec.Command(program(t, "pg_dump"), args...)
			restore := exec.Command(program(t, "psql"), "-X", "-q", "-v", "ON_ERROR_STOP=1", "-d", server.URL(next.Database))
			pipe, err := dump.StdoutPipe()
			require.NoError(t, err)
			restore.Stdin = pipe
			require.NoError(t, dump.Start())
			out, err := restore.CombinedOutput()
			require.NoError(t, err, string(out))
			require.NoError(t, dump.Wait())
			b := bedOn(t, next)
			require.Equal(t, fence, query[int64](b, fenceOf1), "as it was")
			if selected {
				// It comes with its guard and without our sequence, and nobody has noticed yet.
				b.exec(`INSERT INTO fence.protected_table (relation) VALUES ('app.orders')`)
				require.Equal(t, "sequence-behind", b.findings())
				b.exec(`SELECT fence.repair('restored')`)
			} else {
				require.Empty(t, b.findings())
				require.Equal(t, "O", query[string](b, `SELECT tgenabled::text FROM pg_trigger WHERE tgname = '~writegate_guard'`))
				_, err := b.pool.Exec(ctx, `UPDATE app.orders SET v = 'unfenced'`)
				require.ErrorContains(t, err, "WG008")
			}
			b.lawfulHolderWrites(fence)
		})
	}
}

// program finds one of PostgreSQL's, which Debian keeps off the PATH.
func program(t *testing.T, name string) string {
	t.Helper()
	if path, err := exec.LookPath(name); err == nil {
		return path
	}
	found, _ := filepath.Glob("/usr/lib/postgresql/*/bin/" + name)
	require.NotEmpty(t, found, "%s comes with PostgreSQL's client", name)
	return found[len(found)-1]
}

// A database made from another as its template has that one's leases and its sequence, under another oid.
func TestTemplateCopy(t *testing.T) {
	a := newBed(t)
	fence := a.work()
	a.pool.Close()
	admin, copied := pgtest.Shared(t).Config(""), a.cfg.Copy()
	copied.Database += "_copy"
	require.Eventually(t, func() bool { // until the server has seen that nobody is connected any more
		conn, err := pgx.ConnectConfig(context.Background(), admin)
		require.NoError(t, err)
		defer func() { _ = conn.Close(context.Background()) }()
		_, err = conn.Exec(context.Background(), `CREATE DATABASE `+copied.Database+` TEMPLATE `+a.cfg.Database)
		return err == nil
	}, 30*time.Second, 50*time.Millisecond)
	t.Cleanup(func() { pgtest.Exec(t, admin, `DROP DATABASE `+copied.Database+` WITH (FORCE)`) })
	b := bedOn(t, copied)
	b.lawfulHolderWrites(fence)
	require.Contains(t, query[string](b, `SELECT reason FROM fence.epoch ORDER BY id DESC LIMIT 1`), "the sequence is base/")
}

// Recovery to a point in time takes the sequence back together with everything else, while those who were granted a lease
// since hold on to it. The next grant notices. (F3)
func TestPointInTimeRecovery(t *testing.T) {
	ctx := context.Background()
	old := pgtest.Own(t, "archive_mode = on", "wal_level = replica")
	archive := old.Archive(t)
	cfg := old.TCP("postgres")
	_, err := migrate.Up(ctx, cfg)
	require.NoError(t, err)
	pgtest.Exec(t, cfg, ordersSQL)
	a := bedOn(t, cfg)
	backup := old.Backup(t)
	a.work()
	a.exec(`SELECT pg_create_restore_point('before')`)
	lost := a.work()
	segment := query[string](a, `SELECT pg_walfile_name(pg_current_wal_lsn())`)
	a.exec(`SELECT pg_switch_wal()`)
	a.await(`SELECT coalesce(last_archived_wal >= '` + segment + `', false) FROM pg_stat_archiver`)
	a.pool.Close()
	old.Halt(t, "fast")

	backup.Recover(t, archive, "before")
	b := bedOn(t, backup.TCP("postgres"))
	b.await(`SELECT NOT pg_is_in_recovery()`)
	require.Less(t, query[int64](b, fenceOf1), lost, "what came after is gone")
	b.lawfulHolderWrites(lost)
	require.Contains(t, query[string](b, `SELECT reason FROM fence.epoch ORDER BY id DESC LIMIT 1`), "the timeline changed")
}

// TRUNCATE … RESTART IDENTITY does not reach the sequence; setval does, and is found out twice.
func TestSequenceThatWasTakenBack(t *testing.T) {
	ctx := context.Background()
	b := newBed(t)
	fence := b.work()
	b.exec(`TRUNCATE fence.lease, fence.rejection RESTART IDENTITY CASCADE`)
	require.Empty(t, b.findings())
	b.exec(`SELECT setval('fence.fence_seq', 2)`)
	require.Contains(t, b.findings(), "sequence-behind")
	_, err := b.client(leasedb.Config{TTL: time.Hour}).TryAcquire(ctx, "x")
	require.ErrorIs(t, err, leasedb.ErrFence)
	b.exec(`ALTER SEQUENCE fence.fence_seq CACHE 10; SELECT fence.repair()`)
	require.Equal(t, "sequence-definition", b.findings())
	b.exec(`ALTER SEQUENCE fence.fence_seq CACHE 1`)
	b.lawfulHolderWrites(fence)
}

// Repairing while leases are granted takes none back, gives none twice, and none out of order.
func TestRepairAmongGrants(t *testing.T) {
	b := newBed(t)
	stop := make(chan struct{})
	var wait sync.WaitGroup
	for i := range 4 {
		wait.Go(func() {
			conn := b.session()
			last := int64(0)
			for {
				select {
				case <-stop:
					return
				default:
				}
				var fence int64
				err := conn.QueryRow(context.Background(), `SELECT fence FROM fence.acquire($1, 'h', '1 hour', gen_random_uuid(), '10 seconds')`, fmt.Sprint(i, last)).Scan(&fence)
				if err != nil || fence <= last {
					t.Errorf("%d after %d: %v", fence, last, err)
					return
				}
				last = fence
			}
		})
	}
	repairing := b.session()
	for range 10 {
		var at int64
		require.NoError(t, repairing.QueryRow(context.Background(), `SELECT fence.repair('test')`).Scan(&at))
	}
	close(stop)
	wait.Wait()
	require.Equal(t, 0, query[int](b, `SELECT count(*) FROM (SELECT fence FROM fence.term GROUP BY fence HAVING count(*) > 1) d`))
	require.Equal(t, 0, query[int](b, `SELECT count(*) FROM fence.epoch a JOIN fence.epoch c ON c.id > a.id AND c.jumped_to <= a.jumped_to`))
}
