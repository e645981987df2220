package apitest

import (
	"context"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/space-sandbox/space/internal/auth"
	"github.com/space-sandbox/space/internal/control"
	nodev1 "github.com/space-sandbox/space/internal/gen/space/node/v1"
	"github.com/space-sandbox/space/internal/sandbox"
)

// The credentials that a new Service knows.
const (
	AdminKey  = "e2b_aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"
	ReaderKey = "e2b_bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb" // sandboxes:read only
	Token     = "st_cccccccccccccccccccccccccccccccccccccccc"
)

// Service implements control.Service.
type Service struct {
	Guests *Guest
	// Sandbox, Session and Process exist from the start; the sandbox runs.
	Sandbox *sandbox.Sandbox
	Session *sandbox.Session
	Process *nodev1.Process

	mu       sync.Mutex
	keys     map[string]*auth.Principal
	ops      map[sandbox.OperationID]*sandbox.Operation
	fail     map[string]error
	once     map[string]control.Idem
	revoked  chan struct{}
	waiting  atomic.Int32
	Created  []control.CreateSandbox
	Updates  []control.UpdateSandbox
	Commands []control.CreateCommand
	Lists    []control.ListSandboxes
	Resolved int // calls of SessionGuest
}

// New returns a service with one running sandbox, one process and one session.
func New() *Service {
	s := &Service{
		keys: map[string]*auth.Principal{
			AdminKey:  {KeyID: sandbox.NewKeyID(), ProjectID: "default", Scopes: sandbox.AllScopes()},
			ReaderKey: {KeyID: sandbox.NewKeyID(), ProjectID: "default", Scopes: []string{sandbox.ScopeSandboxesRead}},
		},
		ops: map[sandbox.OperationID]*sandbox.Operation{}, fail: map[string]error{}, once: map[string]control.Idem{},
		revoked: make(chan struct{}), Guests: newGuest(),
	}
	now := time.Date(2026, 1, 31, 12, 0, 0, 123456789, time.UTC)
	s.Sandbox = &sandbox.Sandbox{
		ID: sandbox.NewID(), ProjectID: "default", State: sandbox.StateRunning, Generation: 1, Version: 3, CreatedAt: now, UpdatedAt: now,
		Template: sandbox.TemplateRef{Name: "base", Tag: "latest", Digest: "sha256:" + strings.Repeat("0", 64)},
	}
	s.Process = s.Guests.AddProcess()
	s.Session = &sandbox.Session{
		ID: sandbox.NewSessionID(), SandboxID: s.Sandbox.ID, ProcessID: sandbox.ProcessID(s.Process.GetProcessId()), KeyID: s.keys[AdminKey].KeyID,
		ExpiresAt: time.Now().Add(time.Hour),
	}
	return s
}

// Close ends the guest's server.
func (s *Service) Close() { s.Guests.close() }

// Fail makes a method answer err; nil lets it work again.
func (s *Service) Fail(method string, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.fail[method] = err
}

// SetState moves the sandbox.
func (s *Service) SetState(state sandbox.State) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.Sandbox.State = state
}

// EndOperation ends an operation; a nil error is success.
func (s *Service) EndOperation(id sandbox.OperationID, err *sandbox.Error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	op := *s.ops[id]
	op.State = sandbox.OpSucceeded
	if err != nil {
		op.State, op.Error = sandbox.OpFailed, err.Record()
	}
	s.ops[id] = &op
}

// OpenOperations returns the operations that have not ended.
func (s *Service) OpenOperations() []sandbox.OperationID {
	s.mu.Lock()
	defer s.mu.Unlock()
	var out []sandbox.OperationID
	for id, op := range s.ops {
		if !op.State.Ended() {
			out = append(out, id)
		}
	}
	return out
}

// Waiting returns how many calls of GetOperation are waiting.
func (s *Service) Waiting() int { return int(s.waiting.Load()) }

