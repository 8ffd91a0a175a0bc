package main

import (
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/writegate/writegate/internal/audit"
	"github.com/writegate/writegate/internal/show"
)

func (a *app) leases() *cobra.Command {
	var f audit.LeaseFilter
	var fail bool
	states := []string{"held", "expired", "free"}
	cmd := a.addOutput(&cobra.Command{
		Use:   "leases [NAME]",
		Short: "Show who holds which lease, and for how much longer",
		Long: `leases shows who holds which lease, what is left of it, and how long ago it was renewed: holders renew every third of the TTL.
All by the database's clock.

overdue is a lease that has expired without a release, and that nobody has taken over: whoever held it crashed, is stopped, or
has lost touch. A renewal is late when two thirds of the TTL have gone by without one. wanted: somebody waits for it.`,
		Example: `  fencecheck leases
  fencecheck leases nightly-report
  fencecheck leases --overdue --fail`,
		Args: usageArgs(cobra.MaximumNArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			if f.State != "" && !slices.Contains(states, f.State) {
				return usageError{fmt.Errorf("--state %q: want %s", f.State, strings.Join(states, ", "))}
			}
			if err := checkLimit(f.Limit); err != nil {
				return err
			}
			if len(args) > 0 {
				f.Name = args[0]
			}
			return a.readConn(cmd.Context(), []string{"lease"}, func(q audit.Querier) error {
				leases, cut, err := audit.Leases(cmd.Context(), q, f)
				if err != nil {
					return err
				}
				if f.Name != "" && len(leases) == 0 && f.State == "" && f.Holder == "" && !f.Overdue {
					return fmt.Errorf("lease %q was never granted here", f.Name)
				}
				if err := a.printTable(cmd.OutOrStdout(), leases, show.Leases(leases)); err != nil {
					return err
				}
				sayCut(cmd, cut, f.Limit)
				return failIf(fail && len(leases) > 0)
			})
		},
	}, forms...)
	cmd.Flags().StringVar(&f.Holder, "holder", "", "only this holder's")
	cmd.Flags().StringVar(&f.State, "state", "", "only those that are held, expired or free")
	cmd.Flags().BoolVar(&f.Overdue, "overdue", false, "only those that are overdue, or whose renewal is late")
	cmd.Flags().IntVar(&f.Limit, "limit", 1000, "how many to show; 0 for all")
	cmd.Flags().BoolVar(&fail, "fail", false, "exit 1 if there are any")
	_ = cmd.RegisterFlagCompletionFunc("state", cobra.FixedCompletions(states, cobra.ShellCompDirectiveNoFileComp))
	return cmd
}
