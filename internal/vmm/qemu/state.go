package qemu

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"syscall"
	"time"

	"github.com/space-sandbox/space/internal/vmm"
	"github.com/space-sandbox/space/internal/vmm/qmp"
	"golang.org/x/sys/unix"
)

const (
	maxState   = 64 << 20 // device state has a few hundred KiB
	stateMagic = "QEVM"
)

// Continue implements vmm.VM.
func (m *machine) Continue(ctx context.Context) error {
	return m.change(ctx, "continue", func(status string) error {
		if status == qmp.Running {
			return errors.New("the VM is running")
		}
		return m.qmp.Cont(ctx)
	})
}

// Stop implements vmm.VM. Stopping a stopped VM does nothing.
func (m *machine) Stop(ctx context.Context) error {
	return m.change(ctx, "stop", func(string) error { return m.qmp.Stop(ctx) })
}

// CaptureState implements vmm.VM. The file is not synced: whoever keeps it does that.
func (m *machine) CaptureState(ctx context.Context, path string) error {
	return m.change(ctx, "capture state", func(status string) error {
		if status == qmp.Running {
			return errors.New("the VM is running")
		}
		f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL|unix.O_NOFOLLOW, 0o600)
		if err != nil {
			return err
		}
		if err := errors.Join(m.qmp.SaveDeviceState(ctx, f), f.Close()); err != nil {
			return errors.Join(err, os.Remove(path))
		}
		return nil
	})
}

// change does something with the run state, alone, and tells the death of the VMM from other failures.
func (m *machine) change(ctx context.Context, verb string, do func(status string) error) error {
	select {
	case m.turn <- struct{}{}:
		defer func() { <-m.turn }()
	case <-m.done:
		return fmt.Errorf("%s: %w", verb, m.gone())
	case <-ctx.Done():
		return fmt.Errorf("%s: another change is under way: %w", verb, ctx.Err())
	}
	status, err := m.qmp.Status(ctx)
	if err == nil {
		err = do(status)
	}
	if errors.Is(err, qmp.ErrClosed) {
		err = m.explain(ctx, err)
		if !errors.Is(err, vmm.ErrExited) {
			err = m.gone()
		}
	}
	if err != nil {
		return fmt.Errorf("%s: %w", verb, err)
	}
	return nil
}

// gone is the error of calls on a VM that has ended.
func (m *machine) gone() error {
	if err := m.Err(); err != nil {
		return err
	}
	return fmt.Errorf("%w: closed", vmm.ErrExited)
}

// openState opens a device state file.
func openState(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, fmt.Errorf("device state: %w", err)
	}
	if err := checkState(f); err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// checkState refuses what is no state at all. QEMU would wait for ever for the first byte of an empty one.
func checkState(f *os.File) error {
	info, err := f.Stat()
	if err != nil {
		return fmt.Errorf("device state: %w", err)
	}
	if !info.Mode().IsRegular() || info.Size() > maxState {
		return fmt.Errorf("%w: %s is no regular file of at most %d bytes", vmm.ErrState, f.Name(), maxState)
	}
	magic := make([]byte, len(stateMagic))
	if _, err := f.ReadAt(magic, 0); err != nil && !errors.Is(err, io.EOF) {
		return fmt.Errorf("device state: %w", err)
	}
	if string(magic) != stateMagic {
		return fmt.Errorf("%w: %s does not begin like a device state", vmm.ErrState, f.Name())
	}
	return nil
}

// load feeds the device state to a machine that waits for it. QEMU reads a pipe: it wants no regular file.
func (m *machine) load(ctx context.Context, state *os.File) error {
	defer m.lap("state_load", time.Now())
	if err := m.qmp.WatchMigration(ctx); err != nil {
		return m.explain(ctx, err)
	}
	r, w, err := os.Pipe()
	if err != nil {
		return err
	}
	fed := make(chan struct{})
	go func() {
		defer close(fed)
		_, _ = io.Copy(w, state) // a state cut short does not load
		w.Close()
	}()
	defer func() {
		w.Close() // ends a feeder whose reader does not read
		<-fed
	}()
	err = m.qmp.MigrateIncoming(ctx, r)
	r.Close()
	if err != nil {
		return m.refused(ctx, err)
	}
	select {
	case status := <-m.migration:
		if status != "completed" {
			return fmt.Errorf("%w: %s", vmm.ErrState, m.log.excerpt())
		}
	case <-m.done:
		return m.refused(ctx, qmp.ErrClosed)
	case <-ctx.Done():
		return fmt.Errorf("load device state: %w", ctx.Err())
	}
	status, err := m.qmp.Status(ctx)
	if err == nil && status == qmp.InMigrate {
		err = errors.New("the machine still waits for its state")
	}
	return m.explain(ctx, err)
}

// refused classifies a failure during the load: QEMU answers a state that does not fit by an error, an exit or, on
// some builds, an abort. A SIGKILL is none of these.
func (m *machine) refused(ctx context.Context, err error) error {
	var answer *qmp.Error
	if errors.As(err, &answer) {
		return fmt.Errorf("%w: %w", vmm.ErrState, err)
	}
	err = m.explain(ctx, err)
	if !errors.Is(err, vmm.ErrExited) {
		return err
	}
	if ws, ok := m.proc.State().Sys().(syscall.WaitStatus); ok && ws.Signaled() && ws.Signal() == syscall.SIGKILL {
		return err
	}
	return fmt.Errorf("%w: %w", vmm.ErrState, err)
}
