package sandbox

import "time"

// State is where a sandbox is in its life.
type State string

// The states of a sandbox. Those that end in -ing are transitional: such a sandbox has an operation.
const (
	StateCreating   State = "creating"
	StateRunning    State = "running"
	StatePausing    State = "pausing"
	StatePaused     State = "paused"
	StateSuspending State = "suspending"
	StateSuspended  State = "suspended"
	StateWaking     State = "waking"
	StateDeleting   State = "deleting"
	StateDeleted    State = "deleted"
	StateFailed     State = "failed"
)

// Transitional reports whether an operation is moving a sandbox out of s.
func (s State) Transitional() bool {
	switch s {
	case StateCreating, StatePausing, StateSuspending, StateWaking, StateDeleting:
		return true
	}
	return false
}

// Valid reports whether s is one of the states.
func (s State) Valid() bool {
	switch s {
	case StateRunning, StatePaused, StateSuspended, StateDeleted, StateFailed:
		return true
	}
	return s.Transitional()
}

// Resources is a sandbox's shape. Zero fields in a request mean "the template's default".
type Resources struct {
	VCPU      uint32 `json:"vcpu"`
	MemoryMiB uint32 `json:"memory_mib"`
	DiskMiB   uint32 `json:"disk_mib"`
}

// TemplateRef is a resolved template: a release and its exact content.
type TemplateRef struct {
	Name   string `json:"name"`
	Tag    string `json:"tag"`
	Digest string `json:"digest"` // "sha256:" + 64 hex
}

// Environment is what runs a sandbox.
type Environment struct {
	ID           string `json:"id"` // E0 or E1
	VMM          string `json:"vmm"`
	VMMVersion   string `json:"vmm_version"`
	Kernel       string `json:"kernel"`
	Acceleration string `json:"acceleration"` // kvm or tcg
}

// Lifecycle is a sandbox's timers. Durations are whole seconds; nil means never.
type Lifecycle struct {
	IdleSuspendAfterS *int64 `json:"idle_suspend_after_s"`
	MaxLifetimeS      *int64 `json:"max_lifetime_s"`
	OnMaxLifetime     string `json:"on_max_lifetime"` // delete or suspend
	AutoWake          bool   `json:"auto_wake"`
}

// Sandbox is the record of one microVM. Generation grows with every start of its VM, Version with every write of
// the record (the etag).
type Sandbox struct {
	ID          ID
	ProjectID   string
	Owner       KeyID // the key that created it
	Template    TemplateRef
	Environment Environment
	State       State
	StateReason string
	Generation  uint64
	Version     int64
	Resources   Resources
	Lifecycle   Lifecycle
	Metadata    map[string]string
	Env         map[string]string
	Node        string
	OperationID OperationID // of the transition under way, else empty
	CreatedAt   time.Time
	UpdatedAt   time.Time
	LastActive  time.Time
	DeletedAt   time.Time // zero until deleted
}

// OperationKind is the verb of an operation.
type OperationKind string

// The kinds of operations.
const (
	OpCreate   OperationKind = "create"
	OpPause    OperationKind = "pause"
	OpSuspend  OperationKind = "suspend"
	OpWake     OperationKind = "wake"
	OpFork     OperationKind = "fork"
	OpSnapshot OperationKind = "snapshot"
	OpRollback OperationKind = "rollback"
	OpDelete   OperationKind = "delete"
)

// OperationState is how far an operation is.
type OperationState string

// The states of an operation; succeeded and failed are final.
const (
	OpPending   OperationState = "pending"
	OpRunning   OperationState = "running"
	OpSucceeded OperationState = "succeeded"
	OpFailed    OperationState = "failed"
)

// Ended reports whether s is final.
func (s OperationState) Ended() bool { return s == OpSucceeded || s == OpFailed }

// Progress is how far the current phase of an operation is; bytes are 0 where a phase has none.
type Progress struct {
	Phase      string `json:"phase"`
	DoneBytes  uint64 `json:"done_bytes"`
	TotalBytes uint64 `json:"total_bytes"`
}

// Timing is what one phase of an operation took.
type Timing struct {
	Phase string  `json:"phase"`
	MS    float64 `json:"ms"`
}

