package agent

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The ioctls of /dev/random.
const (
	rndAddEntropy = 0x40085203
	rndReseedCRNG = 0x5207
	maxEntropy    = 1024
	maxHostsFile  = 1 << 20
)

// Linux is the System of a real guest.
type Linux struct{ root string }

// NewLinux returns the System whose files are below root.
func NewLinux(root string) *Linux { return &Linux{root: root} }

// SetClock implements System.
func (l *Linux) SetClock(t time.Time) error {
	ts := unix.NsecToTimespec(t.UnixNano())
	return unix.ClockSettime(unix.CLOCK_REALTIME, &ts)
}

// Reseed implements System. Adding entropy alone would not change what the generator gives before its next regular
// reseed, and clones of one snapshot would draw equal bytes.
func (l *Linux) Reseed(entropy []byte) error {
	f, err := os.OpenFile("/dev/urandom", os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	var pool struct {
		bits, size int32
		data       [maxEntropy]byte
	}
	n := copy(pool.data[:], entropy)
	pool.bits, pool.size = int32(n*8), int32(n)
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), rndAddEntropy, uintptr(unsafe.Pointer(&pool))); errno != 0 {
		return fmt.Errorf("add entropy: %w", errno)
	}
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), rndReseedCRNG, 0); errno != 0 {
		return fmt.Errorf("force reseed: %w", errno)
	}
	return nil
}

// SetMachineID implements System.
func (l *Linux) SetMachineID(id string) error {
	if err := l.write("etc/machine-id", []byte(id+"\n"), 0o444); err != nil {
		return err
	}
	dbus := "var/lib/dbus/machine-id"
	// Where it is a link, it is one to the file above.
	if info, err := os.Lstat(filepath.Join(l.root, dbus)); errors.Is(err, os.ErrNotExist) || err == nil && !info.Mode().IsRegular() {
		return nil
	}
	return l.write(dbus, []byte(id+"\n"), 0o444)
}

// SetHostname implements System.
func (l *Linux) SetHostname(name string) error {
	if err := unix.Sethostname([]byte(name)); err != nil {
		return err
	}
	if err := l.write("etc/hostname", []byte(name+"\n"), 0o644); err != nil {
		return err
	}
	return l.write("etc/hosts", hosts(l.readSmall("etc/hosts"), name), 0o644)
}

// hosts returns a hosts file in which 127.0.1.1 is name, other lines kept.
func hosts(old []byte, name string) []byte {
	var out bytes.Buffer
	local := false
	for line := range bytes.Lines(old) {
		f := strings.Fields(string(line))
		if len(f) > 0 && f[0] == "127.0.1.1" {
			continue
		}
		local = local || len(f) > 1 && f[0] == "127.0.0.1"
		out.Write(bytes.TrimRight(line, "\n"))
		out.WriteByte('\n')
	}
	head := ""
	if !local {
		head = "127.0.0.1 localhost\n::1 localhost ip6-localhost ip6-loopback\n"
	}
	return fmt.Appendf([]byte(head), "%s127.0.1.1 %s\n", out.Bytes(), name)
}

// SetCABundle implements System.
func (l *Linux) SetCABundle(pem []byte) error {
	if len(pem) == 0 {
		return nil
	}
	return l.write("run/space/ca-bundle.pem", pem, 0o644)
}

// SetGeneration implements System.
func (l *Linux) SetGeneration(n uint64) error {
	return l.write("run/space/generation", fmt.Appendf(nil, "%d\n", n), 0o644)
}

// Sync implements System.
func (l *Linux) Sync() error {
	f, err := os.Open(l.root)
	if err != nil {
		return err
	}
	defer f.Close()
	return unix.Syncfs(int(f.Fd()))
}

// write replaces a file by rename, so that a link or a pipe that the guest put there is never followed or opened.
func (l *Linux) write(name string, data []byte, mode os.FileMode) error {
	path := filepath.Join(l.root, name)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	temp := path + ".space-new"
	if err := os.Remove(temp); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	f, err := os.OpenFile(temp, os.O_WRONLY|os.O_CREATE|os.O_EXCL|syscall.O_NOFOLLOW, mode)
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	if err = errors.Join(err, f.Close()); err != nil {
		return err
	}
	return os.Rename(temp, path)
}

// readSmall reads a file that the guest's root owns: it follows nothing and waits for nobody.
func (l *Linux) readSmall(name string) []byte {
	f, err := os.OpenFile(filepath.Join(l.root, name), os.O_RDONLY|syscall.O_NONBLOCK|syscall.O_NOFOLLOW, 0)
	if err != nil {
		return nil
	}
	defer f.Close()
	if info, err := f.Stat(); err != nil || !info.Mode().IsRegular() {
		return nil
	}
	data, err := io.ReadAll(io.LimitReader(f, maxHostsFile))
	if err != nil {
		return nil
	}
	return data
}

// Kernel implements System.
func (l *Linux) Kernel() string {
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return ""
	}
	return unix.ByteSliceToString(u.Release[:])
}

// Clocksource implements System.
func (l *Linux) Clocksource() string {
	data, err := os.ReadFile("/sys/devices/system/clocksource/clocksource0/current_clocksource")
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(data))
}

// Usage implements System.
func (l *Linux) Usage() (Usage, error) {
	var u Usage
	mem, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return u, err
	}
	u.MemoryTotal, u.MemoryAvailable = meminfo(mem)
	statm, err := os.ReadFile("/proc/self/statm")
	if err != nil {
		return u, err
	}
	if f := strings.Fields(string(statm)); len(f) > 1 {
		pages, err := strconv.ParseUint(f[1], 10, 64)
		if err != nil {
			return u, err
		}
		u.AgentRSS = pages * uint64(os.Getpagesize())
	}
	var fs unix.Statfs_t
	if err := unix.Statfs(l.root, &fs); err != nil {
		return u, err
	}
	u.DiskTotal, u.DiskFree = fs.Blocks*uint64(fs.Bsize), fs.Bavail*uint64(fs.Bsize)
	fds, err := os.ReadDir("/proc/self/fd")
	u.AgentFDs = uint32(len(fds))
	return u, err
}

func meminfo(data []byte) (total, available uint64) {
	s := bufio.NewScanner(bytes.NewReader(data))
	for s.Scan() {
		f := strings.Fields(s.Text())
		if len(f) < 2 {
			continue
		}
		n, err := strconv.ParseUint(f[1], 10, 54)
		if err != nil {
			continue
		}
		switch f[0] {
		case "MemTotal:":
			total = n << 10
		case "MemAvailable:":
			available = n << 10
		}
	}
	return total, available
}
