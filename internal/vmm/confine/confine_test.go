package confine_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/space-sandbox/space/internal/vmm/confine"
	"golang.org/x/sys/unix"
)

func TestMain(m *testing.M) {
	confine.Main()
	if len(os.Args) > 1 && os.Args[1] == "helper" {
		helper(os.Args[2:])
		os.Exit(0)
	}
	os.Exit(runTests(m))
}

// program is a copy of this test binary that every user can reach.
var program string

func runTests(m *testing.M) int {
	dir, err := os.MkdirTemp("/tmp", "cp")
	if err != nil {
		panic(err)
	}
	defer func() { _ = os.RemoveAll(dir) }()
	exe, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		panic(err)
	}
	program = filepath.Join(dir, "helper")
	if err := errors.Join(os.Chmod(dir, 0o755), os.WriteFile(program, exe, 0o755)); err != nil {
		panic(err)
	}
	return m.Run()
}

const testUID = 61234 // owns nothing on the host

// start runs this test binary as the helper and returns what it printed.
func start(t *testing.T, c confine.Command, args ...string) (*confine.Process, *bufio.Reader) {
	t.Helper()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.Close() })
	defer w.Close()
	c.Path, c.Args, c.Stdout, c.Stderr = program, append([]string{"helper"}, args...), w, w
	if c.Dir == "" {
		c.Dir = ownDir(t)
	}
	p, err := confine.Start(t.Context(), c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.Kill(); err != nil {
			t.Error(err)
		}
		<-p.Done()
	})
	return p, bufio.NewReader(r)
}

// run waits for the helper and returns its output, which must be JSON.
func run(t *testing.T, c confine.Command, result any, args ...string) {
	t.Helper()
	p, out := start(t, c, args...)
	var text bytes.Buffer
	if _, err := text.ReadFrom(out); err != nil {
		t.Fatal(err)
	}
	select {
	case <-p.Done():
	case <-time.After(10 * time.Second):
		t.Fatal("helper did not end")
	}
	if !p.State().Success() {
		t.Fatalf("helper: %v: %s", p.State(), text.String())
	}
	if err := json.Unmarshal(text.Bytes(), result); err != nil {
		t.Fatalf("helper said %q: %v", text.String(), err)
	}
}

// ownDir is a folder that belongs to the test user.
func ownDir(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	if err := os.Chown(dir, uid(), uid()); err != nil {
		t.Fatal(err)
	}
	return dir
}

// uid is who the helper runs as.
func uid() int {
	if os.Geteuid() != 0 {
		return os.Geteuid()
	}
	return testUID
}

// world is a host with things that a confined program must not get at.
type world struct {
	memory, layer, database, key, foreign, socket string
	port                                          string
	command                                       confine.Command
}

func newWorld(t *testing.T) world {
	t.Helper()
	// Not below Dir, and reachable for every user: only confinement keeps the helper out, not a folder's mode.
	host, err := os.MkdirTemp("/tmp", "cw")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(host) })
	if err := os.Chmod(host, 0o755); err != nil {
		t.Fatal(err)
	}
	file := func(name string, mode os.FileMode) string {
		path := filepath.Join(host, name)
		if err := os.WriteFile(path, []byte("content"), mode); err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(path, mode); err != nil {
			t.Fatal(err)
		}
		return path
	}
	w := world{memory: file("memory", 0o666), layer: file("layer", 0o666), database: file("db", 0o666), key: file("key", 0o666)}
	w.foreign = filepath.Join(host, "other")
	if err := os.Mkdir(w.foreign, 0o777); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(w.foreign, 0o777); err != nil {
		t.Fatal(err)
	}
	w.socket = filepath.Join(host, "s")
	serve(t, "unix", w.socket)
	if err := os.Chmod(w.socket, 0o777); err != nil {
		t.Fatal(err)
	}
	_, w.port, err = net.SplitHostPort(serve(t, "tcp", "127.0.0.1:0"))
	if err != nil {
		t.Fatal(err)
	}
	memory, err := os.Open(w.memory)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { memory.Close() })
	w.command = confine.Command{ReadOnly: []string{w.layer}, Files: []*os.File{memory, sealed(t)}, UID: testUID, GID: testUID}
	return w
}

