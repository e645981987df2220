package api

import (
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/space-sandbox/space/internal/api/wire"
	"github.com/space-sandbox/space/internal/control"
	agentv1 "github.com/space-sandbox/space/internal/gen/space/agent/v1"
	nodev1 "github.com/space-sandbox/space/internal/gen/space/node/v1"
	"github.com/space-sandbox/space/internal/sandbox"
)

// TerminalSize is the size of a terminal.
type TerminalSize struct {
	Cols uint32 `json:"cols" minimum:"1" maximum:"65535" doc:"Columns." example:"80"`
	Rows uint32 `json:"rows" minimum:"1" maximum:"65535" doc:"Rows." example:"24"`
}

// CreateCommand is the request to make a process.
type CreateCommand struct {
	Argv           []string          `json:"argv" minItems:"1" maxItems:"4096" doc:"Program and arguments: at most 262,144 bytes in all with a NUL after each, 131,071 each." example:"[\"python3\",\"-c\",\"print(6*7)\"]"`
	Env            map[string]string `json:"env,omitempty" maxProperties:"256" doc:"Added to the sandbox's environment." example:"{\"DEBUG\":\"1\"}"`
	Cwd            string            `json:"cwd,omitempty" minLength:"1" maxLength:"4095" doc:"Working directory; default: the user's home." example:"/home/user"`
	User           string            `json:"user,omitempty" minLength:"1" maxLength:"256" doc:"Name or uid; default: the template's user." example:"user"`
	Stdin          bool              `json:"stdin,omitempty" default:"false" doc:"Whether the process gets an input to write to; else it reads end of file." example:"false"`
	Pty            *TerminalSize     `json:"pty" required:"false" doc:"A terminal of this size instead of three pipes; null: none."`
	TimeoutS       *int64            `json:"timeout_s" required:"false" minimum:"1" maximum:"315360000" doc:"Seconds after which the whole process tree is killed; null: never." example:"60"`
	Start          string            `json:"start,omitempty" enum:"attach,now" default:"attach" doc:"attach: reading the events starts the process; now: it starts at once." example:"attach"`
	OutputCapBytes uint64            `json:"output_cap_bytes,omitempty" minimum:"65536" maximum:"1073741824" default:"67108864" doc:"How much output is kept for readers that come later; older output is dropped with an event." example:"67108864"`
}

// Exit is how a process ended.
type Exit struct {
	Code       *int32  `json:"code" doc:"Exit code; null if a signal ended it." example:"0"`
	Signal     *string `json:"signal" doc:"Signal that ended it; null if it exited." example:"SIGKILL"`
	TimedOut   bool    `json:"timed_out" doc:"Whether timeout_s ended it." example:"false"`
	OOMKilled  bool    `json:"oom_killed" doc:"Whether it was killed for want of memory." example:"false"`
	CoreDumped bool    `json:"core_dumped" doc:"Whether it dumped core." example:"false"`
}

// Output is how much a process has written.
type Output struct {
	StdoutBytes  uint64 `json:"stdout_bytes" doc:"Bytes of standard output; a terminal's bytes count here." example:"3"`
	StderrBytes  uint64 `json:"stderr_bytes" doc:"Bytes of standard error." example:"0"`
	DroppedBytes uint64 `json:"dropped_bytes" doc:"Bytes that the cap dropped." example:"0"`
}

// Process is the record of a process.
type Process struct {
	ID        string   `json:"id" doc:"ID of the process, for ever within its sandbox." example:"p3k9x0a7c2m5q8w1z4b6n"`
	OSPID     *int32   `json:"os_pid" doc:"Its number in the guest; null before it started." example:"412"`
	Argv      []string `json:"argv" doc:"Program and arguments." example:"[\"python3\"]"`
	Cwd       string   `json:"cwd" doc:"Working directory; empty: the user's home." example:"/home/user"`
	User      string   `json:"user" doc:"User; empty: the template's." example:"user"`
	State     string   `json:"state" enum:"created,running,exited" doc:"How far it is." example:"exited"`
	CreatedAt *Time    `json:"created_at" doc:"When it was created."`
	StartedAt *Time    `json:"started_at" doc:"When it started."`
	ExitedAt  *Time    `json:"exited_at" doc:"When it ended."`
	Exit      *Exit    `json:"exit" doc:"How it ended; null until then."`
	Output    Output   `json:"output" doc:"What it has written."`
}

