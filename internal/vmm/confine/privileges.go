package confine

import (
	"errors"
	"fmt"
	"os"
	"strconv"

	"github.com/landlock-lsm/go-landlock/landlock"
	llsys "github.com/landlock-lsm/go-landlock/landlock/syscall"
	"golang.org/x/sys/unix"
)

// minLandlock is the version that covers renames between folders; scopedLandlock adds the network, devices, abstract
// sockets and signals. Below the second there is a gap to report.
const (
	minLandlock    = 2
	scopedLandlock = 6
)

// landlock makes the set of rules: the spec's files and the system's, no TCP, no abstract sockets and no signals to
// the outside. Without Landlock the descriptor is -1.
func (s *spec) landlock() (int, []string, error) {
	abi, err := llsys.LandlockGetABIVersion()
	if err != nil {
		abi = 0 // a kernel without it says so by an error
	}
	if abi < minLandlock {
		return -1, []string{"no Landlock: use Linux 5.19 or newer with landlock among the security modules"}, nil
	}
	var gaps []string
	if abi < scopedLandlock && !s.Namespaces {
		gaps = append(gaps, fmt.Sprintf("Landlock version %d does not cover abstract sockets and signals: use Linux 6.12 or newer", abi))
	}
	rules := []landlock.Rule{
		landlock.RODirs("/usr", "/lib", "/lib32", "/lib64", "/libx32", "/bin", "/sbin").IgnoreIfMissing(),
		landlock.ROFiles("/etc/ld.so.cache").IgnoreIfMissing(),
		landlock.RWDirs(s.Dir),
		landlock.RWFiles(s.Devices...).WithIoctlDev(),
		landlock.ROFiles(s.Path),
	}
	for _, p := range s.ReadOnly {
		rules = append(rules, pathRule(p, false))
	}
	for _, p := range s.ReadWrite {
		rules = append(rules, pathRule(p, true))
	}
	inherited, err := s.inheritedRules()
	if err != nil {
		return -1, nil, err
	}
	fd, _, err := landlock.V11.BestEffort().NewRulesetFD(append(rules, inherited...)...)
	if err != nil {
		return -1, nil, fmt.Errorf("make landlock rules: %w", err)
	}
	return fd, gaps, nil
}

func pathRule(path string, write bool) landlock.Rule {
	info, err := os.Stat(path)
	dir := err == nil && info.IsDir() // a missing path fails when the rule is added
	switch {
	case dir && write:
		return landlock.RWDirs(path)
	case dir:
		return landlock.RODirs(path)
	case write:
		return landlock.RWFiles(path)
	default:
		return landlock.ROFiles(path)
	}
}

// inheritedRules allow regular files among the inherited descriptors to be opened again, with no more access than
// the descriptor has. Sockets, pipes and memory files need no rule and could have none.
func (s *spec) inheritedRules() ([]landlock.Rule, error) {
	var rules []landlock.Rule
	for fd := 3; fd < 3+s.Files; fd++ {
		var st unix.Stat_t
		if err := unix.Fstat(fd, &st); err != nil {
			return nil, fmt.Errorf("descriptor %d: %w", fd, err)
		}
		if _, err := unix.FcntlInt(uintptr(fd), unix.F_GET_SEALS, 0); err == nil && isAnonymous(fd) {
			continue
		}
		if st.Mode&unix.S_IFMT != unix.S_IFREG {
			continue
		}
		flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFL, 0)
		if err != nil {
			return nil, fmt.Errorf("descriptor %d: %w", fd, err)
		}
		path := "/proc/self/fd/" + strconv.Itoa(fd)
		if flags&unix.O_ACCMODE == unix.O_RDONLY {
			rules = append(rules, landlock.PathAccess(llsys.AccessFSReadFile, path))
		} else {
			rules = append(rules, landlock.RWFiles(path))
		}
	}
	return rules, nil
}

// isAnonymous tells a memory file from a file on a tmpfs, which has seals too: it has no name.
func isAnonymous(fd int) bool {
	var st unix.Stat_t
	return unix.Fstat(fd, &st) == nil && st.Nlink == 0
}

// dropPrivileges takes the spec's user, and every capability and the means to regain one. A program that stays root
// of the host or of its user namespace is root without capabilities.
func (s *spec) dropPrivileges() error {
	for c := uintptr(0); c <= 63; c++ {
		err := unix.Prctl(unix.PR_CAPBSET_DROP, c, 0, 0, 0)
		if errors.Is(err, unix.EINVAL) { // past the last one the kernel knows
			break
		}
		if errors.Is(err, unix.EPERM) { // not ours to drop; no_new_privs keeps the program from gaining it
			break
		}
		if err != nil {
			return fmt.Errorf("drop capability %d: %w", c, err)
		}
	}
	if s.UID != 0 && os.Geteuid() == 0 {
		if err := s.switchUser(); err != nil {
			return err
		}
	}
	if err := unix.Prctl(unix.PR_CAP_AMBIENT, unix.PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0); err != nil {
		return fmt.Errorf("clear ambient capabilities: %w", err)
	}
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var none [2]unix.CapUserData
	if err := unix.Capset(&header, &none[0]); err != nil {
		return fmt.Errorf("drop capabilities: %w", err)
	}
	return nil
}

// switchUser changes the identity of this thread alone.
func (s *spec) switchUser() error {
	gid := uintptr(s.GID)
	if gid == 0 {
		gid = uintptr(s.UID) // never keep root's group
	}
	uid := uintptr(s.UID)
	if _, _, errno := unix.RawSyscall(unix.SYS_SETGROUPS, 0, 0, 0); errno != 0 {
		return fmt.Errorf("drop groups: %w", errno)
	}
	if _, _, errno := unix.RawSyscall(unix.SYS_SETRESGID, gid, gid, gid); errno != 0 {
		return fmt.Errorf("set group %d: %w", gid, errno)
	}
	if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, uid, uid, uid); errno != 0 {
		return fmt.Errorf("set user %d: %w", uid, errno)
	}
	return nil
}
