package show

import (
	"strconv"
	"strings"

	"github.com/writegate/writegate/internal/audit"
)

// Leases shows leases to people.
func Leases(leases []audit.Lease) *Table {
	t := &Table{Columns: []Column{
		{Title: "NAME", Min: 12}, {Title: "STATE"}, {Title: "HOLDER", Min: 12}, {Title: "FENCE"}, {Title: "LEFT"}, {Title: "RENEWED"}, {Title: "OF"}, {Title: "RENEWALS"}, {Title: "NOTE", Min: 8},
	}}
	for _, l := range leases {
		left, renewed, ttl := "-", "-", "-"
		state := Cell{Text: l.State}
		switch l.State {
		case "held":
			left, state.Style = audit.Duration(l.Remaining), Good
		case "expired":
			left, state.Style = audit.Duration(-l.Remaining)+" ago", Warn
		}
		if l.State != "free" {
			renewed, ttl = audit.Duration(l.RenewalAge)+" ago", audit.Duration(l.TTL)
		}
		var notes []string
		if l.Overdue {
			notes = append(notes, "overdue")
		}
		if l.Late {
			notes = append(notes, "renewal is late")
		}
		if l.Wanted {
			notes = append(notes, "wanted")
		}
		note := Cell{Text: orDash(strings.Join(notes, ", "))}
		if l.Overdue || l.Late {
			note.Style = Warn
		}
		t.Rows = append(t.Rows, []Cell{
			{Text: l.Name}, state, {Text: orDash(l.Holder)}, {Text: number(l.Fence)}, {Text: left}, {Text: renewed}, {Text: ttl}, {Text: number(l.Renewals)}, note,
		})
	}
	return t
}

// Terms shows terms to people.
func Terms(terms []audit.Term) *Table {
	t := &Table{Columns: []Column{
		{Title: "LEASE", Min: 12}, {Title: "FENCE"}, {Title: "HOLDER", Min: 12}, {Title: "GRANTED"}, {Title: "ENDED"}, {Title: "WHY"}, {Title: "LASTED"}, {Title: "RENEWALS"}, {Title: "APPLICATION", Min: 11}, {Title: "FROM"},
	}}
	for _, x := range terms {
		ended, lasted := "-", "-"
		if x.EndedAt != nil {
			ended, lasted = audit.When(*x.EndedAt), audit.Duration(x.EndedAt.Sub(x.GrantedAt).Seconds())
		}
		end := Cell{Text: x.End}
		switch x.End {
		case "held":
			end.Style = Good
		case "expired", "overdue", "gone":
			end.Style = Warn
		}
		from := "socket"
		if x.ClientAddr != nil {
			from = *x.ClientAddr
		}
		t.Rows = append(t.Rows, []Cell{
			{Text: x.Lease}, {Text: number(x.Fence)}, {Text: orDash(x.Holder)}, {Text: audit.When(x.GrantedAt)}, {Text: ended}, end, {Text: lasted}, {Text: number(x.Renewals)}, {Text: orDash(x.Application)}, {Text: from},
		})
	}
	return t
}

// Rejections shows rejections to people; with what their rows hold now, if that has been looked up.
func Rejections(rejections []audit.Rejection) *Table {
	t := &Table{Columns: []Column{
		{Title: "ID"}, {Title: "LAST"}, {Title: "COUNT"}, {Title: "VERDICT"}, {Title: "REASON"}, {Title: "TABLE", Min: 10}, {Title: "KEY", Min: 10}, {Title: "LEASE", Min: 10},
		{Title: "FENCE"}, {Title: "HOLDER", Min: 10}, {Title: "FOUND"}, {Title: "FOUND HOLDER", Min: 12}, {Title: "APPLICATION", Min: 11},
	}}
	now := false
	for _, r := range rejections {
		now = now || r.Now != nil
	}
	if now {
		t.Columns = append(t.Columns, Column{Title: "NOW", Min: 10})
	}
	for _, r := range rejections {
		row := []Cell{
			{Text: number(r.ID)}, {Text: audit.When(r.LastAt)}, {Text: number(r.Count)}, {Text: r.Verdict, Style: verdictStyle(r.Verdict)}, {Text: r.Reason}, {Text: r.Table}, {Text: r.Key}, {Text: r.Lease},
			{Text: number(r.Fence)}, {Text: orDash(r.Holder)}, {Text: numberOrDash(r.CurrentFence)}, {Text: orDash(r.CurrentHolder)}, {Text: orDash(r.Application)},
		}
		if now {
			row = append(row, Cell{Text: r.Now.String()})
		}
		t.Rows = append(t.Rows, row)
	}
	return t
}

func verdictStyle(verdict string) Style {
	switch verdict {
	case "lawful":
		return Bad
	case "stale":
		return Good
	}
	return Warn
}

// Top shows a top list to people.
func Top(list audit.TopList) *Table {
	t := &Table{Columns: []Column{{Title: strings.ToUpper(list.By), Min: 12}, {Title: "REFUSALS"}, {Title: "ROWS"}, {Title: "LAWFUL"}, {Title: "LAST"}}}
	for _, x := range list.Rows {
		lawful := Cell{Text: number(x.Lawful)}
		if x.Lawful > 0 {
			lawful.Style = Bad
		}
		t.Rows = append(t.Rows, []Cell{{Text: orDash(x.Value)}, {Text: number(x.Refusals)}, {Text: number(x.Rows)}, lawful, {Text: audit.When(x.LastAt)}})
	}
	return t
}

// Tables shows protected tables to people.
func Tables(tables []audit.Table) *Table {
	t := &Table{Columns: []Column{
		{Title: "TABLE", Min: 12}, {Title: "FENCE"}, {Title: "RULE"}, {Title: "STRENGTH"}, {Title: "GUARD"}, {Title: "UNFENCED"}, {Title: "WRONG", Min: 20},
	}}
	for _, x := range tables {
		unfenced := x.Unfenced
		if x.Guard == "off" {
			unfenced = "-"
		}
		wrong := Cell{Text: "-"}
		if len(x.Wrong) > 0 {
			wrong = Cell{Text: strings.Join(x.Wrong, "; "), Style: Bad}
		}
		t.Rows = append(t.Rows, []Cell{{Text: x.Name}, {Text: x.FenceColumn}, {Text: x.Rule}, {Text: x.Strength}, {Text: x.Guard}, {Text: unfenced}, wrong})
	}
	return t
}

func number(n int64) string { return strconv.FormatInt(n, 10) }

func numberOrDash(n *int64) string {
	if n == nil {
		return "-"
	}
	return number(*n)
}

func orDash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}
