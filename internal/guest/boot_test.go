package guest

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/space-sandbox/space/internal/disk"
)

// testInit compiles the PID 1 of testdata.
func testInit(t testing.TB) []byte {
	t.Helper()
	out := filepath.Join(t.TempDir(), "init")
	cmd := exec.Command("go", "build", "-buildvcs=false", "-trimpath", "-ldflags", "-s -w", "-o", out, "./testdata/init")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if text, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, text)
	}
	data, err := os.ReadFile(out)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

// counterRate tells the kernel the rate of the time-stamp counter, which it cannot measure while the host is busy.
func counterRate(t testing.TB) string {
	t.Helper()
	info, err := os.ReadFile("/proc/cpuinfo")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(info), "cpu MHz")
	line, _, _ := strings.Cut(rest, "\n")
	mhz, err := strconv.ParseFloat(strings.Trim(line, "\t :"), 64)
	if err != nil {
		t.Fatalf("the processor's rate in %q: %v", line, err)
	}
	return fmt.Sprintf(" tsc_early_khz=%.0f", mhz*1000)
}

// boot runs a VM until it powers off and returns its console.
func boot(t testing.TB, kernel, initrd, layer string) (string, error) {
	t.Helper()
	dir := t.TempDir()
	base, top := filepath.Join(dir, "base.raw"), filepath.Join(dir, "top.qcow2")
	if err := (disk.Images{}).Base(t.Context(), base, 256); err != nil {
		t.Fatal(err)
	}
	if err := (disk.Images{}).Top(t.Context(), top, []string{base}, 256); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	file := func(driver, node, path, more string) string {
		return "driver=" + driver + ",node-name=" + node + ",file.driver=file,file.filename=" + path + more
	}
	cmd := exec.CommandContext(ctx, "qemu-system-x86_64", "-M", "microvm", "-accel", "tcg,thread=multi", "-cpu", "max",
		"-smp", "2", "-m", "512M", "-nodefaults", "-no-user-config", "-display", "none", "-serial", "stdio", "-no-reboot",
		"-kernel", kernel, "-initrd", initrd, "-append", "console=ttyS0 reboot=t panic=-1 quiet tsc=reliable"+counterRate(t),
		"-blockdev", file("raw", "d0", layer, ",read-only=on"), "-device", "virtio-blk-device,drive=d0,serial=layer0",
		"-blockdev", file("raw", "b1", base, ",read-only=on"),
		"-blockdev", file("qcow2", "d1", top, ",backing=b1"), "-device", "virtio-blk-device,drive=d1,serial=writable",
		"-object", "rng-random,id=r0,filename=/dev/urandom", "-device", "virtio-rng-device,rng=r0")
	var console bytes.Buffer
	cmd.Stdout, cmd.Stderr = &console, &console
	if err := cmd.Run(); err != nil {
		return console.String(), err
	}
	if out, err := exec.Command("qemu-img", "check", "-f", "qcow2", top).CombinedOutput(); err != nil {
		t.Errorf("the disk after use: %v\n%s", err, out)
	}
	return strings.ReplaceAll(console.String(), "\r", ""), nil
}

// TestGuestAndBaseBoot boots the real kernel with the real base layer and looks at what a sandbox would find.
func TestGuestAndBaseBoot(t *testing.T) {
	c := sharedCache(t)
	base, err := c.Base(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	g, err := Build(t.Context(), c, testInit(t), nil)
	if err != nil {
		t.Fatal(err)
	}
	console, err := boot(t, g.Kernel, g.Initrd, base.Layers[0])
	if err != nil {
		// On a machine with far more to do than processors the kernel can fail to calibrate its timers and stop.
		// The product retries such a boot once, and so does this test.
		t.Logf("first boot: %v\n%s", err, console)
		console, err = boot(t, g.Kernel, g.Initrd, base.Layers[0])
	}
	if err != nil {
		t.Fatalf("%v\n%s", err, console)
	}
	t.Log(console)
	for _, want := range []string{`USER SPACE AT `, `LOADED .*/overlay\.ko`, `LOADED .*/nf_tables\.ko`, `LOADED .*/nfsv3\.ko`,
		`RAN python --version: Python 3\.`, `RAN python3 -c .*: ok: err=<nil>`, `RAN pip --version: pip `,
		`RAN node --version: v(2[0-9]|[3-9][0-9])\.`, `RAN node -e .*: ok: err=<nil>`, `RAN npm --version: [0-9]+\.`,
		`RAN git --version: git version`, `RAN curl --version: curl `, `RAN ip -br link: lo`, `RAN ps .*: 1: err=<nil>`,
		`(?s)RAN su user .*: user\nroot\n/home/user\n/: err=<nil>`, `(?s)RAN su - user .*: /home/user\nx: err=<nil>`,
		`LANG=C\.UTF-8`, `: clean: err=<nil>`, `: renamed: err=<nil>`,
		`RAN cat /proc/sys/kernel/osrelease: ` + regexp.QuoteMeta(g.KernelVersion), `DONE `} {
		if !regexp.MustCompile(want).MatchString(console) {
			t.Errorf("the console does not show %q", want)
		}
	}
	if strings.Contains(console, "FAILED") {
		t.Error("the guest failed")
	}
}
