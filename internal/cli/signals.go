package cli

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
	"golang.org/x/term"

	"github.com/space-sandbox/space/internal/client"
)

// interrupted is why a context ended.
type interrupted struct{ sig syscall.Signal }

// Error implements error.
func (e *interrupted) Error() string { return "interrupted by " + unix.SignalName(e.sig) }

// signals decides what a signal to us means: it ends the context, unless a command runs that it can be passed on to.
type signals struct {
	mu      sync.Mutex
	handler func(syscall.Signal) bool
	ch      chan os.Signal
	done    chan struct{}
}

// watchSignals returns a context that a signal ends, and what decides. stop must be called.
func watchSignals(parent context.Context) (context.Context, *signals, func()) {
	ctx, cancel := context.WithCancelCause(parent)
	s := &signals{ch: make(chan os.Signal, 4), done: make(chan struct{})}
	signal.Notify(s.ch, syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	go func() {
		defer close(s.done)
		for raw := range s.ch {
			sig, _ := raw.(syscall.Signal)
			if !s.handled(sig) {
				cancel(&interrupted{sig})
			}
		}
	}()
	return ctx, s, func() {
		signal.Stop(s.ch)
		close(s.ch)
		<-s.done
		cancel(nil)
	}
}

func (s *signals) handled(sig syscall.Signal) bool {
	s.mu.Lock()
	h := s.handler
	s.mu.Unlock()
	return h != nil && h(sig)
}

// forward sets what signals are given to until the function that it returns is called.
func (s *signals) forward(h func(syscall.Signal) bool) (stop func()) {
	set := func(h func(syscall.Signal) bool) {
		s.mu.Lock()
		s.handler = h
		s.mu.Unlock()
	}
	set(h)
	return func() { set(nil) }
}

// forwarder passes the first signal on, kills the command at the second and gives up at the third.
func (a *app) forwarder(ctx context.Context, c *client.Client, id string, cmd *client.Command) func(syscall.Signal) bool {
	count := 0
	return func(sig syscall.Signal) bool {
		count++
		switch count {
		case 1:
			go func() { // ends with the call, which ends with ctx
				if err := c.Signal(ctx, cmd.Session, unix.SignalName(sig)); err != nil && ctx.Err() == nil {
					a.printError(fmt.Errorf("pass on %s: %w", unix.SignalName(sig), err))
				}
			}()
		case 2:
			go func() {
				if _, err := c.KillProcess(ctx, id, cmd.Process.ID); err != nil && ctx.Err() == nil {
					a.printError(fmt.Errorf("kill the command: %w", err))
				}
			}()
		default:
			return false
		}
		return true
	}
}

// takeTerminal makes the terminal raw and passes changes of its size on until the function that it returns is called.
func (a *app) takeTerminal(ctx context.Context, c *client.Client, s client.Session, f *os.File) (func(), error) {
	old, err := term.MakeRaw(int(f.Fd()))
	if err != nil {
		return nil, fmt.Errorf("terminal: %w", err)
	}
	ch := make(chan os.Signal, 1)
	signal.Notify(ch, syscall.SIGWINCH)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for range ch {
			if size, err := sizeOf(f); err == nil {
				_ = c.Resize(ctx, s, *size) // the next change tries again
			}
		}
	}()
	return func() {
		signal.Stop(ch)
		close(ch)
		<-done
		_ = term.Restore(int(f.Fd()), old)
	}, nil
}

// signalled is the exit code when a signal ended our work; ok tells whether one did.
func signalled(ctx context.Context) (code int, ok bool) {
	var e *interrupted
	if !errors.As(context.Cause(ctx), &e) {
		return 0, false
	}
	return 128 + int(e.sig), true
}
