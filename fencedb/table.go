package fencedb

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sort"
	"strings"
	"sync/atomic"

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
	// InTx: as Live, for a whole transaction, of which the write must be a part: [Gate.InTx] makes one.
	InTx Strength = "in_tx"
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

// Set is what a write puts into the row: columns and their new values, or expressions ([Expr]). The fence column is not
// among them.
type Set map[string]any

// Table is a protected table as the catalog and the register describe it. It is safe for concurrent use.
type Table struct {
	gate *Gate
	in   *caller // the caller's transaction, if it is bound to one

	name     string // schema.table, for people
	ident    string // quoted, for SQL
	fenceCol string
	rule     Rule
	strength Strength
	leases   bool // schema fence is in this database: there are leases to be Live, and an audit
	columns  map[string]column
	names    []string      // of the columns, in the table's order
	keys     [][]string    // each sorted; the primary key first
	claimed  []string      // the key that the caller says is one, sorted
	usual    *usualUpdates // nil where values are sent as text
	guarded  *atomic.Bool  // as far as is known
}

// column is what a statement must know of one.
type column struct {
	Name string
	OID  uint32
	Type string // quoted, without its modifier: a cast to varchar(3) would cut off where an assignment complains
	// Always is set if the database makes the value itself: GENERATED ALWAYS AS …
	Always bool
	// Collation is quoted, if it is another than the type's.
	Collation string
	// unhashed is set if the type has no hash function; its text does for one.
	unhashed bool
}

// TableOption changes how a table is read.
type TableOption func(*tableOptions)

type tableOptions struct{ key []string }

// KeyColumns says that these columns name a row although no unique index without NULLs says so: for a table without a
// key, or a partitioned one whose primary key must contain the column that it is partitioned by. That no two rows have
// the same values is the caller's word; if two have, a write changes both.
func KeyColumns(columns ...string) TableOption {
	return func(o *tableOptions) { o.key = columns }
}

// describeSQL reads all about a table from the catalog in one statement. What schema fence knows is asked in others:
// naming here what is not there would fail.
const describeSQL = `
SELECT c.oid::bigint, n.nspname::text, c.relname::text, c.relkind::text, c.relpersistence::text,
       coalesce((SELECT json_agg(json_build_object('Name', a.attname, 'OID', a.atttypid::bigint, 'Type', format('%I.%I', tn.nspname, ty.typname),
                                 'Always', a.attgenerated <> '' OR a.attidentity = 'a',
                                 'Collation', (SELECT format('%I.%I', cn.nspname, co.collname)
                                                 FROM pg_catalog.pg_collation co JOIN pg_catalog.pg_namespace cn ON cn.oid = co.collnamespace
                                                WHERE co.oid = a.attcollation AND a.attcollation <> ty.typcollation)) ORDER BY a.attnum)
          FROM pg_catalog.pg_attribute a
          JOIN pg_catalog.pg_type ty ON ty.oid = a.atttypid
          JOIN pg_catalog.pg_namespace tn ON tn.oid = ty.typnamespace
         WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped), '[]')::text,
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
 WHERE c.oid = pg_catalog.to_regclass($1::text)`

const registeredSQL = `
SELECT p.fence_column::text, p.rule, p.strength, p.guard OPERATOR(pg_catalog.<>) 'off' FROM fence.protected_table p WHERE p.relation = $1::bigint::oid::regclass`

const columnSQL = `
SELECT pg_catalog.format_type(a.atttypid, a.atttypmod), a.attnotnull
  FROM pg_catalog.pg_attribute a
 WHERE a.attrelid = $1::bigint::oid AND a.attname = $2::text AND a.attnum > 0 AND NOT a.attisdropped`

// oldestSchema is the first version of schema fence that has what the gate calls.
const oldestSchema = 4

