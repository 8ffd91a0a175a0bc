package fencedb

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sort"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/writegate/writegate/internal/pgerr"
)

// Rule says how a row compares a write's fence with the one it holds.
type Rule string

// The rules of comparison.
const (
	// Once: the row's fence must be lower. A row takes one write of each grant, which makes a repeat after a lost
	// answer safe.
	Once Rule = "once"
	// Term: the row's fence must not be higher. A row takes any number of writes of one grant.
	Term Rule = "term"
)

// Strength says what else refuses a write.
type Strength string

// The strengths.
const (
	// Fenced: nothing else. An older holder may still write a row that no newer one has written yet.
	Fenced Strength = "fenced"
	// Live: the lease must also be this grant's and not expired, by the database's clock; no newer grant can exist
	// before the write is committed. The leases must be in the same database, and the transaction READ COMMITTED.
	Live Strength = "live"
)

// Key names one row: its primary key, or the columns of a unique index without NULLs, with their values.
type Key map[string]any

// String returns the key as JSON, as the audit shows it. What JSON has no form for is shown as text, a uuid in its own.
func (k Key) String() string {
	shown := make(map[string]any, len(k))
	for column, value := range k {
		if uuid, ok := value.([16]byte); ok {
			value = fmt.Sprintf("%x-%x-%x-%x-%x", uuid[:4], uuid[4:6], uuid[6:8], uuid[8:10], uuid[10:])
		}
		if text, ok := value.(string); ok {
			value = storable(text)
		}
		if _, err := json.Marshal(value); err != nil {
			value = storable(fmt.Sprint(value))
		}
		shown[column] = value
	}
	text, err := json.Marshal(shown)
	if err != nil {
		return fmt.Sprintf("%q", fmt.Sprint(shown)) // a JSON string; each value was tried above
	}
	return string(text)
}

// Set is what a write puts into the row: columns and their new values. The fence column is not among them.
type Set map[string]any

// Table is a protected table as the catalog and the register describe it. It is safe for concurrent use.
type Table struct {
	gate *Gate
	db   querier
	tx   pgx.Tx // the caller's, if it is bound to one

	name     string // schema.table, for people
	ident    string // quoted, for SQL
	fenceCol string
	rule     Rule
	strength Strength
	leases   bool // schema fence is in this database: there are leases to be Live, and an audit
	columns  map[string]bool
	keys     [][]string // each sorted; the primary key first
}

// describeSQL reads all about a table from the catalog in one statement. What schema fence knows is asked in others:
// naming here what is not there would fail.
const describeSQL = `
SELECT c.oid, n.nspname, c.relname, c.relkind::text, c.relpersistence::text,
       ARRAY(SELECT a.attname::text FROM pg_catalog.pg_attribute a
              WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped),
       coalesce((SELECT json_agg(cols ORDER BY is_primary DESC, cols::text)
          FROM (SELECT i.indisprimary AS is_primary,
                       (SELECT json_agg(a.attname ORDER BY a.attname)
                          FROM pg_catalog.pg_attribute a
                         WHERE a.attrelid = i.indrelid AND a.attnum = ANY (i.indkey[0:i.indnkeyatts - 1])) AS cols
                  FROM pg_catalog.pg_index i
                 WHERE i.indrelid = c.oid AND i.indisunique AND i.indimmediate AND i.indisvalid
                   AND i.indpred IS NULL AND i.indexprs IS NULL
                   AND NOT EXISTS (SELECT 1 FROM pg_catalog.pg_attribute a
                                    WHERE a.attrelid = i.indrelid AND NOT a.attnotnull
                                      AND a.attnum = ANY (i.indkey[0:i.indnkeyatts - 1]))) k), '[]')::text,
       EXISTS (SELECT 1 FROM pg_catalog.pg_proc p JOIN pg_catalog.pg_namespace f ON f.oid = p.pronamespace
                WHERE f.nspname = 'fence' AND p.proname = 'schema_version'),
       c.relkind = 'r' AND EXISTS (SELECT 1 FROM pg_catalog.pg_inherits i WHERE i.inhparent = c.oid)
  FROM pg_catalog.pg_class c
  JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
 WHERE c.oid = pg_catalog.to_regclass($1)`