// ErrorRecord is an Error as stored with an operation.
type ErrorRecord struct {
	Code      Code    `json:"code"`
	Message   string  `json:"message"`
	Details   Details `json:"details"`
	Retryable bool    `json:"retryable"`
}

// Record returns e without its cause, to be stored.
func (e *Error) Record() *ErrorRecord {
	return &ErrorRecord{Code: e.Code, Message: e.Message, Details: e.Details, Retryable: e.Retryable}
}

// Err returns the error that r is a record of.
func (r *ErrorRecord) Err() *Error {
	return &Error{Code: r.Code, Message: r.Message, Details: r.Details, Retryable: r.Retryable}
}

// Operation is the record of one asynchronous verb on one sandbox.
type Operation struct {
	ID         OperationID
	Kind       OperationKind
	SandboxID  ID
	ProjectID  string
	Generation uint64 // the generation it works for
	State      OperationState
	Error      *ErrorRecord
	Progress   Progress
	Timings    []Timing
	CreatedAt  time.Time
	StartedAt  time.Time // zero until started
	EndedAt    time.Time // zero until ended
}

// Session is the authorisation for one command's events, stdin, resize and signal.
type Session struct {
	ID        SessionID
	SandboxID ID
	ProcessID ProcessID
	TokenHash [32]byte // SHA-256 of the token; the token itself is never stored
	KeyID     KeyID    // revoking this key ends the session
	CreatedAt time.Time
	ExpiresAt time.Time
}

// APIKey is the record of one key; the key itself is shown once and stored only as its hash.
type APIKey struct {
	ID          KeyID
	ProjectID   string
	Name        string
	Hash        [32]byte // SHA-256 of the key
	Prefix      string   // the first 8 characters, to recognise it by
	Scopes      []string
	SandboxIDs  []ID              // if not empty: limited to these
	Metadata    map[string]string // if not empty: limited to sandboxes with this metadata, which it stamps on new ones
	CreatedAt   time.Time
	ExpiresAt   time.Time // zero: never
	RevokedAt   time.Time // zero: valid
	LastUsedAt  time.Time // zero: never; kept to the minute
	CreatedByID KeyID     // empty for the first key
}

// The scopes an API key can carry.
const (
	ScopeSandboxesRead    = "sandboxes:read"
	ScopeSandboxesWrite   = "sandboxes:write"
	ScopeSandboxesExec    = "sandboxes:exec"
	ScopeFilesRead        = "files:read"
	ScopeFilesWrite       = "files:write"
	ScopeTemplatesRead    = "templates:read"
	ScopeTemplatesWrite   = "templates:write"
	ScopeNetworkRead      = "network:read"
	ScopeNetworkWrite     = "network:write"
	ScopeCredentialsWrite = "credentials:write"
	ScopeCredentialsUse   = "credentials:use"
	ScopeKeysAdmin        = "keys:admin"
	ScopeNodesAdmin       = "nodes:admin"
)

// AllScopes returns every scope, in the order of the documentation.
func AllScopes() []string {
	return []string{
		ScopeSandboxesRead, ScopeSandboxesWrite, ScopeSandboxesExec, ScopeFilesRead, ScopeFilesWrite,
		ScopeTemplatesRead, ScopeTemplatesWrite, ScopeNetworkRead, ScopeNetworkWrite,
		ScopeCredentialsWrite, ScopeCredentialsUse, ScopeKeysAdmin, ScopeNodesAdmin,
	}
}

// Limits of the native API.
const (
	MaxMetadata         = 64
	MaxMetadataKey      = 128
	MaxMetadataValue    = 1024
	MaxEnv              = 256
	MaxArgv             = 4096
	MaxArgvBytes        = 262144 // with the NUL after each
	MaxArg              = 131071 // the kernel's MAX_ARG_STRLEN less its NUL
	MaxIdempotencyKey   = 255
	DefaultOutputCap    = 64 << 20
	DefaultIdleSuspendS = 21600
	DefaultPageLimit    = 100
	MaxPageLimit        = 1000
	MaxWaitS            = 60
	UnattachedCommandS  = 900
)
