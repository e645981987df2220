package agent_test

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"connectrpc.com/connect"
	agentv1 "github.com/space-sandbox/space/internal/gen/space/agent/v1"
)

const (
	stdout = agentv1.Stream_STREAM_STDOUT
	stderr = agentv1.Stream_STREAM_STDERR
	tty    = agentv1.Stream_STREAM_PTY
)

func TestExitCodes(t *testing.T) {
	h := newHost(t)
	var wg sync.WaitGroup
	limit := make(chan struct{}, 8)
	for code := range 256 {
		wg.Add(1)
		go func() {
			defer wg.Done()
			limit <- struct{}{}
			defer func() { <-limit }()
			r, err := h.run(fmt.Sprintf("p%d", code), sh(fmt.Sprintf("echo $$; exit %d", code)))
			if err != nil || r.exited == nil || r.exited.Code == nil || *r.exited.Code != int32(code) || r.exited.GetSignal() != "" {
				t.Errorf("%d: %+v %v", code, r, err)
				return
			}
			if got := strings.TrimSpace(r.out[stdout]); got != fmt.Sprint(r.pid) {
				t.Errorf("pid %s, started says %d", got, r.pid)
			}
		}()
	}
	wg.Wait()
	l, err := h.procs.List(t.Context(), connect.NewRequest(&agentv1.ListRequest{}))
	if err != nil || len(l.Msg.GetProcesses()) != 0 {
		t.Errorf("not forgotten: %v %v", l, err)
	}
	entries, err := os.ReadDir(filepath.Join(h.cgroup, "user"))
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if e.IsDir() {
			t.Errorf("cgroup %s is left", e.Name())
		}
	}
}

func TestSignalsEndProcesses(t *testing.T) {
	h := newHost(t)
	// Under nohup this program was started with SIGHUP ignored, which children inherit unless it is caught here.
	caught := make(chan os.Signal, 1)
	signal.Notify(caught, syscall.SIGHUP)
	defer signal.Stop(caught)
	for n, name := range map[int]string{1: "SIGHUP", 9: "SIGKILL", 15: "SIGTERM", 35: "SIGRTMIN+1"} {
		r := h.mustRun(fmt.Sprint("s", n), sh(fmt.Sprintf("kill -%d $$", n)))
		if r.exited.Code != nil || r.exited.GetSignal() != name {
			t.Errorf("signal %d: %v", n, r.exited)
		}
	}
}

func TestCannotExecute(t *testing.T) {
	h := newHost(t)
	dir := t.TempDir()
	plain, garbage := filepath.Join(dir, "plain"), filepath.Join(dir, "garbage")
	for name, mode := range map[string]os.FileMode{plain: 0o644, garbage: 0o755} {
		if err := os.WriteFile(name, []byte("\x01\x02"), mode); err != nil {
			t.Fatal(err)
		}
	}
	for i, c := range []struct {
		name string
		code int32
		text string
	}{
		{"no-such-command", 127, "not found"}, {"/no/such", 127, "No such file"}, {"./no", 127, "No such file"},
		{plain, 126, "Permission denied"}, {garbage, 126, "Exec format"}, {dir, 126, "Is a directory"}, {"", 127, "not found"},
	} {
		r := h.mustRun(fmt.Sprint("x", i), &agentv1.ProcessSpec{Argv: argv(c.name)})
		if r.pid != 0 || r.exited.GetCode() != c.code || !strings.Contains(r.out[stderr], c.text) {
			t.Errorf("%q: %+v", c.name, r)
		}
	}
}

