package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/writegate/writegate/internal/audit"
	"github.com/writegate/writegate/internal/pgerr"
	"github.com/writegate/writegate/internal/show"
)

// app is what the commands share.
type app struct {
	databaseURL string
	output      string
	width       int
	color       string
	timeout     time.Duration
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
			if a.width < 0 {
				return usageError{fmt.Errorf("--width %d: want 0 (the terminal's) or more", a.width)}
			}
			if a.timeout < 0 || a.timeout > 0 && a.timeout < time.Millisecond {
				return usageError{fmt.Errorf("--statement-timeout %v: want 0 (no limit), or 1ms or more", a.timeout)}
			}
			if !slices.Contains([]string{"auto", "always", "never"}, a.color) {
				return usageError{fmt.Errorf("--color %q: want auto, always or never", a.color)}
			}
			return nil
		},
		SilenceUsage:  true,
		SilenceErrors: true,
		Args:          usageArgs(cobra.NoArgs),
		RunE:          func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	root.PersistentFlags().StringVar(&a.databaseURL, "database-url", "", "the database, as postgres://… or key=value")
	root.PersistentFlags().IntVar(&a.width, "width", 0, "for how many columns to write tables (default: the terminal's, without limit into a pipe)")
	root.PersistentFlags().DurationVar(&a.timeout, "statement-timeout", time.Minute, "for how long a statement that only reads may keep the server busy; 0: no limit")
	root.PersistentFlags().StringVar(&a.color, "color", "auto", "auto (on a terminal, unless NO_COLOR is set), always or never")
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return usageError{err} })
	root.AddGroup(&cobra.Group{ID: "look", Title: "Look:"}, &cobra.Group{ID: "check", Title: "Check and mend:"}, &cobra.Group{ID: "use", Title: "Set up and use:"})
	for id, commands := range map[string][]*cobra.Command{
		"look":  {a.leases(), a.terms(), a.rejections(), a.watch(), a.report(), a.serve()},
		"check": {a.tables(), a.verify(), a.explain(), a.repair(), a.prune()},
		"use":   {a.demo(), a.migrate(), a.protect(), a.unprotect(), a.runCommand()},
	} {
		for _, cmd := range commands {
			cmd.GroupID = id
			root.AddCommand(cmd)
		}
	}
	root.AddCommand(a.demoWorker(), a.version())
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

// forms are the forms of output of a command that lists something.
var forms = []string{"table", "json", "jsonl", "csv"}

// addOutput gives a command the flag that chooses its form of output.
func (a *app) addOutput(cmd *cobra.Command, forms ...string) *cobra.Command {
	cmd.Flags().StringVarP(&a.output, "output", "o", forms[0], strings.Join(forms[:len(forms)-1], ", ")+" or "+forms[len(forms)-1])
	_ = cmd.RegisterFlagCompletionFunc("output", cobra.FixedCompletions(forms, cobra.ShellCompDirectiveNoFileComp))
	check := cmd.PreRunE
	cmd.PreRunE = func(cmd *cobra.Command, args []string) error {
		if !slices.Contains(forms, a.output) {
			return usageError{fmt.Errorf("--output %q: want %s or %s", a.output, strings.Join(forms[:len(forms)-1], ", "), forms[len(forms)-1])}
		}
		if check != nil {
			return check(cmd, args)
		}
		return nil
	}
	return cmd
}

// print writes v in the form that was chosen: a table for people, or data.
func (a *app) print(w io.Writer, v any, table func(io.Writer) error) error {
	switch a.output {
	case "json":
		return show.JSON(w, v)
	case "jsonl":
		return show.JSONLines(w, v)
	case "csv":
		return show.CSV(w, v)
	}
	return table(w)
}

// printTable is print for a list that is shown as a table.
func (a *app) printTable(w io.Writer, v any, table *show.Table) error {
	return a.print(w, v, func(w io.Writer) error { return table.Write(w, a.screen(w)) })
}

