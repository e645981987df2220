package agent

import (
	"context"
	"errors"
	"runtime"
	"runtime/debug"
	"time"

	"connectrpc.com/connect"
	"github.com/space-sandbox/space/internal/agent/fault"
	agentv1 "github.com/space-sandbox/space/internal/gen/space/agent/v1"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// Ping implements AgentService.
func (s *Server) Ping(context.Context, *connect.Request[agentv1.PingRequest]) (*connect.Response[agentv1.PingResponse], error) {
	s.mu.Lock()
	generation := s.generation
	s.mu.Unlock()
	return connect.NewResponse(&agentv1.PingResponse{AgentVersion: version(), Kernel: s.sys.Kernel(),
		Clocksource: s.sys.Clocksource(), Generation: generation, WallClock: timestamppb.Now()}), nil
}

func version() string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "unknown"
	}
	for _, kv := range info.Settings {
		if kv.Key == "vcs.revision" {
			return kv.Value
		}
	}
	return info.Main.Version
}

// Freeze implements AgentService.
func (s *Server) Freeze(ctx context.Context, _ *connect.Request[agentv1.FreezeRequest]) (*connect.Response[agentv1.FreezeResponse], error) {
	s.life.Lock()
	defer s.life.Unlock()
	n, err := s.table.Freeze(ctx)
	if err != nil {
		return nil, fault.From(err, "")
	}
	if err := s.sys.Sync(); err != nil {
		return nil, fault.From(err, "")
	}
	return connect.NewResponse(&agentv1.FreezeResponse{Processes: uint32(n)}), nil
}

// SetClock implements AgentService.
func (s *Server) SetClock(_ context.Context, req *connect.Request[agentv1.SetClockRequest]) (*connect.Response[agentv1.SetClockResponse], error) {
	if !req.Msg.GetWallClock().IsValid() {
		return nil, connect.NewError(connect.CodeInvalidArgument, errors.New("wall_clock is missing or out of range"))
	}
	want := req.Msg.GetWallClock().AsTime()
	step := want.Sub(time.Now().Round(0))
	if err := s.sys.SetClock(want); err != nil {
		return nil, fault.From(err, "")
	}
	return connect.NewResponse(&agentv1.SetClockResponse{SteppedMs: step.Milliseconds()}), nil
}

// Stats implements AgentService.
func (s *Server) Stats(context.Context, *connect.Request[agentv1.StatsRequest]) (*connect.Response[agentv1.StatsResponse], error) {
	u, err := s.sys.Usage()
	if err != nil {
		return nil, fault.From(err, "")
	}
	return connect.NewResponse(&agentv1.StatsResponse{
		MemoryTotalBytes: u.MemoryTotal, MemoryAvailableBytes: u.MemoryAvailable, AgentRssBytes: u.AgentRSS,
		DiskTotalBytes: u.DiskTotal, DiskFreeBytes: u.DiskFree, AgentFds: u.AgentFDs,
		Processes: uint32(s.table.Running()), AgentGoroutines: uint32(runtime.NumGoroutine()),
	}), nil
}
