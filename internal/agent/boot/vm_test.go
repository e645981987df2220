package boot_test

import (
	"context"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/space-sandbox/space/internal/gen/space/agent/v1"
	"github.com/space-sandbox/space/internal/gen/space/agent/v1/agentv1connect"
	"github.com/space-sandbox/space/internal/guest"
	"github.com/space-sandbox/space/internal/image"
	"github.com/space-sandbox/space/internal/link"
	"github.com/space-sandbox/space/internal/vmm"
	"github.com/space-sandbox/space/internal/vmm/confine"
	"github.com/space-sandbox/space/internal/vmm/qemu"
	"google.golang.org/protobuf/types/known/timestamppb"
)

const (
	bootToken = "00112233445566778899aabbccddeeff"
	nextToken = "second"
)

func TestMain(m *testing.M) {
	confine.Main()
	os.Exit(m.Run())
}

// machine is a guest that runs this tree's agent on one small layer.
type machine struct {
	url    string
	client *http.Client
	log    string
}

func command(t *testing.T, name string, args ...string) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), name, args...)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%s: %v\n%s", name, err, out)
	}
}

func disks(t *testing.T, dir, agent string) []vmm.Disk {
	t.Helper()
	root := filepath.Join(dir, "root")
	files := map[string]string{"etc/passwd": "root:x:0:0::/:/bin/sh\nuser:x:1000:1000::/home/user:/bin/sh\n",
		"etc/group": "root:x:0:\nuser:x:1000:\n", "home/user/note": "hello\n"}
	for name, text := range files {
		if err := os.MkdirAll(filepath.Dir(filepath.Join(root, name)), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(root, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	command(t, "install", "-D", agent, filepath.Join(root, "bin/agent"))
	layer, raw, top := filepath.Join(dir, "layer0"), filepath.Join(dir, "writable.raw"), filepath.Join(dir, "writable.qcow2")
	command(t, "mke2fs", "-q", "-t", "ext4", "-d", root, layer, "64m")
	command(t, "mke2fs", "-q", "-t", "ext4", "-m", "0", raw, "64m")
	command(t, "qemu-img", "create", "-q", "-f", "qcow2", "-b", raw, "-F", "raw", top)
	return []vmm.Disk{{Serial: "layer0", Path: layer, ReadOnly: true},
		{Serial: "writable", Path: top, Backing: []string{raw}}}
}

func start(t *testing.T) *machine {
	t.Helper()
	dir := t.TempDir()
	agent := filepath.Join(dir, "agent")
	command(t, "go", "build", "-trimpath", "-ldflags=-s -w", "-o", agent, "github.com/space-sandbox/space/cmd/space-agent")
	binary, err := os.ReadFile(agent)
	if err != nil {
		t.Fatal(err)
	}
	cacheDir, err := image.DefaultDir()
	if err != nil {
		t.Fatal(err)
	}
	cache, err := image.Open(cacheDir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := cache.Close(); err != nil {
			t.Error(err)
		}
	})
	g, err := guest.Build(t.Context(), cache, binary, nil)
	if err != nil {
		t.Fatal(err)
	}
	qemuBinary, err := exec.LookPath("qemu-system-x86_64")
	if err != nil {
		t.Fatal(err)
	}
	memory, err := os.OpenFile(filepath.Join(dir, "memory"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { memory.Close() })
	vmDir := filepath.Join(dir, "vm")
	if err := os.Mkdir(vmDir, 0o700); err != nil {
		t.Fatal(err)
	}
	vm, err := qemu.New().Boot(t.Context(), vmm.Config{VCPU: 2, MemoryMiB: 512, Disks: disks(t, dir, agent),
		Acceleration: vmm.TCG, Binary: qemuBinary, Dir: vmDir},
		vmm.BootSource{Kernel: g.Kernel, Initrd: g.Initrd, Cmdline: "space.token=" + bootToken, MemoryFile: memory})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := vm.Close(); err != nil {
			t.Error(err)
		}
	})
	control, err := link.NewControl(vm.ControlLink())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(control.Close)
	m := &machine{url: "http://" + vmm.ControlGuest + ":1024", log: vmDir,
		client: &http.Client{Transport: &http.Transport{DialContext: control.DialContext, DisableCompression: true}}}
	t.Cleanup(m.client.CloseIdleConnections)
	t.Cleanup(func() { m.dump(t) })
	return m
}

// dump shows the console of a test that failed.
func (m *machine) dump(t *testing.T) {
	if !t.Failed() {
		return
	}
	_ = filepath.WalkDir(m.log, func(path string, d os.DirEntry, err error) error {
		if err == nil && d.Type().IsRegular() {
			data, _ := os.ReadFile(path)
			t.Logf("%s:\n%s", d.Name(), data)
		}
		return nil
	})
}

func bearer[T any](token string, msg *T) *connect.Request[T] {
	r := connect.NewRequest(msg)
	r.Header().Set("Authorization", "Bearer "+token)
	return r
}

func (m *machine) waitReady(t *testing.T) *agentv1.PingResponse {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 90*time.Second)
	defer cancel()
	c := agentv1connect.NewAgentServiceClient(m.client, m.url)
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for {
		try, stop := context.WithTimeout(ctx, 5*time.Second)
		r, err := c.Ping(try, bearer(bootToken, &agentv1.PingRequest{}))
		stop()
		if err == nil {
			return r.Msg
		}
		select {
		case <-ctx.Done():
			t.Fatalf("not ready: %v", err)
		case <-tick.C:
		}
	}
}

