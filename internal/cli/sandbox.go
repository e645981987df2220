package cli

import (
	"errors"
	"fmt"
	"net/url"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/space-sandbox/space/internal/client"
)

func (a *app) sandboxCommand() *cobra.Command {
	return group("sandbox", "Create, list, show and delete sandboxes",
		"  id=$(space sandbox create)\n  space exec $id -- uname -a\n  space sandbox delete $id",
		a.sandboxCreate(), a.sandboxList(), a.sandboxGet(), a.sandboxDelete())
}

func (a *app) sandboxCreate() *cobra.Command {
	var sf sandboxFlags
	cmd := &cobra.Command{
		Use: "create", Short: "Create a sandbox and print its ID once it runs",
		Example: "  space sandbox create --template base --memory-mib 1024 --metadata team=research\n  space sandbox create -o json",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			req, err := sf.request()
			if err != nil {
				return err
			}
			c, err := a.connect()
			if err != nil {
				return err
			}
			ctx, _, stop := watchSignals(cmd.Context())
			defer stop()
			id := ""
			if err := a.createSandbox(ctx, c, req, func(s string) { id = s }); err != nil {
				if id != "" { // nobody else knows it
					return errors.Join(err, a.remove(cmd.Context(), c, id))
				}
				return err
			}
			s, err := c.Sandbox(ctx, id)
			if err != nil {
				return err
			}
			return a.result(s, func() error {
				_, err := fmt.Fprintln(a.out, escape(s.ID))
				return err
			})
		},
	}
	sf.add(cmd)
	return cmd
}

func (a *app) sandboxList() *cobra.Command {
	var states, metadata []string
	var template string
	cmd := &cobra.Command{
		Use: "list", Aliases: []string{"ls"}, Short: "List sandboxes",
		Example: "  space sandbox list --state running --metadata team=research",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			labels, err := pairs(metadata, "--metadata")
			if err != nil {
				return err
			}
			q := url.Values{"state": states}
			for k, v := range labels {
				q.Set("metadata["+k+"]", v)
			}
			if template != "" {
				q.Set("template", template)
			}
			c, err := a.connect()
			if err != nil {
				return err
			}
			list, err := c.Sandboxes(cmd.Context(), q)
			if err != nil {
				return err
			}
			return a.result(list, func() error {
				rows := [][]string{}
				for _, s := range list {
					rows = append(rows, []string{s.ID, s.State, s.Template.Name + ":" + s.Template.Tag, shape(s), ago(&s.CreatedAt), text(s.Node), text(s.StateReason)})
				}
				return table(a.out, []string{"ID", "STATE", "TEMPLATE", "SHAPE", "CREATED", "NODE", "REASON"}, rows)
			})
		},
	}
	cmd.Flags().StringArrayVar(&states, "state", nil, "only sandboxes in this state; repeatable")
	cmd.Flags().StringArrayVar(&metadata, "metadata", nil, "only sandboxes with this KEY=VALUE; repeatable")
	cmd.Flags().StringVar(&template, "template", "", "only sandboxes of this template")
	return cmd
}

func shape(s *client.Sandbox) string {
	return fmt.Sprintf("%d cpu, %d MiB, disk %d MiB", s.Resources.VCPU, s.Resources.MemoryMiB, s.Resources.DiskMiB)
}

func (a *app) sandboxGet() *cobra.Command {
	return &cobra.Command{
		Use: "get SANDBOX", Short: "Show a sandbox", Example: "  space sandbox get i3k9x0a7c2m5q8w1z4b6n -o json", Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.connect()
			if err != nil {
				return err
			}
			s, err := c.Sandbox(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			return a.result(s, func() error {
				labels := []string{}
				for k, v := range s.Metadata {
					labels = append(labels, k+"="+v)
				}
				slices.Sort(labels)
				return table(a.out, []string{"id", s.ID}, [][]string{
					{"state", s.State + " " + text(s.StateReason)}, {"template", s.Template.Name + ":" + s.Template.Tag}, {"digest", s.Template.Digest},
					{"shape", shape(s)}, {"environment", s.Environment.ID + " " + s.Environment.VMM + " " + s.Environment.VMMVersion + " " + s.Environment.Acceleration},
					{"kernel", s.Environment.Kernel}, {"generation", strconv.FormatUint(s.Generation, 10)}, {"node", text(s.Node)},
					{"created", ago(&s.CreatedAt)}, {"last active", ago(s.LastActiveAt)}, {"metadata", strings.Join(labels, ", ")},
				})
			})
		},
	}
}

func (a *app) sandboxDelete() *cobra.Command {
	return &cobra.Command{
		Use: "delete SANDBOX...", Aliases: []string{"rm"}, Short: "Delete sandboxes and wait for their end",
		Example: "  space sandbox delete i3k9x0a7c2m5q8w1z4b6n", Args: cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.connect()
			if err != nil {
				return err
			}
			ops := []*client.Operation{}
			for _, id := range args {
				op, err := c.DeleteSandbox(cmd.Context(), id, 60)
				if err != nil {
					return fmt.Errorf("delete %s: %w", id, err)
				}
				if op != nil && !op.Ended() {
					if op, err = c.WaitOperation(cmd.Context(), op.ID, nil); err != nil {
						return fmt.Errorf("delete %s: %w", id, err)
					}
				}
				ops = append(ops, op)
			}
			return a.result(ops, func() error { return nil })
		},
	}
}
