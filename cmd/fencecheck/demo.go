package main

import (
	"os"
	"os/exec"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/writegate/writegate/internal/demo"
	"github.com/writegate/writegate/internal/pgtest"
)

func (a *app) demo() *cobra.Command {
	var keep bool
	cmd := &cobra.Command{
		Use:   "demo",
		Short: "Watch a late writer be refused, on a throw-away PostgreSQL",
		Long: `demo creates a job runner's schema that already has rows and migrations of its own, adds writegate to it, protects
one table, and starts two worker processes. The first takes the lease, is stopped past its TTL, and is resumed in the
middle of its write, after the second has taken over. Its write is refused by the row.

It runs on a throw-away server made from installed binaries or a container, or, with --database-url, in a database that
it creates on that server and drops again (if it is killed outright, one called writegate_demo_… stays there). DATABASE_URL is
not read, lest it name a server you did not mean; ` + pgtest.EnvURL + ` is, as by the tests.`,
		Example: `  fencecheck demo --keep`,
		Args:    usageArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if a.databaseURL != "" {
				if _, err := a.connConfig(); err != nil {
					return err
				}
			}
			// A reader that goes away ends the demo with an error, and not before it has cleaned up.
			signal.Ignore(syscall.SIGPIPE)
			self, err := os.Executable()
			if err != nil {
				return err
			}
			return demo.Run(cmd.Context(), demo.Options{
				DatabaseURL: a.databaseURL,
				Keep:        keep,
				Worker:      []string{self, "demo-worker"},
				Program:     program(self),
				Out:         cmd.OutOrStdout(),
			})
		},
	}
	cmd.Flags().BoolVar(&keep, "keep", false, "leave the database up, and say how to look at it")
	return cmd
}

func (a *app) demoWorker() *cobra.Command {
	var o demo.WorkerOptions
	cmd := &cobra.Command{
		Use:    "demo-worker",
		Hidden: true, // a process of the demo's, not for people
		Args:   usageArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			o.DatabaseURL = os.Getenv("DATABASE_URL")
			o.In, o.Out = cmd.InOrStdin(), cmd.OutOrStdout()
			return demo.Worker(cmd.Context(), o)
		},
	}
	cmd.Flags().StringVar(&o.Holder, "holder", "worker", "")
	cmd.Flags().BoolVar(&o.Pause, "pause", false, "")
	return cmd
}

// program is how to call this program again: by its name if that is found, as it is when installed, else as one does in
// the repository.
func program(self string) string {
	if path, err := exec.LookPath("fencecheck"); err == nil && path == self {
		return "fencecheck"
	}
	return "go run ./cmd/fencecheck"
}
