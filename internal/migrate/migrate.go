// Package migrate applies writegate's migrations to a database, with a history of their own that never meets the
// history of the user's migrations.
package migrate

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io/fs"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/pressly/goose/v3"

	"github.com/writegate/writegate/migrations"
)

// VersionTable is where goose keeps our history: not goose_db_version, in which our 00001 would be taken for the
// user's 00001 and skipped without a word.
const VersionTable = "fence.goose_db_version"

// lockID keeps two deployers of writegate apart, and does not queue behind a deployer of the user's own migrations
// who holds goose's default lock.
const lockID = 0x66656e6365 // "fence"

// Step is one migration, applied or rolled back.
type Step struct {
	Version int64  `json:"version"`
	File    string `json:"file"`
}

// Status is one migration and when it was applied; AppliedAt is zero while it is pending, and where another tool has
// applied it, which keeps its own history.
type Status struct {
	Version   int64     `json:"version"`
	File      string    `json:"file"`
	AppliedAt time.Time `json:"applied_at,omitzero"`
	ByOther   bool      `json:"applied_by_another_tool,omitempty"`
}

// HeldError says that the schema was not taken away because protected tables still hold fences.
type HeldError struct {
	Tables []string // "app.orders (up to 42)"
}

func (e *HeldError) Error() string {
	return fmt.Sprintf("protected tables still hold fences: %s; without the schema fences start again at 2, below those, "+
		"and the tables would refuse every writer: call fence.unprotect() for tables that need no protection any more, or use --force",
		strings.Join(e.Tables, ", "))
}

// Up applies every migration that is missing and returns what it applied. Safe to run from several processes at once:
// one works, the others wait for it and find nothing to do.
func Up(ctx context.Context, cfg *pgx.ConnConfig) ([]Step, error) {
	var steps []Step
	err := run(ctx, cfg, false, true, func(p *goose.Provider, _ *sql.DB) error {
		done, err := p.Up(ctx)
		steps = stepsOf(done)
		return explainPartial(err)
	})
	return steps, err
}

// Down rolls back to the given version, newest first; 0 takes everything away, schema fence included. A target below
// zero means one step. Unless forced it first makes sure that no protected table would be left holding fences, and
// then changes nothing at all if one would.
func Down(ctx context.Context, cfg *pgx.ConnConfig, target int64, force bool) ([]Step, error) {
	var steps []Step
	err := run(ctx, cfg, force, false, func(p *goose.Provider, db *sql.DB) error {
		exists, err := historyExists(ctx, db)
		if err != nil {
			return err
		}
		if !exists {
			return fmt.Errorf("nothing to roll back: there is no %s here, so no migration was applied by fencecheck "+
				"(a set of your own that has folded ours in rolls back by itself)", VersionTable)
		}
		current, err := p.GetDBVersion(ctx)
		if err != nil {
			return err
		}
		if target < 0 {
			target = max(current-1, 0)
		}
		if target > current {
			return fmt.Errorf("the schema is at version %d: it cannot go down to %d", current, target)
		}
		// Each file is a transaction of its own, and the one that refuses is not the first to be rolled back.
		if gate := int64(2); !force && current >= gate {
			if err := refuseIfHeld(ctx, db, current); err != nil {
				return err
			}
		}
		done, err := p.DownTo(ctx, target)
		steps = stepsOf(done)
		if err != nil {
			return explainPartial(err)
		}
		if target == 0 {
			return dropHistory(ctx, db)
		}
		return nil
	})
	return steps, err
}

// List returns every migration this program knows, in order, and when each was applied.
func List(ctx context.Context, cfg *pgx.ConnConfig) ([]Status, error) {
	var list []Status
	err := run(ctx, cfg, false, false, func(p *goose.Provider, db *sql.DB) error {
		exists, err := historyExists(ctx, db)
		if err != nil {
			return err
		}
		if !exists { // goose would create it, and reading a status must write nothing
			folded, err := foldedVersion(ctx, db)
			for _, s := range p.ListSources() {
				list = append(list, Status{Version: s.Version, File: s.Path, ByOther: s.Version <= folded})
			}
			return err
		}
		all, err := p.Status(ctx)
		if err != nil {
			return err
		}
		for _, m := range all {
			list = append(list, Status{Version: m.Source.Version, File: m.Source.Path, AppliedAt: m.AppliedAt})
		}
		return nil
	})
	return list, err
}

