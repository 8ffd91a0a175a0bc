package fencedb

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/writegate/writegate/internal/pgerr"
)

// link is what statements are sent through, pgx's or database/sql's.
type link interface {
	exec(ctx context.Context, sql string, args []any) (changed int64, err error)
	// query hands every row to each, which must scan it there and then. An error of each is returned as a readError, and
	// only if the statement itself had none: it was carried out, whatever could be read of it.
	query(ctx context.Context, sql string, args []any, each func(row) error) (rows int64, err error)
	// text says that values are sent as text, since nobody tells this link what types a statement wants.
	text() bool
}

// base is where a gate sends what is not in a caller's transaction.
type base interface {
	session(ctx context.Context) (session, error)
	database() string
	// spares is how many connections may be lying dead in the pool.
	spares() int
	text() bool
	// check finds out whether the base can work at all, as far as that shows before it is too late.
	check(ctx context.Context) error
	// audit makes the base for recording refusals, which must not wait for a connection that the refused work holds.
	audit(ctx context.Context) (base, error)
	close()
}

// session is one connection, taken from the pool until it is released.
type session interface {
	link
	// begin begins a transaction, READ COMMITTED, with settings, if any, which end with it: SET LOCAL …; SET LOCAL …
	begin(ctx context.Context, settings string) (transaction, error)
	// beginWith begins a transaction, READ COMMITTED, with a statement that reads one row and writes nothing, in as few round
	// trips as the driver can. There may be a transaction to be rolled back even with an error.
	beginWith(ctx context.Context, sql string, args []any, dest ...any) (transaction, error)
	release()
}

// transaction is one of the gate's own.
type transaction interface {
	link
	commit(ctx context.Context) error
	rollback(ctx context.Context)
	// over reports whether somebody has ended it by a statement of their own, as far as the driver tells.
	over() bool
}

// row is one row of an answer.
type row struct {
	names []string
	scan  func(dest ...any) error
}

// readError says that a statement was carried out, and its answer could not be read.
type readError struct{ error }

func (e readError) Unwrap() error { return e.error }

var errNoRow = errors.New("no row")

// one reads the only row of an answer.
func one(ctx context.Context, l link, sql string, args []any, dest ...any) error {
	n, err := l.query(ctx, sql, args, func(r row) error { return r.scan(dest...) })
	if err == nil && n == 0 {
		return errNoRow
	}
	return err
}

// pgxConn is met by pgx's connections and transactions.
type pgxConn interface {
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
}

type pgxLink struct {
	conn     pgxConn
	textOnly bool
}

func (l pgxLink) text() bool { return l.textOnly }

func (l pgxLink) exec(ctx context.Context, sql string, args []any) (int64, error) {
	tag, err := l.conn.Exec(ctx, sql, args...)
	if err == nil && tag.Select() {
		return 0, errAnswersAsSelect
	}
	return tag.RowsAffected(), l.judge(err)
}

// errAnswersAsSelect: PostgreSQL tells how many rows the outer statement returned, not how many were changed within it.
var errAnswersAsSelect = errors.New("the statement was carried out as a SELECT, which does not tell what it changed: make the INSERT, UPDATE, DELETE or MERGE the outer statement")

// judge marks an error after which the connection is still in use, and which is not the server's: an argument that could
// not be encoded, or an answer that was not understood in the making. An answer that is lost costs the connection.
func (l pgxLink) judge(err error) error {
	var pgErr *pgconn.PgError
	if err == nil || errors.As(err, &pgErr) {
		return err
	}
	var conn *pgx.Conn
	switch c := l.conn.(type) {
	case *pgxpool.Conn:
		conn = c.Conn()
	case pgx.Tx:
		conn = c.Conn()
	}
	if conn != nil && !conn.IsClosed() {
		return pgerr.RolledBack(err)
	}
	return err
}

