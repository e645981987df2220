package local

import (
	"bytes"
	"context"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

	agentv1 "github.com/space-sandbox/space/internal/gen/space/agent/v1"
	nodev1 "github.com/space-sandbox/space/internal/gen/space/node/v1"
	"github.com/space-sandbox/space/internal/image"
	"github.com/space-sandbox/space/internal/node"
	"github.com/space-sandbox/space/internal/node/nodeclient"
	"github.com/space-sandbox/space/internal/sandbox"
	"github.com/space-sandbox/space/internal/vmm/confine"
	"github.com/space-sandbox/space/internal/vmm/qemu"
)

func TestMain(m *testing.M) {
	confine.Main() // the driver's probe starts this binary again
	os.Exit(m.Run())
}

// build compiles one of our programs as it is shipped: static.
func build(t *testing.T, dir, name string) string {
	t.Helper()
	path := filepath.Join(dir, name)
	cmd := exec.CommandContext(t.Context(), "go", "build", "-trimpath", "-ldflags=-s -w", "-o", path, "github.com/space-sandbox/space/cmd/"+name)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build %s: %v\n%s", name, err, out)
	}
	return path
}

func cacheDir(t *testing.T) string {
	t.Helper()
	if dir := os.Getenv("SPACE_TEST_CACHE"); dir != "" {
		return dir
	}
	dir, err := image.DefaultDir()
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

// real is a node with real microVMs.
type real struct {
	t      *testing.T
	cfg    node.Config
	deps   node.Deps
	n      *node.Node
	mem    *nodeclient.Memory
	client *nodeclient.Client
	digest string
	shape  *nodev1.Resources
}

func newReal(t *testing.T) *real {
	t.Helper()
	bin, run := t.TempDir(), ""
	run, err := os.MkdirTemp("/tmp", "sr")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(run) })
	cache, err := image.Open(cacheDir(t))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cache.Close() })
	agent := build(t, bin, "space-agent")
	r := &real{t: t}
	r.cfg = node.Config{DataDir: t.TempDir(), RuntimeDir: run, ShimPath: build(t, bin, "space-shim"), PoolSize: 1,
		Log: slog.New(slog.NewTextHandler(t.Output(), &slog.HandlerOptions{Level: slog.LevelInfo}))}
	r.deps = Deps(cache, qemu.New(), func() ([]byte, error) { return os.ReadFile(agent) })
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		if err := r.n.StopAll(ctx); err != nil {
			t.Errorf("StopAll: %v", err)
		}
		r.stop()
	})
	r.start()
	r.waitReady()
	return r
}

func (r *real) start() {
	r.t.Helper()
	n, err := node.New(r.cfg, r.deps)
	if err != nil {
		r.t.Fatal(err)
	}
	r.n = n
	if err := n.Start(r.t.Context()); err != nil {
		r.t.Fatal(err)
	}
	r.mem = nodeclient.InProcess(n.Handler())
	r.client = r.mem.Client()
}

func (r *real) stop() {
	r.t.Helper()
	if err := r.n.Close(); err != nil {
		r.t.Errorf("close: %v", err)
	}
	_ = r.mem.Close()
}

func (r *real) waitReady() {
	r.t.Helper()
	begin := time.Now()
	for time.Since(begin) < 5*time.Minute {
		resp, err := r.client.ListTemplates(r.t.Context(), connect.NewRequest(&nodev1.ListTemplatesRequest{}))
		if err != nil {
			r.t.Fatal(err)
		}
		tmpl := resp.Msg.Templates[0]
		switch tmpl.State {
		case nodev1.TemplateState_TEMPLATE_STATE_READY:
			r.digest, r.shape = tmpl.Digest, tmpl.Defaults
			r.t.Logf("ready after %v", time.Since(begin))
			return
		case nodev1.TemplateState_TEMPLATE_STATE_FAILED:
			r.t.Fatalf("template: %s", tmpl.Reason)
		}
		time.Sleep(20 * time.Millisecond)
	}
	r.t.Fatal("not ready in time")
}

func (r *real) create() sandbox.ID {
	r.t.Helper()
	id := sandbox.NewID()
	ctx, cancel := context.WithTimeout(r.t.Context(), 2*time.Minute)
	defer cancel()
	begin := time.Now()
	stream, err := r.client.CreateSandbox(ctx, connect.NewRequest(&nodev1.CreateSandboxRequest{
		SandboxId: string(id), Generation: 1, OperationId: "op", TemplateDigest: r.digest, Resources: r.shape,
		Env: map[string]string{"FROM_CREATE": "yes"},
	}))
	if err != nil {
		r.t.Fatal(err)
	}
	defer func() { _ = stream.Close() }()
	var st *nodev1.SandboxStatus
	for stream.Receive() {
		st = stream.Msg().GetStatus()
	}
	if err := stream.Err(); err != nil {
		r.t.Fatal(err)
	}
	if st.GetState() != nodev1.SandboxState_SANDBOX_STATE_RUNNING {
		r.t.Fatalf("status %v", st)
	}
	r.t.Logf("create took %v: %v", time.Since(begin), st.Timings)
	return id
}