// SQL returns the migrations as they are applied, each under a line that names its file, for folding into somebody's
// own set. With a version above zero, that one alone, exactly as the file.
func SQL(version int64) (string, error) {
	names, err := fs.Glob(migrations.FS, "*.sql")
	if err != nil {
		return "", err
	}
	var out strings.Builder
	for _, name := range names {
		var v int64
		if _, err := fmt.Sscanf(name, "%d_", &v); err != nil {
			return "", fmt.Errorf("migration %s: %w", name, err)
		}
		if version > 0 && v != version {
			continue
		}
		text, err := fs.ReadFile(migrations.FS, name)
		if err != nil {
			return "", err
		}
		if version > 0 {
			return string(text), nil
		}
		fmt.Fprintf(&out, "-- %s\n%s\n", name, text)
	}
	if version > 0 {
		return "", fmt.Errorf("there is no migration %d: this program has 1 to %d", version, migrations.Version)
	}
	return out.String(), nil
}

func run(
	ctx context.Context, cfg *pgx.ConnConfig, force, create bool, work func(*goose.Provider, *sql.DB) error,
) (err error) {
	db := stdlib.OpenDB(*cfg)
	defer func() { err = errors.Join(err, db.Close()) }()
	unlock, err := lockOut(ctx, db)
	if err != nil {
		return err
	}
	defer unlock()
	files := migrations.FS
	if force {
		files = forced{files}
	}
	if create {
		if err := refuseOthers(ctx, db); err != nil {
			return err
		}
		// goose creates its table before it runs the migration that creates the schema.
		if err := createSchema(ctx, db); err != nil {
			return err
		}
	}
	provider, err := goose.NewProvider(goose.DialectPostgres, db, files,
		goose.WithTableName(VersionTable), goose.WithDisableGlobalRegistry(true),
		goose.WithLogger(goose.NopLogger()))
	if err != nil {
		return err
	}
	return work(provider, db)
}

// lockOut keeps other deployers waiting until unlock is called. In a transaction that stays open: a session's lock, which
// is goose's own, would be taken and given back in different sessions behind a pooler that pools transactions.
func lockOut(ctx context.Context, db *sql.DB) (unlock func(), err error) {
	tx, err := db.BeginTx(context.WithoutCancel(ctx), nil)
	if err != nil {
		return nil, err
	}
	unlock = func() { _ = tx.Rollback() }
	for _, statement := range []string{
		`SELECT set_config('lock_timeout', '5min', true), set_config('statement_timeout', '0', true), set_config('idle_in_transaction_session_timeout', '0', true)`,
		fmt.Sprintf(`SELECT pg_advisory_xact_lock(%d)`, lockID),
	} {
		if _, err := tx.ExecContext(ctx, statement); err != nil {
			unlock()
			return nil, fmt.Errorf("waiting for another deployer: %w", err)
		}
	}
	return unlock, nil
}

// forced are the migrations with a Down that may leave fences behind. It is said in each one's own transaction: what is
// set for a session may reach somebody else's, behind a pooler.
type forced struct{ fs.FS }

// ReadFile is what goose reads a migration by.
func (f forced) ReadFile(name string) ([]byte, error) {
	text, err := fs.ReadFile(f.FS, name)
	return []byte(strings.Replace(string(text), "-- +goose Down\n", "-- +goose Down\nSET LOCAL writegate.force_down = 'on';\n", 1)), err
}

// Open is for what does not know ReadFile.
func (f forced) Open(name string) (fs.File, error) {
	file, err := f.FS.Open(name)
	if err != nil || !strings.HasSuffix(name, ".sql") {
		return file, err
	}
	text, err := f.ReadFile(name)
	if err != nil {
		return nil, errors.Join(err, file.Close())
	}
	return &inMemory{file, strings.NewReader(string(text))}, nil
}

type inMemory struct {
	fs.File
	text *strings.Reader
}

func (f *inMemory) Read(p []byte) (int, error) { return f.text.Read(p) }

