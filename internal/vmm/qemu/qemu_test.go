package qemu_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/space-sandbox/space/internal/vmm"
	"github.com/space-sandbox/space/internal/vmm/confine"
	"github.com/space-sandbox/space/internal/vmm/qemu"
	"github.com/space-sandbox/space/internal/vmm/vmmtest"
	"golang.org/x/sys/unix"
)

func TestMain(m *testing.M) {
	confine.Main()
	if len(os.Args) > 2 && os.Args[1] == "holder" {
		hold(os.Args[2:])
		return
	}
	os.Exit(m.Run())
}

const testUID = 61235 // owns nothing on the host

func newEnv(t *testing.T) vmmtest.Env {
	t.Helper()
	guest := vmmtest.Build(t)
	driver := qemu.New()
	caps, err := driver.Probe(t.Context(), guest.Kernel, guest.Initrd)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%+v", caps)
	return vmmtest.Env{Driver: driver, Caps: caps, Guest: guest, UID: testUID, GID: testUID, NewTop: newTop}
}

// newTop makes an empty qcow2 image without the name of a backing file: the driver gives that.
func newTop(ctx context.Context, path string, size int64) error {
	out, err := exec.CommandContext(ctx, "qemu-img", "create", "-q", "-f", "qcow2", path, strconv.FormatInt(size, 10)).CombinedOutput()
	if err != nil {
		return fmt.Errorf("qemu-img: %w: %s", err, out)
	}
	return nil
}

func TestConformance(t *testing.T) { vmmtest.Run(t, newEnv) }

// boot starts a guest and returns without waiting for it.
func boot(t testing.TB, dir string, unconfined bool, guest vmmtest.Artifacts) (vmm.VM, error) {
	t.Helper()
	return start(t.Context(), dir, unconfined, guest.Kernel, guest.Initrd)
}

func start(ctx context.Context, dir string, unconfined bool, kernel, initrd string) (vmm.VM, error) {
	memory, err := os.Create(filepath.Join(dir, "memory"))
	if err != nil {
		return nil, err
	}
	defer memory.Close()
	binary, err := exec.LookPath(qemu.Program)
	if err != nil {
		return nil, err
	}
	own := filepath.Join(dir, "own")
	if err := os.MkdirAll(own, 0o700); err != nil {
		return nil, err
	}
	cfg := vmm.Config{
		VCPU: 1, MemoryMiB: 128, Acceleration: vmm.TCG, Binary: binary, Dir: own, UID: testUID, GID: testUID, Unconfined: unconfined,
	}
	return qemu.New().Boot(ctx, cfg, vmm.BootSource{Kernel: kernel, Initrd: initrd, MemoryFile: memory})
}

// hold boots a VM, says its process ID, and keeps it until killed.
func hold(args []string) {
	vm, err := start(context.Background(), args[0], args[1] == "true", args[2], args[3])
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(vm.PID())
	<-vm.Done()
}

func TestVMMDiesWithItsCaller(t *testing.T) {
	guest := vmmtest.Build(t)
	for _, unconfined := range []bool{false, true} {
		t.Run(fmt.Sprintf("unconfined %v", unconfined), func(t *testing.T) {
			exe, err := os.Executable()
			if err != nil {
				t.Fatal(err)
			}
			caller := exec.Command(exe, "holder", t.TempDir(), strconv.FormatBool(unconfined), guest.Kernel, guest.Initrd)
			out, err := caller.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := caller.Start(); err != nil {
				t.Fatal(err)
			}
			defer func() {
				_ = caller.Process.Kill()
				_ = caller.Wait()
			}()
			var pid int
			if _, err := fmt.Fscan(out, &pid); err != nil {
				t.Fatal(err)
			}
			child, err := unix.PidfdOpen(pid, 0)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = unix.Close(child) })
			if err := caller.Process.Kill(); err != nil {
				t.Fatal(err)
			}
			awaitDeath(t, child)
		})
	}
}

