package agent_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/space-sandbox/space/internal/agent"
	agentv1 "github.com/space-sandbox/space/internal/gen/space/agent/v1"
	"github.com/space-sandbox/space/internal/gen/space/agent/v1/agentv1connect"
	"google.golang.org/protobuf/types/known/timestamppb"
)

const (
	firstToken  = "first"
	secondToken = "second"
)

// fakeSystem records what the agent does to the guest, and fails where it is told to.
type fakeSystem struct {
	mu    sync.Mutex
	calls []string
	fail  string
	probe func(step string)
}

func (f *fakeSystem) do(step string, arg any) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.calls = append(f.calls, fmt.Sprintf("%s %v", step, arg))
	if f.probe != nil {
		f.probe(step)
	}
	if step == f.fail {
		return errors.New("told to fail")
	}
	return nil
}

func (f *fakeSystem) SetClock(t time.Time) error   { return f.do("clock", t.Unix()) }
func (f *fakeSystem) Reseed(b []byte) error        { return f.do("reseed", len(b)) }
func (f *fakeSystem) SetMachineID(id string) error { return f.do("machine-id", len(id)) }
func (f *fakeSystem) SetHostname(n string) error   { return f.do("hostname", n) }
func (f *fakeSystem) SetCABundle(b []byte) error   { return f.do("ca", string(b)) }
func (f *fakeSystem) SetGeneration(n uint64) error { return f.do("generation", n) }
func (f *fakeSystem) Sync() error                  { return f.do("sync", "") }
func (f *fakeSystem) Kernel() string               { return "6.1" }
func (f *fakeSystem) Clocksource() string          { return "tsc" }
func (f *fakeSystem) Usage() (agent.Usage, error) {
	return agent.Usage{MemoryTotal: 1}, f.do("usage", "")
}
func (f *fakeSystem) taken() []string { f.mu.Lock(); defer f.mu.Unlock(); return f.calls }

// host is an agent that runs on this machine.
type host struct {
	t      *testing.T
	sys    *fakeSystem
	cgroup string
	url    string
	token  string
	agent  agentv1connect.AgentServiceClient
	procs  agentv1connect.ProcessServiceClient
	files  agentv1connect.FileServiceClient
}

// cgroupRoot makes a cgroup2 folder for one test.
func cgroupRoot(t *testing.T) string {
	t.Helper()
	for _, root := range []string{"/sys/fs/cgroup/unified", "/sys/fs/cgroup"} {
		if _, err := os.Stat(filepath.Join(root, "cgroup.procs")); err != nil {
			continue
		}
		dir, err := os.MkdirTemp(root, "space-agent-test-")
		if err != nil {
			t.Fatalf("these tests make cgroups and need root: %v", err)
		}
		t.Cleanup(func() {
			if err := os.Remove(dir); err != nil {
				t.Error(err)
			}
		})
		return dir
	}
	t.Fatal("no cgroup2 hierarchy")
	return ""
}

// bearer adds the current token to every request.
type bearer struct{ h *host }

func (b bearer) RoundTrip(r *http.Request) (*http.Response, error) {
	r.Header.Set("Authorization", "Bearer "+b.h.token)
	return http.DefaultTransport.RoundTrip(r)
}

// newFrozenHost starts an agent that was not resumed.
func newFrozenHost(t *testing.T) *host {
	t.Helper()
	h := &host{t: t, sys: &fakeSystem{}, cgroup: cgroupRoot(t), token: firstToken}
	s, err := agent.New(agent.Config{Token: firstToken, Root: "/", CgroupRoot: h.cgroup, DefaultUser: "root", System: h.sys})
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan error, 1)
	go func() { served <- s.Serve(l) }()
	t.Cleanup(func() {
		if err := s.Close(context.Background()); err != nil {
			t.Error(err)
		}
		if err := <-served; err != nil {
			t.Error(err)
		}
	})
	h.url = "http://" + l.Addr().String()
	c := &http.Client{Transport: bearer{h}}
	h.agent = agentv1connect.NewAgentServiceClient(c, h.url)
	h.procs = agentv1connect.NewProcessServiceClient(c, h.url)
	h.files = agentv1connect.NewFileServiceClient(c, h.url)
	return h
}

