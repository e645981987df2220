package shim

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"
	agentv1 "github.com/space-sandbox/space/internal/gen/space/agent/v1"
	"github.com/space-sandbox/space/internal/gen/space/agent/v1/agentv1connect"
	nodev1 "github.com/space-sandbox/space/internal/gen/space/node/v1"
	"github.com/space-sandbox/space/internal/gen/space/node/v1/nodev1connect"
	shimv1 "github.com/space-sandbox/space/internal/gen/space/shim/v1"
	"github.com/space-sandbox/space/internal/gen/space/shim/v1/shimv1connect"
	"github.com/space-sandbox/space/internal/sandbox"
	"github.com/space-sandbox/space/internal/shim/archive"
	"google.golang.org/protobuf/encoding/protojson"
)

const (
	testToken    = "shim-token-of-this-test"
	captureToken = "00112233445566778899aabbccddeeff"
)

// rig is a shim with a fake VM, and clients of it.
type rig struct {
	t      *testing.T
	dir    string
	spec   *shimv1.LaunchSpec
	driver *fakeDriver
	agent  *fakeAgent
	shim   shimv1connect.ShimServiceClient
	box    nodev1connect.SandboxServiceClient
	files  agentv1connect.FileServiceClient
	http   *http.Transport
	done   chan struct{}
	err    error // of Run, after done
	cancel context.CancelFunc
}

func newRig(t *testing.T, edit func(*rig)) *rig {
	t.Helper()
	dir, err := os.MkdirTemp("", "shim") // short: it holds a socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	r := &rig{t: t, dir: dir, agent: newFakeAgent(), done: make(chan struct{})}
	r.spec = &shimv1.LaunchSpec{
		Mode: shimv1.LaunchSpec_MODE_RESTORE, ShimId: "s1", Token: testToken, ControlToken: captureToken, Driver: "fake",
		Resources: &nodev1.Resources{Vcpu: 1, MemoryMib: 64}, Acceleration: "tcg", DeviceState: "/none",
		Socket: filepath.Join(dir, "sock"),
	}
	r.driver = &fakeDriver{t: t, token: captureToken, agent: r.agent}
	if edit != nil {
		edit(r)
	}
	data, err := protojson.Marshal(r.spec)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, specFile), data, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(filepath.Join(dir, "journal"), 0o700); err != nil {
		t.Fatal(err)
	}
	r.connect()
	return r
}

func noMemory() (*os.File, error) { return os.Open(os.DevNull) }

func (r *rig) connect() {
	r.http = &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", r.spec.GetSocket())
	}}
	client := &http.Client{Transport: bearer{testToken, r.http}}
	r.shim = shimv1connect.NewShimServiceClient(client, "http://shim")
	r.box = nodev1connect.NewSandboxServiceClient(client, "http://shim")
	r.files = agentv1connect.NewFileServiceClient(client, "http://shim")
}

type bearer struct {
	token string
	next  http.RoundTripper
}

func (b bearer) RoundTrip(req *http.Request) (*http.Response, error) {
	req = req.Clone(req.Context())
	req.Header.Set("Authorization", "Bearer "+b.token)
	return b.next.RoundTrip(req)
}

// start runs the shim until the test ends.
func (r *rig) start() *rig {
	r.t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	r.cancel = cancel
	level := slog.LevelError + 4
	if testing.Verbose() {
		level = slog.LevelDebug
	}
	log := slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: level}))
	go func() {
		defer close(r.done)
		r.err = Run(ctx, Config{Dir: r.dir, Driver: r.driver, Log: log, OpenMemory: noMemory})
	}()
	r.t.Cleanup(func() {
		cancel()
		r.http.CloseIdleConnections()
		select {
		case <-r.done:
		case <-time.After(20 * time.Second):
			r.t.Error("the shim did not end")
		}
	})
	return r
}