// run runs a command and returns what it wrote, and its exit code.
func (r *real) run(id sandbox.ID, argv ...string) (string, int32) {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(r.t.Context(), time.Minute)
	defer cancel()
	processes, _ := r.client.Sandbox(id)
	spec := &agentv1.ProcessSpec{}
	for _, a := range argv {
		spec.Argv = append(spec.Argv, []byte(a))
	}
	pid := string(sandbox.NewProcessID())
	begin := time.Now()
	if _, err := processes.CreateProcess(ctx, connect.NewRequest(&nodev1.CreateProcessRequest{ProcessId: pid, Spec: spec, StartNow: true})); err != nil {
		r.t.Fatal(err)
	}
	stream, err := processes.StreamEvents(ctx, connect.NewRequest(&nodev1.StreamEventsRequest{ProcessId: pid, Start: true}))
	if err != nil {
		r.t.Fatal(err)
	}
	defer func() { _ = stream.Close() }()
	var out bytes.Buffer
	for stream.Receive() {
		out.Write(stream.Msg().GetOutput().GetData())
		if exit := stream.Msg().GetExited(); exit != nil {
			r.t.Logf("%q took %v", argv[0], time.Since(begin))
			return out.String(), exit.Exit.GetCode()
		}
	}
	r.t.Errorf("stream ended without exit: %v; so far %q", stream.Err(), out.String())
	list, err := r.client.ListSandboxes(ctx, connect.NewRequest(&nodev1.ListSandboxesRequest{}))
	r.t.Fatalf("sandboxes: %v, %v", list, err)
	return "", 0
}

func (r *real) delete(id sandbox.ID) {
	r.t.Helper()
	begin := time.Now()
	if _, err := r.client.DeleteSandbox(r.t.Context(), connect.NewRequest(&nodev1.DeleteSandboxRequest{SandboxId: string(id), Generation: 1})); err != nil {
		r.t.Fatal(err)
	}
	r.t.Logf("delete took %v", time.Since(begin))
}

// TestMicroVM takes sandboxes through their life on a real microVM, over a restart of the node.
func TestMicroVM(t *testing.T) {
	r := newReal(t)
	id := r.create()
	if out, code := r.run(id, "/bin/sh", "-c", "echo hello $FROM_CREATE; cat /proc/1/comm; exit 3"); code != 3 || !strings.HasPrefix(out, "hello yes\n") {
		t.Errorf("exit %d, output %q", code, out)
	}
	if out, code := r.run(id, "/bin/true"); code != 0 || out != "" {
		t.Errorf("true: %d, %q", code, out)
	}
	for i := range 40 {
		if out, code := r.run(id, "/bin/echo", strconv.Itoa(i)); code != 0 || out != strconv.Itoa(i)+"\n" {
			t.Errorf("echo %d: exit %d, output %q", i, code, out)
		}
	}
	r.files(id)
	for _, u := range r.n.Usages() {
		t.Logf("PSS of shim %d KiB, of VMM %d KiB", u.ShimPSS>>10, u.VMMPSS>>10)
	}

	r.stop()
	r.start()
	if out, code := r.run(id, "/bin/cat", "/tmp/x"); code != 0 || out != "content" {
		t.Errorf("after a restart of the node: %d, %q", code, out)
	}
	r.waitReady()

	r.waitArmed()
	other := r.create()
	if out, _ := r.run(other, "/bin/cat", "/tmp/x"); strings.Contains(out, "content") {
		t.Error("a file of another sandbox is seen")
	}
	for _, u := range r.n.Usages() {
		if u.SandboxID == string(other) {
			if err := unix.Kill(u.VMMPID, unix.SIGSTOP); err != nil {
				t.Fatal(err)
			}
			r.ownUser(u.VMMPID)
		}
	}
	r.delete(other)
	r.delete(id)
	for _, dir := range []string{"shims", "sandboxes"} {
		entries, err := os.ReadDir(filepath.Join(r.cfg.DataDir, "node", dir))
		for _, e := range entries {
			if dir == "sandboxes" || !r.armed(e.Name()) {
				t.Errorf("%s holds %s, %v", dir, e.Name(), err)
			}
		}
	}
}

// ownUser checks that a VMM does not run as root, nor as whoever runs the node.
func (r *real) ownUser(pid int) {
	r.t.Helper()
	if os.Getuid() != 0 {
		return
	}
	info, err := os.Stat(filepath.Join("/proc", strconv.Itoa(pid)))
	if err != nil {
		r.t.Fatal(err)
	}
	if uid := info.Sys().(*syscall.Stat_t).Uid; uid < 200000 {
		r.t.Errorf("the VMM runs as uid %d", uid)
	}
}

func (r *real) waitArmed() {
	r.t.Helper()
	for begin := time.Now(); time.Since(begin) < time.Minute; time.Sleep(20 * time.Millisecond) {
		resp, err := r.client.GetNode(r.t.Context(), connect.NewRequest(&nodev1.GetNodeRequest{}))
		if err != nil {
			r.t.Fatal(err)
		}
		if resp.Msg.Armed > 0 {
			r.t.Logf("node: %v", resp.Msg)
			return
		}
	}
	r.t.Fatal("no armed VM in time")
}

// armed reports whether a shim folder belongs to a VM of the pool: it names no sandbox.
func (r *real) armed(shim string) bool {
	matches, _ := filepath.Glob(filepath.Join(r.cfg.DataDir, "node", "sandboxes", "*"))
	return shim != "" && len(matches) == 0
}

func (r *real) files(id sandbox.ID) {
	r.t.Helper()
	_, files := r.client.Sandbox(id)
	stream := files.Write(r.t.Context())
	for _, msg := range []*agentv1.WriteRequest{
		{Kind: &agentv1.WriteRequest_Header{Header: &agentv1.WriteHeader{Path: []byte("/tmp/x")}}},
		{Kind: &agentv1.WriteRequest_Data{Data: []byte("content")}},
		{Kind: &agentv1.WriteRequest_Commit{Commit: &agentv1.WriteCommit{}}},
	} {
		if err := stream.Send(msg); err != nil {
			r.t.Fatal(err)
		}
	}
	if resp, err := stream.CloseAndReceive(); err != nil || resp.Msg.Entry.GetSize() != 7 {
		r.t.Fatalf("write: %v, %v", resp, err)
	}
}
