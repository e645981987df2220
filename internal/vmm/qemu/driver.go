package qemu

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync/atomic"
	"time"

	"github.com/space-sandbox/space/internal/vmm"
	"golang.org/x/sys/unix"
)

// Program is the binary that Probe looks for.
const Program = "qemu-system-x86_64"

// startTimeout bounds a start when the caller's context does not.
const startTimeout = 30 * time.Second

// Driver implements vmm.Driver.
type Driver struct {
	// noSandbox is set once QEMU was seen to be built without its system call filter.
	noSandbox atomic.Bool
}

var _ vmm.Driver = (*Driver)(nil)

// New returns a driver. It holds nothing that must be closed.
func New() *Driver { return &Driver{} }

// Name implements vmm.Driver.
func (d *Driver) Name() string { return "qemu" }

// Boot implements vmm.Driver. For the life of the VM the memory file belongs to the VMM's user, as QEMU opens it
// again; afterwards it is given back.
func (d *Driver) Boot(ctx context.Context, cfg vmm.Config, src vmm.BootSource) (vmm.VM, error) {
	m, err := d.boot(ctx, cfg, src)
	if err != nil {
		return nil, fmt.Errorf("boot: %w", err)
	}
	return m, nil
}

func (d *Driver) boot(ctx context.Context, cfg vmm.Config, src vmm.BootSource) (*machine, error) {
	if err := errors.Join(validate(cfg), validateBoot(src)); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	if err := src.MemoryFile.Truncate(int64(cfg.MemoryMiB) << 20); err != nil {
		return nil, fmt.Errorf("size memory file: %w", err)
	}
	var tsc uint64
	if cfg.Acceleration == vmm.TCG {
		tsc = hostTSC(ctx)
	}
	giveBack, err := lend(src.MemoryFile, cfg)
	if err != nil {
		return nil, err
	}
	l := launch{
		cfg: cfg, memory: src.MemoryFile, release: giveBack,
		readOnly: []string{src.Kernel, src.Initrd},
		args:     append(arguments(cfg, memoryObject(cfg.MemoryMiB, sharedMemory)), bootArguments(cfg, src, tsc)...),
	}
	return d.start(ctx, l)
}

// Restore implements vmm.Driver.
func (d *Driver) Restore(ctx context.Context, cfg vmm.Config, snap vmm.Snapshot) (vmm.VM, error) {
	m, err := d.restore(ctx, cfg, snap)
	if err != nil {
		return nil, fmt.Errorf("restore: %w", err)
	}
	return m, nil
}

func (d *Driver) restore(ctx context.Context, cfg vmm.Config, snap vmm.Snapshot) (*machine, error) {
	if err := validate(cfg); err != nil {
		return nil, err
	}
	mode, err := privateMode(snap.Memory, cfg.MemoryMiB)
	if err != nil {
		return nil, err
	}
	state, err := openState(snap.State)
	if err != nil {
		return nil, err
	}
	defer state.Close()
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	args := append(arguments(cfg, memoryObject(cfg.MemoryMiB, mode)), "-incoming", "defer", "-S")
	m, err := d.start(ctx, launch{cfg: cfg, memory: snap.Memory, args: args})
	if err != nil {
		return nil, err
	}
	if err := m.load(ctx, state); err != nil {
		return nil, errors.Join(err, m.Close())
	}
	return m, nil
}

// start launches QEMU, a second time without its system call filter if this build has none.
func (d *Driver) start(ctx context.Context, l launch) (*machine, error) {
	l.filter = !d.noSandbox.Load()
	m, err := l.start(ctx)
	if err == nil || !l.filter || !lacksFilter(err) {
		return m, err
	}
	d.noSandbox.Store(true)
	l.filter = false
	return l.start(ctx)
}

// lacksFilter recognises what QEMU says to -sandbox when it was built without it.
func lacksFilter(err error) bool {
	text := err.Error()
	return strings.Contains(text, "-sandbox support is not enabled") || strings.Contains(text, "no option group 'sandbox'")
}

// lend gives a file that QEMU opens by name to the VMM's user and returns what takes it back.
func lend(f *os.File, cfg vmm.Config) (func(), error) {
	if os.Geteuid() != 0 || cfg.UID == 0 || cfg.Unconfined {
		return func() {}, nil
	}
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return nil, fmt.Errorf("memory file: %w", err)
	}
	own, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0) // the caller may close its descriptor before
	if err != nil {
		return nil, fmt.Errorf("memory file: %w", err)
	}
	if err := unix.Fchown(own, int(cfg.UID), int(cfg.GID)); err != nil {
		_ = unix.Close(own)
		return nil, fmt.Errorf("memory file: %w", err)
	}
	return func() {
		_ = unix.Fchown(own, int(st.Uid), int(st.Gid))
		_ = unix.Close(own)
	}, nil
}
