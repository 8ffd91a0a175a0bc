// Package page draws an audit's overview as a web page: a report that is one file, and the dashboard, which asks again.
//
// Both are complete without a script and without any request: charts are drawn here, as SVG inside the document, and details
// are shown by style sheet alone. The dashboard adds one script, which replaces the page's main part by a newer one. What comes
// from the database is text to both, whatever is in it.
package page

import (
	"bytes"
	"crypto/sha256"
	"embed"
	"encoding/base64"
	"html/template"
	"io"
	"time"

	"github.com/writegate/writegate/internal/audit"
)

// Options say what is not in the overview.
type Options struct {
	Title   string        // "": writegate, and the database's name
	Program string        // what made the page, with its version: "fencecheck v1.2.3"
	Every   time.Duration // how often the dashboard asks again; 0: 5 s, at least 100 ms
}

// ScriptPath is where the dashboard looks for [Live].
const ScriptPath = "/live.js"

//go:embed templates/*.tmpl
var templates embed.FS

//go:embed style.css
var style string

//go:embed live.js
var live []byte

// The policies say by its hash which style the page has, so the page may have no style attributes.
var (
	styleSource     = styleHash(style)
	reportPolicy    = "default-src 'none'; style-src " + styleSource + "; img-src data:; base-uri 'none'; form-action 'none'"
	dashboardPolicy = reportPolicy + "; script-src 'self'; connect-src 'self'; frame-ancestors 'none'"
)

func styleHash(css string) string {
	sum := sha256.Sum256([]byte(css))
	return "'sha256-" + base64.StdEncoding.EncodeToString(sum[:]) + "'"
}

// ReportPolicy is the Content-Security-Policy of a report, which has it in itself too: no script, no request.
func ReportPolicy() string { return reportPolicy }

// DashboardPolicy is the Content-Security-Policy to serve the dashboard with.
func DashboardPolicy() string { return dashboardPolicy }

// Live returns the dashboard's script, to be served at [ScriptPath].
func Live() []byte { return bytes.Clone(live) }

var pages = template.Must(template.New("page").ParseFS(templates, "templates/*.tmpl"))

// Report writes a complete HTML document that needs nothing else and runs nothing.
func Report(w io.Writer, o *audit.Overview, opt Options) error {
	return write(w, o, opt, false)
}

// Dashboard writes the same with a reference to [Live], which asks for the page's address again every opt.Every.
func Dashboard(w io.Writer, o *audit.Overview, opt Options) error {
	return write(w, o, opt, true)
}

// write builds the page first: what fails half-way must not look like a page.
func write(w io.Writer, o *audit.Overview, opt Options, asks bool) error {
	var b bytes.Buffer
	if err := pages.ExecuteTemplate(&b, "page.tmpl", newView(o, opt, asks)); err != nil {
		return err
	}
	_, err := b.WriteTo(w)
	return err
}
