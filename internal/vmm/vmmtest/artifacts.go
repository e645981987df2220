package vmmtest

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// kernelPackage names the newest kernel.
const kernelPackage = "linux-image-cloud-amd64"

// modules are what the test guest loads, in order.
var modules = []string{
	"virtio_ring", "virtio", "virtio_mmio", "virtio_blk", "failover", "net_failover", "virtio_net",
}

// Artifacts are what a test guest boots from.
type Artifacts struct {
	Kernel, Initrd string
	// Ready is the line that the guest writes to its console when it answers.
	Ready string
}

// Build returns the artifacts of the test guest. The kernel is kept in a cache folder: $SPACE_TEST_CACHE, or
// space-test in the user's cache folder. It needs apt-get, dpkg and go.
func Build(t testing.TB) Artifacts {
	t.Helper()
	root, err := kernelTree(t.Context())
	if err != nil {
		t.Fatalf("guest kernel: %v", err)
	}
	kernel, err := one(filepath.Join(root, "boot", "vmlinuz-*"))
	if err != nil {
		t.Fatal(err)
	}
	initrd := filepath.Join(t.TempDir(), "initrd")
	if err := buildInitrd(t.Context(), t.TempDir(), root, initrd); err != nil {
		t.Fatalf("test guest: %v", err)
	}
	return Artifacts{Kernel: kernel, Initrd: initrd, Ready: "testguest: ready"}
}

// kernelTree unpacks the kernel package into the cache, once.
func kernelTree(ctx context.Context) (string, error) {
	cache := os.Getenv("SPACE_TEST_CACHE")
	if cache == "" {
		user, err := os.UserCacheDir()
		if err != nil {
			return "", err
		}
		cache = filepath.Join(user, "space-test")
	}
	final := filepath.Join(cache, "vmm-kernel")
	if _, err := os.Stat(final); err == nil {
		return final, nil
	}
	if err := os.MkdirAll(cache, 0o755); err != nil {
		return "", err
	}
	tmp, err := os.MkdirTemp(cache, "unpack-")
	if err != nil {
		return "", err
	}
	defer func() { _ = os.RemoveAll(tmp) }()
	out, err := exec.CommandContext(ctx, "apt-cache", "depends", "--no-recommends", kernelPackage).Output()
	if err != nil {
		return "", fmt.Errorf("apt-cache: %w", err)
	}
	_, rest, _ := strings.Cut(string(out), "Depends: ")
	name, _, _ := strings.Cut(rest, "\n")
	download := exec.CommandContext(ctx, "apt-get", "download", strings.TrimSpace(name))
	download.Dir = tmp
	if out, err := download.CombinedOutput(); err != nil {
		return "", fmt.Errorf("apt-get download: %w: %s", err, out)
	}
	deb, err := one(filepath.Join(tmp, "*.deb"))
	if err != nil {
		return "", err
	}
	tree := filepath.Join(tmp, "tree")
	if out, err := exec.CommandContext(ctx, "dpkg", "-x", deb, tree).CombinedOutput(); err != nil {
		return "", fmt.Errorf("dpkg -x: %w: %s", err, out)
	}
	// Another test may have been faster: its tree is as good.
	if err := os.Rename(tree, final); err != nil {
		if _, e := os.Stat(final); e != nil {
			return "", err
		}
	}
	return final, nil
}

func buildInitrd(ctx context.Context, scratch, root, path string) error {
	program := filepath.Join(scratch, "init")
	build := exec.CommandContext(ctx, "go", "build", "-buildvcs=false", "-o", program, "-ldflags", "-s -w", "github.com/space-sandbox/space/internal/vmm/vmmtest/testguest")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		return fmt.Errorf("go build: %w: %s", err, out)
	}
	content, err := os.ReadFile(program)
	if err != nil {
		return err
	}
	var archive cpio
	archive.dir("dev")
	archive.device("dev/console", 5, 1)
	archive.dir("modules")
	archive.file("init", content)
	var order bytes.Buffer
	for _, name := range modules {
		file, err := findModule(root, name)
		if err != nil {
			return err
		}
		content, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		archive.file("modules/"+filepath.Base(file), content)
		fmt.Fprintln(&order, filepath.Base(file))
	}
	archive.file("modules/order", order.Bytes())
	return os.WriteFile(path, archive.finish(), 0o644)
}

func findModule(root, name string) (string, error) {
	var found string
	err := filepath.WalkDir(filepath.Join(root, "lib", "modules"), func(path string, _ os.DirEntry, err error) error {
		base := strings.TrimSuffix(filepath.Base(path), ".ko")
		if err == nil && strings.HasSuffix(path, ".ko") && strings.ReplaceAll(base, "-", "_") == name {
			found = path
		}
		return err
	})
	if err == nil && found == "" {
		err = fmt.Errorf("no module %s in the kernel package", name)
	}
	return found, err
}

func one(pattern string) (string, error) {
	matches, err := filepath.Glob(pattern)
	if err != nil || len(matches) != 1 {
		return "", fmt.Errorf("%s: %d matches, want one (%w)", pattern, len(matches), err)
	}
	return matches[0], nil
}

// cpio collects an archive in the "newc" format, as the kernel unpacks it.
type cpio struct {
	out   bytes.Buffer
	inode int
}

func (c *cpio) dir(name string)               { c.add(name, 0o040755, 0, 0, nil) }
func (c *cpio) file(name string, data []byte) { c.add(name, 0o100755, 0, 0, data) }
func (c *cpio) device(name string, major, minor int) {
	c.add(name, 0o020600, major, minor, nil)
}

func (c *cpio) add(name string, mode, major, minor int, data []byte) {
	c.inode++
	fmt.Fprintf(&c.out, "070701%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%s\x00",
		c.inode, mode, 0, 0, 1, 0, len(data), 0, 0, major, minor, len(name)+1, 0, name)
	c.pad()
	c.out.Write(data)
	c.pad()
}

func (c *cpio) pad() {
	for c.out.Len()%4 != 0 {
		c.out.WriteByte(0)
	}
}

func (c *cpio) finish() []byte {
	c.add("TRAILER!!!", 0, 0, 0, nil)
	return c.out.Bytes()
}
