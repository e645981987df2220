package shim

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/space-sandbox/space/internal/disk"
	agentv1 "github.com/space-sandbox/space/internal/gen/space/agent/v1"
	nodev1 "github.com/space-sandbox/space/internal/gen/space/node/v1"
	shimv1 "github.com/space-sandbox/space/internal/gen/space/shim/v1"
	guestimage "github.com/space-sandbox/space/internal/guest"
	"github.com/space-sandbox/space/internal/image"
	"github.com/space-sandbox/space/internal/vmm"
	"github.com/space-sandbox/space/internal/vmm/qemu"
	"google.golang.org/protobuf/encoding/protojson"
)

const (
	realQEMU   = "/usr/bin/qemu-system-x86_64"
	realDisk   = 256 // MiB
	realMemory = 256 // MiB
)

// real is what the tests with a real VM share: the programs, a guest and a captured template.
type real struct {
	t         *testing.T
	dir, shim string
	guest     *guestimage.Guest
	layer     string
	memory    *os.File
}

func compile(t *testing.T, out, pkg string) {
	t.Helper()
	cmd := exec.Command("go", "build", "-buildvcs=false", "-trimpath", "-ldflags", "-s -w", "-o", out, pkg)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if text, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build %s: %v\n%s", pkg, err, text)
	}
}

// newReal builds everything and captures a template with the real shim.
func newReal(t *testing.T) *real {
	t.Helper()
	dir, err := os.MkdirTemp("", "shim") // short: it holds sockets
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	r := &real{t: t, dir: dir, shim: filepath.Join(dir, "space-shim")}
	compile(t, r.shim, "../../cmd/space-shim")
	agentPath := filepath.Join(dir, "space-agent")
	compile(t, agentPath, "../../cmd/space-agent")
	agent, err := os.ReadFile(agentPath)
	if err != nil {
		t.Fatal(err)
	}
	cacheDir := os.Getenv("SPACE_TEST_CACHE")
	if cacheDir == "" {
		if cacheDir, err = image.DefaultDir(); err != nil {
			t.Fatal(err)
		}
	}
	cache, err := image.Open(cacheDir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cache.Close() })
	if r.guest, err = guestimage.Build(t.Context(), cache, agent, nil); err != nil {
		t.Fatal(err)
	}
	base, err := cache.Base(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	r.layer = base.Layers[0]
	r.capture()
	return r
}

func (r *real) spec(mode shimv1.LaunchSpec_Mode, name string) (*shimv1.LaunchSpec, string) {
	dir := filepath.Join(r.dir, name)
	for _, d := range []string{dir, filepath.Join(dir, "journal")} {
		if err := os.Mkdir(d, 0o700); err != nil {
			r.t.Fatal(err)
		}
	}
	return &shimv1.LaunchSpec{
		Mode: mode, ShimId: name, Token: testToken, ControlToken: captureToken, Driver: "qemu", Acceleration: "tcg",
		Resources: &nodev1.Resources{Vcpu: 1, MemoryMib: realMemory, DiskMib: realDisk}, QemuBinary: realQEMU,
		Layers: []string{r.layer}, WritableTop: filepath.Join(dir, "top.qcow2"), Socket: filepath.Join(dir, "s"),
	}, dir
}

// launch starts the shim program as a node would: empty environment, own session, memory as descriptor 3.
func (r *real) launch(spec *shimv1.LaunchSpec, dir string, memory *os.File) *exec.Cmd {
	r.t.Helper()
	data, err := protojson.Marshal(spec)
	if err != nil {
		r.t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, specFile), data, 0o600); err != nil {
		r.t.Fatal(err)
	}
	cmd := exec.Command(r.shim, dir)
	cmd.Env = []string{}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if memory != nil {
		cmd.ExtraFiles = []*os.File{memory}
	}
	log, err := os.Create(filepath.Join(dir, "log"))
	if err != nil {
		r.t.Fatal(err)
	}
	defer log.Close()
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Start(); err != nil {
		r.t.Fatal(err)
	}
	return cmd
}

func (r *real) log(dir string) string {
	b, _ := os.ReadFile(filepath.Join(dir, "log"))
	return string(b)
}

