package vmmtest

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"io"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/space-sandbox/space/internal/vmm"
)

// Sizes of what the suite uses.
const (
	memoryMiB  = 192
	guestLimit = 60 * time.Second // for a guest to boot and answer, on a busy machine without KVM
	callLimit  = 20 * time.Second
)

// Env is a driver and what it is tested with.
type Env struct {
	Driver vmm.Driver
	Caps   vmm.Capabilities
	Guest  Artifacts
	// UID and GID are what VMs run as when the test is root.
	UID, GID uint32
	// NewTop makes an empty writable top of a size over a backing chain.
	NewTop func(ctx context.Context, path string, size int64) error
	// Dirs is below a folder that the VMM's user can reach; empty for the test's own temporary folder.
	Dirs string
}

// suite is the state that cases share: one captured snapshot.
type suite struct {
	env    Env
	layer  string // read-only disk
	base   string // below the writable top
	memory string // RAM image
	state  string // device state
	top    string // the writable disk's top as captured, immutable from then on
	sealed *os.File
}

const (
	layerText = "content of the layer"
	baseText  = "content of the base "
	diskSize  = 8 << 20
)

// Run runs the suite. makeEnv is called once.
func Run(t *testing.T, makeEnv func(t *testing.T) Env) {
	s := &suite{env: makeEnv(t)}
	s.prepare(t)
	if !t.Run("boot, stop, continue, capture", s.bootAndCapture) {
		t.Fatal("nothing else can work")
	}
	cases := []struct {
		name string
		run  func(*testing.T)
	}{
		{"restored twins have private memory", s.twins},
		{"restored disks", s.disks},
		{"restored VM can be captured and restored again", s.generations},
		{"corrupt state", s.corruptState},
		{"links", s.links},
		{"run state errors", s.runStateErrors},
		{"close in every state", s.closeStates},
		{"killed VMM", s.killed},
		{"a stopped VMM blocks nobody else", s.stoppedVMM},
		{"guest ends the machine", s.guestEnds},
		{"wrong configuration", s.wrongConfig},
		{"context ends a start", s.cancelled},
		{"nothing is left", s.nothingLeft},
	}
	for _, c := range cases {
		t.Run(c.name, c.run)
	}
	t.Run("snapshot is unchanged after all", s.snapshotUnchanged)
}

func (s *suite) prepare(t *testing.T) {
	t.Helper()
	dir := s.dir(t)
	s.layer, s.base = filepath.Join(dir, "layer"), filepath.Join(dir, "base")
	for path, text := range map[string]string{s.layer: layerText, s.base: baseText} {
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		if err := os.Truncate(path, diskSize); err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(path, 0o444); err != nil {
			t.Fatal(err)
		}
	}
	s.memory, s.state = filepath.Join(dir, "memory"), filepath.Join(dir, "state")
	s.top = filepath.Join(dir, "top")
}

// dir is a new folder, gone after the test.
func (s *suite) dir(t *testing.T) string {
	t.Helper()
	if s.env.Dirs == "" {
		return t.TempDir()
	}
	dir, err := os.MkdirTemp(s.env.Dirs, "d")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

// config is a machine with a new folder and a new top over backing.
func (s *suite) config(t *testing.T, backing ...string) vmm.Config {
	t.Helper()
	dir := s.dir(t)
	t.Cleanup(func() { showLogs(t, dir) })
	top := filepath.Join(dir, "top")
	if err := s.env.NewTop(t.Context(), top, diskSize); err != nil {
		t.Fatal(err)
	}
	return vmm.Config{
		VCPU: 2, MemoryMiB: memoryMiB, Acceleration: s.env.Caps.Acceleration, Binary: s.env.Caps.Binary,
		Dir: dir, UID: s.env.UID, GID: s.env.GID,
		Disks: []vmm.Disk{
			{Serial: "layer0", Path: s.layer, ReadOnly: true},
			{Serial: "writable", Path: top, Backing: append(backing, s.base)},
		},
	}
}

// showLogs shows the ends of a VM's logs when a test has failed.
func showLogs(t *testing.T, dir string) {
	t.Helper()
	if !t.Failed() {
		return
	}
	logs, err := filepath.Glob(filepath.Join(dir, "*.log"))
	if err != nil {
		t.Error(err)
	}
	for _, path := range logs {
		content, err := os.ReadFile(path)
		if err != nil {
			t.Error(err)
		}
		t.Logf("%s: %s", filepath.Base(path), content[max(0, len(content)-2000):])
	}
}

// restore restores the shared snapshot into a new machine, stopped.
func (s *suite) restore(t *testing.T) (vmm.VM, vmm.Config) {
	t.Helper()
	cfg := s.config(t, s.top)
	vm, err := s.env.Driver.Restore(t.Context(), cfg, vmm.Snapshot{Memory: s.sealed, State: s.state})
	if err != nil {
		t.Fatal(err)
	}
	closeAtEnd(t, vm)
	return vm, cfg
}

// resume restores, lets the guest run and waits until it answers.
func (s *suite) resume(t *testing.T) (vmm.VM, *Client) {
	t.Helper()
	vm, _ := s.restore(t)
	return vm, proceed(t, vm)
}

// proceed lets a guest run and waits until it answers.
func proceed(t *testing.T, vm vmm.VM) *Client {
	t.Helper()
	if err := vm.Continue(limit(t, callLimit)); err != nil {
		t.Fatal(err)
	}
	return connect(t, vm)
}

func connect(t *testing.T, vm vmm.VM) *Client {
	t.Helper()
	c, err := Connect(vm)
	if err != nil {
		t.Fatal(err)
	}
	if got := ask(t, c, "ping"); got != "pong" {
		t.Fatalf("ping: %q", got)
	}
	return c
}

func ask(t *testing.T, c *Client, command ...string) string {
	t.Helper()
	answer, err := c.Ask(limit(t, guestLimit), command...)
	if err != nil {
		t.Fatal(err)
	}
	return answer
}

func closeAtEnd(t *testing.T, vm vmm.VM) {
	t.Helper()
	t.Cleanup(func() {
		if err := vm.Close(); err != nil {
			t.Error(err)
		}
	})
}

func limit(t *testing.T, d time.Duration) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), d)
	t.Cleanup(cancel)
	return ctx
}

func digest(t *testing.T, path string) string {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		t.Fatal(err)
	}
	return hex.EncodeToString(h.Sum(nil))
}

// digestOpen is the digest of an open file from its start.
func digestOpen(t *testing.T, f *os.File) string {
	t.Helper()
	info, err := f.Stat()
	if err != nil {
		t.Fatal(err)
	}
	h := sha256.New()
	if _, err := io.Copy(h, io.NewSectionReader(f, 0, info.Size())); err != nil {
		t.Fatal(err)
	}
	return hex.EncodeToString(h.Sum(nil))
}
