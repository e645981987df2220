package shim

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"connectrpc.com/connect"
	agentv1 "github.com/space-sandbox/space/internal/gen/space/agent/v1"
	shimv1 "github.com/space-sandbox/space/internal/gen/space/shim/v1"
	"github.com/space-sandbox/space/internal/journal"
	"github.com/space-sandbox/space/internal/sandbox"
	"github.com/space-sandbox/space/internal/vmm"
	"google.golang.org/protobuf/types/known/timestamppb"
)

const (
	restoreTimeout = 30 * time.Second
	armTimeout     = 15 * time.Second // until the restored agent has answered
	resumeTimeout  = 10 * time.Second
	maxClockError  = 500 * time.Millisecond
	entropyBytes   = 128
	// warmUpGeneration is the guest's generation while a template is captured. Guests count from there: generation
	// n of a sandbox is n + warmUpGeneration in its guest, so that the first is newer than the template's, too.
	warmUpGeneration = 1
)

// arm restores the snapshot, lets the agent answer once, and stops the VM again.
func (s *server) arm(ctx context.Context) (*machine, error) {
	m, err := s.restore(ctx)
	if err != nil {
		return nil, err
	}
	if err := s.prove(ctx, m); err != nil {
		return nil, errors.Join(err, m.close())
	}
	return m, nil
}

func (s *server) restore(ctx context.Context) (*machine, error) {
	cfg, err := vmConfig(s.cfg.Dir, s.spec)
	if err != nil {
		return nil, fmt.Errorf("prepare VM: %w", err)
	}
	if cfg.CgroupFD != nil {
		defer cfg.CgroupFD.Close()
	}
	memory, err := s.cfg.OpenMemory()
	if err != nil {
		return nil, err
	}
	defer memory.Close() // the VMM has its own descriptor
	ctx, cancel := context.WithTimeout(ctx, restoreTimeout)
	defer cancel()
	start := time.Now()
	vm, err := s.cfg.Driver.Restore(ctx, cfg, vmm.Snapshot{Memory: memory, State: s.spec.GetDeviceState()})
	if err != nil {
		return nil, fmt.Errorf("restore VM: %w", err)
	}
	for _, t := range vm.Timings() {
		s.status.timingFor(t.Phase, t.Duration)
	}
	s.status.timing("restore", start)
	version, _ := vm.(interface{ Version() string })
	s.status.update(func(st *shimv1.StatusResponse) {
		st.VmmPid = int32(vm.PID())
		if version != nil {
			st.VmmVersion = version.Version()
		}
	})
	return newMachine(vm, s.spec.GetControlToken())
}

// prove continues a restored VM until its agent has answered a no-op with a sound clock.
func (s *server) prove(ctx context.Context, m *machine) error {
	ctx, cancel := m.watchVM(ctx)
	defer cancel()
	ctx, stop := context.WithTimeout(ctx, armTimeout)
	defer stop()
	start := time.Now()
	if err := m.cont(ctx); err != nil {
		return err
	}
	ping, err := m.guest.awaitPing(ctx)
	if err != nil {
		return withCause(ctx, err)
	}
	s.status.timing("first_ping", start)
	if err := checkClock(s.spec.GetAcceleration(), ping.GetClocksource()); err != nil {
		return err
	}
	s.status.update(func(st *shimv1.StatusResponse) { st.Kernel = clean(ping.GetKernel()) })
	if s.spec.GetRehearse() {
		if err := s.rehearse(ctx, m); err != nil {
			return withCause(ctx, fmt.Errorf("rehearsal: %w", err))
		}
	}
	start = time.Now()
	if err := m.stop(ctx); err != nil {
		return err
	}
	s.status.timing("stop", start)
	return nil
}

// rehearsals is how often a bind is rehearsed: code that ran once is translated, but not yet chained.
const rehearsals = 2

// rehearse has the agent do what a bind will ask for. Its entropy is fresh and its identity nobody's.
func (s *server) rehearse(ctx context.Context, m *machine) error {
	start := time.Now()
	for n := range rehearsals {
		if err := s.sendResume(ctx, m, &agentv1.ResumeRequest{
			Generation: warmUpGeneration + 1 + uint64(n), Hostname: "armed", Identity: s.spec.GetShimId(),
			ControlToken: newToken(), Rehearsal: true,
		}); err != nil {
			return err
		}
	}
	s.status.timing("rehearsal", start)
	return nil
}

