package proc

import (
	"os"
	"sync/atomic"
	"syscall"
	"time"

	agentv1 "github.com/space-sandbox/space/internal/gen/space/agent/v1"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// process is one entry of the table.
type process struct {
	id    string
	ready bool // guarded by Table.mu: started, and visible to others
	pid   int  // 0 when exec failed
	ring  *ring
	stdin *stdin   // nil without input
	tty   *os.File // nil without a terminal; owned by its source

	timedOut atomic.Bool
	timer    *time.Timer
}

// supervise waits for the exit and appends the last frame.
func (t *Table) supervise(p *process, status <-chan syscall.WaitStatus, sources []*source) {
	defer t.work.Done()
	ws := <-status
	at := time.Now()
	if p.timer != nil {
		p.timer.Stop()
	}
	for _, s := range sources {
		s.exited()
	}
	for _, s := range sources {
		<-s.drained
	}
	if p.stdin != nil {
		p.stdin.shut()
	}
	e := exitOf(ws)
	e.At = timestamppb.New(at)
	e.TimedOut = p.timedOut.Load()
	e.OomKilled = t.cgroups.oomKilled(p.id)
	// Before the frame: whoever sees the exit may reuse the ID after acknowledging it.
	t.cgroups.remove(p.id)
	p.ring.exit(e)
}

func exitOf(ws syscall.WaitStatus) *agentv1.Exited {
	e := &agentv1.Exited{}
	if ws.Signaled() {
		e.Signal = signalName(ws.Signal())
		e.CoreDumped = ws.CoreDump()
		return e
	}
	code := int32(ws.ExitStatus())
	e.Code = &code
	return e
}

// signalName names a signal; the kernel's list has none for the real-time ones.
func signalName(s syscall.Signal) string {
	if name := unix.SignalName(s); name != "" {
		return name
	}
	const first = 34 // SIGRTMIN of the C library
	if s >= first {
		return "SIGRTMIN+" + itoa(int(s)-first)
	}
	return "SIG" + itoa(int(s))
}

// startTimer arms the time limit. The whole tree is killed; only the main process's exit is waited for.
func (t *Table) startTimer(p *process, limit time.Duration) {
	if limit <= 0 {
		return
	}
	p.timer = time.AfterFunc(limit, func() {
		p.timedOut.Store(true)
		// It fails only if the cgroup is gone, and then so is the process.
		_ = t.cgroups.kill(p.id)
	})
}
