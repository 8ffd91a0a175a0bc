package audit

import (
	"context"
	"fmt"
	"io"

	"github.com/jackc/pgx/v5"

	"github.com/writegate/writegate/internal/pgerr"
)

// Finding is something that is wrong.
type Finding struct {
	ID      string `json:"id"` // stable between versions
	Finding string `json:"finding"`
	Fix     string `json:"fix"`
}

// findingsOldest is the first version of the schema that has what Findings reads.
const findingsOldest = 6

var fixes = map[string]string{
	"sequence-definition": "ALTER SEQUENCE fence.fence_seq AS bigint INCREMENT BY 2 CACHE 1 NO CYCLE MAXVALUE 9007199254740990 OWNED BY NONE; then fencecheck repair",
	"sequence-behind":     "fencecheck repair",
	"table-unreadable":    "give the role that asks SELECT on it, or fence.unprotect() a table whose fence column is gone",
}

// Findings returns what is wrong with where fences come from. It reads the protected tables.
func Findings(ctx context.Context, q Querier, database string) ([]Finding, error) {
	version, err := CheckSchema(ctx, q, database)
	if err != nil {
		return nil, err
	}
	if err := pgerr.CheckSchema(version, findingsOldest); err != nil {
		return nil, err
	}
	rows, err := q.Query(ctx, `SELECT f.id, f.finding FROM fence.source_findings() f`)
	if err != nil {
		return nil, fmt.Errorf("looking at the source of fences: %w", err)
	}
	findings, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (f Finding, err error) {
		err = row.Scan(&f.ID, &f.Finding)
		f.Fix = fixes[f.ID]
		return f, err
	})
	if err != nil {
		return nil, fmt.Errorf("looking at the source of fences: %w", err)
	}
	return findings, nil
}

// WriteFindings writes findings for people.
func WriteFindings(w io.Writer, findings []Finding) error {
	if len(findings) == 0 {
		_, err := fmt.Fprintln(w, "fences are ahead of all that are in use")
		return err
	}
	rows := make([][]string, 0, len(findings))
	for _, f := range findings {
		rows = append(rows, []string{f.ID, f.Finding, f.Fix})
	}
	return writeTable(w, []string{"ID", "FINDING", "FIX"}, rows)
}
