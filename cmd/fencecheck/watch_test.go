//go:build unix

package main

import (
	"fmt"
	neturl "net/url"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/creack/pty"
	"github.com/mattn/go-runewidth"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/writegate/writegate/internal/audit"
	"github.com/writegate/writegate/internal/pgtest"
)

// glass is what a terminal shows of what it is told. It knows what watch is to tell it, and notes everything else.
type glass struct {
	mu          sync.Mutex
	cols, rows  int
	cells       [][]string
	x, y        int
	other       bool // the alternate screen
	hidden      bool // the cursor
	rest        string
	bad         []string
	scrolled    int // lines that were lost at the top of the alternate screen
	entered     int
	normal      string // what was written outside the alternate screen
	everWritten strings.Builder
}

const covered = "\x00" // by the wide character before it

func newGlass(cols, rows int) *glass {
	g := &glass{cols: cols, rows: rows}
	g.clear()
	return g
}

func (g *glass) clear() {
	g.cells = make([][]string, g.rows)
	for i := range g.cells {
		g.cells[i] = make([]string, g.cols)
	}
	g.x, g.y = 0, 0
}

var escape = regexp.MustCompile(`^\x1b\[([?0-9;]*)([A-Za-z])`)

// Write takes what comes in any pieces.
func (g *glass) Write(p []byte) (int, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.everWritten.Write(p)
	s := g.rest + string(p)
	for s != "" {
		if s[0] == '\x1b' {
			m := escape.FindStringSubmatch(s)
			if m == nil && regexp.MustCompile(`^\x1b(\[[?0-9;]*)?$`).MatchString(s) {
				break // the rest is to come
			}
			if m == nil {
				g.bad = append(g.bad, s[:min(len(s), 20)])
				s = s[1:]
				continue
			}
			g.obey(m[1], m[2])
			s = s[len(m[0]):]
			continue
		}
		if !utf8.FullRuneInString(s) {
			break
		}
		r, n := utf8.DecodeRuneInString(s)
		s = s[n:]
		g.put(r)
	}
	g.rest = s
	return len(p), nil
}

func (g *glass) obey(parameters, command string) {
	switch parameters + command {
	case "?1049h":
		g.other = true
		g.entered++
		g.clear()
	case "?1049l":
		g.other = false
		g.clear()
	case "?25l":
		g.hidden = true
	case "?25h":
		g.hidden = false
	case "H":
		g.x, g.y = 0, 0
	case "K":
		for x := min(g.x, g.cols); x < g.cols; x++ {
			g.cells[g.y][x] = ""
		}
	case "J":
		for x := min(g.x, g.cols); x < g.cols; x++ {
			g.cells[g.y][x] = ""
		}
		for y := g.y + 1; y < g.rows; y++ {
			g.cells[y] = make([]string, g.cols)
		}
	default:
		if command != "m" {
			g.bad = append(g.bad, "ESC["+parameters+command)
		}
	}
}

func (g *glass) put(r rune) {
	if !g.other && r != '\r' {
		g.normal += string(r)
	}
	switch {
	case r == '\r':
		g.x = 0
	case r == '\n':
		g.down()
	case r == utf8.RuneError || audit.Printable(string(r)) != string(r):
		g.bad = append(g.bad, fmt.Sprintf("%U", r))
	default:
		w := runewidth.RuneWidth(r)
		if g.x+w > g.cols {
			g.x = 0
			g.down()
		}
		if w == 0 && g.x > 0 {
			g.cells[g.y][g.x-1] += string(r)
			return
		}
		g.cells[g.y][g.x] = string(r)
		if g.x += w; w == 2 {
			g.cells[g.y][g.x-1] = covered
		}
	}
}

func (g *glass) down() {
	if g.y++; g.y == g.rows {
		g.y--
		g.cells = append(g.cells[1:], make([]string, g.cols))
		if g.other {
			g.scrolled++
		}
	}
}

func (g *glass) lines() []string {
	g.mu.Lock()
	defer g.mu.Unlock()
	var lines []string
	for _, row := range g.cells {
		var line strings.Builder
		for _, c := range row {
			switch c {
			case "":
				line.WriteByte(' ')
			case covered:
			default:
				line.WriteString(c)
			}
		}
		lines = append(lines, strings.TrimRight(line.String(), " "))
	}
	return lines
}

func (g *glass) shows() string { return strings.Join(g.lines(), "\n") }

func (g *glass) clean(t *testing.T) {
	t.Helper()
	g.mu.Lock()
	defer g.mu.Unlock()
	assert.Empty(t, g.bad, "told the terminal what only it may tell itself")
	assert.Zero(t, g.scrolled, "more than there is room for")
}

// watching is fencecheck watch at a terminal.
type watching struct {
	*glass
	t     *testing.T
	pty   *os.File
	cmd   *exec.Cmd
	ended chan struct{}
}

