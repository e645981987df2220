package cli

import (
	"context"
	"fmt"
	"io"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/space-sandbox/space/internal/client"
)

func (a *app) psCommand() *cobra.Command {
	return &cobra.Command{
		Use: "ps SANDBOX", Short: "List the processes of a sandbox", Example: "  space ps i3k9x0a7c2m5q8w1z4b6n", Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.connect()
			if err != nil {
				return err
			}
			list, err := c.Processes(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			return a.result(list, func() error {
				rows := [][]string{}
				for _, p := range list {
					rows = append(rows, []string{p.ID, p.State, exitText(p.Exit), p.User, ago(p.StartedAt), strings.Join(p.Argv, " ")})
				}
				return table(a.out, []string{"ID", "STATE", "EXIT", "USER", "STARTED", "COMMAND"}, rows)
			})
		},
	}
}

func exitText(e *client.Exit) string {
	switch {
	case e == nil:
		return "-"
	case e.Signal != nil:
		return *e.Signal
	case e.Code != nil:
		return strconv.Itoa(*e.Code)
	}
	return "?"
}

func (a *app) killCommand() *cobra.Command {
	return &cobra.Command{
		Use: "kill SANDBOX PROCESS", Short: "Kill a process with all its children",
		Example: "  space kill i3k9x0a7c2m5q8w1z4b6n p3k9x0a7c2m5q8w1z4b6n", Args: cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.connect()
			if err != nil {
				return err
			}
			p, err := c.KillProcess(cmd.Context(), args[0], args[1])
			if err != nil {
				return err
			}
			return a.result(p, func() error {
				if p.Pending {
					_, _ = fmt.Fprintln(a.errOut, "the kill was sent; the death has not been seen yet")
				}
				return nil
			})
		},
	}
}

func (a *app) logsCommand() *cobra.Command {
	var follow bool
	cmd := &cobra.Command{
		Use: "logs SANDBOX PROCESS", Short: "Show what a process has written",
		Long: `Shows what a process has written so far, its standard error on ours. With -f it goes on until the process ends; a process
that waits for its first reader is started by that.`,
		Example: "  space logs -f i3k9x0a7c2m5q8w1z4b6n p3k9x0a7c2m5q8w1z4b6n", Args: cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.connect()
			if err != nil {
				return err
			}
			p, err := c.Process(cmd.Context(), args[0], args[1])
			if err != nil {
				return err
			}
			if follow || p.State == "exited" {
				s, err := c.NewSession(cmd.Context(), args[0], args[1])
				if err != nil {
					return err
				}
				_, err = c.Events(cmd.Context(), s, a.show)
				return err
			}
			return a.writtenSoFar(cmd.Context(), c, args[0], args[1])
		},
	}
	cmd.Flags().BoolVarP(&follow, "follow", "f", false, "go on until the process ends")
	return cmd
}

func (a *app) writtenSoFar(ctx context.Context, c *client.Client, id, pid string) error {
	for _, s := range []struct {
		name string
		w    io.Writer
	}{{"stdout", a.out}, {"pty", a.out}, {"stderr", a.errOut}} {
		r, err := c.Output(ctx, id, pid, s.name)
		if err != nil {
			return fmt.Errorf("%s: %w", s.name, err)
		}
		_, err = io.Copy(s.w, r)
		_ = r.Close()
		if err != nil {
			return fmt.Errorf("%s: %w", s.name, err)
		}
	}
	return nil
}
