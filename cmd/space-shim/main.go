// Command space-shim owns one sandbox. Its only argument is its folder, which holds spec.json; to restore a
// snapshot it gets the snapshot's memory as descriptor 3. A node starts it; people do not.
package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"runtime/debug"
	"syscall"

	"github.com/space-sandbox/space/internal/shim"
	"github.com/space-sandbox/space/internal/vmm/confine"
	"github.com/space-sandbox/space/internal/vmm/qemu"
	"golang.org/x/sys/unix"
)

// There is one shim per sandbox, so its memory counts; collecting more often than this takes a third of the time that
// output needs.
const (
	gcPercent   = 100
	memoryLimit = 96 << 20
	memoryFD    = 3
)

func main() {
	confine.Main() // never returns in the process that becomes the VMM
	debug.SetGCPercent(gcPercent)
	debug.SetMemoryLimit(memoryLimit)
	if len(os.Args) != 2 || !filepath.IsAbs(os.Args[1]) {
		fmt.Fprintln(os.Stderr, "space-shim: needs its folder, by absolute path, as the only argument")
		os.Exit(2)
	}
	if err := run(os.Args[1]); err != nil {
		fmt.Fprintf(os.Stderr, "space-shim: %v\n", err)
		os.Exit(1)
	}
}

func run(dir string) error {
	// A session of its own: what ends the node or its terminal must not end the sandbox.
	if _, err := unix.Setsid(); err != nil && !errors.Is(err, unix.EPERM) { // EPERM: it leads one already
		return fmt.Errorf("setsid: %w", err)
	}
	signal.Ignore(syscall.SIGHUP, syscall.SIGINT, syscall.SIGPIPE)
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	return shim.Run(ctx, shim.Config{
		Dir: dir, Driver: qemu.New(), OpenMemory: openMemory,
		Log: slog.New(slog.NewTextHandler(os.Stderr, nil)),
	})
}

// openMemory takes over the descriptor that the node has passed, and keeps it from every other child.
func openMemory() (*os.File, error) {
	var st unix.Stat_t
	if err := unix.Fstat(memoryFD, &st); err != nil || st.Mode&unix.S_IFMT != unix.S_IFREG {
		return nil, fmt.Errorf("descriptor %d is not the snapshot's memory: %w", memoryFD, err)
	}
	unix.CloseOnExec(memoryFD)
	return os.NewFile(memoryFD, "memory"), nil
}
