package control

import (
	"context"
	"errors"
	"fmt"
	"time"

	"connectrpc.com/connect"

	nodev1 "github.com/space-sandbox/space/internal/gen/space/node/v1"
	"github.com/space-sandbox/space/internal/sandbox"
	"github.com/space-sandbox/space/internal/store"
)

// How the watch of a node behaves while the node is away.
const (
	rewatchEvery     = 500 * time.Millisecond
	unreachableAfter = 5 * time.Second
)

// watch follows one node until ctx ends. While it is away for long, its sandboxes say so.
func (p *Plane) watch(ctx context.Context, name string, node Node) {
	seen, marked, heard := p.clock.Now(), false, false
	for ctx.Err() == nil {
		heard = false
		err := p.watchOnce(ctx, name, node, func() {
			heard = true
			if marked {
				marked = !p.mark(ctx, name, reasonNodeUnreachable, "")
			}
		})
		if ctx.Err() != nil {
			return
		}
		if heard {
			seen = p.clock.Now() // it was there until now, however long it had nothing to say
		}
		p.log.WarnContext(ctx, "watch of a node ended", "node", name, "error", err)
		if !marked && p.clock.Now().Sub(seen) >= unreachableAfter {
			marked = p.mark(ctx, name, "", reasonNodeUnreachable)
		}
		select {
		case <-ctx.Done():
		case <-p.clock.After(rewatchEvery):
		}
	}
}

// watchOnce runs one watch; alive is called with every message.
func (p *Plane) watchOnce(ctx context.Context, name string, node Node, alive func()) error {
	// Read before the node is asked: a sandbox that runs by now must be in the node's first full set.
	expected, err := p.runningOn(ctx, name)
	if err != nil {
		return err
	}
	// Ended here, so that a node which accepts the call and then says nothing is not waited for.
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := node.WatchSandboxes(ctx, connect.NewRequest(&nodev1.WatchSandboxesRequest{}))
	if err != nil {
		return err
	}
	defer func() { _ = stream.Close() }()
	for stream.Receive() {
		alive()
		st := stream.Msg().GetSandbox()
		if st == nil {
			if err := p.lose(ctx, expected); err != nil {
				return err
			}
			expected = nil
			continue
		}
		forget(expected, st)
		if err := p.observe(ctx, name, st); err != nil {
			return err
		}
	}
	if err := stream.Err(); err != nil {
		return err
	}
	return errors.New("the node ended the watch")
}

// forget takes a sandbox that its node knows off the list of expected ones; another generation is not the same.
func forget(expected map[sandbox.ID]uint64, st *nodev1.SandboxStatus) {
	id := sandbox.ID(st.GetSandboxId())
	if expected[id] == st.GetGeneration() {
		delete(expected, id)
	}
}

// runningOn returns the sandboxes that run on a node, with their generation.
func (p *Plane) runningOn(ctx context.Context, name string) (map[sandbox.ID]uint64, error) {
	running := map[sandbox.ID]uint64{}
	err := p.st.View(ctx, func(tx store.Tx) error {
		list, err := tx.ListSandboxes(ctx, store.SandboxQuery{Node: name, States: []sandbox.State{sandbox.StateRunning}})
		for _, s := range list {
			running[s.ID] = s.Generation
		}
		return err
	})
	return running, err
}

// lose makes sandboxes that their node does not know failed.
func (p *Plane) lose(ctx context.Context, lost map[sandbox.ID]uint64) error {
	for id, generation := range lost {
		if err := p.fail(ctx, id, generation, reasonHostLost); err != nil {
			return err
		}
	}
	return nil
}

// fail makes a running sandbox failed, if it still is of that generation.
func (p *Plane) fail(ctx context.Context, id sandbox.ID, generation uint64, reason string) error {
	err := p.st.Update(ctx, func(tx store.Tx) error {
		s, err := tx.GetSandbox(ctx, id)
		if err != nil || s.State != sandbox.StateRunning || s.Generation != generation {
			return err
		}
		s.State, s.StateReason, s.UpdatedAt = sandbox.StateFailed, reason, p.now()
		p.log.WarnContext(ctx, "sandbox failed", "sandbox", string(id), "reason", reason)
		return tx.UpdateSandbox(ctx, s)
	})
	if errors.Is(err, store.ErrNotFound) {
		return nil
	}
	return err
}

// observe takes in what a node says about a sandbox. What the store does not know is left to the sweep.
func (p *Plane) observe(ctx context.Context, name string, st *nodev1.SandboxStatus) error {
	id := sandbox.ID(st.GetSandboxId())
	var s *sandbox.Sandbox
	err := p.st.View(ctx, func(tx store.Tx) (err error) {
		s, err = tx.GetSandbox(ctx, id)
		return err
	})
	if errors.Is(err, store.ErrNotFound) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("status of sandbox %s: %w", id, err)
	}
	if s.Node != name || s.Generation != st.GetGeneration() {
		return nil
	}
	if s.State.Transitional() {
		// The worker asks the node itself. It is poked only for news that end its work: one that waits between two
		// attempts must not be hurried by the traces of its last attempt.
		if st.GetState() == nodev1.SandboxState_SANDBOX_STATE_RUNNING && s.State == sandbox.StateCreating ||
			st.GetState() == nodev1.SandboxState_SANDBOX_STATE_GONE && s.State == sandbox.StateDeleting {
			p.poke(id)
		}
		return nil
	}
	switch st.GetState() {
	case nodev1.SandboxState_SANDBOX_STATE_RUNNING:
		if at := st.GetLastActiveAt(); at != nil {
			p.activity.touch(id, at.AsTime(), p.clock.Now())
		}
	case nodev1.SandboxState_SANDBOX_STATE_FAILED:
		return p.fail(ctx, id, s.Generation, orElse(st.GetReason(), reasonHostLost))
	case nodev1.SandboxState_SANDBOX_STATE_GONE, nodev1.SandboxState_SANDBOX_STATE_DELETING:
		return p.fail(ctx, id, s.Generation, reasonHostLost)
	}
	return nil
}

// mark changes the reason of the running sandboxes of a node from one value to another. It reports success.
func (p *Plane) mark(ctx context.Context, name, from, to string) bool {
	err := p.st.Update(ctx, func(tx store.Tx) error {
		list, err := tx.ListSandboxes(ctx, store.SandboxQuery{Node: name, States: []sandbox.State{sandbox.StateRunning}})
		if err != nil {
			return err
		}
		for _, s := range list {
			if s.StateReason != from {
				continue
			}
			s.StateReason, s.UpdatedAt = to, p.now()
			if err := tx.UpdateSandbox(ctx, s); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil && ctx.Err() == nil {
		p.log.WarnContext(ctx, "reason was not written", "node", name, "error", err)
	}
	return err == nil
}
