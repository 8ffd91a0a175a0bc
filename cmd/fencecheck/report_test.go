//go:build unix

package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/chromedp/chromedp"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/writegate/writegate/internal/browsertest"
	"github.com/writegate/writegate/internal/pgtest"
)

func read(t *testing.T, name string) string {
	t.Helper()
	text, err := os.ReadFile(name)
	require.NoError(t, err)
	return string(text)
}

func TestReportInABrowser(t *testing.T) {
	ctx := browsertest.New(t)
	cfg := pgtest.New(t)
	eventful(t, cfg)
	file := filepath.Join(t.TempDir(), "a report.html")
	r := fencecheck("report", "--html", file, "--since", "1h", "--database-url", url(t, cfg))
	require.Equal(t, exitClean, r.code, r.stderr)
	require.Equal(t, fmt.Sprintf("%s: %d refusals, 1 leases held, 1 overdue\n", file, 7+1+1200+len(hostiles)), r.stdout)
	require.Empty(t, r.stderr)

	watched := browsertest.Watch(ctx, t)
	browsertest.Emulate(ctx, t, 1280, 800, false)
	address := "file://" + strings.ReplaceAll(file, " ", "%20")
	require.NoError(t, chromedp.Do(ctx, chromedp.Navigate(address)))
	drawn(ctx, t, cfg)
	harmless(ctx, t)
	assert.Contains(t, ask[string](ctx, t, `document.querySelector("[aria-labelledby=verify]").textContent`), "rejection-lawful")
	assert.Contains(t, ask[string](ctx, t, `document.querySelector("[aria-labelledby=latest] tbody tr").textContent`), "unknown")
	assert.Contains(t, ask[string](ctx, t, `document.querySelector("[aria-labelledby=latest]").textContent`), "6 of worker-c", "what the row holds now")
	assert.Zero(t, ask[int](ctx, t, `document.scripts.length`))
	pictures(ctx, t)
	assert.Equal(t, []string{address}, watched.Requests())
	assert.Empty(t, watched.Complaints())

	// One lease, and without the checks.
	r = fencecheck("report", "--html", file, "--since", "1h", "--lease", "over", "--no-verify", "--database-url", url(t, cfg))
	require.Equal(t, exitClean, r.code, r.stderr)
	require.NoError(t, chromedp.Do(ctx, chromedp.Navigate(address)))
	assert.Equal(t, []string{"over"}, ask[[]string](ctx, t, `[...document.querySelectorAll(".lane h3")].map(e => e.textContent)`))
	assert.Equal(t, 1200, ask[map[string]int](ctx, t, tilesOf)["refusals"])
	assert.Contains(t, ask[string](ctx, t, `document.querySelector("[aria-labelledby=verify]").textContent`), "Not asked for")
}

