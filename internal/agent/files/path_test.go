package files

import (
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

func TestResolve(t *testing.T) {
	for path, want := range map[string]string{
		"/": "/", "//": "/", ".": "/home/u", "a": "/home/u/a", "./a/./b//c/": "/home/u/a/b/c", "/a/../b": "/a/../b",
		"..": "/home/u/..", "/\xff\n": "/\xff\n", "/...": "/...",
	} {
		if got, err := resolve("/home/u", []byte(path)); err != nil || got != want {
			t.Errorf("%q: %q %v", path, got, err)
		}
	}
	for _, path := range []string{"", "\x00", "/a\x00", strings.Repeat("x", 256), strings.Repeat("/x", 2048)} {
		if got, err := resolve("/", []byte(path)); err == nil {
			t.Errorf("%q: %q", path, got)
		}
	}
}

func TestSplit(t *testing.T) {
	for path, want := range map[string][2]string{"/a": {"/", "a"}, "/a/b": {"/a", "b"}, "/a/...": {"/a", "..."}} {
		if dir, name, err := split(path); err != nil || dir != want[0] || name != want[1] {
			t.Errorf("%q: %q %q %v", path, dir, name, err)
		}
	}
	for _, path := range []string{"/", "/a/.."} {
		if _, _, err := split(path); err == nil {
			t.Errorf("%q splits", path)
		}
	}
}

// FuzzResolve checks what every caller relies on: an absolute, bounded path without NUL and empty elements, which
// resolves to itself.
func FuzzResolve(f *testing.F) {
	for _, seed := range []string{"", "/", "a", "../..", "/a//b/./c/", "a\x00", "\xff\xfe", strings.Repeat("d/", 3000), strings.Repeat("n", 300)} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, path []byte) {
		got, err := resolve("/home/user", path)
		if err != nil {
			return
		}
		if got[0] != '/' || len(got) >= unix.PathMax || strings.Contains(got, "//") || strings.IndexByte(got, 0) >= 0 {
			t.Fatalf("%q resolves to %q", path, got)
		}
		if again, err := resolve("/other", []byte(got)); err != nil || again != got {
			t.Fatalf("%q resolves to %q, then to %q, %v", path, got, again, err)
		}
	})
}

func FuzzAfterElements(f *testing.F) {
	f.Add("/", []byte("/a/b"))
	f.Add("/a", []byte("/a/b"))
	f.Add("/a", []byte("/ab"))
	f.Add("/a", []byte("/a/"))
	f.Fuzz(func(t *testing.T, folder string, after []byte) {
		elements, err := afterElements(folder, after)
		if err != nil || len(elements) == 0 {
			return
		}
		if back := strings.TrimSuffix(folder, "/") + "/" + strings.Join(elements, "/"); back != string(after) {
			t.Fatalf("%q below %q gives %q", after, folder, elements)
		}
	})
}
