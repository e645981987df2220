package api

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"mime"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/danielgtaylor/huma/v2"

	"github.com/space-sandbox/space/internal/api/guestio"
	"github.com/space-sandbox/space/internal/api/wire"
	"github.com/space-sandbox/space/internal/auth"
	"github.com/space-sandbox/space/internal/control"
	"github.com/space-sandbox/space/internal/sandbox"
)

// sessionHeader names the session whose token is sent as bearer, on the routes that take one.
const sessionHeader = "Space-Session-Id"

// replayedHeader marks the answer to a repeated Idempotency-Key.
const replayedHeader = "Idempotent-Replayed"

type bodyKind int

const (
	bodyNone  bodyKind = iota // a body must be empty
	bodyJSON                  // one JSON object
	bodyBytes                 // streamed bytes of any type
	bodyInput                 // streamed application/octet-stream
)

// route is one operation: what it takes, what it answers, and the code that does it.
type route struct {
	method, path string
	id, tag      string
	summary      string
	description  string
	params       []*huma.Param
	body         bodyKind
	request      any          // zero value of the JSON body's type
	schema       *huma.Schema // of request, set when the document is made
	answers      []answer
	errors       []sandbox.Code
	binary       bool // answers bytes, not JSON
	stream       bool // not counted by the concurrency limit
	session      bool // a session token will do
	waits        bool // Prefer: wait or ?wait make it a long-poll
	later        bool // not available yet: not in the document, no checks
	handle       func(*call) error
}

// answer is one good answer of a route.
type answer struct {
	status      int
	description string
	body        any // nil: none
}

func (r *route) mediaType() string {
	if r.binary {
		return "application/octet-stream"
	}
	return "application/json"
}

// call is one request on its way through a route. It lives in the request's goroutine.
type call struct {
	*wire.Recorder
	r       *http.Request
	server  *Server
	route   *route
	path    map[string]string
	query   url.Values
	raw     []byte // a JSON body
	idem    *control.Idem
	p       *auth.Principal
	session *sandbox.Session // instead of p
}

func (c *call) ctx() context.Context { return c.r.Context() }

func (c *call) svc() control.Service { return c.server.cfg.Service }

// longRunning tells streams and long-polls, which the concurrency limit leaves alone.
func (c *call) longRunning() bool {
	if c.route.stream {
		return true
	}
	if !c.route.waits {
		return false
	}
	wait, ok := wire.PreferWait(c.r.Header)
	return ok && wait > 0 || c.r.URL.Query().Get("wait") != ""
}

func (c *call) authenticateSession(id, token string) error {
	sid, err := sandbox.ParseSessionID(id)
	if err != nil {
		return sandbox.Errorf(sandbox.CodeUnauthorized, "the session or its token is not valid")
	}
	c.session, err = c.svc().AuthenticateSession(c.ctx(), sid, token)
	return err
}

func (c *call) checkContentType() error {
	given := c.r.Header.Get("Content-Type")
	if given == "" || c.route.body == bodyBytes || c.r.ContentLength == 0 {
		return nil
	}
	want := map[bodyKind]string{bodyJSON: "application/json", bodyInput: "application/octet-stream", bodyNone: "application/json"}[c.route.body]
	mediaType, params, err := mime.ParseMediaType(given)
	charset := strings.ToLower(params["charset"])
	if err == nil && mediaType == want && (charset == "" || charset == "utf-8") {
		return nil
	}
	e := sandbox.Errorf(sandbox.CodeInvalidRequest, "the Content-Type must be %s", want)
	e.Status = http.StatusUnsupportedMediaType
	return e.WithRemediation("send Content-Type: " + want)
}

// parseQuery refuses parameters that the route does not know, repeats of those that come once, and values that do
// not fit their schema. What a value means is up to the handler.
func (c *call) parseQuery() error {
	query, err := url.ParseQuery(c.r.URL.RawQuery)
	if err != nil {
		return sandbox.Invalid("query", "percent_encoding", "must be a well-formed query")
	}
	check := &checker{schemas: c.server.schemas}
	for name, values := range query {
		p := c.route.param(name)
		if p == nil {
			check.add(wire.Join("", name), "unknown_parameter", "is no query parameter of this route")
			continue
		}
		if len(values) > 1 && p.Schema.Type != huma.TypeArray {
			check.add(wire.Join("", name), "repeated", "may be given once")
			continue
		}
		for _, v := range values {
			check.parameter(p.Schema, wire.Join("", name), v)
		}
	}
	for _, p := range c.route.params {
		if _, ok := query[p.Name]; !ok && p.In == "query" && p.Required {
			check.add(p.Name, "required", "is required")
		}
	}
	c.query = query
	return check.err()
}

// param returns the description of a query parameter. metadata[key] is the one family of names.
func (r *route) param(name string) *huma.Param {
	member := strings.HasPrefix(name, "metadata[") && strings.HasSuffix(name, "]")
	if member {
		name = "metadata"
	}
	for _, p := range r.params {
		if p.In == "query" && p.Name == name && member == (p.Schema.Type == huma.TypeObject) {
			return p
		}
	}
	return nil
}

