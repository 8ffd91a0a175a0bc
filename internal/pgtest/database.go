package pgtest

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/writegate/writegate/internal/migrate"
)

// Databases are called writegate_<run>_<n>, and say in a comment what they are. While the run lives it keeps a connection
// whose application_name is writegate_<run>, so that a later run can tell what a dead one left on a borrowed server.
const (
	prefix = "writegate_"
	// comment is what marks a database as one that may be dropped: its name alone could be anybody's.
	comment = "made by a test run of writegate, which drops it"
)

var shared struct {
	sync.Mutex
	server   *Server
	run      string    // this process's part of database names
	keep     *pgx.Conn // says that this run lives; creates and drops databases
	template string    // a database with our migrations applied
	dead     error     // Start failed: nobody tries again
	count    atomic.Int64
}

// Main runs a package's tests and then stops the server that they shared; call it from TestMain. An interrupt stops the
// server too.
func Main(m *testing.M) { os.Exit(Run(m)) }

// Run is Main for a TestMain that has more to do: it returns the status to exit with.
func Run(m *testing.M) int {
	interrupted := make(chan os.Signal, 1)
	signal.Notify(interrupted, os.Interrupt, syscall.SIGTERM)
	go func() {
		<-interrupted
		if err := stopShared(); err != nil {
			fmt.Fprintln(os.Stderr, "pgtest:", err)
		}
		os.Exit(1)
	}()
	code := m.Run()
	if err := stopShared(); err != nil {
		fmt.Fprintln(os.Stderr, "pgtest:", err)
		code = 1
	}
	return code
}

// Shared returns the server that all tests of this process share, and starts it if need be.
func Shared(t testing.TB) *Server {
	t.Helper()
	shared.Lock()
	defer shared.Unlock()
	if shared.dead == nil && shared.server == nil {
		shared.dead = startShared()
	}
	if shared.dead != nil {
		t.Fatalf("pgtest: %v", shared.dead)
	}
	return shared.server
}

// New returns the configuration of a fresh database with our migrations applied, gone when the test ends.
func New(t testing.TB) *pgx.ConnConfig {
	t.Helper()
	return create(t, true)
}

// NewEmpty is like New, without any migration.
func NewEmpty(t testing.TB) *pgx.ConnConfig {
	t.Helper()
	return create(t, false)
}

// Example returns a pool on a fresh migrated database in which setup has been run, for Example functions, which have no
// testing.TB. It panics where a test would fail. The package's TestMain must call [Main], which removes the database.
func Example(setup string) *pgxpool.Pool {
	t := &exampleTB{}
	cfg := create(t, true)
	if setup != "" {
		Exec(t, cfg, setup)
	}
	return Pool(t, cfg)
}

// exampleTB is the little of testing.TB that is needed here; all else would be a nil dereference.
type exampleTB struct{ testing.TB }

func (*exampleTB) Helper()                           {}
func (*exampleTB) Cleanup(func())                    {}
func (*exampleTB) Fatal(args ...any)                 { panic(fmt.Sprint(args...)) }
func (*exampleTB) Fatalf(format string, args ...any) { panic(fmt.Sprintf(format, args...)) }

// Conn returns a connection to the database, closed when the test ends.
func Conn(t testing.TB, cfg *pgx.ConnConfig) *pgx.Conn {
	t.Helper()
	conn, err := pgx.ConnectConfig(context.Background(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close(context.Background()) })
	return conn
}

// Pool returns a pool on the database, closed when the test ends. Each configure may change its configuration.
func Pool(t testing.TB, cfg *pgx.ConnConfig, configure ...func(*pgxpool.Config)) *pgxpool.Pool {
	t.Helper()
	poolConfig, err := pgxpool.ParseConfig("")
	if err != nil {
		t.Fatal(err)
	}
	poolConfig.ConnConfig = cfg.Copy()
	poolConfig.MaxConns = 10
	for _, f := range configure {
		f(poolConfig)
	}
	pool, err := pgxpool.NewWithConfig(context.Background(), poolConfig)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	return pool
}

// Exec runs SQL on a connection of its own, statement by statement where there are several.
func Exec(t testing.TB, cfg *pgx.ConnConfig, sql string) {
	t.Helper()
	ctx := context.Background()
	conn, err := pgx.ConnectConfig(ctx, cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close(ctx) }()
	if _, err := conn.PgConn().Exec(ctx, sql).ReadAll(); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
}

