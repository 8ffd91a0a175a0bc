// Package clients runs other people's clients against a guarded table: GORM, bun, ent, sqlc's generated code, and psql; and
// other people's schedulers against a row that their late runs must not write: River, gocron, and a script of cron's. It is
// a module of its own, so that what they need stays out of writegate's.
package clients

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	entsql "entgo.io/ent/dialect/sql"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/stretchr/testify/require"
	"github.com/uptrace/bun"
	"github.com/uptrace/bun/dialect/pgdialect"
	"gorm.io/driver/postgres"
	"gorm.io/gorm"
	"gorm.io/gorm/logger"

	"github.com/writegate/writegate/fencedb"
	"github.com/writegate/writegate/integration/clients/ent"
	"github.com/writegate/writegate/integration/clients/queries"
	"github.com/writegate/writegate/internal/pgtest"
	"github.com/writegate/writegate/leasedb"
)

// workers are what a process of its own can be.
var workers = map[string]func(){}

func TestMain(m *testing.M) {
	slog.SetDefault(slog.New(slog.DiscardHandler)) // refusals are what these tests are about
	if be, ok := workers[os.Getenv("WRITEGATE_TEST_BE")]; ok {
		be()
		return
	}
	pgtest.Main(m)
}

// client writes order 1 in one transaction that enters the lease first, if there is one.
type client func(ctx context.Context, lease *leasedb.Lease, v string) error

const enterSQL = `SELECT fence.enter($1, $2, $3)`

// Every client's write lands while its lease is held, without its knowing of fences; a stale one is refused, as is one that
// enters nothing; and a row's fence does not fall by a save of all columns.
func TestClients(t *testing.T) {
	for name, connect := range map[string]func(*testing.T, *pgx.ConnConfig) client{
		"GORM": gormClient, "bun": bunClient, "ent": entClient, "sqlc": sqlcClient, "psql": psqlClient,
	} {
		t.Run(name, func(t *testing.T) {
			ctx := context.Background()
			cfg := pgtest.New(t)
			pgtest.Exec(t, cfg, `CREATE SCHEMA app; CREATE TABLE app.orders (id int PRIMARY KEY, v text NOT NULL); INSERT INTO app.orders VALUES (1, 'first');
				SELECT fence.protect('app.orders', strength => 'live', guard => 'enforce'); ALTER DATABASE `+cfg.Database+` SET search_path = app, public`)
			write := connect(t, cfg)
			pool := pgtest.Pool(t, cfg)
			grant := func(holder string) *leasedb.Lease {
				c, err := leasedb.New(ctx, pool, leasedb.Config{TTL: time.Hour, Holder: holder, ManualRenewal: true})
				require.NoError(t, err)
				t.Cleanup(func() { _ = c.Close(ctx) })
				lease, err := c.TryAcquire(ctx, "x")
				require.NoError(t, err)
				return lease
			}
			row := func() (v string, fence int64) {
				require.NoError(t, pool.QueryRow(ctx, `SELECT v, last_fence FROM app.orders WHERE id = 1`).Scan(&v, &fence))
				return v, fence
			}
			a := grant("A")
			for _, v := range []string{"A", "A again"} {
				require.NoError(t, write(ctx, a, v))
				stored, fence := row()
				require.Equal(t, v, stored)
				require.Equal(t, a.Fence(), fence)
			}
			require.ErrorContains(t, write(ctx, nil, "unfenced"), "WG008")

			// A's time is up, and B has the lease. A, which knows nothing of it, comes late.
			pgtest.Exec(t, cfg, `UPDATE fence.lease SET expires_at = expires_at - interval '2 hours'`)
			b := grant("B")
			require.NoError(t, write(ctx, b, "B"))
			require.ErrorContains(t, write(ctx, a, "late"), "WG005")
			stored, fence := row()
			require.Equal(t, "B", stored)
			require.Equal(t, b.Fence(), fence)
		})
	}
}

func openDB(t *testing.T, cfg *pgx.ConnConfig) *sql.DB {
	db := stdlib.OpenDB(*cfg)
	t.Cleanup(func() { _ = db.Close() })
	return db
}

// Order is the row as an ORM has it that saves every column: the fence is read-only to it.
type Order struct {
	bun.BaseModel `bun:"table:app.orders" gorm:"-"`

	ID        int    `bun:"id,pk"`
	V         string `bun:"v"`
	LastFence int64  `bun:"last_fence,scanonly" gorm:"->"`
}

// TableName is GORM's name for it.
func (Order) TableName() string { return "app.orders" }

func gormClient(t *testing.T, cfg *pgx.ConnConfig) client {
	db, err := gorm.Open(postgres.New(postgres.Config{Conn: openDB(t, cfg)}), &gorm.Config{Logger: logger.Discard})
	require.NoError(t, err)
	return func(ctx context.Context, lease *leasedb.Lease, v string) error {
		return db.WithContext(ctx).Transaction(func(tx *gorm.DB) error {
			if lease != nil {
				if err := tx.Exec("SELECT fence.enter(?, ?, ?)", lease.Name(), lease.Token(), lease.Fence()).Error; err != nil {
					return err
				}
			}
			var order Order
			if err := tx.First(&order, 1).Error; err != nil {
				return err
			}
			order.V = v
			return tx.Save(&order).Error
		})
	}
}

