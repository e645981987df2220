package node

import (
	"context"
	"slices"
	"time"

	"google.golang.org/protobuf/proto"

	nodev1 "github.com/space-sandbox/space/internal/gen/space/node/v1"
	shimv1 "github.com/space-sandbox/space/internal/gen/space/shim/v1"
	"github.com/space-sandbox/space/internal/node/shims"
)

// Bounds of the pause before a watch of a living shim is renewed.
const (
	rewatchMin = 50 * time.Millisecond
	rewatchMax = 2 * time.Second
)

// follow watches a shim until its VM is gone and returns its last status, with the state FAILED. It returns nil when
// ctx ended first. Each status on the way is given to seen, if that is set; it ends the watch by returning false.
//
// The death of the shim is seen by its pidfd, the death of the VM by the shim. A living shim that does not answer is
// asked again and again.
func (n *Node) follow(ctx context.Context, s *shims.Shim, seen func(*shimv1.StatusResponse) bool) *shimv1.StatusResponse {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	n.wg.Go(func() { // ends the stream of a stopped or dying shim at once
		select {
		case <-s.Done():
			cancel()
		case <-ctx.Done():
		}
	})
	wait := rewatchMin
	for {
		var failed *shimv1.StatusResponse
		stop := false
		err := s.Watch(ctx, func(st *shimv1.StatusResponse) bool {
			wait = rewatchMin
			if st.State == shimv1.ShimState_SHIM_STATE_FAILED {
				failed = st
				return false
			}
			stop = seen != nil && !seen(st)
			return !stop
		})
		if failed != nil || stop {
			return failed
		}
		select {
		case <-s.Done():
			return &shimv1.StatusResponse{State: shimv1.ShimState_SHIM_STATE_FAILED, Reason: reasonHostLost}
		default:
		}
		if ctx.Err() != nil {
			return nil
		}
		n.log.Debug("watch of shim ended", "shim", s.ID, "error", err)
		if !pauseCtx(ctx, wait) {
			continue // look again why
		}
		wait = min(2*wait, rewatchMax)
	}
}

func pauseCtx(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// watchShim follows a bound shim for as long as the sandbox is on this node.
func (n *Node) watchShim(e *entry) {
	var unbound *shimv1.StatusResponse
	st := n.follow(n.ctx, e.shim, func(st *shimv1.StatusResponse) bool {
		if st.State == shimv1.ShimState_SHIM_STATE_ARMED {
			unbound = st
			return false
		}
		return n.noteStatus(e, st)
	})
	if unbound != nil {
		st = &shimv1.StatusResponse{State: unbound.State, Reason: reasonHostLost}
	}
	if st == nil {
		return
	}
	if st.State == shimv1.ShimState_SHIM_STATE_ARMED {
		// Adopted by its record alone, but the node before never got to give it the identity. It must not run as
		// this sandbox now: the caller of the create was never answered.
		_ = n.destroyShim(n.ctx, e.shim) // logged there
	}
	reason := st.Reason
	if reason == "" {
		reason = reasonVMMExited
	}
	n.fail(e, reason)
}

// noteStatus takes over what a living shim tells. It returns false once the sandbox is no longer here.
func (n *Node) noteStatus(e *entry, st *shimv1.StatusResponse) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.sandboxes[e.id] != e {
		return false
	}
	n.changeLocked(e, func() {
		if st.State == shimv1.ShimState_SHIM_STATE_RUNNING && e.state == nodev1.SandboxState_SANDBOX_STATE_CREATING && e.ended() {
			e.state = nodev1.SandboxState_SANDBOX_STATE_RUNNING // adopted before it could answer
		}
		if st.LastActiveAt != nil {
			e.lastActive = st.LastActiveAt.AsTime()
		}
	})
	return true
}

// watcher is one caller of WatchSandboxes. Of several changes of one sandbox it may see only the last, so that a
// slow caller costs no more than one status per sandbox.
type watcher struct {
	poke    chan struct{} // holds at most one
	pending map[string]*nodev1.SandboxStatus
	order   []string
}

// publish tells the watchers. Node.mu is held; it guards their fields too.
func (n *Node) publish(st *nodev1.SandboxStatus) {
	for w := range n.watchers {
		if w.pending[st.SandboxId] == nil {
			w.order = append(w.order, st.SandboxId)
		}
		w.pending[st.SandboxId] = proto.CloneOf(st)
		select {
		case w.poke <- struct{}{}:
		default:
		}
	}
}

// subscribe returns a new watcher and the statuses at this moment.
func (n *Node) subscribe() (*watcher, []*nodev1.SandboxStatus) {
	n.mu.Lock()
	defer n.mu.Unlock()
	w := &watcher{poke: make(chan struct{}, 1), pending: map[string]*nodev1.SandboxStatus{}}
	n.watchers[w] = struct{}{}
	return w, n.statusesLocked()
}

func (n *Node) unsubscribe(w *watcher) {
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.watchers, w)
}

// drain returns what a watcher has not been told, oldest first.
func (n *Node) drain(w *watcher) []*nodev1.SandboxStatus {
	n.mu.Lock()
	defer n.mu.Unlock()
	var out []*nodev1.SandboxStatus
	for _, id := range w.order {
		out = append(out, w.pending[id])
	}
	w.order, w.pending = nil, map[string]*nodev1.SandboxStatus{}
	return out
}

func (n *Node) statuses() []*nodev1.SandboxStatus {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.statusesLocked()
}

// statusesLocked returns all statuses in order of their IDs. Node.mu is held.
func (n *Node) statusesLocked() []*nodev1.SandboxStatus {
	out := make([]*nodev1.SandboxStatus, 0, len(n.sandboxes))
	for _, e := range n.sandboxes {
		out = append(out, e.status())
	}
	slices.SortFunc(out, func(a, b *nodev1.SandboxStatus) int {
		switch {
		case a.SandboxId < b.SandboxId:
			return -1
		case a.SandboxId > b.SandboxId:
			return 1
		}
		return 0
	})
	return out
}
