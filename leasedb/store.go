package leasedb

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/writegate/writegate/internal/pgerr"
)

// store is what a client needs of the database. Tests of the keep-alive put another in its place, because time can be
// controlled only where no network is waited for.
type store interface {
	acquire(ctx context.Context, req acquireRequest) (acquireAnswer, error)
	// renew returns the outcome for each name.
	renew(ctx context.Context, names, tokens []string) (map[string]string, error)
	release(ctx context.Context, req releaseRequest) (string, error)
	// listen calls ready once it listens and heard for each note, until it cannot any more or ctx ends.
	listen(ctx context.Context, ready func(), heard func(payload string)) error
	database() string
	// highest is where this process keeps the newest fence that this database has granted it.
	highest() *atomic.Int64
	close()
}

type acquireRequest struct {
	name, holder, token string
	ttl, lockWait       time.Duration
	waiter              string // "": does not wait
}

type acquireAnswer struct {
	granted    bool
	fence      int64
	remaining  time.Duration
	heldBy     string
	nextInLine bool
}

type releaseRequest struct {
	name, token string
	fence       int64 // 0: not known
	lockWait    time.Duration
	revoke      bool // the acquire was not answered, and may yet be carried out
}

const (
	acquireSQL = `SELECT granted, fence, (extract(epoch FROM remaining) * 1000000)::bigint, held_by, next_in_line
		FROM fence.acquire($1, $2, make_interval(secs => $3), $4::text::uuid, make_interval(secs => $5), $6)`
	// In one row, of those that are as they should be no more than their number.
	renewSQL = `SELECT count(*) FILTER (WHERE outcome = 'renewed'), coalesce(array_agg(name) FILTER (WHERE outcome <> 'renewed'), '{}'),
		coalesce(array_agg(outcome) FILTER (WHERE outcome <> 'renewed'), '{}') FROM fence.renew($1::text[], $2::uuid[])`
	releaseSQL = `SELECT fence.release($1, $2::text::uuid, nullif($3::bigint, 0), make_interval(secs => $4), $5)`
	versionSQL = `SELECT fence.schema_version()`
)

// oldestSchema is the first version of schema fence that has what is called above.
const oldestSchema = 1

// errNotReplicated: the grant is on this server only; a failover would lose it.
var errNotReplicated = errors.New("the grant was committed on this server, but the wait for its synchronous standby was cancelled")

// pgStore talks to schema fence on connections of its own.
type pgStore struct {
	// Renewals have a pool to themselves: neither the user's work nor a queue of acquires, each waiting on a row lock,
	// may keep a heartbeat waiting for a connection. Two, so that one that hangs is not the only one.
	renewals *pgxpool.Pool
	grants   *pgxpool.Pool
	// explicit is set once the session's default isolation level has turned out not to be READ COMMITTED: each call
	// then opens a transaction that says so, at the price of two round trips.
	explicit atomic.Bool
}

func openStore(ctx context.Context, base *pgxpool.Config, grantConns int32, logger *slog.Logger) (*pgStore, error) {
	open := func(conns int32) (*pgxpool.Pool, error) {
		cfg := base.Copy()
		// Names are UTF-8 here: where the database's encoding is another, the server has to convert them, or two programs would
		// mean two leases by one name.
		cfg.ConnConfig.RuntimeParams["client_encoding"] = "UTF8"
		cfg.MaxConns = conns
		cfg.MinConns = 0
		cfg.MinIdleConns = 0
		onNotice := cfg.ConnConfig.OnNotice
		cfg.ConnConfig.OnNotice = func(c *pgconn.PgConn, n *pgconn.Notice) {
			if n.Code == warningCode {
				c.CustomData()[warningCode] = n.Message
			}
			if strings.HasPrefix(n.Message, "writegate: ") { // schema fence has something to say, once
				logger.Warn(n.Message, "hint", n.Hint)
			}
			if onNotice != nil {
				onNotice(c, n)
			}
		}
		return pgxpool.NewWithConfig(ctx, cfg)
	}
	renewals, err := open(2)
	if err != nil {
		return nil, err
	}
	grants, err := open(grantConns)
	if err != nil {
		renewals.Close()
		return nil, err
	}
	return &pgStore{renewals: renewals, grants: grants}, nil
}

