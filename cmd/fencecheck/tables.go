package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/writegate/writegate/internal/audit"
	"github.com/writegate/writegate/internal/pgerr"
	"github.com/writegate/writegate/internal/show"
)

func (a *app) tables() *cobra.Command {
	var fail bool
	cmd := a.addOutput(&cobra.Command{
		Use:   "tables",
		Short: "Show which tables are protected, how, and what is wrong with it",
		Long: `tables shows the register of protected tables: fence column, rule, strength, guard, what the guard does with writes under no
fence, and what keeps the table from being protected as registered. Below it, who did what that a guard has noted.

It looks at the catalogs alone; fencecheck verify reads the rows too.`,
		Example: `  fencecheck tables
  fencecheck tables --fail`,
		Args: usageArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.withConn(cmd.Context(), func(conn *pgx.Conn) error {
				tables, err := audit.Tables(cmd.Context(), audit.Bounded(conn, a.timeout), conn.Config().Database)
				if err != nil {
					return err
				}
				err = a.print(cmd.OutOrStdout(), tables, func(w io.Writer) error {
					if err := show.Tables(tables).Write(w, a.screen(w)); err != nil {
						return err
					}
					for _, t := range tables {
						for _, o := range t.Observed {
							if _, err := fmt.Fprintf(w, "%s: %s\n", audit.Printable(t.Name), audit.Printable(o)); err != nil {
								return err
							}
						}
					}
					return nil
				})
				if err != nil {
					return err
				}
				for _, t := range tables {
					if fail && len(t.Wrong) > 0 {
						return errFindings
					}
				}
				return nil
			})
		},
	}, forms...)
	cmd.Flags().BoolVar(&fail, "fail", false, "exit with 1 if anything is wrong with a table")
	return cmd
}

func (a *app) protect() *cobra.Command {
	var rule, strength, column, guard, unfenced string
	var patience time.Duration
	cmd := &cobra.Command{
		Use:   "protect TABLE…",
		Short: "Make tables ready for protected writes",
		Long: `protect does what SELECT fence.protect(…) in a migration of your own does: it adds the fence column where that is missing,
without rewriting the table, registers the table, and installs, changes or removes its guard. One transaction for each table.

It needs a table to itself for a moment. It waits for that for two seconds at most, so that readers never queue behind it for
longer, and tries again, with pauses, until --patience is over.`,
		Example: `  fencecheck protect app.jobs
  fencecheck protect app.jobs --rule term --strength live --guard observe`,
		Args: usageArgs(cobra.MinimumNArgs(1)),
		RunE: func(cmd *cobra.Command, tables []string) error {
			arguments := pgx.NamedArgs{
				"rule": unlessEmpty(rule), "strength": unlessEmpty(strength), "column": unlessEmpty(column),
				"guard": unlessEmpty(guard), "unfenced": unlessEmpty(unfenced),
			}
			return a.withEach(cmd, tables, patience, "protected", func(ctx context.Context, conn *pgx.Conn, table string) error {
				arguments["table"] = table
				_, err := conn.Exec(ctx, `SELECT fence.protect(@table::text::regclass, @rule::text, @strength::text, @column::text::name, @guard::text, @unfenced::text)`, arguments)
				return err
			})
		},
	}
	cmd.Flags().StringVar(&rule, "rule", "", "once or term (default: as it is; once for a table that is new)")
	cmd.Flags().StringVar(&strength, "strength", "", "fenced, live or in_tx (default: as it is; fenced for a table that is new)")
	cmd.Flags().StringVar(&column, "fence-column", "", "the column that holds the fence (default: as it is; last_fence for a table that is new)")
	cmd.Flags().StringVar(&guard, "guard", "", "off, observe or enforce (default: as it is)")
	cmd.Flags().StringVar(&unfenced, "unfenced", "", "what the guard does with writes under no fence: allow, count or refuse (default: as it is)")
	cmd.Flags().DurationVar(&patience, "patience", time.Minute, "for how long to try to get hold of each table")
	return cmd
}

func (a *app) unprotect() *cobra.Command {
	var patience time.Duration
	cmd := &cobra.Command{
		Use:   "unprotect TABLE…",
		Short: "Take tables off the register, and their guards off them",
		Long: `unprotect does what SELECT fence.unprotect(…) does: it takes the table off the register and removes its guard. The fence
column stays, with its fences, should the table be protected again; drop it yourself when that will not happen.`,
		Example: `  fencecheck unprotect app.jobs`,
		Args:    usageArgs(cobra.MinimumNArgs(1)),
		RunE: func(cmd *cobra.Command, tables []string) error {
			return a.withEach(cmd, tables, patience, "unprotected", func(ctx context.Context, conn *pgx.Conn, table string) error {
				var registered bool
				if err := conn.QueryRow(ctx, `SELECT fence.unprotect($1::text::regclass)`, table).Scan(&registered); err != nil {
					return err
				}
				if !registered {
					return errors.New("it was not protected")
				}
				return nil
			})
		},
	}
	cmd.Flags().DurationVar(&patience, "patience", time.Minute, "for how long to try to get hold of each table")
	return cmd
}

func unlessEmpty(s string) *string {
	if s == "" {
		return nil
	}
	return &s
}

// withEach does work for each table, again while the table is busy, and says what was done before it failed.
func (a *app) withEach(
	cmd *cobra.Command, tables []string, patience time.Duration, done string, work func(context.Context, *pgx.Conn, string) error,
) error {
	return a.withConn(cmd.Context(), func(conn *pgx.Conn) error {
		ctx := cmd.Context()
		version, err := audit.CheckSchema(ctx, conn, conn.Config().Database)
		if err != nil {
			return err
		}
		if err := pgerr.CheckSchema(version, guardSchema); err != nil {
			return err
		}
		for _, table := range tables {
			if err := patiently(ctx, patience, func() error { return work(ctx, conn, table) }); err != nil {
				if pgerr.LockTimeout(err) {
					err = fmt.Errorf("it is in use; nobody has let go of it for %v: %w", patience, err)
				}
				return fmt.Errorf("%s: %w", table, err)
			}
			if _, err := fmt.Fprintf(cmd.OutOrStdout(), "%s: %s\n", table, done); err != nil {
				return err
			}
		}
		return nil
	})
}

// guardSchema is the first version of the schema whose fence.protect knows guards.
const guardSchema = 4

// patiently tries again while a lock does not come free, with pauses in which those who wait for the table get it.
func patiently(ctx context.Context, patience time.Duration, work func() error) error {
	deadline := time.Now().Add(patience)
	for pause := 100 * time.Millisecond; ; pause = min(2*pause, 5*time.Second) {
		err := work()
		if !pgerr.LockTimeout(err) || time.Now().Add(pause).After(deadline) {
			return err
		}
		select {
		case <-ctx.Done():
			return errors.Join(err, ctx.Err())
		case <-time.After(pause):
		}
	}
}
