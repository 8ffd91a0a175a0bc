// Package dashboard serves an audit's overview to browsers, its counters to Prometheus, and its health to whoever asks. It only
// ever reads. However many ask, the database is asked once in a while: answers are shared.
package dashboard

import (
	"bytes"
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/klauspost/compress/gzhttp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/writegate/writegate/internal/audit"
	"github.com/writegate/writegate/internal/page"
)

// Config says where a dashboard gets what it shows, and whom it shows it to.
type Config struct {
	// Survey, Count and Verify read the database. Verify is run in the background every VerifyEvery; 0: never.
	Survey      func(context.Context, *audit.Verification) (*audit.Overview, error)
	Count       func(context.Context) (audit.Counters, error)
	Verify      func(context.Context) (*audit.Verification, error)
	VerifyEvery time.Duration

	Program string        // name and version
	Every   time.Duration // how often a page asks again, and how old an answer may be that is shared
	Timeout time.Duration // for reading the database once
	// Token, if set, has to be given by everybody, as a bearer token or as the password of basic authentication.
	Token string
	// AnyHost lets requests name any host. Without a token only names of this machine itself are taken, lest a page elsewhere, by a
	// name that it makes point here, has a browser read what is ours.
	AnyHost bool
	Logger  *slog.Logger
}

// Dashboard answers requests. Close it to end what runs in the background.
type Dashboard struct {
	cfg     Config
	handler http.Handler
	page    shared[[]byte]
	counts  shared[audit.Counters]

	cancel context.CancelFunc
	done   chan struct{}

	mu         sync.Mutex
	verified   *audit.Verification
	verifiedAt time.Time
	verifyErr  error
}

// New returns a dashboard, and begins to verify.
func New(cfg Config) *Dashboard {
	ctx, cancel := context.WithCancel(context.Background())
	d := &Dashboard{cfg: cfg, cancel: cancel, done: make(chan struct{})}
	d.page = shared[[]byte]{keep: cfg.Every / 2, timeout: cfg.Timeout, ctx: ctx, get: d.render}
	d.counts = shared[audit.Counters]{keep: cfg.Every / 2, timeout: cfg.Timeout, ctx: ctx, get: cfg.Count}
	registry := prometheus.NewRegistry()
	registry.MustRegister(&collector{d})
	mux := http.NewServeMux()
	mux.HandleFunc("GET /{$}", d.serveHome)
	mux.HandleFunc("GET "+page.ScriptPath, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/javascript; charset=utf-8")
		_, _ = w.Write(page.Live())
	})
	mux.Handle("GET /metrics", promhttp.HandlerFor(registry, promhttp.HandlerOpts{ErrorHandling: promhttp.HTTPErrorOnError}))
	mux.HandleFunc("GET /healthz", d.serveHealth)
	d.handler = d.guard(gzhttp.GzipHandler(mux)) // charts of much are large, and alike
	go d.verify(ctx)
	return d
}

// ServeHTTP makes Dashboard an http.Handler.
func (d *Dashboard) ServeHTTP(w http.ResponseWriter, r *http.Request) { d.handler.ServeHTTP(w, r) }

// Close ends what runs in the background, and waits for it.
func (d *Dashboard) Close() {
	d.cancel()
	<-d.done
	d.page.wait()
	d.counts.wait()
}

// guard lets pass who may ask, and says to browsers how to treat what they get.
func (d *Dashboard) guard(next http.Handler) http.Handler {
	want := sha256.Sum256([]byte(d.cfg.Token))
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h := w.Header()
		h.Set("Content-Security-Policy", page.DashboardPolicy())
		h.Set("X-Content-Type-Options", "nosniff")
		h.Set("X-Frame-Options", "DENY")
		h.Set("Referrer-Policy", "no-referrer")
		h.Set("Cross-Origin-Opener-Policy", "same-origin")
		h.Set("Cross-Origin-Resource-Policy", "same-origin")
		h.Set("Cache-Control", "no-store")
		if d.cfg.Token == "" && !d.cfg.AnyHost && !local(r.Host) {
			http.Error(w, "this dashboard answers to names of this machine alone: ask for localhost", http.StatusMisdirectedRequest)
			return
		}
		if d.cfg.Token != "" && r.URL.Path != "/healthz" {
			given := sha256.Sum256([]byte(tokenOf(r)))
			if subtle.ConstantTimeCompare(given[:], want[:]) != 1 {
				h.Set("WWW-Authenticate", `Basic realm="fencecheck: the token is the password", charset="UTF-8"`)
				http.Error(w, "a token is needed, as a bearer token or as the password of basic authentication", http.StatusUnauthorized)
				return
			}
		}
		next.ServeHTTP(w, r)
	})
}

func tokenOf(r *http.Request) string {
	if _, password, ok := r.BasicAuth(); ok {
		return password
	}
	if scheme, token, ok := strings.Cut(r.Header.Get("Authorization"), " "); ok && strings.EqualFold(scheme, "bearer") {
		return token
	}
	return ""
}

