package vmmtest

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/space-sandbox/space/internal/vmm"
)

// bootAndCapture makes the snapshot that other cases restore.
func (s *suite) bootAndCapture(t *testing.T) {
	cfg := s.config(t)
	memory, err := os.OpenFile(s.memory, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer memory.Close()
	src := vmm.BootSource{Kernel: s.env.Guest.Kernel, Initrd: s.env.Guest.Initrd, Cmdline: "quiet", MemoryFile: memory}
	vm, err := s.env.Driver.Boot(t.Context(), cfg, src)
	if err != nil {
		t.Fatal(err)
	}
	closeAtEnd(t, vm)
	c := connect(t, vm)
	ask(t, c, "set", "name", "template")
	ask(t, c, "write", "writable", "4096", "written before the capture")

	ctx := limit(t, callLimit)
	if err := vm.Stop(ctx); err != nil {
		t.Fatal(err)
	}
	if err := vm.Continue(ctx); err != nil {
		t.Fatal(err)
	}
	if got := ask(t, c, "get", "name"); got != "template" {
		t.Errorf("after stop and continue the guest remembers %q", got)
	}
	if err := vm.Stop(ctx); err != nil {
		t.Fatal(err)
	}
	if err := vm.CaptureState(ctx, s.state); err != nil {
		t.Fatal(err)
	}
	if info, err := os.Stat(s.state); err != nil || info.Mode().Perm() != 0o600 || info.Size() == 0 {
		t.Errorf("state file: %v, %v", info, err)
	}
	if err := vm.Close(); err != nil {
		t.Fatal(err)
	}
	s.keep(t, cfg, memory)
}

// keep makes what was captured immutable.
func (s *suite) keep(t *testing.T, cfg vmm.Config, memory *os.File) {
	t.Helper()
	info, err := memory.Stat()
	if err != nil || info.Size() != int64(cfg.MemoryMiB)<<20 {
		t.Fatalf("memory file: %v, %v", info, err)
	}
	for from, to := range map[string]string{filepath.Join(cfg.Dir, "top"): s.top} {
		if err := errors.Join(os.Rename(from, to), os.Chmod(to, 0o444)); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Chmod(s.memory, 0o444); err != nil {
		t.Fatal(err)
	}
	s.sealed, err = s.env.Driver.OpenMemory(t.Context(), s.env.Caps, s.memory)
	if err != nil {
		t.Fatal(err)
	}
}

// twins: what one VM writes is not seen by another of the same snapshot, nor by the snapshot.
func (s *suite) twins(t *testing.T) {
	before := digestOpen(t, s.sealed)
	_, a := s.resume(t)
	_, b := s.resume(t)
	ask(t, a, "set", "name", "a")
	ask(t, b, "set", "name", "b")
	ask(t, a, "fill", "16", "1")
	ask(t, b, "fill", "16", "2")
	if x, y := ask(t, a, "sum"), ask(t, b, "sum"); x == y {
		t.Errorf("both memories have sum %s", x)
	}
	if x, y := ask(t, a, "get", "name"), ask(t, b, "get", "name"); x != "a" || y != "b" {
		t.Errorf("names %q and %q", x, y)
	}
	_, late := s.resume(t)
	if got := ask(t, late, "get", "name"); got != "template" {
		t.Errorf("a VM restored after the others wrote remembers %q", got)
	}
	if after := digestOpen(t, s.sealed); after != before {
		t.Error("the snapshot's memory has changed")
	}
}

// disks: reads go through the chain, writes stay in the top.
func (s *suite) disks(t *testing.T) {
	before := []string{digest(t, s.layer), digest(t, s.base), digest(t, s.top)}
	vm, cfg := s.restore(t)
	c := proceed(t, vm)
	for _, read := range []struct{ disk, offset, want string }{
		{"layer0", "0", layerText}, {"writable", "0", baseText}, {"writable", "4096", "written before the capture"},
	} {
		if got := ask(t, c, "read", read.disk, read.offset, itoa(len(read.want))); got != read.want {
			t.Errorf("%s at %s: %q", read.disk, read.offset, got)
		}
	}
	empty := allocated(t, filepath.Join(cfg.Dir, "top"))
	ask(t, c, "write", "writable", "0", "written after the restore")
	if got := ask(t, c, "read", "writable", "0", "25"); got != "written after the restore" {
		t.Errorf("read back %q", got)
	}
	if now := allocated(t, filepath.Join(cfg.Dir, "top")); now <= empty {
		t.Errorf("the top has %d bytes after a write, before %d", now, empty)
	}
	if _, err := c.Ask(limit(t, guestLimit), "write", "layer0", "0", "overwritten"); err == nil {
		t.Error("the guest wrote a read-only disk")
	}
	for i, path := range []string{s.layer, s.base, s.top} {
		if digest(t, path) != before[i] {
			t.Errorf("%s has changed", path)
		}
	}
}

// generations: the state of a restored VM can be captured, and loads together with its own memory.
func (s *suite) generations(t *testing.T) {
	vm, c := s.resume(t)
	ask(t, c, "set", "name", "second")
	ctx := limit(t, callLimit)
	if err := vm.Stop(ctx); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(s.dir(t), "state")
	if err := vm.CaptureState(ctx, path); err != nil {
		t.Fatal(err)
	}
	if err := vm.CaptureState(ctx, path); !errors.Is(err, os.ErrExist) {
		t.Errorf("capture into an existing file: %v", err)
	}
	if err := vm.Continue(ctx); err != nil {
		t.Fatalf("continue after capture: %v", err)
	}
	if got := ask(t, c, "get", "name"); got != "second" {
		t.Errorf("after the capture the guest remembers %q", got)
	}
	ask(t, c, "write", "writable", "8192", "written after the capture")
}

// corruptState: a state that does not load is ErrState, and neither it nor the memory is touched.
func (s *suite) corruptState(t *testing.T) {
	good, err := os.ReadFile(s.state)
	if err != nil {
		t.Fatal(err)
	}
	flipped := append([]byte{}, good...)
	for i := 8; i < len(flipped); i += 7 {
		flipped[i] ^= 0xff
	}
	for name, content := range map[string][]byte{
		"empty": {}, "cut": good[:len(good)/2], "noise": []byte("this is no device state at all"), "flipped": flipped,
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(s.dir(t), "state")
			if err := os.WriteFile(path, content, 0o600); err != nil {
				t.Fatal(err)
			}
			before, memory := digest(t, path), digestOpen(t, s.sealed)
			vm, err := s.env.Driver.Restore(t.Context(), s.config(t, s.top), vmm.Snapshot{Memory: s.sealed, State: path})
			if err == nil {
				closeAtEnd(t, vm)
			}
			if !errors.Is(err, vmm.ErrState) {
				t.Errorf("error %v, want ErrState", err)
			}
			if digest(t, path) != before || digestOpen(t, s.sealed) != memory {
				t.Error("the snapshot has changed")
			}
		})
	}
	t.Run("other memory size", func(t *testing.T) {
		cfg := s.config(t, s.top)
		cfg.MemoryMiB *= 2
		if _, err := s.env.Driver.Restore(t.Context(), cfg, vmm.Snapshot{Memory: s.sealed, State: s.state}); !errors.Is(err, vmm.ErrState) {
			t.Errorf("error %v, want ErrState", err)
		}
	})
	t.Run("other devices", func(t *testing.T) {
		cfg := s.config(t, s.top)
		cfg.Disks = cfg.Disks[1:]
		if _, err := s.env.Driver.Restore(t.Context(), cfg, vmm.Snapshot{Memory: s.sealed, State: s.state}); !errors.Is(err, vmm.ErrState) {
			t.Errorf("error %v, want ErrState", err)
		}
	})
	s.resume(t) // the good one still works
}

// snapshotUnchanged: after everything that was restored from it, the snapshot is as it was captured.
func (s *suite) snapshotUnchanged(t *testing.T) {
	defer s.sealed.Close()
	if digestOpen(t, s.sealed) != digest(t, s.memory) {
		t.Error("the memory has changed")
	}
	s.resume(t)
}
