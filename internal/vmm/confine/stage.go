package confine

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"runtime"
	"strconv"

	"golang.org/x/sys/unix"
)

// Main turns the process into the confined program when it was started as a stage, and then never returns. In any
// other process it does nothing, at no cost. It must be called before anything else in main.
func Main() {
	if len(os.Args) != 3 || os.Args[1] != StageArg {
		return
	}
	fd, err := strconv.Atoi(os.Args[2])
	if err != nil || fd < 3 {
		os.Exit(2)
	}
	// Identity and restrictions below are set on this thread alone: it is the one that executes the program, and
	// the execution ends all others.
	runtime.LockOSThread()
	control := os.NewFile(uintptr(fd), "control")
	r := report{Error: "spec unreadable"}
	if s, err := readSpec(control); err == nil {
		err = s.become(control)
		r.Error, r.Refused = err.Error(), errors.Is(err, errNamespaces)
	}
	_ = json.NewEncoder(control).Encode(r)
	os.Exit(1)
}

func readSpec(control *os.File) (spec, error) {
	var s spec
	line, err := bufio.NewReader(control).ReadBytes('\n')
	if err != nil {
		return s, err
	}
	return s, json.Unmarshal(line, &s)
}

// become confines this thread and executes the program. It returns only with an error.
func (s *spec) become(control *os.File) error {
	if err := unix.Setrlimit(unix.RLIMIT_CORE, &unix.Rlimit{}); err != nil {
		return fmt.Errorf("limit core dumps: %w", err)
	}
	unix.CloseOnExec(int(control.Fd()))
	if err := unix.CloseRange(uint(3+s.Files), ^uint(0)>>1, unix.CLOSE_RANGE_CLOEXEC); err != nil {
		return fmt.Errorf("close other descriptors: %w", err)
	}
	var gaps []string
	if err := unix.Chdir(s.Dir); err != nil {
		return fmt.Errorf("enter %s: %w", s.Dir, err)
	}
	if !s.Unconfined {
		var err error
		if gaps, err = s.confine(); err != nil {
			return err
		}
	}
	if err := s.tieToParent(control); err != nil {
		return err
	}
	if err := json.NewEncoder(control).Encode(report{Gaps: gaps}); err != nil {
		return err
	}
	argv := append([]string{s.Path}, s.Args...)
	if err := unix.Exec(s.Path, argv, []string{}); err != nil {
		return fmt.Errorf("execute %s: %w", s.Path, err)
	}
	return nil
}

// confine takes everything away that the program does not need, in the order in which the stage still may.
func (s *spec) confine() ([]string, error) {
	if s.Namespaces {
		if err := s.buildRoot(); err != nil {
			return nil, err
		}
	}
	rules, gaps, err := s.landlock()
	if err != nil {
		return nil, err
	}
	if rules >= 0 {
		defer func() { _ = unix.Close(rules) }()
	}
	if err := s.dropPrivileges(); err != nil {
		return nil, err
	}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return nil, fmt.Errorf("set no_new_privs: %w", err)
	}
	if rules >= 0 {
		if _, _, errno := unix.RawSyscall(unix.SYS_LANDLOCK_RESTRICT_SELF, uintptr(rules), 0, 0); errno != 0 {
			return nil, fmt.Errorf("enforce landlock: %w", errno)
		}
	}
	return gaps, nil
}

// tieToParent arms the parent-death signal, which a change of user disarms, and then makes sure that the parent did
// not die before: its end of the control connection would be closed. The parent's ID says it too, but is not
// visible from a PID namespace.
func (s *spec) tieToParent(control *os.File) error {
	if err := unix.Prctl(unix.PR_SET_PDEATHSIG, uintptr(unix.SIGKILL), 0, 0, 0); err != nil {
		return fmt.Errorf("arm parent-death signal: %w", err)
	}
	poll := []unix.PollFd{{Fd: int32(control.Fd()), Events: unix.POLLRDHUP}}
	n, err := unix.Poll(poll, 0)
	for errors.Is(err, unix.EINTR) {
		n, err = unix.Poll(poll, 0)
	}
	if err != nil || n > 0 {
		return errors.Join(errors.New("parent has ended"), err)
	}
	if ppid := unix.Getppid(); ppid != 0 && ppid != s.ParentPID {
		return errors.New("parent has ended")
	}
	return nil
}
