package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"
	"github.com/mattn/go-runewidth"
	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/writegate/writegate/internal/audit"
	"github.com/writegate/writegate/internal/show"
)

func (a *app) watch() *cobra.Command {
	var every time.Duration
	w := window{since: "1h"}
	cmd := &cobra.Command{
		Use:   "watch",
		Short: "Watch leases and refusals live in the terminal",
		Long: `watch shows who holds which lease, which are overdue, and the latest refusals, and goes on doing so until it is interrupted. When the
database does not answer it says so, and since when, and tries again.

It needs a terminal; fencecheck rejections --follow goes into a pipe, and fencecheck serve is for browsers.`,
		Example: `  fencecheck watch --since 15m`,
		Args:    usageArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := w.check(); err != nil {
				return err
			}
			if every < 100*time.Millisecond {
				return usageError{fmt.Errorf("--every %v: want 100ms or more", every)}
			}
			file, ok := cmd.OutOrStdout().(*os.File)
			if !ok || !term.IsTerminal(int(file.Fd())) {
				return usageError{errors.New("watch needs a terminal: fencecheck rejections --follow goes into a pipe")}
			}
			cfg, err := a.connConfig()
			if err != nil {
				return err
			}
			return a.watchOn(cmd.Context(), file, cfg, w, every)
		},
	}
	cmd.Flags().StringVar(&w.since, "since", w.since, "show refusals from this time on (2026-01-31T08:00:00+01:00), or from this long ago (24h)")
	cmd.Flags().DurationVar(&every, "every", 2*time.Second, "how often to look")
	return cmd
}

// What a terminal is told.
const (
	enterScreen = "\x1b[?1049h\x1b[?25l"
	leaveScreen = "\x1b[?25h\x1b[?1049l"
	home        = "\x1b[H"
	clearLine   = "\x1b[K"
	clearBelow  = "\x1b[J"
)

func (a *app) watchOn(ctx context.Context, file *os.File, cfg *pgx.ConnConfig, w window, every time.Duration) (err error) {
	// The first look is before the screen is taken: what cannot work is said where it stays.
	conn, err := pgx.ConnectConfig(ctx, cfg)
	if err != nil {
		return a.explainConnect(err)
	}
	defer func() {
		if conn != nil {
			_ = conn.Close(context.WithoutCancel(ctx))
		}
	}()
	view, err := a.look(ctx, conn, file, w)
	if err != nil {
		return err
	}
	if _, err := io.WriteString(file, enterScreen); err != nil {
		return err
	}
	defer func() { _, _ = io.WriteString(file, leaveScreen) }()
	answered := time.Now()
	for {
		if err := draw(file, view, ""); err != nil {
			return err
		}
		for {
			select {
			case <-ctx.Done():
				return nil
			case <-time.After(every):
			}
			if conn == nil || conn.IsClosed() {
				conn, err = pgx.ConnectConfig(ctx, cfg)
			}
			if err == nil {
				var next string
				bounded, cancel := context.WithTimeout(ctx, max(10*time.Second, every))
				next, err = a.look(bounded, conn, file, w)
				cancel()
				if err == nil {
					view, answered = next, time.Now()
					break
				}
			}
			if ctx.Err() != nil {
				return nil
			}
			trouble := fmt.Sprintf("NO ANSWER since %s ago, what is below is as old: %v", time.Since(answered).Round(time.Second), a.explainConnect(err))
			if err := draw(file, view, trouble); err != nil {
				return err
			}
			err = nil
		}
	}
}

