package node

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"connectrpc.com/connect"

	nodev1 "github.com/space-sandbox/space/internal/gen/space/node/v1"
	"github.com/space-sandbox/space/internal/node/nodeclient"
	"github.com/space-sandbox/space/internal/node/shimtest"
	"github.com/space-sandbox/space/internal/sandbox"
	"github.com/space-sandbox/space/internal/vmm"
)

func TestMain(m *testing.M) {
	shimtest.Main()
	os.Exit(m.Run())
}

var (
	testDigest = "sha256:" + strings.Repeat("ab", 32)
	testShape  = &nodev1.Resources{Vcpu: 1, MemoryMib: 128, DiskMib: 256}
)

// fakes stand in for what makes images and proves the machine; shims and their processes are real.
type fakes struct {
	baseCalls, probes, captures atomic.Int32
	baseErr                     atomic.Pointer[error]
	baseGate                    chan struct{} // if set, Base waits for it
	warmUp                      []string
}

func (f *fakes) Base(ctx context.Context, progress ProgressFunc) (*Template, error) {
	f.baseCalls.Add(1)
	progress("packages", 1, 2)
	if f.baseGate != nil {
		select {
		case <-f.baseGate:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	if err := f.baseErr.Load(); err != nil && *err != nil {
		return nil, *err
	}
	return &Template{Name: "base", Tag: "latest", Digest: testDigest, Layers: []string{"/layer"}, SizeBytes: 7,
		CreatedAt: time.Now(), DefaultUser: "user", Defaults: testShape, WarmUp: f.warmUp}, nil
}

func (f *fakes) Guest(context.Context, ProgressFunc) (*Guest, error) {
	return &Guest{Kernel: "/kernel", Initrd: "/initrd", Digest: strings.Repeat("cd", 32), Version: "6.1"}, nil
}

type fakeDisks struct{ *fakes }

func (f fakeDisks) Base(_ context.Context, path string, _ uint32) error {
	f.captures.Add(1)
	return os.WriteFile(path, []byte("base"), 0o600)
}

func (f fakeDisks) Top(_ context.Context, path string, backing []string, _ uint32) error {
	for _, b := range backing {
		if _, err := os.Stat(b); err != nil {
			return err
		}
	}
	return os.WriteFile(path, []byte("top"), 0o600)
}

type fakeMachine struct{ *fakes }

func (f fakeMachine) Name() string { return "fake" }
func (f fakeMachine) Probe(context.Context, string, string) (vmm.Capabilities, error) {
	f.probes.Add(1)
	return vmm.Capabilities{VMM: "fake", Version: "0", Binary: "/bin/sleep", Acceleration: vmm.TCG, OverheadMiB: 50, ReadOnlyMem: true}, nil
}
func (f fakeMachine) OpenMemory(_ context.Context, _ vmm.Capabilities, path string) (*os.File, error) {
	return os.Open(path)
}

// place is a data folder that several nodes of a test use one after the other.
type place struct {
	t         *testing.T
	data, run string
	fakes     *fakes
}

func newPlace(t *testing.T) *place {
	t.Helper()
	run, err := os.MkdirTemp("/tmp", "sn")
	if err != nil {
		t.Fatal(err)
	}
	p := &place{t: t, data: t.TempDir(), run: run, fakes: &fakes{}}
	t.Cleanup(func() {
		if err := os.RemoveAll(run); err != nil {
			t.Error(err)
		}
	})
	return p
}

func (p *place) config() Config {
	exe, err := os.Executable()
	if err != nil {
		p.t.Fatal(err)
	}
	cfg := Config{Name: "n", DataDir: p.data, RuntimeDir: p.run, ShimPath: exe, MemoryLimitMiB: 4096, PoolSize: -1, DiskReserveMiB: 1,
		DeleteTimeout: 15 * time.Second}
	if testing.Verbose() {
		cfg.Log = slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelDebug}))
	}
	return cfg
}

func (p *place) deps() Deps {
	return Deps{Images: p.fakes, Guests: p.fakes, Disks: fakeDisks{p.fakes}, Machine: fakeMachine{p.fakes}}
}

// testNode is a started node, reached as the control plane reaches it.
type testNode struct {
	*Node
	t      *testing.T
	client *nodeclient.Client
	mem    *nodeclient.Memory
}

func (p *place) start(change ...func(*Config)) *testNode {
	p.t.Helper()
	cfg := p.config()
	for _, c := range change {
		c(&cfg)
	}
	n, err := New(cfg, p.deps())
	if err != nil {
		p.t.Fatal(err)
	}
	if err := n.Start(p.t.Context()); err != nil {
		p.t.Fatal(err)
	}
	tn := &testNode{Node: n, t: p.t, mem: nodeclient.InProcess(n.Handler())}
	tn.client = tn.mem.Client()
	p.t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
		defer cancel()
		if err := n.StopAll(ctx); err != nil && !errors.Is(err, errClosed) {
			p.t.Errorf("StopAll: %v", err)
		}
		tn.stop()
	})
	return tn
}

