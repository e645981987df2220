package dataplane

import (
	"context"
	"encoding/json"
	"log/slog"
	"mime"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/space-sandbox/space/internal/api/guestio"
	"github.com/space-sandbox/space/internal/api/wire"
	"github.com/space-sandbox/space/internal/control"
	"github.com/space-sandbox/space/internal/sandbox"
)

// Config is what a Server needs. Zero durations take their defaults.
type Config struct {
	Service control.Service
	Logger  *slog.Logger // nil: no log

	PingInterval time.Duration // between comments on a quiet stream; 15 s
	WriteTimeout time.Duration // for one event to be accepted by a client; 30 s
	LostAfter    time.Duration // how long a lost guest is asked for again; 30 s
	RetryMin     time.Duration // first pause between two attempts; 50 ms
	RetryMax     time.Duration // longest pause between two attempts; 2 s
}

// Server is the data plane as an http.Handler.
type Server struct {
	cfg     Config
	handler http.Handler
	drain   chan struct{} // closed when Drain begins
	once    sync.Once
	running sync.WaitGroup
	mu      sync.Mutex // guards closing against running.Add
	closing bool
}

// New returns the data plane of cfg.
func New(cfg Config) *Server {
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	for _, d := range []struct {
		v   *time.Duration
		def time.Duration
	}{
		{&cfg.PingInterval, 15 * time.Second}, {&cfg.WriteTimeout, 30 * time.Second}, {&cfg.LostAfter, 30 * time.Second},
		{&cfg.RetryMin, 50 * time.Millisecond}, {&cfg.RetryMax, 2 * time.Second},
	} {
		if *d.v == 0 {
			*d.v = d.def
		}
	}
	s := &Server{cfg: cfg, drain: make(chan struct{})}
	s.handler = wire.Guard(cfg.Logger, s.serve)
	return s
}

// ServeHTTP implements http.Handler.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) { s.handler.ServeHTTP(w, r) }

// Drain refuses new requests, ends every stream with `interrupted` (server_draining, retryable) and returns when none
// is left or ctx is over.
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

func (s *Server) enter() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closing {
		return false
	}
	s.running.Add(1)
	return true
}

// cors lets any page use the data plane: the credential is a token in a header, never a cookie, so a page can do only
// what it was given a token for.
func cors(h http.Header) {
	h.Set("Access-Control-Allow-Origin", "*")
	h.Set("Access-Control-Expose-Headers", "X-Request-Id, Retry-After, "+guestio.StdinOffsetHeader)
}

func (s *Server) serve(w *wire.Recorder, r *http.Request) {
	cors(w.Header())
	if r.URL.Path == "/healthz" && (r.Method == http.MethodGet || r.Method == http.MethodHead) {
		wire.WriteJSON(w, http.StatusOK, map[string]string{"status": "ok"})
		return
	}
	if !s.enter() {
		w.Fail(r, sandbox.Errorf(sandbox.CodeServiceUnavailable, "the server is shutting down"))
		return
	}
	defer s.running.Done()
	if err := s.route(w, r); err != nil {
		w.Fail(r, err)
	}
}

// verb is one thing that can be done with a session.
type verb struct {
	method string
	params []string
	do     func(*wire.Recorder, *http.Request, *sandbox.Session) error
}

func (s *Server) verbs() map[string]verb {
	return map[string]verb{
		"events": {http.MethodGet, []string{"last_event_id"}, s.events},
		"stdin":  {http.MethodPost, []string{"offset", "close"}, s.stdin},
		"resize": {http.MethodPost, nil, s.resize},
		"signal": {http.MethodPost, nil, s.signal},
	}
}

func (s *Server) route(w *wire.Recorder, r *http.Request) error {
	rest, ok := strings.CutPrefix(strings.TrimPrefix(r.URL.Path, "/api"), "/v1/sessions/")
	id, name, _ := strings.Cut(rest, "/")
	v, known := s.verbs()[name]
	if !ok || !known {
		return sandbox.Errorf(sandbox.CodeNotFound, "no such route").
			WithRemediation("the data plane serves /v1/sessions/{id}/events, stdin, resize and signal")
	}
	w.Label = v.method + " /v1/sessions/{id}/" + name
	if r.Method == http.MethodOptions {
		h := w.Header()
		h.Set("Access-Control-Allow-Methods", v.method+", OPTIONS")
		h.Set("Access-Control-Allow-Headers", "Authorization, Content-Type, Last-Event-ID, Idempotency-Key, X-Request-Id")
		h.Set("Access-Control-Max-Age", "600")
		w.WriteHeader(http.StatusNoContent)
		return nil
	}
	if r.Method != v.method {
		w.Header().Set("Allow", v.method+", OPTIONS")
		e := sandbox.Errorf(sandbox.CodeInvalidRequest, "this route does not know the method")
		e.Status = http.StatusMethodNotAllowed
		return e
	}
	session, err := s.authenticate(r, id)
	if err != nil {
		return err
	}
	if err := checkQuery(r, v.params); err != nil {
		return err
	}
	return v.do(w, r, session)
}