// look reads what is shown.
func (a *app) look(ctx context.Context, conn *pgx.Conn, file *os.File, w window) (string, error) {
	q := audit.Bounded(conn, a.timeout)
	if _, err := audit.CheckSchema(ctx, q, conn.Config().Database, "lease", "rejection"); err != nil {
		return "", err
	}
	var now time.Time
	if err := q.QueryRow(ctx, `SELECT clock_timestamp()`).Scan(&now); err != nil {
		return "", err
	}
	since, until, err := w.at(now)
	if err != nil {
		return "", err
	}
	counts, err := audit.CountLeases(ctx, q)
	if err != nil {
		return "", err
	}
	_, height, err := term.GetSize(int(file.Fd()))
	if err != nil || height < 12 {
		height = 12
	}
	room := (height - 9) / 2
	troubled, moreTroubled, err := audit.Leases(ctx, q, audit.LeaseFilter{Overdue: true, Limit: room})
	if err != nil {
		return "", err
	}
	held, moreHeld, err := audit.Leases(ctx, q, audit.LeaseFilter{State: "held", Limit: max(room-len(troubled), 1)})
	if err != nil {
		return "", err
	}
	leases := troubled
	for _, l := range held {
		if !l.Late { // which is among those above
			leases = append(leases, l)
		}
	}
	f := audit.Filter{Since: since, Until: until, Limit: room}
	found, moreFound, err := audit.Rejections(ctx, q, f)
	if err != nil {
		return "", err
	}
	f.Limit = 1
	f.Verdict = "lawful"
	lawful, _, err := audit.Rejections(ctx, q, f)
	if err != nil {
		return "", err
	}
	screen := a.screen(file)
	var b strings.Builder
	fmt.Fprintf(&b, "fencecheck watch  %s  database %s  (Ctrl-C ends)\n", audit.When(now), audit.Printable(conn.Config().Database))
	fmt.Fprintf(&b, "%d leases held, %d overdue, %d free\n", counts.Held, counts.Overdue, counts.Free)
	if len(lawful) > 0 {
		b.WriteString(screen.Alarm("A LAWFUL HOLDER WAS REFUSED: fencecheck rejections --verdict lawful"))
	}
	b.WriteString("\n")
	if err := show.Leases(leases).Write(&b, screen); err != nil {
		return "", err
	}
	if moreTroubled || moreHeld {
		b.WriteString("… there are more: fencecheck leases\n")
	}
	b.WriteString("\n")
	if len(found) == 0 {
		b.WriteString("No write was refused since " + audit.When(since) + ".\n")
	} else if err := show.Rejections(found).Write(&b, screen); err != nil {
		return "", err
	}
	if moreFound {
		b.WriteString("… there are more: fencecheck rejections\n")
	}
	return b.String(), nil
}

// draw puts a view on the screen in one write, without a flicker, and as many lines of it as there are.
func draw(file *os.File, view, trouble string) error {
	width, height, err := term.GetSize(int(file.Fd()))
	if err != nil {
		width, height = 80, 24
	}
	lines := strings.Split(strings.TrimSuffix(view, "\n"), "\n")
	if trouble != "" {
		lines = append([]string{runewidth.Truncate(audit.Printable(trouble), width, "…")}, lines...)
	}
	if len(lines) > height {
		lines = lines[:height]
	}
	var b strings.Builder
	b.WriteString(home)
	for i, line := range lines {
		b.WriteString(clearLine)
		b.WriteString(fit(line, width))
		if i < len(lines)-1 {
			b.WriteString("\r\n")
		}
	}
	b.WriteString(clearBelow)
	_, err = io.WriteString(file, b.String())
	return err
}

// fit returns what of a line fits into so many columns: one that is wider would go on in the next, and push the first off the
// screen.
func fit(line string, width int) string {
	used := 0
	for i := 0; i < len(line); {
		if line[i] == '\x1b' { // a style, which takes no room
			end := strings.IndexByte(line[i:], 'm')
			if end < 0 {
				return line[:i]
			}
			i += end + 1
			continue
		}
		r, n := utf8.DecodeRuneInString(line[i:])
		if used += runewidth.RuneWidth(r); used > width {
			return line[:i] + "\x1b[0m"
		}
		i += n
	}
	return line
}
