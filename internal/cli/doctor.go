package cli

import (
	"context"
	"fmt"
	"os"

	"github.com/spf13/cobra"

	"github.com/space-sandbox/space/internal/config"
	"github.com/space-sandbox/space/internal/doctor"
)

func (a *app) doctorCommand() *cobra.Command {
	var cfg config.Config
	settings, settingsErr := config.Settings(&cfg)
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Tell what works on this machine, and what to do about the rest",
		Long: `Checks what the platform needs and what it can use. It needs no running server and no root. The exit code is 1 if
something keeps sandboxes from running.`,
		Example: "  space doctor\n  space doctor -o json",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			lookup := func(name string) (string, bool) { v := a.getenv(name); return v, v != "" }
			if settingsErr != nil {
				return settingsErr
			}
			if err := config.Apply(settings, lookup, ""); err != nil {
				return err
			}
			if err := cfg.FillDefaults(os.Geteuid(), a.getenv); err != nil {
				return err
			}
			return a.doctor(cmd.Context(), cfg)
		},
	}
	for _, s := range settings {
		switch s.Flag {
		case "data-dir", "cache-dir", "api-listen", "data-listen":
			cmd.Flags().Var(s, s.Flag, s.Doc)
		}
	}
	return cmd
}

func (a *app) doctor(ctx context.Context, cfg config.Config) error {
	report := doctor.Run(ctx, doctor.System(doctor.Prober(cfg.CacheDir)), doctor.Options{
		DataDir: cfg.DataDir, CacheDir: cfg.CacheDir, APIListen: cfg.APIListen, DataListen: cfg.DataListen,
	})
	err := a.result(report, func() error {
		rows := [][]string{}
		for _, c := range report.Checks {
			rows = append(rows, []string{string(c.Status), c.Name, c.Message})
			if c.Remedy != "" {
				rows = append(rows, []string{"", "", "-> " + c.Remedy})
			}
		}
		return table(a.out, []string{"STATUS", "CHECK", "FINDING"}, rows)
	})
	if err == nil && report.Failed() {
		return &exitError{code: 1, err: fmt.Errorf("something is missing; see the checks that failed")}
	}
	return err
}
