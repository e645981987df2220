package control

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"

	"github.com/space-sandbox/space/internal/auth"
	nodev1 "github.com/space-sandbox/space/internal/gen/space/node/v1"
	"github.com/space-sandbox/space/internal/sandbox"
	"github.com/space-sandbox/space/internal/store"
)

func TestDelete(t *testing.T) {
	e := newEnv(t)
	s := e.running(func(r *CreateSandbox) { r.Env = map[string]string{"SECRET": "x"} })
	acc := e.delete(s.ID)
	if acc.Sandbox.State != sandbox.StateDeleting || acc.Operation.Kind != sandbox.OpDelete {
		t.Errorf("accepted %+v", acc)
	}
	if op := e.wait(acc.Operation.ID); op.State != sandbox.OpSucceeded || len(op.Timings) == 0 {
		t.Errorf("operation %+v", op)
	}
	if e.node.has(s.ID) {
		t.Error("the node still has it")
	}
	_, err := e.GetSandbox(t.Context(), e.admin, s.ID)
	e.wantCode(err, sandbox.CodeNotFound)
	_, err = e.DeleteSandbox(t.Context(), e.admin, s.ID, nil)
	e.wantCode(err, sandbox.CodeNotFound)
	_, err = e.UpdateSandbox(t.Context(), e.admin, s.ID, UpdateSandbox{})
	e.wantCode(err, sandbox.CodeNotFound)
	if r := e.record(s.ID); r.DeletedAt.IsZero() || r.Env != nil || r.OperationID != "" {
		t.Errorf("tombstone %+v", r)
	}
}

func TestDeleteUnknownOrForeign(t *testing.T) {
	e := newEnv(t)
	s := e.running()
	_, foreign := e.key(func(k *sandbox.APIKey) { k.ProjectID = "other" })
	_, limited := e.key(func(k *sandbox.APIKey) { k.Metadata = map[string]string{"team": "x"} })
	for name, call := range map[string]func() error{
		"unknown": func() error { _, err := e.DeleteSandbox(t.Context(), e.admin, sandbox.NewID(), nil); return err },
		"foreign": func() error { _, err := e.DeleteSandbox(t.Context(), foreign, s.ID, nil); return err },
		"limited": func() error { _, err := e.DeleteSandbox(t.Context(), limited, s.ID, nil); return err },
	} {
		t.Run(name, func(t *testing.T) { (&env{t: t}).wantCode(call(), sandbox.CodeNotFound) })
	}
	if e.record(s.ID).State != sandbox.StateRunning {
		t.Error("it was deleted all the same")
	}
}

func TestDeleteRepeated(t *testing.T) {
	e := newEnv(t)
	s := e.running()
	entered, release, hook := blocked()
	e.hookDelete(func(ctx context.Context, _ *nodev1.DeleteSandboxRequest) error { return hook(ctx) })
	var (
		wg  sync.WaitGroup
		mu  sync.Mutex
		ops = map[sandbox.OperationID]bool{}
	)
	for range 20 {
		wg.Go(func() {
			acc, err := e.DeleteSandbox(t.Context(), e.admin, s.ID, nil)
			if err != nil {
				t.Error(err)
				return
			}
			mu.Lock()
			defer mu.Unlock()
			ops[acc.Operation.ID] = true
		})
	}
	wg.Wait()
	if len(ops) != 1 {
		t.Fatalf("%d operations", len(ops))
	}
	e.await(entered, "node was called")
	_, err := e.UpdateSandbox(t.Context(), e.admin, s.ID, UpdateSandbox{Metadata: map[string]string{}})
	e.wantCode(err, sandbox.CodeConflict)
	_, err = e.Guest(t.Context(), e.admin, s.ID, sandbox.ScopeFilesRead, GuestUse{})
	e.wantCode(err, sandbox.CodeConflict)
	release()
	for id := range ops {
		e.wait(id)
	}
}

