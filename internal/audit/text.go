package audit

import (
	"fmt"
	"io"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"
)

// timeLayout always shows the offset: a time without one is a guess.
const timeLayout = "2006-01-02 15:04:05.000Z07:00"

// WriteLeases writes leases as a table for people.
func WriteLeases(w io.Writer, leases []Lease) error {
	rows := make([][]string, 0, len(leases))
	for _, l := range leases {
		left := "-"
		switch l.State {
		case "held":
			left = duration(l.Remaining)
		case "expired":
			left = duration(-l.Remaining) + " ago"
		}
		renewed := "-"
		if l.RenewedAt != nil {
			renewed = l.RenewedAt.Format(timeLayout)
		}
		rows = append(rows, []string{
			l.Name, l.State, l.Holder, strconv.FormatInt(l.Fence, 10), left, renewed, strconv.FormatInt(l.Renewals, 10),
		})
	}
	return writeTable(w, []string{"NAME", "STATE", "HOLDER", "FENCE", "LEFT", "LAST RENEWED", "RENEWALS"}, rows)
}

// WriteRejections writes rejections as a table for people.
func WriteRejections(w io.Writer, rejections []Rejection) error {
	rows := make([][]string, 0, len(rejections))
	for _, r := range rejections {
		current := "-"
		if r.CurrentFence != nil {
			current = strconv.FormatInt(*r.CurrentFence, 10)
		}
		rows = append(rows, []string{
			r.LastAt.Format(timeLayout), strconv.FormatInt(r.Count, 10), r.Verdict, r.Reason, r.Table, r.Key, r.Lease,
			strconv.FormatInt(r.Fence, 10), orDash(r.Holder), current, orDash(r.CurrentHolder),
		})
	}
	return writeTable(w, []string{
		"LAST", "COUNT", "VERDICT", "REASON", "TABLE", "KEY", "LEASE", "FENCE", "OF", "FOUND", "OF",
	}, rows)
}

func writeTable(w io.Writer, header []string, rows [][]string) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	if _, err := fmt.Fprintln(t, strings.Join(header, "\t")); err != nil {
		return err
	}
	for _, row := range rows {
		for i, cell := range row {
			row[i] = Printable(cell)
		}
		if _, err := fmt.Fprintln(t, strings.Join(row, "\t")); err != nil {
			return err
		}
	}
	return t.Flush()
}

func duration(seconds float64) string {
	d := time.Duration(seconds * float64(time.Second))
	if d >= time.Minute {
		return d.Round(time.Second).String()
	}
	return d.Round(100 * time.Millisecond).String()
}

func orDash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}
