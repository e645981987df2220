package qemu

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"time"

	"github.com/space-sandbox/space/internal/vmm"
	"github.com/space-sandbox/space/internal/vmm/qmp"
)

const (
	kvmDevice   = "/dev/kvm"
	kvmDeadline = 10 * time.Second // for a guest's user space under KVM; it needs less than one
	kvmSilence  = 4 * time.Second  // without any word of the kernel
	probeMiB    = 256
	// What a VM needs beside its guest's pages.
	overheadTCG = 150 // most of it the translation cache
	overheadKVM = 60
)

// signsOfLife are what the console shows once a guest has reached user space.
var signsOfLife = []string{"Run /init as init process", "space-agent: ready"}

// Probe implements vmm.Driver. It starts one QEMU without a machine and, if there is a KVM device, one with a guest.
func (d *Driver) Probe(ctx context.Context, kernel, initrd string) (vmm.Capabilities, error) {
	binary, err := exec.LookPath(Program)
	if err != nil {
		return vmm.Capabilities{}, fmt.Errorf("%w: %s not found: install the package qemu-system-x86", vmm.ErrUnsupported, Program)
	}
	caps := vmm.Capabilities{VMM: d.Name(), Binary: binary, OverheadMiB: overheadTCG}
	dir, err := os.MkdirTemp("", "space-probe-")
	if err != nil {
		return vmm.Capabilities{}, fmt.Errorf("probe: %w", err)
	}
	defer func() { _ = os.RemoveAll(dir) }()
	if err := d.probeFeatures(ctx, dir, &caps); err != nil {
		return vmm.Capabilities{}, fmt.Errorf("probe %s: %w", binary, err)
	}
	caps.Acceleration = vmm.KVM
	if caps.AccelReason = oneLine(d.probeKVM(ctx, dir, binary, kernel, initrd)); caps.AccelReason != "" {
		caps.Acceleration = vmm.TCG
	} else {
		caps.OverheadMiB = overheadKVM
	}
	return caps, ctx.Err()
}

// probeFeatures asks a QEMU that has no machine what it can do, and sees on the way how well it can be confined.
func (d *Driver) probeFeatures(ctx context.Context, dir string, caps *vmm.Capabilities) (err error) {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	cfg := vmm.Config{Binary: caps.Binary, Dir: dir, UID: uint32(os.Geteuid()), GID: uint32(os.Getegid())}
	m, err := d.start(ctx, launch{cfg: cfg, args: []string{"-M", "none"}})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, m.Close()) }()
	g := m.greeting
	caps.Version = strings.TrimSpace(fmt.Sprintf("%d.%d.%d %s", g.Major, g.Minor, g.Micro, g.Package))
	microvm, err := m.qmp.HasMachine(ctx, "microvm")
	if err != nil {
		return err
	}
	if !microvm {
		return fmt.Errorf("%w: no microvm machine in this build: install the package qemu-system-x86", vmm.ErrUnsupported)
	}
	if caps.ReadOnlyMem, err = m.qmp.HasProperty(ctx, "memory-backend-file", "rom"); err != nil {
		return err
	}
	caps.IsolationGaps = m.proc.Gaps()
	if d.noSandbox.Load() {
		caps.IsolationGaps = append(caps.IsolationGaps, "QEMU without system call filter: use a build with seccomp")
	}
	caps.Isolation = "full"
	if len(caps.IsolationGaps) > 0 {
		caps.Isolation = "reduced"
	}
	return nil
}

// probeKVM returns why KVM cannot be used, or nothing if a guest has run under it.
func (d *Driver) probeKVM(ctx context.Context, dir, binary, kernel, initrd string) string {
	f, err := os.OpenFile(kvmDevice, os.O_RDWR, 0)
	if err != nil {
		return fmt.Sprintf("cannot open the KVM device: %v", err)
	}
	f.Close()
	memory, err := os.CreateTemp(dir, "memory-")
	if err != nil {
		return err.Error()
	}
	defer memory.Close()
	ctx, cancel := context.WithTimeout(ctx, kvmDeadline)
	defer cancel()
	cfg := vmm.Config{
		VCPU: 1, MemoryMiB: probeMiB, Acceleration: vmm.KVM, Binary: binary, Dir: dir,
		UID: uint32(os.Geteuid()), GID: uint32(os.Getegid()),
	}
	m, err := d.boot(ctx, cfg, vmm.BootSource{Kernel: kernel, Initrd: initrd, MemoryFile: memory})
	if err != nil {
		return fmt.Sprintf("%s opens, but no VM starts: %v", kvmDevice, err)
	}
	reason := m.watchBoot(ctx, kvmSilence)
	if err := m.Close(); err != nil {
		return err.Error()
	}
	return reason
}

// watchBoot waits until the console shows that the guest has reached user space, and else returns what kept it.
func (m *machine) watchBoot(ctx context.Context, silence time.Duration) string {
	const prefix = kvmDevice + " opens, but a guest does not run: "
	timer := time.NewTimer(silence)
	defer timer.Stop()
	for {
		select {
		case <-m.console.grown:
			timer.Stop() // it speaks: the context's deadline is enough
			if m.alive() {
				return ""
			}
		case <-m.halted:
			if status, err := m.qmp.Status(ctx); err == nil && status == qmp.InternalError {
				return prefix + "KVM internal error: " + m.log.excerpt()
			}
		case <-m.done:
			return prefix + fmt.Sprint(m.err)
		case <-timer.C:
			return fmt.Sprintf("%sits kernel said nothing within %v", prefix, silence)
		case <-ctx.Done():
			if errors.Is(ctx.Err(), context.Canceled) {
				return "probe was cancelled"
			}
			return fmt.Sprintf("%sno user space within %v", prefix, kvmDeadline)
		}
	}
}

func (m *machine) alive() bool {
	text := m.console.String()
	for _, s := range signsOfLife {
		if strings.Contains(text, s) {
			return true
		}
	}
	return false
}

func oneLine(text string) string { return strings.Join(strings.Fields(text), " ") }
