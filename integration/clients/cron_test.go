//go:build unix

package clients

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/writegate/writegate/internal/pgtest"
)

// importScript is the script of docs/schedulers.md, as a file that cron would run.
func importScript(t *testing.T) string {
	t.Helper()
	page, err := os.ReadFile("../../docs/schedulers.md")
	require.NoError(t, err)
	found := regexp.MustCompile("(?ms)^```sh\n(#!/bin/sh\n.*?)^```$").FindSubmatch(page)
	require.NotNil(t, found)
	script := filepath.Join(t.TempDir(), "orders-import")
	require.NoError(t, os.WriteFile(script, found[1], 0o700)) //nolint:gosec // to be executed
	return script
}

// cron runs the script. The long part of it, which there is date, is in a directory before the system's: it prints what is
// imported, and waits for a line in the file atWork, if it is to be held up.
type cron struct {
	script, bin, role string
}

func newCron(t *testing.T, role string) *cron {
	t.Helper()
	_, err := exec.LookPath("psql")
	require.NoError(t, err, "psql comes with PostgreSQL's client (on Debian: apt-get install postgresql-client)")
	c := &cron{script: importScript(t), bin: t.TempDir(), role: role}
	require.NoError(t, os.WriteFile(filepath.Join(c.bin, "date"), []byte("#!/bin/sh\n"+
		`if [ -n "$AT_WORK" ]; then read -r line <"$AT_WORK"; fi; echo "by $HOLDER"`+"\n"), 0o700)) //nolint:gosec // to be executed
	return c
}

func (c *cron) run(t *testing.T, cfg *pgx.ConnConfig, holder, atWork string) *process {
	t.Helper()
	cmd := exec.Command(c.script)
	cmd.Env = append(os.Environ(), "PATH="+c.bin+string(os.PathListSeparator)+os.Getenv("PATH"), "PGOPTIONS=-c role="+c.role,
		"HOLDER="+holder, "AT_WORK="+atWork, fmt.Sprintf("TTL=%v", ttl))
	return start(t, cfg, cmd)
}

// Cron starts a script on two machines. The first is stopped in its long part for longer than its lease lasts, the second takes
// over, and the first one's write is refused, with a status that cron can see, and on record.
func TestCronScriptIsStopped(t *testing.T) {
	t.Parallel()
	cfg := pgtest.New(t)
	role := "wg_" + cfg.Database
	pgtest.Exec(t, cfg, `CREATE SCHEMA app; CREATE TABLE app.orders (id int PRIMARY KEY, v text NOT NULL); INSERT INTO app.orders VALUES (1, 'first');
		SELECT fence.protect('app.orders', guard => 'enforce'); CREATE ROLE `+role+`; SELECT fence.allow('`+role+`', 'holder');
		GRANT USAGE ON SCHEMA app TO `+role+`; GRANT SELECT, UPDATE ON app.orders TO `+role)
	t.Cleanup(func() { pgtest.Exec(t, cfg, `DROP OWNED BY `+role+`; DROP ROLE `+role) })
	pool := pgtest.Pool(t, cfg)
	c := newCron(t, role)

	// While somebody is at it there is nothing to do, and nothing to say.
	pgtest.Exec(t, cfg, `SELECT fence.acquire('orders-import', 'somebody', '1 hour', '11111111-1111-4111-8111-111111111111')`)
	p := c.run(t, cfg, "C", "")
	require.Equal(t, 75, p.wait(), &p.err)
	require.Empty(t, p.err.String())
	require.Equal(t, "first", query[string](t, pool, `SELECT v FROM app.orders`))
	pgtest.Exec(t, cfg, `SELECT fence.release('orders-import', '11111111-1111-4111-8111-111111111111')`)

	atWork := filepath.Join(t.TempDir(), "at-work")
	require.NoError(t, syscall.Mkfifo(atWork, 0o600))
	a := c.run(t, cfg, "A", atWork)
	opened := make(chan *os.File, 1)
	go func() {
		if f, err := os.OpenFile(atWork, os.O_WRONLY, 0); err == nil { // once it reads
			opened <- f
		}
	}()
	var goOn *os.File
	select {
	case goOn = <-opened:
	case <-a.ended:
		require.Fail(t, "it has ended", a.err.String())
	case <-time.After(patience):
		require.Fail(t, "it is not at work")
	}
	a.signal(syscall.SIGSTOP)
	eventually(t, pool, `SELECT expires_at < clock_timestamp() FROM fence.lease`)

	b := c.run(t, cfg, "B", "")
	require.Equal(t, 0, b.wait(), &b.err)
	require.Empty(t, b.err.String(), "cron would send a mail")
	const row = `SELECT format('%s, %s', v, last_fence) FROM app.orders`
	require.Equal(t, "imported by B, 6", query[string](t, pool, row))

	a.signal(syscall.SIGCONT)
	_, err := goOn.WriteString("go on\n")
	require.NoError(t, err)
	require.NoError(t, goOn.Close())
	require.Equal(t, 3, a.wait(), &a.err)
	require.Contains(t, a.err.String(), "WG005")
	require.Equal(t, "imported by B, 6", query[string](t, pool, row))
	require.Equal(t, `app.orders {"id": 1}: superseded, A 4, row is B 6; verdict stale, 1`, query[string](t, pool, rejectionsSQL))
	require.Equal(t, "somebody released, A expired, B released",
		query[string](t, pool, `SELECT string_agg(holder || ' ' || end_reason, ', ' ORDER BY fence) FROM fence.term`), "A has not ended B's")
}
