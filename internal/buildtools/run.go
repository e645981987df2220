package buildtools

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"time"
)

// ErrMissing means that a program that is needed is not installed.
var ErrMissing = errors.New("program is not installed")

// stderrKept is how much of the end of a program's messages an error shows.
const stderrKept = 4 << 10

// defaultGrace is the time between SIGTERM and SIGKILL.
const defaultGrace = 10 * time.Second

// Command is one program to run.
type Command struct {
	Name string
	Args []string
	Env  []string // KEY=VALUE, over the caller's environment
	Dir  string
	// Stdout receives what the program writes; nil discards it.
	Stdout io.Writer
	// Line is called for each line of standard error, from one goroutine; may be nil.
	Line func(string)
	// Isolate gives the command PID and mount namespaces of its own when the caller is root and may do that.
	Isolate bool
	// Grace is the time between SIGTERM and SIGKILL when the context ends; 0 means 10 s.
	Grace time.Duration
}

// Run runs the command to its end.
func (c Command) Run(ctx context.Context) error {
	name, err := Look(c.Name)
	if err != nil {
		return err
	}
	args := c.Args
	if c.Isolate && canIsolate(ctx) {
		args = append([]string{"--mount", "--pid", "--fork", "--kill-child=SIGKILL", "--mount-proc", "--", name}, args...)
		name = "unshare"
	}
	messages := &lineWriter{line: c.Line}
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Env = append(append(os.Environ(), "LC_ALL=C.UTF-8"), c.Env...)
	cmd.Dir, cmd.Stdout, cmd.Stderr = c.Dir, c.Stdout, messages
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	grace := c.Grace
	if grace == 0 {
		grace = defaultGrace
	}
	err = runGroup(ctx, cmd, grace)
	messages.flush()
	if cause := context.Cause(ctx); cause != nil {
		return fmt.Errorf("%s: %w", c.Name, cause)
	}
	if err != nil {
		return fmt.Errorf("%s: %w: %s", c.Name, err, messages.tail())
	}
	return nil
}

// runGroup owns the process from its start to the moment its whole group is gone. It stays on one thread because
// the kernel ties Pdeathsig to the thread that started the child.
func runGroup(ctx context.Context, cmd *exec.Cmd, grace time.Duration) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGTERM) }
	cmd.WaitDelay = grace // then os/exec kills the leader and closes the pipes
	if err := cmd.Start(); err != nil {
		return err
	}
	err := cmd.Wait()
	if err != nil || ctx.Err() != nil {
		// The leader is dead; whatever is left of its group has no owner any more. ESRCH says that nothing is.
		_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
	}
	return err
}

// Look finds a program, also where ordinary users' PATH does not look.
func Look(name string) (string, error) {
	if path, err := exec.LookPath(name); err == nil {
		return path, nil
	}
	for _, dir := range []string{"/usr/sbin/", "/sbin/", "/usr/local/sbin/"} {
		if path, err := exec.LookPath(dir + name); err == nil {
			return path, nil
		}
	}
	return "", fmt.Errorf("%s: %w", name, ErrMissing)
}

// canIsolate says whether namespaces may be made here; containers often refuse it even to root.
func canIsolate(ctx context.Context) bool {
	if os.Geteuid() != 0 {
		return false
	}
	args := []string{"--mount", "--pid", "--fork", "--kill-child=SIGKILL", "--mount-proc", "--", "true"}
	return exec.CommandContext(ctx, "unshare", args...).Run() == nil
}

// lineWriter splits what a program says into lines and keeps the end of it.
type lineWriter struct {
	mu      sync.Mutex
	line    func(string)
	partial bytes.Buffer
	kept    []byte
}

// Write implements io.Writer.
func (w *lineWriter) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.kept = append(w.kept, p...)
	if over := len(w.kept) - stderrKept; over > 0 {
		w.kept = append(w.kept[:0], w.kept[over:]...)
	}
	if w.line == nil {
		return len(p), nil
	}
	w.partial.Write(p)
	for {
		i := bytes.IndexByte(w.partial.Bytes(), '\n')
		if i < 0 {
			break
		}
		w.line(strings.TrimRight(string(w.partial.Next(i+1)), "\r\n"))
	}
	if w.partial.Len() > stderrKept {
		w.partial.Reset() // no line worth showing
	}
	return len(p), nil
}

func (w *lineWriter) flush() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.line != nil && w.partial.Len() > 0 {
		w.line(w.partial.String())
		w.partial.Reset()
	}
}

func (w *lineWriter) tail() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return strings.TrimSpace(string(w.kept))
}
