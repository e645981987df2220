package node

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

	nodev1 "github.com/space-sandbox/space/internal/gen/space/node/v1"
	"github.com/space-sandbox/space/internal/node/shimtest"
	"github.com/space-sandbox/space/internal/sandbox"
)

func TestCreateAndDelete(t *testing.T) {
	p := newPlace(t)
	n := p.start()
	id := n.mustCreate()
	st := n.status(id)
	phases := map[string]bool{}
	for _, tm := range st.Timings {
		phases[tm.Phase] = true
	}
	for _, want := range []string{"admit", "restore", "record", "bind"} {
		if !phases[want] {
			t.Errorf("no timing of %s in %v", want, st.Timings)
		}
	}
	if st.Kernel != "6.1-fake" || st.Environment != "E1" || st.Acceleration != "tcg" {
		t.Errorf("status %v", st)
	}
	shim, vmm := n.pids(id)
	if err := n.deleteCall(id, 1); err != nil {
		t.Fatal(err)
	}
	if !dead(shim) || !dead(vmm) {
		t.Error("delete answered before the processes were dead")
	}
	p.nothingLeft()
	if used, _ := n.admission.totals(); used != 0 {
		t.Errorf("%d MiB still reserved", used)
	}
	if err := n.deleteCall(id, 1); err != nil {
		t.Errorf("second delete: %v", err)
	}
}

func TestCreateRefusesBadRequests(t *testing.T) {
	n := newPlace(t).start()
	for name, change := range map[string]func(*nodev1.CreateSandboxRequest){
		"id":           func(r *nodev1.CreateSandboxRequest) { r.SandboxId = "../x" },
		"generation":   func(r *nodev1.CreateSandboxRequest) { r.Generation = 0 },
		"digest":       func(r *nodev1.CreateSandboxRequest) { r.TemplateDigest = "sha256:../../x" },
		"no resources": func(r *nodev1.CreateSandboxRequest) { r.Resources = nil },
		"vcpu": func(r *nodev1.CreateSandboxRequest) {
			r.Resources = &nodev1.Resources{Vcpu: 65, MemoryMib: 128, DiskMib: 256}
		},
		"memory": func(r *nodev1.CreateSandboxRequest) {
			r.Resources = &nodev1.Resources{Vcpu: 1, MemoryMib: 63, DiskMib: 256}
		},
		"disk": func(r *nodev1.CreateSandboxRequest) {
			r.Resources = &nodev1.Resources{Vcpu: 1, MemoryMib: 128, DiskMib: 63}
		},
	} {
		req := request(sandbox.NewID(), 1)
		change(req)
		if _, err := n.create(req); connect.CodeOf(err) != connect.CodeInvalidArgument {
			t.Errorf("%s: %v", name, err)
		}
	}
	req := request(sandbox.NewID(), 1)
	req.TemplateDigest = "sha256:" + "00" + testDigest[9:]
	_, err := n.create(req)
	wantCode(t, err, connect.CodeNotFound)
	wantCode(t, n.deleteCall("nonsense", 1), connect.CodeInvalidArgument)
}

func TestGenerations(t *testing.T) {
	p := newPlace(t)
	n := p.start()
	id := sandbox.NewID()
	if _, err := n.create(request(id, 5)); err != nil {
		t.Fatal(err)
	}
	if st, err := n.create(request(id, 5)); err != nil || st.Generation != 5 {
		t.Fatalf("repeat: %v, %v", st, err)
	}
	for _, generation := range []uint64{4, 6} {
		_, err := n.create(request(id, generation))
		wantCode(t, err, connect.CodeFailedPrecondition)
	}
	wantCode(t, n.deleteCall(id, 4), connect.CodeFailedPrecondition)
	if err := n.deleteCall(id, 5); err != nil {
		t.Fatal(err)
	}
	_, err := n.create(request(id, 5))
	wantCode(t, err, connect.CodeFailedPrecondition)
	// A delete that overtakes its create.
	other := sandbox.NewID()
	if err := n.deleteCall(other, 3); err != nil {
		t.Fatal(err)
	}
	n.stop()
	n = p.start() // tombstones survive
	for _, c := range []struct {
		id         sandbox.ID
		generation uint64
		ok         bool
	}{{id, 5, false}, {other, 3, false}, {id, 6, true}, {other, 4, true}} {
		_, err := n.create(request(c.id, c.generation))
		if (err == nil) != c.ok {
			t.Errorf("generation %d after restart: %v", c.generation, err)
		}
	}
}

