package journal

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	nodev1 "github.com/space-sandbox/space/internal/gen/space/node/v1"
	"github.com/space-sandbox/space/internal/sandbox"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"
)

// Errors of this package, wrapped with the particulars.
var (
	// ErrCorrupt: a file does not hold what was written to it.
	ErrCorrupt = errors.New("journal is damaged")
	// ErrNotFound: no such process, or its journal was removed.
	ErrNotFound = errors.New("no such process")
	// ErrExists: a process of this ID is recorded already.
	ErrExists = errors.New("process exists")
	// ErrOrder: the event cannot come now.
	ErrOrder = errors.New("event out of order")
	// ErrTooLarge: a record or chunk is out of bounds.
	ErrTooLarge = errors.New("out of bounds")
	// ErrSealed: the journal takes no more events.
	ErrSealed = errors.New("journal is sealed")
	// ErrReadOnly: the journal was opened for reading.
	ErrReadOnly = errors.New("journal is read-only")
	// ErrLocked: another process writes this journal.
	ErrLocked = errors.New("journal is in use")
)

// Options are the limits of a sandbox's journal. Zero values mean the defaults.
type Options struct {
	SandboxCap int64         // bytes on disk in all; 1 GiB
	ExitedKept int           // exited processes whose record is kept; 1,000
	SyncEvery  time.Duration // how long an event may wait for its fsync; 1 s
}

func (o Options) withDefaults() Options {
	if o.SandboxCap == 0 {
		o.SandboxCap = 1 << 30
	}
	if o.ExitedKept == 0 {
		o.ExitedKept = 1000
	}
	if o.SyncEvery == 0 {
		o.SyncEvery = time.Second
	}
	return o
}

// Journal is the event store of one sandbox. Its owner closes it.
type Journal struct {
	dir      string
	opts     Options
	readOnly bool
	lock     *os.File // nil when read-only

	total atomic.Int64 // bytes on disk
	capMu sync.Mutex   // one goroutine enforces the sandbox's cap

	mu      sync.Mutex
	procs   map[sandbox.ProcessID]*Process
	order   []*Process // by creation
	next    uint64     // order of the next process
	dirty   map[*Process]struct{}
	timer   *time.Timer // runs while dirty is not empty
	syncing sync.WaitGroup
	syncErr error
	closed  bool
	damaged []error
}

// Open opens the journal in an existing folder for writing and cuts torn tails.
func Open(dir string, opts Options) (*Journal, error) {
	lock, err := os.OpenFile(filepath.Join(dir, ".lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open journal: %w", err)
	}
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		lock.Close()
		return nil, fmt.Errorf("%s: %w", dir, ErrLocked)
	}
	j, err := open(dir, opts, false)
	if err != nil {
		lock.Close()
		return nil, err
	}
	j.lock = lock
	return j, nil
}

// OpenReadOnly opens the journal of a dead shim. Nothing is changed on disk; it is sealed from the start.
func OpenReadOnly(dir string) (*Journal, error) { return open(dir, Options{}, true) }

func open(dir string, opts Options, readOnly bool) (*Journal, error) {
	j := &Journal{
		dir: dir, opts: opts.withDefaults(), readOnly: readOnly,
		procs: make(map[sandbox.ProcessID]*Process), dirty: make(map[*Process]struct{}),
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, fmt.Errorf("open journal: %w", err)
	}
	for _, e := range entries {
		id, err := sandbox.ParseProcessID(e.Name())
		if err != nil || !e.IsDir() {
			continue
		}
		p, err := j.load(id)
		if err != nil {
			j.damaged = append(j.damaged, fmt.Errorf("process %s: %w", id, err))
			continue
		}
		j.procs[id] = p
		j.order = append(j.order, p)
		j.total.Add(p.kept)
		j.next = max(j.next, p.meta.order+1)
	}
	slices.SortFunc(j.order, func(a, b *Process) int {
		if a.meta.order < b.meta.order {
			return -1
		}
		return 1
	})
	return j, nil
}