// await watches until the shim has reached a state.
func (r *rig) await(want shimv1.ShimState) *shimv1.StatusResponse {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(r.t.Context(), 20*time.Second)
	defer cancel()
	for ctx.Err() == nil {
		stream, err := r.shim.Watch(ctx, connect.NewRequest(&shimv1.WatchRequest{}))
		if err != nil {
			pause(ctx, 5*time.Millisecond)
			continue
		}
		for stream.Receive() {
			if stream.Msg().GetState() == want {
				cancel()
				return stream.Msg()
			}
		}
		pause(ctx, 5*time.Millisecond)
	}
	r.t.Fatalf("never %v", want)
	return nil
}

func (r *rig) bindRequest() *shimv1.BindRequest {
	return &shimv1.BindRequest{
		SandboxId: string(sandbox.NewID()), Generation: 7, Hostname: "box", Env: map[string]string{"A": "b"},
		JournalDir: filepath.Join(r.dir, "journal"),
	}
}

// running brings a rig to RUNNING.
func running(t *testing.T, edit func(*rig)) *rig {
	t.Helper()
	r := newRig(t, edit).start()
	r.await(shimv1.ShimState_SHIM_STATE_ARMED)
	resp, err := r.shim.Bind(t.Context(), connect.NewRequest(r.bindRequest()))
	if err != nil {
		t.Fatal(err)
	}
	if resp.Msg.GetStatus().GetState() != shimv1.ShimState_SHIM_STATE_RUNNING {
		t.Fatalf("after Bind: %v", resp.Msg)
	}
	return r
}

func (r *rig) create(now bool, argv ...string) string {
	r.t.Helper()
	id := string(sandbox.NewProcessID())
	spec := &agentv1.ProcessSpec{Stdin: true}
	for _, a := range argv {
		spec.Argv = append(spec.Argv, []byte(a))
	}
	_, err := r.box.CreateProcess(r.t.Context(), connect.NewRequest(&nodev1.CreateProcessRequest{ProcessId: id, Spec: spec, StartNow: now}))
	if err != nil {
		r.t.Fatal(err)
	}
	return id
}

// events reads a stream to its end.
func (r *rig) events(ctx context.Context, id string, after *uint64, visit func(*nodev1.Event) bool) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := r.box.StreamEvents(ctx, connect.NewRequest(&nodev1.StreamEventsRequest{ProcessId: id, AfterId: after, Start: true}))
	if err != nil {
		return err
	}
	for stream.Receive() {
		if !visit(stream.Msg()) {
			return nil
		}
	}
	return stream.Err()
}

func (r *rig) all(id string) []*nodev1.Event {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(r.t.Context(), 30*time.Second)
	defer cancel()
	var evs []*nodev1.Event
	if err := r.events(ctx, id, nil, func(ev *nodev1.Event) bool { evs = append(evs, ev); return true }); err != nil {
		r.t.Fatal(err)
	}
	return evs
}

func (r *rig) shutdown(reason string) {
	r.t.Helper()
	if _, err := r.shim.Shutdown(r.t.Context(), connect.NewRequest(&shimv1.ShutdownRequest{Reason: reason})); err != nil {
		r.t.Fatal(err)
	}
	<-r.done
	if r.err != nil {
		r.t.Fatalf("after Shutdown: %v", r.err)
	}
}