func historyExists(ctx context.Context, db *sql.DB) (exists bool, err error) {
	err = db.QueryRowContext(ctx, `SELECT to_regclass($1) IS NOT NULL`, VersionTable).Scan(&exists)
	return exists, err
}

// refuseOthers keeps us from applying what a set that has folded ours in has applied already, under a history of its own.
func refuseOthers(ctx context.Context, db *sql.DB) error {
	version, err := foldedVersion(ctx, db)
	if err != nil || version == 0 {
		return err
	}
	return fmt.Errorf("schema fence is at version %d here, and there is no %s: another tool has applied it, and has to upgrade it "+
		"(`fencecheck migrate sql` prints what is new)", version, VersionTable)
}

// foldedVersion returns the version of a schema that was not applied by us, 0 if there is none.
func foldedVersion(ctx context.Context, db *sql.DB) (version int64, err error) {
	if exists, err := historyExists(ctx, db); err != nil || exists {
		return 0, err
	}
	var found bool
	err = db.QueryRowContext(ctx, `SELECT EXISTS (SELECT 1 FROM pg_catalog.pg_proc p
		JOIN pg_catalog.pg_namespace n ON n.oid = p.pronamespace WHERE n.nspname = 'fence' AND p.proname = 'schema_version')`).Scan(&found)
	if err != nil || !found {
		return 0, err
	}
	err = db.QueryRowContext(ctx, `SELECT fence.schema_version()`).Scan(&version)
	return version, err
}

func createSchema(ctx context.Context, db *sql.DB) error {
	var exists bool
	err := db.QueryRowContext(ctx, `SELECT to_regnamespace('fence') IS NOT NULL`).Scan(&exists)
	if err != nil || exists { // IF NOT EXISTS asks for the CREATE right even where there is nothing to create
		return err
	}
	_, err = db.ExecContext(ctx, `CREATE SCHEMA IF NOT EXISTS fence`)
	// Two sessions that create the same schema at once: IF NOT EXISTS does not keep the later from a duplicate key.
	if pgErr := (*pgconn.PgError)(nil); errors.As(err, &pgErr) && (pgErr.Code == "23505" || pgErr.Code == "42P06") {
		return nil
	}
	return err
}

func refuseIfHeld(ctx context.Context, db *sql.DB, version int64) error {
	query := `SELECT format('%s (up to %s)', relation, max_fence) FROM fence.tables_holding_fences()`
	if version >= 3 {
		query += ` UNION ALL SELECT format('%s (tombstones of %s deleted rows)', t.relation, count(*))
			FROM fence.tombstone t JOIN fence.protected_table p ON p.relation = t.relation GROUP BY t.relation`
	}
	rows, err := db.QueryContext(ctx, query)
	if err != nil {
		return err
	}
	defer func() { _ = rows.Close() }()
	held := &HeldError{}
	for rows.Next() {
		var table string
		if err := rows.Scan(&table); err != nil {
			return err
		}
		held.Tables = append(held.Tables, table)
	}
	if err := rows.Err(); err != nil {
		return err
	}
	if len(held.Tables) > 0 {
		return held
	}
	return nil
}

// dropHistory takes away what the migrations themselves could not: the table that goose was still writing to.
func dropHistory(ctx context.Context, db *sql.DB) error {
	if _, err := db.ExecContext(ctx, `DROP TABLE IF EXISTS `+VersionTable); err != nil {
		return err
	}
	_, err := db.ExecContext(ctx, `DROP SCHEMA IF EXISTS fence`)
	if pgErr := (*pgconn.PgError)(nil); errors.As(err, &pgErr) && pgErr.Code == "2BP01" {
		return nil // somebody keeps something of theirs in it
	}
	return err
}

func stepsOf(done []*goose.MigrationResult) []Step {
	var steps []Step
	for _, r := range done {
		steps = append(steps, Step{Version: r.Source.Version, File: r.Source.Path})
	}
	return steps
}

// explainPartial says which file failed, and keeps what went before it.
func explainPartial(err error) error {
	var partial *goose.PartialError
	if !errors.As(err, &partial) {
		return err
	}
	return fmt.Errorf("%s failed and left nothing behind; %d before it stay applied: %w",
		partial.Failed.Source.Path, len(partial.Applied), partial.Err)
}
