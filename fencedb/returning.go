package fencedb

import (
	"database/sql"
	"fmt"
	"reflect"
	"strings"
)

// reader takes over rows of an answer.
type reader struct {
	columns []string            // asked for by name
	element reflect.Type        // of what a row is read into
	keep    func(reflect.Value) // takes one
	reset   func()              // forgets what an earlier attempt has read
}

// Returning reads the row as the write leaves it into dst. If that is a struct, its exported fields name the columns: by
// the tag `db`, else by their names, in any case and with or without underscores; `db:"-"` is left out. Anything else
// takes the one column that is named. Also after [AlreadyApplied], when it is the row as it is then, or, for a repeat of
// a request ([WithRequestID]), what the request returned the first time. Without a row dst stays as it is.
func Returning[T any](dst *T, columns ...string) WriteOption {
	return returning(reader{columns, reflect.TypeFor[T](), func(v reflect.Value) { *dst = v.Interface().(T) }, func() {}})
}

// ReturningAll is [Returning] for statements of one's own that return any number of rows. It replaces what dst holds.
func ReturningAll[T any](dst *[]T, columns ...string) WriteOption {
	return returning(reader{columns, reflect.TypeFor[T](),
		func(v reflect.Value) { *dst = append(*dst, v.Interface().(T)) }, func() { *dst = nil }})
}

func returning(r reader) WriteOption {
	return func(o *writeOptions) { o.set("Returning"); o.into = &r }
}

var scanner = reflect.TypeFor[sql.Scanner]()

// fields returns where the columns of a row go in a struct, by the name they are known by; nil if it is a single value.
func (r *reader) fields() map[string][]int {
	t := r.element
	if t.Kind() != reflect.Struct || reflect.PointerTo(t).Implements(scanner) {
		return nil
	}
	fields := map[string][]int{}
	for _, f := range reflect.VisibleFields(t) {
		tag, _, _ := strings.Cut(f.Tag.Get("db"), ",")
		embedded := f.Anonymous && f.Type.Kind() == reflect.Struct && tag == ""
		if !f.IsExported() || tag == "-" || embedded {
			continue
		}
		if throughPointer(t, f.Index) {
			continue
		}
		if tag == "" {
			tag = f.Name
		}
		fields[plain(tag)] = f.Index
	}
	if len(fields) == 0 {
		return nil // time.Time, netip.Addr and their like
	}
	return fields
}

// throughPointer reports whether a field belongs to a struct that is embedded by pointer, which may be nil.
func throughPointer(t reflect.Type, index []int) bool {
	for _, i := range index[:len(index)-1] {
		f := t.Field(i)
		if f.Type.Kind() == reflect.Pointer {
			return true
		}
		t = f.Type
	}
	return false
}

// plain is a name without what Go and SQL write differently.
func plain(name string) string { return strings.ToLower(strings.ReplaceAll(name, "_", "")) }

// of returns the columns of a table that the reader wants.
func (r *reader) of(t *Table) ([]string, error) {
	for i, c := range r.columns {
		if _, ok := t.columns[c]; !ok {
			return nil, fmt.Errorf("fencedb: table %s has no column %q to return", t.name, c)
		}
		for _, other := range r.columns[:i] {
			if plain(other) == plain(c) {
				return nil, fmt.Errorf("fencedb: table %s: Returning %q and %q: both would go into one field", t.name, other, c)
			}
		}
	}
	if len(r.columns) > 0 {
		return r.columns, nil
	}
	fields := r.fields()
	if fields == nil {
		return nil, fmt.Errorf("fencedb: table %s: Returning into a %v: say which column", t.name, r.element)
	}
	var columns []string
	for _, c := range t.names {
		if _, ok := fields[plain(c)]; ok {
			columns = append(columns, c)
			delete(fields, plain(c))
		}
	}
	for name := range fields {
		return nil, fmt.Errorf("fencedb: table %s has no column for field %q of %v: give it a `db` tag, or `db:\"-\"`", t.name, name, r.element)
	}
	return columns, nil
}

// read takes over one row.
func (r *reader) read(from row) error {
	value := reflect.New(r.element)
	fields := r.fields()
	targets := make([]any, len(from.names))
	if _, isField := fields[plain(first(from.names))]; len(from.names) == 1 && !isField {
		targets[0] = value.Interface()
	} else {
		for i, name := range from.names {
			index, ok := fields[plain(name)]
			if !ok {
				return fmt.Errorf("%v has no field for column %q", r.element, name)
			}
			targets[i] = value.Elem().FieldByIndex(index).Addr().Interface()
		}
	}
	if err := from.scan(targets...); err != nil {
		return err
	}
	r.keep(value.Elem())
	return nil
}

func first(names []string) string {
	if len(names) == 0 {
		return ""
	}
	return names[0]
}
