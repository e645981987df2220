package files

import (
	"context"
	"errors"
	"io"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

const dirMode = 0o755

// mkdir makes a folder; with parents also those above it, and one that exists is fine.
func mkdir(path string, mode *uint32, parents bool) error {
	perm := uint32(dirMode)
	if mode != nil {
		perm = *mode
	}
	err := unix.Mkdir(path, perm)
	if parents && errors.Is(err, unix.ENOENT) && path != "/" {
		if err := mkdir(path[:max(1, strings.LastIndexByte(path, '/'))], nil, true); err != nil {
			return err
		}
		err = unix.Mkdir(path, perm)
	}
	if parents && (errors.Is(err, unix.EEXIST) || errors.Is(err, unix.EROFS) || errors.Is(err, unix.EACCES)) {
		return existingDir(path, err)
	}
	if err != nil || mode == nil {
		return err
	}
	return unix.Fchmodat(unix.AT_FDCWD, path, perm, 0) // whatever the umask is
}

// existingDir is no error for a folder, and err when nothing is there.
func existingDir(path string, err error) error {
	var st unix.Stat_t
	if e := unix.Stat(path, &st); e != nil {
		return err
	}
	if st.Mode&unix.S_IFMT != unix.S_IFDIR {
		return unix.ENOTDIR
	}
	return nil
}

// remove removes a file, or a folder: an empty one, or with everything in it. The root is refused by any name.
func remove(path string, recursive bool) error {
	var st, root unix.Stat_t
	if err := unix.Lstat(path, &st); err != nil {
		return err
	}
	if err := unix.Stat("/", &root); err != nil {
		return err
	}
	if st.Dev == root.Dev && st.Ino == root.Ino {
		return unix.EINVAL
	}
	if st.Mode&unix.S_IFMT != unix.S_IFDIR {
		return unix.Unlink(path)
	}
	if !recursive {
		return unix.Rmdir(path)
	}
	if _, _, err := split(path); err != nil {
		return err
	}
	return os.RemoveAll(path) // follows no links
}

// move renames, or copies and removes where the file system ends.
func move(ctx context.Context, from, to string, overwrite bool) error {
	if _, _, err := split(from); err != nil {
		return err
	}
	if _, _, err := split(to); err != nil {
		return &atTarget{err}
	}
	var st unix.Stat_t
	if err := unix.Lstat(from, &st); err != nil {
		return err
	}
	err := rename(from, to, overwrite)
	if !errors.Is(err, unix.EXDEV) {
		return err
	}
	c := &copier{ctx: ctx, keepOwner: true}
	if err := c.place(from, to, overwrite, &st); err != nil {
		return err
	}
	return remove(from, true)
}

// rename blames the target for what only the target can be at fault for.
func rename(from, to string, overwrite bool) error {
	flags := uint(unix.RENAME_NOREPLACE)
	if overwrite {
		flags = 0
	}
	err := unix.Renameat2(unix.AT_FDCWD, from, unix.AT_FDCWD, to, flags)
	switch {
	case errors.Is(err, unix.EXDEV):
		return err
	case err != nil:
		return &atTarget{err}
	}
	return nil
}

// duplicate copies a file, or with recursive a tree.
func duplicate(ctx context.Context, from, to string, overwrite, recursive bool) error {
	var st unix.Stat_t
	stat := unix.Stat
	if recursive {
		stat = unix.Lstat
	}
	if err := stat(from, &st); err != nil {
		return err
	}
	if st.Mode&unix.S_IFMT == unix.S_IFDIR && !recursive {
		return unix.EISDIR
	}
	c := &copier{ctx: ctx, follow: !recursive}
	return c.place(from, to, overwrite, &st)
}

// copier copies files and trees. It runs with the user's rights.
type copier struct {
	ctx       context.Context
	keepOwner bool // where it is allowed
	follow    bool // links that name the source itself; those inside are copied as links
}

// place copies to a temporary name next to the target and renames: the target is never half there.
func (c *copier) place(from, to string, overwrite bool, st *unix.Stat_t) error {
	dir, _, err := split(to)
	if err != nil {
		return &atTarget{err}
	}
	if st.Mode&unix.S_IFMT == unix.S_IFDIR {
		if err := outside(dir, st); err != nil {
			return &atTarget{err}
		}
	}
	var there unix.Stat_t
	if err := unix.Lstat(to, &there); err == nil && !overwrite {
		return &atTarget{unix.EEXIST}
	}
	temp := strings.TrimSuffix(dir, "/") + "/" + tempName()
	if err := c.copy(from, temp, st); err != nil {
		_ = os.RemoveAll(temp) // what remains is unreachable by its name for everybody else
		return err
	}
	if err := rename(temp, to, overwrite); err != nil {
		_ = os.RemoveAll(temp)
		return err
	}
	return nil
}

// outside fails if dir is the folder st or below it.
func outside(dir string, st *unix.Stat_t) error {
	fd, err := unix.Open(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(fd) }()
	var last unix.Stat_t
	for {
		var at unix.Stat_t
		if err := unix.Fstat(fd, &at); err != nil {
			return err
		}
		if at.Dev == st.Dev && at.Ino == st.Ino {
			return unix.EINVAL
		}
		if at.Dev == last.Dev && at.Ino == last.Ino {
			return nil // the root is its own parent
		}
		last = at
		up, err := unix.Openat(fd, "..", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		if err != nil {
			return err
		}
		_ = unix.Close(fd)
		fd = up
	}
}

func (c *copier) copy(from, to string, st *unix.Stat_t) error {
	if err := c.ctx.Err(); err != nil {
		return err
	}
	mode := st.Mode & 0o7777
	var err error
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFREG:
		err = c.regular(from, to, mode)
	case unix.S_IFDIR:
		err = c.folder(from, to)
	case unix.S_IFLNK:
		return c.link(from, to, st)
	default:
		err = atErr(unix.Mknod(to, st.Mode&unix.S_IFMT|0o600, int(st.Rdev)))
	}
	if err != nil {
		return err
	}
	if err := c.own(to, st); err != nil {
		return err
	}
	return atErr(unix.Fchmodat(unix.AT_FDCWD, to, mode, 0))
}

func atErr(err error) error {
	if err != nil {
		return &atTarget{err}
	}
	return nil
}

// own gives a copy its original's owner when it is moved.
func (c *copier) own(path string, st *unix.Stat_t) error {
	if !c.keepOwner {
		return nil
	}
	err := unix.Lchown(path, int(st.Uid), int(st.Gid))
	if errors.Is(err, unix.EPERM) {
		return nil
	}
	return atErr(err)
}

func (c *copier) link(from, to string, st *unix.Stat_t) error {
	target, err := os.Readlink(from)
	if err != nil {
		return err
	}
	if err := unix.Symlink(target, to); err != nil {
		return &atTarget{err}
	}
	return c.own(to, st)
}

func (c *copier) regular(from, to string, mode uint32) error {
	flags := unix.O_RDONLY | unix.O_NONBLOCK | unix.O_NOFOLLOW
	if c.follow {
		flags &^= unix.O_NOFOLLOW
	}
	in, err := os.OpenFile(from, flags, 0)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.OpenFile(to, os.O_WRONLY|os.O_CREATE|os.O_EXCL, os.FileMode(mode&0o700))
	if err != nil {
		return &atTarget{err}
	}
	defer out.Close()
	for {
		// In pieces, so that the end of ctx is seen. The kernel copies where it can.
		n, err := io.CopyN(out, in, 16<<20)
		if errors.Is(err, io.EOF) {
			return atErr(out.Sync())
		}
		if err == nil && n > 0 {
			err = c.ctx.Err()
		}
		if err != nil {
			return &atTarget{err}
		}
	}
}

func (c *copier) folder(from, to string) error {
	if err := unix.Mkdir(to, 0o700); err != nil {
		return &atTarget{err}
	}
	dir, err := os.Open(from)
	if err != nil {
		return err
	}
	defer dir.Close()
	for {
		names, err := dir.Readdirnames(256)
		for _, n := range names {
			var st unix.Stat_t
			if err := unix.Lstat(from+"/"+n, &st); err != nil {
				return err
			}
			if err := c.copy(from+"/"+n, to+"/"+n, &st); err != nil {
				return err
			}
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
	}
}
