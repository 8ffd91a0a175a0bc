// Package browsertest looks at pages as a browser does: it starts a real Chromium for a test and ends it with the test.
package browsertest

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"

	"github.com/chromedp/cdproto/cdp"
	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/cdproto/log"
	"github.com/chromedp/cdproto/network"
	"github.com/chromedp/cdproto/runtime"
	"github.com/chromedp/chromedp"
	"github.com/stretchr/testify/require"
)

var names = []string{"chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome"}

// New returns the context of a tab in a browser of the test's own, whose profile is gone afterwards. Without a browser the
// test is skipped, but where CI is true it fails: there, nobody reads what was skipped.
func New(t testing.TB) context.Context {
	t.Helper()
	path := find()
	if path == "" {
		const say = "no browser installed: apt-get install chromium"
		if os.Getenv("CI") == "true" {
			t.Fatal(say)
		}
		t.Skip(say)
	}
	options := append(chromedp.DefaultExecAllocatorOptions[:],
		chromedp.ExecPath(path),
		chromedp.Flag("headless", "new"),
		chromedp.Flag("hide-scrollbars", false), // they take room, as a reader's do
		chromedp.Flag("font-render-hinting", "none"),
		chromedp.DisableGPU,
		chromedp.UserDataDir(t.TempDir()),
	)
	if os.Geteuid() == 0 {
		options = append(options, chromedp.NoSandbox) // Chromium refuses to run as root otherwise
	}
	allocator, end := chromedp.NewExecAllocator(context.Background(), options...)
	ctx, closeTab := chromedp.NewContext(allocator)
	t.Cleanup(func() {
		// Asks the browser to close, and waits until it has: its profile can be removed only then.
		if err := chromedp.Cancel(ctx); err != nil {
			t.Logf("closing the browser: %v", err)
		}
		closeTab()
		end()
	})
	require.NoError(t, chromedp.Do(ctx), "starting %s", path)
	return ctx
}

func find() string {
	for _, name := range names {
		if path, err := exec.LookPath(name); err == nil {
			return path
		}
	}
	return ""
}

// Emulate sets the window's width and height in CSS pixels, and whether the reader prefers dark pages.
func Emulate(ctx context.Context, t testing.TB, width, height int64, dark bool) {
	t.Helper()
	resize(ctx, t, width, height)
	scheme := "light"
	if dark {
		scheme = "dark"
	}
	_, err := chromedp.Call(ctx, emulation.SetEmulatedMedia, emulation.SetEmulatedMediaParams{
		Features: []*emulation.MediaFeature{
			{Name: "prefers-color-scheme", Value: scheme}, {Name: "prefers-reduced-motion", Value: "reduce"},
		},
	})
	require.NoError(t, err)
}

// Watched is what a tab has asked for and complained of.
type Watched struct {
	mu         sync.Mutex
	requests   []string
	complaints []string
}

// Watch begins to note requests, and whatever the console, the log and the scripts complain of.
func Watch(ctx context.Context, t testing.TB) *Watched {
	t.Helper()
	w := &Watched{}
	require.NoError(t, chromedp.Listen(ctx, func(event any) {
		w.mu.Lock()
		defer w.mu.Unlock()
		switch e := event.(type) {
		case *network.EventRequestWillBeSent:
			w.requests = append(w.requests, e.Request.URL)
		case *runtime.EventConsoleAPICalled:
			said := string(e.Type) + ":"
			for _, a := range e.Args {
				said += " " + string(a.Value)
			}
			w.complaints = append(w.complaints, said)
		case *runtime.EventExceptionThrown:
			w.complaints = append(w.complaints, e.ExceptionDetails.Text)
		case *log.EventEntryAdded:
			w.complaints = append(w.complaints, string(e.Entry.Level)+": "+e.Entry.Text+" "+e.Entry.URL)
		}
	}))
	_, err := chromedp.Call(ctx, network.Enable, network.EnableParams{})
	require.NoError(t, err)
	_, err = chromedp.Call(ctx, log.Enable, cdp.Empty{})
	require.NoError(t, err)
	_, err = chromedp.Call(ctx, runtime.Enable, cdp.Empty{})
	require.NoError(t, err)
	return w
}

// Requests returns the addresses that were asked for since the last call.
func (w *Watched) Requests() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	r := w.requests
	w.requests = nil
	return r
}

// Complaints returns what was complained of since the last call.
func (w *Watched) Complaints() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	c := w.complaints
	w.complaints = nil
	return c
}

// Screenshot writes the whole page, as it looks now, to a PNG file.
func Screenshot(ctx context.Context, t testing.TB, file string) {
	t.Helper()
	// The window is made as high as the page: what is off the screen is not drawn, and not photographed by chromedp.FullScreenshot.
	size, err := chromedp.Run(ctx, chromedp.Evaluate[[]int64](`[innerWidth, innerHeight, document.documentElement.scrollHeight]`))
	require.NoError(t, err)
	resize(ctx, t, size[0], size[2])
	const drawn = `new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(true))))`
	_, err = chromedp.Run(ctx, chromedp.Evaluate[bool](drawn, chromedp.EvalAwaitPromise))
	require.NoError(t, err)
	Viewport(ctx, t, file)
	resize(ctx, t, size[0], size[1])
}

// Viewport writes what the window shows, as it looks now, to a PNG file.
func Viewport(ctx context.Context, t testing.TB, file string) {
	t.Helper()
	png, err := chromedp.Run(ctx, chromedp.CaptureScreenshot())
	require.NoError(t, err)
	write(t, file, png)
}

// PDF returns the page as it is printed.
func PDF(ctx context.Context, t testing.TB) []byte {
	t.Helper()
	pdf, err := chromedp.Run(ctx, chromedp.PrintToPDF(chromedp.PDFPreferCSSPageSize()))
	require.NoError(t, err)
	return pdf
}

func resize(ctx context.Context, t testing.TB, width, height int64) {
	t.Helper()
	_, err := chromedp.Call(ctx, emulation.SetDeviceMetricsOverride, emulation.SetDeviceMetricsOverrideParams{
		Width: width, Height: height, DeviceScaleFactor: 1, Mobile: width < 500,
	})
	require.NoError(t, err)
}

func write(t testing.TB, file string, data []byte) {
	t.Helper()
	require.NoError(t, os.MkdirAll(filepath.Dir(file), 0o755))
	require.NoError(t, os.WriteFile(file, data, 0o644))
}