// Table reads what there is to know about a table, once, and refuses one that cannot be written safely: not a table,
// without a fence column (bigint NOT NULL), without a key ([KeyColumns] helps), or, where schema fence is in this
// database, not registered by fence.protect. The name is as in SQL: schema-qualified or found through search_path,
// quoted where it needs to be.
//
// Where the database has no schema fence (the leases live elsewhere), the fence column is last_fence, the rule Once,
// the strength Fenced, and refusals are returned and logged, but there is no audit to record them in, no tombstone that
// a Delete could leave, and no record of requests.
func (g *Gate) Table(ctx context.Context, name string, options ...TableOption) (*Table, error) {
	var o tableOptions
	for _, option := range options {
		option(&o)
	}
	if !g.checked.Load() {
		if err := g.base.check(ctx); err != nil {
			return nil, fmt.Errorf("fencedb: %w", pgerr.ExplainSchema(err, g.base.database()))
		}
		g.checked.Store(true)
	}
	t := &Table{gate: g, fenceCol: "last_fence", rule: Once, strength: Fenced, guarded: new(atomic.Bool)}
	if base, ok := g.base.(pgxBase); ok && !base.textOnly {
		t.usual = &usualUpdates{base: base}
	}
	s, err := g.base.session(ctx)
	if err != nil {
		return nil, fmt.Errorf("fencedb: table %s: %w", name, err)
	}
	defer s.release()
	var oid int64
	var schema, relation, kind, persistence, columns, keys string
	var inherited bool
	err = one(ctx, s, describeSQL, []any{name},
		&oid, &schema, &relation, &kind, &persistence, &columns, &keys, &t.leases, &inherited)
	switch {
	case errors.Is(err, errNoRow):
		return nil, fmt.Errorf("fencedb: there is no table %s in database %q, or it is not on the search_path", name, g.base.database())
	case err != nil:
		return nil, fmt.Errorf("fencedb: table %s: %w", name, err)
	}
	t.name = schema + "." + relation
	t.ident = pgx.Identifier{schema, relation}.Sanitize()
	if inherited {
		return nil, fmt.Errorf("fencedb: other tables inherit from %s: a key is unique in each of them, not in all", t.name)
	}
	if err := t.readColumns(columns, keys); err != nil {
		return nil, fmt.Errorf("fencedb: table %s: %w", t.name, err)
	}

	registered := true
	if t.leases {
		if registered, err = t.readRegister(ctx, s, oid); err != nil {
			return nil, fmt.Errorf("fencedb: table %s: %w", t.name, pgerr.ExplainSchema(err, g.base.database()))
		}
	}
	if err := t.validate(ctx, s, oid, kind, persistence, registered, o); err != nil {
		return nil, err
	}
	if err := t.findUnhashed(ctx, s); err != nil {
		return nil, fmt.Errorf("fencedb: table %s: %w", t.name, err)
	}
	return t, nil
}

// findUnhashed marks the key columns whose types PostgreSQL has no hash function for (bit, tsvector), by trying.
func (t *Table) findUnhashed(ctx context.Context, s link) error {
	if !t.leases {
		return nil
	}
	try := func(types []string) error {
		var hash *int64
		return one(ctx, s, "SELECT pg_catalog.hash_record_extended(ROW(NULL::"+strings.Join(types, ", NULL::")+"), 0)", nil, &hash)
	}
	var names, types []string
	for _, key := range t.everyKey() {
		for _, c := range key {
			names, types = append(names, c), append(types, t.columns[c].Type)
		}
	}
	if try(types) == nil {
		return nil
	}
	for i, c := range names {
		switch err := try(types[i : i+1]); {
		case pgerr.Code(err) == "42883":
			column := t.columns[c]
			column.unhashed = true
			t.columns[c] = column
		case err != nil:
			return err
		}
	}
	return nil
}

func (t *Table) readColumns(columns, keys string) error {
	var list []column
	if err := json.Unmarshal([]byte(columns), &list); err != nil {
		return fmt.Errorf("columns: %w", err)
	}
	t.columns = make(map[string]column, len(list))
	for _, c := range list {
		t.columns[c.Name] = c
		t.names = append(t.names, c.Name)
	}
	if err := json.Unmarshal([]byte(keys), &t.keys); err != nil {
		return fmt.Errorf("keys: %w", err)
	}
	for _, key := range t.keys {
		sort.Strings(key)
	}
	return nil
}

// readRegister takes over what fence.protect was told of the table; false if it never was.
func (t *Table) readRegister(ctx context.Context, s link, oid int64) (bool, error) {
	var version int
	if err := one(ctx, s, `SELECT fence.schema_version()`, nil, &version); err != nil {
		return false, err
	}
	if err := pgerr.CheckSchema(version, oldestSchema); err != nil {
		return false, err
	}
	var rule, strength string
	var guarded bool
	err := one(ctx, s, registeredSQL, []any{oid}, &t.fenceCol, &rule, &strength, &guarded)
	if errors.Is(err, errNoRow) {
		return false, nil
	}
	t.guarded.Store(guarded)
	t.rule, t.strength = Rule(rule), Strength(strength)
	return err == nil, err
}

