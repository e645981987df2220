package qemu

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"

	"github.com/space-sandbox/space/internal/vmm"
)

const (
	maxTransports = 24 // virtio-mmio devices of a microvm
	otherDevices  = 3  // two network devices and the random number generator
	maxDisks      = maxTransports - otherDevices
	maxVCPU       = 64
	minMemoryMiB  = 64
)

var serialPattern = regexp.MustCompile(`^[a-z0-9][a-z0-9_-]{0,19}$`) // virtio allows 20 bytes

// validate finds mistakes of the caller before QEMU words them.
func validate(cfg vmm.Config) error {
	var errs []error
	bad := func(format string, args ...any) { errs = append(errs, fmt.Errorf("config: "+format, args...)) }
	if cfg.VCPU < 1 || cfg.VCPU > maxVCPU {
		bad("vcpu is %d, must be 1 to %d", cfg.VCPU, maxVCPU)
	}
	if cfg.MemoryMiB < minMemoryMiB {
		bad("memory is %d MiB, must be at least %d", cfg.MemoryMiB, minMemoryMiB)
	}
	if cfg.Acceleration != vmm.KVM && cfg.Acceleration != vmm.TCG {
		bad("acceleration is %q, must be %q or %q", cfg.Acceleration, vmm.KVM, vmm.TCG)
	}
	if !filepath.IsAbs(cfg.Binary) {
		bad("binary is %q, must be an absolute path", cfg.Binary)
	}
	if info, err := os.Stat(cfg.Dir); err != nil || !info.IsDir() || !filepath.IsAbs(cfg.Dir) {
		bad("dir %q must be the absolute path of an existing folder", cfg.Dir)
	}
	if len(cfg.Disks) > maxDisks {
		bad("%d disks, must be at most %d", len(cfg.Disks), maxDisks)
	}
	seen := map[string]bool{}
	for i, d := range cfg.Disks {
		if err := validateDisk(d); err != nil {
			bad("disk %d: %w", i, err)
		}
		if seen[d.Serial] {
			bad("disk %d: serial %q is used twice", i, d.Serial)
		}
		seen[d.Serial] = true
	}
	return errors.Join(errs...)
}

func validateDisk(d vmm.Disk) error {
	if !serialPattern.MatchString(d.Serial) {
		return fmt.Errorf("serial %q must match %s", d.Serial, serialPattern)
	}
	if d.ReadOnly && len(d.Backing) > 0 {
		return errors.New("a read-only disk is one raw image and has no backing")
	}
	for _, p := range append([]string{d.Path}, d.Backing...) {
		if !filepath.IsAbs(p) {
			return fmt.Errorf("path %q must be absolute", p)
		}
		if info, err := os.Stat(p); err != nil {
			return err
		} else if !info.Mode().IsRegular() {
			return fmt.Errorf("%s is no regular file", p)
		}
	}
	return nil
}

func validateBoot(src vmm.BootSource) error {
	if src.MemoryFile == nil {
		return errors.New("boot source: no memory file")
	}
	for _, p := range []string{src.Kernel, src.Initrd} {
		if !filepath.IsAbs(p) {
			return fmt.Errorf("boot source: path %q must be absolute", p)
		}
	}
	return nil
}
