//go:build unix

package main

import (
	"bufio"
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"image/png"
	"io"
	"math/big"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/chromedp/chromedp"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/writegate/writegate/internal/audit"
	"github.com/writegate/writegate/internal/browsertest"
	"github.com/writegate/writegate/internal/pgtest"
)

// hostiles are what a holder, a key, an application and a lease may be called.
var hostiles = []string{
	`<script>document.title="owned"</script>`, `"><img src=/owned onerror=alert(1)>`, `' onmouseover='alert(1)`, "\x1b[31mred\x1b]0;title\x07", "two\nlines\r\tand a tab", "\u202egnip\u2066 \u200b\ufeff",
	`{{.Title}} ${1} <!-- &amp;`, `javascript:alert(1)`, "=cmd|'/c calc'!A0", "\u0085\u009b31m", "מנעול 漢字",
}

// eventful leaves the events of the last half hour: four leases, what became of them, refusals with every verdict, and hostile names.
func eventful(t *testing.T, cfg *pgx.ConnConfig) {
	t.Helper()
	pgtest.Exec(t, cfg, `
		CREATE SCHEMA app; CREATE TABLE app.orders (id int PRIMARY KEY); SELECT fence.protect('app.orders'); INSERT INTO app.orders VALUES (1, 6);
		INSERT INTO fence.term (fence, name, holder, ttl, granted_at, renewals, ended_at, end_reason) SELECT f, n, h, '1 min', clock_timestamp() - a, 3, clock_timestamp() - z, e
		  FROM (VALUES (2, 'nightly', 'worker-a', interval '30 min', interval '25 min', 'released'), (4, 'nightly', 'worker-b', '20 min', '15 min', 'expired'), (6, 'nightly', 'worker-c', '10 min', NULL, NULL),
		               (8, 'over', 'worker-d', '20 min', NULL, NULL), (10, 'free', 'worker-e', '20 min', '18 min', 'released')) v (f, n, h, a, z, e);
		INSERT INTO fence.lease (name, fence, holder, ttl, granted_at, renewed_at, expires_at, released_at) VALUES
		  ('nightly', 6, 'worker-c', '1000 days', clock_timestamp(), clock_timestamp(), clock_timestamp() + interval '1000 days', NULL),
		  ('over', 8, 'worker-d', '1 min', clock_timestamp(), clock_timestamp(), clock_timestamp() - interval '1 min', NULL), ('free', 10, 'worker-e', '1 min', clock_timestamp(), clock_timestamp(), clock_timestamp(), clock_timestamp())`)
	refusal(t, cfg, 2, "nightly", "worker-a", "web", `{"id": 1}`, "stale", 7, "12 min")
	refusal(t, cfg, 6, "nightly", "worker-c", "web", `{"id": 2}`, "lawful", 1, "5 min")
	refusal(t, cfg, 8, "over", "worker-d", "job", `{"id": 3}`, "expired", 1200, "4 min")
	for i, h := range hostiles {
		refusal(t, cfg, int64(100+i), h, h, h, `{"id": 4}`, "unknown", 1, "3 min")
		execute(t, cfg, `UPDATE fence.rejection SET row_key = jsonb_build_object('k', $1::text), current_holder = $1 WHERE fence = $2`, h, 100+i)
	}
}

func refusal(t *testing.T, cfg *pgx.ConnConfig, fence int64, lease, holder, application, key, verdict string, count int64, ago string) {
	t.Helper()
	execute(t, cfg, `INSERT INTO fence.rejection (fence, table_name, row_key, row_key_hash, lease_name, holder, application_name, reason, verdict, count, first_at, last_at, current_fence)
		SELECT $1::bigint, 'app.orders', $2::jsonb, sha256($2::text::bytea), $3::text, $4::text, $5::text, 'stale', $6::text, $7::bigint, clock_timestamp() - $8::interval, clock_timestamp() - $8::interval, 6`,
		fence, key, lease, holder, application, verdict, count, ago)
}

func execute(t *testing.T, cfg *pgx.ConnConfig, sql string, args ...any) {
	t.Helper()
	conn, err := pgx.ConnectConfig(context.Background(), cfg)
	require.NoError(t, err)
	defer func() { _ = conn.Close(context.Background()) }()
	_, err = conn.Exec(context.Background(), sql, args...)
	require.NoError(t, err)
}

