package fencedb

import (
	"context"
	"errors"
	"fmt"
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
// An attempt whose answer was lost is not undone by what the next one is told: if that fails, the outcome is still Unknown, with
// both errors; if it is refused, the refusal's error is an [ErrUnknown] as well, for the first may have been applied before.
//
// A repeat that finds its own first attempt is [AlreadyApplied], which is no refusal and not recorded as one. A write
// inside a transaction cannot be repeated by itself: put the whole transaction, or the call of [Gate.InTx], into write.
func Retry[T any](ctx context.Context, write func(context.Context) (T, error)) (T, error) {
	pause := firstPause
	var doubt error // an earlier attempt's, that may have been applied
	var doubted T
	end := func(result T, err error) (T, error) {
		switch {
		case doubt == nil, err == nil, errors.Is(err, ErrUnknown):
			return result, err
		case errors.Is(err, ErrStale), errors.Is(err, ErrLeaseLost):
			return result, fmt.Errorf("%w; an earlier attempt may have been applied: %w", err, doubt)
		}
		return doubted, fmt.Errorf("%w; a repeat: %w", doubt, err)
	}
	for attempt := 1; ; attempt++ {
		result, err := write(context.WithValue(ctx, attemptKey{}, attempt))
		if err == nil || !retryable(err) {
			return end(result, err)
		}
		if errors.Is(err, ErrUnknown) {
			doubt, doubted = err, result
		}
		if !sleep(ctx, pause/2+rand.N(pause/2)) {
			return end(result, err)
		}
		pause = min(2*pause, lastPause)
	}
}

// sleep waits for d, and reports whether ctx lasted for as long.
func sleep(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-timer.C:
		return true
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
