package fencedb_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/writegate/writegate/fencedb"
	"github.com/writegate/writegate/internal/pgtest"
	"github.com/writegate/writegate/leasedb"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

const jobs = `
	CREATE SCHEMA app;
	CREATE TABLE app.jobs (id bigint PRIMARY KEY, status text NOT NULL, result text);
	INSERT INTO app.jobs VALUES (1, 'pending'), (2, 'pending');
	SELECT fence.protect('app.jobs')`

func Example() {
	ctx := context.Background()
	pool := pgtest.Example(jobs) // your *pgxpool.Pool, on a database with app.jobs in it
	defer pool.Close()

	leases, err := leasedb.New(ctx, pool, leasedb.Config{TTL: 30 * time.Second})
	if err != nil {
		log.Fatal(err)
	}
	defer leases.Close(ctx)
	gate := fencedb.New(pool, fencedb.Config{})
	defer gate.Close()
	table, err := gate.Table(ctx, "app.jobs")
	if err != nil {
		log.Fatal(err)
	}

	err = leases.Do(ctx, "job-1", func(ctx context.Context, lease *leasedb.Lease) error {
		result := "computed" // the long part
		outcome, err := table.Update(ctx, lease,
			fencedb.Key{"id": 1},
			fencedb.Set{"status": "done", "result": result})
		if errors.Is(err, fencedb.ErrStale) || errors.Is(err, fencedb.ErrLeaseLost) {
			return fmt.Errorf("somebody else has taken this job over: %w", err)
		}
		fmt.Println(outcome)
		return err
	})
	if err != nil {
		log.Fatal(err)
	}
	// Output: applied
}

func ExampleTable_In() {
	ctx := context.Background()
	pool := pgtest.Example(jobs)
	defer pool.Close()
	gate := fencedb.New(pool, fencedb.Config{})
	defer gate.Close()
	table, err := gate.Table(ctx, "app.jobs")
	if err != nil {
		log.Fatal(err)
	}
	// Fences from another lock service, or handed over by whoever holds the lease.
	lease := fencedb.Static("job-1", 12, "worker-1")

	err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		if _, err := table.In(tx).Update(ctx, lease, fencedb.Key{"id": 1}, fencedb.Set{"status": "done"}); err != nil {
			return err // rolls back; the refusal stays on record
		}
		_, err := tx.Exec(ctx, `UPDATE app.jobs SET status = 'ready' WHERE id = 2`)
		return err
	})
	fmt.Println(err)
	// Output: <nil>
}
