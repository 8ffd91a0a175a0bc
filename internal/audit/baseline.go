package audit

import (
	"fmt"
	"io"
	"slices"
	"strings"
)

// Baseline are findings that somebody has accepted. As a file: a line for each, id, object and reason with tabs between; the
// object * is all of them. Lines that begin with # are comments.
type Baseline []Acceptance

// Acceptance is one line of a Baseline.
type Acceptance struct{ ID, Object, Reason string }

const anyObject = "*"

// ReadBaseline reads a baseline, and refuses one that names a check that there is not.
func ReadBaseline(r io.Reader) (Baseline, error) {
	text, err := io.ReadAll(r)
	if err != nil {
		return nil, err
	}
	var b Baseline
	n := 0
	for line := range strings.Lines(string(text)) {
		n++
		line = strings.TrimSpace(line)
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		fields := strings.SplitN(line, "\t", 3)
		if len(fields) < 3 || strings.TrimSpace(fields[2]) == "" {
			return nil, fmt.Errorf("line %d: want an id, an object (or *) and a reason, with tabs between", n)
		}
		if _, ok := CheckByID(fields[0]); !ok {
			return nil, fmt.Errorf("line %d: there is no check %q", n, fields[0])
		}
		b = append(b, Acceptance{fields[0], fields[1], strings.TrimSpace(fields[2])})
	}
	return b, nil
}

// Write writes the baseline as ReadBaseline reads it.
func (b Baseline) Write(w io.Writer) error {
	if _, err := fmt.Fprintln(w, "# Findings of fencecheck verify that are accepted: id, object (* for all), reason, with tabs between."); err != nil {
		return err
	}
	for _, a := range b {
		if _, err := fmt.Fprintf(w, "%s\t%s\t%s\n", a.ID, Printable(a.Object), Printable(a.Reason)); err != nil {
			return err
		}
	}
	return nil
}

// BaselineOf accepts all of what was found, and keeps the reasons of what was accepted before.
func BaselineOf(v *Verification, reason string) Baseline {
	var b Baseline
	for _, f := range v.Findings {
		why := f.Accepted
		if why == "" {
			why = reason
		}
		b = append(b, Acceptance{f.ID, f.Object, why})
	}
	return b
}

// Apply marks the findings that the baseline accepts, and notes what it accepts that is not found any more.
func (b Baseline) Apply(v *Verification) {
	for _, a := range b {
		used := false
		for i := range v.Findings {
			f := &v.Findings[i]
			if f.ID == a.ID && (a.Object == anyObject || a.Object == Printable(f.Object)) {
				f.Accepted, used = a.Reason, true
			}
		}
		if !used && slices.Contains(v.Checks, a.ID) {
			v.Notes = append(v.Notes, fmt.Sprintf("the baseline accepts %s of %s, which is not found any more: take it out", a.ID, a.Object))
		}
	}
}
