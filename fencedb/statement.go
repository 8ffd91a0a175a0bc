package fencedb

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
)

// Args are the values of the named arguments (@name) of an expression, a condition, or a statement of one's own.
type Args map[string]any

// expression is a value that the database computes.
type expression struct {
	sql  string
	args Args
}

// Expr is a value of a [Set] that the database computes: SQL in which columns are those of the row as it was (in an
// Upsert written t.column), and @name stands for an argument. @fence is the lease's fence.
//
//	fencedb.Set{"attempts": fencedb.Expr("t.attempts + @n", fencedb.Args{"n": 1})}
//
// The text is part of the statement: never make it out of what somebody else has written; that is what args are for.
func Expr(sql string, args ...Args) any { return expression{sql, merge(args)} }

func merge(list []Args) Args {
	if len(list) == 1 {
		return list[0]
	}
	all := Args{}
	for _, args := range list {
		for name, value := range args {
			all[name] = value
		}
	}
	return all
}

// statement collects a statement and its arguments. Its text depends on nothing but the table, the columns and the
// options, so that it is prepared once.
type statement struct {
	strings.Builder
	args  []any
	text  bool   // send values as text
	fence string // the placeholder of the fence, once there is one
	err   error
}

func (s *statement) add(parts ...string) {
	for _, p := range parts {
		s.WriteString(p)
	}
}

func (s *statement) arg(value any) string {
	s.args = append(s.args, value)
	return "$" + strconv.Itoa(len(s.args))
}

// typed is a value as its column has it.
func (s *statement) typed(c column, value any) string {
	if !s.text {
		return s.arg(value) + "::" + c.Type
	}
	// By way of text, so that the driver has nothing to make of it: lib/pq would take a string for the bytes themselves.
	switch text := asText(c.OID, value).(type) {
	case nil, string:
		return s.arg(text) + "::pg_catalog.text::" + c.Type
	default:
		return s.arg(text) + "::" + c.Type
	}
}

// value is what a column is set to.
func (s *statement) value(c column, value any, fence int64) string {
	if e, ok := value.(expression); ok {
		return s.fragment(e, fence)
	}
	return s.typed(c, value)
}

// theFence is the fence's placeholder.
func (s *statement) theFence(fence int64) string {
	if s.fence == "" {
		s.fence = s.arg(fence) + "::bigint"
	}
	return s.fence
}

// fragment takes SQL of the caller's into the statement.
func (s *statement) fragment(e expression, fence int64) string {
	sql, args, err := named(len(s.args), e.sql, e.args, Args{"fence": fence})
	if err != nil {
		if s.err == nil {
			s.err = fmt.Errorf("in %q: %w", e.sql, err)
		}
		return "NULL"
	}
	s.args = append(s.args, args...)
	return "(" + sql + "\n)" // what a comment in it may have opened ends with the line
}

// given is a named argument's value, by which it is found again after the names have been replaced.
type given struct {
	name  string
	value any
}

// named replaces the names in sql by numbers, from after on, and returns their values. An argument of own that sql does
// not use is an error, and so is a name in it for which there is none; those in reserved may be used.
func named(after int, sql string, own, reserved Args) (string, []any, error) {
	// What is not UTF-8 ends the statement for the lexer, without a word: a comment in Latin-1 would cost it its condition.
	if !utf8.ValidString(sql) || strings.ContainsRune(sql, 0) {
		return "", nil, errors.New("it is not UTF-8 without NUL")
	}
	// The names under which the arguments before these are counted stand for them wherever they stand.
	if strings.Contains(sql, "@writegate_") {
		return "", nil, errors.New("names that begin with @writegate_ are the gate's own: choose another")
	}
	all := make(map[string]any, after+len(own)+len(reserved))
	for name, value := range own {
		if _, taken := reserved[name]; taken || strings.HasPrefix(name, "writegate_") {
			return "", nil, fmt.Errorf("argument @%s is the gate's own: choose another name", name)
		}
		all[name] = given{name, value}
	}
	for name, value := range reserved {
		all[name] = given{name, value}
	}
	// In front of it, for the numbering, as many arguments as there are already.
	var front strings.Builder
	width := 0
	for i := range after {
		name := "writegate_" + strconv.Itoa(i)
		all[name] = given{}
		front.WriteString("@" + name + " ")
		width += len("$ ") + len(strconv.Itoa(i+1))
	}
	text, args, err := pgx.NamedArgs(all).RewriteQuery(context.Background(), nil, front.String()+sql, nil)
	if err != nil {
		return "", nil, err
	}
	args = args[after:]
	used := map[string]bool{}
	for i, arg := range args {
		g, ok := arg.(given)
		if !ok {
			_, _, err := pgx.StrictNamedArgs(all).RewriteQuery(context.Background(), nil, sql, nil)
			return "", nil, fmt.Errorf("a name in it has no argument: %w", err)
		}
		used[g.name] = true
		args[i] = g.value
	}
	for name := range own {
		if !used[name] {
			return "", nil, fmt.Errorf("argument @%s is not used in it", name)
		}
	}
	return text[width:], args, nil
}

// types encode values as text. They are not safe for concurrent use, and take a while to make.
var types = sync.Pool{New: func() any { return pgtype.NewMap() }}

// asText returns value in PostgreSQL's own text form for the type, and NULL as nil. What pgx's types do not know is
// left to the driver.
func asText(oid uint32, value any) any {
	if value == nil {
		return nil
	}
	m := types.Get().(*pgtype.Map)
	defer types.Put(m)
	text, err := m.Encode(oid, pgtype.TextFormatCode, value, []byte{})
	if err != nil {
		return value
	}
	if text == nil {
		return nil
	}
	return string(text)
}

// textArray is an array of values in their text forms, in the making: in a form that every driver can send.
type textArray struct{ b []byte }

// add puts one more value at its end.
func (a *textArray) add(oid uint32, value any) error {
	if len(a.b) == 0 {
		a.b = append(a.b, '{')
	} else {
		a.b = append(a.b, ',')
	}
	switch oid { // what most keys are, without the detour
	case pgtype.Int4OID, pgtype.Int8OID:
		if i, ok := value.(int); ok && (oid == pgtype.Int8OID || i == int(int32(i))) {
			a.b = strconv.AppendInt(a.b, int64(i), 10)
			return nil
		}
	case pgtype.TextOID, pgtype.VarcharOID:
		if text, ok := value.(string); ok {
			a.addText(text)
			return nil
		}
	}
	switch text := asText(oid, value).(type) {
	case nil:
		a.b = append(a.b, "NULL"...)
	case string:
		a.addText(text)
	default:
		return fmt.Errorf("a %T, has no text form for its column", value)
	}
	return nil
}

func (a *textArray) addText(text string) {
	a.b = append(a.b, '"')
	for i := range len(text) {
		if c := text[i]; c == '"' || c == '\\' {
			a.b = append(a.b, '\\')
		}
		a.b = append(a.b, text[i])
	}
	a.b = append(a.b, '"')
}

func (a *textArray) String() string { return string(a.b) + "}" }

func quote(name string) string { return pgx.Identifier{name}.Sanitize() }
