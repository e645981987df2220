package shim

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"connectrpc.com/connect"
	shimv1 "github.com/space-sandbox/space/internal/gen/space/shim/v1"
	"github.com/space-sandbox/space/internal/gen/space/shim/v1/shimv1connect"
	"github.com/space-sandbox/space/internal/journal"
	"github.com/space-sandbox/space/internal/shim/archive"
)

const (
	orphanAfter  = 30 * time.Second // an armed VM that nobody watches ends after this
	streamsGrace = 500 * time.Millisecond
	reportGrace  = 2 * time.Second // for watchers to hear of a failure
	activityTick = 15 * time.Second
)

// The reasons of `interrupted` that the shim itself gives.
const reasonFailed = "sandbox_failed"

// server is the shim of one sandbox and answers ShimService.
type server struct {
	cfg    Config
	spec   *shimv1.LaunchSpec
	log    *slog.Logger
	status *status

	life   context.Context // ends when the shim is to end; transitions are made under it
	end    context.CancelFunc
	turn   chan struct{} // one slot: who makes a transition
	exit   chan error    // receives why the shim ends; buffered
	tasks  sync.WaitGroup
	orphan time.Duration

	mu       sync.Mutex
	armed    *machine // between arm and bind
	live     *live    // from bind on
	reason   string   // of `interrupted`
	shutdown chan struct{}
	down     error
}

// live is a sandbox from its Bind on. Its parts outlive the VM; only Shutdown closes them.
type live struct {
	m       *machine
	journal *journal.Journal
	reading *archive.Reading
	table   *table
	once    sync.Once // stopping
}

var _ shimv1connect.ShimServiceHandler = (*server)(nil)

func newServer(cfg Config, spec *shimv1.LaunchSpec) *server {
	life, end := context.WithCancel(context.Background())
	return &server{
		cfg: cfg, spec: spec, log: cfg.Log, status: newStatus(spec.GetShimId(), spec.GetAcceleration()),
		life: life, end: end, turn: make(chan struct{}, 1), exit: make(chan error, 1), orphan: orphanAfter,
		reason: reasonFailed,
	}
}

// finish tells Run to return. Only the first reason counts.
func (s *server) finish(err error) {
	select {
	case s.exit <- err:
	default:
	}
}