// said is what a process has written so far.
type said struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (s *said) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}

func (s *said) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}

// process is fencecheck as a process of its own.
type process struct {
	t      *testing.T
	cmd    *exec.Cmd
	stderr said
	base   string // of a server: where it serves
	ended  chan struct{}
}

// command is fencecheck with nothing of this process's environment that could reach it.
func command(t *testing.T, args ...string) *exec.Cmd {
	t.Helper()
	self, err := os.Executable()
	require.NoError(t, err)
	cmd := exec.Command(self, args...)
	for _, kv := range os.Environ() {
		if name, _, _ := strings.Cut(kv, "="); name != envToken && name != "DATABASE_URL" && !strings.HasPrefix(name, "PG") {
			cmd.Env = append(cmd.Env, kv)
		}
	}
	return cmd
}

// startServe starts fencecheck serve, and waits until it serves.
func startServe(t *testing.T, args ...string) *process {
	t.Helper()
	p := &process{t: t, cmd: command(t, append([]string{"serve", "--listen", "127.0.0.1:0"}, args...)...), ended: make(chan struct{})}
	p.cmd.Stderr = &p.stderr
	out, err := p.cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, p.cmd.Start())
	lines := bufio.NewReader(out)
	line, _ := lines.ReadString('\n')
	go func() {
		_, _ = io.Copy(&p.stderr, lines)
		_ = p.cmd.Wait()
		close(p.ended)
	}()
	t.Cleanup(func() {
		_ = p.cmd.Process.Kill()
		<-p.ended
	})
	address, ok := strings.CutPrefix(line, "serving on ")
	require.True(t, ok, "%q %s", line, p.stderr.String())
	p.base = strings.TrimSpace(address)
	return p
}

// end tells the process to end, and returns how it did.
func (p *process) end() int {
	p.t.Helper()
	require.NoError(p.t, p.cmd.Process.Signal(syscall.SIGTERM))
	<-p.ended
	return p.cmd.ProcessState.ExitCode()
}

func fetch(t *testing.T, address string, change ...func(*http.Request)) (int, string) {
	t.Helper()
	r, err := http.NewRequestWithContext(context.Background(), http.MethodGet, address, nil)
	require.NoError(t, err)
	for _, f := range change {
		f(r)
	}
	response, err := http.DefaultClient.Do(r)
	require.NoError(t, err)
	defer func() { _ = response.Body.Close() }()
	body, err := io.ReadAll(response.Body)
	require.NoError(t, err)
	return response.StatusCode, string(body)
}

// ask returns what a JavaScript expression comes to, when it has come to it.
func ask[T any](ctx context.Context, t testing.TB, expression string) T {
	t.Helper()
	v, err := chromedp.Run(ctx, chromedp.Evaluate[T](expression, chromedp.EvalAwaitPromise))
	require.NoError(t, err, expression)
	return v
}

// await waits until a JavaScript expression is true. What the page complains of meanwhile is for others.
func await(ctx context.Context, t testing.TB, expression string) {
	t.Helper()
	ask[bool](ctx, t, `new Promise(done => { const look = () => (`+expression+`) ? done(true) : setTimeout(look, 10); look(); })`)
}

const (
	tilesOf = `Object.fromEntries([...document.querySelectorAll("[data-tile]")].map(e => [e.dataset.tile, Number(e.querySelector(".n").textContent.replaceAll(",", ""))]))`
	// lanesOf is [lease, how many bars, how many marks, labels…] of each timeline.
	lanesOf = `[...document.querySelectorAll(".lane")].map(l => [l.querySelector("details.long > span")?.textContent || l.querySelector("h3").textContent,
		String(l.querySelectorAll(".track > i rect:first-of-type:not(.ahead):not(.late)").length), ...[...l.querySelectorAll(".track > [role=img]")].map(e => e.ariaLabel)])`
)

