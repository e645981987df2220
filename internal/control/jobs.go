package control

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/space-sandbox/space/internal/sandbox"
	"github.com/space-sandbox/space/internal/store"
)

// Pauses between attempts.
const (
	firstBackoff = 200 * time.Millisecond
	maxBackoff   = 15 * time.Second
)

// jobs are the sandboxes that a worker is busy with: at most one worker each.
type jobs struct {
	mu     sync.Mutex
	closed bool
	byID   map[sandbox.ID]*job
}

type job struct {
	wake chan struct{} // holds one: look again
	mu   sync.Mutex
	stop context.CancelFunc // of the step under way, or nil

	last sandbox.OperationID // what the worker did last; its own
}

func (j *job) setStop(stop context.CancelFunc) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.stop = stop
}

func (j *job) interrupt() {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.stop != nil {
		j.stop()
	}
}

// get returns the job of id with a wake-up in it, and whether it is a new one; nil after close.
func (js *jobs) get(id sandbox.ID) (j *job, fresh bool) {
	js.mu.Lock()
	defer js.mu.Unlock()
	if js.closed {
		return nil, false
	}
	if j = js.byID[id]; j == nil {
		j, fresh = &job{wake: make(chan struct{}, 1)}, true
		js.byID[id] = j
		return j, fresh
	}
	select {
	case j.wake <- struct{}{}:
	default: // it will look again anyway
	}
	return j, fresh
}

// finish removes a job, unless it was woken since it last looked.
func (js *jobs) finish(id sandbox.ID, j *job) bool {
	js.mu.Lock()
	defer js.mu.Unlock()
	select {
	case <-j.wake:
		return false
	default:
		delete(js.byID, id)
		return true
	}
}

func (js *jobs) close() {
	js.mu.Lock()
	defer js.mu.Unlock()
	js.closed = true
}

// poke makes sure that a worker looks at the sandbox now or later. The worker lives as long as the Plane, whoever
// pokes it.
//
//nolint:contextcheck // see above
func (p *Plane) poke(id sandbox.ID) *job {
	j, fresh := p.jobs.get(id)
	if fresh {
		p.wg.Go(func() { p.drive(id, j) })
	}
	return j
}

// supersede pokes the worker and takes it off what it does: the record now says something else.
func (p *Plane) supersede(id sandbox.ID) {
	if j := p.poke(id); j != nil {
		j.interrupt()
	}
}

// drive is the worker of one sandbox: it steps until there is nothing left to do.
func (p *Plane) drive(id sandbox.ID, j *job) {
	backoff := firstBackoff
	for p.ctx.Err() == nil {
		ctx, stop := context.WithCancel(p.ctx)
		j.setStop(stop) // before the record is read: an intent written after that interrupts this step
		err := p.step(ctx, id, j)
		j.setStop(nil)
		interrupted := ctx.Err() != nil
		stop()
		if err == nil {
			p.ops.end(j.last) // for a report that came after another one had ended the operation
			if p.jobs.finish(id, j) {
				return
			}
			continue
		}
		if !interrupted {
			p.log.WarnContext(p.ctx, "operation will be tried again", "sandbox", string(id), "error", err)
		}
		select {
		case <-p.ctx.Done():
		case <-j.wake:
			backoff = firstBackoff
		case <-p.clock.After(backoff):
			backoff = min(2*backoff, maxBackoff)
		}
	}
}

// step does what the record of a sandbox asks for. An error means: try again.
func (p *Plane) step(ctx context.Context, id sandbox.ID, j *job) error {
	var (
		s  *sandbox.Sandbox
		op *sandbox.Operation
	)
	err := p.st.View(ctx, func(tx store.Tx) (err error) {
		if s, err = tx.GetSandbox(ctx, id); err != nil || s.OperationID == "" {
			return err
		}
		op, err = tx.GetOperation(ctx, s.OperationID)
		return err
	})
	switch {
	case errors.Is(err, store.ErrNotFound):
		return nil
	case err != nil:
		return err
	case op == nil || op.State.Ended():
		return nil
	}
	if j.last != op.ID {
		p.ops.end(j.last)
		j.last = op.ID
	}
	switch {
	case op.Kind == sandbox.OpCreate && s.State == sandbox.StateCreating:
		return p.limited(ctx, p.creates, func() error { return p.runCreate(ctx, s, op) })
	case op.Kind == sandbox.OpDelete && s.State == sandbox.StateDeleting:
		return p.limited(ctx, p.deletes, func() error { return p.runDelete(ctx, s, op) })
	}
	p.log.ErrorContext(ctx, "no worker for this operation", "sandbox", string(id), "kind", string(op.Kind), "state", string(s.State))
	return nil
}

func (p *Plane) limited(ctx context.Context, slots chan struct{}, fn func() error) error {
	select {
	case slots <- struct{}{}:
	case <-ctx.Done():
		return ctx.Err()
	}
	defer func() { <-slots }()
	return fn()
}

// conclude writes the end of an operation together with what it made of its sandbox. It does nothing if the sandbox
// has meanwhile got another operation.
func (p *Plane) conclude(ctx context.Context, op *sandbox.Operation, failure *sandbox.Error, change func(*sandbox.Sandbox)) error {
	err := p.st.Update(ctx, func(tx store.Tx) error {
		s, err := tx.GetSandbox(ctx, op.SandboxID)
		if err != nil {
			return err
		}
		if s.OperationID != op.ID {
			return nil
		}
		s.OperationID, s.UpdatedAt = "", p.now()
		change(s)
		if err := tx.UpdateSandbox(ctx, s); err != nil {
			return err
		}
		done := *op
		done.State, done.EndedAt = sandbox.OpSucceeded, p.now()
		if failure != nil {
			done.State, done.Error = sandbox.OpFailed, failure.Record()
		}
		if done.StartedAt.IsZero() {
			done.StartedAt = done.EndedAt
		}
		return tx.UpdateOperation(ctx, &done)
	})
	if err != nil {
		return err
	}
	p.ops.end(op.ID)
	return nil
}
