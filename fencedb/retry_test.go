package fencedb

import (
	"context"
	"errors"
	"testing"

	"github.com/stretchr/testify/require"
)

// What became of an attempt whose answer was lost is not known because a later one fails, or is refused.
func TestRetryForgetsNoDoubt(t *testing.T) {
	boom := errors.New("boom")
	unknown := &WriteError{Outcome: Unknown, again: true}
	for name, c := range map[string]struct {
		then    error
		result  Outcome
		outcome Outcome
		is      []error
	}{
		"applied":          {nil, Applied, Applied, nil},
		"already applied":  {nil, AlreadyApplied, AlreadyApplied, nil},
		"failed":           {&WriteError{Outcome: Failed, Err: boom}, Failed, Unknown, []error{ErrUnknown, boom}},
		"stale":            {&WriteError{Outcome: Stale}, Stale, Stale, []error{ErrStale, ErrUnknown}},
		"lease lost":       {&WriteError{Outcome: LeaseLost}, LeaseLost, LeaseLost, []error{ErrLeaseLost, ErrUnknown}},
		"unknown for good": {&WriteError{Outcome: Unknown}, Unknown, Unknown, []error{ErrUnknown}},
	} {
		t.Run(name, func(t *testing.T) {
			n := 0
			outcome, err := Retry(context.Background(), func(context.Context) (Outcome, error) {
				if n++; n == 1 {
					return Unknown, unknown
				}
				return c.result, c.then
			})
			require.Equal(t, 2, n)
			require.Equal(t, c.outcome, outcome)
			if c.is == nil {
				require.NoError(t, err)
			}
			for _, target := range c.is {
				require.ErrorIs(t, err, target)
			}
		})
	}
	// Its context ends while the server cannot be reached for the repeat.
	ctx, cancel := context.WithCancel(context.Background())
	n := 0
	outcome, err := Retry(ctx, func(context.Context) (Outcome, error) {
		if n++; n == 1 {
			return Unknown, unknown
		}
		cancel()
		return Failed, &WriteError{Outcome: Failed, Err: boom, again: true}
	})
	require.Equal(t, Unknown, outcome)
	require.ErrorIs(t, err, ErrUnknown)
	// Without any doubt a failure is one.
	outcome, err = Retry(context.Background(), func(context.Context) (Outcome, error) { return Failed, &WriteError{Outcome: Failed, Err: boom} })
	require.Equal(t, Failed, outcome)
	require.NotErrorIs(t, err, ErrUnknown)
}