func (l pgxLink) query(ctx context.Context, sql string, args []any, each func(row) error) (int64, error) {
	rows, err := l.conn.Query(ctx, sql, args...)
	if err != nil {
		return 0, l.judge(err)
	}
	// All of it is read before any of it is scanned: pgx ends a query whose row cannot be scanned with that error, and
	// the server's own, such as a constraint that is checked at the end, would be lost behind it.
	var raw [][][]byte
	for rows.Next() {
		values := rows.RawValues()
		kept := make([][]byte, len(values))
		for i, v := range values {
			if v != nil {
				kept[i] = append([]byte{}, v...)
			}
		}
		raw = append(raw, kept)
	}
	rows.Close()
	if err := rows.Err(); err != nil {
		return 0, l.judge(err)
	}
	if each == nil || len(raw) == 0 {
		return int64(len(raw)), nil
	}
	fields := rows.FieldDescriptions()
	names := make([]string, len(fields))
	for i, f := range fields {
		names[i] = f.Name
	}
	types := rows.Conn().TypeMap()
	for _, values := range raw {
		err := each(row{names, func(dest ...any) error { return pgx.ScanRow(types, fields, values, dest...) }})
		if err != nil {
			return int64(len(raw)), readError{err}
		}
	}
	return int64(len(raw)), nil
}

type sqlLink struct{ conn Conn }

func (l sqlLink) text() bool { return true }

func (l sqlLink) exec(ctx context.Context, sql string, args []any) (int64, error) {
	result, err := l.conn.ExecContext(ctx, sql, args...)
	if err != nil {
		return 0, err
	}
	changed, err := result.RowsAffected()
	if err != nil {
		return 0, fmt.Errorf("the driver does not say how many rows a statement changed: %w", err)
	}
	return changed, nil
}

func (l sqlLink) query(ctx context.Context, sql string, args []any, each func(row) error) (n int64, err error) {
	rows, err := l.conn.QueryContext(ctx, sql, args...)
	if err != nil {
		return 0, err
	}
	defer func() { _ = rows.Close() }()
	names, err := rows.Columns()
	if err != nil {
		return 0, err
	}
	var unread error
	for rows.Next() {
		n++
		if each != nil && unread == nil {
			unread = each(row{names, rows.Scan})
		}
	}
	if err := rows.Err(); err != nil {
		return 0, err
	}
	if err := rows.Close(); err != nil {
		return 0, err
	}
	if unread != nil {
		return n, readError{unread}
	}
	return n, nil
}

// pooledLink takes a connection for each statement: a *sql.DB by itself may send one again, if its driver says so.
type pooledLink struct{ base base }

func (l pooledLink) text() bool { return l.base.text() }

func (l pooledLink) exec(ctx context.Context, sql string, args []any) (int64, error) {
	s, err := l.base.session(ctx)
	if err != nil {
		return 0, err
	}
	defer s.release()
	return s.exec(ctx, sql, args)
}

func (l pooledLink) query(ctx context.Context, sql string, args []any, each func(row) error) (int64, error) {
	s, err := l.base.session(ctx)
	if err != nil {
		return 0, err
	}
	defer s.release()
	return s.query(ctx, sql, args, each)
}

type pgxBase struct {
	pool     *pgxpool.Pool
	name     string // of the database; asking the pool copies its whole configuration
	textOnly bool
	prepares bool // statements, by name, to run them again
	own      bool // close it
}

func newPgxBase(pool *pgxpool.Pool) pgxBase {
	cfg := pool.Config().ConnConfig
	mode := cfg.DefaultQueryExecMode
	return pgxBase{
		pool: pool, name: cfg.Database,
		textOnly: mode == pgx.QueryExecModeExec || mode == pgx.QueryExecModeSimpleProtocol,
		prepares: mode == pgx.QueryExecModeCacheStatement,
	}
}

func (b pgxBase) database() string { return b.name }
func (b pgxBase) spares() int      { return int(b.pool.Stat().MaxConns()) }
func (b pgxBase) text() bool       { return b.textOnly }

