package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"github.com/stretchr/testify/require"

	"github.com/writegate/writegate/internal/audit"
)

const referencePages = "../../docs/reference"

// documented are the commands that users are told of, in the order in which help lists them. What cobra adds by itself is not
// among them.
func documented(cmd *cobra.Command) (all []*cobra.Command) {
	if cmd.IsAvailableCommand() || !cmd.HasParent() {
		all = append(all, cmd)
		for _, child := range cmd.Commands() {
			all = append(all, documented(child)...)
		}
	}
	return all
}

func pageOf(cmd *cobra.Command) string {
	return strings.ReplaceAll(cmd.CommandPath(), " ", "-") + ".md"
}

func linkTo(cmd *cobra.Command) string { return "[" + cmd.CommandPath() + "](" + pageOf(cmd) + ")" }

// cell is text for a cell of a table.
func cell(text string) string {
	return strings.NewReplacer("|", `\|`, "<", "&lt;", "\n", " ").Replace(text)
}

// reference is a command's page.
func reference(cmd *cobra.Command) string {
	var b strings.Builder
	fmt.Fprintf(&b, "<!-- Written by go test ./cmd/fencecheck -run Reference -update; do not edit. -->\n# %s\n\n%s.\n", cmd.CommandPath(), cmd.Short)
	if cmd.Runnable() || !cmd.HasAvailableSubCommands() {
		fmt.Fprintf(&b, "\n```text\n%s\n```\n", cmd.UseLine())
	}
	if cmd.Long != "" {
		fmt.Fprintf(&b, "\n%s\n", strings.ReplaceAll(cmd.Long, "<", "&lt;"))
	}
	if cmd.Example != "" {
		fmt.Fprintf(&b, "\n## Examples\n\n```text\n%s\n```\n", unindented(cmd.Example))
	}
	commands := func(title string, which func(*cobra.Command) bool) {
		var rows strings.Builder
		for _, child := range cmd.Commands() {
			if child.IsAvailableCommand() && which(child) {
				fmt.Fprintf(&rows, "| %s | %s |\n", linkTo(child), cell(child.Short))
			}
		}
		if rows.Len() > 0 {
			fmt.Fprintf(&b, "\n## %s\n\n| command | |\n|---|---|\n%s", title, rows.String())
		}
	}
	for _, group := range cmd.Groups() {
		commands(strings.TrimSuffix(group.Title, ":"), func(child *cobra.Command) bool { return child.GroupID == group.ID })
	}
	title := "Commands"
	if len(cmd.Groups()) > 0 {
		title = "Others"
	}
	commands(title, func(child *cobra.Command) bool { return child.GroupID == "" })

	title = "Flags"
	if !cmd.HasParent() {
		title = "Flags of all commands"
	}
	var rows strings.Builder
	cmd.LocalFlags().VisitAll(func(f *pflag.Flag) {
		if f.Hidden || f.Name == "help" {
			return
		}
		name := "`--" + f.Name + "`"
		if f.Shorthand != "" {
			name = "`-" + f.Shorthand + "`, " + name
		}
		// "default" in the text itself says more than the empty value.
		standard := f.DefValue
		if standard == "[]" || standard == "false" {
			standard = ""
		}
		if standard != "" {
			standard = "`" + standard + "`"
		}
		kind := f.Value.Type()
		if kind == "bool" {
			kind = ""
		}
		fmt.Fprintf(&rows, "| %s | %s | %s | %s |\n", name, kind, standard, cell(f.Usage))
	})
	if rows.Len() > 0 {
		fmt.Fprintf(&b, "\n## %s\n\n| flag | type | default | |\n|---|---|---|---|\n%s", title, rows.String())
	}
	switch {
	case !cmd.HasParent():
		b.WriteString("\nEvery command has `--help`. `fencecheck completion bash` (zsh, fish, powershell) prints a script that completes commands, flags\nand the names of checks.\n")
	case cmd.Parent().HasParent():
		fmt.Fprintf(&b, "\nBesides these, [the flags of all commands](fencecheck.md#flags-of-all-commands). Part of %s.\n", linkTo(cmd.Parent()))
	default:
		b.WriteString("\nBesides these, [the flags of all commands](fencecheck.md#flags-of-all-commands).\n")
	}
	return strings.ReplaceAll(b.String(), "\nBesides these, [the flags", map[bool]string{true: "\nBesides these, [the flags", false: "\nIt has [the flags"}[rows.Len() > 0])
}

func unindented(text string) string {
	lines := strings.Split(strings.Trim(text, "\n"), "\n")
	for i, line := range lines {
		lines[i] = strings.TrimPrefix(line, "  ")
	}
	return strings.Join(lines, "\n")
}

