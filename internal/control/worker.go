package control

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"time"

	"connectrpc.com/connect"

	nodev1 "github.com/space-sandbox/space/internal/gen/space/node/v1"
	"github.com/space-sandbox/space/internal/sandbox"
	"github.com/space-sandbox/space/internal/store"
)

// Reasons that a sandbox's state_reason can hold, besides those that a node reports.
const (
	reasonHostLost        = "host_lost"
	reasonNodeUnreachable = "node_unreachable"
	reasonCreateFailed    = "create_failed"
	reasonNoCapacity      = "no_capacity"
	reasonMaxLifetime     = "max_lifetime"
	reasonDeleteRetry     = "delete_retrying"
)

// persistEvery bounds how often progress is written.
const persistEvery = time.Second

var errCut = errors.New("the node's stream ended without a status")

// runCreate orders the sandbox at its node and follows it to the end. The order may be repeated at any time.
func (p *Plane) runCreate(ctx context.Context, s *sandbox.Sandbox, op *sandbox.Operation) error {
	begun := p.now()
	if op.StartedAt.IsZero() {
		op.StartedAt = begun
	}
	op.State = sandbox.OpRunning
	node, ok := p.cfg.Nodes[s.Node]
	if !ok {
		return p.failCreate(ctx, op, reasonCreateFailed, sandbox.Errorf(sandbox.CodeInternal, "its node is no longer configured"))
	}
	left := p.cfg.CreateTimeout - begun.Sub(op.CreatedAt)
	if left <= 0 {
		return p.failCreate(ctx, op, reasonNodeUnreachable,
			sandbox.Errorf(sandbox.CodeServiceUnavailable, "the node did not bring up the sandbox within %v", p.cfg.CreateTimeout))
	}
	call, cancel := context.WithTimeout(ctx, left)
	defer cancel()
	status, err := p.orderCreate(call, node, s, op)
	switch {
	case err == nil && status.GetState() == nodev1.SandboxState_SANDBOX_STATE_RUNNING:
		return p.created(ctx, op, status, begun)
	case err == nil:
		e := sandbox.Errorf(sandbox.CodeInternal, "the sandbox failed to start")
		e.Details.Cause = status.GetReason()
		return p.failCreate(ctx, op, orElse(status.GetReason(), reasonCreateFailed), e)
	case !final(err):
		return fmt.Errorf("create on node %s: %w", s.Node, err)
	case connect.CodeOf(err) == connect.CodeResourceExhausted:
		return p.failCreate(ctx, op, reasonNoCapacity, noRoom(err))
	case connect.CodeOf(err) == connect.CodeNotFound:
		return p.failCreate(ctx, op, reasonCreateFailed, sandbox.Errorf(sandbox.CodeFailedPrecondition, "the template's content is no longer on the node").WithCause(err))
	}
	p.log.ErrorContext(ctx, "node refused a create", "sandbox", string(s.ID), "error", err)
	return p.failCreate(ctx, op, reasonCreateFailed, sandbox.Errorf(sandbox.CodeInternal, "the node could not create the sandbox").WithCause(err))
}

// noRoom passes on what the node lacks. Its text is ours: numbers of memory and disk.
func noRoom(err error) *sandbox.Error {
	e := sandbox.Errorf(sandbox.CodeCapacityUnavailable, "no node has room for this sandbox").
		WithRemediation("delete sandboxes, ask for less memory, or give the node more memory or disk")
	var answer *connect.Error
	if errors.As(err, &answer) {
		e.Details.Cause = answer.Message()
	}
	return e
}

// final reports whether err is the node's own last word: neither made up by the client for a broken connection, nor
// one that another try may change.
func final(err error) bool {
	if !connect.IsWireError(err) {
		return false
	}
	switch connect.CodeOf(err) {
	case connect.CodeUnavailable, connect.CodeDeadlineExceeded, connect.CodeCanceled, connect.CodeAborted:
		return false
	}
	return true
}

func orElse(s, def string) string {
	if s == "" {
		return def
	}
	return s
}

// orderCreate sends the order and passes the progress on; it returns the status that ends the stream.
func (p *Plane) orderCreate(ctx context.Context, node Node, s *sandbox.Sandbox, op *sandbox.Operation) (status *nodev1.SandboxStatus, err error) {
	stream, err := node.CreateSandbox(ctx, connect.NewRequest(&nodev1.CreateSandboxRequest{
		SandboxId: string(s.ID), Generation: op.Generation, OperationId: string(op.ID), TemplateDigest: s.Template.Digest,
		Resources: &nodev1.Resources{Vcpu: s.Resources.VCPU, MemoryMib: s.Resources.MemoryMiB, DiskMib: s.Resources.DiskMiB},
		Env:       maps.Clone(s.Env),
	}))
	if err != nil {
		return nil, err
	}
	defer func() { _ = stream.Close() }()
	persisted := p.clock.Now()
	for stream.Receive() {
		switch m := stream.Msg(); {
		case m.GetStatus() != nil:
			status = m.GetStatus()
		case m.GetProgress() != nil:
			g := m.GetProgress()
			op.Progress = sandbox.Progress{Phase: g.GetPhase(), DoneBytes: g.GetDoneBytes(), TotalBytes: g.GetTotalBytes()}
			p.ops.progress(op.ID, op.StartedAt, op.Progress)
			if now := p.clock.Now(); now.Sub(persisted) >= persistEvery {
				persisted = now
				p.persist(ctx, op)
			}
		}
	}
	if err := stream.Err(); err != nil {
		return nil, err
	}
	if status == nil {
		return nil, errCut
	}
	return status, nil
}

