package main

import (
	"fmt"
	"io"
	"runtime"
	"runtime/debug"

	"github.com/spf13/cobra"

	"github.com/writegate/writegate/migrations"
)

// versionInfo is what `fencecheck version` says.
type versionInfo struct {
	Version  string `json:"version"`
	Revision string `json:"revision,omitempty"`
	Schema   int    `json:"schema"` // the version of schema fence that this program brings
	Go       string `json:"go"`
	Platform string `json:"platform"`
}

func (a *app) version() *cobra.Command {
	return a.addOutput(&cobra.Command{
		Use:   "version",
		Short: "Show the version of this program and of the schema that it brings",
		Args:  usageArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			v := versionInfo{Version: "(devel)", Schema: migrations.Version, Go: runtime.Version(), Platform: runtime.GOOS + "/" + runtime.GOARCH}
			if info, ok := debug.ReadBuildInfo(); ok {
				if info.Main.Version != "" {
					v.Version = info.Main.Version
				}
				for _, s := range info.Settings {
					if s.Key == "vcs.revision" {
						v.Revision = s.Value
					}
				}
			}
			return a.print(cmd.OutOrStdout(), v, func(w io.Writer) error {
				_, err := fmt.Fprintf(w, "fencecheck %s %s (schema %d, %s, %s)\n", v.Version, v.Revision, v.Schema, v.Go, v.Platform)
				return err
			})
		},
	})
}
