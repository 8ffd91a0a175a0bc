package integration

import (
	"bufio"
	"context"
	"flag"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/writegate/writegate/internal/pgtest"
)

var updateDocs = flag.Bool("update", false, "write the generated parts of the documentation anew")

// The rules that docs/alerting.md recommends are sound, and fire when they should.
func TestAlertRules(t *testing.T) {
	promtool, err := exec.LookPath("promtool")
	if err != nil {
		const want = "want promtool, to test the alerts: it is in Debian's package prometheus, and in Prometheus' own archive"
		require.NotEqual(t, "true", os.Getenv("CI"), want)
		t.Skip(want)
	}
	for _, args := range [][]string{{"check", "rules", "alerts.yml"}, {"test", "rules", "alerts_test.yml"}} {
		cmd := exec.Command(promtool, args...)
		cmd.Dir = "../docs"
		out, err := cmd.CombinedOutput()
		require.NoError(t, err, "promtool %s\n%s", strings.Join(args, " "), out)
	}
}

// Every alert has a test that it fires and one that it does not, and says what to do next.
func TestAlertsAreComplete(t *testing.T) {
	rules, err := os.ReadFile("../docs/alerts.yml")
	require.NoError(t, err)
	tests, err := os.ReadFile("../docs/alerts_test.yml")
	require.NoError(t, err)
	page, err := os.ReadFile("../docs/alerting.md")
	require.NoError(t, err)
	all := strings.Split(string(rules), "- alert: ")[1:]
	require.NotEmpty(t, all)
	for _, rule := range all {
		name, _, _ := strings.Cut(rule, "\n")
		require.Regexp(t, `\n +severity: (critical|warning)\n`, rule, name)
		require.Regexp(t, `\n +summary: "`, rule, name)
		require.Regexp(t, `(?s)\n +description: .*fencecheck\s+(leases|rejections|verify|tables|explain)`, rule, name)
		require.Regexp(t, `(?s)alertname: `+name+`,? *\n? *exp_alerts: *`, string(tests), name+" is not tested to fire")
		require.Contains(t, string(tests), "alertname: "+name+"}", name+" is not tested to keep quiet")
		require.Contains(t, string(page), "`"+name+"`", "docs/alerting.md does not speak of it")
	}
	// Their commands have the flags that they are given.
	pages, err := filepath.Glob("../docs/reference/*.md")
	require.NoError(t, err)
	var reference strings.Builder
	for _, file := range pages {
		text, err := os.ReadFile(file)
		require.NoError(t, err)
		reference.Write(text)
	}
	for _, flag := range regexp.MustCompile(`--[a-z][a-z-]+`).FindAllString(string(rules)+string(page), -1) {
		require.Contains(t, reference.String(), "`"+flag+"`")
	}
}

// family is a metric as /metrics shows it.
type family struct{ kind, labels, help string }

