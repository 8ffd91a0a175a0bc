package main

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/writegate/writegate/internal/audit"
	"github.com/writegate/writegate/internal/pgerr"
)

// repairSchema is the first version of the schema that can be verified and repaired.
const repairSchema = 6

func (a *app) verify() *cobra.Command {
	return a.addOutput(&cobra.Command{
		Use:   "verify",
		Short: "Check that fences cannot fall back behind those in use",
		Long: `verify looks at where fences come from, and at every place that holds some: a sequence that is behind them makes every lawful
holder's writes refused. It happens where rows came without the sequence, or the sequence was taken back: logical replication, a
dump of selected tables, data restored into a running server, setval, TRUNCATE … RESTART IDENTITY. Restarts, failovers and
restores are noticed by the next grant itself.

It reads the protected tables, and exits with 1 if there are findings. fencecheck repair mends them.`,
		Args: usageArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.withConn(cmd.Context(), func(conn *pgx.Conn) error {
				findings, err := audit.Findings(cmd.Context(), conn, conn.Config().Database)
				if err != nil {
					return err
				}
				if err := a.print(cmd.OutOrStdout(), findings, func(w io.Writer) error { return audit.WriteFindings(w, findings) }); err != nil {
					return err
				}
				if len(findings) > 0 {
					return errFindings
				}
				return nil
			})
		},
	})
}

func (a *app) repair() *cobra.Command {
	var yes bool
	var reason string
	cmd := &cobra.Command{
		Use:   "repair",
		Short: "Move fences past all that are in use",
		Long: `repair moves the sequence past every fence that this database holds, and past every one that can have been lost, and logs why in
fence.epoch. It shows the statement, and runs it with --yes, or once it is told yes. It is safe while leases are granted, and does
no harm where nothing is wrong: holders keep what they hold, and the next fence is higher than it would have been.`,
		Args: usageArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			statement := fmt.Sprintf("SELECT fence.repair('%s')", strings.ReplaceAll(reason, "'", "''"))
			fmt.Fprintf(cmd.OutOrStdout(), "%s;\n", statement)
			if !yes {
				fmt.Fprintf(cmd.OutOrStdout(), "Run it? [y/N] ")
				answer, _ := bufio.NewReader(cmd.InOrStdin()).ReadString('\n')
				if answer = strings.TrimSpace(strings.ToLower(answer)); answer != "y" && answer != "yes" {
					return errors.New("nothing was done: --yes runs it")
				}
			}
			return a.withConn(cmd.Context(), func(conn *pgx.Conn) error {
				version, err := audit.CheckSchema(cmd.Context(), conn, conn.Config().Database)
				if err == nil {
					err = pgerr.CheckSchema(version, repairSchema)
				}
				if err != nil {
					return err
				}
				var last int64
				if err := conn.QueryRow(cmd.Context(), `SELECT fence.repair($1::text)`, reason).Scan(&last); err != nil {
					return err
				}
				_, err = fmt.Fprintf(cmd.OutOrStdout(), "the next fence is above %d\n", last)
				return err
			})
		},
	}
	cmd.Flags().BoolVar(&yes, "yes", false, "run it without asking")
	cmd.Flags().StringVar(&reason, "reason", "repaired by fencecheck", "what to log")
	return cmd
}