func TestBindGivesTheIdentityOnce(t *testing.T) {
	r := newRig(t, nil).start()
	st := r.await(shimv1.ShimState_SHIM_STATE_ARMED)
	if st.GetKernel() != "6.1?[0m" || st.GetVmmPid() == 0 || len(st.GetTimings()) < 4 {
		t.Fatalf("armed: %v", st)
	}
	if _, err := r.box.ListProcesses(t.Context(), connect.NewRequest(&nodev1.ListProcessesRequest{})); connect.CodeOf(err) != connect.CodeFailedPrecondition {
		t.Fatalf("list before bind: %v", err)
	}
	bad := r.bindRequest()
	bad.SandboxId = "../etc"
	if _, err := r.shim.Bind(t.Context(), connect.NewRequest(bad)); connect.CodeOf(err) != connect.CodeInvalidArgument {
		t.Fatalf("bad ID: %v", err)
	}
	req := r.bindRequest()
	resp, err := r.shim.Bind(t.Context(), connect.NewRequest(req))
	if err != nil {
		t.Fatal(err)
	}
	got := r.agent.resume
	if got.GetGeneration() != 8 || got.GetIdentity() != req.GetSandboxId() || len(got.GetEntropy()) < 64 || got.GetHostname() != "box" ||
		got.GetEnv()["A"] != "b" || len(got.GetControlToken()) < 32 || got.GetControlToken() == captureToken {
		t.Fatalf("Resume got %v", got)
	}
	phases := map[string]bool{}
	for _, tm := range resp.Msg.GetStatus().GetTimings() {
		phases[tm.GetPhase()] = true
	}
	for _, p := range []string{"vmm_load", "restore", "first_ping", "stop", "continue", "resume", "ping"} {
		if !phases[p] {
			t.Errorf("no timing of %s", p)
		}
	}
	if _, err := r.shim.Bind(t.Context(), connect.NewRequest(r.bindRequest())); connect.CodeOf(err) != connect.CodeFailedPrecondition {
		t.Fatalf("second bind: %v", err)
	}
	if s, err := r.shim.Status(t.Context(), connect.NewRequest(&shimv1.StatusRequest{})); err != nil || s.Msg.GetSandboxId() != req.GetSandboxId() {
		t.Fatalf("the refused bind changed the sandbox: %v, %v", s, err)
	}
	r.shutdown("sandbox_deleted")
}

// TestRehearsal checks that a VM that is to wait rehearses with an identity and a token that are nobody's.
func TestRehearsal(t *testing.T) {
	r := running(t, func(r *rig) { r.spec.Rehearse = true })
	r.agent.mu.Lock()
	defer r.agent.mu.Unlock()
	if len(r.agent.rehearsals) != rehearsals || r.agent.generation != 7+warmUpGeneration {
		t.Fatalf("%d rehearsals, then generation %d", len(r.agent.rehearsals), r.agent.generation)
	}
	for _, m := range append(r.agent.rehearsals[:rehearsals-1:rehearsals-1], r.agent.resume) {
		last := r.agent.rehearsals[rehearsals-1]
		if bytes.Equal(m.GetEntropy(), last.GetEntropy()) || m.GetControlToken() == last.GetControlToken() || len(last.GetEnv()) > 0 {
			t.Errorf("a rehearsal repeats or tells something: %v", m)
		}
	}
}

func TestFailsClosed(t *testing.T) {
	for name, edit := range map[string]func(*rig){
		"resume error":  func(r *rig) { r.agent.resumeErr = connect.NewError(connect.CodeInternal, errors.New("no reseed")) },
		"clock is off":  func(r *rig) { r.agent.skew = -2 * time.Second },
		"cannot resume": func(r *rig) { r.driver.conts = []error{nil, errors.New("qmp")} },
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, edit).start()
			r.await(shimv1.ShimState_SHIM_STATE_ARMED)
			if _, err := r.shim.Bind(t.Context(), connect.NewRequest(r.bindRequest())); err == nil {
				t.Fatal("bound")
			}
			r.await(shimv1.ShimState_SHIM_STATE_FAILED)
			<-r.driver.current().done
			if _, err := r.box.CreateProcess(t.Context(), connect.NewRequest(&nodev1.CreateProcessRequest{})); err == nil {
				t.Fatal("served")
			}
			<-r.done
			if r.err == nil {
				t.Fatal("the shim ended without an error")
			}
		})
	}
}

func TestArmFailures(t *testing.T) {
	for name, edit := range map[string]func(*rig){
		"restore":      func(r *rig) { r.driver.fail = errors.New("state refused") },
		"clock source": func(r *rig) { r.agent.clocksource = "refined-jiffies" },
		"wrong token":  func(r *rig) { r.driver.token = "another" },
		"kvm-clock":    func(r *rig) { r.agent.clocksource = "kvm-clock" }, // not under tcg
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, edit).start()
			if st := r.await(shimv1.ShimState_SHIM_STATE_FAILED); st.GetReason() == "" || st.GetVmmPid() != 0 {
				t.Fatalf("failed: %v", st)
			}
			<-r.done
			if r.err == nil {
				t.Fatal("the shim ended without an error")
			}
		})
	}
}

