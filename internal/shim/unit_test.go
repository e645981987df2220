package shim

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	agentv1 "github.com/space-sandbox/space/internal/gen/space/agent/v1"
	nodev1 "github.com/space-sandbox/space/internal/gen/space/node/v1"
	shimv1 "github.com/space-sandbox/space/internal/gen/space/shim/v1"
	"github.com/space-sandbox/space/internal/journal"
	"github.com/space-sandbox/space/internal/sandbox"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// TestImports keeps the shim small: there is one per sandbox.
func TestImports(t *testing.T) {
	out, err := exec.Command("go", "list", "-deps", "github.com/space-sandbox/space/cmd/space-shim").Output()
	if err != nil {
		t.Fatal(err)
	}
	for pkg := range strings.FieldsSeq(string(out)) {
		for _, bad := range []string{
			"space-sandbox/space/internal/store", "space-sandbox/space/internal/api", "space-sandbox/space/internal/control",
			"space-sandbox/space/internal/node", "huma", "sqlite", "k8s.io", "containerd", "pgx", "aws", "minio", "cobra",
		} {
			if strings.Contains(pkg, bad) {
				t.Errorf("the shim contains %s", pkg)
			}
		}
	}
}

func validSpec() *shimv1.LaunchSpec {
	return &shimv1.LaunchSpec{
		Mode: shimv1.LaunchSpec_MODE_RESTORE, ShimId: "s", Token: testToken, ControlToken: "c", Socket: "/s", DeviceState: "/d",
		Acceleration: "tcg", Resources: &nodev1.Resources{Vcpu: 1, MemoryMib: 64}, Kernel: "/k", Initrd: "/i", CaptureDir: "/c",
	}
}

