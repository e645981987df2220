package node

import (
	"os"
	"path/filepath"
	"testing"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

	nodev1 "github.com/space-sandbox/space/internal/gen/space/node/v1"
	"github.com/space-sandbox/space/internal/sandbox"
)

// TestAdoption restarts the node while sandboxes are in different states.
func TestAdoption(t *testing.T) {
	p := newPlace(t)
	n := p.start(func(c *Config) { c.PoolSize = 1 })
	n.waitReady()
	running, vmmDead, shimDead, diesAway := n.mustCreate(), n.mustCreate(), n.mustCreate(), n.mustCreate()
	kill := func(pid int) {
		t.Helper()
		if err := unix.Kill(pid, unix.SIGKILL); err != nil {
			t.Fatal(err)
		}
	}
	_, vmm := n.pids(vmmDead)
	kill(vmm)
	n.waitState(vmmDead, nodev1.SandboxState_SANDBOX_STATE_FAILED)
	shim, _ := n.pids(shimDead)
	kill(shim)
	n.waitState(shimDead, nodev1.SandboxState_SANDBOX_STATE_FAILED)
	runningShim, runningVMM := n.pids(running)
	awayShim, awayVMM := n.pids(diesAway)
	eventually(t, "an armed VM", func() bool { return n.pool.count() == 1 })
	n.stop()
	if dead(runningShim) || dead(runningVMM) {
		t.Fatal("a bound sandbox ended with its node service")
	}
	ids, err := n.shims.List()
	if err != nil || len(ids) != 4 {
		t.Fatalf("folders after close: %v, %v (the armed VM must be gone)", ids, err)
	}
	kill(awayShim)
	eventually(t, "death", func() bool { return dead(awayShim) && dead(awayVMM) })

	n = p.start()
	if p.fakes.probes.Load() != 1 {
		n.waitReady()
	}
	for id, want := range map[sandbox.ID]string{running: "", vmmDead: "vmm_exited", shimDead: "host_lost", diesAway: "host_lost"} {
		// A shim that was killed a moment ago can still be seen at the start; its watch then notices.
		eventually(t, "the state after the restart, reason "+want, func() bool {
			st := n.status(id)
			return st != nil && st.Reason == want && (st.State == nodev1.SandboxState_SANDBOX_STATE_RUNNING) == (want == "")
		})
	}
	if shim, vmm := n.pids(running); shim != runningShim || vmm != runningVMM {
		t.Errorf("adopted %d and %d, want %d and %d", shim, vmm, runningShim, runningVMM)
	}
	// Adopted sandboxes are watched and can be deleted like any other.
	kill(runningVMM)
	n.waitState(running, nodev1.SandboxState_SANDBOX_STATE_FAILED)
	for _, id := range []sandbox.ID{running, vmmDead, shimDead, diesAway} {
		if err := n.deleteCall(id, 1); err != nil {
			t.Error(err)
		}
	}
	n.waitReady()
	p.nothingLeft()
	if p.fakes.captures.Load() != 1 || p.fakes.probes.Load() != 1 {
		t.Errorf("%d captures and %d probes for two starts", p.fakes.captures.Load(), p.fakes.probes.Load())
	}
	n.stop()
	p.noRuntimeFolder()
}

