package node

import (
	"os"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"

	nodev1 "github.com/space-sandbox/space/internal/gen/space/node/v1"
)

func countFDs(t *testing.T) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(entries)
}

// TestChurnLeaksNothing repeats whole lives, the failed ones too, and compares what is held after each half.
func TestChurnLeaksNothing(t *testing.T) {
	p := newPlace(t)
	n := p.start()
	n.waitReady()
	round := func() {
		t.Helper()
		for i := range 6 {
			id := n.mustCreate()
			shim, vmm := n.pids(id)
			switch i % 3 {
			case 1:
				_ = unix.Kill(shim, unix.SIGKILL)
			case 2:
				_ = unix.Kill(vmm, unix.SIGKILL)
				n.waitState(id, nodev1.SandboxState_SANDBOX_STATE_FAILED)
			}
			if err := n.deleteCall(id, 1); err != nil {
				t.Fatal(err)
			}
		}
	}
	round()
	fds, goroutines := countFDs(t), runtime.NumGoroutine()
	round()
	// Connections of the last calls end a little after the calls.
	eventually(t, "the same descriptors and goroutines as before", func() bool {
		return countFDs(t) <= fds && runtime.NumGoroutine() <= goroutines
	})
	p.nothingLeft()
}
