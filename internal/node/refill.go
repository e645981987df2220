package node

import (
	"context"
	"time"
)

const (
	refillIdle     = 20 * time.Millisecond // how often a waiting refill looks whether creates are under way
	refillPatience = 2 * time.Second       // after this it goes on all the same
	refillRetryMax = time.Minute
)

// usePool makes a shape the last used one and asks for its armed VMs.
func (n *Node) usePool(ctx context.Context, w *warm) {
	if evicted := n.pool.touch(w); len(evicted) > 0 {
		n.wg.Go(func() { n.destroyArmed(ctx, evicted) })
	}
	n.pokeRefill()
}

func (n *Node) pokeRefill() {
	select {
	case n.refill <- struct{}{}:
	default:
	}
}

// refillLoop arms VMs, one at a time and not while a create is under way, until every kept shape has enough.
func (n *Node) refillLoop() {
	wait := time.Second
	for {
		select {
		case <-n.refill:
		case <-n.ctx.Done():
			return
		}
		for n.ctx.Err() == nil {
			w := n.pool.wanted()
			if w == nil {
				break
			}
			n.yieldToCreates()
			ok, err := n.refillOne(w)
			if err == nil && ok {
				wait = time.Second
				continue
			}
			if err == nil {
				break // no memory for it: the next release or take asks again
			}
			n.log.Warn("cannot arm a VM", "shape", w.key, "error", err)
			if !n.pause(wait) {
				return
			}
			wait = min(2*wait, refillRetryMax)
		}
	}
}

// pause waits and reports false if the node ends meanwhile.
func (n *Node) pause(d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-n.ctx.Done():
		return false
	}
}

func (n *Node) yieldToCreates() {
	for deadline := time.Now().Add(refillPatience); n.creating.Load() > 0 && time.Now().Before(deadline); {
		if !n.pause(refillIdle) {
			return
		}
	}
}

// arming is the one refill under way. A create that needs its memory cancels it.
type arming struct {
	cancel context.CancelFunc
	done   chan struct{}
}

// refillOne arms one VM if there is memory for it without taking any from others.
func (n *Node) refillOne(w *warm) (bool, error) {
	ctx, cancel := context.WithCancel(n.ctx)
	defer cancel()
	now := &arming{cancel: cancel, done: make(chan struct{})}
	defer close(now.done)
	n.mu.Lock()
	p := n.prep.done
	n.arming = now
	n.mu.Unlock()
	memory, ok := n.admission.reserve(n.vmMiB(p, w.shape))
	if !ok || n.diskRoom() != nil {
		memory.release()
		return false, nil
	}
	s, err := n.arm(ctx, p, w, true)
	if err != nil {
		memory.release()
		if ctx.Err() != nil {
			err = nil // a create, or the end of the node, wanted it so
		}
		return false, err
	}
	a := newArmed(w.key, s, memory)
	if ctx.Err() != nil || !n.pool.add(a) {
		n.destroyArmed(ctx, []*armed{a})
		return false, nil
	}
	n.wg.Go(func() { n.guardArmed(a) })
	return true, nil
}

// stopArming ends the refill under way, if there is one, and waits until its memory is free or in the pool.
func (n *Node) stopArming() {
	n.mu.Lock()
	now := n.arming
	n.mu.Unlock()
	if now != nil {
		now.cancel()
		<-now.done
	}
}

// guardArmed replaces an armed VM that dies before anybody takes it.
func (n *Node) guardArmed(a *armed) {
	ctx, cancel := context.WithCancel(n.ctx)
	defer cancel()
	n.wg.Go(func() {
		select {
		case <-a.claimed:
		case <-ctx.Done():
		}
		cancel()
	})
	if st := n.follow(ctx, a.shim, nil); st == nil || !a.take(claimEvicted) {
		return
	}
	n.pool.drop(a)
	n.log.Warn("an armed VM died", "shim", a.shim.ID)
	n.destroyArmed(ctx, []*armed{a})
	if n.pause(time.Second) { // a VM that cannot live must not keep the machine busy
		n.pokeRefill()
	}
}
