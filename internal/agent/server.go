package agent

import (
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"errors"
	"net"
	"net/http"
	"strings"
	"sync"
	"time"

	"connectrpc.com/connect"
	"github.com/space-sandbox/space/internal/agent/files"
	"github.com/space-sandbox/space/internal/agent/proc"
	"github.com/space-sandbox/space/internal/agent/users"
	"github.com/space-sandbox/space/internal/gen/space/agent/v1/agentv1connect"
)

const (
	maxHeader    = 16 << 10
	maxMessage   = 1 << 20
	headerWithin = 10 * time.Second
)

// Config is what a Server needs.
type Config struct {
	Token       string // the control token until the first Resume
	Root        string // folder of the guest's files; "/" in a guest
	CgroupRoot  string // a cgroup2 folder that the agent may make `user` in
	DefaultUser string // "" means "user"
	System      System // nil: the real one
	AllOrphans  bool   // reap every child, as PID 1 must
}

// Server serves one guest.
type Server struct {
	sys   System
	table *proc.Table
	http  *http.Server

	life sync.Mutex // one Freeze or Resume at a time

	mu         sync.Mutex
	token      [sha256.Size]byte
	generation uint64
	machineID  string
}

// New makes the `user` cgroup and starts the reaper. Close ends what it started.
func New(cfg Config) (*Server, error) {
	if cfg.Token == "" {
		return nil, errors.New("agent: no control token")
	}
	if cfg.DefaultUser == "" {
		cfg.DefaultUser = "user"
	}
	db := users.New(cfg.Root, cfg.DefaultUser)
	table, err := proc.New(proc.Config{CgroupRoot: cfg.CgroupRoot, Users: db, AllOrphans: cfg.AllOrphans})
	if err != nil {
		return nil, err
	}
	s := &Server{sys: cfg.System, table: table, token: sha256.Sum256([]byte(cfg.Token))}
	if s.sys == nil {
		s.sys = NewLinux(cfg.Root)
	}
	opts := []connect.HandlerOption{connect.WithReadMaxBytes(maxMessage), connect.WithCompression("gzip", nil, nil)}
	mux := http.NewServeMux()
	mux.Handle(agentv1connect.NewAgentServiceHandler(s, opts...))
	path, processes := agentv1connect.NewProcessServiceHandler(proc.NewService(table), opts...)
	mux.Handle(path, proc.Coalesce(processes))
	mux.Handle(agentv1connect.NewFileServiceHandler(files.New(db), opts...))
	s.http = &http.Server{Handler: s.authorize(mux), MaxHeaderBytes: maxHeader, ReadHeaderTimeout: headerWithin}
	return s, nil
}

// Serve answers on l until Close.
func (s *Server) Serve(l net.Listener) error {
	err := s.http.Serve(l)
	if errors.Is(err, http.ErrServerClosed) {
		return nil
	}
	return err
}

// Close ends the server, kills every process and waits until what it owns is gone or ctx ends.
func (s *Server) Close(ctx context.Context) error {
	err := s.http.Close()
	return errors.Join(err, s.table.Close(ctx))
}

// authorize lets only requests with the current token pass. Hashes are compared, so neither the length nor the
// content of the token shows in the time it takes.
func (s *Server) authorize(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		given, ok := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
		sum := sha256.Sum256([]byte(given))
		s.mu.Lock()
		want := s.token
		s.mu.Unlock()
		if subtle.ConstantTimeCompare(sum[:], want[:]) != 1 || !ok {
			http.Error(w, "unauthenticated", http.StatusUnauthorized)
			return
		}
		next.ServeHTTP(w, r)
	})
}
