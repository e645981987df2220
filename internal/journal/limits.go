package journal

import (
	"errors"
	"os"
	"time"
)

// scheduleSync makes sure that p is fsynced within opts.SyncEvery.
func (j *Journal) scheduleSync(p *Process) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.markDirtyLocked(p)
}

func (j *Journal) markDirtyLocked(p *Process) {
	if j.closed {
		return // Close syncs every process
	}
	j.dirty[p] = struct{}{}
	if j.timer == nil {
		j.syncing.Add(1)
		j.timer = time.AfterFunc(j.opts.SyncEvery, j.syncDirty)
	}
}

// syncDirty runs on the timer. It fsyncs with no lock of the journal held.
func (j *Journal) syncDirty() {
	defer j.syncing.Done()
	j.mu.Lock()
	todo := j.dirty
	j.dirty = make(map[*Process]struct{})
	j.timer = nil
	j.mu.Unlock()
	errs := []error{syncPath(j.dir)}
	for p := range todo {
		if err := p.sync(); err != nil && !errors.Is(err, os.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	if err := errors.Join(errs...); err != nil {
		j.mu.Lock()
		j.syncErr = err
		j.mu.Unlock()
	}
}

// SyncErr is the last failure to make events durable, nil if there was none.
func (j *Journal) SyncErr() error {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.syncErr
}

// Bytes is what the journal takes on disk.
func (j *Journal) Bytes() int64 { return j.total.Load() }

// grew accounts for n bytes and enforces the sandbox's cap: exited processes lose their oldest segments first, in
// order of creation, then the living ones.
func (j *Journal) grew(n int64) {
	if j.total.Add(n) <= j.opts.SandboxCap || n <= 0 || !j.capMu.TryLock() {
		return // under the cap, or another goroutine is at it
	}
	defer j.capMu.Unlock()
	for _, exited := range []bool{true, false} {
		for _, p := range j.snapshot() {
			for j.total.Load() > j.opts.SandboxCap && p.Exited() == exited && p.shed() {
				continue
			}
		}
	}
}

func (j *Journal) snapshot() []*Process {
	j.mu.Lock()
	defer j.mu.Unlock()
	return append([]*Process(nil), j.order...)
}

// exited removes the oldest exited processes beyond opts.ExitedKept. The newest is never its own victim.
func (j *Journal) exited(newest *Process) {
	all := j.snapshot()
	var done []*Process
	for _, p := range all {
		if p != newest && p.Exited() {
			done = append(done, p)
		}
	}
	for i := 0; i <= len(done)-j.opts.ExitedKept; i++ {
		_ = j.Remove(done[i].id) // already gone is fine
	}
}
