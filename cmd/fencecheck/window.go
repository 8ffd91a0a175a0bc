package main

import (
	"context"
	"fmt"
	"math"
	"time"

	"github.com/spf13/cobra"

	"github.com/writegate/writegate/internal/audit"
)

// window is the time [since, until) that a command is asked about.
type window struct{ since, until string }

func (w *window) addFlags(cmd *cobra.Command, what string) {
	cmd.Flags().StringVar(&w.since, "since", w.since, what+" this time (2026-01-31T08:00:00+01:00), or this long ago (24h)")
	cmd.Flags().StringVar(&w.until, "until", w.until, "before this time, likewise")
}

// check says what is wrong with the flags, before anything is asked of a database.
func (w *window) check() error {
	_, _, err := w.at(time.Now())
	return err
}

// resolve returns the window; how long ago something is, is by the database's clock.
func (w *window) resolve(ctx context.Context, q audit.Querier) (since, until time.Time, err error) {
	var now time.Time
	if err := q.QueryRow(ctx, `SELECT clock_timestamp()`).Scan(&now); err != nil {
		return since, until, fmt.Errorf("asking for the time: %w", err)
	}
	return w.at(now)
}

func (w *window) at(now time.Time) (since, until time.Time, err error) {
	if since, err = parseTime("--since", w.since, now); err != nil {
		return since, until, err
	}
	if until, err = parseTime("--until", w.until, now); err != nil {
		return since, until, err
	}
	if !since.IsZero() && !until.IsZero() && !since.Before(until) {
		return since, until, usageError{fmt.Errorf("--since %s is not before --until %s: nothing can lie between", w.since, w.until)}
	}
	return since, until, nil
}

// parseTime takes a time with its offset, or a duration that counts back from now. A time without an offset would mean
// another moment on another machine.
func parseTime(flag, text string, now time.Time) (time.Time, error) {
	if text == "" {
		return time.Time{}, nil
	}
	var ago age
	if ago.Set(text) == nil {
		return now.Add(-time.Duration(ago)), nil
	}
	for _, layout := range []string{time.RFC3339Nano, "2006-01-02 15:04:05.999999999Z07:00", "2006-01-02T15:04Z07:00", "2006-01-02 15:04Z07:00"} {
		if t, err := time.Parse(layout, text); err == nil && !t.IsZero() { // that one would stand for no limit
			return t, nil
		}
	}
	return time.Time{}, usageError{fmt.Errorf("%s %q: want a time with its offset, like 2026-01-31T08:00:00Z or 2026-01-31T08:00:00+01:00, or how long ago, like 24h or 7d", flag, text)}
}

func checkLimit(limit int) error {
	if limit < 0 || limit == math.MaxInt {
		return usageError{fmt.Errorf("--limit %d: want 0 (all) or more", limit)}
	}
	return nil
}

// sayCut says that there is more than was shown: a list that was cut must not pass for all there is.
func sayCut(cmd *cobra.Command, cut bool, limit int) {
	if cut {
		_, _ = fmt.Fprintf(cmd.ErrOrStderr(), "fencecheck: there are more than these %d; --limit 0 shows all\n", limit)
	}
}

func failIf(found bool) error {
	if found {
		return errFindings
	}
	return nil
}
