package fencedb

import (
	"context"
	"errors"
	"math/rand/v2"
	"time"

	"github.com/writegate/writegate/internal/pgerr"
)

const (
	firstPause = 20 * time.Millisecond
	lastPause  = 2 * time.Second
)

// Retry calls write until its outcome is known: again while that is [Unknown] and the write can be repeated without being
// applied twice (rule once, or a request id), and while the database asks for it (a serialization failure, a deadlock, a
// lock that did not come free) or could not be reached. It pauses between, from 20 ms up to 2 s, at random. It ends with
// the first other outcome, and when ctx does: then with the last error, so that an Unknown stays one. Give it the context
// of the lease, or of Do, and it ends with the lease.
//
//	outcome, err := fencedb.Retry(ctx, func(ctx context.Context) (fencedb.Outcome, error) {
//		return table.Update(ctx, lease, key, set)
//	})
//
// A repeat that finds its own first attempt is [AlreadyApplied], which is no refusal and not recorded as one. A write
// inside a transaction cannot be repeated by itself: put the whole transaction, or the call of [Gate.InTx], into write.
func Retry[T any](ctx context.Context, write func(context.Context) (T, error)) (T, error) {
	pause := firstPause
	for attempt := 1; ; attempt++ {
		result, err := write(context.WithValue(ctx, attemptKey{}, attempt))
		if err == nil || !retryable(err) {
			return result, err
		}
		timer := time.NewTimer(pause/2 + rand.N(pause/2))
		select {
		case <-ctx.Done():
			timer.Stop()
			return result, err
		case <-timer.C:
		}
		pause = min(2*pause, lastPause)
	}
}

func retryable(err error) bool {
	switch pgerr.Code(err) {
	case "40001", "40P01": // whoever got it, the whole transaction is gone
		return true
	}
	var many *ManyError
	if errors.As(err, &many) {
		return many.again
	}
	var e *WriteError
	return errors.As(err, &e) && e.again
}

type attemptKey struct{}

// attemptOf tells which of Retry's attempts this is, 1 outside of it.
func attemptOf(ctx context.Context) int {
	if n, ok := ctx.Value(attemptKey{}).(int); ok {
		return n
	}
	return 1
}
