package show

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"net/url"
	"strings"

	"github.com/writegate/writegate/internal/audit"
)

// Findings shows findings to people.
func Findings(findings []audit.Finding) *Table {
	t := &Table{Columns: []Column{{Title: "SEVERITY"}, {Title: "ID"}, {Title: "OBJECT", Min: 12}, {Title: "FINDING", Min: 24}, {Title: "FIX", Min: 16}}}
	for _, f := range findings {
		severity := Cell{Text: string(f.Severity)}
		switch {
		case f.Accepted != "":
			severity = Cell{Text: "accepted", Style: Faint}
		case f.Severity == audit.SeverityError:
			severity.Style = Bad
		case f.Severity == audit.SeverityWarning:
			severity.Style = Warn
		}
		fix := f.Fix
		if f.Accepted != "" {
			fix = "accepted: " + f.Accepted
		}
		t.Rows = append(t.Rows, []Cell{severity, {Text: f.ID}, {Text: f.Object}, {Text: f.Finding}, {Text: fix}})
	}
	return t
}

// GitHub writes what came of the checks as annotations of a GitHub workflow.
func GitHub(w io.Writer, v *audit.Verification) error {
	var b strings.Builder
	escape := strings.NewReplacer("%", "%25", "\r", "%0D", "\n", "%0A")
	property := strings.NewReplacer("%", "%25", "\r", "%0D", "\n", "%0A", ":", "%3A", ",", "%2C")
	line := func(level, title, message string) {
		fmt.Fprintf(&b, "::%s title=%s::%s\n", level, property.Replace(audit.Printable(title)), escape.Replace(audit.Printable(message)))
	}
	for _, f := range v.Findings {
		level := map[audit.Severity]string{audit.SeverityError: "error", audit.SeverityWarning: "warning", audit.SeverityInfo: "notice"}[f.Severity]
		message := fmt.Sprintf("%s: %s. %s", f.Object, f.Finding, f.Fix)
		if f.Accepted != "" {
			level, message = "notice", fmt.Sprintf("%s: %s (accepted: %s)", f.Object, f.Finding, f.Accepted)
		}
		line(level, "fencecheck "+f.ID, message)
	}
	for _, u := range v.Unchecked {
		line("error", "fencecheck "+u.ID, strings.TrimSpace("could not be checked: "+u.Object+" "+u.Why))
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// SARIF writes what came of the checks in the Static Analysis Results Interchange Format, version 2.1.0, for whatever
// collects such results. What is found in a database has no line in a file: its place is postgresql/DATABASE/OBJECT.
func SARIF(w io.Writer, v *audit.Verification, database, version string) error {
	type object = map[string]any
	levels := map[audit.Severity]string{audit.SeverityError: "error", audit.SeverityWarning: "warning", audit.SeverityInfo: "note"}
	var rules []object
	index := map[string]int{}
	for i, c := range audit.Checks() {
		index[c.ID] = i
		rules = append(rules, object{
			"id": c.ID, "shortDescription": object{"text": c.Title}, "fullDescription": object{"text": c.Meaning},
			"help": object{"text": c.Cause + "\n" + c.Action}, "defaultConfiguration": object{"level": levels[c.Severity]},
		})
	}
	results := []object{}
	for _, f := range v.Findings {
		sum := sha256.Sum256([]byte(f.ID + "\x00" + f.Object))
		r := object{
			"ruleId": f.ID, "ruleIndex": index[f.ID], "level": levels[f.Severity],
			"message": object{"text": audit.Printable(f.Object + ": " + f.Finding + ". " + f.Fix)},
			"locations": []object{{
				"physicalLocation": object{"artifactLocation": object{"uri": "postgresql/" + url.PathEscape(database) + "/" + url.PathEscape(f.Object)}, "region": object{"startLine": 1}},
				"logicalLocations": []object{{"fullyQualifiedName": audit.Printable(f.Object)}},
			}},
			"partialFingerprints": object{"idAndObject/v1": hex.EncodeToString(sum[:])},
		}
		if f.Accepted != "" {
			r["suppressions"] = []object{{"kind": "external", "justification": audit.Printable(f.Accepted)}}
		}
		results = append(results, r)
	}
	notifications := []object{}
	for _, u := range v.Unchecked {
		notifications = append(notifications, object{
			"level": "error", "message": object{"text": audit.Printable(strings.TrimSpace("could not be checked: " + u.Object + " " + u.Why))},
			"associatedRule": object{"id": u.ID, "index": index[u.ID]},
		})
	}
	for _, n := range v.Notes {
		notifications = append(notifications, object{"level": "note", "message": object{"text": audit.Printable(n)}})
	}
	return JSON(w, object{
		"$schema": "https://json.schemastore.org/sarif-2.1.0.json", "version": "2.1.0",
		"runs": []object{{
			"tool": object{"driver": object{
				"name": "fencecheck", "version": version, "informationUri": "https://github.com/writegate/writegate", "rules": rules,
			}},
			"invocations": []object{{"executionSuccessful": len(v.Unchecked) == 0, "toolExecutionNotifications": notifications}},
			"results":     results,
		}},
	})
}
