package api

import (
	"context"
	"errors"
	"log/slog"
	"net/http"
	"strings"
	"sync"

	"github.com/space-sandbox/space/internal/api/wire"
	"github.com/space-sandbox/space/internal/auth"
	"github.com/space-sandbox/space/internal/control"
	"github.com/space-sandbox/space/internal/sandbox"
)

// Modes of the limit of running requests.
const (
	ConcurrencyEnforce = "enforce" // refuse with rate_limited
	ConcurrencyObserve = "observe" // count and log only
)

// DefaultConcurrency is how many requests one client may have running.
const DefaultConcurrency = 32

// Config is what a Server needs.
type Config struct {
	Service control.Service
	Version string // of the product, shown in the OpenAPI document
	// AllowedHosts are the names that clients reach the listener by, with or without port. localhost and addresses
	// are always allowed.
	AllowedHosts []string
	// DataPlaneURL is where clients reach the data plane, without a slash at the end.
	DataPlaneURL string
	// DataPlaneURLFunc replaces DataPlaneURL if the address is known only later; nil: not used.
	DataPlaneURLFunc func() string
	Logger           *slog.Logger // nil: no log
	Concurrency      int          // requests a client may have running; 0: DefaultConcurrency
	ConcurrencyMode  string       // ConcurrencyEnforce (default) or ConcurrencyObserve
	// Fallback answers what lies outside of the native API (the E2B-compatible API); nil: 501.
	Fallback http.Handler
}

// Server is the native API as an http.Handler.
type Server struct {
	cfg     Config
	log     *slog.Logger
	schemas *schemas
	routes  *router
	limit   *limiter
	doc     document
	handler http.Handler
	drain   chan struct{} // closed when Drain begins
	once    sync.Once
	running sync.WaitGroup
	mu      sync.Mutex // guards draining against running.Add
	closing bool
}

// New returns the API of cfg. It fails only if the OpenAPI document cannot be made, which a test rules out.
func New(cfg Config) (*Server, error) {
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	if cfg.Concurrency == 0 {
		cfg.Concurrency = DefaultConcurrency
	}
	cfg.DataPlaneURL = strings.TrimSuffix(cfg.DataPlaneURL, "/")
	s := &Server{
		cfg: cfg, log: cfg.Logger, schemas: newSchemas(), routes: newRouter(), drain: make(chan struct{}),
		limit: newLimiter(cfg.Concurrency, cfg.ConcurrencyMode != ConcurrencyObserve),
	}
	table := s.table()
	for _, r := range table {
		s.routes.add(r)
	}
	for _, r := range upcoming() {
		s.routes.add(r)
	}
	doc, err := s.describe(table)
	if err != nil {
		return nil, err
	}
	s.doc = doc
	s.handler = wire.Guard(s.log, s.serve)
	return s, nil
}

// ServeHTTP implements http.Handler.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) { s.handler.ServeHTTP(w, r) }

// Drain refuses new requests, ends long waits early and returns when no request is running or ctx is over.
func (s *Server) Drain(ctx context.Context) error {
	s.mu.Lock()
	s.closing = true
	s.mu.Unlock()
	s.once.Do(func() { close(s.drain) })
	done := make(chan struct{})
	go func() { // ends when the last request ends
		s.running.Wait()
		close(done)
	}()
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (s *Server) dataPlane() string {
	if s.cfg.DataPlaneURLFunc != nil {
		return strings.TrimSuffix(s.cfg.DataPlaneURLFunc(), "/")
	}
	return s.cfg.DataPlaneURL
}

// enter counts a request in, unless the server is draining.
func (s *Server) enter() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closing {
		return false
	}
	s.running.Add(1)
	return true
}

func (s *Server) serve(w *wire.Recorder, r *http.Request) {
	if r.URL.Path == "/healthz" { // says only that the process is alive, also while it drains
		s.health(w, r)
		return
	}
	if !s.enter() {
		w.Fail(r, sandbox.Errorf(sandbox.CodeServiceUnavailable, "the server is shutting down"))
		return
	}
	defer s.running.Done()
	if !wire.HostAllowed(r.Host, s.cfg.AllowedHosts) {
		w.Fail(r, sandbox.Errorf(sandbox.CodeForbidden, "the Host header names no host of this server").
			WithRemediation("use the address the server is configured with, or add the name to its allowed hosts"))
		return
	}
	switch r.URL.Path {
	case "/readyz":
		s.ready(w, r)
		return
	case "/openapi.yaml", "/openapi.json":
		s.openapi(w, r)
		return
	}
	path, ok := nativePath(r.URL.EscapedPath())
	if !ok {
		s.foreign(w, r)
		return
	}
	s.native(w, r, path)
}

// nativePath returns the part of a path behind /v1 or /api/v1.
func nativePath(path string) (string, bool) {
	rest, ok := strings.CutPrefix(strings.TrimPrefix(path, "/api"), "/v1")
	return rest, ok && (rest == "" || rest[0] == '/')
}

