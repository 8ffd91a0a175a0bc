package audit

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/writegate/writegate/internal/pgerr"
)

// SurveyOptions say what of a database an Overview is to show.
type SurveyOptions struct {
	Since, Until time.Time // half-open; zero Since: from the beginning; zero Until: until now
	Lease        string    // only this one; empty: all
	Server       string    // what to call the server
	Lanes        int       // most timelines; 0: 50
	Spans, Marks int       // most of each in a timeline, approximately; 0: 300 and 100
	Bins         int       // of the histogram; 0: 60
	Latest       int       // rejections to show each; 0: 50
	Verify       *Verification
	Timeout      time.Duration // for each statement; 0: no limit
}

// Beginner begins transactions: a connection or a pool.
type Beginner interface {
	BeginTx(ctx context.Context, options pgx.TxOptions) (pgx.Tx, error)
}

// Survey reads an Overview, all of it at one moment. However much there is in the database, what it returns is bounded: the
// database sums up.
func Survey(ctx context.Context, db Beginner, database string, opt SurveyOptions) (*Overview, error) {
	o := &Overview{Server: opt.Server, Verify: opt.Verify}
	err := pgx.BeginTxFunc(ctx, db, pgx.TxOptions{BeginQuery: fmt.Sprintf("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY; SET LOCAL search_path = pg_catalog, pg_temp; SET LOCAL jit = off; SET LOCAL statement_timeout = %d", opt.Timeout.Milliseconds())}, func(tx pgx.Tx) (err error) {
		s := surveyor{ctx, tx, opt.withDefaults(), o}
		// The privileges before the rest: an error there says what is missing.
		if o.Schema, err = CheckSchema(ctx, tx, database, "lease", "term", "rejection", "protected_table", "observation", "audit_loss", "guard_refused"); err != nil {
			return err
		}
		for _, read := range []func() error{s.window, s.counts, s.lanes, s.histogram, s.top, s.latest} {
			if err := read(); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	return o, nil
}

func (o SurveyOptions) withDefaults() SurveyOptions {
	for _, d := range []struct {
		value  *int
		normal int
	}{{&o.Lanes, 50}, {&o.Spans, 300}, {&o.Marks, 100}, {&o.Bins, 60}, {&o.Latest, 50}} {
		if *d.value <= 0 {
			*d.value = d.normal
		}
	}
	return o
}

type surveyor struct {
	ctx context.Context
	tx  pgx.Tx
	opt SurveyOptions
	o   *Overview
}

const rangeSQL = `
SELECT current_database(), pg_is_in_recovery(), clock_timestamp(),
       least((SELECT t.granted_at FROM fence.term t WHERE $1 = '' OR t.name = $1 ORDER BY t.fence LIMIT 1),
             (SELECT r.last_at FROM fence.rejection r WHERE $1 = '' OR r.lease_name = $1 ORDER BY r.last_at, r.id LIMIT 1))`

func (s *surveyor) window() error {
	var earliest *time.Time
	if err := s.tx.QueryRow(s.ctx, rangeSQL, s.opt.Lease).Scan(&s.o.Database, &s.o.Standby, &s.o.At, &earliest); err != nil {
		return fmt.Errorf("reading fence.term: %w", err)
	}
	s.o.Since, s.o.Until = s.opt.Since, s.opt.Until
	if s.o.Until.IsZero() {
		s.o.Until = s.o.At.Add(time.Microsecond) // what happened just now is part of it
	}
	if s.o.Since.IsZero() {
		s.o.Since = s.o.Until.Add(-time.Hour)
		if earliest != nil && earliest.Before(s.o.Until) {
			s.o.Since = *earliest
		}
	}
	if s.o.Until.Sub(s.o.Since) < time.Second { // what is shorter has no axis
		s.o.Since = s.o.Until.Add(-time.Second)
	}
	utc(&s.o.At, &s.o.Since, &s.o.Until)
	return nil
}

func (s *surveyor) filter() Filter {
	return Filter{Since: s.o.Since, Until: s.o.Until, Lease: s.opt.Lease}
}

func (s *surveyor) counts() (err error) {
	if s.o.Leases, err = CountLeases(s.ctx, s.tx); err != nil {
		return err
	}
	r := &s.o.Refusals
	err = s.tx.QueryRow(s.ctx, `SELECT coalesce(sum(count), 0)::bigint, count(*), coalesce(sum(count) FILTER (WHERE verdict = 'stale'), 0)::bigint,
		coalesce(sum(count) FILTER (WHERE verdict = 'expired'), 0)::bigint, coalesce(sum(count) FILTER (WHERE verdict = 'lawful'), 0)::bigint,
		coalesce(sum(count) FILTER (WHERE verdict = 'unknown'), 0)::bigint FROM fence.rejection`+rejectionsWhere, s.filter().arguments()...).
		Scan(&r.Refusals, &r.Rows, &r.Stale, &r.Expired, &r.Lawful, &r.Unknown)
	if err != nil {
		return fmt.Errorf("reading fence.rejection: %w", err)
	}
	r.Lost, r.GuardOnly, err = beyondRecord(s.ctx, s.tx, s.o.Schema)
	return err
}

// beyondRecord returns how many refusals are known by their number alone: those that could not be recorded, and those of guards.
func beyondRecord(ctx context.Context, q Querier, version int) (lost, guards int64, err error) {
	if version >= 3 {
		if err := q.QueryRow(ctx, `SELECT coalesce(sum(a.count), 0)::bigint FROM fence.audit_loss a`).Scan(&lost); err != nil {
			return 0, 0, fmt.Errorf("reading fence.audit_loss: %w", err)
		}
	}
	if version >= 4 {
		if err := q.QueryRow(ctx, `SELECT CASE WHEN g.is_called THEN g.last_value ELSE 0 END FROM fence.guard_refused g`).Scan(&guards); err != nil {
			return 0, 0, fmt.Errorf("reading fence.guard_refused: %w", err)
		}
	}
	return lost, guards, nil
}

const lanesSQL = `
WITH r AS (SELECT x.lease_name AS name, sum(x.count)::bigint AS refusals, count(*) AS marks, count(*) FILTER (WHERE x.verdict = 'lawful') AS lawful FROM fence.rejection x
            WHERE x.last_at >= $1 AND x.last_at < $2 AND ($3 = '' OR x.lease_name = $3) GROUP BY 1),
     t AS (SELECT x.name, count(*) AS terms, max(x.fence) AS fence FROM fence.term x
            WHERE x.granted_at < $2 AND coalesce(x.ended_at, 'infinity') >= $1 AND ($3 = '' OR x.name = $3) GROUP BY 1)
SELECT coalesce(r.name, t.name), coalesce(t.terms, 0), coalesce(r.refusals, 0), coalesce(r.marks, 0), count(*) OVER ()
  FROM r FULL JOIN t ON t.name = r.name
 ORDER BY coalesce(r.lawful, 0) DESC, coalesce(r.refusals, 0) > 0 DESC, r.refusals DESC NULLS LAST, t.fence DESC NULLS LAST, 1
 LIMIT $4`

// Many terms that were granted in the same stretch of time become one span; a lane that has few keeps them apart.
const spansSQL = `
SELECT t.name, min(t.granted_at), max(t.over), max(t.fence), (array_agg(t.holder ORDER BY t.fence DESC))[1], (array_agg(t.why ORDER BY t.fence DESC))[1],
       sum(t.renewals)::bigint, count(*), min(t.fence), bool_and(t.why IN ('expired', 'overdue')), count(*) FILTER (WHERE t.why IN ('expired', 'overdue')),
       sum(extract(epoch FROM least(t.over, $6) - t.granted_at))::float8
  FROM (SELECT x.name, x.granted_at, x.fence, x.holder, coalesce(l.renewals, x.renewals) AS renewals, k.terms,
               coalesce(x.ended_at, l.expires_at, x.granted_at + x.ttl) AS over,
               coalesce(x.end_reason, CASE WHEN l.expires_at > $6 THEN 'held' ELSE 'overdue' END) AS why
          FROM unnest($1::text[], $2::bigint[]) k (name, terms)
          JOIN fence.term x ON x.name = k.name COLLATE "C"
          LEFT JOIN fence.lease l ON l.name = x.name AND l.fence = x.fence
         WHERE x.granted_at < $4 AND coalesce(x.ended_at, 'infinity') >= $3) t
 GROUP BY t.name, CASE WHEN t.terms <= $5 THEN t.fence
                       ELSE -width_bucket(extract(epoch FROM t.granted_at), extract(epoch FROM $3::timestamptz), extract(epoch FROM $4::timestamptz), $5::int) END
 ORDER BY 1, 2`

const marksSQL = `
SELECT m.lease_name, m.first, m.last, m.refusals, m.n, m.verdict, r.id, r.table_name, r.row_key::text, r.reason, r.fence, r.current_fence, r.holder, r.current_holder, r.application_name
  FROM (SELECT x.lease_name, min(x.last_at) AS first, max(x.last_at) AS last, sum(x.count)::bigint AS refusals, count(*) AS n,
               (ARRAY['lawful', 'stale', 'expired', 'unknown'])[min(array_position(ARRAY['lawful', 'stale', 'expired', 'unknown'], x.verdict))] AS verdict,
               (array_agg(x.id ORDER BY x.last_at DESC, x.id DESC))[1] AS latest
          FROM unnest($1::text[], $2::bigint[]) k (name, marks)
          JOIN fence.rejection x ON x.lease_name = k.name COLLATE "C"
         WHERE x.last_at >= $3 AND x.last_at < $4
         GROUP BY x.lease_name, CASE WHEN k.marks <= $5 THEN x.id
                                     ELSE -width_bucket(extract(epoch FROM x.last_at), extract(epoch FROM $3::timestamptz), extract(epoch FROM $4::timestamptz), $5::int) END) m
  JOIN fence.rejection r ON r.id = m.latest
 ORDER BY m.lease_name, m.last, r.id`

func (s *surveyor) lanes() error {
	rows, err := s.tx.Query(s.ctx, lanesSQL, s.o.Since, s.o.Until, s.opt.Lease, s.opt.Lanes)
	if err != nil {
		return fmt.Errorf("reading fence.term and fence.rejection: %w", err)
	}
	s.o.Lanes = []Lane{}
	place := map[string]int{}
	var names []string
	var terms, marks []int64
	var all int64
	var l Lane
	var rejected int64
	_, err = pgx.ForEachRow(rows, []any{&l.Lease, &l.Terms, &l.Refusals, &rejected, &all}, func() error {
		place[l.Lease] = len(s.o.Lanes)
		names, terms, marks = append(names, l.Lease), append(terms, l.Terms), append(marks, rejected)
		s.o.Lanes = append(s.o.Lanes, l)
		return nil
	})
	if err != nil {
		return fmt.Errorf("reading fence.term and fence.rejection: %w", err)
	}
	s.o.LanesLeftOut = all - int64(len(names))

	rows, err = s.tx.Query(s.ctx, spansSQL, names, terms, s.o.Since, s.o.Until, s.opt.Spans, s.o.At)
	if err != nil {
		return fmt.Errorf("reading fence.term: %w", err)
	}
	var name string
	var x Span
	_, err = pgx.ForEachRow(rows, []any{&name, &x.From, &x.To, &x.Fence, &x.Holder, &x.End, &x.Renewals, &x.Terms, &x.OldFence, &x.AllLapsed, &x.Lapsed, &x.Held}, func() error {
		utc(&x.From, &x.To)
		lane := &s.o.Lanes[place[name]]
		lane.Spans = append(lane.Spans, x)
		return nil
	})
	if err != nil {
		return fmt.Errorf("reading fence.term: %w", err)
	}

	rows, err = s.tx.Query(s.ctx, marksSQL, names, marks, s.o.Since, s.o.Until, s.opt.Marks)
	if err != nil {
		return fmt.Errorf("reading fence.rejection: %w", err)
	}
	for rows.Next() {
		var m Mark
		if err := rows.Scan(&name, &m.From, &m.At, &m.Refusals, &m.Rows, &m.Verdict, &m.ID, &m.Table, &m.Key, &m.Reason, &m.Fence, &m.CurrentFence,
			&m.Holder, &m.CurrentHolder, &m.Application); err != nil {
			return fmt.Errorf("reading fence.rejection: %w", err)
		}
		utc(&m.From, &m.At)
		lane := &s.o.Lanes[place[name]]
		lane.Marks = append(lane.Marks, m)
	}
	if err := rows.Err(); err != nil {
		return fmt.Errorf("reading fence.rejection: %w", err)
	}
	return nil
}

func (s *surveyor) histogram() error {
	width := s.o.Until.Sub(s.o.Since) / time.Duration(s.opt.Bins)
	s.o.Histogram = make([]Bin, s.opt.Bins)
	for i := range s.o.Histogram {
		s.o.Histogram[i].From = s.o.Since.Add(time.Duration(i) * width)
		s.o.Histogram[i].To = s.o.Since.Add(time.Duration(i+1) * width)
	}
	s.o.Histogram[s.opt.Bins-1].To = s.o.Until
	rows, err := s.tx.Query(s.ctx, `SELECT least(floor(extract(epoch FROM last_at - $1::timestamptz) * 1000000 / $11::float8), $12 - 1)::int, verdict, sum(count)::bigint
		FROM fence.rejection`+rejectionsWhere+` GROUP BY 1, 2`, s.filter().arguments(float64(width.Nanoseconds())/1000, s.opt.Bins)...)
	if err != nil {
		return fmt.Errorf("reading fence.rejection: %w", err)
	}
	var bin int
	var verdict string
	var n int64
	_, err = pgx.ForEachRow(rows, []any{&bin, &verdict, &n}, func() error {
		b := &s.o.Histogram[bin]
		switch verdict {
		case "stale":
			b.Stale += n
		case "expired":
			b.Expired += n
		case "lawful":
			b.Lawful += n
		default:
			b.Unknown += n
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("reading fence.rejection: %w", err)
	}
	return nil
}

func (s *surveyor) top() error {
	f := s.filter()
	f.Limit = 10
	for _, by := range []string{"table", "holder", "lease", "reason", "application"} {
		list, err := TopRejections(s.ctx, s.tx, by, f)
		if err != nil {
			return err
		}
		s.o.Top = append(s.o.Top, list)
	}
	return nil
}

func (s *surveyor) latest() (err error) {
	f := s.filter()
	f.Limit = s.opt.Latest
	if s.o.Latest, s.o.LatestCut, err = Rejections(s.ctx, s.tx, f); err != nil {
		return err
	}
	if err := LookAtRows(s.ctx, s.tx, s.o.Latest, false); err != nil {
		return err
	}
	s.o.Tables, err = Tables(s.ctx, s.tx, s.o.Database)
	if errors.Is(err, pgerr.ErrSchema) { // older than the register as it is read now
		s.o.Tables, err = []Table{}, nil
	}
	return err
}