func serve(t *testing.T, network, address string) string {
	t.Helper()
	l, err := net.Listen(network, address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	return l.Addr().String()
}

// sealed is a memory file that nobody can write any more.
func sealed(t *testing.T) *os.File {
	t.Helper()
	fd, err := unix.MemfdCreate("m", unix.MFD_ALLOW_SEALING|unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	f := os.NewFile(uintptr(fd), "m")
	t.Cleanup(func() { f.Close() })
	if _, err := f.WriteString("content"); err != nil {
		t.Fatal(err)
	}
	seals := unix.F_SEAL_WRITE | unix.F_SEAL_GROW | unix.F_SEAL_SHRINK | unix.F_SEAL_SEAL
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seals); err != nil {
		t.Fatal(err)
	}
	return f
}

// probe runs every attempt in the helper and returns those that worked.
func (w world) probe(t *testing.T, c confine.Command) map[string]string {
	t.Helper()
	var results map[string]string
	run(t, c, &results, "attempt", w.memory, w.layer, w.database, w.key, w.foreign, w.socket, w.port, fmt.Sprint(os.Getpid()))
	return results
}

// attempts are what must fail under confinement and work without it.
var attempts = []string{
	"write memory by path", "write memory by descriptor", "write layer", "read database", "write key",
	"write foreign folder", "list host root", "read environ of host process", "connect unix socket", "connect tcp",
	"signal host process", "see host processes", "have capabilities", "become root", "mount", "dump core",
}

func TestConfinedProgramGetsAtNothing(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Log("not root: confinement is by a user namespace")
	}
	w := newWorld(t)
	results := w.probe(t, w.command)
	for _, a := range attempts {
		if results[a] == "ok" {
			t.Errorf("confined helper could: %s", a)
		}
	}
	for _, a := range []string{"read memory by descriptor", "read sealed memory", "read layer", "write own folder"} {
		if results[a] != "ok" {
			t.Errorf("confined helper could not %s: %s", a, results[a])
		}
	}
	if results["write sealed memory"] == "ok" {
		t.Error("confined helper wrote sealed memory")
	}
}

// What the confined helper fails at must be possible without confinement, or the test above shows nothing.
func TestUnconfinedProgramGetsAtThings(t *testing.T) {
	w := newWorld(t)
	c := w.command
	c.Unconfined = true
	results := w.probe(t, c)
	for _, a := range attempts {
		rootOnly := slices.Contains([]string{"have capabilities", "become root", "mount"}, a) && os.Geteuid() != 0
		if results[a] != "ok" && !rootOnly && a != "dump core" {
			t.Errorf("unconfined helper could not: %s: %s", a, results[a])
		}
	}
	if results["write sealed memory"] == "ok" {
		t.Error("a sealed memory file was written")
	}
}

// Without namespaces Landlock and the user change still keep files, the network and privileges.
func TestReducedConfinementReportsGapAndKeepsFiles(t *testing.T) {
	w := newWorld(t)
	c := w.command
	c.NoNamespaces = true
	results := w.probe(t, c)
	for _, a := range []string{
		"write memory by path", "write memory by descriptor", "write layer", "read database", "write key",
		"write foreign folder", "list host root", "connect tcp", "signal host process", "have capabilities", "become root", "mount",
	} {
		if results[a] == "ok" {
			t.Errorf("helper without namespaces could: %s", a)
		}
	}
}

func TestGaps(t *testing.T) {
	p, _ := start(t, confine.Command{UID: testUID}, "sleep")
	if os.Geteuid() == 0 && len(p.Gaps()) != 0 {
		t.Errorf("gaps of a full confinement: %v", p.Gaps())
	}
}

// A device that only root may open on the host, as /dev/kvm often is, can be given to the program.
func TestDevices(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root can give devices away")
	}
	w := newWorld(t)
	device := filepath.Join(t.TempDir(), "zero")
	if err := unix.Mknod(device, unix.S_IFCHR|0o600, int(unix.Mkdev(1, 5))); err != nil {
		t.Fatal(err)
	}
	for _, given := range []bool{true, false} {
		c := w.command
		if given {
			c.Devices = []string{device}
		}
		var results map[string]string
		run(t, c, &results, "device", device)
		if got := results["open device"] == "ok"; got != given {
			t.Errorf("given %v: %s", given, results["open device"])
		}
	}
	var st unix.Stat_t
	if err := unix.Stat(device, &st); err != nil || st.Uid != 0 || st.Mode&0o777 != 0o600 {
		t.Errorf("the host's node has changed: %+v, %v", st, err)
	}
}

func TestIdentityAndEnvironment(t *testing.T) {
	for _, level := range []struct {
		name                     string
		unconfined, noNamespaces bool
	}{{"full", false, false}, {"reduced", false, true}, {"none", true, false}} {
		t.Run(level.name, func(t *testing.T) {
			t.Setenv("SECRET", "value")
			stray, err := os.Open("/dev/null")
			if err != nil {
				t.Fatal(err)
			}
			defer stray.Close()
			// Even a descriptor that someone forgot to mark stays here.
			if _, err := unix.FcntlInt(stray.Fd(), unix.F_SETFD, 0); err != nil {
				t.Fatal(err)
			}
			c := confine.Command{UID: testUID, Unconfined: level.unconfined, NoNamespaces: level.noNamespaces}
			var id identity
			run(t, c, &id, "identity")
			if len(id.Environ) != 0 {
				t.Errorf("environment: %v", id.Environ)
			}
			if len(id.FDs) != 3 {
				t.Errorf("open descriptors: %v", id.FDs)
			}
			if id.CoreLimit != 0 {
				t.Errorf("core limit %d", id.CoreLimit)
			}
			if id.Session != id.PID {
				t.Errorf("session %d of process %d", id.Session, id.PID)
			}
			if level.unconfined {
				return
			}
			if !id.NoNewPrivs {
				t.Error("new privileges can be gained")
			}
			if os.Geteuid() == 0 && (id.UID != testUID || id.GID != testUID || len(id.Groups) != 0) {
				t.Errorf("identity: %+v", id)
			}
			if !level.noNamespaces && id.PID != 1 {
				t.Errorf("process %d of its namespace, want 1", id.PID)
			}
		})
	}
}

