package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/spf13/cobra"
)

// app is the world a command runs in.
type app struct {
	in     io.Reader
	out    io.Writer
	errOut io.Writer
	getenv func(string) string
	output string // table or json
}

// exitError is an error with an exit code of its own. A nil err prints nothing.
type exitError struct {
	code int
	err  error
}

// Error implements error.
func (e *exitError) Error() string {
	if e.err == nil {
		return fmt.Sprintf("exit code %d", e.code)
	}
	return e.err.Error()
}

// Unwrap returns what happened.
func (e *exitError) Unwrap() error { return e.err }

// exitOwn is the exit code of run and exec when it is not the command's.
const exitOwn = 125

// Main runs the command line and returns the exit code.
func Main(args []string) int {
	a := &app{in: os.Stdin, out: os.Stdout, errOut: os.Stderr, getenv: os.Getenv}
	return a.main(context.Background(), args)
}

func (a *app) main(ctx context.Context, args []string) int {
	root := a.root()
	root.SetArgs(args)
	root.SetIn(a.in)
	root.SetOut(a.out)
	root.SetErr(a.errOut)
	cmd, err := root.ExecuteContextC(ctx)
	if err == nil {
		return 0
	}
	code := 1
	if cmd != nil && (cmd.Name() == "run" || cmd.Name() == "exec") {
		code = exitOwn
	}
	var exit *exitError
	if errors.As(err, &exit) {
		code, err = exit.code, exit.err
	}
	if err != nil {
		a.printError(err)
	}
	return code
}

// root returns the command tree.
func (a *app) root() *cobra.Command {
	root := &cobra.Command{
		Use:   "space",
		Short: "Run untrusted code in microVMs",
		Long: `SPACE runs untrusted code in microVMs. "space up" starts the platform on this machine; the other commands talk to it.

They read SPACE_API_URL (default http://127.0.0.1:8700), SPACE_DATA_PLANE_URL and SPACE_API_TOKEN. Without a token the
admin key in the data folder of this machine's server is used.`,
		Example: `  space up                                  start the platform
  space run -- python3 -c 'print(6*7)'      one command in a fresh microVM
  space doctor                              what works on this machine, and what to do about the rest`,
		SilenceUsage: true, SilenceErrors: true, TraverseChildren: true,
		CompletionOptions: cobra.CompletionOptions{HiddenDefaultCmd: true},
	}
	root.PersistentFlags().StringVarP(&a.output, "output", "o", "table", "form of the result: table or json")
	root.PersistentPreRunE = func(*cobra.Command, []string) error {
		if a.output != "table" && a.output != "json" {
			return fmt.Errorf("--output must be table or json, not %q", a.output)
		}
		return nil
	}
	root.AddCommand(a.upCommand(), a.runCommand(), a.execCommand(), a.sandboxCommand(), a.psCommand(), a.killCommand(),
		a.cpCommand(), a.logsCommand(), a.templateCommand(), a.keyCommand(), a.doctorCommand(), a.benchCommand(), a.versionCommand())
	return root
}

// group is a command that only holds others.
func group(use, short, example string, children ...*cobra.Command) *cobra.Command {
	c := &cobra.Command{Use: use, Short: short, Example: example, Args: cobra.NoArgs, RunE: func(c *cobra.Command, _ []string) error {
		_ = c.Help()
		return &exitError{code: 1}
	}}
	c.AddCommand(children...)
	return c
}

// pairs parses K=V arguments.
func pairs(list []string, flag string) (map[string]string, error) {
	if len(list) == 0 {
		return nil, nil
	}
	out := map[string]string{}
	for _, item := range list {
		k, v, ok := strings.Cut(item, "=")
		if !ok || k == "" {
			return nil, fmt.Errorf("%s wants KEY=VALUE, not %q", flag, item)
		}
		out[k] = v
	}
	return out, nil
}
