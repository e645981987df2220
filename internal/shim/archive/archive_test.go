package archive

import (
	"bytes"
	"errors"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"connectrpc.com/connect"
	agentv1 "github.com/space-sandbox/space/internal/gen/space/agent/v1"
	nodev1 "github.com/space-sandbox/space/internal/gen/space/node/v1"
	"github.com/space-sandbox/space/internal/gen/space/node/v1/nodev1connect"
	"github.com/space-sandbox/space/internal/journal"
	"github.com/space-sandbox/space/internal/sandbox"
)

const stdout = agentv1.Stream_STREAM_STDOUT

// dead is the journal of a shim that has died: one process exited, one ran, one never started.
type dead struct {
	client                nodev1connect.SandboxServiceClient
	exited, running, idle string
}

func newDead(t *testing.T) dead {
	t.Helper()
	dir := t.TempDir()
	j, err := journal.Open(dir, journal.Options{})
	if err != nil {
		t.Fatal(err)
	}
	make := func(started, exited bool) string {
		id := string(sandbox.NewProcessID())
		p, err := j.Create(&nodev1.Process{ProcessId: id, OutputCapBytes: 64 << 10})
		if err == nil && started {
			err = p.AppendStarted(&nodev1.Started{OsPid: 1})
			for i := 0; err == nil && i < 40; i++ {
				err = p.AppendOutput(stdout, bytes.Repeat([]byte{byte(i)}, 4096))
			}
		}
		if err == nil && exited {
			err = p.AppendExited(&agentv1.Exited{Signal: "SIGKILL"})
		}
		if err != nil {
			t.Fatal(err)
		}
		return id
	}
	d := dead{exited: make(true, true), running: make(true, false), idle: make(false, false)}
	if err := j.Close(); err != nil {
		t.Fatal(err)
	}
	a, err := New(dir, "sandbox_failed")
	if err != nil {
		t.Fatal(err)
	}
	mux := http.NewServeMux()
	mux.Handle(nodev1connect.NewSandboxServiceHandler(a))
	srv := httptest.NewServer(mux)
	t.Cleanup(func() {
		srv.Close()
		if err := a.Close(); err != nil {
			t.Error(err)
		}
	})
	d.client = nodev1connect.NewSandboxServiceClient(srv.Client(), srv.URL)
	return d
}

func (d dead) last(t *testing.T, id string) (*nodev1.Event, int) {
	t.Helper()
	s, err := d.client.StreamEvents(t.Context(), connect.NewRequest(&nodev1.StreamEventsRequest{ProcessId: id, Start: true}))
	if err != nil {
		t.Fatal(err)
	}
	var ev *nodev1.Event
	n := 0
	for s.Receive() {
		ev = s.Msg()
		n++
	}
	if s.Err() != nil {
		t.Fatal(s.Err())
	}
	return ev, n
}

func TestStreamsEnd(t *testing.T) {
	d := newDead(t)
	if ev, _ := d.last(t, d.exited); ev.GetExited().GetExit().GetSignal() != "SIGKILL" {
		t.Errorf("exited: %v", ev)
	}
	if ev, n := d.last(t, d.running); ev.GetInterrupted().GetReason() != "sandbox_failed" || ev.GetInterrupted().GetRetryable() || n < 3 {
		t.Errorf("running: %v, %d events", ev, n)
	}
	if ev, n := d.last(t, d.idle); ev.GetInterrupted() == nil || n != 1 {
		t.Errorf("not started: %v, %d events", ev, n)
	}
}

func TestProcesses(t *testing.T) {
	d := newDead(t)
	list, err := d.client.ListProcesses(t.Context(), connect.NewRequest(&nodev1.ListProcessesRequest{Limit: 2}))
	if err != nil || len(list.Msg.GetProcesses()) != 2 || !list.Msg.GetMore() || list.Msg.GetProcesses()[0].GetProcessId() != d.exited {
		t.Fatalf("first page: %v, %v", list, err)
	}
	list, err = d.client.ListProcesses(t.Context(), connect.NewRequest(&nodev1.ListProcessesRequest{After: d.running}))
	if err != nil || len(list.Msg.GetProcesses()) != 1 || list.Msg.GetMore() || list.Msg.GetProcesses()[0].GetProcessId() != d.idle {
		t.Fatalf("last page: %v, %v", list, err)
	}
	start := time.Now()
	p, err := d.client.GetProcess(t.Context(), connect.NewRequest(&nodev1.GetProcessRequest{ProcessId: d.running, WaitMs: 60000}))
	if err != nil || p.Msg.GetProcess().GetState() != nodev1.ProcessState_PROCESS_STATE_RUNNING || time.Since(start) > 30*time.Second {
		t.Fatalf("waiting for a process that cannot exit: %v, %v", p, err)
	}
}