func startWatch(t *testing.T, cols, rows int, args ...string) *watching {
	t.Helper()
	w := &watching{glass: newGlass(cols, rows), t: t, cmd: command(t, append([]string{"watch", "--every", "100ms"}, args...)...), ended: make(chan struct{})}
	w.cmd.Env = append(w.cmd.Env, "TERM=xterm-256color")
	var err error
	w.pty, err = pty.StartWithSize(w.cmd, &pty.Winsize{Rows: uint16(rows), Cols: uint16(cols)})
	require.NoError(t, err)
	read := make(chan struct{})
	go func() {
		defer close(read)
		for buffer := make([]byte, 4096); ; {
			n, err := w.pty.Read(buffer)
			_, _ = w.Write(buffer[:n])
			if err != nil {
				return
			}
		}
	}()
	go func() {
		_ = w.cmd.Wait()
		<-read // all that it has written
		close(w.ended)
	}()
	t.Cleanup(func() {
		_ = w.cmd.Process.Kill()
		<-w.ended
		_ = w.pty.Close()
	})
	return w
}

// until waits for the screen to be as it should.
func (w *watching) until(what string, is func(screen string) bool) {
	w.t.Helper()
	for deadline := time.Now().Add(patience); !is(w.shows()); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			require.Fail(w.t, "the screen never had "+what, w.shows())
		}
	}
}

func (w *watching) untilShown(texts ...string) {
	w.t.Helper()
	for _, text := range texts {
		w.until(text, func(s string) bool { return strings.Contains(s, text) })
	}
}

func (w *watching) restored() {
	w.t.Helper()
	<-w.ended
	assert.Equal(w.t, exitClean, w.cmd.ProcessState.ExitCode())
	assert.False(w.t, w.other, "the screen that was there before")
	assert.False(w.t, w.hidden, "the cursor")
	assert.Equal(w.t, 1, w.entered)
	assert.Empty(w.t, strings.Trim(strings.ReplaceAll(w.normal, "^C", ""), "\n"), "nothing is left on it")
	w.clean(w.t)
}

func TestWatch(t *testing.T) {
	cfg := pgtest.New(t)
	eventful(t, cfg)
	w := startWatch(t, 250, 60, "--database-url", url(t, cfg), "--since", "1h")
	w.untilShown("fencecheck watch", cfg.Database, "1 leases held, 1 overdue, 1 free", "A LAWFUL HOLDER WAS REFUSED", "nightly", "worker-c", "overdue", "worker-d", "app.orders", "1200")
	for _, h := range hostiles {
		w.until(audit.Printable(h)[:8], func(s string) bool {
			return strings.Contains(strings.ReplaceAll(s, "\n", ""), string([]rune(audit.Printable(h))[:4]))
		})
	}
	w.clean(t)

	// It goes on looking.
	refusal(t, cfg, 4, "nightly", "worker-b", "the new one", `{"id": 9}`, "stale", 31337, "0")
	w.untilShown("the new one", "31337")
	execute(t, cfg, `SELECT fence.acquire('the new lease', 'somebody new', '1 hour', gen_random_uuid())`)
	w.untilShown("2 leases held", "the new lease", "somebody new")
	execute(t, cfg, `UPDATE fence.lease SET released_at = clock_timestamp() WHERE name = 'over'`)
	w.untilShown("2 leases held, 0 overdue, 2 free")
	execute(t, cfg, `DELETE FROM fence.rejection`)
	w.untilShown("No write was refused since ")
	w.until("an end of what is gone", func(s string) bool { return !strings.Contains(s, "LAWFUL") && !strings.Contains(s, "31337") })
	_, err := w.pty.WriteString("\x03") // as Ctrl-C does
	require.NoError(t, err)
	w.restored()

	for _, s := range []syscall.Signal{syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP} {
		w := startWatch(t, 120, 30, "--database-url", url(t, cfg))
		w.untilShown("fencecheck watch")
		require.NoError(t, w.cmd.Process.Signal(s))
		w.restored()
	}
}

