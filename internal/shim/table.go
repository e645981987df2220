package shim

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/space-sandbox/space/internal/gen/space/node/v1"
	"github.com/space-sandbox/space/internal/journal"
	"github.com/space-sandbox/space/internal/sandbox"
	"google.golang.org/protobuf/types/known/timestamppb"
)

const maxProcesses = 1024 // created or running at once

// errNotRunning is the answer of what needs a running VM.
var errNotRunning = errors.New("the sandbox does not run")

// table holds the processes that have not exited, and the goroutines that carry their output to the journal.
type table struct {
	journal *journal.Journal
	guest   *guest
	log     *slog.Logger
	touch   func()
	lost    func(error) // the agent has lost a process: the VM cannot be served any longer
	expiry  time.Duration
	acks    *acker

	ctx    context.Context // of the pumps
	cancel context.CancelFunc
	pumps  sync.WaitGroup

	mu      sync.Mutex
	procs   map[sandbox.ProcessID]*process
	stopped bool
}

// process is one that has not exited.
type process struct {
	rec   *journal.Process
	stdin chan struct{} // one slot: whose turn it is to write without an offset

	mu      sync.Mutex
	attempt *attempt    // the start that was asked for
	expire  *time.Timer // until then
	written uint64      // stdin bytes that the agent has taken
}

// attempt is one start; err is set before done is closed.
type attempt struct {
	done chan struct{}
	once sync.Once
	err  error
}

func (a *attempt) report(err error) {
	a.once.Do(func() {
		a.err = err
		close(a.done)
	})
}

func newTable(j *journal.Journal, g *guest, log *slog.Logger, touch func(), lost func(error)) *table {
	ctx, cancel := context.WithCancel(context.Background())
	t := &table{
		journal: j, guest: g, log: log, touch: touch, lost: lost, expiry: sandbox.UnattachedCommandS * time.Second,
		ctx: ctx, cancel: cancel, procs: make(map[sandbox.ProcessID]*process),
	}
	t.acks = newAcker(ctx, g)
	t.pumps.Go(t.acks.run)
	return t
}

// stop ends all pumps and returns when the journal will get no more events of them.
func (t *table) stop() {
	t.mu.Lock()
	t.stopped = true
	for _, p := range t.procs {
		p.stopExpiry()
	}
	t.mu.Unlock()
	t.cancel()
	t.pumps.Wait()
}

// create records a process, or returns the one of that ID; fresh tells which.
func (t *table) create(rec *nodev1.Process) (p *process, fresh bool, err error) {
	id := sandbox.ProcessID(rec.GetProcessId())
	rec.CreatedAt = timestamppb.Now()
	t.mu.Lock()
	defer t.mu.Unlock()
	if p := t.procs[id]; p != nil {
		return p, false, nil
	}
	if t.stopped {
		return nil, false, errNotRunning
	}
	if len(t.procs) >= maxProcesses {
		return nil, false, fmt.Errorf("%d processes: %w", len(t.procs), errTooMany)
	}
	jp, err := t.journal.Create(rec)
	if err != nil {
		return nil, false, err
	}
	p = &process{rec: jp, stdin: make(chan struct{}, 1)}
	p.mu.Lock()
	p.expire = time.AfterFunc(t.expiry, func() { t.expired(p) })
	p.mu.Unlock()
	t.procs[id] = p
	return p, true, nil
}

var errTooMany = errors.New("too many processes")

// find returns a process that has not exited, nil if there is none of that ID.
func (t *table) find(id sandbox.ProcessID) *process {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.procs[id]
}

func (t *table) forget(p *process) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.procs, p.rec.ID())
}

// expired removes a process that nobody attached to.
func (t *table) expired(p *process) {
	p.mu.Lock()
	started := p.attempt != nil
	if !started {
		p.attempt = &attempt{done: make(chan struct{})}
		p.attempt.report(journal.ErrNotFound)
	}
	p.mu.Unlock()
	if !started {
		t.discard(p)
	}
}

// discard removes a process that never started, with its record.
func (t *table) discard(p *process) {
	p.stopExpiry()
	t.forget(p)
	if err := t.journal.Remove(p.rec.ID()); err != nil && !errors.Is(err, journal.ErrNotFound) {
		t.log.Warn("cannot remove a process record", "process", p.rec.ID(), "error", err)
	}
}

func (p *process) stopExpiry() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.expire != nil {
		p.expire.Stop()
	}
}

// start starts p unless that was done, and returns when its `started` is journalled or the start has failed. After
// a failure it can be tried again.
func (t *table) start(ctx context.Context, p *process) error {
	if p.rec.LastID() > 0 {
		return nil
	}
	a, err := t.begin(p)
	if err != nil {
		return err
	}
	select {
	case <-a.done:
		return a.err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// begin returns the attempt under way, or begins one.
func (t *table) begin(p *process) (*attempt, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.attempt != nil {
		return p.attempt, nil
	}
	if t.stopped {
		return nil, errNotRunning
	}
	p.expire.Stop()
	a := &attempt{done: make(chan struct{})}
	p.attempt = a
	t.pumps.Go(func() { t.pump(p, a) })
	return a, nil
}

// refused ends an attempt that started nothing.
func (t *table) refused(p *process, a *attempt, err error) {
	p.mu.Lock()
	p.attempt = nil
	if t.ctx.Err() == nil {
		p.expire.Reset(t.expiry)
	}
	p.mu.Unlock()
	a.report(err)
}
