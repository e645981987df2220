// Command space-agent is PID 1 of a guest: it boots the guest from an initramfs and then serves space.agent.v1 on
// the control link. It takes no arguments and never ends while the machine runs.
package main

import (
	"errors"
	"fmt"
	"os"
	"os/signal"
	"runtime"
	"runtime/debug"
	"syscall"

	"github.com/space-sandbox/space/internal/agent"
	"github.com/space-sandbox/space/internal/agent/boot"
)

// The agent's own memory is small and most of it garbage of single calls. The limit keeps the guest's memory for the
// guest; collecting after every few megabytes would take a good part of the time that output and files need.
const (
	gcPercent   = 200
	memoryLimit = 48 << 20
)

// The main goroutine keeps the main thread, so that no other goroutine gives the main thread, which is what
// /proc/1 shows, another network namespace or foreign rights.
func init() { runtime.LockOSThread() }

func main() {
	debug.SetGCPercent(gcPercent)
	debug.SetMemoryLimit(memoryLimit)
	if os.Getpid() != 1 {
		fmt.Fprintln(os.Stderr, "space-agent: runs as PID 1 of a guest only")
		os.Exit(2)
	}
	err := run()
	fmt.Fprintf(os.Stdout, "space-agent: fatal: %v\n", err)
	boot.Fail()
}

// run returns only with an error.
func run() error {
	catchSignals()
	g, err := boot.Run(os.Stdout)
	if err != nil {
		return err
	}
	s, err := agent.New(agent.Config{Token: g.Token, Root: "/", CgroupRoot: boot.CgroupRoot, AllOrphans: true})
	if err != nil {
		return err
	}
	fmt.Fprintln(os.Stdout, "space-agent: ready")
	if err := s.Serve(g.Listener); err != nil {
		return err
	}
	return errors.New("the server ended")
}

// catchSignals keeps signals that the guest's root sends to PID 1 from ending the Go runtime, and with it the
// machine. They are caught, not ignored: children would inherit that.
func catchSignals() {
	c := make(chan os.Signal, 1)
	signal.Notify(c, syscall.SIGHUP, syscall.SIGINT, syscall.SIGQUIT, syscall.SIGTERM, syscall.SIGUSR1,
		syscall.SIGUSR2, syscall.SIGALRM, syscall.SIGPIPE, syscall.SIGPWR, syscall.SIGABRT)
}