func (b pgxBase) close() {
	if b.own {
		b.pool.Close()
	}
}

// check asks whether what one statement prepares is there for the next, which behind a pooler that pools transactions it may
// not be: another client is made to take the session in between.
func (b pgxBase) check(ctx context.Context) error {
	if !b.prepares || b.pool.Stat().MaxConns() < 2 {
		return nil
	}
	const name = "writegate_probe"
	conn, err := b.pool.Acquire(ctx)
	if err != nil {
		return err
	}
	defer conn.Release()
	brief, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	other, err := b.pool.Acquire(brief)
	if err != nil {
		return ctx.Err() // they are all in use: it will show later
	}
	defer other.Release()
	if _, err := conn.Conn().Prepare(ctx, name, "SELECT 1"); err != nil {
		return err
	}
	tx, err := other.Begin(ctx)
	if err != nil {
		return err
	}
	_, err = conn.Exec(ctx, name)
	if rollbackErr := tx.Rollback(ctx); err == nil {
		err = rollbackErr
	}
	if err == nil {
		err = conn.Conn().Deallocate(ctx, name)
	}
	return err
}

func (b pgxBase) audit(ctx context.Context) (base, error) {
	cfg := b.pool.Config()
	cfg.MaxConns, cfg.MinConns, cfg.MinIdleConns = 1, 0, 0
	pool, err := pgxpool.NewWithConfig(ctx, cfg)
	if err != nil {
		return nil, err
	}
	own := newPgxBase(pool)
	own.own = true
	return own, nil
}

func (b pgxBase) session(ctx context.Context) (session, error) {
	conn, err := b.pool.Acquire(ctx)
	if err != nil {
		return nil, pgerr.BeforeSending(err)
	}
	return pgxSession{pgxLink{conn, b.textOnly}, conn}, nil
}

// exec runs one statement on a connection of the pool.
func (b pgxBase) exec(ctx context.Context, sql string, args []any) (int64, error) {
	conn, err := b.pool.Acquire(ctx)
	if err != nil {
		return 0, pgerr.BeforeSending(err)
	}
	defer conn.Release()
	return pgxLink{conn, b.textOnly}.exec(ctx, sql, args)
}

type pgxSession struct {
	pgxLink
	pooled *pgxpool.Conn
}

func (s pgxSession) release() { s.pooled.Release() }

func (s pgxSession) begin(ctx context.Context, settings string) (transaction, error) {
	options := pgx.TxOptions{IsoLevel: pgx.ReadCommitted}
	if settings != "" {
		options = pgx.TxOptions{BeginQuery: "begin isolation level read committed; " + settings} // in one round trip
	}
	tx, err := s.pooled.BeginTx(ctx, options)
	if err != nil {
		return nil, pgerr.BeforeSending(err)
	}
	return pgxTransaction{pgxLink{tx, s.textOnly}, tx}, nil
}

func (s pgxSession) beginWith(ctx context.Context, sql string, args []any, dest ...any) (transaction, error) {
	found := false
	var batch pgx.Batch
	batch.BeginTx(pgx.TxOptions{IsoLevel: pgx.ReadCommitted})
	batch.Queue(sql, args...).Query(func(rows pgx.Rows) error {
		if found = rows.Next(); found {
			return rows.Scan(dest...)
		}
		return nil
	})
	results := s.pooled.SendBatch(ctx, &batch)
	tx := pgxTransaction{pgxLink{results.Tx(), s.textOnly}, results.Tx()}
	err := results.Close()
	switch {
	case err != nil && s.pooled.Conn().IsClosed():
		err = pgerr.BeforeSending(err) // of anything that matters
	case err != nil:
		err = s.judge(err)
	case !found:
		err = errNoRow
	}
	return tx, err
}

type pgxTransaction struct {
	pgxLink
	tx pgx.Tx
}

