package shim

import (
	"context"
	"errors"
	"net"
	"net/http"
	"os"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/space-sandbox/space/internal/gen/space/agent/v1/agentv1connect"
	"github.com/space-sandbox/space/internal/link/linktest"
	"github.com/space-sandbox/space/internal/vmm"
)

// fakeDriver makes VMs whose guest is a second network stack and a fake agent in this process: everything of the
// shim runs, only the VMM does not.
type fakeDriver struct {
	t     testing.TB
	token string
	agent *fakeAgent
	fail  error // of Restore and Boot
	conts []error

	mu sync.Mutex
	vm *fakeVM
}

func (d *fakeDriver) Name() string { return "fake" }

func (d *fakeDriver) Probe(context.Context, string, string) (vmm.Capabilities, error) {
	return vmm.Capabilities{}, vmm.ErrUnsupported
}

func (d *fakeDriver) OpenMemory(context.Context, vmm.Capabilities, string) (*os.File, error) {
	return nil, vmm.ErrUnsupported
}

func (d *fakeDriver) Boot(_ context.Context, _ vmm.Config, src vmm.BootSource) (vmm.VM, error) {
	if _, err := src.MemoryFile.WriteString("ram"); err != nil {
		return nil, err
	}
	vm, err := d.start() //nolint:contextcheck // the VM outlives the call
	if err != nil {
		return nil, err
	}
	vm.running.Store(true)
	return vm, nil
}

func (d *fakeDriver) Restore(context.Context, vmm.Config, vmm.Snapshot) (vmm.VM, error) {
	vm, err := d.start() //nolint:contextcheck // the VM outlives the call
	return vm, err
}

func (d *fakeDriver) start() (*fakeVM, error) {
	if d.fail != nil {
		return nil, d.fail
	}
	host, far := net.Pipe()
	work, workFar := net.Pipe()
	vm := &fakeVM{control: host, workload: work, done: make(chan struct{}), conts: d.conts}
	gate := &gatedConn{Conn: far, vm: vm}
	guest, err := linktest.New(gate)
	if err != nil {
		return nil, err
	}
	vm.listener = &trackingListener{Listener: guest.Listener}
	mux := http.NewServeMux()
	mux.Handle(agentv1connect.NewAgentServiceHandler(d.agent))
	mux.Handle(agentv1connect.NewProcessServiceHandler(d.agent))
	mux.Handle(agentv1connect.NewFileServiceHandler(d.agent))
	d.agent.setToken(d.token)
	srv := &http.Server{Handler: d.agent.authenticate(mux)}
	served := make(chan struct{})
	go func() {
		defer close(served)
		_ = srv.Serve(vm.listener)
	}()
	vm.end = func() {
		work.Close()
		workFar.Close()
		_ = srv.Close()
		<-served
		guest.Close()
		host.Close()
	}
	d.mu.Lock()
	d.vm = vm
	d.mu.Unlock()
	return vm, nil
}

func (d *fakeDriver) current() *fakeVM {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.vm
}

// fakeVM is one such VM.
type fakeVM struct {
	control, workload net.Conn
	listener          *trackingListener
	running           atomic.Bool
	end               func()
	once              sync.Once
	done              chan struct{}
	err               error
	conts             []error // what Continue answers, one after the other

	mu     sync.Mutex
	nconts int
}

func (v *fakeVM) PID() int { return os.Getpid() }

func (v *fakeVM) Continue(context.Context) error {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.nconts < len(v.conts) && v.conts[v.nconts] != nil {
		return v.conts[v.nconts]
	}
	v.nconts++
	if v.running.Swap(true) {
		return errors.New("already running")
	}
	return nil
}

func (v *fakeVM) Stop(context.Context) error {
	v.running.Store(false)
	return nil
}

func (v *fakeVM) CaptureState(_ context.Context, path string) error {
	if v.running.Load() {
		return errors.New("the VM runs")
	}
	return os.WriteFile(path, []byte("state"), 0o600)
}

func (v *fakeVM) ControlLink() net.Conn  { return v.control }
func (v *fakeVM) WorkloadLink() net.Conn { return v.workload }
func (v *fakeVM) Done() <-chan struct{}  { return v.done }
func (v *fakeVM) Err() error {
	select {
	case <-v.done:
		return v.err
	default:
		return nil
	}
}

func (v *fakeVM) Close() error { return v.die(nil) }

// die ends the VM for a reason of its own.
func (v *fakeVM) die(err error) error {
	v.once.Do(func() {
		v.err = err
		v.end()
		close(v.done)
	})
	return nil
}

func (v *fakeVM) Timings() []vmm.Timing { return []vmm.Timing{{Phase: "vmm_load", Duration: 1000}} }

// gatedConn loses what the host sends while the VM is stopped, as nothing else does it in a VM: here it only has to
// look dead.
type gatedConn struct {
	net.Conn
	vm *fakeVM
}

func (c *gatedConn) Write(b []byte) (int, error) {
	if !c.vm.running.Load() {
		return len(b), nil
	}
	return c.Conn.Write(b)
}

// trackingListener can cut all connections at once.
type trackingListener struct {
	net.Listener
	mu    sync.Mutex
	conns []net.Conn
}

func (l *trackingListener) Accept() (net.Conn, error) {
	conn, err := l.Listener.Accept()
	if err == nil {
		l.mu.Lock()
		l.conns = append(l.conns, conn)
		l.mu.Unlock()
	}
	return conn, err
}

func (l *trackingListener) cut() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, c := range l.conns {
		c.Close()
	}
	l.conns = nil
}
