package buildtools

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

func sh(script string) Command { return Command{Name: "sh", Args: []string{"-c", script}} }

func TestRunPassesOutputEnvironmentAndFolder(t *testing.T) {
	dir, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	for _, isolate := range []bool{false, true} {
		var out bytes.Buffer
		var lines []string
		c := sh(`pwd; echo "$LC_ALL $X"; printf 'one\r\ntwo' >&2; cat`)
		c.Dir, c.Env, c.Stdout, c.Isolate = dir, []string{"X=y"}, &out, isolate
		c.Line = func(l string) { lines = append(lines, l) }
		if err := c.Run(t.Context()); err != nil {
			t.Fatal(err)
		}
		if want := dir + "\nC.UTF-8 y\n"; out.String() != want {
			t.Errorf("isolate %v: %q", isolate, out.String())
		}
		if fmt.Sprint(lines) != "[one two]" {
			t.Errorf("isolate %v: lines %q", isolate, lines)
		}
	}
}

func TestFailureShowsTheEndOfTheMessages(t *testing.T) {
	err := sh(`i=0; while [ $i -lt 2000 ]; do echo "noise $i" >&2; i=$((i+1)); done; echo the reason >&2; exit 3`).Run(t.Context())
	if err == nil || !strings.Contains(err.Error(), "exit status 3") || !strings.HasSuffix(err.Error(), "the reason") {
		t.Errorf("got %v", err)
	}
	if len(err.Error()) > stderrKept+100 {
		t.Errorf("the error has %d bytes", len(err.Error()))
	}
}

func TestMissingProgram(t *testing.T) {
	if err := (Command{Name: "no-such-program-here"}).Run(t.Context()); !errors.Is(err, ErrMissing) {
		t.Errorf("got %v", err)
	}
}

func TestLookFindsAdministrativePrograms(t *testing.T) {
	t.Setenv("PATH", "/nowhere")
	if path, err := Look("mke2fs"); err != nil || !filepath.IsAbs(path) {
		t.Errorf("%q %v", path, err)
	}
}

func alive(pid int) bool {
	if syscall.Kill(pid, 0) != nil {
		return false
	}
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	return err == nil && !strings.Contains(string(stat), ") Z ")
}

// waitGone waits until no process works in dir any more.
func waitGone(t *testing.T, dir string) {
	t.Helper()
	deadline := time.Now().Add(20 * time.Second)
	for {
		var here []int
		links, _ := filepath.Glob("/proc/[0-9]*/cwd")
		for _, l := range links {
			if to, err := os.Readlink(l); err == nil && to == dir {
				if pid, err := strconv.Atoi(strings.Split(l, "/")[2]); err == nil && alive(pid) {
					here = append(here, pid)
				}
			}
		}
		if len(here) == 0 {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("still running: %v", here)
		}
		time.Sleep(10 * time.Millisecond)
	}
}

func TestCancelEndsTheWholeTree(t *testing.T) {
	cases := map[string]struct {
		script  string
		isolate bool
	}{
		"polite":                 {`sleep 1000 & echo up; wait`, false},
		"ignores SIGTERM":        {`trap '' TERM; sleep 1000 & echo up; wait`, false},
		"isolated":               {`sleep 1000 & echo up; wait`, true},
		"isolated, own sessions": {`setsid sh -c 'trap "" TERM; setsid sleep 1000 & wait' & echo up; wait`, true},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			if c.isolate && os.Geteuid() != 0 {
				t.Skip("namespaces of one's own need root here")
			}
			dir, err := filepath.EvalSymlinks(t.TempDir())
			if err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			cmd := sh(c.script)
			cmd.Dir, cmd.Isolate, cmd.Grace = dir, c.isolate, 300*time.Millisecond
			cmd.Stdout = writerFunc(func(p []byte) (int, error) { cancel(); return len(p), nil })
			began := time.Now()
			if err := cmd.Run(ctx); !errors.Is(err, context.Canceled) {
				t.Errorf("got %v", err)
			}
			if took := time.Since(began); took > 20*time.Second {
				t.Errorf("took %v", took)
			}
			waitGone(t, dir)
		})
	}
}

type writerFunc func([]byte) (int, error)

func (f writerFunc) Write(p []byte) (int, error) { return f(p) }

func TestIsolatedMountsVanish(t *testing.T) {
	if os.Geteuid() != 0 || !canIsolate(t.Context()) {
		t.Skip("namespaces of one's own need root here")
	}
	dir := t.TempDir()
	c := sh(`mount -t tmpfs none "$0" && touch "$0/inside" && ls "$0"`)
	var out bytes.Buffer
	c.Args, c.Isolate, c.Stdout = append(c.Args, dir), true, &out
	if err := c.Run(t.Context()); err != nil {
		t.Fatal(err)
	}
	if entries, err := os.ReadDir(dir); err != nil || len(entries) != 0 || out.String() != "inside\n" {
		t.Errorf("%v %v %q", entries, err, out.String())
	}
}

func TestLineWriterBoundsLinesWithoutEnd(t *testing.T) {
	var lines []string
	w := &lineWriter{line: func(l string) { lines = append(lines, l) }}
	for range 100 {
		if _, err := w.Write(bytes.Repeat([]byte("x"), 1000)); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := w.Write([]byte("\nend\nrest")); err != nil {
		t.Fatal(err)
	}
	w.flush()
	if w.partial.Cap() > 64<<10 || len(w.kept) > stderrKept || lines[len(lines)-1] != "rest" || lines[len(lines)-2] != "end" {
		t.Errorf("kept %d, capacity %d, %d lines", len(w.kept), w.partial.Cap(), len(lines))
	}
}
