package clients

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/writegate/writegate/internal/migrate"
	"github.com/writegate/writegate/internal/pgtest"
	"github.com/writegate/writegate/migrations"
)

// The goose command line itself takes the files that `fencecheck migrate sql` prints, among a user's own, up and down to
// nothing, also as an editor on Windows has saved them. (C35)
func TestGooseCommandLine(t *testing.T) {
	goose := filepath.Join(t.TempDir(), "goose")
	build := exec.Command("go", "build", "-tags", "no_clickhouse no_libsql no_mssql no_mysql no_sqlite3 no_vertica no_ydb", "-o", goose, "github.com/pressly/goose/v3/cmd/goose")
	out, err := build.CombinedOutput()
	require.NoError(t, err, string(out))
	for name, ending := range map[string]string{"Unix": "\n", "Windows": "\r\n"} {
		t.Run(name, func(t *testing.T) {
			cfg := pgtest.NewEmpty(t)
			dir := t.TempDir()
			write := func(file, text string) {
				require.NoError(t, os.WriteFile(filepath.Join(dir, file), []byte(strings.ReplaceAll(text, "\n", ending)), 0o600))
			}
			write("20240101000000_orders.sql", "-- +goose Up\nCREATE TABLE orders (id int PRIMARY KEY);\n-- +goose Down\nDROP TABLE orders;\n")
			for v := int64(1); v <= migrations.Version; v++ {
				text, err := migrate.SQL(v)
				require.NoError(t, err)
				write(fmt.Sprintf("2024010200000%d_fence.sql", v), text)
			}
			write("20240103000000_protect.sql", "-- +goose Up\nSELECT fence.protect('orders', guard => 'enforce');\n-- +goose Down\nSELECT fence.unprotect('orders');\n")
			run := func(args ...string) {
				t.Helper()
				cmd := exec.Command(goose, append([]string{"-dir", dir}, args...)...)
				cmd.Env = append(os.Environ(), "GOOSE_DRIVER=postgres", "GOOSE_DBSTRING="+pgtest.Shared(t).URL(cfg.Database))
				out, err := cmd.CombinedOutput()
				require.NoError(t, err, string(out))
			}
			run("validate")
			for range 2 {
				run("up")
				var version int
				require.NoError(t, pgtest.Pool(t, cfg).QueryRow(t.Context(), `SELECT fence.schema_version()`).Scan(&version))
				require.Equal(t, migrations.Version, version)
				pgtest.Exec(t, cfg, `INSERT INTO orders (id, last_fence) VALUES (1, 2)`)
				run("down-to", "0")
			}
		})
	}
}