func TestDeleteCancelsACreate(t *testing.T) {
	e := newEnv(t)
	entered, release, hook := blocked()
	defer release()
	e.hookCreate(func(ctx context.Context, _ *nodev1.CreateSandboxRequest, _ *createStream) error { return hook(ctx) })
	acc := e.create()
	e.await(entered, "node was called")
	del := e.delete(acc.Sandbox.ID)
	if op := e.wait(acc.Operation.ID); op.State != sandbox.OpFailed || op.Error.Code != sandbox.CodeConflict {
		t.Errorf("create %+v", op)
	}
	if op := e.wait(del.Operation.ID); op.State != sandbox.OpSucceeded { // although the create still hangs
		t.Errorf("delete %+v", op)
	}
}

// TestCreateFinishesAsDeleteComes: whoever is first, the sandbox ends deleted and nothing is left on the node.
func TestCreateAndDeleteRace(t *testing.T) {
	e := newEnv(t)
	var wg sync.WaitGroup
	for i := range 40 {
		wg.Go(func() {
			acc := e.create()
			<-time.After(time.Duration(i) * time.Millisecond / 2)
			del, err := e.DeleteSandbox(t.Context(), e.admin, acc.Sandbox.ID, nil)
			if err != nil {
				t.Error(err)
				return
			}
			if op, err := e.GetOperation(t.Context(), e.admin, del.Operation.ID, patience); err != nil || op.State != sandbox.OpSucceeded {
				t.Errorf("delete %+v, %v", op, err)
			}
			if op, err := e.GetOperation(t.Context(), e.admin, acc.Operation.ID, patience); err != nil || !op.State.Ended() {
				t.Errorf("create %+v, %v", op, err)
			}
		})
	}
	wg.Wait()
	for _, s := range e.records() {
		if s.State != sandbox.StateDeleted {
			t.Errorf("sandbox %+v", s)
		}
	}
	// A create that the node had begun may come up after the delete: the sweep takes it away.
	e.eventually("node is empty", func() bool {
		e.node.mu.Lock()
		defer e.node.mu.Unlock()
		return len(e.node.sandboxes) == 0
	})
}

func TestDeleteIsRetriedForEver(t *testing.T) {
	for name, test := range map[string]struct {
		err    error
		reason string
	}{
		"unreachable": {connect.NewError(connect.CodeUnavailable, nil), reasonNodeUnreachable},
		"refused":     {connect.NewError(connect.CodeInternal, errors.New("cannot kill it")), reasonDeleteRetry},
	} {
		t.Run(name, func(t *testing.T) {
			e := newEnv(t)
			s := e.running()
			e.hookDelete(func(context.Context, *nodev1.DeleteSandboxRequest) error { return test.err })
			acc := e.delete(s.ID)
			e.eventually("reason and retries", func() bool {
				_, n := e.node.counts()
				return n > 3 && e.record(s.ID).StateReason == test.reason
			})
			if e.record(s.ID).State != sandbox.StateDeleting {
				t.Error("it is not deleting")
			}
			e.hookDelete(nil)
			if op := e.wait(acc.Operation.ID); op.State != sandbox.OpSucceeded {
				t.Errorf("operation %+v", op)
			}
		})
	}
}

func TestDeleteOnANodeThatIsDown(t *testing.T) {
	e := newEnv(t)
	s := e.running()
	e.node.setDown(true)
	acc := e.delete(s.ID)
	e.eventually("reason", func() bool { return e.record(s.ID).StateReason == reasonNodeUnreachable })
	e.restart()
	e.node.setDown(false)
	e.wait(acc.Operation.ID)
}

func TestDeleteOfAFailedSandbox(t *testing.T) {
	e := newEnv(t)
	s := e.running()
	e.node.put(&nodev1.SandboxStatus{SandboxId: string(s.ID), Generation: 1, State: nodev1.SandboxState_SANDBOX_STATE_FAILED, Reason: "vmm_exited"})
	e.waitState(s.ID, sandbox.StateFailed)
	if op := e.wait(e.delete(s.ID).Operation.ID); op.State != sandbox.OpSucceeded {
		t.Errorf("operation %+v", op)
	}
}

