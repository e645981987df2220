package sqlite

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// LockedError says that another process has the data folder.
type LockedError struct {
	Dir string
	PID int // 0: not known
}

// Error implements error.
func (e *LockedError) Error() string {
	if e.PID == 0 {
		return fmt.Sprintf("another process uses the data folder %s: stop it first", e.Dir)
	}
	return fmt.Sprintf("process %d uses the data folder %s: stop it first", e.PID, e.Dir)
}

// lockDir takes the exclusive lock on dir/lock and writes our process ID into it. The lock belongs to the open file:
// the kernel drops it however this process ends, so a lock is never stale.
func lockDir(dir string) (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_CREATE|os.O_RDWR|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		defer f.Close()
		if !errors.Is(err, unix.EWOULDBLOCK) {
			return nil, fmt.Errorf("lock %s: %w", dir, err)
		}
		return nil, &LockedError{Dir: dir, PID: readPID(f)}
	}
	// The number is a help for people only, so a full disk is no reason to refuse.
	if err := f.Truncate(0); err == nil {
		_, _ = f.WriteAt([]byte(strconv.Itoa(os.Getpid())+"\n"), 0)
	}
	return f, nil
}

func readPID(f *os.File) int {
	b, err := io.ReadAll(io.LimitReader(f, 32))
	if err != nil {
		return 0
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(b)))
	if err != nil || pid < 0 {
		return 0
	}
	return pid
}

// unlockDir leaves the file: removing it would let two processes lock two files of the same name.
func unlockDir(f *os.File) error {
	if f == nil {
		return nil
	}
	return f.Close()
}
