package boot

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

const (
	diskWait = 10 * time.Second
	maxLayer = 16
	newRoot  = "/mnt/root"
)

// mount is one mount to make; the folder is made when it is missing.
type mount struct {
	source, target, fstype string
	flags                  uintptr
	data                   string
}

func (m mount) do() error {
	if err := os.MkdirAll(m.target, 0o755); err != nil {
		return err
	}
	if err := unix.Mount(m.source, m.target, m.fstype, m.flags, m.data); err != nil {
		return fmt.Errorf("mount %s on %s: %w", m.fstype, m.target, err)
	}
	return nil
}

func mountAll(list []mount) error {
	for _, m := range list {
		if err := m.do(); err != nil {
			return err
		}
	}
	return nil
}

func mountEarly() error {
	for _, m := range []mount{
		{"proc", "/proc", "proc", unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC, ""},
		{"sysfs", "/sys", "sysfs", unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC, ""},
		{"devtmpfs", "/dev", "devtmpfs", unix.MS_NOSUID, "mode=0755"},
	} {
		// Kernels that mount it by themselves answer EBUSY.
		if err := m.do(); err != nil && !errors.Is(err, unix.EBUSY) {
			return err
		}
	}
	return nil
}

// mountDisks joins the layers and the writable disk at newRoot.
func mountDisks() error {
	disks, err := waitDisks("/sys/block", diskWait)
	if err != nil {
		return err
	}
	lower := make([]string, 0, len(disks))
	for i := len(disks) - 2; i >= 0; i-- { // overlay wants the top layer first
		dir := fmt.Sprintf("/mnt/layer%d", i)
		m := mount{disks[fmt.Sprintf("layer%d", i)], dir, "ext4", unix.MS_RDONLY | unix.MS_NOATIME, ""}
		if err := m.do(); err != nil {
			return fmt.Errorf("layer%d: %w", i, err)
		}
		lower = append(lower, dir)
	}
	if err := (mount{disks["writable"], "/mnt/writable", "ext4", unix.MS_NOATIME, ""}).do(); err != nil {
		return fmt.Errorf("writable: %w", err)
	}
	for _, dir := range []string{"/mnt/writable/upper", "/mnt/writable/work"} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
	}
	data := "lowerdir=" + strings.Join(lower, ":") +
		",upperdir=/mnt/writable/upper,workdir=/mnt/writable/work,redirect_dir=on,metacopy=off,index=off"
	return mount{"overlay", newRoot, "overlay", unix.MS_NOATIME, data}.do()
}

// waitDisks polls until the disks are there: drivers may probe after their modules are loaded.
func waitDisks(block string, limit time.Duration) (map[string]string, error) {
	deadline := time.Now().Add(limit)
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for {
		disks, err := findDisks(block)
		if err == nil || time.Now().After(deadline) {
			return disks, err
		}
		<-tick.C
	}
}

// findDisks maps serials to device files, and fails unless there are layers without a gap and a writable disk.
func findDisks(block string) (map[string]string, error) {
	entries, err := os.ReadDir(block)
	if err != nil {
		return nil, err
	}
	all := map[string]string{}
	for _, e := range entries {
		serial, err := os.ReadFile(filepath.Join(block, e.Name(), "serial"))
		if err != nil {
			continue // loop devices and the like have none
		}
		all[strings.TrimRight(string(serial), "\n\x00 ")] = "/dev/" + e.Name()
	}
	disks := map[string]string{"writable": all["writable"]}
	if all["writable"] == "" {
		return nil, errors.New("no disk with serial writable")
	}
	for i := range maxLayer {
		name := fmt.Sprintf("layer%d", i)
		if all[name] == "" {
			break
		}
		disks[name] = all[name]
	}
	if disks["layer0"] == "" {
		return nil, errors.New("no disk with serial layer0")
	}
	for name := range all {
		if strings.HasPrefix(name, "layer") && disks[name] == "" {
			return nil, fmt.Errorf("disk %s, but not all layers below it", name)
		}
	}
	return disks, nil
}

// switchRoot makes newRoot the root and frees the memory of the initramfs.
func switchRoot() error {
	for _, dir := range []string{"/proc", "/sys", "/dev"} {
		target := newRoot + dir
		if err := realDir(target, 0o755); err != nil {
			return err
		}
		if err := unix.Mount(dir, target, "", unix.MS_MOVE, ""); err != nil {
			return fmt.Errorf("move %s: %w", dir, err)
		}
	}
	for _, name := range []string{"/lib", "/init", "/modules.list", "/modules.extra"} {
		if err := os.RemoveAll(name); err != nil {
			return err
		}
	}
	if err := unix.Chdir(newRoot); err != nil {
		return err
	}
	if err := unix.Mount(".", "/", "", unix.MS_MOVE, ""); err != nil {
		return fmt.Errorf("move the root: %w", err)
	}
	if err := unix.Chroot("."); err != nil {
		return err
	}
	return unix.Chdir("/")
}

// realDir makes a folder where there is none; a link would lead out of the new root.
func realDir(path string, mode os.FileMode) error {
	info, err := os.Lstat(path)
	if errors.Is(err, os.ErrNotExist) {
		return os.MkdirAll(path, mode)
	}
	if err == nil && !info.IsDir() {
		return fmt.Errorf("%s is not a folder", path)
	}
	return err
}

// mountLate completes the new root. /tmp stays on the writable disk: builds put more there than memory holds.
func mountLate() error {
	const quiet = unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC
	err := mountAll([]mount{
		{"devpts", "/dev/pts", "devpts", unix.MS_NOSUID | unix.MS_NOEXEC, "gid=5,mode=620,ptmxmode=666"},
		{"tmpfs", "/dev/shm", "tmpfs", unix.MS_NOSUID | unix.MS_NODEV, "mode=1777"},
		{"tmpfs", "/run", "tmpfs", unix.MS_NOSUID | unix.MS_NODEV, "mode=0755,size=20%"},
		{"cgroup2", CgroupRoot, "cgroup2", quiet, ""},
	})
	if err != nil {
		return err
	}
	links := map[string]string{"/dev/fd": "/proc/self/fd", "/dev/stdin": "/proc/self/fd/0",
		"/dev/stdout": "/proc/self/fd/1", "/dev/stderr": "/proc/self/fd/2"}
	for name, target := range links {
		if err := os.Symlink(target, name); err != nil && !errors.Is(err, os.ErrExist) {
			return err
		}
	}
	for _, dir := range []string{"/run/lock", "/tmp"} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
		if err := os.Chmod(dir, 0o777|os.ModeSticky); err != nil {
			return err
		}
	}
	return os.MkdirAll("/run/space", 0o755)
}
