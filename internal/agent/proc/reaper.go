package proc

import (
	"errors"
	"os"
	"os/signal"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// reaper collects the exit statuses of all processes of the table, and of orphans when it works for PID 1.
type reaper struct {
	all    bool
	orphan func() // called without lock after orphans were collected

	mu      sync.Mutex // held while starting a process and while collecting
	waiting map[int]chan syscall.WaitStatus

	signals chan os.Signal
	stop    chan struct{}
	done    chan struct{}
}

func newReaper(all bool, orphan func()) *reaper {
	r := &reaper{all: all, orphan: orphan, waiting: map[int]chan syscall.WaitStatus{},
		signals: make(chan os.Signal, 1), stop: make(chan struct{}), done: make(chan struct{})}
	signal.Notify(r.signals, syscall.SIGCHLD)
	go r.loop()
	return r
}

func (r *reaper) loop() {
	defer close(r.done)
	for {
		select {
		case <-r.stop:
			return
		case <-r.signals:
		}
		if r.collect() {
			r.orphan()
		}
	}
}

// close ends the loop; statuses are not collected any more.
func (r *reaper) close() {
	signal.Stop(r.signals)
	close(r.stop)
	<-r.done
}

// start runs fork and registers the pid it returns before any status can be collected. ForkExec itself collects a
// child whose exec failed; the lock keeps the reaper from taking that.
func (r *reaper) start(fork func() (int, error)) (int, <-chan syscall.WaitStatus, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	pid, err := fork()
	if err != nil {
		return 0, nil, err
	}
	c := make(chan syscall.WaitStatus, 1)
	r.waiting[pid] = c
	return pid, c, nil
}

// signal signals a process of the table. The lock keeps its pid from being collected and reused meanwhile.
func (r *reaper) signal(pid int, sig syscall.Signal, group bool) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if _, ok := r.waiting[pid]; !ok {
		return unix.ESRCH
	}
	if group {
		pid = -pid
	}
	return syscall.Kill(pid, sig)
}

// collect takes all statuses that are there and reports whether an orphan was among them.
func (r *reaper) collect() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.all {
		return r.collectAll()
	}
	for pid := range r.waiting {
		r.take(pid)
	}
	return true
}

func (r *reaper) collectAll() bool {
	orphans := false
	for {
		pid, ok := r.take(-1)
		if pid <= 0 {
			return orphans
		}
		orphans = orphans || !ok
	}
}

// take waits for pid without blocking and reports whether it was a process of the table.
func (r *reaper) take(pid int) (int, bool) {
	var status syscall.WaitStatus
	got, err := syscall.Wait4(pid, &status, syscall.WNOHANG, nil)
	for errors.Is(err, syscall.EINTR) {
		got, err = syscall.Wait4(pid, &status, syscall.WNOHANG, nil)
	}
	if err != nil || got <= 0 {
		return 0, false
	}
	c, ok := r.waiting[got]
	if ok {
		delete(r.waiting, got)
		c <- status // buffered
	}
	return got, ok
}
