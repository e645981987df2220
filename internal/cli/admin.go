package cli

import (
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/space-sandbox/space/internal/client"
	"github.com/space-sandbox/space/internal/sandbox"
)

func (a *app) templateCommand() *cobra.Command {
	list := &cobra.Command{
		Use: "list", Aliases: []string{"ls"}, Short: "List templates", Example: "  space template list", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := a.connect()
			if err != nil {
				return err
			}
			all, err := c.Templates(cmd.Context())
			if err != nil {
				return err
			}
			return a.result(all, func() error {
				rows := [][]string{}
				for _, t := range all {
					rows = append(rows, []string{t.Name + ":" + t.Tag, t.State, fmt.Sprintf("%d MiB", t.SizeBytes>>20), ago(t.CreatedAt), t.Description})
				}
				return table(a.out, []string{"TEMPLATE", "STATE", "SIZE", "CREATED", "DESCRIPTION"}, rows)
			})
		},
	}
	get := &cobra.Command{
		Use: "get NAME", Short: "Show a template", Example: "  space template get base", Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.connect()
			if err != nil {
				return err
			}
			t, err := c.Template(cmd.Context(), args[0])
			if err != nil {
				return fmt.Errorf("template %q: %w", args[0], err)
			}
			return a.result(t, func() error {
				return table(a.out, []string{"template", t.Name + ":" + t.Tag}, [][]string{
					{"state", t.State + " " + text(t.Reason)}, {"digest", text(t.Digest)}, {"size", fmt.Sprintf("%d MiB", t.SizeBytes>>20)},
					{"user", t.DefaultUser}, {"defaults", fmt.Sprintf("%d cpu, %d MiB, disk %d MiB", t.Defaults.VCPU, t.Defaults.MemoryMiB, t.Defaults.DiskMiB)},
					{"created", ago(t.CreatedAt)}, {"description", t.Description},
				})
			})
		},
	}
	return group("template", "List and show templates", "  space template list", list, get)
}

func (a *app) keyCommand() *cobra.Command {
	return group("key", "Create, list and revoke API keys", "  space key create --name ci --scope sandboxes:read --scope sandboxes:write",
		a.keyCreate(), a.keyList(), a.keyRevoke())
}

func (a *app) keyCreate() *cobra.Command {
	var in client.CreateKey
	var metadata []string
	var ttl time.Duration
	var allScopes bool
	cmd := &cobra.Command{
		Use: "create", Short: "Create an API key and print it, once",
		Example: "  space key create --name ci --scope sandboxes:read --scope sandboxes:exec --expires-in 720h",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) (err error) {
			if allScopes {
				in.Scopes = sandbox.AllScopes()
			}
			if len(in.Scopes) == 0 {
				return fmt.Errorf("say what the key may do: --scope, one or more of %s; or --all-scopes", strings.Join(sandbox.AllScopes(), ", "))
			}
			if in.Metadata, err = pairs(metadata, "--metadata"); err != nil {
				return err
			}
			if ttl > 0 {
				t := time.Now().Add(ttl).UTC().Truncate(time.Millisecond)
				in.ExpiresAt = &t
			}
			c, err := a.connect()
			if err != nil {
				return err
			}
			key, err := c.CreateKey(cmd.Context(), in)
			if err != nil {
				return err
			}
			return a.result(key, func() error {
				_, _ = fmt.Fprintf(a.errOut, "key %s; it is not shown again:\n", escape(key.ID))
				_, err := fmt.Fprintln(a.out, escape(text(key.Key)))
				return err
			})
		},
	}
	fl := cmd.Flags()
	fl.StringVar(&in.Name, "name", "cli", "what the key is for")
	fl.StringArrayVar(&in.Scopes, "scope", nil, "what the key may do; repeatable")
	fl.BoolVar(&allScopes, "all-scopes", false, "the key may do everything")
	fl.StringArrayVar(&in.SandboxIDs, "sandbox", nil, "limit the key to this sandbox; repeatable")
	fl.StringArrayVar(&metadata, "metadata", nil, "limit the key to sandboxes with this KEY=VALUE; repeatable")
	fl.DurationVar(&ttl, "expires-in", 0, "how long the key is valid, such as 720h; 0: for ever")
	return cmd
}

func (a *app) keyList() *cobra.Command {
	return &cobra.Command{
		Use: "list", Aliases: []string{"ls"}, Short: "List API keys", Example: "  space key list", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := a.connect()
			if err != nil {
				return err
			}
			keys, err := c.Keys(cmd.Context())
			if err != nil {
				return err
			}
			return a.result(keys, func() error {
				rows := [][]string{}
				for _, k := range keys {
					state := "valid"
					if k.RevokedAt != nil {
						state = "revoked"
					} else if k.ExpiresAt != nil && time.Now().After(*k.ExpiresAt) {
						state = "expired"
					}
					rows = append(rows, []string{k.ID, k.Name, k.Prefix + "…", state, ago(&k.CreatedAt), ago(k.LastUsedAt), strings.Join(k.Scopes, ",")})
				}
				return table(a.out, []string{"ID", "NAME", "KEY", "STATE", "CREATED", "USED", "SCOPES"}, rows)
			})
		},
	}
}

func (a *app) keyRevoke() *cobra.Command {
	return &cobra.Command{
		Use: "revoke KEY", Short: "Revoke an API key by its ID", Example: "  space key revoke k3k9x0a7c2m5q8w1z4b6n", Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.connect()
			if err != nil {
				return err
			}
			key, err := c.RevokeKey(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			return a.result(key, func() error { return nil })
		},
	}
}
