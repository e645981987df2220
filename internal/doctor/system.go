package doctor

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
)

const probeTimeout = 2 * time.Second

// existing returns the nearest folder above or at dir that is there.
func existing(dir string) (string, error) {
	for {
		info, err := os.Stat(dir)
		if err == nil && info.IsDir() {
			return dir, nil
		}
		if err == nil {
			return "", fmt.Errorf("%s is no folder", dir)
		}
		if !errors.Is(err, fs.ErrNotExist) || dir == filepath.Dir(dir) {
			return "", err
		}
		dir = filepath.Dir(dir)
	}
}

// existingCache tells whether the folder is a cache; opening it would make one: it refuses to make a cache folder.
func existingCache(dir string) (os.FileInfo, error) { return os.Stat(filepath.Join(dir, "format")) }

func freeSpace(dir string) (Space, error) {
	dir, err := existing(dir)
	if err != nil {
		return Space{}, err
	}
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return Space{}, err
	}
	return Space{FreeMiB: st.Bavail * uint64(st.Bsize) >> 20}, nil
}

func writable(dir string) error {
	dir, err := existing(dir)
	if err != nil {
		return err
	}
	if err := unix.Access(dir, unix.W_OK|unix.X_OK); err != nil {
		return fmt.Errorf("%s: %w", dir, err)
	}
	return nil
}

func listening(ctx context.Context, address string) error {
	d := net.Dialer{Timeout: probeTimeout}
	conn, err := d.DialContext(ctx, "tcp", address)
	if err != nil {
		return err
	}
	return conn.Close()
}

func healthy(ctx context.Context, address string) bool {
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+address+"/healthz", nil)
	if err != nil {
		return false
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return false
	}
	defer resp.Body.Close()
	return resp.StatusCode == http.StatusOK
}

// fileClock compares our clock with the one that stamps files: they differ on some network file systems.
func fileClock(dir string) (now, file time.Time, err error) {
	if dir, err = existing(dir); err != nil {
		return now, file, err
	}
	f, err := os.CreateTemp(dir, ".space-doctor-")
	if err != nil {
		return now, file, err
	}
	defer os.Remove(f.Name()) //nolint:errcheck // nothing can be done about it
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return now, file, err
	}
	return time.Now(), info.ModTime(), nil
}

// clockSync asks the kernel whether something keeps its clock right.
func clockSync() (bool, error) {
	var tx unix.Timex
	state, err := unix.Adjtimex(&tx)
	if err != nil {
		return false, err
	}
	const timeError = 5 // TIME_ERROR
	return state != timeError, nil
}