func TestAdoptsShimThatDoesNotAnswer(t *testing.T) {
	p := newPlace(t)
	n := p.start()
	id := n.mustCreate()
	shim, _ := n.pids(id)
	n.stop()
	if err := unix.Kill(shim, unix.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	n = p.start()
	if st := n.status(id); st.State != nodev1.SandboxState_SANDBOX_STATE_CREATING {
		t.Errorf("not heard of, but %v", st.State)
	}
	if err := unix.Kill(shim, unix.SIGCONT); err != nil {
		t.Fatal(err)
	}
	n.waitState(id, nodev1.SandboxState_SANDBOX_STATE_RUNNING)
}

func TestSweepsWhatHasNoRecord(t *testing.T) {
	p := newPlace(t)
	n := p.start()
	kept, lost := n.mustCreate(), n.mustCreate()
	shim, vmm := n.pids(lost)
	n.stop()
	junk := filepath.Join(p.data, "node", "shims", "junk")
	half := filepath.Join(p.data, "node", "sandboxes", string(sandbox.NewID()))
	warm := filepath.Join(p.data, "node", "warm", "x", "y.tmp")
	for _, dir := range []string{junk, half, warm} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.RemoveAll(filepath.Join(p.data, "node", "sandboxes", string(lost))); err != nil {
		t.Fatal(err)
	}
	// Without its pid file a shim is still found.
	if err := os.Remove(filepath.Join(p.data, "node", "shims", n.sandboxes[string(lost)].rec.Shim, "pid.json")); err != nil {
		t.Fatal(err)
	}
	n = p.start()
	if !dead(shim) || !dead(vmm) {
		t.Error("a shim without a record was left running")
	}
	for _, dir := range []string{junk, half, warm} {
		if _, err := os.Stat(dir); !os.IsNotExist(err) {
			t.Errorf("%s left: %v", dir, err)
		}
	}
	if st := n.status(kept); st == nil || st.State != nodev1.SandboxState_SANDBOX_STATE_RUNNING {
		t.Errorf("the one with a record: %v", st)
	}
}

func TestSweepSafety(t *testing.T) {
	p := newPlace(t)
	n := p.start()
	var ids []sandbox.ID
	var pids []int
	for range 5 {
		id := n.mustCreate()
		shim, _ := n.pids(id)
		ids, pids = append(ids, id), append(pids, shim)
	}
	n.stop()
	aside := t.TempDir()
	move := func(from, to string) {
		t.Helper()
		for _, id := range ids[1:] {
			if err := os.Rename(filepath.Join(from, string(id)), filepath.Join(to, string(id))); err != nil {
				t.Fatal(err)
			}
		}
	}
	move(n.l.sandboxes(), aside)
	unsafe := p.start()
	for _, pid := range pids {
		if dead(pid) {
			t.Error("swept in spite of the safety rule")
		}
	}
	resp, err := unsafe.client.GetNode(t.Context(), connect.NewRequest(&nodev1.GetNodeRequest{}))
	if err != nil || resp.Msg.Ready || resp.Msg.NotReadyReason == "" {
		t.Errorf("node %v, %v", resp, err)
	}
	_, err = unsafe.create(request(sandbox.NewID(), 1))
	wantCode(t, err, connect.CodeUnavailable)
	unsafe.stop()
	move(aside, n.l.sandboxes())
	again := p.start()
	for _, id := range ids {
		if st := again.status(id); st == nil || st.State != nodev1.SandboxState_SANDBOX_STATE_RUNNING {
			t.Errorf("after the records came back: %v", st)
		}
	}
}

func TestTooManyUnknown(t *testing.T) {
	for _, c := range []struct {
		living, unknown int
		want            bool
	}{{0, 0, false}, {3, 3, false}, {4, 4, true}, {20, 4, false}, {19, 4, true}, {100, 20, false}, {100, 21, true}} {
		if got := tooManyUnknown(c.living, c.unknown); got != c.want {
			t.Errorf("%d of %d: %v", c.unknown, c.living, got)
		}
	}
}

func TestOneNodePerFolder(t *testing.T) {
	p := newPlace(t)
	p.start()
	n, err := New(p.config(), p.deps())
	if err != nil {
		t.Fatal(err)
	}
	if err := n.Start(t.Context()); err == nil {
		t.Fatal("two nodes in one folder")
	}
	if err := n.Close(); err != nil {
		t.Fatal(err)
	}
}

func TestLongRuntimeFolder(t *testing.T) {
	p := newPlace(t)
	n := p.start(func(c *Config) {
		c.RuntimeDir = filepath.Join(p.run, "a-folder-with-a-name-that-is-much-too-long-for-a-unix-socket-below-it-at-last")
	})
	eventually(t, "reason", func() bool { return n.template().State == nodev1.TemplateState_TEMPLATE_STATE_FAILED })
}

func TestAdoptTrustsNoPaths(t *testing.T) {
	p := newPlace(t)
	n := p.start()
	victim := filepath.Join(t.TempDir(), "victim")
	if err := os.WriteFile(victim, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	dir := n.shims.Path("evil")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	spec := `{"shimId":"evil","socket":"` + victim + `","cgroup":"` + filepath.Dir(victim) + `"}`
	if err := os.WriteFile(filepath.Join(dir, "spec.json"), []byte(spec), 0o600); err != nil {
		t.Fatal(err)
	}
	s, err := n.shims.Adopt("evil")
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Destroy(t.Context(), "x"); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(victim); err != nil {
		t.Errorf("a path from a spec was removed: %v", err)
	}
}
