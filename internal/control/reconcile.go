package control

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"connectrpc.com/connect"

	nodev1 "github.com/space-sandbox/space/internal/gen/space/node/v1"
	"github.com/space-sandbox/space/internal/sandbox"
	"github.com/space-sandbox/space/internal/store"
)

// reconcile is one round of the backstop: whatever should be under way and is not, is started again. It asks no node,
// so that none can hold it up; each node has a sweep of its own.
func (p *Plane) reconcile(ctx context.Context) error {
	return errors.Join(p.resume(ctx), p.loadTimers(ctx))
}

// resume pokes the worker of every open operation, and ends those that are no longer their sandbox's own.
func (p *Plane) resume(ctx context.Context) error {
	var ops []*sandbox.Operation
	stray := map[sandbox.OperationID]bool{}
	err := p.st.View(ctx, func(tx store.Tx) (err error) {
		if ops, err = tx.OpenOperations(ctx); err != nil {
			return err
		}
		for _, op := range ops {
			s, err := tx.GetSandbox(ctx, op.SandboxID)
			if err != nil {
				return err
			}
			stray[op.ID] = s.OperationID != op.ID
		}
		return nil
	})
	if err != nil {
		return err
	}
	for _, op := range ops {
		if !stray[op.ID] {
			p.poke(op.SandboxID)
			continue
		}
		op.State, op.EndedAt = sandbox.OpFailed, p.now()
		op.Error = sandbox.Errorf(sandbox.CodeConflict, "another operation took its place").Record()
		err := p.st.Update(ctx, func(tx store.Tx) error { return tx.UpdateOperation(ctx, op) })
		if err != nil && !errors.Is(err, store.ErrVersion) {
			return err
		}
		p.ops.end(op.ID)
	}
	return nil
}

// orphanGuard holds, per node, why its unknown sandboxes are left alone.
type orphanGuard struct {
	mu      sync.Mutex
	reasons map[string]string
}

func (g *orphanGuard) set(node, reason string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	delete(g.reasons, node)
	if reason != "" {
		g.reasons[node] = reason
	}
}

func (g *orphanGuard) any() string {
	g.mu.Lock()
	defer g.mu.Unlock()
	for node, reason := range g.reasons {
		return fmt.Sprintf("node %s: %s", node, reason)
	}
	return ""
}

// doomed is a sandbox that a node has and should not have.
type doomed struct {
	id         sandbox.ID
	generation uint64
}

// sweep compares what a node has with what it should have.
func (p *Plane) sweep(ctx context.Context, name string, node Node) error {
	expected, err := p.runningOn(ctx, name) // before the node is asked, as in watchOnce
	if err != nil {
		return err
	}
	call, cancel := context.WithTimeout(ctx, sweepNode)
	defer cancel()
	res, err := node.ListSandboxes(call, connect.NewRequest(&nodev1.ListSandboxesRequest{}))
	if err != nil {
		return err
	}
	listed := res.Msg.GetSandboxes()
	for _, st := range listed {
		forget(expected, st)
		if err := p.observe(ctx, name, st); err != nil {
			return err
		}
	}
	if err := p.lose(ctx, expected); err != nil {
		return err
	}
	unknown, remains, err := p.classify(ctx, name, listed)
	if err != nil {
		return err
	}
	if n := len(unknown); n > max(3, len(listed)/5) {
		p.guard.set(name, fmt.Sprintf("%d of its %d sandboxes are not in the database, so none of them is deleted: is this an old backup or the wrong database?", n, len(listed)))
	} else {
		p.guard.set(name, "")
		remains = append(remains, unknown...)
	}
	for _, d := range remains {
		p.log.WarnContext(ctx, "deleting what a node should not have", "node", name, "sandbox", string(d.id))
		if err := p.orderDelete(ctx, name, d.id, d.generation); err != nil {
			return err
		}
	}
	return nil
}