func TestCommand(t *testing.T) {
	r := running(t, nil)
	id := r.create(false, "print", "100000")
	if p, err := r.box.GetProcess(t.Context(), connect.NewRequest(&nodev1.GetProcessRequest{ProcessId: id})); err != nil || p.Msg.GetProcess().GetState() != nodev1.ProcessState_PROCESS_STATE_CREATED {
		t.Fatalf("before the start: %v, %v", p, err)
	}
	evs := r.all(id)
	var out []byte
	for _, ev := range evs {
		out = append(out, ev.GetOutput().GetData()...)
	}
	last := evs[len(evs)-1].GetExited()
	if evs[0].GetStarted().GetOsPid() != 42 || !bytes.Equal(out, pattern(100000)) || last.GetExit().Code == nil || last.GetStdoutBytes() != 100000 {
		t.Fatalf("%d bytes, %v", len(out), last)
	}
	again, err := r.box.CreateProcess(t.Context(), connect.NewRequest(&nodev1.CreateProcessRequest{
		ProcessId: id, Spec: &agentv1.ProcessSpec{Argv: [][]byte{[]byte("print")}}, StartNow: true,
	}))
	if err != nil || again.Msg.GetProcess().GetState() != nodev1.ProcessState_PROCESS_STATE_EXITED || r.agent.runs != 1 {
		t.Fatalf("repeat: %v, %v, %d runs", again, err, r.agent.runs)
	}
	stream, err := r.box.ReadOutput(t.Context(), connect.NewRequest(&nodev1.ReadOutputRequest{ProcessId: id, Stream: agentv1.Stream_STREAM_STDOUT, From: 99999}))
	if err != nil || !stream.Receive() || !bytes.Equal(stream.Msg().GetData(), out[99999:]) {
		t.Fatalf("output: %v", err)
	}
	list, err := r.box.ListProcesses(t.Context(), connect.NewRequest(&nodev1.ListProcessesRequest{}))
	if err != nil || len(list.Msg.GetProcesses()) != 1 {
		t.Fatalf("list: %v, %v", list, err)
	}
	waitFor(t, "the agent forgets the process", func() bool {
		r.agent.mu.Lock()
		defer r.agent.mu.Unlock()
		return len(r.agent.procs) == 0
	})
}

func waitFor(t *testing.T, what string, ok func() bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	for !ok() {
		if !pause(ctx, 2*time.Millisecond) {
			t.Fatalf("not seen: %s", what)
		}
	}
}