func create(t testing.TB, migrated bool) *pgx.ConnConfig {
	t.Helper()
	server := Shared(t)
	shared.Lock()
	defer shared.Unlock()
	ctx := context.Background()
	template := "template1"
	if migrated {
		if shared.template == "" {
			name := fmt.Sprintf("%s%s_template", prefix, shared.run)
			if err := createDatabase(ctx, name, "template1"); err != nil {
				t.Fatalf("pgtest: %v", err)
			}
			if _, err := migrate.Up(ctx, server.Config(name)); err != nil {
				t.Fatalf("pgtest: %v", err)
			}
			shared.template = name
		}
		template = shared.template
	}
	name := fmt.Sprintf("%s%s_%d", prefix, shared.run, shared.count.Add(1))
	if err := createDatabase(ctx, name, template); err != nil {
		t.Fatalf("pgtest: %v", err)
	}
	t.Cleanup(func() {
		shared.Lock()
		defer shared.Unlock()
		if shared.keep == nil {
			return // stopped under us, by an interrupt
		}
		if _, err := shared.keep.Exec(ctx, "DROP DATABASE "+name+" WITH (FORCE)"); err != nil {
			t.Errorf("pgtest: %v", err)
		}
	})
	return server.Config(name)
}

func createDatabase(ctx context.Context, name, template string) error {
	sql := fmt.Sprintf("CREATE DATABASE %s TEMPLATE %s", name, template)
	// Copying the files is several times quicker than logging every page of them, which is the default where there
	// is a choice.
	if !strings.HasPrefix(shared.keep.PgConn().ParameterStatus("server_version"), "14") {
		sql += " STRATEGY file_copy"
	}
	if _, err := shared.keep.Exec(ctx, sql); err != nil {
		return err
	}
	_, err := shared.keep.Exec(ctx, fmt.Sprintf("COMMENT ON DATABASE %s IS '%s'", name, comment))
	return err
}

func startShared() error {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Minute)
	defer cancel()
	server, err := Start(ctx)
	if err != nil {
		return err
	}
	run := strings.ToLower(rand.Text()[:12])
	cfg := server.admin.Copy()
	cfg.RuntimeParams["application_name"] = prefix + run
	keep, err := pgx.ConnectConfig(ctx, cfg)
	if err != nil {
		return errors.Join(err, server.Stop())
	}
	shared.server, shared.run, shared.keep = server, run, keep
	if server.Kind == "url" {
		if err := sweep(ctx, keep); err != nil {
			return fmt.Errorf("removing databases that dead runs left: %w", err)
		}
	}
	return nil
}

func stopShared() error {
	shared.Lock()
	defer shared.Unlock()
	if shared.server == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	var errs []error
	if shared.server.Kind == "url" {
		errs = append(errs, dropAll(ctx, shared.keep, prefix+shared.run+"_"))
	}
	errs = append(errs, shared.keep.Close(ctx), shared.server.Stop())
	shared.server, shared.keep, shared.template = nil, nil, ""
	return errors.Join(errs...)
}

// sweep drops the databases of test runs that are no longer connected.
func sweep(ctx context.Context, conn *pgx.Conn) error {
	rows, err := conn.Query(ctx, `
		SELECT DISTINCT substring(d.datname FROM '^writegate_[a-z2-7]{12}')
		  FROM pg_database d
		 WHERE d.datname ~ '^writegate_[a-z2-7]{12}_' AND shobj_description(d.oid, 'pg_database') = $1
		   AND NOT EXISTS (SELECT 1 FROM pg_stat_activity a
		                    WHERE a.application_name = substring(d.datname FROM '^writegate_[a-z2-7]{12}'))`, comment)
	if err != nil {
		return err
	}
	runs, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return err
	}
	var errs []error
	for _, run := range runs {
		errs = append(errs, dropAll(ctx, conn, run+"_"))
	}
	return errors.Join(errs...)
}

func dropAll(ctx context.Context, conn *pgx.Conn, namePrefix string) error {
	rows, err := conn.Query(ctx, `SELECT datname FROM pg_database d
		WHERE starts_with(datname, $1) AND shobj_description(d.oid, 'pg_database') = $2`, namePrefix, comment)
	if err != nil {
		return err
	}
	names, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return err
	}
	var errs []error
	for _, name := range names {
		_, err := conn.Exec(ctx, "DROP DATABASE IF EXISTS "+pgx.Identifier{name}.Sanitize()+" WITH (FORCE)")
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}
