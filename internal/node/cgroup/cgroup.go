package cgroup

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// Tree is this node's subtree. The zero Tree has no groups.
type Tree struct {
	root string
	gap  string
}

// Discover finds the cgroup v2 mount and makes the subtree of an instance. It never fails: Gap says what is missing.
func Discover(instance string) *Tree {
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return &Tree{gap: "cannot read mountinfo: " + err.Error()}
	}
	self, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return &Tree{gap: "cannot read own cgroup: " + err.Error()}
	}
	mount, own := findMount(string(mounts)), findOwn(string(self))
	if mount == "" || own == "" {
		return &Tree{gap: "no cgroup v2 hierarchy is mounted: processes cannot be killed as a group"}
	}
	return At(filepath.Join(mount, own, "space", instance))
}

// At is the tree of a given folder of a cgroup v2 hierarchy.
func At(root string) *Tree {
	if err := os.MkdirAll(root, 0o755); err != nil {
		return &Tree{gap: "no cgroup can be made (delegate one to this service): " + err.Error()}
	}
	if _, err := os.Stat(filepath.Join(root, "cgroup.kill")); err != nil {
		_ = os.Remove(root)
		return &Tree{gap: "the kernel's cgroups cannot be killed at once: " + err.Error()}
	}
	// Best effort: a cgroup that holds processes itself cannot hand controllers down.
	for _, dir := range []string{filepath.Dir(root), root} {
		for _, c := range []string{"+memory", "+cpu"} {
			_ = os.WriteFile(filepath.Join(dir, "cgroup.subtree_control"), []byte(c), 0o600)
		}
	}
	return &Tree{root: root}
}

// LimitGap says what keeps memory and CPU limits from being set; empty if they work or there are no groups at all.
func (t *Tree) LimitGap() string {
	if t.root == "" {
		return ""
	}
	have, err := os.ReadFile(filepath.Join(t.root, "cgroup.subtree_control"))
	if err == nil && strings.Contains(string(have), "memory") && strings.Contains(string(have), "cpu") {
		return ""
	}
	return "no cgroup limits: the memory and cpu controllers are not delegated to this service on cgroup v2 (systemd: Delegate=yes)"
}

// findMount returns where cgroup2 is mounted, from the text of mountinfo. The file system type follows " - ".
func findMount(mountinfo string) string {
	for line := range strings.Lines(mountinfo) {
		before, after, ok := strings.Cut(line, " - ")
		fields := strings.Fields(before)
		if ok && strings.HasPrefix(after, "cgroup2 ") && len(fields) >= 5 && fields[3] == "/" {
			return unescape(fields[4])
		}
	}
	return ""
}

// unescape undoes the octal escapes of mountinfo.
func unescape(s string) string {
	return strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`).Replace(s)
}

// findOwn returns the cgroup v2 path from the text of /proc/self/cgroup.
func findOwn(cgroups string) string {
	for line := range strings.Lines(cgroups) {
		if path, ok := strings.CutPrefix(strings.TrimSuffix(line, "\n"), "0::"); ok && strings.HasPrefix(path, "/") {
			return path
		}
	}
	return ""
}

// Gap says what is missing; empty if groups work.
func (t *Tree) Gap() string { return t.gap }

// New makes a group. Without cgroups it returns an empty path and no error.
func (t *Tree) New(name string) (string, error) {
	if t.root == "" {
		return "", nil
	}
	path := filepath.Join(t.root, name)
	if err := os.Mkdir(path, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
		return "", fmt.Errorf("cgroup: %w", err)
	}
	return path, nil
}

// Limit sets limits where the controllers exist and reports whether all were set.
func Limit(group string, memoryBytes uint64, cpus uint32) bool {
	files := map[string]string{
		"memory.max": strconv.FormatUint(memoryBytes, 10),
		"cpu.max":    fmt.Sprintf("%d 100000", 100000*cpus),
	}
	all := true
	for name, value := range files {
		path := filepath.Join(group, name)
		if _, err := os.Stat(path); err != nil {
			all = false
			continue
		}
		all = os.WriteFile(path, []byte(value), 0o600) == nil && all
	}
	return all
}

// Kill kills everything in a group and below it. A group that does not exist is fine, as is an empty path.
func Kill(group string) error {
	if group == "" {
		return nil
	}
	err := os.WriteFile(filepath.Join(group, "cgroup.kill"), []byte("1"), 0o600)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// Remove removes a group and what is below it once it is empty; it waits for that until ctx ends.
func Remove(ctx context.Context, group string) error {
	if group == "" {
		return nil
	}
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for {
		err := removeTree(group)
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("cgroup %s is not empty: %w", filepath.Base(group), err)
		case <-tick.C:
		}
	}
}

func removeTree(group string) error {
	entries, err := os.ReadDir(group)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	for _, e := range entries {
		if e.IsDir() {
			if err := removeTree(filepath.Join(group, e.Name())); err != nil {
				return err
			}
		}
	}
	if err := os.Remove(group); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// Sweep kills and removes the groups of this tree whose name keep does not accept.
func (t *Tree) Sweep(ctx context.Context, keep func(name string) bool) error {
	if t.root == "" {
		return nil
	}
	entries, err := os.ReadDir(t.root)
	if err != nil {
		return fmt.Errorf("cgroup: %w", err)
	}
	var errs []error
	for _, e := range entries {
		if !e.IsDir() || keep(e.Name()) {
			continue
		}
		group := filepath.Join(t.root, e.Name())
		errs = append(errs, Kill(group), Remove(ctx, group))
	}
	return errors.Join(errs...)
}

// Close removes the subtree if no group is left in it. A group in use is not an error: sandboxes outlive nodes.
func (t *Tree) Close() {
	if t.root == "" {
		return
	}
	if os.Remove(t.root) == nil {
		_ = os.Remove(filepath.Dir(t.root)) // the "space" above it, if this was the only instance
	}
}
