package confine

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// systemPaths are what programs of the distribution run from.
func systemPaths() []string {
	return []string{"/usr", "/lib", "/lib32", "/lib64", "/libx32", "/bin", "/sbin", "/etc/ld.so.cache"}
}

// bind is one piece of the host that the program sees.
type bind struct {
	path string
	attr uint64 // mount attributes
	link string // instead of a mount: a symbolic link with this target
	dir  bool
	fd   int // a detached copy of the mount
	// node is the number of a device that the user may not open on the host, as /dev/kvm often is; it gets a node of
	// its own instead of a mount. 0: none.
	node  uint64
	owner uint32
}

// buildRoot replaces the root by one that holds only what the spec names. The caller is in a mount namespace of its
// own, so nothing of it is seen outside, and all of it goes with the process.
func (s *spec) buildRoot() error {
	at, err := s.mountingPlace()
	if err != nil {
		return err
	}
	binds, err := s.binds()
	if err != nil {
		return err
	}
	// The sources are held by descriptors, so Dir can serve as the mount point although it is a source itself.
	for i := range binds {
		if err := binds[i].detach(); err != nil {
			return err
		}
	}
	if err := unix.Mount("tmpfs", at, "tmpfs", unix.MS_NOSUID|unix.MS_NOEXEC, "mode=0755,size=1m"); err != nil {
		return fmt.Errorf("%w: mount root: %w", errNamespaces, err)
	}
	for i := range binds {
		if err := binds[i].attach(at); err != nil {
			return err
		}
	}
	if err := mountProc(filepath.Join(at, "proc")); err != nil {
		return err
	}
	return enterRoot(at, s.Dir)
}

// mountingPlace makes the folder private that the new root is mounted on, so that nothing of it is seen outside. That is Dir,
// except under a chroot: there the mount that Dir lies in is not to be reached by any path, and might be shared with
// the host. /proc is a mount of its own, whatever the root is.
func (s *spec) mountingPlace() (string, error) {
	err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, "")
	if err == nil {
		return s.Dir, nil
	}
	if errors.Is(err, unix.EINVAL) {
		if err = unix.Mount("", "/proc", "", unix.MS_REC|unix.MS_PRIVATE, ""); err == nil {
			return "/proc", nil
		}
	}
	return "", fmt.Errorf("%w: make mounts private: %w", errNamespaces, err)
}

// binds lists the pieces, parents before what lies below them.
func (s *spec) binds() ([]bind, error) {
	const system = unix.MOUNT_ATTR_RDONLY | unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV
	var list []bind
	for _, p := range systemPaths() {
		b, err := newBind(p, system)
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, err
		}
		list = append(list, b)
	}
	groups := []struct {
		paths []string
		attr  uint64
	}{
		{[]string{s.Dir}, unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV | unix.MOUNT_ATTR_NOEXEC},
		{s.ReadWrite, unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV | unix.MOUNT_ATTR_NOEXEC},
		{[]string{s.Path}, system},
		{s.ReadOnly, system},
		{s.Devices, unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NOEXEC},
	}
	for _, g := range groups {
		for _, p := range g.paths {
			if covered(list, p, g.attr) {
				continue
			}
			var st unix.Stat_t // files the caller names may be links; what they point to is bound
			if err := unix.Stat(p, &st); err != nil {
				return nil, fmt.Errorf("%s: %w", p, err)
			}
			b := bind{path: filepath.Clean(p), attr: g.attr, dir: st.Mode&unix.S_IFMT == unix.S_IFDIR, fd: -1}
			if st.Mode&unix.S_IFMT == unix.S_IFCHR && st.Mode&0o006 != 0o006 && s.UID != 0 {
				b.node, b.owner = st.Rdev, s.UID
			}
			list = append(list, b)
		}
	}
	return list, nil
}

// newBind looks at a system path: a link, as /lib is on merged systems, is made again rather than mounted.
func newBind(path string, attr uint64) (bind, error) {
	info, err := os.Lstat(path)
	if err != nil {
		return bind{}, err
	}
	b := bind{path: path, attr: attr, dir: info.IsDir(), fd: -1}
	if info.Mode()&os.ModeSymlink != 0 {
		b.link, err = os.Readlink(path)
	}
	return b, err
}

// covered tells whether a path is seen already, with the same attributes, as a part of an earlier folder.
func covered(list []bind, path string, attr uint64) bool {
	for _, b := range list {
		below := strings.HasPrefix(path, b.path+"/") && (b.dir || b.link != "")
		if b.attr == attr && (path == b.path || below) {
			return true
		}
	}
	return false
}

