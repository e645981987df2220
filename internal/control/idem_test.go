package control

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/space-sandbox/space/internal/auth"
	nodev1 "github.com/space-sandbox/space/internal/gen/space/node/v1"
	"github.com/space-sandbox/space/internal/sandbox"
	"github.com/space-sandbox/space/internal/store"
)

func (e *env) createIdem(pr *auth.Principal, im *Idem) (Accepted, error) {
	return e.CreateSandbox(e.t.Context(), pr, CreateSandbox{Template: "base"}, im)
}

func TestIdempotentCreate(t *testing.T) {
	e := newEnv(t)
	first, err := e.createIdem(e.admin, idem("k", "body"))
	if err != nil || first.Replayed {
		t.Fatalf("%+v, %v", first, err)
	}
	e.wait(first.Operation.ID)
	same := func(when string) {
		t.Helper()
		again, err := e.createIdem(e.admin, idem("k", "body"))
		if err != nil || !again.Replayed || again.Sandbox.ID != first.Sandbox.ID || again.Operation.ID != first.Operation.ID {
			t.Fatalf("%s: %+v, %v", when, again, err)
		}
		if again.Sandbox.State != e.record(first.Sandbox.ID).State || again.Operation.State != sandbox.OpSucceeded {
			t.Errorf("%s: the answer is not the current state: %+v", when, again.Sandbox)
		}
	}
	same("at once")
	e.restart()
	same("after a restart")
	e.node.setDown(true)
	same("while the node is down")
	e.node.setDown(false)

	_, err = e.createIdem(e.admin, idem("k", "other body"))
	e.wantCode(err, sandbox.CodeIdempotencyConflict)
	_, err = e.DeleteSandbox(t.Context(), e.admin, first.Sandbox.ID, &Idem{Key: "k", Scope: "DELETE /v1/x"})
	if err != nil {
		t.Fatalf("the same key in another scope: %v", err)
	}
	e.waitState(first.Sandbox.ID, sandbox.StateDeleted)
	same("after it was deleted")

	other, err := e.createIdem(e.principal(sandbox.AllScopes()...), idem("k", "body"))
	if err != nil || other.Replayed || other.Sandbox.ID == first.Sandbox.ID {
		t.Errorf("another owner's key: %+v, %v", other, err)
	}
	e.clock.add(24*time.Hour + time.Second)
	later, err := e.createIdem(e.admin, idem("k", "other body"))
	if err != nil || later.Replayed || later.Sandbox.ID == first.Sandbox.ID {
		t.Errorf("after 24 h: %+v, %v", later, err)
	}
}

func TestIdempotentReplayIsAuthorisedAgain(t *testing.T) {
	e := newEnv(t)
	first, err := e.createIdem(e.admin, idem("k", "b"))
	if err != nil {
		t.Fatal(err)
	}
	e.wait(first.Operation.ID)
	weaker := *e.admin
	weaker.Scopes = []string{sandbox.ScopeSandboxesRead}
	_, err = e.createIdem(&weaker, idem("k", "b"))
	e.wantCode(err, sandbox.CodeForbidden)
	blind := *e.admin
	blind.Metadata = map[string]string{"team": "x"}
	_, err = e.createIdem(&blind, idem("k", "b"))
	e.wantCode(err, sandbox.CodeNotFound)
}

func TestRacingCreatesWithOneKeyMakeOne(t *testing.T) {
	e := newEnv(t)
	var (
		wg       sync.WaitGroup
		mu       sync.Mutex
		ids      = map[sandbox.ID]bool{}
		replayed int
	)
	for range 50 {
		wg.Go(func() {
			acc, err := e.createIdem(e.admin, idem("k", "b"))
			if err != nil {
				t.Error(err)
				return
			}
			mu.Lock()
			defer mu.Unlock()
			ids[acc.Sandbox.ID] = true
			if acc.Replayed {
				replayed++
			}
		})
	}
	wg.Wait()
	if len(ids) != 1 || replayed != 49 || len(e.records()) != 1 {
		t.Errorf("%d sandboxes, %d replays, %d records", len(ids), replayed, len(e.records()))
	}
}

func TestReplayWhileCreating(t *testing.T) {
	e := newEnv(t)
	entered, release, hook := blocked()
	defer release()
	e.hookCreate(func(ctx context.Context, _ *nodev1.CreateSandboxRequest, _ *createStream) error { return hook(ctx) })
	first, err := e.createIdem(e.admin, idem("k", "b"))
	if err != nil {
		t.Fatal(err)
	}
	e.await(entered, "node was called")
	again, err := e.createIdem(e.admin, idem("k", "b"))
	if err != nil || !again.Replayed || again.Operation.State.Ended() || again.Sandbox.State != sandbox.StateCreating {
		t.Fatalf("%+v, %v", again, err)
	}
	release()
	if op := e.wait(again.Operation.ID); op.State != sandbox.OpSucceeded || op.ID != first.Operation.ID {
		t.Errorf("operation %+v", op)
	}
}

func TestIdempotentDelete(t *testing.T) {
	e := newEnv(t)
	s := e.running()
	first, err := e.DeleteSandbox(t.Context(), e.admin, s.ID, idem("k", ""))
	if err != nil || first.Replayed {
		t.Fatalf("%+v, %v", first, err)
	}
	e.wait(first.Operation.ID)
	again, err := e.DeleteSandbox(t.Context(), e.admin, s.ID, idem("k", ""))
	if err != nil || !again.Replayed || again.Operation.ID != first.Operation.ID || again.Operation.State != sandbox.OpSucceeded {
		t.Fatalf("%+v, %v", again, err)
	}
	_, err = e.DeleteSandbox(t.Context(), e.admin, s.ID, idem("k2", ""))
	e.wantCode(err, sandbox.CodeNotFound)
	if _, n := e.node.counts(); n != 1 {
		t.Errorf("%d deletes on the node", n)
	}
}

