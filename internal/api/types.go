package api

import (
	"strconv"
	"time"

	"github.com/danielgtaylor/huma/v2"

	"github.com/space-sandbox/space/internal/sandbox"
)

// Time is a time as the API writes it: RFC 3339, UTC, milliseconds.
type Time time.Time

const timeFormat = "2006-01-02T15:04:05.000Z"

// MarshalJSON implements json.Marshaler.
func (t Time) MarshalJSON() ([]byte, error) {
	return []byte(strconv.Quote(time.Time(t).UTC().Format(timeFormat))), nil
}

// Schema implements huma.SchemaProvider.
func (Time) Schema(huma.Registry) *huma.Schema {
	return &huma.Schema{Type: huma.TypeString, Format: "date-time", Examples: []any{"2026-01-31T12:00:00.000Z"}}
}

func timeOrNull(t time.Time) *Time {
	if t.IsZero() {
		return nil
	}
	v := Time(t)
	return &v
}

func textOrNull[T ~string](s T) *string {
	if s == "" {
		return nil
	}
	v := string(s)
	return &v
}

// Resources is the shape of a sandbox.
type Resources struct {
	VCPU      uint32 `json:"vcpu" doc:"Virtual processors." example:"2"`
	MemoryMiB uint32 `json:"memory_mib" doc:"Memory in MiB." example:"512"`
	DiskMiB   uint32 `json:"disk_mib" doc:"Size of the writable disk in MiB." example:"4096"`
}

// ResourcesRequest asks for a shape; what is absent is the template's default.
type ResourcesRequest struct {
	VCPU      uint32 `json:"vcpu,omitempty" minimum:"1" maximum:"4294967295" doc:"Virtual processors; default: the template's." example:"2"`
	MemoryMiB uint32 `json:"memory_mib,omitempty" minimum:"1" maximum:"4294967295" doc:"Memory in MiB; default: the template's." example:"512"`
	DiskMiB   uint32 `json:"disk_mib,omitempty" minimum:"1" maximum:"4294967295" doc:"Size of the writable disk in MiB; default: the template's." example:"4096"`
}

// Lifecycle is the timers of a sandbox.
type Lifecycle struct {
	IdleSuspendAfterS *int64 `json:"idle_suspend_after_s" doc:"Seconds without activity after which the sandbox is to be suspended; null: never. Recorded only: suspend is not available yet." example:"21600"`
	MaxLifetimeS      *int64 `json:"max_lifetime_s" doc:"Seconds after creation at which on_max_lifetime happens; null: never." example:"86400"`
	OnMaxLifetime     string `json:"on_max_lifetime" enum:"delete,suspend" doc:"What happens at the end of the lifetime." example:"delete"`
	AutoWake          bool   `json:"auto_wake" doc:"Whether activity wakes the sandbox." example:"true"`
}

// LifecycleRequest sets the timers; what is absent takes its default.
type LifecycleRequest struct {
	IdleSuspendAfterS *int64 `json:"idle_suspend_after_s" required:"false" minimum:"1" maximum:"315360000" default:"21600" doc:"Seconds without activity after which the sandbox is to be suspended; null: never. Recorded only: suspend is not available yet." example:"21600"`
	MaxLifetimeS      *int64 `json:"max_lifetime_s" required:"false" minimum:"1" maximum:"315360000" doc:"Seconds after creation at which on_max_lifetime happens; null: never (the default)." example:"86400"`
	OnMaxLifetime     string `json:"on_max_lifetime,omitempty" enum:"delete,suspend" default:"delete" doc:"What happens at the end of the lifetime." example:"delete"`
	AutoWake          bool   `json:"auto_wake,omitempty" default:"true" doc:"Whether activity wakes the sandbox." example:"true"`
}

func defaultLifecycle() LifecycleRequest {
	idle := int64(sandbox.DefaultIdleSuspendS)
	return LifecycleRequest{IdleSuspendAfterS: &idle, OnMaxLifetime: "delete", AutoWake: true}
}

func (l LifecycleRequest) lifecycle() sandbox.Lifecycle { return sandbox.Lifecycle(l) }

