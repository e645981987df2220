package control

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/space-sandbox/space/internal/auth"
	"github.com/space-sandbox/space/internal/sandbox"
	"github.com/space-sandbox/space/internal/store"
)

// flushEvery bounds how old the stored activity of a sandbox can be.
const flushEvery = 15 * time.Second

// activity holds when sandboxes were last used, until it is written: a write per call would cost more than the call.
type activity struct {
	mu   sync.Mutex
	last map[sandbox.ID]time.Time
}

// touch notes a use; one that seems to be in the future (a node's clock) is noted as now.
func (a *activity) touch(id sandbox.ID, at, now time.Time) {
	if at.After(now) {
		at = now
	}
	at = at.Round(0).UTC()
	a.mu.Lock()
	defer a.mu.Unlock()
	if at.After(a.last[id]) {
		a.last[id] = at
	}
}

// overlay moves the record's LastActive to what is known here.
func (a *activity) overlay(s *sandbox.Sandbox) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if at, ok := a.last[s.ID]; ok && at.After(s.LastActive) {
		s.LastActive = at
	}
}

func (a *activity) drop(id sandbox.ID) {
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.last, id)
}

func (a *activity) take() map[sandbox.ID]time.Time {
	a.mu.Lock()
	defer a.mu.Unlock()
	taken := a.last
	a.last = map[sandbox.ID]time.Time{}
	return taken
}

func (p *Plane) flushActivity(ctx context.Context) error {
	taken := p.activity.take()
	if len(taken) == 0 {
		return nil
	}
	err := p.st.Update(ctx, func(tx store.Tx) error {
		for id, at := range taken {
			if err := tx.TouchSandbox(ctx, id, at); err != nil && !errors.Is(err, store.ErrNotFound) {
				return err
			}
		}
		return nil
	})
	if err != nil {
		for id, at := range taken {
			p.activity.touch(id, at, at)
		}
	}
	return err
}

// Guest implements Service.
func (p *Plane) Guest(ctx context.Context, pr *auth.Principal, id sandbox.ID, scope string, use GuestUse) (*Guest, error) {
	if err := pr.Require(scope); err != nil {
		return nil, err
	}
	s, err := p.load(ctx, pr, id)
	if err != nil {
		return nil, err
	}
	return p.guest(s, use)
}

// SessionGuest implements Service.
func (p *Plane) SessionGuest(ctx context.Context, session *sandbox.Session, use GuestUse) (*Guest, error) {
	var s *sandbox.Sandbox
	err := p.view(ctx, func(tx store.Tx) (err error) {
		s, err = tx.GetSandbox(ctx, session.SandboxID)
		return err
	})
	if sandbox.CodeOf(err) == sandbox.CodeNotFound || err == nil && s.State == sandbox.StateDeleted {
		return nil, errNoSandbox()
	}
	if err != nil {
		return nil, err
	}
	return p.guest(s, use)
}

func (p *Plane) guest(s *sandbox.Sandbox, use GuestUse) (*Guest, error) {
	allowed := []sandbox.State{sandbox.StateRunning}
	if use.ReadOnly {
		allowed = append(allowed, sandbox.StateFailed)
	}
	if !slices.Contains(allowed, s.State) {
		return nil, sandbox.ConflictState("use", s.State, s.State == sandbox.StateCreating, allowed...)
	}
	node, ok := p.cfg.Nodes[s.Node]
	if !ok {
		return nil, sandbox.Errorf(sandbox.CodeServiceUnavailable, "the node of this sandbox is not configured")
	}
	if use.Active && s.State == sandbox.StateRunning {
		now := p.clock.Now()
		p.activity.touch(s.ID, now, now)
	}
	processes, files := node.Sandbox(s.ID)
	return &Guest{Sandbox: s, Processes: processes, Files: files}, nil
}
