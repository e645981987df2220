package boot

import (
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func TestParseToken(t *testing.T) {
	hex := strings.Repeat("ab", 16)
	if got, err := parseToken("console=ttyS0 space.token=" + hex + " quiet\n"); err != nil || got != hex {
		t.Errorf("%q %v", got, err)
	}
	for _, line := range []string{"", "space.token=", "space.token=ab", "space.token=" + strings.Repeat("x", 32), "xspace.token=" + hex} {
		if got, err := parseToken(line); err == nil {
			t.Errorf("%q: %q", line, got)
		}
	}
}

func FuzzParseToken(f *testing.F) {
	f.Add("space.token=00112233445566778899aabbccddeeff")
	f.Add("space.token= space.token=zz")
	f.Fuzz(func(t *testing.T, line string) {
		got, err := parseToken(line)
		if err == nil && (len(got) < 32 || !strings.Contains(line, "space.token="+got)) {
			t.Fatalf("%q: %q", line, got)
		}
	})
}

func blockDir(t *testing.T, serials map[string]string) string {
	t.Helper()
	dir := t.TempDir()
	for dev, serial := range serials {
		if err := os.Mkdir(filepath.Join(dir, dev), 0o755); err != nil {
			t.Fatal(err)
		}
		if serial == "" {
			continue
		}
		if err := os.WriteFile(filepath.Join(dir, dev, "serial"), []byte(serial), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func TestFindDisks(t *testing.T) {
	got, err := findDisks(blockDir(t, map[string]string{"vda": "layer1", "vdb": "writable\n", "vdc": "layer0", "loop0": "", "vdd": "other"}))
	want := map[string]string{"layer0": "/dev/vdc", "layer1": "/dev/vda", "writable": "/dev/vdb"}
	if err != nil || !maps.Equal(got, want) {
		t.Errorf("%v %v", got, err)
	}
	for name, serials := range map[string]map[string]string{
		"nothing":     {},
		"no layer":    {"vda": "writable"},
		"no writable": {"vda": "layer0"},
		"gap":         {"vda": "layer0", "vdb": "layer2", "vdc": "writable"},
	} {
		if got, err := findDisks(blockDir(t, serials)); err == nil {
			t.Errorf("%s: %v", name, got)
		}
	}
}

func TestWaitDisks(t *testing.T) {
	dir := blockDir(t, map[string]string{"vda": "writable"})
	if _, err := waitDisks(dir, 20*time.Millisecond); err == nil {
		t.Error("no error without a layer")
	}
	late := time.AfterFunc(30*time.Millisecond, func() {
		_ = os.Mkdir(filepath.Join(dir, "vdb"), 0o755)
		_ = os.WriteFile(filepath.Join(dir, "vdb", "serial"), []byte("layer0"), 0o644)
	})
	defer late.Stop()
	if disks, err := waitDisks(dir, 10*time.Second); err != nil || disks["layer0"] != "/dev/vdb" {
		t.Errorf("%v %v", disks, err)
	}
}

func TestReserve(t *testing.T) {
	for total, want := range map[uint64]uint64{64 << 20: 32 << 20, 256 << 20: 48 << 20, 1000 << 20: 100 << 20} {
		if got := reserve(total); got != want {
			t.Errorf("%d MiB: %d", total>>20, got)
		}
	}
}

func TestUserCgroup(t *testing.T) {
	root := t.TempDir() // stands for a hierarchy
	if err := os.WriteFile(filepath.Join(root, "cgroup.controllers"), []byte("cpu memory pids\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"cgroup.subtree_control", "user/cgroup.subtree_control", "user/memory.max"} {
		if err := os.MkdirAll(filepath.Dir(filepath.Join(root, name)), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(root, name), nil, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if err := makeUserCgroup(root, 1000<<20); err != nil {
		t.Fatal(err)
	}
	if got, err := os.ReadFile(filepath.Join(root, "user/memory.max")); err != nil || string(got) != "943718400" {
		t.Errorf("%s %v", got, err)
	}
}

func TestLoadList(t *testing.T) {
	list := filepath.Join(t.TempDir(), "modules.list")
	if err := os.WriteFile(list, []byte("\n/no/such.ko\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := loadList(list); err == nil || !strings.Contains(err.Error(), "/no/such.ko") {
		t.Errorf("%v", err)
	}
}