func resumeRequest(generation uint64) *agentv1.ResumeRequest {
	return &agentv1.ResumeRequest{Generation: generation, WallClock: timestamppb.New(time.Unix(1234, 0)),
		Entropy: make([]byte, 64), Hostname: "box", ControlToken: secondToken, Identity: "i1",
		Env: map[string]string{"GUEST": "yes", "BOTH": "guest"}, CaBundle: []byte("pem")}
}

// newHost starts an agent that runs processes.
func newHost(t *testing.T) *host {
	t.Helper()
	h := newFrozenHost(t)
	if _, err := h.agent.Resume(t.Context(), connect.NewRequest(resumeRequest(1))); err != nil {
		t.Fatal(err)
	}
	h.token = secondToken
	return h
}

// result is what a process did.
type result struct {
	pid    int32
	out    map[agentv1.Stream]string
	exited *agentv1.Exited
	seq    uint64
}

func argv(args ...string) [][]byte {
	out := make([][]byte, len(args))
	for i, a := range args {
		out[i] = []byte(a)
	}
	return out
}

func sh(script string) *agentv1.ProcessSpec {
	return &agentv1.ProcessSpec{Argv: argv("sh", "-c", script)}
}

// run starts a process and reads it to its end, acknowledging as it goes.
func (h *host) run(id string, spec *agentv1.ProcessSpec) (*result, error) {
	ctx, cancel := context.WithTimeout(h.t.Context(), 30*time.Second)
	defer cancel()
	s, err := h.procs.Run(ctx, connect.NewRequest(&agentv1.RunRequest{ProcessId: id, Spec: spec}))
	if err != nil {
		return nil, err
	}
	defer func() { _ = s.Close() }()
	r := &result{out: map[agentv1.Stream]string{}}
	for s.Receive() {
		f := s.Msg()
		if f.GetSeq() != r.seq+1 {
			h.t.Errorf("frame %d after %d", f.GetSeq(), r.seq)
		}
		r.seq = f.GetSeq()
		switch k := f.GetKind().(type) {
		case *agentv1.ProcessFrame_Started:
			r.pid = k.Started.GetOsPid()
		case *agentv1.ProcessFrame_Output:
			r.out[k.Output.GetStream()] += string(k.Output.GetData())
			if n := len(k.Output.GetData()); n < 1 || n > 32768 {
				h.t.Errorf("frame of %d bytes", n)
			}
		case *agentv1.ProcessFrame_Exited:
			r.exited = k.Exited
		}
		h.ack(id, r.seq)
	}
	return r, s.Err()
}

func (h *host) ack(id string, seq uint64) {
	h.t.Helper()
	_, err := h.procs.Ack(h.t.Context(), connect.NewRequest(&agentv1.AckRequest{
		Acks: []*agentv1.ProcessAck{{ProcessId: id, Seq: seq}}}))
	if err != nil {
		h.t.Error(err)
	}
}

func (h *host) mustRun(id string, spec *agentv1.ProcessSpec) *result {
	h.t.Helper()
	r, err := h.run(id, spec)
	if err != nil || r.exited == nil {
		h.t.Fatalf("%s: %+v %v", id, r, err)
	}
	return r
}

// eventually waits for a condition.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	deadline := time.Now().Add(20 * time.Second)
	for tick := time.NewTicker(5 * time.Millisecond); !ok(); <-tick.C {
		if time.Now().After(deadline) {
			t.Fatalf("never: %s", what)
		}
	}
}

// reasonOf returns the detail of an error.
func reasonOf(err error) (agentv1.FileErrorReason, string) {
	var ce *connect.Error
	if !errors.As(err, &ce) {
		return 0, ""
	}
	for _, d := range ce.Details() {
		if v, err := d.Value(); err == nil {
			if fe, ok := v.(*agentv1.FileError); ok {
				return fe.GetReason(), fe.GetField()
			}
		}
	}
	return 0, ""
}
