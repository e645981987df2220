package floor

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"

	"github.com/space-sandbox/space/internal/disk"
	"github.com/space-sandbox/space/internal/vmm"
	"github.com/space-sandbox/space/internal/vmm/qemu"
)

// uid is what the VMMs run as when the caller is root: beyond those that a node gives out.
const uid = 290000

// snapshot is what Floor needs of a warm snapshot's manifest.
type snapshot struct {
	Layers       []string `json:"layers"`
	VCPU         uint32   `json:"vcpu"`
	MemoryMiB    uint32   `json:"memory_mib"`
	DiskMiB      uint32   `json:"disk_mib"`
	ControlToken string   `json:"control_token"`
}

// Floor starts VMs from the warm snapshot of a node.
type Floor struct {
	snap   snapshot
	caps   vmm.Capabilities
	driver vmm.Driver
	warm   string // the snapshot's folder
	dir    string // ours
	memory *os.File
	next   int
}

// Open finds the one warm snapshot below a node's data folder. The caller closes the Floor.
func Open(ctx context.Context, dataDir string) (_ *Floor, err error) {
	f := &Floor{driver: qemu.New()}
	var probe struct{ Caps vmm.Capabilities }
	if err := readJSON(filepath.Join(dataDir, "node", "probe.json"), &probe); err != nil {
		return nil, err
	}
	f.caps = probe.Caps
	manifests, err := filepath.Glob(filepath.Join(dataDir, "node", "warm", "*", "*", "manifest.json"))
	if err != nil || len(manifests) != 1 {
		return nil, fmt.Errorf("%d warm snapshots in %s, 1 is needed", len(manifests), dataDir)
	}
	if err := readJSON(manifests[0], &f.snap); err != nil {
		return nil, err
	}
	f.warm = filepath.Dir(manifests[0])
	if f.dir, err = os.MkdirTemp(dataDir, "floor-"); err != nil {
		return nil, err
	}
	if f.memory, err = f.driver.OpenMemory(ctx, f.caps, filepath.Join(f.warm, "memory")); err != nil {
		return nil, errors.Join(err, os.RemoveAll(f.dir))
	}
	return f, nil
}

func readJSON(path string, v any) error {
	data, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	if err := json.Unmarshal(data, v); err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	return nil
}

// Close frees the memory and removes the folder. The VMs must be closed before.
func (f *Floor) Close() error { return errors.Join(f.memory.Close(), os.RemoveAll(f.dir)) }

// config makes the folder and the disk of a new VM.
func (f *Floor) config(ctx context.Context) (vmm.Config, error) {
	f.next++
	dir := filepath.Join(f.dir, strconv.Itoa(f.next))
	cfg := vmm.Config{
		VCPU: f.snap.VCPU, MemoryMiB: f.snap.MemoryMiB, Acceleration: f.caps.Acceleration, Binary: f.caps.Binary,
		Dir: filepath.Join(dir, "vm"),
	}
	if os.Getuid() == 0 {
		cfg.UID, cfg.GID = uid, uid
	}
	if err := os.MkdirAll(cfg.Dir, 0o700); err != nil {
		return cfg, err
	}
	for i, layer := range f.snap.Layers {
		cfg.Disks = append(cfg.Disks, vmm.Disk{Serial: "layer" + strconv.Itoa(i), Path: layer, ReadOnly: true})
	}
	top := vmm.Disk{
		Serial: "writable", Path: filepath.Join(dir, "top.qcow2"),
		Backing: []string{filepath.Join(f.warm, "writable.qcow2"), filepath.Join(f.warm, "base.raw")},
	}
	cfg.Disks = append(cfg.Disks, top)
	return cfg, disk.Images{}.Top(ctx, top.Path, top.Backing, f.snap.DiskMiB)
}