// CreateSandbox is the request to create a sandbox.
type CreateSandbox struct {
	Template    string            `json:"template" maxLength:"256" pattern:"^[a-z0-9][a-z0-9._/-]{0,127}(:[A-Za-z0-9_][A-Za-z0-9._-]{0,127}|@sha256:[0-9a-f]{64})?$" patternDescription:"name[:tag] or name@sha256:digest" doc:"Template to start from: name[:tag] (tag latest by default) or name@sha256:digest." example:"base"`
	Environment string            `json:"environment,omitempty" enum:"auto,E0,E1" default:"auto" doc:"Execution environment: E0 is Firecracker on KVM, E1 is QEMU; auto takes what the node has." example:"auto"`
	Metadata    map[string]string `json:"metadata,omitempty" maxProperties:"64" doc:"Labels of your own: keys up to 128 bytes, values up to 1024." example:"{\"team\":\"research\"}"`
	Env         map[string]string `json:"env,omitempty" maxProperties:"256" doc:"Environment of every process of the sandbox." example:"{\"LANG\":\"C.UTF-8\"}"`
	Resources   *ResourcesRequest `json:"resources,omitempty" doc:"Shape; default: the template's."`
	Lifecycle   *LifecycleRequest `json:"lifecycle,omitempty" doc:"Timers."`
}

// UpdateSandbox changes a sandbox's record; each object given replaces the old one whole.
type UpdateSandbox struct {
	Metadata  map[string]string `json:"metadata,omitempty" maxProperties:"64" doc:"Replaces all metadata." example:"{\"team\":\"research\"}"`
	Lifecycle *LifecycleRequest `json:"lifecycle,omitempty" doc:"Replaces all timers; absent fields take their defaults."`
}

// TemplateRef is the template that a sandbox was made from, as resolved.
type TemplateRef struct {
	Name   string `json:"name" doc:"Name of the release." example:"base"`
	Tag    string `json:"tag" doc:"Tag of the release." example:"latest"`
	Digest string `json:"digest" doc:"Exact content." example:"sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"`
}

// Environment is what a sandbox runs on.
type Environment struct {
	ID           string `json:"id" enum:"E0,E1" doc:"Execution environment." example:"E1"`
	VMM          string `json:"vmm" doc:"Virtual machine monitor." example:"qemu"`
	VMMVersion   string `json:"vmm_version" doc:"Its version." example:"7.2.15"`
	Kernel       string `json:"kernel" doc:"Kernel of the guest." example:"6.1.0-28-cloud-amd64"`
	Acceleration string `json:"acceleration" doc:"kvm, or tcg: emulation, never a security boundary." example:"kvm"`
}

// SandboxNetwork is how far the network policy of a sandbox is applied.
type SandboxNetwork struct {
	AppliedRevision int64 `json:"applied_revision" doc:"Revision that is enforced." example:"0"`
	DesiredRevision int64 `json:"desired_revision" doc:"Revision that was asked for." example:"0"`
}

// Sandbox is the record of one microVM.
type Sandbox struct {
	ID           string            `json:"id" doc:"ID of the sandbox." example:"i3k9x0a7c2m5q8w1z4b6n"`
	Template     TemplateRef       `json:"template" doc:"Template it was made from."`
	Environment  Environment       `json:"environment" doc:"What it runs on."`
	State        string            `json:"state" enum:"creating,running,pausing,paused,suspending,suspended,waking,deleting,deleted,failed" doc:"Where it is in its life." example:"running"`
	StateReason  *string           `json:"state_reason" doc:"Why it is in this state, if there is more to say." example:"host_lost"`
	OperationID  *string           `json:"operation_id" doc:"Operation that moves it out of a transitional state." example:"op3k9x0a7c2m5q8w1z4b6n"`
	Generation   uint64            `json:"generation" doc:"Grows with every start of the VM." example:"1"`
	Etag         string            `json:"etag" doc:"Version of the record, for If-Match." example:"\"3\""`
	Resources    Resources         `json:"resources" doc:"Its shape."`
	Lifecycle    Lifecycle         `json:"lifecycle" doc:"Its timers."`
	Metadata     map[string]string `json:"metadata" doc:"Your labels." example:"{\"team\":\"research\"}"`
	Network      SandboxNetwork    `json:"network" doc:"Network policy."`
	Node         *string           `json:"node" doc:"Machine it is on." example:"node-1"`
	ProjectID    string            `json:"project_id" doc:"Project it belongs to." example:"default"`
	CreatedAt    Time              `json:"created_at" doc:"When it was created."`
	UpdatedAt    Time              `json:"updated_at" doc:"When the record last changed."`
	LastActiveAt *Time             `json:"last_active_at" doc:"Last activity."`
	SuspendedAt  *Time             `json:"suspended_at" doc:"When it was suspended."`
	SuspendDueAt *Time             `json:"suspend_due_at" doc:"When it will be suspended if it stays idle."`
}

