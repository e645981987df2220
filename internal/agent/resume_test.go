package agent_test

import (
	"context"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	agentv1 "github.com/space-sandbox/space/internal/gen/space/agent/v1"
)

func TestResumeOrder(t *testing.T) {
	h := newFrozenHost(t)
	r, err := h.agent.Resume(t.Context(), connect.NewRequest(resumeRequest(7)))
	if err != nil {
		t.Fatal(err)
	}
	want := []string{"clock 1234", "reseed 64", "machine-id 32", "hostname box", "ca pem", "generation 7"}
	if got := h.sys.taken(); !slices.Equal(got, want) {
		t.Errorf("steps %q, want %q", got, want)
	}
	if r.Msg.GetClocksource() != "tsc" || len(r.Msg.GetMachineId()) != 32 {
		t.Errorf("answer %v", r.Msg)
	}
	if _, err := h.agent.Ping(t.Context(), connect.NewRequest(&agentv1.PingRequest{})); connect.CodeOf(err) != connect.CodeUnauthenticated {
		t.Errorf("the old token: %v", err)
	}
	h.token = secondToken
	p, err := h.agent.Ping(t.Context(), connect.NewRequest(&agentv1.PingRequest{}))
	if err != nil || p.Msg.GetGeneration() != 7 {
		t.Errorf("ping: %v %v", p, err)
	}
	for _, g := range []uint64{0, 6, 7} {
		_, err := h.agent.Resume(t.Context(), connect.NewRequest(resumeRequest(g)))
		if connect.CodeOf(err) != connect.CodeFailedPrecondition {
			t.Errorf("generation %d: %v", g, err)
		}
	}
}

// TestResumeFails checks that each step that fails leaves the guest frozen and the old token valid.
func TestResumeFails(t *testing.T) {
	for _, step := range []string{"clock", "reseed", "machine-id", "hostname", "ca", "generation"} {
		t.Run(step, func(t *testing.T) {
			h := newFrozenHost(t)
			h.sys.fail = step
			if _, err := h.agent.Resume(t.Context(), connect.NewRequest(resumeRequest(1))); err == nil {
				t.Fatal("no error")
			}
			calls := h.sys.taken()
			if last := calls[len(calls)-1]; !strings.HasPrefix(last, step+" ") {
				t.Errorf("it went on: %q", calls)
			}
			p, err := h.agent.Ping(t.Context(), connect.NewRequest(&agentv1.PingRequest{}))
			if err != nil || p.Msg.GetGeneration() != 0 {
				t.Errorf("ping with the old token: %v %v", p, err)
			}
			if _, err := h.run("p1", sh("true")); connect.CodeOf(err) != connect.CodeFailedPrecondition {
				t.Errorf("run: %v", err)
			}
		})
	}
}

// TestRehearsal checks that nothing of a rehearsal is seen afterwards but that it happened.
func TestRehearsal(t *testing.T) {
	h := newFrozenHost(t)
	for range 2 {
		m := resumeRequest(2)
		m.Rehearsal = true
		if _, err := h.agent.Resume(t.Context(), connect.NewRequest(m)); err != nil {
			t.Fatal(err)
		}
	}
	once := []string{"clock 1234", "reseed 64", "machine-id 32", "hostname box"}
	if got := h.sys.taken(); !slices.Equal(got, append(once, once...)) {
		t.Errorf("steps %q", got)
	}
	if _, err := h.run("p1", sh("true")); connect.CodeOf(err) != connect.CodeFailedPrecondition {
		t.Errorf("run: %v", err)
	}
	p, err := h.agent.Ping(t.Context(), connect.NewRequest(&agentv1.PingRequest{}))
	if err != nil || p.Msg.GetGeneration() != 0 {
		t.Errorf("ping with the old token: %v %v", p, err)
	}
	if _, err := h.agent.Resume(t.Context(), connect.NewRequest(resumeRequest(2))); err != nil {
		t.Fatal(err)
	}
	h.token = secondToken
	if r := h.mustRun("p1", sh("echo $GUEST")); r.out[agentv1.Stream_STREAM_STDOUT] != "yes\n" {
		t.Errorf("after the true one: %+v", r)
	}
	m := resumeRequest(2)
	m.Rehearsal = true
	if _, err := h.agent.Resume(t.Context(), connect.NewRequest(m)); connect.CodeOf(err) != connect.CodeFailedPrecondition {
		t.Errorf("a rehearsal of what has happened: %v", err)
	}
}

