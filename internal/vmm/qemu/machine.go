package qemu

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/space-sandbox/space/internal/vmm"
	"github.com/space-sandbox/space/internal/vmm/confine"
	"github.com/space-sandbox/space/internal/vmm/qmp"
)

// closeTimeout is how long Close waits for the kernel to deliver the death.
const closeTimeout = 10 * time.Second

// machine implements vmm.VM.
type machine struct {
	proc              *confine.Process // nil until started
	qmp               *qmp.Client
	greeting          qmp.Greeting
	control, workload net.Conn
	consoleConn       net.Conn
	logPipe           *os.File
	console, log      *boundedLog
	release           func()

	turn      chan struct{} // holds one token; whoever has it changes the run state
	migration chan string   // how the load ended
	halted    chan struct{} // receives when the machine stopped by itself or by order

	closing atomic.Bool
	done    chan struct{} // closed when all is over; err is set before
	err     error

	mu      sync.Mutex
	timings []vmm.Timing
}

var _ vmm.VM = (*machine)(nil)

func newMachine(release func()) *machine {
	return &machine{
		release: release,
		turn:    make(chan struct{}, 1), migration: make(chan string, 1), halted: make(chan struct{}, 1),
		done: make(chan struct{}),
	}
}

// run starts the goroutines that accompany the process.
func (m *machine) run() {
	var readers sync.WaitGroup
	readers.Go(func() { _, _ = io.Copy(m.console, m.consoleConn) })
	readers.Go(func() { _, _ = io.Copy(m.log, m.logPipe) })
	go func() {
		<-m.proc.Done()
		// What the dead VMM wrote is still in the pipes; their ends follow, but not if someone else inherited them.
		limit := time.Now().Add(time.Second)
		_ = m.consoleConn.SetReadDeadline(limit)
		_ = m.logPipe.SetReadDeadline(limit)
		readers.Wait()
		if !m.closing.Load() {
			m.err = m.exitError()
		}
		m.dispose()
		close(m.done)
	}()
}

// dispose frees everything but the process.
func (m *machine) dispose() {
	if m.qmp != nil {
		_ = m.qmp.Close()
	}
	closeConns([]net.Conn{m.control, m.workload, m.consoleConn})
	if m.logPipe != nil {
		m.logPipe.Close()
	}
	for _, l := range []*boundedLog{m.console, m.log} {
		if l != nil {
			_ = l.Close()
		}
	}
	if m.release != nil {
		m.release()
	}
}

// exitError says how the process ended, with the end of both logs.
func (m *machine) exitError() error {
	text := m.log.excerpt()
	if console := m.console.excerpt(); console != "" {
		text += "; console: " + console
	}
	return fmt.Errorf("%w: %v: %s", vmm.ErrExited, m.proc.State(), text)
}

// event handles what QEMU tells; it must not block.
func (m *machine) event(e qmp.Event) {
	switch e.Name {
	case "MIGRATION":
		var d struct {
			Status string `json:"status"`
		}
		if json.Unmarshal(e.Data, &d) == nil && (d.Status == "completed" || d.Status == "failed") {
			select {
			case m.migration <- d.Status:
			default:
			}
		}
	case "STOP":
		select {
		case m.halted <- struct{}{}:
		default:
		}
	}
}

// explain replaces the error of a broken conversation by that of the VMM's death, if it is dying.
func (m *machine) explain(ctx context.Context, err error) error {
	if !errors.Is(err, qmp.ErrClosed) {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	select {
	case <-m.done:
		if m.err != nil {
			return m.err
		}
	case <-ctx.Done():
	}
	return err
}

// lap records the duration of a phase.
func (m *machine) lap(phase string, begin time.Time) {
	m.mu.Lock()
	m.timings = append(m.timings, vmm.Timing{Phase: phase, Duration: time.Since(begin)})
	m.mu.Unlock()
}

// PID implements vmm.VM.
func (m *machine) PID() int { return m.proc.PID() }

// ControlLink implements vmm.VM.
func (m *machine) ControlLink() net.Conn { return m.control }

// WorkloadLink implements vmm.VM.
func (m *machine) WorkloadLink() net.Conn { return m.workload }

// Done implements vmm.VM.
func (m *machine) Done() <-chan struct{} { return m.done }

// Err implements vmm.VM.
func (m *machine) Err() error {
	select {
	case <-m.done:
		return m.err
	default:
		return nil
	}
}

// Timings implements vmm.VM: vmm_start is the process and its confinement, memory_map QEMU's own start with the
// guest's memory, state_load the load of the device state.
func (m *machine) Timings() []vmm.Timing {
	m.mu.Lock()
	defer m.mu.Unlock()
	return append([]vmm.Timing(nil), m.timings...)
}

// Close implements vmm.VM.
func (m *machine) Close() error {
	m.closing.Store(true)
	if err := m.proc.Kill(); err != nil {
		return fmt.Errorf("kill vmm: %w", err)
	}
	timer := time.NewTimer(closeTimeout)
	defer timer.Stop()
	select {
	case <-m.done:
		return nil
	case <-timer.C:
		return fmt.Errorf("vmm %d did not die within %v", m.PID(), closeTimeout)
	}
}
