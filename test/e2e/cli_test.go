package e2e

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/creack/pty"
)

// cli runs the space command against the server and returns its output and exit code.
func (s *server) cli(t *testing.T, stdin string, args ...string) (stdout, stderr string, code int) {
	t.Helper()
	cmd := s.cliCommand(args...)
	var out, errOut bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(stdin), &out, &errOut
	err := cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatalf("space %v: %v", args, err)
	}
	return out.String(), errOut.String(), cmd.ProcessState.ExitCode()
}

func (s *server) cliCommand(args ...string) *exec.Cmd {
	cmd := exec.Command(spaceBin(), args...)
	cmd.Env = append(os.Environ(), "SPACE_API_URL=http://"+s.api, "SPACE_DATA_PLANE_URL=http://"+s.data, "SPACE_API_TOKEN="+s.key)
	return cmd
}

func TestRunPassesTheExitCodeThrough(t *testing.T) {
	t.Parallel()
	out, errOut, code := shared.cli(t, "", "run", "--", "sh", "-c", "echo out; echo err >&2; exit 42")
	if out != "out\n" || !strings.Contains(errOut, "err\n") || code != 42 {
		t.Errorf("out %q err %q code %d", out, errOut, code)
	}
	_, errOut, code = shared.cli(t, "", "run", "--", "sh", "-c", "kill -TERM $$")
	if code != 128+15 {
		t.Errorf("a signal gives %d: %s", code, errOut)
	}
	_, errOut, code = shared.cli(t, "", "run", "--template", "nope", "--", "true")
	if code != 125 || !strings.Contains(errOut, "nope") {
		t.Errorf("our own error gives %d: %s", code, errOut)
	}
}

func TestCommandLineTour(t *testing.T) {
	t.Parallel()
	out, errOut, code := shared.cli(t, "", "sandbox", "create", "-o", "json")
	var sb sandboxJSON
	if code != 0 || json.Unmarshal([]byte(out), &sb) != nil || sb.State != "running" {
		t.Fatalf("create: code %d, %q, %q", code, out, errOut)
	}
	defer shared.remove(t, sb.ID)
	must := func(want string, args ...string) {
		t.Helper()
		out, errOut, code := shared.cli(t, "", args...)
		if code != 0 || !strings.Contains(out, want) {
			t.Errorf("space %s: code %d, want %q in %q (stderr %q)", strings.Join(args, " "), code, want, out, errOut)
		}
	}
	must(sb.ID, "sandbox", "list")
	must(sb.ID, "sandbox", "get", sb.ID)
	must("hello", "exec", sb.ID, "--", "echo", "hello")
	must("base", "template", "list")
	must("sha256:", "template", "get", "base")
	must("echo hello", "ps", sb.ID)
	if out, _, code := shared.cli(t, "some input", "exec", "-i", sb.ID, "--", "cat"); out != "some input" || code != 0 {
		t.Errorf("exec -i: %q, code %d", out, code)
	}
	dir := t.TempDir()
	src, back := filepath.Join(dir, "a file"), filepath.Join(dir, "back")
	if err := os.WriteFile(src, []byte("content\x00\xff"), 0o600); err != nil {
		t.Fatal(err)
	}
	must("", "cp", src, sb.ID+":/home/user/a file")
	must("", "cp", sb.ID+":/home/user/a file", back)
	if b, err := os.ReadFile(back); err != nil || string(b) != "content\x00\xff" {
		t.Errorf("cp round trip: %q %v", b, err)
	}
	link := filepath.Join(dir, "link")
	if err := os.Symlink(dir, link); err != nil {
		t.Fatal(err)
	}
	must("", "cp", link, sb.ID+":/home/user/tree")
	must("content", "exec", sb.ID, "--", "cat", "/home/user/tree/a file")
	var ps []struct{ ID, State string }
	out, _, _ = shared.cli(t, "", "ps", sb.ID, "-o", "json")
	if err := json.Unmarshal([]byte(out), &ps); err != nil || len(ps) == 0 {
		t.Fatalf("ps -o json: %v in %q", err, out)
	}
	must("hello", "logs", sb.ID, ps[0].ID)
	c := shared.command(t, sb.ID, []string{"sleep", "600"}, object{"start": "now"})
	must("", "kill", sb.ID, c.Process.ID)
	if p := shared.await(t, sb.ID, c.Process.ID); p.Exit.Signal == nil {
		t.Errorf("space kill: %+v", p.Exit)
	}
	must("", "sandbox", "delete", sb.ID)
	must("space 0.", "version")
	if _, errOut, code := shared.cli(t, "", "sandbox", "get", sb.ID); code == 0 || !strings.Contains(errOut, "not_found") {
		t.Errorf("get of a deleted sandbox: code %d, %q", code, errOut)
	}
}