func (t *Table) validate(ctx context.Context, s link, oid int64, kind, persistence string, registered bool, o tableOptions) error {
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
	err := one(ctx, s, columnSQL, []any{oid, t.fenceCol}, &columnType, &notNull)
	switch {
	case errors.Is(err, errNoRow):
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
	case len(t.keys) == 0 && o.key == nil:
		return fmt.Errorf("fencedb: table %s has neither a primary key nor a unique index without NULLs: a write could not name its row; say which columns do with KeyColumns", t.name)
	case t.rule != Once && t.rule != Term, t.strength != Fenced && t.strength != Live && t.strength != InTx:
		return fmt.Errorf("fencedb: table %s is registered with rule %q and strength %q, which this program does not know: %w",
			t.name, t.rule, t.strength, ErrSchema)
	}
	if o.key == nil {
		return nil
	}
	t.claimed = slices.Sorted(slices.Values(o.key))
	for i, c := range t.claimed {
		if _, ok := t.columns[c]; !ok || c == t.fenceCol || i > 0 && c == t.claimed[i-1] {
			return fmt.Errorf("fencedb: table %s: KeyColumns %q: want columns of the table, each once, without its fence", t.name, o.key)
		}
	}
	if len(t.claimed) == 0 {
		return fmt.Errorf("fencedb: table %s: KeyColumns names no column", t.name)
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
// the transaction can still be undone; what became of them is the caller's commit to tell, or [Gate.InTx]'s.
func (t *Table) In(tx pgx.Tx) *Table {
	bound := *t
	bound.in = &caller{link: pgxLink{tx, t.gate.base.text()}, tx: tx, ends: true}
	switch p := tx.(type) {
	case *pinnedTx:
		bound.in.pin = &p.pin
	case *pinnedSavepoint:
		bound.in.pin = &p.pin
	}
	return &bound
}

// Conn is what database/sql and what is built upon it send statements through: *sql.DB, *sql.Conn, *sql.Tx, GORM's
// ConnPool, ent's ExecQuerier. Of a bun.Tx take the *sql.Tx in it (tx.Tx): bun has placeholders of its own.
type Conn interface {
	ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error)
	QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error)
}

// InSQL returns the table for writing through a connection or a transaction of database/sql, as [Table.In] does for
// pgx. Of anything but a *sql.Tx the gate cannot tell whether it is a transaction: a lost answer is then [Unknown].
func (t *Table) InSQL(conn Conn) *Table {
	bound := *t
	_, ends := conn.(*sql.Tx)
	bound.in = &caller{link: sqlLink{conn}, tx: conn, ends: ends}
	if db, ok := conn.(*sql.DB); ok {
		bound.in.link = pooledLink{sqlBase{db: db}}
	}
	return &bound
}

// caller is a transaction, or a connection, of the caller's.
type caller struct {
	link
	tx   any  // what identifies it
	ends bool // it is certain that what was sent is undone unless the caller commits
	pin  *pin // the grant that it is pinned to, if the gate did that
}

// pinned returns the grant that the transaction is pinned to, if it is.
func (c *caller) pinned(ctx context.Context) *pin {
	if c == nil {
		return nil
	}
	if c.pin != nil {
		return c.pin
	}
	if p, ok := ctx.Value(pinKey{}).(*pin); ok && p.tx == c.tx {
		return p // a *sql.Tx cannot be wrapped to say so itself
	}
	return nil
}

// checkKey returns the key's columns in a fixed order, or what is wrong with it.
func (t *Table) checkKey(key Key) ([]string, error) {
	columns := sortedKeys(key)
	for _, c := range columns {
		if key[c] == nil {
			return nil, fmt.Errorf("fencedb: table %s: key column %q is NULL, which names no row", t.name, c)
		}
	}
	for _, want := range t.everyKey() {
		if slices.Equal(want, columns) {
			return columns, nil
		}
	}
	return nil, fmt.Errorf("fencedb: table %s: key %v is not a key of the table: want the columns of one of %v", t.name, columns, t.everyKey())
}

// everyKey returns all keys of the table, the claimed one first.
func (t *Table) everyKey() [][]string {
	if t.claimed == nil || slices.ContainsFunc(t.keys, func(k []string) bool { return slices.Equal(k, t.claimed) }) {
		return t.keys
	}
	return append([][]string{t.claimed}, t.keys...)
}

// checkSet returns the columns to set in a fixed order, or what is wrong with them.
func (t *Table) checkSet(key Key, set Set) ([]string, error) {
	columns := sortedKeys(set)
	for _, c := range columns {
		known, ok := t.columns[c]
		switch _, isKey := key[c]; {
		case c == t.fenceCol:
			return nil, fmt.Errorf("fencedb: table %s: column %q is the fence, which the gate alone writes", t.name, c)
		case isKey:
			return nil, fmt.Errorf("fencedb: table %s: column %q names the row: a write that changes it could not be told from one that was lost", t.name, c)
		case !ok:
			return nil, fmt.Errorf("fencedb: table %s has no column %q", t.name, c)
		case known.Always:
			return nil, fmt.Errorf("fencedb: table %s: column %q is generated always, by the database", t.name, c)
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
