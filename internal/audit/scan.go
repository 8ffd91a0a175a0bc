package audit

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/writegate/writegate/internal/pgerr"
)

// ScanLimit says how to read the rows of protected tables: page by page, in batches that are made so large that each takes a
// fraction of a second, so that nothing else on the server waits for long, and nothing is lost when it is interrupted.
type ScanLimit struct {
	// None leaves the rows unread, which is noted.
	None bool
	// Sample is which part of each table's pages to read, in percent, picked at random; 0 or 100: all of them.
	Sample float64
	// State, if set, is a file in which the scan notes how far it has come. One that is there is gone on with; it is removed
	// when all has been read.
	State string
	// Progress, if set, is told how many bytes of how many have been passed.
	Progress func(table string, done, total int64)
	// Pause is slept after each batch.
	Pause time.Duration
}

// scanned is what has been seen of a table so far.
type scanned struct {
	File     int64  `json:"file"` // the table's, on disk: what was rewritten, or made anew, has another
	Next     int64  `json:"next"` // page
	Read     int64  `json:"read"` // pages
	Max      int64  `json:"max"`
	Null     int64  `json:"null"`
	Negative int64  `json:"negative"`
	Unknown  int64  `json:"unknown"`
	Example  string `json:"example,omitempty"` // of an unknown fence, and where
}

// scanState is the file of ScanLimit.State.
type scanState struct {
	Database string              `json:"database"`
	Sample   float64             `json:"sample"` // of each table
	Epoch    int64               `json:"epoch"`  // of the source of fences: after a jump, what was seen is of another time
	Tables   map[string]*scanned `json:"tables"` // by partition
}

const scanTablesSQL = `
SELECT %s, quote_ident(p.fence_column), p.high_water, format('%%I.%%I', n.nspname, k.relname),
       coalesce(pg_catalog.pg_relation_filenode(t.relid), 0)::bigint, pg_catalog.pg_relation_size(t.relid) / current_setting('block_size')::bigint, current_setting('block_size')::bigint,
       has_column_privilege(t.relid, a.attnum, 'SELECT') AND has_column_privilege(t.relid, 'ctid', 'SELECT'), row_security_active(t.relid)
  FROM fence.protected_table p
  JOIN pg_catalog.pg_class c ON c.oid = p.relation
 CROSS JOIN LATERAL %s t
  JOIN pg_catalog.pg_class k ON k.oid = t.relid JOIN pg_catalog.pg_namespace n ON n.oid = k.relnamespace
  JOIN pg_catalog.pg_attribute a ON a.attrelid = t.relid AND a.attname = p.fence_column AND NOT a.attisdropped AND a.atttypid = 'bigint'::regtype
 WHERE t.isleaf AND k.relkind = 'r'
 ORDER BY 1, 4`

type scanTable struct {
	table, fence, part string
	highWater          int64
	file               int64
	pages, pageSize    int64
	mayRead, secured   bool
}

