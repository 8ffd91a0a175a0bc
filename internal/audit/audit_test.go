package audit_test

import (
	"context"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/writegate/writegate/internal/migrate"
)

func migrated(t *testing.T, cfg *pgx.ConnConfig) {
	t.Helper()
	_, err := migrate.Up(context.Background(), cfg)
	require.NoError(t, err)
}