func TestRefusedStarts(t *testing.T) {
	r := running(t, nil)
	id := string(sandbox.NewProcessID())
	spec := &agentv1.ProcessSpec{Argv: [][]byte{[]byte("true")}, User: "nobody-here"}
	_, err := r.box.CreateProcess(t.Context(), connect.NewRequest(&nodev1.CreateProcessRequest{ProcessId: id, Spec: spec}))
	var ce *connect.Error
	if !errors.As(err, &ce) || ce.Code() != connect.CodeInvalidArgument || strings.ContainsRune(ce.Message(), 0) || fileError(ce).GetField() != "user" {
		t.Fatalf("unknown user: %v", err)
	}
	if _, err := r.box.GetProcess(t.Context(), connect.NewRequest(&nodev1.GetProcessRequest{ProcessId: id})); connect.CodeOf(err) != connect.CodeNotFound {
		t.Fatalf("a refused process is recorded: %v", err)
	}
	spec = &agentv1.ProcessSpec{Argv: [][]byte{[]byte("refuse")}}
	_, err = r.box.CreateProcess(t.Context(), connect.NewRequest(&nodev1.CreateProcessRequest{ProcessId: id, Spec: spec, StartNow: true}))
	if connect.CodeOf(err) != connect.CodeResourceExhausted {
		t.Fatalf("start_now of a refused process: %v", err)
	}
	if _, err := r.box.GetProcess(t.Context(), connect.NewRequest(&nodev1.GetProcessRequest{ProcessId: id})); connect.CodeOf(err) != connect.CodeNotFound {
		t.Fatalf("a refused process is recorded: %v", err)
	}
	for name, req := range map[string]*nodev1.CreateProcessRequest{
		"ID":        {ProcessId: "p1", Spec: spec},
		"no argv":   {ProcessId: id},
		"huge argv": {ProcessId: id, Spec: &agentv1.ProcessSpec{Argv: [][]byte{make([]byte, sandbox.MaxArg+1)}}},
		"huge cap":  {ProcessId: id, Spec: spec, OutputCapBytes: maxOutputCap + 1},
	} {
		if _, err := r.box.CreateProcess(t.Context(), connect.NewRequest(req)); connect.CodeOf(err) != connect.CodeInvalidArgument {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestStdinAndSignals(t *testing.T) {
	r := running(t, nil)
	cat := r.create(true, "cat")
	big := pattern(700 << 10)
	w, err := r.box.WriteStdin(t.Context(), connect.NewRequest(&nodev1.WriteStdinRequest{ProcessId: cat, Data: big}))
	if err != nil || w.Msg.GetOffset() != uint64(len(big)) {
		t.Fatalf("stdin: %v, %v", w, err)
	}
	w, err = r.box.WriteStdin(t.Context(), connect.NewRequest(&nodev1.WriteStdinRequest{ProcessId: cat, Data: []byte("end"), Close: true}))
	if err != nil || w.Msg.GetOffset() != uint64(len(big)+3) || !w.Msg.GetClosed() {
		t.Fatalf("stdin at the end: %v, %v", w, err)
	}
	var out []byte
	for _, ev := range r.all(cat) {
		out = append(out, ev.GetOutput().GetData()...)
	}
	if !bytes.Equal(out, append(big, "end"...)) {
		t.Fatalf("cat wrote %d bytes", len(out))
	}
	sleep := r.create(true, "sleep")
	kill := &nodev1.SignalRequest{ProcessId: sleep, Signal: 9, Target: agentv1.SignalTarget_SIGNAL_TARGET_TREE}
	for range 2 { // the second finds it dead
		k, err := r.box.Signal(t.Context(), connect.NewRequest(kill))
		if err != nil || k.Msg.GetPending() || k.Msg.GetProcess().GetExit().GetSignal() != "SIG9" {
			t.Fatalf("kill: %v, %v", k, err)
		}
	}
	waiting := r.create(false, "sleep")
	if _, err := r.box.Signal(t.Context(), connect.NewRequest(&nodev1.SignalRequest{ProcessId: waiting, Signal: 9})); connect.CodeOf(err) != connect.CodeFailedPrecondition {
		t.Fatalf("signal before the start: %v", err)
	}
}

// TestDisconnectStorm cuts both sides over and over: the client from the shim and the shim from the agent.
func TestDisconnectStorm(t *testing.T) {
	size := 64 << 20
	if raceEnabled {
		size = 8 << 20
	}
	r := running(t, nil)
	id := string(sandbox.NewProcessID())
	_, err := r.box.CreateProcess(t.Context(), connect.NewRequest(&nodev1.CreateProcessRequest{ProcessId: id, Spec: &agentv1.ProcessSpec{
		Argv: [][]byte{[]byte("print"), []byte(strconv.Itoa(size))},
	}}))
	if err != nil {
		t.Fatal(err)
	}
	stop := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			select {
			case <-stop:
				return
			case <-time.After(30 * time.Millisecond): // a storm, not a wait
				r.driver.current().listener.cut()
			}
		}
	})
	ctx, cancel := context.WithTimeout(t.Context(), 120*time.Second)
	defer cancel()
	want := pattern(size)
	for i := range 3 {
		wg.Go(func() { readInPieces(ctx, t, r, id, want, 50+100*i) })
	}
	go func() {
		defer close(stop)
		_, _ = r.box.GetProcess(ctx, connect.NewRequest(&nodev1.GetProcessRequest{ProcessId: id, WaitMs: 60000}))
	}()
	wg.Wait()
	if r.agent.runs != 1 {
		t.Fatalf("the process was started %d times", r.agent.runs)
	}
}

