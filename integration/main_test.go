// Package integration tests writegate as its users meet it: through the public packages, on a real PostgreSQL.
package integration

import (
	"context"
	"log/slog"
	"os"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/writegate/writegate/fencedb"
	"github.com/writegate/writegate/internal/pgtest"
	"github.com/writegate/writegate/leasedb"
)

func TestMain(m *testing.M) {
	slog.SetDefault(slog.New(slog.DiscardHandler)) // refusals and losses are what these tests are about
	var err error
	if binaries, err = os.MkdirTemp("", "writegate-bin-"); err != nil {
		panic(err)
	}
	code := pgtest.Run(m)
	_ = os.RemoveAll(binaries)
	os.Exit(code)
}

// bed is a database with writegate's schema and a protected table app.orders with rows 1, 2 and 3.
type bed struct {
	t    *testing.T
	cfg  *pgx.ConnConfig
	pool *pgxpool.Pool
	gate *fencedb.Gate
}

const ordersSQL = `
	CREATE SCHEMA app;
	CREATE TABLE app.orders (id int PRIMARY KEY, v text NOT NULL);
	INSERT INTO app.orders VALUES (1, 'first'), (2, 'first'), (3, 'first');
	SELECT fence.protect('app.orders')`

func newBed(t *testing.T) *bed {
	t.Helper()
	cfg := pgtest.New(t)
	pgtest.Exec(t, cfg, ordersSQL)
	return bedOn(t, cfg)
}

// bedOn is a bed on a database that has the schema and the table already.
func bedOn(t *testing.T, cfg *pgx.ConnConfig) *bed {
	t.Helper()
	// Before everything that is cleaned up, so that it looks when all that has been.
	options := []goleak.Option{goleak.IgnoreCurrent()}
	for _, f := range []string{"/toxics.(*ToxicStub).Run", ".(*ToxicLink).read", ".(*ToxicLink).write"} {
		// The proxy between is not under test, and ends its goroutines when it pleases.
		options = append(options, goleak.IgnoreAnyFunction("github.com/Shopify/toxiproxy/v2"+f))
	}
	t.Cleanup(func() { goleak.VerifyNone(t, options...) })
	b := &bed{t: t, cfg: cfg, pool: pgtest.Pool(t, cfg)}
	b.gate = fencedb.New(b.pool, fencedb.Config{})
	t.Cleanup(b.gate.Close)
	return b
}

func (b *bed) exec(sql string) {
	b.t.Helper()
	pgtest.Exec(b.t, b.cfg, sql)
}

// table returns app.orders as the gate sees it.
func (b *bed) table() *fencedb.Table {
	b.t.Helper()
	table, err := b.gate.Table(context.Background(), "app.orders")
	require.NoError(b.t, err)
	return table
}

// client returns a lease client that is closed when the test ends.
func (b *bed) client(cfg leasedb.Config) *leasedb.Client {
	b.t.Helper()
	if cfg.TTL == 0 {
		cfg.TTL = 30 * time.Second
	}
	client, err := leasedb.New(context.Background(), b.pool, cfg)
	require.NoError(b.t, err)
	b.t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		_ = client.Close(ctx) // what its leases have to say is the test's business
	})
	return client
}

func (b *bed) acquire(client *leasedb.Client, name string) *leasedb.Lease {
	b.t.Helper()
	lease, err := client.TryAcquire(context.Background(), name)
	require.NoError(b.t, err)
	return lease
}

// query returns the single value that sql selects.
func query[T any](b *bed, sql string, args ...any) T {
	b.t.Helper()
	var v T
	require.NoError(b.t, b.pool.QueryRow(context.Background(), sql, args...).Scan(&v))
	return v
}

// session opens a connection of its own, closed when the test ends.
func (b *bed) session() *pgx.Conn {
	b.t.Helper()
	return pgtest.Conn(b.t, b.cfg)
}

// waitUntilBlocked returns once a session of the database waits for a lock, which the server shows.
func (b *bed) waitUntilBlocked() {
	b.t.Helper()
	deadline := time.Now().Add(30 * time.Second)
	for time.Now().Before(deadline) {
		if query[int](b, `SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'`) > 0 {
			return
		}
		time.Sleep(2 * time.Millisecond) // there is no event to wait for: another session's lock wait
	}
	b.t.Fatal("no session came to wait for a lock")
}

// age moves a lease's whole term into the past, as if that much time had gone by.
func (b *bed) age(name string, by time.Duration) {
	b.t.Helper()
	_, err := b.pool.Exec(context.Background(), ageSQL, name, by)
	require.NoError(b.t, err)
}

const ageSQL = `
	UPDATE fence.lease SET granted_at = granted_at - $2::interval, renewed_at = renewed_at - $2::interval,
	       expires_at = expires_at - $2::interval WHERE name = $1`

// together calls work n times at once, and none may fail.
func together(t *testing.T, n int, work func(i int) error) {
	t.Helper()
	begin, errs := make(chan struct{}), make(chan error, n)
	for i := range n {
		go func() {
			<-begin
			errs <- work(i)
		}()
	}
	close(begin)
	for range n {
		require.NoError(t, <-errs)
	}
}
