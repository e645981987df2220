package shim

import (
	"context"
	"sync"
	"time"

	"connectrpc.com/connect"
	agentv1 "github.com/space-sandbox/space/internal/gen/space/agent/v1"
	"github.com/space-sandbox/space/internal/sandbox"
)

const (
	ackBytes = 512 << 10 // acknowledge at once after this much output
	ackDelay = 50 * time.Millisecond
)

// acker tells the agent what is journalled, many processes and frames in one call. A lost acknowledgement is
// harmless: the next one covers it, and that of an exit is repeated until it arrives.
type acker struct {
	ctx   context.Context
	guest *guest
	wake  chan struct{}

	mu      sync.Mutex
	pending map[sandbox.ProcessID]uint64
	bytes   uint64
	urgent  bool
}

func newAcker(ctx context.Context, g *guest) *acker {
	return &acker{ctx: ctx, guest: g, wake: make(chan struct{}, 1), pending: make(map[sandbox.ProcessID]uint64)}
}

// note records that a frame is journalled.
func (a *acker) note(id sandbox.ProcessID, seq, bytes uint64, exited bool) {
	a.mu.Lock()
	first := len(a.pending) == 0
	a.pending[id] = max(a.pending[id], seq)
	a.bytes += bytes
	due := !a.urgent && (exited || a.bytes >= ackBytes)
	a.urgent = a.urgent || due
	a.mu.Unlock()
	if first || due {
		select {
		case a.wake <- struct{}{}:
		default:
		}
	}
}

// run sends acknowledgements until the context ends.
func (a *acker) run() {
	for {
		select {
		case <-a.wake:
		case <-a.ctx.Done():
			return
		}
		if !a.isUrgent() {
			a.linger()
		}
		batch := a.take()
		if len(batch) == 0 {
			continue
		}
		if err := a.send(batch); err != nil {
			a.putBack(batch)
			pause(a.ctx, ackDelay)
		}
	}
}

// linger waits for more to acknowledge, or for something urgent.
func (a *acker) linger() {
	t := time.NewTimer(ackDelay)
	defer t.Stop()
	for !a.isUrgent() {
		select {
		case <-a.wake:
		case <-t.C:
			return
		case <-a.ctx.Done():
			return
		}
	}
}

func (a *acker) isUrgent() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.urgent
}

func (a *acker) take() map[sandbox.ProcessID]uint64 {
	a.mu.Lock()
	defer a.mu.Unlock()
	batch := a.pending
	a.pending = make(map[sandbox.ProcessID]uint64)
	a.bytes, a.urgent = 0, false
	return batch
}

func (a *acker) putBack(batch map[sandbox.ProcessID]uint64) {
	for id, seq := range batch {
		a.note(id, seq, ackBytes, false)
	}
}

func (a *acker) send(batch map[sandbox.ProcessID]uint64) error {
	req := new(agentv1.AckRequest)
	for id, seq := range batch {
		req.Acks = append(req.Acks, &agentv1.ProcessAck{ProcessId: string(id), Seq: seq})
	}
	ctx, cancel := context.WithTimeout(a.ctx, callTimeout)
	defer cancel()
	_, err := a.guest.procs.Ack(ctx, connect.NewRequest(req))
	if connect.IsWireError(err) {
		return nil // the agent answered; what it does not know needs no acknowledgement
	}
	return err
}