func TestConcurrentCreatesJoin(t *testing.T) {
	n := newPlace(t).start()
	id := sandbox.NewID()
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			if st, err := n.create(request(id, 1)); err != nil || st.State != nodev1.SandboxState_SANDBOX_STATE_RUNNING {
				t.Errorf("%v, %v", st, err)
			}
		})
	}
	wg.Wait()
	ids, err := n.shims.List()
	if err != nil || len(ids) != 1 {
		t.Fatalf("shims %v, %v", ids, err)
	}
}

func TestCreateSurvivesItsCaller(t *testing.T) {
	p := newPlace(t)
	p.fakes.baseGate = make(chan struct{})
	n := p.start()
	id := sandbox.NewID()
	ctx, cancel := context.WithCancel(t.Context())
	stream, err := n.client.CreateSandbox(ctx, connect.NewRequest(request(id, 1)))
	if err != nil {
		t.Fatal(err)
	}
	if !stream.Receive() || stream.Msg().GetProgress().GetPhase() == "" {
		t.Fatalf("no progress while the template is built: %v, %v", stream.Msg(), stream.Err())
	}
	cancel()
	_ = stream.Close()
	close(p.fakes.baseGate)
	n.waitState(id, nodev1.SandboxState_SANDBOX_STATE_RUNNING)
}

func TestBindFailureLeavesNothing(t *testing.T) {
	for _, mode := range []string{shimtest.BindError, shimtest.BindDie, shimtest.BindHang} {
		t.Run(mode, func(t *testing.T) {
			p := newPlace(t)
			n := p.start(func(c *Config) { c.BindTimeout = time.Second })
			_, err := n.create(request(sandbox.NewID(), 1, shimtest.BindEnv, mode))
			wantCode(t, err, connect.CodeUnavailable)
			p.nothingLeft()
			if len(n.statuses()) != 0 {
				t.Errorf("still listed: %v", n.statuses())
			}
			if used, _ := n.admission.totals(); used != 0 {
				t.Errorf("%d MiB still reserved", used)
			}
		})
	}
}

func TestDeleteCancelsCreate(t *testing.T) {
	p := newPlace(t)
	n := p.start()
	n.waitReady()
	id := sandbox.NewID()
	result := make(chan error, 1)
	go func() {
		_, err := n.create(request(id, 1, shimtest.BindEnv, shimtest.BindHang))
		result <- err
	}()
	eventually(t, "shim folder", func() bool { ids, _ := n.shims.List(); return len(ids) == 1 && n.status(id) != nil })
	if err := n.deleteCall(id, 1); err != nil {
		t.Fatal(err)
	}
	if err := <-result; err == nil {
		t.Error("a create that was cancelled succeeded")
	}
	p.nothingLeft()
	_, err := n.create(request(id, 1))
	wantCode(t, err, connect.CodeFailedPrecondition)
}

