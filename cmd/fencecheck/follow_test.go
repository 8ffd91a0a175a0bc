package main

import (
	"bufio"
	"encoding/json"
	"os"
	"os/exec"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/writegate/writegate/internal/audit"
	"github.com/writegate/writegate/internal/pgtest"
)

// Refusals are shown as they happen, and again when they are repeated, until it is interrupted.
func TestFollow(t *testing.T) {
	cfg := pgtest.New(t)
	refuse := func(key, holder string) {
		pgtest.Exec(t, cfg, `SELECT fence.record_rejection('app.orders', '{"id": "`+key+`"}', 'x', NULL, 2, 'stale', 4, '`+holder+`')`)
	}
	refuse("before", "A")
	self, err := os.Executable()
	require.NoError(t, err)
	cmd := exec.Command(self, "rejections", "--follow", "-o", "jsonl", "--holder", "A", "--since", "1h", "--now", "--database-url", url(t, cfg))
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	cmd.Stderr = os.Stderr
	require.NoError(t, cmd.Start())
	ended := false
	t.Cleanup(func() {
		if !ended {
			_ = cmd.Process.Kill()
			_ = cmd.Wait()
		}
	})
	lines := bufio.NewScanner(out)
	next := func() (r audit.Rejection) {
		t.Helper()
		require.True(t, lines.Scan(), "it ended: %v", lines.Err())
		require.NoError(t, json.Unmarshal(lines.Bytes(), &r))
		return r
	}
	require.Equal(t, `{"id": "before"}`, next().Key)
	refuse("other", "B") // which is not asked for
	refuse("first", "A")
	r := next()
	require.Equal(t, `{"id": "first"}`, r.Key)
	require.Equal(t, "unknown", r.Now.State)
	require.EqualValues(t, 1, r.Count)
	refuse("first", "A")
	r = next()
	require.Equal(t, `{"id": "first"}`, r.Key)
	require.EqualValues(t, 2, r.Count)
	require.NoError(t, cmd.Process.Signal(syscall.SIGINT))
	require.False(t, lines.Scan(), "nothing is shown twice: %s", lines.Text())
	require.NoError(t, cmd.Wait())
	ended = true

	for _, args := range [][]string{{"-o", "json"}, {"--fail"}, {"--until", "1h"}, {"--sort", "count"}} {
		require.Equal(t, exitUsage, fencecheck(append(args, "rejections", "--follow")...).code)
	}
}

// Whoever has read enough closes the pipe; that is no reason to complain, or to go on. (C42)
func TestClosedPipe(t *testing.T) {
	cfg := pgtest.New(t)
	pgtest.Exec(t, cfg, `INSERT INTO fence.rejection (table_name, row_key, row_key_hash, lease_name, fence, reason, verdict, first_at, last_at)
		SELECT 'app.orders', to_jsonb(repeat('x', 100)), int4send(i), 'job', 4, 'stale', 'stale', now(), now() FROM generate_series(1, 3000) i`) // much more than a pipe holds
	self, err := os.Executable()
	require.NoError(t, err)
	for _, form := range forms {
		cmd := exec.Command("/bin/sh", "-c", `"$0" rejections --limit 0 -o "$1" --database-url "$2" | head -1`, self, form, url(t, cfg))
		out, err := cmd.CombinedOutput()
		require.NoError(t, err, form)
		require.NotContains(t, string(out), "fencecheck:", "%s: it does not complain", form)
	}
}
