package show

import (
	"encoding/csv"
	"encoding/json"
	"fmt"
	"io"
	"reflect"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/writegate/writegate/internal/audit"
)

// JSON writes v, indented.
func JSON(w io.Writer, v any) error {
	e := json.NewEncoder(unobeyed{w})
	e.SetIndent("", "  ")
	return e.Encode(v)
}

// JSONLines writes each element of a slice as a JSON object on a line of its own; anything else as one line.
func JSONLines(w io.Writer, v any) error {
	e := json.NewEncoder(unobeyed{w})
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
		return audit.Printable(string(text)), err
	}
	return fmt.Sprint(v.Interface()), nil
}

// inert returns text that a spreadsheet takes for text. Some of them take the wide forms for the narrow ones.
func inert(s string) string {
	if first, _ := utf8.DecodeRuneInString(s); s != "" && strings.ContainsRune("=+-@＝＋－＠", first) {
		return "'" + s
	}
	return s
}

// unobeyed is written whole JSON texts to, and escapes what encoding/json leaves as it is and a terminal might obey. All of it
// stands in strings, where Printable's escapes are JSON's.
type unobeyed struct{ w io.Writer }

func (u unobeyed) Write(p []byte) (int, error) {
	var b strings.Builder
	for line := range strings.Lines(string(p)) {
		line, ended := strings.CutSuffix(line, "\n")
		b.WriteString(audit.Printable(line))
		if ended {
			b.WriteByte('\n')
		}
	}
	if _, err := io.WriteString(u.w, b.String()); err != nil {
		return 0, err
	}
	return len(p), nil
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
