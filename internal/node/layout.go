package node

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/space-sandbox/space/internal/embedded"
	"github.com/space-sandbox/space/internal/node/shims"
)

// layout is where things are. All folders are 0700.
type layout struct {
	data string // Config.DataDir
	run  string // this instance's part of Config.RuntimeDir
}

func (l layout) node() string                 { return filepath.Join(l.data, "node") }
func (l layout) warm() string                 { return filepath.Join(l.node(), "warm") }
func (l layout) shims() string                { return filepath.Join(l.node(), "shims") }
func (l layout) sandboxes() string            { return filepath.Join(l.node(), "sandboxes") }
func (l layout) sandbox(id string) string     { return filepath.Join(l.sandboxes(), id) }
func (l layout) journal(id string) string     { return filepath.Join(l.sandbox(id), "journal") }
func (l layout) generations() string          { return filepath.Join(l.node(), "generations") }
func (l layout) probe() string                { return filepath.Join(l.node(), "probe.json") }
func (l layout) sandboxFile(id string) string { return filepath.Join(l.sandbox(id), "sandbox.json") }

// makeFolders makes the node's folders and returns its instance ID, a fresh one at the first start.
func makeFolders(cfg Config) (layout, string, error) {
	l := layout{data: cfg.DataDir}
	for _, dir := range []string{l.node(), l.warm(), l.shims(), l.sandboxes()} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return l, "", fmt.Errorf("data folder: %w", err)
		}
	}
	instance, err := instanceID(filepath.Join(l.node(), "instance"))
	if err != nil {
		return l, "", err
	}
	// Below the instance's name, so that two data folders can share one runtime folder.
	l.run = filepath.Join(cfg.RuntimeDir, instance)
	if err := os.MkdirAll(l.run, 0o700); err != nil {
		return l, "", fmt.Errorf("runtime folder: %w", err)
	}
	return l, instance, nil
}

func instanceID(path string) (string, error) {
	data, err := os.ReadFile(path)
	if err == nil {
		id := strings.TrimSpace(string(data))
		if id == "" || strings.Trim(id, "0123456789abcdef") != "" {
			return "", fmt.Errorf("instance file %s holds no instance ID", path)
		}
		return id, nil
	}
	if !errors.Is(err, fs.ErrNotExist) {
		return "", fmt.Errorf("instance ID: %w", err)
	}
	id := shims.NewToken()[:8]
	return id, writeDurably(path, []byte(id+"\n"), 0o600)
}

// lockFolder makes sure that only one process works in the folder. Closing the file unlocks it.
func lockFolder(dir string) (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("lock: %w", err)
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		_ = f.Close()
		return nil, fmt.Errorf("data folder %s is in use by another node service: %w", dir, err)
	}
	return f, nil
}

// writeDurably replaces a file: after a crash it has the old or the new content.
func writeDurably(path string, data []byte, mode os.FileMode) error {
	tmp := path + ".tmp"
	f, err := os.OpenFile(tmp, os.O_CREATE|os.O_WRONLY|os.O_TRUNC, mode)
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	if err == nil {
		err = f.Sync()
	}
	if err := errors.Join(err, f.Close()); err != nil {
		return err
	}
	if err := os.Rename(tmp, path); err != nil {
		return err
	}
	return syncPath(filepath.Dir(path))
}

// syncPath makes a file's content, or a folder's names, durable.
func syncPath(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}

// installShim writes the embedded shim below the data folder, under its own digest: shims of an older release may
// still run from theirs.
func installShim(dataDir string) (string, error) {
	data, err := embedded.Shim()
	if err != nil {
		return "", err
	}
	sum := sha256.Sum256(data)
	dir := filepath.Join(dataDir, "bin", hex.EncodeToString(sum[:8]))
	path := filepath.Join(dir, "space-shim")
	if have, err := os.ReadFile(path); err == nil && sha256.Sum256(have) == sum {
		return path, nil
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return "", fmt.Errorf("install shim: %w", err)
	}
	if err := writeDurably(path, data, 0o755); err != nil {
		return "", fmt.Errorf("install shim: %w", err)
	}
	return path, os.Chmod(path, 0o755)
}

// availableMiB returns the memory that programs can still get on this machine.
func availableMiB() (uint64, error) {
	data, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(data)) {
		var kib uint64
		if n, _ := fmt.Sscanf(line, "MemAvailable: %d kB", &kib); n == 1 {
			return kib >> 10, nil
		}
	}
	return 0, errors.New("/proc/meminfo has no MemAvailable")
}

// freeMiB returns the free space of a file system.
func freeMiB(path string) (uint64, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(path, &st); err != nil {
		return 0, err
	}
	return st.Bavail * uint64(st.Bsize) >> 20, nil
}
