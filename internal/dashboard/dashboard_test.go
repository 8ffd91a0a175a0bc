package dashboard_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/writegate/writegate/internal/audit"
	"github.com/writegate/writegate/internal/dashboard"
	"github.com/writegate/writegate/internal/page"
	"github.com/writegate/writegate/internal/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

var noon = time.Date(2026, 1, 2, 12, 0, 0, 0, time.UTC)

func overview(lawful int64) *audit.Overview {
	return &audit.Overview{Database: "db", At: noon, Since: noon.Add(-time.Hour), Until: noon, Refusals: audit.RefusalCounts{Refusals: lawful, Lawful: lawful}}
}

// config is one of a database that is well and empty.
func config() dashboard.Config {
	return dashboard.Config{
		Survey: func(_ context.Context, v *audit.Verification) (*audit.Overview, error) {
			o := overview(0)
			o.Verify = v
			return o, nil
		},
		Count:   func(context.Context) (audit.Counters, error) { return audit.Counters{Schema: 7}, nil },
		Every:   time.Hour,
		Timeout: time.Minute,
		Logger:  slog.New(slog.DiscardHandler),
	}
}

func start(t *testing.T, cfg dashboard.Config) *dashboard.Dashboard {
	t.Helper()
	d := dashboard.New(cfg)
	t.Cleanup(d.Close)
	return d
}

type asked func(*http.Request)

func header(name, value string) asked { return func(r *http.Request) { r.Header.Set(name, value) } }
func host(name string) asked          { return func(r *http.Request) { r.Host = name } }

func request(method, path string, change ...asked) *http.Request {
	r := httptest.NewRequest(method, path, nil)
	r.Host = "localhost:8480"
	for _, f := range change {
		f(r)
	}
	return r
}

func get(d http.Handler, path string, change ...asked) *httptest.ResponseRecorder {
	w := httptest.NewRecorder()
	d.ServeHTTP(w, request(http.MethodGet, path, change...))
	return w
}

var paths = []string{"/", page.ScriptPath, "/metrics", "/healthz"}

func TestItAnswers(t *testing.T) {
	d := start(t, config())
	for path, want := range map[string][2]string{
		"/": {"text/html; charset=utf-8", "No write was refused in this time"}, page.ScriptPath: {"text/javascript; charset=utf-8", "writegate:refresh"},
		"/metrics": {"text/plain; version=0.0.4", "writegate_up 1"}, "/healthz": {"text/plain; charset=utf-8", "ok\n"},
	} {
		w := get(d, path)
		assert.Equal(t, http.StatusOK, w.Code, path)
		assert.Contains(t, w.Header().Get("Content-Type"), want[0], path)
		assert.Contains(t, w.Body.String(), want[1], path)

		w = httptest.NewRecorder()
		d.ServeHTTP(w, request(http.MethodHead, path))
		assert.Equal(t, http.StatusOK, w.Code, "HEAD %s", path)
	}
}

