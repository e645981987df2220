package qemu

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/space-sandbox/space/internal/vmm"
	"golang.org/x/sys/unix"
)

func TestDiskArguments(t *testing.T) {
	for name, c := range map[string]struct {
		disk vmm.Disk
		want string
	}{
		"layer": {
			vmm.Disk{Serial: "layer0", Path: "/l,a", ReadOnly: true},
			`{"driver":"raw","node-name":"disk3","read-only":true,"file":{"driver":"file","read-only":true,"filename":"/l,a","locking":"off"}}`,
		},
		"top alone": {
			vmm.Disk{Serial: "w", Path: "/top"},
			`{"driver":"qcow2","node-name":"disk3","read-only":false,"discard":"unmap",` +
				`"file":{"driver":"file","read-only":false,"discard":"unmap","filename":"/top"},"backing":null}`,
		},
		"chain": {
			vmm.Disk{Serial: "w", Path: "/top", Backing: []string{"/mid", "/base"}},
			`{"driver":"qcow2","node-name":"disk3","read-only":false,"discard":"unmap",` +
				`"file":{"driver":"file","read-only":false,"discard":"unmap","filename":"/top"},` +
				`"backing":{"driver":"qcow2","read-only":true,"file":{"driver":"file","read-only":true,"filename":"/mid","locking":"off"},` +
				`"backing":{"driver":"raw","read-only":true,"file":{"driver":"file","read-only":true,"filename":"/base","locking":"off"}}}}`,
		},
	} {
		t.Run(name, func(t *testing.T) {
			args := diskArguments(3, c.disk)
			if args[0] != "-blockdev" || args[1] != c.want {
				t.Errorf("got  %s\nwant %s", args[1], c.want)
			}
			if want := "virtio-blk-device,drive=disk3,serial=" + c.disk.Serial + ",werror=report,rerror=report"; args[3] != want {
				t.Errorf("device %s, want %s", args[3], want)
			}
		})
	}
}

func TestArguments(t *testing.T) {
	cfg := vmm.Config{VCPU: 3, MemoryMiB: 512, Acceleration: vmm.TCG}
	tcg := strings.Join(arguments(cfg, memoryObject(512, privateReadMem)), " ")
	for _, want := range []string{
		"-accel tcg,thread=multi,tb-size=64", "-cpu max", "-smp 3", "-m 512M", "migration.send-configuration=off",
		"memory-backend-file,id=m,size=512M,mem-path=/proc/self/fd/7,share=off,readonly=on,rom=off,merge=off,dump=off",
		"stream,id=workload,server=off,addr.type=fd,addr.str=4", "mac=" + vmm.WorkloadMAC, "mac=" + vmm.ControlMAC,
	} {
		if !strings.Contains(tcg, want) {
			t.Errorf("%s\nlacks %s", tcg, want)
		}
	}
	if strings.Index(tcg, vmm.WorkloadMAC) > strings.Index(tcg, vmm.ControlMAC) {
		t.Error("the workload link must be the first device")
	}
	cfg.Acceleration = vmm.KVM
	if kvm := strings.Join(arguments(cfg, ""), " "); !strings.Contains(kvm, "-accel kvm -cpu host") {
		t.Error(kvm)
	}
	if got := commonArguments(false); slices.Contains(got, "-sandbox") {
		t.Error("filter although there is none")
	}
}

func TestBootArguments(t *testing.T) {
	src := vmm.BootSource{Kernel: "/k", Initrd: "/i", Cmdline: "quiet a=b"}
	for _, c := range []struct {
		accel vmm.Acceleration
		tsc   uint64
		want  string
	}{
		{vmm.TCG, 2500000, "console=ttyS0 reboot=t panic=-1 tsc=reliable tsc_early_khz=2500000 quiet a=b"},
		{vmm.TCG, 0, "console=ttyS0 reboot=t panic=-1 tsc=reliable quiet a=b"},
		{vmm.KVM, 2500000, "console=ttyS0 reboot=t panic=-1 quiet a=b"},
	} {
		args := bootArguments(vmm.Config{Acceleration: c.accel}, src, c.tsc)
		if got := args[len(args)-1]; got != c.want {
			t.Errorf("%s: %q, want %q", c.accel, got, c.want)
		}
	}
}

