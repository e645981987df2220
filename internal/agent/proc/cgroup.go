package proc

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// cgroups makes and removes the cgroups of processes below one folder.
type cgroups struct {
	user string // folder

	mu        sync.Mutex
	lingering map[string]bool // folders with background children
}

func newCgroups(root string) (*cgroups, error) {
	c := &cgroups{user: filepath.Join(root, "user"), lingering: map[string]bool{}}
	if err := os.Mkdir(c.user, 0o755); err != nil && !errors.Is(err, os.ErrExist) {
		return nil, fmt.Errorf("user cgroup: %w", err)
	}
	return c, nil
}

func (c *cgroups) path(id string) string { return filepath.Join(c.user, id) }

// make makes the cgroup of a process and opens it.
func (c *cgroups) make(id string) (*os.File, error) {
	path := c.path(id)
	// A background child of a forgotten process with the same ID may be in it still.
	if err := os.Mkdir(path, 0o755); err != nil && !errors.Is(err, os.ErrExist) {
		return nil, err
	}
	c.mu.Lock()
	delete(c.lingering, path)
	c.mu.Unlock()
	return os.OpenFile(path, os.O_RDONLY|unix.O_DIRECTORY, 0)
}

// remove removes a cgroup now, or later when it is empty.
func (c *cgroups) remove(id string) {
	path := c.path(id)
	if unix.Rmdir(path) != nil {
		c.mu.Lock()
		c.lingering[path] = true
		c.mu.Unlock()
	}
}

// sweep removes those that became empty.
func (c *cgroups) sweep() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for path := range c.lingering {
		if err := unix.Rmdir(path); err == nil || errors.Is(err, unix.ENOENT) {
			delete(c.lingering, path)
		}
	}
}

// kill kills everything in the cgroup of a process.
func (c *cgroups) kill(id string) error {
	return os.WriteFile(filepath.Join(c.path(id), "cgroup.kill"), []byte("1"), 0)
}

// oomKilled reports whether the kernel killed a process of the cgroup for want of memory.
func (c *cgroups) oomKilled(id string) bool {
	return eventOf(filepath.Join(c.path(id), "memory.events"), "oom_kill") > 0
}

// freeze freezes or thaws all processes and waits for it.
func (c *cgroups) freeze(ctx context.Context, frozen bool) error {
	value := map[bool]string{true: "1", false: "0"}[frozen]
	if err := os.WriteFile(filepath.Join(c.user, "cgroup.freeze"), []byte(value), 0); err != nil {
		return err
	}
	return c.await(ctx, "frozen", value)
}

// await waits until cgroup.events of `user` says key value. The kernel reports changes of it as POLLPRI.
func (c *cgroups) await(ctx context.Context, key, value string) error {
	f, err := os.Open(filepath.Join(c.user, "cgroup.events"))
	if err != nil {
		return err
	}
	defer f.Close()
	buf := make([]byte, 256)
	for {
		n, err := f.ReadAt(buf, 0)
		if n == 0 && err != nil {
			return err
		}
		if got, ok := field(string(buf[:n]), key); ok && got == value {
			return nil
		}
		if err := ctx.Err(); err != nil {
			return fmt.Errorf("cgroup not %s %s: %w", key, value, err)
		}
		// Short, so that the end of ctx is seen.
		_, err = unix.Poll([]unix.PollFd{{Fd: int32(f.Fd()), Events: unix.POLLPRI}}, int(50*time.Millisecond/time.Millisecond))
		if err != nil && !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

// empty reports whether there is surely no process.
func (c *cgroups) empty() bool {
	data, err := os.ReadFile(filepath.Join(c.user, "cgroup.events"))
	if err != nil {
		return false
	}
	populated, ok := field(string(data), "populated")
	return ok && populated == "0"
}

// eventOf reads one counter of a flat-keyed file; 0 when there is none.
func eventOf(path, key string) uint64 {
	data, err := os.ReadFile(path)
	if err != nil {
		return 0
	}
	s, _ := field(string(data), key)
	n, err := strconv.ParseUint(s, 10, 64)
	if err != nil {
		return 0
	}
	return n
}

func field(data, key string) (string, bool) {
	for line := range strings.Lines(data) {
		if k, v, ok := strings.Cut(strings.TrimSpace(line), " "); ok && k == key {
			return v, true
		}
	}
	return "", false
}

// killAll kills every process of every cgroup.
func (c *cgroups) killAll() error {
	return os.WriteFile(filepath.Join(c.user, "cgroup.kill"), []byte("1"), 0)
}

// removeUser removes `user` with what is empty in it.
func (c *cgroups) removeUser() error {
	entries, err := os.ReadDir(c.user)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if e.IsDir() {
			err = errors.Join(err, unix.Rmdir(filepath.Join(c.user, e.Name())))
		}
	}
	return errors.Join(err, unix.Rmdir(c.user))
}