// Principal returns whom a key stands for.
func (s *Service) Principal(key string) *auth.Principal {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.keys[key]
}

// Revoke revokes every key.
func (s *Service) Revoke() { close(s.revoked) }

func (s *Service) failing(method string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.fail[method]
}

// Authenticate implements control.Service.
func (s *Service) Authenticate(_ context.Context, key string) (*auth.Principal, error) {
	if err := s.failing("Authenticate"); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if p := s.keys[key]; p != nil {
		return p, nil
	}
	return nil, sandbox.Errorf(sandbox.CodeUnauthorized, "the API key is not valid")
}

// AuthenticateSession implements control.Service.
func (s *Service) AuthenticateSession(_ context.Context, id sandbox.SessionID, token string) (*sandbox.Session, error) {
	if id != s.Session.ID || token != Token {
		return nil, sandbox.Errorf(sandbox.CodeUnauthorized, "the session or its token is not valid")
	}
	return s.Session, nil
}

// RevocationOf implements control.Service.
func (s *Service) RevocationOf(context.Context, sandbox.KeyID) <-chan struct{} { return s.revoked }

func (s *Service) see(p *auth.Principal, scope string, id sandbox.ID) (*sandbox.Sandbox, error) {
	if err := p.Require(scope); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if id != s.Sandbox.ID {
		return nil, sandbox.Errorf(sandbox.CodeNotFound, "no such sandbox")
	}
	c := *s.Sandbox
	return &c, nil
}

func (s *Service) operation(kind sandbox.OperationKind) *sandbox.Operation {
	s.mu.Lock()
	defer s.mu.Unlock()
	op := &sandbox.Operation{ID: sandbox.NewOperationID(), Kind: kind, SandboxID: s.Sandbox.ID, State: sandbox.OpRunning, CreatedAt: s.Sandbox.CreatedAt}
	s.ops[op.ID] = op
	return op
}

