package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/writegate/writegate/internal/audit"
	"github.com/writegate/writegate/internal/show"
)

// rejectionFlags say which rejections a command is about.
type rejectionFlags struct {
	window
	audit.Filter
}

func (r *rejectionFlags) addFlags(cmd *cobra.Command, limit int) {
	r.window.addFlags(cmd, "refused at or after")
	f := cmd.Flags()
	f.StringVar(&r.Table, "table", "", "only this table, as schema.table")
	f.StringVar(&r.Key, "key", "", `only rows whose key has this in it, as JSON: '{"id": 7}'`)
	f.StringVar(&r.Lease, "lease", "", "only this lease")
	f.StringVar(&r.Holder, "holder", "", "only what this holder was refused")
	f.StringVar(&r.Reason, "reason", "", "only for this reason: "+strings.Join(audit.Reasons, ", "))
	f.StringVar(&r.Verdict, "verdict", "", "only with this verdict: "+strings.Join(audit.Verdicts, ", "))
	f.StringVar(&r.Application, "application", "", "only of this application_name")
	f.IntVar(&r.Limit, "limit", limit, "how many to show; 0 for all")
	_ = cmd.RegisterFlagCompletionFunc("reason", cobra.FixedCompletions(audit.Reasons, cobra.ShellCompDirectiveNoFileComp))
	_ = cmd.RegisterFlagCompletionFunc("verdict", cobra.FixedCompletions(audit.Verdicts, cobra.ShellCompDirectiveNoFileComp))
}

func (r *rejectionFlags) check() error {
	if err := r.window.check(); err != nil {
		return err
	}
	if r.Reason != "" && !slices.Contains(audit.Reasons, r.Reason) {
		return usageError{fmt.Errorf("--reason %q: want one of %s", r.Reason, strings.Join(audit.Reasons, ", "))}
	}
	if r.Verdict != "" && !slices.Contains(audit.Verdicts, r.Verdict) {
		return usageError{fmt.Errorf("--verdict %q: want one of %s", r.Verdict, strings.Join(audit.Verdicts, ", "))}
	}
	var key map[string]any
	if r.Key != "" && (json.Unmarshal([]byte(r.Key), &key) != nil || len(key) == 0) {
		return usageError{fmt.Errorf(`--key %q: want a JSON object of key columns, like '{"id": 7}'`, r.Key)}
	}
	if r.Table != "" && !strings.Contains(r.Table, ".") {
		return usageError{fmt.Errorf("--table %q: want schema.table", r.Table)}
	}
	return checkLimit(r.Limit)
}

// filter is the filter, once the database's clock is known. A table that is named must exist, or have been refused once: a name
// that was mistyped must not pass for a clean bill.
func (r *rejectionFlags) filter(ctx context.Context, q audit.Querier) (f audit.Filter, err error) {
	f = r.Filter
	f.Since, f.Until, err = r.resolve(ctx, q)
	return f, err
}

var rejectionReads = []string{"rejection"}

func (a *app) rejections() *cobra.Command {
	var r rejectionFlags
	var fail, follow, now bool
	cmd := a.addOutput(&cobra.Command{
		Use:   "rejections",
		Short: "Show the writes that were refused, the latest first",
		Long: `rejections shows which late writes were stopped, whose they were, and whose they would have overwritten. A write that
was tried again and again is one line with a count. The verdict says whether its writer had been superseded (stale), had
merely run out of time (expired), or was the lawful holder (lawful). The last is an alarm: the source of fences went back
in time, or the row is written under two leases, whose fences then stand in each other's way. Where this database has no
such lease, because fences come from elsewhere, it is unknown.

FENCE and HOLDER are the refused one's; FOUND is the fence that stood in the way, and FOUND HOLDER whose it was. NOW is the fence that
the row holds now, read from the table by its key, for which the role needs SELECT on it.`,
		Example: `  fencecheck rejections --since 24h
  fencecheck rejections --verdict lawful --fail
  fencecheck rejections --table app.jobs --key '{"id": 7}' -o json
  fencecheck rejections --limit 0 --now=false -o csv
  fencecheck rejections --follow`,
		Args: usageArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) (err error) {
			if err := r.check(); err != nil {
				return err
			}
			if !slices.Contains(audit.Sorts, r.Sort) {
				return usageError{fmt.Errorf("--sort %q: want one of %s", r.Sort, strings.Join(audit.Sorts, ", "))}
			}
			if follow && (a.output == "json" || fail || r.until != "" || cmd.Flags().Changed("sort")) {
				return usageError{errors.New("--follow has no end: it goes with table, jsonl and csv, and not with --fail, --until or --sort")}
			}
			return a.readConn(cmd.Context(), rejectionReads, func(q audit.Querier) error {
				f, err := r.filter(cmd.Context(), q)
				if err != nil {
					return err
				}
				if follow {
					return a.follow(cmd, q, f, now)
				}
				found, cut, err := audit.Rejections(cmd.Context(), q, f)
				if err != nil {
					return err
				}
				if len(found) == 0 && r.Table != "" {
					// A name that was mistyped must not pass for a clean bill.
					if err := audit.CheckTable(cmd.Context(), q, r.Table); err != nil {
						return err
					}
				}
				if now {
					if err := audit.LookAtRows(cmd.Context(), q, found, false); err != nil {
						return err
					}
				}
				err = a.print(cmd.OutOrStdout(), found, func(w io.Writer) error {
					if len(found) == 0 {
						_, err := fmt.Fprintln(w, "nothing was refused") // a header alone leaves one wondering
						return err
					}
					return show.Rejections(found).Write(w, a.screen(w))
				})
				if err != nil {
					return err
				}
				sayCut(cmd, cut, r.Limit)
				return failIf(fail && len(found) > 0)
			})
		},
	}, forms...)
	r.addFlags(cmd, 100)
	cmd.Flags().StringVar(&r.Sort, "sort", "last", "by what: last or first (refused), or count; the latest, or the most, first")
	cmd.Flags().BoolVar(&now, "now", true, "look up what each row holds now; --now=false spares that")
	cmd.Flags().BoolVar(&follow, "follow", false, "go on showing refusals as they happen, until interrupted")
	cmd.Flags().BoolVar(&fail, "fail", false, "exit 1 if there are any")
	_ = cmd.RegisterFlagCompletionFunc("sort", cobra.FixedCompletions(audit.Sorts, cobra.ShellCompDirectiveNoFileComp))
	cmd.AddCommand(a.rejectionsTop(), a.rejectionsShow())
	return cmd
}