// drawn checks a page of the last hour against the database.
func drawn(ctx context.Context, t *testing.T, cfg *pgx.ConnConfig) {
	t.Helper()
	refused := func(where string) int {
		return value[int](t, cfg, `SELECT coalesce(sum(count), 0)::int FROM fence.rejection WHERE last_at > clock_timestamp() - interval '1 hour' AND `+where)
	}
	leases := func(where string) int { return value[int](t, cfg, `SELECT count(*) FROM fence.lease WHERE `+where) }
	assert.Equal(t, map[string]int{
		"held": leases("released_at IS NULL AND expires_at > clock_timestamp()"), "overdue": leases("released_at IS NULL AND expires_at <= clock_timestamp()"), "free": leases("released_at IS NOT NULL"),
		"refusals": refused("true"), "lawful": refused("verdict = 'lawful'"), "stale": refused("verdict = 'stale'"), "expired": refused("verdict = 'expired'"), "unknown": refused("verdict = 'unknown'"),
		"lost": 0, "guard": 0,
	}, ask[map[string]int](ctx, t, tilesOf))

	conn, err := pgx.ConnectConfig(context.Background(), cfg)
	require.NoError(t, err)
	defer func() { _ = conn.Close(context.Background()) }()
	terms, _, err := audit.Terms(context.Background(), conn, audit.TermFilter{})
	require.NoError(t, err)
	rejections, _, err := audit.Rejections(context.Background(), conn, audit.Filter{})
	require.NoError(t, err)
	labels := map[string][]string{}
	count := 0
	for _, l := range ask[[][]string](ctx, t, lanesOf) {
		labels[l[0]] = l[2:]
		count += len(l[2:])
	}
	has := func(lease string, parts ...string) {
		t.Helper()
		for _, label := range labels[audit.Printable(lease)] {
			// A name in a script that runs the other way is set apart.
			label = strings.NewReplacer("\u2068", "", "\u2069", "").Replace(label)
			all := true
			for _, part := range parts {
				all = all && strings.Contains(label, part)
			}
			if all {
				return
			}
		}
		assert.Fail(t, "nothing is drawn for it", "%q of %q, but %q", parts, lease, labels)
	}
	ends := map[string]string{"held": "holds it now", "overdue": "overdue"}
	for _, x := range terms {
		end := ends[x.End]
		if end == "" {
			end = x.End
		}
		has(x.Lease, audit.Printable(x.Holder)+", "+end, fmt.Sprint("\nfence ", x.Fence, "\n"), x.GrantedAt.Format("2006-01-02 15:04:05.000Z"))
	}
	for _, r := range rejections {
		what := strings.ToUpper(r.Verdict) + ": "
		if r.Verdict != "lawful" {
			what = r.Verdict + ": "
		}
		has(r.Lease, what, r.LastAt.Format("2006-01-02 15:04:05.000Z"), audit.Printable(r.Table+" "+r.Key), fmt.Sprint("fence ", r.Fence, " of ", audit.Printable(r.Holder)), "application "+audit.Printable(r.Application))
	}
	assert.Equal(t, len(terms)+len(rejections), count, "nothing else is drawn")
	assert.Equal(t, min(len(rejections), 50), ask[int](ctx, t, `document.querySelectorAll("[aria-labelledby=latest] tbody tr").length`))
}

// harmless checks that what comes from the database is text, all of it, and nothing else.
func harmless(ctx context.Context, t *testing.T) {
	t.Helper()
	text := ask[string](ctx, t, `document.body.textContent`)
	for _, h := range hostiles {
		assert.Contains(t, text, audit.Printable(h))
	}
	assert.Zero(t, ask[int](ctx, t, `document.querySelectorAll("img, iframe, object, embed, form, main script, a:not([href^='#']), [style], [src]:not([src='/live.js'])").length`))
	assert.Empty(t, ask[[]string](ctx, t, `[...document.querySelectorAll("*")].flatMap(e => e.getAttributeNames()).filter(a => a.startsWith("on"))`))
	assert.Empty(t, ask[[]string](ctx, t, `[...document.body.textContent].filter(c => /[\u0000-\u0009\u000b-\u001f\u007f-\u009f\u200b-\u200f\u202a-\u202e\ufeff]/.test(c)).map(c => c.codePointAt(0).toString(16))`))
	assert.NotContains(t, ask[string](ctx, t, `document.title`), "owned")
}