// TestDeleteMatrix deletes sandboxes whose processes are in every kind of trouble.
func TestDeleteMatrix(t *testing.T) {
	for name, harm := range map[string]func(shim, vmm int) error{
		"running":      func(int, int) error { return nil },
		"vmm stopped":  func(_, vmm int) error { return unix.Kill(vmm, unix.SIGSTOP) },
		"shim stopped": func(shim, _ int) error { return unix.Kill(shim, unix.SIGSTOP) },
		"both stopped": func(shim, vmm int) error {
			return errors.Join(unix.Kill(vmm, unix.SIGSTOP), unix.Kill(shim, unix.SIGSTOP))
		},
		"vmm killed":  func(_, vmm int) error { return unix.Kill(vmm, unix.SIGKILL) },
		"shim killed": func(shim, _ int) error { return unix.Kill(shim, unix.SIGKILL) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := newPlace(t)
			n := p.start()
			id := n.mustCreate()
			other := n.mustCreate()
			shim, vmm := n.pids(id)
			if err := harm(shim, vmm); err != nil {
				t.Fatal(err)
			}
			if err := n.deleteCall(id, 1); err != nil {
				t.Fatal(err)
			}
			if !dead(shim) || !dead(vmm) {
				t.Error("processes left")
			}
			if st := n.status(other); st.State != nodev1.SandboxState_SANDBOX_STATE_RUNNING {
				t.Errorf("the other sandbox: %v", st)
			}
			if err := n.deleteCall(other, 1); err != nil {
				t.Fatal(err)
			}
			p.nothingLeft()
		})
	}
}

func TestConcurrentDeletesJoin(t *testing.T) {
	p := newPlace(t)
	n := p.start()
	id := n.mustCreate()
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			if err := n.deleteCall(id, 1); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	p.nothingLeft()
}

func TestWatchTellsFailures(t *testing.T) {
	n := newPlace(t).start()
	stream, err := n.client.WatchSandboxes(t.Context(), connect.NewRequest(&nodev1.WatchSandboxesRequest{}))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = stream.Close() }()
	next := func() *nodev1.SandboxStatus {
		t.Helper()
		if !stream.Receive() {
			t.Fatalf("watch ended: %v", stream.Err())
		}
		return stream.Msg().Sandbox
	}
	if st := next(); st != nil {
		t.Fatalf("want the end of an empty set, got %v", st)
	}
	until := func(id sandbox.ID, want nodev1.SandboxState) *nodev1.SandboxStatus {
		t.Helper()
		for {
			if st := next(); st.GetSandboxId() == string(id) && st.State == want {
				return st
			}
		}
	}
	for name, c := range map[string]struct {
		kill   func(shim, vmm int) int
		reason string
	}{
		"vmm":  {func(_, vmm int) int { return vmm }, "vmm_exited"},
		"shim": {func(shim, _ int) int { return shim }, "host_lost"},
	} {
		id := n.mustCreate()
		until(id, nodev1.SandboxState_SANDBOX_STATE_RUNNING)
		before, _ := n.admission.totals()
		if err := unix.Kill(c.kill(n.pids(id)), unix.SIGKILL); err != nil {
			t.Fatal(err)
		}
		if st := until(id, nodev1.SandboxState_SANDBOX_STATE_FAILED); st.Reason != c.reason {
			t.Errorf("%s: reason %q want %q", name, st.Reason, c.reason)
		}
		eventually(t, "memory released", func() bool { used, _ := n.admission.totals(); return used < before })
		if err := n.deleteCall(id, 1); err != nil {
			t.Fatal(err)
		}
		until(id, nodev1.SandboxState_SANDBOX_STATE_GONE)
	}
}

func TestStoppedShimBlocksNoOther(t *testing.T) {
	n := newPlace(t).start()
	sick := n.mustCreate()
	shim, _ := n.pids(sick)
	if err := unix.Kill(shim, unix.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Kill(shim, unix.SIGCONT) }()
	id := n.mustCreate()
	if err := n.deleteCall(id, 1); err != nil {
		t.Fatal(err)
	}
	if _, err := n.client.ListSandboxes(t.Context(), connect.NewRequest(&nodev1.ListSandboxesRequest{})); err != nil {
		t.Fatal(err)
	}
}