func TestCheckSpec(t *testing.T) {
	if err := checkSpec(validSpec()); err != nil {
		t.Fatal(err)
	}
	long := validSpec()
	long.Socket = strings.Repeat("x", maxSocket)
	if err := checkSpec(long); err != nil {
		t.Errorf("a socket path of %d bytes: %v", maxSocket, err)
	}
	for name, edit := range map[string]func(*shimv1.LaunchSpec){
		"mode":           func(s *shimv1.LaunchSpec) { s.Mode = 0 },
		"shim_id":        func(s *shimv1.LaunchSpec) { s.ShimId = "" },
		"token":          func(s *shimv1.LaunchSpec) { s.Token = "short" },
		"control token":  func(s *shimv1.LaunchSpec) { s.ControlToken = "" },
		"resources":      func(s *shimv1.LaunchSpec) { s.Resources = nil },
		"acceleration":   func(s *shimv1.LaunchSpec) { s.Acceleration = "hvf" },
		"long socket":    func(s *shimv1.LaunchSpec) { s.Socket = strings.Repeat("x", maxSocket+1) },
		"state":          func(s *shimv1.LaunchSpec) { s.DeviceState = "" },
		"kernel":         func(s *shimv1.LaunchSpec) { s.Mode, s.Kernel = shimv1.LaunchSpec_MODE_CAPTURE, "" },
		"capture folder": func(s *shimv1.LaunchSpec) { s.Mode, s.CaptureDir = shimv1.LaunchSpec_MODE_CAPTURE, "" },
		"cmdline":        func(s *shimv1.LaunchSpec) { s.Mode, s.ControlToken = shimv1.LaunchSpec_MODE_CAPTURE, "a init=/x" },
	} {
		s := validSpec()
		edit(s)
		if err := checkSpec(s); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
}

func TestLoadSpec(t *testing.T) {
	dir := t.TempDir()
	if _, err := loadSpec(dir); !errors.Is(err, os.ErrNotExist) {
		t.Fatalf("no spec: %v", err)
	}
	for name, text := range map[string]string{"empty": "", "not JSON": "{", "wrong type": `{"shim_id": 5}`, "huge": strings.Repeat(" ", maxSpecBytes+1)} {
		if err := os.WriteFile(filepath.Join(dir, specFile), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := loadSpec(dir); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
}

func TestPIDFile(t *testing.T) {
	dir := t.TempDir()
	if err := writePID(dir); err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(filepath.Join(dir, pidFile))
	if err != nil {
		t.Fatal(err)
	}
	var got struct{ Shim identity }
	if err := json.Unmarshal(b, &got); err != nil || got.Shim.PID != os.Getpid() || got.Shim.StartTime == 0 || len(got.Shim.BootID) != 36 {
		t.Fatalf("%s: %+v, %v", b, got, err)
	}
}

func TestVMConfig(t *testing.T) {
	dir := t.TempDir()
	s := validSpec()
	s.Layers, s.WritableTop, s.WritableBacking = []string{"/a", "/b"}, "/top", []string{"/base"}
	cfg, err := vmConfig(dir, s)
	if err != nil {
		t.Fatal(err)
	}
	if len(cfg.Disks) != 3 || cfg.Disks[1].Serial != "layer1" || !cfg.Disks[1].ReadOnly || cfg.Disks[2].Serial != "writable" || cfg.Disks[2].ReadOnly {
		t.Fatalf("disks: %+v", cfg.Disks)
	}
	if st, err := os.Stat(cfg.Dir); err != nil || st.Mode().Perm() != 0o700 || filepath.Dir(cfg.Dir) != dir {
		t.Fatalf("folder of the VM: %v, %v", st, err)
	}
	s.Cgroup = "/nonexistent"
	if _, err := vmConfig(dir, s); err == nil {
		t.Fatal("a missing cgroup was accepted")
	}
}

func TestGuestErrorsAreRebuilt(t *testing.T) {
	wire := func(code connect.Code, text string, fe *agentv1.FileError) error {
		e := connect.NewWireError(code, errors.New(text))
		if fe != nil {
			d, err := connect.NewErrorDetail(fe)
			if err != nil {
				t.Fatal(err)
			}
			e.AddDetail(d)
		}
		e.Meta().Set("X-Evil", "1")
		return e
	}
	for name, tc := range map[string]struct {
		in   error
		code connect.Code
		text string
	}{
		"known":           {wire(connect.CodeNotFound, "gone", nil), connect.CodeNotFound, "gone"},
		"unauthenticated": {wire(connect.CodeUnauthenticated, "x", nil), connect.CodeUnavailable, "x"},
		"control bytes":   {wire(connect.CodeNotFound, "a\x1b]0;b\xff", nil), connect.CodeNotFound, "a?]0;b?"},
		"long":            {wire(connect.CodeNotFound, strings.Repeat("y", 9999), nil), connect.CodeNotFound, strings.Repeat("y", maxErrorText)},
		"deadline":        {context.DeadlineExceeded, connect.CodeDeadlineExceeded, "the guest did not answer in time"},
		"not from it":     {errors.New("dial"), connect.CodeUnavailable, "the guest agent cannot be reached or answers nonsense"},
	} {
		var got *connect.Error
		if !errors.As(guestError(tc.in), &got) || got.Code() != tc.code || got.Message() != tc.text {
			t.Errorf("%s: %v", name, got)
		}
		if got.Meta().Get("X-Evil") != "" {
			t.Errorf("%s: headers of the guest are passed on", name)
		}
	}
	var got *connect.Error
	if !errors.As(guestError(wire(connect.CodeNotFound, "x", &agentv1.FileError{Reason: 99, Field: "<script>"})), &got) {
		t.Fatal("no error")
	}
	if fe := fileError(got); fe.GetReason() != 0 || fe.GetField() != "" {
		t.Errorf("undefined values are passed on: %v", fe)
	}
}

func FuzzClean(f *testing.F) {
	f.Add("plain")
	f.Add("\x1b[31m\xff\u2028" + strings.Repeat("ä", 400))
	f.Fuzz(func(t *testing.T, in string) {
		out := clean(in)
		if len(out) > maxErrorText {
			t.Fatalf("%d bytes", len(out))
		}
		for _, r := range out {
			if r < ' ' || r == 0x7f {
				t.Fatalf("%q holds a control character", out)
			}
		}
	})
}

func TestClock(t *testing.T) {
	for _, tc := range []struct {
		accel, source string
		ok            bool
	}{{"tcg", "tsc", true}, {"kvm", "tsc", true}, {"kvm", "kvm-clock", true}, {"tcg", "kvm-clock", false}, {"kvm", "", false}} {
		if err := checkClock(tc.accel, tc.source); (err == nil) != tc.ok {
			t.Errorf("%s under %s: %v", tc.source, tc.accel, err)
		}
	}
	now := time.Now()
	for d, ok := range map[time.Duration]bool{
		0: true, -maxClockError: true, time.Second + maxClockError: true,
		-maxClockError - time.Millisecond: false, time.Second + maxClockError + time.Millisecond: false,
	} {
		if err := checkWallClock(timestamppb.New(now.Add(d)), now, now.Add(time.Second)); (err == nil) != ok {
			t.Errorf("off by %v: %v", d, err)
		}
	}
	if checkWallClock(nil, now, now) == nil || checkWallClock(&timestamppb.Timestamp{Nanos: -1}, now, now) == nil {
		t.Error("no time was accepted")
	}
	if d := jumped(now, now.Add(time.Minute)); d != 0 {
		t.Errorf("a minute in which nothing jumped: %v", d)
	}
	// Without its monotonic reading a time stands for a wall clock that was set.
	set := time.Now().Add(time.Hour).Round(0)
	if d := jumped(set, set); d != 0 {
		t.Errorf("no jump: %v", d)
	}
}

func newTestTable(t *testing.T, expiry time.Duration) *table {
	t.Helper()
	j, err := journal.Open(t.TempDir(), journal.Options{})
	if err != nil {
		t.Fatal(err)
	}
	dead := func(ctx context.Context, _, _ string) (net.Conn, error) { return nil, errors.New("no guest") }
	tb := newTable(j, newGuest(dead, "t"), slog.New(slog.DiscardHandler), func() {}, func(error) {})
	tb.expiry = expiry
	t.Cleanup(func() {
		tb.stop()
		if err := j.Close(); err != nil {
			t.Error(err)
		}
	})
	return tb
}

func TestUnattachedCommandExpires(t *testing.T) {
	tb := newTestTable(t, 20*time.Millisecond)
	id := sandbox.NewProcessID()
	p, fresh, err := tb.create(&nodev1.Process{ProcessId: string(id)})
	if err != nil || !fresh {
		t.Fatal(err)
	}
	waitFor(t, "the command expires", func() bool {
		_, err := tb.journal.Process(id)
		return errors.Is(err, journal.ErrNotFound)
	})
	if err := tb.start(t.Context(), p); !errors.Is(err, journal.ErrNotFound) {
		t.Fatalf("start after the expiry: %v", err)
	}
}

func TestTableLimits(t *testing.T) {
	tb := newTestTable(t, time.Hour)
	var id string
	for range maxProcesses {
		id = string(sandbox.NewProcessID())
		if _, _, err := tb.create(&nodev1.Process{ProcessId: id}); err != nil {
			t.Fatal(err)
		}
	}
	if _, _, err := tb.create(&nodev1.Process{ProcessId: string(sandbox.NewProcessID())}); !errors.Is(err, errTooMany) {
		t.Fatalf("one more than %d: %v", maxProcesses, err)
	}
	if _, fresh, err := tb.create(&nodev1.Process{ProcessId: id}); err != nil || fresh {
		t.Fatalf("a repeat: fresh %v, %v", fresh, err)
	}
	tb.stop()
	if err := tb.start(t.Context(), tb.find(sandbox.ProcessID(id))); !errors.Is(err, errNotRunning) {
		t.Fatalf("start after stop: %v", err)
	}
}

func TestFrameChecks(t *testing.T) {
	tb := newTestTable(t, time.Hour)
	p, _, err := tb.create(&nodev1.Process{ProcessId: string(sandbox.NewProcessID())})
	if err != nil {
		t.Fatal(err)
	}
	f := &feed{t: tb, p: p, a: &attempt{done: make(chan struct{})}}
	started := &agentv1.ProcessFrame{Seq: 1, Kind: &agentv1.ProcessFrame_Started{Started: &agentv1.Started{OsPid: 1}}}
	out := func(seq uint64, s agentv1.Stream, n int) *agentv1.ProcessFrame {
		return &agentv1.ProcessFrame{Seq: seq, Kind: &agentv1.ProcessFrame_Output{Output: &agentv1.Output{Stream: s, Data: make([]byte, n)}}}
	}
	const stdout = agentv1.Stream_STREAM_STDOUT
	steps := []struct {
		name string
		f    *agentv1.ProcessFrame
		want error
	}{
		{"output before started", out(1, stdout, 1), errNonsense},
		{"exit before started", &agentv1.ProcessFrame{Seq: 1, Kind: &agentv1.ProcessFrame_Exited{Exited: &agentv1.Exited{}}}, errNonsense},
		{"empty frame", &agentv1.ProcessFrame{Seq: 1}, errNonsense},
		{"no number", out(0, stdout, 1), errNonsense},
		{"started", started, nil},
		{"started again", started, nil}, // a repeat is skipped
		{"second started", &agentv1.ProcessFrame{Seq: 2, Kind: started.Kind}, errNonsense},
		{"gap", out(3, stdout, 1), errNonsense},
		{"terminal output without a terminal", out(2, agentv1.Stream_STREAM_PTY, 1), errNonsense},
		{"unknown stream", out(2, 77, 1), errNonsense},
		{"no data", out(2, stdout, 0), errNonsense},
		{"too much data", out(2, stdout, journal.MaxChunk+1), errNonsense},
		{"largest chunk", out(2, stdout, journal.MaxChunk), nil},
		{"exit", &agentv1.ProcessFrame{Seq: 3, Kind: &agentv1.ProcessFrame_Exited{Exited: &agentv1.Exited{
			Signal: strings.Repeat("S\n", 99), At: &timestamppb.Timestamp{Seconds: -1 << 60},
		}}}, nil},
	}
	for _, s := range steps {
		if err := f.take(s.f); !errors.Is(err, s.want) || (err != nil) != (s.want != nil) {
			t.Errorf("%s: %v", s.name, err)
		}
	}
	rec := p.rec.Record()
	if !f.done || len(rec.GetExit().GetSignal()) > 32 || strings.Contains(rec.GetExit().GetSignal(), "\n") || rec.GetExitedAt().CheckValid() != nil {
		t.Fatalf("record: %v", rec)
	}
}
