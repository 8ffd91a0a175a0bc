package audit

import (
	"context"
	"fmt"

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

// qualifiedOf is the SQL of a table's name, quoted, whatever the session's search_path is.
func qualifiedOf(relation string) string {
	return `coalesce((SELECT format('%I.%I', n.nspname, k.relname) FROM pg_catalog.pg_class k JOIN pg_catalog.pg_namespace n ON n.oid = k.relnamespace
                  WHERE k.oid = ` + relation + `), ` + relation + `::text)`
}

// qualified is that of a row p of the register.
var qualified = qualifiedOf("p.relation")

// partsOf is the SQL of a table c itself, or of a partitioned one and its partitions: pg_partition_tree knows only the latter.
const partsOf = `(SELECT c.oid AS relid, true AS isleaf WHERE c.relkind = 'r' UNION ALL SELECT y.relid, y.isleaf FROM pg_catalog.pg_partition_tree(c.oid) y)`

var tablesSQL = `
SELECT ` + qualified + `, p.fence_column::text, p.rule, p.strength, p.guard, p.unfenced,
       ARRAY(SELECT format('%s %s by %s (%s), first at %s', o.operation, o.finding, coalesce(nullif(o.application_name, ''), '?'), o.db_user,
                           to_char(o.first_at AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS"Z"'))
               FROM fence.observation o WHERE o.relation = p.relation ORDER BY o.first_at)
  FROM fence.protected_table p
 ORDER BY 1`

// Tables returns the protected tables, by name.
func Tables(ctx context.Context, q Querier, database string) ([]Table, error) {
	version, err := CheckSchema(ctx, q, database, "protected_table", "observation")
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
		err = row.Scan(&t.Name, &t.FenceColumn, &t.Rule, &t.Strength, &t.Guard, &t.Unfenced, &t.Observed)
		t.Wrong = []string{}
		return t, err
	})
	if err != nil {
		return nil, fmt.Errorf("reading fence.protected_table: %w", err)
	}
	faults, err := tableFaults(ctx, q)
	if err != nil {
		return nil, err
	}
	guards, _, err := guardFaults(ctx, q)
	if err != nil {
		return nil, err
	}
	for _, f := range append(faults, guards...) {
		for i := range tables {
			if tables[i].Name == f.Object {
				tables[i].Wrong = append(tables[i].Wrong, f.Finding)
			}
		}
	}
	return tables, nil
}