// detach takes a copy of the mount with the bind's attributes.
func (b *bind) detach() error {
	if b.link != "" || b.node != 0 {
		return nil
	}
	flags := uint(unix.OPEN_TREE_CLONE | unix.OPEN_TREE_CLOEXEC)
	set := uint(unix.AT_EMPTY_PATH)
	if b.dir {
		flags |= unix.AT_RECURSIVE
		set |= unix.AT_RECURSIVE
	}
	fd, err := unix.OpenTree(unix.AT_FDCWD, b.path, flags)
	if err != nil {
		return fmt.Errorf("%w: take mount of %s: %w", errNamespaces, b.path, err)
	}
	b.fd = fd
	if err := unix.MountSetattr(fd, "", set, &unix.MountAttr{Attr_set: b.attr}); err != nil {
		return fmt.Errorf("%w: restrict mount of %s: %w", errNamespaces, b.path, err)
	}
	return nil
}

// attach puts the bind into its place below root.
func (b *bind) attach(root string) error {
	target := filepath.Join(root, b.path)
	if err := os.MkdirAll(filepath.Dir(target), 0o755); err != nil {
		return err
	}
	if b.link != "" {
		return os.Symlink(b.link, target)
	}
	if b.node != 0 {
		if err := unix.Mknod(target, unix.S_IFCHR|0o600, int(b.node)); err != nil {
			return fmt.Errorf("make device %s: %w", b.path, err)
		}
		return os.Lchown(target, int(b.owner), int(b.owner))
	}
	if err := mountPoint(target, b.dir); err != nil {
		return fmt.Errorf("mount point for %s: %w", b.path, err)
	}
	if err := unix.MoveMount(b.fd, "", unix.AT_FDCWD, target, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
		return fmt.Errorf("mount %s: %w", b.path, err)
	}
	return unix.Close(b.fd)
}

// mountPoint makes an empty folder or file unless there is one.
func mountPoint(target string, dir bool) error {
	if dir {
		return os.MkdirAll(target, 0o755)
	}
	if _, err := os.Lstat(target); err == nil {
		return nil
	}
	f, err := os.OpenFile(target, os.O_CREATE|os.O_WRONLY|os.O_EXCL, 0o644)
	if err != nil {
		return err
	}
	return f.Close()
}

// mountProc shows the program its own processes: descriptors are opened again through it.
func mountProc(target string) error {
	if err := os.Mkdir(target, 0o755); err != nil {
		return err
	}
	const flags = unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC
	err := unix.Mount("proc", target, "proc", flags, "subset=pid")
	if errors.Is(err, unix.EINVAL) { // before Linux 5.8
		err = unix.Mount("proc", target, "proc", flags, "")
	}
	if err != nil {
		return fmt.Errorf("%w: mount proc: %w", errNamespaces, err)
	}
	return nil
}

// enterRoot makes root, which nothing more is added to, the root of this process, and lets go of the old one.
func enterRoot(root, dir string) error {
	if err := unix.MountSetattr(unix.AT_FDCWD, root, 0, &unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY}); err != nil {
		return fmt.Errorf("make root read-only: %w", err)
	}
	if err := unix.Chdir(root); err != nil {
		return fmt.Errorf("enter root: %w", err)
	}
	if err := replaceRoot(); err != nil {
		return err
	}
	if err := unix.Chdir(dir); err != nil {
		return fmt.Errorf("enter folder: %w", err)
	}
	return nil
}

// replaceRoot makes the working directory the root. The old root ends up on top of the new one, where it is removed at
// once. Under a chroot the kernel refuses that, and another chroot has to do: leaving it takes a capability, which
// the program does not get, or a descriptor of a folder outside, which it does not have.
func replaceRoot() error {
	err := unix.PivotRoot(".", ".")
	switch {
	case err == nil:
		if err := unix.Unmount(".", unix.MNT_DETACH); err != nil {
			return fmt.Errorf("drop old root: %w", err)
		}
		return nil
	case !errors.Is(err, unix.EINVAL):
		return fmt.Errorf("%w: pivot root: %w", errNamespaces, err)
	}
	if err := unix.Chroot("."); err != nil {
		return fmt.Errorf("%w: change root: %w", errNamespaces, err)
	}
	return nil
}
