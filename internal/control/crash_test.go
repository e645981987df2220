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

// TestCrashes ends the process at every step of a create and lets the next one finish it.
func TestCrashes(t *testing.T) {
	t.Run("before the node was called", func(t *testing.T) {
		e := newEnv(t)
		e.stop() // the intent is written by a process that never gets to act
		now := e.clock.Now().UTC()
		s := &sandbox.Sandbox{ID: sandbox.NewID(), ProjectID: auth.DefaultProject, State: sandbox.StateCreating, Generation: 1,
			Node: "n1", OperationID: sandbox.NewOperationID(), CreatedAt: now}
		op := &sandbox.Operation{ID: s.OperationID, Kind: sandbox.OpCreate, SandboxID: s.ID, ProjectID: s.ProjectID, Generation: 1,
			State: sandbox.OpPending, CreatedAt: now}
		e.tx(func(ctx context.Context, tx store.Tx) error {
			return errors.Join(tx.InsertSandbox(ctx, s), tx.InsertOperation(ctx, op))
		})
		e.start()
		if got := e.wait(op.ID); got.State != sandbox.OpSucceeded {
			t.Errorf("operation %+v", got)
		}
	})
	t.Run("while the node works", func(t *testing.T) {
		e := newEnv(t)
		entered, release, hook := blocked()
		e.hookCreate(func(ctx context.Context, _ *nodev1.CreateSandboxRequest, _ *createStream) error { return hook(ctx) })
		acc := e.create()
		e.await(entered, "node was called")
		e.stop()
		if s := e.record(acc.Sandbox.ID); s.State != sandbox.StateCreating {
			t.Fatalf("sandbox %+v", s)
		}
		release()
		e.start()
		if got := e.wait(acc.Operation.ID); got.State != sandbox.OpSucceeded {
			t.Errorf("operation %+v", got)
		}
	})
	t.Run("before the outcome is written", func(t *testing.T) {
		e := newEnv(t)
		e.hookCreate(func(context.Context, *nodev1.CreateSandboxRequest, *createStream) error {
			e.st.setFail(func() error { return store.ErrUnavailable })
			return nil
		})
		acc := e.create()
		e.eventually("node has it", func() bool { return e.node.has(acc.Sandbox.ID) })
		e.st.setFail(nil)
		e.hookCreate(nil)
		e.restart()
		if got := e.wait(acc.Operation.ID); got.State != sandbox.OpSucceeded {
			t.Errorf("operation %+v", got)
		}
	})
	t.Run("delete, while the node works", func(t *testing.T) {
		e := newEnv(t)
		s := e.running()
		entered, release, hook := blocked()
		e.hookDelete(func(ctx context.Context, _ *nodev1.DeleteSandboxRequest) error { return hook(ctx) })
		acc := e.delete(s.ID)
		e.await(entered, "node was called")
		e.stop()
		release()
		e.start()
		if got := e.wait(acc.Operation.ID); got.State != sandbox.OpSucceeded || e.node.has(s.ID) {
			t.Errorf("operation %+v", got)
		}
		e.waitState(s.ID, sandbox.StateDeleted)
	})
}

func TestStoreDownLeavesNothing(t *testing.T) {
	e := newEnv(t)
	e.st.setFail(func() error { return store.ErrUnavailable })
	_, err := e.CreateSandbox(t.Context(), e.admin, CreateSandbox{Template: "base"}, nil)
	e.wantCode(err, sandbox.CodeServiceUnavailable)
	if n, _ := e.node.counts(); n != 0 || len(e.records()) != 0 {
		t.Errorf("%d creates, %d records", n, len(e.records()))
	}
}

func TestNodeDownRefusesCreates(t *testing.T) {
	e := newEnv(t)
	e.node.setDown(true)
	_, err := e.CreateSandbox(t.Context(), e.admin, CreateSandbox{Template: "base"}, nil)
	e.wantCode(err, sandbox.CodeServiceUnavailable)
	e.wantCode(e.Ready(t.Context()), sandbox.CodeServiceUnavailable)
	e.node.setDown(false)
	e.running()
}

func TestManyAtOnce(t *testing.T) {
	e := newEnv(t, func(c *Config) { c.MaxParallel = 8 })
	var (
		wg      sync.WaitGroup
		mu      sync.Mutex
		now     int
		highest int
	)
	e.hookCreate(func(context.Context, *nodev1.CreateSandboxRequest, *createStream) error {
		mu.Lock()
		now++
		highest = max(highest, now)
		mu.Unlock()
		<-time.After(5 * time.Millisecond) // so that they overlap
		mu.Lock()
		defer mu.Unlock()
		now--
		return nil
	})
	ids := make([]sandbox.ID, 100)
	for i := range ids {
		wg.Go(func() {
			acc, err := e.CreateSandbox(t.Context(), e.admin, CreateSandbox{Template: "base"}, nil)
			if err != nil {
				t.Error(err)
				return
			}
			ids[i] = acc.Sandbox.ID
			if op, err := e.GetOperation(t.Context(), e.admin, acc.Operation.ID, patience); err != nil || op.State != sandbox.OpSucceeded {
				t.Errorf("%+v, %v", op, err)
			}
		})
	}
	wg.Wait()
	if highest > 8 || highest < 2 {
		t.Errorf("%d creates at once", highest)
	}
	for _, id := range ids {
		wg.Go(func() {
			if acc, err := e.DeleteSandbox(t.Context(), e.admin, id, nil); err != nil {
				t.Error(err)
			} else if op, err := e.GetOperation(t.Context(), e.admin, acc.Operation.ID, patience); err != nil || op.State != sandbox.OpSucceeded {
				t.Errorf("%+v, %v", op, err)
			}
		})
	}
	wg.Wait()
	e.node.with(func() {
		if len(e.node.sandboxes) != 0 {
			t.Errorf("%d are left on the node", len(e.node.sandboxes))
		}
		seen := map[string]int{}
		for _, r := range e.node.creates {
			seen[r.SandboxId]++
		}
		if len(seen) != 100 {
			t.Errorf("%d sandboxes were ordered", len(seen))
		}
	})
}

func TestConfig(t *testing.T) {
	e := newEnv(t)
	for name, cfg := range map[string]Config{
		"no store": {Nodes: e.cfg.Nodes, NodeName: "n1"},
		"no node":  {Store: e.st, NodeName: "n1"},
		"wrong":    {Store: e.st, Nodes: e.cfg.Nodes, NodeName: "n2"},
	} {
		if _, err := New(cfg); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
	p, err := New(Config{Store: e.st, Nodes: e.cfg.Nodes, NodeName: "n1"})
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Close(); err != nil {
		t.Error(err)
	}
	if j := p.poke(sandbox.NewID()); j != nil {
		t.Error("a closed plane starts workers")
	}
	if _, ok := <-(System{}).After(0); !ok || (System{}).Now().IsZero() {
		t.Error("the system clock stands")
	}
}