// stop closes the node as a service restart does.
func (n *testNode) stop() {
	n.t.Helper()
	if err := n.Close(); err != nil {
		n.t.Errorf("close: %v", err)
	}
	if err := n.mem.Close(); err != nil {
		n.t.Errorf("close: %v", err)
	}
}

// eventually waits for a condition with a deadline.
func eventually(t *testing.T, what string, cond func() bool) {
	t.Helper()
	deadline := time.Now().Add(20 * time.Second)
	for !cond() {
		if time.Now().After(deadline) {
			t.Fatalf("not in time: %s", what)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

func (n *testNode) waitReady() {
	n.t.Helper()
	eventually(n.t, "ready", func() bool { return n.notReady() == "" })
}

func request(id sandbox.ID, generation uint64, env ...string) *nodev1.CreateSandboxRequest {
	req := &nodev1.CreateSandboxRequest{SandboxId: string(id), Generation: generation, OperationId: "op",
		TemplateDigest: testDigest, Resources: testShape, Env: map[string]string{}}
	for i := 0; i+1 < len(env); i += 2 {
		req.Env[env[i]] = env[i+1]
	}
	return req
}

func (n *testNode) create(req *nodev1.CreateSandboxRequest) (*nodev1.SandboxStatus, error) {
	ctx, cancel := context.WithTimeout(n.t.Context(), 30*time.Second)
	defer cancel()
	stream, err := n.client.CreateSandbox(ctx, connect.NewRequest(req))
	if err != nil {
		return nil, err
	}
	defer func() { _ = stream.Close() }()
	var last *nodev1.SandboxStatus
	for stream.Receive() {
		if st := stream.Msg().GetStatus(); st != nil {
			last = st
		}
	}
	if err := stream.Err(); err != nil {
		return nil, err
	}
	if last == nil {
		return nil, errors.New("stream without a status")
	}
	return last, nil
}

func (n *testNode) mustCreate() sandbox.ID {
	n.t.Helper()
	id := sandbox.NewID()
	st, err := n.create(request(id, 1))
	if err != nil {
		n.t.Fatal(err)
	}
	if st.State != nodev1.SandboxState_SANDBOX_STATE_RUNNING || st.SandboxId != string(id) {
		n.t.Fatalf("created: %v", st)
	}
	return id
}

func (n *testNode) deleteCall(id sandbox.ID, generation uint64) error {
	ctx, cancel := context.WithTimeout(n.t.Context(), 30*time.Second)
	defer cancel()
	_, err := n.client.DeleteSandbox(ctx, connect.NewRequest(&nodev1.DeleteSandboxRequest{SandboxId: string(id), Generation: generation}))
	return err
}

func (n *testNode) status(id sandbox.ID) *nodev1.SandboxStatus {
	for _, st := range n.statuses() {
		if st.SandboxId == string(id) {
			return st
		}
	}
	return nil
}

func (n *testNode) waitState(id sandbox.ID, want nodev1.SandboxState) *nodev1.SandboxStatus {
	n.t.Helper()
	eventually(n.t, fmt.Sprintf("%s is %v", id, want), func() bool {
		st := n.status(id)
		return st != nil && st.State == want
	})
	return n.status(id)
}

// pids returns the processes of a sandbox.
func (n *testNode) pids(id sandbox.ID) (shim, vmm int) {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.sandboxes[string(id)].shim.PIDs()
}

func wantCode(t *testing.T, err error, want connect.Code) {
	t.Helper()
	if connect.CodeOf(err) != want || err == nil {
		t.Fatalf("error %v, want code %v", err, want)
	}
}

// noRuntimeFolder checks that a node that ended with nothing running took its folder of sockets along.
func (p *place) noRuntimeFolder() {
	p.t.Helper()
	if left, _ := filepath.Glob(filepath.Join(p.run, "*")); len(left) != 0 {
		p.t.Errorf("left in the runtime folder: %v", left)
	}
}

// nothingLeft checks that a place has no shim folder, sandbox folder, socket or process.
func (p *place) nothingLeft() {
	p.t.Helper()
	for _, dir := range []string{"shims", "sandboxes"} {
		entries, err := os.ReadDir(filepath.Join(p.data, "node", dir))
		if err != nil || len(entries) != 0 {
			p.t.Errorf("%s holds %v, %v", dir, entries, err)
		}
	}
	sockets, _ := filepath.Glob(filepath.Join(p.run, "*", "*"))
	if len(sockets) != 0 {
		p.t.Errorf("sockets left: %v", sockets)
	}
	running, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, path := range running {
		data, _ := os.ReadFile(path)
		if strings.Contains(string(data), p.data) {
			p.t.Errorf("process left: %s %q", path, data)
		}
	}
}

func dead(pid int) bool {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	return err != nil || strings.Contains(string(data), ") Z ")
}