func readInPieces(ctx context.Context, t *testing.T, r *rig, id string, want []byte, piece int) {
	var got []byte
	after, exits := uint64(0), 0
	for exits == 0 && ctx.Err() == nil {
		n := 0
		err := r.events(ctx, id, &after, func(ev *nodev1.Event) bool {
			if ev.GetId() != after+1 {
				t.Errorf("event %d after %d", ev.GetId(), after)
				exits++
				return false
			}
			after = ev.GetId()
			got = append(got, ev.GetOutput().GetData()...)
			if ev.GetExited() != nil {
				exits++
			}
			n++
			return n < piece
		})
		if err != nil && ctx.Err() == nil {
			t.Errorf("stream: %v", err)
			return
		}
	}
	if !bytes.Equal(got, want) {
		t.Errorf("%d bytes of %d", len(got), len(want))
	}
}

func TestVMDeathInterrupts(t *testing.T) {
	r := running(t, nil)
	id := r.create(true, "sleep")
	got := make(chan []*nodev1.Event, 1)
	go func() {
		var evs []*nodev1.Event
		_ = r.events(context.Background(), id, nil, func(ev *nodev1.Event) bool { evs = append(evs, ev); return true })
		got <- evs
	}()
	_ = r.driver.current().die(errors.New("killed"))
	evs := <-got
	if n := len(evs); n != 2 || evs[0].GetStarted() == nil || evs[1].GetInterrupted().GetReason() != "sandbox_failed" {
		t.Fatalf("events: %v", evs)
	}
	st := r.await(shimv1.ShimState_SHIM_STATE_FAILED)
	if !strings.HasPrefix(st.GetReason(), "vmm_exited") {
		t.Fatalf("reason %q", st.GetReason())
	}
	if evs := r.all(id); len(evs) != 2 { // the journal can still be read
		t.Fatalf("after the death: %v", evs)
	}
	if _, err := r.box.CreateProcess(t.Context(), connect.NewRequest(&nodev1.CreateProcessRequest{})); connect.CodeOf(err) != connect.CodeFailedPrecondition {
		t.Fatalf("create after the death: %v", err)
	}
	r.shutdown("sandbox_deleted")
	a, err := archive.New(filepath.Join(r.dir, "journal"), "sandbox_failed")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = a.Close() }()
	p, err := a.GetProcess(t.Context(), connect.NewRequest(&nodev1.GetProcessRequest{ProcessId: id, WaitMs: 60000}))
	if err != nil || p.Msg.GetProcess().GetState() != nodev1.ProcessState_PROCESS_STATE_RUNNING || p.Msg.GetProcess().GetExit() != nil {
		t.Fatalf("archive: %v, %v", p, err)
	}
}

func TestShutdownInterrupts(t *testing.T) {
	r := running(t, nil)
	id := r.create(true, "sleep")
	got := make(chan *nodev1.Event, 8)
	go func() {
		defer close(got)
		_ = r.events(context.Background(), id, nil, func(ev *nodev1.Event) bool { got <- ev; return true })
	}()
	if ev := <-got; ev.GetStarted() == nil {
		t.Fatalf("first: %v", ev)
	}
	start := time.Now()
	r.shutdown("sandbox_deleted")
	if d := time.Since(start); d > 5*time.Second {
		t.Errorf("Shutdown took %v", d)
	}
	if ev := <-got; ev.GetInterrupted().GetReason() != "sandbox_deleted" {
		t.Fatalf("last: %v", ev)
	}
	if ev, more := <-got; more {
		t.Fatalf("after interrupted: %v", ev)
	}
	if _, err := os.Stat(r.spec.GetSocket()); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the socket is left: %v", err)
	}
}

