package vmmtest

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/space-sandbox/space/internal/vmm"
	"golang.org/x/sys/unix"
)

func itoa(n int) string { return strconv.Itoa(n) }

func allocated(t *testing.T, path string) int64 {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		t.Fatal(err)
	}
	return st.Blocks * 512
}

// links: frames of every size pass in both directions, on both links.
func (s *suite) links(t *testing.T) {
	_, c := s.resume(t)
	for _, size := range []int{46, 47, 500, 1499, 1500} {
		payload := bytes.Repeat([]byte{byte(size)}, size)
		back, err := c.Echo(limit(t, guestLimit), payload)
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(back, payload) {
			t.Errorf("%d bytes came back as %d", size, len(back))
		}
	}
	// The control link has a large MTU.
	long := strings.Repeat("x", vmm.LinkMTU-100)
	if got := ask(t, c, "length", long); got != itoa(len(long)) {
		t.Errorf("the guest got %s bytes of %d", got, len(long))
	}
	ask(t, c, "set", "long", long)
	if got := ask(t, c, "get", "long"); got != long {
		t.Errorf("%d bytes came back as %d", len(long), len(got))
	}
}

func (s *suite) runStateErrors(t *testing.T) {
	vm, _ := s.resume(t)
	ctx := limit(t, callLimit)
	if err := vm.Continue(ctx); err == nil {
		t.Error("a running VM was continued")
	}
	path := filepath.Join(s.dir(t), "state")
	if err := vm.CaptureState(ctx, path); err == nil {
		t.Error("a running VM was captured")
	}
	if _, err := os.Stat(path); !errors.Is(err, os.ErrNotExist) {
		t.Error("a failed capture left a file")
	}
	if vm.Err() != nil {
		t.Errorf("Err of a live VM: %v", vm.Err())
	}
	if len(vm.Timings()) == 0 {
		t.Error("no timings")
	}
	if err := vm.Close(); err != nil {
		t.Fatal(err)
	}
	for name, call := range map[string]func() error{
		"continue": func() error { return vm.Continue(ctx) },
		"stop":     func() error { return vm.Stop(ctx) },
		"capture":  func() error { return vm.CaptureState(ctx, path) },
	} {
		if err := call(); !errors.Is(err, vmm.ErrExited) {
			t.Errorf("%s after close: %v, want ErrExited", name, err)
		}
	}
}

// closeStates: Close works in every state, frees everything and may be repeated.
func (s *suite) closeStates(t *testing.T) {
	ctx := limit(t, guestLimit)
	for name, bring := range map[string]func(vmm.VM) error{
		"stopped, links never read": func(vmm.VM) error { return nil },
		"running":                   func(vm vmm.VM) error { return vm.Continue(ctx) },
		"stopped again":             func(vm vmm.VM) error { return errors.Join(vm.Continue(ctx), vm.Stop(ctx)) },
		"process stopped":           func(vm vmm.VM) error { return syscall.Kill(vm.PID(), syscall.SIGSTOP) },
		"process dead":              func(vm vmm.VM) error { return syscall.Kill(vm.PID(), syscall.SIGKILL) },
	} {
		t.Run(name, func(t *testing.T) {
			vm, _ := s.restore(t)
			if err := bring(vm); err != nil {
				t.Fatal(err)
			}
			begin := time.Now()
			for range 2 {
				if err := vm.Close(); err != nil {
					t.Fatal(err)
				}
			}
			if d := time.Since(begin); d > 5*time.Second {
				t.Errorf("close took %v", d)
			}
			select {
			case <-vm.Done():
			default:
				t.Error("closed but not done")
			}
			if err := vm.Err(); err != nil && name != "process dead" {
				t.Errorf("Err after Close: %v", err)
			}
			if alive(vm.PID()) {
				t.Error("the process lives")
			}
			if _, err := vm.ControlLink().Read(make([]byte, 1)); err == nil {
				t.Error("the control link is open")
			}
		})
	}
}

func alive(pid int) bool { return syscall.Kill(pid, 0) == nil }