// screen is what a table is written to: as wide as the terminal is, with colours unless NO_COLOR is set; a pipe or a file
// has neither.
func (a *app) screen(w io.Writer) show.Screen {
	s := show.Screen{Width: a.width}
	file, ok := w.(*os.File)
	tty := ok && term.IsTerminal(int(file.Fd()))
	if tty && s.Width == 0 {
		s.Width, _, _ = term.GetSize(int(file.Fd()))
	}
	switch a.color {
	case "always":
		s.Color = true
	case "auto":
		s.Color = tty && os.Getenv("NO_COLOR") == "" && os.Getenv("TERM") != "dumb"
	}
	return s
}

// poolConfig resolves which database is meant.
func (a *app) poolConfig() (*pgxpool.Config, error) {
	dsn := a.databaseURL
	if dsn == "" {
		dsn = os.Getenv("DATABASE_URL")
	}
	if strings.HasPrefix(dsn, "postgres") && strings.Contains(dsn, "#") {
		return nil, usageError{errors.New("the connection string has a #, which ends a URL: write it as %23")}
	}
	if misplacedAt(dsn) {
		return nil, usageError{errors.New("the connection string has an @ that is not the one before the host: in a password write / as %2F, ? as %3F and @ as %40, and elsewhere @ as %40 too")}
	}
	pool, err := pgxpool.ParseConfig(dsn)
	if err != nil {
		return nil, usageError{pgerr.ExplainParse(err)}
	}
	cfg := pool.ConnConfig
	for name := range cfg.RuntimeParams {
		if !parameterName.MatchString(name) { // the server would quote it
			return nil, usageError{errors.New("the connection string has something before a = that is no parameter's name (it is not shown, for it may be of a password): want postgres://user@host:port/database or key=value pairs")}
		}
	}
	// Nothing is sent twice that would be worth preparing, and a pooler that pools transactions loses what is prepared.
	cfg.DefaultQueryExecMode = pgx.QueryExecModeExec
	if cfg.ConnectTimeout == 0 {
		cfg.ConnectTimeout = 10 * time.Second
	}
	// Text is UTF-8 here, whatever the database's encoding is: the server converts.
	cfg.RuntimeParams["client_encoding"] = "UTF8"
	if _, named := cfg.RuntimeParams["application_name"]; !named {
		cfg.RuntimeParams["application_name"] = "fencecheck"
	}
	return pool, nil
}

var parameterName = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_.$]*$`)

// misplacedAt reports whether a URL has another @ than the one between the password and the host. A password with a /, ? or @ in it
// ends there for whoever reads the URL, and what is left of it would be shown as the host, the database or the user.
func misplacedAt(dsn string) bool {
	if !strings.HasPrefix(dsn, "postgres://") && !strings.HasPrefix(dsn, "postgresql://") {
		return false
	}
	_, rest, _ := strings.Cut(dsn, "://")
	authority := rest
	if i := strings.IndexAny(rest, "/?"); i >= 0 {
		authority = rest[:i]
	}
	return strings.Count(authority, "@") > 1 || strings.Contains(rest[len(authority):], "@")
}

// connConfig is poolConfig for one connection.
func (a *app) connConfig() (*pgx.ConnConfig, error) {
	pool, err := a.poolConfig()
	if err != nil {
		return nil, err
	}
	return pool.ConnConfig, nil
}

// readConn runs work that only reads, on one connection to a database whose schema fits, for a role that may read the named
// relations of it.
func (a *app) readConn(ctx context.Context, reads []string, work func(audit.Querier) error) error {
	return a.withConn(ctx, func(conn *pgx.Conn) error {
		q := audit.Bounded(conn, a.timeout)
		if _, err := audit.CheckSchema(ctx, q, conn.Config().Database, reads...); err != nil {
			return err
		}
		return work(q)
	})
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