func (a *app) rejectionsTop() *cobra.Command {
	var r rejectionFlags
	var by string
	cmd := a.addOutput(&cobra.Command{
		Use:     "top",
		Short:   "Sum refusals up by who or what has the most",
		Long:    `top sums refusals up by holder, table, lease, reason, verdict, application, user or key, the most first.`,
		Example: `  fencecheck rejections top --by table --since 168h`,
		Args:    usageArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := r.check(); err != nil {
				return err
			}
			if !slices.Contains(audit.TopBy(), by) {
				return usageError{fmt.Errorf("--by %q: want one of %s", by, strings.Join(audit.TopBy(), ", "))}
			}
			return a.readConn(cmd.Context(), rejectionReads, func(q audit.Querier) error {
				f, err := r.filter(cmd.Context(), q)
				if err != nil {
					return err
				}
				list, err := audit.TopRejections(cmd.Context(), q, by, f)
				if err != nil {
					return err
				}
				if err := a.printTable(cmd.OutOrStdout(), list.Rows, show.Top(list)); err != nil {
					return err
				}
				sayCut(cmd, list.Cut, r.Limit)
				return nil
			})
		},
	}, forms...)
	r.addFlags(cmd, 10)
	cmd.Flags().StringVar(&by, "by", "holder", strings.Join(audit.TopBy(), ", "))
	_ = cmd.RegisterFlagCompletionFunc("by", cobra.FixedCompletions(audit.TopBy(), cobra.ShellCompDirectiveNoFileComp))
	return cmd
}

// rejectionStory is one rejection and what explains it.
type rejectionStory struct {
	audit.Rejection
	Terms        []audit.Term `json:"terms"` // of its lease, around it
	TermsLeftOut int64        `json:"terms_left_out,string"`
}

func (a *app) rejectionsShow() *cobra.Command {
	return a.addOutput(&cobra.Command{
		Use:   "show ID",
		Short: "Show one refusal: whose it was, what the row holds now, and the terms around it",
		Long: `show tells the story of one refusal: who was refused what and why, which fence stood in the way, what the row holds now (its
columns too: the role needs SELECT on the table), and the terms of its lease before, during and after.`,
		Example: `  fencecheck rejections show 42`,
		Args:    usageArgs(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			id, err := strconv.ParseInt(args[0], 10, 64)
			if err != nil || id < 1 {
				return usageError{fmt.Errorf("%q: want the number of a rejection, as fencecheck rejections shows it", args[0])}
			}
			return a.readConn(cmd.Context(), []string{"rejection", "term", "lease", "protected_table"}, func(q audit.Querier) error {
				r, err := audit.RejectionByID(cmd.Context(), q, id)
				if err != nil {
					return err
				}
				found := []audit.Rejection{r}
				if err := audit.LookAtRows(cmd.Context(), q, found, true); err != nil {
					return err
				}
				s := rejectionStory{Rejection: found[0]}
				if s.Terms, s.TermsLeftOut, err = audit.TermsAround(cmd.Context(), q, r); err != nil {
					return err
				}
				return a.print(cmd.OutOrStdout(), s, func(w io.Writer) error { return a.tellStory(w, s) })
			})
		},
	}, "table", "json", "jsonl")
}