// TestStoppedGuest: nothing but calls into the guest may wait for a guest that does not run.
func TestStoppedGuest(t *testing.T) {
	r := running(t, nil)
	id := r.create(true, "sleep")
	r.driver.current().running.Store(false)
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	if _, err := r.files.Stat(ctx, connect.NewRequest(&agentv1.StatRequest{Path: []byte("/")})); connect.CodeOf(err) != connect.CodeDeadlineExceeded {
		t.Fatalf("a call into the guest: %v", err)
	}
	start := time.Now()
	for range 20 {
		if _, err := r.shim.Status(t.Context(), connect.NewRequest(&shimv1.StatusRequest{})); err != nil {
			t.Fatal(err)
		}
		if _, err := r.box.ListProcesses(t.Context(), connect.NewRequest(&nodev1.ListProcessesRequest{})); err != nil {
			t.Fatal(err)
		}
	}
	r.await(shimv1.ShimState_SHIM_STATE_RUNNING)
	_ = r.events(t.Context(), id, nil, func(*nodev1.Event) bool { return false })
	r.shutdown("sandbox_deleted")
	if d := time.Since(start); d > 5*time.Second {
		t.Fatalf("took %v", d)
	}
}

func TestShutdownDuringBind(t *testing.T) {
	r := newRig(t, func(r *rig) { r.agent.hangResume = true }).start()
	r.await(shimv1.ShimState_SHIM_STATE_ARMED)
	bound := make(chan error, 1)
	go func() {
		_, err := r.shim.Bind(context.Background(), connect.NewRequest(r.bindRequest()))
		bound <- err
	}()
	r.await(shimv1.ShimState_SHIM_STATE_BINDING)
	if _, err := r.shim.Shutdown(t.Context(), connect.NewRequest(&shimv1.ShutdownRequest{Reason: "sandbox_deleted"})); err != nil {
		t.Fatal(err)
	}
	if err := <-bound; err == nil {
		t.Fatal("bound")
	}
	<-r.driver.current().done
}

func TestLostProcessFailsTheSandbox(t *testing.T) {
	r := running(t, func(r *rig) {
		r.agent.frame = func(f *agentv1.ProcessFrame) *agentv1.ProcessFrame {
			if f.GetSeq() > 1 { // a gap, whatever is asked for
				return &agentv1.ProcessFrame{Seq: f.GetSeq() + 1, Kind: f.GetKind()}
			}
			return f
		}
	})
	id := r.create(true, "print", "10")
	st := r.await(shimv1.ShimState_SHIM_STATE_FAILED)
	if !strings.HasPrefix(st.GetReason(), "agent_lost") {
		t.Fatalf("reason %q", st.GetReason())
	}
	evs := r.all(id)
	if last := evs[len(evs)-1]; last.GetInterrupted().GetReason() != "sandbox_failed" {
		t.Fatalf("last: %v", last)
	}
}

func TestSocketNeedsToken(t *testing.T) {
	r := newRig(t, nil).start()
	r.await(shimv1.ShimState_SHIM_STATE_ARMED)
	for _, token := range []string{"", "x", testToken + "x", captureToken} {
		c := shimv1connect.NewShimServiceClient(&http.Client{Transport: bearer{token, r.http}}, "http://shim")
		if _, err := c.Status(t.Context(), connect.NewRequest(&shimv1.StatusRequest{})); connect.CodeOf(err) != connect.CodeUnauthenticated {
			t.Errorf("token %q: %v", token, err)
		}
	}
	st, err := os.Stat(r.spec.GetSocket())
	if err != nil || st.Mode().Perm() != 0o600 {
		t.Fatalf("socket mode %v, %v", st.Mode(), err)
	}
}