// Damaged lists the processes whose records could not be read at all.
func (j *Journal) Damaged() []error { return j.damaged }

// load reads one process from disk.
func (j *Journal) load(id sandbox.ProcessID) (*Process, error) {
	p := &Process{j: j, id: id, dir: filepath.Join(j.dir, string(id)), changed: make(chan struct{}), sealed: j.readOnly}
	var err error
	if p.meta, err = readMeta(p.dir); err != nil {
		return nil, err
	}
	firsts, err := listSegments(p.dir)
	if err != nil {
		return nil, err
	}
	p.restore()
	for n := len(firsts); n > 0 && len(p.segs) == 0 && p.damaged == nil; n = len(firsts) {
		last := firsts[n-1]
		firsts = firsts[:n-1]
		if err := p.loadLast(last); err != nil {
			return nil, err
		}
	}
	p.loadRest(firsts)
	return p, nil
}

// restore sets the position from the record alone; the last segment, if there is one, knows better.
func (p *Process) restore() {
	m := p.meta.proc
	p.pos = position{next: p.meta.lastID + 1}
	if m.GetState() == nodev1.ProcessState_PROCESS_STATE_EXITED {
		out := 1
		if m.GetSpec().GetPty() != nil {
			out = streams
		}
		p.pos.off[out], p.pos.off[2] = m.GetStdoutBytes(), m.GetStderrBytes()
		p.exit = &nodev1.ProcessExited{
			Exit: m.GetExit(), StdoutBytes: m.GetStdoutBytes(), StderrBytes: m.GetStderrBytes(), DroppedBytes: m.GetDroppedBytes(),
		}
	} else if m.GetStartedAt() != nil {
		p.pos.next = 2
	}
}

// loadRest lists the segments before the last one. One that cannot be read leaves a gap: readers are told when they
// come to it.
func (p *Process) loadRest(firsts []uint64) {
	var segs []*segment
	for _, first := range firsts {
		s, err := loadSegment(p.dir, first)
		if err != nil {
			continue
		}
		segs = append(segs, s)
		p.kept += s.size
	}
	p.segs = append(segs, p.segs...)
}

// loadLast scans the last segment, cuts its torn tail and takes over what its events say.
func (p *Process) loadLast(first uint64) error {
	s, err := scanSegment(p.dir, first, func(rec record) error {
		if rec.kind == kindOutput {
			return nil
		}
		ev, err := rec.event()
		if err == nil {
			p.pos.next = rec.id + 1
			p.apply(ev)
		}
		return err
	})
	if err != nil && !errors.Is(err, ErrCorrupt) {
		return err
	}
	p.damaged = err
	if s.seg == nil {
		if s.torn && !p.j.readOnly {
			return dropSegment(p.dir, first)
		}
		if err != nil {
			p.pos.next = max(p.pos.next, first)
		}
		return nil
	}
	p.segs = append(p.segs, s.seg)
	p.kept += s.seg.size
	p.pos = s.end
	if !p.j.readOnly && p.damaged == nil {
		return p.reopen(s)
	}
	return nil
}

func (p *Process) apply(ev *nodev1.Event) {
	switch k := ev.GetKind().(type) {
	case *nodev1.Event_Started:
		p.meta.proc.StartedAt, p.meta.proc.OsPid = k.Started.GetAt(), k.Started.GetOsPid()
		p.meta.proc.State = nodev1.ProcessState_PROCESS_STATE_RUNNING
	case *nodev1.Event_Exited:
		p.applyExitLocked(k.Exited)
	}
}

