package guestio

import (
	"context"
	"time"
)

// CallTimeout is the deadline of one call into a guest, and of one step of a stream.
const CallTimeout = 30 * time.Second

// Watchdog cancels a context when no step was made for a while. It is how a stream of any length has a deadline.
// It is used by one goroutine.
type Watchdog struct {
	timer *time.Timer
	limit time.Duration
}

// WithWatchdog returns a context that is cancelled limit after the last Step, and its watchdog. cancel frees both.
func WithWatchdog(ctx context.Context, limit time.Duration) (context.Context, *Watchdog, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	timer := time.AfterFunc(limit, func() { cancel(context.DeadlineExceeded) })
	stop := func() {
		timer.Stop()
		cancel(context.Canceled)
	}
	return ctx, &Watchdog{timer: timer, limit: limit}, stop
}

// Step starts the time anew.
func (w *Watchdog) Step() { w.timer.Reset(w.limit) }

// Pause stops the time until the next Step, for waits that have another owner's deadline.
func (w *Watchdog) Pause() { w.timer.Stop() }