func TestFilesRelay(t *testing.T) {
	r := running(t, nil)
	body := pattern(3<<20 + 17)
	write := func(path string, commit bool) error {
		s := r.files.Write(t.Context())
		_ = s.Send(&agentv1.WriteRequest{Kind: &agentv1.WriteRequest_Header{Header: &agentv1.WriteHeader{Path: []byte(path)}}})
		for b := body; len(b) > 0; b = b[min(len(b), fileChunk):] {
			if err := s.Send(&agentv1.WriteRequest{Kind: &agentv1.WriteRequest_Data{Data: b[:min(len(b), fileChunk)]}}); err != nil {
				break
			}
		}
		if commit {
			_ = s.Send(&agentv1.WriteRequest{Kind: &agentv1.WriteRequest_Commit{Commit: &agentv1.WriteCommit{}}})
		}
		_, err := s.CloseAndReceive()
		return err
	}
	if err := write("/a", true); err != nil {
		t.Fatal(err)
	}
	if err := write("/b", false); connect.CodeOf(err) != connect.CodeAborted {
		t.Fatalf("without commit: %v", err)
	}
	if err := write("/full", true); connect.CodeOf(err) != connect.CodeResourceExhausted {
		t.Fatalf("full disk: %v", err)
	}
	got, err := r.readFile("/a")
	if err != nil || !bytes.Equal(got, body) {
		t.Fatalf("read %d bytes: %v", len(got), err)
	}
	var ce *connect.Error
	if _, err := r.readFile("/nothing"); !errors.As(err, &ce) || fileError(ce).GetReason() != agentv1.FileErrorReason_FILE_ERROR_REASON_NOT_FOUND {
		t.Fatalf("missing file: %v", err)
	}
	if _, err := r.readFile("/huge-chunk"); connect.CodeOf(err) != connect.CodeUnavailable {
		t.Fatalf("a chunk out of bounds: %v", err)
	}
	st, err := r.files.Stat(t.Context(), connect.NewRequest(&agentv1.StatRequest{Path: []byte("/a")}))
	if err != nil || st.Msg.GetEntry().GetSize() != uint64(len(body)) {
		t.Fatalf("stat: %v, %v", st, err)
	}
}

func (r *rig) readFile(path string) ([]byte, error) {
	s, err := r.files.Read(r.t.Context(), connect.NewRequest(&agentv1.ReadRequest{Path: []byte(path)}))
	if err != nil {
		return nil, err
	}
	defer func() { _ = s.Close() }()
	var out []byte
	for s.Receive() {
		out = append(out, s.Msg().GetData()...)
	}
	return out, s.Err()
}

func TestOrphanEnds(t *testing.T) {
	r := newRig(t, nil)
	spec, err := loadSpec(r.dir)
	if err != nil {
		t.Fatal(err)
	}
	s := newServer(Config{Dir: r.dir, Driver: r.driver, OpenMemory: noMemory, Log: slog.New(slog.NewTextHandler(io.Discard, nil))}, spec)
	s.orphan = 50 * time.Millisecond
	ended := make(chan error, 1)
	go func() { ended <- s.run(context.Background()) }()
	select {
	case err := <-ended:
		if err == nil || !strings.Contains(err.Error(), "no node") {
			t.Fatalf("ended with %v", err)
		}
	case <-time.After(20 * time.Second):
		t.Fatal("still there")
	}
	<-r.driver.current().done
}

func TestCapture(t *testing.T) {
	dir := t.TempDir()
	r := newRig(t, func(r *rig) {
		r.spec.Mode, r.spec.Kernel, r.spec.Initrd, r.spec.CaptureDir = shimv1.LaunchSpec_MODE_CAPTURE, "/k", "/i", dir
		r.spec.WarmUp = []string{"true", "ls"}
	}).start()
	<-r.done
	if r.err != nil {
		t.Fatal(r.err)
	}
	if !r.agent.frozen || r.agent.runs != 2 {
		t.Fatalf("frozen %v, %d warm-up commands", r.agent.frozen, r.agent.runs)
	}
	for name, want := range map[string]string{"memory": "ram", "state": "state"} {
		b, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil || string(b) != want {
			t.Errorf("%s: %q, %v", name, b, err)
		}
		if st, err := os.Stat(filepath.Join(dir, name)); err != nil || st.Mode().Perm() != 0o444 {
			t.Errorf("%s: %v", name, st.Mode())
		}
	}
	b, err := os.ReadFile(filepath.Join(dir, "agent.json"))
	if err != nil || !strings.Contains(string(b), `"agent_version"`) || !strings.Contains(string(b), `"clocksource"`) {
		t.Errorf("agent.json: %s, %v", b, err)
	}
	<-r.driver.current().done
}