// However small the terminal and however much there is, what matters most is at its top, and nothing runs over.
func TestWatchFitsTheTerminal(t *testing.T) {
	cfg := pgtest.New(t)
	eventful(t, cfg)
	pgtest.Exec(t, cfg, `INSERT INTO fence.lease (name, fence, holder, ttl, granted_at, renewed_at, expires_at)
		SELECT 'lease number ' || i || repeat(' and more', 10), i, '漢字のホルダー ' || i, '1 hour', clock_timestamp(), clock_timestamp(), clock_timestamp() + interval '1 hour' FROM generate_series(1000, 1100) i`)
	for _, size := range [][2]int{{80, 24}, {100, 40}, {60, 15}, {40, 10}, {40, 5}, {200, 12}} {
		t.Run(fmt.Sprint(size[0], "x", size[1]), func(t *testing.T) {
			w := startWatch(t, size[0], size[1], "--database-url", url(t, cfg))
			w.untilShown("fencecheck watch")
			for range 2 { // two more drawings, each told by a count that changes
				n := value[int](t, cfg, `SELECT count(*) FROM fence.lease WHERE released_at IS NOT NULL`)
				execute(t, cfg, `UPDATE fence.lease SET released_at = clock_timestamp() WHERE name = (SELECT name FROM fence.lease WHERE released_at IS NULL AND fence >= 1000 LIMIT 1)`)
				w.until("another count", func(s string) bool {
					return strings.Contains(strings.ReplaceAll(s, "\n", ""), fmt.Sprint(n+1, " free"))
				})
				assert.True(t, strings.HasPrefix(w.lines()[0], "fencecheck watch"), w.shows())
			}
			require.NoError(t, w.cmd.Process.Signal(os.Interrupt))
			w.restored()
		})
	}
}

// A database that does not answer is told, with what was known; and so is that it is back. Its name is text, too.
func TestWatchWhileTheDatabaseIsGone(t *testing.T) {
	server := pgtest.Own(t)
	const name = "evil\x1b[31m\u202edb\n"
	admin := server.TCP("postgres")
	execute(t, admin, `CREATE DATABASE "`+name+`"`)
	cfg := server.TCP(name)
	dsn := fmt.Sprintf("postgres://%s:%s@%s:%d/%s?sslmode=disable", cfg.User, cfg.Password, cfg.Host, cfg.Port, neturl.PathEscape(name))
	r := fencecheck("migrate", "up", "--database-url", dsn)
	require.Equal(t, exitClean, r.code, r.stderr)
	eventful(t, cfg)
	w := startWatch(t, 150, 40, "--database-url", dsn, "--since", "1h")
	w.untilShown("nightly", "worker-c", audit.Printable(name))
	assert.NotContains(t, w.shows(), "NO ANSWER")
	for range 2 {
		server.Halt(t, "fast")
		w.untilShown("NO ANSWER since ")
		assert.True(t, strings.HasPrefix(w.lines()[0], "NO ANSWER since "), w.shows())
		assert.Contains(t, w.shows(), "worker-c", "what was known is still shown")
		assert.True(t, strings.HasPrefix(w.lines()[1], "fencecheck watch"), w.shows())
		server.Restart(t, "fast")
		w.until("an answer again", func(s string) bool { return strings.HasPrefix(s, "fencecheck watch") })
		assert.NotContains(t, w.shows(), "NO ANSWER")
	}
	server.Halt(t, "immediate")
	w.untilShown("NO ANSWER since ")
	_, err := w.pty.WriteString("\x03")
	require.NoError(t, err)
	w.restored()
	assert.NotContains(t, w.everWritten.String(), cfg.Password)
}

func TestWatchRefuses(t *testing.T) {
	cfg := pgtest.New(t)
	db := "--database-url=" + url(t, cfg)
	for says, args := range map[string][]string{
		"watch needs a terminal": {}, "want 100ms or more": {"--every", "1ms"}, "with its offset": {"--since", "2024-03-10 02:30"}, "unknown command": {"x"}, "unknown flag": {"--until", "2h"},
	} {
		r := fencecheck(append([]string{"watch", db}, args...)...)
		require.Equal(t, exitUsage, r.code, says)
		require.Contains(t, r.stderr, says)
		require.Empty(t, r.stdout)
	}
	// Into a pipe and into a file, as a process.
	cmd := command(t, "watch", db)
	out, err := cmd.CombinedOutput()
	require.Error(t, err)
	require.Equal(t, exitUsage, cmd.ProcessState.ExitCode())
	require.Contains(t, string(out), "fencecheck rejections --follow goes into a pipe")
	file, err := os.CreateTemp(t.TempDir(), "")
	require.NoError(t, err)
	defer func() { _ = file.Close() }()
	cmd = command(t, "watch", db)
	cmd.Stdout = file
	require.Error(t, cmd.Run())
	require.Equal(t, exitUsage, cmd.ProcessState.ExitCode())
	require.Empty(t, read(t, file.Name()))

	// What cannot work is said where it stays: the screen is not taken.
	for says, dsn := range map[string]string{"127.0.0.1:1": "postgres://me:s3cr3t@127.0.0.1:1/db", "fencecheck migrate up": url(t, pgtest.NewEmpty(t))} {
		w := startWatch(t, 100, 30, "--database-url", dsn)
		<-w.ended
		require.Equal(t, exitCannotCheck, w.cmd.ProcessState.ExitCode())
		require.Zero(t, w.entered)
		require.Contains(t, strings.ReplaceAll(w.shows(), "\n", ""), says)
		require.NotContains(t, w.everWritten.String(), "s3cr3t")
	}
}
