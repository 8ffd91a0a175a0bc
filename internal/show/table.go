// Package show writes what package audit has read for people and for programs: tables that fit a terminal, JSON, a JSON object
// a line, CSV. Text from the database is shown, never obeyed: control characters are escaped wherever they could do something.
package show

import (
	"fmt"
	"io"
	"strings"

	"github.com/mattn/go-runewidth"

	"github.com/writegate/writegate/internal/audit"
)

// Style is how a cell of a table stands out, where colours are wanted.
type Style int

// The styles.
const (
	Plain Style = iota
	Bad         // wake somebody
	Warn
	Good
	Faint
)

var escapes = map[Style]string{Bad: "\x1b[1;31m", Warn: "\x1b[33m", Good: "\x1b[32m", Faint: "\x1b[2m"}

// Cell is a field of a table.
type Cell struct {
	Text  string
	Style Style
}

// Table is rows under a header, for people.
type Table struct {
	Columns []Column
	Rows    [][]Cell
}

// Column is one of a table's.
type Column struct {
	Title string
	// Min is to how many columns of the terminal its text may be shortened where there is not enough room; 0: not at all.
	Min int
}

// Row adds cells without style.
func (t *Table) Row(cells ...string) {
	row := make([]Cell, len(cells))
	for i, c := range cells {
		row[i].Text = c
	}
	t.Rows = append(t.Rows, row)
}

// Screen is what a table is written to.
type Screen struct {
	Width int // in columns; 0: no limit
	Color bool
}

// gap is the space between two columns.
const gap = 2

// Write writes the table. Where the screen is too narrow, long texts are shortened, with an ellipsis; where that is not
// enough, each row is written on lines of its own.
func (t *Table) Write(w io.Writer, s Screen) error {
	widths := make([]int, len(t.Columns))
	for i, c := range t.Columns {
		widths[i] = runewidth.StringWidth(c.Title)
	}
	texts := make([][]string, len(t.Rows))
	for i, row := range t.Rows {
		texts[i] = make([]string, len(row))
		for j, cell := range row {
			texts[i][j] = audit.Printable(cell.Text)
			widths[j] = max(widths[j], runewidth.StringWidth(texts[i][j]))
		}
	}
	if s.Width > 0 && !t.fit(widths, s.Width) {
		return t.writeRecords(w, s, texts)
	}
	var b strings.Builder
	line := func(text func(int) (string, Style)) {
		for j := range t.Columns {
			cell, style := text(j)
			short := runewidth.Truncate(cell, widths[j], "…")
			pad := widths[j] + gap - runewidth.StringWidth(short)
			if j == len(t.Columns)-1 {
				pad = 0
			}
			b.WriteString(s.styled(short, style))
			b.WriteString(strings.Repeat(" ", pad))
		}
		b.WriteByte('\n')
	}
	line(func(j int) (string, Style) { return t.Columns[j].Title, Plain })
	for i, row := range t.Rows {
		line(func(j int) (string, Style) { return texts[i][j], row[j].Style })
		if b.Len() > 1<<16 {
			if _, err := io.WriteString(w, b.String()); err != nil {
				return err
			}
			b.Reset()
		}
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// fit makes columns narrower, always the widest of those that may be, until they fit, and reports whether they do.
func (t *Table) fit(widths []int, room int) bool {
	total := gap * (len(widths) - 1)
	for _, width := range widths {
		total += width
	}
	for ; total > room; total-- {
		widest := -1
		for j, c := range t.Columns {
			if c.Min > 0 && widths[j] > max(c.Min, runewidth.StringWidth(c.Title)) && (widest < 0 || widths[j] > widths[widest]) {
				widest = j
			}
		}
		if widest < 0 {
			return false
		}
		widths[widest]--
	}
	return true
}

func (t *Table) writeRecords(w io.Writer, s Screen, texts [][]string) error {
	label := 0
	for _, c := range t.Columns {
		label = max(label, runewidth.StringWidth(c.Title))
	}
	for i, row := range t.Rows {
		if i > 0 {
			if _, err := fmt.Fprintln(w); err != nil {
				return err
			}
		}
		for j, c := range t.Columns {
			if _, err := fmt.Fprintf(w, "%s  %s\n", runewidth.FillRight(c.Title, label), s.styled(texts[i][j], row[j].Style)); err != nil {
				return err
			}
		}
	}
	return nil
}

func (s Screen) styled(text string, style Style) string {
	if !s.Color || style == Plain || text == "" {
		return text
	}
	return escapes[style] + text + "\x1b[0m"
}

// Fact is something known of one thing.
type Fact struct{ Name, Value string }

// Facts are what is known of one thing.
type Facts []Fact

// Write writes a line for each; what is empty is left out.
func (f Facts) Write(w io.Writer) error {
	label := 0
	for _, x := range f {
		label = max(label, len(x.Name))
	}
	for _, x := range f {
		if x.Value == "" {
			continue
		}
		if _, err := fmt.Fprintf(w, "%-*s  %s\n", label, x.Name, audit.Printable(x.Value)); err != nil {
			return err
		}
	}
	return nil
}

// Alarm is a line that nobody should overlook.
func (s Screen) Alarm(text string) string { return s.styled(audit.Printable(text), Bad) + "\n" }
