package shim

import (
	"context"
	"errors"
	"fmt"
	"time"

	"connectrpc.com/connect"
	agentv1 "github.com/space-sandbox/space/internal/gen/space/agent/v1"
	nodev1 "github.com/space-sandbox/space/internal/gen/space/node/v1"
	"github.com/space-sandbox/space/internal/gen/space/node/v1/nodev1connect"
	"github.com/space-sandbox/space/internal/journal"
	"github.com/space-sandbox/space/internal/sandbox"
	"github.com/space-sandbox/space/internal/shim/archive"
)

const (
	killWait      = 5 * time.Second
	stdinChunk    = 256 << 10
	stdinTimeout  = 30 * time.Second
	stdinMargin   = 500 * time.Millisecond // for the agent's answer to arrive before the deadline
	maxOutputCap  = 1 << 30
	maxStringSize = 4096
)

// sandboxService is space.node.v1.SandboxService. Reading works as long as the shim lives, the rest while it is
// RUNNING.
type sandboxService struct{ s *server }

var _ nodev1connect.SandboxServiceHandler = sandboxService{}

func connectErr(code connect.Code, format string, args ...any) error {
	return connect.NewError(code, fmt.Errorf(format, args...))
}

// tableErr turns an error of the process table into a Connect error.
func tableErr(err error) error {
	var ce *connect.Error
	switch {
	case errors.As(err, &ce):
		return ce
	case errors.Is(err, errNotRunning), errors.Is(err, journal.ErrSealed):
		return connect.NewError(connect.CodeFailedPrecondition, errNotRunning)
	case errors.Is(err, errTooMany):
		return connect.NewError(connect.CodeResourceExhausted, err)
	}
	return archive.Error(err)
}

// CreateProcess implements SandboxService.
func (h sandboxService) CreateProcess(ctx context.Context, req *connect.Request[nodev1.CreateProcessRequest]) (*connect.Response[nodev1.CreateProcessResponse], error) {
	live, err := h.s.running()
	if err != nil {
		return nil, err
	}
	msg := req.Msg
	if err := checkCreate(msg); err != nil {
		return nil, connect.NewError(connect.CodeInvalidArgument, err)
	}
	h.s.status.touch()
	if known, err := live.journal.Process(sandbox.ProcessID(msg.GetProcessId())); err == nil {
		return h.created(ctx, live, known, msg.GetStartNow())
	}
	if msg.GetSpec().GetUser() != "" || len(msg.GetSpec().GetCwd()) > 0 {
		cctx, cancel := context.WithTimeout(ctx, callTimeout)
		defer cancel()
		check := &agentv1.CheckRequest{User: msg.GetSpec().GetUser(), Cwd: msg.GetSpec().GetCwd()}
		if _, err := live.m.guest.procs.Check(cctx, connect.NewRequest(check)); err != nil {
			return nil, guestError(err)
		}
	}
	p, fresh, err := live.table.create(&nodev1.Process{
		ProcessId: msg.GetProcessId(), Spec: msg.GetSpec(), OutputCapBytes: msg.GetOutputCapBytes(),
	})
	if errors.Is(err, journal.ErrExists) { // created, started and exited since we looked
		known, err := live.journal.Process(sandbox.ProcessID(msg.GetProcessId()))
		if err != nil {
			return nil, tableErr(err)
		}
		return h.created(ctx, live, known, false)
	}
	if err != nil {
		return nil, tableErr(err)
	}
	resp, err := h.created(ctx, live, p.rec, msg.GetStartNow())
	if err != nil && fresh && p.rec.LastID() == 0 && connect.CodeOf(err) != connect.CodeDeadlineExceeded && connect.CodeOf(err) != connect.CodeCanceled {
		live.table.discard(p) // refused: nothing of it stays
	}
	return resp, err
}

// created answers with a recorded process, started if that is asked for.
func (h sandboxService) created(ctx context.Context, live *live, rec *journal.Process, start bool) (*connect.Response[nodev1.CreateProcessResponse], error) {
	if start {
		if err := h.start(ctx, live, rec); err != nil {
			return nil, err
		}
	}
	return connect.NewResponse(&nodev1.CreateProcessResponse{Process: rec.Record()}), nil
}

