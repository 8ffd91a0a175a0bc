// Package model checks writegate's protocol, as protocol.pml has it, in every order of its steps; docs/model.md tells more.
package model

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// The parts that are searched to the end, each small enough for that.
var parts = map[string][]string{
	"lease":     {"LEASE"},
	"rows":      {"ROWS"},
	"promotion": {"FAIL", "HOLDERS=2", "DRAWS=3", "PROMOTIONS=2", "CRASHES=0"},
	"crash":     {"FAIL", "HOLDERS=2", "DRAWS=2", "PROMOTIONS=1", "CRASHES=1"},
}

// The protocol keeps all its properties.
func TestProtocol(t *testing.T) {
	for part := range parts {
		t.Run(part, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			report := verify(t, dir, "-O2", parts[part])
			if trail, err := os.ReadFile(filepath.Join(dir, "protocol.pml.trail")); err == nil {
				require.NotEmpty(t, trail)
				how := run(t, dir, "spin", append([]string{"-t", "-p"}, defines(parts[part])...)...)
				t.Fatalf("the protocol is broken:\n%s\nby this:\n%s", report, how)
			}
			require.Regexp(t, `(?m)errors: 0$`, report)
			require.NotContains(t, report, "max search depth too small")
			require.NotContains(t, report, "out of memory")
			require.NotContains(t, report, "Search not completed")
			t.Log(regexp.MustCompile(`\d+ states, stored`).FindString(report), part)
		})
	}
}

// Each rule is needed: without it the property meant for it breaks.
func TestMutants(t *testing.T) {
	for _, m := range []struct{ mutant, part, property string }{
		{"M_CLOCK_EARLY", "lease", "short_grant"},
		{"M_CLOCK_EARLY", "lease", "expired_passes"},
		{"M_LIVE_NO_LOCK", "lease", "newer_grant"},
		{"M_RENEW_BY_NAME", "lease", "two_live"},
		{"M_RELEASE_BY_NAME", "lease", "two_live"},
		{"M_DRAW_EARLY M_NO_SEEN", "lease", "lease_falls"},
		{"M_DRAW_EARLY M_NO_SEEN", "lease", "lawful_refused"},
		{"M_CACHE M_NO_SEEN", "lease", "lease_falls"},
		{"M_NO_PREDICATE", "rows", "stale_overwrites"},
		{"M_NO_PREDICATE", "rows", "row_falls"},
		{"M_GREATER", "rows", "stale_overwrites"},
		{"M_ONCE_EQUAL", "rows", "applied_twice"},
		{"M_SEAL", "rows", "read_after_seal"},
		{"M_SEAL_TO_FENCE", "rows", "told_applied"},
		{"M_NO_TOMBSTONE", "rows", "deleted_back"},
		{"M_FLOOR_EARLY", "rows", "deleted_back"},
		{"M_NO_JUMP", "promotion", "fence_shared"},
		{"M_NO_JUMP", "promotion", "lost_wins"},
		{"M_NO_JUMP", "promotion", "lawful_refused"},
		{"M_JUMP_COUNTED", "promotion", "fence_shared"},
		{"M_ASYNC", "crash", "fence_shared"},
	} {
		t.Run(m.mutant+"/"+m.property, func(t *testing.T) {
			t.Parallel()
			settings := append(strings.Fields(m.mutant), "ONLY="+m.property)
			report := verify(t, t.TempDir(), "-O0", append(settings, parts[m.part]...))
			require.Regexp(t, `(?m)assertion violated `+m.property+` `, report)
		})
	}
}

// What the properties are about does happen in the search.
func TestReached(t *testing.T) {
	for goal, part := range map[string]string{
		"takeover": "lease", "renewed": "lease", "renewal_refused": "lease", "late_release": "lease",
		"live_applied": "lease", "live_refused": "lease",
		"stale_refused": "rows", "told_again": "rows", "sealed_refuses": "rows", "sealed_written": "rows",
		"insert_refused": "rows", "back_by_newer": "rows",
		"promoted_grant": "promotion", "lost_written": "promotion", "lost_refused": "promotion", "second_jump": "promotion",
	} {
		t.Run(goal, func(t *testing.T) {
			t.Parallel()
			report := verify(t, t.TempDir(), "-O0", append([]string{"GOAL=" + goal}, parts[part]...))
			require.Regexp(t, `(?m)assertion violated `+goal+` `, report)
		})
	}
}

// verify searches the model with these settings and returns pan's report.
func verify(t *testing.T, dir, optimize string, settings []string) string {
	t.Helper()
	for _, tool := range []string{"spin", "gcc"} {
		if _, err := exec.LookPath(tool); err != nil {
			want := fmt.Sprintf("want %s, to check the model of the protocol: it is in Debian's package of that name", tool)
			require.NotEqual(t, "true", os.Getenv("CI"), want)
			t.Skip(want)
		}
	}
	source, err := os.ReadFile("protocol.pml")
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "protocol.pml"), source, 0o600))
	run(t, dir, "spin", append([]string{"-a"}, defines(settings)...)...)
	run(t, dir, "gcc", "-w", optimize, "-DSAFETY", "-DCOLLAPSE", "-DMEMLIM=1000", "-o", "pan", "pan.c")
	return run(t, dir, "./pan", "-m20000", "-w20", "-n")
}

func defines(settings []string) []string {
	var args []string
	for _, s := range settings {
		args = append(args, "-D"+s)
	}
	return append(args, "protocol.pml")
}

func run(t *testing.T, dir, name string, args ...string) string {
	t.Helper()
	// So that a search that does not end is ended; none takes a tenth of this.
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir = dir
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s %s\n%s", name, strings.Join(args, " "), out)
	return string(out)
}
