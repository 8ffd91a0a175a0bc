package page_test

import (
	"bytes"
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"flag"
	"html"
	"html/template"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/writegate/writegate/internal/audit"
	"github.com/writegate/writegate/internal/page"
)

var update = flag.Bool("update", false, "write the golden files anew")

var options = page.Options{Program: "fencecheck v0.9.0"}

func report(t testing.TB, o *audit.Overview) string {
	t.Helper()
	var b bytes.Buffer
	require.NoError(t, page.Report(&b, o, options))
	return b.String()
}

func dashboard(t testing.TB, o *audit.Overview) string {
	t.Helper()
	var b bytes.Buffer
	require.NoError(t, page.Dashboard(&b, o, options))
	return b.String()
}

func TestPagesAreAsTheyWere(t *testing.T) {
	for name, got := range map[string]string{
		"report": report(t, sample()), "dashboard": dashboard(t, sample()), "quiet": report(t, quiet()),
	} {
		t.Run(name, func(t *testing.T) {
			// The style has a file and tests of its own: a new shade must not touch what is said here.
			got := styleElement.ReplaceAllString(got, "<style>…</style>")
			got = regexp.MustCompile(`sha256-[A-Za-z0-9/;&#+]+=`).ReplaceAllString(got, "sha256-…")
			file := filepath.Join("testdata", name+".golden.html")
			if *update {
				require.NoError(t, os.WriteFile(file, []byte(got), 0o644))
			}
			want, err := os.ReadFile(file)
			require.NoError(t, err)
			assert.Equal(t, string(want), got)
		})
	}
}

var (
	styleElement = regexp.MustCompile(`(?s)<style>(.*?)</style>`)
	tags         = regexp.MustCompile(`<[/!]?([a-zA-Z][a-zA-Z0-9]*)`)
)

func TestThePolicyNamesTheStyleAndNothingElseMayRun(t *testing.T) {
	for name, got := range map[string]string{"report": report(t, hostile()), "dashboard": dashboard(t, hostile())} {
		t.Run(name, func(t *testing.T) {
			styles := styleElement.FindAllStringSubmatch(got, -1)
			require.Len(t, styles, 1)
			sum := sha256.Sum256([]byte(styles[0][1]))
			source := "style-src 'sha256-" + base64.StdEncoding.EncodeToString(sum[:]) + "'"
			assert.Contains(t, page.ReportPolicy(), source)
			assert.Contains(t, page.DashboardPolicy(), source)
			rest := styleElement.ReplaceAllString(got, "")
			// Inside a label a quote is escaped, so these cannot be what somebody's name says.
			assert.NotRegexp(t, `<[^<>]*\sstyle=`, labels.ReplaceAllString(rest, ""))
			assert.NotRegexp(t, `<[^<>]*\son[a-z]+=`, labels.ReplaceAllString(rest, ""))
			assert.NotRegexp(t, `(src|href)="?(https?:)?//`, rest)
		})
	}
	assert.Contains(t, page.ReportPolicy(), "default-src 'none'")
	assert.NotContains(t, page.ReportPolicy(), "script-src")
	assert.NotContains(t, report(t, sample()), "<script")
	assert.Contains(t, html.UnescapeString(report(t, sample())), `<meta http-equiv="Content-Security-Policy" content="`+page.ReportPolicy()+`">`)
	assert.Equal(t, 1, strings.Count(dashboard(t, sample()), "<script"))
	assert.Contains(t, dashboard(t, sample()), `<script src="/live.js" defer data-every="5000"></script>`)
	assert.Contains(t, page.DashboardPolicy(), "script-src 'self'; connect-src 'self'")
}

var labels = regexp.MustCompile(`="[^"]*"`)

func TestHostileTextStaysText(t *testing.T) {
	got, known := report(t, hostile()), map[string]bool{}
	for _, m := range tags.FindAllStringSubmatch(report(t, sample()), -1) {
		known[m[1]] = true
	}
	for _, m := range tags.FindAllStringSubmatch(got, -1) {
		assert.True(t, known[m[1]], "element %s came out of the data", m[1])
	}
	assert.NotRegexp(t, `[\x00-\x08\x0b-\x1f\x7f]`, got, "control characters")
	// The page's own isolates around such text come in pairs, which the text cannot break up.
	assert.Equal(t, strings.Count(got, "\u2068"), strings.Count(got, "\u2069"))
	assert.Contains(t, got, "\u2068שלום עולם 42\u2069")
	assert.NotRegexp(t, "[\u200b-\u200f\u2028-\u202e\u2066\u2067\ufeff]", got, "characters that turn the text or hide in it")
	for _, h := range hostiles {
		if h != "" {
			assert.Contains(t, got, template.HTMLEscapeString(audit.Printable(h)))
		}
	}
}

