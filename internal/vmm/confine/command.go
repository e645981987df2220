package confine

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Command is a program and all it may touch.
type Command struct {
	Path string   // the program
	Args []string // without the program's name
	// Dir is an existing folder that belongs to the program: readable and writable, and its working directory.
	Dir string
	// ReadOnly and ReadWrite are files or folders beside Dir and the system's libraries, by absolute path. They are
	// seen at the same path. Only what the user owns or may access by its mode is in fact accessible.
	ReadOnly, ReadWrite []string
	Devices             []string // device nodes beside null, zero and urandom
	// Files become descriptors 3, 4, ... of the program. Regular files among them can be opened again through
	// /proc/self/fd, with the access their descriptors have.
	Files          []*os.File
	Stdout, Stderr *os.File // nil: /dev/null
	UID, GID       uint32   // what to run as when the caller is root; 0 is the caller's own
	CgroupFD       *os.File // cgroup v2 folder to start in; may be nil
	// Unconfined starts the program with an empty environment and closed descriptors, but with nothing else taken
	// away. Only for tests.
	Unconfined bool
	// NoNamespaces acts as if the host refused namespaces. Only for tests and hosts known to.
	NoNamespaces bool
}

// Process is a started program.
type Process struct {
	cmd  *exec.Cmd
	gaps []string
	done chan struct{} // closed when the death was seen
}

// PID is the process ID in the caller's namespace.
func (p *Process) PID() int { return p.cmd.Process.Pid }

// Gaps names what is missing for full isolation, each with its remedy.
func (p *Process) Gaps() []string { return p.gaps }

// Done is closed when the program's death was seen.
func (p *Process) Done() <-chan struct{} { return p.done }

// State says how the program ended; nil before Done.
func (p *Process) State() *os.ProcessState {
	select {
	case <-p.done:
		return p.cmd.ProcessState
	default:
		return nil
	}
}

// Kill kills the program and everything in its PID namespace. It does not wait.
func (p *Process) Kill() error {
	if err := p.cmd.Process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	return nil
}

const namespaces = unix.CLONE_NEWNS | unix.CLONE_NEWPID | unix.CLONE_NEWNET | unix.CLONE_NEWIPC | unix.CLONE_NEWUTS

// errNamespaces marks failures that only mean that this host allows no namespaces.
var errNamespaces = errors.New("namespaces refused")

// Start starts the program and returns once it has replaced the stage. ctx bounds the start only.
func Start(ctx context.Context, c Command) (*Process, error) {
	if c.Unconfined || c.NoNamespaces {
		return c.start(ctx, false)
	}
	p, err := c.start(ctx, true)
	if !errors.Is(err, errNamespaces) {
		return p, err
	}
	reason := err
	if p, err = c.start(ctx, false); err != nil {
		return nil, err
	}
	p.gaps = append(p.gaps, fmt.Sprintf("no namespaces (%v): run the node as root or allow unprivileged user namespaces", reason))
	return p, nil
}

func (c *Command) start(ctx context.Context, isolate bool) (*Process, error) {
	ours, theirs, err := socketpair()
	if err != nil {
		return nil, err
	}
	defer ours.Close()
	defer theirs.Close()
	p := &Process{cmd: c.stage(theirs, isolate), done: make(chan struct{})}
	if err := p.launch(); err != nil {
		return nil, c.startError(err, isolate)
	}
	theirs.Close()
	p.gaps, err = converse(ctx, ours, c.spec(isolate))
	if err != nil {
		_ = p.Kill()
		<-p.done
		return nil, err
	}
	return p, nil
}

// stage is the caller's own binary, in its namespaces. Through /proc it is the same program even if the file was
// replaced meanwhile.
func (c *Command) stage(control *os.File, isolate bool) *exec.Cmd {
	files := append(append([]*os.File{}, c.Files...), control)
	cmd := &exec.Cmd{
		Path:       "/proc/self/exe",
		Args:       []string{"space-vmm", StageArg, strconv.Itoa(2 + len(files))},
		Env:        []string{},
		ExtraFiles: files,
		SysProcAttr: &syscall.SysProcAttr{
			Setsid:    true,
			Pdeathsig: syscall.SIGKILL,
		},
	}
	if c.Stdout != nil {
		cmd.Stdout = c.Stdout
	}
	if c.Stderr != nil {
		cmd.Stderr = c.Stderr
	}
	attr := cmd.SysProcAttr
	if c.CgroupFD != nil {
		attr.UseCgroupFD, attr.CgroupFD = true, int(c.CgroupFD.Fd())
	}
	if isolate {
		attr.Cloneflags = namespaces
		if os.Geteuid() != 0 {
			attr.Cloneflags |= unix.CLONE_NEWUSER
			attr.UidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Geteuid(), Size: 1}}
			attr.GidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getegid(), Size: 1}}
		}
	}
	return cmd
}

// startError tells a refusal of namespaces, which clone answers with one of few errors, from other failures.
func (c *Command) startError(err error, isolate bool) error {
	refused := errors.Is(err, unix.EPERM) || errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EACCES)
	if isolate && refused {
		return fmt.Errorf("%w: %w", errNamespaces, err)
	}
	return fmt.Errorf("start confinement stage: %w", err)
}

// launch starts the command and waits for its end on one thread that is kept for this alone: the parent-death
// signal fires when the thread that made the child ends.
func (p *Process) launch() error {
	started := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		if err := p.cmd.Start(); err != nil {
			started <- err
			return
		}
		started <- nil
		_ = p.cmd.Wait() // its result is in ProcessState
		close(p.done)
	}()
	return <-started
}

// converse sends the stage its spec and reads its report, which ends when the stage has become the program. The
// connection stays open until then, so that the stage can see whether its parent lives.
func converse(ctx context.Context, conn net.Conn, s spec) ([]string, error) {
	deadline := time.Now().Add(10 * time.Second)
	if d, ok := ctx.Deadline(); ok && d.Before(deadline) {
		deadline = d
	}
	_ = conn.SetDeadline(deadline)
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	if err := json.NewEncoder(conn).Encode(s); err != nil {
		return nil, fmt.Errorf("send spec to confinement stage: %w", err)
	}
	var r report
	reports := json.NewDecoder(io.LimitReader(conn, 64<<10))
	n := 0
	for ; ; n++ {
		r.Error = ""
		err := reports.Decode(&r)
		if errors.Is(err, io.EOF) || errors.Is(err, unix.ECONNRESET) {
			break
		}
		if err != nil {
			return nil, fmt.Errorf("confinement stage: %w", errors.Join(err, ctx.Err()))
		}
		if r.Error != "" {
			break
		}
	}
	switch {
	case n == 0 && r.Error == "":
		return nil, errors.New("confinement stage ended without a report: does this binary call confine.Main?")
	case r.Refused:
		return nil, fmt.Errorf("%w: %s", errNamespaces, r.Error)
	case r.Error != "":
		return nil, fmt.Errorf("confinement stage: %s", r.Error)
	}
	return r.Gaps, nil
}

// socketpair returns the parent's end and the stage's.
func socketpair() (net.Conn, *os.File, error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("socketpair: %w", err)
	}
	mine := os.NewFile(uintptr(fds[0]), "stage")
	theirs := os.NewFile(uintptr(fds[1]), "parent")
	defer mine.Close()
	conn, err := net.FileConn(mine)
	if err != nil {
		theirs.Close()
		return nil, nil, fmt.Errorf("socketpair: %w", err)
	}
	return conn, theirs, nil
}
