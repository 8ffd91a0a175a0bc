package page_test

import (
	"context"
	"flag"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/cdproto/input"
	"github.com/chromedp/chromedp"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/writegate/writegate/internal/audit"
	"github.com/writegate/writegate/internal/browsertest"
	"github.com/writegate/writegate/internal/page"
)

// ask returns what a JavaScript expression comes to.
func ask[T any](ctx context.Context, t testing.TB, expression string) T {
	t.Helper()
	v, err := chromedp.Run(ctx, chromedp.Evaluate[T](expression, chromedp.EvalAwaitPromise))
	require.NoError(t, err, expression)
	return v
}

// act runs JavaScript statements.
func act(ctx context.Context, t testing.TB, statements string) {
	t.Helper()
	ask[bool](ctx, t, "(() => { "+statements+"; return true; })()")
}

func open(ctx context.Context, t testing.TB, html string) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "report.html")
	require.NoError(t, os.WriteFile(file, []byte(html), 0o644))
	require.NoError(t, chromedp.Do(ctx, chromedp.Navigate("file://"+file)))
	return "file://" + file
}

// details is what the style sheet shows of an element's label, and whether all of it is within the window.
type details struct {
	Shown                    bool
	Left, Top, Right, Bottom float64
	Width, Height            float64 // of the window
}

const detailsOf = `(e => {
	const s = getComputedStyle(e, "::after");
	const left = parseFloat(s.left), top = parseFloat(s.top);
	const more = n => parseFloat(s[n]) || 0;
	return {
		Shown: s.content !== "none" && s.visibility === "visible" && s.display !== "none" && s.position === "fixed",
		Left: left, Top: top, Right: left + more("width"), Bottom: top + more("marginTop") + more("height"),
		Width: innerWidth, Height: innerHeight,
	};
})`

func assertShown(t testing.TB, d details, what string) {
	t.Helper()
	assert.True(t, d.Shown, what)
	assert.GreaterOrEqual(t, d.Left, -0.5, "%s: %+v", what, d)
	assert.GreaterOrEqual(t, d.Top, -0.5, "%s: %+v", what, d)
	assert.LessOrEqual(t, d.Right, d.Width+0.5, "%s: %+v", what, d)
	assert.LessOrEqual(t, d.Bottom, d.Height+0.5, "%s: %+v", what, d)
	assert.Greater(t, d.Right-d.Left, 100.0, "%s: %+v", what, d)
	assert.Greater(t, d.Bottom-d.Top, 30.0, "%s: %+v", what, d)
}

