package integration

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/writegate/writegate/internal/pgtest"
)

// block is one fenced block of a Markdown file, with the list's indentation taken away.
type block struct{ language, text string }

var blockPattern = regexp.MustCompile("(?ms)^( *)```(\\w+)\n(.*?)^ *```$")

func blocks(t *testing.T, file string) []block {
	t.Helper()
	text, err := os.ReadFile(file)
	require.NoError(t, err)
	var found []block
	for _, m := range blockPattern.FindAllStringSubmatch(string(text), -1) {
		var lines []string
		for _, line := range strings.Split(strings.TrimSuffix(m[3], "\n"), "\n") {
			lines = append(lines, strings.TrimPrefix(line, m[1]))
		}
		found = append(found, block{m[2], strings.Join(lines, "\n")})
	}
	require.NotEmpty(t, found)
	return found
}

// readmeGrants returns the grants that the README asks for, on a role that is made first.
func readmeGrants(t *testing.T) string {
	for _, b := range blocks(t, "../README.md") {
		if b.language == "sql" && strings.Contains(b.text, "fence.allow") {
			allow, _, _ := strings.Cut(b.text, ";") // the application's is the first
			return "CREATE ROLE app_role; " + allow
		}
	}
	t.Fatal("the README has no grants")
	return ""
}

// Everything in the README that can be run is run, in its order, on one database that has the table it speaks of.
func TestREADME(t *testing.T) {
	b := newBed(t)
	b.exec(`DROP TABLE app.orders; DROP SCHEMA fence CASCADE;
		CREATE TABLE app.jobs (id bigint PRIMARY KEY, status text NOT NULL, result text)`)
	examples := exampleFunctions(t)
	ci, err := os.ReadFile("../.ci/run")
	require.NoError(t, err)
	role := "wg_" + b.cfg.Database

	ran := map[string]int{}
	for _, block := range blocks(t, "../README.md") {
		switch block.language {
		case "sh":
			for _, line := range strings.Split(block.text, "\n") {
				if line == "go test ./..." { // that is what runs this
					require.Contains(t, string(ci), "go test -race ./...")
					continue
				}
				runShell(b, line)
				ran["sh"]++
			}
		case "sql":
			sql := strings.ReplaceAll(strings.ReplaceAll(block.text, "app_role", role), "audit_role", role+"_audit")
			if sql != block.text {
				b.exec(`CREATE ROLE ` + role + `; CREATE ROLE ` + role + `_audit`)
				defer b.exec(`DROP OWNED BY ` + role + `, ` + role + `_audit; DROP ROLE ` + role + `, ` + role + `_audit`)
			}
			b.exec(sql)
			ran["sql"]++
		case "go":
			require.Contains(t, examples, unindent(block.text), "no Example function that is run has this in it")
			ran["go"]++
		case "mermaid":
		default:
			t.Errorf("a block in %s: teach this test what to do with it", block.language)
		}
	}
	require.GreaterOrEqual(t, ran["sh"], 7)
	require.GreaterOrEqual(t, ran["sql"], 5)
	require.GreaterOrEqual(t, ran["go"], 2)
	require.Equal(t, "none", query[string](b, `SELECT coalesce(to_regnamespace('fence')::text, 'none')`), "its last command removes the schema")
}

var createRole = regexp.MustCompile(`CREATE ROLE (\w+)`)

// What the pages in docs/ show is run too, each page on a database of its own.
func TestDocs(t *testing.T) {
	pages, err := filepath.Glob("../docs/*.md")
	require.NoError(t, err)
	require.NotEmpty(t, pages)
	examples := exampleFunctions(t)
	for _, page := range pages {
		t.Run(filepath.Base(page), func(t *testing.T) {
			b := newBed(t)
			roles := map[string]string{} // of the whole server, so that each run needs its own
			for _, block := range blocks(t, page) {
				for _, m := range createRole.FindAllStringSubmatch(block.text, -1) {
					roles[m[1]] = m[1] + "_" + b.cfg.Database
					defer b.exec(`DROP OWNED BY ` + roles[m[1]] + `; DROP ROLE ` + roles[m[1]])
				}
				for role, name := range roles {
					block.text = strings.ReplaceAll(block.text, role, name)
				}
				switch block.language {
				case "sql":
					b.exec(block.text)
				case "sh":
					runShell(b, block.text)
				case "go":
					require.Contains(t, examples, unindent(block.text), "no Example function that is run has this in it")
				case "text":
				default:
					t.Errorf("a block in %s: teach this test what to do with it", block.language)
				}
			}
		})
	}
}

// installed returns a directory in which fencecheck is installed, once for all tests; TestMain removes it.
func installed(t *testing.T) string {
	t.Helper()
	bin, err := install()
	require.NoError(t, err)
	return bin
}

var install = sync.OnceValues(func() (string, error) {
	cmd := exec.Command("go", "install", "./cmd/fencecheck")
	cmd.Dir = ".."
	cmd.Env = append(os.Environ(), "GOBIN="+binaries)
	out, err := cmd.CombinedOutput()
	if err != nil {
		err = fmt.Errorf("%w: %s", err, out)
	}
	return binaries, err
})

// binaries is where the tests of this package install what they run as a user would.
var binaries string

// runShell runs a command as a user would, in the repository, on the bed's database.
func runShell(b *bed, line string) {
	b.t.Helper()
	cmd := exec.Command("/bin/sh", "-c", line)
	cmd.Dir = ".."
	bin := installed(b.t)
	cmd.Env = append(os.Environ(), "DATABASE_URL="+pgtest.Shared(b.t).URL(b.cfg.Database),
		"GOBIN="+bin, "PATH="+bin+string(os.PathListSeparator)+os.Getenv("PATH"))
	out, err := cmd.CombinedOutput()
	require.NoError(b.t, err, "%s\n%s", line, out)
}

// exampleFunctions returns all example files, and the tests with other people's modules, without indentation: what go test
// compiles and runs.
func exampleFunctions(t *testing.T) string {
	t.Helper()
	files, err := filepath.Glob("../*/example_test.go")
	require.NoError(t, err)
	require.NotEmpty(t, files)
	theirs, err := filepath.Glob("clients/*_test.go") // a module of its own, whose tests CI runs too
	require.NoError(t, err)
	require.NotEmpty(t, theirs)
	var all strings.Builder
	for _, file := range append(files, theirs...) {
		text, err := os.ReadFile(file)
		require.NoError(t, err)
		all.WriteString(unindent(string(text)))
	}
	return all.String()
}

func unindent(text string) string {
	lines := strings.Split(text, "\n")
	for i, line := range lines {
		lines[i] = strings.TrimLeft(line, "\t ")
	}
	return strings.Join(lines, "\n")
}
