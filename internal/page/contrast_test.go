package page_test

import (
	"math"
	"os"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// What is read needs 4.5 to 1 (WCAG 2.2, 1.4.3), what is looked at 3 to 1 (1.4.11).
var contrasts = []struct {
	on    string
	text  []string
	shape []string
}{
	{on: "page", text: []string{"ink", "faint", "link", "bad"}, shape: []string{"focus"}},
	{on: "card", text: []string{"ink", "faint", "link", "bad", "warn", "bar-ink"},
		shape: []string{"edge", "focus", "held", "released-edge", "expired-edge", "overdue-edge", "stale", "lawful", "lapsed", "unknown", "ink"}},
	{on: "soft", text: []string{"ink", "link"}, shape: []string{"stale", "lawful"}},
	{on: "bad-soft", text: []string{"ink", "bad", "faint", "link"}, shape: []string{"lawful", "bad"}},
	{on: "warn-soft", text: []string{"warn"}, shape: []string{"warn"}},
	{on: "good-soft", text: []string{"good"}, shape: []string{"good"}},
	{on: "held", text: []string{"held-ink"}},
	{on: "released", text: []string{"bar-ink"}, shape: []string{"released-edge"}},
	{on: "expired", text: []string{"bar-ink"}, shape: []string{"expired-edge"}},
	{on: "overdue", text: []string{"bar-ink"}, shape: []string{"overdue-edge"}},
	{on: "unknown-soft", shape: []string{"unknown"}},
	{on: "lawful", text: []string{"lawful-ink"}},
	{on: "tip", text: []string{"tip-ink"}},
}

func TestContrast(t *testing.T) {
	css, err := os.ReadFile("style.css")
	require.NoError(t, err)
	roots := regexp.MustCompile(`(?s):root \{(.*?)\}`).FindAllStringSubmatch(string(css), 2)
	require.Len(t, roots, 2)
	for i, mode := range []string{"light", "dark"} {
		colours := map[string]string{}
		for _, m := range regexp.MustCompile(`--([a-z-]+): (#[0-9a-f]{6});`).FindAllStringSubmatch(roots[i][1], -1) {
			colours[m[1]] = m[2]
		}
		for _, c := range contrasts {
			check := func(names []string, least float64) {
				for _, name := range names {
					require.Contains(t, colours, name)
					require.Contains(t, colours, c.on)
					got := contrast(t, colours[name], colours[c.on])
					assert.GreaterOrEqual(t, got, least, "%s: %s %s on %s %s", mode, name, colours[name], c.on, colours[c.on])
				}
			}
			check(c.text, 4.5)
			check(c.shape, 3)
		}
	}
}

// Every colour comes from the lists above: one written elsewhere would be the same in both modes, and unchecked.
func TestColoursHaveNames(t *testing.T) {
	css, err := os.ReadFile("style.css")
	require.NoError(t, err)
	for _, line := range strings.Split(string(css), "\n") {
		if !strings.HasPrefix(strings.TrimSpace(line), "--") {
			rest := strings.ReplaceAll(line, ":root { --page: #ffffff; }", "") // paper
			assert.NotRegexp(t, `#[0-9a-f]{3,8}\b`, strings.ReplaceAll(rest, "url(#", "url("), line)
		}
	}
}

func contrast(t *testing.T, a, b string) float64 {
	l1, l2 := luminance(t, a), luminance(t, b)
	return (max(l1, l2) + 0.05) / (min(l1, l2) + 0.05)
}

func luminance(t *testing.T, hex string) float64 {
	channel := func(s string) float64 {
		n, err := strconv.ParseUint(s, 16, 8)
		require.NoError(t, err)
		c := float64(n) / 255
		if c <= 0.04045 {
			return c / 12.92
		}
		return math.Pow((c+0.055)/1.055, 2.4)
	}
	return 0.2126*channel(hex[1:3]) + 0.7152*channel(hex[3:5]) + 0.0722*channel(hex[5:7])
}
