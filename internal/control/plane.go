package control

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/space-sandbox/space/internal/auth"
	"github.com/space-sandbox/space/internal/sandbox"
	"github.com/space-sandbox/space/internal/store"
)

// Clock is where a Plane gets the time from.
type Clock interface {
	// Now returns the time; System's carries a monotonic reading.
	Now() time.Time
	// After returns a channel that receives once, d from now.
	After(d time.Duration) <-chan time.Time
}

// System is the clock of the machine.
type System struct{}

// Now implements Clock.
func (System) Now() time.Time { return time.Now() }

// After implements Clock.
func (System) After(d time.Duration) <-chan time.Time { return time.After(d) }

// Config says what a Plane works with. Zero durations and counts have defaults.
type Config struct {
	Store    store.Store     // not closed by the Plane
	Nodes    map[string]Node // by name
	NodeName string          // where new sandboxes go; one of Nodes
	Clock    Clock           // nil: System
	Logger   *slog.Logger    // nil: none

	ReconcileEvery time.Duration // 10 s
	JanitorEvery   time.Duration // 1 min
	CreateTimeout  time.Duration // 5 min: how long a create may take, retries included
	AdmissionWait  time.Duration // 75 ms: how long CreateSandbox waits for a node without room to say so
	SessionTTL     time.Duration // 24 h
	IdempotencyTTL time.Duration // 24 h
	TombstoneTTL   time.Duration // 7 days
	MaxParallel    int           // 32 creates and 32 deletes
}

func (c *Config) setDefaults() error {
	if c.Store == nil {
		return errors.New("control: no store")
	}
	if _, ok := c.Nodes[c.NodeName]; !ok {
		return fmt.Errorf("control: node %q is not one of the nodes", c.NodeName)
	}
	if c.Clock == nil {
		c.Clock = System{}
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	for _, d := range []struct {
		value *time.Duration
		def   time.Duration
	}{
		{&c.ReconcileEvery, 10 * time.Second}, {&c.JanitorEvery, time.Minute}, {&c.CreateTimeout, 5 * time.Minute},
		{&c.AdmissionWait, 75 * time.Millisecond}, {&c.SessionTTL, 24 * time.Hour},
		{&c.IdempotencyTTL, 24 * time.Hour}, {&c.TombstoneTTL, 7 * 24 * time.Hour},
	} {
		if *d.value <= 0 {
			*d.value = d.def
		}
	}
	if c.MaxParallel <= 0 {
		c.MaxParallel = 32
	}
	return nil
}

// Deadlines of single calls.
const (
	askNode     = 5 * time.Second  // questions a client waits for
	sweepNode   = 10 * time.Second // questions nobody waits for
	deleteCall  = time.Minute
	processCall = 15 * time.Second
	afterwards  = 5 * time.Second // store work that must happen although the caller has gone
)

// Plane is the Service over a store and its nodes. Make one with New, run it with Run, end it with Close.
type Plane struct {
	cfg      Config
	st       store.Store
	clock    Clock
	log      *slog.Logger
	keys     *auth.Keys
	instance string // tells what this process left running from what an earlier one did

	ctx    context.Context //nolint:containedctx // the life of the workers, ended by Close
	cancel context.CancelFunc
	wg     sync.WaitGroup

	jobs     jobs
	ops      opHub
	activity activity
	timers   timers
	guard    orphanGuard
	creates  chan struct{}
	deletes  chan struct{}
}

var _ Service = (*Plane)(nil)

// New makes a Plane. Its workers act as soon as it is called; what an earlier process left over is picked up by Run.
func New(cfg Config) (*Plane, error) {
	if err := cfg.setDefaults(); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(context.Background())
	return &Plane{
		cfg: cfg, st: cfg.Store, clock: cfg.Clock, log: cfg.Logger,
		keys:     auth.NewKeys(cfg.Store, cfg.Clock.Now, cfg.Logger),
		instance: string(sandbox.NewOperationID()),
		ctx:      ctx, cancel: cancel,
		jobs:     jobs{byID: map[sandbox.ID]*job{}},
		ops:      opHub{live: map[sandbox.OperationID]*liveOp{}},
		activity: activity{last: map[sandbox.ID]time.Time{}},
		timers:   timers{byID: map[sandbox.ID]deadline{}},
		guard:    orphanGuard{reasons: map[string]string{}},
		creates:  make(chan struct{}, cfg.MaxParallel),
		deletes:  make(chan struct{}, cfg.MaxParallel),
	}, nil
}

// Run reconciles, watches the nodes and cleans up until ctx or the Plane ends.
func (p *Plane) Run(ctx context.Context) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stop := context.AfterFunc(p.ctx, cancel) //nolint:contextcheck // two lives, the shorter one counts
	defer stop()
	var wg sync.WaitGroup
	defer wg.Wait()
	for name, node := range p.cfg.Nodes {
		wg.Go(func() { p.watch(ctx, name, node) })
		sweep := func(ctx context.Context) error { return p.sweep(ctx, name, node) }
		wg.Go(func() { p.every(ctx, p.cfg.ReconcileEvery, "sweep of node "+name, sweep) })
	}
	wg.Go(func() { p.every(ctx, p.cfg.ReconcileEvery, "reconcile", p.reconcile) })
	wg.Go(func() { p.every(ctx, time.Second, "timers", p.expire) })
	wg.Go(func() { p.every(ctx, auth.PollEvery, "poll keys", p.keys.Poll) })
	wg.Go(func() { p.every(ctx, flushEvery, "write activity", p.flushActivity) })
	wg.Go(func() { p.every(ctx, p.cfg.JanitorEvery, "clean up", p.clean) })
}