func TestOnce(t *testing.T) {
	e := newEnv(t)
	runs := 0
	run := func(pr *auth.Principal, im *Idem, fail error) (bool, error) {
		return e.Once(t.Context(), pr, im, func(context.Context) error { runs++; return fail })
	}
	want := func(what string, replayed, wantReplayed bool, err error, code sandbox.Code, wantRuns int) {
		t.Helper()
		if replayed != wantReplayed || sandbox.CodeOf(err) != code || runs != wantRuns {
			t.Fatalf("%s: replayed %v, %v, %d runs", what, replayed, err, runs)
		}
	}
	r, err := run(e.admin, nil, nil)
	want("no key", r, false, err, "", 1)
	r, err = run(e.admin, idem("a", "1"), nil)
	want("first", r, false, err, "", 2)
	r, err = run(e.admin, idem("a", "1"), nil)
	want("again", r, true, err, "", 2)
	r, err = run(e.admin, idem("a", "2"), nil)
	want("other body", r, false, err, sandbox.CodeIdempotencyConflict, 2)
	r, err = run(e.principal(sandbox.ScopeFilesRead), idem("a", "2"), nil)
	want("other owner", r, false, err, "", 3)
	r, err = run(e.admin, idem("b", "1"), sandbox.Errorf(sandbox.CodeConflict, "no"))
	want("failing", r, false, err, sandbox.CodeConflict, 4)
	r, err = run(e.admin, idem("b", "1"), nil)
	want("after a failure", r, false, err, "", 5)
	e.restart()
	r, err = run(e.admin, idem("b", "1"), nil)
	want("after a restart", r, true, err, "", 5)
	e.clock.add(25 * time.Hour)
	r, err = run(e.admin, idem("b", "1"), nil)
	want("after 24 h", r, false, err, "", 6)
	e.st.setFail(func() error { return store.ErrUnavailable })
	r, err = run(e.admin, idem("c", "1"), nil)
	want("store down", r, false, err, sandbox.CodeServiceUnavailable, 6)
}

func TestOnceRunsOneOfMany(t *testing.T) {
	e := newEnv(t)
	entered, release, hook := blocked()
	var wg sync.WaitGroup
	wg.Go(func() {
		if replayed, err := e.Once(t.Context(), e.admin, idem("k", "b"), hook); replayed || err != nil {
			t.Errorf("first: %v, %v", replayed, err)
		}
	})
	e.await(entered, "first call runs")
	for range 10 {
		_, err := e.Once(t.Context(), e.admin, idem("k", "b"), hook)
		if got := e.wantCode(err, sandbox.CodeConflict); !got.Retryable {
			t.Error("not retryable")
		}
	}
	release()
	wg.Wait()
	if replayed, err := e.Once(t.Context(), e.admin, idem("k", "b"), hook); !replayed || err != nil {
		t.Errorf("after it: %v, %v", replayed, err)
	}
	if len(entered) != 0 {
		t.Error("it ran twice")
	}
}

// TestOnceAndACrash: an earlier process died during the call.
func TestOnceAndACrash(t *testing.T) {
	e := newEnv(t)
	e.tx(func(ctx context.Context, tx store.Tx) error {
		return e.putClaim(ctx, tx, e.admin, idem("k", "b"), claim{Running: "an earlier process"})
	})
	fn := func(context.Context) error { return nil }
	_, err := e.Once(t.Context(), e.admin, idem("k", "b"), fn)
	if got := e.wantCode(err, sandbox.CodeConflict); got.Retryable || got.Details.Remediation == "" {
		t.Errorf("%+v", got)
	}
	im := idem("k", "b")
	im.Repeatable = true
	if replayed, err := e.Once(t.Context(), e.admin, im, fn); replayed || err != nil {
		t.Errorf("repeatable: %v, %v", replayed, err)
	}
	if replayed, err := e.Once(t.Context(), e.admin, im, fn); !replayed || err != nil {
		t.Errorf("then: %v, %v", replayed, err)
	}
}

func TestOnceFreesTheKeyOfAPanicAndOfACallerThatLeft(t *testing.T) {
	e := newEnv(t)
	func() {
		defer func() {
			if recover() == nil {
				t.Error("the panic was swallowed")
			}
		}()
		_, _ = e.Once(t.Context(), e.admin, idem("k", "b"), func(context.Context) error { panic("boom") })
	}()
	ctx, cancel := context.WithCancel(t.Context())
	_, err := e.Once(ctx, e.admin, idem("k", "b"), func(ctx context.Context) error {
		cancel()
		return ctx.Err()
	})
	if !errors.Is(err, context.Canceled) {
		t.Errorf("error %v", err)
	}
	if replayed, err := e.Once(t.Context(), e.admin, idem("k", "b"), func(context.Context) error { return nil }); replayed || err != nil {
		t.Errorf("the key is taken: %v, %v", replayed, err)
	}
}

func TestDamagedClaimIsAnError(t *testing.T) {
	e := newEnv(t)
	e.tx(func(ctx context.Context, tx store.Tx) error {
		im := idem("k", "b")
		return tx.InsertIdempotency(ctx, &store.Idempotency{Scope: idemScope(e.admin, im), Key: "k", BodyHash: im.BodyHash,
			Resource: "{", CreatedAt: e.clock.Now(), ExpiresAt: e.clock.Now().Add(time.Hour)})
	})
	_, err := e.createIdem(e.admin, idem("k", "b"))
	e.wantCode(err, sandbox.CodeInternal)
}