func TestMaxLifetime(t *testing.T) {
	e := newEnv(t)
	hour := int64(3600)
	s := e.running(func(r *CreateSandbox) { r.Lifecycle.MaxLifetimeS = &hour })
	other := e.running()
	late := e.running(func(r *CreateSandbox) { r.Lifecycle.MaxLifetimeS = &hour })
	if _, err := e.UpdateSandbox(t.Context(), e.admin, late.ID, UpdateSandbox{Lifecycle: &sandbox.Lifecycle{}}); err != nil {
		t.Fatal(err)
	}
	e.clock.add(59 * time.Minute)
	<-time.After(100 * time.Millisecond)
	if got := e.record(s.ID).State; got != sandbox.StateRunning {
		t.Fatalf("after 59 minutes: %s", got)
	}
	e.restart() // the lifetime does not begin anew
	e.clock.add(2 * time.Minute)
	e.waitState(s.ID, sandbox.StateDeleted)
	for _, id := range []sandbox.ID{other.ID, late.ID} {
		if got := e.record(id).State; got != sandbox.StateRunning {
			t.Errorf("another one is %s", got)
		}
	}
}

// TestTimersDoNotFollowTheWallClock feeds times whose wall clock jumps while the monotonic one stands.
func TestTimersDoNotFollowTheWallClock(t *testing.T) {
	ts := timers{byID: map[sandbox.ID]deadline{}}
	minute, now := int64(60), time.Now()
	s := &sandbox.Sandbox{ID: sandbox.NewID(), CreatedAt: now.Round(0).UTC(), State: sandbox.StateRunning,
		Lifecycle: sandbox.Lifecycle{MaxLifetimeS: &minute}}
	ts.set(s, now)
	s.CreatedAt = s.CreatedAt.Add(-time.Hour) // as if the wall clock had jumped
	ts.set(s, now.Add(time.Second))
	if ids := ts.due(now.Add(59 * time.Second)); len(ids) != 0 {
		t.Error("a jump of the wall clock expired it")
	}
	if ids := ts.due(now.Add(time.Minute)); len(ids) != 1 {
		t.Error("it did not expire")
	}
	huge := int64(1) << 62
	s.Lifecycle.MaxLifetimeS = &huge
	ts.set(s, now)
	if ids := ts.due(now.Add(time.Hour)); len(ids) != 0 {
		t.Error("a huge lifetime overflowed")
	}
	s.State = sandbox.StateDeleting
	ts.set(s, now)
	if len(ts.byID) != 0 {
		t.Error("a deleted one is timed")
	}
}

func TestJanitor(t *testing.T) {
	e := newEnv(t)
	s := e.running()
	acc, err := e.DeleteSandbox(t.Context(), e.admin, s.ID, idem("k", "b"))
	if err != nil {
		t.Fatal(err)
	}
	e.wait(acc.Operation.ID)
	find := func() (rec, key bool) {
		e.tx(func(ctx context.Context, tx store.Tx) error {
			_, err1 := tx.GetSandbox(ctx, s.ID)
			_, err2 := tx.GetIdempotency(ctx, idemScope(e.admin, idem("k", "b")), "k")
			rec, key = err1 == nil, err2 == nil
			return nil
		})
		return rec, key
	}
	if rec, key := find(); !rec || !key {
		t.Fatal("cleaned too early")
	}
	e.clock.add(25 * time.Hour)
	e.eventually("key is gone", func() bool { rec, key := find(); return rec && !key })
	e.clock.add(7 * 24 * time.Hour)
	e.eventually("tombstone is gone", func() bool { rec, _ := find(); return !rec })
	_, err = e.GetOperation(t.Context(), e.admin, acc.Operation.ID, 0)
	e.wantCode(err, sandbox.CodeNotFound)
}

func TestStrayOperationIsEnded(t *testing.T) {
	e := newEnv(t)
	s := e.running()
	op := &sandbox.Operation{ID: sandbox.NewOperationID(), Kind: sandbox.OpCreate, SandboxID: s.ID, ProjectID: auth.DefaultProject,
		Generation: 1, State: sandbox.OpPending, CreatedAt: e.clock.Now().UTC()}
	e.tx(func(ctx context.Context, tx store.Tx) error { return tx.InsertOperation(ctx, op) })
	if got := e.wait(op.ID); got.State != sandbox.OpFailed {
		t.Errorf("operation %+v", got)
	}
	if got := e.record(s.ID).State; got != sandbox.StateRunning {
		t.Errorf("the sandbox is %s", got)
	}
}
