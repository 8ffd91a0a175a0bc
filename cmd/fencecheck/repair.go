package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/writegate/writegate/internal/audit"
	"github.com/writegate/writegate/internal/pgerr"
)

// repairSchema is the first version of the schema that can be repaired.
const repairSchema = 6

func (a *app) repair() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "repair",
		Short: "Mend the sequence of fences, guards, or the register of tables",
		Long: `repair mends what fencecheck verify has found. It shows the SQL first, and runs it with --yes, or once it is told yes. It needs
the rights of the owner of schema fence, and of the tables.`,
		Args: usageArgs(cobra.NoArgs),
		RunE: func(*cobra.Command, []string) error {
			return usageError{errors.New("repair: want sequence, guard or registry")}
		},
	}
	cmd.AddCommand(a.repairSequence(), a.repairGuard(), a.repairRegistry())
	return cmd
}

func (a *app) repairSequence() *cobra.Command {
	var yes bool
	var reason string
	cmd := &cobra.Command{
		Use:   "sequence",
		Short: "Move fences past all that are in use",
		Long: `sequence moves the sequence past every fence that this database holds, and past every one that can have been lost, and logs why in
fence.epoch. It is safe while leases are granted, and does no harm where nothing is wrong: holders keep what they hold, and the
next fence is higher than it would have been. It reads the protected tables.`,
		Example: `  fencecheck repair sequence --reason 'restored from a dump'`,
		Args:    usageArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.withRepair(cmd, func(ctx context.Context, conn *pgx.Conn) error {
				// Quoted by hand to be shown; run as it is shown.
				statement := "SELECT fence.repair(" + literal(reason) + ")"
				if err := agree(cmd, yes, []string{statement}); err != nil {
					return err
				}
				var last int64
				if err := conn.QueryRow(ctx, statement).Scan(&last); err != nil {
					return err
				}
				_, err := fmt.Fprintf(cmd.OutOrStdout(), "the next fence is above %d\n", last)
				return err
			})
		},
	}
	cmd.Flags().BoolVar(&yes, "yes", false, "run it without asking")
	cmd.Flags().StringVar(&reason, "reason", "repaired by fencecheck", "what to log")
	return cmd
}

