package main

import (
	"context"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/writegate/writegate/internal/audit"
	"github.com/writegate/writegate/internal/pgerr"
)

// pruneSchema is the first version of the schema whose audit can be pruned.
const pruneSchema = 7

// age is a duration that can be given in days.
type age time.Duration

func (a *age) String() string {
	if d := time.Duration(*a); d%(24*time.Hour) != 0 {
		return d.String()
	}
	return strconv.FormatInt(int64(time.Duration(*a)/(24*time.Hour)), 10) + "d"
}

func (a *age) Set(s string) error {
	if days, ok := strings.CutSuffix(s, "d"); ok {
		n, err := strconv.ParseUint(days, 10, 32)
		if err != nil || n > math.MaxInt64/uint64(24*time.Hour) {
			return fmt.Errorf("want days like 90d, or a duration like 36h")
		}
		*a = age(time.Duration(n) * 24 * time.Hour)
		return nil
	}
	d, err := time.ParseDuration(s)
	if err != nil || d < 0 {
		return fmt.Errorf("want days like 90d, or a duration like 36h")
	}
	*a = age(d)
	return nil
}

func (a *age) Type() string { return "age" }

// Seconds, for the database: an interval of days would depend on daylight saving.
func (a age) interval() string {
	return strconv.FormatFloat(time.Duration(a).Seconds(), 'f', -1, 64) + " seconds"
}

// pruned is what is old enough to go, or went.
type pruned struct {
	What  string `json:"what"`
	Count int64  `json:"count,string"`
}

const prunableSQL = `
WITH b AS (SELECT clock_timestamp() - $1::interval AS audit, clock_timestamp() - $2::interval AS rows)
SELECT x.what, x.n FROM b CROSS JOIN LATERAL (VALUES
    (1, 'rejections', (SELECT count(*) FROM fence.rejection r WHERE r.last_at < b.audit)),
    (2, 'terms', (SELECT count(*) FROM fence.term t WHERE t.ended_at < b.audit AND t.fence < (SELECT max(y.fence) FROM fence.term y)
                     AND NOT EXISTS (SELECT 1 FROM fence.lease l WHERE l.name = t.name AND l.fence = t.fence))),
    (3, 'audit losses', (SELECT count(*) FROM fence.audit_loss a WHERE a.last_at < b.audit)),
    (4, 'observations', (SELECT count(*) FROM fence.observation o WHERE o.first_at < b.audit)),
    (5, 'tombstones', (SELECT count(*) FROM fence.tombstone t WHERE t.deleted_at < b.rows)),
    (6, 'request ids', (SELECT count(*) FROM fence.request q WHERE q.applied_at < b.rows))) x (i, what, n)
 ORDER BY x.i`

