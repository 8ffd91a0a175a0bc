package leasedb_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"testing"
	"time"

	"github.com/writegate/writegate/internal/pgtest"
	"github.com/writegate/writegate/leasedb"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

func ExampleClient_Do() {
	ctx := context.Background()
	pool := pgtest.Example("") // your *pgxpool.Pool
	defer pool.Close()

	client, err := leasedb.New(ctx, pool, leasedb.Config{Holder: "worker-1", TTL: 30 * time.Second})
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close(ctx)

	err = client.Do(ctx, "monthly-report", func(ctx context.Context, lease *leasedb.Lease) error {
		fmt.Println("working under fence", lease.Fence())
		return ctx.Err() // which ends if the lease is lost
	})
	fmt.Println("error:", err)
	// Output:
	// working under fence 2
	// error: <nil>
}

func ExampleClient_TryAcquire() {
	ctx := context.Background()
	pool := pgtest.Example("")
	defer pool.Close()
	first, err := leasedb.New(ctx, pool, leasedb.Config{Holder: "worker-1", TTL: 30 * time.Second})
	if err != nil {
		log.Fatal(err)
	}
	defer first.Close(ctx)
	second, err := leasedb.New(ctx, pool, leasedb.Config{Holder: "worker-2", TTL: 30 * time.Second})
	if err != nil {
		log.Fatal(err)
	}
	defer second.Close(ctx)

	lease, err := first.TryAcquire(ctx, "scheduler")
	if err != nil {
		log.Fatal(err)
	}
	_, err = second.TryAcquire(ctx, "scheduler")
	var held *leasedb.HeldError
	if errors.As(err, &held) {
		fmt.Println("held by", held.Holder)
	}
	if err := lease.Release(ctx); err != nil {
		log.Fatal(err)
	}
	lease, err = second.TryAcquire(ctx, "scheduler")
	fmt.Println("fence", lease.Fence(), "error", err)
	// Output:
	// held by worker-1
	// fence 4 error <nil>
}

func ExampleNew() {
	ctx := context.Background()
	pool := pgtest.Example("")
	defer pool.Close()

	client, err := leasedb.New(ctx, pool, leasedb.Config{
		TTL:        30 * time.Second, // a crashed holder blocks the others for up to this long
		RenewEvery: 10 * time.Second, // TTL/3 unless set
		Margin:     3 * time.Second,  // TTL/10 unless set
		MaxHold:    6 * time.Hour,    // even a healthy lease ends then; no limit unless set
	})
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close(ctx)
	_, err = leasedb.New(ctx, pool, leasedb.Config{TTL: 30 * time.Second, RenewEvery: 25 * time.Second})
	fmt.Println(err)
	// Output:
	// leasedb: invalid Config: RenewEvery 25s: want at most half the TTL of 30s, or one lost renewal loses the lease
	// RenewEvery 25s and Margin 3s: together they must leave a quarter of the TTL of 30s for a renewal to be answered
}

func ExampleLease_Check() {
	ctx := context.Background()
	pool := pgtest.Example("")
	defer pool.Close()
	client, err := leasedb.New(ctx, pool, leasedb.Config{TTL: 30 * time.Second})
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close(ctx)

	err = client.Do(ctx, "mailing", func(ctx context.Context, lease *leasedb.Lease) error {
		// What cannot be cancelled comes last, and only with time enough for it.
		if err := lease.Check(5 * time.Second); err != nil {
			return err
		}
		fmt.Println("sending")
		return nil
	})
	fmt.Println(err)
	// Output:
	// sending
	// <nil>
}
