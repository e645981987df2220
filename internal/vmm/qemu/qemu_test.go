package qemu_test

import (
	"context"
	"os"
	"testing"
	"time"

	"github.com/space-sandbox/space/internal/vmm"
	"github.com/space-sandbox/space/internal/vmm/confine"
	"github.com/space-sandbox/space/internal/vmm/qemu"
	"github.com/space-sandbox/space/internal/vmm/vmmtest"
)

func TestMain(m *testing.M) {
	confine.Main()
	os.Exit(m.Run())
}

func TestSmoke(t *testing.T) {
	a := vmmtest.Build(t)
	d := qemu.New()
	begin := time.Now()
	caps, err := d.Probe(t.Context(), a.Kernel, a.Initrd)
	t.Logf("%+v %v in %v", caps, err, time.Since(begin))
	if err != nil {
		t.Fatal(err)
	}
	mem, err := os.Create(t.TempDir() + "/mem")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	cfg := vmm.Config{VCPU: 2, MemoryMiB: 256, Acceleration: vmm.TCG, Binary: caps.Binary, Dir: dir, UID: 61234, GID: 61234}
	begin = time.Now()
	vm, err := d.Boot(t.Context(), cfg, vmm.BootSource{Kernel: a.Kernel, Initrd: a.Initrd, MemoryFile: mem})
	if err != nil {
		t.Fatal(err)
	}
	defer vm.Close()
	t.Log(vm.Timings())
	c, err := vmmtest.Connect(vm)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	r, err := c.Ask(ctx, "ping")
	t.Log(r, err, time.Since(begin))
	b, _ := os.ReadFile(dir + "/console.log")
	if len(b) > 1500 {
		b = b[len(b)-1500:]
	}
	t.Log(string(b))
}
