package proc

import (
	"context"
	"errors"
	"syscall"

	"connectrpc.com/connect"
	"github.com/space-sandbox/space/internal/agent/fault"
	agentv1 "github.com/space-sandbox/space/internal/gen/space/agent/v1"
	"golang.org/x/sys/unix"
)

const (
	maxStdin  = 256 << 10
	maxSignal = 64
)

// Service serves a Table as space.agent.v1.ProcessService.
type Service struct{ table *Table }

// NewService returns the service of a table.
func NewService(t *Table) *Service { return &Service{t} }

// Run implements ProcessService.
func (s *Service) Run(ctx context.Context, req *connect.Request[agentv1.RunRequest], out *connect.ServerStream[agentv1.ProcessFrame]) error {
	p, err := s.table.spawn(req.Msg.GetProcessId(), req.Msg.GetSpec())
	if err != nil {
		return err
	}
	return follow(ctx, p, 0, out)
}

// Follow implements ProcessService.
func (s *Service) Follow(ctx context.Context, req *connect.Request[agentv1.FollowRequest], out *connect.ServerStream[agentv1.ProcessFrame]) error {
	p, err := s.table.get(req.Msg.GetProcessId())
	if err != nil {
		return err
	}
	return follow(ctx, p, req.Msg.GetAfterSeq(), out)
}

// follow sends what comes. Frames that are there together go out together.
func follow(ctx context.Context, p *process, seq uint64, out *connect.ServerStream[agentv1.ProcessFrame]) error {
	hold := holder(ctx)
	for {
		frames, end, err := p.ring.after(ctx, seq)
		if err != nil || end {
			return fault.From(err, "")
		}
		for i, f := range frames {
			hold(i < len(frames)-1)
			if err := out.Send(f); err != nil {
				return err
			}
			seq = f.GetSeq()
			if f.GetExited() != nil {
				return nil
			}
		}
	}
}

// Ack implements ProcessService.
func (s *Service) Ack(_ context.Context, req *connect.Request[agentv1.AckRequest]) (*connect.Response[agentv1.AckResponse], error) {
	for _, a := range req.Msg.GetAcks() {
		s.table.ack(a.GetProcessId(), a.GetSeq())
	}
	return connect.NewResponse(&agentv1.AckResponse{}), nil
}

// Check implements ProcessService.
func (s *Service) Check(_ context.Context, req *connect.Request[agentv1.CheckRequest]) (*connect.Response[agentv1.CheckResponse], error) {
	w, err := resolve(s.table.cfg.Users, req.Msg.GetUser(), req.Msg.GetCwd(), nil)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&agentv1.CheckResponse{User: w.user.Name, Uid: w.user.UID, Cwd: []byte(w.cwd)}), nil
}

// Signal implements ProcessService.
func (s *Service) Signal(_ context.Context, req *connect.Request[agentv1.SignalRequest]) (*connect.Response[agentv1.SignalResponse], error) {
	n := req.Msg.GetSignal()
	if n < 1 || n > maxSignal {
		return nil, connect.NewError(connect.CodeInvalidArgument, errors.New("signal is not 1 to 64"))
	}
	p, err := s.table.get(req.Msg.GetProcessId())
	if err != nil {
		return nil, err
	}
	switch req.Msg.GetTarget() {
	case agentv1.SignalTarget_SIGNAL_TARGET_PROCESS:
		err = s.table.reaper.signal(p.pid, syscall.Signal(n), false)
	case agentv1.SignalTarget_SIGNAL_TARGET_GROUP:
		err = s.table.reaper.signal(p.pid, syscall.Signal(n), true)
	case agentv1.SignalTarget_SIGNAL_TARGET_TREE:
		if syscall.Signal(n) != syscall.SIGKILL {
			return nil, connect.NewError(connect.CodeInvalidArgument, errors.New("only SIGKILL goes to a tree"))
		}
		err = s.table.cgroups.kill(p.id)
	default:
		return nil, connect.NewError(connect.CodeInvalidArgument, errors.New("no target"))
	}
	switch {
	case errors.Is(err, unix.ESRCH), errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENODEV):
		return nil, connect.NewError(connect.CodeFailedPrecondition, errors.New("the process has exited"))
	case err != nil:
		return nil, fault.From(err, "signal")
	}
	return connect.NewResponse(&agentv1.SignalResponse{}), nil
}

// WriteStdin implements ProcessService.
func (s *Service) WriteStdin(ctx context.Context, req *connect.Request[agentv1.WriteStdinRequest]) (*connect.Response[agentv1.WriteStdinResponse], error) {
	m := req.Msg
	if len(m.GetData()) > maxStdin {
		return nil, connect.NewError(connect.CodeInvalidArgument, errors.New("data is longer than 256 KiB"))
	}
	p, err := s.table.get(m.GetProcessId())
	if err != nil {
		return nil, err
	}
	if p.stdin == nil {
		return nil, connect.NewError(connect.CodeFailedPrecondition, errors.New("the process has no standard input"))
	}
	offset, closed, err := p.stdin.write(ctx, m.GetOffset(), m.GetData(), m.GetClose())
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&agentv1.WriteStdinResponse{Offset: offset, Closed: closed}), nil
}

// Resize implements ProcessService.
func (s *Service) Resize(_ context.Context, req *connect.Request[agentv1.ResizeRequest]) (*connect.Response[agentv1.ResizeResponse], error) {
	if err := checkSize(req.Msg.GetSize()); err != nil {
		return nil, connect.NewError(connect.CodeInvalidArgument, err)
	}
	p, err := s.table.get(req.Msg.GetProcessId())
	if err != nil {
		return nil, err
	}
	if p.tty == nil {
		return nil, connect.NewError(connect.CodeFailedPrecondition, errors.New("the process has no terminal"))
	}
	if err := setSize(p.tty, req.Msg.GetSize()); err != nil {
		return nil, connect.NewError(connect.CodeFailedPrecondition, errors.New("the terminal is gone"))
	}
	return connect.NewResponse(&agentv1.ResizeResponse{}), nil
}

// List implements ProcessService.
func (s *Service) List(context.Context, *connect.Request[agentv1.ListRequest]) (*connect.Response[agentv1.ListResponse], error) {
	return connect.NewResponse(&agentv1.ListResponse{Processes: s.table.list()}), nil
}
