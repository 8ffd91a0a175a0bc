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
	Version   string `json:"version"`
	Revision  string `json:"revision,omitempty"`
	Committed string `json:"committed,omitempty"` // when the revision was
	Modified  bool   `json:"modified,omitempty"`  // built from files that differ from the revision
	Schema    int    `json:"schema"`              // the version of schema fence that this program brings
	Go        string `json:"go"`
	Platform  string `json:"platform"`
}

func (a *app) version() *cobra.Command {
	return a.addOutput(&cobra.Command{
		Use:   "version",
		Short: "Show the version of this program and of the schema that it brings",
		Long: `version shows what the build says of itself: the module's version, the revision that it was built from, and whether the files had
been changed; and the version of schema fence that this program brings. It needs no database.`,
		Example: `  fencecheck version -o json`,
		Args:    usageArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			v := thisVersion()
			return a.print(cmd.OutOrStdout(), v, func(w io.Writer) error {
				revision := v.Revision
				if v.Modified {
					revision += " and changes"
				}
				_, err := fmt.Fprintf(w, "fencecheck %s %s (schema %d, %s, %s)\n", v.Version, revision, v.Schema, v.Go, v.Platform)
				return err
			})
		},
	}, "table", "json")
}

// thisVersion is what the build says of itself.
func thisVersion() versionInfo {
	v := versionInfo{Version: "(devel)", Schema: migrations.Version, Go: runtime.Version(), Platform: runtime.GOOS + "/" + runtime.GOARCH}
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return v
	}
	if info.Main.Version != "" {
		v.Version = info.Main.Version
	}
	for _, s := range info.Settings {
		switch s.Key {
		case "vcs.revision":
			v.Revision = s.Value
		case "vcs.time":
			v.Committed = s.Value
		case "vcs.modified":
			v.Modified = s.Value == "true"
		}
	}
	return v
}
