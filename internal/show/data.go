package show

import (
	"encoding/csv"
	"encoding/json"
	"fmt"
	"io"
	"reflect"
	"strings"
	"time"

	"github.com/writegate/writegate/internal/audit"
)

// JSON writes v, indented.
func JSON(w io.Writer, v any) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	return e.Encode(v)
}

// JSONLines writes each element of a slice as a JSON object on a line of its own; anything else as one line.
func JSONLines(w io.Writer, v any) error {
	e := json.NewEncoder(w)
	for _, item := range items(v) {
		if err := e.Encode(item); err != nil {
			return err
		}
	}
	return nil
}

// CSV writes a slice of structs under a header: the fields, and their names, that JSON has, in the same order. What is not
// a single value stands in its field as JSON. Text that a spreadsheet would take for a formula gets an apostrophe in front.
func CSV(w io.Writer, v any) error {
	t := reflect.TypeOf(v)
	if t.Kind() == reflect.Slice {
		t = t.Elem()
	}
	var names []string
	var fields []int
	for i := range t.NumField() {
		name, _, _ := strings.Cut(t.Field(i).Tag.Get("json"), ",")
		if name == "" || name == "-" {
			continue
		}
		names = append(names, name)
		fields = append(fields, i)
	}
	out := csv.NewWriter(w)
	if err := out.Write(names); err != nil {
		return err
	}
	for _, item := range items(v) {
		record := make([]string, len(fields))
		for i, n := range fields {
			text, err := field(reflect.ValueOf(item).Field(n))
			if err != nil {
				return err
			}
			record[i] = text
		}
		if err := out.Write(record); err != nil {
			return err
		}
	}
	out.Flush()
	return out.Error()
}

func field(v reflect.Value) (string, error) {
	for v.Kind() == reflect.Pointer {
		if v.IsNil() {
			return "", nil
		}
		v = v.Elem()
	}
	if at, ok := v.Interface().(time.Time); ok {
		return at.Format(time.RFC3339Nano), nil
	}
	switch v.Kind() {
	case reflect.String:
		return inert(audit.Printable(v.String())), nil
	case reflect.Struct, reflect.Slice, reflect.Map, reflect.Interface:
		if v.Kind() == reflect.Slice && v.Len() == 0 {
			return "", nil
		}
		text, err := json.Marshal(v.Interface())
		return string(text), err
	}
	return fmt.Sprint(v.Interface()), nil
}

// inert returns text that a spreadsheet takes for text.
func inert(s string) string {
	if s != "" && strings.ContainsRune("=+-@", rune(s[0])) {
		return "'" + s
	}
	return s
}

func items(v any) []any {
	value := reflect.ValueOf(v)
	if value.Kind() != reflect.Slice {
		return []any{v}
	}
	all := make([]any, value.Len())
	for i := range all {
		all[i] = value.Index(i).Interface()
	}
	return all
}
