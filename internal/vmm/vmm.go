package vmm

import (
	"context"
	"errors"
	"net"
	"os"
	"time"
)

// Errors that drivers return, wrapped with the particulars.
var (
	// ErrUnsupported: this machine or VMM cannot do it; the text says what is missing.
	ErrUnsupported = errors.New("not supported here")
	// ErrExited: the VMM has ended; the text holds the end of its log.
	ErrExited = errors.New("vmm exited")
	// ErrState: the device state does not fit this VMM or configuration. The snapshot is untouched.
	ErrState = errors.New("device state refused")
)

// Acceleration is how guest code is executed.
type Acceleration string

// KVM is hardware virtualisation. TCG is software emulation: slower, and never called a security boundary.
const (
	KVM Acceleration = "kvm"
	TCG Acceleration = "tcg"
)

// Capabilities is what Probe found. It is data: a missing thing has a reason, not an error.
type Capabilities struct {
	VMM           string // "qemu"
	Version       string
	Binary        string
	Acceleration  Acceleration
	AccelReason   string   // why not KVM; empty with KVM
	Isolation     string   // "full" or "reduced"
	IsolationGaps []string // what is missing for "full", each with its remedy
	OverheadMiB   uint32   // host memory per VM beside the guest's own pages
	ReadOnlyMem   bool     // memory files can be mapped from a read-only descriptor; else sealed memfds are used
}

// Disk is one block device of the guest.
type Disk struct {
	Serial   string   // the guest finds it by this: "layer0".., "writable"
	Path     string   // raw image when read-only, qcow2 when writable
	Backing  []string // writable only: immutable images below the top, nearest first; the last is raw, others qcow2
	ReadOnly bool
}

// Config is everything about a VM that must be equal when its state is captured and restored.
type Config struct {
	VCPU         uint32
	MemoryMiB    uint32
	Disks        []Disk // order matters
	Acceleration Acceleration
	Binary       string // the VMM program
	// Dir is an existing folder that belongs to this VM alone: the driver puts logs and sockets there, with the
	// owner it gives the VMM. Serial and VMM logs are bounded.
	Dir string
	// UID and GID are what the VMM runs as when the caller is root; 0 means the caller's own.
	UID, GID uint32
	// CgroupFD is an open cgroup v2 folder the VMM is started in; nil for none.
	CgroupFD *os.File
	// Unconfined switches confinement off. Only for tests that show what confinement changes.
	Unconfined bool
}

// BootSource is what a cold boot starts from.
type BootSource struct {
	Kernel, Initrd string
	Cmdline        string // the driver adds what its machine needs (console, tsc=reliable, ...)
	// MemoryFile becomes the guest's RAM, shared: after Stop it is the RAM image. Opened read-write by the caller,
	// of any size; the driver sizes it. When the VMM runs as another user, the file belongs to that user until the
	// VM has ended.
	MemoryFile *os.File
}

// Snapshot is what Restore starts from. Nothing in it is ever written.
type Snapshot struct {
	Memory *os.File // from Driver.OpenMemory
	State  string   // device state file, from VM.CaptureState
}

// Driver starts virtual machines. Implementations are safe for concurrent use.
type Driver interface {
	// Name is a short constant, "qemu".
	Name() string
	// Probe finds out what works here. KVM is proven by running the given kernel under it, with a deadline: a
	// device that opens proves nothing. Probing starts processes; callers cache the result.
	Probe(ctx context.Context, kernel, initrd string) (Capabilities, error)
	// OpenMemory opens a RAM image so that any number of VMs can map it privately and none can write it: a
	// read-only descriptor where the VMM can use one, else a sealed memfd with a copy. The caller closes it.
	OpenMemory(ctx context.Context, caps Capabilities, path string) (*os.File, error)
	// Boot starts a VM from a kernel; it runs when Boot returns. The guest's progress is the caller's to watch.
	Boot(ctx context.Context, cfg Config, src BootSource) (VM, error)
	// Restore starts a VM from a snapshot and returns it stopped, its device state loaded.
	// ErrState if the state does not load. ctx bounds the start only; the VM lives on after it.
	Restore(ctx context.Context, cfg Config, snap Snapshot) (VM, error)
}

// VM is one running or stopped virtual machine.
type VM interface {
	// PID is the VMM's process ID in the caller's namespace.
	PID() int
	// Continue lets the guest run. Continuing a running VM is an error.
	Continue(ctx context.Context) error
	// Stop halts all vCPUs and flushes the disks. Memory, disks and device state then belong to one instant.
	Stop(ctx context.Context) error
	// CaptureState writes the device state of a stopped VM to a new file of mode 0600.
	CaptureState(ctx context.Context, path string) error
	// ControlLink and WorkloadLink carry Ethernet frames, each preceded by its length as 4 bytes big-endian. They
	// are the host ends of the guest's second and first network device; the VM closes them when it ends. Whoever
	// does not read a link stops only the guest's transmission on it.
	ControlLink() net.Conn
	WorkloadLink() net.Conn
	// Done is closed when the VMM's death was seen. Err then says why; nil after Close.
	Done() <-chan struct{}
	Err() error
	// Close kills the VMM with everything in its PID namespace, waits for the death and frees what Boot or
	// Restore took. Safe to call twice. It fails only if the kernel did not deliver the death within 10 s.
	Close() error
	// Timings tells what the phases of the start took.
	Timings() []Timing
}

// Timing is the duration of one phase.
type Timing struct {
	Phase    string
	Duration time.Duration
}

// The guest's fixed network addresses. They are the same in every sandbox, so that a snapshot needs no renumbering.
const (
	WorkloadMAC   = "02:00:00:00:00:02" // the guest's first device
	WorkloadGuest = "169.254.0.21"      // /30
	WorkloadHost  = "169.254.0.22"
	ControlMAC    = "02:00:00:00:01:02" // the guest's second device
	ControlGuest  = "169.254.1.2"       // /30
	ControlHost   = "169.254.1.1"
	LinkHostMAC   = "02:00:00:00:00:01" // the host end of both
	LinkMTU       = 65520               // of the control link; the workload link has 1500
	AgentPort     = 1024                // TCP, on ControlGuest
)