func bunClient(t *testing.T, cfg *pgx.ConnConfig) client {
	db := bun.NewDB(openDB(t, cfg), pgdialect.New())
	return func(ctx context.Context, lease *leasedb.Lease, v string) error {
		return db.RunInTx(ctx, nil, func(ctx context.Context, tx bun.Tx) error {
			if lease != nil {
				if _, err := tx.ExecContext(ctx, "SELECT fence.enter(?, ?, ?)", lease.Name(), lease.Token(), lease.Fence()); err != nil {
					return err
				}
			}
			_, err := tx.NewInsert().Model(&Order{ID: 1, V: v}).On("CONFLICT (id) DO UPDATE").Set("v = EXCLUDED.v").Exec(ctx)
			return err
		})
	}
}

func entClient(t *testing.T, cfg *pgx.ConnConfig) client {
	driver := entsql.OpenDB("postgres", openDB(t, cfg))
	return func(ctx context.Context, lease *leasedb.Lease, v string) error {
		tx, err := driver.Tx(ctx)
		if err != nil {
			return err
		}
		defer func() { _ = tx.Rollback() }()
		if lease != nil {
			if err := tx.Exec(ctx, enterSQL, []any{lease.Name(), lease.Token(), lease.Fence()}, nil); err != nil {
				return err
			}
		}
		if err := ent.NewClient(ent.Driver(inTx{tx, driver})).Order.UpdateOneID(1).SetV(v).Exec(ctx); err != nil {
			return err
		}
		return tx.Commit()
	}
}

func sqlcClient(t *testing.T, cfg *pgx.ConnConfig) client {
	db := openDB(t, cfg)
	return func(ctx context.Context, lease *leasedb.Lease, v string) error {
		tx, err := db.BeginTx(ctx, nil)
		if err != nil {
			return err
		}
		defer func() { _ = tx.Rollback() }()
		if lease != nil {
			if _, err := tx.ExecContext(ctx, enterSQL, lease.Name(), lease.Token(), lease.Fence()); err != nil {
				return err
			}
		}
		if err := queries.New(tx).SetOrder(ctx, queries.SetOrderParams{ID: 1, V: v}); err != nil {
			return err
		}
		return tx.Commit()
	}
}

// psqlClient is any other language.
func psqlClient(t *testing.T, cfg *pgx.ConnConfig) client {
	psql, err := exec.LookPath("psql")
	require.NoError(t, err, "psql comes with PostgreSQL's client (on Debian: apt-get install postgresql-client)")
	url := pgtest.Shared(t).URL(cfg.Database)
	return func(ctx context.Context, lease *leasedb.Lease, v string) error {
		script := "BEGIN;\n"
		args := []string{"-X", "-q", "-v", "ON_ERROR_STOP=1", "-v", "VERBOSITY=verbose", "-v", "v=" + v}
		if lease != nil {
			script += "SELECT fence.enter(:'name', :'token', :fence);\n"
			args = append(args, "-v", "name="+lease.Name(), "-v", "token="+lease.Token(), "-v", fmt.Sprint("fence=", lease.Fence()))
		}
		script += "UPDATE app.orders SET v = :'v' WHERE id = 1;\nCOMMIT;\n"
		cmd := exec.CommandContext(ctx, psql, append(args, url)...)
		cmd.Stdin = strings.NewReader(script)
		if out, err := cmd.CombinedOutput(); err != nil {
			return errors.New(string(out))
		}
		return nil
	}
}

// The statement of docs/writes.md as sqlc generates it, classified; and ORMs' connections as the gate's own.
func TestGateOverTheirConnections(t *testing.T) {
	ctx := context.Background()
	cfg := pgtest.New(t)
	pgtest.Exec(t, cfg, `CREATE SCHEMA app; CREATE TABLE app.orders (id int PRIMARY KEY, v text NOT NULL);
		INSERT INTO app.orders SELECT i, 'first' FROM generate_series(1, 4) i; SELECT fence.protect('app.orders')`)
	db := openDB(t, cfg)
	gate := fencedb.NewSQL(db, fencedb.Config{})
	defer gate.Close()
	table, err := gate.Table(ctx, "app.orders")
	require.NoError(t, err)
	newer, older := fencedb.Static("x", 34, "B"), fencedb.Static("x", 32, "A")

	changed, err := queries.New(db).FinishOrder(ctx, queries.FinishOrderParams{ID: 1, V: "B", Fence: newer.Fence()})
	outcome, err := table.Classify(ctx, newer, fencedb.Key{"id": 1}, changed, err)
	require.NoError(t, err)
	require.Equal(t, fencedb.Applied, outcome)
	changed, err = queries.New(db).FinishOrder(ctx, queries.FinishOrderParams{ID: 1, V: "A", Fence: older.Fence()})
	_, err = table.Classify(ctx, older, fencedb.Key{"id": 1}, changed, err)
	require.ErrorIs(t, err, fencedb.ErrStale)

	write := func(id int, conn fencedb.Conn) {
		t.Helper()
		bound := table.InSQL(conn)
		_, err := bound.Update(ctx, newer, fencedb.Key{"id": id}, fencedb.Set{"v": "B"})
		require.NoError(t, err)
		_, err = bound.Update(ctx, older, fencedb.Key{"id": id}, fencedb.Set{"v": "A"})
		require.ErrorIs(t, err, fencedb.ErrStale)
	}
	g, err := gorm.Open(postgres.New(postgres.Config{Conn: db}), &gorm.Config{Logger: logger.Discard})
	require.NoError(t, err)
	require.NoError(t, g.Transaction(func(tx *gorm.DB) error {
		write(2, tx.Statement.ConnPool)
		return nil
	}))
	require.NoError(t, bun.NewDB(db, pgdialect.New()).RunInTx(ctx, nil, func(_ context.Context, tx bun.Tx) error {
		write(3, tx.Tx) // bun itself has placeholders of its own
		return nil
	}))
	driver := entsql.OpenDB("postgres", db)
	write(4, driver.ExecQuerier.(fencedb.Conn))
}
