package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/writegate/writegate/internal/audit"
	"github.com/writegate/writegate/internal/show"
)

// verifyFlags say what to check, and how hard.
type verifyFlags struct {
	audit.VerifyOptions
	window
}

func (v *verifyFlags) addFlags(cmd *cobra.Command) {
	f := cmd.Flags()
	f.StringSliceVar(&v.Skip, "skip", nil, "checks that are not to run, by id")
	f.StringSliceVar(&v.Only, "only", nil, "run these checks alone")
	for _, flag := range []string{"skip", "only"} {
		_ = cmd.RegisterFlagCompletionFunc(flag, func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
			return checkIDs(), cobra.ShellCompDirectiveNoFileComp
		})
	}
}

func checkIDs() []string {
	var ids []string
	for _, c := range audit.Checks() {
		ids = append(ids, c.ID+"\t"+c.Title)
	}
	return ids
}

func (v *verifyFlags) check() error {
	for _, id := range append(slices.Clone(v.Skip), v.Only...) {
		if _, ok := audit.CheckByID(id); !ok {
			return usageError{fmt.Errorf("there is no check %q: fencecheck explain lists them", id)}
		}
	}
	return nil
}

func (a *app) verify() *cobra.Command {
	var v verifyFlags
	var baseline, writeBaseline, failOn string
	cmd := a.addOutput(&cobra.Command{
		Use:   "verify",
		Short: "Check that the promise holds: fences, tables, guards, leases, privileges, settings",
		Long: `verify checks everything that the promise rests on: where fences come from, the fences in every protected row, the tables and their
guards, the audit, the leases, who may do what, and the settings of the server. Each finding has the id of its check, which does
not change between versions; fencecheck explain tells about it.

It reads the rows of protected tables, in small batches: --sample reads a part of them, --resume FILE goes on where an interrupted
run stopped. On a large database a bar shows how far it is. Whatever the role may not read, or a standby cannot know, is reported
as not checked.

Exit status: 0 nothing was found, 1 there are findings as bad as --fail-on says, or worse, that the baseline does not accept, 3
a check could not run, whatever else was found.`,
		Example: `  fencecheck verify
  fencecheck verify --skip lease-overdue,lease-late --sample 5
  fencecheck verify --baseline accepted.tsv -o sarif > fencecheck.sarif
  fencecheck verify --write-baseline accepted.tsv`,
		Args: usageArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := errors.Join(v.check(), v.window.check()); err != nil {
				return usageError{err}
			}
			if !slices.Contains(audit.Severities, audit.Severity(failOn)) {
				return usageError{fmt.Errorf("--fail-on %q: want error, warning or info", failOn)}
			}
			if !(v.Scan.Sample > 0 && v.Scan.Sample <= 100) { // nor NaN
				return usageError{fmt.Errorf("--sample %g: want more than 0 and at most 100 percent", v.Scan.Sample)}
			}
			accepted, err := readBaseline(baseline)
			if err != nil {
				return err
			}
			return a.withConn(cmd.Context(), func(conn *pgx.Conn) error {
				ctx := cmd.Context()
				q := audit.Bounded(conn, a.timeout)
				if v.Since, _, err = v.resolve(ctx, q); err != nil {
					return err
				}
				end := showProgress(cmd.ErrOrStderr(), &v.Scan)
				result, err := audit.Verify(ctx, q, conn.Config().Database, v.VerifyOptions)
				end()
				if errors.Is(err, audit.ErrNoChecks) {
					return usageError{err}
				}
				if err != nil {
					if v.Scan.State != "" && ctx.Err() != nil {
						return fmt.Errorf("interrupted; --resume %s goes on from here: %w", v.Scan.State, err)
					}
					return err
				}
				accepted.Apply(result)
				if writeBaseline != "" {
					err := writeFile(writeBaseline, func(w io.Writer) error {
						return audit.BaselineOf(result, "accepted on "+time.Now().UTC().Format(time.DateOnly)).Write(w)
					})
					if err != nil {
						return err
					}
				}
				if err := a.showVerification(cmd.OutOrStdout(), result, conn.Config().Database); err != nil {
					return err
				}
				if len(result.Unchecked) > 0 {
					return fmt.Errorf("%s could not run", count(len(unchecked(result)), "check"))
				}
				return failIf(writeBaseline == "" && len(result.Open(audit.Severity(failOn))) > 0)
			})
		},
	}, append(slices.Clone(forms), "sarif", "github")...)
	v.addFlags(cmd)
	f := cmd.Flags()
	f.StringVar(&v.since, "since", "", "count rejections from this time on (2026-01-31T08:00:00+01:00), or this long ago (24h)")
	f.StringVar(&baseline, "baseline", "", "a file of findings that are accepted")
	f.StringVar(&writeBaseline, "write-baseline", "", "accept all that is found now, in this file, and exit 0 for it")
	f.StringVar(&failOn, "fail-on", "warning", "exit 1 for findings as bad as this: error, warning or info")
	f.Float64Var(&v.Scan.Sample, "sample", 100, "how much of the protected tables to read, in percent, picked at random")
	f.StringVar(&v.Scan.State, "resume", "", "a file to note in how far the reading of tables has come, and to go on from")
	f.DurationVar(&v.Scan.Pause, "pause", 0, "pause after each batch of rows")
	_ = cmd.RegisterFlagCompletionFunc("fail-on", cobra.FixedCompletions([]string{"error", "warning", "info"}, cobra.ShellCompDirectiveNoFileComp))
	return cmd
}

