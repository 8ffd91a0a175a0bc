//go:build linux

package bench

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/writegate/writegate/fencedb"
)

// scaleSQL fills a database as years of use would. The fences are what the sequence has passed.
const scaleSQL = `
CREATE SCHEMA app;
CREATE TABLE app.once (id int PRIMARY KEY, v text NOT NULL, last_fence bigint NOT NULL DEFAULT 0) WITH (fillfactor = 70);
INSERT INTO app.once (id, v) SELECT i, 'as it was' FROM generate_series(0, %[2]d - 1) i;
SELECT fence.protect('app.once');
SELECT setval('fence.fence_seq', 2 * %[1]d);
INSERT INTO fence.lease (name, fence, token, holder, ttl, granted_at, renewed_at, expires_at, released_at)
SELECT 'lease-' || i, 2 * i + 2, gen_random_uuid(), 'host/' || i %% 100, '30 s', now() - interval '1 day', now() - interval '1 day', now() - interval '1 day', now() - interval '1 day'
  FROM generate_series(0, %[1]d - 1) i;
INSERT INTO fence.term (fence, name, holder, ttl, granted_at, ended_at, end_reason)
SELECT l.fence, l.name, l.holder, l.ttl, l.granted_at, l.expires_at, 'released' FROM fence.lease l;
INSERT INTO fence.rejection (table_name, row_key, row_key_hash, lease_name, fence, reason, verdict, current_fence, holder, current_holder, count, first_at, last_at)
SELECT 'app.once', jsonb_build_object('id', i %% %[2]d), sha256(int4send(i)), 'lease-' || i, 2 * i + 2, 'stale', 'stale', 2 * i + 4, 'host/' || i %% 100, 'host/' || i %% 7, 1 + i %% 5,
       now() - make_interval(secs => i), now() - make_interval(secs => i / 2)
  FROM generate_series(0, %[1]d - 1) i;`

var (
	scaled     sync.Map // databases by their size: they take a while to fill
	fencecheck = sync.OnceValues(func() (string, error) {
		program := filepath.Join(programs, "fencecheck")
		cmd := exec.Command("go", "build", "-o", program, "./cmd/fencecheck")
		cmd.Dir = filepath.Join("..", "..")
		if said, err := cmd.CombinedOutput(); err != nil {
			return "", fmt.Errorf("%w: %s", err, said)
		}
		return program, nil
	})
)

func (b *bench) scaledTo(leases, rows int) *pgx.ConnConfig {
	b.Helper()
	if cfg, ok := scaled.Load(leases); ok {
		return cfg.(*pgx.ConnConfig).Copy()
	}
	cfg := b.database(fmt.Sprintf("scale_%d", leases), fmt.Sprintf(scaleSQL, leases, rows))
	scaled.Store(leases, cfg.Copy())
	return cfg
}

// scale does the same in a small and in a large database.
func (b *bench) scale() {
	big := sized(1_000_000, 2000)
	small := b.scaledTo(1000, 1000)
	protected := max(big/10, 1000)
	large := b.scaledTo(big, protected)
	against := func(work string, workers int, slice time.Duration, of func(cfg *pgx.ConnConfig) *side) {
		b.Helper()
		plain, ours := of(small), of(large)
		plain.name = "1,000 of each"
		c := b.compareFor(slice, workers, plain, ours)
		cost := 1 / c.ratio()
		b.add(result{Work: fmt.Sprintf("%s among %d leases, %d rows, %d rejections", work, big, protected, big), Ratio: value(cost), P99Ratio: value(c.p99Ratio()), Goal: "cost ≤ 1.20",
			Met: value(cost <= 1.2), How: c.how()})
	}
	against("acquire and release", workers, b.slice, func(cfg *pgx.ConnConfig) *side {
		return b.cycleOf(cfg, workers, func(worker, i int) string { return fmt.Sprintf("lease-%d", worker*50+i%50) })
	})
	against("Fenced", workers, b.slice, func(cfg *pgx.ConnConfig) *side {
		pool := b.pool(cfg, workers, withoutFsync)
		gate := fencedb.New(pool, fencedb.Config{Logger: quiet})
		b.Cleanup(gate.Close)
		table, err := gate.Table(b.ctx, "app.once")
		require.NoError(b, err)
		return through(table, func(worker, i int) int { return worker*50 + i%50 }, grants())
	})
	program, err := fencecheck()
	require.NoError(b, err)
	against("fencecheck rejections --limit 50", 1, 3*b.slice, func(cfg *pgx.ConnConfig) *side {
		return &side{do: func(ctx context.Context, _, _ int) error {
			out, _, err := b.run(ctx, cfg, program, "rejections", "--limit", "50")
			if err == nil && bytes.Count(out, []byte("\n")) < 50 {
				err = fmt.Errorf("it showed too few: %s", out)
			}
			return err
		}}
	})
}

// run runs fencecheck, for which findings are no failure.
func (b *bench) run(ctx context.Context, cfg *pgx.ConnConfig, program string, args ...string) (out []byte, peak int64, err error) {
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.Env = append(os.Environ(), fmt.Sprintf("DATABASE_URL=host=%s port=%d user=%s dbname=%s sslmode=disable", cfg.Host, cfg.Port, cfg.User, cfg.Database))
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err = cmd.Output()
	if cmd.ProcessState != nil {
		if cmd.ProcessState.ExitCode() == 1 {
			err = nil
		}
		peak = cmd.ProcessState.SysUsage().(*syscall.Rusage).Maxrss * 1024
	}
	if err != nil {
		err = fmt.Errorf("fencecheck %v: %w: %s", args, err, stderr.Bytes())
	}
	return out, peak, err
}

func (b *bench) report() {
	n := sized(1_000_000, 2000)
	cfg := b.scaledTo(n, max(n/10, 1000))
	program, err := fencecheck()
	require.NoError(b, err)
	file := filepath.Join(b.TempDir(), "report.html")
	began := time.Now()
	_, peak, err := b.run(b.ctx, cfg, program, "report", "--html", file)
	require.NoError(b, err)
	took := time.Since(began)
	info, err := os.Stat(file)
	require.NoError(b, err)
	b.add(result{Work: fmt.Sprintf("fencecheck report --html over %d rejections", n), Goal: "≤ 10 s, ≤ 200 MiB", Met: value(took <= 10*time.Second && peak <= 200<<20),
		How: fmt.Sprintf("%v, at most %d MiB of memory, a page of %d KiB", took.Round(10*time.Millisecond), peak>>20, info.Size()>>10)})
}