// pictures takes the page at the widths of a desk and a telephone.
func pictures(ctx context.Context, t *testing.T) {
	t.Helper()
	for _, width := range []int64{1280, 360} {
		browsertest.Emulate(ctx, t, width, 800, width == 360)
		name := filepath.Join(t.TempDir(), fmt.Sprint(width, ".png"))
		browsertest.Screenshot(ctx, t, name)
		file, err := os.Open(name)
		require.NoError(t, err)
		picture, err := png.Decode(file)
		require.NoError(t, errors.Join(err, file.Close()))
		assert.EqualValues(t, width, picture.Bounds().Dx())
		assert.Greater(t, picture.Bounds().Dy(), 700)
		colors := map[any]bool{}
		for y := range picture.Bounds().Dy() {
			colors[picture.At(int(width/2), y)] = true
		}
		assert.Greater(t, len(colors), 5, "it is not blank")
		assert.LessOrEqual(t, ask[int64](ctx, t, `document.documentElement.scrollWidth`), width)
	}
	browsertest.Emulate(ctx, t, 1280, 800, false)
}

func TestServeInABrowser(t *testing.T) {
	ctx := browsertest.New(t)
	cfg := pgtest.New(t)
	eventful(t, cfg)
	p := startServe(t, "--database-url", url(t, cfg), "--since", "1h", "--every", "1s")
	watched := browsertest.Watch(ctx, t)
	browsertest.Emulate(ctx, t, 1280, 800, false)
	require.NoError(t, chromedp.Do(ctx, chromedp.Navigate(p.base+"/")))
	assert.Equal(t, []string{p.base + "/", p.base + "/live.js"}, watched.Requests()[:2])
	drawn(ctx, t, cfg)
	harmless(ctx, t)
	await(ctx, t, `document.querySelector("[aria-labelledby=verify]").textContent.includes("checks ran to the end")`)
	require.Contains(t, ask[string](ctx, t, `document.querySelector("[aria-labelledby=verify]").textContent`), "rejection-lawful")

	// What happens meanwhile appears by itself.
	before := ask[map[string]int](ctx, t, tilesOf)["refusals"]
	refusal(t, cfg, 4, "nightly", "worker-b", "the new one", `{"id": 9}`, "stale", 3, "0")
	await(ctx, t, fmt.Sprintf(`(%s).refusals === %d`, tilesOf, before+3))
	execute(t, cfg, `UPDATE fence.lease SET released_at = clock_timestamp() WHERE name = 'nightly'`)
	execute(t, cfg, `UPDATE fence.term SET ended_at = clock_timestamp(), end_reason = 'released' WHERE fence = 6`)
	await(ctx, t, `(`+tilesOf+`).free === 2`)
	drawn(ctx, t, cfg)
	harmless(ctx, t)
	pictures(ctx, t)
	assert.Empty(t, watched.Complaints())
	for _, r := range watched.Requests() {
		assert.Contains(t, []string{p.base + "/", p.base + "/live.js"}, r)
	}
	code, metrics := fetch(t, p.base+"/metrics")
	assert.Equal(t, http.StatusOK, code)
	assert.Contains(t, metrics, fmt.Sprintf("writegate_rejections_total{reason=\"stale\",table=\"app.orders\"} %d\n", before+3))
	assert.Equal(t, exitClean, p.end(), p.stderr.String())
	assert.NotContains(t, p.stderr.String(), "level=ERROR")
}