func processOf(p *nodev1.Process) *Process {
	out := &Process{
		ID: p.GetProcessId(), Argv: []string{}, Cwd: wire.Lossy(p.GetSpec().GetCwd()), User: p.GetSpec().GetUser(),
		State: "created", CreatedAt: stamp(p.GetCreatedAt()), StartedAt: stamp(p.GetStartedAt()),
		ExitedAt: stamp(p.GetExitedAt()),
		Output:   Output{StdoutBytes: p.GetStdoutBytes(), StderrBytes: p.GetStderrBytes(), DroppedBytes: p.GetDroppedBytes()},
	}
	for _, a := range p.GetSpec().GetArgv() {
		out.Argv = append(out.Argv, wire.Lossy(a))
	}
	if pid := p.GetOsPid(); pid > 0 {
		out.OSPID = &pid
	}
	switch p.GetState() {
	case nodev1.ProcessState_PROCESS_STATE_RUNNING:
		out.State = "running"
	case nodev1.ProcessState_PROCESS_STATE_EXITED:
		out.State, out.Exit = "exited", exitOf(p.GetExit())
	}
	return out
}

func exitOf(e *agentv1.Exited) *Exit {
	out := &Exit{Signal: textOrNull(e.GetSignal()), TimedOut: e.GetTimedOut(), OOMKilled: e.GetOomKilled(), CoreDumped: e.GetCoreDumped()}
	if e != nil {
		out.Code = e.Code
	}
	return out
}

func stamp(t *timestamppb.Timestamp) *Time {
	if t == nil {
		return nil
	}
	return timeOrNull(t.AsTime())
}

// ProcessPage is one page of processes.
type ProcessPage struct {
	Items      []*Process `json:"items" doc:"The processes of this page, in order of creation."`
	NextCursor *string    `json:"next_cursor" doc:"Cursor of the next page; null at the end." example:"p3k9x0a7c2m5q8w1z4b6n"`
}

// KilledProcess answers a kill.
type KilledProcess struct {
	Process
	Pending bool `json:"pending" doc:"Whether the death has not been seen yet." example:"false"`
}

// Session is what one needs to follow one command.
type Session struct {
	ID        string `json:"id" doc:"ID of the session." example:"cs3k9x0a7c2m5q8w1z4b6n"`
	Token     string `json:"token" doc:"Bearer token for this command's events, input, resize and signals. Shown once." example:"st_…"`
	EventsURL string `json:"events_url" format:"uri" doc:"Where the command's events are streamed." example:"https://data.example.com/v1/sessions/cs3k9x0a7c2m5q8w1z4b6n/events"`
	ExpiresAt Time   `json:"expires_at" doc:"When the token expires."`
}

func (s *Server) sessionOf(n control.NewSession) Session {
	return Session{
		ID: string(n.Session.ID), Token: n.Token, ExpiresAt: Time(n.Session.ExpiresAt),
		EventsURL: s.dataPlane() + "/v1/sessions/" + string(n.Session.ID) + "/events",
	}
}

// CommandCreated answers a command.
type CommandCreated struct {
	Process *Process `json:"process" nullable:"false" doc:"The new process."`
	Session Session  `json:"session" doc:"Its first session."`
}

// SessionCreated answers a new session.
type SessionCreated struct {
	Session Session `json:"session" doc:"The new session."`
}

// SignalProcess is the request to send a signal.
type SignalProcess struct {
	Signal string `json:"signal" pattern:"^SIG[A-Z0-9]{2,8}(\\+[0-9]{1,2})?$" patternDescription:"a signal's name" doc:"Name of the signal, such as SIGTERM or SIGRTMIN+3." example:"SIGTERM"`
	Target string `json:"target,omitempty" enum:"process,group" default:"process" doc:"The process alone or its process group." example:"process"`
}

// Template is a release of a template.
type Template struct {
	Name        string    `json:"name" doc:"Name of the release." example:"base"`
	Tag         string    `json:"tag" doc:"Tag of the release." example:"latest"`
	Digest      *string   `json:"digest" doc:"Exact content; null until it is ready." example:"sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"`
	State       string    `json:"state" enum:"building,ready,failed" doc:"Whether sandboxes can be made from it." example:"ready"`
	Reason      *string   `json:"reason" doc:"Why it failed." example:"no space left"`
	Progress    *Progress `json:"progress" doc:"How far its build is."`
	Defaults    Resources `json:"defaults" doc:"Shape of a sandbox that asks for none."`
	SizeBytes   uint64    `json:"size_bytes" doc:"Bytes it takes on a node." example:"734003200"`
	DefaultUser string    `json:"default_user" doc:"User that commands run as." example:"user"`
	Description string    `json:"description" doc:"What is in it." example:"Debian with Python and Node.js"`
	CreatedAt   *Time     `json:"created_at" doc:"When it was built."`
}