// reopen prepares the last segment for further appends.
func (p *Process) reopen(s scanned) error {
	f, err := os.OpenFile(segmentPath(p.dir, s.seg.base.next), os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	if s.torn {
		if err := errors.Join(f.Truncate(s.seg.size), f.Sync()); err != nil {
			f.Close()
			return err
		}
	}
	if p.exit != nil {
		return f.Close()
	}
	p.f = f
	return nil
}

// Create records a process that has not started. The record needs a valid, new process_id.
func (j *Journal) Create(rec *nodev1.Process) (*Process, error) {
	id, err := sandbox.ParseProcessID(rec.GetProcessId())
	if err != nil {
		return nil, err
	}
	m := proto.CloneOf(rec)
	m.State = nodev1.ProcessState_PROCESS_STATE_CREATED
	if m.GetOutputCapBytes() == 0 {
		m.OutputCapBytes = sandbox.DefaultOutputCap
	}
	m.OutputCapBytes = min(m.GetOutputCapBytes(), uint64(j.opts.SandboxCap))
	p := &Process{j: j, id: id, dir: filepath.Join(j.dir, string(id)), changed: make(chan struct{})}
	p.pos.next = 1
	j.mu.Lock()
	defer j.mu.Unlock()
	switch {
	case j.readOnly:
		return nil, ErrReadOnly
	case j.closed:
		return nil, ErrSealed
	case j.procs[id] != nil:
		return nil, fmt.Errorf("%s: %w", id, ErrExists)
	}
	p.meta = meta{order: j.next, proc: m}
	if err := os.Mkdir(p.dir, 0o700); err != nil {
		return nil, fmt.Errorf("create process: %w", err)
	}
	if err := p.meta.write(p.dir); err != nil {
		return nil, errors.Join(err, os.RemoveAll(p.dir))
	}
	j.next++
	j.procs[id] = p
	j.order = append(j.order, p)
	j.markDirtyLocked(p)
	return p, nil
}

// Process returns a process, or ErrNotFound.
func (j *Journal) Process(id sandbox.ProcessID) (*Process, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	p := j.procs[id]
	if p == nil {
		return nil, fmt.Errorf("%s: %w", id, ErrNotFound)
	}
	return p, nil
}

// List returns at most limit processes in order of creation, after the given one (from the first if it is empty or
// unknown), and whether there are more.
func (j *Journal) List(after sandbox.ProcessID, limit int) ([]*Process, bool) {
	j.mu.Lock()
	defer j.mu.Unlock()
	rest := j.order
	if p := j.procs[after]; p != nil {
		rest = rest[slices.Index(rest, p)+1:]
	}
	n := min(limit, len(rest))
	return slices.Clone(rest[:n]), n < len(rest)
}

// Remove forgets a process and deletes its folder. Its readers end with ErrNotFound.
func (j *Journal) Remove(id sandbox.ProcessID) error {
	if j.readOnly {
		return ErrReadOnly
	}
	j.mu.Lock()
	p := j.procs[id]
	j.forgetLocked(p)
	j.mu.Unlock()
	if p == nil {
		return fmt.Errorf("%s: %w", id, ErrNotFound)
	}
	return p.remove()
}

func (j *Journal) forgetLocked(p *Process) {
	if p == nil {
		return
	}
	delete(j.procs, p.id)
	delete(j.dirty, p)
	if i := slices.Index(j.order, p); i >= 0 {
		j.order = slices.Delete(j.order, i, i+1)
	}
}

// Seal ends the journal as it is: appends fail, and readers end once they have read what is there.
func (j *Journal) Seal() {
	procs, _ := j.List("", int(^uint(0)>>1))
	for _, p := range procs {
		p.seal()
	}
}

// Close seals and syncs the journal and releases its files. Readers may go on to its end.
func (j *Journal) Close() error {
	j.mu.Lock()
	if j.closed {
		j.mu.Unlock()
		return nil
	}
	j.closed = true
	if j.timer != nil && j.timer.Stop() {
		j.syncing.Done()
	}
	procs := slices.Clone(j.order)
	j.mu.Unlock()
	j.syncing.Wait()
	if j.readOnly {
		return nil
	}
	errs := []error{j.syncErr}
	for _, p := range procs {
		errs = append(errs, p.close())
	}
	return errors.Join(append(errs, syncPath(j.dir), j.lock.Close())...)
}