func TestErrors(t *testing.T) {
	d := newDead(t)
	for name, tc := range map[string]struct {
		err  error
		want connect.Code
	}{
		"bad ID":     {second(d.client.GetProcess(t.Context(), connect.NewRequest(&nodev1.GetProcessRequest{ProcessId: "../x"}))), connect.CodeInvalidArgument},
		"unknown ID": {second(d.client.GetProcess(t.Context(), connect.NewRequest(&nodev1.GetProcessRequest{ProcessId: string(sandbox.NewProcessID())}))), connect.CodeNotFound},
		"bad after":  {second(d.client.ListProcesses(t.Context(), connect.NewRequest(&nodev1.ListProcessesRequest{After: "x"}))), connect.CodeInvalidArgument},
		"create":     {second(d.client.CreateProcess(t.Context(), connect.NewRequest(&nodev1.CreateProcessRequest{}))), connect.CodeFailedPrecondition},
		"signal":     {second(d.client.Signal(t.Context(), connect.NewRequest(&nodev1.SignalRequest{}))), connect.CodeFailedPrecondition},
		"stdin":      {second(d.client.WriteStdin(t.Context(), connect.NewRequest(&nodev1.WriteStdinRequest{}))), connect.CodeFailedPrecondition},
		"resize":     {second(d.client.Resize(t.Context(), connect.NewRequest(&nodev1.ResizeRequest{}))), connect.CodeFailedPrecondition},
	} {
		if connect.CodeOf(tc.err) != tc.want {
			t.Errorf("%s: %v", name, tc.err)
		}
	}
}

func second[T any](_ T, err error) error { return err }

func TestReadOutput(t *testing.T) {
	d := newDead(t)
	read := func(from uint64, follow bool) ([]byte, error) {
		s, err := d.client.ReadOutput(t.Context(), connect.NewRequest(&nodev1.ReadOutputRequest{ProcessId: d.running, Stream: stdout, From: from, Follow: follow}))
		if err != nil {
			return nil, err
		}
		var out []byte
		for s.Receive() {
			if s.Msg().GetOffset() != from+uint64(len(out)) {
				t.Fatalf("bytes at %d", s.Msg().GetOffset())
			}
			out = append(out, s.Msg().GetData()...)
		}
		return out, s.Err()
	}
	for _, follow := range []bool{false, true} {
		out, err := read(40*4096-5000, follow)
		if err != nil || len(out) != 5000 || out[4999] != 39 {
			t.Fatalf("%d bytes, %v", len(out), err)
		}
	}
	_, err := read(0, false)
	var ce *connect.Error
	if !errors.As(err, &ce) || ce.Code() != connect.CodeOutOfRange || len(ce.Details()) != 1 {
		t.Fatalf("dropped bytes: %v", err)
	}
	v, err := ce.Details()[0].Value()
	if dropped, ok := v.(*nodev1.OutputDropped); err != nil || !ok || dropped.GetToOffset() == 0 {
		t.Fatalf("detail: %v, %v", v, err)
	}
	if _, err := read(40*4096+1, false); connect.CodeOf(err) != connect.CodeOutOfRange {
		t.Fatalf("past the end: %v", err)
	}
}

func TestInterruptedReasons(t *testing.T) {
	for reason, retry := range map[string]bool{
		"sandbox_failed": false, "sandbox_deleted": false, "sandbox_suspended": true, "sandbox_paused": true, "server_draining": true,
	} {
		if in := Interrupted(reason).GetInterrupted(); in.GetReason() != reason || in.GetRetryable() != retry || (in.GetRetryAfterS() > 0) != retry {
			t.Errorf("%s: %v", reason, in)
		}
	}
}
