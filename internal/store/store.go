package store

import (
	"context"
	"errors"
	"time"

	"github.com/space-sandbox/space/internal/sandbox"
)

// Errors of the contract; implementations wrap them.
var (
	// ErrNotFound: no such row.
	ErrNotFound = errors.New("not found")
	// ErrExists: a row with this key exists.
	ErrExists = errors.New("already exists")
	// ErrVersion: the row was changed since it was read.
	ErrVersion = errors.New("version changed")
	// ErrUnavailable: the database cannot be reached, is full or is busy past the deadline. Nothing was written.
	ErrUnavailable = errors.New("store unavailable")
)

// Store is the database of the control plane.
type Store interface {
	// Update runs fn in one read-write transaction and commits if fn returns nil. fn may run more than once (a
	// serialisation failure), so it must have no other effects; it must not keep tx.
	Update(ctx context.Context, fn func(tx Tx) error) error
	// View runs fn in one read-only transaction: a consistent snapshot. A write in it fails.
	View(ctx context.Context, fn func(tx Tx) error) error
	// Close waits for running transactions and frees everything.
	Close() error
}

// Tx is the view of one transaction.
type Tx interface {
	// InsertSandbox fails with ErrExists for a used ID, deleted sandboxes included. Version is set to 1.
	InsertSandbox(ctx context.Context, s *sandbox.Sandbox) error
	// UpdateSandbox writes all of s if the stored version is s.Version, and raises s.Version; else ErrVersion.
	UpdateSandbox(ctx context.Context, s *sandbox.Sandbox) error
	// GetSandbox returns deleted sandboxes too (tombstones), until they are purged.
	GetSandbox(ctx context.Context, id sandbox.ID) (*sandbox.Sandbox, error)
	// TouchSandbox moves LastActive forward (never back) and leaves everything else, the version too, as it is:
	// being used is no change that a client's etag should notice.
	TouchSandbox(ctx context.Context, id sandbox.ID, lastActive time.Time) error
	// ListSandboxes returns a page in the order of (CreatedAt, ID).
	ListSandboxes(ctx context.Context, q SandboxQuery) ([]*sandbox.Sandbox, error)
	// PurgeSandboxes removes tombstones older than before, with their operations and sessions.
	PurgeSandboxes(ctx context.Context, before time.Time) (int, error)

	// InsertOperation fails with ErrNotFound if its sandbox is unknown, and with ErrExists for a used ID.
	InsertOperation(ctx context.Context, op *sandbox.Operation) error
	// UpdateOperation writes all of op. An ended operation never changes: ErrVersion.
	UpdateOperation(ctx context.Context, op *sandbox.Operation) error
	GetOperation(ctx context.Context, id sandbox.OperationID) (*sandbox.Operation, error)
	// OpenOperations returns all operations that have not ended, oldest first.
	OpenOperations(ctx context.Context) ([]*sandbox.Operation, error)

	// InsertSession fails with ErrNotFound if its sandbox is unknown, and with ErrExists for a used ID.
	InsertSession(ctx context.Context, s *sandbox.Session) error
	GetSession(ctx context.Context, id sandbox.SessionID) (*sandbox.Session, error)
	// DeleteSession removes one session; an unknown one is fine.
	DeleteSession(ctx context.Context, id sandbox.SessionID) error
	// DeleteSessions removes the sessions that expired before that time.
	DeleteSessions(ctx context.Context, expiredBefore time.Time) (int, error)

	// InsertKey fails with ErrExists for a used ID or hash.
	InsertKey(ctx context.Context, k *sandbox.APIKey) error
	// UpdateKey writes all of k; ErrNotFound if it is unknown.
	UpdateKey(ctx context.Context, k *sandbox.APIKey) error
	GetKey(ctx context.Context, id sandbox.KeyID) (*sandbox.APIKey, error)
	GetKeyByHash(ctx context.Context, hash [32]byte) (*sandbox.APIKey, error)
	// ListKeys returns the keys behind the key after (empty: all) in the order of (CreatedAt, ID), revoked ones
	// included; an unknown after is ErrNotFound. limit 0: no limit.
	ListKeys(ctx context.Context, project string, after sandbox.KeyID, limit int) ([]*sandbox.APIKey, error)

	// InsertIdempotency records what a key stands for; ErrExists if the (scope, key) is there and had not expired
	// at e.CreatedAt. An expired entry is replaced.
	InsertIdempotency(ctx context.Context, e *Idempotency) error
	// GetIdempotency returns the entry, expired or not.
	GetIdempotency(ctx context.Context, scope, key string) (*Idempotency, error)
	// RemoveIdempotency removes one entry; an unknown one is fine.
	RemoveIdempotency(ctx context.Context, scope, key string) error
	// DeleteIdempotency removes the entries that expired before that time.
	DeleteIdempotency(ctx context.Context, expiredBefore time.Time) (int, error)

	// Setting returns a small value of the deployment, such as its instance ID; ErrNotFound if it was never put.
	Setting(ctx context.Context, name string) (string, error)
	// PutSetting writes or replaces a setting.
	PutSetting(ctx context.Context, name, value string) error
}

// Idempotency binds an Idempotency-Key to the resource that the first call made.
type Idempotency struct {
	Scope     string   // owner, method and path
	Key       string   // as sent
	BodyHash  [32]byte // of the request body as received
	Resource  string   // JSON that the API needs to rebuild its answer: IDs, never secrets
	CreatedAt time.Time
	ExpiresAt time.Time
}

// SandboxQuery selects sandboxes; zero fields select everything.
type SandboxQuery struct {
	ProjectID  string
	IDs        []sandbox.ID
	States     []sandbox.State // empty: all but deleted
	Template   string          // name
	Metadata   map[string]string
	Node       string
	Descending bool
	After      Cursor // exclusive
	Limit      int    // 0: no limit
}

// Cursor is a place in the order of (CreatedAt, ID).
type Cursor struct {
	CreatedAt time.Time
	ID        string
}

// IsZero reports whether c is the beginning.
func (c Cursor) IsZero() bool { return c.ID == "" }
