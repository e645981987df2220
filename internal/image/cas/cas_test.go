package cas

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// thing is a record of tests.
type thing struct {
	Note  string `json:"note"`
	Parts []Blob `json:"parts"`
}

func (t thing) BlobList() []Blob { return t.Parts }

func open(t *testing.T, dir string) *Store {
	t.Helper()
	s, err := Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// maker builds a thing of one blob and counts how often it ran.
func maker(s *Store, content string, runs *atomic.Int32) Maker[thing] {
	return func(ctx context.Context, w *Temp) (thing, error) {
		runs.Add(1)
		file := w.Path("part")
		if err := os.WriteFile(file, []byte(content), 0o600); err != nil {
			return thing{}, err
		}
		b, err := s.Ingest(ctx, file)
		return thing{Note: content, Parts: []Blob{b}}, err
	}
}

func obtain(t *testing.T, s *Store, content string, runs *atomic.Int32) thing {
	t.Helper()
	r, err := Obtain(t.Context(), s, "kind", "key", false, maker(s, content, runs))
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func pathOf(t *testing.T, s *Store, b Blob) string {
	t.Helper()
	path, err := s.Path(b.Digest)
	if err != nil {
		t.Fatal(err)
	}
	return path
}

func TestObtainBuildsOnceAndKeeps(t *testing.T) {
	dir := t.TempDir()
	var runs atomic.Int32
	s := open(t, dir)
	first := obtain(t, s, "hello", &runs)
	again := obtain(t, s, "other", &runs)
	later := obtain(t, open(t, dir), "third", &runs)
	if runs.Load() != 1 || again.Note != "hello" || later.Note != "hello" {
		t.Errorf("%d builds, %q, %q", runs.Load(), again.Note, later.Note)
	}
	path := pathOf(t, s, first.Parts[0])
	data, err := os.ReadFile(path)
	if err != nil || string(data) != "hello" {
		t.Errorf("%q %v", data, err)
	}
	if fi, err := os.Stat(path); err != nil || fi.Mode().Perm() != 0o444 {
		t.Errorf("%v %v", fi.Mode(), err)
	}
	if err := s.Verify(t.Context(), first.Parts[0]); err != nil {
		t.Error(err)
	}
	assertNoTemp(t, dir)
}

func assertNoTemp(t *testing.T, dir string) {
	t.Helper()
	left, err := os.ReadDir(filepath.Join(dir, "tmp"))
	if err != nil || len(left) != 0 {
		t.Errorf("left in tmp: %v %v", left, err)
	}
}

func TestRefreshBuildsAgain(t *testing.T) {
	var runs atomic.Int32
	s := open(t, t.TempDir())
	old := obtain(t, s, "old", &runs)
	fresh, err := Obtain(t.Context(), s, "kind", "key", true, maker(s, "new", &runs))
	if err != nil || fresh.Note != "new" {
		t.Fatal(fresh, err)
	}
	if got := obtain(t, s, "x", &runs); got.Note != "new" || runs.Load() != 2 {
		t.Errorf("%+v after %d builds", got, runs.Load())
	}
	if err := s.Check(old.Parts[0]); err != nil {
		t.Errorf("the old blob, which sandboxes may use, is gone: %v", err)
	}
}

func TestManyCallersBuildOnce(t *testing.T) {
	dir := t.TempDir()
	var runs atomic.Int32
	var wg sync.WaitGroup
	for i := range 16 {
		s := open(t, dir)
		wg.Add(1)
		go func() {
			defer wg.Done()
			r, err := Obtain(t.Context(), s, "kind", "key", false, maker(s, fmt.Sprint("by ", i), &runs))
			if err != nil || s.Verify(t.Context(), r.Parts[0]) != nil {
				t.Errorf("%v %v", r, err)
			}
		}()
	}
	wg.Wait()
	if runs.Load() != 1 {
		t.Errorf("%d builds", runs.Load())
	}
	assertNoTemp(t, dir)
}

func TestDamageIsDetectedAndRepaired(t *testing.T) {
	damage := map[string]func(path string) error{
		"missing":   os.Remove,
		"truncated": func(path string) error { return os.Truncate(path, 2) },
		"longer":    func(path string) error { return os.Truncate(path, 20) },
		"a folder":  func(path string) error { return errors.Join(os.Remove(path), os.Mkdir(path, 0o755)) },
	}
	for name, hurt := range damage {
		t.Run(name, func(t *testing.T) {
			var runs atomic.Int32
			s := open(t, t.TempDir())
			r := obtain(t, s, "hello", &runs)
			path := pathOf(t, s, r.Parts[0])
			if err := hurt(path); err != nil {
				t.Fatal(err)
			}
			if _, err := Load[thing](s, "kind", "key"); !errors.Is(err, ErrCorrupt) {
				t.Errorf("load: %v", err)
			}
			if err := s.Check(r.Parts[0]); !errors.Is(err, ErrCorrupt) {
				t.Errorf("check: %v", err)
			}
			if name == "a folder" {
				return
			}
			obtain(t, s, "hello", &runs)
			if err := s.Verify(t.Context(), r.Parts[0]); err != nil || runs.Load() != 2 {
				t.Errorf("after repair: %v, %d builds", err, runs.Load())
			}
		})
	}
}

func TestVerifySeesFlippedBitsAndIngestRepairs(t *testing.T) {
	s := open(t, t.TempDir())
	b, err := s.IngestBytes(t.Context(), []byte("hello"))
	if err != nil {
		t.Fatal(err)
	}
	path := pathOf(t, s, b)
	if err := errors.Join(os.Remove(path), os.WriteFile(path, []byte("hellp"), 0o444)); err != nil {
		t.Fatal(err)
	}
	if err := s.Check(b); err != nil {
		t.Errorf("check compares sizes only: %v", err)
	}
	if err := s.Verify(t.Context(), b); !errors.Is(err, ErrCorrupt) {
		t.Errorf("verify: %v", err)
	}
	if _, err := s.IngestBytes(t.Context(), []byte("hello")); err != nil {
		t.Fatal(err)
	}
	if err := s.Verify(t.Context(), b); err != nil {
		t.Errorf("after ingesting it again: %v", err)
	}
}

func TestIngestKeepsTheFileThatIsThere(t *testing.T) {
	s := open(t, t.TempDir())
	b, err := s.IngestBytes(t.Context(), []byte("shared"))
	if err != nil {
		t.Fatal(err)
	}
	before, err := os.Stat(pathOf(t, s, b))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.IngestBytes(t.Context(), []byte("shared")); err != nil {
		t.Fatal(err)
	}
	after, err := os.Stat(pathOf(t, s, b))
	if err != nil || !os.SameFile(before, after) {
		t.Errorf("the blob was replaced: %v", err)
	}
}

func TestFailedAndCancelledBuildsLeaveNothing(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir)
	boom := errors.New("boom")
	_, err := Obtain(t.Context(), s, "kind", "key", false, func(_ context.Context, w *Temp) (thing, error) {
		return thing{}, errors.Join(boom, os.WriteFile(w.Path("half"), []byte("x"), 0o600))
	})
	if !errors.Is(err, boom) {
		t.Errorf("got %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	var runs atomic.Int32
	_, err = Obtain(ctx, s, "kind", "key", false, func(ctx context.Context, w *Temp) (thing, error) {
		defer cancel()
		return maker(s, "done too late", &runs)(ctx, w)
	})
	if !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
	if _, err := Load[thing](s, "kind", "key"); !errors.Is(err, ErrNoRecord) {
		t.Errorf("a record was committed: %v", err)
	}
	assertNoTemp(t, dir)
}

func TestWaitingForAnotherBuildEndsWithTheContext(t *testing.T) {
	s := open(t, t.TempDir())
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	_, err := Obtain(t.Context(), s, "kind", "key", false, func(_ context.Context, w *Temp) (thing, error) {
		_, err := Obtain(ctx, s, "kind", "key", false, func(context.Context, *Temp) (thing, error) {
			t.Error("two builds at once")
			return thing{}, nil
		})
		return thing{}, err
	})
	if !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("got %v", err)
	}
}

func TestRecordMustNameBlobsThatAreThere(t *testing.T) {
	s := open(t, t.TempDir())
	gone := Blob{Digest: "sha256:" + strings.Repeat("a", 64), Size: 1}
	_, err := Obtain(t.Context(), s, "kind", "key", false, func(context.Context, *Temp) (thing, error) {
		return thing{Parts: []Blob{gone}}, nil
	})
	if !errors.Is(err, ErrCorrupt) {
		t.Errorf("got %v", err)
	}
	if _, err := Load[thing](s, "kind", "key"); !errors.Is(err, ErrNoRecord) {
		t.Errorf("got %v", err)
	}
}

func TestBadRecordsAreRebuilt(t *testing.T) {
	for name, text := range map[string]string{
		"empty": "", "cut": `{"note":"x","par`, "unknown field": `{"note":"x","parts":null,"more":1}`,
		"bad digest": `{"note":"x","parts":[{"digest":"sha256:../../etc/passwd","size":1}]}`,
		"other type": `[]`,
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			s := open(t, dir)
			path := filepath.Join(dir, "records", "kind", "key")
			if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(text), 0o600)); err != nil {
				t.Fatal(err)
			}
			if _, err := Load[thing](s, "kind", "key"); !errors.Is(err, ErrCorrupt) {
				t.Errorf("load: %v", err)
			}
			var runs atomic.Int32
			if got := obtain(t, s, "good", &runs); got.Note != "good" {
				t.Errorf("%+v", got)
			}
		})
	}
}