// TestBoot boots a machine and does with it what a shim does.
func TestBoot(t *testing.T) {
	m := start(t)
	t.Logf("ping: %v", m.waitReady(t))
	console, err := os.ReadFile(filepath.Join(m.log, "console.log"))
	if err != nil || !strings.Contains(string(console), "space-agent: ready") {
		t.Errorf("the console does not say that it is ready: %v", err)
	}
	ctx := t.Context()
	agent := agentv1connect.NewAgentServiceClient(m.client, m.url)
	if _, err := agent.Ping(ctx, bearer("wrong", &agentv1.PingRequest{})); connect.CodeOf(err) != connect.CodeUnauthenticated {
		t.Errorf("wrong token: %v", err)
	}
	resumed, err := agent.Resume(ctx, bearer(bootToken, &agentv1.ResumeRequest{Generation: 1, WallClock: timestamppb.Now(),
		Entropy: make([]byte, 64), Hostname: "box", ControlToken: nextToken, Identity: "i1"}))
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("resume: %v", resumed.Msg)
	if _, err := agent.Ping(ctx, bearer(bootToken, &agentv1.PingRequest{})); connect.CodeOf(err) != connect.CodeUnauthenticated {
		t.Errorf("old token: %v", err)
	}
	m.checkProcess(ctx, t)
	m.checkFiles(ctx, t)
	stats, err := agent.Stats(ctx, bearer(nextToken, &agentv1.StatsRequest{}))
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("stats: %v", stats.Msg)
	if rss := stats.Msg.GetAgentRssBytes(); rss > 20<<20 {
		t.Errorf("the agent uses %d bytes", rss)
	}
	if _, err := agent.Freeze(ctx, bearer(nextToken, &agentv1.FreezeRequest{})); err != nil {
		t.Error(err)
	}
}

// checkProcess runs the agent as a user: it says that it is not PID 1.
func (m *machine) checkProcess(ctx context.Context, t *testing.T) {
	t.Helper()
	c := agentv1connect.NewProcessServiceClient(m.client, m.url)
	began := time.Now()
	s, err := c.Run(ctx, bearer(nextToken, &agentv1.RunRequest{ProcessId: "p1",
		Spec: &agentv1.ProcessSpec{Argv: [][]byte{[]byte("agent")}}}))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = s.Close() }()
	text, code := "", int32(-1)
	for s.Receive() {
		text += string(s.Msg().GetOutput().GetData())
		if e := s.Msg().GetExited(); e != nil {
			code = e.GetCode()
		}
	}
	if s.Err() != nil || code != 2 || !strings.Contains(text, "PID 1") {
		t.Errorf("run: %v, code %d, %q", s.Err(), code, text)
	}
	t.Logf("round trip: %v", time.Since(began))
}

func (m *machine) checkFiles(ctx context.Context, t *testing.T) {
	t.Helper()
	c := agentv1connect.NewFileServiceClient(m.client, m.url)
	e, err := c.Stat(ctx, bearer(nextToken, &agentv1.StatRequest{Path: []byte("note")}))
	if err != nil || string(e.Msg.GetEntry().GetPath()) != "/home/user/note" {
		t.Errorf("stat: %v %v", e, err)
	}
	// Neither the workload's root nor anyone else sees the control device.
	net, err := c.ListDir(ctx, bearer(nextToken, &agentv1.ListDirRequest{Path: []byte("/sys/class/net"), User: "root", Depth: 1, Limit: 100}))
	if err != nil {
		t.Fatal(err)
	}
	if n := len(net.Msg.GetEntries()); n != 2 {
		t.Errorf("%d network devices: %v", n, net.Msg)
	}
}