// rows reads the fences of every protected row.
func (v *verifier) rows() error {
	if v.opt.Scan.None {
		v.result.Notes = append(v.result.Notes, "the rows of protected tables were not read: fencecheck verify does that")
		for _, id := range []string{"fence-unknown", "fence-negative", "fence-null"} {
			v.unchecked[id] = true // on request
		}
		return nil
	}
	rows, err := v.q.Query(v.ctx, fmt.Sprintf(scanTablesSQL, qualified, partsOf))
	if err != nil {
		return err
	}
	tables, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (t scanTable, err error) {
		return t, row.Scan(&t.table, &t.fence, &t.highWater, &t.part, &t.file, &t.pages, &t.pageSize, &t.mayRead, &t.secured)
	})
	if err != nil {
		return err
	}
	limit := &v.opt.Scan
	state, err := v.openState()
	if err != nil {
		return err
	}
	// Where no lease was ever granted leases live elsewhere, and no fence is known.
	var terms bool
	if err := v.q.QueryRow(v.ctx, `SELECT EXISTS (SELECT 1 FROM fence.term)`).Scan(&terms); err != nil {
		return err
	}
	if v.version >= prunedOldest {
		if err := mayRead(v.ctx, v.q, "pruned"); err != nil {
			return err
		}
	}
	if !terms && len(tables) > 0 {
		v.result.Notes = append(v.result.Notes, "no lease was ever granted here: whether rows hold fences that were never granted cannot be told")
	}
	var total, done, pages, read int64
	whole := true
	for _, t := range tables {
		total += t.pages * t.pageSize
	}
	seen := map[string]*scanned{} // by table
	var order []string
	for _, t := range tables {
		switch {
		case !t.mayRead:
			v.cannotScan(t.table, fmt.Sprintf("this role may not read it: GRANT SELECT (%s, ctid) ON %s TO %s", t.fence, t.part, currentRole(v.ctx, v.q)))
			continue
		case t.secured:
			v.cannotScan(t.table, "row security may hide rows from this role: ask as its owner, or as a role with BYPASSRLS")
			continue
		}
		part := state.Tables[t.part]
		if part == nil || part.File != t.file || part.Next > t.pages {
			part = &scanned{File: t.file}
			state.Tables[t.part] = part
		}
		err := v.scan(t, part, terms, func() error {
			if limit.Progress != nil {
				limit.Progress(t.table, done+min(part.Next, t.pages)*t.pageSize, total)
			}
			return v.saveState(state)
		})
		done += t.pages * t.pageSize
		if err != nil {
			if v.ctx.Err() != nil || pgerr.Code(err) == "" {
				return err
			}
			v.cannotScan(t.table, err.Error())
			whole = false
			continue
		}
		pages, read = pages+t.pages, read+min(part.Read, t.pages)
		if seen[t.table] == nil {
			seen[t.table] = &scanned{}
			order = append(order, t.table)
		}
		sum := seen[t.table]
		sum.Max, sum.Null, sum.Negative, sum.Unknown = max(sum.Max, part.Max), sum.Null+part.Null, sum.Negative+part.Negative, sum.Unknown+part.Unknown
		sum.Example = cmp.Or(sum.Example, part.Example)
	}
	// Last: what is granted while this reads is ahead of it, and no finding.
	var next int64
	if err := v.q.QueryRow(v.ctx, `SELECT CASE WHEN s.is_called THEN s.last_value + 2 ELSE s.last_value END FROM fence.fence_seq s`).Scan(&next); err != nil {
		return err
	}
	for _, table := range order {
		s := seen[table]
		if s.Max >= next {
			v.find("sequence-behind", table, "", "it holds fences up to %d, and the next that is granted is %d: its holder would be refused", s.Max, next)
		}
		if s.Null > 0 {
			v.find("fence-null", table, "", "%s no fence (NULL)", rowsHold(s.Null))
		}
		if s.Negative > 0 {
			v.find("fence-negative", table, "", "%s a fence below 0", rowsHold(s.Negative))
		}
		if s.Unknown > 0 {
			v.find("fence-unknown", table, "", "%s a fence that was never granted here, like %s", rowsHold(s.Unknown), s.Example)
		}
	}
	if limit.sampled() && len(order) > 0 {
		v.result.Notes = append(v.result.Notes, fmt.Sprintf("%d of %d pages of %s were read: what is rare may have been missed", read, pages, strings.Join(order, ", ")))
	}
	if limit.State != "" && whole && v.ctx.Err() == nil {
		if err := os.Remove(limit.State); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
	}
	return nil
}

func (l ScanLimit) sampled() bool { return l.Sample > 0 && l.Sample < 100 }

func rowsHold(n int64) string {
	if n == 1 {
		return "1 row holds"
	}
	return fmt.Sprintf("%d rows hold", n)
}

func (v *verifier) cannotScan(table, why string) {
	for _, id := range []string{"sequence-behind", "fence-unknown", "fence-negative", "fence-null"} {
		v.cannot(id, table, why)
	}
}

// scanSQL reads the fences on some pages. What is known of the sequence and of the terms is not older than the rows are: a fence
// is drawn, and its term committed, before a row can hold it; and fences up to the highest term that was pruned cannot be judged.
const scanSQL = `
WITH f AS MATERIALIZED (
    SELECT t.%[1]s AS fence, count(*) AS n, min(t.ctid)::text AS place FROM ONLY %[2]s t
     WHERE t.ctid >= $1::text::tid AND t.ctid < $2::text::tid GROUP BY 1),
u AS MATERIALIZED (
    SELECT f.fence, f.n, f.place FROM f
     WHERE $4 AND f.fence > greatest($3, %[3]s) AND NOT EXISTS (SELECT 1 FROM fence.term x WHERE x.fence = f.fence + f.fence %% 2))
SELECT coalesce(max(f.fence), 0), coalesce(sum(f.n) FILTER (WHERE f.fence IS NULL), 0)::bigint, coalesce(sum(f.n) FILTER (WHERE f.fence < 0), 0)::bigint,
       coalesce((SELECT sum(u.n) FROM u), 0)::bigint, coalesce((SELECT format('%%s at %%s', u.fence, u.place) FROM u ORDER BY u.fence DESC LIMIT 1), '')
  FROM f`

const (
	batchTime  = 200 * time.Millisecond // a batch is made to take about this long
	smallTable = 200                    // pages
)

