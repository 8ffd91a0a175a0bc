package main

import (
	"fmt"
	"io"
	"math"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/writegate/writegate/internal/audit"
)

func (a *app) rejections() *cobra.Command {
	var filter audit.Filter
	var since, until string
	var fail bool
	cmd := a.addOutput(&cobra.Command{
		Use:   "rejections",
		Short: "Show the writes that were refused, the latest first",
		Long: `rejections shows which late writes were stopped, whose they were, and whose they would have overwritten. A write that
was tried again and again is one line with a count. The verdict says whether its writer had been superseded (stale), had
merely run out of time (expired), or was the lawful holder (lawful). The last is an alarm: the source of fences went back
in time, or the row is written under two leases, whose fences then stand in each other's way. Where this database has no
such lease, because fences come from elsewhere, it is unknown.`,
		Args: usageArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) (err error) {
			if filter.Since, err = parseTime("--since", since); err != nil {
				return err
			}
			if filter.Until, err = parseTime("--until", until); err != nil {
				return err
			}
			if !filter.Since.IsZero() && !filter.Until.IsZero() && !filter.Since.Before(filter.Until) {
				return usageError{fmt.Errorf("--since %s is not before --until %s: nothing can lie between", since, until)}
			}
			if filter.Limit < 0 || filter.Limit == math.MaxInt {
				return usageError{fmt.Errorf("--limit %d: want 0 (all) or more", filter.Limit)}
			}
			return a.withConn(cmd.Context(), func(conn *pgx.Conn) error {
				if _, err := audit.CheckSchema(cmd.Context(), conn, conn.Config().Database); err != nil {
					return err
				}
				found, cut, err := audit.Rejections(cmd.Context(), conn, filter)
				if err != nil {
					return err
				}
				err = a.print(cmd.OutOrStdout(), found, func(w io.Writer) error { return audit.WriteRejections(w, found) })
				if err != nil {
					return err
				}
				if len(found) == 0 && filter.Table != "" {
					// A name that was mistyped must not pass for a clean bill.
					if err := audit.CheckTable(cmd.Context(), conn, filter.Table); err != nil {
						return err
					}
				}
				if cut {
					_, _ = fmt.Fprintf(cmd.ErrOrStderr(), "fencecheck: there are more than these %d; --limit 0 shows all\n", filter.Limit)
				}
				if fail && len(found) > 0 {
					return errFindings
				}
				return nil
			})
		},
	})
	cmd.Flags().StringVar(&since, "since", "", "refused at or after this time (2026-01-31T08:00:00+01:00), or this long ago (24h)")
	cmd.Flags().StringVar(&until, "until", "", "refused before this time, likewise")
	cmd.Flags().StringVar(&filter.Table, "table", "", "only this table, as schema.table")
	cmd.Flags().StringVar(&filter.Lease, "lease", "", "only this lease")
	cmd.Flags().IntVar(&filter.Limit, "limit", 100, "how many to show; 0 for all")
	cmd.Flags().BoolVar(&fail, "fail", false, "exit 1 if there are any")
	return cmd
}

// parseTime takes a time with its offset, or a duration that counts back from now. A time without an offset would mean
// another moment on another machine.
func parseTime(flag, text string) (time.Time, error) {
	if text == "" {
		return time.Time{}, nil
	}
	if ago, err := time.ParseDuration(text); err == nil && ago >= 0 {
		return time.Now().Add(-ago), nil
	}
	for _, layout := range []string{time.RFC3339Nano, "2006-01-02 15:04:05.999999999Z07:00", "2006-01-02T15:04Z07:00", "2006-01-02 15:04Z07:00"} {
		if t, err := time.Parse(layout, text); err == nil {
			return t, nil
		}
	}
	return time.Time{}, usageError{fmt.Errorf("%s %q: want a time with its offset, like 2026-01-31T08:00:00Z or 2026-01-31T08:00:00+01:00, or a duration like 24h", flag, text)}
}
