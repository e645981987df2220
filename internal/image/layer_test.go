package image

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/space-sandbox/space/internal/image/apt"
)

var stamp = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

// makeLayer writes a layer and returns its path and the error of closing it.
func makeLayer(t *testing.T, fill func(l *layerWriter) error) (string, error) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "layer")
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	l := newLayer(f, stamp)
	return path, l.Close(fill(l))
}

func debugfs(t *testing.T, image, request string) string {
	t.Helper()
	cmd := exec.Command("debugfs", "-R", request, image)
	cmd.Env = append(os.Environ(), "PATH="+os.Getenv("PATH")+":/usr/sbin:/sbin")
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("debugfs %s: %v", request, err)
	}
	return string(out)
}

func tarOf(t *testing.T, headers ...*tar.Header) *bytes.Buffer {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, h := range headers {
		body := strings.Repeat("x", int(h.Size))
		if err := w.WriteHeader(h); err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(w, body); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return &b
}

func same(h *tar.Header) string { return h.Name }

func TestLayerKeepsWhatFilesAre(t *testing.T) {
	future := stamp.Add(time.Hour)
	in := tarOf(t,
		&tar.Header{Name: "./", Typeflag: tar.TypeDir, Mode: 0o755},
		&tar.Header{Name: "./bin/", Typeflag: tar.TypeDir, Mode: 0o1777, Uid: 7, Gid: 8, ModTime: stamp},
		&tar.Header{Name: "./bin/su", Typeflag: tar.TypeReg, Mode: 0o4755, Size: 5, ModTime: future,
			PAXRecords: map[string]string{"SCHILY.xattr.user.note": "value"}},
		&tar.Header{Name: "./bin/hard", Typeflag: tar.TypeLink, Linkname: "./bin/su"},
		&tar.Header{Name: "./bin/soft", Typeflag: tar.TypeSymlink, Linkname: "../bin/su", Mode: 0o777},
		&tar.Header{Name: "./pipe", Typeflag: tar.TypeFifo, Mode: 0o600, Uid: 1000, Gid: 1000},
		&tar.Header{Name: "./empty", Typeflag: tar.TypeReg, Mode: 0o400},
	)
	image, err := makeLayer(t, func(l *layerWriter) error {
		return errors.Join(l.addAll(t.Context(), in, same), l.file("etc/note", 0o640, "text"), l.symlink("bin/sh", "su"))
	})
	if err != nil {
		t.Fatal(err)
	}
	for request, wants := range map[string][]string{
		"stat /bin":      {"Mode:  01777", "User:     7   Group:     8"},
		"stat /bin/su":   {"Mode:  04755", "Links: 2", "Size: 5", "user.note", "Jan  2 03:04:05 2026"},
		"stat /bin/soft": {"Type: symlink", `Fast link dest: "../bin/su"`},
		"stat /pipe":     {"Type: FIFO", "User:  1000"},
		"stat /empty":    {"Size: 0", "Mode:  0400"},
		"cat /etc/note":  {"text"},
		"stat /bin/sh":   {"Type: symlink"},
	} {
		cmd := debugfs(t, image, request)
		for _, want := range wants {
			if !strings.Contains(cmd, want) {
				t.Errorf("%s does not show %q:\n%s", request, want, cmd)
			}
		}
	}
}

func TestEqualInputGivesEqualLayers(t *testing.T) {
	var images [2][]byte
	for i := range images {
		path, err := makeLayer(t, func(l *layerWriter) error { return l.file("a/b/c", 0o644, "x") })
		if err != nil {
			t.Fatal(err)
		}
		if images[i], err = os.ReadFile(path); err != nil {
			t.Fatal(err)
		}
	}
	if !bytes.Equal(images[0], images[1]) {
		t.Error("two layers of the same files differ")
	}
}

func TestLayerRefusesBadArchives(t *testing.T) {
	reg := func(name string) *tar.Header {
		return &tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: 0o644, Size: 3}
	}
	whole := tarOf(t, reg("a"), reg("b")).Bytes()
	cases := map[string][]byte{
		"parent":                 tarOf(t, reg("../x")).Bytes(),
		"parent inside":          tarOf(t, reg("a/../../x")).Bytes(),
		"twice":                  tarOf(t, reg("a"), reg("./a")).Bytes(),
		"cut in the head":        whole[:1300],
		"cut in the body":        whole[:513],
		"no archive":             bytes.Repeat([]byte("garbage "), 200),
		"hard link to nowhere":   tarOf(t, &tar.Header{Name: "l", Typeflag: tar.TypeLink, Linkname: "no"}).Bytes(),
		"hard link out of it":    tarOf(t, &tar.Header{Name: "l", Typeflag: tar.TypeLink, Linkname: "../../etc/passwd"}).Bytes(),
		"file where a folder is": tarOf(t, &tar.Header{Name: "d", Typeflag: tar.TypeDir, Mode: 0o755}, reg("d")).Bytes(),
	}
	for name, data := range cases {
		if _, err := makeLayer(t, func(l *layerWriter) error { return l.addAll(t.Context(), bytes.NewReader(data), same) }); err == nil {
			t.Errorf("%s was accepted", name)
		}
	}
}

