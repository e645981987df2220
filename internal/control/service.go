package control

import (
	"context"
	"time"

	"github.com/space-sandbox/space/internal/auth"
	agentv1 "github.com/space-sandbox/space/internal/gen/space/agent/v1"
	"github.com/space-sandbox/space/internal/gen/space/agent/v1/agentv1connect"
	nodev1 "github.com/space-sandbox/space/internal/gen/space/node/v1"
	"github.com/space-sandbox/space/internal/gen/space/node/v1/nodev1connect"
	"github.com/space-sandbox/space/internal/sandbox"
)

// Service is the control plane as the API sees it. Every error is, or wraps, a *sandbox.Error. Scopes are checked
// here, so that no front end can forget one; what the caller may not see is not found.
type Service interface {
	// Authenticate resolves an API key. unauthorized if it is unknown, expired or revoked.
	Authenticate(ctx context.Context, key string) (*auth.Principal, error)
	// AuthenticateSession resolves a session token, compared in constant time. unauthorized if it is wrong,
	// expired, or its key was revoked.
	AuthenticateSession(ctx context.Context, id sandbox.SessionID, token string) (*sandbox.Session, error)
	// RevocationOf is closed within 5 s after the key was revoked or expired; streams opened with it then end.
	// The caller cancels ctx when it no longer cares.
	RevocationOf(ctx context.Context, key sandbox.KeyID) <-chan struct{}

	CreateSandbox(ctx context.Context, p *auth.Principal, req CreateSandbox, idem *Idem) (Accepted, error)
	GetSandbox(ctx context.Context, p *auth.Principal, id sandbox.ID) (*sandbox.Sandbox, error)
	ListSandboxes(ctx context.Context, p *auth.Principal, q ListSandboxes) (Page[*sandbox.Sandbox], error)
	UpdateSandbox(ctx context.Context, p *auth.Principal, id sandbox.ID, u UpdateSandbox) (*sandbox.Sandbox, error)
	DeleteSandbox(ctx context.Context, p *auth.Principal, id sandbox.ID, idem *Idem) (Accepted, error)
	// GetOperation waits up to wait for the operation to end, then answers what there is.
	GetOperation(ctx context.Context, p *auth.Principal, id sandbox.OperationID, wait time.Duration) (*sandbox.Operation, error)

	// CreateCommand makes a process and its first session.
	CreateCommand(ctx context.Context, p *auth.Principal, id sandbox.ID, req CreateCommand, idem *Idem) (NewCommand, error)
	// CreateSession makes another session for a process.
	CreateSession(ctx context.Context, p *auth.Principal, id sandbox.ID, pid sandbox.ProcessID, idem *Idem) (NewSession, error)
	// Guest authorises the caller for scope and returns the clients of a sandbox. active marks the sandbox as used.
	// conflict unless it is running; with readOnly also from failed, where only journalled data can be had.
	Guest(ctx context.Context, p *auth.Principal, id sandbox.ID, scope string, use GuestUse) (*Guest, error)
	// SessionGuest is Guest for the holder of a session.
	SessionGuest(ctx context.Context, s *sandbox.Session, use GuestUse) (*Guest, error)
	// Once runs fn at most once per idempotency key for calls that change a guest and have no record of their own
	// (signal, kill, stdin, files). The answer is kept if fn succeeded. replayed tells that fn was not run.
	Once(ctx context.Context, p *auth.Principal, idem *Idem, fn func(context.Context) error) (replayed bool, err error)

	ListTemplates(ctx context.Context, p *auth.Principal) ([]*nodev1.Template, error)
	GetTemplate(ctx context.Context, p *auth.Principal, name string) (*nodev1.Template, error)

	CreateKey(ctx context.Context, p *auth.Principal, req CreateKey, idem *Idem) (NewKey, error)
	ListKeys(ctx context.Context, p *auth.Principal, after sandbox.KeyID, limit int) (Page[*sandbox.APIKey], error)
	RevokeKey(ctx context.Context, p *auth.Principal, id sandbox.KeyID) (*sandbox.APIKey, error)

	// Ready returns nil when sandboxes can be created, else why not (base template building with progress, ...).
	Ready(ctx context.Context) error
}

// Idem is an idempotency key as it came with a request; a nil *Idem means none.
type Idem struct {
	Key      string
	Scope    string // method and path; the owner of the key is added by Service
	BodyHash [32]byte
	// Repeatable lets Once run the call again if a crash left open whether it took effect (an overwrite, a kill).
	Repeatable bool
}

// Accepted is the answer of an asynchronous verb.
type Accepted struct {
	Sandbox   *sandbox.Sandbox
	Operation *sandbox.Operation
	Replayed  bool
}

// CreateSandbox is a validated request: limits and shapes were checked by the front end, the meaning is checked here
// (template exists, environment can be had, resources in bounds).
type CreateSandbox struct {
	Template    string // name[:tag] or name@sha256:…
	Environment string // auto, E0, E1
	Metadata    map[string]string
	Env         map[string]string
	Resources   sandbox.Resources // zero fields: template default
	Lifecycle   sandbox.Lifecycle
}

// UpdateSandbox changes a record; nil fields stay.
type UpdateSandbox struct {
	IfMatch   *int64 // failed_precondition if the version differs
	Metadata  map[string]string
	Lifecycle *sandbox.Lifecycle
}

// ListSandboxes is a list request; an empty Cursor is the beginning.
type ListSandboxes struct {
	States     []sandbox.State
	Template   string
	Metadata   map[string]string
	Descending bool
	Cursor     string // opaque; invalid_request if it is not one of ours
	Limit      int
}

// Page is one page of a list; an empty NextCursor ends it.
type Page[T any] struct {
	Items      []T
	NextCursor string
}

// CreateCommand is a validated command.
type CreateCommand struct {
	Spec      *agentv1.ProcessSpec
	OutputCap uint64
	StartNow  bool
}

// NewCommand is a new process with its session. Token is shown only here.
type NewCommand struct {
	Process *nodev1.Process
	NewSession
}

// NewSession is a new session; on a replay the token is a fresh one.
type NewSession struct {
	Session  *sandbox.Session
	Token    string
	Replayed bool
}

// CreateKey is a request for an API key.
type CreateKey struct {
	Name       string
	Scopes     []string
	ExpiresAt  time.Time // zero: never
	SandboxIDs []sandbox.ID
	Metadata   map[string]string
}

// NewKey is a new API key. Secret is shown only here, and empty on a replay.
type NewKey struct {
	Key      *sandbox.APIKey
	Secret   string
	Replayed bool
}

// GuestUse says how a guest is about to be used.
type GuestUse struct {
	Active   bool // counts as activity
	ReadOnly bool // only journalled data and the process table are read
}

// Guest is a sandbox's services, already bound to it.
type Guest struct {
	Sandbox   *sandbox.Sandbox
	Processes nodev1connect.SandboxServiceClient
	Files     agentv1connect.FileServiceClient
}

// Node is how the control plane reaches one node: the node's own service, and the services of its sandboxes.
type Node interface {
	nodev1connect.NodeServiceClient
	// Sandbox returns clients whose calls carry the sandbox's ID.
	Sandbox(id sandbox.ID) (nodev1connect.SandboxServiceClient, agentv1connect.FileServiceClient)
}
