package fencedb_test

import (
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/writegate/writegate/fencedb"
	"github.com/writegate/writegate/internal/pgtest"
)

// Ratios to the same work without the gate are integration/bench's; these are for comparing two versions of the gate with each
// other, by scripts/benchcmp.

const benchSQL = `
CREATE SCHEMA app;
CREATE TABLE app.bare (id int PRIMARY KEY, v text NOT NULL, last_fence bigint NOT NULL DEFAULT 0) WITH (fillfactor = 70);
INSERT INTO app.bare (id, v) SELECT i, 'as it was' FROM generate_series(0, 999) i;
CREATE TABLE app.once AS TABLE app.bare;
ALTER TABLE app.once ADD PRIMARY KEY (id), ALTER v SET NOT NULL, ALTER last_fence SET NOT NULL, ALTER last_fence SET DEFAULT 0;
SELECT fence.protect('app.once');`

func BenchmarkBareUpdate(b *testing.B) {
	cfg := pgtest.New(b)
	pgtest.Exec(b, cfg, benchSQL)
	pool := pgtest.Pool(b, cfg)
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		_, err := pool.Exec(b.Context(), "UPDATE app.bare SET v = $2 WHERE id = $1", i%1000, "as it is now")
		require.NoError(b, err)
	}
}

// benchUpdate writes one row after the other, each under a fence above all before.
func benchUpdate(b *testing.B, options ...fencedb.WriteOption) {
	cfg := pgtest.New(b)
	pgtest.Exec(b, cfg, benchSQL)
	gate := fencedb.New(pgtest.Pool(b, cfg), fencedb.Config{})
	defer gate.Close()
	table, err := gate.Table(b.Context(), "app.once")
	require.NoError(b, err)
	var fence atomic.Int64
	lease := fencedb.Callback("bench", "bench", func() (int64, error) { return fence.Add(2), nil })
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		outcome, err := table.Update(b.Context(), lease, fencedb.Key{"id": i % 1000}, fencedb.Set{"v": "as it is now"}, options...)
		require.NoError(b, err)
		require.Equal(b, fencedb.Applied, outcome)
	}
}

func BenchmarkUpdate(b *testing.B) { benchUpdate(b) }

func BenchmarkUpdateTerm(b *testing.B) { benchUpdate(b, fencedb.WithRule(fencedb.Term)) }

func BenchmarkUpdateMany(b *testing.B) {
	cfg := pgtest.New(b)
	pgtest.Exec(b, cfg, benchSQL)
	gate := fencedb.New(pgtest.Pool(b, cfg), fencedb.Config{})
	defer gate.Close()
	table, err := gate.Table(b.Context(), "app.once")
	require.NoError(b, err)
	rows := make([]fencedb.Row, 1000)
	for i := range rows {
		rows[i] = fencedb.Row{Key: fencedb.Key{"id": i}, Set: fencedb.Set{"v": "as it is now"}}
	}
	var fence atomic.Int64
	lease := fencedb.Callback("bench", "bench", func() (int64, error) { return fence.Add(2), nil })
	b.ReportAllocs()
	for b.Loop() {
		_, err := table.UpdateMany(b.Context(), lease, rows)
		require.NoError(b, err)
	}
}