// classify finds what a node should not have: sandboxes that the store has never seen, and remains of those that
// ended. The record is written before its node hears of it, so a missing record is not one that is yet to come.
func (p *Plane) classify(ctx context.Context, name string, listed []*nodev1.SandboxStatus) (unknown, remains []doomed, err error) {
	err = p.st.View(ctx, func(tx store.Tx) error {
		unknown, remains = nil, nil
		for _, st := range listed {
			d := doomed{id: sandbox.ID(st.GetSandboxId()), generation: st.GetGeneration()}
			s, err := tx.GetSandbox(ctx, d.id)
			switch {
			case errors.Is(err, store.ErrNotFound):
				unknown = append(unknown, d)
			case err != nil:
				return err
			case s.State == sandbox.StateDeleted, s.Node != name, s.State == sandbox.StateFailed && occupies(st):
				remains = append(remains, d)
			}
		}
		return nil
	})
	return unknown, remains, err
}

// occupies reports whether a VM may be alive. A sandbox that failed here may still have come up there, after the
// create was given up; it is never served again, so it must not hold memory.
func occupies(st *nodev1.SandboxStatus) bool {
	return st.GetState() == nodev1.SandboxState_SANDBOX_STATE_RUNNING || st.GetState() == nodev1.SandboxState_SANDBOX_STATE_CREATING
}

// timers are the lifetimes of sandboxes, measured from an anchor on this process's monotonic clock.
type timers struct {
	mu   sync.Mutex
	byID map[sandbox.ID]deadline
}

type deadline struct {
	anchor   time.Time // when the sandbox was created, on the monotonic clock
	lifetime time.Duration
}

// set takes over the lifetime of s. The wall clock is asked only the first time.
func (t *timers) set(s *sandbox.Sandbox, now time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if s.Lifecycle.MaxLifetimeS == nil || s.State == sandbox.StateDeleting || s.State == sandbox.StateDeleted {
		delete(t.byID, s.ID)
		return
	}
	d, ok := t.byID[s.ID]
	if !ok {
		d.anchor = now.Add(-now.Round(0).Sub(s.CreatedAt))
	}
	d.lifetime = time.Duration(min(*s.Lifecycle.MaxLifetimeS, int64(1<<62)/int64(time.Second))) * time.Second
	t.byID[s.ID] = d
}

func (t *timers) drop(id sandbox.ID) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.byID, id)
}

func (t *timers) due(now time.Time) []sandbox.ID {
	t.mu.Lock()
	defer t.mu.Unlock()
	var ids []sandbox.ID
	for id, d := range t.byID {
		if now.Sub(d.anchor) >= d.lifetime {
			ids = append(ids, id)
		}
	}
	return ids
}

func (p *Plane) loadTimers(ctx context.Context) error {
	var list []*sandbox.Sandbox
	err := p.st.View(ctx, func(tx store.Tx) (err error) {
		list, err = tx.ListSandboxes(ctx, store.SandboxQuery{})
		return err
	})
	now := p.clock.Now()
	for _, s := range list {
		p.timers.set(s, now)
	}
	return err
}

// expire deletes the sandboxes whose lifetime is over.
func (p *Plane) expire(ctx context.Context) error {
	for _, id := range p.timers.due(p.clock.Now()) {
		var (
			acc   Accepted
			ended sandbox.OperationID
		)
		err := p.st.Update(ctx, func(tx store.Tx) error {
			acc = Accepted{}
			s, err := tx.GetSandbox(ctx, id)
			if errors.Is(err, store.ErrNotFound) {
				return nil
			}
			if err != nil || s.State == sandbox.StateDeleted || s.Lifecycle.MaxLifetimeS == nil {
				return err
			}
			acc, ended, err = p.intendDelete(ctx, tx, s, reasonMaxLifetime)
			return err
		})
		if err != nil {
			return err
		}
		p.timers.drop(id)
		if acc.Sandbox != nil {
			p.log.InfoContext(ctx, "lifetime is over", "sandbox", string(id))
			p.deleting(acc, ended)
		}
	}
	return nil
}
