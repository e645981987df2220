package node

import (
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

	nodev1 "github.com/space-sandbox/space/internal/gen/space/node/v1"
	"github.com/space-sandbox/space/internal/sandbox"
)

func TestClaimHasOneWinner(t *testing.T) {
	for range 200 {
		a := newArmed("k", nil, nil)
		var winners atomic.Int32
		var wg sync.WaitGroup
		for i := range 8 {
			wg.Go(func() {
				if a.take(claimTaken + int32(i%2)) {
					winners.Add(1)
				}
			})
		}
		wg.Wait()
		if winners.Load() != 1 {
			t.Fatalf("%d winners", winners.Load())
		}
		<-a.claimed
	}
}

func TestPoolOrderAndEviction(t *testing.T) {
	p := newPool(2, 2)
	adm := &admission{limit: 1000}
	add := func(key string) *armed {
		r, _ := adm.reserve(10)
		a := newArmed(key, nil, r)
		if !p.add(a) {
			t.Fatalf("%s refused", key)
		}
		return a
	}
	a, b := &warm{key: "a"}, &warm{key: "b"}
	p.touch(a)
	p.touch(b)
	a1, b1, b2 := add("a"), add("b"), add("b")
	if r, _ := adm.reserve(10); p.add(newArmed("b", nil, r)) {
		t.Error("a third one accepted")
	}
	if p.add(newArmed("unknown", nil, nil)) {
		t.Error("an unknown shape accepted")
	}
	if w := p.wanted(); w != a {
		t.Errorf("wanted %v", w)
	}
	if got := p.evict(31); got != nil {
		t.Errorf("evicted %d for more than there is", len(got))
	}
	if got := p.evict(11); len(got) != 2 || got[0] != a1 || got[1] != b1 {
		t.Errorf("evicted %v, want the least used shape first", got)
	}
	// A third shape pushes the least used one out.
	p.touch(a)
	if got := p.touch(&warm{key: "c"}); len(got) != 1 || got[0] != b2 {
		t.Errorf("pushed out %v", got)
	}
	if p.count() != 0 {
		t.Errorf("%d left", p.count())
	}
}

func TestAdmissionCounts(t *testing.T) {
	a := &admission{limit: 100}
	r, ok := a.reserve(60)
	if !ok {
		t.Fatal("refused")
	}
	if _, ok := a.reserve(41); ok || a.missing(41) != 1 || a.missing(40) != 0 {
		t.Errorf("over the limit: %v, missing %d", ok, a.missing(41))
	}
	forced := a.force(500)
	if _, ok := a.reserve(1); ok {
		t.Error("reserved beyond what adopted VMs use")
	}
	r.release()
	r.release()
	forced.release()
	(*reservation)(nil).release()
	if used, _ := a.totals(); used != 0 {
		t.Errorf("%d used", used)
	}
}

func TestSlotsAreUnique(t *testing.T) {
	s := &slots{used: map[uint32]bool{}}
	s.mark(1)
	if a, b := s.take(), s.take(); a != 0 || b != 2 {
		t.Errorf("%d, %d", a, b)
	}
	s.free(1)
	if a := s.take(); a != 1 {
		t.Errorf("%d", a)
	}
}

func TestArmedVMIsTakenAndReplaced(t *testing.T) {
	p := newPlace(t)
	n := p.start(func(c *Config) { c.PoolSize = 2 })
	eventually(t, "two armed VMs", func() bool { return n.pool.count() == 2 })
	id := n.mustCreate()
	taken := false
	for _, tm := range n.status(id).Timings {
		taken = taken || tm.Phase == "take"
	}
	if !taken {
		t.Errorf("not from the pool: %v", n.status(id).Timings)
	}
	eventually(t, "refilled", func() bool { return n.pool.count() == 2 })
	resp, err := n.client.GetNode(t.Context(), connect.NewRequest(&nodev1.GetNodeRequest{}))
	if err != nil || resp.Msg.Armed != 2 || resp.Msg.Sandboxes != 1 || resp.Msg.MemoryUsedMib != 3*178 {
		t.Errorf("%v, %v", resp, err)
	}
}

func TestDeadArmedVMIsReplaced(t *testing.T) {
	n := newPlace(t).start(func(c *Config) { c.PoolSize = 1 })
	eventually(t, "armed", func() bool { return n.pool.count() == 1 })
	n.pool.mu.Lock()
	var first *armed
	for _, vms := range n.pool.vms {
		first = vms[0]
	}
	n.pool.mu.Unlock()
	_, vmm := first.shim.PIDs()
	if err := unix.Kill(vmm, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	eventually(t, "gone", func() bool { return first.claim.Load() == claimEvicted && !first.shim.Alive() })
	eventually(t, "replaced", func() bool { return n.pool.count() == 1 })
}

func TestRacingCreatesGetDifferentVMs(t *testing.T) {
	n := newPlace(t).start(func(c *Config) { c.PoolSize = 3 })
	eventually(t, "armed", func() bool { return n.pool.count() == 3 })
	var wg sync.WaitGroup
	for range 6 {
		wg.Go(func() {
			if _, err := n.create(request(sandbox.NewID(), 1)); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	shims := map[string]bool{}
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, e := range n.sandboxes {
		shims[e.rec.Shim] = true
	}
	if len(shims) != 6 {
		t.Errorf("%d shims for 6 sandboxes", len(shims))
	}
}

func TestNoRoom(t *testing.T) {
	n := newPlace(t).start(func(c *Config) {
		c.PoolSize = 2
		c.MemoryLimitMiB = 2*178 + 10
	})
	eventually(t, "armed", func() bool { return n.pool.count() == 2 })
	// Another shape: armed VMs make room for it.
	req := request(sandbox.NewID(), 1)
	req.Resources = &nodev1.Resources{Vcpu: 1, MemoryMib: 100, DiskMib: 256}
	if _, err := n.create(req); err != nil {
		t.Fatalf("armed VMs were not ended for it: %v", err)
	}
	n.mustCreate()
	begin := time.Now()
	id := sandbox.NewID()
	_, err := n.create(request(id, 1))
	wantCode(t, err, connect.CodeResourceExhausted)
	if d := time.Since(begin); d > 2*time.Second {
		t.Errorf("refused after %v", d)
	}
	if n.status(id) != nil {
		t.Error("a refused sandbox is listed")
	}
	// The refusal does not use up the generation.
	if err := n.deleteCall(sandbox.ID(req.SandboxId), 1); err != nil {
		t.Fatal(err)
	}
	if _, err := n.create(request(id, 1)); err != nil {
		t.Errorf("with room again: %v", err)
	}
}

func TestFullDisk(t *testing.T) {
	full := func(c *Config) { c.DiskReserveMiB = 1 << 40 }
	p := newPlace(t)
	n := p.start()
	n.waitReady()
	n.stop()
	n = p.start(full)
	n.waitReady()
	_, err := n.create(request(sandbox.NewID(), 1))
	wantCode(t, err, connect.CodeResourceExhausted)

	// Without a warm snapshot it does not begin to capture one, and says why.
	p = newPlace(t)
	n = p.start(full)
	eventually(t, "the reason", func() bool { return strings.Contains(n.notReady(), "the disk is nearly full") })
	if got := p.fakes.captures.Load(); got != 0 {
		t.Errorf("%d captures on a full disk", got)
	}
}