// start starts a process unless it has been started.
func (h sandboxService) start(ctx context.Context, live *live, rec *journal.Process) error {
	p := live.table.find(rec.ID())
	if p == nil {
		return nil // it has exited
	}
	if err := live.table.start(ctx, p); err != nil {
		return tableErr(err)
	}
	return nil
}

func checkCreate(req *nodev1.CreateProcessRequest) error {
	if _, err := sandbox.ParseProcessID(req.GetProcessId()); err != nil {
		return err
	}
	spec := req.GetSpec()
	if n := len(spec.GetArgv()); n == 0 || n > sandbox.MaxArgv {
		return fmt.Errorf("argv has %d entries, 1 to %d are possible", n, sandbox.MaxArgv)
	}
	total := 0
	for _, arg := range spec.GetArgv() {
		if len(arg) > sandbox.MaxArg {
			return fmt.Errorf("an argument is longer than %d bytes", sandbox.MaxArg)
		}
		total += len(arg) + 1
	}
	if total > sandbox.MaxArgvBytes {
		return fmt.Errorf("argv has more than %d bytes", sandbox.MaxArgvBytes)
	}
	if len(spec.GetEnv()) > sandbox.MaxEnv {
		return fmt.Errorf("env has more than %d entries", sandbox.MaxEnv)
	}
	if len(spec.GetCwd()) > maxStringSize || len(spec.GetUser()) > 256 {
		return errors.New("cwd or user is too long")
	}
	if req.GetOutputCapBytes() > maxOutputCap {
		return fmt.Errorf("output_cap_bytes is above %d", maxOutputCap)
	}
	return nil
}

// Signal implements SandboxService. Signalling a process that has exited is no error.
func (h sandboxService) Signal(ctx context.Context, req *connect.Request[nodev1.SignalRequest]) (*connect.Response[nodev1.SignalResponse], error) {
	live, rec, err := h.target(req.Msg.GetProcessId())
	if err != nil {
		return nil, err
	}
	tree := req.Msg.GetTarget() == agentv1.SignalTarget_SIGNAL_TARGET_TREE
	answer := func(pending bool) (*connect.Response[nodev1.SignalResponse], error) {
		return connect.NewResponse(&nodev1.SignalResponse{Process: rec.Record(), Pending: pending}), nil
	}
	if rec.Exited() {
		return answer(false)
	}
	if rec.LastID() == 0 {
		return nil, connectErr(connect.CodeFailedPrecondition, "the process has not started")
	}
	cctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	_, err = live.m.guest.procs.Signal(cctx, connect.NewRequest(&agentv1.SignalRequest{
		ProcessId: string(rec.ID()), Signal: req.Msg.GetSignal(), Target: req.Msg.GetTarget(),
	}))
	// An agent that does not know it any more, or finds it dead, has its exit on the way.
	if code := connect.CodeOf(err); err != nil && code != connect.CodeNotFound {
		return nil, guestError(err)
	}
	if !tree {
		return answer(false)
	}
	wctx, stop := context.WithTimeout(ctx, killWait)
	defer stop()
	return answer(!archive.AwaitExit(wctx, rec))
}

// target finds the process that a call into the guest is about, and notes the activity.
func (h sandboxService) target(id string) (*live, *journal.Process, error) {
	live, err := h.s.running()
	if err != nil {
		return nil, nil, err
	}
	rec, err := live.reading.Find(id)
	if err != nil {
		return nil, nil, err
	}
	h.s.status.touch()
	return live, rec, nil
}

// WriteStdin implements SandboxService.
func (h sandboxService) WriteStdin(ctx context.Context, req *connect.Request[nodev1.WriteStdinRequest]) (*connect.Response[nodev1.WriteStdinResponse], error) {
	live, rec, err := h.target(req.Msg.GetProcessId())
	if err != nil {
		return nil, err
	}
	p := live.table.find(rec.ID())
	if p == nil || rec.LastID() == 0 {
		return nil, connectErr(connect.CodeFailedPrecondition, "the process does not run")
	}
	ctx, cancel := context.WithTimeout(ctx, stdinTimeout)
	defer cancel()
	offset := req.Msg.GetOffset()
	if req.Msg.Offset == nil {
		select { // callers without an offset take turns
		case p.stdin <- struct{}{}:
			defer func() { <-p.stdin }()
		case <-ctx.Done():
			return nil, guestError(ctx.Err())
		}
		offset = p.stdinEnd()
	}
	resp, err := writeStdin(ctx, live.m.guest, p, offset, req.Msg)
	if err != nil {
		return nil, guestError(err)
	}
	return connect.NewResponse(resp), nil
}