func (r *real) capture() {
	r.t.Helper()
	spec, dir := r.spec(shimv1.LaunchSpec_MODE_CAPTURE, "capture")
	out := filepath.Join(dir, "out")
	base := filepath.Join(r.dir, "base.raw")
	for _, err := range []error{
		os.Mkdir(out, 0o700), (disk.Images{}).Base(r.t.Context(), base, realDisk),
		(disk.Images{}).Top(r.t.Context(), spec.WritableTop, []string{base}, realDisk),
	} {
		if err != nil {
			r.t.Fatal(err)
		}
	}
	spec.WritableBacking, spec.CaptureDir = []string{base}, out
	spec.Kernel, spec.Initrd, spec.WarmUp = r.guest.Kernel, r.guest.Initrd, []string{"true", "sh -c 'ls / >/dev/null'"}
	start := time.Now()
	if err := r.launch(spec, dir, nil).Wait(); err != nil {
		r.t.Fatalf("capture: %v\n%s", err, r.log(dir))
	}
	r.t.Logf("captured in %v", time.Since(start))
	var err error
	r.memory, err = qemu.New().OpenMemory(r.t.Context(), vmm.Capabilities{Binary: realQEMU}, filepath.Join(out, "memory"))
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { r.memory.Close() })
}

// restore starts a sandbox from the template. Its rig has no driver: the shim is a process of its own.
func (r *real) restore(name string) (*rig, *exec.Cmd) {
	r.t.Helper()
	spec, dir := r.spec(shimv1.LaunchSpec_MODE_RESTORE, name)
	captured := filepath.Join(r.dir, "capture", "top.qcow2")
	base := filepath.Join(r.dir, "base.raw")
	if err := (disk.Images{}).Top(r.t.Context(), spec.WritableTop, []string{captured, base}, realDisk); err != nil {
		r.t.Fatal(err)
	}
	spec.WritableBacking = []string{captured, base}
	spec.DeviceState = filepath.Join(r.dir, "capture", "out", "state")
	cmd := r.launch(spec, dir, r.memory)
	g := &rig{t: r.t, dir: dir, spec: spec, done: make(chan struct{})}
	g.connect()
	go func() {
		g.err = cmd.Wait()
		close(g.done)
	}()
	r.t.Cleanup(func() {
		g.http.CloseIdleConnections()
		_ = cmd.Process.Kill()
		<-g.done
		if r.t.Failed() {
			r.t.Logf("%s:\n%s", name, r.log(dir))
		}
	})
	return g, cmd
}

func (g *rig) bindReal() *shimv1.StatusResponse {
	g.t.Helper()
	g.await(shimv1.ShimState_SHIM_STATE_ARMED)
	resp, err := g.shim.Bind(g.t.Context(), connect.NewRequest(g.bindRequest()))
	if err != nil {
		g.t.Fatal(err)
	}
	for _, tm := range resp.Msg.GetStatus().GetTimings() {
		g.t.Logf("%-24s %8.1f ms", tm.GetPhase(), tm.GetMs())
	}
	return resp.Msg.GetStatus()
}

// sh runs a command line and returns its output and exit code.
func (g *rig) sh(line string) (string, int32) {
	g.t.Helper()
	var out []byte
	evs := g.all(g.create(false, "/bin/sh", "-c", line))
	for _, ev := range evs {
		out = append(out, ev.GetOutput().GetData()...)
	}
	return string(out), evs[len(evs)-1].GetExited().GetExit().GetCode()
}