// persist writes the progress of an operation. It is for readers in other processes only, so a failure is no more
// than logged.
func (p *Plane) persist(ctx context.Context, op *sandbox.Operation) {
	err := p.st.Update(ctx, func(tx store.Tx) error { return tx.UpdateOperation(ctx, op) })
	if err != nil && !errors.Is(err, store.ErrVersion) && ctx.Err() == nil {
		p.log.WarnContext(ctx, "progress was not written", "operation", string(op.ID), "error", err)
	}
}

func (p *Plane) created(ctx context.Context, op *sandbox.Operation, st *nodev1.SandboxStatus, begun time.Time) error {
	op.Timings = []sandbox.Timing{{Phase: "dispatch", MS: millis(begun.Sub(op.CreatedAt))}}
	for _, t := range st.GetTimings() {
		op.Timings = append(op.Timings, sandbox.Timing{Phase: t.GetPhase(), MS: t.GetMs()})
	}
	op.Timings = append(op.Timings, sandbox.Timing{Phase: "node_call", MS: millis(p.now().Sub(begun))})
	return p.conclude(ctx, op, nil, func(s *sandbox.Sandbox) {
		s.State, s.StateReason, s.LastActive = sandbox.StateRunning, "", p.now()
		env := &s.Environment
		env.ID = orElse(st.GetEnvironment(), env.ID)
		env.VMMVersion = orElse(st.GetVmmVersion(), env.VMMVersion)
		env.Kernel = orElse(st.GetKernel(), env.Kernel)
		env.Acceleration = orElse(st.GetAcceleration(), env.Acceleration)
	})
}

func millis(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

func (p *Plane) failCreate(ctx context.Context, op *sandbox.Operation, reason string, e *sandbox.Error) error {
	return p.conclude(ctx, op, e, func(s *sandbox.Sandbox) {
		s.State, s.StateReason = sandbox.StateFailed, reason
	})
}

// runDelete has the node remove everything. It never gives up: an error is written as the reason and means another
// try.
func (p *Plane) runDelete(ctx context.Context, s *sandbox.Sandbox, op *sandbox.Operation) error {
	if op.StartedAt.IsZero() {
		op.StartedAt = p.now()
	}
	p.ops.progress(op.ID, op.StartedAt, sandbox.Progress{Phase: "node"})
	err := p.orderDelete(ctx, s.Node, s.ID, op.Generation)
	if err != nil {
		p.explain(ctx, s.ID, op.ID, err)
		return err
	}
	op.Progress = sandbox.Progress{}
	op.Timings = []sandbox.Timing{{Phase: "node_call", MS: millis(p.now().Sub(op.StartedAt))}}
	err = p.conclude(ctx, op, nil, func(s *sandbox.Sandbox) { bury(s, p.now()) })
	if err == nil {
		p.timers.drop(s.ID)
		p.activity.drop(s.ID)
	}
	return err
}

func (p *Plane) orderDelete(ctx context.Context, name string, id sandbox.ID, generation uint64) error {
	node, ok := p.cfg.Nodes[name]
	if !ok {
		return fmt.Errorf("node %s is not configured", name)
	}
	ctx, cancel := context.WithTimeout(ctx, deleteCall)
	defer cancel()
	_, err := node.DeleteSandbox(ctx, connect.NewRequest(&nodev1.DeleteSandboxRequest{SandboxId: string(id), Generation: generation}))
	if err != nil {
		return fmt.Errorf("delete on node %s: %w", name, err)
	}
	return nil
}

// explain writes why a delete is not through yet, if that is news.
func (p *Plane) explain(ctx context.Context, id sandbox.ID, op sandbox.OperationID, cause error) {
	if ctx.Err() != nil {
		return
	}
	reason := reasonDeleteRetry
	if !final(cause) {
		reason = reasonNodeUnreachable
	}
	err := p.st.Update(ctx, func(tx store.Tx) error {
		s, err := tx.GetSandbox(ctx, id)
		if err != nil || s.OperationID != op || s.StateReason == reason {
			return err
		}
		s.StateReason, s.UpdatedAt = reason, p.now()
		return tx.UpdateSandbox(ctx, s)
	})
	if err != nil && ctx.Err() == nil {
		p.log.WarnContext(ctx, "reason was not written", "sandbox", string(id), "error", err)
	}
}
