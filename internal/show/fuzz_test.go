package show_test

import (
	"bytes"
	"encoding/csv"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/url"
	"reflect"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"
	"unicode"

	"github.com/stretchr/testify/require"

	"github.com/writegate/writegate/internal/audit"
	"github.com/writegate/writegate/internal/show"
)

// fill puts text into every string of v, and a number into every other field.
func fill(v reflect.Value, text func() string, number int64) {
	switch v.Kind() {
	case reflect.String:
		v.SetString(text())
	case reflect.Int64, reflect.Int:
		v.SetInt(number)
	case reflect.Float64:
		v.SetFloat(float64(number) / 1000)
	case reflect.Bool:
		v.SetBool(number%2 != 0)
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		fill(v.Elem(), text, number)
	case reflect.Slice:
		if v.Type() == reflect.TypeFor[json.RawMessage]() {
			raw, _ := json.Marshal(map[string]string{"c": text()})
			v.SetBytes(raw)
			return
		}
		v.Set(reflect.MakeSlice(v.Type(), 2, 2))
		for i := range 2 {
			fill(v.Index(i), text, number)
		}
	case reflect.Struct:
		if v.Type() == reflect.TypeFor[time.Time]() {
			v.Set(reflect.ValueOf(time.Unix(number%1e9, 123456789).UTC()))
			return
		}
		for i := range v.NumField() {
			fill(v.Field(i), text, number)
		}
	default:
		panic(v.Kind().String())
	}
}

// rows are two of what is listed, with the texts in them in turn.
func rows[T any](number int64, texts ...string) []T {
	n := 0
	list := make([]T, 2)
	for i := range list {
		fill(reflect.ValueOf(&list[i]).Elem(), func() string { n++; return texts[n%len(texts)] }, number)
	}
	return list
}

// obeyed finds what a terminal would obey, or what turns text: nothing but the ends of lines may be left of these.
func obeyed(t require.TestingT, out string) {
	i := strings.IndexFunc(out, func(r rune) bool {
		return r != '\n' && (unicode.IsControl(r) || unicode.Is(unicode.Bidi_Control, r) || unicode.In(r, unicode.Zl, unicode.Zp))
	})
	if i >= 0 {
		require.Failf(t, "a terminal would obey it", "%.40q in %q", out[i:], out)
	}
}

var (
	colours = regexp.MustCompile(`\x1b\[(1;31|33|32|2|0)m`)
	plain   = regexp.MustCompile(`^(-?[0-9]+([.][0-9]+)?(e[+-][0-9]+)?|true|false|[0-9TZ:.-]*)$`)
)

// each form of output of one kind of list.
func forms[T any](t require.TestingT, list []T, table *show.Table, width int) {
	for _, s := range []show.Screen{{}, {Width: width}, {Width: width, Color: true}} {
		out := write(t, table, s)
		if s.Color {
			out = colours.ReplaceAllString(out, "")
		}
		obeyed(t, out)
		if s.Width == 0 {
			require.Equal(t, len(list)+1, strings.Count(out, "\n"), out)
		}
	}
	// What JSON says is what was there, as far as that was text.
	var want, got []T
	var b bytes.Buffer
	require.NoError(t, show.JSON(&b, list))
	obeyed(t, b.String())
	plainly, err := json.Marshal(list)
	require.NoError(t, err)
	require.NoError(t, json.Unmarshal(plainly, &want))
	require.NoError(t, json.Unmarshal(b.Bytes(), &got))
	require.Equal(t, meaning(t, want), meaning(t, got))
	b.Reset()
	require.NoError(t, show.JSONLines(&b, list))
	obeyed(t, b.String())
	require.Equal(t, len(list), strings.Count(b.String(), "\n"))
	got = nil
	for d := json.NewDecoder(&b); ; {
		var item T
		err := d.Decode(&item)
		if errors.Is(err, io.EOF) {
			break
		}
		require.NoError(t, err)
		got = append(got, item)
	}
	require.Equal(t, meaning(t, want), meaning(t, got))
	// A spreadsheet finds the same cells, and no formula in them.
	b.Reset()
	require.NoError(t, show.CSV(&b, list))
	obeyed(t, b.String())
	records, err := csv.NewReader(&b).ReadAll()
	require.NoError(t, err)
	require.Len(t, records, len(list)+1)
	for i, record := range records[1:] {
		n := 0
		for f := range reflect.TypeFor[T]().Fields() {
			name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
			if name == "" || name == "-" {
				continue
			}
			require.Equal(t, name, records[0][n])
			cell := record[n]
			n++
			if f.Type.Kind() != reflect.String {
				require.True(t, plain.MatchString(cell) || !strings.ContainsAny(cell[:1], "=+-@"), "%s: %q", f.Name, cell)
				continue
			}
			text := audit.Printable(reflect.ValueOf(list[i]).FieldByIndex(f.Index).String())
			if first := []rune(text + "x")[0]; strings.ContainsRune("=+-@＝＋－＠", first) {
				text = "'" + text
			}
			require.Equal(t, text, cell)
		}
		require.Len(t, record, n)
	}
}

// meaning is a list without what tells two encodings of the same JSON apart.
func meaning(t require.TestingT, v any) (plainly any) {
	text, err := json.Marshal(v)
	require.NoError(t, err)
	require.NoError(t, json.Unmarshal(text, &plainly))
	return plainly
}