// What is under way when it is told to end is answered, and nothing new is begun.
func TestServeEndsAsItShould(t *testing.T) {
	ctx := context.Background()
	for _, s := range []syscall.Signal{syscall.SIGTERM, syscall.SIGINT} {
		t.Run(s.String(), func(t *testing.T) {
			cfg := pgtest.New(t)
			eventful(t, cfg)
			p := startServe(t, "--database-url", url(t, cfg), "--verify-every", "0")
			conn, err := pgx.ConnectConfig(ctx, cfg)
			require.NoError(t, err)
			defer func() { _ = conn.Close(ctx) }()
			_, err = conn.Exec(ctx, `BEGIN; LOCK TABLE fence.term IN ACCESS EXCLUSIVE MODE`)
			require.NoError(t, err)
			type answer struct {
				code int
				body string
				err  error
			}
			answers := make(chan answer, 1)
			go func() {
				response, err := http.Get(p.base + "/")
				if err != nil {
					answers <- answer{err: err}
					return
				}
				body, err := io.ReadAll(response.Body)
				_ = response.Body.Close()
				answers <- answer{response.StatusCode, string(body), err}
			}()
			waits := `SELECT EXISTS (SELECT 1 FROM pg_locks WHERE NOT granted AND relation = 'fence.term'::regclass)`
			require.Eventually(t, func() bool { return value[bool](t, cfg, waits) }, time.Minute, 5*time.Millisecond)
			require.NoError(t, p.cmd.Process.Signal(s))
			require.Eventually(t, func() bool {
				conn, err := net.Dial("tcp", strings.TrimPrefix(p.base, "http://"))
				if err == nil {
					_ = conn.Close()
				}
				return err != nil
			}, time.Minute, time.Millisecond, "nobody new is let in")
			_, err = conn.Exec(ctx, `COMMIT`)
			require.NoError(t, err)
			a := <-answers
			require.NoError(t, a.err)
			assert.Equal(t, http.StatusOK, a.code)
			assert.True(t, strings.HasSuffix(strings.TrimSpace(a.body), "</html>"))
			<-p.ended
			assert.Equal(t, exitClean, p.cmd.ProcessState.ExitCode(), p.stderr.String())
		})
	}
}

func TestServeRefuses(t *testing.T) {
	dir := t.TempDir()
	file := func(name, text string) string {
		name = filepath.Join(dir, name)
		require.NoError(t, os.WriteFile(name, []byte(text), 0o600))
		return name
	}
	long := file("long", "0123456789abcdef\n")
	db := "--database-url=" + url(t, pgtest.New(t))
	for _, c := range []struct {
		name  string
		args  []string
		token string
		code  int
		says  string
	}{
		{"every address", []string{"--listen", "0.0.0.0:0"}, "", exitUsage, "--public says that this is meant"},
		{"no address", []string{"--listen", ":0"}, "", exitUsage, "--public says that this is meant"},
		{"every address of IPv6", []string{"--listen", "[::]:0"}, "", exitUsage, "--public says that this is meant"},
		{"with a token alone", []string{"--listen", "0.0.0.0:0"}, "0123456789abcdef", exitUsage, "--public says that this is meant"},
		{"public without a token", []string{"--listen", "0.0.0.0:0", "--public"}, "", exitUsage, "--public needs a token"},
		{"public without a token, here", []string{"--listen", "127.0.0.1:0", "--public"}, "", exitUsage, "--public needs a token"},
		{"a short token", []string{"--listen", "0.0.0.0:0", "--public"}, "short", exitUsage, "the token is short"},
		{"a short token in a file", []string{"--listen", "127.0.0.1:0", "--token-file", file("short", "short                \n")}, "", exitUsage, "the token is short"},
		{"an empty token file", []string{"--listen", "0.0.0.0:0", "--public", "--token-file", file("empty", "\n")}, "0123456789abcdef", exitUsage, "is empty"},
		{"no token file", []string{"--listen", "0.0.0.0:0", "--public", "--token-file", filepath.Join(dir, "nonesuch")}, "0123456789abcdef", exitUsage, "no such file"},
		{"no port", []string{"--listen", "127.0.0.1"}, "", exitUsage, "want host:port"},
		{"no such port", []string{"--listen", "127.0.0.1:99999"}, "", exitCannotCheck, "invalid port"},
		{"a certificate alone", []string{"--tls-cert", long}, "", exitUsage, "go together"},
		{"a key alone", []string{"--tls-key", long}, "", exitUsage, "go together"},
		{"no certificate", []string{"--listen", "127.0.0.1:0", "--tls-cert", long, "--tls-key", long}, "", exitCannotCheck, "tls:"},
		{"too often", []string{"--every", "10ms"}, "", exitUsage, "want 1s or more"},
		{"checks too often", []string{"--verify-every", "1s"}, "", exitUsage, "want 0 (never), or 10s or more"},
		{"an end", []string{"--until", "1h"}, "", exitUsage, "unknown flag"},
		{"no such check", []string{"--skip", "nonesuch"}, "", exitUsage, "no check"},
		{"a time without a zone", []string{"--since", "2024-03-10 02:30"}, "", exitUsage, "with its offset"},
		{"an argument", []string{"x"}, "", exitUsage, "unknown command"},
		{"no server", []string{"--database-url=postgres://me:s3cr3t@127.0.0.1:1/db"}, "", exitCannotCheck, "127.0.0.1:1"},
		{"no schema", []string{"--database-url=" + url(t, pgtest.NewEmpty(t))}, "", exitCannotCheck, "fencecheck migrate up"},
	} {
		t.Run(c.name, func(t *testing.T) {
			cmd := command(t, append([]string{"serve", db}, c.args...)...)
			cmd.Env = append(cmd.Env, envToken+"="+c.token)
			var out bytes.Buffer
			cmd.Stdout, cmd.Stderr = &out, &out
			// One that wrongly serves would do so for ever: its address is the end of it.
			done := make(chan struct{})
			require.NoError(t, cmd.Start())
			go func() {
				select {
				case <-done:
				case <-time.After(time.Minute):
					_ = cmd.Process.Kill()
				}
			}()
			_ = cmd.Wait()
			close(done)
			require.Equal(t, c.code, cmd.ProcessState.ExitCode(), out.String())
			require.Contains(t, out.String(), c.says)
			require.NotContains(t, out.String(), "s3cr3t")
			require.NotContains(t, out.String(), "0123456789abcdef")
		})
	}
}