func TestDiesWithParent(t *testing.T) {
	for _, level := range []string{"full", "reduced", "unconfined"} {
		t.Run(level, func(t *testing.T) {
			parent := exec.Command(program, "helper", "parent", level, ownDir(t))
			out, err := parent.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			parent.Stderr = os.Stderr
			if err := parent.Start(); err != nil {
				t.Fatal(err)
			}
			var pid int
			if _, err := fmt.Fscan(out, &pid); err != nil {
				t.Fatal(err)
			}
			child, err := unix.PidfdOpen(pid, 0)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = unix.Close(child) })
			if err := parent.Process.Kill(); err != nil {
				t.Fatal(err)
			}
			_ = parent.Wait()
			awaitDeath(t, child)
		})
	}
}

func TestErrors(t *testing.T) {
	dir := ownDir(t)
	script := filepath.Join(filepath.Dir(program), "junk")
	if err := os.WriteFile(script, []byte("junk"), 0o755); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]confine.Command{
		"no such file":      {Path: "/usr/bin/true", Dir: dir, ReadOnly: []string{"/nonexistent/layer"}},
		"no such file ":     {Path: "/usr/bin/no-such-program", Dir: dir},
		"exec format error": {Path: script, Dir: dir, UID: testUID},
		"permission denied": {Path: "/etc/passwd", Dir: dir, UID: testUID},
		"no such":           {Path: "/usr/bin/true", Dir: "/nonexistent"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := confine.Start(t.Context(), c)
			if err == nil {
				t.Fatal("no error")
			}
			if want := strings.TrimSpace(name); !strings.Contains(err.Error(), want) {
				t.Errorf("%v, want %s", err, want)
			}
		})
	}
}

func TestStartGivesUpWithContext(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if p, err := confine.Start(ctx, confine.Command{Path: "/usr/bin/true", Dir: ownDir(t)}); err == nil {
		t.Fatalf("started process %d", p.PID())
	}
}

func TestKillEndsDescendants(t *testing.T) {
	p, out := start(t, confine.Command{UID: testUID}, "fork")
	line, err := out.ReadString('\n')
	if err != nil || line != "forked\n" {
		t.Fatalf("%q, %v", line, err)
	}
	if err := p.Kill(); err != nil {
		t.Fatal(err)
	}
	select {
	case <-p.Done():
	case <-time.After(10 * time.Second):
		t.Fatal("not dead")
	}
	// The grandchild held the other end of the output: it is dead when the end is reached.
	ended := make(chan struct{})
	go func() { _, _ = out.ReadString('\n'); close(ended) }()
	select {
	case <-ended:
	case <-time.After(10 * time.Second):
		t.Fatal("grandchild lives on")
	}
	if ws, ok := p.State().Sys().(syscall.WaitStatus); !ok || ws.Signal() != syscall.SIGKILL {
		t.Errorf("state %v", p.State())
	}
}

func TestNothingLeftOnTheHost(t *testing.T) {
	before, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	fds := openFDs(t)
	for range 3 {
		var id identity
		run(t, confine.Command{UID: testUID}, &id, "identity")
	}
	after, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(before, after) {
		t.Errorf("mounts changed:\n%s\n%s", before, after)
	}
	if now := openFDs(t); now > fds+3 { // the test's own pipes are closed at its end
		t.Errorf("%d descriptors, before %d", now, fds)
	}
}

func openFDs(t *testing.T) int {
	t.Helper()
	list, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(list)
}

// awaitDeath waits until the process of a descriptor is dead.
func awaitDeath(t *testing.T, pidfd int) {
	t.Helper()
	for deadline := time.Now().Add(10 * time.Second); time.Now().Before(deadline); {
		poll := []unix.PollFd{{Fd: int32(pidfd), Events: unix.POLLIN}}
		n, err := unix.Poll(poll, 10_000)
		if n == 1 {
			return
		}
		if err != nil && !errors.Is(err, unix.EINTR) {
			t.Fatal(err)
		}
	}
	t.Fatal("the process lives on")
}
