package qemu

import (
	"context"
	"math"
	"time"
)

const (
	tscWindow  = 20 * time.Millisecond // long enough for an error of a few millionths
	tscSamples = 8
)

// readTSC reads the CPU's time-stamp counter.
func readTSC() uint64

// hostTSC measures how fast the counter runs, in kHz; 0 if ctx ends first.
//
// A guest under TCG sees the host's counter, and a microvm gives its kernel nothing but an emulated PIT to measure
// it with. On a busy host that measurement fails, and as the kernel then has no timer at all it hangs without a
// word. So it is told.
func hostTSC(ctx context.Context) uint64 {
	begin, first := tscSample()
	timer := time.NewTimer(tscWindow)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
		return 0
	}
	end, last := tscSample()
	return tscRate(last-first, end.Sub(begin))
}

// tscRate is ticks per millisecond, rounded.
func tscRate(ticks uint64, d time.Duration) uint64 {
	if d <= 0 {
		return 0
	}
	return uint64(math.Round(float64(ticks) / d.Seconds() / 1000))
}

// tscSample reads the clock and the counter at the same instant: of several tries, that with the least time between
// the two readings of the counter that enclose the clock's.
func tscSample() (time.Time, uint64) {
	var at time.Time
	var counter uint64
	best := uint64(math.MaxUint64)
	for range tscSamples {
		before := readTSC()
		now := time.Now()
		after := readTSC()
		if after-before < best {
			best, at, counter = after-before, now, before+(after-before)/2
		}
	}
	return at, counter
}
