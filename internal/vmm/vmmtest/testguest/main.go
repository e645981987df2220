// Command testguest is the first process of the guests of internal/vmm/vmmtest: it loads the drivers, and answers
// requests that come as raw Ethernet frames on the control link, so that it needs no network stack on either side.
// Frames on the workload link are sent back. It trusts its host; it runs in tests only.
package main

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

const etherType = 0x88b5 // for local experiments

func main() {
	fmt.Println("testguest: failed:", run()) // it returns only by an error
	time.Sleep(time.Second)                  // for the console
	_ = unix.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF)
}

func run() error {
	for _, m := range []struct{ kind, path string }{{"proc", "/proc"}, {"sysfs", "/sys"}, {"devtmpfs", "/dev"}} {
		if err := os.MkdirAll(m.path, 0o755); err != nil {
			return err
		}
		if err := unix.Mount(m.kind, m.path, m.kind, 0, ""); err != nil && !errors.Is(err, unix.EBUSY) {
			return fmt.Errorf("mount %s: %w", m.path, err)
		}
	}
	list, err := os.ReadFile("/modules/order")
	if err != nil {
		return err
	}
	for _, name := range strings.Fields(string(list)) {
		if err := loadModule("/modules/" + name); err != nil {
			return fmt.Errorf("module %s: %w", name, err)
		}
	}
	workload, err := open("02:00:00:00:00:02", 1500)
	if err != nil {
		return err
	}
	control, err := open("02:00:00:00:01:02", 65520)
	if err != nil {
		return err
	}
	go func() { _ = echo(workload) }()
	fmt.Println("testguest: ready")
	return serve(control)
}

func loadModule(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := unix.FinitModule(int(f.Fd()), "", 0); err != nil && !errors.Is(err, unix.EEXIST) {
		return err
	}
	return nil
}

// open waits for the device with an address, brings it up and returns a packet socket on it.
func open(mac string, mtu int) (int, error) {
	var dev *net.Interface
	for deadline := time.Now().Add(30 * time.Second); dev == nil; {
		all, err := net.Interfaces()
		if err != nil {
			return 0, err
		}
		for i := range all {
			if all[i].HardwareAddr.String() == mac {
				dev = &all[i]
			}
		}
		if dev == nil && time.Now().After(deadline) {
			return 0, fmt.Errorf("no device %s among %v", mac, all)
		}
	}
	ctl, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM, 0)
	if err != nil {
		return 0, err
	}
	defer func() { _ = unix.Close(ctl) }()
	for _, change := range []struct {
		request uint
		value   uint32
	}{{unix.SIOCSIFMTU, uint32(mtu)}, {unix.SIOCSIFFLAGS, unix.IFF_UP}} {
		req, err := unix.NewIfreq(dev.Name)
		if err != nil {
			return 0, err
		}
		if change.request == unix.SIOCSIFFLAGS {
			req.SetUint16(uint16(change.value))
		} else {
			req.SetUint32(change.value)
		}
		if err := unix.IoctlIfreq(ctl, change.request, req); err != nil {
			return 0, fmt.Errorf("configure %s: %w", dev.Name, err)
		}
	}
	proto := etherType<<8&0xff00 | etherType>>8
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW, proto)
	if err != nil {
		return 0, err
	}
	return fd, unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: uint16(proto), Ifindex: dev.Index})
}

// turn makes a frame go back to where it came from.
func turn(frame []byte) {
	var dst [6]byte
	copy(dst[:], frame[:6])
	copy(frame[:6], frame[6:12])
	copy(frame[6:12], dst[:])
}

func echo(fd int) error {
	buf := make([]byte, 1<<16)
	for {
		n, from, err := unix.Recvfrom(fd, buf, 0)
		if err != nil {
			return err
		}
		if l, ok := from.(*unix.SockaddrLinklayer); !ok || l.Pkttype == unix.PACKET_OUTGOING || n < 14 {
			continue
		}
		turn(buf[:n])
		if _, err := unix.Write(fd, buf[:n]); err != nil {
			return err
		}
	}
}

// serve answers requests: a length, then "number command arguments".
func serve(fd int) error {
	g := guest{values: map[string]string{}}
	buf := make([]byte, 1<<17)
	for {
		n, from, err := unix.Recvfrom(fd, buf, 0)
		if err != nil {
			return err
		}
		if l, ok := from.(*unix.SockaddrLinklayer); !ok || l.Pkttype == unix.PACKET_OUTGOING || n < 18 {
			continue
		}
		size := int(binary.BigEndian.Uint32(buf[14:18]))
		number, request, _ := strings.Cut(string(buf[18:min(18+size, n)]), " ")
		result, err := g.do(strings.SplitN(request, " ", 4))
		text := number + " ok " + result
		if err != nil {
			text = number + " error " + err.Error()
		}
		turn(buf[:14])
		binary.BigEndian.PutUint32(buf[14:18], uint32(len(text)))
		copy(buf[18:], text)
		if _, err := unix.Write(fd, buf[:max(18+len(text), 60)]); err != nil {
			return err
		}
	}
}

type guest struct {
	values map[string]string
	filled []byte
}

func (g *guest) do(args []string) (string, error) {
	for len(args) < 4 {
		args = append(args, "")
	}
	switch args[0] {
	case "ping":
		return "pong", nil
	case "set":
		g.values[args[1]] = args[2]
		return "", nil
	case "get":
		return g.values[args[1]], nil
	case "length":
		return strconv.Itoa(len(args[1])), nil
	case "fill": // size in MiB, byte
		mib, _ := strconv.Atoi(args[1])
		value, _ := strconv.Atoi(args[2])
		g.filled = bytes.Repeat([]byte{byte(value)}, mib<<20)
		return "", nil
	case "sum":
		return strconv.FormatUint(uint64(crc32.ChecksumIEEE(g.filled)), 16), nil
	case "write": // disk, offset, text
		return "", withDisk(args[1], os.O_RDWR, func(f *os.File) error {
			offset, _ := strconv.ParseInt(args[2], 10, 64)
			if _, err := f.WriteAt([]byte(args[3]), offset); err != nil {
				return err
			}
			return f.Sync()
		})
	case "read": // disk, offset, length
		offset, _ := strconv.ParseInt(args[2], 10, 64)
		length, _ := strconv.Atoi(args[3])
		content := make([]byte, length)
		err := withDisk(args[1], os.O_RDONLY, func(f *os.File) error {
			_, err := f.ReadAt(content, offset)
			return err
		})
		return string(content), err
	case "poweroff":
		return "", unix.Reboot(unix.LINUX_REBOOT_CMD_RESTART)
	}
	return "", fmt.Errorf("unknown command %q", args[0])
}

// withDisk opens the disk with a serial.
func withDisk(serial string, mode int, do func(*os.File) error) error {
	paths, err := filepath.Glob("/sys/block/*/serial")
	if err != nil {
		return err
	}
	for _, p := range paths {
		if found, err := os.ReadFile(p); err != nil || strings.TrimSpace(string(found)) != serial {
			continue
		}
		f, err := os.OpenFile("/dev/"+filepath.Base(filepath.Dir(p)), mode, 0)
		if err != nil {
			return err
		}
		return errors.Join(do(f), f.Close())
	}
	return fmt.Errorf("no disk %q", serial)
}
