package api

import "sync"

// limiter counts running requests by client. Clients without running requests take no memory.
type limiter struct {
	max     int
	enforce bool
	mu      sync.Mutex
	running map[string]int
}

func newLimiter(limit int, enforce bool) *limiter {
	return &limiter{max: limit, enforce: enforce, running: map[string]int{}}
}

// enter counts one request of client in; release counts it out and must be called once. ok is false, and nothing is
// counted, if the client has too many running and the limit is enforced.
func (l *limiter) enter(client string) (release func(), running int, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	running = l.running[client] + 1
	if l.enforce && running > l.max {
		return nil, running, false
	}
	l.running[client] = running
	return func() { l.leave(client) }, running, true
}

func (l *limiter) leave(client string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.running[client]--; l.running[client] == 0 {
		delete(l.running, client)
	}
}
