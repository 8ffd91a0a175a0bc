package integration

import (
	"context"
	"fmt"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/writegate/writegate/leasedb"
)

// Ten thousand leases of one client are renewed in one statement, and released when it closes.
func TestTenThousandLeases(t *testing.T) {
	const leases, conns = 10_000, 8
	ctx := context.Background()
	b := newBed(t)
	events := make(chan leasedb.RenewEvent, 10_000)
	client := b.client(leasedb.Config{
		TTL: time.Hour, RenewEvery: time.Second, Conns: conns,
		Observe: func(e leasedb.Event) {
			if r, ok := e.(leasedb.RenewEvent); ok {
				events <- r
			}
		},
	})
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	var wait sync.WaitGroup
	for w := range conns {
		wait.Go(func() {
			for i := w; i < leases; i += conns {
				if _, err := client.TryAcquire(ctx, fmt.Sprintf("lease-%05d", i)); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	wait.Wait()
	runtime.GC()
	runtime.ReadMemStats(&after)
	timeout := time.After(2 * time.Minute)
	for {
		select {
		case r := <-events:
			require.Zero(t, r.Lost)
			if r.Renewed < leases {
				continue
			}
			t.Logf("%d leases in one beat of %v; %d bytes of memory each", r.Renewed, r.Took, (after.HeapAlloc-before.HeapAlloc)/leases)
		case <-timeout:
			t.Fatal("no beat has renewed them all")
		}
		break
	}
	require.NoError(t, client.Close(ctx))
	require.Equal(t, 0, query[int](b, `SELECT count(*) FROM fence.lease WHERE released_at IS NULL`))
	require.Equal(t, leases, query[int](b, `SELECT count(*) FROM fence.term WHERE end_reason = 'released'`))
}