// docs/reference has a page for each command, as the program itself tells of it.
func TestReference(t *testing.T) {
	pages := map[string]string{}
	for _, cmd := range documented(newRoot()) {
		pages[pageOf(cmd)] = reference(cmd)
	}
	if *update {
		require.NoError(t, os.MkdirAll(referencePages, 0o755)) //nolint:gosec // pages that everybody may read
	}
	files, err := filepath.Glob(referencePages + "/*")
	require.NoError(t, err)
	for _, file := range files {
		if _, ok := pages[filepath.Base(file)]; !ok {
			if *update {
				require.NoError(t, os.Remove(file))
				continue
			}
			t.Errorf("%s is of no command: go test ./cmd/fencecheck -run Reference -update removes it", file)
		}
	}
	for name, want := range pages {
		file := filepath.Join(referencePages, name)
		if *update {
			require.NoError(t, os.WriteFile(file, []byte(want), 0o644)) //nolint:gosec // a page that everybody may read
			continue
		}
		has, err := os.ReadFile(file)
		require.NoError(t, err, "go test ./cmd/fencecheck -run Reference -update writes it")
		require.Equal(t, want, string(has), "go test ./cmd/fencecheck -run Reference -update writes %s anew", file)
	}
}

// docs/verify.md lists all checks, as the program itself tells of them.
func TestReferenceOfChecks(t *testing.T) {
	const page, begin, end = "../../docs/verify.md", "<!-- checks: written by go test ./cmd/fencecheck -run Reference -update -->\n", "<!-- end of checks -->\n"
	text, err := os.ReadFile(page)
	require.NoError(t, err)
	before, rest, ok := strings.Cut(string(text), begin)
	require.True(t, ok, "%s has no %s", page, begin)
	_, after, ok := strings.Cut(rest, end)
	require.True(t, ok, "%s has no %s", page, end)
	var b strings.Builder
	b.WriteString("| id | severity | what it finds |\n|---|---|---|\n")
	for _, c := range audit.Checks() {
		fmt.Fprintf(&b, "| `%s` | %s | %s |\n", c.ID, c.Severity, cell(c.Title))
	}
	want := before + begin + b.String() + end + after
	if *update {
		require.NoError(t, os.WriteFile(page, []byte(want), 0o644)) //nolint:gosec // a page that everybody may read
		return
	}
	require.Equal(t, want, string(text), "go test ./cmd/fencecheck -run Reference -update writes it anew")
}

// Every command and every flag says what it is for, and what the examples show can be called.
func TestReferenceIsComplete(t *testing.T) {
	for _, cmd := range documented(newRoot()) {
		path := cmd.CommandPath()
		require.NotEmpty(t, cmd.Short, path)
		require.NotRegexp(t, `\.$`, cmd.Short, path)
		require.NotEmpty(t, cmd.Long, path)
		require.True(t, cmd.Example != "" || cmd.HasAvailableSubCommands(), "%s has no example", path)
		cmd.LocalFlags().VisitAll(func(f *pflag.Flag) {
			if f.Name != "help" {
				require.NotEmpty(t, f.Usage, "%s --%s", path, f.Name)
			}
		})
		for line := range strings.Lines(cmd.Example) {
			if line = strings.TrimSpace(line); line != "" {
				parseExample(t, line)
			}
		}
	}
}

// parseExample finds the command of an example's line and has it parse its flags and check its arguments, and no more.
func parseExample(t *testing.T, line string) {
	t.Helper()
	words := shellWords(t, line)
	require.Equal(t, "fencecheck", words[0], line)
	cmd, args, err := newRoot().Find(words[1:])
	require.NoError(t, err, line)
	require.Contains(t, line, cmd.CommandPath(), line)
	require.NoError(t, cmd.ParseFlags(args), line)
	require.NoError(t, cmd.ValidateArgs(cmd.Flags().Args()), line)
	require.NoError(t, cmd.ValidateRequiredFlags(), line)
}

// shellWords splits a line up to a redirection or a pipe, as far as examples need it: spaces, and single quotes.
func shellWords(t *testing.T, line string) (words []string) {
	t.Helper()
	word, in, quoted := "", false, false
	end := func() {
		if in {
			words = append(words, word)
		}
		word, in = "", false
	}
	for _, r := range line {
		switch {
		case r == '\'':
			quoted, in = !quoted, true
		case quoted:
			word += string(r)
		case r == ' ':
			end()
		case r == '>' || r == '|':
			end()
			return words
		default:
			require.NotContains(t, "\"\\$`&;", string(r), "teach this test about it: %s", line)
			word, in = word+string(r), true
		}
	}
	require.False(t, quoted, line)
	end()
	return words
}
