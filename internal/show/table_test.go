package show_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/mattn/go-runewidth"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/writegate/writegate/internal/show"
)

func write(t require.TestingT, table *show.Table, s show.Screen) string {
	var b strings.Builder
	require.NoError(t, table.Write(&b, s))
	return b.String()
}

func TestTableFitsTheScreen(t *testing.T) {
	table := &show.Table{Columns: []show.Column{{Title: "ID"}, {Title: "NAME", Min: 6}, {Title: "NOTE", Min: 4}}}
	table.Row("1", "東京東京東京東京", "a note that is long")
	table.Row("22", "é", "")
	require.Equal(t, "ID  NAME              NOTE\n1   東京東京東京東京  a note that is long\n22  é                 \n", write(t, table, show.Screen{}))
	require.Equal(t, "ID  NAME       NOTE\n1   東京東京…  a note t…\n22  é          \n", write(t, table, show.Screen{Width: 24}))
	require.Equal(t, "ID    1\nNAME  東京東京東京東京\nNOTE  a note that is long\n\nID    22\nNAME  é\nNOTE  \n", write(t, table, show.Screen{Width: 10}))
	require.Equal(t, "ID  NAME  NOTE\n", write(t, &show.Table{Columns: table.Columns}, show.Screen{Width: 80}))
}

func TestColours(t *testing.T) {
	table := &show.Table{Columns: []show.Column{{Title: "A"}, {Title: "B"}}, Rows: [][]show.Cell{{{Text: "x", Style: show.Bad}, {Text: "y"}}}}
	require.Equal(t, "A  B\n\x1b[1;31mx\x1b[0m  y\n", write(t, table, show.Screen{Color: true}))
	require.Equal(t, "A  B\nx  y\n", write(t, table, show.Screen{}))
}

// Whatever the texts are, no line is wider than the screen unless each row has lines of its own, and nothing of them is obeyed.
func TestNoTextBreaksATable(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		columns := rapid.IntRange(2, 5).Draw(t, "columns")
		table := &show.Table{}
		for i := range columns {
			table.Columns = append(table.Columns, show.Column{Title: fmt.Sprint("TITLE", i), Min: rapid.IntRange(0, 8).Draw(t, "min")})
		}
		rows := rapid.IntRange(0, 4).Draw(t, "rows")
		for range rows {
			table.Row(rapid.SliceOfN(rapid.String(), columns, columns).Draw(t, "row")...)
		}
		width := rapid.IntRange(0, 120).Draw(t, "width")
		out := write(t, table, show.Screen{Width: width})
		lines := strings.Split(strings.TrimSuffix(out, "\n"), "\n")
		records := !strings.Contains(lines[0], fmt.Sprint("TITLE", columns-1))
		for _, line := range lines {
			if width > 0 && !records {
				require.LessOrEqual(t, runewidth.StringWidth(line), width)
			}
			for _, r := range line {
				require.False(t, r < 0x20 || r >= 0x7f && r < 0xa0 || r == 0x202e, "%q", line)
			}
		}
		if width == 0 {
			require.Len(t, lines, rows+1)
		}
	})
}

func TestCSV(t *testing.T) {
	type row struct {
		Name  string    `json:"name"`
		N     *int64    `json:"n,string"`
		At    time.Time `json:"at"`
		Many  []string  `json:"many"`
		Left  string    `json:"-"`
		Truth bool      `json:"truth,omitempty"`
	}
	n := int64(9007199254740993)
	var b strings.Builder
	require.NoError(t, show.CSV(&b, []row{
		{"=1+1", &n, time.Date(2026, 1, 2, 3, 4, 5, 6000, time.UTC), []string{"a", "b"}, "left", true}, {Name: "-1,\"x\"\n\x1b"}, {Name: "@x"}, {Name: "+x"}, {Name: "plain"},
	}))
	require.Equal(t, "name,n,at,many,truth\n'=1+1,9007199254740993,2026-01-02T03:04:05.000006Z,\"[\"\"a\"\",\"\"b\"\"]\",true\n"+
		"\"'-1,\"\"x\"\"\\u000a\\u001b\",,0001-01-01T00:00:00Z,,false\n'@x,,0001-01-01T00:00:00Z,,false\n'+x,,0001-01-01T00:00:00Z,,false\nplain,,0001-01-01T00:00:00Z,,false\n", b.String())
	b.Reset()
	require.NoError(t, show.CSV(&b, []row{}))
	require.Equal(t, "name,n,at,many,truth\n", b.String())
	b.Reset()
	require.NoError(t, show.JSONLines(&b, []int{1, 2}))
	require.Equal(t, "1\n2\n", b.String())
}

func TestFacts(t *testing.T) {
	var b strings.Builder
	require.NoError(t, show.Facts{{Name: "a", Value: "x\ny"}, {Name: "long", Value: "z"}, {Name: "none"}}.Write(&b))
	require.Equal(t, "a     x\\u000ay\nlong  z\n", b.String())
}