// literal is text as SQL writes it; standard_conforming_strings or not.
func literal(s string) string {
	quoted := "'" + strings.ReplaceAll(s, "'", "''") + "'"
	if strings.Contains(s, `\`) {
		return "E" + strings.ReplaceAll(quoted, `\`, `\\`)
	}
	return quoted
}

func (a *app) repairGuard() *cobra.Command {
	var yes bool
	var patience time.Duration
	cmd := &cobra.Command{
		Use:   "guard [TABLE…]",
		Short: "Install guards that are missing, disabled, outdated or not as registered",
		Long: `guard installs the guards anew with which fencecheck verify finds something wrong: of the tables that are named, as it writes them,
or of all. Each is done in a transaction of its own and needs the table to itself for a moment, as fencecheck protect does.`,
		Example: `  fencecheck repair guard app.jobs`,
		RunE: func(cmd *cobra.Command, tables []string) error {
			return a.withRepair(cmd, func(ctx context.Context, conn *pgx.Conn) error {
				plan, err := a.guardPlan(ctx, conn, tables)
				if err != nil {
					return err
				}
				return carryOut(ctx, cmd, conn, plan, yes, patience)
			})
		},
	}
	cmd.Flags().BoolVar(&yes, "yes", false, "run it without asking")
	cmd.Flags().DurationVar(&patience, "patience", time.Minute, "for how long to try to get hold of each table")
	return cmd
}

// guardPlan returns, for each table whose guard is not as it should be, what installs it anew.
func (a *app) guardPlan(ctx context.Context, conn *pgx.Conn, only []string) (plan [][]string, err error) {
	ids := []string{"guard-missing", "guard-disabled", "guard-differs", "guard-truncate", "guard-outdated"}
	v, err := audit.Verify(ctx, audit.Bounded(conn, a.timeout), conn.Config().Database, audit.VerifyOptions{Only: ids})
	if err != nil {
		return nil, err
	}
	if len(v.Unchecked) > 0 {
		return nil, fmt.Errorf("looking at the guards: %s", v.Unchecked[0].Why)
	}
	known, err := audit.Tables(ctx, audit.Bounded(conn, a.timeout), conn.Config().Database)
	if err != nil {
		return nil, err
	}
	for _, table := range only {
		if !slices.ContainsFunc(known, func(t audit.Table) bool { return t.Name == table }) {
			return nil, usageError{fmt.Errorf("%s is not protected: fencecheck tables lists those that are", table)}
		}
	}
	wanted := func(table string) bool { return len(only) == 0 || slices.Contains(only, table) }
	outdated := map[string]bool{} // fence columns
	var again []string
	for _, f := range v.Findings {
		for _, t := range known {
			if t.Name != f.Object || !wanted(t.Name) {
				continue
			}
			if f.ID == "guard-outdated" {
				outdated[t.FenceColumn] = true
			} else if !slices.Contains(again, t.Name) {
				again = append(again, t.Name)
			}
		}
	}
	for _, t := range known {
		if slices.Contains(again, t.Name) && !outdated[t.FenceColumn] {
			plan = append(plan, []string{"SELECT fence.protect(" + literal(t.Name) + ")"})
		}
	}
	// Tables whose fence columns have the same name share the copy of the guard, and let go of it together.
	for column := range outdated {
		var off, on []string
		for _, t := range known {
			if t.FenceColumn == column && t.Guard != "off" {
				off = append(off, "SELECT fence.protect("+literal(t.Name)+", guard => 'off')")
				on = append(on, "SELECT fence.protect("+literal(t.Name)+", guard => "+literal(t.Guard)+")")
			}
		}
		var drop []string
		rows, err := audit.Bounded(conn, a.timeout).Query(ctx, `SELECT 'DROP FUNCTION ' || p.oid::regprocedure FROM pg_catalog.pg_proc p
			WHERE p.pronamespace = 'fence'::regnamespace AND p.proname IN ('guard_' || md5($1::text), 'guard_rekey_' || md5($1::text)) ORDER BY 1`, column)
		if err == nil {
			drop, err = pgx.CollectRows(rows, pgx.RowTo[string])
		}
		if err != nil {
			return nil, err
		}
		plan = append(plan, slices.Concat(off, drop, on))
	}
	return plan, nil
}

func (a *app) repairRegistry() *cobra.Command {
	var yes bool
	cmd := &cobra.Command{
		Use:     "registry",
		Short:   "Take tables that are gone off the register",
		Long:    `registry takes tables off the register of protected tables that do not exist any more.`,
		Example: `  fencecheck repair registry`,
		Args:    usageArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.withRepair(cmd, func(ctx context.Context, conn *pgx.Conn) error {
				v, err := audit.Verify(ctx, audit.Bounded(conn, a.timeout), conn.Config().Database, audit.VerifyOptions{Only: []string{"table-gone"}})
				if err != nil {
					return err
				}
				if len(v.Unchecked) > 0 {
					return fmt.Errorf("looking at the register: %s", v.Unchecked[0].Why)
				}
				var plan [][]string
				for _, f := range v.Findings {
					plan = append(plan, []string{f.Fix})
				}
				return carryOut(ctx, cmd, conn, plan, yes, time.Minute)
			})
		},
	}
	cmd.Flags().BoolVar(&yes, "yes", false, "run it without asking")
	return cmd
}

// withRepair connects where the schema can be repaired.
func (a *app) withRepair(cmd *cobra.Command, work func(context.Context, *pgx.Conn) error) error {
	return a.withConn(cmd.Context(), func(conn *pgx.Conn) error {
		version, err := audit.CheckSchema(cmd.Context(), conn, conn.Config().Database)
		if err == nil {
			err = pgerr.CheckSchema(version, repairSchema)
		}
		if err != nil {
			return err
		}
		return work(cmd.Context(), conn)
	})
}

// agree shows statements, and is an error unless they may be run.
func agree(cmd *cobra.Command, yes bool, statements []string) error {
	for _, s := range statements {
		if _, err := fmt.Fprintf(cmd.OutOrStdout(), "%s;\n", audit.Printable(s)); err != nil {
			return err
		}
	}
	if yes {
		return nil
	}
	if _, err := fmt.Fprintf(cmd.OutOrStdout(), "Run it? [y/N] "); err != nil {
		return err
	}
	answer, _ := bufio.NewReader(cmd.InOrStdin()).ReadString('\n')
	if answer = strings.TrimSpace(strings.ToLower(answer)); answer != "y" && answer != "yes" {
		return errors.New("nothing was done: --yes runs it")
	}
	return nil
}

// carryOut shows a plan and runs it, each part of it in a transaction, and says what was done before it failed.
func carryOut(ctx context.Context, cmd *cobra.Command, conn *pgx.Conn, plan [][]string, yes bool, patience time.Duration) error {
	if len(plan) == 0 {
		_, err := fmt.Fprintln(cmd.OutOrStdout(), "nothing to do")
		return err
	}
	if err := agree(cmd, yes, slices.Concat(plan...)); err != nil {
		return err
	}
	for i, part := range plan {
		err := patiently(ctx, patience, func() error {
			return pgx.BeginFunc(ctx, conn, func(tx pgx.Tx) error {
				for _, statement := range part {
					if _, err := tx.Exec(ctx, statement); err != nil {
						return fmt.Errorf("%s: %w", statement, err)
					}
				}
				return nil
			})
		})
		if err != nil {
			return fmt.Errorf("%d of %d done, then: %w", i, len(plan), err)
		}
	}
	_, err := fmt.Fprintf(cmd.OutOrStdout(), "done\n")
	return err
}
