package qemu_test

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"testing"

	"github.com/space-sandbox/space/internal/vmm/confine"
	"github.com/space-sandbox/space/internal/vmm/qemu"
	"github.com/space-sandbox/space/internal/vmm/vmmtest"
)

func TestMain(m *testing.M) {
	confine.Main()
	if len(os.Args) > 2 && os.Args[1] == "holder" {
		hold(os.Args[2])
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

func hold(string) {}