// TestRehearsalKeepsProcessesFrozen checks that a rehearsal thaws no process that was frozen with the template.
func TestRehearsalKeepsProcessesFrozen(t *testing.T) {
	h := newHost(t)
	s, err := h.procs.Run(t.Context(), connect.NewRequest(&agentv1.RunRequest{ProcessId: "busy", Spec: sh("sleep 0.3; echo ran; sleep 60")}))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = s.Close() }()
	s.Receive()
	if _, err := h.agent.Freeze(t.Context(), connect.NewRequest(&agentv1.FreezeRequest{})); err != nil {
		t.Fatal(err)
	}
	m := resumeRequest(2)
	m.Rehearsal = true
	if _, err := h.agent.Resume(t.Context(), connect.NewRequest(m)); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 600*time.Millisecond)
	defer cancel()
	f, err := h.procs.Follow(ctx, connect.NewRequest(&agentv1.FollowRequest{ProcessId: "busy", AfterSeq: 1}))
	if err == nil {
		defer func() { _ = f.Close() }()
		if f.Receive() {
			t.Errorf("it went on: %v", f.Msg())
		}
	}
}

func TestResumeRefusesBadRequests(t *testing.T) {
	h := newFrozenHost(t)
	for name, spoil := range map[string]func(*agentv1.ResumeRequest){
		"token":    func(m *agentv1.ResumeRequest) { m.ControlToken = "" },
		"clock":    func(m *agentv1.ResumeRequest) { m.WallClock = nil },
		"entropy":  func(m *agentv1.ResumeRequest) { m.Entropy = m.Entropy[:63] },
		"identity": func(m *agentv1.ResumeRequest) { m.Identity = "" },
		"hostname": func(m *agentv1.ResumeRequest) { m.Hostname = "a\nb" },
		"dash":     func(m *agentv1.ResumeRequest) { m.Hostname = "-a" },
		"env":      func(m *agentv1.ResumeRequest) { m.Env = map[string]string{"A=B": ""} },
	} {
		m := resumeRequest(1)
		spoil(m)
		if _, err := h.agent.Resume(t.Context(), connect.NewRequest(m)); connect.CodeOf(err) != connect.CodeInvalidArgument {
			t.Errorf("%s: %v", name, err)
		}
	}
	if calls := h.sys.taken(); len(calls) != 0 {
		t.Errorf("something was done: %q", calls)
	}
}

func TestFreeze(t *testing.T) {
	h := newHost(t)
	s, err := h.procs.Run(t.Context(), connect.NewRequest(&agentv1.RunRequest{ProcessId: "busy",
		Spec: sh("while :; do :; done")}))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = s.Close() }()
	s.Receive()
	for range 2 {
		f, err := h.agent.Freeze(t.Context(), connect.NewRequest(&agentv1.FreezeRequest{}))
		if err != nil || f.Msg.GetProcesses() != 1 {
			t.Fatalf("freeze: %v %v", f, err)
		}
	}
	if _, err := h.run("p2", sh("true")); connect.CodeOf(err) != connect.CodeFailedPrecondition {
		t.Errorf("run while frozen: %v", err)
	}
	if _, err := h.agent.Resume(t.Context(), connect.NewRequest(resumeRequest(2))); err != nil {
		t.Fatal(err)
	}
	if r := h.mustRun("p2", sh("echo $GUEST")); r.out[agentv1.Stream_STREAM_STDOUT] != "yes\n" {
		t.Errorf("after thaw: %+v", r)
	}
}

func TestAuthorization(t *testing.T) {
	h := newFrozenHost(t)
	for path, want := range map[string]int{"/": 404, "/space.agent.v1.Other/Ping": 404, "/space.agent.v1.AgentService/Nope": 404} {
		r, err := (&http.Client{Transport: bearer{h}}).Get(h.url + path)
		if err != nil {
			t.Fatal(err)
		}
		r.Body.Close()
		if r.StatusCode != want {
			t.Errorf("%s: %d", path, r.StatusCode)
		}
	}
	for _, auth := range []string{"", "Bearer", "Bearer ", "first", "Basic first", "Bearer firs", "Bearer firstx"} {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, h.url+"/", nil)
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Authorization", auth)
		r, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		r.Body.Close()
		if r.StatusCode != http.StatusUnauthorized {
			t.Errorf("%q: %d", auth, r.StatusCode)
		}
	}
}
