package control

import (
	"context"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	nodev1 "github.com/space-sandbox/space/internal/gen/space/node/v1"
	"github.com/space-sandbox/space/internal/sandbox"
	"github.com/space-sandbox/space/internal/store"
)

func status(id sandbox.ID, state nodev1.SandboxState) *nodev1.SandboxStatus {
	return &nodev1.SandboxStatus{SandboxId: string(id), Generation: 1, State: state}
}

func TestNodeReportsFailure(t *testing.T) {
	for name, test := range map[string]struct {
		state  nodev1.SandboxState
		reason string
		want   string
	}{
		"with a reason":    {nodev1.SandboxState_SANDBOX_STATE_FAILED, "vmm_exited", "vmm_exited"},
		"without a reason": {nodev1.SandboxState_SANDBOX_STATE_FAILED, "", reasonHostLost},
		"gone":             {nodev1.SandboxState_SANDBOX_STATE_GONE, "", reasonHostLost},
	} {
		t.Run(name, func(t *testing.T) {
			e := newEnv(t)
			s := e.running()
			st := status(s.ID, test.state)
			st.Reason = test.reason
			e.node.put(st)
			if got := e.waitState(s.ID, sandbox.StateFailed); got.StateReason != test.want || got.Version <= s.Version {
				t.Errorf("sandbox %+v", got)
			}
		})
	}
}

func TestLostWhileTheServerWasDown(t *testing.T) {
	e := newEnv(t)
	kept, lost, failed, other := e.running(), e.running(), e.running(), e.running()
	e.stop()
	e.node.put(status(lost.ID, nodev1.SandboxState_SANDBOX_STATE_GONE))
	e.node.put(status(failed.ID, nodev1.SandboxState_SANDBOX_STATE_FAILED))
	stale := status(other.ID, nodev1.SandboxState_SANDBOX_STATE_RUNNING)
	stale.Generation = 0
	e.node.put(stale)
	e.start()
	for _, s := range []*sandbox.Sandbox{lost, failed, other} {
		if got := e.waitState(s.ID, sandbox.StateFailed); got.StateReason != reasonHostLost {
			t.Errorf("sandbox %+v", got)
		}
	}
	if got := e.record(kept.ID); got.State != sandbox.StateRunning {
		t.Errorf("sandbox %+v", got)
	}
}

// TestFailedStaysFailed: a VM that comes up after its sandbox was given up is never served; it is taken away.
func TestFailedStaysFailed(t *testing.T) {
	e := newEnv(t)
	s := e.running()
	e.node.put(status(s.ID, nodev1.SandboxState_SANDBOX_STATE_GONE))
	e.waitState(s.ID, sandbox.StateFailed)
	e.node.put(status(s.ID, nodev1.SandboxState_SANDBOX_STATE_RUNNING))
	e.eventually("it is taken away", func() bool { return !e.node.has(s.ID) })
	if got := e.record(s.ID); got.State != sandbox.StateFailed {
		t.Errorf("sandbox %+v", got)
	}
	// One that is known as failed there keeps its journal until it is deleted.
	e.node.put(status(s.ID, nodev1.SandboxState_SANDBOX_STATE_FAILED))
	<-time.After(100 * time.Millisecond)
	if !e.node.has(s.ID) {
		t.Error("the journal of a failed sandbox was taken away")
	}
}

func TestRemainsAreSwept(t *testing.T) {
	e := newEnv(t)
	s := e.running()
	e.wait(e.delete(s.ID).Operation.ID)
	unknown := sandbox.NewID()
	e.node.put(status(s.ID, nodev1.SandboxState_SANDBOX_STATE_RUNNING))
	e.node.put(status(unknown, nodev1.SandboxState_SANDBOX_STATE_FAILED))
	e.eventually("both are gone", func() bool { return !e.node.has(s.ID) && !e.node.has(unknown) })
}

func TestTooManyUnknownAreLeftAlone(t *testing.T) {
	e := newEnv(t)
	mine := e.running()
	var foreign []sandbox.ID
	e.node.with(func() { // at once, as after a restored backup
		for range 4 {
			id := sandbox.NewID()
			foreign = append(foreign, id)
			e.node.sandboxes[string(id)] = status(id, nodev1.SandboxState_SANDBOX_STATE_RUNNING)
		}
	})
	e.eventually("not ready", func() bool { return sandbox.CodeOf(e.Ready(t.Context())) == sandbox.CodeServiceUnavailable })
	if _, n := e.node.counts(); n != 0 {
		t.Errorf("%d deletes", n)
	}
	if e.record(mine.ID).State != sandbox.StateRunning {
		t.Error("the known one was touched")
	}
	e.node.put(status(foreign[0], nodev1.SandboxState_SANDBOX_STATE_GONE))
	e.eventually("three are few enough", func() bool { return !e.node.has(foreign[1]) && !e.node.has(foreign[3]) })
	e.eventually("ready again", func() bool { return e.Ready(t.Context()) == nil })
}

func TestUnreachableNodeIsShown(t *testing.T) {
	e := newEnv(t)
	s := e.running()
	e.node.setDown(true)
	e.eventually("watch is down", func() bool {
		e.clock.add(time.Second)
		return e.record(s.ID).StateReason == reasonNodeUnreachable
	})
	if got := e.record(s.ID).State; got != sandbox.StateRunning {
		t.Errorf("it is %s", got)
	}
	e.node.setDown(false)
	e.eventually("reason is gone", func() bool { return e.record(s.ID).StateReason == "" })
}

