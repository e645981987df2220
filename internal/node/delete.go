package node

import (
	"context"
	"errors"
	"fmt"
	"os"

	"connectrpc.com/connect"

	nodev1 "github.com/space-sandbox/space/internal/gen/space/node/v1"
	"github.com/space-sandbox/space/internal/sandbox"
)

// delete ends a sandbox and waits until nothing is left or ctx ends. generation 0 means whichever there is.
func (n *Node) delete(ctx context.Context, id string, generation uint64) error {
	if _, err := sandbox.ParseID(id); err != nil {
		return connect.NewError(connect.CodeInvalidArgument, err)
	}
	d, err := n.beginDelete(ctx, id, generation)
	if err != nil {
		return err
	}
	if d == nil {
		return n.fence(id, generation)
	}
	select {
	case <-d.done:
		return d.err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// fence keeps an older create that is still on its way from starting after its delete.
func (n *Node) fence(id string, generation uint64) error {
	if generation == 0 {
		return nil
	}
	if err := n.gens.add(id, generation); err != nil {
		return connect.NewError(connect.CodeUnavailable, err)
	}
	return nil
}

// beginDelete joins or starts a deletion; nil if there is no such sandbox.
func (n *Node) beginDelete(ctx context.Context, id string, generation uint64) (*deletion, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.closed || !n.started {
		return nil, errClosed
	}
	e := n.sandboxes[id]
	if e == nil {
		return nil, nil
	}
	if generation != 0 && generation < e.generation {
		return nil, precondition("generation %d is older than %d, which is here", generation, e.generation)
	}
	if e.deletion != nil {
		return e.deletion, nil
	}
	d := &deletion{done: make(chan struct{})}
	e.deletion = d
	n.changeLocked(e, func() { e.state = nodev1.SandboxState_SANDBOX_STATE_DELETING })
	e.cancel()
	n.wg.Go(func() { n.runDelete(ctx, e, d, max(generation, e.generation)) })
	return d, nil
}

func (n *Node) runDelete(ctx context.Context, e *entry, d *deletion, generation uint64) {
	// A delete that has begun is finished, whether the caller leaves or the node closes.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), n.cfg.DeleteTimeout)
	defer cancel()
	err := n.removeSandbox(ctx, e, generation)
	n.mu.Lock()
	defer n.mu.Unlock()
	if err != nil {
		n.log.Error("delete failed", "sandbox", e.id, "error", err)
		d.err = connect.NewError(connect.CodeUnavailable, fmt.Errorf("sandbox is not deleted yet: %w", err))
		n.changeLocked(e, func() { e.deletion, e.reason = nil, reasonNotDeleted })
	} else {
		n.forget(e)
		n.pokeRefill()
	}
	close(d.done)
}

// removeSandbox removes all that a sandbox has. It may be repeated.
func (n *Node) removeSandbox(ctx context.Context, e *entry, generation uint64) error {
	select {
	case <-e.done: // the create was cancelled, and undoes what it did
	case <-ctx.Done():
		return fmt.Errorf("create has not ended: %w", ctx.Err())
	}
	if err := n.gens.add(e.id, generation); err != nil {
		return err
	}
	if e.shim != nil {
		if err := e.shim.Destroy(ctx, "sandbox_deleted"); err != nil {
			return err
		}
	}
	if err := errors.Join(e.archive.close(), os.RemoveAll(n.l.sandbox(e.id))); err != nil {
		return err
	}
	e.memory.release()
	if err := syncPath(n.l.sandboxes()); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}
