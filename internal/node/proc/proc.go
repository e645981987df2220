package proc

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// ErrGone says that the process has ended, or its PID belongs to another one now.
var ErrGone = errors.New("process is gone")

// Identity names one process for ever.
type Identity struct {
	BootID    string `json:"boot_id"`
	PID       int    `json:"pid"`
	StartTime uint64 `json:"start_time"` // clock ticks after boot
}

// BootID returns the ID of this boot of the kernel.
func BootID() (string, error) {
	data, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", fmt.Errorf("boot ID: %w", err)
	}
	return strings.TrimSpace(string(data)), nil
}

// Identify names the process that has a PID now.
func Identify(pid int) (Identity, error) {
	boot, err := BootID()
	if err != nil {
		return Identity{}, err
	}
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if errors.Is(err, os.ErrNotExist) || errors.Is(err, syscall.ESRCH) {
		return Identity{}, fmt.Errorf("pid %d: %w", pid, ErrGone)
	}
	if err != nil {
		return Identity{}, fmt.Errorf("pid %d: %w", pid, err)
	}
	start, err := parseStartTime(data)
	if err != nil {
		return Identity{}, fmt.Errorf("pid %d: %w", pid, err)
	}
	return Identity{BootID: boot, PID: pid, StartTime: start}, nil
}

// parseStartTime takes field 22 of a stat line. The second field is the program's name, which can hold anything,
// blanks and parentheses included: counting starts after the last parenthesis.
func parseStartTime(stat []byte) (uint64, error) {
	i := bytes.LastIndexByte(stat, ')')
	if i < 0 {
		return 0, errors.New("stat line without a name")
	}
	fields := bytes.Fields(stat[i+1:])
	const startTime = 22 - 3 // fields[0] is field 3
	if len(fields) <= startTime {
		return 0, fmt.Errorf("stat line with %d fields", len(fields)+2)
	}
	return strconv.ParseUint(string(fields[startTime]), 10, 64)
}

// Handle is a hold on one process: signals sent through it reach that process or none.
type Handle struct {
	id   Identity
	file *os.File
	done chan struct{}
	once sync.Once
	quit chan struct{} // closed by the watcher when it has ended
	reap func()
}

// Open takes a hold on the process id names. ErrGone if it has ended.
func Open(id Identity) (*Handle, error) {
	boot, err := BootID()
	if err != nil {
		return nil, err
	}
	if id.BootID != boot || id.PID <= 0 {
		return nil, fmt.Errorf("pid %d of an earlier boot: %w", id.PID, ErrGone)
	}
	fd, err := unix.PidfdOpen(id.PID, unix.PIDFD_NONBLOCK)
	if errors.Is(err, unix.ESRCH) || errors.Is(err, unix.EINVAL) {
		return nil, fmt.Errorf("pid %d: %w", id.PID, ErrGone)
	}
	if err != nil {
		return nil, fmt.Errorf("pidfd of %d: %w", id.PID, err)
	}
	// Checked after opening: whatever the PID meant before, the pidfd now holds the process that was compared.
	now, err := Identify(id.PID)
	if err == nil && now != id {
		err = fmt.Errorf("pid %d was used again: %w", id.PID, ErrGone)
	}
	if err == nil && ended(fd) { // a zombie still has its name
		err = fmt.Errorf("pid %d: %w", id.PID, ErrGone)
	}
	if err != nil {
		_ = unix.Close(fd)
		return nil, err
	}
	return watch(id, fd, nil)
}

// Child takes a hold on a child of this process. fd is its pidfd, which the handle owns from now on, also on
// error; reap collects the child after its death was seen, before Done is closed.
func Child(pid, fd int, reap func()) (*Handle, error) {
	id, err := Identify(pid)
	if err == nil {
		err = unix.SetNonblock(fd, true)
	}
	if err != nil {
		_ = unix.Close(fd)
		return nil, err
	}
	return watch(id, fd, reap)
}

