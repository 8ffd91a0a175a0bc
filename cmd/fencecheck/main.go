// Command fencecheck applies writegate's migrations to a database, shows who holds which lease, audits the writes that were
// refused, and checks what the promise rests on. `fencecheck demo` shows the whole at work; `fencecheck --help` lists what
// else there is.
//
// It exits 0 when all is well, 1 when it found what it was asked to look for, 2 when it was called wrongly, and 3 when it
// could not do or check what it was asked to.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/writegate/writegate/internal/audit"
)

// Exit codes.
const (
	exitClean       = 0
	exitFindings    = 1
	exitUsage       = 2
	exitCannotCheck = 3
)

// errFindings ends a command that found what it was asked to look for; it has been shown already.
var errFindings = errors.New("findings")

// usageError is an error of whoever typed the command.
type usageError struct{ error }

func (e usageError) Unwrap() error { return e.error }

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	code := run(ctx, os.Args[1:], os.Stdin, os.Stdout, os.Stderr)
	stop()
	os.Exit(code)
}

func run(ctx context.Context, args []string, stdin io.Reader, stdout, stderr io.Writer) int {
	root := newRoot()
	root.SetArgs(args)
	root.SetIn(stdin)
	root.SetOut(stdout)
	root.SetErr(stderr)
	err := root.ExecuteContext(ctx)
	var usage usageError
	var status exitStatus
	switch {
	case err == nil:
		return exitClean
	case errors.Is(err, errFindings):
		return exitFindings
	case errors.As(err, &status):
		return int(status)
	case errors.As(err, &usage):
		fmt.Fprintf(stderr, "fencecheck: %s\nSee 'fencecheck --help'.\n", lines(err))
		return exitUsage
	}
	fmt.Fprintln(stderr, "fencecheck:", lines(err))
	return exitCannotCheck
}

// lines is an error as a terminal may show it: names in it may try to be more than text.
func lines(err error) string {
	text := strings.Split(err.Error(), "\n")
	for i := range text {
		text[i] = audit.Printable(text[i])
	}
	return strings.Join(text, "\n")
}
