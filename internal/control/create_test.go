package control

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"

	nodev1 "github.com/space-sandbox/space/internal/gen/space/node/v1"
	"github.com/space-sandbox/space/internal/sandbox"
)

type createStream = connect.ServerStream[nodev1.CreateSandboxResponse]

// hookCreate sets what the node does before it answers a create with running.
func (e *env) hookCreate(fn func(context.Context, *nodev1.CreateSandboxRequest, *createStream) error) {
	e.node.with(func() { e.node.onCreate = fn })
}

func (e *env) hookDelete(fn func(context.Context, *nodev1.DeleteSandboxRequest) error) {
	e.node.with(func() { e.node.onDelete = fn })
}

func TestCreate(t *testing.T) {
	e := newEnv(t)
	acc := e.create(func(r *CreateSandbox) {
		r.Metadata, r.Env = map[string]string{"a": "b"}, map[string]string{"K": "V"}
		r.Resources.MemoryMiB = 1024
	})
	if acc.Sandbox.Generation != 1 || acc.Operation.Kind != sandbox.OpCreate || acc.Sandbox.OperationID != acc.Operation.ID {
		t.Errorf("accepted %+v, %+v", acc.Sandbox, acc.Operation)
	}
	op := e.wait(acc.Operation.ID)
	if op.State != sandbox.OpSucceeded || op.StartedAt.IsZero() || op.EndedAt.Before(op.StartedAt) || op.Error != nil {
		t.Errorf("operation %+v", op)
	}
	phases := map[string]bool{}
	for _, timing := range op.Timings {
		phases[timing.Phase] = true
	}
	if !phases["dispatch"] || !phases["resume"] || !phases["node_call"] {
		t.Errorf("timings %+v", op.Timings)
	}
	s, err := e.GetSandbox(t.Context(), e.admin, acc.Sandbox.ID)
	if err != nil {
		t.Fatal(err)
	}
	if s.State != sandbox.StateRunning || s.OperationID != "" || s.Environment.VMMVersion != "7.2.1" || s.Node != "n1" ||
		s.Template != (sandbox.TemplateRef{Name: "base", Tag: "1", Digest: "sha256:aa"}) ||
		s.Resources != (sandbox.Resources{VCPU: 1, MemoryMiB: 1024, DiskMiB: 1024}) {
		t.Errorf("sandbox %+v", s)
	}
	req := e.node.creates[0]
	if req.TemplateDigest != "sha256:aa" || req.Resources.MemoryMib != 1024 || req.Env["K"] != "V" || req.Generation != 1 || req.OperationId != string(op.ID) {
		t.Errorf("order %+v", req)
	}
}