// killed: the death of the VMM is seen without anyone asking.
func (s *suite) killed(t *testing.T) {
	vm, _ := s.resume(t)
	if err := syscall.Kill(vm.PID(), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	select {
	case <-vm.Done():
	case <-time.After(callLimit):
		t.Fatal("the death was not seen")
	}
	if err := vm.Err(); !errors.Is(err, vmm.ErrExited) || !strings.Contains(err.Error(), "killed") {
		t.Errorf("Err: %v", err)
	}
	if err := vm.Stop(limit(t, callLimit)); !errors.Is(err, vmm.ErrExited) {
		t.Errorf("stop: %v, want ErrExited", err)
	}
}

// stoppedVMM: calls on a VMM that does not run end by their deadline, and other VMs are not held up.
func (s *suite) stoppedVMM(t *testing.T) {
	stuck, _ := s.resume(t)
	if err := syscall.Kill(stuck.PID(), syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
	defer cancel()
	result := make(chan error, 1)
	go func() { result <- stuck.Stop(ctx) }()
	other, c := s.resume(t)
	ask(t, c, "ping")
	if err := other.Stop(limit(t, callLimit)); err != nil {
		t.Error(err)
	}
	select {
	case err := <-result:
		if !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("stop of a stuck VMM: %v", err)
		}
	case <-time.After(callLimit):
		t.Error("stop of a stuck VMM ignores its deadline")
	}
}

// guestEnds: a guest that reboots or powers off ends its VM.
func (s *suite) guestEnds(t *testing.T) {
	vm, c := s.resume(t)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	go func() {
		<-vm.Done()
		cancel()
	}()
	if _, err := c.Ask(ctx, "poweroff"); err == nil {
		t.Error("the guest answered")
	}
	select {
	case <-vm.Done():
		if err := vm.Err(); !errors.Is(err, vmm.ErrExited) {
			t.Errorf("Err: %v", err)
		}
	case <-time.After(guestLimit):
		t.Error("the VM lives on")
	}
}

func (s *suite) wrongConfig(t *testing.T) {
	for name, spoil := range map[string]func(*vmm.Config){
		"vcpu":         func(c *vmm.Config) { c.VCPU = 0 },
		"memory":       func(c *vmm.Config) { c.MemoryMiB = 1 },
		"acceleration": func(c *vmm.Config) { c.Acceleration = "magic" },
		"binary":       func(c *vmm.Config) { c.Binary = "vmm" },
		"nonexistent":  func(c *vmm.Config) { c.Binary = "/nonexistent/vmm" },
		"dir":          func(c *vmm.Config) { c.Dir = filepath.Join(c.Dir, "missing") },
		"serial":       func(c *vmm.Config) { c.Disks[0].Serial = "a,b=c" },
		"twice":        func(c *vmm.Config) { c.Disks[1].Serial = c.Disks[0].Serial },
		"no such file": func(c *vmm.Config) { c.Disks[0].Path = filepath.Join(c.Dir, "missing") },
		"absolute":     func(c *vmm.Config) { c.Disks[0].Path = "relative" },
		"backing":      func(c *vmm.Config) { c.Disks[1].ReadOnly = true },
		"at most":      func(c *vmm.Config) { c.Disks = make([]vmm.Disk, 100) },
	} {
		t.Run(name, func(t *testing.T) {
			cfg := s.config(t, s.top)
			spoil(&cfg)
			vm, err := s.env.Driver.Restore(t.Context(), cfg, vmm.Snapshot{Memory: s.sealed, State: s.state})
			if err == nil {
				closeAtEnd(t, vm)
				t.Fatal("it was accepted")
			}
			if !strings.Contains(err.Error(), name) {
				t.Errorf("error %q does not say %q", err, name)
			}
		})
	}
	t.Run("writable memory", func(t *testing.T) {
		f, err := os.OpenFile(filepath.Join(s.dir(t), "memory"), os.O_RDWR|os.O_CREATE, 0o600)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		if err := f.Truncate(memoryMiB << 20); err != nil {
			t.Fatal(err)
		}
		if _, err := s.env.Driver.Restore(t.Context(), s.config(t, s.top), vmm.Snapshot{Memory: f, State: s.state}); !errors.Is(err, vmm.ErrUnsupported) {
			t.Errorf("error %v, want ErrUnsupported", err)
		}
	})
}

func (s *suite) cancelled(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	vm, err := s.env.Driver.Restore(ctx, s.config(t, s.top), vmm.Snapshot{Memory: s.sealed, State: s.state})
	if err == nil {
		closeAtEnd(t, vm)
		t.Fatal("started although its context had ended")
	}
}

// nothingLeft: a VM that is gone leaves no descriptor, process or mount.
func (s *suite) nothingLeft(t *testing.T) {
	round := func() {
		vm, _ := s.restore(t)
		if err := vm.Close(); err != nil {
			t.Fatal(err)
		}
	}
	round() // what is opened once for all is opened now
	fds, mounts, children := count(t, "/proc/self/fd"), mountTable(t), childCount(t)
	for range 3 {
		round()
	}
	if now := count(t, "/proc/self/fd"); now > fds {
		t.Errorf("%d descriptors, before %d", now, fds)
	}
	if now := mountTable(t); now != mounts {
		t.Errorf("mounts changed:\n%s\nbefore:\n%s", now, mounts)
	}
	if now := childCount(t); now > children {
		t.Errorf("%d child processes, before %d", now, children)
	}
}

func count(t *testing.T, dir string) int {
	t.Helper()
	list, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	return len(list)
}

func mountTable(t *testing.T) string {
	t.Helper()
	table, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		t.Fatal(err)
	}
	return string(table)
}

// childCount counts the children of all threads.
func childCount(t *testing.T) int {
	t.Helper()
	paths, err := filepath.Glob("/proc/self/task/*/children")
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for _, p := range paths {
		list, err := os.ReadFile(p)
		if err != nil && !errors.Is(err, os.ErrNotExist) { // a thread may have ended
			t.Fatal(err)
		}
		n += len(strings.Fields(string(list)))
	}
	return n
}