func watch(id Identity, fd int, reap func()) (*Handle, error) {
	h := &Handle{
		id: id, file: os.NewFile(uintptr(fd), "pidfd"), reap: reap,
		done: make(chan struct{}), quit: make(chan struct{}),
	}
	conn, err := h.file.SyscallConn()
	if err != nil {
		_ = h.file.Close()
		return nil, fmt.Errorf("pidfd of %d: %w", id.PID, err)
	}
	go h.wait(conn)
	return h, nil
}

// wait parks in the runtime's poller, so that a thousand watched processes cost no threads.
func (h *Handle) wait(conn syscall.RawConn) {
	defer close(h.quit)
	dead := false
	_ = conn.Read(func(fd uintptr) bool {
		dead = ended(int(fd))
		return dead
	})
	if !dead {
		return // closed by its owner
	}
	if h.reap != nil {
		h.reap()
	}
	close(h.done)
}

// ended reports whether the process of a pidfd has ended.
func ended(fd int) bool {
	fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
	n, err := unix.Poll(fds, 0)
	return err == nil && n > 0
}

// Identity returns the name of the process.
func (h *Handle) Identity() Identity { return h.id }

// Done is closed when the death of the process was seen. It stays open if the handle is closed before.
func (h *Handle) Done() <-chan struct{} { return h.done }

// Alive reports whether the death of the process has not been seen yet.
func (h *Handle) Alive() bool {
	select {
	case <-h.done:
		return false
	default:
		return true
	}
}

// Signal sends a signal. ErrGone if the process has ended.
func (h *Handle) Signal(sig unix.Signal) error {
	conn, err := h.file.SyscallConn()
	if err != nil {
		return fmt.Errorf("signal %d: %w", h.id.PID, err)
	}
	var sent error
	if err := conn.Control(func(fd uintptr) { sent = unix.PidfdSendSignal(int(fd), sig, nil, 0) }); err != nil {
		return fmt.Errorf("signal %d: %w", h.id.PID, err)
	}
	if errors.Is(sent, unix.ESRCH) {
		return fmt.Errorf("pid %d: %w", h.id.PID, ErrGone)
	}
	return sent
}

// Close ends the watch and frees the pidfd; the process goes on. Safe to call twice.
func (h *Handle) Close() error {
	var err error
	h.once.Do(func() {
		err = h.file.Close()
		<-h.quit
	})
	return err
}

// FindByArg returns the processes that have arg as one of their arguments, exactly.
func FindByArg(arg string) ([]Identity, error) {
	paths, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		return nil, err
	}
	var found []Identity
	for _, path := range paths {
		data, err := os.ReadFile(path)
		if err != nil || !hasArg(data, arg) {
			continue // ended meanwhile, or not ours to read
		}
		pid, err := strconv.Atoi(filepath.Base(filepath.Dir(path)))
		if err != nil || pid == os.Getpid() {
			continue
		}
		if id, err := Identify(pid); err == nil {
			found = append(found, id)
		}
	}
	return found, nil
}

func hasArg(cmdline []byte, arg string) bool {
	args := bytes.Split(cmdline, []byte{0})
	for _, a := range args[min(1, len(args)):] {
		if string(a) == arg {
			return true
		}
	}
	return false
}

// PSS returns the proportional set size of a process in bytes: its memory, shared pages divided by their users.
func PSS(pid int) (uint64, error) {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/smaps_rollup", pid))
	if err != nil {
		return 0, fmt.Errorf("memory of %d: %w", pid, err)
	}
	return parsePSS(data)
}

func parsePSS(rollup []byte) (uint64, error) {
	for line := range strings.Lines(string(rollup)) {
		rest, ok := strings.CutPrefix(line, "Pss:")
		if !ok {
			continue
		}
		kib, err := strconv.ParseUint(strings.TrimSuffix(strings.TrimSpace(rest), " kB"), 10, 54)
		if err != nil {
			return 0, fmt.Errorf("smaps_rollup: %w", err)
		}
		return kib << 10, nil
	}
	return 0, errors.New("smaps_rollup without Pss")
}