const registeredSQL = `
SELECT p.fence_column::text, p.rule, p.strength FROM fence.protected_table p WHERE p.relation = $1::oid::regclass`

const columnSQL = `
SELECT pg_catalog.format_type(a.atttypid, a.atttypmod), a.attnotnull
  FROM pg_catalog.pg_attribute a
 WHERE a.attrelid = $1 AND a.attname = $2 AND a.attnum > 0 AND NOT a.attisdropped`

// oldestSchema is the first version of schema fence that has what the gate calls.
const oldestSchema = 2

// Table reads what there is to know about a table, once, and refuses one that cannot be written safely: not a table,
// without a fence column (bigint NOT NULL), without a key, or, where schema fence is in this database, not registered
// by fence.protect. The name is as in SQL: schema-qualified or found through search_path, quoted where it needs to be.
//
// Where the database has no schema fence (the leases live elsewhere), the fence column is last_fence, the rule Once,
// the strength Fenced, and refusals are returned and logged, but there is no audit to record them in.
func (g *Gate) Table(ctx context.Context, name string) (*Table, error) {
	t := &Table{gate: g, db: g.pool, fenceCol: "last_fence", rule: Once, strength: Fenced}
	var oid uint32
	var schema, relation, kind, persistence, keys string
	var columns []string
	var inherited bool
	err := g.pool.QueryRow(ctx, describeSQL, name).
		Scan(&oid, &schema, &relation, &kind, &persistence, &columns, &keys, &t.leases, &inherited)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return nil, fmt.Errorf("fencedb: there is no table %s in database %q, or it is not on the search_path",
			name, g.pool.Config().ConnConfig.Database)
	case err != nil:
		return nil, fmt.Errorf("fencedb: table %s: %w", name, err)
	}
	t.name = schema + "." + relation
	t.ident = pgx.Identifier{schema, relation}.Sanitize()
	t.columns = make(map[string]bool, len(columns))
	for _, c := range columns {
		t.columns[c] = true
	}
	if inherited {
		return nil, fmt.Errorf("fencedb: other tables inherit from %s: a key is unique in each of them, not in all", t.name)
	}
	if err := json.Unmarshal([]byte(keys), &t.keys); err != nil {
		return nil, fmt.Errorf("fencedb: table %s: keys: %w", t.name, err)
	}
	for _, key := range t.keys {
		sort.Strings(key)
	}

	registered := true
	if t.leases {
		if registered, err = t.readRegister(ctx, oid); err != nil {
			return nil, fmt.Errorf("fencedb: table %s: %w", t.name, pgerr.ExplainSchema(err, g.pool.Config().ConnConfig.Database))
		}
	}
	if err := t.validate(ctx, oid, kind, persistence, registered); err != nil {
		return nil, err
	}
	return t, nil
}

// readRegister takes over what fence.protect was told of the table; false if it never was.
func (t *Table) readRegister(ctx context.Context, oid uint32) (bool, error) {
	var version int
	if err := t.db.QueryRow(ctx, `SELECT fence.schema_version()`).Scan(&version); err != nil {
		return false, err
	}
	if err := pgerr.CheckSchema(version, oldestSchema); err != nil {
		return false, err
	}
	err := t.db.QueryRow(ctx, registeredSQL, oid).Scan(&t.fenceCol, &t.rule, &t.strength)
	if errors.Is(err, pgx.ErrNoRows) {
		return false, nil
	}
	return err == nil, err
}

