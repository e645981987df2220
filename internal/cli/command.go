package cli

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
	"golang.org/x/term"

	"github.com/space-sandbox/space/internal/client"
	"github.com/space-sandbox/space/internal/sandbox"
)

// commandFlags are what run and exec have in common.
type commandFlags struct {
	env         []string
	user, cwd   string
	timeout     int64
	interactive bool
	tty         bool
}

// attach runs a command in a sandbox, passes its streams through and returns the exit code.
func (a *app) attach(ctx context.Context, c *client.Client, sig *signals, id string, argv []string, f commandFlags) (int, error) {
	req := client.CreateCommand{Argv: argv, User: f.user, Cwd: f.cwd, Stdin: f.interactive}
	var err error
	if req.Env, err = pairs(f.env, "--env"); err != nil {
		return exitOwn, err
	}
	if f.timeout > 0 {
		req.TimeoutS = &f.timeout
	}
	var terminal *os.File
	if f.tty {
		if terminal, err = a.terminal(); err != nil {
			return exitOwn, err
		}
		if req.Pty, err = sizeOf(terminal); err != nil {
			return exitOwn, err
		}
		if req.Env["TERM"] == "" {
			if req.Env == nil {
				req.Env = map[string]string{}
			}
			req.Env["TERM"] = termName(a.getenv("TERM"))
		}
	}
	cmd, err := c.CreateCommand(ctx, id, req)
	if err != nil {
		return exitOwn, fmt.Errorf("run the command: %w", err)
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer sig.forward(a.forwarder(ctx, c, id, cmd))()
	if terminal != nil {
		restore, err := a.takeTerminal(ctx, c, cmd.Session, terminal)
		if err != nil {
			return exitOwn, err
		}
		defer restore()
	}
	exit, err := c.Events(ctx, cmd.Session, func(ev *client.Event) error {
		if ev.Kind == client.EventStarted && f.interactive {
			// Ends with the input, or with this program: a read from a terminal cannot be called off.
			go a.pumpStdin(ctx, c, cmd.Session)
		}
		return a.show(ev)
	})
	if err != nil {
		if cause := context.Cause(ctx); errors.As(cause, new(*interrupted)) {
			return exitOwn, cause
		}
		return exitOwn, err
	}
	return a.exitCode(&exit.Exit), nil
}

func termName(name string) string {
	if name == "" {
		return "xterm"
	}
	return name
}

// show passes output on.
func (a *app) show(ev *client.Event) error {
	var err error
	switch ev.Kind {
	case client.EventStdout, client.EventPty:
		_, err = a.out.Write(ev.Data)
	case client.EventStderr:
		_, err = a.errOut.Write(ev.Data)
	case client.EventDropped:
		_, err = fmt.Fprintf(a.errOut, "space: %d bytes of %s were dropped: more than what is kept was not read\n", ev.ToOffset-ev.FromOffset, escape(ev.Stream))
	}
	return err
}

// exitCode is the exit code that stands for how the process ended.
func (a *app) exitCode(e *client.Exit) int {
	if e.TimedOut {
		_, _ = fmt.Fprintln(a.errOut, "space: the command was killed at its time limit")
	}
	if e.OOMKilled {
		victim := "the command"
		if e.Code != nil { // it ended by itself
			victim = "a process of the command"
		}
		_, _ = fmt.Fprintln(a.errOut, "space: "+victim+" was killed for want of memory; try a larger --memory-mib")
	}
	if e.Code != nil {
		return *e.Code
	}
	if e.Signal != nil {
		return 128 + signalNumber(*e.Signal)
	}
	return exitOwn
}

// signalNumber is the number of a signal by its name; 0 if there is none.
func signalNumber(name string) int {
	if n := unix.SignalNum(name); n != 0 {
		return int(n)
	}
	if rest, ok := strings.CutPrefix(name, "SIGRTMIN"); ok {
		if n, err := strconv.Atoi(strings.TrimPrefix(rest, "+")); err == nil || rest == "" {
			return 34 + n
		}
	}
	return 0
}

const stdinChunk = 64 << 10

// pumpStdin sends the input until it ends. What the process no longer takes is left.
func (a *app) pumpStdin(ctx context.Context, c *client.Client, s client.Session) {
	buf := make([]byte, stdinChunk)
	var offset int64
	for {
		n, readErr := a.in.Read(buf)
		if n > 0 || readErr != nil {
			if err := c.WriteStdin(ctx, s, offset, buf[:n], readErr != nil); err != nil {
				if code := client.CodeOf(err); ctx.Err() == nil && code != sandbox.CodeConflict && code != sandbox.CodeNotFound && code != sandbox.CodeFailedPrecondition {
					a.printError(fmt.Errorf("input: %w", err))
				}
				return
			}
			offset += int64(n)
		}
		if readErr != nil {
			return
		}
	}
}

// terminal is the terminal that standard input is.
func (a *app) terminal() (*os.File, error) {
	f, ok := a.in.(*os.File)
	if !ok || !term.IsTerminal(int(f.Fd())) {
		return nil, errors.New("-t needs a terminal, and standard input is none: leave it out")
	}
	return f, nil
}

func sizeOf(f *os.File) (*client.Terminal, error) {
	cols, rows, err := term.GetSize(int(f.Fd()))
	if err != nil {
		return nil, fmt.Errorf("size of the terminal: %w", err)
	}
	return &client.Terminal{Cols: uint32(max(1, cols)), Rows: uint32(max(1, rows))}, nil
}
