package agent

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"strings"
	"time"

	"connectrpc.com/connect"
	"github.com/space-sandbox/space/internal/agent/fault"
	"github.com/space-sandbox/space/internal/agent/proc"
	agentv1 "github.com/space-sandbox/space/internal/gen/space/agent/v1"
	"google.golang.org/protobuf/types/known/timestamppb"
)

const minEntropy = 64

// System is what the agent changes in the guest's kernel and files. Calls may block no longer than the disk does.
type System interface {
	SetClock(t time.Time) error
	// Reseed feeds entropy to the kernel's generator and forces it to be used.
	Reseed(entropy []byte) error
	SetMachineID(id string) error
	SetHostname(name string) error
	// SetCABundle writes the bundle where processes find it.
	SetCABundle(pem []byte) error
	SetGeneration(n uint64) error
	// Sync flushes the writable file system.
	Sync() error
	Kernel() string
	Clocksource() string
	Usage() (Usage, error)
}

// Usage is what the guest and the agent use.
type Usage struct {
	MemoryTotal, MemoryAvailable uint64
	AgentRSS                     uint64
	DiskTotal, DiskFree          uint64
	AgentFDs                     uint32
}

// Resume implements AgentService.
func (s *Server) Resume(ctx context.Context, req *connect.Request[agentv1.ResumeRequest]) (*connect.Response[agentv1.ResumeResponse], error) {
	m := req.Msg
	if err := checkResume(m); err != nil {
		return nil, connect.NewError(connect.CodeInvalidArgument, err)
	}
	s.life.Lock()
	defer s.life.Unlock()
	s.mu.Lock()
	current := s.generation
	s.mu.Unlock()
	if m.GetGeneration() <= current {
		return nil, connect.NewError(connect.CodeFailedPrecondition,
			fmt.Errorf("generation %d is not newer than %d", m.GetGeneration(), current))
	}
	id := machineID(m.GetIdentity(), m.GetGeneration())
	apply := s.apply
	if m.GetRehearsal() {
		apply = s.rehearse
	}
	if err := apply(ctx, m, id); err != nil {
		return nil, fault.From(err, "")
	}
	return connect.NewResponse(&agentv1.ResumeResponse{WallClock: timestamppb.Now(),
		Clocksource: s.sys.Clocksource(), MachineId: id}), nil
}

// apply runs the steps in their order and stops at the first failure. The new token is staged before them and takes
// effect after the last: until then the caller can still ask, with the token it has, what went wrong.
func (s *Server) apply(ctx context.Context, m *agentv1.ResumeRequest, id string) error {
	token := sha256.Sum256([]byte(m.GetControlToken()))
	// A step that fails must find the user processes frozen, also when nobody froze them before.
	if _, err := s.table.Freeze(ctx); err != nil {
		return fmt.Errorf("freeze: %w", err)
	}
	steps := []struct {
		name string
		do   func() error
	}{
		{"clock", func() error { return s.sys.SetClock(m.GetWallClock().AsTime()) }},
		{"reseed", func() error { return s.sys.Reseed(m.GetEntropy()) }},
		{"machine-id", func() error { return s.sys.SetMachineID(id) }},
		{"hostname", func() error { return s.sys.SetHostname(m.GetHostname()) }},
		{"ca bundle", func() error { return s.sys.SetCABundle(m.GetCaBundle()) }},
		{"generation", func() error { return s.sys.SetGeneration(m.GetGeneration()) }},
		{"environment", func() error { s.table.SetEnv(m.GetEnv()); return nil }},
		{"thaw", func() error { return s.table.Thaw(ctx) }},
	}
	for _, step := range steps {
		if err := step.do(); err != nil {
			return fmt.Errorf("%s: %w", step.name, err)
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.token, s.generation, s.machineID = token, m.GetGeneration(), id
	return nil
}

// rehearse takes the steps whose effects the true Resume undoes, and leaves everything frozen.
func (s *Server) rehearse(ctx context.Context, m *agentv1.ResumeRequest, id string) error {
	if _, err := s.table.Freeze(ctx); err != nil {
		return fmt.Errorf("freeze: %w", err)
	}
	if err := errors.Join(s.sys.SetClock(m.GetWallClock().AsTime()), s.sys.Reseed(m.GetEntropy()),
		s.sys.SetMachineID(id), s.sys.SetHostname(m.GetHostname())); err != nil {
		return err
	}
	return s.table.Rehearse(ctx)
}

func checkResume(m *agentv1.ResumeRequest) error {
	switch {
	case m.GetControlToken() == "":
		return errors.New("control_token is empty")
	case !m.GetWallClock().IsValid():
		return errors.New("wall_clock is missing or out of range")
	case len(m.GetEntropy()) < minEntropy:
		return fmt.Errorf("entropy is shorter than %d bytes", minEntropy)
	case m.GetIdentity() == "":
		return errors.New("identity is empty")
	case !validHostname(m.GetHostname()):
		return errors.New("hostname is not a host name")
	}
	return proc.CheckEnv(m.GetEnv())
}

func validHostname(name string) bool {
	if name == "" || len(name) > 63 || strings.Trim(name[:1]+name[len(name)-1:], "-.") != name[:1]+name[len(name)-1:] {
		return false
	}
	for _, c := range []byte(name) {
		if (c < 'a' || c > 'z') && (c < 'A' || c > 'Z') && (c < '0' || c > '9') && c != '-' && c != '.' {
			return false
		}
	}
	return true
}

// machineID is the same for the same sandbox and generation, and tells neither.
func machineID(identity string, generation uint64) string {
	sum := sha256.Sum256(fmt.Appendf(nil, "space machine-id\n%s\n%d\n", identity, generation))
	return hex.EncodeToString(sum[:16])
}