func TestLayerStopsWhenCancelled(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	in := tarOf(t, &tar.Header{Name: "a", Typeflag: tar.TypeReg, Size: 1})
	if _, err := makeLayer(t, func(l *layerWriter) error { return l.addAll(ctx, in, same) }); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
}

func TestAddGzipTakesWhatIsWanted(t *testing.T) {
	file := filepath.Join(t.TempDir(), "p.tgz")
	var z bytes.Buffer
	w := gzip.NewWriter(&z)
	if _, err := w.Write(tarOf(t, &tar.Header{Name: "package/bin/node", Typeflag: tar.TypeReg, Mode: 0o755, Size: 2, Uid: 501},
		&tar.Header{Name: "package/include/x.h", Typeflag: tar.TypeReg, Size: 2}).Bytes()); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(w.Close(), os.WriteFile(file, z.Bytes(), 0o600)); err != nil {
		t.Fatal(err)
	}
	image, err := makeLayer(t, func(l *layerWriter) error { return addGzip(t.Context(), l, file, keepNode) })
	if err != nil {
		t.Fatal(err)
	}
	if out := debugfs(t, image, "ls -p /usr/local/bin"); !strings.Contains(out, "/100755/0/0/node/2/") {
		t.Errorf("got %s", out)
	}
	if out := debugfs(t, image, "ls -p /"); strings.Contains(out, "include") || strings.Contains(out, "package") {
		t.Errorf("got %s", out)
	}
	if err := os.WriteFile(file, z.Bytes()[:z.Len()/2], 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := makeLayer(t, func(l *layerWriter) error { return addGzip(t.Context(), l, file, same) }); err == nil {
		t.Error("half an archive was accepted")
	}
}

func TestKeepBase(t *testing.T) {
	for name, want := range map[string]string{
		"./etc/passwd": "etc/passwd", "./etc/machine-id": "", "./etc/hostname": "", "./etc/passwd-": "",
		"./var/log/": "var/log", "./var/log/btmp": "", "./var/log/apt/term.log": "", "./var/lib/apt/lists/": "var/lib/apt/lists",
		"./var/lib/apt/lists/partial/": "", "./dev/null": "", "./dev/": "dev", "./proc/": "proc",
		"./etc/apt/apt.conf.d/99mmdebstrap": "", "./etc/ssh/ssh_host_rsa_key": "", "./etc/ssh/ssh_config": "etc/ssh/ssh_config",
		"./usr/lib/python3.11/EXTERNALLY-MANAGED": "", "./usr/lib/python3.11/os.py": "usr/lib/python3.11/os.py",
		"./etc/apt/sources.list.d/0000sources.list": "", "./etc/apt/sources.list.d/": "etc/apt/sources.list.d",
		"./etc/apt/auth.conf": "", "./tmp/x": "", "./tmp/": "tmp", "./": ".",
	} {
		if got := keepBase(&tar.Header{Name: name}); got != want {
			t.Errorf("%s: %q, want %q", name, got, want)
		}
	}
}

func TestGuestSourcesHoldNoSecrets(t *testing.T) {
	got := guestSources([]apt.Source{{URI: "https://name:secret@m.test/debian", Suite: "bookworm", Components: []string{"main"}, SignedBy: "/home/x/key.gpg"}})
	want := "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] https://m.test/debian bookworm main\n"
	if got != want {
		t.Errorf("got %q", got)
	}
}

func TestCleanName(t *testing.T) {
	for name, want := range map[string]string{"a": "a", "./a/": "a", "/a//b/./c": "a/b/c", "a/../b": "b", "./": ".", "...": "..."} {
		if got, err := cleanName(name); err != nil || got != want {
			t.Errorf("%q: %q %v", name, got, err)
		}
	}
	for _, name := range []string{"", "..", "../a", "/../a", "a/../../b", "a\x00b"} {
		if got, err := cleanName(name); err == nil {
			t.Errorf("%q gave %q", name, got)
		}
	}
}

func FuzzCleanName(f *testing.F) {
	for _, s := range []string{"./a/b", "../x", "/", "a\x00", "a/../..", "....//"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, name string) {
		got, err := cleanName(name)
		if err != nil {
			return
		}
		if !filepath.IsLocal(got) || strings.ContainsRune(got, 0) {
			t.Errorf("%q gave %q", name, got)
		}
	})
}
