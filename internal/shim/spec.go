package shim

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	shimv1 "github.com/space-sandbox/space/internal/gen/space/shim/v1"
	"github.com/space-sandbox/space/internal/vmm"
	"google.golang.org/protobuf/encoding/protojson"
)

const (
	specFile     = "spec.json"
	pidFile      = "pid.json"
	maxSocket    = 100
	maxSpecBytes = 1 << 20
)

// loadSpec reads and checks the launch spec in dir.
func loadSpec(dir string) (*shimv1.LaunchSpec, error) {
	path := filepath.Join(dir, specFile)
	st, err := os.Stat(path)
	if err != nil {
		return nil, fmt.Errorf("launch spec: %w", err)
	}
	if st.Size() > maxSpecBytes {
		return nil, fmt.Errorf("launch spec: %d bytes are too many", st.Size())
	}
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("launch spec: %w", err)
	}
	spec := new(shimv1.LaunchSpec)
	// Fields of a newer node are ignored: a node may be updated while its shims live on.
	if err := (protojson.UnmarshalOptions{DiscardUnknown: true}).Unmarshal(data, spec); err != nil {
		return nil, fmt.Errorf("launch spec: %w", err)
	}
	if err := checkSpec(spec); err != nil {
		return nil, fmt.Errorf("launch spec: %w", err)
	}
	return spec, nil
}

func checkSpec(s *shimv1.LaunchSpec) error {
	var errs []error
	need := func(ok bool, what string) {
		if !ok {
			errs = append(errs, errors.New(what))
		}
	}
	need(s.GetShimId() != "", "shim_id is missing")
	need(s.GetControlToken() != "", "control_token is missing")
	need(s.GetResources().GetVcpu() > 0 && s.GetResources().GetMemoryMib() > 0, "resources are missing")
	need(s.GetAcceleration() == string(vmm.KVM) || s.GetAcceleration() == string(vmm.TCG), "acceleration is neither kvm nor tcg")
	switch s.GetMode() {
	case shimv1.LaunchSpec_MODE_RESTORE:
		need(len(s.GetToken()) >= 16, "token is missing or short")
		need(s.GetSocket() != "" && len(s.GetSocket()) <= maxSocket, "socket is missing or longer than 100 bytes")
		need(s.GetDeviceState() != "", "device_state is missing")
	case shimv1.LaunchSpec_MODE_CAPTURE:
		need(s.GetKernel() != "" && s.GetInitrd() != "", "kernel or initrd is missing")
		need(s.GetCaptureDir() != "", "capture_dir is missing")
		need(!strings.ContainsAny(s.GetControlToken(), " \t\n\""), "control_token does not fit a kernel command line")
	default:
		need(false, "mode is unknown")
	}
	return errors.Join(errs...)
}

// identity names a process for ever: a PID that was used again has another start time, or another boot.
type identity struct {
	PID       int    `json:"pid"`
	BootID    string `json:"boot_id"`
	StartTime uint64 `json:"start_time"` // clock ticks after boot
}

func self() (identity, error) {
	id := identity{PID: os.Getpid()}
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return id, err
	}
	id.BootID = strings.TrimSpace(string(boot))
	stat, err := os.ReadFile("/proc/self/stat")
	if err != nil {
		return id, err
	}
	// The name in parentheses may hold anything; field 22 is the 20th after it.
	_, rest, _ := strings.Cut(string(stat[strings.LastIndexByte(string(stat), ')')+1:]), " ")
	fields := strings.Fields(rest)
	if len(fields) < 20 {
		return id, errors.New("/proc/self/stat is short")
	}
	id.StartTime, err = strconv.ParseUint(fields[19], 10, 64)
	return id, err
}

// writePID notes the shim's own identity, in the form that the node reads and later completes by the VMM's.
func writePID(dir string) error {
	id, err := self()
	if err != nil {
		return fmt.Errorf("identify the shim: %w", err)
	}
	data, err := json.Marshal(map[string]identity{"shim": id})
	if err != nil {
		return err
	}
	tmp := filepath.Join(dir, "."+pidFile+".shim")
	if err := os.WriteFile(tmp, data, 0o600); err != nil {
		return fmt.Errorf("write %s: %w", pidFile, err)
	}
	return os.Rename(tmp, filepath.Join(dir, pidFile))
}

// vmConfig translates the spec for the driver. The caller closes the cgroup's descriptor, if there is one.
func vmConfig(dir string, s *shimv1.LaunchSpec) (vmm.Config, error) {
	own := filepath.Join(dir, "vm")
	if err := os.Mkdir(own, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
		return vmm.Config{}, err
	}
	cfg := vmm.Config{
		VCPU: s.GetResources().GetVcpu(), MemoryMiB: s.GetResources().GetMemoryMib(),
		Acceleration: vmm.Acceleration(s.GetAcceleration()), Binary: s.GetQemuBinary(),
		Dir: own, UID: s.GetVmmUid(), GID: s.GetVmmUid(),
	}
	if cfg.UID != 0 && os.Getuid() == 0 {
		if err := os.Chown(own, int(cfg.UID), int(cfg.GID)); err != nil {
			return cfg, err
		}
	}
	for i, layer := range s.GetLayers() {
		cfg.Disks = append(cfg.Disks, vmm.Disk{Serial: "layer" + strconv.Itoa(i), Path: layer, ReadOnly: true})
	}
	if s.GetWritableTop() != "" {
		cfg.Disks = append(cfg.Disks, vmm.Disk{Serial: "writable", Path: s.GetWritableTop(), Backing: s.GetWritableBacking()})
	}
	if s.GetCgroup() != "" {
		f, err := os.Open(s.GetCgroup())
		if err != nil {
			return cfg, fmt.Errorf("cgroup: %w", err)
		}
		cfg.CgroupFD = f
	}
	return cfg, nil
}