func (a *app) prune() *cobra.Command {
	keepAudit, keepRows := age(90*24*time.Hour), age(30*24*time.Hour)
	var yes bool
	var batch int32
	var pause time.Duration
	cmd := a.addOutput(&cobra.Command{
		Use:   "prune",
		Short: "Delete what is old: refusals, terms, tombstones, request ids",
		Long: `prune shows how much there is that is older than it has to be kept, and deletes it with --yes, or once it is told yes, in batches,
each in a transaction of its own.

--keep-audit is for refusals (by when they were last repeated), ended terms, audit losses and what guards have noted; a day or more. How many
refusals were pruned stays counted, and the newest term of each lease stays. --keep-rows is for tombstones, which keep superseded
holders from bringing deleted rows back, and for request ids; eight days or more, which is longer than any lease.

It needs the rights of the owner of schema fence.`,
		Example: `  fencecheck prune --keep-audit 365d --yes`,
		Args:    usageArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if time.Duration(keepAudit) < 24*time.Hour {
				return usageError{fmt.Errorf("--keep-audit %s: want 1d or more", &keepAudit)}
			}
			if time.Duration(keepRows) < 8*24*time.Hour {
				return usageError{fmt.Errorf("--keep-rows %s: want 8d or more, which is longer than any lease", &keepRows)}
			}
			if batch < 1 {
				return usageError{fmt.Errorf("--batch %d: want 1 or more", batch)}
			}
			return a.withConn(cmd.Context(), func(conn *pgx.Conn) error {
				ctx := cmd.Context()
				version, err := audit.CheckSchema(ctx, audit.Bounded(conn, a.timeout), conn.Config().Database, "rejection", "term", "lease", "audit_loss", "observation", "tombstone", "request")
				if err == nil {
					err = pgerr.CheckSchema(version, pruneSchema)
				}
				if err != nil {
					return err
				}
				rows, err := audit.Bounded(conn, a.timeout).Query(ctx, prunableSQL, keepAudit.interval(), keepRows.interval())
				if err != nil {
					return err
				}
				old, err := pgx.CollectRows(rows, pgx.RowToStructByPos[pruned])
				if err != nil {
					return err
				}
				if !slices.ContainsFunc(old, func(p pruned) bool { return p.Count > 0 }) {
					if a.output != "table" {
						return a.print(cmd.OutOrStdout(), old, nil)
					}
					_, err := fmt.Fprintln(cmd.OutOrStdout(), "nothing to do: nothing is that old")
					return err
				}
				if a.output != "table" && !yes {
					return usageError{fmt.Errorf("--output %s: want --yes with it", a.output)}
				}
				if a.output == "table" {
					if _, err := fmt.Fprintf(cmd.OutOrStdout(), "to delete: %s\n", describe(old)); err != nil {
						return err
					}
					statements := []string{
						fmt.Sprintf("SELECT rejections, terms, audit_losses, observations FROM fence.prune_audit(interval '%s', %d)", keepAudit.interval(), batch),
						fmt.Sprintf("SELECT tombstones, requests FROM fence.prune(interval '%s', %d)", keepRows.interval(), batch),
					}
					if err := agree(cmd, yes, statements); err != nil {
						return err
					}
				}
				gone, err := pruneAll(ctx, conn, keepAudit, keepRows, batch, pause)
				if err != nil {
					return fmt.Errorf("after deleting %s: %w", describe(gone), err)
				}
				if a.output != "table" {
					return a.print(cmd.OutOrStdout(), gone, nil)
				}
				_, err = fmt.Fprintf(cmd.OutOrStdout(), "deleted: %s\n", describe(gone))
				return err
			})
		},
	}, forms...)
	cmd.Flags().Var(&keepAudit, "keep-audit", "keep refusals and terms for this long (90d, 36h)")
	cmd.Flags().Var(&keepRows, "keep-rows", "keep tombstones and request ids for this long")
	cmd.Flags().Int32Var(&batch, "batch", 10_000, "how many of each to delete in one transaction")
	cmd.Flags().DurationVar(&pause, "pause", 100*time.Millisecond, "pause after each batch")
	cmd.Flags().BoolVar(&yes, "yes", false, "delete it without asking")
	return cmd
}

func describe(some []pruned) string {
	var parts []string
	for _, p := range some {
		parts = append(parts, fmt.Sprintf("%d %s", p.Count, p.What))
	}
	return strings.Join(parts, ", ")
}

func pruneAll(ctx context.Context, conn *pgx.Conn, keepAudit, keepRows age, batch int32, pause time.Duration) ([]pruned, error) {
	gone := []pruned{{What: "rejections"}, {What: "terms"}, {What: "audit losses"}, {What: "observations"}, {What: "tombstones"}, {What: "request ids"}}
	for {
		var n [6]int64
		err := conn.QueryRow(ctx, `SELECT p.rejections, p.terms, p.audit_losses, p.observations FROM fence.prune_audit($1::interval, $2) p`, keepAudit.interval(), batch).
			Scan(&n[0], &n[1], &n[2], &n[3])
		if err == nil {
			err = conn.QueryRow(ctx, `SELECT p.tombstones, p.requests FROM fence.prune($1::interval, $2) p`, keepRows.interval(), batch).Scan(&n[4], &n[5])
		}
		more := false
		for i := range n {
			gone[i].Count += n[i]
			more = more || n[i] > 0
		}
		if err != nil || !more {
			return gone, err
		}
		select {
		case <-ctx.Done():
			return gone, context.Cause(ctx)
		case <-time.After(pause):
		}
	}
}