func sandboxOf(s *sandbox.Sandbox) *Sandbox {
	if s == nil {
		return nil
	}
	metadata := s.Metadata
	if metadata == nil {
		metadata = map[string]string{}
	}
	return &Sandbox{
		ID: string(s.ID), Template: TemplateRef(s.Template), Environment: Environment(s.Environment),
		State: string(s.State), StateReason: textOrNull(s.StateReason), OperationID: textOrNull(s.OperationID),
		Generation: s.Generation, Etag: etag(s.Version), Resources: Resources(s.Resources),
		Lifecycle: Lifecycle(s.Lifecycle), Metadata: metadata, Node: textOrNull(s.Node), ProjectID: s.ProjectID,
		CreatedAt: Time(s.CreatedAt), UpdatedAt: Time(s.UpdatedAt), LastActiveAt: timeOrNull(s.LastActive),
	}
}

func etag(version int64) string { return `"` + strconv.FormatInt(version, 10) + `"` }

// SandboxPage is one page of sandboxes.
type SandboxPage struct {
	Items      []*Sandbox `json:"items" doc:"The sandboxes of this page."`
	NextCursor *string    `json:"next_cursor" doc:"Cursor of the next page; null at the end." example:"MTcwNjcwMDAwMA"`
}

// OperationError is the error of a failed operation.
type OperationError struct {
	Code      sandbox.Code    `json:"code" doc:"Class of the error." example:"service_unavailable"`
	Message   string          `json:"message" doc:"What went wrong, for people." example:"the VM did not start"`
	RequestID string          `json:"request_id" doc:"Always empty: an operation outlives its request." example:""`
	Details   sandbox.Details `json:"details" doc:"What a program can use."`
	Retryable bool            `json:"retryable" doc:"Whether the same request can succeed later." example:"true"`
}

// Progress is how far a phase is.
type Progress struct {
	Phase      string `json:"phase" doc:"Phase under way." example:"restore"`
	DoneBytes  uint64 `json:"done_bytes" doc:"Bytes done; 0 where a phase has none." example:"0"`
	TotalBytes uint64 `json:"total_bytes" doc:"Bytes in all; 0 where a phase has none." example:"0"`
}

// Timing is what one phase took.
type Timing struct {
	Phase string  `json:"phase" doc:"Name of the phase." example:"restore"`
	MS    float64 `json:"ms" doc:"Milliseconds it took." example:"41.5"`
}

// Operation is the record of one asynchronous verb.
type Operation struct {
	ID        string          `json:"id" doc:"ID of the operation." example:"op3k9x0a7c2m5q8w1z4b6n"`
	Kind      string          `json:"kind" enum:"create,pause,suspend,wake,fork,snapshot,rollback,delete" doc:"The verb." example:"create"`
	SandboxID string          `json:"sandbox_id" doc:"Sandbox it works on." example:"i3k9x0a7c2m5q8w1z4b6n"`
	State     string          `json:"state" enum:"pending,running,succeeded,failed" doc:"How far it is; succeeded and failed are final." example:"succeeded"`
	Error     *OperationError `json:"error" doc:"Why it failed."`
	Progress  Progress        `json:"progress" doc:"How far the current phase is."`
	Timings   []Timing        `json:"timings" doc:"What each phase took."`
	CreatedAt Time            `json:"created_at" doc:"When it was asked for."`
	StartedAt *Time           `json:"started_at" doc:"When work on it began."`
	EndedAt   *Time           `json:"ended_at" doc:"When it ended."`
}

func operationOf(o *sandbox.Operation) *Operation {
	if o == nil {
		return nil
	}
	out := &Operation{
		ID: string(o.ID), Kind: string(o.Kind), SandboxID: string(o.SandboxID), State: string(o.State),
		Progress: Progress(o.Progress), Timings: make([]Timing, 0, len(o.Timings)), CreatedAt: Time(o.CreatedAt),
		StartedAt: timeOrNull(o.StartedAt), EndedAt: timeOrNull(o.EndedAt),
	}
	for _, t := range o.Timings {
		out.Timings = append(out.Timings, Timing(t))
	}
	if e := o.Error; e != nil {
		out.Error = &OperationError{Code: e.Code, Message: e.Message, Details: e.Details, Retryable: e.Retryable}
	}
	return out
}

// SandboxAccepted answers a create.
type SandboxAccepted struct {
	Sandbox   *Sandbox   `json:"sandbox" nullable:"false" doc:"The sandbox as it is now."`
	Operation *Operation `json:"operation" nullable:"false" doc:"The operation that creates it."`
}

// OperationAccepted answers a delete.
type OperationAccepted struct {
	Operation *Operation `json:"operation" nullable:"false" doc:"The operation that deletes it."`
}