func TestRunRefuses(t *testing.T) {
	h := newHost(t)
	for name, c := range map[string]struct {
		id     string
		spec   *agentv1.ProcessSpec
		code   connect.Code
		field  string
		reason agentv1.FileErrorReason
	}{
		"user": {"a", &agentv1.ProcessSpec{Argv: argv("true"), User: "nobody-here"}, connect.CodeInvalidArgument, "user",
			agentv1.FileErrorReason_FILE_ERROR_REASON_UNKNOWN_USER},
		"cwd": {"a", &agentv1.ProcessSpec{Argv: argv("true"), Cwd: []byte("/no/such")}, connect.CodeInvalidArgument, "cwd",
			agentv1.FileErrorReason_FILE_ERROR_REASON_NOT_FOUND},
		"cwd file": {"a", &agentv1.ProcessSpec{Argv: argv("true"), Cwd: []byte("/etc/passwd")}, connect.CodeInvalidArgument, "cwd",
			agentv1.FileErrorReason_FILE_ERROR_REASON_NOT_DIRECTORY},
		"cwd rights": {"a", &agentv1.ProcessSpec{Argv: argv("true"), Cwd: []byte("/root"), User: "12345"}, connect.CodeInvalidArgument,
			"cwd", agentv1.FileErrorReason_FILE_ERROR_REASON_PERMISSION},
		"id":    {"../a", sh("true"), connect.CodeInvalidArgument, "", 0},
		"no id": {"", sh("true"), connect.CodeInvalidArgument, "", 0},
		"argv":  {"a", &agentv1.ProcessSpec{}, connect.CodeInvalidArgument, "", 0},
		"nul":   {"a", &agentv1.ProcessSpec{Argv: argv("a\x00b")}, connect.CodeInvalidArgument, "", 0},
		"env":   {"a", &agentv1.ProcessSpec{Argv: argv("a"), Env: map[string]string{"": "x"}}, connect.CodeInvalidArgument, "", 0},
		"pty":   {"a", &agentv1.ProcessSpec{Argv: argv("a"), Pty: &agentv1.TerminalSize{Cols: 70000, Rows: 1}}, connect.CodeInvalidArgument, "", 0},
	} {
		_, err := h.run(c.id, c.spec)
		reason, field := reasonOf(err)
		if connect.CodeOf(err) != c.code || reason != c.reason || field != c.field {
			t.Errorf("%s: %v (%v, %s)", name, err, reason, field)
		}
	}
}

func TestUserAndEnvironment(t *testing.T) {
	h := newHost(t)
	spec := sh(`id -u; id -g; pwd; echo $HOME $USER $GUEST $BOTH $LANG; cat /proc/self/cgroup; cat /proc/self/oom_score_adj`)
	spec.User, spec.Cwd, spec.Env = "nobody", []byte("/tmp"), map[string]string{"BOTH": "own"}
	r := h.mustRun("u1", spec)
	out := r.out[stdout]
	for _, want := range []string{"65534\n65534\n/tmp\n", " nobody yes own C.UTF-8\n", "/user/u1\n"} {
		if !strings.Contains(out, want) {
			t.Errorf("%q is missing in %q (%q)", want, out, r.out[stderr])
		}
	}
	c, err := h.procs.Check(t.Context(), connect.NewRequest(&agentv1.CheckRequest{User: "nobody", Cwd: []byte("/tmp")}))
	if err != nil || c.Msg.GetUid() != 65534 || string(c.Msg.GetCwd()) != "/tmp" {
		t.Errorf("check: %v %v", c, err)
	}
}

// TestBackgroundChild checks that a child that holds the pipe neither delays the exit nor dies of it.
func TestBackgroundChild(t *testing.T) {
	h := newHost(t)
	done := filepath.Join(t.TempDir(), "done")
	for _, terminal := range []*agentv1.TerminalSize{nil, {Cols: 80, Rows: 24}} {
		began := time.Now()
		spec := sh(`trap "" HUP; (sleep 1; echo late; echo late; touch ` + done + `; sleep 1000) & echo out`)
		spec.Pty = terminal
		id := fmt.Sprint("bg", terminal != nil)
		r := h.mustRun(id, spec)
		if took := time.Since(began); took > 900*time.Millisecond || !strings.HasPrefix(r.out[stdout]+r.out[tty], "out") {
			t.Errorf("%v: %+v", took, r)
		}
		eventually(t, "the child went on", func() bool { _, err := os.Stat(done); return err == nil })
		if err := os.Remove(done); err != nil {
			t.Fatal(err)
		}
	}
}

func TestTimeoutKillsTheTree(t *testing.T) {
	h := newHost(t)
	spec := sh("setsid sleep 1000 & sleep 1000")
	spec.TimeoutMs = 200
	r := h.mustRun("t1", spec)
	if !r.exited.GetTimedOut() || r.exited.GetSignal() != "SIGKILL" {
		t.Errorf("%v", r.exited)
	}
	eventually(t, "the cgroup is gone", func() bool {
		_, err := os.Stat(filepath.Join(h.cgroup, "user", "t1"))
		if err == nil {
			// The orphan is init's on this machine: only a later process's end makes the agent look again.
			h.mustRun("look", sh("true"))
		}
		return err != nil
	})
}