// However much there is, the page stays small, says what it has summed up, and has lost nothing of it.
func TestReportOfVeryMuch(t *testing.T) {
	ctx := browsertest.New(t)
	cfg := pgtest.New(t)
	pgtest.Exec(t, cfg, `INSERT INTO fence.term (fence, name, holder, ttl, granted_at, renewals, ended_at, end_reason)
		SELECT i * 2, 'many', 'a holder with a name that is rather long ' || i, '1 s', clock_timestamp() - i * interval '4 s', 0, clock_timestamp() - i * interval '4 s' + interval '1 s', 'expired' FROM generate_series(1, 20000) i;
		INSERT INTO fence.term (fence, name, holder, ttl, granted_at, renewals, ended_at, end_reason)
		SELECT i * 2 + 100000, 'l' || i % 60, 'h' || i, '1 s', clock_timestamp() - i * interval '4 s', 0, clock_timestamp() - i * interval '4 s' + interval '1 s', 'released' FROM generate_series(1, 18000) i;
		INSERT INTO fence.rejection (fence, table_name, row_key, row_key_hash, lease_name, holder, application_name, reason, verdict, first_at, last_at)
		SELECT i, 'app.t' || i % 100, jsonb_build_object('id', i, 'more', repeat('x', 3000)), sha256(i::text::bytea), CASE WHEN i % 2 = 0 THEN 'many' ELSE 'l' || i % 60 END, 'h' || i, repeat('application ', 5), 'stale',
		       CASE WHEN i = 777 THEN 'lawful' ELSE 'stale' END, clock_timestamp() - i * interval '0.8 s', clock_timestamp() - i * interval '0.8 s' FROM generate_series(1, 100000) i`)
	file := filepath.Join(t.TempDir(), "report.html")
	r := fencecheck("report", "--html", file, "--database-url", url(t, cfg))
	require.Equal(t, exitClean, r.code, r.stderr)
	require.Contains(t, r.stdout, "100000 refusals")
	info, err := os.Stat(file)
	require.NoError(t, err)
	assert.Less(t, info.Size(), int64(8<<20))
	t.Logf("%d bytes", info.Size())

	watched := browsertest.Watch(ctx, t)
	require.NoError(t, chromedp.Do(ctx, chromedp.Navigate("file://"+file)))
	assert.Len(t, watched.Requests(), 1)
	assert.Empty(t, watched.Complaints())
	tiles := ask[map[string]int](ctx, t, tilesOf)
	assert.Equal(t, []int{100000, 99999, 1}, []int{tiles["refusals"], tiles["stale"], tiles["lawful"]})
	says := ask[string](ctx, t, `document.querySelector("[aria-labelledby=timelines]")?.textContent || document.body.textContent`)
	found := regexp.MustCompile(`([\d,]+) terms in ([\d,]+) bars, ([\d,]+) refusals in ([\d,]+) marks, of 50 leases\.`).FindStringSubmatch(says)
	require.NotNil(t, found, "it says what is summed up")
	assert.Contains(t, says, fmt.Sprintf("Left out: %d more leases with terms or refusals in this time.", value[int](t, cfg, `SELECT count(DISTINCT name) - 50 FROM fence.term`)))
	number := func(s string) (n int) {
		_, err := fmt.Sscan(strings.ReplaceAll(s, ",", ""), &n)
		require.NoError(t, err)
		return n
	}
	// What the drawn bars and marks say they stand for is what is said of all of them, and of their lease.
	sums := ask[map[string]int](ctx, t, `(() => {
		const n = (s, d) => s ? Number(s[1].replaceAll(",", "")) : d;
		const all = {terms: 0, bars: 0, refusals: 0, marks: 0, lanes: 0};
		for (const lane of document.querySelectorAll(".lane")) {
			let terms = 0, refusals = 0;
			for (const e of lane.querySelectorAll(".track > [role=img]")) {
				if (/^(LAWFUL|stale|expired|unknown): /.test(e.ariaLabel)) {
					refusals += n(e.ariaLabel.match(/\n([\d,]+) refusals? in /), n(e.ariaLabel.match(/\nrefused ([\d,]+) times/), 1));
					all.marks++;
				} else {
					terms += n(e.ariaLabel.match(/^([\d,]+) terms/), 1);
					all.bars++;
				}
			}
			const says = lane.querySelector("figcaption p").textContent.match(/([\d,]+) terms?, ([\d,]+) refusals?/);
			if (n(says) !== terms || Number(says[2].replaceAll(",", "")) !== refusals) throw new Error(lane.textContent + ": " + terms + ", " + refusals);
			all.terms += terms; all.refusals += refusals; all.lanes++;
		}
		return all;
	})()`)
	assert.Equal(t, map[string]int{"terms": number(found[1]), "bars": number(found[2]), "refusals": number(found[3]), "marks": number(found[4]), "lanes": 50}, sums)
	many := ask[[]string](ctx, t, `[...document.querySelectorAll(".lane")].filter(l => l.querySelector("h3").textContent === "many").map(l => l.querySelector("figcaption p").textContent)`)
	assert.Equal(t, []string{fmt.Sprintf("%s terms, 50,000 refusals", "20,000")}, many)
	assert.Less(t, number(found[2]), 50*302)
	assert.Less(t, number(found[4]), 50*102)
	assert.Equal(t, 1, ask[int](ctx, t, `[...document.querySelectorAll(".lane .track > i.lawful")].length`), "one in a hundred thousand is seen")
	assert.Contains(t, ask[string](ctx, t, `document.querySelector("[aria-labelledby=latest]").textContent`), "These are the latest 50 rows of the audit; there are more")
}