func TestTheToken(t *testing.T) {
	const token = "0123456789abcdef"
	cfg := config()
	cfg.Token = token
	d := start(t, cfg)
	basic := func(user, password string) asked { return func(r *http.Request) { r.SetBasicAuth(user, password) } }
	for name, c := range map[string]struct {
		give asked
		ok   bool
	}{
		"none":                          {func(*http.Request) {}, false},
		"bearer":                        {header("Authorization", "Bearer "+token), true},
		"bearer in other letters":       {header("Authorization", "bEARER "+token), true},
		"wrong bearer":                  {header("Authorization", "Bearer "+token[1:]), false},
		"longer bearer":                 {header("Authorization", "Bearer "+token+"x"), false},
		"empty bearer":                  {header("Authorization", "Bearer "), false},
		"no scheme":                     {header("Authorization", token), false},
		"another scheme":                {header("Authorization", "Digest "+token), false},
		"basic":                         {basic("anybody", token), true},
		"basic without a name":          {basic("", token), true},
		"the token as the name":         {basic(token, ""), false},
		"wrong basic":                   {basic("anybody", strings.ToUpper(token)), false},
		"broken basic":                  {header("Authorization", "Basic "+token), false},
		"in the address":                {func(r *http.Request) { r.URL.RawQuery = "token=" + token }, false},
		"in a cookie":                   {header("Cookie", "token="+token), false},
		"from this machine, without it": {func(r *http.Request) { r.RemoteAddr, r.Host = "127.0.0.1:1", "localhost" }, false},
	} {
		for _, path := range append(paths, "/nonesuch", "//healthz", "/healthz/", "/healthz/../metrics") {
			w := get(d, path, c.give)
			switch {
			case c.ok || path == "/healthz":
				assert.NotEqual(t, http.StatusUnauthorized, w.Code, "%s: %s", name, path)
			default:
				assert.Equal(t, http.StatusUnauthorized, w.Code, "%s: %s", name, path)
				assert.Contains(t, w.Header().Get("WWW-Authenticate"), "Basic ")
				assert.NotContains(t, w.Body.String(), "writegate_")
			}
			assert.NotContains(t, w.Body.String(), token)
		}
	}
	// With a token it may be asked for by any name.
	assert.Equal(t, http.StatusOK, get(d, "/", host("evil.example"), header("Authorization", "Bearer "+token)).Code)
	assert.Equal(t, "ok\n", get(d, "/healthz", host("evil.example")).Body.String())
}

// Without a token, a page elsewhere must not read what is here by a name that it makes point here.
func TestTheHost(t *testing.T) {
	d := start(t, config())
	for name, ok := range map[string]bool{
		"localhost": true, "localhost:8480": true, "LocalHost:1": true, "127.0.0.1": true, "127.0.0.1:8480": true, "127.9.9.9:80": true, "[::1]": true, "[::1]:8480": true,
		"evil.example": false, "evil.example:8480": false, "localhost.evil.example": false, "127.0.0.1.evil.example:8480": false, "127.0.0.1.nip.io": false, "10.0.0.1:8480": false,
		"0.0.0.0:8480": false, "[::]:8480": false, "localhost@evil.example": false, "evil.example#localhost": false, "": false, "[::ffff:10.0.0.1]": false,
	} {
		for _, path := range paths {
			w := get(d, path, host(name), header("Origin", "http://"+name), header("X-Forwarded-Host", "localhost"))
			if ok {
				assert.Equal(t, http.StatusOK, w.Code, "%s of %q", path, name)
				continue
			}
			assert.Equal(t, http.StatusMisdirectedRequest, w.Code, "%s of %q", path, name)
			assert.NotContains(t, w.Body.String(), "writegate_")
		}
	}
	cfg := config()
	cfg.AnyHost = true
	assert.Equal(t, http.StatusOK, get(start(t, cfg), "/", host("evil.example")).Code)
}

