package main

import (
	"fmt"

	"github.com/spf13/cobra"

	"github.com/writegate/writegate/internal/audit"
	"github.com/writegate/writegate/internal/show"
)

func (a *app) terms() *cobra.Command {
	var f audit.TermFilter
	var w window
	cmd := a.addOutput(&cobra.Command{
		Use:   "terms [LEASE]",
		Short: "Show a lease's history: who was granted it, and how each term ended",
		Long: `terms shows grants, the newest first: of one lease, or of all. A term ends because it was released or because it expired; one that
has not ended is held, overdue (it has expired and nobody has followed), or gone (its lease was deleted).

With --since and --until those that were under way at some moment of that time.`,
		Example: `  fencecheck terms nightly-report
  fencecheck terms --since 24h --holder worker-7
  fencecheck terms --fence 1042`,
		Args: usageArgs(cobra.MaximumNArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := w.check(); err != nil {
				return err
			}
			if err := checkLimit(f.Limit); err != nil {
				return err
			}
			if len(args) > 0 {
				f.Lease = args[0]
			}
			return a.readConn(cmd.Context(), []string{"term", "lease"}, func(q audit.Querier) (err error) {
				if f.Since, f.Until, err = w.resolve(cmd.Context(), q); err != nil {
					return err
				}
				terms, cut, err := audit.Terms(cmd.Context(), q, f)
				if err != nil {
					return err
				}
				if f.Lease != "" && len(terms) == 0 {
					// A name that was mistyped must not pass for one without history.
					leases, _, err := audit.Leases(cmd.Context(), q, audit.LeaseFilter{Name: f.Lease, Limit: 1})
					if err != nil {
						return err
					}
					if len(leases) == 0 {
						return fmt.Errorf("lease %q was never granted here", f.Lease)
					}
				}
				if err := a.printTable(cmd.OutOrStdout(), terms, show.Terms(terms)); err != nil {
					return err
				}
				sayCut(cmd, cut, f.Limit)
				return nil
			})
		},
	}, forms...)
	w.addFlags(cmd, "under way at or after")
	cmd.Flags().Int64SliceVar(&f.Fences, "fence", nil, "only the grants of these fences: whose were they?")
	cmd.Flags().StringVar(&f.Holder, "holder", "", "only this holder's")
	cmd.Flags().IntVar(&f.Limit, "limit", 100, "how many to show; 0 for all")
	return cmd
}