var textSeeds = [][2]string{
	{"plain", "東京"}, {"=1+1", "+x"}, {"@SUM(A1)", "-1"}, {"＝1", "\t=1"}, {"a,b", "\"q\""}, {"two\nlines", "\r\n"}, {"\x1b[31m", "\u009b31m"}, {"\u202e", "\u2028\x7f"},
	{"bad\xff", "nul\x00"}, {"<script>", "&amp;"}, {"\ufeffx", `\.`}, {"", "'"}, {"%0A::error::x", "::notice title=a,b:c::d"}, {"..", "/"}, {"#", "?x=%2F"},
}

// Whatever names and values a database holds, a table is lines that nothing in them breaks or has obeyed, JSON says the same as the
// database does, and CSV is text.
func FuzzLists(f *testing.F) {
	for i, seed := range textSeeds {
		f.Add(seed[0], seed[1], int64(i)*1234567891, uint8(i*10))
	}
	f.Add("x", "y", int64(-5), uint8(0))
	f.Fuzz(func(t *testing.T, one, other string, number int64, width uint8) {
		w := int(width)
		number %= 1 << 53
		rejections := rows[audit.Rejection](number, one, other)
		for i := range rejections {
			if rejections[i].Now != nil {
				rejections[i].Now.State = []string{"present", "unknown"}[i]
			}
		}
		forms(t, rejections, show.Rejections(rejections), w)
		leases := rows[audit.Lease](number, one, other)
		leases[0].State = "expired"
		forms(t, leases, show.Leases(leases), w)
		terms := rows[audit.Term](number, other, one)
		forms(t, terms, show.Terms(terms), w)
		tables := rows[audit.Table](number, one, other)
		forms(t, tables, show.Tables(tables), w)
		top := rows[audit.Top](number, one)
		forms(t, top, show.Top(audit.TopList{By: "key", Rows: top}), w)
		findings := rows[audit.Finding](number, one, other)
		forms(t, findings, show.Findings(findings), w)

		var b strings.Builder
		require.NoError(t, show.Facts{{Name: "a", Value: one}, {Name: "b", Value: "x" + other}}.Write(&b))
		b.WriteString(show.Screen{}.Alarm(one))
		obeyed(t, b.String())
		lines := 2
		if one != "" {
			lines = 3
		}
		require.Equal(t, lines, strings.Count(b.String(), "\n"), b.String())
	})
}

// What the checks find is one result of SARIF and one annotation of a workflow each, with the text that it is, whatever is in it.
func FuzzFindings(f *testing.F) {
	for _, seed := range textSeeds {
		f.Add(seed[0], seed[1])
	}
	f.Fuzz(func(t *testing.T, one, other string) {
		v := &audit.Verification{
			Findings:  []audit.Finding{{ID: "fsync-off", Severity: audit.SeverityError, Object: one, Finding: other, Fix: one}, {ID: "role-gone", Severity: audit.SeverityInfo, Object: other, Accepted: "a" + one}},
			Unchecked: []audit.Unchecked{{ID: "lease-hot", Object: one, Why: "x" + other}}, Notes: []string{other},
		}
		var b bytes.Buffer
		require.NoError(t, show.SARIF(&b, v, other, "v1"))
		obeyed(t, b.String())
		var s struct {
			Runs []struct {
				Tool struct {
					Driver struct{ Rules []struct{ ID string } }
				}
				Results []struct {
					RuleID              string
					RuleIndex           int
					Message             struct{ Text string }
					PartialFingerprints map[string]string
					Locations           []struct {
						PhysicalLocation struct{ ArtifactLocation struct{ URI string } }
					}
				}
			}
		}
		require.NoError(t, json.Unmarshal(b.Bytes(), &s))
		require.Len(t, s.Runs[0].Results, 2)
		for i, r := range s.Runs[0].Results {
			found := v.Findings[i]
			require.Equal(t, found.ID, s.Runs[0].Tool.Driver.Rules[r.RuleIndex].ID)
			require.Equal(t, audit.Printable(fmt.Sprintf("%s: %s. %s", found.Object, found.Finding, found.Fix)), r.Message.Text)
			place := r.Locations[0].PhysicalLocation.ArtifactLocation.URI
			u, err := url.Parse("file:///root/" + place)
			require.NoError(t, err, place)
			require.Empty(t, u.RawQuery+u.Fragment, place)
			parts := strings.Split(strings.TrimPrefix(u.EscapedPath(), "/root/"), "/")
			require.Len(t, parts, 3, place)
			for j, want := range []string{"postgresql", other, found.Object} {
				got, err := url.PathUnescape(parts[j])
				require.NoError(t, err)
				require.Equal(t, want, got)
			}
		}
		b.Reset()
		require.NoError(t, show.GitHub(&b, v))
		obeyed(t, b.String())
		lines := strings.Split(strings.TrimSuffix(b.String(), "\n"), "\n")
		require.Len(t, lines, 3)
		command := regexp.MustCompile(`^::(error|warning|notice) title=fencecheck [a-z-]+::(.*)$`)
		for i, want := range []string{one + ": " + other + ". " + one, other + ":  (accepted: a" + one + ")", strings.TrimSpace("could not be checked: " + one + " x" + other)} {
			m := command.FindStringSubmatch(lines[i])
			require.NotNil(t, m, lines[i])
			text, err := url.PathUnescape(m[2])
			require.NoError(t, err, "every %% is escaped: "+strconv.Quote(m[2]))
			require.Equal(t, audit.Printable(want), text)
		}
	})
}