// writeStdin relays the data in chunks. It stops early, with the offset it came to, when the pipe stays full.
func writeStdin(ctx context.Context, g *guest, p *process, offset uint64, msg *nodev1.WriteStdinRequest) (*nodev1.WriteStdinResponse, error) {
	if deadline, ok := ctx.Deadline(); ok {
		var cancel context.CancelFunc
		ctx, cancel = context.WithDeadline(ctx, deadline.Add(-stdinMargin))
		defer cancel()
	}
	data := msg.GetData()
	for {
		n := min(len(data), stdinChunk)
		last := n == len(data)
		resp, err := g.procs.WriteStdin(ctx, connect.NewRequest(&agentv1.WriteStdinRequest{
			ProcessId: string(p.rec.ID()), Offset: offset, Data: data[:n], Close: last && msg.GetClose(),
		}))
		if err != nil {
			return nil, err
		}
		at := resp.Msg.GetOffset()
		p.stdinAt(at)
		short := at < offset+uint64(n)
		if last || short || resp.Msg.GetClosed() {
			return &nodev1.WriteStdinResponse{Offset: at, Closed: resp.Msg.GetClosed()}, nil
		}
		data, offset = data[n:], offset+uint64(n)
	}
}

func (p *process) stdinEnd() uint64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.written
}

func (p *process) stdinAt(n uint64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.written = max(p.written, n)
}

// Resize implements SandboxService.
func (h sandboxService) Resize(ctx context.Context, req *connect.Request[nodev1.ResizeRequest]) (*connect.Response[nodev1.ResizeResponse], error) {
	live, rec, err := h.target(req.Msg.GetProcessId())
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	_, err = live.m.guest.procs.Resize(ctx, connect.NewRequest(&agentv1.ResizeRequest{ProcessId: string(rec.ID()), Size: req.Msg.GetSize()}))
	if err != nil {
		return nil, guestError(err)
	}
	return connect.NewResponse(&nodev1.ResizeResponse{}), nil
}

// GetProcess implements SandboxService.
func (h sandboxService) GetProcess(ctx context.Context, req *connect.Request[nodev1.GetProcessRequest]) (*connect.Response[nodev1.GetProcessResponse], error) {
	live, err := h.s.bound()
	if err != nil {
		return nil, err
	}
	return live.reading.GetProcess(ctx, req)
}

// ListProcesses implements SandboxService.
func (h sandboxService) ListProcesses(ctx context.Context, req *connect.Request[nodev1.ListProcessesRequest]) (*connect.Response[nodev1.ListProcessesResponse], error) {
	live, err := h.s.bound()
	if err != nil {
		return nil, err
	}
	return live.reading.ListProcesses(ctx, req)
}

// StreamEvents implements SandboxService.
func (h sandboxService) StreamEvents(ctx context.Context, req *connect.Request[nodev1.StreamEventsRequest], stream *connect.ServerStream[nodev1.Event]) error {
	live, err := h.s.bound()
	if err != nil {
		return err
	}
	rec, err := live.reading.Find(req.Msg.GetProcessId())
	if err != nil {
		return err
	}
	if req.Msg.GetStart() && rec.LastID() == 0 && !rec.Sealed() {
		h.s.status.touch()
		if err := h.start(ctx, live, rec); err != nil && !rec.Sealed() {
			return err
		}
	}
	return live.reading.Stream(ctx, rec, req.Msg.AfterId, stream.Send)
}

// ReadOutput implements SandboxService.
func (h sandboxService) ReadOutput(ctx context.Context, req *connect.Request[nodev1.ReadOutputRequest], stream *connect.ServerStream[nodev1.ReadOutputResponse]) error {
	live, err := h.s.bound()
	if err != nil {
		return err
	}
	return live.reading.ReadOutput(ctx, req, stream)
}
