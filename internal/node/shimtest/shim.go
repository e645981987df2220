package shimtest

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	agentv1 "github.com/space-sandbox/space/internal/gen/space/agent/v1"
	"github.com/space-sandbox/space/internal/gen/space/agent/v1/agentv1connect"
	nodev1 "github.com/space-sandbox/space/internal/gen/space/node/v1"
	"github.com/space-sandbox/space/internal/gen/space/node/v1/nodev1connect"
	shimv1 "github.com/space-sandbox/space/internal/gen/space/shim/v1"
	"github.com/space-sandbox/space/internal/gen/space/shim/v1/shimv1connect"
)

// What BindRequest.env can make the shim do, under the name BindEnv.
const (
	BindEnv   = "FAKE_BIND"
	BindError = "error" // refuse, end the VM and exit
	BindHang  = "hang"  // never answer
	BindDie   = "die"   // exit without an answer
)

// CaptureFails as a warm-up line makes a capture end with status 3.
const CaptureFails = "fail"

// Main runs the shim if this process was started as one, and then does not return. TestMain calls it first.
func Main() {
	if len(os.Args) != 2 {
		return
	}
	dir := os.Args[1]
	data, err := os.ReadFile(filepath.Join(dir, "spec.json"))
	if err != nil {
		return
	}
	spec := &shimv1.LaunchSpec{}
	if err := protojson.Unmarshal(data, spec); err != nil {
		fail(err)
	}
	if spec.Mode == shimv1.LaunchSpec_MODE_CAPTURE {
		capture(spec)
	}
	fail(serve(spec))
}

// exit ends the process at once. os.Exit would sleep for a second under the race detector.
func exit(code int) { syscall.Exit(code) }

func fail(err error) {
	fmt.Fprintln(os.Stderr, "fake shim:", err)
	exit(3)
}

func capture(spec *shimv1.LaunchSpec) {
	for _, line := range spec.WarmUp {
		if line == CaptureFails {
			fail(errors.New("told to fail"))
		}
	}
	agent := []byte(`{"agentVersion":"fake","kernel":"6.1-fake","clocksource":"tsc"}`)
	for name, data := range map[string][]byte{"memory": []byte("memory"), "state": []byte("state"), "agent.json": agent} {
		if err := os.WriteFile(filepath.Join(spec.CaptureDir, name), data, 0o600); err != nil {
			fail(err)
		}
	}
	exit(0)
}

// shim is the server; its fields are guarded by mu.
type shim struct {
	spec *shimv1.LaunchSpec
	vmm  *exec.Cmd
	dead chan struct{}

	mu      sync.Mutex
	st      *shimv1.StatusResponse
	changed chan struct{}
}

func serve(spec *shimv1.LaunchSpec) error {
	s := &shim{spec: spec, dead: make(chan struct{}), changed: make(chan struct{})}
	s.vmm = exec.CommandContext(context.Background(), "/bin/sleep", "1000")
	s.vmm.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := s.vmm.Start(); err != nil {
		return err
	}
	s.st = &shimv1.StatusResponse{
		ShimId: spec.ShimId, State: shimv1.ShimState_SHIM_STATE_ARMED, VmmPid: int32(s.vmm.Process.Pid),
		LastActiveAt: timestamppb.Now(), Kernel: "6.1-fake", VmmVersion: "0", Acceleration: spec.Acceleration,
	}
	go s.waitVMM()
	l, err := new(net.ListenConfig).Listen(context.Background(), "unix", spec.Socket)
	if err != nil {
		return err
	}
	mux := http.NewServeMux()
	mux.Handle(shimv1connect.NewShimServiceHandler(shimCalls{s}))
	mux.Handle(nodev1connect.NewSandboxServiceHandler(sandboxCalls{s: s}))
	mux.Handle(agentv1connect.NewFileServiceHandler(fileCalls{s: s}))
	server := &http.Server{Handler: s.auth(mux), ReadHeaderTimeout: time.Minute}
	return server.Serve(l)
}

func (s *shim) auth(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Authorization") != "Bearer "+s.spec.Token {
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		next.ServeHTTP(w, r)
	})
}

func (s *shim) waitVMM() {
	_ = s.vmm.Wait()
	s.set(func(st *shimv1.StatusResponse) {
		st.State, st.Reason, st.VmmPid = shimv1.ShimState_SHIM_STATE_FAILED, "vmm_exited", 0
	})
	close(s.dead)
}