func (v *verifier) scan(t scanTable, seen *scanned, terms bool, noted func() error) error {
	pruned := `0`
	if v.version >= prunedOldest {
		pruned = `(SELECT coalesce(max(p.max_fence), 0) FROM fence.pruned p WHERE p.what = 'term')`
	}
	sql := fmt.Sprintf(scanSQL, t.fence, t.part, pruned)
	sample := v.opt.Scan.Sample / 100
	batch := int64(64)
	// A sample is made of stretches of the same length, each read or passed by, and of one at least. What is small is read whole.
	sampled := v.opt.Scan.sampled() && t.pages > smallTable
	least := int64(-1)
	if sampled {
		batch = max(1, min(64, t.pages/smallTable))
		least = batch * rand.Int64N((t.pages+batch-1)/batch) //nolint:gosec // which pages are read is no secret
	}
	for seen.Next < t.pages {
		from := seen.Next
		to := min(from+batch, t.pages)
		if to == t.pages {
			to = 1<<32 - 1 // and what has been added since
		}
		seen.Next = min(to, t.pages)
		if sampled && from != least && rand.Float64() >= sample { //nolint:gosec // likewise
			continue
		}
		var maximum, null, negative, unknown int64
		var example string
		began := time.Now()
		err := v.q.QueryRow(v.ctx, sql, fmt.Sprintf("(%d,0)", from), fmt.Sprintf("(%d,0)", to), t.highWater, terms).Scan(&maximum, &null, &negative, &unknown, &example)
		if err != nil {
			seen.Next = from
			if pgerr.Code(err) == "57014" && batch > 1 && v.ctx.Err() == nil { // it took too long: a smaller one may not
				batch = max(batch/4, 1)
				continue
			}
			return err
		}
		seen.Read += seen.Next - from
		seen.Max, seen.Null, seen.Negative, seen.Unknown = max(seen.Max, maximum), seen.Null+null, seen.Negative+negative, seen.Unknown+unknown
		seen.Example = cmp.Or(seen.Example, example)
		if err := noted(); err != nil {
			return err
		}
		switch took := time.Since(began); {
		case sampled:
		case took < batchTime/2:
			batch = min(2*batch, 1<<16)
		case took > 2*batchTime:
			batch = max(batch/2, 1)
		}
		if v.opt.Scan.Pause > 0 {
			select {
			case <-v.ctx.Done():
				return context.Cause(v.ctx)
			case <-time.After(v.opt.Scan.Pause):
			}
		}
	}
	return nil
}

func (v *verifier) openState() (*scanState, error) {
	state := &scanState{Sample: v.opt.Scan.Sample, Tables: map[string]*scanned{}}
	if v.opt.Scan.State == "" {
		return state, nil
	}
	if err := v.q.QueryRow(v.ctx, `SELECT current_database(), coalesce((SELECT max(e.id) FROM fence.epoch e), 0)`).Scan(&state.Database, &state.Epoch); err != nil {
		return nil, err
	}
	text, err := os.ReadFile(v.opt.Scan.State)
	if errors.Is(err, os.ErrNotExist) {
		return state, nil
	}
	if err != nil {
		return nil, err
	}
	var old scanState
	if err := json.Unmarshal(text, &old); err != nil {
		return nil, fmt.Errorf("%s is not the state of a scan: %w", v.opt.Scan.State, err)
	}
	for name, t := range old.Tables {
		// The server takes a page below 0 for one near the end of what there can be: none would be read, and nothing found.
		if t != nil && min(t.Next, t.Read, t.Max, t.Null, t.Negative, t.Unknown) < 0 {
			return nil, fmt.Errorf("%s is not the state of a scan: it has a number below 0 for %q", v.opt.Scan.State, name)
		}
	}
	if old.Database != state.Database {
		return nil, fmt.Errorf("%s is the state of a scan of database %q, this is %q: remove it, or name another file", v.opt.Scan.State, old.Database, state.Database)
	}
	if old.Sample != state.Sample {
		return nil, fmt.Errorf("%s is the state of a scan of %g %% of each table, this is one of %g %%: remove it, or name another file", v.opt.Scan.State, old.Sample, state.Sample)
	}
	if old.Epoch != state.Epoch || old.Tables == nil {
		v.result.Notes = append(v.result.Notes, "the source of fences has changed since the scan was begun: it was begun anew")
		return state, nil
	}
	v.result.Notes = append(v.result.Notes, "the scan went on where "+v.opt.Scan.State+" had left it: rows that it had passed before were not read again")
	return &old, nil
}

func (v *verifier) saveState(state *scanState) error {
	if v.opt.Scan.State == "" {
		return nil
	}
	text, err := json.Marshal(state)
	if err != nil {
		return err
	}
	file, err := os.CreateTemp(filepath.Dir(v.opt.Scan.State), ".fencecheck-*")
	if err != nil {
		return err
	}
	_, err = file.Write(text)
	err = errors.Join(err, file.Close())
	if err == nil {
		err = os.Rename(file.Name(), v.opt.Scan.State)
	}
	if err != nil {
		_ = os.Remove(file.Name())
	}
	return err
}
