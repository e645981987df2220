package proc

import (
	"errors"
	"os"
	"os/exec"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func start(t *testing.T, args ...string) *exec.Cmd {
	t.Helper()
	cmd := exec.Command(args[0], args[1:]...)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	return cmd
}

func waitDone(t *testing.T, h *Handle) {
	t.Helper()
	select {
	case <-h.Done():
	case <-time.After(10 * time.Second):
		t.Fatal("death was not seen")
	}
}

func TestHandleSeesDeathOfOther(t *testing.T) {
	cmd := start(t, "sleep", "600")
	id, err := Identify(cmd.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	h, err := Open(id)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = h.Close() }()
	if !h.Alive() || h.Identity() != id {
		t.Fatalf("alive %v, identity %v want %v", h.Alive(), h.Identity(), id)
	}
	if err := h.Signal(unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	waitDone(t, h)
	if _, err := Open(id); !errors.Is(err, ErrGone) {
		t.Fatalf("open of a zombie: %v", err)
	}
	_ = cmd.Wait()
	if err := h.Signal(unix.SIGKILL); !errors.Is(err, ErrGone) {
		t.Fatalf("signal after death: %v", err)
	}
	if _, err := Open(id); !errors.Is(err, ErrGone) {
		t.Fatalf("open after death: %v", err)
	}
}

func TestOpenRefusesOtherNames(t *testing.T) {
	cmd := start(t, "sleep", "600")
	good, err := Identify(cmd.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	for name, change := range map[string]func(*Identity){
		"other boot":    func(id *Identity) { id.BootID = "x" },
		"used again":    func(id *Identity) { id.StartTime++ },
		"zero pid":      func(id *Identity) { id.PID = 0 },
		"negative pid":  func(id *Identity) { id.PID = -1 },
		"unused pid":    func(id *Identity) { id.PID = 1 << 30 },
		"zero identity": func(id *Identity) { *id = Identity{} },
	} {
		id := good
		change(&id)
		if h, err := Open(id); !errors.Is(err, ErrGone) {
			t.Errorf("%s: %v", name, err)
			if h != nil {
				_ = h.Close()
			}
		}
	}
}

func TestCloseEndsWatchAndKeepsProcess(t *testing.T) {
	cmd := start(t, "sleep", "600")
	id, _ := Identify(cmd.Process.Pid)
	h, err := Open(id)
	if err != nil {
		t.Fatal(err)
	}
	if err := h.Close(); err != nil {
		t.Fatal(err)
	}
	if err := h.Close(); err != nil {
		t.Fatalf("second close: %v", err)
	}
	if !h.Alive() {
		t.Fatal("closing must not look like a death")
	}
	if _, err := Identify(cmd.Process.Pid); err != nil {
		t.Fatalf("process ended with its handle: %v", err)
	}
}

func TestChildIsReapedBeforeDone(t *testing.T) {
	fd := -1
	cmd := exec.Command("true")
	cmd.SysProcAttr = &unix.SysProcAttr{PidFD: &fd}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	reaped := false
	h, err := Child(cmd.Process.Pid, fd, func() { _ = cmd.Wait(); reaped = true })
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = h.Close() }()
	waitDone(t, h)
	if !reaped || cmd.ProcessState == nil || cmd.ProcessState.ExitCode() != 0 {
		t.Fatalf("reaped %v, state %v", reaped, cmd.ProcessState)
	}
}

func TestFindByArg(t *testing.T) {
	arg := t.TempDir()
	cmd := start(t, "sh", "-c", "sleep 600; :", arg)
	found, err := FindByArg(arg)
	if err != nil || len(found) != 1 || found[0].PID != cmd.Process.Pid {
		t.Fatalf("found %v, %v; want %d", found, err, cmd.Process.Pid)
	}
	if found, _ := FindByArg(arg + "x"); len(found) != 0 {
		t.Fatalf("a longer name matched: %v", found)
	}
}

func TestParseStartTime(t *testing.T) {
	good := "7 (a) b) (c) S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 4711 20\n"
	if v, err := parseStartTime([]byte(good)); err != nil || v != 4711 {
		t.Fatalf("%d, %v", v, err)
	}
	for _, bad := range []string{"", "7 a S 1", "7 (a) S 1 2", "7 (a) S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 x"} {
		if _, err := parseStartTime([]byte(bad)); err == nil {
			t.Errorf("%q accepted", bad)
		}
	}
}

func TestPSS(t *testing.T) {
	pss, err := PSS(os.Getpid())
	if err != nil || pss < 1<<20 {
		t.Fatalf("own PSS %d, %v", pss, err)
	}
	if v, err := parsePSS([]byte("x\nRss: 9 kB\nPss:      12 kB\n")); err != nil || v != 12<<10 {
		t.Fatalf("%d, %v", v, err)
	}
	for _, bad := range []string{"", "Rss: 1 kB\n", "Pss: x kB\n"} {
		if _, err := parsePSS([]byte(bad)); err == nil {
			t.Errorf("%q accepted", bad)
		}
	}
}

func FuzzParseStartTime(f *testing.F) {
	f.Add([]byte("7 (a) b) (c) S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 4711 20\n"))
	f.Add([]byte(")"))
	f.Fuzz(func(_ *testing.T, data []byte) { _, _ = parseStartTime(data) })
}