// local reports whether a request's host names this machine.
func local(host string) bool {
	name, _, err := net.SplitHostPort(host)
	if err != nil {
		name = host
	}
	name = strings.Trim(name, "[]")
	ip := net.ParseIP(name)
	return strings.EqualFold(name, "localhost") || ip != nil && ip.IsLoopback()
}

func (d *Dashboard) render(ctx context.Context) ([]byte, error) {
	v, _, verifyErr := d.verification()
	if verifyErr != nil {
		// What could not be looked at must not look clean.
		v = &audit.Verification{Unchecked: []audit.Unchecked{{ID: "all checks", Why: verifyErr.Error()}}}
	}
	o, err := d.cfg.Survey(ctx, v)
	if err != nil {
		return nil, err
	}
	var b bytes.Buffer
	err = page.Dashboard(&b, o, page.Options{Program: d.cfg.Program, Every: d.cfg.Every})
	return b.Bytes(), err
}

func (d *Dashboard) serveHome(w http.ResponseWriter, r *http.Request) {
	body, err := d.page.value(r.Context())
	if err != nil {
		d.fail(w, r, err)
		return
	}
	w.Header().Set("Content-Type", "text/html; charset=utf-8")
	_, _ = w.Write(body)
}

// serveHealth answers 200 while the database can be read. Who may not see the rest learns no more than that.
func (d *Dashboard) serveHealth(w http.ResponseWriter, r *http.Request) {
	if _, err := d.counts.value(r.Context()); err != nil {
		d.cfg.Logger.Error("the database cannot be read", "error", err)
		http.Error(w, "the database cannot be read", http.StatusServiceUnavailable)
		return
	}
	_, _ = fmt.Fprintln(w, "ok")
}

func (d *Dashboard) fail(w http.ResponseWriter, r *http.Request, err error) {
	if r.Context().Err() != nil {
		return // nobody listens
	}
	d.cfg.Logger.Error("the database cannot be read", "error", err)
	http.Error(w, "the database cannot be read: "+err.Error(), http.StatusServiceUnavailable)
}

// verify keeps the findings fresh.
func (d *Dashboard) verify(ctx context.Context) {
	defer close(d.done)
	if d.cfg.VerifyEvery <= 0 {
		return
	}
	for {
		v, err := d.cfg.Verify(ctx)
		if ctx.Err() != nil {
			return
		}
		if err != nil {
			d.cfg.Logger.Error("the checks could not run", "error", err)
		}
		d.mu.Lock()
		d.verified, d.verifyErr, d.verifiedAt = v, err, time.Now()
		d.mu.Unlock()
		d.page.forget()
		select {
		case <-ctx.Done():
			return
		case <-time.After(d.cfg.VerifyEvery):
		}
	}
}

func (d *Dashboard) verification() (*audit.Verification, time.Time, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.verified, d.verifiedAt, d.verifyErr
}

// shared is an answer that is got once for all who ask for it at the same time, or shortly after.
type shared[T any] struct {
	get     func(context.Context) (T, error)
	keep    time.Duration
	timeout time.Duration
	ctx     context.Context //nolint:containedctx // the dashboard's, which outlives each request

	mu      sync.Mutex
	running *answer[T]
	last    *answer[T]
	group   sync.WaitGroup
}

type answer[T any] struct {
	done  chan struct{}
	value T
	err   error
	at    time.Time
}

func (s *shared[T]) value(ctx context.Context) (value T, err error) {
	s.mu.Lock()
	a := s.last
	if a == nil || time.Since(a.at) > s.keep {
		if s.running == nil {
			s.running = &answer[T]{done: make(chan struct{})}
			s.group.Add(1)
			go s.run(s.running)
		}
		a = s.running
	}
	s.mu.Unlock()
	select {
	case <-a.done:
		return a.value, a.err
	case <-ctx.Done():
		return value, context.Cause(ctx)
	}
}

// run gets an answer. It does not end with the request that asked first: others wait for it too.
func (s *shared[T]) run(a *answer[T]) {
	defer s.group.Done()
	ctx, cancel := context.WithTimeoutCause(s.ctx, s.timeout, errors.New("the database did not answer in time"))
	defer cancel()
	a.value, a.err = s.get(ctx)
	if a.err != nil && ctx.Err() != nil {
		a.err = context.Cause(ctx)
	}
	a.at = time.Now()
	s.mu.Lock()
	if s.running == a {
		s.last, s.running = a, nil
	}
	s.mu.Unlock()
	close(a.done)
}

// forget has the next one who asks get a new answer.
func (s *shared[T]) forget() {
	s.mu.Lock()
	s.last, s.running = nil, nil
	s.mu.Unlock()
}

func (s *shared[T]) wait() { s.group.Wait() }
