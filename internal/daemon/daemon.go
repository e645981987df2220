package daemon

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"time"

	"github.com/space-sandbox/space/internal/api"
	"github.com/space-sandbox/space/internal/auth"
	"github.com/space-sandbox/space/internal/config"
	"github.com/space-sandbox/space/internal/control"
	"github.com/space-sandbox/space/internal/dataplane"
	"github.com/space-sandbox/space/internal/image"
	"github.com/space-sandbox/space/internal/node"
	"github.com/space-sandbox/space/internal/node/local"
	"github.com/space-sandbox/space/internal/node/nodeclient"
	"github.com/space-sandbox/space/internal/store/sqlite"
	"github.com/space-sandbox/space/internal/vmm/qemu"
)

// AdminKeyFile is the name of the file in the data folder that holds the admin key.
const AdminKeyFile = "admin.key"

// daemon is one `space up`. close ends what was made, last first.
type daemon struct {
	cfg     config.Config
	version string
	log     *slog.Logger

	apiListener, dataListener net.Listener
	node                      *node.Node
	plane                     *control.Plane
	api                       *api.Server
	data                      *dataplane.Server
	closers                   []func() error
}

// Run serves until ctx ends, then shuts down in order. cfg must have its defaults filled in.
func Run(ctx context.Context, cfg config.Config, version string, log *slog.Logger) (err error) {
	d := &daemon{cfg: cfg, version: version, log: log}
	defer func() { err = errors.Join(err, d.close()) }()
	if err := d.listen(ctx); err != nil {
		return err
	}
	if err := d.assemble(ctx); err != nil {
		return err
	}
	return d.serve(ctx)
}

func (d *daemon) onClose(fn func() error) { d.closers = append(d.closers, fn) }

func (d *daemon) close() error {
	var errs []error
	for i := len(d.closers) - 1; i >= 0; i-- {
		errs = append(errs, d.closers[i]())
	}
	return errors.Join(errs...)
}

// listen binds both ports.
func (d *daemon) listen(ctx context.Context) (err error) {
	if d.apiListener, err = d.bind(ctx, "api-listen", d.cfg.APIListen); err != nil {
		return err
	}
	d.dataListener, err = d.bind(ctx, "data-listen", d.cfg.DataListen)
	return err
}

func (d *daemon) bind(ctx context.Context, flag, address string) (net.Listener, error) {
	var lc net.ListenConfig
	l, err := lc.Listen(ctx, "tcp", address)
	if err != nil {
		return nil, fmt.Errorf("cannot listen on %s: %w; is another server running? Choose another address with --%s", address, err, flag)
	}
	d.onClose(func() error { // the HTTP server has closed it already, if it got that far
		if err := l.Close(); err != nil && !errors.Is(err, net.ErrClosed) {
			return err
		}
		return nil
	})
	return l, nil
}

// assemble makes everything behind the listeners, and starts the node and the control plane.
func (d *daemon) assemble(ctx context.Context) error {
	if err := os.MkdirAll(d.cfg.DataDir, 0o700); err != nil {
		return fmt.Errorf("data folder: %w; choose another with --data-dir", err)
	}
	if err := privateFolder(d.cfg.RuntimeDir); err != nil {
		return fmt.Errorf("runtime folder: %w; choose another with --runtime-dir", err)
	}
	path, err := sqlite.ParseURL(d.cfg.Database)
	if err != nil {
		return fmt.Errorf("--database: %w", err)
	}
	st, err := sqlite.Open(ctx, path)
	if err != nil {
		return err
	}
	d.onClose(st.Close)
	keyFile := filepath.Join(d.cfg.DataDir, AdminKeyFile)
	_, statErr := os.Stat(keyFile)
	if _, err := auth.EnsureAdminKey(ctx, st, keyFile); err != nil {
		return err
	}
	if errors.Is(statErr, os.ErrNotExist) {
		d.log.Info("the admin key was made; the space command finds it by itself, other clients need it in SPACE_API_TOKEN",
			"file", keyFile, "use", "export SPACE_API_TOKEN=$(cat "+keyFile+")")
	}
	client, err := d.startNode(ctx)
	if err != nil {
		return err
	}
	name := d.nodeName()
	d.plane, err = control.New(control.Config{Store: st, Nodes: map[string]control.Node{name: client}, NodeName: name, Logger: d.log})
	if err != nil {
		return err
	}
	d.onClose(d.plane.Close)
	return d.makeServers()
}