func TestSecurityHeadersOnEveryAnswer(t *testing.T) {
	withToken, failing := config(), config()
	withToken.Token = "0123456789abcdef"
	failing.Survey = func(context.Context, *audit.Verification) (*audit.Overview, error) { return nil, errors.New("no") }
	failing.Count = func(context.Context) (audit.Counters, error) { return audit.Counters{}, errors.New("no") }
	seen := map[int]bool{}
	for _, cfg := range []dashboard.Config{config(), withToken, failing} {
		d := start(t, cfg)
		for _, r := range []*http.Request{
			request(http.MethodGet, "/"), request(http.MethodGet, page.ScriptPath), request(http.MethodGet, "/metrics"), request(http.MethodGet, "/healthz"), request(http.MethodGet, "/nonesuch"),
			request(http.MethodPost, "/"), request(http.MethodGet, "/", host("evil.example")), request(http.MethodGet, "/a//b/../"), request(http.MethodHead, "/"),
		} {
			w := httptest.NewRecorder()
			d.ServeHTTP(w, r)
			seen[w.Code] = true
			for name, want := range map[string]string{
				"Content-Security-Policy": page.DashboardPolicy(), "X-Content-Type-Options": "nosniff", "X-Frame-Options": "DENY", "Referrer-Policy": "no-referrer",
				"Cross-Origin-Opener-Policy": "same-origin", "Cross-Origin-Resource-Policy": "same-origin", "Cache-Control": "no-store",
			} {
				assert.Equal(t, []string{want}, w.Header().Values(name), "%s of %s %s: %d", name, r.Method, r.URL, w.Code)
			}
			assert.Empty(t, w.Header().Values("Access-Control-Allow-Origin"))
			assert.Empty(t, w.Header().Values("Set-Cookie"))
		}
	}
	for _, code := range []int{200, 401, 404, 405, 421, 503} {
		assert.True(t, seen[code], "no answer was %d", code)
	}
	for _, part := range []string{"default-src 'none'", "script-src 'self'", "frame-ancestors 'none'", "form-action 'none'", "base-uri 'none'"} {
		assert.Contains(t, page.DashboardPolicy(), part)
	}
	assert.NotContains(t, page.DashboardPolicy(), "unsafe")
}

func TestItOnlyAnswersWhatItIsThereFor(t *testing.T) {
	var calls atomic.Int64
	cfg := config()
	cfg.Survey = func(context.Context, *audit.Verification) (*audit.Overview, error) {
		calls.Add(1)
		return overview(0), nil
	}
	cfg.Count = func(context.Context) (audit.Counters, error) {
		calls.Add(1)
		return audit.Counters{}, nil
	}
	d := start(t, cfg)
	for _, method := range []string{"POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "PROPFIND"} {
		for _, path := range paths {
			w := httptest.NewRecorder()
			d.ServeHTTP(w, request(method, path))
			assert.Equal(t, http.StatusMethodNotAllowed, w.Code, "%s %s", method, path)
			assert.Equal(t, "GET, HEAD", w.Header().Get("Allow"))
		}
	}
	for _, path := range []string{"/nonesuch", "/index.html", "/metrics/", "/favicon.ico", "/debug/pprof/", "/.git/config", "/live.js.map"} {
		assert.Equal(t, http.StatusNotFound, get(d, path).Code, path)
	}
	assert.Zero(t, calls.Load(), "the database was asked")
}

// A database that fails is told as such, without what nobody but its owner may know.
func TestADatabaseThatFails(t *testing.T) {
	const secret = "s3cr3t"
	connectFails := func(ctx context.Context) error {
		_, err := pgx.Connect(ctx, "postgres://me:"+secret+"@127.0.0.1:1/db?sslmode=disable&connect_timeout=10")
		return err
	}
	cfg := config()
	var logged lockedBuffer
	cfg.Logger = slog.New(slog.NewTextHandler(&logged, nil))
	cfg.Survey = func(ctx context.Context, _ *audit.Verification) (*audit.Overview, error) {
		return nil, connectFails(ctx)
	}
	cfg.Count = func(ctx context.Context) (audit.Counters, error) { return audit.Counters{}, connectFails(ctx) }
	d := start(t, cfg)
	for path, want := range map[string]string{"/": "the database cannot be read: failed to connect", "/healthz": "the database cannot be read\n"} {
		w := get(d, path)
		assert.Equal(t, http.StatusServiceUnavailable, w.Code, path)
		assert.Contains(t, w.Body.String(), want, path)
		assert.Equal(t, "text/plain; charset=utf-8", w.Header().Get("Content-Type"), path)
		assert.NotContains(t, w.Body.String(), secret)
	}
	assert.Equal(t, "the database cannot be read\n", get(d, "/healthz").Body.String(), "who may not see the rest learns no more")
	w := get(d, "/metrics")
	assert.Equal(t, http.StatusOK, w.Code)
	families := parse(t, w.Body.String())
	assert.Zero(t, sample(t, families, "writegate_up"))
	assert.Len(t, families, 1, "what is not known is missing, and not 0")
	assert.Contains(t, logged.String(), "the database cannot be read")
	assert.NotContains(t, logged.String(), secret)
}

