package shims

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

	shimv1 "github.com/space-sandbox/space/internal/gen/space/shim/v1"
	"github.com/space-sandbox/space/internal/gen/space/shim/v1/shimv1connect"
	"github.com/space-sandbox/space/internal/node/cgroup"
	"github.com/space-sandbox/space/internal/node/proc"
)

// Deadlines of calls to a shim. Status answers at once whatever the guest does, so a slow answer is a sick shim.
const (
	statusTimeout   = 3 * time.Second
	watchRound      = 5 * time.Minute // a watch is renewed: no call to a shim is without end
	shutdownTimeout = 3 * time.Second
	exitGrace       = time.Second // between the answer to Shutdown and the exit
)

// ErrDied says that the shim has ended; the text holds the end of its log.
var ErrDied = errors.New("shim exited")

// Shim is a hold on one shim process, living or dead.
type Shim struct {
	ID   string
	Dir  string
	Spec *shimv1.LaunchSpec // not to be changed
	// OnGone, if set before the shim is shared, is called once, when the first Destroy has succeeded.
	OnGone func()

	m         *Manager
	proc      *proc.Handle // nil: there is no process
	exit      atomic.Int64 // exit code of a child; -1 unknown
	transport *http.Transport
	client    shimv1connect.ShimServiceClient

	mu       sync.Mutex // guards vmm and released; never held across a call
	vmm      *proc.Handle
	released bool

	gone    sync.Once
	destroy sync.Mutex // one Destroy at a time; nothing else takes it
}

func newShim(m *Manager, spec *shimv1.LaunchSpec, dir string) *Shim {
	s := &Shim{ID: spec.ShimId, Dir: dir, Spec: spec, m: m}
	s.exit.Store(-1)
	socket := spec.Socket
	s.transport = &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			var d net.Dialer
			return d.DialContext(ctx, "unix", socket)
		},
		DisableCompression:     true,
		MaxIdleConns:           16,
		MaxIdleConnsPerHost:    16,
		IdleConnTimeout:        time.Minute,
		MaxResponseHeaderBytes: 64 << 10,
	}
	auth := connect.WithInterceptors(bearer(spec.Token))
	s.client = shimv1connect.NewShimServiceClient(&http.Client{Transport: s.transport}, "http://shim", auth, connect.WithReadMaxBytes(1<<20))
	return s
}

// Transport returns connections to the shim's socket, for calls that are passed on. The caller adds the token.
func (s *Shim) Transport() http.RoundTripper { return s.transport }

// Alive reports whether the shim's process runs.
func (s *Shim) Alive() bool { return s.proc != nil && s.proc.Alive() }

// Done is closed when the death of the shim was seen. For the remains of a dead one it is closed already.
func (s *Shim) Done() <-chan struct{} {
	if s.proc == nil {
		return closed
	}
	return s.proc.Done()
}

var closed = func() chan struct{} { // immutable
	c := make(chan struct{})
	close(c)
	return c
}()