func (a *app) tellStory(w io.Writer, s rejectionStory) error {
	screen := a.screen(w)
	if _, err := fmt.Fprintf(w, "%s\n\n", audit.Printable(s.Explain())); err != nil {
		return err
	}
	facts := show.Facts{
		{Name: "last refused", Value: audit.When(s.LastAt)}, {Name: "first refused", Value: audit.When(s.FirstAt)}, {Name: "times", Value: strconv.FormatInt(s.Count, 10)},
		{Name: "verdict", Value: s.Verdict}, {Name: "reason", Value: s.Reason}, {Name: "table", Value: s.Table}, {Name: "key", Value: s.Key}, {Name: "lease", Value: s.Lease},
		{Name: "its fence", Value: strconv.FormatInt(s.Fence, 10)}, {Name: "its holder", Value: s.Holder}, {Name: "application", Value: s.Application}, {Name: "user", Value: s.User},
	}
	if s.ClientAddr != nil {
		facts = append(facts, show.Fact{Name: "from", Value: *s.ClientAddr})
	}
	if s.CurrentFence != nil {
		facts = append(facts, show.Fact{Name: "fence found", Value: strconv.FormatInt(*s.CurrentFence, 10)})
	}
	facts = append(facts, show.Fact{Name: "holder found", Value: s.CurrentHolder}, show.Fact{Name: "the row now", Value: s.Now.String()})
	if s.Now != nil && len(s.Now.Row) > 0 {
		facts = append(facts, show.Fact{Name: "its columns", Value: string(s.Now.Row)})
	}
	if err := facts.Write(w); err != nil {
		return err
	}
	if len(s.Terms) == 0 {
		_, err := fmt.Fprintf(w, "\nNo term of lease %s is known here.\n", audit.Printable(strconv.Quote(s.Lease)))
		return err
	}
	if _, err := fmt.Fprintf(w, "\nTerms of the lease around it, the newest first:\n\n"); err != nil {
		return err
	}
	table := show.Terms(s.Terms)
	table.Columns = append([]show.Column{{Title: ""}}, table.Columns...)
	for i, t := range s.Terms {
		mark := show.Cell{}
		switch {
		case t.Fence == s.Fence:
			mark = show.Cell{Text: "refused", Style: show.Bad}
		case s.CurrentFence != nil && t.Fence == *s.CurrentFence+*s.CurrentFence%2:
			mark = show.Cell{Text: "found"}
		}
		table.Rows[i] = append([]show.Cell{mark}, table.Rows[i]...)
	}
	if err := table.Write(w, screen); err != nil {
		return err
	}
	if s.TermsLeftOut > 0 {
		_, err := fmt.Fprintf(w, "\n%d terms between these are not shown: fencecheck terms shows them.\n", s.TermsLeftOut)
		return err
	}
	return nil
}

// follow shows refusals as they happen: those that are new, and those that have been repeated, each time they are.
func (a *app) follow(cmd *cobra.Command, q audit.Querier, f audit.Filter, now bool) error {
	ctx, w := cmd.Context(), cmd.OutOrStdout()
	shown := map[int64]int64{}
	since := f.Since
	if since.IsZero() {
		if err := q.QueryRow(ctx, `SELECT clock_timestamp()`).Scan(&since); err != nil {
			return fmt.Errorf("asking for the time: %w", err)
		}
	}
	header := true
	f.Limit, f.Sort = 0, ""
	for {
		f.Since = since
		found, _, err := audit.Rejections(ctx, q, f)
		if err != nil {
			if ctx.Err() != nil {
				err = nil // interrupted, which is how this ends
			}
			return err
		}
		slices.Reverse(found)
		fresh := found[:0]
		before := shown
		shown = make(map[int64]int64, len(found))
		for _, r := range found {
			if before[r.ID] != r.Count {
				fresh = append(fresh, r)
			}
			shown[r.ID] = r.Count
			// What was refused at this time may be committed later: some of it is looked at again.
			since = later(since, r.LastAt.Add(-overlap))
		}
		if now {
			if err := audit.LookAtRows(ctx, q, fresh, false); err != nil {
				return err
			}
		}
		if len(fresh) > 0 {
			if err := a.printMore(w, fresh, header); err != nil {
				return err
			}
			header = false
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(pollEvery):
		}
	}
}

const (
	pollEvery = time.Second
	overlap   = 10 * time.Second
)

func later(a, b time.Time) time.Time {
	if b.After(a) {
		return b
	}
	return a
}

// printMore writes more of a list whose header has been written, or has not.
func (a *app) printMore(w io.Writer, found []audit.Rejection, header bool) error {
	switch a.output {
	case "jsonl":
		return show.JSONLines(w, found)
	case "csv":
		if !header {
			w = &skipLine{w: w}
		}
		return show.CSV(w, found)
	}
	if !header {
		w = &skipLine{w: w}
	}
	return show.Rejections(found).Write(w, a.screen(w))
}

// skipLine drops what is written to it up to the end of the first line.
type skipLine struct {
	w       io.Writer
	skipped bool
}

func (s *skipLine) Write(p []byte) (int, error) {
	if s.skipped {
		return s.w.Write(p)
	}
	i := slices.Index(p, '\n')
	if i < 0 {
		return len(p), nil
	}
	s.skipped = true
	if _, err := s.w.Write(p[i+1:]); err != nil {
		return 0, err
	}
	return len(p), nil
}