func TestNamesCannotLeaveTheCache(t *testing.T) {
	s := open(t, t.TempDir())
	for _, name := range []string{"", "..", "../x", "a/b", "A", ".x", strings.Repeat("a", 101), "a\x00"} {
		if _, err := Load[thing](s, name, "key"); err == nil || errors.Is(err, ErrNoRecord) {
			t.Errorf("kind %q: %v", name, err)
		}
		if _, err := Load[thing](s, "kind", name); err == nil || errors.Is(err, ErrNoRecord) {
			t.Errorf("key %q: %v", name, err)
		}
	}
	for _, d := range []string{"", "sha256:", "sha256:" + strings.Repeat("A", 64), "md5:" + strings.Repeat("a", 64),
		"sha256:" + strings.Repeat("a", 63) + "/", strings.Repeat("a", 64)} {
		if _, err := s.Path(d); !errors.Is(err, ErrCorrupt) {
			t.Errorf("digest %q: %v", d, err)
		}
	}
}

func TestOpenSweepsTheDeadAndSparesTheLiving(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir)
	alive, err := s.Temp()
	if err != nil {
		t.Fatal(err)
	}
	dead := filepath.Join(dir, "tmp", "dead")
	for path, isDir := range map[string]bool{dead: true, filepath.Join(dead, "root", "deep"): true, dead + ".lock": false,
		filepath.Join(dir, "tmp", "lonely.lock"): false, filepath.Join(dir, "tmp", "nolock"): true} {
		if isDir {
			err = os.MkdirAll(path, 0o700)
		} else {
			err = os.WriteFile(path, nil, 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	open(t, dir)
	left, err := filepath.Glob(filepath.Join(dir, "tmp", "*"))
	if err != nil || len(left) != 2 || left[0] != alive.Dir() {
		t.Errorf("left: %v %v", left, err)
	}
	if err := os.WriteFile(alive.Path("x"), nil, 0o600); err != nil {
		t.Errorf("the living one's folder: %v", err)
	}
	if err := alive.Close(); err != nil {
		t.Error(err)
	}
	assertNoTemp(t, dir)
}

// TestMain lets the test binary be the process that dies in TestKilledBuilderIsSwept.
func TestMain(m *testing.M) {
	if dir := os.Getenv("CAS_TEST_DIE_IN"); dir != "" {
		os.Exit(dieHalfWay(dir))
	}
	os.Exit(m.Run())
}

// dieHalfWay starts a build and waits to be killed in it.
func dieHalfWay(dir string) int {
	s, err := Open(dir)
	if err != nil {
		return 1
	}
	_, err = Obtain(context.Background(), s, "kind", "key", false, func(ctx context.Context, w *Temp) (thing, error) {
		err := os.WriteFile(w.Path("half"), bytes.Repeat([]byte("x"), 1<<20), 0o600)
		fmt.Println("half way")
		_, _ = os.Stdin.Read(make([]byte, 1))
		return thing{}, err
	})
	fmt.Println(err)
	return 1
}

func TestKilledBuilderIsSwept(t *testing.T) {
	dir := t.TempDir()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), "CAS_TEST_DIE_IN="+dir)
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	said := make([]byte, 8)
	_, rerr := out.Read(said)
	s := open(t, dir) // a living builder is left alone
	during, err := os.ReadDir(filepath.Join(dir, "tmp"))
	if string(said) != "half way" || err != nil || len(during) != 2 {
		t.Errorf("%q %v: %v %v", said, rerr, during, err)
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait() // it was killed
	open(t, dir)
	assertNoTemp(t, dir)
	var runs atomic.Int32
	if got := obtain(t, s, "second try", &runs); got.Note != "second try" {
		t.Errorf("%+v", got)
	}
}

func TestOtherFormatIsRefused(t *testing.T) {
	dir := t.TempDir()
	open(t, dir)
	path := filepath.Join(dir, "format")
	if err := errors.Join(os.Remove(path), os.WriteFile(path, []byte("2\n"), 0o600)); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(dir); err == nil || !strings.Contains(err.Error(), "--cache-dir") {
		t.Errorf("got %v", err)
	}
	if _, err := Open(filepath.Join(dir, "format")); err == nil {
		t.Error("a file was opened as a cache")
	}
}

func FuzzRecord(f *testing.F) {
	f.Add([]byte(`{"note":"x","parts":[{"digest":"sha256:` + strings.Repeat("0", 64) + `","size":3}]}`))
	f.Add([]byte(`{"note":"x","parts":[{"digest":"sha256:../../../etc/passwd","size":-1}]}`))
	f.Add([]byte(`nul`))
	f.Fuzz(func(t *testing.T, data []byte) {
		dir := t.TempDir()
		s, err := Open(dir)
		if err != nil {
			t.Fatal(err)
		}
		path := filepath.Join(dir, "records", "kind", "key")
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, data, 0o600)); err != nil {
			t.Fatal(err)
		}
		r, err := Load[thing](s, "kind", "key")
		if err == nil && len(r.Parts) > 0 {
			t.Errorf("a record of blobs that are not there was accepted: %q", data)
		}
		if err != nil && !errors.Is(err, ErrCorrupt) {
			t.Errorf("untyped error %v", err)
		}
	})
}
