package control

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"

	"github.com/space-sandbox/space/internal/auth"
	agentv1 "github.com/space-sandbox/space/internal/gen/space/agent/v1"
	nodev1 "github.com/space-sandbox/space/internal/gen/space/node/v1"
	"github.com/space-sandbox/space/internal/sandbox"
	"github.com/space-sandbox/space/internal/store"
)

func (e *env) command(id sandbox.ID, im *Idem) (NewCommand, error) {
	return e.CreateCommand(e.t.Context(), e.admin, id, CreateCommand{Spec: &agentv1.ProcessSpec{Argv: [][]byte{[]byte("true")}}}, im)
}

func (e *env) hasSession(id sandbox.SessionID) bool {
	e.t.Helper()
	found := false
	e.tx(func(ctx context.Context, tx store.Tx) error {
		_, err := tx.GetSession(ctx, id)
		found = err == nil
		return nil
	})
	return found
}

func TestCreateCommand(t *testing.T) {
	e := newEnv(t)
	s := e.running()
	cmd, err := e.command(s.ID, nil)
	if err != nil {
		t.Fatal(err)
	}
	if cmd.Process.ProcessId != string(cmd.Session.ProcessID) || cmd.Replayed || cmd.Session.SandboxID != s.ID {
		t.Errorf("%+v", cmd)
	}
	got, err := e.AuthenticateSession(t.Context(), cmd.Session.ID, cmd.Token)
	if err != nil || got.ProcessID != cmd.Session.ProcessID {
		t.Fatalf("%+v, %v", got, err)
	}
	g, err := e.SessionGuest(t.Context(), got, GuestUse{Active: true})
	if err != nil {
		t.Fatal(err)
	}
	res, err := g.Processes.GetProcess(t.Context(), connect.NewRequest(&nodev1.GetProcessRequest{ProcessId: string(got.ProcessID)}))
	if err != nil || string(res.Msg.Process.Spec.Argv[0]) != "true" {
		t.Errorf("%v, %v", res, err)
	}
}

func TestIdempotentCommand(t *testing.T) {
	e := newEnv(t)
	s := e.running()
	first, err := e.command(s.ID, idem("k", "b"))
	if err != nil {
		t.Fatal(err)
	}
	e.restart()
	again, err := e.command(s.ID, idem("k", "b"))
	if err != nil || !again.Replayed || again.Process.ProcessId != first.Process.ProcessId {
		t.Fatalf("%+v, %v", again, err)
	}
	if again.Token == first.Token || again.Session.ID == first.Session.ID {
		t.Error("the token of a replay is not fresh")
	}
	for _, c := range []NewCommand{first, again} {
		if _, err := e.AuthenticateSession(t.Context(), c.Session.ID, c.Token); err != nil {
			t.Error(err)
		}
	}
	_, err = e.command(s.ID, idem("k", "other"))
	e.wantCode(err, sandbox.CodeIdempotencyConflict)
	if e.node.processes.count() != 1 {
		t.Errorf("%d processes", e.node.processes.count())
	}
}

