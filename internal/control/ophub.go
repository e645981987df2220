package control

import (
	"context"
	"sync"
	"time"

	"github.com/space-sandbox/space/internal/auth"
	"github.com/space-sandbox/space/internal/sandbox"
	"github.com/space-sandbox/space/internal/store"
)

// rereadEvery bounds how long a waiter trusts the notice of an end in this process.
const rereadEvery = 2 * time.Second

// opHub tells waiters what the workers of this process do: how far an operation is, and that it has ended. The store
// stays the truth; the hub is faster and finer.
type opHub struct {
	mu   sync.Mutex
	live map[sandbox.OperationID]*liveOp
}

type liveOp struct {
	refs   int
	begun  time.Time // zero: no report yet
	report sandbox.Progress
	first  chan struct{} // closed at the first report, or at the end
	ended  chan struct{}
}

// get is called with the mutex held.
func (h *opHub) get(id sandbox.OperationID) *liveOp {
	l := h.live[id]
	if l == nil {
		l = &liveOp{first: make(chan struct{}), ended: make(chan struct{})}
		h.live[id] = l
	}
	return l
}

// watch returns channels that close at the first report and at the end of an operation; release must be called.
func (h *opHub) watch(id sandbox.OperationID) (first, ended <-chan struct{}, release func()) {
	h.mu.Lock()
	defer h.mu.Unlock()
	l := h.get(id)
	l.refs++
	return l.first, l.ended, func() {
		h.mu.Lock()
		defer h.mu.Unlock()
		l.refs--
		if l.refs == 0 && l.begun.IsZero() && h.live[id] == l {
			delete(h.live, id)
		}
	}
}

func (h *opHub) progress(id sandbox.OperationID, begun time.Time, report sandbox.Progress) {
	h.mu.Lock()
	defer h.mu.Unlock()
	l := h.get(id)
	if l.begun.IsZero() {
		l.begun = begun
		close(l.first)
	}
	l.report = report
}

func (h *opHub) end(id sandbox.OperationID) {
	h.mu.Lock()
	defer h.mu.Unlock()
	l := h.live[id]
	if l == nil {
		return
	}
	delete(h.live, id)
	close(l.ended) // before first: whoever wakes by first must see that it has ended
	if l.begun.IsZero() {
		close(l.first)
	}
}

// overlay adds to an open operation what was not written yet.
func (h *opHub) overlay(op *sandbox.Operation) {
	h.mu.Lock()
	defer h.mu.Unlock()
	l := h.live[op.ID]
	if l == nil || l.begun.IsZero() || op.State.Ended() {
		return
	}
	op.State, op.Progress = sandbox.OpRunning, l.report
	if op.StartedAt.IsZero() {
		op.StartedAt = l.begun
	}
}

// GetOperation implements Service. A key that may change sandboxes may read the operations it starts.
func (p *Plane) GetOperation(ctx context.Context, pr *auth.Principal, id sandbox.OperationID, wait time.Duration) (*sandbox.Operation, error) {
	if err := pr.Require(sandbox.ScopeSandboxesRead); err != nil && pr.Require(sandbox.ScopeSandboxesWrite) != nil {
		return nil, err
	}
	_, ended, release := p.ops.watch(id) // before the first look, so that no end falls between
	defer release()
	until := p.clock.Now().Add(wait)
	for {
		op, err := p.readOperation(ctx, pr, id)
		if err != nil {
			return nil, err
		}
		left := until.Sub(p.clock.Now())
		if op.State.Ended() || left <= 0 {
			return op, nil
		}
		select {
		case <-ended:
			ended = nil // seen; the look that follows finds it, or the next one does
		case <-p.clock.After(min(left, rereadEvery)):
		case <-ctx.Done():
			return nil, edge(ctx.Err())
		}
	}
}

func (p *Plane) readOperation(ctx context.Context, pr *auth.Principal, id sandbox.OperationID) (op *sandbox.Operation, err error) {
	err = p.view(ctx, func(tx store.Tx) (err error) {
		if op, err = tx.GetOperation(ctx, id); err != nil {
			return err
		}
		s, err := tx.GetSandbox(ctx, op.SandboxID)
		if err == nil && !pr.MaySee(s) {
			return store.ErrNotFound
		}
		return err
	})
	if sandbox.CodeOf(err) == sandbox.CodeNotFound {
		return nil, sandbox.Errorf(sandbox.CodeNotFound, "no operation has this ID").WithCause(err)
	}
	if err != nil {
		return nil, err
	}
	p.ops.overlay(op)
	return op, nil
}
