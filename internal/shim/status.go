package shim

import (
	"sync"
	"time"

	nodev1 "github.com/space-sandbox/space/internal/gen/space/node/v1"
	shimv1 "github.com/space-sandbox/space/internal/gen/space/shim/v1"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// status is what Status and Watch tell. It is safe for concurrent use and its lock is held for moments only.
type status struct {
	mu       sync.Mutex
	cur      *shimv1.StatusResponse
	active   time.Time
	changed  chan struct{} // closed at a change
	watchers int
	idle     chan struct{} // signalled when the number of watchers changes
}

func newStatus(shimID, accel string) *status {
	return &status{
		cur: &shimv1.StatusResponse{
			ShimId: shimID, State: shimv1.ShimState_SHIM_STATE_STARTING, Acceleration: accel,
		},
		active: time.Now(), changed: make(chan struct{}), idle: make(chan struct{}, 1),
	}
}

// get returns the status and a channel that is closed when it changes. Activity is no change.
func (s *status) get() (*shimv1.StatusResponse, <-chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := proto.CloneOf(s.cur)
	out.LastActiveAt = timestamppb.New(s.active)
	return out, s.changed
}

func (s *status) state() shimv1.ShimState {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.cur.GetState()
}

// update changes the status.
func (s *status) update(f func(*shimv1.StatusResponse)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f(s.cur)
	close(s.changed)
	s.changed = make(chan struct{})
}

// move goes from one state to another, unless the state is a different one by now.
func (s *status) move(from, to shimv1.ShimState) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.cur.GetState() != from {
		return false
	}
	s.cur.State = to
	close(s.changed)
	s.changed = make(chan struct{})
	return true
}

// touch notes activity.
func (s *status) touch() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.active = time.Now()
}

// timing appends the duration of a phase that began at start.
func (s *status) timing(phase string, start time.Time) { s.timingFor(phase, time.Since(start)) }

func (s *status) timingFor(phase string, d time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.cur.Timings = append(s.cur.Timings, &nodev1.Timing{Phase: phase, Ms: float64(d.Microseconds()) / 1000})
}

// watch counts a watcher in or out.
func (s *status) watch(n int) {
	s.mu.Lock()
	s.watchers += n
	s.mu.Unlock()
	select {
	case s.idle <- struct{}{}:
	default:
	}
}

func (s *status) watched() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.watchers > 0
}
