package cli

import (
	"fmt"
	"runtime"
	"runtime/debug"

	"github.com/spf13/cobra"
)

// linked is set by the linker: the content of VERSION and the commit. It is never written.
var linked string

// buildVersion is what the linker or the module system knows of this build.
func buildVersion() string {
	if linked != "" {
		return linked
	}
	if info, ok := debug.ReadBuildInfo(); ok && info.Main.Version != "" && info.Main.Version != "(devel)" {
		return info.Main.Version
	}
	return "dev"
}

func (a *app) versionCommand() *cobra.Command {
	return &cobra.Command{
		Use: "version", Short: "Print the version", Example: "  space version -o json", Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			v := map[string]string{"version": buildVersion(), "go": runtime.Version(), "platform": runtime.GOOS + "/" + runtime.GOARCH}
			return a.result(v, func() error {
				_, err := fmt.Fprintf(a.out, "space %s (%s, %s)\n", v["version"], v["go"], v["platform"])
				return err
			})
		},
	}
}