// echoer tells what reaches a program in a terminal: its size, signals and lines.
const echoer = `
import os, signal, sys
def size(*_): print("size", *os.get_terminal_size(), flush=True)
signal.signal(signal.SIGWINCH, size)
signal.signal(signal.SIGINT, lambda *_: print("interrupted", flush=True))
size()
for line in sys.stdin:
    if line.strip() == "quit": sys.exit(5)
    print("got", line.strip(), flush=True)
`

func TestInteractiveExecBehavesLikeATerminal(t *testing.T) {
	t.Parallel()
	sb := shared.create(t, nil)
	cmd := shared.cliCommand("exec", "-it", sb.ID, "--", "python3", "-c", echoer)
	tty, err := pty.StartWithSize(cmd, &pty.Winsize{Cols: 87, Rows: 21})
	if err != nil {
		t.Fatal(err)
	}
	defer tty.Close()
	var seen lockedBuffer
	go func() { _, _ = copyAll(&seen, tty) }()
	expect := func(want string) {
		t.Helper()
		err := poll(30*time.Second, func() (bool, error) { return strings.Contains(seen.String(), want), nil })
		if err != nil {
			t.Fatalf("the terminal does not show %q: %q", want, tail(seen.String(), 1000))
		}
	}
	send := func(input string) {
		t.Helper()
		if _, err := tty.WriteString(input); err != nil {
			t.Fatal(err)
		}
	}
	expect("size 87 21")
	send("hello\n")
	expect("got hello")
	if err := pty.Setsize(tty, &pty.Winsize{Cols: 99, Rows: 44}); err != nil {
		t.Fatal(err)
	}
	expect("size 99 44")
	send("\x03") // reaches the program in the sandbox, not our client
	expect("interrupted")
	send("still here\n")
	expect("got still here")
	send("quit\n")
	_ = cmd.Wait()
	if code := cmd.ProcessState.ExitCode(); code != 5 {
		t.Errorf("exit code %d after %q", code, tail(seen.String(), 500))
	}
}

func copyAll(dst *lockedBuffer, src *os.File) (int64, error) {
	buf := make([]byte, 4096)
	var total int64
	for {
		n, err := src.Read(buf)
		_, _ = dst.Write(buf[:n])
		total += int64(n)
		if err != nil {
			return total, err
		}
	}
}

func TestDoctorSaysWhatIsInForce(t *testing.T) {
	t.Parallel()
	out, errOut, code := shared.cli(t, "", "doctor", "-o", "json", "--cache-dir", cacheDir(), "--data-dir", shared.dir)
	var report struct {
		Checks []struct{ Name, Status, Message, Remedy string }
	}
	if err := json.Unmarshal([]byte(out), &report); err != nil || len(report.Checks) < 6 {
		t.Fatalf("code %d, %v in %q (%s)", code, err, out, errOut)
	}
	text, _, _ := shared.cli(t, "", "doctor", "--cache-dir", cacheDir(), "--data-dir", shared.dir)
	for _, want := range []string{"qemu", "isolation", "localhost"} {
		if !strings.Contains(strings.ToLower(text), want) {
			t.Errorf("doctor does not speak of %s:\n%s", want, text)
		}
	}
	for _, c := range report.Checks {
		if c.Status != "ok" && c.Remedy == "" {
			t.Errorf("%s is %s (%s) without a remedy", c.Name, c.Status, c.Message)
		}
	}
	// Without QEMU the package is named.
	cmd := shared.cliCommand("doctor", "--cache-dir", cacheDir(), "--data-dir", shared.dir)
	cmd.Env = append(cmd.Env, "PATH=/nonexistent")
	got, _ := cmd.CombinedOutput()
	if cmd.ProcessState.ExitCode() == 0 || !strings.Contains(string(got), "qemu-system-x86") {
		t.Errorf("without qemu: code %d\n%s", cmd.ProcessState.ExitCode(), got)
	}
}

func TestBenchPrintsFiguresWithFloors(t *testing.T) {
	cmd := exec.Command(spaceBin(), "bench", "-n", "3", "-o", "json", "--cache-dir", cacheDir())
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("bench: %v\n%s", err, out)
	}
	var b struct {
		Machine map[string]any
		Figures []struct {
			Name, Unit    string
			N             int
			P50, P95, P99 float64
			FloorP50      float64 `json:"floor_p50"`
			Ratio         float64
		}
	}
	if err := json.Unmarshal(out, &b); err != nil {
		t.Fatalf("%v in %q", err, tail(string(out), 500))
	}
	if len(b.Figures) < 8 || len(b.Machine) == 0 {
		t.Errorf("%d figures, machine %v", len(b.Figures), b.Machine)
	}
	for _, f := range b.Figures {
		if f.N == 0 || f.P50 <= 0 || f.P95 < f.P50 || f.Unit == "" {
			t.Errorf("figure %+v", f)
		}
		t.Logf("%-36s p50 %8.2f %-5s floor %8.2f ratio %.2f", f.Name, f.P50, f.Unit, f.FloorP50, f.Ratio)
	}
}
