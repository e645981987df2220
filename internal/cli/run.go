package cli

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/space-sandbox/space/internal/client"
	"github.com/space-sandbox/space/internal/sandbox"
)

// deleteTimeout bounds the delete at the end of a run.
const deleteTimeout = 45 * time.Second

// sandboxFlags are what run and sandbox create have in common.
type sandboxFlags struct {
	template, environment string
	env, metadata         []string
	vcpu, memory, disk    uint32
}

func (f *sandboxFlags) add(cmd *cobra.Command) {
	fl := cmd.Flags()
	fl.StringVar(&f.template, "template", "base", "template to start from: name[:tag] or name@sha256:digest")
	fl.StringVar(&f.environment, "environment", "", "execution environment: auto, E0 or E1")
	fl.StringArrayVarP(&f.env, "env", "e", nil, "KEY=VALUE in the environment of every process; repeatable")
	fl.StringArrayVar(&f.metadata, "metadata", nil, "KEY=VALUE label; repeatable")
	fl.Uint32Var(&f.vcpu, "vcpu", 0, "virtual processors; 0: the template's")
	fl.Uint32Var(&f.memory, "memory-mib", 0, "memory in MiB; 0: the template's")
	fl.Uint32Var(&f.disk, "disk-mib", 0, "size of the writable disk in MiB; 0: the template's")
}

func (f *sandboxFlags) request() (client.CreateSandbox, error) {
	req := client.CreateSandbox{Template: f.template, Environment: f.environment}
	var err error
	if req.Env, err = pairs(f.env, "--env"); err != nil {
		return req, err
	}
	if req.Metadata, err = pairs(f.metadata, "--metadata"); err != nil {
		return req, err
	}
	if f.vcpu|f.memory|f.disk != 0 {
		req.Resources = &client.ResourcesRequest{VCPU: f.vcpu, MemoryMiB: f.memory, DiskMiB: f.disk}
	}
	return req, nil
}

func (a *app) runCommand() *cobra.Command {
	var sf sandboxFlags
	var cf commandFlags
	cmd := &cobra.Command{
		Use:   "run [flags] -- COMMAND [ARG...]",
		Short: "Run one command in a fresh microVM",
		Long: `Creates a sandbox, runs the command in it and deletes the sandbox, whatever happens. The exit code is the command's, 128+n
if signal n ended it, and 125 if the trouble is ours. Ctrl-C is passed on to the command; a second one kills it.`,
		Example: `  space run -- python3 -c 'print(6*7)'
  echo data | space run -i -- sha256sum
  space run -it -- bash
  space run --memory-mib 1024 -e DEBUG=1 --timeout 60 -- ./job`,
		Args: cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error { return a.run(cmd.Context(), args, &sf, cf) },
	}
	sf.add(cmd)
	cf.add(cmd)
	return cmd
}

func (f *commandFlags) add(cmd *cobra.Command) {
	fl := cmd.Flags()
	fl.StringVar(&f.user, "user", "", "name or uid to run as; default: the template's user")
	fl.StringVar(&f.cwd, "cwd", "", "working directory; default: the user's home")
	fl.Int64Var(&f.timeout, "timeout", 0, "seconds after which the command is killed; 0: never")
	fl.BoolVarP(&f.interactive, "interactive", "i", false, "pass standard input on")
	fl.BoolVarP(&f.tty, "tty", "t", false, "give the command a terminal")
}

// graceAfterTimeout is what a sandbox of a run may live beyond the command's time limit: if this program is killed,
// the server still ends it.
const graceAfterTimeout = 600

func (a *app) run(parent context.Context, argv []string, sf *sandboxFlags, cf commandFlags) (err error) {
	req, err := sf.request()
	if err != nil {
		return err
	}
	if cf.timeout > 0 {
		req.Lifecycle = &client.LifecycleRequest{MaxLifetimeS: cf.timeout + graceAfterTimeout}
	}
	c, err := a.connect()
	if err != nil {
		return err
	}
	ctx, sig, stop := watchSignals(parent)
	defer stop()
	id := ""
	code := exitOwn
	if err = a.createSandbox(ctx, c, req, func(s string) { id = s }); err == nil {
		code, err = a.attach(ctx, c, sig, id, argv, cf)
	}
	if n, ok := signalled(ctx); ok {
		code, err = n, nil
	}
	if id != "" {
		err = errors.Join(err, a.remove(parent, c, id))
	}
	if code == 0 && err == nil {
		return nil
	}
	if code == 0 {
		code = exitOwn
	}
	return &exitError{code: code, err: err}
}

// remove deletes a sandbox also when the command was interrupted.
func (a *app) remove(parent context.Context, c *client.Client, id string) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(parent), deleteTimeout)
	defer cancel()
	_, err := c.DeleteSandbox(ctx, id, 30)
	if err != nil && client.CodeOf(err) != sandbox.CodeNotFound {
		return fmt.Errorf("delete sandbox %s: %w", id, err)
	}
	return nil
}

func (a *app) execCommand() *cobra.Command {
	var cf commandFlags
	cmd := &cobra.Command{
		Use:   "exec [flags] SANDBOX -- COMMAND [ARG...]",
		Short: "Run a command in a sandbox",
		Long: `Runs a command in a sandbox that exists and passes its streams and its exit code through. With -t the command gets a
terminal and sees every key, Ctrl-C included. Without, Ctrl-C is passed on as SIGINT; a second one kills the command.`,
		Example: `  space exec i3k9x0a7c2m5q8w1z4b6n -- ls -l
  space exec -it i3k9x0a7c2m5q8w1z4b6n -- bash
  tar c . | space exec -i --cwd /home/user i3k9x0a7c2m5q8w1z4b6n -- tar x`,
		Args: cobra.MinimumNArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.connect()
			if err != nil {
				return err
			}
			ctx, sig, stop := watchSignals(cmd.Context())
			defer stop()
			code, err := a.attach(ctx, c, sig, args[0], args[1:], cf)
			if n, ok := signalled(ctx); ok {
				code, err = n, nil
			}
			if code == 0 && err == nil {
				return nil
			}
			return &exitError{code: code, err: err}
		},
	}
	cf.add(cmd)
	cmd.Flags().StringArrayVarP(&cf.env, "env", "e", nil, "KEY=VALUE in the command's environment; repeatable")
	return cmd
}
