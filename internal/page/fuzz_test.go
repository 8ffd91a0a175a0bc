package page_test

import (
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/writegate/writegate/internal/audit"
)

// element is a start tag: its name, and the names of its attributes.
type element struct {
	name       string
	attributes []string
}

// parse takes a page apart as a browser does, as far as the page is written: what a browser would have to mend is an error. It
// returns the start tags, and what is text between them.
func parse(page string) (elements []element, texts []string, err error) {
	void := map[string]bool{"meta": true, "link": true, "br": true, "hr": true, "img": true, "input": true}
	var open []string
	space := func(c byte) bool { return strings.IndexByte(" \t\n\f\r", c) >= 0 }
	letter := func(c byte) bool { return c|0x20 >= 'a' && c|0x20 <= 'z' }
	for i := 0; i < len(page); {
		next := strings.IndexByte(page[i:], '<')
		if next < 0 {
			next = len(page) - i
		}
		texts = append(texts, page[i:i+next])
		if i += next; i == len(page) {
			break
		}
		switch rest := page[i:]; {
		case strings.HasPrefix(rest, "<!doctype html>"), strings.HasPrefix(rest, "<!DOCTYPE html>"):
			i += len("<!doctype html>")
		case strings.HasPrefix(rest, "</"):
			name, _, closed := strings.Cut(rest[2:], ">")
			if !closed || len(open) == 0 || open[len(open)-1] != name {
				return nil, nil, fmt.Errorf("</%.20s closes nothing: %v is open", name, open)
			}
			open = open[:len(open)-1]
			i += len("</>") + len(name)
		case len(rest) > 1 && letter(rest[1]):
			j := 1
			for j < len(rest) && !space(rest[j]) && rest[j] != '>' && rest[j] != '/' {
				j++
			}
			e := element{name: rest[1:j]}
			for {
				for j < len(rest) && space(rest[j]) {
					j++
				}
				if j == len(rest) {
					return nil, nil, fmt.Errorf("<%s has no end", e.name)
				}
				if rest[j] == '>' || strings.HasPrefix(rest[j:], "/>") {
					break
				}
				k := j
				for k < len(rest) && !space(rest[k]) && strings.IndexByte("=>/", rest[k]) < 0 {
					if strings.IndexByte(`"'<`, rest[k]) >= 0 {
						return nil, nil, fmt.Errorf("%q in the name of an attribute of <%s", rest[k], e.name)
					}
					k++
				}
				if k == j {
					return nil, nil, fmt.Errorf("<%s: no name at %.20q", e.name, rest[j:])
				}
				e.attributes = append(e.attributes, rest[j:k])
				j = k
				if j < len(rest) && rest[j] == '=' {
					j++
					if j < len(rest) && rest[j] == '"' {
						end := strings.IndexByte(rest[j+1:], '"')
						if end < 0 {
							return nil, nil, fmt.Errorf("<%s: a value has no end", e.name)
						}
						texts = append(texts, rest[j+1:j+1+end])
						j += end + 2
					} else {
						k := j
						for k < len(rest) && !space(rest[k]) && rest[k] != '>' {
							if strings.IndexByte("\"'<=`", rest[k]) >= 0 {
								return nil, nil, fmt.Errorf("%q in a value of <%s that is not quoted", rest[k], e.name)
							}
							k++
						}
						j = k
					}
				}
			}
			elements = append(elements, e)
			if rest[j] == '/' {
				j += 2
			} else {
				j++
				if !void[e.name] {
					open = append(open, e.name)
				}
			}
			i += j
			if e.name == "style" { // the package's own, up to its end
				end := strings.Index(page[i:], "</style>")
				if end < 0 {
					return nil, nil, fmt.Errorf("<style> has no end")
				}
				i += end
			}
		default:
			return nil, nil, fmt.Errorf("%.20q is no tag", rest)
		}
	}
	if len(open) > 0 {
		return nil, nil, fmt.Errorf("%v are left open", open)
	}
	return elements, texts, nil
}

// put gives every text of an overview one of some, but for what a page is told apart by.
func put(v reflect.Value, text func(old string) string) {
	switch v.Kind() {
	case reflect.String:
		v.SetString(text(v.String()))
	case reflect.Pointer:
		if !v.IsNil() {
			put(v.Elem(), text)
		}
	case reflect.Slice:
		if v.Type().Elem().Kind() == reflect.Uint8 {
			return
		}
		for i := range v.Len() {
			put(v.Index(i), text)
		}
	case reflect.Struct:
		if v.Type() == reflect.TypeFor[time.Time]() {
			return
		}
		for i := range v.NumField() {
			put(v.Field(i), text)
		}
	}
}

// Whatever a database holds, a page is made of the elements and attributes that the templates have, each closed where it should be;
// and what was put into it stands there as text.
func FuzzPages(f *testing.F) {
	for i, h := range hostiles {
		f.Add(h, hostiles[(i+3)%len(hostiles)], uint8(i), int64(i)*98765432101)
	}
	f.Add("lawful", `held" onload=x`, uint8(7), int64(-1))
	f.Add("%3Cscript%3E", "&lt;b&gt;", uint8(3), int64(1)<<62)
	f.Add("<", ">", uint8(0), int64(0))
	known := map[string]map[string]bool{}
	for _, o := range []*audit.Overview{sample(), hostile(), quiet()} {
		for _, page := range []string{report(f, o), dashboard(f, o)} {
			elements, _, err := parse(page)
			require.NoError(f, err)
			for _, e := range elements {
				if known[e.name] == nil {
					known[e.name] = map[string]bool{}
				}
				for _, a := range e.attributes {
					known[e.name][a] = true
				}
			}
		}
	}
	f.Fuzz(func(t *testing.T, one, other string, which uint8, number int64) {
		o := sample()
		n := int(which)
		put(reflect.ValueOf(o).Elem(), func(old string) string {
			n++
			switch n % 5 {
			case 0, 1, 2:
				return one
			case 3:
				return other
			}
			return old
		})
		o.Lanes[0].Spans[0].Fence, o.Lanes[0].Spans[1].Terms, o.Lanes[0].Spans[0].Held = number, number, float64(number)
		o.Lanes[0].Marks[1].Refusals, o.Lanes[0].Marks[0].ID, o.Latest[0].ID, o.Latest[0].Count = number, number, number, number
		o.Lanes[0].Lease, o.Latest[0].Holder = one, other
		for _, page := range []string{report(t, o), dashboard(t, o)} {
			elements, texts, err := parse(page)
			require.NoError(t, err)
			for _, e := range elements {
				if known[e.name] == nil {
					t.Fatalf("no template has an element <%s", e.name)
				}
				for i, a := range e.attributes {
					if !known[e.name][a] || slices.Contains(e.attributes[:i], a) {
						t.Fatalf("<%s has %v; the templates' have %v, once each", e.name, e.attributes, slices.Sorted(maps.Keys(known[e.name])))
					}
				}
			}
			// As a whole somewhere, with whatever is special in HTML escaped, unless it is too long for that.
			for _, s := range []string{one, other} {
				want := htmlText(audit.Printable(s))
				if len(s) > 0 && len(s) < 200 && strings.TrimSpace(s) != "" {
					require.True(t, slices.ContainsFunc(texts, func(text string) bool { return strings.Contains(text, want) }), "%q", s)
				}
			}
		}
	})
}

var htmlText = strings.NewReplacer("&", "&amp;", "<", "&lt;", ">", "&gt;", `"`, "&#34;", "'", "&#39;", "\x00", "\uFFFD", "+", "&#43;").Replace