func (s *Server) native(w *wire.Recorder, r *http.Request, path string) {
	found, values := s.routes.find(path)
	if found == nil {
		w.Fail(r, sandbox.Errorf(sandbox.CodeNotFound, "no such route").WithRemediation("see /openapi.yaml for the routes of this API"))
		return
	}
	method := r.Method
	if method == http.MethodHead {
		method = http.MethodGet
	}
	rt := found.methods[method]
	if rt == nil {
		w.Header().Set("Allow", found.allow())
		e := sandbox.Errorf(sandbox.CodeInvalidRequest, "this route does not know the method")
		e.Status = http.StatusMethodNotAllowed
		w.Fail(r, e.WithRemediation("use one of "+found.allow()))
		return
	}
	w.Label = rt.method + " /v1" + rt.path
	c := &call{Recorder: w, r: r, server: s, route: rt, path: values}
	if err := s.answer(c); err != nil {
		w.Fail(r, err)
	}
}

// answer runs the checks that all routes share, in the order in which a client can mend them, then the handler.
func (s *Server) answer(c *call) error {
	release, err := s.admit(c)
	if err != nil {
		return err
	}
	defer release()
	if c.route.later { // what it will take is not known yet
		return c.route.handle(c)
	}
	if !wire.Accepts(c.r.Header, c.route.mediaType()) {
		e := sandbox.Errorf(sandbox.CodeInvalidRequest, "the Accept header does not admit %s", c.route.mediaType())
		e.Status = http.StatusNotAcceptable
		return e
	}
	if err := c.checkContentType(); err != nil {
		return err
	}
	if err := c.parseQuery(); err != nil {
		return err
	}
	if c.route.body == bodyJSON || c.route.body == bodyNone {
		if err := c.readJSON(); err != nil {
			return err
		}
	}
	if c.idem, err = c.idempotency(); err != nil {
		return err
	}
	return c.route.handle(c)
}

// admit authenticates the caller and counts it. release is never nil when err is.
func (s *Server) admit(c *call) (release func(), err error) {
	release = func() {}
	key := wire.Bearer(c.r.Header)
	if key == "" {
		key = c.r.Header.Get("X-API-Key")
	}
	if key == "" {
		return nil, sandbox.Errorf(sandbox.CodeUnauthorized, "no credential was sent").
			WithRemediation("send Authorization: Bearer <API key>, or X-API-Key")
	}
	if id := c.r.Header.Get(sessionHeader); id != "" && c.route.session {
		return release, c.authenticateSession(id, key)
	}
	if c.p, err = s.cfg.Service.Authenticate(c.r.Context(), key); err != nil {
		return nil, err
	}
	if c.longRunning() {
		return release, nil
	}
	return s.count(c.p)
}

func (s *Server) count(p *auth.Principal) (func(), error) {
	release, running, ok := s.limit.enter(string(p.KeyID))
	if !ok {
		return nil, sandbox.Errorf(sandbox.CodeRateLimited, "more than %d requests of this key are running", s.cfg.Concurrency).
			WithRemediation("wait for running requests to end; long-polls and streams do not count")
	}
	if running > s.cfg.Concurrency {
		s.log.Info("client exceeds the concurrency limit", "key_id", p.KeyID, "running", running, "limit", s.cfg.Concurrency)
	}
	return release, nil
}

// foreign answers what is outside of the native API.
func (s *Server) foreign(w *wire.Recorder, r *http.Request) {
	if s.cfg.Fallback != nil {
		s.cfg.Fallback.ServeHTTP(w, r)
		return
	}
	wire.WriteJSON(w, http.StatusNotImplemented, struct {
		Code    int    `json:"code"`
		Message string `json:"message"`
	}{http.StatusNotImplemented, "this path is reserved for the E2B-compatible API, which is not available yet; the native API is below /v1"})
}

func getOnly(w *wire.Recorder, r *http.Request) bool {
	if r.Method == http.MethodGet || r.Method == http.MethodHead {
		return true
	}
	w.Header().Set("Allow", "GET, HEAD")
	e := sandbox.Errorf(sandbox.CodeInvalidRequest, "this route does not know the method")
	e.Status = http.StatusMethodNotAllowed
	w.Fail(r, e)
	return false
}

type statusAnswer struct {
	Status string `json:"status"`
}

func (s *Server) health(w *wire.Recorder, r *http.Request) {
	if getOnly(w, r) {
		wire.WriteJSON(w, http.StatusOK, statusAnswer{"ok"})
	}
}

func (s *Server) ready(w *wire.Recorder, r *http.Request) {
	if !getOnly(w, r) {
		return
	}
	err := s.cfg.Service.Ready(r.Context())
	if err == nil {
		wire.WriteJSON(w, http.StatusOK, statusAnswer{"ready"})
		return
	}
	var typed *sandbox.Error
	if !errors.As(err, &typed) || wire.Status(typed) != http.StatusServiceUnavailable {
		typed = sandbox.Errorf(sandbox.CodeServiceUnavailable, "sandboxes cannot be created yet").WithCause(err)
	}
	w.Fail(r, typed)
}