func (t *Table) validate(ctx context.Context, oid uint32, kind, persistence string, registered bool) error {
	protect := fmt.Sprintf("SELECT fence.protect('%s')", strings.ReplaceAll(t.ident, "'", "''"))
	if !t.leases {
		protect = fmt.Sprintf("`fencecheck migrate up` and %s, or, where the leases live elsewhere, ALTER TABLE %s ADD COLUMN last_fence bigint NOT NULL DEFAULT 0",
			protect, t.ident)
	}
	if kind != "r" && kind != "p" {
		return fmt.Errorf("fencedb: %s is not a table (relkind %q): protect the table behind it", t.name, kind)
	}
	if persistence == "u" {
		return fmt.Errorf("fencedb: table %s is unlogged: a crash empties it, and its fences with it", t.name)
	}
	var columnType string
	var notNull bool
	err := t.db.QueryRow(ctx, columnSQL, oid, t.fenceCol).Scan(&columnType, &notNull)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return fmt.Errorf("fencedb: table %s has no fence column %q (bigint NOT NULL DEFAULT 0): add it with %s",
			t.name, t.fenceCol, protect)
	case err != nil:
		return fmt.Errorf("fencedb: table %s: %w", t.name, err)
	case columnType != "bigint":
		return fmt.Errorf("fencedb: table %s: fence column %q is %s, want bigint: fences outgrow anything smaller",
			t.name, t.fenceCol, columnType)
	case !notNull:
		return fmt.Errorf("fencedb: table %s: fence column %q may be NULL, which compares with no fence: set it to 0 and NOT NULL",
			t.name, t.fenceCol)
	case !registered:
		return fmt.Errorf("fencedb: table %s is not registered in fence.protected_table: %s", t.name, protect)
	case len(t.keys) == 0:
		return fmt.Errorf("fencedb: table %s has neither a primary key nor a unique index without NULLs: a write could not name its row", t.name)
	}
	return nil
}

// Name returns the table's name as schema.table.
func (t *Table) Name() string { return t.name }

// Rule returns the rule by which the table compares fences.
func (t *Table) Rule() Rule { return t.rule }

// Strength returns the strength with which the table is written.
func (t *Table) Strength() Strength { return t.strength }

// In returns the table for writing inside a transaction of the caller's, who commits or rolls back. A refusal leaves
// the transaction usable, and is recorded whether it is then committed or not. Until the commit the other writes of
// the transaction can still be undone; what became of them is the caller's commit to tell.
func (t *Table) In(tx pgx.Tx) *Table {
	bound := *t
	bound.db, bound.tx = tx, tx
	return &bound
}

// checkKey returns the key's columns in a fixed order, or what is wrong with it.
func (t *Table) checkKey(key Key) ([]string, error) {
	columns := sortedKeys(key)
	for _, c := range columns {
		if key[c] == nil {
			return nil, fmt.Errorf("fencedb: table %s: key column %q is NULL, which names no row", t.name, c)
		}
	}
	for _, want := range t.keys {
		if slices.Equal(want, columns) {
			return columns, nil
		}
	}
	return nil, fmt.Errorf("fencedb: table %s: key %v is not a key of the table: want the columns of one of %v", t.name, columns, t.keys)
}

func (t *Table) checkSet(key Key, set Set) ([]string, error) {
	columns := sortedKeys(set)
	if len(columns) == 0 {
		return nil, fmt.Errorf("fencedb: table %s: nothing to set", t.name)
	}
	for _, c := range columns {
		if c == t.fenceCol {
			return nil, fmt.Errorf("fencedb: table %s: column %q is the fence, which the gate alone writes", t.name, c)
		}
		if _, isKey := key[c]; isKey {
			return nil, fmt.Errorf("fencedb: table %s: column %q names the row: a write that changes it could not be told from one that was lost", t.name, c)
		}
		if !t.columns[c] {
			return nil, fmt.Errorf("fencedb: table %s has no column %q", t.name, c)
		}
	}
	return columns, nil
}

func sortedKeys[M ~map[string]V, V any](m M) []string {
	keys := make([]string, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	sort.Strings(keys)
	return keys
}
