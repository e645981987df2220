package creds

import (
	"fmt"
	"os"
	"runtime"
	"unsafe"

	"github.com/space-sandbox/space/internal/agent/users"
	"golang.org/x/sys/unix"
)

// Do calls fn with u's rights and returns its error. fn runs on a goroutine of its own; Do waits for it.
func Do(u users.User, fn func() error) error {
	if os.Geteuid() != 0 {
		if int(u.UID) != os.Geteuid() {
			return fmt.Errorf("act as another user: %w", unix.EPERM)
		}
		return fn()
	}
	if u.UID == 0 && u.GID == 0 {
		return fn()
	}
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		saved, err := enter(u)
		if err == nil {
			err = fn()
		}
		// Locked still, a goroutine that ends takes its thread along.
		if saved != nil && saved.restore() == nil {
			runtime.UnlockOSThread()
		}
		done <- err
	}()
	return <-done
}

// state is what a thread had before.
type state struct {
	caps [2]unix.CapUserData
}

// enter gives the calling thread u's rights. With an error the thread must not be used again.
func enter(u users.User) (*state, error) {
	s := &state{}
	h := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	if err := capget(&h, &s.caps); err != nil {
		return nil, err
	}
	if err := setgroups(u.Groups); err != nil {
		return nil, err
	}
	if err := setfs(unix.SYS_SETFSGID, u.GID); err != nil {
		return nil, err
	}
	if err := setfs(unix.SYS_SETFSUID, u.UID); err != nil {
		return nil, err
	}
	if u.UID == 0 {
		return s, nil
	}
	// Dropping fsuid 0 takes the file capabilities away, but not CAP_SYS_PTRACE or CAP_SYS_ADMIN, which open other
	// users' files in /proc.
	none := s.caps
	none[0].Effective, none[1].Effective = 0, 0
	return s, capset(&h, &none)
}

// restore gives the calling thread root's rights back.
func (s *state) restore() error {
	h := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	// First, because the rest needs CAP_SETUID and CAP_SETGID.
	if err := capset(&h, &s.caps); err != nil {
		return err
	}
	if err := setfs(unix.SYS_SETFSUID, 0); err != nil {
		return err
	}
	if err := setfs(unix.SYS_SETFSGID, 0); err != nil {
		return err
	}
	if err := capset(&h, &s.caps); err != nil {
		return err
	}
	return setgroups(nil)
}

// The raw calls below act on the calling thread alone; the wrappers of package syscall act on all threads.

func setgroups(groups []uint32) error {
	var p unsafe.Pointer
	if len(groups) > 0 {
		p = unsafe.Pointer(&groups[0])
	}
	return raw(unix.SYS_SETGROUPS, uintptr(len(groups)), uintptr(p), "setgroups")
}

// setfs sets and verifies: setfsuid and setfsgid tell no error.
func setfs(call uintptr, id uint32) error {
	_, _, _ = unix.RawSyscall(call, uintptr(id), 0, 0)
	now, _, _ := unix.RawSyscall(call, ^uintptr(0), 0, 0)
	if uint32(now) != id {
		return fmt.Errorf("take on a user's id: %w", unix.EPERM)
	}
	return nil
}

func capget(h *unix.CapUserHeader, d *[2]unix.CapUserData) error {
	return raw(unix.SYS_CAPGET, uintptr(unsafe.Pointer(h)), uintptr(unsafe.Pointer(&d[0])), "capget")
}

func capset(h *unix.CapUserHeader, d *[2]unix.CapUserData) error {
	return raw(unix.SYS_CAPSET, uintptr(unsafe.Pointer(h)), uintptr(unsafe.Pointer(&d[0])), "capset")
}

func raw(call, a, b uintptr, name string) error {
	if _, _, errno := unix.RawSyscall(call, a, b, 0); errno != 0 {
		return fmt.Errorf("%s: %w", name, errno)
	}
	return nil
}