// warningCode is what a COMMIT that stopped waiting for its synchronous standby warns with. It succeeds all the same,
// and pgx reports no error.
const warningCode = "01000"

func (s *pgStore) checkSchema(ctx context.Context) error {
	var found int
	if err := s.grants.QueryRow(ctx, versionSQL).Scan(&found); err != nil {
		return pgerr.ExplainSchema(err, s.database())
	}
	return pgerr.CheckSchema(found, oldestSchema)
}

func (s *pgStore) acquire(ctx context.Context, req acquireRequest) (a acquireAnswer, err error) {
	var micros int64
	var waiter *string
	if req.waiter != "" {
		waiter = &req.waiter
	}
	warned, err := s.call(ctx, s.grants, func(ctx context.Context, q querier) error {
		return q.QueryRow(ctx, acquireSQL, req.name, req.holder, req.ttl.Seconds(), req.token, req.lockWait.Seconds(), waiter).
			Scan(&a.granted, &a.fence, &micros, &a.heldBy, &a.nextInLine)
	})
	a.remaining = time.Duration(micros) * time.Microsecond
	if err == nil && a.granted && warned != "" {
		return a, fmt.Errorf("%w: %s", errNotReplicated, warned)
	}
	return a, err
}

func (s *pgStore) renew(ctx context.Context, names, tokens []string) (map[string]string, error) {
	ids := make([]pgtype.UUID, len(tokens)) // which the server need not parse
	for i, token := range tokens {
		if err := ids[i].Scan(token); err != nil {
			return nil, err
		}
	}
	var renewed int
	var others, outcomes []string
	_, err := s.call(ctx, s.renewals, func(ctx context.Context, q querier) error {
		return q.QueryRow(ctx, renewSQL, names, ids).Scan(&renewed, &others, &outcomes)
	})
	if err != nil {
		return nil, err
	}
	if renewed+len(others) != len(names) {
		return nil, fmt.Errorf("fence.renew answered for %d leases of %d", renewed+len(others), len(names))
	}
	answers := make(map[string]string, len(names))
	for _, name := range names {
		answers[name] = outcomeRenewed
	}
	for i, name := range others {
		answers[name] = outcomes[i]
	}
	return answers, nil
}

func (s *pgStore) release(ctx context.Context, req releaseRequest) (outcome string, err error) {
	_, err = s.call(ctx, s.grants, func(ctx context.Context, q querier) error {
		return q.QueryRow(ctx, releaseSQL, req.name, req.token, req.fence, req.lockWait.Seconds(), req.revoke).Scan(&outcome)
	})
	return outcome, err
}

type querier interface {
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}

// call runs one statement as a transaction of its own, at READ COMMITTED, and returns what the server warned of.
func (s *pgStore) call(
	ctx context.Context, pool *pgxpool.Pool, work func(context.Context, querier) error,
) (warned string, err error) {
	conn, err := pool.Acquire(ctx)
	if err != nil {
		return "", pgerr.BeforeSending(err)
	}
	defer conn.Release()
	notes := conn.Conn().PgConn().CustomData()
	delete(notes, warningCode)

	if !s.explicit.Load() {
		err = work(ctx, conn)
		if pgerr.Code(err) != pgerr.Isolation {
			warned, _ = notes[warningCode].(string)
			return warned, err
		}
		s.explicit.Store(true)
	}
	tx, err := conn.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.ReadCommitted})
	if err != nil {
		return "", pgerr.BeforeSending(err)
	}
	if err := work(ctx, tx); err != nil {
		// The server has undone it. A connection on which the rollback fails is closed by the pool.
		_ = tx.Rollback(context.WithoutCancel(ctx))
		return "", err
	}
	err = tx.Commit(ctx)
	warned, _ = notes[warningCode].(string)
	return warned, err
}

func (s *pgStore) database() string {
	return s.grants.Config().ConnConfig.Database
}

// highestOf is keyed by host, port and database: all clients of a process share what they have seen.
var highestOf sync.Map

func (s *pgStore) highest() *atomic.Int64 {
	cfg := s.grants.Config().ConnConfig
	mark, _ := highestOf.LoadOrStore(fmt.Sprintf("%s:%d/%s", cfg.Host, cfg.Port, cfg.Database), new(atomic.Int64))
	return mark.(*atomic.Int64)
}

func (s *pgStore) close() {
	s.renewals.Close()
	s.grants.Close()
}