// take gets the turn to make a transition.
func (s *server) take(ctx context.Context) error {
	select {
	case s.turn <- struct{}{}:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (s *server) give() { <-s.turn }

// prepare brings the shim to ARMED, or ends it.
func (s *server) prepare() {
	if s.take(s.life) != nil {
		return
	}
	defer s.give()
	m, err := s.arm(s.life)
	if err != nil {
		s.fail("restore_failed", err)
		return
	}
	s.mu.Lock()
	s.armed = m
	s.mu.Unlock()
	s.tasks.Go(func() { s.guard(m) })
	if s.status.move(shimv1.ShimState_SHIM_STATE_STARTING, shimv1.ShimState_SHIM_STATE_ARMED) {
		s.tasks.Go(s.awaitOwner)
	}
}

// fail reports an error from before RUNNING and ends the shim once its watchers have heard of it.
func (s *server) fail(reason string, err error) {
	s.log.Error("failed", "reason", reason, "error", err)
	s.status.update(func(st *shimv1.StatusResponse) {
		st.State, st.Reason, st.VmmPid = shimv1.ShimState_SHIM_STATE_FAILED, reason+": "+clean(err.Error()), 0
	})
	s.tasks.Go(func() {
		pause(s.life, reportGrace)
		s.finish(fmt.Errorf("%s: %w", reason, err))
	})
}

// awaitOwner ends an armed shim that nobody watches: its node is gone.
func (s *server) awaitOwner() {
	timer := time.NewTimer(s.orphan)
	defer timer.Stop()
	for s.status.state() == shimv1.ShimState_SHIM_STATE_ARMED {
		_, changed := s.status.get()
		if s.status.watched() {
			timer.Reset(s.orphan)
		}
		select {
		case <-timer.C:
			if !s.status.watched() && s.status.move(shimv1.ShimState_SHIM_STATE_ARMED, shimv1.ShimState_SHIM_STATE_FAILED) {
				s.finish(errors.New("no node has watched this armed VM"))
				return
			}
		case <-s.status.idle:
			timer.Reset(s.orphan)
		case <-changed:
		case <-s.life.Done():
			return
		}
	}
}

// guard waits for the VM's death. Before and during a bind whoever makes the transition sees it too.
func (s *server) guard(m *machine) {
	select {
	case <-m.vm.Done():
	case <-s.life.Done():
		return
	}
	s.mu.Lock()
	l, armed := s.live, s.armed == m
	s.mu.Unlock()
	switch {
	case l != nil:
		s.lose(l, "vmm_exited", m.deathError())
	case armed && s.status.move(shimv1.ShimState_SHIM_STATE_ARMED, shimv1.ShimState_SHIM_STATE_FAILED):
		s.fail("vmm_exited", m.deathError())
	}
}

// lose makes a running sandbox FAILED: its VM has ended, or cannot be served any longer and is ended.
func (s *server) lose(l *live, reason string, err error) {
	if !s.status.move(shimv1.ShimState_SHIM_STATE_RUNNING, shimv1.ShimState_SHIM_STATE_FAILED) {
		return
	}
	s.log.Error("sandbox failed", "reason", reason, "error", err)
	s.status.update(func(st *shimv1.StatusResponse) { st.Reason, st.VmmPid = reason+": "+clean(err.Error()), 0 })
	s.halt(l)
	if err := l.m.close(); err != nil {
		s.log.Error("cannot end the VMM", "error", err)
	}
}

// halt ends the journal of a sandbox: no more events, and open streams come to their end.
func (s *server) halt(l *live) {
	l.once.Do(func() {
		l.table.stop()
		l.journal.Seal()
	})
}

// running returns the sandbox if its guest can be asked.
func (s *server) running() (*live, error) {
	if s.status.state() != shimv1.ShimState_SHIM_STATE_RUNNING {
		return nil, connect.NewError(connect.CodeFailedPrecondition, errNotRunning)
	}
	return s.bound()
}

// bound returns the sandbox if there has been one.
func (s *server) bound() (*live, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.live == nil {
		return nil, connect.NewError(connect.CodeFailedPrecondition, errors.New("this VM has no identity"))
	}
	return s.live, nil
}

func (s *server) interruptReason() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.reason
}

// Status implements ShimService.
func (s *server) Status(context.Context, *connect.Request[shimv1.StatusRequest]) (*connect.Response[shimv1.StatusResponse], error) {
	st, _ := s.status.get()
	return connect.NewResponse(st), nil
}

// Watch implements ShimService. Activity alone is told every few seconds at most.
func (s *server) Watch(ctx context.Context, _ *connect.Request[shimv1.WatchRequest], stream *connect.ServerStream[shimv1.StatusResponse]) error {
	s.status.watch(1)
	defer s.status.watch(-1)
	tick := time.NewTicker(activityTick)
	defer tick.Stop()
	for {
		st, changed := s.status.get()
		if err := stream.Send(st); err != nil {
			return err
		}
		sent := st.GetLastActiveAt().AsTime()
	wait:
		for {
			select {
			case <-changed:
				break wait
			case <-tick.C:
				if now, _ := s.status.get(); now.GetLastActiveAt().AsTime().After(sent) {
					break wait
				}
			case <-ctx.Done():
				return ctx.Err()
			case <-s.life.Done():
				return nil
			}
		}
	}
}

// Bind implements ShimService.
func (s *server) Bind(ctx context.Context, req *connect.Request[shimv1.BindRequest]) (*connect.Response[shimv1.BindResponse], error) {
	if err := checkBind(req.Msg); err != nil {
		return nil, connect.NewError(connect.CodeInvalidArgument, err)
	}
	if err := s.take(ctx); err != nil {
		return nil, err
	}
	defer s.give()
	if !s.status.move(shimv1.ShimState_SHIM_STATE_ARMED, shimv1.ShimState_SHIM_STATE_BINDING) {
		return nil, connectErr(connect.CodeFailedPrecondition, "the shim is %v", s.status.state())
	}
	s.mu.Lock()
	m := s.armed
	s.mu.Unlock()
	// The identity is given or the VM destroyed, whether the caller waits or not.
	j, err := s.bind(s.life, m, req.Msg) //nolint:contextcheck // see above
	if err != nil {
		err = errors.Join(err, m.close())
		s.fail("bind_failed", err)
		return nil, connect.NewError(connect.CodeUnavailable, errors.New("bind failed: "+clean(err.Error())))
	}
	s.serve(m, j, req.Msg) //nolint:contextcheck // the sandbox outlives the call
	st, _ := s.status.get()
	return connect.NewResponse(&shimv1.BindResponse{Status: st}), nil
}

// serve makes a bound VM a running sandbox.
func (s *server) serve(m *machine, j *journal.Journal, req *shimv1.BindRequest) {
	l := &live{m: m, journal: j, reading: archive.NewReading(j, s.interruptReason)}
	l.table = newTable(j, m.guest, s.log, s.status.touch, func(err error) {
		s.tasks.Go(func() { s.lose(l, "agent_lost", err) })
	})
	s.mu.Lock()
	s.armed, s.live = nil, l
	s.mu.Unlock()
	s.status.touch()
	s.status.update(func(st *shimv1.StatusResponse) {
		st.State, st.SandboxId, st.Generation = shimv1.ShimState_SHIM_STATE_RUNNING, req.GetSandboxId(), req.GetGeneration()
	})
	s.tasks.Go(func() { s.keepTime(m) })
	select {
	case <-m.vm.Done(): // died after its last answer: guard may have looked before live was set
		s.tasks.Go(func() { s.lose(l, "vmm_exited", m.deathError()) })
	default:
	}
}

// Shutdown implements ShimService. Repeated calls wait for the first.
func (s *server) Shutdown(ctx context.Context, req *connect.Request[shimv1.ShutdownRequest]) (*connect.Response[shimv1.ShutdownResponse], error) {
	s.mu.Lock()
	done := s.shutdown
	if done == nil {
		done = make(chan struct{})
		s.shutdown = done
		if r := clean(req.Msg.GetReason()); r != "" && s.status.state() != shimv1.ShimState_SHIM_STATE_FAILED {
			s.reason = r
		}
		go s.shutDown(done) //nolint:contextcheck // goes on although the caller leaves
	}
	s.mu.Unlock()
	select {
	case <-done:
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	if s.down != nil {
		return nil, connect.NewError(connect.CodeInternal, s.down)
	}
	return connect.NewResponse(&shimv1.ShutdownResponse{}), nil
}

// shutDown ends everything in order: transitions, journal, streams, VM. done is closed at the end.
func (s *server) shutDown(done chan struct{}) {
	defer close(done)
	s.end()
	s.turn <- struct{}{} // transitions end soon now; the slot is never given back
	s.mu.Lock()
	l, m := s.live, s.armed
	s.mu.Unlock()
	if l != nil {
		m = l.m
		s.halt(l)
		s.drain(l)
	}
	if m != nil {
		s.down = m.close()
	}
	if l != nil {
		if err := l.journal.Close(); err != nil {
			s.log.Error("close journal", "error", err)
		}
	}
	s.finish(s.down)
}

// drain gives open streams a moment to send their last event.
func (s *server) drain(l *live) {
	ctx, cancel := context.WithTimeout(context.Background(), streamsGrace)
	defer cancel()
	for l.reading.Streams() > 0 && pause(ctx, 5*time.Millisecond) {
		continue
	}
}