type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

func TestADatabaseThatDoesNotAnswer(t *testing.T) {
	cfg := config()
	cfg.Timeout = time.Millisecond
	cfg.Survey = func(ctx context.Context, _ *audit.Verification) (*audit.Overview, error) {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	w := get(start(t, cfg), "/")
	assert.Equal(t, http.StatusServiceUnavailable, w.Code)
	assert.Equal(t, "the database cannot be read: the database did not answer in time\n", w.Body.String())
}

// However many ask, the database is asked once; and one who goes away takes the answer from nobody.
func TestRequestsShareOneReading(t *testing.T) {
	var calls, canceled atomic.Int64
	begun, go1 := make(chan struct{}, 100), make(chan struct{})
	cfg := config()
	cfg.Survey = func(ctx context.Context, _ *audit.Verification) (*audit.Overview, error) {
		calls.Add(1)
		begun <- struct{}{}
		select {
		case <-go1:
		case <-ctx.Done():
			canceled.Add(1)
			return nil, ctx.Err()
		}
		return overview(77), nil
	}
	server := httptest.NewServer(start(t, cfg))
	defer server.Close()
	ctx, leave := context.WithCancel(context.Background())
	left := make(chan error, 1)
	go func() { // the first, on whose behalf the database is asked
		r, err := http.NewRequestWithContext(ctx, http.MethodGet, server.URL+"/", nil)
		if err == nil {
			var response *http.Response
			if response, err = http.DefaultClient.Do(r); err == nil {
				err = errors.Join(errors.New("it was answered"), response.Body.Close())
			}
		}
		left <- err
	}()
	<-begun
	const many = 50
	bodies := make(chan string, many)
	var waiting sync.WaitGroup
	d := server.Config.Handler
	for range many {
		waiting.Add(1)
		go func() {
			waiting.Done()
			bodies <- get(d, "/").Body.String()
		}()
	}
	waiting.Wait()
	leave()
	require.ErrorIs(t, <-left, context.Canceled)
	close(go1)
	for range many {
		assert.Contains(t, <-bodies, "77 writes were refused although the writer held the lease")
	}
	assert.EqualValues(t, 1, calls.Load())
	assert.Zero(t, canceled.Load())
	get(d, "/")
	assert.EqualValues(t, 1, calls.Load(), "it is new enough")
	assert.EqualValues(t, 0, len(begun))
}

func TestAnAnswerGetsOld(t *testing.T) {
	var calls atomic.Int64
	cfg := config()
	cfg.Every = 2 * time.Nanosecond
	cfg.Survey = func(context.Context, *audit.Verification) (*audit.Overview, error) {
		return overview(10 + calls.Add(1)), nil
	}
	d := start(t, cfg)
	for i := range 3 {
		assert.Contains(t, get(d, "/").Body.String(), fmt.Sprint(11+i, " writes were refused"))
	}
}

// Close waits for what it has begun, which it tells to end.
func TestCloseWaits(t *testing.T) {
	defer goleak.VerifyNone(t, goleak.IgnoreCurrent())
	var ended atomic.Int64
	begun := make(chan struct{}, 3)
	wait := func(ctx context.Context) error {
		begun <- struct{}{}
		<-ctx.Done()
		for range 1000 { // so that whoever does not wait is seen
			time.Sleep(time.Microsecond)
		}
		ended.Add(1)
		return ctx.Err()
	}
	cfg := config()
	cfg.VerifyEvery = time.Hour
	cfg.Survey = func(ctx context.Context, _ *audit.Verification) (*audit.Overview, error) { return nil, wait(ctx) }
	cfg.Count = func(ctx context.Context) (audit.Counters, error) { return audit.Counters{}, wait(ctx) }
	cfg.Verify = func(ctx context.Context) (*audit.Verification, error) { return nil, wait(ctx) }
	d := dashboard.New(cfg)
	for _, path := range []string{"/", "/healthz"} {
		ctx, leave := context.WithCancel(context.Background())
		gone := make(chan struct{})
		go func() {
			defer close(gone)
			d.ServeHTTP(httptest.NewRecorder(), request(http.MethodGet, path).WithContext(ctx))
		}()
		defer func() { <-gone }()
		defer leave()
	}
	for range 3 {
		<-begun
	}
	d.Close()
	assert.EqualValues(t, 3, ended.Load())

	// And one that has verified, and waits for the next time.
	verified := make(chan struct{})
	cfg = config()
	cfg.VerifyEvery = time.Hour
	cfg.Verify = func(context.Context) (*audit.Verification, error) { close(verified); return &audit.Verification{}, nil }
	d = dashboard.New(cfg)
	<-verified
	d.Close()
}

func parse(t *testing.T, text string) map[string]*dto.MetricFamily {
	t.Helper()
	parser := expfmt.NewTextParser(model.LegacyValidation)
	families, err := parser.TextToMetricFamilies(strings.NewReader(text))
	require.NoError(t, err, text)
	return families
}

// sample returns the value of the one metric with the labels, given as name, value, …
func sample(t *testing.T, families map[string]*dto.MetricFamily, name string, labels ...string) float64 {
	t.Helper()
	require.Contains(t, families, name)
	var found []float64
	for _, m := range families[name].GetMetric() {
		same := true
		for i := 0; i < len(labels); i += 2 {
			has := false
			for _, l := range m.GetLabel() {
				has = has || l.GetName() == labels[i] && l.GetValue() == labels[i+1]
			}
			same = same && has
		}
		if same {
			found = append(found, m.GetGauge().GetValue()+m.GetCounter().GetValue())
		}
	}
	require.Len(t, found, 1, "%s %q", name, labels)
	return found[0]
}

func TestVerifyInTheBackground(t *testing.T) {
	results := make(chan error)
	cfg := config()
	cfg.VerifyEvery = time.Nanosecond
	n := 0
	cfg.Verify = func(ctx context.Context) (*audit.Verification, error) {
		select {
		case err := <-results:
			if err != nil {
				return nil, err
			}
		case <-ctx.Done():
			return nil, ctx.Err()
		}
		n++
		return &audit.Verification{
			Checks: []string{"lease-overdue", "fence-null"},
			Findings: []audit.Finding{
				{ID: "lease-overdue", Severity: audit.SeverityWarning, Object: "lease a", Finding: fmt.Sprint("found ", n)}, {ID: "lease-overdue", Severity: audit.SeverityWarning, Object: "lease b"},
			},
			Unchecked: []audit.Unchecked{{ID: "fsync-off", Object: "x", Why: "not allowed"}, {ID: "fsync-off", Object: "y", Why: "not allowed"}},
		}, nil
	}
	d := start(t, cfg)
	body := func() string { return get(d, "/").Body.String() }
	assert.Contains(t, body(), "Not asked for", "before it has come to its end")
	assert.NotContains(t, get(d, "/metrics").Body.String(), "writegate_verify")

	results <- nil
	require.Eventually(t, func() bool { return strings.Contains(body(), "found 1") }, time.Minute, time.Millisecond, "it is shown at once, however long an answer is good for")
	families := parse(t, get(d, "/metrics").Body.String())
	assert.EqualValues(t, 2, sample(t, families, "writegate_verify_findings", "id", "lease-overdue", "severity", "warning"))
	assert.EqualValues(t, 0, sample(t, families, "writegate_verify_findings", "id", "fence-null"), "what found nothing is 0, and not missing")
	assert.EqualValues(t, 1, sample(t, families, "writegate_verify_unchecked", "id", "fsync-off"))
	assert.Zero(t, sample(t, families, "writegate_verify_failed"))
	assert.InDelta(t, time.Now().Unix(), sample(t, families, "writegate_verify_last_run_timestamp_seconds"), 3600)

	results <- errors.New("no rights to <b>")
	require.Eventually(t, func() bool { return strings.Contains(body(), "no rights to &lt;b&gt;") }, time.Minute, time.Millisecond)
	assert.Contains(t, body(), "1 check did not run")
	assert.NotContains(t, body(), "found 1", "what cannot be looked at must not look clean")
	families = parse(t, get(d, "/metrics").Body.String())
	assert.EqualValues(t, 1, sample(t, families, "writegate_verify_failed"))
	assert.NotContains(t, families, "writegate_verify_findings")

	results <- nil
	require.Eventually(t, func() bool { return strings.Contains(body(), "found 2") }, time.Minute, time.Millisecond)
	assert.Zero(t, sample(t, parse(t, get(d, "/metrics").Body.String()), "writegate_verify_failed"))
}

func TestMetrics(t *testing.T) {
	hostile := []string{`a"b`, `a\b`, "a\nb", "a\x1b[31m", "a}b{c=\"d\"", "", "<script>", "\u202e", "\xff\xfe", "\xfe\xff"}
	cfg := config()
	cfg.Count = func(context.Context) (audit.Counters, error) {
		c := audit.Counters{
			Schema: 7, Leases: audit.LeaseCounts{Held: 3, Overdue: 2, Free: 1}, Late: 4, OldestOverdue: 12.5, Losses: 5, GuardRefused: 6, GuardObserved: 7, LastFence: audit.FenceCeiling / 4 * 3,
		}
		for i, name := range hostile {
			c.Refusals = append(c.Refusals, audit.RefusalCounter{Table: name, Reason: "stale", Count: int64(100 + i), Lawful: int64(i), LastAt: noon.Add(500 * time.Millisecond)})
		}
		return c, nil
	}
	w := get(start(t, cfg), "/metrics")
	require.Equal(t, http.StatusOK, w.Code, w.Body.String())
	families := parse(t, w.Body.String())
	for name, want := range map[string]float64{
		"writegate_up": 1, "writegate_schema_version": 7, "writegate_leases_late": 4, "writegate_lease_overdue_seconds_max": 12.5, "writegate_audit_losses_total": 5,
		"writegate_guard_refused_total": 6, "writegate_unfenced_writes_total": 7, "writegate_fence_last": float64(audit.FenceCeiling / 4 * 3),
	} {
		assert.Equal(t, want, sample(t, families, name), name)
	}
	assert.InDelta(t, 0.25, sample(t, families, "writegate_fence_headroom_ratio"), 1e-9)
	for state, want := range map[string]float64{"held": 3, "overdue": 2, "free": 1} {
		assert.Equal(t, want, sample(t, families, "writegate_leases", "state", state))
	}
	for i, name := range hostile[:8] {
		assert.EqualValues(t, 100+i, sample(t, families, "writegate_rejections_total", "table", name, "reason", "stale"))
		assert.EqualValues(t, i, sample(t, families, "writegate_rejections_lawful_total", "table", name))
		assert.EqualValues(t, float64(noon.Unix())+0.5, sample(t, families, "writegate_rejection_last_timestamp_seconds", "table", name))
	}
	assert.Len(t, families["writegate_rejections_total"].GetMetric(), len(hostile), "names that differ stay apart, also where they are no UTF-8")
	for name, f := range families {
		counts := strings.HasSuffix(name, "_total")
		assert.Equal(t, counts, f.GetType() == dto.MetricType_COUNTER, name)
		assert.NotEmpty(t, f.GetHelp(), name)
	}
}

// What a real database counts never falls, also when its audit is pruned; and its checks and its page are shown.
func TestOfARealDatabase(t *testing.T) {
	ctx := context.Background()
	cfg := pgtest.New(t)
	pgtest.Exec(t, cfg, `SELECT fence.acquire('x', 'A', '1 hour', gen_random_uuid());
		SELECT fence.record_rejection('app.t', jsonb_build_object('id', i), 'x', NULL, i * 2 + 100, 'stale', 5000, 'B', 3) FROM generate_series(1, 20) i;
		UPDATE fence.rejection SET last_at = clock_timestamp() - fence * interval '1 day', verdict = CASE WHEN fence % 4 = 0 THEN 'lawful' ELSE 'stale' END;
		INSERT INTO fence.audit_loss (application_name, db_user, count, last_at) VALUES ('a', 'u', 9, clock_timestamp() - interval '1 year')`)
	pool := pgtest.Pool(t, cfg)
	q := audit.Bounded(pool, time.Minute)
	c := config()
	c.Every = 2 * time.Nanosecond
	c.VerifyEvery = time.Hour
	c.Survey = func(ctx context.Context, v *audit.Verification) (*audit.Overview, error) {
		return audit.Survey(ctx, pool, cfg.Database, audit.SurveyOptions{Verify: v, Timeout: time.Minute})
	}
	c.Count = func(ctx context.Context) (audit.Counters, error) { return audit.Count(ctx, q, cfg.Database) }
	c.Verify = func(ctx context.Context) (*audit.Verification, error) {
		return audit.Verify(ctx, q, cfg.Database, audit.VerifyOptions{Only: []string{"lease-overdue", "rejection-lawful"}})
	}
	server := httptest.NewServer(start(t, c))
	defer server.Close()
	read := func(path string) string {
		t.Helper()
		response, err := http.Get(server.URL + path)
		require.NoError(t, err)
		defer func() { _ = response.Body.Close() }()
		body, err := io.ReadAll(response.Body)
		require.NoError(t, err)
		require.Equal(t, http.StatusOK, response.StatusCode, string(body))
		return string(body)
	}
	totals := func() map[string]float64 {
		families := parse(t, read("/metrics"))
		found := map[string]float64{}
		for name, f := range families {
			if f.GetType() == dto.MetricType_COUNTER {
				for _, m := range f.GetMetric() {
					found[fmt.Sprint(name, m.GetLabel())] += m.GetCounter().GetValue()
				}
			}
		}
		found["all"] = sample(t, families, "writegate_rejections_total", "table", "app.t", "reason", "stale")
		found["lawful"] = sample(t, families, "writegate_rejections_lawful_total", "table", "app.t", "reason", "stale")
		found["lost"] = sample(t, families, "writegate_audit_losses_total")
		return found
	}
	before := totals()
	assert.Equal(t, []float64{60, 30, 9}, []float64{before["all"], before["lawful"], before["lost"]})
	for left := 20; left > 0; {
		pgtest.Exec(t, cfg, `SELECT fence.prune_audit('1 day', 7)`)
		require.NoError(t, pool.QueryRow(ctx, `SELECT count(*) FROM fence.rejection`).Scan(&left))
		assert.Equal(t, before, totals())
	}
	pgtest.Exec(t, cfg, `SELECT fence.record_rejection('app.t', '{"id": 1}', 'x', NULL, 4, 'stale', 5000, 'B', 3)`)
	after := totals()
	for name, n := range before {
		assert.GreaterOrEqual(t, after[name], n, name)
	}
	assert.EqualValues(t, 63, after["all"])
	require.Eventually(t, func() bool { return strings.Contains(read("/"), "rejection-lawful") }, time.Minute, 5*time.Millisecond)
	assert.Contains(t, read("/"), cfg.Database)
}
