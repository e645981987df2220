package node

import (
	"sync"
	"sync/atomic"

	"github.com/space-sandbox/space/internal/node/shims"
)

// Claims of an armed VM. The one who changes it from free owns the VM.
const (
	claimFree int32 = iota
	claimTaken
	claimEvicted
)

// armed is a restored, stopped VM without an identity.
type armed struct {
	shim    *shims.Shim
	memory  *reservation
	key     string
	claim   atomic.Int32
	claimed chan struct{} // closed by the one who claimed it
}

func newArmed(key string, shim *shims.Shim, memory *reservation) *armed {
	return &armed{shim: shim, memory: memory, key: key, claimed: make(chan struct{})}
}

// take makes the caller the owner, unless somebody else is.
func (a *armed) take(as int32) bool {
	if !a.claim.CompareAndSwap(claimFree, as) {
		return false
	}
	close(a.claimed)
	return true
}

// pool keeps armed VMs per shape. It owns none of them longer than until they are claimed, and calls nothing while
// it holds its lock. Safe for concurrent use.
type pool struct {
	size, shapes int

	mu    sync.Mutex
	order []string // keys, last used first
	warm  map[string]*warm
	vms   map[string][]*armed
}

func newPool(size, shapes int) *pool {
	return &pool{size: size, shapes: shapes, warm: map[string]*warm{}, vms: map[string][]*armed{}}
}

// touch makes a shape the last used one and returns the VMs of shapes that are no longer kept, claimed.
func (p *pool) touch(w *warm) []*armed {
	p.mu.Lock()
	defer p.mu.Unlock()
	order := []string{w.key}
	for _, key := range p.order {
		if key != w.key {
			order = append(order, key)
		}
	}
	p.warm[w.key] = w
	var evicted []*armed
	for _, key := range order[min(p.shapes, len(order)):] {
		evicted = append(evicted, claimAll(p.vms[key], claimEvicted)...)
		delete(p.vms, key)
		delete(p.warm, key)
	}
	p.order = order[:min(p.shapes, len(order))]
	return evicted
}

// take returns an armed VM of a shape, or nil.
func (p *pool) take(key string) *armed {
	p.mu.Lock()
	vms := p.vms[key]
	p.mu.Unlock()
	for _, a := range vms {
		if a.shim.Alive() && a.take(claimTaken) {
			p.drop(a)
			return a
		}
	}
	return nil
}

// add offers a VM. It is refused if its shape is no longer kept or has enough.
func (p *pool) add(a *armed) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.warm[a.key] == nil || len(p.vms[a.key]) >= p.size {
		return false
	}
	// A fresh slice each time: take reads the old one without the lock.
	p.vms[a.key] = append(append([]*armed(nil), p.vms[a.key]...), a)
	return true
}

// drop forgets a VM.
func (p *pool) drop(a *armed) {
	p.mu.Lock()
	defer p.mu.Unlock()
	var rest []*armed
	for _, other := range p.vms[a.key] {
		if other != a {
			rest = append(rest, other)
		}
	}
	p.vms[a.key] = rest
}

// wanted returns the last used shape that has too few VMs, or nil.
func (p *pool) wanted() *warm {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, key := range p.order {
		if len(p.vms[key]) < p.size {
			return p.warm[key]
		}
	}
	return nil
}

// evict claims VMs, the least used shapes first, until mib of memory are covered. If all of them would not be
// enough it claims none and returns nil.
func (p *pool) evict(mib uint64) []*armed {
	p.mu.Lock()
	defer p.mu.Unlock()
	var candidates []*armed
	var sum uint64
	for i := len(p.order) - 1; i >= 0 && sum < mib; i-- {
		for _, a := range p.vms[p.order[i]] {
			if sum < mib {
				candidates = append(candidates, a)
				sum += a.memory.mib
			}
		}
	}
	if sum < mib {
		return nil
	}
	evicted := claimAll(candidates, claimEvicted)
	for _, a := range evicted {
		var rest []*armed
		for _, other := range p.vms[a.key] {
			if other != a {
				rest = append(rest, other)
			}
		}
		p.vms[a.key] = rest
	}
	return evicted
}

// empty claims all VMs and keeps no shape from now on.
func (p *pool) empty() []*armed {
	p.mu.Lock()
	defer p.mu.Unlock()
	var all []*armed
	for _, vms := range p.vms {
		all = append(all, claimAll(vms, claimEvicted)...)
	}
	p.vms, p.warm, p.order = map[string][]*armed{}, map[string]*warm{}, nil
	return all
}

// count returns how many armed VMs there are.
func (p *pool) count() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := 0
	for _, vms := range p.vms {
		n += len(vms)
	}
	return n
}

func claimAll(vms []*armed, as int32) []*armed {
	var mine []*armed
	for _, a := range vms {
		if a.take(as) {
			mine = append(mine, a)
		}
	}
	return mine
}
