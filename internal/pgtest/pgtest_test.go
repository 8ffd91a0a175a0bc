package pgtest

import (
	"context"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
)

func TestMain(m *testing.M) { Main(m) }

func TestEachTestHasItsOwnMigratedDatabase(t *testing.T) {
	ctx := context.Background()
	a, b := New(t), New(t)
	require.NotEqual(t, a.Database, b.Database)
	Exec(t, a, `INSERT INTO fence.lease (name) VALUES ('only in a')`)
	for cfg, want := range map[*pgx.ConnConfig]int{a: 1, b: 0} {
		conn, err := pgx.ConnectConfig(ctx, cfg)
		require.NoError(t, err)
		var n int
		require.NoError(t, conn.QueryRow(ctx, `SELECT count(*) FROM fence.lease`).Scan(&n))
		require.Equal(t, want, n)
		require.NoError(t, conn.Close(ctx))
	}
}