func TestCreateRefusals(t *testing.T) {
	e := newEnv(t)
	building := &nodev1.Template{Name: "slow", State: nodev1.TemplateState_TEMPLATE_STATE_BUILDING,
		Progress: &nodev1.Progress{Phase: "download", DoneBytes: 50, TotalBytes: 200}}
	broken := &nodev1.Template{Name: "broken", State: nodev1.TemplateState_TEMPLATE_STATE_FAILED, Reason: "no mirror"}
	e.node.with(func() { e.node.templates = append(e.node.templates, building, broken) })
	for name, test := range map[string]struct {
		change func(*CreateSandbox)
		code   sandbox.Code
		text   string
	}{
		"unknown template": {func(r *CreateSandbox) { r.Template = "nope" }, sandbox.CodeNotFound, ""},
		"building":         {func(r *CreateSandbox) { r.Template = "slow" }, sandbox.CodeServiceUnavailable, "download, 25 %"},
		"broken":           {func(r *CreateSandbox) { r.Template = "broken" }, sandbox.CodeFailedPrecondition, "broken"},
		"no E0":            {func(r *CreateSandbox) { r.Environment = "E0" }, sandbox.CodeFailedPrecondition, "E0"},
		"odd environment":  {func(r *CreateSandbox) { r.Environment = "E7" }, sandbox.CodeInvalidRequest, "environment"},
		"cpus":             {func(r *CreateSandbox) { r.Resources.VCPU = 9 }, sandbox.CodeInvalidRequest, "resources.vcpu"},
		"memory low":       {func(r *CreateSandbox) { r.Resources.MemoryMiB = 127 }, sandbox.CodeInvalidRequest, "resources.memory_mib"},
		"memory high":      {func(r *CreateSandbox) { r.Resources.MemoryMiB = 16385 }, sandbox.CodeInvalidRequest, "resources.memory_mib"},
		"disk":             {func(r *CreateSandbox) { r.Resources.DiskMiB = 65537 }, sandbox.CodeInvalidRequest, "resources.disk_mib"},
		"suspend":          {func(r *CreateSandbox) { r.Lifecycle.OnMaxLifetime = "suspend" }, sandbox.CodeFailedPrecondition, "suspended"},
		"lifetime":         {func(r *CreateSandbox) { r.Lifecycle.MaxLifetimeS = new(int64) }, sandbox.CodeInvalidRequest, "max_lifetime_s"},
		"idle":             {func(r *CreateSandbox) { r.Lifecycle.IdleSuspendAfterS = new(int64) }, sandbox.CodeInvalidRequest, "idle_suspend"},
		"on lifetime":      {func(r *CreateSandbox) { r.Lifecycle.OnMaxLifetime = "explode" }, sandbox.CodeInvalidRequest, "on_max_lifetime"},
	} {
		t.Run(name, func(t *testing.T) {
			req := CreateSandbox{Template: "base"}
			test.change(&req)
			_, err := e.CreateSandbox(t.Context(), e.admin, req, idem("key-"+name, "x"))
			got := e.wantCode(err, test.code)
			if !strings.Contains(got.Message, test.text) {
				t.Errorf("message %q lacks %q", got.Message, test.text)
			}
			if test.code == sandbox.CodeFailedPrecondition && got.Details.Remediation == "" {
				t.Error("no remediation")
			}
			if test.code == sandbox.CodeServiceUnavailable && (!got.Retryable || got.RetryAfter == 0) {
				t.Error("not retryable")
			}
		})
	}
	if list := e.records(); len(list) != 0 {
		t.Errorf("refused creates left %d records", len(list))
	}
}

func TestAllWrongResourcesAreNamed(t *testing.T) {
	_, err := checkResources(sandbox.Resources{VCPU: 99, MemoryMiB: 1, DiskMiB: 1}, nil)
	var e *sandbox.Error
	if !errors.As(err, &e) || len(e.Details.Violations) != 3 {
		t.Errorf("%v", err)
	}
	if _, err := checkResources(sandbox.Resources{}, nil); err == nil {
		t.Error("a template without defaults makes a sandbox of nothing")
	}
}

func TestPickTemplate(t *testing.T) {
	list := []*nodev1.Template{
		{Name: "a", Tag: "1", Digest: "sha256:1"}, {Name: "a", Tag: "latest", Digest: "sha256:2"},
		{Name: "b", Tag: "x"}, {Name: "c", Tag: "1", Digest: "sha256:3"},
	}
	for ref, want := range map[string]string{
		"a": "latest", "a:1": "1", "a:2": "", "a@sha256:1": "1", "a@sha256:3": "", "b": "x", "b@": "", "z": "", "": "", "c": "1", "a:": "",
	} {
		if got := pick(list, ref).GetTag(); got != want {
			t.Errorf("pick(%q) = %q, want %q", ref, got, want)
		}
	}
}

func TestCreateWithoutScope(t *testing.T) {
	e := newEnv(t)
	_, err := e.CreateSandbox(t.Context(), e.principal(sandbox.ScopeSandboxesRead), CreateSandbox{Template: "base"}, nil)
	if got := e.wantCode(err, sandbox.CodeForbidden); got.Details.RequiredScope != sandbox.ScopeSandboxesWrite {
		t.Errorf("required scope %q", got.Details.RequiredScope)
	}
}

func TestPlainLackOfMemory(t *testing.T) {
	e := newEnv(t)
	e.node.with(func() { e.node.info.MemoryTotalMib, e.node.info.MemoryUsedMib = 1000, 600 })
	_, err := e.CreateSandbox(t.Context(), e.admin, CreateSandbox{Template: "base"}, nil)
	e.wantCode(err, sandbox.CodeCapacityUnavailable)
	// What is used may be an armed VM that this sandbox gets: the node must be asked.
	e.node.with(func() { e.node.info.Armed = 1 })
	e.running()
	_, err = e.CreateSandbox(t.Context(), e.admin, CreateSandbox{Template: "base", Resources: sandbox.Resources{MemoryMiB: 1001}}, nil)
	e.wantCode(err, sandbox.CodeCapacityUnavailable)
}