// parameter checks one value of a query parameter.
func (c *checker) parameter(schema *huma.Schema, path, value string) {
	if schema.Type == huma.TypeArray {
		schema = schema.Items
	}
	switch schema.Type {
	case huma.TypeInteger:
		n, err := strconv.ParseFloat(value, 64)
		if err != nil || strings.Trim(value, "0123456789") != "" || value == "" {
			c.add(path, "type", "must be an integer")
			return
		}
		c.check(schema, path, n)
	case huma.TypeBoolean:
		if value != "true" && value != "false" {
			c.add(path, "type", "must be true or false")
		}
	case huma.TypeString:
		c.check(schema, path, value)
	}
}

func (c *call) number(name string, def int) int {
	n, err := strconv.Atoi(c.query.Get(name))
	if err != nil {
		return def // absent: what is present was checked
	}
	return n
}

// readJSON reads a small body whole, so that its hash can be compared before anything is done.
func (c *call) readJSON() (err error) {
	rc := http.NewResponseController(c)
	// Servers without deadlines (tests) answer ErrNotSupported; the body is then bounded by its connection.
	_ = rc.SetReadDeadline(time.Now().Add(readTimeout))
	c.raw, err = wire.ReadBody(c.r.Body, wire.MaxJSON)
	_ = rc.SetReadDeadline(time.Time{})
	return err
}

// idempotency returns the request's key bound to what is asked; nil if there is none.
func (c *call) idempotency() (*control.Idem, error) {
	if c.r.Method == http.MethodGet || c.r.Method == http.MethodHead || c.r.Method == http.MethodPatch {
		return nil, nil
	}
	key, err := wire.IdempotencyKey(c.r.Header)
	if key == "" || err != nil {
		return nil, err
	}
	path, _ := nativePath(c.r.URL.EscapedPath()) // so that the alias is the same request
	hash := sha256.New()
	hash.Write([]byte(c.query.Encode()))
	hash.Write([]byte{0})
	if c.route.body == bodyBytes || c.route.body == bodyInput {
		hash.Write([]byte(strconv.FormatInt(c.r.ContentLength, 10))) // the bytes are streamed, never held
	} else {
		hash.Write(c.raw)
	}
	idem := &control.Idem{Key: key, Scope: c.route.method + " /v1" + path}
	hash.Sum(idem.BodyHash[:0])
	return idem, nil
}

// decode checks the JSON body against the schema of dst's type and fills dst, which may hold defaults.
func (c *call) decode(dst any) error {
	if len(c.raw) == 0 {
		return sandbox.Invalid("body", "required", "must be a JSON object")
	}
	v, err := wire.ParseJSON(c.raw)
	if err != nil {
		return err
	}
	if object, ok := v.(map[string]any); ok {
		if err := laterFields(object, c.route.request); err != nil {
			return err
		}
	}
	check := &checker{schemas: c.server.schemas}
	check.check(c.route.schema, "", v)
	if err := check.err(); err != nil {
		return err
	}
	if err := json.Unmarshal(c.raw, dst); err != nil {
		return sandbox.Invalid("body", "type", "holds a value of the wrong type").WithCause(err)
	}
	return nil
}

// noBody refuses a body where none is meant; an empty object is taken for none.
func (c *call) noBody() error {
	if len(c.raw) == 0 {
		return nil
	}
	v, err := wire.ParseJSON(c.raw)
	if object, ok := v.(map[string]any); err == nil && ok && len(object) == 0 {
		return nil
	}
	return sandbox.Invalid("body", "empty", "must be empty")
}

func (c *call) json(status int, v any) error {
	wire.WriteJSON(c, status, v)
	return nil
}

func (c *call) replayed(yes bool) {
	if yes {
		c.Header().Set(replayedHeader, "true")
	}
}

func (c *call) sandboxID() (sandbox.ID, error) {
	id, err := sandbox.ParseID(c.path["id"])
	if err != nil {
		return "", sandbox.Errorf(sandbox.CodeNotFound, "no such sandbox")
	}
	return id, nil
}

func (c *call) processID() (sandbox.ProcessID, error) {
	id, err := sandbox.ParseProcessID(c.path["pid"])
	if err != nil {
		return "", sandbox.Errorf(sandbox.CodeNotFound, "no such process")
	}
	return id, nil
}

// guest resolves the sandbox of the path for a scope.
func (c *call) guest(scope string, use control.GuestUse) (*control.Guest, error) {
	id, err := c.sandboxID()
	if err != nil {
		return nil, err
	}
	return c.svc().Guest(c.ctx(), c.p, id, scope, use)
}

// once runs fn under the request's Idempotency-Key, if it has one.
func (c *call) once(fn func(context.Context) error) (replayed bool, err error) {
	if c.idem == nil || c.p == nil {
		return false, fn(c.ctx())
	}
	replayed, err = c.svc().Once(c.ctx(), c.p, c.idem, fn)
	c.replayed(replayed)
	return replayed, err
}

// step returns a context with the deadline of one call into a guest.
func (c *call) step() (context.Context, context.CancelFunc) {
	return context.WithTimeout(c.ctx(), guestio.CallTimeout)
}

// draining derives a context that also ends when the server drains, for waits that can be cut short.
func (c *call) draining() (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancel(c.ctx())
	go func() { // ends with ctx
		select {
		case <-c.server.drain:
			cancel()
		case <-ctx.Done():
		}
	}()
	return ctx, cancel
}
