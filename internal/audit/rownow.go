package audit

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/writegate/writegate/internal/pgerr"
)

// LookAtRows fills in what the rows of rejections hold now: their fence, whose it is, and with whole their columns. It reads
// the protected tables by the keys that are on record. What it cannot find out it says in the rejection, and is no error.
func LookAtRows(ctx context.Context, q Querier, found []Rejection, whole bool) error {
	type kind struct{ table, columns string }
	kinds := map[kind][]int{}
	var order []kind
	for i := range found {
		columns, err := keyColumns(found[i].Key)
		if err != nil {
			found[i].Now = &RowNow{State: "unknown", Note: "its key is not on record"}
			continue
		}
		k := kind{found[i].Table, strings.Join(columns, "\x00")}
		if kinds[k] == nil {
			order = append(order, k)
		}
		kinds[k] = append(kinds[k], i)
	}
	for _, k := range order {
		look := func(which ...int) error {
			return attempt(ctx, q, func(q Querier) error {
				return lookAtRows(ctx, q, found, which, strings.Split(k.columns, "\x00"), whole)
			})
		}
		err := look(kinds[k]...)
		if len(kinds[k]) > 1 && slices.Contains([]string{"22", "23"}, codeClass(err)) { // one key that fits no more must not hide the rest
			for _, i := range kinds[k] {
				if err := look(i); err != nil && pgerr.Code(err) == "" {
					return err
				} else if err != nil {
					found[i].Now = &RowNow{State: "unknown", Note: cannotRead(err)}
				}
			}
			continue
		}
		if err != nil && pgerr.Code(err) == "" {
			return err // not this table's fault
		}
		if err != nil {
			for _, i := range kinds[k] {
				found[i].Now = &RowNow{State: "unknown", Note: cannotRead(err)}
			}
		}
	}
	err := attempt(ctx, q, func(q Querier) error { return nameHolders(ctx, q, found) })
	if pgerr.Code(err) == "42501" {
		return nil // whose they are is not for this role to know
	}
	return err
}

func cannotRead(err error) string {
	switch pgerr.Code(err) {
	case "42501":
		return "this role may not read the table"
	case "57014":
		return "it took too long to read"
	}
	return "the table cannot be read by this key: SQLSTATE " + pgerr.Code(err)
}

func codeClass(err error) string {
	code := pgerr.Code(err)
	return code[:min(len(code), 2)]
}

func keyColumns(key string) ([]string, error) {
	var fields map[string]json.RawMessage
	if err := json.Unmarshal([]byte(key), &fields); err != nil {
		return nil, err
	}
	if len(fields) == 0 {
		return nil, fmt.Errorf("no columns")
	}
	var columns []string
	for c := range fields {
		columns = append(columns, c)
	}
	slices.Sort(columns)
	return columns, nil
}

func lookAtRows(ctx context.Context, q Querier, found []Rejection, which []int, columns []string, whole bool) error {
	var relation, fence, key string
	var has int
	// The key's columns alone are made of the JSON, by their types: those of other columns may not be null.
	err := q.QueryRow(ctx, `SELECT pg_catalog.format('%I.%I', n.nspname, c.relname), pg_catalog.quote_ident(p.fence_column), k.has, k.columns
		FROM fence.protected_table p JOIN pg_catalog.pg_class c ON c.oid = p.relation JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
		CROSS JOIN LATERAL (SELECT count(*) AS has, coalesce(pg_catalog.string_agg(pg_catalog.format('%I %s', a.attname, pg_catalog.format_type(a.atttypid, a.atttypmod)), ', '), '') AS columns
		  FROM pg_catalog.pg_attribute a WHERE a.attrelid = c.oid AND a.attname = ANY ($2::text[]) AND NOT a.attisdropped) k
		WHERE n.nspname || '.' || c.relname = $1`, found[which[0]].Table, columns).Scan(&relation, &fence, &has, &key)
	if errors.Is(err, pgx.ErrNoRows) {
		for _, i := range which {
			found[i].Now = &RowNow{State: "unknown", Note: "the table is not protected any more"}
		}
		return nil
	}
	if err != nil {
		return err
	}
	if has < len(columns) {
		for _, i := range which {
			found[i].Now = &RowNow{State: "unknown", Note: "the table has no such columns any more as its key has"}
		}
		return nil
	}
	keys := make([]string, len(which))
	for n, i := range which {
		keys[n] = found[i].Key
		found[i].Now = &RowNow{State: "missing"}
	}
	var same []string
	for _, c := range columns {
		c = pgx.Identifier{c}.Sanitize()
		same = append(same, "t."+c+" = r."+c)
	}
	row := "NULL"
	if whole {
		row = "to_jsonb(t)::text"
	}
	// A key that is not one any more may find several rows.
	rows, err := q.Query(ctx, fmt.Sprintf(`SELECT DISTINCT ON (k.n) k.n::int - 1, t.%[1]s::bigint, %[2]s
		FROM unnest($1::text[]) WITH ORDINALITY k (key, n)
		CROSS JOIN LATERAL jsonb_to_record(k.key::jsonb) r (%[5]s)
		JOIN %[3]s t ON %[4]s
		ORDER BY k.n, t.%[1]s DESC`, fence, row, relation, strings.Join(same, " AND "), key), keys)
	if err != nil {
		return err
	}
	var n int
	var f *int64
	var content *string
	_, err = pgx.ForEachRow(rows, []any{&n, &f, &content}, func() error {
		now := &RowNow{State: "present"}
		if f != nil {
			fence := *f
			now.Fence = &fence
		}
		if content != nil {
			now.Row = json.RawMessage(*content)
		}
		found[which[n]].Now = now
		return nil
	})
	return err
}

// nameHolders says whose the fences are that rows hold. A sealed row holds the one below the sealer's.
func nameHolders(ctx context.Context, q Querier, found []Rejection) error {
	var fences []int64
	for _, r := range found {
		if r.Now != nil && r.Now.Fence != nil {
			fences = append(fences, *r.Now.Fence)
		}
	}
	if len(fences) == 0 {
		return nil
	}
	rows, err := q.Query(ctx, `SELECT f.fence, t.name, t.holder FROM unnest($1::bigint[]) f (fence) JOIN fence.term t ON t.fence = f.fence + f.fence % 2`, fences)
	if err != nil {
		return fmt.Errorf("reading fence.term: %w", err)
	}
	type owner struct{ lease, holder string }
	owners := map[int64]owner{}
	var fence int64
	var o owner
	if _, err := pgx.ForEachRow(rows, []any{&fence, &o.lease, &o.holder}, func() error { owners[fence] = o; return nil }); err != nil {
		return fmt.Errorf("reading fence.term: %w", err)
	}
	for i := range found {
		if now := found[i].Now; now != nil && now.Fence != nil {
			now.Lease, now.Holder = owners[*now.Fence].lease, owners[*now.Fence].holder
		}
	}
	return nil
}