func TestFencesAreCompleteAndCountsAreReadable(t *testing.T) {
	o := sample()
	o.Lanes[0].Spans[1].Fence = math.MaxInt64
	o.Latest[0].Fence = math.MaxInt64
	o.Latest[0].CurrentFence = ptr(int64(math.MaxInt64 - 1))
	o.Refusals.Refusals = math.MaxInt64
	got := report(t, o)
	assert.Contains(t, got, "\nfence 9223372036854775807\n")
	assert.Contains(t, got, "<span>9223372036854775807</span>")
	assert.Contains(t, got, "9223372036854775806")
	assert.Contains(t, got, "9,223,372,036,854,775,807")
}

func TestThePageSaysWhatItLeavesOut(t *testing.T) {
	got := report(t, sample())
	assert.Contains(t, got, "42 terms in 6 bars, 49 refusals in 5 marks, of 4 leases.")
	assert.Contains(t, got, "Left out: 3 more leases")
	assert.Contains(t, got, "37 terms, 12 of them expired")
	assert.Contains(t, got, "37 refusals in 5 rows of the audit")
	assert.Contains(t, got, "These are the latest 4 rows of the audit")

	got = report(t, large())
	assert.Contains(t, got, "400,000 terms in 20,000 bars, 120,000 refusals in 6,000 marks, of 50 leases.")
	assert.Contains(t, got, "300 of 20,000 bars: the latest 6 of each lease.")
	assert.Contains(t, got, "300 of 6,000 marks")
}

func TestAlarmsAreRaisedForWhatMatters(t *testing.T) {
	calm := func() *audit.Overview {
		o := sample()
		o.Refusals.Lawful = 0
		o.Verify.Findings, o.Verify.Unchecked = o.Verify.Findings[1:], nil // a warning, accepted
		return o
	}
	assert.NotContains(t, report(t, calm()), `aria-label="Alarm"`)
	assert.Contains(t, report(t, calm()), "No lawful holder was refused")
	for name, change := range map[string]func(o *audit.Overview){
		"a lawful refusal": func(o *audit.Overview) { o.Refusals.Lawful = 1 },
		"an error":         func(o *audit.Overview) { o.Verify.Findings = sample().Verify.Findings },
		"not checked":      func(o *audit.Overview) { o.Verify.Unchecked = sample().Verify.Unchecked },
	} {
		t.Run(name, func(t *testing.T) {
			o := calm()
			change(o)
			assert.Equal(t, 1, strings.Count(report(t, o), `aria-label="Alarm"`))
			assert.Contains(t, report(t, o), "<title>(!) ")
		})
	}
	t.Run("an accepted error", func(t *testing.T) {
		o := calm()
		o.Verify.Findings = sample().Verify.Findings[:1]
		o.Verify.Findings[0].Accepted = "known"
		assert.NotContains(t, report(t, o), `aria-label="Alarm"`)
	})
	o := calm()
	o.Refusals.Lawful = 1
	assert.Contains(t, report(t, o), "<code>fencecheck rejections --verdict lawful</code> and <code>fencecheck explain rejection-lawful</code>")
}

func TestEmptyPagesSayThatTheyAre(t *testing.T) {
	got := report(t, quiet())
	for _, want := range []string{
		"No lease was held in this time", "No write was refused in this time", "No table is protected", "Not asked for", ", standby<",
	} {
		assert.Contains(t, got, want)
	}
	assert.NotContains(t, report(t, &audit.Overview{}), "<no value>")
}