// idem checks a key like the real service: the same key for another body is a conflict.
func (s *Service) idem(p *auth.Principal, idem *control.Idem) (replayed bool, err error) {
	if idem == nil {
		return false, nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	name := string(p.KeyID) + idem.Scope + idem.Key
	old, ok := s.once[name]
	if ok && old.BodyHash != idem.BodyHash {
		return false, sandbox.Errorf(sandbox.CodeIdempotencyConflict, "the key was used for another request")
	}
	s.once[name] = *idem
	return ok, nil
}

// CreateSandbox implements control.Service. The operation ends at once unless "CreateSandbox" was told to hang.
func (s *Service) CreateSandbox(_ context.Context, p *auth.Principal, req control.CreateSandbox, idem *control.Idem) (control.Accepted, error) {
	if err := s.failing("CreateSandbox"); err != nil {
		return control.Accepted{}, err
	}
	if err := p.Require(sandbox.ScopeSandboxesWrite); err != nil {
		return control.Accepted{}, err
	}
	replayed, err := s.idem(p, idem)
	if err != nil {
		return control.Accepted{}, err
	}
	op := s.operation(sandbox.OpCreate)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.Created = append(s.Created, req)
	c := *s.Sandbox
	c.State, c.OperationID = sandbox.StateCreating, op.ID
	return control.Accepted{Sandbox: &c, Operation: op, Replayed: replayed}, nil
}

// GetSandbox implements control.Service.
func (s *Service) GetSandbox(_ context.Context, p *auth.Principal, id sandbox.ID) (*sandbox.Sandbox, error) {
	if err := s.failing("GetSandbox"); err != nil {
		return nil, err
	}
	return s.see(p, sandbox.ScopeSandboxesRead, id)
}

// ListSandboxes implements control.Service.
func (s *Service) ListSandboxes(_ context.Context, p *auth.Principal, q control.ListSandboxes) (control.Page[*sandbox.Sandbox], error) {
	sb, err := s.see(p, sandbox.ScopeSandboxesRead, s.Sandbox.ID)
	if err != nil {
		return control.Page[*sandbox.Sandbox]{}, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.Lists = append(s.Lists, q)
	return control.Page[*sandbox.Sandbox]{Items: []*sandbox.Sandbox{sb}, NextCursor: "more"}, nil
}

// UpdateSandbox implements control.Service.
func (s *Service) UpdateSandbox(_ context.Context, p *auth.Principal, id sandbox.ID, u control.UpdateSandbox) (*sandbox.Sandbox, error) {
	sb, err := s.see(p, sandbox.ScopeSandboxesWrite, id)
	if err != nil {
		return nil, err
	}
	if u.IfMatch != nil && *u.IfMatch != sb.Version {
		return nil, sandbox.Errorf(sandbox.CodeFailedPrecondition, "the sandbox has changed")
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.Updates = append(s.Updates, u)
	return sb, nil
}

// DeleteSandbox implements control.Service.
func (s *Service) DeleteSandbox(_ context.Context, p *auth.Principal, id sandbox.ID, idem *control.Idem) (control.Accepted, error) {
	sb, err := s.see(p, sandbox.ScopeSandboxesWrite, id)
	if err != nil {
		return control.Accepted{}, err
	}
	replayed, err := s.idem(p, idem)
	return control.Accepted{Sandbox: sb, Operation: s.operation(sandbox.OpDelete), Replayed: replayed}, err
}

// GetOperation implements control.Service.
func (s *Service) GetOperation(ctx context.Context, p *auth.Principal, id sandbox.OperationID, wait time.Duration) (*sandbox.Operation, error) {
	if err := p.Require(sandbox.ScopeSandboxesRead); err != nil {
		return nil, err
	}
	if wait > 0 {
		s.waiting.Add(1)
		defer s.waiting.Add(-1)
	}
	for deadline := time.Now().Add(wait); ; {
		s.mu.Lock()
		op := s.ops[id]
		s.mu.Unlock()
		if op == nil {
			return nil, sandbox.Errorf(sandbox.CodeNotFound, "no such operation")
		}
		if op.State.Ended() || !time.Now().Before(deadline) {
			return op, nil
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(2 * time.Millisecond):
		}
	}
}

// CreateCommand implements control.Service.
func (s *Service) CreateCommand(_ context.Context, p *auth.Principal, id sandbox.ID, req control.CreateCommand, idem *control.Idem) (control.NewCommand, error) {
	if _, err := s.see(p, sandbox.ScopeSandboxesExec, id); err != nil {
		return control.NewCommand{}, err
	}
	replayed, err := s.idem(p, idem)
	if err != nil {
		return control.NewCommand{}, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.Commands = append(s.Commands, req)
	return control.NewCommand{
		Process: &nodev1.Process{ProcessId: s.Process.GetProcessId(), Spec: req.Spec}, NewSession: control.NewSession{Session: s.Session, Token: Token, Replayed: replayed},
	}, nil
}

// CreateSession implements control.Service.
func (s *Service) CreateSession(_ context.Context, p *auth.Principal, id sandbox.ID, pid sandbox.ProcessID, idem *control.Idem) (control.NewSession, error) {
	if _, err := s.see(p, sandbox.ScopeSandboxesExec, id); err != nil {
		return control.NewSession{}, err
	}
	if pid != s.Session.ProcessID {
		return control.NewSession{}, sandbox.Errorf(sandbox.CodeNotFound, "no such process")
	}
	replayed, err := s.idem(p, idem)
	return control.NewSession{Session: s.Session, Token: Token, Replayed: replayed}, err
}

// Guest implements control.Service.
func (s *Service) Guest(_ context.Context, p *auth.Principal, id sandbox.ID, scope string, use control.GuestUse) (*control.Guest, error) {
	sb, err := s.see(p, scope, id)
	if err != nil {
		return nil, err
	}
	return s.guest(sb, use)
}

func (s *Service) guest(sb *sandbox.Sandbox, use control.GuestUse) (*control.Guest, error) {
	if sb.State != sandbox.StateRunning && (!use.ReadOnly || sb.State != sandbox.StateFailed) {
		return nil, sandbox.ConflictState("use", sb.State, sb.State == sandbox.StateCreating, sandbox.StateRunning)
	}
	processes, files := s.Guests.clients()
	return &control.Guest{Sandbox: sb, Processes: processes, Files: files}, nil
}

// SessionGuest implements control.Service.
func (s *Service) SessionGuest(_ context.Context, _ *sandbox.Session, use control.GuestUse) (*control.Guest, error) {
	if err := s.failing("SessionGuest"); err != nil {
		return nil, err
	}
	s.mu.Lock()
	s.Resolved++
	sb := *s.Sandbox
	s.mu.Unlock()
	return s.guest(&sb, use)
}

// Once implements control.Service.
func (s *Service) Once(ctx context.Context, p *auth.Principal, idem *control.Idem, fn func(context.Context) error) (bool, error) {
	replayed, err := s.idem(p, idem)
	if err != nil || replayed {
		return replayed, err
	}
	return false, fn(ctx)
}

// ListTemplates implements control.Service.
func (s *Service) ListTemplates(_ context.Context, p *auth.Principal) ([]*nodev1.Template, error) {
	if err := p.Require(sandbox.ScopeTemplatesRead); err != nil {
		return nil, err
	}
	return []*nodev1.Template{{Name: "base", Tag: "latest", State: nodev1.TemplateState_TEMPLATE_STATE_READY, Progress: &nodev1.Progress{Phase: "ready"}}}, nil
}

// GetTemplate implements control.Service.
func (s *Service) GetTemplate(ctx context.Context, p *auth.Principal, name string) (*nodev1.Template, error) {
	list, err := s.ListTemplates(ctx, p)
	if err != nil {
		return nil, err
	}
	if name != "base" {
		return nil, sandbox.Errorf(sandbox.CodeNotFound, "no such template")
	}
	return list[0], nil
}

// CreateKey implements control.Service.
func (s *Service) CreateKey(_ context.Context, p *auth.Principal, req control.CreateKey, idem *control.Idem) (control.NewKey, error) {
	if err := p.Require(sandbox.ScopeKeysAdmin); err != nil {
		return control.NewKey{}, err
	}
	replayed, err := s.idem(p, idem)
	key := control.NewKey{Key: &sandbox.APIKey{ID: p.KeyID, Name: req.Name, Scopes: req.Scopes, ExpiresAt: req.ExpiresAt, SandboxIDs: req.SandboxIDs}, Replayed: replayed}
	if !replayed {
		key.Secret = AdminKey
	}
	return key, err
}

// ListKeys implements control.Service.
func (s *Service) ListKeys(_ context.Context, p *auth.Principal, _ sandbox.KeyID, _ int) (control.Page[*sandbox.APIKey], error) {
	if err := p.Require(sandbox.ScopeKeysAdmin); err != nil {
		return control.Page[*sandbox.APIKey]{}, err
	}
	return control.Page[*sandbox.APIKey]{Items: []*sandbox.APIKey{{ID: p.KeyID, Name: "admin"}}}, nil
}

// RevokeKey implements control.Service.
func (s *Service) RevokeKey(_ context.Context, p *auth.Principal, id sandbox.KeyID) (*sandbox.APIKey, error) {
	if err := p.Require(sandbox.ScopeKeysAdmin); err != nil {
		return nil, err
	}
	if id != p.KeyID {
		return nil, sandbox.Errorf(sandbox.CodeNotFound, "no such API key")
	}
	return &sandbox.APIKey{ID: id, RevokedAt: time.Now()}, nil
}

// Ready implements control.Service.
func (s *Service) Ready(context.Context) error { return s.failing("Ready") }