// What was there before stays until the new one is complete; and nothing else is left behind.
func TestReportIsWrittenWhollyOrNotAtAll(t *testing.T) {
	cfg := pgtest.New(t)
	eventful(t, cfg)
	dir := t.TempDir()
	file := filepath.Join(dir, "report.html")
	require.NoError(t, os.WriteFile(file, []byte("old"), 0o600))
	only := func(want ...string) {
		t.Helper()
		entries, err := os.ReadDir(dir)
		require.NoError(t, err)
		var names []string
		for _, e := range entries {
			names = append(names, e.Name())
		}
		require.Equal(t, want, names)
	}
	gone := cfg.Copy()
	gone.Database = "nonesuch"
	for name, c := range map[string][]string{
		"no server": {"--database-url", "postgres://me:s3cr3t@127.0.0.1:1/db"}, "no database": {"--database-url", url(t, gone)}, "no schema": {"--database-url", url(t, pgtest.NewEmpty(t))},
	} {
		r := fencecheck(append([]string{"report", "--html", file}, c...)...)
		require.Equal(t, exitCannotCheck, r.code, name)
		require.NotContains(t, r.stderr, "s3cr3t")
		require.Equal(t, "old", read(t, file), name)
	}
	// One that fails in the middle of reading.
	conn, err := pgx.ConnectConfig(context.Background(), cfg)
	require.NoError(t, err)
	defer func() { _ = conn.Close(context.Background()) }()
	_, err = conn.Exec(context.Background(), `BEGIN; LOCK TABLE fence.term IN ACCESS EXCLUSIVE MODE`)
	require.NoError(t, err)
	r := fencecheck("report", "--html", file, "--no-verify", "--statement-timeout", "50ms", "--database-url", url(t, cfg))
	require.Equal(t, exitCannotCheck, r.code)
	require.Contains(t, r.stderr, "57014")
	require.Equal(t, "old", read(t, file))
	_, err = conn.Exec(context.Background(), `ROLLBACK`)
	require.NoError(t, err)
	only("report.html")

	// What cannot be written is an error, whatever is in the way.
	db := "--database-url=" + url(t, cfg)
	full := filepath.Join(dir, "full")
	require.NoError(t, os.MkdirAll(filepath.Join(full, "x"), 0o755))
	for _, name := range []string{filepath.Join(dir, "nonesuch", "r.html"), filepath.Join(file, "r.html"), full} {
		r := fencecheck("report", "--html", name, db)
		require.Equal(t, exitCannotCheck, r.code, name)
		require.Empty(t, r.stdout)
	}
	if os.Geteuid() != 0 { // to whom nothing is forbidden
		require.NoError(t, os.Chmod(dir, 0o500))
		require.Equal(t, exitCannotCheck, fencecheck("report", "--html", file, db).code)
		require.NoError(t, os.Chmod(dir, 0o700))
	}
	require.Equal(t, "old", read(t, file))
	only("full", "report.html")

	// Who has the old one open reads it to its end.
	open, err := os.Open(file)
	require.NoError(t, err)
	defer func() { _ = open.Close() }()
	r = fencecheck("report", "--html", file, db)
	require.Equal(t, exitClean, r.code, r.stderr)
	buffer := make([]byte, 10)
	n, err := open.Read(buffer)
	require.NoError(t, err)
	require.Equal(t, "old", string(buffer[:n]))
	require.True(t, strings.HasSuffix(strings.TrimSpace(read(t, file)), "</html>"))
	info, err := os.Stat(file)
	require.NoError(t, err)
	require.EqualValues(t, 0o644, info.Mode().Perm())
	only("full", "report.html")
}

