package guest

import (
	"bytes"
	"compress/gzip"
	"context"
	"encoding/binary"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/ulikunitz/xz"

	"github.com/space-sandbox/space/internal/image"
	"github.com/space-sandbox/space/internal/image/cas"
)

func archive(t testing.TB, fill func(c *cpioWriter) error) []byte {
	t.Helper()
	var b bytes.Buffer
	c := newCPIO(&b)
	if err := errors.Join(fill(c), c.close()); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// TestCPIOGolden compares a small archive with its bytes as the format's description has them.
func TestCPIOGolden(t *testing.T) {
	got := archive(t, func(c *cpioWriter) error { return c.file("a/b", 0o644, []byte("hello")) })
	head := func(ino, mode, links, size, name string) string {
		zero := "00000000"
		return "070701" + ino + mode + zero + zero + links + zero + size + zero + zero + zero + zero + name + zero
	}
	want := head("00000001", "000041ED", "00000002", "00000000", "00000002") + "a\x00" +
		head("00000002", "000081A4", "00000001", "00000005", "00000004") + "a/b\x00\x00\x00" + "hello\x00\x00\x00" +
		head("00000000", "00000000", "00000001", "00000000", "0000000B") + "TRAILER!!!\x00\x00\x00\x00"
	if string(got) != want {
		t.Errorf("got  %q\nwant %q", got, want)
	}
}

// TestCPIOIsReadBack has another program list and unpack what was written.
func TestCPIOIsReadBack(t *testing.T) {
	data := archive(t, func(c *cpioWriter) error {
		return errors.Join(c.file("lib/x/m.ko", 0o600, []byte("module")), c.dir("lib"), c.dir("proc"),
			c.char("dev/null", 0o666, 1, 3), c.file("init", 0o755, bytes.Repeat([]byte("i"), 5001)), c.file("empty", 0o644, nil))
	})
	second := archive(t, func(c *cpioWriter) error { return c.file("late", 0o644, []byte("x")) })
	if len(data)%4 != 0 || len(second)%4 != 0 {
		t.Errorf("lengths %d and %d are not aligned: archives could not be joined", len(data), len(second))
	}
	names := map[string][]byte{}
	for _, e := range readCPIO(t, append(data, second...)) {
		names[e.name] = e.data
	}
	for name, size := range map[string]int{"lib": 0, "lib/x": 0, "lib/x/m.ko": 6, "proc": 0, "dev": 0, "dev/null": 0, "init": 5001, "empty": 0, "late": 1} {
		if got, ok := names[name]; !ok || len(got) != size {
			t.Errorf("%s: %d bytes, there: %v", name, len(got), ok)
		}
	}
	if len(names) != 9 {
		t.Errorf("%d entries", len(names))
	}
}

type cpioEntry struct {
	name string
	mode uint32
	data []byte
}

// readCPIO is an independent reader of joined archives.
func readCPIO(t testing.TB, data []byte) []cpioEntry {
	t.Helper()
	var out []cpioEntry
	align := func(n int) int { return (n + 3) &^ 3 }
	for at := 0; at < len(data); {
		if len(data)-at < 110 || string(data[at:at+6]) != "070701" {
			t.Fatalf("no header at %d", at)
		}
		field := func(i int) int {
			raw := make([]byte, 4)
			if _, err := decodeHex(raw, data[at+6+8*i:at+14+8*i]); err != nil {
				t.Fatal(err)
			}
			return int(binary.BigEndian.Uint32(raw))
		}
		nameLen, size := field(11), field(6)
		name := string(data[at+110 : at+110+nameLen-1])
		body := align(at + 110 + nameLen)
		if name != "TRAILER!!!" {
			out = append(out, cpioEntry{name, uint32(field(1)), data[body : body+size]})
		}
		at = align(body + size)
	}
	return out
}

func decodeHex(dst, src []byte) (int, error) {
	for i := range dst {
		var v byte
		for _, c := range src[2*i : 2*i+2] {
			d := strings.IndexByte("0123456789ABCDEF", c)
			if d < 0 {
				return 0, errors.New("not upper-case hexadecimal")
			}
			v = v<<4 | byte(d)
		}
		dst[i] = v
	}
	return len(dst), nil
}

func TestCPIORefusesNames(t *testing.T) {
	for _, name := range []string{"", "/abs", "../up", "a/../b", "a//b", "./a", "a/", "a\x00b", ".."} {
		c := newCPIO(&bytes.Buffer{})
		if err := c.file(name, 0o644, nil); !errors.Is(err, errName) {
			t.Errorf("%q: %v", name, err)
		}
	}
}

type failing struct{ left int }

var errFull = errors.New("disk full")

func (f *failing) Write(p []byte) (int, error) {
	if f.left -= len(p); f.left < 0 {
		return 0, errFull
	}
	return len(p), nil
}

func TestCPIOReportsWriteErrors(t *testing.T) {
	for _, room := range []int{0, 50, 120, 300} {
		c := newCPIO(&failing{room})
		if err := errors.Join(c.file("a/b", 0o644, make([]byte, 400)), c.close()); !errors.Is(err, errFull) {
			t.Errorf("room for %d: %v", room, err)
		}
	}
}

func FuzzCPIO(f *testing.F) {
	f.Add("lib/modules/x.ko", []byte("data"))
	f.Add("../x", []byte{})
	f.Add("a", []byte("070701"))
	f.Fuzz(func(t *testing.T, name string, data []byte) {
		var b bytes.Buffer
		c := newCPIO(&b)
		if err := c.file(name, 0o644, data); err != nil {
			if !errors.Is(err, errName) {
				t.Errorf("untyped error %v", err)
			}
			return
		}
		if err := c.close(); err != nil {
			t.Fatal(err)
		}
		entries := readCPIO(t, b.Bytes())
		if name == "TRAILER!!!" {
			return
		}
		last := entries[len(entries)-1]
		if last.name != name || !bytes.Equal(last.data, data) {
			t.Errorf("%q came back as %q", name, last.name)
		}
	})
}

// object makes an ELF file with a .modinfo section, as the kernel's build does.
func object(t testing.TB, depends string) []byte {
	t.Helper()
	dir := t.TempDir()
	src, out := filepath.Join(dir, "m.s"), filepath.Join(dir, "m.o")
	text := ".section .modinfo,\"a\"\n.asciz \"license=GPL\"\n.asciz \"depends=" + depends + "\"\n.asciz \"retpoline=Y\"\n"
	if err := os.WriteFile(src, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	if msg, err := exec.Command("as", "-o", out, src).CombinedOutput(); err != nil {
		t.Fatalf("as: %v\n%s", err, msg)
	}
	data, err := os.ReadFile(out)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

// fakeKernel is an unpacked package with the modules given: name to what it depends on.
func fakeKernel(t testing.TB, modules map[string]string) *moduleSet {
	t.Helper()
	root := t.TempDir()
	for name, depends := range modules {
		path := filepath.Join(root, "lib/modules/1.0/kernel/d", name+".ko")
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, object(t, depends), 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	s, err := findModules(root, "1.0")
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func names(modules []module) (out []string) {
	for _, m := range modules {
		out = append(out, m.Name)
	}
	return out
}

func TestModuleOrder(t *testing.T) {
	s := fakeKernel(t, map[string]string{"a": "b-b,c", "b-b": "c", "c": "", "d": "a", "loop1": "loop2", "loop2": "loop1", "dangling": "gone"})
	cases := map[string]struct {
		want     []string
		optional bool
		result   []string
	}{
		"dependencies first": {[]string{"d", "c"}, false, []string{"c", "b_b", "a", "d"}},
		"given order":        {[]string{"c", "a"}, false, []string{"c", "b_b", "a"}},
		"missing":            {[]string{"zzz"}, false, nil},
		"missing, optional":  {[]string{"zzz", "c"}, true, []string{"c"}},
		"loop":               {[]string{"loop1"}, false, nil},
		"dangling":           {[]string{"dangling"}, true, nil},
	}
	for name, c := range cases {
		got, err := s.order(c.want, c.optional)
		if (err != nil) != (c.result == nil) || err != nil && !errors.Is(err, ErrModule) {
			t.Errorf("%s: %v", name, err)
		}
		if err == nil && !reflect.DeepEqual(names(got), c.result) {
			t.Errorf("%s: %v", name, names(got))
		}
	}
}

func TestModuleDependsRefusesGarbage(t *testing.T) {
	for name, data := range map[string][]byte{"empty": nil, "text": []byte("not ELF"), "cut": object(t, "")[:80]} {
		if _, err := moduleDepends(data); err == nil {
			t.Errorf("%s was accepted", name)
		}
	}
}

func FuzzModuleDepends(f *testing.F) {
	f.Add(object(f, "a,b-c"))
	f.Add([]byte("\x7fELF\x02\x01\x01"))
	f.Fuzz(func(t *testing.T, data []byte) {
		depends, err := moduleDepends(data)
		if err != nil && depends != nil {
			t.Error("dependencies with an error")
		}
	})
}

func TestDecompress(t *testing.T) {
	var zx, zg bytes.Buffer
	x, err := xz.NewWriter(&zx)
	if err != nil {
		t.Fatal(err)
	}
	g := gzip.NewWriter(&zg)
	_, err1 := x.Write([]byte("module"))
	_, err2 := g.Write([]byte("module"))
	if err := errors.Join(err1, err2, x.Close(), g.Close()); err != nil {
		t.Fatal(err)
	}
	for name, data := range map[string][]byte{"m.ko": []byte("module"), "m.ko.xz": zx.Bytes(), "m.ko.gz": zg.Bytes()} {
		if got, err := decompress(name, data); err != nil || string(got) != "module" {
			t.Errorf("%s: %q %v", name, got, err)
		}
	}
	for name, data := range map[string][]byte{"m.ko.xz": []byte("junk"), "m.ko.gz": zg.Bytes()[:12], "m.ko.lzo": nil} {
		if _, err := decompress(name, data); err == nil {
			t.Errorf("%s was accepted", name)
		}
	}
}

func TestModuleNames(t *testing.T) {
	for file, want := range map[string]string{"a/virtio-rng.ko": "virtio_rng", "b/nf_tables.ko.xz": "nf_tables"} {
		if got := moduleName(file); got != want {
			t.Errorf("%s: %s", file, got)
		}
	}
}

// cachedKernel puts a small kernel where the downloaded one would be.
func cachedKernel(t *testing.T, c *image.Cache) {
	t.Helper()
	modules := map[string]string{}
	for _, name := range required {
		modules[name] = ""
	}
	modules["fuse"] = ""
	set := fakeKernel(t, modules)
	boot := filepath.Join(set.root, "boot")
	_, err := cas.Obtain(t.Context(), c.Store(), "kernel", kernelKey(), false, func(ctx context.Context, w *cas.Temp) (kernel, error) {
		root := w.Path("root")
		if err := errors.Join(os.Mkdir(boot, 0o755), os.WriteFile(filepath.Join(boot, "vmlinuz-1.0"), []byte("kernel"), 0o600),
			os.CopyFS(root, os.DirFS(set.root))); err != nil {
			return kernel{}, err
		}
		return storeKernel(ctx, c.Store(), w, root, kernel{Version: "1.0", Package: "1.0-1"})
	})
	if err != nil {
		t.Fatal(err)
	}
}

func TestBuildFromTheCache(t *testing.T) {
	c, err := image.Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	cachedKernel(t, c)
	t.Setenv("PATH", "/nowhere") // nothing may be started
	g, err := Build(t.Context(), c, []byte("agent one"), nil)
	if err != nil {
		t.Fatal(err)
	}
	again, err := Build(t.Context(), c, []byte("agent one"), func(string, int64, int64) { t.Error("a cached guest was built") })
	if err != nil || *again != *g {
		t.Errorf("%+v %v", again, err)
	}
	other, err := Build(t.Context(), c, []byte("agent two"), nil)
	if err != nil || other.Kernel != g.Kernel || other.Initrd == g.Initrd || other.Digest == g.Digest {
		t.Errorf("%+v %v", other, err)
	}
	data, err := os.ReadFile(g.Initrd)
	if err != nil {
		t.Fatal(err)
	}
	found := map[string]cpioEntry{}
	for _, e := range readCPIO(t, data) {
		found[e.name] = e
	}
	if string(found["init"].data) != "agent one" || found["init"].mode != modeFile|0o755 {
		t.Errorf("init: %+v", found["init"])
	}
	list := strings.Fields(string(found["modules.list"].data))
	if len(list) != len(required) {
		t.Errorf("modules.list: %v", list)
	}
	for i, file := range list {
		if moduleName(file) != required[i] || len(found[strings.TrimPrefix(file, "/")].data) == 0 {
			t.Errorf("module %d: %s", i, file)
		}
	}
	if string(found["modules.extra"].data) != "/lib/modules/1.0/kernel/d/fuse.ko\n" {
		t.Errorf("modules.extra: %q", found["modules.extra"].data)
	}
}

func TestDamagedInitrdIsBuiltAgain(t *testing.T) {
	c, err := image.Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	cachedKernel(t, c)
	g, err := Build(t.Context(), c, []byte("agent"), nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(g.Initrd, 100); err != nil {
		t.Fatal(err)
	}
	again, err := Build(t.Context(), c, []byte("agent"), nil)
	if err != nil || again.Initrd != g.Initrd {
		t.Fatalf("%+v %v", again, err)
	}
	if fi, err := os.Stat(again.Initrd); err != nil || fi.Size() == 100 {
		t.Errorf("the initramfs is still cut: %v", err)
	}
}