func TestReportInABrowser(t *testing.T) {
	ctx := browsertest.New(t)
	watched := browsertest.Watch(ctx, t)
	browsertest.Emulate(ctx, t, 1280, 800, false)
	o := sample()

	t.Run("it asks for nothing and complains of nothing", func(t *testing.T) {
		url := open(ctx, t, report(t, o))
		assert.Equal(t, []string{url}, watched.Requests())
		assert.Empty(t, watched.Complaints())
		assert.Equal(t, "(!) writegate: orders", ask[string](ctx, t, `document.title`))
		assert.Equal(t, "en", ask[string](ctx, t, `document.documentElement.lang`))
	})

	t.Run("it draws what the overview has", func(t *testing.T) {
		open(ctx, t, report(t, o))
		lanes := ask[[][]string](ctx, t, `[...document.querySelectorAll(".lane")].map(l => [l.querySelector("h3").textContent,
			...[...l.querySelectorAll(".track > [role=img]")].map(e => e.ariaLabel)])`)
		require.Len(t, lanes, len(o.Lanes))
		for i, l := range o.Lanes {
			require.Len(t, lanes[i], 1+len(l.Spans)+len(l.Marks), l.Lease)
			assert.Equal(t, l.Lease, lanes[i][0])
			for j, s := range l.Spans {
				label := lanes[i][1+j]
				assert.Contains(t, label, fmt.Sprint("fence ", s.Fence))
				assert.Contains(t, label, s.Holder)
				assert.Contains(t, label, s.From.Format("2006-01-02 15:04:05.000Z"))
				if s.Terms > 1 {
					assert.Contains(t, label, fmt.Sprintf("%d terms, %d of them expired", s.Terms, s.Lapsed))
				}
			}
			for j, m := range l.Marks {
				label := lanes[i][1+len(l.Spans)+j]
				assert.True(t, strings.HasPrefix(strings.ToLower(label), m.Verdict+": "), label)
				assert.Contains(t, label, m.Table+" "+m.Key)
				assert.Contains(t, label, fmt.Sprint("fence ", m.Fence))
				assert.Contains(t, label, m.Application)
			}
		}
		assert.Equal(t, map[string]string{
			"held": "2", "overdue": "1", "free": "5", "refusals": "1,049", "lawful": "8", "stale": "1,038", "expired": "1",
			"unknown": "2", "lost": "3", "guard": "4",
		}, ask[map[string]string](ctx, t, `Object.fromEntries([...document.querySelectorAll("[data-tile]")].map(e => [e.dataset.tile, e.querySelector(".n").textContent]))`))
		assert.Equal(t, 6, ask[int](ctx, t, `document.querySelectorAll(".plot [role=img]").length`), "bins with refusals")
		assert.Equal(t, 4, ask[int](ctx, t, `document.querySelectorAll("[aria-labelledby=latest] tbody tr").length`))

		// Ten minutes of an hour are a sixth of the track.
		bar := ask[[]float64](ctx, t, `(() => {
			const track = document.querySelector(".lane .track").getBoundingClientRect();
			const r = document.querySelectorAll(".lane .track > i")[1].querySelector("rect").getBBox();
			return [r.x / track.width, r.width / track.width];
		})()`)
		assert.InDelta(t, 14.0/60, bar[0], 0.001)
		assert.InDelta(t, 16.0/60, bar[1], 0.001)

		// Lawful refusals are larger than others, and of another shape.
		size := ask[map[string]float64](ctx, t, `Object.fromEntries([...document.querySelectorAll(".lane use:last-of-type")].filter(u => u.href.baseVal.startsWith("#k-"))
			.map(u => [u.href.baseVal, u.getBoundingClientRect().width]))`)
		assert.NotEmpty(t, size["#k-lawful"])
		assert.Greater(t, size["#k-lawful"], size["#k-stale"])
	})

	t.Run("headings are in order and ids are unique", func(t *testing.T) {
		open(ctx, t, report(t, o))
		last := 0
		for _, level := range ask[[]int](ctx, t, `[...document.querySelectorAll("h1,h2,h3,h4")].map(h => Number(h.tagName[1]))`) {
			assert.LessOrEqual(t, level, last+1)
			last = level
		}
		assert.Empty(t, ask[[]string](ctx, t, `(ids => ids.filter((x, i) => ids.indexOf(x) !== i))([...document.querySelectorAll("[id]")].map(e => e.id))`))
		assert.Empty(t, ask[[]string](ctx, t, `[...document.querySelectorAll("[aria-labelledby]")].map(e => e.getAttribute("aria-labelledby")).filter(id => !document.getElementById(id))`))
	})

	for _, width := range []int64{1280, 360} {
		t.Run(fmt.Sprintf("details are shown to mouse and keyboard, %d wide", width), func(t *testing.T) {
			browsertest.Emulate(ctx, t, width, 800, false)
			open(ctx, t, report(t, o))
			count := ask[int](ctx, t, `document.querySelectorAll(".track > [role=img]").length`)
			require.Equal(t, 6+5+6, count)
			for i := range count {
				at := ask[[]float64](ctx, t, fmt.Sprintf(`(() => {
					const e = document.querySelectorAll(".track > [role=img]")[%d];
					(e.closest(".lane") || e.closest(".plot")).scrollIntoView({block: "end"});
					const shapes = e.querySelectorAll("rect, use:not([href='#past']):not([href='#later'])");
					const r = shapes[shapes.length - 1].getBoundingClientRect();
					return [r.x + r.width / 2, r.y + r.height / 2];
				})()`, i))
				require.NoError(t, chromedp.Do(ctx, chromedp.MouseEvent(input.DispatchMouseEventTypeMouseMoved, at[0], at[1])))
				e := fmt.Sprintf(`document.querySelectorAll(".track > [role=img]")[%d]`, i)
				assertShown(t, ask[details](ctx, t, detailsOf+"("+e+")"), "hover "+ask[string](ctx, t, e+".ariaLabel"))
			}
			require.NoError(t, chromedp.Do(ctx, chromedp.MouseEvent(input.DispatchMouseEventTypeMouseMoved, 1, 1)))

			act(ctx, t, `document.querySelector(".legend").scrollIntoView()`)
			act(ctx, t, `document.querySelector(".track > [role=img]").focus()`)
			for i := range 6 + 5 {
				if i > 0 {
					require.NoError(t, chromedp.Do(ctx, chromedp.KeyEvent("\t")))
				}
				require.Equal(t, i, ask[int](ctx, t, `[...document.querySelectorAll(".track > [role=img]")].indexOf(document.activeElement)`))
				assertShown(t, ask[details](ctx, t, detailsOf+"(document.activeElement)"), "focus "+ask[string](ctx, t, `document.activeElement.ariaLabel`))
			}
			assert.Equal(t, 1, ask[int](ctx, t, `[...document.querySelectorAll(".track > i")].filter(e => getComputedStyle(e, "::after").content !== "none").length`))
		})
	}

	for name, o := range map[string]*audit.Overview{"sample": sample(), "hostile": hostile(), "quiet": quiet()} {
		t.Run("nothing is wider than a telephone: "+name, func(t *testing.T) {
			browsertest.Emulate(ctx, t, 360, 740, false)
			open(ctx, t, report(t, o))
			act(ctx, t, `document.querySelectorAll("details").forEach(d => d.open = true)`)
			assert.LessOrEqual(t, ask[int](ctx, t, `document.documentElement.scrollWidth`), 360)
		})
	}

	t.Run("dark where the reader likes it dark", func(t *testing.T) {
		const background = `getComputedStyle(document.body).backgroundColor`
		browsertest.Emulate(ctx, t, 1280, 800, true)
		open(ctx, t, report(t, o))
		assert.Equal(t, "rgb(15, 20, 26)", ask[string](ctx, t, background))
		browsertest.Emulate(ctx, t, 1280, 800, false)
		assert.Equal(t, "rgb(244, 245, 247)", ask[string](ctx, t, background))
	})

	t.Run("it prints", func(t *testing.T) {
		browsertest.Emulate(ctx, t, 1280, 800, true)
		open(ctx, t, report(t, o))
		pdf := browsertest.PDF(ctx, t)
		assert.True(t, strings.HasPrefix(string(pdf), "%PDF-"))
		assert.Greater(t, len(pdf), 20_000)
	})

	t.Run("hostile text makes no elements, no attributes and no requests", func(t *testing.T) {
		const names = `[...new Set([...document.querySelectorAll("*")].flatMap(e => [e.localName, ...e.getAttributeNames().map(a => e.localName + " " + a)]))]`
		open(ctx, t, report(t, o))
		known := append(ask[[]string](ctx, t, names), "details id", "details class")
		watched.Requests()
		watched.Complaints()
		url := open(ctx, t, report(t, hostile()))
		assert.Subset(t, known, ask[[]string](ctx, t, names))
		assert.Equal(t, []string{url}, watched.Requests())
		assert.Empty(t, watched.Complaints())
		text := ask[string](ctx, t, `document.body.textContent`)
		for _, h := range hostiles {
			assert.Contains(t, text, audit.Printable(h))
		}
	})
	assert.Empty(t, watched.Complaints())
}

