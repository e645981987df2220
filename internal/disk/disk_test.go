package disk

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/space-sandbox/space/internal/sandbox"
)

func run(t *testing.T, name string, args ...string) string {
	t.Helper()
	out, err := exec.Command(name, args...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s %v: %v\n%s", name, args, err, out)
	}
	return string(out)
}

func TestQCOW2IsWhatQEMUExpects(t *testing.T) {
	for _, size := range []int64{512, 1 << 20, 512 << 20, 512<<20 + 512, 2 << 30, 1 << 40, maxSize} {
		path := filepath.Join(t.TempDir(), "top.qcow2")
		if err := CreateQCOW2(path, size); err != nil {
			t.Fatalf("size %d: %v", size, err)
		}
		run(t, "qemu-img", "check", "-f", "qcow2", path)
		var info struct {
			Format      string
			VirtualSize int64  `json:"virtual-size"`
			ClusterSize int64  `json:"cluster-size"`
			Backing     string `json:"backing-filename"`
			Specific    struct {
				Data struct {
					Compat  string
					Corrupt bool
				}
			} `json:"format-specific"`
		}
		out := run(t, "qemu-img", "info", "--output=json", path)
		if err := json.Unmarshal([]byte(out), &info); err != nil {
			t.Fatal(err)
		}
		if info.Format != "qcow2" || info.VirtualSize != size || info.ClusterSize != clusterSize || info.Backing != "" ||
			info.Specific.Data.Compat != "1.1" || info.Specific.Data.Corrupt {
			t.Errorf("size %d: qemu-img says %s", size, out)
		}
	}
}

func TestQCOW2TakesWritesOverABase(t *testing.T) {
	dir := t.TempDir()
	base, top := filepath.Join(dir, "base.raw"), filepath.Join(dir, "top.qcow2")
	if err := os.WriteFile(base, bytes.Repeat([]byte{0x11}, 64<<20), 0o444); err != nil {
		t.Fatal(err)
	}
	if err := (Images{}).Top(t.Context(), top, []string{base}, 64); err != nil {
		t.Fatal(err)
	}
	image := `json:{"driver":"qcow2","file":{"driver":"file","filename":"` + top +
		`"},"backing":{"driver":"raw","file":{"driver":"file","filename":"` + base + `"}}}`
	for _, command := range []string{"read -P 0x11 0 64M", "write -P 0x22 1000000 3000000", "read -P 0x22 1000000 3000000",
		"read -P 0x11 0 1000000", "read -P 0x11 4000000 60M"} {
		if out := run(t, "qemu-io", "-c", command, image); strings.Contains(out, "failed") {
			t.Errorf("%s: %s", command, out)
		}
	}
	run(t, "qemu-img", "check", "-f", "qcow2", top)
	data, err := os.ReadFile(base)
	if err != nil || bytes.Count(data, []byte{0x11}) != 64<<20 {
		t.Errorf("the base changed: %v", err)
	}
}