// scrape starts fencecheck serve on the bed's database, where everything that it can count has happened, and returns its metrics.
func scrape(t *testing.T) map[string]family {
	t.Helper()
	b := newBed(t)
	b.exec(`SELECT fence.acquire('job', 'A', '1 hour', gen_random_uuid());
		SELECT fence.record_rejection('app.orders', '{"id": 1}', 'job', NULL, 2, 'stale', 4)`)
	// The checks cannot read what is locked, and say so.
	locked := b.session()
	_, err := locked.Exec(context.Background(), `BEGIN; LOCK TABLE app.orders`)
	require.NoError(t, err)

	const token = "0123456789abcdef0123456789abcdef"
	cmd := exec.Command(filepath.Join(installed(t), "fencecheck"), "serve", "--listen", "127.0.0.1:0", "--rows", "--statement-timeout", "300ms", "--every", "1s")
	cmd.Env = append(os.Environ(), "DATABASE_URL="+pgtest.Shared(t).URL(b.cfg.Database), "FENCECHECK_TOKEN="+token)
	cmd.Stderr = io.Discard // what was locked is logged
	stdout, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	defer func() {
		require.NoError(t, cmd.Process.Signal(syscall.SIGTERM))
		require.NoError(t, cmd.Wait())
	}()
	line, err := bufio.NewReader(stdout).ReadString('\n')
	require.NoError(t, err)
	address := strings.TrimSpace(strings.TrimPrefix(line, "serving on "))

	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: 30 * time.Second}
	get := func(token string) (int, string) {
		request, err := http.NewRequestWithContext(context.Background(), http.MethodGet, address+"/metrics", nil)
		require.NoError(t, err)
		request.Header.Set("Authorization", "Bearer "+token)
		answer, err := client.Do(request)
		require.NoError(t, err)
		defer func() { _ = answer.Body.Close() }()
		body, err := io.ReadAll(answer.Body)
		require.NoError(t, err)
		return answer.StatusCode, string(body)
	}
	status, _ := get("another")
	require.Equal(t, http.StatusUnauthorized, status)
	var text string
	require.Eventually(t, func() bool {
		status, text = get(token)
		return status == http.StatusOK && strings.Contains(text, "writegate_verify_unchecked{")
	}, 60*time.Second, 200*time.Millisecond, "the checks have not run: %s", text)
	return families(text)
}

var sample = regexp.MustCompile(`^(\w+)(?:\{(.*)\})? \S+$`)

func families(text string) map[string]family {
	found := map[string]family{}
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		switch {
		case strings.HasPrefix(line, "# HELP "):
			name, help, _ := strings.Cut(strings.TrimPrefix(line, "# HELP "), " ")
			f := found[name]
			f.help = help
			found[name] = f
		case strings.HasPrefix(line, "# TYPE "):
			name, kind, _ := strings.Cut(strings.TrimPrefix(line, "# TYPE "), " ")
			f := found[name]
			f.kind = kind
			found[name] = f
		default:
			m := sample.FindStringSubmatch(line)
			if m == nil {
				continue
			}
			var labels []string
			for _, l := range regexp.MustCompile(`(\w+)="`).FindAllStringSubmatch(m[2], -1) {
				labels = append(labels, "`"+l[1]+"`")
			}
			f := found[m[1]]
			f.labels = strings.Join(labels, ", ")
			found[m[1]] = f
		}
	}
	return found
}

// The page documents every metric that there is and none besides, and the rules use no other.
func TestAlertMetrics(t *testing.T) {
	metrics := scrape(t)
	var names []string
	for name, f := range metrics {
		require.NotEmpty(t, f.help, name)
		names = append(names, name)
	}
	slices.Sort(names)
	var table strings.Builder
	table.WriteString("| metric | type | labels | |\n|---|---|---|---|\n")
	for _, name := range names {
		f := metrics[name]
		table.WriteString("| `" + name + "` | " + f.kind + " | " + f.labels + " | " + f.help + " |\n")
	}
	const page, begin, end = "../docs/alerting.md", "<!-- metrics: written by go test ./integration -run AlertMetrics -update -->\n", "<!-- end of metrics -->\n"
	text, err := os.ReadFile(page)
	require.NoError(t, err)
	before, rest, ok := strings.Cut(string(text), begin)
	require.True(t, ok, "%s has no %s", page, begin)
	_, after, ok := strings.Cut(rest, end)
	require.True(t, ok, "%s has no %s", page, end)
	want := before + begin + table.String() + end + after
	if *updateDocs {
		require.NoError(t, os.WriteFile(page, []byte(want), 0o644)) //nolint:gosec // a page that everybody may read
	} else {
		require.Equal(t, want, string(text), "go test ./integration -run AlertMetrics -update writes it anew")
	}

	named := regexp.MustCompile(`\bwritegate_\w+`)
	for _, file := range []string{"../docs/alerts.yml", "../docs/alerts_test.yml", page} {
		text, err := os.ReadFile(file)
		require.NoError(t, err)
		for _, name := range named.FindAllString(string(text), -1) {
			require.Contains(t, metrics, name, "%s names a metric that there is not", file)
		}
	}
}