// The VMM's process shows what confinement has taken away.
func TestVMMIsConfined(t *testing.T) {
	guest := vmmtest.Build(t)
	dir := t.TempDir()
	vm, err := boot(t, dir, false, guest)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = vm.Close() })
	proc := fmt.Sprintf("/proc/%d/", vm.PID())
	status, err := os.ReadFile(proc + "status")
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"NoNewPrivs:\t1", "Seccomp:\t2", "CapPrm:\t0000000000000000", "CapBnd:\t0000000000000000"} {
		if !strings.Contains(string(status), want) {
			t.Errorf("status lacks %q", want)
		}
	}
	if environ, err := os.ReadFile(proc + "environ"); err != nil || len(environ) != 0 {
		t.Errorf("environment %q, %v", environ, err)
	}
	for _, ns := range []string{"mnt", "pid", "net", "ipc"} {
		theirs, err1 := os.Readlink(proc + "ns/" + ns)
		ours, err2 := os.Readlink("/proc/self/ns/" + ns)
		if err := errors.Join(err1, err2); err != nil || theirs == ours {
			t.Errorf("namespace %s: %s, %v", ns, theirs, err)
		}
	}
	for _, path := range []string{"/etc/passwd", "/var", "/home", "/sys", "/proc/cpuinfo", filepath.Join(dir, "memory")} {
		if _, err := os.Stat(proc + "root" + path); err == nil {
			t.Errorf("the VMM sees %s", path)
		}
	}
	if os.Geteuid() == 0 {
		checkOwners(t, dir, vm)
	}
}

// checkOwners: the VMM's user owns its folder and, while it lives, the memory file.
func checkOwners(t *testing.T, dir string, vm vmm.VM) {
	t.Helper()
	owner := func(path string) uint32 {
		var st unix.Stat_t
		if err := unix.Lstat(path, &st); err != nil {
			t.Fatal(err)
		}
		return st.Uid
	}
	if got := owner(filepath.Join(dir, "own")); got != testUID {
		t.Errorf("the VM's folder belongs to %d", got)
	}
	if got := owner(dir); got != 0 {
		t.Errorf("the folder above belongs to %d", got)
	}
	if err := vm.Close(); err != nil {
		t.Fatal(err)
	}
	if got := owner(filepath.Join(dir, "memory")); got != 0 {
		t.Errorf("the memory file was not given back: it belongs to %d", got)
	}
}

func TestProbeWithoutQEMU(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	_, err := qemu.New().Probe(t.Context(), "/kernel", "/initrd")
	if !errors.Is(err, vmm.ErrUnsupported) || !strings.Contains(err.Error(), "qemu-system-x86") {
		t.Errorf("%v", err)
	}
}

func TestProbeSaysWhyNotKVM(t *testing.T) {
	guest := vmmtest.Build(t)
	caps, err := qemu.New().Probe(t.Context(), guest.Kernel, guest.Initrd)
	if err != nil {
		t.Fatal(err)
	}
	if (caps.Acceleration == vmm.KVM) != (caps.AccelReason == "") {
		t.Errorf("%s because of %q", caps.Acceleration, caps.AccelReason)
	}
	if (caps.Isolation == "full") != (len(caps.IsolationGaps) == 0) || caps.Version == "" || caps.OverheadMiB == 0 {
		t.Errorf("%+v", caps)
	}
}

// BenchmarkStart compares how long a VMM takes to answer with and without confinement.
func BenchmarkStart(b *testing.B) {
	guest := vmmtest.Build(b)
	for _, unconfined := range []bool{true, false} {
		b.Run(fmt.Sprintf("unconfined %v", unconfined), func(b *testing.B) {
			for b.Loop() {
				vm, err := boot(b, b.TempDir(), unconfined, guest)
				if err != nil {
					b.Fatal(err)
				}
				for _, t := range vm.Timings() {
					b.ReportMetric(float64(t.Duration.Microseconds())/1000, t.Phase+"-ms")
				}
				if err := vm.Close(); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
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
