package fencedb_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"

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

// protected is what the other examples start from: a gate, the table app.jobs, and a lease.
func protected(pool *pgxpool.Pool) (gate *fencedb.Gate, table *fencedb.Table, lease *leasedb.Lease, done func()) {
	ctx := context.Background()
	leases, err := leasedb.New(ctx, pool, leasedb.Config{TTL: 30 * time.Second, Holder: "worker-1"})
	if err != nil {
		log.Fatal(err)
	}
	gate = fencedb.New(pool, fencedb.Config{})
	if table, err = gate.Table(ctx, "app.jobs"); err != nil {
		log.Fatal(err)
	}
	if lease, err = leases.Acquire(ctx, "job-1"); err != nil {
		log.Fatal(err)
	}
	return gate, table, lease, func() {
		leases.Close(ctx)
		gate.Close()
		pool.Close()
	}
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

func ExampleTable_Update() {
	ctx := context.Background()
	_, table, lease, done := protected(pgtest.Example(jobs))
	defer done()

	var job struct {
		ID     int64
		Status string
	}
	outcome, err := table.Update(ctx, lease,
		fencedb.Key{"id": 1},
		fencedb.Set{"status": "done", "result": fencedb.Expr("upper(@text)", fencedb.Args{"text": "ok"})},
		fencedb.Where("status = @from", fencedb.Args{"from": "pending"}),
		fencedb.Returning(&job))
	fmt.Println(outcome, err, job)
	// Output: applied <nil> {1 done}
}

func ExampleTable_Insert() {
	ctx := context.Background()
	_, table, lease, done := protected(pgtest.Example(jobs))
	defer done()

	outcome, err := table.Insert(ctx, lease, fencedb.Set{"id": 3, "status": "pending"})
	fmt.Println(outcome, err)
	// Output: applied <nil>
}

func ExampleTable_Upsert() {
	ctx := context.Background()
	_, table, lease, done := protected(pgtest.Example(jobs))
	defer done()

	outcome, err := table.Upsert(ctx, lease,
		fencedb.Key{"id": 3},
		fencedb.Set{"status": "running", "result": fencedb.Expr("t.result || '.'")},
		fencedb.Inserting(fencedb.Set{"result": "."}))
	fmt.Println(outcome, err)
	// Output: applied <nil>
}

func ExampleTable_Delete() {
	ctx := context.Background()
	_, table, lease, done := protected(pgtest.Example(jobs))
	defer done()

	outcome, err := table.Delete(ctx, lease, fencedb.Key{"id": 2})
	fmt.Println(outcome, err)
	// A holder that was superseded before that, and comes late:
	_, err = table.Insert(ctx, fencedb.Static("job-1", lease.Fence()-1, "worker-0"), fencedb.Set{"id": 2, "status": "pending"})
	fmt.Println(errors.Is(err, fencedb.ErrStale))
	// Output:
	// applied <nil>
	// true
}

func ExampleTable_UpdateMany() {
	ctx := context.Background()
	_, table, lease, done := protected(pgtest.Example(jobs))
	defer done()

	results, err := table.UpdateMany(ctx, lease, []fencedb.Row{
		{Key: fencedb.Key{"id": 1}, Set: fencedb.Set{"status": "done", "result": "a"}},
		{Key: fencedb.Key{"id": 2}, Set: fencedb.Set{"status": "done", "result": "b"}},
	})
	var many *fencedb.ManyError
	if errors.As(err, &many) {
		for _, refused := range many.Refused {
			log.Print(refused.Key, refused.Outcome) // these stood in the way, and nothing was written
		}
	}
	fmt.Println(len(results), err)
	// Output: 2 <nil>
}

func ExampleTable_Seal() {
	ctx := context.Background()
	_, table, lease, done := protected(pgtest.Example(jobs))
	defer done()

	var job struct{ Status string }
	if _, err := table.Seal(ctx, lease, fencedb.Key{"id": 1}, fencedb.Returning(&job)); err != nil {
		log.Fatal(err)
	}
	// No older holder writes the row any more: what was read stays so until this grant's own write.
	outcome, err := table.Update(ctx, lease, fencedb.Key{"id": 1}, fencedb.Set{"status": "after " + job.Status})
	fmt.Println(outcome, err)
	// Output: applied <nil>
}

func ExampleGate_InTx() {
	ctx := context.Background()
	gate, table, lease, done := protected(pgtest.Example(jobs))
	defer done()

	err := gate.InTx(ctx, lease, func(ctx context.Context, tx pgx.Tx) error {
		if _, err := table.In(tx).Update(ctx, lease, fencedb.Key{"id": 1}, fencedb.Set{"status": "done"}); err != nil {
			return err
		}
		_, err := tx.Exec(ctx, `UPDATE app.jobs SET status = 'ready' WHERE id > 1`) // any statements, any tables
		return err
	})
	fmt.Println(err)
	// Output: <nil>
}

func ExampleGate_Exec() {
	ctx := context.Background()
	gate, table, lease, done := protected(pgtest.Example(jobs))
	defer done()

	outcome, err := gate.Exec(ctx, lease, `
		UPDATE app.jobs SET status = @to, last_fence = @fence
		 WHERE id = @id AND last_fence < @fence`,
		fencedb.Args{"id": 1, "to": "done"},
		fencedb.Target(table, fencedb.Key{"id": 1}))
	fmt.Println(outcome, err)
	// Output: applied <nil>
}

func ExampleTable_Classify() {
	ctx := context.Background()
	pool := pgtest.Example(jobs)
	_, table, lease, done := protected(pool)
	defer done()
	finishJob := func(id int, status string, fence int64) (int64, error) { // as sqlc generates it
		tag, err := pool.Exec(ctx, `UPDATE app.jobs SET status = $1, last_fence = $2 WHERE id = $3 AND last_fence < $2`, status, fence, id)
		return tag.RowsAffected(), err
	}

	changed, err := finishJob(1, "done", lease.Fence())
	outcome, err := table.Classify(ctx, lease, fencedb.Key{"id": 1}, changed, err)
	fmt.Println(outcome, err)
	// Output: applied <nil>
}

func ExampleRetry() {
	ctx := context.Background()
	_, table, lease, done := protected(pgtest.Example(jobs))
	defer done()

	outcome, err := fencedb.Retry(lease.Context(), func(ctx context.Context) (fencedb.Outcome, error) {
		return table.Update(ctx, lease, fencedb.Key{"id": 1}, fencedb.Set{"status": "done"})
	})
	fmt.Println(outcome, err)

	// Rule term takes any number of writes of one grant; the request id tells a repeat from another write.
	outcome, err = fencedb.Retry(lease.Context(), func(ctx context.Context) (fencedb.Outcome, error) {
		return table.Update(ctx, lease, fencedb.Key{"id": 2}, fencedb.Set{"result": fencedb.Expr("coalesce(result, '') || '.'")},
			fencedb.WithRule(fencedb.Term), fencedb.WithRequestID("step-1"))
	})
	fmt.Println(outcome, err)
	_ = ctx
	// Output:
	// applied <nil>
	// applied <nil>
}

func ExampleNewSQL() {
	ctx := context.Background()
	pool := pgtest.Example(jobs)
	_, _, lease, done := protected(pool)
	defer done()
	db := stdlib.OpenDBFromPool(pool) // or sql.Open with lib/pq
	defer db.Close()

	gate := fencedb.NewSQL(db, fencedb.Config{})
	defer gate.Close()
	table, err := gate.Table(ctx, "app.jobs")
	if err != nil {
		log.Fatal(err)
	}
	tx, err := db.BeginTx(ctx, nil) // a *sql.Tx, or what gorm, bun or ent call a connection
	if err != nil {
		log.Fatal(err)
	}
	defer tx.Rollback()
	outcome, err := table.InSQL(tx).Update(ctx, lease, fencedb.Key{"id": 1}, fencedb.Set{"status": "done"})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(outcome, tx.Commit())
	// Output: applied <nil>
}

// The bytes go where no fence is compared, under a name that nobody else uses; what makes them count is one protected row.
func Example_object() {
	ctx := context.Background()
	_, table, lease, done := protected(pgtest.Example(jobs))
	defer done()
	put := func(name string, _ []byte) error { return nil } // to S3, or a file system

	object := fmt.Sprintf("reports/job-1/%d", lease.Fence()) // never written twice with something else in it
	if err := put(object, []byte("report")); err != nil {
		log.Fatal(err)
	}
	outcome, err := table.Update(ctx, lease, fencedb.Key{"id": 1}, fencedb.Set{"status": "done", "result": object})
	fmt.Println(outcome, err)
	// Output: applied <nil>
}

// What cannot be taken back comes last, and is written down with the work before it is done.
func Example_outbox() {
	ctx := context.Background()
	pool := pgtest.Example(jobs + `; CREATE TABLE app.outbox (id text PRIMARY KEY, recipient text, sent_at timestamptz)`)
	gate, table, lease, done := protected(pool)
	defer done()

	err := gate.InTx(ctx, lease, func(ctx context.Context, tx pgx.Tx) error {
		if _, err := table.In(tx).Update(ctx, lease, fencedb.Key{"id": 1}, fencedb.Set{"status": "done"}); err != nil {
			return err
		}
		_, err := tx.Exec(ctx, `INSERT INTO app.outbox VALUES ('job-1 done', 'team@example.org')`)
		return err
	})
	fmt.Println(err)
	// Output: <nil>
}