// every runs fn at once and then in steps until ctx ends. A failure is logged; the next step is the repair.
func (p *Plane) every(ctx context.Context, step time.Duration, what string, fn func(context.Context) error) {
	for {
		if err := fn(ctx); err != nil && ctx.Err() == nil {
			p.log.WarnContext(ctx, what+" failed", "error", err)
		}
		select {
		case <-ctx.Done():
			return
		case <-p.clock.After(step):
		}
	}
}

// Close ends the workers, waits for them and writes what is only in memory. Work that was under way is taken up
// again by the next Plane on the same store.
func (p *Plane) Close() error {
	p.jobs.close()
	p.cancel()
	p.wg.Wait()
	ctx, cancel := context.WithTimeout(context.Background(), afterwards)
	defer cancel()
	return p.flushActivity(ctx)
}

// clean removes what has expired.
func (p *Plane) clean(ctx context.Context) error {
	now := p.clock.Now()
	return p.st.Update(ctx, func(tx store.Tx) error {
		if _, err := tx.DeleteSessions(ctx, now); err != nil {
			return err
		}
		if _, err := tx.DeleteIdempotency(ctx, now); err != nil {
			return err
		}
		_, err := tx.PurgeSandboxes(ctx, now.Add(-p.cfg.TombstoneTTL))
		return err
	})
}

// now is the time as records hold it.
func (p *Plane) now() time.Time { return p.clock.Now().Round(0).UTC() }

// update is Store.Update with the errors of the edge.
func (p *Plane) update(ctx context.Context, fn func(store.Tx) error) error {
	return edge(p.st.Update(ctx, fn))
}

// view is Store.View with the errors of the edge.
func (p *Plane) view(ctx context.Context, fn func(store.Tx) error) error {
	return edge(p.st.View(ctx, fn))
}

func edge(err error) error {
	var e *sandbox.Error
	switch {
	case err == nil || errors.As(err, &e):
		return err
	case errors.Is(err, store.ErrNotFound):
		return sandbox.Errorf(sandbox.CodeNotFound, "not found").WithCause(err)
	}
	return auth.ErrStore(err)
}