// withCause adds why ctx ended to an error that came of it.
func withCause(ctx context.Context, err error) error {
	if cause := context.Cause(ctx); cause != nil && !errors.Is(err, cause) {
		return fmt.Errorf("%w (%w)", err, cause)
	}
	return err
}

// checkBind refuses what cannot be meant, before the VM is touched.
func checkBind(req *shimv1.BindRequest) error {
	if _, err := sandbox.ParseID(req.GetSandboxId()); err != nil {
		return err
	}
	if req.GetGeneration() == 0 {
		return errors.New("generation is missing")
	}
	if !filepath.IsAbs(req.GetJournalDir()) {
		return errors.New("journal_dir is not absolute")
	}
	if len(req.GetHostname()) > 63 || len(req.GetEnv()) > sandbox.MaxEnv {
		return errors.New("hostname or env is too large")
	}
	st, err := os.Stat(req.GetJournalDir())
	if err != nil {
		return fmt.Errorf("journal_dir: %w", err)
	}
	if !st.IsDir() {
		return errors.New("journal_dir is not a folder")
	}
	return nil
}

// bind gives m its identity. On error the caller destroys it.
func (s *server) bind(ctx context.Context, m *machine, req *shimv1.BindRequest) (*journal.Journal, error) {
	ctx, cancel := m.watchVM(ctx)
	defer cancel()
	j, err := journal.Open(req.GetJournalDir(), journal.Options{})
	if err != nil {
		return nil, err
	}
	if err := s.resume(ctx, m, req); err != nil {
		return nil, errors.Join(withCause(ctx, err), j.Close())
	}
	return j, nil
}

// resume continues the VM and has its agent acknowledge identity, clock and reseed.
func (s *server) resume(ctx context.Context, m *machine, req *shimv1.BindRequest) error {
	start := time.Now()
	if err := m.cont(ctx); err != nil {
		return err
	}
	s.status.timing("continue", start)
	start = time.Now()
	token := newToken()
	err := s.sendResume(ctx, m, &agentv1.ResumeRequest{
		Generation: req.GetGeneration() + warmUpGeneration, Hostname: cmp.Or(req.GetHostname(), req.GetSandboxId()),
		Env: req.GetEnv(), ControlToken: token, Identity: req.GetSandboxId(),
	})
	if err != nil {
		return fmt.Errorf("resume: %w", err)
	}
	m.guest.setToken(token)
	s.status.timing("resume", start)
	start = time.Now()
	ping, err := m.guest.ping(ctx, callTimeout)
	if err != nil {
		return err
	}
	s.status.timing("ping", start)
	if want := req.GetGeneration() + warmUpGeneration; ping.GetGeneration() != want {
		return fmt.Errorf("the agent is at generation %d, not %d", ping.GetGeneration(), want)
	}
	return checkWallClock(ping.GetWallClock(), start, time.Now())
}

// newToken returns a fresh secret of 256 bits.
func newToken() string {
	var secret [32]byte
	_, _ = rand.Read(secret[:]) // never fails: crypto/rand aborts the program instead
	return hex.EncodeToString(secret[:])
}

// sendResume completes the request by time and entropy, makes the call and checks the clock in the answer.
func (s *server) sendResume(ctx context.Context, m *machine, req *agentv1.ResumeRequest) error {
	req.Entropy = make([]byte, entropyBytes)
	_, _ = rand.Read(req.Entropy) // never fails, as above
	ctx, cancel := context.WithTimeout(ctx, resumeTimeout)
	defer cancel()
	start := time.Now()
	req.WallClock = timestamppb.New(start)
	resp, err := m.guest.agent.Resume(ctx, connect.NewRequest(req))
	if err != nil {
		return err
	}
	if err := checkClock(s.spec.GetAcceleration(), resp.Msg.GetClocksource()); err != nil {
		return err
	}
	return checkWallClock(resp.Msg.GetWallClock(), start, time.Now())
}

// checkWallClock fails when the guest's clock was more than maxClockError off at any time of the call.
func checkWallClock(guest *timestamppb.Timestamp, from, to time.Time) error {
	if err := guest.CheckValid(); err != nil {
		return errors.New("the agent told no time")
	}
	t := guest.AsTime()
	if t.Before(from.Add(-maxClockError)) || t.After(to.Add(maxClockError)) {
		return fmt.Errorf("the guest's clock is off by %v", t.Sub(to).Round(time.Millisecond))
	}
	return nil
}
