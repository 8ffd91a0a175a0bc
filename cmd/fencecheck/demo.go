package main

import (
	"os"

	"github.com/spf13/cobra"

	"github.com/writegate/writegate/internal/demo"
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
it creates on that server and drops again. DATABASE_URL is not read, lest it name a server you did not mean.`,
		Args: usageArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if a.databaseURL != "" {
				if _, err := a.connConfig(); err != nil {
					return err
				}
			}
			self, err := os.Executable()
			if err != nil {
				return err
			}
			return demo.Run(cmd.Context(), demo.Options{
				DatabaseURL: a.databaseURL,
				Keep:        keep,
				Worker:      []string{self, "demo-worker"},
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
