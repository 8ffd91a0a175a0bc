//go:build linux

// The benchmarks of writegate against the same work without it, and against other leases on PostgreSQL, side by side on
// one real server. As a test, every one of them runs for a moment, so that none rots, and nothing is judged. Measured it is
// by `make bench` (docs/speed.md).
package bench

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"
	"text/tabwriter"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/writegate/writegate/internal/migrate"
	"github.com/writegate/writegate/internal/pgtest"
)

var (
	measure = flag.Bool("measure", false, "measure and judge, for some minutes")
	jsonTo  = flag.String("json", "", "write the results to this file as well")
	only    = flag.String("work", "", "only work that has this in its name")
)

func TestMain(m *testing.M) {
	var err error
	if programs, err = os.MkdirTemp("", "writegate-bench-"); err != nil {
		panic(err)
	}
	code := pgtest.Run(m)
	_ = os.RemoveAll(programs)
	os.Exit(code)
}

// programs is where those are that are built for this.
var programs string

// result is one line of what comes out.
type result struct {
	Work     string   `json:"work"`
	Ratio    *float64 `json:"ratio"`     // to what it is compared with; null where the goal is no ratio
	P99Ratio *float64 `json:"p99_ratio"` // of the 99th percentile of the time that one takes
	Goal     string   `json:"goal"`
	Met      *bool    `json:"met"` // null: for comparison only
	How      string   `json:"how"`
}

// bench is one run of all of it.
type bench struct {
	*testing.T
	ctx     context.Context
	server  *pgtest.Server
	results []result

	pairs int           // of one comparison
	slice time.Duration // for which each side of a pair runs
}

func TestBench(t *testing.T) {
	began := time.Now()
	b := &bench{T: t, ctx: t.Context(), pairs: 1, slice: 20 * time.Millisecond}
	if *measure {
		b.pairs, b.slice = 25, 120*time.Millisecond // many short ones: what else goes on falls on both sides of most
	}
	// Durable, as servers are, and as they come otherwise, but for room enough that no checkpoint falls into one side of a
	// pair alone.
	b.server = pgtest.Own(t, "fsync = on", "max_connections = 500", "shared_buffers = 256MB", "max_wal_size = 8GB",
		"checkpoint_timeout = 30min", "track_functions = none")
	for _, work := range []struct {
		name string
		run  func(*bench)
	}{
		{"Fenced", (*bench).fenced},
		{"Live", (*bench).live},
		{"Live, one lease", (*bench).liveOneLease},
		{"guard", (*bench).guard},
		{"InTx", (*bench).inTx},
		{"UpdateMany", (*bench).updateMany},
		{"acquire and release", (*bench).acquireRelease},
		{"keeping", (*bench).keeping},
		{"hand-over", (*bench).handOver},
		{"take-over", (*bench).takeOver},
		{"zombie", (*bench).zombie},
		{"scale", (*bench).scale},
		{"report", (*bench).report},
	} {
		if !strings.Contains(work.name, *only) {
			continue
		}
		t.Run(strings.ReplaceAll(work.name, " ", "_"), func(t *testing.T) {
			part := *b
			part.T, part.results = t, nil
			work.run(&part)
			b.results = append(b.results, part.results...)
		})
	}
	require.NotEmpty(t, b.results, "-work %q is in the name of none", *only)
	b.print(time.Since(began))
}

// add adds a result, and says it at once.
func (b *bench) add(r result) {
	b.results = append(b.results, r)
	b.Logf("%s: %s", r.Work, r.How)
}

func (b *bench) print(took time.Duration) {
	if !*measure {
		return
	}
	number := func(f *float64) string {
		if f == nil {
			return "-"
		}
		return fmt.Sprintf("%.2f", *f)
	}
	w := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', 0)
	_, _ = fmt.Fprintln(w, "WORK\tRATIO\tP99\tGOAL\tMET\tHOW")
	for _, r := range b.results {
		met := "-"
		if r.Met != nil {
			met = map[bool]string{true: "yes", false: "NO"}[*r.Met]
		}
		_, _ = fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t%s\n", r.Work, number(r.Ratio), number(r.P99Ratio), r.Goal, met, r.How)
	}
	require.NoError(b, w.Flush())
	fmt.Printf("in %v\n", took.Round(time.Second))
	if *jsonTo != "" {
		text, err := json.MarshalIndent(b.results, "", "  ")
		require.NoError(b, err)
		require.NoError(b, os.WriteFile(*jsonTo, append(text, '\n'), 0o644))
	}
}

// database makes one with schema fence and the given SQL in it.
func (b *bench) database(name, sql string) *pgx.ConnConfig {
	b.Helper()
	pgtest.Exec(b, b.server.Config(""), "CREATE DATABASE "+name)
	cfg := b.server.Config(name)
	_, err := migrate.Up(b.ctx, cfg)
	require.NoError(b, err)
	pgtest.Exec(b, cfg, sql)
	pgtest.Exec(b, cfg, "VACUUM ANALYZE")
	return cfg
}

// durability is what a session waits for at a commit.
type durability struct{ name, setting string }

var (
	withFsync    = durability{"fsync", "on"}
	withoutFsync = durability{"synchronous_commit off", "off"}
	durabilities = []durability{withFsync, withoutFsync}
)

func (b *bench) pool(cfg *pgx.ConnConfig, conns int, d durability) *pgxpool.Pool {
	b.Helper()
	return pgtest.Pool(b, cfg, func(c *pgxpool.Config) {
		c.MaxConns, c.MinConns = int32(conns), int32(conns)
		c.ConnConfig.RuntimeParams["synchronous_commit"] = d.setting
	})
}

// sized is n when measuring, and small otherwise.
func sized(n, small int) int {
	if *measure {
		return n
	}
	return small
}

func value[T any](v T) *T { return &v }