func TestReportFlags(t *testing.T) {
	cfg := pgtest.New(t)
	eventful(t, cfg)
	execute(t, cfg, `UPDATE fence.rejection SET last_at = '2026-01-02 03:04:05.000006Z', first_at = '2026-01-02 03:04:05Z' WHERE fence = 2`)
	db := "--database-url=" + url(t, cfg)
	tile := func(args ...string) (refusals string, page string) {
		t.Helper()
		r := fencecheck(append([]string{"report", "--html", "-", "--no-verify", db}, args...)...)
		require.Equal(t, exitClean, r.code, r.stderr)
		require.True(t, strings.HasPrefix(r.stdout, "<!doctype html>"), "nothing else on the standard output")
		found := regexp.MustCompile(`data-tile="refusals"><dt>[^<]*</dt><dd class="n">([\d,]+)</dd>`).FindStringSubmatch(r.stdout)
		require.NotNil(t, found)
		return found[1], r.stdout
	}
	for want, c := range map[string][][]string{
		"7": {
			{"--since", "2026-01-02T03:04:05.000006Z", "--until", "2026-01-02T03:04:05.000007Z"}, {"--since", "2026-01-02T04:04:05.000006+01:00", "--until", "2026-01-02 04:05+01:00"},
			{"--since", "2026-01-02T03:04:05.000006Z", "--until", "1h"},
		},
		"0": {
			{"--since", "2026-01-01T00:00:00Z", "--until", "2026-01-02T03:04:05.000006Z"}, {"--since", "2026-01-02T03:04:05.000007Z", "--until", "1h"}, {"--until", "2020-01-01T00:00:00Z", "--since", ""},
		},
		"1,201": {{"--since", "1h", "--until", "210s"}, {"--since", "1h", "--until", "3m30s"}},
	} {
		for _, args := range c {
			got, _ := tile(args...)
			assert.Equal(t, want, got, args)
		}
	}
	all, _ := tile("--since", "")
	assert.Equal(t, fmt.Sprintf("1,%d", 208+len(hostiles)), all)
	_, page := tile("--since", "2026-01-02T03:04:00Z", "--until", "2026-01-02T03:05:00Z")
	assert.Contains(t, page, "2026-01-02 03:04:00.000Z to 2026-01-02 03:05:00.000Z")

	// What is accepted is shown as such, and alarms nobody.
	r := fencecheck("report", "--html", "-", db)
	require.Equal(t, exitClean, r.code, r.stderr)
	require.Contains(t, r.stdout, "fsync-off")
	baseline := filepath.Join(t.TempDir(), "accepted.tsv")
	require.NoError(t, os.WriteFile(baseline, []byte("fsync-off\t*\tonly <here>\n"), 0o600))
	r = fencecheck("report", "--html", "-", "--baseline", baseline, db)
	require.Contains(t, r.stdout, "only &lt;here&gt;")
	r = fencecheck("report", "--html", "-", "--skip", "fsync-off", db)
	require.NotContains(t, r.stdout, `<code>fsync-off</code>`)

	for says, args := range map[string][]string{
		"want --html FILE": {}, "is not before": {"--html", "-", "--since", "1h", "--until", "2h"}, "with its offset": {"--html", "-", "--since", "2024-03-10 02:30"},
		"no check": {"--html", "-", "--only", "nonesuch"}, "unknown flag": {"--html", "-", "--output", "json"}, "unknown command": {"--html", "-", "x"},
		"nonesuch.tsv": {"--html", "-", "--baseline", "nonesuch.tsv"}, "--statement-timeout": {"--html", "-", "--statement-timeout", "-1s"},
	} {
		r := fencecheck(append([]string{"report", db}, args...)...)
		require.Equal(t, exitUsage, r.code, says)
		require.Contains(t, r.stderr, says)
		require.Empty(t, r.stdout)
	}
}

// A standby and a role that may only audit are enough; what they cannot tell is said.
func TestReportNeedsLittle(t *testing.T) {
	cfg := pgtest.New(t)
	eventful(t, cfg)
	role := "wg_" + cfg.Database // roles are the whole server's
	pgtest.Exec(t, cfg, `CREATE ROLE `+role+` LOGIN PASSWORD 'x'`)
	t.Cleanup(func() { pgtest.Exec(t, cfg, `DROP OWNED BY `+role+`; DROP ROLE `+role) })
	as := pgtest.Shared(t).TCP(cfg.Database)
	db := fmt.Sprintf("--database-url=postgres://%s:x@%s:%d/%s?sslmode=disable", role, as.Host, as.Port, cfg.Database)
	r := fencecheck("report", "--html", "-", db)
	require.Equal(t, exitCannotCheck, r.code)
	require.Empty(t, r.stdout)
	require.Contains(t, r.stderr, "GRANT USAGE ON SCHEMA fence TO "+role)
	pgtest.Exec(t, cfg, `SELECT fence.allow('`+role+`', 'auditor')`)
	r = fencecheck("report", "--html", "-", db)
	require.Equal(t, exitClean, r.code, r.stderr)
	require.Contains(t, r.stdout, "worker-c")
	require.Contains(t, r.stdout, "unknown: this role may not read the table")
	require.Contains(t, r.stdout, "app.orders")
	require.NotContains(t, r.stdout, ":x@")
	require.NotContains(t, r.stdout, role)

	server := pgtest.Own(t)
	r = fencecheck("migrate", "up", "--database-url", server.URL("postgres"))
	require.Equal(t, exitClean, r.code, r.stderr)
	eventful(t, server.Config("postgres"))
	standby := server.Standby(t)
	require.Eventually(t, func() bool {
		return value[bool](t, standby.Config("postgres"), `SELECT to_regclass('fence.rejection') IS NOT NULL`) && value[int](t, standby.Config("postgres"), `SELECT count(*) FROM fence.rejection WHERE current_holder <> ''`) == len(hostiles)
	}, time.Minute, 20*time.Millisecond)
	r = fencecheck("report", "--html", "-", "--database-url", standby.URL("postgres"))
	require.Equal(t, exitCannotCheck, r.code)
	require.Contains(t, r.stderr, "6 checks could not run, as the page says")
	require.Contains(t, r.stdout, ", standby</dd>")
	require.Contains(t, r.stdout, "6 of worker-c", "its rows are read too")
	require.Contains(t, r.stdout, "ask the primary", "what it cannot know is not called clean")
	require.Contains(t, r.stdout, "checks did not run")
}
