package shim

import (
	"context"
	"time"

	"connectrpc.com/connect"
	agentv1 "github.com/space-sandbox/space/internal/gen/space/agent/v1"
	"google.golang.org/protobuf/types/known/timestamppb"
)

const (
	clockEvery = 30 * time.Second
	clockJump  = 250 * time.Millisecond
)

// jumped reports how far the wall clock has moved against the monotonic one between two readings. A host that
// slept, or whose clock was set, shows here.
func jumped(before, now time.Time) time.Duration {
	wall := now.Round(0).Sub(before.Round(0))
	d := wall - now.Sub(before)
	if d < 0 {
		return -d
	}
	return d
}

// keepTime sets the guest's clock after the host's has jumped.
func (s *server) keepTime(m *machine) {
	tick := time.NewTicker(clockEvery)
	defer tick.Stop()
	before := time.Now()
	for {
		select {
		case <-tick.C:
		case <-m.vm.Done():
			return
		case <-s.life.Done():
			return
		}
		now := time.Now()
		if jumped(before, now) < clockJump {
			continue
		}
		if err := setClock(s.life, m.guest); err != nil {
			s.log.Warn("cannot set the guest's clock", "error", err)
			continue // before stays: tried again
		}
		before = now
	}
}

func setClock(ctx context.Context, g *guest) error {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	_, err := g.agent.SetClock(ctx, connect.NewRequest(&agentv1.SetClockRequest{WallClock: timestamppb.Now()}))
	return err
}