func readBaseline(name string) (audit.Baseline, error) {
	if name == "" {
		return nil, nil
	}
	file, err := os.Open(name)
	if err != nil {
		return nil, usageError{fmt.Errorf("the baseline: %w", err)}
	}
	defer func() { _ = file.Close() }()
	b, err := audit.ReadBaseline(file)
	if err != nil {
		return nil, usageError{fmt.Errorf("the baseline %s: %w", name, err)}
	}
	return b, nil
}

// unchecked are the ids of the checks that did not run.
func unchecked(v *audit.Verification) []string {
	var ids []string
	for _, u := range v.Unchecked {
		if !slices.Contains(ids, u.ID) {
			ids = append(ids, u.ID)
		}
	}
	return ids
}

func (a *app) showVerification(w io.Writer, v *audit.Verification, database string) error {
	switch a.output {
	case "sarif":
		return show.SARIF(w, v, database, thisVersion().Version)
	case "github":
		return show.GitHub(w, v)
	case "csv", "jsonl":
		// A check that did not run must not be missing from what a script reads.
		all := slices.Clone(v.Findings)
		for _, u := range v.Unchecked {
			all = append(all, audit.Finding{ID: u.ID, Severity: "unchecked", Object: u.Object, Finding: u.Why})
		}
		return a.print(w, all, nil)
	}
	return a.print(w, v, func(w io.Writer) error {
		if len(v.Findings) > 0 {
			if err := show.Findings(v.Findings).Write(w, a.screen(w)); err != nil {
				return err
			}
			if _, err := fmt.Fprintln(w); err != nil {
				return err
			}
		}
		var b strings.Builder
		for _, u := range together(v.Unchecked) {
			fmt.Fprintf(&b, "NOT CHECKED  %s\n", audit.Printable(strings.TrimSpace(u.Object+"  "+u.ID)+": "+u.Why))
		}
		for _, n := range v.Notes {
			fmt.Fprintf(&b, "note: %s\n", audit.Printable(n))
		}
		counts := map[string]int{}
		for _, f := range v.Findings {
			if f.Accepted != "" {
				counts["accepted"]++
			} else {
				counts[string(f.Severity)]++
			}
		}
		fmt.Fprintf(&b, "%s: ", count(len(v.Checks), "check"))
		if len(v.Findings) == 0 {
			b.WriteString(map[bool]string{true: "nothing is wrong", false: "nothing was found"}[len(v.Unchecked) == 0])
		} else {
			var parts []string
			for _, s := range []string{"error", "warning", "info", "accepted"} {
				if counts[s] > 0 {
					parts = append(parts, plural(counts[s], s))
				}
			}
			b.WriteString(strings.Join(parts, ", "))
			b.WriteString("; fencecheck explain ID says more")
		}
		if n := len(unchecked(v)); n > 0 {
			fmt.Fprintf(&b, "; %d could not run", n)
		}
		b.WriteByte('\n')
		_, err := io.WriteString(w, b.String())
		return err
	})
}