// TestBackpressure checks that a full ring stops the process, and that nothing is lost.
func TestBackpressure(t *testing.T) {
	h := newHost(t)
	const total = 3 << 20
	ctx, cancel := context.WithCancel(t.Context())
	s, err := h.procs.Run(ctx, connect.NewRequest(&agentv1.RunRequest{ProcessId: "big",
		Spec: sh(fmt.Sprintf("head -c %d /dev/zero | tr '\\0' x", total))}))
	if err != nil {
		t.Fatal(err)
	}
	s.Receive()
	cancel()
	_ = s.Close()
	last := func() uint64 {
		l, err := h.procs.List(t.Context(), connect.NewRequest(&agentv1.ListRequest{}))
		if err != nil || len(l.Msg.GetProcesses()) != 1 || l.Msg.GetProcesses()[0].GetExited() {
			t.Fatalf("list: %v %v", l, err)
		}
		return l.Msg.GetProcesses()[0].GetLastSeq()
	}
	eventually(t, "the ring is full", func() bool {
		before := last()
		time.Sleep(50 * time.Millisecond) // nothing happens: there is no event to wait for
		return before > 16 && last() == before
	})
	f, err := h.procs.Follow(t.Context(), connect.NewRequest(&agentv1.FollowRequest{ProcessId: "big", AfterSeq: 1}))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	n, unacked := 0, 0
	for f.Receive() {
		d := f.Msg().GetOutput().GetData()
		n, unacked = n+len(d), unacked+len(d)
		if unacked > 512<<10 || f.Msg().GetExited() != nil {
			h.ack("big", f.Msg().GetSeq())
			unacked = 0
		}
		if !bytes.Equal(d, bytes.Repeat([]byte("x"), len(d))) {
			t.Fatal("other bytes")
		}
	}
	if f.Err() != nil || n != total {
		t.Errorf("%d of %d bytes, %v", n, total, f.Err())
	}
	if _, err := h.procs.Signal(t.Context(), connect.NewRequest(&agentv1.SignalRequest{ProcessId: "big", Signal: 9,
		Target: agentv1.SignalTarget_SIGNAL_TARGET_PROCESS})); connect.CodeOf(err) != connect.CodeNotFound {
		t.Errorf("forgotten: %v", err)
	}
}

func TestFollowAndAck(t *testing.T) {
	h := newHost(t)
	s, err := h.procs.Run(t.Context(), connect.NewRequest(&agentv1.RunRequest{ProcessId: "f", Spec: sh("echo a; exit 3")}))
	if err != nil {
		t.Fatal(err)
	}
	for s.Receive() {
	}
	_ = s.Close()
	if _, err := h.run("f", sh("true")); connect.CodeOf(err) != connect.CodeAlreadyExists {
		t.Errorf("again: %v", err)
	}
	for after, want := range map[uint64]int{0: 3, 1: 2, 2: 1, 3: 0, 99: 0} {
		f, err := h.procs.Follow(t.Context(), connect.NewRequest(&agentv1.FollowRequest{ProcessId: "f", AfterSeq: after}))
		if err != nil {
			t.Fatal(err)
		}
		n := 0
		for f.Receive() {
			n++
		}
		if n != want || f.Err() != nil {
			t.Errorf("after %d: %d frames, %v", after, n, f.Err())
		}
		_ = f.Close()
	}
	h.ack("f", 2)
	h.ack("f", 3)
	h.ack("f", 3)
	f, err := h.procs.Follow(t.Context(), connect.NewRequest(&agentv1.FollowRequest{ProcessId: "f"}))
	if err == nil && (f.Receive() || connect.CodeOf(f.Err()) != connect.CodeNotFound) {
		t.Errorf("forgotten: %v", f.Err())
	}
}

func (h *host) write(id string, offset uint64, data string, end bool) (*agentv1.WriteStdinResponse, error) {
	ctx, cancel := context.WithTimeout(h.t.Context(), time.Second)
	defer cancel()
	r, err := h.procs.WriteStdin(ctx, connect.NewRequest(&agentv1.WriteStdinRequest{ProcessId: id, Offset: offset, Data: []byte(data), Close: end}))
	if err != nil {
		return nil, err
	}
	return r.Msg, nil
}

func TestStdin(t *testing.T) {
	h := newHost(t)
	for _, terminal := range []*agentv1.TerminalSize{nil, {Cols: 80, Rows: 24}} {
		id := fmt.Sprint("in", terminal != nil)
		spec := sh("stty -echo 2>/dev/null; echo ready; cat")
		spec.Stdin, spec.Pty = true, terminal
		s, err := h.procs.Run(t.Context(), connect.NewRequest(&agentv1.RunRequest{ProcessId: id, Spec: spec}))
		if err != nil {
			t.Fatal(err)
		}
		out := ""
		for !strings.Contains(out, "ready") && s.Receive() {
			out += string(s.Msg().GetOutput().GetData())
		}
		for _, c := range []struct {
			offset uint64
			data   string
			end    bool
			taken  uint64
		}{{0, "abc\n", false, 4}, {0, "abc\n", false, 4}, {2, "c\nde\n", false, 7}, {7, "f\n", true, 9}, {7, "f\n", true, 9}} {
			r, err := h.write(id, c.offset, c.data, c.end)
			if err != nil || r.GetOffset() != c.taken || r.GetClosed() != c.end {
				t.Errorf("%s %+v: %v %v", id, c, r, err)
			}
		}
		if _, err := h.write(id, 10, "x", false); connect.CodeOf(err) != connect.CodeOutOfRange {
			t.Errorf("gap: %v", err)
		}
		if _, err := h.write(id, 9, "x", false); connect.CodeOf(err) != connect.CodeFailedPrecondition {
			t.Errorf("after the end: %v", err)
		}
		for s.Receive() {
			out += string(s.Msg().GetOutput().GetData())
		}
		_ = s.Close()
		if got := strings.ReplaceAll(out, "\r", ""); !strings.HasSuffix(got, "ready\nabc\nde\nf\n") {
			t.Errorf("%s read %q", id, got)
		}
	}
}

