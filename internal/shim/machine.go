package shim

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/space-sandbox/space/internal/link"
	"github.com/space-sandbox/space/internal/vmm"
)

// vmmTimeout bounds one command to the VMM.
const vmmTimeout = 5 * time.Second

// machine is a VM with its links. Its owner closes it; close may be called more than once.
type machine struct {
	vm      vmm.VM
	control *link.Control
	sink    *link.Sink
	guest   *guest
}

// newMachine takes ownership of vm, also on error.
func newMachine(vm vmm.VM, token string) (*machine, error) {
	control, err := link.NewControl(vm.ControlLink())
	if err != nil {
		return nil, errors.Join(err, vm.Close())
	}
	m := &machine{vm: vm, control: control, sink: link.Discard(vm.WorkloadLink())}
	m.guest = newGuest(control.DialContext, token)
	return m, nil
}

// close kills the VM and returns when its death was seen.
func (m *machine) close() error {
	err := m.vm.Close() // first: it must not wait for anything
	m.control.Close()
	m.sink.Close()
	m.guest.hangUp()
	return err
}

// cont and stop are the VM's verbs with a deadline.
func (m *machine) cont(ctx context.Context) error {
	return bounded(ctx, "continue", vmmTimeout, m.vm.Continue)
}

func (m *machine) stop(ctx context.Context) error {
	return bounded(ctx, "stop", vmmTimeout, m.vm.Stop)
}

func bounded(ctx context.Context, what string, d time.Duration, f func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, d)
	defer cancel()
	if err := f(ctx); err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	return nil
}

// watchVM returns a context that ends with the VM: waiting for a dead guest makes no sense.
func (m *machine) watchVM(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	stop := make(chan struct{})
	go func() {
		select {
		case <-m.vm.Done():
			cancel(fmt.Errorf("the VM ended: %w", m.deathError()))
		case <-stop:
		}
	}()
	return ctx, func() {
		close(stop)
		cancel(nil)
	}
}

func (m *machine) deathError() error {
	if err := m.vm.Err(); err != nil {
		return err
	}
	return vmm.ErrExited
}