// With a token others may be let in; a browser that has it keeps the page fresh.
func TestServeWithAToken(t *testing.T) {
	const token = "0123456789abcdef"
	cfg := pgtest.New(t)
	eventful(t, cfg)
	file := filepath.Join(t.TempDir(), "token")
	require.NoError(t, os.WriteFile(file, []byte(token+"\n"), 0o600))
	p := startServe(t, "--database-url", url(t, cfg), "--public", "--token-file", file, "--listen", "0.0.0.0:0", "--every", "1s")
	_, port, err := net.SplitHostPort(strings.TrimPrefix(p.base, "http://"))
	require.NoError(t, err)
	base := "http://127.0.0.1:" + port
	code, body := fetch(t, base+"/")
	assert.Equal(t, http.StatusUnauthorized, code)
	assert.NotContains(t, body, "nightly")
	code, _ = fetch(t, base+"/metrics", func(r *http.Request) { r.Header.Set("Authorization", "Bearer "+token+"x") })
	assert.Equal(t, http.StatusUnauthorized, code)
	code, body = fetch(t, base+"/metrics", func(r *http.Request) { r.Header.Set("Authorization", "Bearer "+token) })
	assert.Equal(t, http.StatusOK, code)
	assert.Contains(t, body, "writegate_up 1")
	code, body = fetch(t, base+"/healthz")
	assert.Equal(t, []any{http.StatusOK, "ok\n"}, []any{code, body})
	code, _ = fetch(t, base+"/", func(r *http.Request) {
		r.Host = "dashboard.example"
		r.SetBasicAuth("", token)
	})
	assert.Equal(t, http.StatusOK, code)

	ctx := browsertest.New(t)
	watched := browsertest.Watch(ctx, t)
	require.NoError(t, chromedp.Do(ctx, chromedp.Navigate("http://me:"+token+"@127.0.0.1:"+port+"/")))
	before := ask[map[string]int](ctx, t, tilesOf)["stale"]
	refusal(t, cfg, 4, "nightly", "worker-b", "x", `{"id": 9}`, "stale", 3, "0")
	await(ctx, t, fmt.Sprintf(`(%s).stale === %d || document.documentElement.dataset.live === "gone"`, tilesOf, before+3))
	assert.Equal(t, "on", ask[string](ctx, t, `document.documentElement.dataset.live`), ask[string](ctx, t, `document.getElementById("live-says").textContent`))
	assert.Empty(t, watched.Complaints())
	assert.Equal(t, exitClean, p.end())
	assert.NotContains(t, p.stderr.String(), token)
}