// TestStdinFull checks the answer when nobody reads the pipe, and after the reader is gone.
func TestStdinFull(t *testing.T) {
	h := newHost(t)
	spec := sh("exec sleep 1000")
	spec.Stdin = true
	s, err := h.procs.Run(t.Context(), connect.NewRequest(&agentv1.RunRequest{ProcessId: "full", Spec: spec}))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = s.Close() }()
	s.Receive()
	big := strings.Repeat("x", 200<<10)
	r, err := h.write("full", 0, big, false)
	if err != nil || r.GetOffset() == 0 || r.GetOffset() >= uint64(len(big)) {
		t.Fatalf("%v %v", r, err)
	}
	if _, err := h.procs.Signal(t.Context(), connect.NewRequest(&agentv1.SignalRequest{ProcessId: "full", Signal: 9,
		Target: agentv1.SignalTarget_SIGNAL_TARGET_TREE})); err != nil {
		t.Fatal(err)
	}
	for s.Receive() {
	}
	if _, err := h.write("full", r.GetOffset(), "y", false); connect.CodeOf(err) != connect.CodeFailedPrecondition {
		t.Errorf("after the exit: %v", err)
	}
}

func TestTerminal(t *testing.T) {
	h := newHost(t)
	spec := sh(`stty size; trap 'stty size; exit 5' WINCH; echo ready; while :; do sleep 0.05; done`)
	spec.Pty, spec.User = &agentv1.TerminalSize{Cols: 100, Rows: 30}, "nobody"
	spec.Cwd = []byte("/")
	s, err := h.procs.Run(t.Context(), connect.NewRequest(&agentv1.RunRequest{ProcessId: "tty", Spec: spec}))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = s.Close() }()
	out, code := "", int32(-1)
	for s.Receive() {
		before := strings.Contains(out, "ready")
		out += string(s.Msg().GetOutput().GetData())
		if e := s.Msg().GetExited(); e != nil {
			code = e.GetCode()
		}
		if !before && strings.Contains(out, "ready") {
			if _, err := h.procs.Resize(t.Context(), connect.NewRequest(&agentv1.ResizeRequest{ProcessId: "tty",
				Size: &agentv1.TerminalSize{Cols: 120, Rows: 40}})); err != nil {
				t.Fatal(err)
			}
		}
	}
	if code != 5 || !strings.Contains(out, "30 100") || !strings.Contains(out, "40 120") {
		t.Errorf("code %d, %q", code, out)
	}
}

func TestSignalTargets(t *testing.T) {
	h := newHost(t)
	for i, target := range []agentv1.SignalTarget{agentv1.SignalTarget_SIGNAL_TARGET_PROCESS,
		agentv1.SignalTarget_SIGNAL_TARGET_GROUP, agentv1.SignalTarget_SIGNAL_TARGET_TREE} {
		id := fmt.Sprint("sig", i)
		s, err := h.procs.Run(t.Context(), connect.NewRequest(&agentv1.RunRequest{ProcessId: id, Spec: sh("exec sleep 1000")}))
		if err != nil {
			t.Fatal(err)
		}
		s.Receive()
		if _, err := h.procs.Signal(t.Context(), connect.NewRequest(&agentv1.SignalRequest{ProcessId: id, Signal: 9, Target: target})); err != nil {
			t.Errorf("%v: %v", target, err)
		}
		for s.Receive() {
			if e := s.Msg().GetExited(); e != nil && e.GetSignal() != "SIGKILL" {
				t.Errorf("%v: %v", target, e)
			}
		}
		_ = s.Close()
		for _, bad := range []*agentv1.SignalRequest{{ProcessId: id, Signal: 0, Target: target}, {ProcessId: id, Signal: 65, Target: target}} {
			if _, err := h.procs.Signal(t.Context(), connect.NewRequest(bad)); connect.CodeOf(err) != connect.CodeInvalidArgument {
				t.Errorf("%v: %v", bad, err)
			}
		}
	}
}