// together are checks that did not run for the same reason, at the same thing.
func together(all []audit.Unchecked) (merged []audit.Unchecked) {
	for _, u := range all {
		i := slices.IndexFunc(merged, func(m audit.Unchecked) bool { return m.Object == u.Object && m.Why == u.Why })
		if i < 0 {
			merged = append(merged, u)
		} else if !slices.Contains(strings.Split(merged[i].ID, ", "), u.ID) {
			merged[i].ID += ", " + u.ID
		}
	}
	return merged
}

// count is a number of things, in words.
func count(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}

// plural is a number of findings, by how bad they are; some of these words have no plural.
func plural(n int, what string) string {
	if what == "error" || what == "warning" {
		return count(n, what)
	}
	return fmt.Sprintf("%d %s", n, what)
}

// showProgress shows a bar, on a terminal, once reading the tables takes a while.
func showProgress(w io.Writer, scan *audit.ScanLimit) (end func()) {
	file, ok := w.(*os.File)
	if !ok || !term.IsTerminal(int(file.Fd())) {
		return func() {}
	}
	began := time.Now()
	drawn := time.Time{}
	scan.Progress = func(table string, done, total int64) {
		if time.Since(began) < time.Second || time.Since(drawn) < 100*time.Millisecond || total == 0 {
			return
		}
		drawn = time.Now()
		const width = 30
		full := int(width * done / total)
		_, _ = fmt.Fprintf(w, "\r\x1b[K[%s%s] %3d %% of %d MiB  %s", strings.Repeat("#", full), strings.Repeat(".", width-full), 100*done/total, total>>20, audit.Printable(table))
	}
	return func() {
		if !drawn.IsZero() {
			_, _ = fmt.Fprint(w, "\r\x1b[K")
		}
	}
}

func (a *app) explain() *cobra.Command {
	return a.addOutput(&cobra.Command{
		Use:   "explain [ID]",
		Short: "Say what a finding of verify means, how it comes about, and what to do",
		Long:  `explain tells about a check of fencecheck verify; without an id it lists all of them. It needs no database.`,
		Example: `  fencecheck explain
  fencecheck explain sequence-behind`,
		Args: usageArgs(cobra.MaximumNArgs(1)),
		ValidArgsFunction: func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
			return checkIDs(), cobra.ShellCompDirectiveNoFileComp
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			w := cmd.OutOrStdout()
			if len(args) == 0 {
				table := &show.Table{Columns: []show.Column{{Title: "ID"}, {Title: "SEVERITY"}, {Title: "WHAT IT FINDS", Min: 20}}}
				for _, c := range audit.Checks() {
					table.Row(c.ID, string(c.Severity), c.Title)
				}
				return a.printTable(w, audit.Checks(), table)
			}
			c, ok := audit.CheckByID(args[0])
			if !ok {
				return usageError{fmt.Errorf("there is no check %q: fencecheck explain lists them", args[0])}
			}
			return a.print(w, c, func(w io.Writer) error {
				_, err := fmt.Fprintf(w, "%s (%s): %s\n\nWhat it means\n  %s\n\nHow it comes about\n  %s\n\nWhat to do\n  %s\n", c.ID, c.Severity, c.Title, fold(c.Meaning), fold(c.Cause), fold(c.Action))
				return err
			})
		},
	}, "table", "json", "jsonl", "csv")
}

// fold breaks a text into lines that a terminal shows whole, indented by two.
func fold(text string) string {
	var lines []string
	line := ""
	for _, word := range strings.Fields(text) {
		if line != "" && len(line)+len(word) > 96 {
			lines = append(lines, line)
			line = ""
		}
		line = strings.TrimSpace(line + " " + word)
	}
	return strings.Join(append(lines, line), "\n  ")
}

// verifyFor runs the checks for a report or the dashboard.
func (a *app) verifyFor(ctx context.Context, db audit.Beginner, database string, opt audit.VerifyOptions, rows bool) (*audit.Verification, error) {
	opt.Scan.None = !rows
	return audit.Verify(ctx, audit.Bounded(db, a.timeout), database, opt)
}
