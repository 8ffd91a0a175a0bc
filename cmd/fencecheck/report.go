package main

import (
	"errors"
	"fmt"
	"io"
	"net"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/writegate/writegate/internal/audit"
	"github.com/writegate/writegate/internal/page"
)

func (a *app) report() *cobra.Command {
	w := window{since: "24h"}
	var v verifyFlags
	var file, lease, baseline string
	var rows, noVerify bool
	cmd := &cobra.Command{
		Use:   "report --html FILE",
		Short: "Write a page: who held what when, what was refused, what is wrong",
		Long: `report writes one HTML file that needs nothing else: a timeline of each lease, with its terms and the refusals; refusals over time; the
tables, holders and reasons with the most; and what verify finds. It is all read at one moment. However much there is, the page
stays small: the database sums up, and the page says what it has summed up.

The rows of protected tables are read with --rows alone, as fencecheck verify does. The status is 3 if a check could not run: the
page is written all the same, and says which.`,
		Example: `  fencecheck report --html report.html
  fencecheck report --html - --since 168h --lease nightly-report > week.html`,
		Args: usageArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if file == "" {
				return usageError{errors.New("want --html FILE, or --html - for the standard output")}
			}
			if err := errors.Join(w.check(), v.check()); err != nil {
				return usageError{err}
			}
			accepted, err := readBaseline(baseline)
			if err != nil {
				return err
			}
			return a.withConn(cmd.Context(), func(conn *pgx.Conn) error {
				ctx := cmd.Context()
				opt := audit.SurveyOptions{Lease: lease, Server: serverName(conn.Config()), Timeout: a.timeout}
				if opt.Since, opt.Until, err = w.resolve(ctx, audit.Bounded(conn, a.timeout)); err != nil {
					return err
				}
				if !noVerify {
					v.Since = opt.Since
					if opt.Verify, err = a.verifyFor(ctx, conn, conn.Config().Database, v.VerifyOptions, rows); err != nil {
						return err
					}
					accepted.Apply(opt.Verify)
				}
				o, err := audit.Survey(ctx, conn, conn.Config().Database, opt)
				if err != nil {
					return err
				}
				write := func(w io.Writer) error {
					return page.Report(w, o, page.Options{Program: "fencecheck " + thisVersion().Version})
				}
				if file == "-" {
					err = write(cmd.OutOrStdout())
				} else if err = writeFile(file, write); err == nil {
					_, err = fmt.Fprintf(cmd.OutOrStdout(), "%s: %d refusals, %d leases held, %d overdue\n", file, o.Refusals.Refusals, o.Leases.Held, o.Leases.Overdue)
				}
				if err == nil && opt.Verify != nil && len(opt.Verify.Unchecked) > 0 {
					err = fmt.Errorf("%s could not run, as the page says; --skip or --no-verify leaves them out", count(len(unchecked(opt.Verify)), "check"))
				}
				return err
			})
		},
	}
	w.addFlags(cmd, "what happened at or after")
	v.addFlags(cmd)
	cmd.Flags().StringVar(&file, "html", "", "the file to write; - for the standard output")
	cmd.Flags().StringVar(&lease, "lease", "", "only this lease")
	cmd.Flags().StringVar(&baseline, "baseline", "", "a file of findings that are accepted")
	cmd.Flags().BoolVar(&rows, "rows", false, "read the rows of protected tables too")
	cmd.Flags().BoolVar(&noVerify, "no-verify", false, "leave the checks out")
	return cmd
}

// serverName names the server without user and password.
func serverName(cfg *pgx.ConnConfig) string {
	if strings.HasPrefix(cfg.Host, "/") {
		return cfg.Host
	}
	return net.JoinHostPort(cfg.Host, strconv.Itoa(int(cfg.Port)))
}
