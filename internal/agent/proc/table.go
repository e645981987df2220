package proc

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"connectrpc.com/connect"
	"github.com/space-sandbox/space/internal/agent/users"
	agentv1 "github.com/space-sandbox/space/internal/gen/space/agent/v1"
)

const (
	defaultMax = 4096
	closeGrace = 10 * time.Second
)

// Config is what a Table needs.
type Config struct {
	CgroupRoot   string // a cgroup2 folder; the table makes `user` in it
	Users        *users.DB
	AllOrphans   bool // collect every child of this process, as PID 1 must
	MaxProcesses int  // running or unacknowledged; 0 means 4096
}

// Table is the process table.
type Table struct {
	cfg     Config
	cgroups *cgroups
	reaper  *reaper
	work    sync.WaitGroup // all goroutines of processes
	buffers sync.Pool

	gate   sync.RWMutex // held for reading while a process starts; guards frozen and env
	frozen bool
	held   bool // frozen, and the kernel has said so
	env    map[string]string

	mu     sync.Mutex
	procs  map[string]*process
	closed bool
}

// New makes an empty table that is frozen: Thaw opens it.
func New(cfg Config) (*Table, error) {
	if cfg.MaxProcesses == 0 {
		cfg.MaxProcesses = defaultMax
	}
	c, err := newCgroups(cfg.CgroupRoot)
	if err != nil {
		return nil, err
	}
	t := &Table{cfg: cfg, cgroups: c, frozen: true, procs: map[string]*process{}, buffers: sync.Pool{New: newBuffer}}
	t.reaper = newReaper(cfg.AllOrphans, c.sweep)
	return t, nil
}

// Freeze stops all processes and refuses new ones. It returns how many of the table's run.
func (t *Table) Freeze(ctx context.Context) (int, error) {
	t.gate.Lock()
	t.frozen = true
	held := t.held
	t.gate.Unlock()
	if held { // what could undo it is frozen itself
		return t.Running(), nil
	}
	err := t.cgroups.freeze(ctx, true)
	t.gate.Lock()
	t.held = err == nil && t.frozen
	t.gate.Unlock()
	return t.Running(), err
}

// Thaw undoes Freeze.
func (t *Table) Thaw(ctx context.Context) error {
	t.gate.Lock()
	defer t.gate.Unlock()
	t.held = false
	if err := t.cgroups.freeze(ctx, false); err != nil {
		return errors.Join(err, t.cgroups.freeze(context.WithoutCancel(ctx), true))
	}
	t.frozen = false
	return nil
}

// Rehearse thaws and freezes a table in which nothing runs, for what that costs the first time.
func (t *Table) Rehearse(ctx context.Context) error {
	t.gate.Lock()
	defer t.gate.Unlock()
	if !t.frozen || !t.cgroups.empty() {
		return nil
	}
	t.held = false
	err := errors.Join(t.cgroups.freeze(ctx, false), t.cgroups.freeze(context.WithoutCancel(ctx), true))
	t.held = err == nil
	return err
}

// SetEnv sets the variables that every later process gets under its own.
func (t *Table) SetEnv(env map[string]string) {
	t.gate.Lock()
	defer t.gate.Unlock()
	t.env = env
}

// Running counts the processes that have not exited.
func (t *Table) Running() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	n := 0
	for _, p := range t.procs {
		if _, exited := p.ring.last(); !exited {
			n++
		}
	}
	return n
}

// Close kills everything and waits for it. The table refuses everything from then on.
func (t *Table) Close(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, closeGrace)
	defer cancel()
	t.mu.Lock()
	t.closed = true
	for _, p := range t.procs {
		p.ring.close()
	}
	t.mu.Unlock()
	t.gate.Lock() // no process is starting
	t.frozen = true
	t.gate.Unlock()
	err := t.cgroups.killAll()
	err = errors.Join(err, t.cgroups.await(ctx, "populated", "0"))
	done := make(chan struct{})
	go func() {
		defer close(done)
		t.work.Wait()
	}()
	select {
	case <-done:
	case <-ctx.Done():
		err = errors.Join(err, fmt.Errorf("processes still there: %w", ctx.Err()))
	}
	t.reaper.close()
	t.cgroups.sweep()
	return errors.Join(err, t.cgroups.removeUser())
}

// reserve takes a place in the table.
func (t *Table) reserve(id string, p *process) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	switch {
	case t.closed:
		return connect.NewError(connect.CodeUnavailable, errors.New("the agent is closing"))
	case t.procs[id] != nil:
		return connect.NewError(connect.CodeAlreadyExists, errors.New("process_id exists"))
	case len(t.procs) >= t.cfg.MaxProcesses:
		return connect.NewError(connect.CodeResourceExhausted,
			fmt.Errorf("%d processes are running or unacknowledged", len(t.procs)))
	}
	t.procs[id] = p
	return nil
}

func (t *Table) forget(id string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.procs, id)
}

func (t *Table) get(id string) (*process, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if p := t.procs[id]; p != nil && p.ready {
		return p, nil
	}
	return nil, connect.NewError(connect.CodeNotFound, errors.New("no such process"))
}

// publish makes a reserved process visible.
func (t *Table) publish(p *process) {
	t.mu.Lock()
	defer t.mu.Unlock()
	p.ready = true
	if t.closed {
		p.ring.close()
	}
}

// ack frees frames and forgets processes whose `exited` is acknowledged.
func (t *Table) ack(id string, seq uint64) {
	p, err := t.get(id)
	if err != nil {
		return // forgotten already: acknowledgements may be repeated
	}
	if p.ring.ack(seq) {
		t.forget(id)
	}
}

func (t *Table) list() []*agentv1.ProcessInfo {
	t.mu.Lock()
	defer t.mu.Unlock()
	out := make([]*agentv1.ProcessInfo, 0, len(t.procs))
	for id, p := range t.procs {
		if !p.ready {
			continue
		}
		seq, exited := p.ring.last()
		out = append(out, &agentv1.ProcessInfo{ProcessId: id, OsPid: int32(p.pid), LastSeq: seq, Exited: exited})
	}
	return out
}
