package qemu

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"time"

	"github.com/space-sandbox/space/internal/vmm"
	"github.com/space-sandbox/space/internal/vmm/confine"
	"github.com/space-sandbox/space/internal/vmm/qmp"
	"golang.org/x/sys/unix"
)

// launch is one start of QEMU.
type launch struct {
	cfg      vmm.Config
	args     []string // beside the common ones
	memory   *os.File // nil for a machine without memory
	readOnly []string // files to see beside the disks
	filter   bool     // QEMU's own system call filter
	release  func()   // called once when the VMM is dead or did not start
}

// start runs QEMU and waits until it answers. On error nothing is left.
func (l *launch) start(ctx context.Context) (_ *machine, err error) {
	m := newMachine(l.release)
	defer func() {
		if err != nil && m.proc == nil {
			m.dispose()
		}
	}()
	if err := l.handOver(); err != nil {
		return nil, err
	}
	command, ends, err := l.prepare(m)
	defer closeAll(ends)
	if err != nil {
		return nil, err
	}
	begin := time.Now()
	if m.proc, err = confine.Start(ctx, command); err != nil {
		return nil, fmt.Errorf("start %s: %w", l.cfg.Binary, err)
	}
	closeAll(ends)
	m.lap("vmm_start", begin)
	m.run()
	begin = time.Now()
	if m.greeting, err = m.qmp.Handshake(ctx); err != nil {
		return nil, errors.Join(m.explain(ctx, err), m.Close())
	}
	m.lap("memory_map", begin)
	return m, nil
}

// handOver gives the VMM's user what it must write: the VM's folder and the tops of its disks, and nothing else.
func (l *launch) handOver() error {
	if os.Geteuid() != 0 || l.cfg.UID == 0 || l.cfg.Unconfined {
		return nil
	}
	paths := append([]string{l.cfg.Dir}, writable(l.cfg.Disks)...)
	for _, p := range paths {
		if err := os.Lchown(p, int(l.cfg.UID), int(l.cfg.GID)); err != nil {
			return err
		}
	}
	return nil
}

func writable(disks []vmm.Disk) []string {
	var paths []string
	for _, d := range disks {
		if !d.ReadOnly {
			paths = append(paths, d.Path)
		}
	}
	return paths
}

// prepare makes the sockets and logs, whose host ends become m's. The other ends are the caller's to close, also
// after an error.
func (l *launch) prepare(m *machine) (confine.Command, []*os.File, error) {
	var ends []*os.File
	var conns [4]net.Conn
	for i := range conns {
		conn, end, err := socketpair()
		if err != nil {
			closeConns(conns[:])
			return confine.Command{}, ends, err
		}
		conns[i], ends = conn, append(ends, end)
	}
	m.qmp = qmp.New(conns[0].(*net.UnixConn), m.event)
	m.workload, m.control, m.consoleConn = conns[1], conns[2], conns[3]
	r, w, err := os.Pipe()
	if err != nil {
		return confine.Command{}, ends, err
	}
	m.logPipe, ends = r, append(ends, w)
	if m.console, err = newLog(filepath.Join(l.cfg.Dir, "console.log")); err != nil {
		return confine.Command{}, ends, err
	}
	if m.log, err = newLog(filepath.Join(l.cfg.Dir, "vmm.log")); err != nil {
		return confine.Command{}, ends, err
	}
	command := l.command(ends[:4])
	command.Stdout, command.Stderr = w, w
	return command, ends, nil
}

func (l *launch) command(sockets []*os.File) confine.Command {
	c := confine.Command{
		Path: l.cfg.Binary, Args: append(commonArguments(l.filter), l.args...), Dir: l.cfg.Dir,
		ReadWrite: writable(l.cfg.Disks), ReadOnly: append([]string{}, l.readOnly...),
		Files: append([]*os.File{}, sockets...), UID: l.cfg.UID, GID: l.cfg.GID,
		CgroupFD: l.cfg.CgroupFD, Unconfined: l.cfg.Unconfined,
	}
	for _, d := range l.cfg.Disks {
		if d.ReadOnly {
			c.ReadOnly = append(c.ReadOnly, d.Path)
		}
		c.ReadOnly = append(c.ReadOnly, d.Backing...)
	}
	if l.cfg.Acceleration == vmm.KVM {
		c.Devices = []string{"/dev/kvm"}
	}
	if l.memory != nil {
		c.Files = append(c.Files, l.memory)
	}
	return c
}

// socketpair returns a connection and the descriptor of its other end.
func socketpair() (net.Conn, *os.File, error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("socketpair: %w", err)
	}
	ours, theirs := os.NewFile(uintptr(fds[0]), "host"), os.NewFile(uintptr(fds[1]), "vmm")
	defer ours.Close()
	conn, err := net.FileConn(ours)
	if err != nil {
		theirs.Close()
		return nil, nil, fmt.Errorf("socketpair: %w", err)
	}
	return conn, theirs, nil
}

func closeAll(files []*os.File) {
	for _, f := range files {
		f.Close()
	}
}

func closeConns(conns []net.Conn) {
	for _, c := range conns {
		if c != nil {
			c.Close()
		}
	}
}