func (d *daemon) nodeName() string {
	if d.cfg.NodeName != "" {
		return d.cfg.NodeName
	}
	if name, err := os.Hostname(); err == nil && name != "" {
		return name
	}
	return "local"
}

func (d *daemon) startNode(ctx context.Context) (*nodeclient.Client, error) {
	cache, err := image.Open(d.cfg.CacheDir)
	if err != nil {
		return nil, fmt.Errorf("cache folder: %w", err)
	}
	d.onClose(cache.Close)
	pool := d.cfg.PoolSize
	if pool == 0 {
		pool = -1 // the node's 0 means its default
	}
	cfg := node.Config{
		Name: d.nodeName(), DataDir: d.cfg.DataDir, RuntimeDir: d.cfg.RuntimeDir, PoolSize: pool,
		MemoryLimitMiB: uint64(d.cfg.MemoryLimitMiB), VMMUIDBase: uint32(d.cfg.VMMUIDBase), Log: d.log,
	}
	if d.node, err = node.New(cfg, local.Deps(cache, qemu.New(), nil)); err != nil {
		return nil, err
	}
	if err := d.node.Start(ctx); err != nil {
		return nil, fmt.Errorf("start the node: %w", err)
	}
	d.onClose(d.node.Close)
	memory := nodeclient.InProcess(d.node.Handler())
	d.onClose(memory.Close)
	return memory.Client(), nil
}

func (d *daemon) makeServers() (err error) {
	d.api, err = api.New(api.Config{
		Service: d.plane, Version: d.version, AllowedHosts: append([]string{d.cfg.Domain}, d.cfg.AllowedHosts...),
		DataPlaneURL: d.dataPlaneURL(), Logger: d.log, Concurrency: d.cfg.Concurrency,
	})
	d.data = dataplane.New(dataplane.Config{Service: d.plane, Logger: d.log})
	return err
}

// dataPlaneURL is what sessions name. An address that means "all of this machine's" is no address for a client.
func (d *daemon) dataPlaneURL() string {
	if d.cfg.DataPlaneURL != "" {
		return d.cfg.DataPlaneURL
	}
	host, port, err := net.SplitHostPort(d.dataListener.Addr().String())
	if err != nil {
		return "http://" + d.cfg.DataListen
	}
	if ip := net.ParseIP(host); ip == nil || ip.IsUnspecified() {
		host = d.cfg.Domain
	}
	return "http://" + net.JoinHostPort(host, port)
}

// serve runs until ctx ends or a server fails.
func (d *daemon) serve(ctx context.Context) error {
	planeCtx, stopPlane := context.WithCancel(context.WithoutCancel(ctx))
	planeDone := make(chan struct{})
	go func() {
		defer close(planeDone)
		d.plane.Run(planeCtx)
	}()
	defer func() {
		stopPlane()
		<-planeDone
	}()
	failed := make(chan error, 2)
	servers := []*http.Server{d.httpServer(d.api), d.httpServer(d.data)}
	for i, l := range []net.Listener{d.apiListener, d.dataListener} {
		go func() { failed <- servers[i].Serve(l) }() // ends by Shutdown or Close below
	}
	d.log.Info("listening", "api", "http://"+d.apiListener.Addr().String(), "data_plane", d.dataPlaneURL(), "data_dir", d.cfg.DataDir)
	go d.tellReady(planeCtx) // ends with planeCtx
	var err error
	select {
	case <-ctx.Done():
	case err = <-failed:
		err = fmt.Errorf("serve: %w", err)
	}
	return errors.Join(err, d.shutdown(servers)) //nolint:contextcheck // ctx has ended; shutting down has deadlines of its own
}

func (d *daemon) httpServer(h http.Handler) *http.Server {
	return &http.Server{
		Handler: h, ReadHeaderTimeout: 10 * time.Second, IdleTimeout: 2 * time.Minute, MaxHeaderBytes: 64 << 10,
		ErrorLog: slog.NewLogLogger(d.log.Handler(), slog.LevelWarn),
	}
}