func TestServeOverTLS(t *testing.T) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour), IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, IsCA: true,
		BasicConstraintsValid: true, KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	require.NoError(t, err)
	private, err := x509.MarshalPKCS8PrivateKey(key)
	require.NoError(t, err)
	dir := t.TempDir()
	cert, secret := filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
	require.NoError(t, os.WriteFile(cert, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), 0o600))
	require.NoError(t, os.WriteFile(secret, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: private}), 0o600))
	p := startServe(t, "--database-url", url(t, pgtest.New(t)), "--tls-cert", cert, "--tls-key", secret, "--verify-every", "0")
	require.True(t, strings.HasPrefix(p.base, "https://127.0.0.1:"), p.base)
	parsed, err := x509.ParseCertificate(der)
	require.NoError(t, err)
	roots := x509.NewCertPool()
	roots.AddCert(parsed)
	transport := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots}, ForceAttemptHTTP2: true}
	defer transport.CloseIdleConnections()
	response, err := (&http.Client{Transport: transport}).Get(p.base + "/healthz")
	require.NoError(t, err)
	body, err := io.ReadAll(response.Body)
	require.NoError(t, err)
	require.NoError(t, response.Body.Close())
	assert.Equal(t, "ok\n", string(body))
	assert.Equal(t, "HTTP/2.0", response.Proto)
	stranger, err := http.Get(p.base + "/healthz")
	if err == nil {
		_ = stranger.Body.Close()
	}
	require.ErrorContains(t, err, "certificate")
	assert.Equal(t, exitClean, p.end(), p.stderr.String())
}

// A database that is gone is told, by everything that is served, without a password; and so is that it is back.
func TestServeWhileTheDatabaseIsGone(t *testing.T) {
	ctx := browsertest.New(t)
	server := pgtest.Own(t)
	cfg := server.TCP("postgres")
	r := fencecheck("migrate", "up", "--database-url", server.URL("postgres"))
	require.Equal(t, exitClean, r.code, r.stderr)
	eventful(t, cfg)
	dsn := fmt.Sprintf("postgres://%s:%s@%s:%d/postgres?sslmode=disable", cfg.User, cfg.Password, cfg.Host, cfg.Port)
	require.NotEmpty(t, cfg.Password)
	p := startServe(t, "--database-url", dsn, "--every", "1s", "--since", "1h")
	require.NoError(t, chromedp.Do(ctx, chromedp.Navigate(p.base+"/")))
	drawn(ctx, t, cfg)
	becomes := func(path string, code int, says string) {
		t.Helper()
		var body string
		require.Eventually(t, func() bool {
			var got int
			got, body = fetch(t, p.base+path)
			return got == code && strings.Contains(body, says)
		}, time.Minute, 20*time.Millisecond, "%s: %s", path, body)
		assert.NotContains(t, body, cfg.Password)
	}
	for range 2 {
		becomes("/healthz", http.StatusOK, "ok")
		server.Halt(t, "fast")
		await(ctx, t, `document.documentElement.dataset.live === "gone"`)
		says := ask[string](ctx, t, `document.getElementById("live-says").textContent`)
		assert.Contains(t, says, "what is below is old")
		assert.NotContains(t, says, cfg.Password)
		assert.NotEmpty(t, ask[map[string]int](ctx, t, tilesOf), "what was known is still shown")
		becomes("/healthz", http.StatusServiceUnavailable, "the database cannot be read\n")
		becomes("/metrics", http.StatusOK, "writegate_up 0\n")
		becomes("/", http.StatusServiceUnavailable, "the database cannot be read: ")
		server.Restart(t, "fast")
		becomes("/healthz", http.StatusOK, "ok")
		becomes("/metrics", http.StatusOK, "writegate_up 1\n")
		becomes("/", http.StatusOK, "</html>")
		await(ctx, t, `document.documentElement.dataset.live === "on"`)
	}
	drawn(ctx, t, cfg)
	assert.Equal(t, exitClean, p.end(), p.stderr.String())
	assert.Contains(t, p.stderr.String(), "the database cannot be read")
	assert.NotContains(t, p.stderr.String(), cfg.Password)
}
