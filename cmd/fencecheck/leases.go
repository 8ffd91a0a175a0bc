package main

import (
	"io"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/writegate/writegate/internal/audit"
)

func (a *app) leases() *cobra.Command {
	return a.addOutput(&cobra.Command{
		Use:   "leases",
		Short: "Show who holds which lease, and for how much longer",
		Args:  usageArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.withConn(cmd.Context(), func(conn *pgx.Conn) error {
				if _, err := audit.CheckSchema(cmd.Context(), conn, conn.Config().Database); err != nil {
					return err
				}
				leases, err := audit.Leases(cmd.Context(), conn)
				if err != nil {
					return err
				}
				return a.print(cmd.OutOrStdout(), leases, func(w io.Writer) error { return audit.WriteLeases(w, leases) })
			})
		},
	})
}
