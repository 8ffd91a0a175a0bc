package audit

import (
	"context"
	"fmt"
	"io"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/writegate/writegate/internal/pgerr"
)

// Table is one row of fence.protected_table, and what the catalog says of it.
type Table struct {
	Name        string   `json:"name"`
	FenceColumn string   `json:"fence_column"`
	Rule        string   `json:"rule"`
	Strength    string   `json:"strength"`
	Guard       string   `json:"guard"`
	Unfenced    string   `json:"unfenced"`
	Observed    []string `json:"observed"` // who did what that the guard would refuse, or was told to count
	Wrong       []string `json:"wrong"`    // what keeps the table from being protected as registered
}

// tablesOldest is the first version of the schema that has what Tables reads.
const tablesOldest = 4

const tablesSQL = `
SELECT p.relation::text, p.fence_column::text, p.rule, p.strength, p.guard, p.unfenced,
       ARRAY(SELECT format('%s %s by %s (%s), first at %s', o.operation, o.finding, coalesce(nullif(o.application_name, ''), '?'), o.db_user,
                           to_char(o.first_at AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS"Z"'))
               FROM fence.observation o WHERE o.relation = p.relation ORDER BY o.first_at),
       array_remove(ARRAY[
           CASE WHEN c.oid IS NULL THEN 'the table is gone: SELECT fence.unprotect(' || p.relation::oid || ')' END,
           CASE WHEN c.oid IS NOT NULL AND a.attname IS NULL THEN format('it has no column %I', p.fence_column) END,
           CASE WHEN a.atttypid <> 'bigint'::regtype THEN format('column %I is %s, not bigint', p.fence_column, format_type(a.atttypid, a.atttypmod)) END,
           CASE WHEN NOT a.attnotnull THEN format('column %I may be NULL', p.fence_column) END,
           CASE WHEN c.relpersistence = 'u' THEN 'it is unlogged: a crash empties it, and its fences with it' END,
           CASE WHEN p.guard <> 'off' AND g.tgname IS NULL THEN 'its guard is missing' END,
           CASE WHEN g.tgenabled = 'D' THEN 'its guard is disabled' END,
           CASE WHEN g.tgenabled = 'R' THEN 'its guard looks at replication alone' END,
           CASE WHEN p.guard <> 'off' AND g.tgname IS NOT NULL AND EXISTS (
               SELECT 1 FROM pg_partition_tree(p.relation) x
                WHERE NOT EXISTS (SELECT 1 FROM pg_trigger t WHERE t.tgrelid = x.relid AND t.tgname = '~writegate_guard_truncate' AND t.tgenabled <> 'D'))
               THEN 'a partition may be truncated: call fence.protect again' END,
           CASE WHEN g.tgname IS NOT NULL THEN (
               SELECT 'triggers look at a row after its guard, and may change it: ' || string_agg(quote_ident(t.tgname), ', ' ORDER BY t.tgname)
                 FROM pg_trigger t WHERE t.tgrelid = p.relation AND NOT t.tgisinternal AND t.tgtype & 2 <> 0 AND t.tgtype & 1 <> 0
                  AND t.tgname > '~writegate_guard' AND t.tgname NOT LIKE '~writegate_guard%') END
       ], NULL)
  FROM fence.protected_table p
  LEFT JOIN pg_class c ON c.oid = p.relation
  LEFT JOIN pg_attribute a ON a.attrelid = p.relation AND a.attname = p.fence_column AND NOT a.attisdropped
  LEFT JOIN pg_trigger g ON g.tgrelid = p.relation AND g.tgname = '~writegate_guard'
 ORDER BY p.relation::text`

// Tables returns the protected tables, by name.
func Tables(ctx context.Context, q Querier, database string) ([]Table, error) {
	version, err := CheckSchema(ctx, q, database)
	if err != nil {
		return nil, err
	}
	if err := pgerr.CheckSchema(version, tablesOldest); err != nil {
		return nil, err
	}
	rows, err := q.Query(ctx, tablesSQL)
	if err != nil {
		return nil, fmt.Errorf("reading fence.protected_table: %w", err)
	}
	tables, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (t Table, err error) {
		err = row.Scan(&t.Name, &t.FenceColumn, &t.Rule, &t.Strength, &t.Guard, &t.Unfenced, &t.Observed, &t.Wrong)
		return t, err
	})
	if err != nil {
		return nil, fmt.Errorf("reading fence.protected_table: %w", err)
	}
	return tables, nil
}

// WriteTables writes protected tables as a table for people, and below it what has been observed.
func WriteTables(w io.Writer, tables []Table) error {
	rows := make([][]string, 0, len(tables))
	for _, t := range tables {
		wrong := "-"
		if len(t.Wrong) > 0 {
			wrong = strings.Join(t.Wrong, "; ")
		}
		unfenced := t.Unfenced
		if t.Guard == "off" {
			unfenced = "-"
		}
		rows = append(rows, []string{t.Name, t.FenceColumn, t.Rule, t.Strength, t.Guard, unfenced, wrong})
	}
	if err := writeTable(w, []string{"TABLE", "FENCE", "RULE", "STRENGTH", "GUARD", "UNFENCED", "WRONG"}, rows); err != nil {
		return err
	}
	for _, t := range tables {
		for _, o := range t.Observed {
			if _, err := fmt.Fprintf(w, "%s: %s\n", Printable(t.Name), Printable(o)); err != nil {
				return err
			}
		}
	}
	return nil
}
