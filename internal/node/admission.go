package node

import "sync"

// admission counts the memory that is promised to VMs. Safe for concurrent use.
type admission struct {
	mu          sync.Mutex
	limit, used uint64 // MiB
}

// reservation is memory promised to one VM. Releasing it twice is harmless.
type reservation struct {
	a    *admission
	mib  uint64
	once sync.Once
}

// reserve promises memory if there is enough.
func (a *admission) reserve(mib uint64) (*reservation, bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.used+mib > a.limit {
		return nil, false
	}
	a.used += mib
	return &reservation{a: a, mib: mib}, true
}

// force promises memory that is in use already: an adopted VM's.
func (a *admission) force(mib uint64) *reservation {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.used += mib
	return &reservation{a: a, mib: mib}
}

// missing returns how much would have to be released before mib can be reserved.
func (a *admission) missing(mib uint64) uint64 {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.used+mib <= a.limit {
		return 0
	}
	return a.used + mib - a.limit
}

func (a *admission) totals() (used, limit uint64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.used, a.limit
}

func (r *reservation) release() {
	if r == nil {
		return
	}
	r.once.Do(func() {
		r.a.mu.Lock()
		defer r.a.mu.Unlock()
		r.a.used -= r.mib
	})
}

// slots hands out numbers that are unique among living VMs. Safe for concurrent use.
type slots struct {
	mu   sync.Mutex
	used map[uint32]bool
}

func (s *slots) take() uint32 {
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := uint32(0); ; i++ {
		if !s.used[i] {
			s.used[i] = true
			return i
		}
	}
}

func (s *slots) mark(i uint32) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.used[i] = true
}

func (s *slots) free(i uint32) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.used, i)
}
