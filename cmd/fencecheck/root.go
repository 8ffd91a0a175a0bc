package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/writegate/writegate/internal/pgerr"
)

// app is what the commands share.
type app struct {
	databaseURL string
	output      string
}

func newRoot() *cobra.Command {
	a := &app{}
	root := &cobra.Command{
		Use:   "fencecheck",
		Short: "Leases, fences and refused writes in PostgreSQL: set up, look, audit",
		Long: `fencecheck sets up and audits writegate, the fencing-aware write gate for PostgreSQL.

The database is named by --database-url, else by DATABASE_URL, else by the PG* variables that psql reads too.

Exit status: 0 all is well; 1 found what it was asked to look for; 2 called wrongly; 3 could not do or check it.`,
		PersistentPreRunE: func(cmd *cobra.Command, _ []string) error {
			if cmd.Flags().Changed("database-url") && a.databaseURL == "" { // most often an unset variable of the shell
				return usageError{errors.New("--database-url is empty")}
			}
			return nil
		},
		SilenceUsage:  true,
		SilenceErrors: true,
		Args:          usageArgs(cobra.NoArgs),
		RunE:          func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	root.PersistentFlags().StringVar(&a.databaseURL, "database-url", "", "the database, as postgres://… or key=value")
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return usageError{err} })
	root.AddCommand(a.demo(), a.demoWorker(), a.migrate(), a.protect(), a.unprotect(), a.tables(), a.verify(), a.repair(), a.leases(), a.rejections(), a.version())
	return root
}

// usageArgs marks what a command says of its arguments as the caller's error.
func usageArgs(check cobra.PositionalArgs) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if err := check(cmd, args); err != nil {
			return usageError{err}
		}
		return nil
	}
}

// addOutput gives a command the flag that chooses its form of output.
func (a *app) addOutput(cmd *cobra.Command) *cobra.Command {
	cmd.Flags().StringVarP(&a.output, "output", "o", "table", "table or json")
	cmd.PreRunE = func(*cobra.Command, []string) error {
		if a.output != "table" && a.output != "json" {
			return usageError{fmt.Errorf("--output %q: want table or json", a.output)}
		}
		return nil
	}
	return cmd
}

// print writes v as JSON, or what table writes.
func (a *app) print(w io.Writer, v any, table func(io.Writer) error) error {
	if a.output != "json" {
		return table(w)
	}
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	return e.Encode(v)
}

// connConfig resolves which database is meant.
func (a *app) connConfig() (*pgx.ConnConfig, error) {
	dsn := a.databaseURL
	if dsn == "" {
		dsn = os.Getenv("DATABASE_URL")
	}
	if strings.HasPrefix(dsn, "postgres") && strings.Contains(dsn, "#") {
		return nil, usageError{errors.New("the connection string has a #, which ends a URL: write it as %23")}
	}
	cfg, err := pgx.ParseConfig(dsn)
	if err != nil {
		return nil, usageError{pgerr.ExplainParse(err)}
	}
	// Nothing is sent twice that would be worth preparing, and a pooler that pools transactions loses what is prepared.
	cfg.DefaultQueryExecMode = pgx.QueryExecModeExec
	if cfg.ConnectTimeout == 0 {
		cfg.ConnectTimeout = 10 * time.Second
	}
	if _, named := cfg.RuntimeParams["application_name"]; !named {
		cfg.RuntimeParams["application_name"] = "fencecheck"
	}
	return cfg, nil
}

// withConn runs work on one connection.
func (a *app) withConn(ctx context.Context, work func(*pgx.Conn) error) (err error) {
	cfg, err := a.connConfig()
	if err != nil {
		return err
	}
	conn, err := pgx.ConnectConfig(ctx, cfg)
	if err != nil {
		return a.explainConnect(err)
	}
	defer func() { err = errors.Join(err, conn.Close(context.WithoutCancel(ctx))) }()
	return work(conn)
}

func (a *app) explainConnect(err error) error {
	if a.databaseURL == "" && os.Getenv("DATABASE_URL") == "" {
		return fmt.Errorf("%w (neither --database-url nor DATABASE_URL is set: these are the PG* variables and defaults)", err)
	}
	return err
}
