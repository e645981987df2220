package proc

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"syscall"
	"time"

	"connectrpc.com/connect"
	"github.com/creack/pty"
	agentv1 "github.com/space-sandbox/space/internal/gen/space/agent/v1"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/types/known/timestamppb"
)

const (
	maxID      = 64
	maxArgs    = 65536
	pipeBytes  = 1 << 20 // of a pipe that output goes through
	maxTimeout = 10 * 365 * 24 * time.Hour
)

func itoa(n int) string { return strconv.Itoa(n) }

// spawn starts a process. The error is one of Run's.
func (t *Table) spawn(id string, spec *agentv1.ProcessSpec) (*process, error) {
	if err := checkSpec(id, spec); err != nil {
		return nil, connect.NewError(connect.CodeInvalidArgument, err)
	}
	t.gate.RLock()
	defer t.gate.RUnlock()
	if t.frozen {
		return nil, connect.NewError(connect.CodeFailedPrecondition, errors.New("the guest is frozen"))
	}
	p := &process{id: id, ring: newRing()}
	if err := t.reserve(id, p); err != nil {
		return nil, err
	}
	if err := t.launch(p, spec); err != nil {
		t.forget(id)
		return nil, err
	}
	t.publish(p)
	return p, nil
}

// launch resolves who, where and what, and starts it. A failed exec is a process that has exited.
func (t *Table) launch(p *process, spec *agentv1.ProcessSpec) error {
	var env map[string]string
	var program string
	var bad *execError
	argv0 := string(spec.GetArgv()[0])
	w, err := resolve(t.cfg.Users, spec.GetUser(), spec.GetCwd(), func(w where) {
		env = environ(w.user, spec.GetPty() != nil, t.env, spec.GetEnv())
		program, bad = lookPath(argv0, w.cwd, env["PATH"])
	})
	if err != nil {
		return err
	}
	if bad == nil {
		if bad, err = t.exec(p, spec, w, program, envList(env)); err != nil {
			return err
		}
	}
	if bad != nil {
		now := time.Now()
		p.ring.started(0, now)
		p.ring.output(errorStream(spec.GetPty() != nil), execFrame(argv0, bad))
		p.ring.exit(&agentv1.Exited{Code: &bad.code, At: timestamppb.New(now)})
	}
	return nil
}

// exec forks and wires the process up.
func (t *Table) exec(p *process, spec *agentv1.ProcessSpec, w where, program string, env []string) (*execError, error) {
	files, err := openStreams(spec, w.user.UID)
	if err != nil {
		return nil, exhausted(err)
	}
	defer files.closeChild()
	cg, err := t.cgroups.make(p.id)
	if err != nil {
		files.closeParent()
		return nil, exhausted(err)
	}
	defer cg.Close()
	attr := &syscall.ProcAttr{Dir: w.cwd, Env: env, Files: files.childFDs(), Sys: &syscall.SysProcAttr{
		Setsid: true, Setctty: spec.GetPty() != nil, Ctty: 0,
		Credential:  &syscall.Credential{Uid: w.user.UID, Gid: w.user.GID, Groups: w.user.Groups},
		UseCgroupFD: true, CgroupFD: int(cg.Fd()),
	}}
	if os.Geteuid() != 0 {
		attr.Sys.Credential = nil
	}
	argv := make([]string, len(spec.GetArgv()))
	for i, a := range spec.GetArgv() {
		argv[i] = string(a)
	}
	pid, status, err := t.reaper.start(func() (int, error) { return syscall.ForkExec(program, argv, attr) })
	if err != nil {
		files.closeParent()
		t.cgroups.remove(p.id)
		if errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.ENOMEM) || errors.Is(err, unix.EMFILE) {
			return nil, exhausted(err)
		}
		return toExecError(err), nil
	}
	p.pid = pid
	p.ring.started(pid, time.Now())
	t.attach(p, files, status, time.Duration(min(spec.GetTimeoutMs(), uint64(maxTimeout/time.Millisecond)))*time.Millisecond)
	return nil, nil
}

// attach starts the goroutines of a process.
func (t *Table) attach(p *process, files *streams, status <-chan syscall.WaitStatus, limit time.Duration) {
	t.startTimer(p, limit)
	if files.input != nil {
		p.stdin = newStdin(files.input, files.tty)
	}
	if files.tty {
		p.tty = files.input
	}
	var sources []*source
	for _, out := range files.outputs {
		s := &source{file: out.file, stream: out.stream, ring: p.ring, buffers: &t.buffers, drained: make(chan struct{})}
		sources = append(sources, s)
		t.work.Add(1)
		go s.run(func() {
			out.file.Close()
			t.work.Done()
		})
	}
	t.work.Add(1)
	go t.supervise(p, status, sources)
}

func exhausted(err error) error {
	return connect.NewError(connect.CodeResourceExhausted, fmt.Errorf("start a process: %w", err))
}