// server serves a dashboard whose overview changes.
type server struct {
	mu sync.Mutex
	o  *audit.Overview
	no string // what it answers instead, with status 500
}

func (s *server) set(change func(s *server)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	change(s)
}

func (s *server) start(t *testing.T, every time.Duration) *httptest.Server {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /{$}", func(w http.ResponseWriter, _ *http.Request) {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.no != "" {
			http.Error(w, s.no, http.StatusInternalServerError)
			return
		}
		w.Header().Set("Content-Type", "text/html; charset=utf-8")
		w.Header().Set("Content-Security-Policy", page.DashboardPolicy())
		assert.NoError(t, page.Dashboard(w, s.o, page.Options{Program: "fencecheck v0.9.0", Every: every}))
	})
	mux.HandleFunc("GET "+page.ScriptPath, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/javascript; charset=utf-8")
		_, err := w.Write(page.Live())
		assert.NoError(t, err)
	})
	h := httptest.NewServer(mux)
	t.Cleanup(h.Close)
	return h
}

// refreshed makes the page ask now, and returns what came of it.
const refreshed = `new Promise(done => {
	for (const said of ["writegate:refreshed", "writegate:failed"]) {
		document.addEventListener(said, e => done(e.type), { once: true });
	}
	document.dispatchEvent(new CustomEvent("writegate:refresh"));
})`

