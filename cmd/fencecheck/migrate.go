package main

import (
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/writegate/writegate/internal/migrate"
)

func (a *app) migrate() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "migrate",
		Short: "Create, upgrade or remove schema fence",
		Long: `migrate applies writegate's own migrations, which touch schema fence and nothing else. Their history is in
` + migrate.VersionTable + `, apart from that of your own migrations.`,
		Args: usageArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return usageError{fmt.Errorf("migrate: want up, down, status or sql")}
		},
	}
	cmd.AddCommand(a.migrateUp(), a.migrateDown(), a.migrateStatus(), a.migrateSQL())
	return cmd
}

func (a *app) migrateUp() *cobra.Command {
	return &cobra.Command{
		Use:   "up",
		Short: "Apply every migration that is missing",
		Long: `up applies what is missing, each migration in a transaction of its own. Several that run at once wait for each other, and it can
go through a pooler that pools transactions.`,
		Example: `  fencecheck migrate up`,
		Args:    usageArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			cfg, err := a.connConfig()
			if err != nil {
				return err
			}
			steps, err := migrate.Up(cmd.Context(), cfg)
			report(cmd.OutOrStdout(), "applied", steps)
			if err != nil {
				return a.explainConnect(err)
			}
			if len(steps) == 0 {
				_, _ = fmt.Fprintln(cmd.OutOrStdout(), "nothing to do: every migration is applied")
			}
			return nil
		},
	}
}

func (a *app) migrateDown() *cobra.Command {
	var to int64
	var force bool
	cmd := &cobra.Command{
		Use:   "down",
		Short: "Roll back the newest migration, or down to a version",
		Long: `down rolls back one migration, or with --to all that are newer than the given version; --to 0 removes schema fence.

It changes nothing while a protected table still holds fences: without the schema they would start again at 2, below
those in the table, and every later writer would be refused. --force says that this is known.`,
		Example: `  fencecheck migrate down
  fencecheck migrate down --to 0`,
		Args: usageArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			cfg, err := a.connConfig()
			if err != nil {
				return err
			}
			target := int64(-1)
			if cmd.Flags().Changed("to") {
				if target = to; to < 0 {
					return usageError{fmt.Errorf("--to %d: want 0 or more", to)}
				}
			}
			steps, err := migrate.Down(cmd.Context(), cfg, target, force)
			report(cmd.OutOrStdout(), "rolled back", steps)
			if err != nil {
				return a.explainConnect(err)
			}
			if len(steps) == 0 {
				_, _ = fmt.Fprintln(cmd.OutOrStdout(), "nothing to do")
			}
			return nil
		},
	}
	cmd.Flags().Int64Var(&to, "to", 0, "the version to stay at; 0 removes everything")
	cmd.Flags().BoolVar(&force, "force", false, "even if protected tables still hold fences")
	return cmd
}

func report(w io.Writer, what string, steps []migrate.Step) {
	for _, s := range steps {
		_, _ = fmt.Fprintf(w, "%s %s\n", what, s.File)
	}
}

func (a *app) migrateStatus() *cobra.Command {
	return a.addOutput(&cobra.Command{
		Use:   "status",
		Short: "Show which migrations are applied, and when they were",
		Long: `status shows each migration that this program brings: applied, and when; pending; or applied by another tool, where they were
folded into a set of your own. It writes nothing.`,
		Example: `  fencecheck migrate status`,
		Args:    usageArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			cfg, err := a.connConfig()
			if err != nil {
				return err
			}
			list, err := migrate.List(cmd.Context(), cfg)
			if err != nil {
				return a.explainConnect(err)
			}
			return a.print(cmd.OutOrStdout(), list, func(w io.Writer) error {
				for _, m := range list {
					when := "pending"
					if m.ByOther {
						when = "applied by another tool"
					}
					if !m.AppliedAt.IsZero() {
						when = "applied " + m.AppliedAt.UTC().Format("2006-01-02 15:04:05Z07:00")
					}
					if _, err := fmt.Fprintf(w, "%-24s  %s\n", m.File, when); err != nil {
						return err
					}
				}
				return nil
			})
		},
	}, forms...)
}

func (a *app) migrateSQL() *cobra.Command {
	var version int64
	cmd := &cobra.Command{
		Use:   "sql",
		Short: "Print the migrations, for folding into your own set",
		Long: `sql prints the goose files as they are, each under its name; with --version one of them alone, ready to be
redirected into a file of your own set. It needs no database.`,
		Example: `  fencecheck migrate sql --version 1`,
		Args:    usageArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if cmd.Flags().Changed("version") && version < 1 {
				return usageError{fmt.Errorf("--version %d: want 1 or more", version)}
			}
			text, err := migrate.SQL(version)
			if err != nil {
				return usageError{err}
			}
			_, err = io.WriteString(cmd.OutOrStdout(), text)
			return err
		},
	}
	cmd.Flags().Int64Var(&version, "version", 0, "only this one, exactly as its file")
	return cmd
}