func TestActivity(t *testing.T) {
	e := newEnv(t)
	s := e.running()
	version := s.Version
	e.clock.add(time.Hour)
	if _, err := e.Guest(t.Context(), e.admin, s.ID, sandbox.ScopeFilesRead, GuestUse{}); err != nil {
		t.Fatal(err)
	}
	if got, err := e.GetSandbox(t.Context(), e.admin, s.ID); err != nil || !got.LastActive.Equal(s.LastActive) {
		t.Errorf("reading is activity: %v, %v", got.LastActive, err)
	}
	if _, err := e.Guest(t.Context(), e.admin, s.ID, sandbox.ScopeFilesRead, GuestUse{Active: true}); err != nil {
		t.Fatal(err)
	}
	got, err := e.GetSandbox(t.Context(), e.admin, s.ID)
	if err != nil || got.LastActive.Sub(s.LastActive) < time.Hour {
		t.Errorf("last active %v, %v", got.LastActive, err)
	}
	e.eventually("it is written", func() bool { return e.record(s.ID).LastActive.Equal(got.LastActive) })
	if v := e.record(s.ID).Version; v != version {
		t.Errorf("activity changed the etag from %d to %d", version, v)
	}
	// What the node says counts too, but not its idea of the future.
	st := status(s.ID, nodev1.SandboxState_SANDBOX_STATE_RUNNING)
	st.LastActiveAt = timestamppb.New(e.clock.Now().Add(1000 * time.Hour))
	e.node.put(st)
	e.eventually("it is taken over", func() bool {
		got2, err := e.GetSandbox(t.Context(), e.admin, s.ID)
		return err == nil && got2.LastActive.After(got.LastActive)
	})
	if got, err := e.GetSandbox(t.Context(), e.admin, s.ID); err != nil || got.LastActive.After(e.clock.Now()) {
		t.Errorf("last active %v, %v", got.LastActive, err)
	}
}

func TestActivityOutlivesClose(t *testing.T) {
	e := newEnv(t)
	s := e.running()
	e.clock.add(time.Minute)
	if _, err := e.Guest(t.Context(), e.admin, s.ID, sandbox.ScopeFilesRead, GuestUse{Active: true}); err != nil {
		t.Fatal(err)
	}
	e.stop()
	if got := e.record(s.ID).LastActive; got.Sub(s.LastActive) < time.Minute {
		t.Errorf("last active %v", got)
	}
}

func TestActivityIsKeptWhileTheStoreIsDown(t *testing.T) {
	e := newEnv(t)
	s := e.running()
	e.stop()
	p, err := New(e.cfg)
	if err != nil {
		t.Fatal(err)
	}
	p.activity.touch(s.ID, e.clock.Now().Add(-time.Second), e.clock.Now())
	p.activity.touch(sandbox.NewID(), e.clock.Now(), e.clock.Now()) // purged meanwhile: no reason to fail
	e.st.setFail(func() error { return store.ErrUnavailable })
	if err := p.flushActivity(t.Context()); err == nil {
		t.Error("a failed write is hidden")
	}
	e.st.setFail(nil)
	before := e.record(s.ID).LastActive
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
	if got := e.record(s.ID).LastActive; got.Before(before) {
		t.Errorf("last active went from %v to %v", before, got)
	}
	if len(p.activity.last) != 0 {
		t.Error("it is written for ever")
	}
}

func TestReady(t *testing.T) {
	e := newEnv(t)
	if err := e.Ready(t.Context()); err != nil {
		t.Fatal(err)
	}
	for name, change := range map[string]func(){
		"node": func() { e.node.info.Ready, e.node.info.NotReadyReason = false, "says why" },
		"building": func() {
			e.node.templates[0].Progress = &nodev1.Progress{Phase: "says why"}
			e.node.templates[0].State = nodev1.TemplateState_TEMPLATE_STATE_BUILDING
		},
		"failed": func() {
			e.node.templates[0].Reason = "says why"
			e.node.templates[0].State = nodev1.TemplateState_TEMPLATE_STATE_FAILED
		},
	} {
		t.Run(name, func(t *testing.T) {
			e.node.with(change)
			err := e.Ready(t.Context())
			if got := (&env{t: t}).wantCode(err, sandbox.CodeServiceUnavailable); !strings.Contains(got.Message, "says why") {
				t.Errorf("error %v", err)
			}
			e.node.with(func() {
				e.node.info.Ready = true
				e.node.templates[0].State = nodev1.TemplateState_TEMPLATE_STATE_READY
			})
		})
	}
	e.node.with(func() { e.node.templates = nil })
	e.wantCode(e.Ready(t.Context()), sandbox.CodeServiceUnavailable)
}

func TestTemplates(t *testing.T) {
	e := newEnv(t)
	list, err := e.ListTemplates(t.Context(), e.admin)
	if err != nil || len(list) != 1 || list[0].Name != "base" {
		t.Errorf("%v, %v", list, err)
	}
	if got, err := e.GetTemplate(t.Context(), e.admin, "base:1"); err != nil || got.Digest != "sha256:aa" {
		t.Errorf("%v, %v", got, err)
	}
	_, err = e.GetTemplate(t.Context(), e.admin, "other")
	e.wantCode(err, sandbox.CodeNotFound)
	none := e.principal(sandbox.ScopeSandboxesRead)
	_, err = e.ListTemplates(t.Context(), none)
	e.wantCode(err, sandbox.CodeForbidden)
	_, err = e.GetTemplate(t.Context(), none, "base")
	e.wantCode(err, sandbox.CodeForbidden)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = e.ListTemplates(ctx, e.admin)
	e.wantCode(err, sandbox.CodeServiceUnavailable)
}