func TestQCOW2Refuses(t *testing.T) {
	dir := t.TempDir()
	for _, size := range []int64{0, -512, 1, 513, maxSize + 512} {
		path := filepath.Join(dir, "x")
		if err := CreateQCOW2(path, size); !errors.Is(err, ErrFormat) {
			t.Errorf("size %d: %v", size, err)
		}
		if _, err := os.Stat(path); err == nil {
			t.Errorf("size %d left a file", size)
		}
	}
	path := filepath.Join(dir, "there")
	if err := os.WriteFile(path, []byte("mine"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := CreateQCOW2(path, 1<<20); !errors.Is(err, os.ErrExist) {
		t.Errorf("existing file: %v", err)
	}
	if data, _ := os.ReadFile(path); string(data) != "mine" {
		t.Error("an existing file was overwritten")
	}
}

func TestTopChecksItsBacking(t *testing.T) {
	dir := t.TempDir()
	write := func(name string, size int64) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Truncate(path, size); err != nil {
			t.Fatal(err)
		}
		return path
	}
	base := write("base", 64<<20)
	middle := filepath.Join(dir, "middle")
	if err := CreateQCOW2(middle, 64<<20); err != nil {
		t.Fatal(err)
	}
	small := filepath.Join(dir, "small")
	if err := CreateQCOW2(small, 32<<20); err != nil {
		t.Fatal(err)
	}
	cases := map[string]struct {
		backing []string
		ok      bool
	}{
		"none":           {nil, true},
		"base":           {[]string{base}, true},
		"chain":          {[]string{middle, base}, true},
		"raw size":       {[]string{write("short", 64<<20-1)}, false},
		"qcow2 size":     {[]string{small, base}, false},
		"raw as qcow2":   {[]string{base, base}, false},
		"empty as qcow2": {[]string{write("empty", 0), base}, false},
		"missing":        {[]string{filepath.Join(dir, "no")}, false},
		"folder":         {[]string{dir}, false},
	}
	for name, c := range cases {
		path := filepath.Join(t.TempDir(), "top")
		err := Images{}.Top(t.Context(), path, c.backing, 64)
		if (err == nil) != c.ok {
			t.Errorf("%s: %v", name, err)
		}
		if _, serr := os.Stat(path); (serr == nil) != c.ok {
			t.Errorf("%s: file: %v", name, serr)
		}
	}
}

func TestBase(t *testing.T) {
	dir := t.TempDir()
	var images [2][]byte
	for i := range images {
		path := filepath.Join(dir, []string{"a", "b"}[i])
		if err := (Images{}).Base(t.Context(), path, 256); err != nil {
			t.Fatal(err)
		}
		run(t, "e2fsck", "-fn", path)
		fi, err := os.Stat(path)
		if err != nil || fi.Size() != 256<<20 || fi.Mode().Perm() != 0o444 {
			t.Fatalf("%v %v", fi, err)
		}
		if images[i], err = os.ReadFile(path); err != nil {
			t.Fatal(err)
		}
	}
	if !bytes.Equal(images[0], images[1]) {
		t.Error("two base images of one size differ")
	}
	out := run(t, "dumpe2fs", filepath.Join(dir, "a"))
	if !strings.Contains(out, "Reserved block count:     0\n") || !strings.Contains(out, "has_journal") {
		t.Errorf("unexpected file system:\n%.2000s", out)
	}
	if err := (Images{}).Base(t.Context(), filepath.Join(dir, "a"), 256); !errors.Is(err, os.ErrExist) {
		t.Errorf("existing base: %v", err)
	}
}

func TestBaseLeavesNothingWhenCancelled(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	path := filepath.Join(t.TempDir(), "base")
	if err := (Images{}).Base(ctx, path, 256); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
	if _, err := os.Stat(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("left: %v", err)
	}
}

func TestSizeLimits(t *testing.T) {
	for size, ok := range map[uint32]bool{0: false, MinMiB - 1: false, MinMiB: true, MaxMiB: true, MaxMiB + 1: false} {
		err := Images{}.Top(t.Context(), filepath.Join(t.TempDir(), "t"), nil, size)
		if (err == nil) != ok || !ok && sandbox.CodeOf(err) != sandbox.CodeInvalidRequest {
			t.Errorf("%d MiB: %v", size, err)
		}
	}
	path := filepath.Join(t.TempDir(), "base")
	if err := (Images{}).Base(t.Context(), path, MinMiB); err != nil {
		t.Errorf("the least size: %v", err)
	}
}

func FuzzParseSize(f *testing.F) {
	path := filepath.Join(f.TempDir(), "seed")
	if err := CreateQCOW2(path, 1<<30); err != nil {
		f.Fatal(err)
	}
	data, err := os.ReadFile(path)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(data[:104])
	f.Add([]byte{})
	f.Add([]byte("QFI\xfb\x00\x00\x00\x03"))
	f.Fuzz(func(t *testing.T, data []byte) {
		size, err := parseSize(bytes.NewReader(data))
		if err == nil && (size <= 0 || size > maxSize) {
			t.Errorf("size %d", size)
		}
		if err != nil && !errors.Is(err, ErrFormat) {
			t.Errorf("untyped error %v", err)
		}
	})
}

func BenchmarkCreateQCOW2(b *testing.B) {
	dir := b.TempDir()
	path := filepath.Join(dir, "t")
	for b.Loop() {
		if err := CreateQCOW2(path, 2<<30); err != nil {
			b.Fatal(err)
		}
		b.StopTimer()
		if err := os.Remove(path); err != nil {
			b.Fatal(err)
		}
		b.StartTimer()
	}
}