func TestRealSandbox(t *testing.T) {
	r := newReal(t)
	g, cmd := r.restore("a")
	status := g.bindReal()
	t.Run("command", func(t *testing.T) {
		if out, code := g.sh("echo hello; hostname; cat /run/space/generation; exit 3"); code != 3 || !strings.HasPrefix(out, "hello\nbox\n") {
			t.Errorf("%q, exit %d", out, code)
		}
	})
	t.Run("output", func(t *testing.T) { realOutput(t, g) })
	t.Run("files", func(t *testing.T) { realFiles(t, g) })
	t.Run("clones differ", func(t *testing.T) {
		h, _ := r.restore("b")
		h.bindReal()
		const line = "head -c 16 /dev/urandom | od -An -tx1; cat /etc/machine-id"
		a, _ := g.sh(line)
		if b, _ := h.sh(line); a == b || len(a) < 60 {
			t.Errorf("two sandboxes read %q and %q", a, b)
		}
		h.shutdown("sandbox_deleted")
	})
	t.Run("memory", func(t *testing.T) { logPSS(t, "shim", cmd.Process.Pid) })
	t.Run("stopped VMM", func(t *testing.T) { realStopped(t, g, int(status.GetVmmPid())) })
	t.Run("dead shim", func(t *testing.T) {
		if err := cmd.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		<-g.done
		waitFor(t, "the VMM dies with its shim", func() bool { return !alive(int(status.GetVmmPid())) })
	})
}

func alive(pid int) bool {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	return err == nil && !bytes.Contains(b, []byte(") Z "))
}

func realOutput(t *testing.T, g *rig) {
	const size = 64 << 20
	id := g.create(false, "/bin/sh", "-c", fmt.Sprintf("head -c %d /dev/zero | tr '\\0' x", size))
	start, got, after := time.Now(), 0, uint64(0)
	for exited := false; !exited; {
		n := 0
		if err := g.events(t.Context(), id, &after, func(ev *nodev1.Event) bool {
			if ev.GetId() != after+1 {
				t.Fatalf("event %d after %d", ev.GetId(), after)
			}
			after = ev.GetId()
			got += bytes.Count(ev.GetOutput().GetData(), []byte("x"))
			exited = ev.GetExited() != nil
			n++
			return n < 300
		}); err != nil {
			t.Fatal(err)
		}
	}
	if got != size {
		t.Errorf("%d bytes of %d", got, size)
	}
	t.Logf("64 MiB of output, cut every 300 events: %v", time.Since(start))
}

func realFiles(t *testing.T, g *rig) {
	body := pattern(5<<20 + 3)
	s := g.files.Write(t.Context())
	err := s.Send(&agentv1.WriteRequest{Kind: &agentv1.WriteRequest_Header{Header: &agentv1.WriteHeader{Path: []byte("/tmp/dir/file"), User: "root", Parents: true}}})
	for b := body; err == nil && len(b) > 0; b = b[min(len(b), fileChunk):] {
		err = s.Send(&agentv1.WriteRequest{Kind: &agentv1.WriteRequest_Data{Data: b[:min(len(b), fileChunk)]}})
	}
	if err == nil {
		err = s.Send(&agentv1.WriteRequest{Kind: &agentv1.WriteRequest_Commit{Commit: &agentv1.WriteCommit{}}})
	}
	if err != nil && !errors.Is(err, io.EOF) {
		t.Fatal(err)
	}
	if _, err := s.CloseAndReceive(); err != nil {
		t.Fatal(err)
	}
	got, err := g.readFile("/tmp/dir/file")
	if err != nil || !bytes.Equal(got, body) {
		t.Fatalf("read %d bytes: %v", len(got), err)
	}
}

func logPSS(t *testing.T, what string, pid int) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/smaps_rollup", pid))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(b)) {
		if strings.HasPrefix(line, "Pss:") || strings.HasPrefix(line, "Pss_Anon:") {
			t.Logf("%s %s", what, strings.TrimSpace(line))
		}
	}
}

// realStopped stops the VMM's process: calls into the guest end by their deadline, nothing else waits.
func realStopped(t *testing.T, g *rig, pid int) {
	if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	if _, err := g.files.Stat(ctx, connect.NewRequest(&agentv1.StatRequest{Path: []byte("/")})); connect.CodeOf(err) != connect.CodeDeadlineExceeded {
		t.Errorf("stat: %v", err)
	}
	short, stop := context.WithTimeout(t.Context(), 2*time.Second)
	defer stop()
	if _, err := g.shim.Status(short, connect.NewRequest(&shimv1.StatusRequest{})); err != nil {
		t.Errorf("status: %v", err)
	}
	if err := syscall.Kill(pid, syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	if out, code := g.sh("echo back"); out != "back\n" || code != 0 {
		t.Errorf("after the stop: %q, %d", out, code)
	}
}