// authenticate answers the same for a wrong token and an unknown session: which sessions exist is not told.
func (s *Server) authenticate(r *http.Request, id string) (*sandbox.Session, error) {
	token := wire.Bearer(r.Header)
	if token == "" {
		return nil, sandbox.Errorf(sandbox.CodeUnauthorized, "no session token was sent").
			WithRemediation("send Authorization: Bearer <session token>")
	}
	sid, err := sandbox.ParseSessionID(id)
	if err != nil {
		return nil, sandbox.Errorf(sandbox.CodeUnauthorized, "the session or its token is not valid")
	}
	return s.cfg.Service.AuthenticateSession(r.Context(), sid, token)
}

func checkQuery(r *http.Request, known []string) error {
	query, err := url.ParseQuery(r.URL.RawQuery)
	if err != nil {
		return sandbox.Invalid("query", "percent_encoding", "must be a well-formed query")
	}
	var wrong []sandbox.Violation
	for name, values := range query {
		switch {
		case !slices.Contains(known, name):
			wrong = append(wrong, sandbox.Violation{Field: wire.Join("", name), Rule: "unknown_parameter", Message: "is no query parameter of this route"})
		case len(values) > 1:
			wrong = append(wrong, sandbox.Violation{Field: name, Rule: "repeated", Message: "may be given once"})
		}
	}
	if len(wrong) > 0 {
		return sandbox.InvalidAll(wrong)
	}
	return nil
}

// active resolves the guest for a call that changes it.
func (s *Server) active(r *http.Request, session *sandbox.Session) (*control.Guest, error) {
	return s.cfg.Service.SessionGuest(r.Context(), session, control.GuestUse{Active: true})
}

func (s *Server) stdin(w *wire.Recorder, r *http.Request, session *sandbox.Session) error {
	in := guestio.Stdin{Process: session.ProcessID}
	query := r.URL.Query()
	switch query.Get("close") {
	case "", "false":
	case "true":
		in.Close = true
	default:
		return sandbox.Invalid("close", "type", "must be true or false")
	}
	if value := query.Get("offset"); value != "" {
		offset, err := strconv.ParseUint(value, 10, 64)
		if err != nil || strings.Trim(value, "0123456789") != "" {
			return sandbox.Invalid("offset", "type", "must be an integer")
		}
		in.Offset = &offset
	}
	if err := contentType(r, "application/octet-stream"); err != nil {
		return err
	}
	g, err := s.active(r, session)
	if err != nil {
		return err
	}
	return guestio.WriteStdin(w, r, g, in)
}

type resizeJSON struct {
	Cols float64 `json:"cols"`
	Rows float64 `json:"rows"`
}

func (s *Server) resize(w *wire.Recorder, r *http.Request, session *sandbox.Session) error {
	var in resizeJSON
	if err := decode(r, &in, "cols", "rows"); err != nil {
		return err
	}
	for _, v := range []struct {
		field string
		n     float64
	}{{"cols", in.Cols}, {"rows", in.Rows}} {
		if v.n < 1 || v.n > 65535 || v.n != float64(int(v.n)) {
			return sandbox.Invalid(v.field, "range", "must be an integer from 1 to 65535")
		}
	}
	g, err := s.active(r, session)
	if err != nil {
		return err
	}
	if err := guestio.Resize(r.Context(), g, session.ProcessID, uint32(in.Cols), uint32(in.Rows)); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

type signalJSON struct {
	Signal string `json:"signal"`
	Target string `json:"target"`
}

func (s *Server) signal(w *wire.Recorder, r *http.Request, session *sandbox.Session) error {
	var in signalJSON
	if err := decode(r, &in, "signal", "target"); err != nil {
		return err
	}
	sig, err := guestio.ParseSignal(in.Signal)
	if err != nil {
		return err
	}
	target, err := guestio.ParseTarget(in.Target)
	if err != nil {
		return err
	}
	g, err := s.active(r, session)
	if err != nil {
		return err
	}
	if _, err := guestio.Signal(r.Context(), g, session.ProcessID, sig, target); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func contentType(r *http.Request, want string) error {
	given := r.Header.Get("Content-Type")
	if given == "" || r.ContentLength == 0 {
		return nil
	}
	if mediaType, _, err := mime.ParseMediaType(given); err == nil && mediaType == want {
		return nil
	}
	e := sandbox.Errorf(sandbox.CodeInvalidRequest, "the Content-Type must be %s", want)
	e.Status = http.StatusUnsupportedMediaType
	return e
}

// decode parses a small JSON object that may hold only the given fields.
func decode(r *http.Request, dst any, fields ...string) error {
	if err := contentType(r, "application/json"); err != nil {
		return err
	}
	data, err := wire.ReadBody(r.Body, 4096)
	if err != nil {
		return err
	}
	v, err := wire.ParseJSON(data)
	if err != nil {
		return err
	}
	object, ok := v.(map[string]any)
	if !ok {
		return sandbox.Invalid("body", "type", "must be an object")
	}
	for name := range object {
		if !slices.Contains(fields, name) {
			return sandbox.Invalid(wire.Join("", name), "unknown_field", "is no field of this object")
		}
	}
	if err := json.Unmarshal(data, dst); err != nil {
		return sandbox.Invalid("body", "type", "holds a value of the wrong type").WithCause(err)
	}
	return nil
}
