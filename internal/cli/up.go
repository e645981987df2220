package cli

import (
	"io"
	"log/slog"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/space-sandbox/space/internal/config"
	"github.com/space-sandbox/space/internal/daemon"
)

func (a *app) upCommand() *cobra.Command {
	var cfg config.Config
	var file string
	settings, settingsErr := config.Settings(&cfg)
	cmd := &cobra.Command{
		Use:   "up",
		Short: "Start the platform on this machine",
		Long: `Starts API, data plane and node in one process in the foreground. Every flag has a twin in the environment (--data-dir is
SPACE_DATA_DIR) and a key in the file that --config names (data_dir); the flag wins, then the environment.

SIGTERM and SIGINT end it in order: streams are told, running requests may finish, and sandboxes go on, to be taken over
by the next start. With --stop-sandboxes they end too.`,
		Example: `  space up
  space up --data-dir /srv/space --api-listen 127.0.0.1:9000 --data-listen 127.0.0.1:9001
  SPACE_POOL_SIZE=0 space up --config /etc/space.yaml`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if settingsErr != nil {
				return settingsErr
			}
			if file == "" {
				file = a.getenv("SPACE_CONFIG")
			}
			lookup := func(name string) (string, bool) { v := a.getenv(name); return v, v != "" }
			if err := config.Apply(settings, lookup, file); err != nil {
				return err
			}
			if err := cfg.FillDefaults(os.Geteuid(), a.getenv); err != nil {
				return err
			}
			ctx, stop := signal.NotifyContext(cmd.Context(), syscall.SIGINT, syscall.SIGTERM)
			defer stop()
			return daemon.Run(ctx, cfg, buildVersion(), logger(a.errOut, cfg))
		},
	}
	config.AddFlags(cmd.Flags(), settings)
	cmd.Flags().StringVar(&file, "config", "", "configuration file, .yaml or .toml")
	return cmd
}

func logger(w io.Writer, cfg config.Config) *slog.Logger {
	var level slog.Level
	if err := level.UnmarshalText([]byte(cfg.LogLevel)); err != nil {
		level = slog.LevelInfo // checked before
	}
	opts := &slog.HandlerOptions{Level: level}
	if cfg.LogFormat == "json" {
		return slog.New(slog.NewJSONHandler(w, opts))
	}
	return slog.New(slog.NewTextHandler(w, opts))
}
