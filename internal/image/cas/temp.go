package cas

import (
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// Temp is a private work folder on the cache's file system. It is gone after Close, or, if its owner dies, after the
// next Open.
type Temp struct {
	dir  string
	lock *os.File
}

// Temp makes a work folder that the caller closes.
func (s *Store) Temp() (*Temp, error) {
	for {
		dir := filepath.Join(s.root, "tmp", strings.ToLower(rand.Text()))
		lock, err := tryLock(dir+".lock", unix.LOCK_EX)
		if errors.Is(err, errLocked) {
			continue
		}
		if err != nil {
			return nil, err
		}
		if err := os.Mkdir(dir, 0o700); err != nil {
			err = errors.Join(err, os.Remove(lock.Name()))
			lock.Close()
			return nil, err
		}
		return &Temp{dir: dir, lock: lock}, nil
	}
}

// Dir is the folder's path.
func (t *Temp) Dir() string { return t.dir }

// Path is the path of a name in the folder.
func (t *Temp) Path(name string) string { return filepath.Join(t.dir, name) }

// Close removes the folder with everything in it.
func (t *Temp) Close() error {
	err := os.RemoveAll(t.dir)
	if err == nil {
		err = os.Remove(t.dir + ".lock")
	}
	t.lock.Close()
	return err
}

// Sweep removes the work folders whose owners have died, as Open does. It returns how many.
func (s *Store) Sweep() (int, error) {
	dir := filepath.Join(s.root, "tmp")
	entries, err := os.ReadDir(dir)
	if err != nil {
		return 0, err
	}
	swept := 0
	var errs []error
	for _, e := range entries {
		name := strings.TrimSuffix(e.Name(), ".lock")
		if name != e.Name() && hasDir(filepath.Join(dir, name)) {
			continue // handled at the folder's own entry
		}
		lock, err := tryLock(filepath.Join(dir, name+".lock"), unix.LOCK_EX)
		if errors.Is(err, errLocked) {
			continue
		}
		if err != nil {
			errs = append(errs, err)
			continue
		}
		dead := Temp{dir: filepath.Join(dir, name), lock: lock}
		if err := dead.Close(); err != nil {
			errs = append(errs, fmt.Errorf("sweep %s: %w", name, err))
			continue
		}
		swept++
	}
	return swept, errors.Join(errs...)
}

func hasDir(path string) bool {
	fi, err := os.Lstat(path)
	return err == nil && fi.IsDir()
}