func (s *shim) set(change func(*shimv1.StatusResponse)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	change(s.st)
	close(s.changed)
	s.changed = make(chan struct{})
}

func (s *shim) get() (*shimv1.StatusResponse, chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return proto.CloneOf(s.st), s.changed
}

type shimCalls struct{ s *shim }

// Status implements ShimService.
func (c shimCalls) Status(context.Context, *connect.Request[shimv1.StatusRequest]) (*connect.Response[shimv1.StatusResponse], error) {
	st, _ := c.s.get()
	return connect.NewResponse(st), nil
}

// Watch implements ShimService.
func (c shimCalls) Watch(ctx context.Context, _ *connect.Request[shimv1.WatchRequest], out *connect.ServerStream[shimv1.StatusResponse]) error {
	for {
		st, changed := c.s.get()
		if err := out.Send(st); err != nil {
			return err
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return nil
		}
	}
}

// Bind implements ShimService.
func (c shimCalls) Bind(ctx context.Context, req *connect.Request[shimv1.BindRequest]) (*connect.Response[shimv1.BindResponse], error) {
	switch req.Msg.Env[BindEnv] {
	case BindError:
		time.AfterFunc(50*time.Millisecond, func() { exit(1) })
		return nil, connect.NewError(connect.CodeInternal, errors.New("told to fail"))
	case BindHang:
		<-ctx.Done()
		return nil, ctx.Err()
	case BindDie:
		exit(1)
	}
	if _, err := os.Stat(req.Msg.JournalDir); err != nil {
		return nil, connect.NewError(connect.CodeInvalidArgument, err)
	}
	c.s.set(func(st *shimv1.StatusResponse) {
		st.State, st.SandboxId, st.Generation = shimv1.ShimState_SHIM_STATE_RUNNING, req.Msg.SandboxId, req.Msg.Generation
	})
	st, _ := c.s.get()
	return connect.NewResponse(&shimv1.BindResponse{Status: st}), nil
}

// Shutdown implements ShimService.
func (c shimCalls) Shutdown(context.Context, *connect.Request[shimv1.ShutdownRequest]) (*connect.Response[shimv1.ShutdownResponse], error) {
	_ = c.s.vmm.Process.Kill()
	<-c.s.dead
	time.AfterFunc(10*time.Millisecond, func() { exit(0) })
	return connect.NewResponse(&shimv1.ShutdownResponse{}), nil
}

// sandboxCalls shows what arrives.
type sandboxCalls struct {
	nodev1connect.UnimplementedSandboxServiceHandler
	s *shim
}

// GetProcess answers with the ID of the process and, as its user, of the sandbox that the shim was bound to.
func (c sandboxCalls) GetProcess(_ context.Context, req *connect.Request[nodev1.GetProcessRequest]) (*connect.Response[nodev1.GetProcessResponse], error) {
	st, _ := c.s.get()
	return connect.NewResponse(&nodev1.GetProcessResponse{Process: &nodev1.Process{
		ProcessId: req.Msg.ProcessId, Spec: &agentv1.ProcessSpec{User: st.SandboxId},
	}}), nil
}

// StreamEvents sends one event and then nothing until the caller leaves.
func (c sandboxCalls) StreamEvents(ctx context.Context, _ *connect.Request[nodev1.StreamEventsRequest], out *connect.ServerStream[nodev1.Event]) error {
	if err := out.Send(&nodev1.Event{Id: 1}); err != nil {
		return err
	}
	<-ctx.Done()
	c.s.set(func(st *shimv1.StatusResponse) { st.LastActiveAt = timestamppb.New(time.Unix(4711, 0)) })
	return nil
}

type fileCalls struct {
	agentv1connect.UnimplementedFileServiceHandler
	s *shim
}

// Write notes, in the status, that the first message has arrived, and then counts the others' bytes.
func (c fileCalls) Write(_ context.Context, in *connect.ClientStream[agentv1.WriteRequest]) (*connect.Response[agentv1.WriteResponse], error) {
	size := uint64(0)
	for in.Receive() {
		if size == 0 {
			c.s.set(func(st *shimv1.StatusResponse) { st.LastActiveAt = timestamppb.New(time.Unix(815, 0)) })
		}
		size += uint64(proto.Size(in.Msg()))
	}
	if err := in.Err(); err != nil {
		return nil, err
	}
	return connect.NewResponse(&agentv1.WriteResponse{Entry: &agentv1.Entry{Size: size}}), nil
}
