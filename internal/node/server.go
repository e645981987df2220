package node

import (
	"context"
	"errors"
	"net/http"

	"connectrpc.com/connect"

	nodev1 "github.com/space-sandbox/space/internal/gen/space/node/v1"
	"github.com/space-sandbox/space/internal/gen/space/node/v1/nodev1connect"
	"github.com/space-sandbox/space/internal/sandbox"
)

// service answers NodeService. It is a type of its own so that Node's methods are its life, not its protocol.
type service struct{ n *Node }

var _ nodev1connect.NodeServiceHandler = service{}

// Handler answers space.node.v1.NodeService, and passes SandboxService and FileService on. It authenticates nobody:
// whoever reaches it must be trusted, by the socket it is served on.
func (n *Node) Handler() http.Handler {
	mux := http.NewServeMux()
	mux.Handle(nodev1connect.NewNodeServiceHandler(service{n}, connect.WithReadMaxBytes(1<<20)))
	n.route(mux)
	return mux
}

// GetNode implements NodeService.
func (s service) GetNode(context.Context, *connect.Request[nodev1.GetNodeRequest]) (*connect.Response[nodev1.GetNodeResponse], error) {
	n := s.n
	reason := n.notReady()
	n.mu.Lock()
	p, count := n.prep.done, len(n.sandboxes)
	n.mu.Unlock()
	used, limit := n.admission.totals()
	out := &nodev1.GetNodeResponse{
		Name: n.cfg.Name, Environment: "E1", Vmm: n.deps.Machine.Name(),
		MemoryTotalMib: limit, MemoryUsedMib: used,
		Sandboxes: uint32(count), Armed: uint32(n.pool.count()),
		Ready: reason == "", NotReadyReason: reason,
	}
	if p != nil {
		out.Vmm, out.VmmVersion, out.Kernel = p.caps.VMM, p.caps.Version, p.guest.Version
		out.Acceleration, out.AccelerationReason = string(p.caps.Acceleration), p.caps.AccelReason
		out.Isolation, out.IsolationGaps = p.caps.Isolation, p.caps.IsolationGaps
	}
	for _, gap := range []string{n.cgroups.Gap(), n.cgroups.LimitGap()} {
		if gap != "" {
			out.IsolationGaps = append(append([]string(nil), out.IsolationGaps...), gap)
		}
	}
	return connect.NewResponse(out), nil
}

// CreateSandbox implements NodeService.
func (s service) CreateSandbox(ctx context.Context, req *connect.Request[nodev1.CreateSandboxRequest], out *connect.ServerStream[nodev1.CreateSandboxResponse]) error {
	e, err := s.n.begin(req.Msg) //nolint:contextcheck // a create belongs to the node, not to its caller
	if err != nil {
		return err
	}
	var sent *nodev1.Progress
	for {
		s.n.mu.Lock()
		changed, progress, status := e.changed, e.progress, e.status()
		s.n.mu.Unlock()
		if e.ended() {
			if e.createErr != nil {
				return asConnect(e.createErr)
			}
			if status.State == nodev1.SandboxState_SANDBOX_STATE_CREATING {
				// Adopted and not heard of yet, or closed between the two looks: look again.
				s.n.mu.Lock()
				status = e.status()
				s.n.mu.Unlock()
			}
			if status.State != nodev1.SandboxState_SANDBOX_STATE_CREATING {
				return out.Send(&nodev1.CreateSandboxResponse{Kind: &nodev1.CreateSandboxResponse_Status{Status: status}})
			}
		}
		if progress != nil && progress != sent {
			sent = progress
			if err := out.Send(&nodev1.CreateSandboxResponse{Kind: &nodev1.CreateSandboxResponse_Progress{Progress: progress}}); err != nil {
				return err
			}
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return asConnect(ctx.Err()) // the create goes on
		}
	}
}

// DeleteSandbox implements NodeService.
func (s service) DeleteSandbox(ctx context.Context, req *connect.Request[nodev1.DeleteSandboxRequest]) (*connect.Response[nodev1.DeleteSandboxResponse], error) {
	if err := s.n.delete(ctx, req.Msg.SandboxId, req.Msg.Generation); err != nil {
		return nil, asConnect(err)
	}
	return connect.NewResponse(&nodev1.DeleteSandboxResponse{}), nil
}

// ListSandboxes implements NodeService.
func (s service) ListSandboxes(context.Context, *connect.Request[nodev1.ListSandboxesRequest]) (*connect.Response[nodev1.ListSandboxesResponse], error) {
	return connect.NewResponse(&nodev1.ListSandboxesResponse{Sandboxes: s.n.statuses()}), nil
}

// WatchSandboxes implements NodeService.
func (s service) WatchSandboxes(ctx context.Context, _ *connect.Request[nodev1.WatchSandboxesRequest], out *connect.ServerStream[nodev1.WatchSandboxesResponse]) error {
	w, first := s.n.subscribe()
	defer s.n.unsubscribe(w)
	for _, st := range first {
		if err := out.Send(&nodev1.WatchSandboxesResponse{Sandbox: st}); err != nil {
			return err
		}
	}
	if err := out.Send(&nodev1.WatchSandboxesResponse{}); err != nil {
		return err
	}
	for {
		select {
		case <-w.poke:
		case <-ctx.Done():
			return nil
		case <-s.n.ctx.Done():
			return errClosed
		}
		for _, st := range s.n.drain(w) {
			if err := out.Send(&nodev1.WatchSandboxesResponse{Sandbox: st}); err != nil {
				return err
			}
		}
	}
}

// ListTemplates implements NodeService.
func (s service) ListTemplates(context.Context, *connect.Request[nodev1.ListTemplatesRequest]) (*connect.Response[nodev1.ListTemplatesResponse], error) {
	return connect.NewResponse(&nodev1.ListTemplatesResponse{Templates: []*nodev1.Template{s.n.template()}}), nil
}

// asConnect gives an error the code that fits it, if it has none.
func asConnect(err error) error {
	var ce *connect.Error
	switch {
	case errors.As(err, &ce):
		return ce
	case errors.Is(err, context.DeadlineExceeded):
		return connect.NewError(connect.CodeDeadlineExceeded, err)
	case errors.Is(err, context.Canceled):
		return connect.NewError(connect.CodeCanceled, err)
	}
	var se *sandbox.Error
	if errors.As(err, &se) {
		return connect.NewError(codeOf(se.Code), err)
	}
	return connect.NewError(connect.CodeInternal, err)
}

// codeOf returns the protocol's code for one of ours.
func codeOf(c sandbox.Code) connect.Code {
	switch c {
	case sandbox.CodeInvalidRequest:
		return connect.CodeInvalidArgument
	case sandbox.CodeNotFound:
		return connect.CodeNotFound
	case sandbox.CodeFailedPrecondition, sandbox.CodeConflict:
		return connect.CodeFailedPrecondition
	case sandbox.CodeCapacityUnavailable:
		return connect.CodeResourceExhausted
	case sandbox.CodeServiceUnavailable:
		return connect.CodeUnavailable
	}
	return connect.CodeInternal
}
