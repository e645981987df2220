package shim

import (
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"strings"
	"time"

	"connectrpc.com/connect"
	"github.com/space-sandbox/space/internal/gen/space/agent/v1/agentv1connect"
	"github.com/space-sandbox/space/internal/gen/space/node/v1/nodev1connect"
	shimv1 "github.com/space-sandbox/space/internal/gen/space/shim/v1"
	"github.com/space-sandbox/space/internal/gen/space/shim/v1/shimv1connect"
	"github.com/space-sandbox/space/internal/vmm"
	"golang.org/x/sys/unix"
)

const (
	maxRequest = 4 << 20
	httpGrace  = 300 * time.Millisecond
)

// Config is what a shim needs beside its folder.
type Config struct {
	Dir    string     // the shim's folder, with spec.json
	Driver vmm.Driver // starts the VM
	// OpenMemory returns the snapshot's memory. It is called once, and only in MODE_RESTORE; the shim closes it.
	OpenMemory func() (*os.File, error)
	Log        *slog.Logger
}

// Run is the life of a shim. It returns nil after a capture or a Shutdown, and when ctx ends after an orderly
// shutdown with the reason sandbox_failed.
func Run(ctx context.Context, cfg Config) error {
	if err := writePID(cfg.Dir); err != nil {
		return err
	}
	spec, err := loadSpec(cfg.Dir)
	if err != nil {
		return err
	}
	if want := cfg.Driver.Name(); spec.GetDriver() != "" && spec.GetDriver() != want {
		return fmt.Errorf("launch spec: driver %q, this shim has %q", spec.GetDriver(), want)
	}
	s := newServer(cfg, spec)
	defer s.end()
	if spec.GetMode() == shimv1.LaunchSpec_MODE_CAPTURE {
		return s.capture(ctx)
	}
	return s.run(ctx)
}

// run serves until the shim is to end.
func (s *server) run(ctx context.Context) error {
	l, err := listen(ctx, s.spec.GetSocket())
	if err != nil {
		return err
	}
	protocols := new(http.Protocols)
	protocols.SetHTTP1(true)
	protocols.SetUnencryptedHTTP2(true)
	srv := &http.Server{
		Handler: s.handler(), Protocols: protocols, ReadHeaderTimeout: 10 * time.Second, MaxHeaderBytes: 64 << 10,
		ErrorLog: slog.NewLogLogger(s.log.Handler(), slog.LevelWarn),
	}
	served := make(chan error, 1)
	go func() { served <- srv.Serve(l) }()
	s.tasks.Go(s.prepare)
	select {
	case err = <-s.exit:
	case serr := <-served:
		err = fmt.Errorf("serve: %w", serr)
	case <-ctx.Done():
	}
	_, down := s.Shutdown(context.WithoutCancel(ctx), connect.NewRequest(&shimv1.ShutdownRequest{Reason: reasonFailed}))
	grace, cancel := context.WithTimeout(context.WithoutCancel(ctx), httpGrace)
	defer cancel()
	if srv.Shutdown(grace) != nil {
		_ = srv.Close()
	}
	s.tasks.Wait()
	return errors.Join(err, down)
}

// handler routes and authenticates.
func (s *server) handler() http.Handler {
	// No compression: the peer is on this machine, and a compressor takes more memory than a whole stream.
	limit := connect.WithHandlerOptions(connect.WithReadMaxBytes(maxRequest), connect.WithCompression("gzip", nil, nil))
	mux := http.NewServeMux()
	mux.Handle(shimv1connect.NewShimServiceHandler(s, limit))
	mux.Handle(nodev1connect.NewSandboxServiceHandler(sandboxService{s}, limit))
	mux.Handle(agentv1connect.NewFileServiceHandler(newFileService(s), limit))
	want := sha256.Sum256([]byte(s.spec.GetToken()))
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		token, _ := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
		got := sha256.Sum256([]byte(token))
		if subtle.ConstantTimeCompare(got[:], want[:]) != 1 {
			http.Error(w, "a shim token is needed", http.StatusUnauthorized)
			return
		}
		mux.ServeHTTP(w, r)
	})
}

// listen opens the socket for its owner alone. The umask does it, so that there is no moment in between.
func listen(ctx context.Context, path string) (net.Listener, error) {
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	old := unix.Umask(0o177)
	l, err := (&net.ListenConfig{}).Listen(ctx, "unix", path)
	unix.Umask(old)
	if err != nil {
		return nil, fmt.Errorf("listen: %w", err)
	}
	return peerListener{l}, nil
}

// peerListener hangs up on peers that are neither root nor of the shim's own uid.
type peerListener struct{ net.Listener }

// Accept implements net.Listener.
func (l peerListener) Accept() (net.Conn, error) {
	for {
		conn, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		if peerAllowed(conn) {
			return conn, nil
		}
		conn.Close()
	}
}

func peerAllowed(conn net.Conn) bool {
	uc, ok := conn.(*net.UnixConn)
	if !ok {
		return false
	}
	raw, err := uc.SyscallConn()
	if err != nil {
		return false
	}
	allowed := false
	err = raw.Control(func(fd uintptr) {
		cred, err := unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
		allowed = err == nil && (cred.Uid == 0 || int(cred.Uid) == os.Getuid())
	})
	return err == nil && allowed
}
