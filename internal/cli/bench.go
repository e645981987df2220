package cli

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/space-sandbox/space/internal/bench"
	"github.com/space-sandbox/space/internal/bench/floor"
	"github.com/space-sandbox/space/internal/client"
	"github.com/space-sandbox/space/internal/daemon"
)

func (a *app) benchCommand() *cobra.Command {
	var n int
	var apiURL, cacheDir string
	cmd := &cobra.Command{
		Use:   "bench",
		Short: "Measure how fast sandboxes are on this machine",
		Long: `Starts servers of its own, one with ready VMs and one without, in a temporary data folder, measures them and removes
everything again. Next to each figure it measures the floor: what the VMM alone needs for the same thing, in the same run.
With --api-url it measures a server that runs, with SPACE_API_TOKEN, and no floors. What moves 64 MiB is sampled at most
five times; N tells.`,
		Example: "  space bench -n 50\n  space bench -n 10 -o json > bench.json",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if n < 1 {
				return errors.New("-n must be at least 1")
			}
			ctx, _, stop := watchSignals(cmd.Context())
			defer stop()
			cfg := bench.Config{N: n, Say: func(s string) { _, _ = fmt.Fprintln(a.errOut, "measuring:", s) }}
			if apiURL != "" {
				cfg.Armed = client.New(client.Config{APIURL: apiURL, DataURL: a.getenv("SPACE_DATA_PLANE_URL"), Token: a.getenv("SPACE_API_TOKEN")})
				return a.bench(ctx, cfg)
			}
			return a.privateBench(ctx, cfg, cacheDir)
		},
	}
	cmd.Flags().IntVarP(&n, "samples", "n", 50, "samples of each figure")
	cmd.Flags().StringVar(&apiURL, "api-url", "", "measure the server at this URL instead of private ones")
	cmd.Flags().StringVar(&cacheDir, "cache-dir", "", "folder of templates and kernels; default: as for space up")
	return cmd
}

func (a *app) privateBench(ctx context.Context, cfg bench.Config, cacheDir string) (err error) {
	_, _ = fmt.Fprintln(a.errOut, "starting two private servers")
	var pids []int
	var armed *private
	for _, s := range []struct {
		client **client.Client
		pool   int
	}{{&cfg.Armed, 2}, {&cfg.Unarmed, 0}} {
		p, perr := startPrivate(ctx, cacheDir, s.pool)
		if p != nil {
			defer func() { err = errors.Join(err, p.stop()) }()
		}
		if perr != nil {
			return perr
		}
		*s.client = p.client
		pids = append(pids, p.cmd.Process.Pid)
		if s.pool > 0 {
			armed = p
		} else {
			cfg.UnarmedDir = p.dir
		}
	}
	cfg.Settle = bench.Quiet(pids...)
	if cfg.Floor, err = floor.Open(ctx, armed.dir); err != nil {
		return fmt.Errorf("floor: %w", err)
	}
	defer func() { err = errors.Join(err, cfg.Floor.Close()) }() // before the server removes its folder
	return a.bench(ctx, cfg)
}

func (a *app) bench(ctx context.Context, cfg bench.Config) error {
	r, err := bench.Run(ctx, cfg)
	if err != nil {
		return err
	}
	return a.result(r, func() error {
		rows := [][]string{}
		for _, f := range r.Figures {
			row := []string{f.Name, f.Unit, strconv.Itoa(f.N)}
			for _, v := range []float64{f.P50, f.P95, f.P99} {
				row = append(row, strconv.FormatFloat(v, 'f', 1, 64))
			}
			for _, v := range []*float64{f.FloorP50, f.Ratio} {
				if v == nil {
					row = append(row, "-")
				} else {
					row = append(row, strconv.FormatFloat(*v, 'f', 2, 64))
				}
			}
			rows = append(rows, row)
		}
		return table(a.out, []string{"FIGURE", "UNIT", "N", "P50", "P95", "P99", "FLOOR P50", "RATIO"}, rows)
	})
}

// private is a server of our own with a temporary data folder.
type private struct {
	dir    string
	cmd    *exec.Cmd
	exited chan struct{}
	client *client.Client
}

// startPrivate starts a server and waits until it is ready. What it returns must be stopped, also after an error.
func startPrivate(ctx context.Context, cacheDir string, pool int) (*private, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp("", "space-bench-")
	if err != nil {
		return nil, err
	}
	p := &private{dir: dir, exited: make(chan struct{})}
	api, data, err := freePorts(ctx)
	if err != nil {
		close(p.exited)
		return p, err
	}
	args := []string{"up", "--data-dir", dir, "--runtime-dir", filepath.Join(dir, "r"), "--api-listen", api, "--data-listen", data,
		"--pool-size", strconv.Itoa(pool), "--stop-sandboxes", "--log-level", "error"}
	if cacheDir != "" {
		args = append(args, "--cache-dir", cacheDir)
	}
	p.cmd = exec.Command(self, args...) //nolint:gosec,noctx // our own program; stop ends it in order
	p.cmd.Stderr = os.Stderr
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // Ctrl-C is ours: we end it in order
	if err := p.cmd.Start(); err != nil {
		close(p.exited)
		return p, err
	}
	go func() { // ends with the process
		_ = p.cmd.Wait()
		close(p.exited)
	}()
	return p, p.ready(ctx, api, data)
}

func (p *private) ready(ctx context.Context, api, data string) error {
	probe := client.New(client.Config{APIURL: "http://" + api})
	for probe.Ready(ctx) != nil {
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-p.exited:
			return errors.New("the private server ended early")
		case <-time.After(200 * time.Millisecond):
		}
	}
	token, err := os.ReadFile(filepath.Join(p.dir, daemon.AdminKeyFile))
	p.client = client.New(client.Config{APIURL: "http://" + api, DataURL: "http://" + data, Token: strings.TrimSpace(string(token))})
	return err
}

func (p *private) stop() error {
	select {
	case <-p.exited:
	default:
		if err := p.cmd.Process.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
			return err
		}
		select {
		case <-p.exited:
		case <-time.After(time.Minute):
			return fmt.Errorf("the private server (process %d) did not end; its data is in %s", p.cmd.Process.Pid, p.dir)
		}
	}
	return os.RemoveAll(p.dir)
}

// freePorts returns two addresses that nobody listens on.
func freePorts(ctx context.Context) (string, string, error) {
	var lc net.ListenConfig
	var out [2]string
	for i := range out {
		l, err := lc.Listen(ctx, "tcp", "127.0.0.1:0")
		if err != nil {
			return "", "", err
		}
		defer func() { _ = l.Close() }()
		out[i] = l.Addr().String()
	}
	return out[0], out[1], nil
}