const (
	lawfulTile = `document.querySelector("[data-tile=lawful] .n").textContent`
	liveState  = `document.documentElement.dataset.live`
	liveSays   = `document.getElementById("live-says").textContent`
)

func TestDashboardInABrowser(t *testing.T) {
	ctx := browsertest.New(t)
	watched := browsertest.Watch(ctx, t)
	browsertest.Emulate(ctx, t, 1280, 800, false)
	s := &server{o: sample()}
	h := s.start(t, time.Hour) // this test says when
	require.NoError(t, chromedp.Do(ctx, chromedp.Navigate(h.URL+"/")))
	assert.Equal(t, []string{h.URL + "/", h.URL + "/live.js"}, watched.Requests())
	assert.Equal(t, "on", ask[string](ctx, t, liveState))
	assert.Equal(t, "8", ask[string](ctx, t, lawfulTile))

	t.Run("newer numbers come in, and what somebody does stays", func(t *testing.T) {
		fence := fmt.Sprint("t", s.o.Lanes[0].Spans[1].Fence)
		act(ctx, t, `document.getElementById("bins-table").open = true; document.getElementById("`+fence+`").focus(); scrollTo(0, 700)`)
		before := ask[float64](ctx, t, `scrollY`)
		require.Greater(t, before, 600.0)
		s.set(func(s *server) {
			s.o = sample()
			s.o.Refusals.Lawful = 9
			s.o.At = noon.Add(5 * time.Second)
		})
		assert.Equal(t, "writegate:refreshed", ask[string](ctx, t, refreshed))
		assert.Equal(t, "9", ask[string](ctx, t, lawfulTile))
		assert.Equal(t, "2026-11-29 12:00:05.000Z", ask[string](ctx, t, `document.querySelector("main").dataset.at`))
		assert.Equal(t, fence, ask[string](ctx, t, `document.activeElement.id`))
		assert.InDelta(t, before, ask[float64](ctx, t, `scrollY`), 1)
		assert.True(t, ask[bool](ctx, t, `document.getElementById("bins-table").open`))
		assert.False(t, ask[bool](ctx, t, `document.getElementById("checks").open`))
		assert.Equal(t, []string{h.URL + "/"}, watched.Requests())
	})

	t.Run("the focus stays near when its element goes", func(t *testing.T) {
		act(ctx, t, `document.querySelector(".lane .track > i").focus()`)
		s.set(func(s *server) { s.o.Lanes[0].Spans = s.o.Lanes[0].Spans[1:] })
		ask[string](ctx, t, refreshed)
		assert.Equal(t, "lane0", ask[string](ctx, t, `(document.activeElement.closest(".lane") || document.activeElement).id`))
	})

	t.Run("selected text is not taken away", func(t *testing.T) {
		act(ctx, t, `getSelection().selectAllChildren(document.querySelector(".facts"))`)
		act(ctx, t, `document.dispatchEvent(new CustomEvent("writegate:refresh"))`)
		assert.Equal(t, "held", ask[string](ctx, t, liveState))
		act(ctx, t, `getSelection().removeAllRanges()`)
		ask[string](ctx, t, refreshed)
		assert.Equal(t, "on", ask[string](ctx, t, liveState))
	})

	t.Run("it can be paused", func(t *testing.T) {
		act(ctx, t, `document.getElementById("live-pause").click()`)
		assert.Equal(t, "paused", ask[string](ctx, t, liveState))
		assert.Contains(t, ask[string](ctx, t, liveSays), "Paused: what is below was read at 2026-11-29 12:00:05.000Z")
		assert.Equal(t, "writegate:refreshed", ask[string](ctx, t, `new Promise(done => {
			document.addEventListener("writegate:refreshed", e => done(e.type), { once: true });
			document.getElementById("live-pause").click();
		})`))
		assert.Equal(t, "on", ask[string](ctx, t, liveState))
	})
	assert.Empty(t, watched.Complaints())

	t.Run("an error is told, with the time of what is shown", func(t *testing.T) {
		s.set(func(s *server) { s.no = "the database does not answer" })
		assert.Equal(t, "writegate:failed", ask[string](ctx, t, refreshed))
		assert.Equal(t, "gone", ask[string](ctx, t, liveState))
		assert.Equal(t, "No answer since 2026-11-29 12:00:05.000Z: what is below is old (it answered 500: the database does not answer)", ask[string](ctx, t, liveSays))
		s.set(func(s *server) { s.no = "" })
		ask[string](ctx, t, refreshed)
		assert.Equal(t, "on", ask[string](ctx, t, liveState))
	})

	t.Run("a server that is gone is told", func(t *testing.T) {
		h.Close()
		assert.Equal(t, "writegate:failed", ask[string](ctx, t, refreshed))
		assert.Equal(t, "gone", ask[string](ctx, t, liveState))
		assert.Contains(t, ask[string](ctx, t, liveSays), "No answer since 2026-11-29 12:00:05.000Z")
		assert.Equal(t, "9", ask[string](ctx, t, lawfulTile))
		assert.Less(t, ask[float64](ctx, t, `Number(getComputedStyle(document.querySelector("main")).opacity)`), 1.0)
	})
}

func TestTheDashboardAsksByItself(t *testing.T) {
	ctx := browsertest.New(t)
	s := &server{o: sample()}
	h := s.start(t, 100*time.Millisecond)
	require.NoError(t, chromedp.Do(ctx, chromedp.Navigate(h.URL+"/")))
	s.set(func(s *server) {
		s.o = sample()
		s.o.Refusals.Lawful = 12
	})
	assert.Equal(t, "12", ask[string](ctx, t, `new Promise(done => document.addEventListener("writegate:refreshed", () => {
		const n = `+lawfulTile+`;
		if (n === "12") done(n);
	}))`))
}

var screenshots = flag.String("screenshots", "", "write pictures of the sample page to this directory")

func TestScreenshots(t *testing.T) {
	if *screenshots == "" {
		t.Skip("no -screenshots DIR")
	}
	ctx := browsertest.New(t)
	for _, width := range []int64{1280, 360} {
		for mode, dark := range map[string]bool{"light": false, "dark": true} {
			browsertest.Emulate(ctx, t, width, 800, dark)
			open(ctx, t, report(t, sample()))
			browsertest.Screenshot(ctx, t, filepath.Join(*screenshots, fmt.Sprintf("report-%d-%s.png", width, mode)))
		}
	}
}
