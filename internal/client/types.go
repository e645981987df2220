package client

import (
	"time"

	"github.com/space-sandbox/space/internal/sandbox"
)

// CreateSandbox is the request to create a sandbox.
type CreateSandbox struct {
	Template    string            `json:"template"`
	Environment string            `json:"environment,omitempty"`
	Metadata    map[string]string `json:"metadata,omitempty"`
	Env         map[string]string `json:"env,omitempty"`
	Resources   *ResourcesRequest `json:"resources,omitempty"`
	Lifecycle   *LifecycleRequest `json:"lifecycle,omitempty"`
}

// LifecycleRequest sets the timers of a new sandbox; what is absent takes its default.
type LifecycleRequest struct {
	MaxLifetimeS int64 `json:"max_lifetime_s,omitempty"`
}

// ResourcesRequest asks for a shape; zero fields are left to the template.
type ResourcesRequest struct {
	VCPU      uint32 `json:"vcpu,omitempty"`
	MemoryMiB uint32 `json:"memory_mib,omitempty"`
	DiskMiB   uint32 `json:"disk_mib,omitempty"`
}

// Sandbox is the record of one microVM.
type Sandbox struct {
	ID           string              `json:"id"`
	Template     sandbox.TemplateRef `json:"template"`
	Environment  sandbox.Environment `json:"environment"`
	State        string              `json:"state"`
	StateReason  *string             `json:"state_reason"`
	OperationID  *string             `json:"operation_id"`
	Generation   uint64              `json:"generation"`
	Etag         string              `json:"etag"`
	Resources    sandbox.Resources   `json:"resources"`
	Lifecycle    sandbox.Lifecycle   `json:"lifecycle"`
	Metadata     map[string]string   `json:"metadata"`
	Node         *string             `json:"node"`
	ProjectID    string              `json:"project_id"`
	CreatedAt    time.Time           `json:"created_at"`
	UpdatedAt    time.Time           `json:"updated_at"`
	LastActiveAt *time.Time          `json:"last_active_at"`
}

// Operation is the record of one asynchronous verb.
type Operation struct {
	ID        string           `json:"id"`
	Kind      string           `json:"kind"`
	SandboxID string           `json:"sandbox_id"`
	State     string           `json:"state"`
	Error     *Error           `json:"error"`
	Progress  sandbox.Progress `json:"progress"`
	Timings   []sandbox.Timing `json:"timings"`
	CreatedAt time.Time        `json:"created_at"`
	EndedAt   *time.Time       `json:"ended_at"`
}

// Ended reports whether the operation is over.
func (o *Operation) Ended() bool { return sandbox.OperationState(o.State).Ended() }

// Accepted answers a create or a delete.
type Accepted struct {
	Sandbox   *Sandbox   `json:"sandbox,omitempty"`
	Operation *Operation `json:"operation"`
}

// Terminal is the size of a terminal.
type Terminal struct {
	Cols uint32 `json:"cols"`
	Rows uint32 `json:"rows"`
}

// CreateCommand is the request to make a process.
type CreateCommand struct {
	Argv     []string          `json:"argv"`
	Env      map[string]string `json:"env,omitempty"`
	Cwd      string            `json:"cwd,omitempty"`
	User     string            `json:"user,omitempty"`
	Stdin    bool              `json:"stdin,omitempty"`
	Pty      *Terminal         `json:"pty,omitempty"`
	TimeoutS *int64            `json:"timeout_s,omitempty"`
	Start    string            `json:"start,omitempty"`
}

// Exit is how a process ended.
type Exit struct {
	Code       *int    `json:"code"`
	Signal     *string `json:"signal"`
	TimedOut   bool    `json:"timed_out"`
	OOMKilled  bool    `json:"oom_killed"`
	CoreDumped bool    `json:"core_dumped"`
}

// Output is how much a process has written.
type Output struct {
	StdoutBytes  uint64 `json:"stdout_bytes"`
	StderrBytes  uint64 `json:"stderr_bytes"`
	DroppedBytes uint64 `json:"dropped_bytes"`
}

// Process is the record of a process.
type Process struct {
	ID        string     `json:"id"`
	OSPID     *int       `json:"os_pid"`
	Argv      []string   `json:"argv"`
	Cwd       string     `json:"cwd"`
	User      string     `json:"user"`
	State     string     `json:"state"`
	CreatedAt *time.Time `json:"created_at"`
	StartedAt *time.Time `json:"started_at"`
	ExitedAt  *time.Time `json:"exited_at"`
	Exit      *Exit      `json:"exit"`
	Output    Output     `json:"output"`
	Pending   bool       `json:"pending,omitempty"` // of a kill whose effect was not seen yet
}

// Session is what one needs to follow one command.
type Session struct {
	ID        string    `json:"id"`
	Token     string    `json:"token"`
	EventsURL string    `json:"events_url"`
	ExpiresAt time.Time `json:"expires_at"`
}

// Command is a new process with its session.
type Command struct {
	Process *Process `json:"process"`
	Session Session  `json:"session"`
}

// Template is a release of a template.
type Template struct {
	Name        string            `json:"name"`
	Tag         string            `json:"tag"`
	Digest      *string           `json:"digest"`
	State       string            `json:"state"`
	Reason      *string           `json:"reason"`
	Progress    *sandbox.Progress `json:"progress"`
	Defaults    sandbox.Resources `json:"defaults"`
	SizeBytes   uint64            `json:"size_bytes"`
	DefaultUser string            `json:"default_user"`
	Description string            `json:"description"`
	CreatedAt   *time.Time        `json:"created_at"`
}

// CreateKey is the request for an API key.
type CreateKey struct {
	Name       string            `json:"name"`
	Scopes     []string          `json:"scopes"`
	ExpiresAt  *time.Time        `json:"expires_at,omitempty"`
	SandboxIDs []string          `json:"sandbox_ids,omitempty"`
	Metadata   map[string]string `json:"metadata,omitempty"`
}

// Key is the record of an API key; Key is the key itself, in the answer that makes it and nowhere else.
type Key struct {
	ID         string            `json:"id"`
	Name       string            `json:"name"`
	Prefix     string            `json:"prefix"`
	Scopes     []string          `json:"scopes"`
	SandboxIDs []string          `json:"sandbox_ids"`
	Metadata   map[string]string `json:"metadata"`
	CreatedAt  time.Time         `json:"created_at"`
	ExpiresAt  *time.Time        `json:"expires_at"`
	RevokedAt  *time.Time        `json:"revoked_at"`
	LastUsedAt *time.Time        `json:"last_used_at"`
	Key        *string           `json:"key,omitempty"`
}

// Entry is a file, folder or link of a sandbox.
type Entry struct {
	Name        string  `json:"name"`
	Path        string  `json:"path"`
	PathEncoded string  `json:"path_encoded"`
	Type        string  `json:"type"`
	Size        uint64  `json:"size"`
	Mode        string  `json:"mode"`
	Target      *string `json:"symlink_target_encoded"`
}