// Times that make no sense must neither hang nor break the drawing.
func TestOddTimes(t *testing.T) {
	far := time.Date(9999, 12, 31, 0, 0, 0, 0, time.UTC)
	place := regexp.MustCompile(` (x|width|x1|x2|y|height)="?(-?[0-9.]+|NaN|[+-]Inf)%?`)
	for name, change := range map[string]func(o *audit.Overview){
		"since the beginning":  func(o *audit.Overview) { o.Since = time.Time{} },
		"no end":               func(o *audit.Overview) { o.Until = time.Time{} },
		"no time at all":       func(o *audit.Overview) { o.Since, o.Until, o.At = time.Time{}, time.Time{}, time.Time{} },
		"an empty range":       func(o *audit.Overview) { o.Until = o.Since },
		"a range backwards":    func(o *audit.Overview) { o.Since, o.Until = o.Until, o.Since },
		"a nanosecond":         func(o *audit.Overview) { o.Since = o.Until.Add(-1) },
		"eight thousand years": func(o *audit.Overview) { o.Since, o.Until = time.Unix(-1e11, 0), far },
		"spans out of range": func(o *audit.Overview) {
			s := o.Lanes[0].Spans
			s[0].From, s[0].To = ago(90*time.Hour), ago(80*time.Hour)
			s[1].From, s[1].To = time.Time{}, far
			s[2].From, s[2].To = s[2].To, s[2].From
			s[3].From, s[3].To = noon, noon
			o.Lanes[0].Marks[0].At = far
			o.Lanes[0].Marks[1].At = time.Time{}
		},
		"bins out of range": func(o *audit.Overview) {
			o.Histogram[7].From, o.Histogram[7].To = far, time.Time{}
			o.Histogram[17].Stale = math.MaxInt64
			o.Histogram[17].Expired = math.MaxInt64
			o.Histogram[18].Stale = -5
		},
	} {
		t.Run(name, func(t *testing.T) {
			o := sample()
			change(o)
			got := report(t, o)
			found := place.FindAllStringSubmatch(got, -1)
			require.NotEmpty(t, found)
			for _, m := range found {
				assert.NotContains(t, m[2], "N", m[0])
				assert.NotContains(t, m[2], "Inf", m[0])
				if m[1] == "width" {
					assert.False(t, strings.HasPrefix(m[2], "-"), m[0])
				}
			}
			assert.Equal(t, 4, strings.Count(got, "<figure class=\"lane\""))
			assert.LessOrEqual(t, strings.Count(got, `class="tick"`), 2*9)
		})
	}
}

func TestWhatGoesOnOutsideTheRangeSaysSo(t *testing.T) {
	got := report(t, sample())
	assert.Equal(t, 1, strings.Count(got, `<use href="#past"`), "billing's first term began before")
	assert.Equal(t, 1, strings.Count(got, `<use href="#later"`), "its last goes on")
	assert.Equal(t, 1, strings.Count(got, `class=late`), "since when nightly-report is overdue")
}

func TestALargePageStaysOfASizeThatABrowserTakes(t *testing.T) {
	got := len(report(t, large()))
	t.Logf("50 lanes of 400 spans and 120 marks: %.1f MB", float64(got)/1e6)
	assert.Less(t, got, 7_500_000)
}

func TestWhatTheRowHoldsNow(t *testing.T) {
	assert.NotContains(t, report(t, sample()), "The row now")
	o := sample()
	o.Latest[1].Now = &audit.RowNow{State: "present", Fence: ptr(int64(1764417600004000)), Holder: "worker-<9>"}
	got := report(t, o)
	assert.Contains(t, got, ">The row now</th>")
	assert.Contains(t, got, ">1764417600004000 of worker-&lt;9&gt;</td>")
	assert.Equal(t, len(o.Latest)-1, strings.Count(got, ">not looked at</td>"))
}

type broken struct{}

func (broken) Write([]byte) (int, error) { return 0, errors.New("disk full") }

func TestWriteErrorsAreReturned(t *testing.T) {
	assert.EqualError(t, page.Report(broken{}, sample(), options), "disk full")
	assert.EqualError(t, page.Dashboard(broken{}, sample(), options), "disk full")
}

func BenchmarkReport(b *testing.B) {
	o := large()
	for b.Loop() {
		var w bytes.Buffer
		if err := page.Report(&w, o, options); err != nil {
			b.Fatal(err)
		}
		b.SetBytes(int64(w.Len()))
	}
}