// tableFaultsSQL finds what keeps protected tables from being protected as registered, as far as the catalogs tell.
var tableFaultsSQL = `
SELECT t.name, f.id, f.finding, f.fix
  FROM fence.protected_table p
 CROSS JOIN LATERAL (SELECT ` + qualified + ` AS name) t
  LEFT JOIN pg_catalog.pg_class c ON c.oid = p.relation
  LEFT JOIN pg_catalog.pg_attribute a ON a.attrelid = p.relation AND a.attname = p.fence_column AND NOT a.attisdropped
  LEFT JOIN pg_catalog.pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
  LEFT JOIN pg_catalog.pg_trigger g ON g.tgrelid = p.relation AND g.tgname = '~writegate_guard'
  LEFT JOIN pg_catalog.pg_proc h ON h.oid = g.tgfoid
 CROSS JOIN LATERAL (VALUES
    (1, c.oid IS NULL, 'table-gone', 'the table is gone',
        'SELECT fence.unprotect(' || p.relation::oid || ')'),
    (2, c.oid IS NOT NULL AND a.attname IS NULL, 'fence-column-missing', format('it has no column %I', p.fence_column),
        format('SELECT fence.protect(%L) adds it anew, without the fences that it had; rename it back if it was renamed', t.name)),
    (3, a.atttypid <> 'bigint'::regtype, 'fence-column-type', format('column %I is %s, not bigint', p.fence_column, format_type(a.atttypid, a.atttypmod)),
        format('ALTER TABLE %s ALTER %I TYPE bigint', t.name, p.fence_column)),
    (4, NOT a.attnotnull, 'fence-column-nullable', format('column %I may be NULL', p.fence_column),
        format('UPDATE %1$s SET %2$I = 0 WHERE %2$I IS NULL; ALTER TABLE %1$s ALTER %2$I SET NOT NULL', t.name, p.fence_column)),
    (5, a.attname IS NOT NULL AND coalesce(pg_get_expr(d.adbin, d.adrelid), '') !~ '^[(]?''?0''?[)]?(::bigint)?$', 'fence-column-default',
        format('column %I has %s, not the default 0', p.fence_column, coalesce('the default ' || pg_get_expr(d.adbin, d.adrelid), 'no default')),
        format('ALTER TABLE %s ALTER %I SET DEFAULT 0', t.name, p.fence_column)),
    (6, EXISTS (SELECT 1 FROM ` + partsOf + ` x JOIN pg_catalog.pg_class k ON k.oid = x.relid WHERE k.relpersistence = 'u'), 'table-unlogged',
        'it, or a partition of it, is unlogged: a crash empties it, and its fences with it', format('ALTER TABLE %s SET LOGGED', t.name)),
    (7, c.relkind = 'r' AND EXISTS (SELECT 1 FROM pg_catalog.pg_inherits i WHERE i.inhparent = p.relation), 'table-inherited',
        'other tables inherit from it: a write by key could change several rows, and theirs have no guard',
        'make the child table one of its own (ALTER TABLE … NO INHERIT), or partition it'),
    (13, p.guard <> 'off' AND EXISTS (` + laterTriggers + `), 'guard-later-trigger',
        'triggers look at a row after its guard, and may change it: ' || (SELECT string_agg(DISTINCT quote_ident(t.tgname), ', ') ` + fromLaterTriggers + `),
        'rename them, so that they sort before ~writegate_guard: ALTER TRIGGER … RENAME TO …'),
    (15, EXISTS (SELECT 1 FROM ` + partsOf + ` x JOIN pg_catalog.pg_rewrite r ON r.ev_class = x.relid WHERE r.ev_type <> '1'), 'table-rules',
        'rules rewrite what is written to it: ' || (SELECT string_agg(format('%I on %s', r.rulename, x.relid::regclass), ', ') FROM ` + partsOf + ` x JOIN pg_catalog.pg_rewrite r ON r.ev_class = x.relid WHERE r.ev_type <> '1'),
        'DROP RULE; use a trigger that sorts before the guard'),
    (14, g.tgname IS NOT NULL AND p.fence_column <> 'last_fence'
         AND h.prosrc <> replace((SELECT x.prosrc FROM pg_catalog.pg_proc x WHERE x.oid = to_regprocedure('fence.guard()')), '.last_fence', '.' || quote_ident(p.fence_column)),
        'guard-outdated', 'its guard is the function of an older version of schema fence',
        format('SELECT fence.protect(%L, guard => ''off''); DROP FUNCTION %s; SELECT fence.protect(%L, guard => %L)', t.name, h.oid::regprocedure, t.name, p.guard))
    ) f (n, found, id, finding, fix)
 WHERE f.found
 ORDER BY t.name, f.n`

const (
	fromLaterTriggers = `FROM ` + partsOf + ` x JOIN pg_catalog.pg_trigger t ON t.tgrelid = x.relid WHERE NOT t.tgisinternal AND t.tgtype & 2 <> 0 AND t.tgtype & 1 <> 0
                  AND t.tgname > '~writegate_guard' AND t.tgname NOT LIKE '~writegate_guard%'`
	laterTriggers = `SELECT 1 ` + fromLaterTriggers
)

func tableFaults(ctx context.Context, q Querier) ([]Finding, error) {
	rows, err := q.Query(ctx, tableFaultsSQL)
	if err != nil {
		return nil, fmt.Errorf("looking at the protected tables: %w", err)
	}
	faults, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (f Finding, err error) {
		err = row.Scan(&f.Object, &f.ID, &f.Finding, &f.Fix)
		return f, err
	})
	if err != nil {
		return nil, fmt.Errorf("looking at the protected tables: %w", err)
	}
	return faults, nil
}
