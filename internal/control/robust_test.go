package control

import (
	"context"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"connectrpc.com/connect"

	nodev1 "github.com/space-sandbox/space/internal/gen/space/node/v1"
	"github.com/space-sandbox/space/internal/sandbox"
	"github.com/space-sandbox/space/internal/store"
)

// deafNode answers everything but never says a word on its watch.
type deafNode struct{ Node }

func (d deafNode) WatchSandboxes(ctx context.Context, _ *connect.Request[nodev1.WatchSandboxesRequest]) (*connect.ServerStreamForClient[nodev1.WatchSandboxesResponse], error) {
	<-ctx.Done()
	return nil, ctx.Err()
}

// TestSweepNeedsNoWatch: a watch that hangs hides nothing.
func TestSweepNeedsNoWatch(t *testing.T) {
	e := newEnv(t, func(c *Config) { c.Nodes = map[string]Node{"n1": deafNode{c.Nodes["n1"]}} })
	lost, failed := e.running(), e.running()
	e.node.put(status(lost.ID, nodev1.SandboxState_SANDBOX_STATE_GONE))
	st := status(failed.ID, nodev1.SandboxState_SANDBOX_STATE_FAILED)
	st.Reason = "vmm_exited"
	e.node.put(st)
	if got := e.waitState(lost.ID, sandbox.StateFailed); got.StateReason != reasonHostLost {
		t.Errorf("sandbox %+v", got)
	}
	if got := e.waitState(failed.ID, sandbox.StateFailed); got.StateReason != "vmm_exited" {
		t.Errorf("sandbox %+v", got)
	}
}

// TestDeletesDoNotWaitForCreates: creates that hang take every slot of their own kind and no other.
func TestDeletesDoNotWaitForCreates(t *testing.T) {
	e := newEnv(t, func(c *Config) { c.MaxParallel = 1 })
	idle := e.running()
	entered, release, hook := blocked()
	defer release()
	e.hookCreate(func(ctx context.Context, _ *nodev1.CreateSandboxRequest, _ *createStream) error { return hook(ctx) })
	hanging := e.create()
	e.await(entered, "node was called")
	queued := e.create()
	for _, id := range []sandbox.ID{idle.ID, queued.Sandbox.ID, hanging.Sandbox.ID} {
		if op := e.wait(e.delete(id).Operation.ID); op.State != sandbox.OpSucceeded {
			t.Errorf("operation %+v", op)
		}
	}
	for _, id := range []sandbox.OperationID{hanging.Operation.ID, queued.Operation.ID} {
		if op := e.wait(id); op.State != sandbox.OpFailed {
			t.Errorf("create %+v", op)
		}
	}
}

