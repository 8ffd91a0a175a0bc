package integration

import (
	"os/exec"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// A program that imports the packages gets pgx with them, and nothing heavier.
func TestImportsPullInPgxAlone(t *testing.T) {
	for pkg, modules := range map[string][]string{
		"leasedb":    {"github.com/jackc/pgx/v5"},
		"fencedb":    {"github.com/jackc/pgx/v5"},
		"migrations": nil,
	} {
		allowed := map[string]bool{"": true, "github.com/writegate/writegate": true}
		if modules != nil {
			for _, m := range modules {
				allowed[m] = true
			}
			// What pgx itself needs.
			for _, m := range []string{
				"github.com/jackc/pgpassfile", "github.com/jackc/pgservicefile", "github.com/jackc/puddle/v2",
				"golang.org/x/sync", "golang.org/x/text",
			} {
				allowed[m] = true
			}
		}
		cmd := exec.Command("go", "list", "-deps", "-f", "{{with .Module}}{{.Path}}{{end}}", "./"+pkg)
		cmd.Dir = ".."
		out, err := cmd.Output()
		require.NoError(t, err)
		for _, module := range strings.Split(string(out), "\n") {
			require.True(t, allowed[module], "%s pulls in %s", pkg, module)
		}
	}
	cmd := exec.Command("go", "list", "-deps", "./fencedb")
	cmd.Dir = ".."
	out, err := cmd.Output()
	require.NoError(t, err)
	require.NotContains(t, string(out), "writegate/leasedb")
}