func TestRacingCommandsWithOneKeyMakeOneProcess(t *testing.T) {
	e := newEnv(t)
	s := e.running()
	var wg sync.WaitGroup
	for range 20 {
		wg.Go(func() {
			if _, err := e.command(s.ID, idem("k", "b")); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if e.node.processes.count() != 1 {
		t.Errorf("%d processes", e.node.processes.count())
	}
}

// TestLostAnswerOfACommand: the guest made the process, but nobody heard of it.
func TestLostAnswerOfACommand(t *testing.T) {
	e := newEnv(t)
	s := e.running()
	e.node.processes.set(nil, func(*nodev1.CreateProcessRequest) error { return connect.NewError(connect.CodeUnavailable, nil) })
	_, err := e.command(s.ID, idem("k", "b"))
	e.wantCode(err, sandbox.CodeServiceUnavailable)
	e.node.processes.set(nil, nil)
	e.restart()
	cmd, err := e.command(s.ID, idem("k", "b"))
	if err != nil || !cmd.Replayed || e.node.processes.count() != 1 {
		t.Errorf("%+v, %v, %d processes", cmd, err, e.node.processes.count())
	}
}

func TestRefusedCommandLeavesNothing(t *testing.T) {
	e := newEnv(t)
	s := e.running()
	e.node.processes.set(func(*nodev1.CreateProcessRequest) error {
		err := connect.NewError(connect.CodeInvalidArgument, errors.New("guest text"))
		d, derr := connect.NewErrorDetail(&agentv1.FileError{Reason: agentv1.FileErrorReason_FILE_ERROR_REASON_UNKNOWN_USER, Field: "user"})
		if derr != nil {
			return derr
		}
		err.AddDetail(d)
		return err
	}, nil)
	_, err := e.command(s.ID, idem("k", "b"))
	got := e.wantCode(err, sandbox.CodeInvalidRequest)
	if len(got.Details.Violations) != 1 || got.Details.Violations[0].Field != "user" {
		t.Errorf("%+v", got.Details)
	}
	e.tx(func(ctx context.Context, tx store.Tx) error {
		n, err := tx.DeleteSessions(ctx, e.clock.Now().Add(1000*time.Hour))
		if n != 0 {
			t.Errorf("%d sessions were left", n)
		}
		return err
	})
	e.node.processes.set(nil, nil)
	if cmd, err := e.command(s.ID, idem("k", "b")); err != nil || cmd.Replayed {
		t.Errorf("the key is taken: %+v, %v", cmd, err)
	}
}

func TestCommandNeedsARunningSandbox(t *testing.T) {
	e := newEnv(t)
	entered, release, hook := blocked()
	e.hookCreate(func(ctx context.Context, _ *nodev1.CreateSandboxRequest, _ *createStream) error { return hook(ctx) })
	acc := e.create()
	e.await(entered, "node was called")
	_, err := e.command(acc.Sandbox.ID, nil)
	got := e.wantCode(err, sandbox.CodeConflict)
	if !got.Retryable || got.Details.State != "creating" || len(got.Details.AllowedFrom) == 0 {
		t.Errorf("%+v", got)
	}
	release()
	e.wait(acc.Operation.ID)
	cmd, err := e.command(acc.Sandbox.ID, nil)
	if err != nil {
		t.Fatal(err)
	}
	e.node.put(&nodev1.SandboxStatus{SandboxId: string(acc.Sandbox.ID), Generation: 1, State: nodev1.SandboxState_SANDBOX_STATE_FAILED})
	e.waitState(acc.Sandbox.ID, sandbox.StateFailed)
	_, err = e.command(acc.Sandbox.ID, nil)
	if got := e.wantCode(err, sandbox.CodeConflict); got.Retryable {
		t.Error("a failed sandbox does not come back")
	}
	// What was journalled can still be read.
	if _, err := e.Guest(t.Context(), e.admin, acc.Sandbox.ID, sandbox.ScopeSandboxesRead, GuestUse{ReadOnly: true}); err != nil {
		t.Error(err)
	}
	if _, err := e.CreateSession(t.Context(), e.admin, acc.Sandbox.ID, cmd.Session.ProcessID, nil); err != nil {
		t.Error(err)
	}
	e.wait(e.delete(acc.Sandbox.ID).Operation.ID)
	_, err = e.command(acc.Sandbox.ID, nil)
	e.wantCode(err, sandbox.CodeNotFound)
	_, err = e.SessionGuest(t.Context(), cmd.Session, GuestUse{ReadOnly: true})
	e.wantCode(err, sandbox.CodeNotFound)
}

func TestCommandScopes(t *testing.T) {
	e := newEnv(t)
	s := e.running()
	weak := e.principal(sandbox.ScopeSandboxesRead, sandbox.ScopeSandboxesWrite)
	_, err := e.CreateCommand(t.Context(), weak, s.ID, CreateCommand{}, nil)
	if got := e.wantCode(err, sandbox.CodeForbidden); got.Details.RequiredScope != sandbox.ScopeSandboxesExec {
		t.Errorf("%+v", got.Details)
	}
	_, err = e.CreateSession(t.Context(), weak, s.ID, sandbox.NewProcessID(), nil)
	e.wantCode(err, sandbox.CodeForbidden)
	_, err = e.Guest(t.Context(), weak, s.ID, sandbox.ScopeFilesWrite, GuestUse{})
	e.wantCode(err, sandbox.CodeForbidden)
}

func TestCreateSession(t *testing.T) {
	e := newEnv(t)
	s := e.running()
	cmd, err := e.command(s.ID, nil)
	if err != nil {
		t.Fatal(err)
	}
	first, err := e.CreateSession(t.Context(), e.admin, s.ID, cmd.Session.ProcessID, idem("k", ""))
	if err != nil || first.Replayed || first.Session.ProcessID != cmd.Session.ProcessID {
		t.Fatalf("%+v, %v", first, err)
	}
	again, err := e.CreateSession(t.Context(), e.admin, s.ID, cmd.Session.ProcessID, idem("k", ""))
	if err != nil || !again.Replayed || again.Token == first.Token {
		t.Fatalf("%+v, %v", again, err)
	}
	if got := first.Session.ExpiresAt.Sub(first.Session.CreatedAt); got != 24*time.Hour {
		t.Errorf("lasts %v", got)
	}
	_, err = e.CreateSession(t.Context(), e.admin, s.ID, sandbox.NewProcessID(), nil)
	e.wantCode(err, sandbox.CodeNotFound)
}

func TestAuthenticateSession(t *testing.T) {
	e := newEnv(t)
	s := e.running()
	_, owner := e.key(func(*sandbox.APIKey) {})
	open := func() NewSession {
		t.Helper()
		cmd, err := e.CreateCommand(t.Context(), owner, s.ID, CreateCommand{}, nil)
		if err != nil {
			t.Fatal(err)
		}
		return cmd.NewSession
	}
	a, b := open(), open()
	try := func(id sandbox.SessionID, token string) sandbox.Code {
		_, err := e.AuthenticateSession(t.Context(), id, token)
		return sandbox.CodeOf(err)
	}
	for name, got := range map[string]sandbox.Code{
		"another's token": try(a.Session.ID, b.Token),
		"no token":        try(a.Session.ID, ""),
		"unknown":         try(sandbox.NewSessionID(), a.Token),
	} {
		if got != sandbox.CodeUnauthorized {
			t.Errorf("%s: %q", name, got)
		}
	}
	if got := try(a.Session.ID, a.Token); got != "" {
		t.Errorf("the right token: %q", got)
	}
	e.clock.add(24 * time.Hour)
	if got := try(a.Session.ID, a.Token); got != sandbox.CodeUnauthorized {
		t.Errorf("expired: %q", got)
	}
	e.eventually("expired session is cleaned up", func() bool { return !e.hasSession(a.Session.ID) })
	c := open()
	if _, err := e.RevokeKey(t.Context(), e.admin, owner.KeyID); err != nil {
		t.Fatal(err)
	}
	if got := try(c.Session.ID, c.Token); got != sandbox.CodeUnauthorized {
		t.Errorf("its key is revoked: %q", got)
	}
}

func TestKeys(t *testing.T) {
	e := newEnv(t)
	ctx := t.Context()
	made, err := e.CreateKey(ctx, e.admin, CreateKey{Name: "ci", Scopes: []string{sandbox.ScopeSandboxesRead}}, idem("k", "b"))
	if err != nil || made.Key.Prefix != made.Secret[:8] || made.Key.CreatedByID != e.admin.KeyID {
		t.Fatalf("%+v, %v", made, err)
	}
	pr, err := e.Authenticate(ctx, made.Secret)
	if err != nil || pr.KeyID != made.Key.ID || pr.Require(sandbox.ScopeSandboxesRead) != nil {
		t.Fatalf("%+v, %v", pr, err)
	}
	again, err := e.CreateKey(ctx, e.admin, CreateKey{}, idem("k", "b"))
	if err != nil || !again.Replayed || again.Secret != "" || again.Key.ID != made.Key.ID {
		t.Fatalf("%+v, %v", again, err)
	}
	watch, cancel := context.WithCancel(ctx)
	defer cancel()
	revoked, other := e.RevocationOf(watch, made.Key.ID), e.RevocationOf(watch, e.admin.KeyID)
	for range 2 {
		key, err := e.RevokeKey(ctx, e.admin, made.Key.ID)
		if err != nil || key.RevokedAt.IsZero() {
			t.Fatalf("%+v, %v", key, err)
		}
	}
	e.await(revoked, "stream is told")
	select {
	case <-other:
		t.Error("another key's stream ended")
	default:
	}
	_, err = e.Authenticate(ctx, made.Secret)
	e.wantCode(err, sandbox.CodeUnauthorized)
	_, err = e.RevokeKey(ctx, e.admin, sandbox.NewKeyID())
	e.wantCode(err, sandbox.CodeNotFound)
	_, foreign := e.key(func(k *sandbox.APIKey) { k.ProjectID = "other" })
	_, err = e.RevokeKey(ctx, foreign, e.admin.KeyID)
	e.wantCode(err, sandbox.CodeNotFound)
}

// TestRevocationByAnotherProcess: only the store knows of it.
func TestRevocationByAnotherProcess(t *testing.T) {
	e := newEnv(t)
	_, pr := e.key(func(*sandbox.APIKey) {})
	revoked := e.RevocationOf(t.Context(), pr.KeyID)
	e.tx(func(ctx context.Context, tx store.Tx) error {
		key, err := tx.GetKey(ctx, pr.KeyID)
		if err != nil {
			return err
		}
		key.RevokedAt = e.clock.Now().UTC()
		return tx.UpdateKey(ctx, key)
	})
	e.await(revoked, "stream is told")
}

func TestKeysCannotGrantMoreThanTheyHave(t *testing.T) {
	e := newEnv(t)
	id := sandbox.NewID()
	read := []string{sandbox.ScopeSandboxesRead}
	limited := &auth.Principal{KeyID: e.admin.KeyID, ProjectID: auth.DefaultProject, Scopes: append(read, sandbox.ScopeKeysAdmin),
		SandboxIDs: []sandbox.ID{id}, Metadata: map[string]string{"team": "a"}}
	inside := CreateKey{Scopes: read, SandboxIDs: []sandbox.ID{id}, Metadata: map[string]string{"team": "a", "x": "y"}}
	for name, test := range map[string]struct {
		pr     *auth.Principal
		change func(*CreateKey)
		want   sandbox.Code
	}{
		"inside":         {limited, func(*CreateKey) {}, ""},
		"no admin":       {&auth.Principal{Scopes: read}, func(*CreateKey) {}, sandbox.CodeForbidden},
		"no scope":       {limited, func(r *CreateKey) { r.Scopes = nil }, sandbox.CodeInvalidRequest},
		"unknown scope":  {limited, func(r *CreateKey) { r.Scopes = []string{"all"} }, sandbox.CodeInvalidRequest},
		"more scopes":    {limited, func(r *CreateKey) { r.Scopes = []string{sandbox.ScopeFilesRead} }, sandbox.CodeForbidden},
		"all sandboxes":  {limited, func(r *CreateKey) { r.SandboxIDs = nil }, sandbox.CodeForbidden},
		"other sandbox":  {limited, func(r *CreateKey) { r.SandboxIDs = []sandbox.ID{sandbox.NewID()} }, sandbox.CodeForbidden},
		"no metadata":    {limited, func(r *CreateKey) { r.Metadata = nil }, sandbox.CodeForbidden},
		"other metadata": {limited, func(r *CreateKey) { r.Metadata = map[string]string{"team": "b"} }, sandbox.CodeForbidden},
		"in the past":    {limited, func(r *CreateKey) { r.ExpiresAt = e.clock.Now() }, sandbox.CodeInvalidRequest},
	} {
		t.Run(name, func(t *testing.T) {
			req := inside
			test.change(&req)
			_, err := e.CreateKey(t.Context(), test.pr, req, nil)
			(&env{t: t}).wantCode(err, test.want)
		})
	}
}

func TestListKeys(t *testing.T) {
	e := newEnv(t)
	var want []sandbox.KeyID
	for range 5 {
		want = append(want, e.principal(sandbox.ScopeFilesRead).KeyID)
	}
	want = append([]sandbox.KeyID{e.admin.KeyID}, want...)
	var got []sandbox.KeyID
	after := sandbox.KeyID("")
	for {
		page, err := e.ListKeys(t.Context(), e.admin, after, 2)
		if err != nil {
			t.Fatal(err)
		}
		for _, k := range page.Items {
			got = append(got, k.ID)
		}
		if after = sandbox.KeyID(page.NextCursor); after == "" {
			break
		}
	}
	if len(got) != len(want) {
		t.Fatalf("%v, want %v", got, want)
	}
	for i := range got {
		if got[i] != want[i] {
			t.Errorf("%v, want %v", got, want)
		}
	}
	_, err := e.ListKeys(t.Context(), e.admin, sandbox.NewKeyID(), 2)
	e.wantCode(err, sandbox.CodeInvalidRequest)
	_, err = e.ListKeys(t.Context(), e.principal(sandbox.ScopeFilesRead), "", 2)
	e.wantCode(err, sandbox.CodeForbidden)
}