func (t pgxTransaction) commit(ctx context.Context) error {
	err := t.tx.Commit(ctx)
	if errors.Is(err, pgx.ErrTxCommitRollback) {
		return pgerr.RolledBack(fmt.Errorf("a statement in it had failed: %w", err))
	}
	return err
}

func (t pgxTransaction) over() bool {
	conn := t.tx.Conn()
	return conn != nil && !conn.IsClosed() && conn.PgConn().TxStatus() == 'I'
}

// rollback needs no answer: the server undoes it as well when it finds the connection gone, which the pool closes.
func (t pgxTransaction) rollback(ctx context.Context) { _ = t.tx.Rollback(ctx) }

type sqlBase struct {
	db       *sql.DB
	auditing *sql.DB
}

func (b sqlBase) database() string { return "(of the *sql.DB)" }
func (b sqlBase) text() bool       { return true }

func (b sqlBase) spares() int { return b.db.Stats().OpenConnections }
func (b sqlBase) close()      {}

// check has nothing to go by: which mode a driver is in, it does not say.
func (b sqlBase) check(context.Context) error { return nil }

func (b sqlBase) audit(context.Context) (base, error) { return sqlBase{b.auditing, nil}, nil }

func (b sqlBase) session(ctx context.Context) (session, error) {
	// A connection of our own choosing: through a *sql.DB a driver that loses the answer may make it send the statement
	// once more, and nobody would know.
	conn, err := b.db.Conn(ctx)
	if err != nil {
		return nil, pgerr.BeforeSending(err)
	}
	return &sqlSession{sqlLink: sqlLink{conn}, pooled: conn}, nil
}

type sqlSession struct {
	sqlLink
	pooled    *sql.Conn
	abandoned chan struct{} // closed once the end of a transaction that nobody waits for any more has returned
}

func (s *sqlSession) release() {
	if s.abandoned == nil {
		_ = s.pooled.Close()
		return
	}
	go func() {
		<-s.abandoned
		_ = s.pooled.Close()
	}()
}

func (s *sqlSession) begin(ctx context.Context, settings string) (transaction, error) {
	if err := ctx.Err(); err != nil {
		return nil, pgerr.BeforeSending(err)
	}
	// Not with ctx, at whose end database/sql would roll back behind our back, while we commit.
	lasting, cancel := context.WithCancel(context.WithoutCancel(ctx))
	tx, err := s.pooled.BeginTx(lasting, &sql.TxOptions{Isolation: sql.LevelReadCommitted})
	if err != nil {
		cancel()
		return nil, pgerr.BeforeSending(err)
	}
	t := &sqlTransaction{sqlLink{tx}, tx, s, cancel}
	if settings != "" {
		if _, err := tx.ExecContext(lasting, settings); err != nil {
			t.rollback(ctx)
			return nil, pgerr.BeforeCommit(err)
		}
	}
	return t, nil
}

func (s *sqlSession) beginWith(ctx context.Context, sql string, args []any, dest ...any) (transaction, error) {
	tx, err := s.begin(ctx, "")
	if err != nil {
		return nil, err
	}
	return tx, one(ctx, tx, sql, args, dest...)
}

type sqlTransaction struct {
	sqlLink
	tx      *sql.Tx
	session *sqlSession
	cancel  context.CancelFunc
}

func (*sqlTransaction) over() bool { return false }

// commit gives up waiting when ctx ends, which database/sql itself would not.
func (t *sqlTransaction) commit(ctx context.Context) error {
	done, result := make(chan struct{}), make(chan error, 1)
	go func() {
		defer close(done)
		result <- t.tx.Commit()
	}()
	select {
	case err := <-result:
		<-done
		t.cancel()
		return err
	case <-ctx.Done():
		t.session.abandoned = done
		t.cancel()
		return ctx.Err()
	}
}

func (t *sqlTransaction) rollback(ctx context.Context) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = t.tx.Rollback()
	}()
	select {
	case <-done:
	case <-ctx.Done():
		t.session.abandoned = done
	}
	t.cancel()
}