// PIDs returns the processes of the shim and its VMM; 0 where there is none or it is not known.
func (s *Shim) PIDs() (shim, vmm int) {
	if s.Alive() {
		shim = s.proc.Identity().PID
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.vmm != nil && s.vmm.Alive() {
		vmm = s.vmm.Identity().PID
	}
	return shim, vmm
}

// Died describes the death of the shim: its exit status, if it was this process's child, and the end of its log.
func (s *Shim) Died() error {
	if code := s.exit.Load(); code >= 0 {
		return fmt.Errorf("%w with status %d: %s", ErrDied, code, logTail(s.Dir))
	}
	return fmt.Errorf("%w: %s", ErrDied, logTail(s.Dir))
}

// WaitExit waits for the end of a shim that ends by itself and returns an error unless it succeeded.
func (s *Shim) WaitExit(ctx context.Context) error {
	select {
	case <-s.Done():
	case <-ctx.Done():
		return ctx.Err()
	}
	if s.exit.Load() == 0 {
		return nil
	}
	return fmt.Errorf("%w%s", s.Died(), consoleTail(s.Dir))
}

// WaitState waits until the shim has reached want. It fails as soon as that cannot happen any more.
func (s *Shim) WaitState(ctx context.Context, want shimv1.ShimState) (*shimv1.StatusResponse, error) {
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for {
		// Until it listens, the socket is tried; from then on the shim tells each change.
		st, err := s.Status(ctx)
		if err == nil && st.State != want && st.State != shimv1.ShimState_SHIM_STATE_FAILED {
			st, err = s.awaitChange(ctx, want)
		}
		switch {
		case err == nil && st.State == want:
			return st, nil
		case err == nil && st.State == shimv1.ShimState_SHIM_STATE_FAILED:
			return st, fmt.Errorf("shim failed: %s: %s", st.Reason, logTail(s.Dir))
		}
		select {
		case <-tick.C:
		case <-s.Done():
			return nil, s.Died()
		case <-ctx.Done():
			return nil, fmt.Errorf("wait for shim: %w (last answer: %w)", ctx.Err(), err)
		}
	}
}

func (s *Shim) awaitChange(ctx context.Context, want shimv1.ShimState) (*shimv1.StatusResponse, error) {
	var last *shimv1.StatusResponse
	err := s.Watch(ctx, func(st *shimv1.StatusResponse) bool {
		last = st
		return st.State != want && st.State != shimv1.ShimState_SHIM_STATE_FAILED
	})
	if last == nil && err == nil {
		err = errors.New("watch ended without a status")
	}
	return last, err
}

// Status asks the shim how it is, with a deadline of its own.
func (s *Shim) Status(ctx context.Context) (*shimv1.StatusResponse, error) {
	ctx, cancel := context.WithTimeout(ctx, statusTimeout)
	defer cancel()
	resp, err := s.client.Status(ctx, connect.NewRequest(&shimv1.StatusRequest{}))
	if err != nil {
		return nil, fmt.Errorf("shim status: %w", err)
	}
	s.noteVMM(resp.Msg.VmmPid)
	return resp.Msg, nil
}

// Watch calls fn with the status and every change of it until fn returns false, the stream ends or a few minutes
// have passed; the caller renews it.
func (s *Shim) Watch(ctx context.Context, fn func(*shimv1.StatusResponse) bool) error {
	ctx, cancel := context.WithTimeout(ctx, watchRound)
	defer cancel()
	stream, err := s.client.Watch(ctx, connect.NewRequest(&shimv1.WatchRequest{}))
	if err != nil {
		return fmt.Errorf("shim watch: %w", err)
	}
	defer stream.Close() //nolint:errcheck // the stream's own error was seen
	for stream.Receive() {
		s.noteVMM(stream.Msg().VmmPid)
		if !fn(stream.Msg()) {
			return nil
		}
	}
	return stream.Err()
}

// Bind makes the armed VM a sandbox. The caller's context is its deadline.
func (s *Shim) Bind(ctx context.Context, req *shimv1.BindRequest) (*shimv1.StatusResponse, error) {
	resp, err := s.client.Bind(ctx, connect.NewRequest(req))
	if err != nil {
		return nil, fmt.Errorf("bind: %w", err)
	}
	if resp.Msg.Status == nil {
		return nil, errors.New("bind: answer without a status")
	}
	s.noteVMM(resp.Msg.Status.VmmPid)
	return resp.Msg.Status, nil
}

// noteVMM takes hold of the VMM that a living shim reports, and notes it for a later node: should the shim die
// without its VMM, it can still be killed.
func (s *Shim) noteVMM(pid int32) {
	s.mu.Lock()
	known := s.released || pid <= 0 || s.vmm != nil && s.vmm.Identity().PID == int(pid)
	s.mu.Unlock()
	if known {
		return
	}
	id, err := proc.Identify(int(pid))
	if err != nil || s.proc == nil || id.StartTime < s.proc.Identity().StartTime {
		return // ended meanwhile, or older than its shim: not a VMM of this shim
	}
	h, err := proc.Open(id)
	if err != nil {
		return
	}
	s.mu.Lock()
	if !s.released {
		h, s.vmm = s.vmm, h // what is left in h was an earlier VMM, or nothing
	}
	s.mu.Unlock()
	if h != nil {
		_ = h.Close()
	}
	if err := s.savePIDs(); err != nil {
		s.m.Log.Warn("cannot note VMM", "shim", s.ID, "error", err)
	}
}

// savePIDs writes pid.json. Without fsync: after a power loss there is no such process any more.
func (s *Shim) savePIDs() error {
	pids := pidFile{Shim: s.proc.Identity()}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.vmm != nil {
		id := s.vmm.Identity()
		pids.VMM = &id
	}
	data, err := json.Marshal(pids)
	if err != nil {
		return err
	}
	tmp := filepath.Join(s.Dir, "pid.json.tmp")
	if err := os.WriteFile(tmp, data, 0o600); err != nil {
		return err
	}
	return os.Rename(tmp, filepath.Join(s.Dir, "pid.json"))
}

// Release gives up the holds on the processes and leaves them running. Safe to call twice.
func (s *Shim) Release() {
	s.mu.Lock()
	vmm := s.vmm
	s.vmm, s.released = nil, true
	s.mu.Unlock()
	if vmm != nil {
		_ = vmm.Close()
	}
	if s.proc != nil {
		_ = s.proc.Close()
	}
	s.transport.CloseIdleConnections()
}

// Destroy ends the shim and its VMM and removes everything it had. With a reason it first asks the shim to end by
// itself, so that open streams are told. An error means that something is left; Destroy can then be repeated.
func (s *Shim) Destroy(ctx context.Context, reason string) error {
	s.destroy.Lock()
	defer s.destroy.Unlock()
	if reason != "" && s.Alive() {
		s.askToEnd(ctx, reason)
	}
	if err := s.kill(ctx); err != nil {
		return err
	}
	err := errors.Join(
		cgroup.Remove(ctx, s.Spec.Cgroup),
		removeFile(s.Spec.Socket),
		os.RemoveAll(s.Dir),
	)
	if err != nil {
		return fmt.Errorf("remove shim %s: %w", s.ID, err)
	}
	s.Release()
	if s.OnGone != nil {
		s.gone.Do(s.OnGone)
	}
	return nil
}

// askToEnd gives the shim a short while to end by itself. What it leaves undone is killed.
func (s *Shim) askToEnd(ctx context.Context, reason string) {
	ctx, cancel := context.WithTimeout(ctx, shutdownTimeout)
	defer cancel()
	if _, err := s.client.Shutdown(ctx, connect.NewRequest(&shimv1.ShutdownRequest{Reason: reason})); err != nil {
		s.m.Log.Debug("shim did not shut down by itself", "shim", s.ID, "error", err)
		return
	}
	timer := time.NewTimer(exitGrace)
	defer timer.Stop()
	select {
	case <-s.Done():
	case <-timer.C:
	case <-ctx.Done():
	}
}

// kill kills shim and VMM and waits for both deaths. A stopped process dies of SIGKILL as well.
func (s *Shim) kill(ctx context.Context) error {
	s.mu.Lock()
	vmm := s.vmm
	s.mu.Unlock()
	for _, h := range []*proc.Handle{s.proc, vmm} {
		if h == nil || !h.Alive() {
			continue
		}
		if err := h.Signal(unix.SIGKILL); err != nil && !errors.Is(err, proc.ErrGone) {
			return fmt.Errorf("kill shim %s: %w", s.ID, err)
		}
	}
	if err := cgroup.Kill(s.Spec.Cgroup); err != nil {
		s.m.Log.Warn("cgroup.kill", "shim", s.ID, "error", err)
	}
	for _, h := range []*proc.Handle{s.proc, vmm} {
		if h == nil {
			continue
		}
		select {
		case <-h.Done():
		case <-ctx.Done():
			return fmt.Errorf("process %d of shim %s has not died yet: %w", h.Identity().PID, s.ID, ctx.Err())
		}
	}
	return nil
}

func removeFile(path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) && !errors.Is(err, syscall.ENOTDIR) {
		return err
	}
	return nil
}

// bearer adds the shim's token to every call.
type bearer string

// WrapUnary implements connect.Interceptor.
func (b bearer) WrapUnary(next connect.UnaryFunc) connect.UnaryFunc {
	return func(ctx context.Context, req connect.AnyRequest) (connect.AnyResponse, error) {
		req.Header().Set("Authorization", "Bearer "+string(b))
		return next(ctx, req)
	}
}

// WrapStreamingClient implements connect.Interceptor.
func (b bearer) WrapStreamingClient(next connect.StreamingClientFunc) connect.StreamingClientFunc {
	return func(ctx context.Context, spec connect.Spec) connect.StreamingClientConn {
		conn := next(ctx, spec)
		conn.RequestHeader().Set("Authorization", "Bearer "+string(b))
		return conn
	}
}

// WrapStreamingHandler implements connect.Interceptor: a client has no handlers to wrap.
func (b bearer) WrapStreamingHandler(next connect.StreamingHandlerFunc) connect.StreamingHandlerFunc {
	return next
}
