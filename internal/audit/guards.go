package audit

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"
)

// guardSQL returns, for each guarded table and each partition of it, the triggers that its guard is made of: as they are,
// and as fence.install_guard makes them. %s is the table's keys, or no keys where this role may not ask for them.
const guardSQL = `
SELECT %s, x.relid::regclass::text, x.relid = p.relation, n.name, g.oid IS NOT NULL, coalesce(g.tgenabled IN ('O', 'A'), false), coalesce(g.tgenabled = 'R', false),
       concat_ws(', ',
           CASE WHEN g.tgfoid <> to_regprocedure('fence.' || quote_ident(n.function || e.suffix) || '()') THEN 'it calls ' || g.tgfoid::regprocedure END,
           CASE WHEN g.tgtype <> n.type THEN 'it fires at other times' END,
           CASE WHEN coalesce(substring(pg_get_triggerdef(g.oid, true) FROM ' FOR EACH (?:ROW|STATEMENT) (?:WHEN \((.*)\) )?EXECUTE FUNCTION '), '') <>
                     CASE WHEN e.quick AND n.name = '~writegate_guard'
                          THEN format('(new.%%1$I > old.%%1$I) IS NOT TRUE OR current_setting(''fence.entered''::text, true) <> ''''::text', p.fence_column) ELSE '' END
                THEN 'it has another condition' END,
           CASE WHEN n.name <> '~writegate_guard_keys' AND g.tgattr <> ''::int2vector THEN 'it looks at some columns alone' END),
       coalesce(g.tgargs, ''),
       ARRAY[p.guard, p.unfenced, CASE WHEN p.strength = 'fenced' THEN '' ELSE 'proof' END, p.fence_column::text, CASE c.relkind WHEN 'p' THEN 'partitioned' ELSE '' END],
       e.keys,
       ARRAY(SELECT a.attname::text FROM pg_catalog.pg_attribute a WHERE a.attrelid = x.relid AND a.attnum = ANY (g.tgattr) ORDER BY a.attname::text COLLATE "C"),
       ARRAY(SELECT DISTINCT k.name COLLATE "C" FROM unnest(e.keys) u (names) CROSS JOIN LATERAL json_array_elements_text(u.names::json) k (name) ORDER BY 1)
  FROM fence.protected_table p
  JOIN pg_catalog.pg_class c ON c.oid = p.relation
 CROSS JOIN LATERAL (SELECT CASE WHEN p.fence_column = 'last_fence' THEN '' ELSE '_' || md5(p.fence_column) END AS suffix,
                           p.strength = 'fenced' AND c.relkind = 'r' AS quick, %s AS keys) e
 CROSS JOIN LATERAL (SELECT c.oid AS relid WHERE c.relkind IN ('r', 'p') UNION SELECT y.relid FROM pg_catalog.pg_partition_tree(c.oid) y) x
 CROSS JOIN LATERAL (VALUES ('~writegate_guard', 'guard', CASE WHEN e.quick THEN 19 ELSE 31 END), ('~writegate_guard_rows', 'guard', 15),
                                    ('~writegate_guard_keys', 'guard_rekey', 19), ('~writegate_guard_truncate', 'guard', 34)) n (name, function, type)
  LEFT JOIN pg_catalog.pg_trigger g ON g.tgrelid = x.relid AND g.tgname = n.name
 WHERE p.guard <> 'off' AND (e.quick OR n.name <> '~writegate_guard_rows')
 ORDER BY 1, 2, n.name`

// guardFaults finds what keeps guards from working as they are registered, in every partition. keys is false where this role may not
// ask for the keys that a guard has to know: then those were not compared.
func guardFaults(ctx context.Context, q Querier) (faults []Finding, keys bool, err error) {
	if err := q.QueryRow(ctx, `SELECT coalesce(pg_catalog.has_function_privilege(pg_catalog.to_regprocedure('fence.keys_of(regclass)'), 'EXECUTE'), false)`).Scan(&keys); err != nil {
		return nil, false, fmt.Errorf("looking at the guards: %w", err)
	}
	ask := `NULL::text[]`
	if keys {
		ask = `fence.keys_of(p.relation)`
	}
	rows, err := q.Query(ctx, fmt.Sprintf(guardSQL, qualified, ask))
	if err != nil {
		return nil, false, fmt.Errorf("looking at the guards: %w", err)
	}
	var g struct {
		table, part, name              string
		top, there, enabled, replica   bool
		wrong                          string
		arguments                      []byte
		want, keys, columns, keyColumn []string
	}
	said := map[string]bool{} // tables whose triggers have other arguments, which are those of all of them
	_, err = pgx.ForEachRow(rows, []any{
		&g.table, &g.part, &g.top, &g.name, &g.there, &g.enabled, &g.replica, &g.wrong, &g.arguments, &g.want, &g.keys, &g.columns, &g.keyColumn,
	}, func() error {
		where, what := "", "its guard"
		if !g.top {
			where = " in " + g.part
		}
		fix := "SELECT fence.protect('" + strings.ReplaceAll(g.table, "'", "''") + "')"
		find := func(id, format string, args ...any) {
			faults = append(faults, Finding{ID: id, Object: g.table, Finding: fmt.Sprintf(format, args...) + where, Fix: fix})
		}
		switch g.name {
		case "~writegate_guard_rows":
			what = "its guard of rows that come and go"
		case "~writegate_guard_keys":
			what = "its guard of keys"
			if !g.there && (!keys || len(g.keys) == 0) {
				return nil // without a key there is none
			}
		case "~writegate_guard_truncate":
			if !g.there || !g.enabled || g.wrong != "" {
				find("guard-truncate", "it may be truncated")
				return nil
			}
			what = "its guard against TRUNCATE"
		}
		switch {
		case !g.there:
			find("guard-missing", "%s is missing", what)
			return nil
		case g.replica:
			find("guard-disabled", "%s looks at replication alone", what)
		case !g.enabled:
			find("guard-disabled", "%s is disabled", what)
		}
		if g.wrong != "" {
			find("guard-differs", "%s is not the one that was installed: %s", what, g.wrong)
			return nil
		}
		has := strings.Split(strings.TrimSuffix(string(g.arguments), "\x00"), "\x00")
		want := append(slices.Clone(g.want), g.keys...)
		if !keys {
			has, want = has[:min(len(has), len(g.want))], g.want
		}
		if !slices.Equal(has, want) {
			if said[g.table] {
				return nil
			}
			said[g.table] = true
			find("guard-differs", "%s works with (%s), the register and the table's keys say (%s)", what, strings.Join(has, ", "), strings.Join(want, ", "))
		} else if keys && g.name == "~writegate_guard_keys" && !slices.Equal(g.columns, g.keyColumn) {
			find("guard-differs", "%s looks at changes of (%s), the keys are of (%s)", what, strings.Join(g.columns, ", "), strings.Join(g.keyColumn, ", "))
		}
		return nil
	})
	if err != nil {
		return nil, false, fmt.Errorf("looking at the guards: %w", err)
	}
	return faults, keys, nil
}