func TestTSCRate(t *testing.T) {
	if got := tscRate(50_000_000, 20*time.Millisecond); got != 2_500_000 {
		t.Errorf("%d", got)
	}
	if got := tscRate(1, 0); got != 0 {
		t.Errorf("%d", got)
	}
	a, b := hostTSC(t.Context()), hostTSC(t.Context())
	if a == 0 || float64(max(a, b)-min(a, b)) > float64(a)/1000 {
		t.Errorf("two measurements: %d and %d kHz", a, b)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if got := hostTSC(ctx); got != 0 {
		t.Errorf("%d after the end of the context", got)
	}
}

func TestLogIsBounded(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log")
	if err := os.WriteFile(path, []byte("of an older VM"), 0o644); err != nil {
		t.Fatal(err)
	}
	l, err := newLog(path)
	if err != nil {
		t.Fatal(err)
	}
	chunk := bytes.Repeat([]byte("0123456789abcdef"), 1<<12)
	for range 40 { // 2.5 MiB
		if n, err := l.Write(chunk); n != len(chunk) || err != nil {
			t.Fatal(n, err)
		}
	}
	if _, err := l.Write([]byte("the end \xff")); err != nil {
		t.Fatal(err)
	}
	info, err := os.Stat(path)
	if err != nil || info.Size() > maxLogFile || info.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", info, err)
	}
	if got := l.String(); len(got) > tailSize || !strings.HasSuffix(got, "the end \xff") {
		t.Errorf("tail of %d bytes", len(got))
	}
	if got := l.excerpt(); len(got) > errorTail || !strings.HasSuffix(got, "the end ?") {
		t.Errorf("excerpt of %d bytes: %q", len(got), got[max(0, len(got)-20):])
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	if n, err := l.Write([]byte("x")); n != 1 || err != nil {
		t.Errorf("a log without a file fails: %d, %v", n, err)
	}
}

// A VMM may have put a link where the next log goes.
func TestLogDoesNotFollowLinks(t *testing.T) {
	dir := t.TempDir()
	victim, path := filepath.Join(dir, "victim"), filepath.Join(dir, "log")
	if err := errors.Join(os.WriteFile(victim, []byte("precious"), 0o600), os.Symlink(victim, path)); err != nil {
		t.Fatal(err)
	}
	l, err := newLog(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	if _, err := l.Write([]byte("overwritten")); err != nil {
		t.Fatal(err)
	}
	if content, err := os.ReadFile(victim); err != nil || string(content) != "precious" {
		t.Errorf("%q, %v", content, err)
	}
}

func TestOpenMemory(t *testing.T) {
	path := filepath.Join(t.TempDir(), "memory")
	content := make([]byte, 3<<20)
	copy(content[1<<20:], "in the middle")
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := f.Truncate(int64(len(content))); err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteAt([]byte("in the middle"), 1<<20); err != nil {
		t.Fatal(err)
	}
	f.Close()
	for readOnly, want := range map[bool]memoryMode{true: privateReadMem, false: privateSealed} {
		m, err := New().OpenMemory(t.Context(), vmm.Capabilities{ReadOnlyMem: readOnly}, path)
		if err != nil {
			t.Fatal(err)
		}
		defer m.Close()
		got, err := io.ReadAll(io.NewSectionReader(m, 0, 1<<30))
		if err != nil || !bytes.Equal(got, content) {
			t.Errorf("read-only %v: %d bytes, %v", readOnly, len(got), err)
		}
		if _, err := m.WriteAt([]byte("x"), 0); err == nil {
			t.Errorf("read-only %v: written", readOnly)
		}
		if mode, err := privateMode(m, 3); err != nil || mode != want {
			t.Errorf("read-only %v: mode %q, %v", readOnly, mode, err)
		}
		var st unix.Stat_t
		if err := unix.Fstat(int(m.Fd()), &st); err != nil || st.Blocks*512 > 1<<20 {
			t.Errorf("read-only %v: holes were filled: %d blocks, %v", readOnly, st.Blocks, err)
		}
		if _, err := privateMode(m, 4); !errors.Is(err, vmm.ErrState) {
			t.Errorf("wrong size: %v", err)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := New().OpenMemory(ctx, vmm.Capabilities{}, path); !errors.Is(err, context.Canceled) {
		t.Errorf("after the end of the context: %v", err)
	}
}

func TestLacksFilter(t *testing.T) {
	for text, want := range map[string]bool{
		"qemu-system-x86_64: -sandbox on: -sandbox support is not enabled in this QEMU binary": true,
		"qemu-system-x86_64: cannot open disk":                                                 false,
	} {
		if got := lacksFilter(errors.New(text)); got != want {
			t.Errorf("%s: %v", text, got)
		}
	}
}