func TestNodeRefusesForLackOfRoom(t *testing.T) {
	e := newEnv(t, func(c *Config) { c.AdmissionWait = admission })
	full := true
	e.hookCreate(func(context.Context, *nodev1.CreateSandboxRequest, *createStream) error {
		if full {
			return connect.NewError(connect.CodeResourceExhausted, errors.New("the disk is nearly full"))
		}
		return nil
	})
	_, err := e.CreateSandbox(t.Context(), e.admin, CreateSandbox{Template: "base"}, idem("k", "b"))
	if got := e.wantCode(err, sandbox.CodeCapacityUnavailable); !got.Retryable || got.Details.Cause != "the disk is nearly full" {
		t.Errorf("not retryable or without its cause: %+v", got)
	}
	list := e.records()
	if len(list) != 1 || list[0].State != sandbox.StateDeleted {
		t.Fatalf("left %+v", list)
	}
	// The same key may be tried again, since nothing came of it.
	full = false
	acc, err := e.CreateSandbox(t.Context(), e.admin, CreateSandbox{Template: "base"}, idem("k", "b"))
	if err != nil || acc.Replayed {
		t.Fatalf("%+v, %v", acc, err)
	}
	e.wait(acc.Operation.ID)
}

func TestLateLackOfRoomFailsTheOperation(t *testing.T) {
	e := newEnv(t)
	entered, release, hook := blocked()
	e.hookCreate(func(ctx context.Context, _ *nodev1.CreateSandboxRequest, _ *createStream) error {
		if err := hook(ctx); err != nil {
			return err
		}
		return connect.NewError(connect.CodeResourceExhausted, nil)
	})
	acc := e.create()
	e.await(entered, "node was called")
	release()
	if op := e.wait(acc.Operation.ID); op.State != sandbox.OpFailed || op.Error.Code != sandbox.CodeCapacityUnavailable || !op.Error.Retryable {
		t.Errorf("operation %+v", op)
	}
	if s := e.record(acc.Sandbox.ID); s.State != sandbox.StateFailed || s.StateReason != reasonNoCapacity {
		t.Errorf("sandbox %+v", s)
	}
}

func TestNodeFailsACreate(t *testing.T) {
	e := newEnv(t)
	failed := func(reason string) func(context.Context, *nodev1.CreateSandboxRequest, *createStream) error {
		return func(_ context.Context, r *nodev1.CreateSandboxRequest, out *createStream) error {
			st := &nodev1.SandboxStatus{SandboxId: r.SandboxId, Generation: r.Generation, State: nodev1.SandboxState_SANDBOX_STATE_FAILED, Reason: reason}
			if err := out.Send(&nodev1.CreateSandboxResponse{Kind: &nodev1.CreateSandboxResponse_Status{Status: st}}); err != nil {
				return err
			}
			return errAnswered
		}
	}
	coded := func(code connect.Code) func(context.Context, *nodev1.CreateSandboxRequest, *createStream) error {
		return func(context.Context, *nodev1.CreateSandboxRequest, *createStream) error {
			return connect.NewError(code, errors.New("inner text"))
		}
	}
	for name, test := range map[string]struct {
		hook func(context.Context, *nodev1.CreateSandboxRequest, *createStream) error
		code sandbox.Code
	}{
		"failed":           {failed("agent_lost"), sandbox.CodeInternal},
		"failed, no why":   {failed(""), sandbox.CodeInternal},
		"internal":         {coded(connect.CodeInternal), sandbox.CodeInternal},
		"stale generation": {coded(connect.CodeFailedPrecondition), sandbox.CodeInternal},
		"template gone":    {coded(connect.CodeNotFound), sandbox.CodeFailedPrecondition},
	} {
		t.Run(name, func(t *testing.T) {
			e.hookCreate(test.hook)
			acc := e.create()
			op := e.wait(acc.Operation.ID)
			if op.State != sandbox.OpFailed || op.Error.Code != test.code || strings.Contains(op.Error.Message, "inner text") {
				t.Errorf("operation %+v, error %+v", op, op.Error)
			}
			if s := e.record(acc.Sandbox.ID); s.State != sandbox.StateFailed || s.StateReason == "" || s.OperationID != "" {
				t.Errorf("sandbox %+v", s)
			} else if name == "failed" && (s.StateReason != "agent_lost" || op.Error.Details.Cause != "agent_lost") {
				t.Errorf("the node's reason was lost: %+v, %+v", s, op.Error)
			}
			e.wait(e.delete(acc.Sandbox.ID).Operation.ID)
		})
	}
}

