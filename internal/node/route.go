package node

import (
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httputil"
	"strings"
	"sync"

	"connectrpc.com/connect"

	"github.com/space-sandbox/space/internal/gen/space/agent/v1/agentv1connect"
	"github.com/space-sandbox/space/internal/gen/space/node/v1/nodev1connect"
	nodeapi "github.com/space-sandbox/space/internal/node/nodeclient"
	"github.com/space-sandbox/space/internal/sandbox"
	"github.com/space-sandbox/space/internal/shim/archive"
)

// route passes the calls that a sandbox answers itself on to its shim.
func (n *Node) route(mux *http.ServeMux) {
	pass := http.HandlerFunc(n.pass)
	mux.Handle("/"+nodev1connect.SandboxServiceName+"/", pass)
	mux.Handle("/"+agentv1connect.FileServiceName+"/", pass)
}

func (n *Node) pass(w http.ResponseWriter, r *http.Request) {
	e, err := n.lookup(r.Header.Get(nodeapi.SandboxHeader))
	if err != nil {
		_ = errorWriter.Write(w, r, err)
		return
	}
	if e.shim != nil && e.shim.Alive() {
		// Without it the server closes the request's body when the answer begins. Should the end of the body not have
		// been passed on by then, the connection to the shim breaks, and the answer with it. HTTP/2 needs no asking.
		_ = http.NewResponseController(w).EnableFullDuplex()
		n.proxy(e).ServeHTTP(w, r)
		return
	}
	n.fromArchive(e, w, r)
}

var errorWriter = connect.NewErrorWriter() // immutable

// lookup finds the sandbox that a call is for.
func (n *Node) lookup(header string) (*entry, error) {
	id, err := sandbox.ParseID(header)
	if err != nil {
		return nil, connect.NewError(connect.CodeInvalidArgument, fmt.Errorf("header %s: %w", nodeapi.SandboxHeader, err))
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	e := n.sandboxes[string(id)]
	if e == nil {
		return nil, connect.NewError(connect.CodeNotFound, errors.New("no such sandbox on this node"))
	}
	if !e.ended() {
		return nil, connect.NewError(connect.CodeUnavailable, errors.New("the sandbox is being created"))
	}
	return e, nil
}

// proxy passes one call on, unread, in both directions at once. The caller's credentials end here; the shim gets
// its own token.
func (n *Node) proxy(e *entry) http.Handler {
	token := "Bearer " + e.shim.Spec.Token
	return &httputil.ReverseProxy{
		Transport:     e.shim.Transport(),
		FlushInterval: -1,
		BufferPool:    &n.copies,
		ErrorLog:      slog.NewLogLogger(n.log.Handler(), slog.LevelWarn),
		Rewrite: func(r *httputil.ProxyRequest) {
			r.Out.URL.Scheme, r.Out.URL.Host, r.Out.Host = "http", "shim", "shim"
			r.Out.Header.Set("Authorization", token)
			r.Out.Header.Del("Cookie")
		},
		ErrorHandler: func(w http.ResponseWriter, r *http.Request, err error) {
			_ = errorWriter.Write(w, r, connect.NewError(connect.CodeUnavailable, fmt.Errorf("sandbox does not answer: %w", err)))
		},
	}
}

// copyBuffers are what proxied bodies are copied through. Idle ones are freed.
type copyBuffers struct{ pool sync.Pool }

// copyBytes takes a whole frame of output or a good part of a chunk of a file.
const copyBytes = 128 << 10

// Get implements httputil.BufferPool.
func (c *copyBuffers) Get() []byte {
	if b, ok := c.pool.Get().(*[]byte); ok {
		return *b
	}
	return make([]byte, copyBytes)
}

// Put implements httputil.BufferPool.
func (c *copyBuffers) Put(b []byte) { c.pool.Put(&b) }

// archived is the journal of a sandbox whose shim is gone, opened when it is first asked for.
type archived struct {
	mu      sync.Mutex
	journal *archive.Archive
	handler http.Handler
	closed  bool
}

func (a *archived) open(dir string) (http.Handler, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.closed {
		return nil, connect.NewError(connect.CodeNotFound, errors.New("the sandbox has been deleted"))
	}
	if a.journal != nil {
		return a.handler, nil
	}
	journal, err := archive.New(dir, "sandbox_failed")
	if err != nil {
		return nil, connect.NewError(connect.CodeUnavailable, fmt.Errorf("journal: %w", err))
	}
	a.journal = journal
	_, a.handler = nodev1connect.NewSandboxServiceHandler(journal, connect.WithReadMaxBytes(4<<20))
	return a.handler, nil
}

// close ends the use of the journal for good.
func (a *archived) close() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	journal := a.journal
	a.journal, a.closed = nil, true
	if journal == nil {
		return nil
	}
	return journal.Close()
}

// fromArchive answers from the journal of a sandbox whose shim is gone. Its files went with the VM.
func (n *Node) fromArchive(e *entry, w http.ResponseWriter, r *http.Request) {
	if strings.HasPrefix(r.URL.Path, "/"+agentv1connect.FileServiceName+"/") {
		_ = errorWriter.Write(w, r, precondition("the sandbox does not run"))
		return
	}
	h, err := e.archive.open(n.l.journal(e.id))
	if err != nil {
		_ = errorWriter.Write(w, r, err)
		return
	}
	h.ServeHTTP(w, r)
}