// TestOneCallPerSandboxAtATime lets many intents race and has the node look for overlaps.
func TestOneCallPerSandboxAtATime(t *testing.T) {
	e := newEnv(t)
	var (
		mu   sync.Mutex
		busy = map[string]int{}
		bad  bool
	)
	enter := func(ctx context.Context, id string) error {
		mu.Lock()
		busy[id]++
		bad = bad || busy[id] > 1
		mu.Unlock()
		defer func() {
			mu.Lock()
			defer mu.Unlock()
			busy[id]--
		}()
		select {
		case <-time.After(3 * time.Millisecond):
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	e.hookCreate(func(ctx context.Context, r *nodev1.CreateSandboxRequest, _ *createStream) error {
		return enter(ctx, r.SandboxId)
	})
	var wg sync.WaitGroup
	for range 10 {
		acc := e.create()
		for range 5 {
			wg.Go(func() { e.poke(acc.Sandbox.ID) })
		}
		e.wait(acc.Operation.ID)
		e.hookDelete(func(ctx context.Context, r *nodev1.DeleteSandboxRequest) error { return enter(ctx, r.SandboxId) })
		del := e.delete(acc.Sandbox.ID)
		for range 5 {
			wg.Go(func() { e.poke(acc.Sandbox.ID) })
		}
		e.wait(del.Operation.ID)
	}
	wg.Wait()
	mu.Lock()
	defer mu.Unlock()
	if bad {
		t.Error("two calls for one sandbox were under way at once")
	}
	e.eventually("no worker stays", func() bool {
		e.jobs.mu.Lock()
		defer e.jobs.mu.Unlock()
		return len(e.jobs.byID) == 0
	})
}

// TestNodeThatIsNotConfigured: its sandboxes can neither be used nor be forgotten.
func TestNodeThatIsNotConfigured(t *testing.T) {
	e := newEnv(t)
	s := e.running()
	e.tx(func(ctx context.Context, tx store.Tx) error {
		got, err := tx.GetSandbox(ctx, s.ID)
		if err != nil {
			return err
		}
		got.Node = "n2"
		return tx.UpdateSandbox(ctx, got)
	})
	_, err := e.Guest(t.Context(), e.admin, s.ID, sandbox.ScopeFilesRead, GuestUse{})
	e.wantCode(err, sandbox.CodeServiceUnavailable)
	e.delete(s.ID)
	e.eventually("reason", func() bool { return e.record(s.ID).StateReason == reasonNodeUnreachable })
	if got := e.record(s.ID).State; got != sandbox.StateDeleting {
		t.Errorf("it is %s", got)
	}
	e.tx(func(ctx context.Context, tx store.Tx) error {
		got, err := tx.GetSandbox(ctx, s.ID)
		if err != nil {
			return err
		}
		got.Node = "n1"
		return tx.UpdateSandbox(ctx, got)
	})
	e.waitState(s.ID, sandbox.StateDeleted)
}

func TestCreateOnANodeThatIsNotConfigured(t *testing.T) {
	e := newEnv(t)
	entered, release, hook := blocked()
	defer release()
	e.hookCreate(func(ctx context.Context, _ *nodev1.CreateSandboxRequest, _ *createStream) error { return hook(ctx) })
	acc := e.create()
	e.await(entered, "node was called")
	e.stop()
	e.tx(func(ctx context.Context, tx store.Tx) error {
		got, err := tx.GetSandbox(ctx, acc.Sandbox.ID)
		if err != nil {
			return err
		}
		got.Node = "n2"
		return tx.UpdateSandbox(ctx, got)
	})
	e.start()
	if op := e.wait(acc.Operation.ID); op.State != sandbox.OpFailed || op.Error == nil {
		t.Errorf("operation %+v", op)
	}
}

// TestProgressIsWritten for readers in other processes, but not with every message.
func TestProgressIsWritten(t *testing.T) {
	e := newEnv(t)
	entered, release, hook := blocked()
	defer release()
	var writes atomic.Int32
	e.hookCreate(func(ctx context.Context, _ *nodev1.CreateSandboxRequest, out *createStream) error {
		e.st.setFail(func() error { writes.Add(1); return nil })
		for i := range uint64(200) {
			if i == 199 {
				e.clock.add(2 * time.Second)
			}
			if err := out.Send(&nodev1.CreateSandboxResponse{Kind: &nodev1.CreateSandboxResponse_Progress{
				Progress: &nodev1.Progress{Phase: "copy", DoneBytes: i, TotalBytes: 199}}}); err != nil {
				return err
			}
		}
		return hook(ctx)
	})
	acc := e.create()
	e.await(entered, "node has sent everything")
	stored := func() (op *sandbox.Operation) {
		e.tx(func(ctx context.Context, tx store.Tx) (err error) {
			op, err = tx.GetOperation(ctx, acc.Operation.ID)
			return err
		})
		return op
	}
	e.eventually("it is written", func() bool { op := stored(); return op.State == sandbox.OpRunning && op.Progress.Phase == "copy" })
	release()
	e.wait(acc.Operation.ID)
	e.stop()
	if n := writes.Load(); n > 50 {
		t.Errorf("%d writes for 200 messages", n)
	}
}

func TestReplayOfAFailedCreate(t *testing.T) {
	e := newEnv(t)
	e.hookCreate(func(context.Context, *nodev1.CreateSandboxRequest, *createStream) error {
		return connect.NewError(connect.CodeInternal, nil)
	})
	first, err := e.createIdem(e.admin, idem("k", "b"))
	if err != nil {
		t.Fatal(err)
	}
	e.wait(first.Operation.ID)
	again, err := e.createIdem(e.admin, idem("k", "b"))
	if err != nil || !again.Replayed || again.Operation.State != sandbox.OpFailed || again.Sandbox.State != sandbox.StateFailed {
		t.Errorf("%+v, %v", again, err)
	}
	if n, _ := e.node.counts(); n != 1 {
		t.Errorf("the node was asked %d times", n)
	}
}

// brokenStore cannot even be read.
type brokenStore struct{ store.Store }

func (brokenStore) View(context.Context, func(store.Tx) error) error   { return store.ErrUnavailable }
func (brokenStore) Update(context.Context, func(store.Tx) error) error { return store.ErrUnavailable }

// TestStoreDown: every call says so, in the one way that clients can handle.
func TestStoreDown(t *testing.T) {
	e := newEnv(t)
	id, cfg := sandbox.NewID(), e.cfg
	cfg.Store = brokenStore{e.st}
	p, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = p.Close() }()
	ctx := t.Context()
	for name, call := range map[string]func() error{
		"create": func() error {
			_, err := p.CreateSandbox(ctx, e.admin, CreateSandbox{Template: "base"}, nil)
			return err
		},
		"get":    func() error { _, err := p.GetSandbox(ctx, e.admin, id); return err },
		"list":   func() error { _, err := p.ListSandboxes(ctx, e.admin, ListSandboxes{}); return err },
		"update": func() error { _, err := p.UpdateSandbox(ctx, e.admin, id, UpdateSandbox{}); return err },
		"delete": func() error { _, err := p.DeleteSandbox(ctx, e.admin, id, nil); return err },
		"operation": func() error {
			_, err := p.GetOperation(ctx, e.admin, sandbox.NewOperationID(), time.Second)
			return err
		},
		"command":      func() error { _, err := p.CreateCommand(ctx, e.admin, id, CreateCommand{}, nil); return err },
		"session":      func() error { _, err := p.CreateSession(ctx, e.admin, id, sandbox.NewProcessID(), nil); return err },
		"guest":        func() error { _, err := p.Guest(ctx, e.admin, id, sandbox.ScopeFilesRead, GuestUse{}); return err },
		"sessionGuest": func() error { _, err := p.SessionGuest(ctx, &sandbox.Session{}, GuestUse{}); return err },
		"auth": func() error {
			_, err := p.Authenticate(ctx, "e2b_0000000000000000000000000000000000000000")
			return err
		},
		"authSession": func() error { _, err := p.AuthenticateSession(ctx, sandbox.NewSessionID(), "x"); return err },
		"createKey": func() error {
			_, err := p.CreateKey(ctx, e.admin, CreateKey{Scopes: sandbox.AllScopes()}, nil)
			return err
		},
		"listKeys":  func() error { _, err := p.ListKeys(ctx, e.admin, "", 0); return err },
		"revokeKey": func() error { _, err := p.RevokeKey(ctx, e.admin, sandbox.NewKeyID()); return err },
		"once": func() error {
			_, err := p.Once(ctx, e.admin, idem("k", "b"), func(context.Context) error { t.Error("it ran"); return nil })
			return err
		},
		"ready": func() error { return p.Ready(ctx) },
	} {
		t.Run(name, func(t *testing.T) {
			if got := (&env{t: t}).wantCode(call(), sandbox.CodeServiceUnavailable); !got.Retryable {
				t.Error("not retryable")
			}
		})
	}
	for name, loop := range map[string]func(context.Context) error{
		"reconcile": p.reconcile, "timers": p.loadTimers, "clean": p.clean,
		"sweep": func(ctx context.Context) error { return p.sweep(ctx, "n1", cfg.Nodes["n1"]) },
		"watch": func(ctx context.Context) error { return p.watchOnce(ctx, "n1", cfg.Nodes["n1"], func() {}) },
	} {
		if loop(ctx) == nil {
			t.Errorf("%s hides it", name)
		}
	}
}

// TestCloseEndsRun although the context of Run lives on.
func TestCloseEndsRun(t *testing.T) {
	e := newEnv(t)
	p, err := New(e.cfg)
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		p.Run(t.Context())
	}()
	if err := p.Close(); err != nil {
		t.Error(err)
	}
	e.await(done, "Run ends")
}