// TestCreateIsTriedAgain: what may be a passing trouble of the node or the way there does not fail the sandbox.
func TestCreateIsTriedAgain(t *testing.T) {
	for name, trouble := range map[string]error{
		"unavailable": connect.NewError(connect.CodeUnavailable, nil),
		"aborted":     connect.NewError(connect.CodeAborted, nil),
		"cut":         errAnswered, // the stream ends without a status
	} {
		t.Run(name, func(t *testing.T) {
			e := newEnv(t)
			var mu sync.Mutex
			left := 3
			e.hookCreate(func(context.Context, *nodev1.CreateSandboxRequest, *createStream) error {
				mu.Lock()
				defer mu.Unlock()
				if left--; left >= 0 {
					return trouble
				}
				return nil
			})
			e.running()
			e.node.with(func() {
				for _, r := range e.node.creates {
					if r.SandboxId != e.node.creates[0].SandboxId || r.Generation != 1 {
						t.Errorf("a repeat asked for something else: %+v", r)
					}
				}
			})
		})
	}
}

func TestCreateGivesUpInTheEnd(t *testing.T) {
	e := newEnv(t, func(c *Config) { c.CreateTimeout = time.Hour })
	e.hookCreate(func(context.Context, *nodev1.CreateSandboxRequest, *createStream) error {
		return connect.NewError(connect.CodeUnavailable, nil)
	})
	acc := e.create()
	e.eventually("some attempts", func() bool { n, _ := e.node.counts(); return n > 2 })
	e.clock.add(2 * time.Hour)
	if op := e.wait(acc.Operation.ID); op.Error == nil || op.Error.Code != sandbox.CodeServiceUnavailable {
		t.Errorf("operation %+v", op)
	}
	if s := e.record(acc.Sandbox.ID); s.State != sandbox.StateFailed || s.StateReason != reasonNodeUnreachable {
		t.Errorf("sandbox %+v", s)
	}
}

func TestProgressIsSeenWhileCreating(t *testing.T) {
	e := newEnv(t)
	entered, release, hook := blocked()
	e.hookCreate(func(ctx context.Context, _ *nodev1.CreateSandboxRequest, out *createStream) error {
		err := out.Send(&nodev1.CreateSandboxResponse{Kind: &nodev1.CreateSandboxResponse_Progress{
			Progress: &nodev1.Progress{Phase: "restore", DoneBytes: 3, TotalBytes: 9}}})
		return errors.Join(err, hook(ctx))
	})
	acc := e.create()
	e.await(entered, "node was called")
	e.eventually("progress", func() bool {
		op, err := e.GetOperation(t.Context(), e.admin, acc.Operation.ID, 0)
		return err == nil && op.State == sandbox.OpRunning && op.Progress == (sandbox.Progress{Phase: "restore", DoneBytes: 3, TotalBytes: 9}) && !op.StartedAt.IsZero()
	})
	release()
	e.wait(acc.Operation.ID)
	e.eventually("hub is empty", func() bool {
		e.ops.mu.Lock()
		defer e.ops.mu.Unlock()
		return len(e.ops.live) == 0
	})
}

func TestWaitingEndsInTime(t *testing.T) {
	e := newEnv(t)
	entered, release, hook := blocked()
	defer release()
	e.hookCreate(func(ctx context.Context, _ *nodev1.CreateSandboxRequest, _ *createStream) error { return hook(ctx) })
	acc := e.create()
	e.await(entered, "node was called")
	op, err := e.GetOperation(t.Context(), e.admin, acc.Operation.ID, 30*time.Millisecond)
	if err != nil || op.State.Ended() {
		t.Errorf("%+v, %v", op, err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := e.GetOperation(ctx, e.admin, acc.Operation.ID, time.Minute); err == nil {
		t.Error("a caller that left was answered")
	}
}