func checkSpec(id string, spec *agentv1.ProcessSpec) error {
	if !validID(id) {
		return errors.New("process_id is not 1 to 64 characters of [A-Za-z0-9_-]")
	}
	if n := len(spec.GetArgv()); n == 0 || n > maxArgs {
		return errors.New("argv is empty or too long")
	}
	for _, a := range spec.GetArgv() {
		for _, c := range a {
			if c == 0 {
				return errors.New("argv holds NUL")
			}
		}
	}
	if spec.GetPty() != nil {
		if err := checkSize(spec.GetPty()); err != nil {
			return err
		}
	}
	return CheckEnv(spec.GetEnv())
}

// validID keeps an ID usable as the name of a cgroup: cgroup files all have a dot in theirs.
func validID(id string) bool {
	if id == "" || len(id) > maxID {
		return false
	}
	for _, c := range []byte(id) {
		if (c < 'a' || c > 'z') && (c < 'A' || c > 'Z') && (c < '0' || c > '9') && c != '-' && c != '_' {
			return false
		}
	}
	return true
}

func checkSize(s *agentv1.TerminalSize) error {
	if s.GetCols() < 1 || s.GetCols() > 65535 || s.GetRows() < 1 || s.GetRows() > 65535 {
		return errors.New("terminal size is not 1 to 65535")
	}
	return nil
}

// output is the parent's end of one stream.
type output struct {
	file   *os.File
	stream agentv1.Stream
}

// streams are the files of a process that starts.
type streams struct {
	child   []*os.File // standard input, output, error
	input   *os.File   // parent's end, or nil; with a terminal also the only output
	outputs []output
	tty     bool
}

func openStreams(spec *agentv1.ProcessSpec, uid uint32) (*streams, error) {
	s := &streams{}
	var err error
	if spec.GetPty() != nil {
		err = s.openPty(spec.GetPty(), uid)
	} else {
		err = s.openPipes(spec.GetStdin())
	}
	if err != nil {
		s.closeChild()
		s.closeParent()
		return nil, err
	}
	return s, nil
}

func (s *streams) openPipes(stdin bool) error {
	in, err := os.Open(os.DevNull)
	if stdin && err == nil {
		in.Close()
		in, s.input, err = pipe(true)
	}
	if err != nil {
		return err
	}
	s.child = append(s.child, in)
	for _, stream := range []agentv1.Stream{agentv1.Stream_STREAM_STDOUT, agentv1.Stream_STREAM_STDERR} {
		r, w, err := pipe(false)
		if err != nil {
			return err
		}
		// Fewer turns between writer and reader. Without the right to it the pipe stays as it is.
		_, _ = unix.FcntlInt(r.Fd(), unix.F_SETPIPE_SZ, pipeBytes)
		s.child = append(s.child, w)
		s.outputs = append(s.outputs, output{r, stream})
	}
	return nil
}

// pipe makes a pipe whose parent's end alone does not block: the mode belongs to each end, and programs expect
// theirs to block.
func pipe(parentWrites bool) (r, w *os.File, err error) {
	var fds [2]int
	if err := unix.Pipe2(fds[:], unix.O_CLOEXEC); err != nil {
		return nil, nil, err
	}
	parent := fds[0]
	if parentWrites {
		parent = fds[1]
	}
	if err := unix.SetNonblock(parent, true); err != nil {
		return nil, nil, errors.Join(err, unix.Close(fds[0]), unix.Close(fds[1]))
	}
	return os.NewFile(uintptr(fds[0]), "pipe"), os.NewFile(uintptr(fds[1]), "pipe"), nil
}

func (s *streams) openPty(size *agentv1.TerminalSize, uid uint32) error {
	ptmx, tty, err := pty.Open()
	if err != nil {
		return err
	}
	defer ptmx.Close()
	s.tty, s.child = true, []*os.File{tty, tty, tty}
	// The library's file blocks; a copy that does not can be read with deadlines.
	fd, err := unix.FcntlInt(ptmx.Fd(), unix.F_DUPFD_CLOEXEC, 3)
	if err != nil {
		return err
	}
	if err := unix.SetNonblock(fd, true); err != nil {
		return errors.Join(err, unix.Close(fd))
	}
	s.input = os.NewFile(uintptr(fd), "ptmx")
	s.outputs = []output{{s.input, agentv1.Stream_STREAM_PTY}}
	if os.Geteuid() == 0 {
		if err := tty.Chown(int(uid), -1); err != nil {
			return err
		}
	}
	return setSize(s.input, size)
}

// setSize changes the size of a terminal; the kernel tells its foreground group.
func setSize(f *os.File, size *agentv1.TerminalSize) error {
	conn, err := f.SyscallConn()
	if err != nil {
		return err
	}
	ws := &unix.Winsize{Row: uint16(size.GetRows()), Col: uint16(size.GetCols())}
	ctl := conn.Control(func(fd uintptr) { err = unix.IoctlSetWinsize(int(fd), unix.TIOCSWINSZ, ws) })
	return errors.Join(ctl, err)
}

func (s *streams) childFDs() []uintptr {
	fds := make([]uintptr, len(s.child))
	for i, f := range s.child {
		fds[i] = f.Fd()
	}
	return fds
}

func (s *streams) closeChild() {
	for _, f := range s.child {
		f.Close()
	}
}

func (s *streams) closeParent() {
	if s.input != nil {
		s.input.Close()
	}
	for _, o := range s.outputs {
		o.file.Close()
	}
}