func templateOf(t *nodev1.Template) *Template {
	d := t.GetDefaults()
	out := &Template{
		Name: t.GetName(), Tag: t.GetTag(), Digest: textOrNull(t.GetDigest()), State: "building", Reason: textOrNull(t.GetReason()),
		Defaults:  Resources{VCPU: d.GetVcpu(), MemoryMiB: d.GetMemoryMib(), DiskMiB: d.GetDiskMib()},
		SizeBytes: t.GetSizeBytes(), DefaultUser: t.GetDefaultUser(), Description: t.GetDescription(), CreatedAt: stamp(t.GetCreatedAt()),
	}
	if p := t.GetProgress(); p != nil {
		out.Progress = &Progress{Phase: p.GetPhase(), DoneBytes: p.GetDoneBytes(), TotalBytes: p.GetTotalBytes()}
	}
	switch t.GetState() {
	case nodev1.TemplateState_TEMPLATE_STATE_READY:
		out.State = "ready"
	case nodev1.TemplateState_TEMPLATE_STATE_FAILED:
		out.State = "failed"
	}
	return out
}

// TemplatePage is the list of templates.
type TemplatePage struct {
	Items      []*Template `json:"items" doc:"The templates."`
	NextCursor *string     `json:"next_cursor" doc:"Always null: the list comes whole." example:""`
}

// CreateKey is the request for an API key.
type CreateKey struct {
	Name       string            `json:"name" minLength:"1" maxLength:"128" doc:"What the key is for." example:"ci"`
	Scopes     []string          `json:"scopes" minItems:"1" maxItems:"64" enum:"sandboxes:read,sandboxes:write,sandboxes:exec,files:read,files:write,templates:read,templates:write,network:read,network:write,credentials:write,credentials:use,keys:admin,nodes:admin" doc:"What the key may do." example:"[\"sandboxes:read\"]"`
	ExpiresAt  *string           `json:"expires_at" required:"false" format:"date-time" maxLength:"64" doc:"When it expires, in RFC 3339; null: never." example:"2027-01-31T12:00:00.000Z"`
	SandboxIDs []string          `json:"sandbox_ids,omitempty" maxItems:"1000" doc:"Limits the key to these sandboxes." example:"[\"i3k9x0a7c2m5q8w1z4b6n\"]"`
	Metadata   map[string]string `json:"metadata,omitempty" maxProperties:"64" doc:"Limits the key to sandboxes with this metadata, which it stamps on those it creates." example:"{\"team\":\"research\"}"`
}

// KeyRecord is the record of a key.
type KeyRecord struct {
	ID         string            `json:"id" doc:"ID of the record." example:"k3k9x0a7c2m5q8w1z4b6n"`
	Name       string            `json:"name" doc:"What the key is for." example:"ci"`
	Prefix     string            `json:"prefix" doc:"First characters of the key." example:"e2b_1a2b"`
	Scopes     []string          `json:"scopes" doc:"What it may do." example:"[\"sandboxes:read\"]"`
	SandboxIDs []string          `json:"sandbox_ids" doc:"Sandboxes it is limited to; empty: no such limit." example:"[]"`
	Metadata   map[string]string `json:"metadata" doc:"Metadata it is limited to; empty: no such limit." example:"{}"`
	ProjectID  string            `json:"project_id" doc:"Project it belongs to." example:"default"`
	CreatedAt  Time              `json:"created_at" doc:"When it was made."`
	ExpiresAt  *Time             `json:"expires_at" doc:"When it expires; null: never."`
	RevokedAt  *Time             `json:"revoked_at" doc:"When it was revoked; null: it is valid."`
	LastUsedAt *Time             `json:"last_used_at" doc:"When it was last used, to the minute."`
}

// NewKey answers the request for a key.
type NewKey struct {
	KeyRecord
	Key *string `json:"key" doc:"The key itself. Shown once: null when the answer is a replay." example:"e2b_0123456789abcdef0123456789abcdef01234567"`
}

// KeyPage is one page of keys.
type KeyPage struct {
	Items      []*KeyRecord `json:"items" doc:"The keys of this page."`
	NextCursor *string      `json:"next_cursor" doc:"Cursor of the next page; null at the end." example:"k3k9x0a7c2m5q8w1z4b6n"`
}

func keyOf(k *sandbox.APIKey) *KeyRecord {
	out := &KeyRecord{
		ID: string(k.ID), Name: k.Name, Prefix: k.Prefix, Scopes: append([]string{}, k.Scopes...), SandboxIDs: []string{},
		Metadata: k.Metadata, ProjectID: k.ProjectID, CreatedAt: Time(k.CreatedAt), ExpiresAt: timeOrNull(k.ExpiresAt),
		RevokedAt: timeOrNull(k.RevokedAt), LastUsedAt: timeOrNull(k.LastUsedAt),
	}
	if out.Metadata == nil {
		out.Metadata = map[string]string{}
	}
	for _, id := range k.SandboxIDs {
		out.SandboxIDs = append(out.SandboxIDs, string(id))
	}
	return out
}
