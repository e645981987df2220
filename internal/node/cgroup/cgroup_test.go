package cgroup

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"
)

func TestFindMount(t *testing.T) {
	const unified = "41 31 0:38 / /sys/fs/cgroup/unified rw,relatime shared:9 - cgroup2 cgroup2 rw\n"
	for name, c := range map[string]struct{ in, want string }{
		"hybrid":    {"32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n" + unified, "/sys/fs/cgroup/unified"},
		"none":      {"32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n", ""},
		"escaped":   {`41 31 0:38 / /a\040b rw - cgroup2 cgroup2 rw` + "\n", "/a b"},
		"bind part": {"41 31 0:38 /part /x rw - cgroup2 cgroup2 rw\n", ""},
		"short":     {"41 31 - cgroup2 x\n", ""},
		"empty":     {"", ""},
	} {
		if got := findMount(c.in); got != c.want {
			t.Errorf("%s: %q want %q", name, got, c.want)
		}
	}
}

func TestFindOwn(t *testing.T) {
	for in, want := range map[string]string{
		"4:memory:/x\n0::/user.slice/a b\n": "/user.slice/a b",
		"0::/\n":                            "/",
		"4:memory:/x\n":                     "",
		"0::relative\n":                     "",
	} {
		if got := findOwn(in); got != want {
			t.Errorf("%q: %q want %q", in, got, want)
		}
	}
}

func TestEmptyTree(t *testing.T) {
	tree := At(filepath.Join(t.TempDir(), "not-a-cgroup"))
	if tree.Gap() == "" {
		t.Fatal("a plain folder was taken for a cgroup")
	}
	path, err := tree.New("x")
	if path != "" || err != nil {
		t.Fatalf("%q, %v", path, err)
	}
	if err := Kill(path); err != nil {
		t.Fatal(err)
	}
	if err := Remove(t.Context(), path); err != nil {
		t.Fatal(err)
	}
	if err := tree.Sweep(t.Context(), nil); err != nil {
		t.Fatal(err)
	}
	tree.Close()
}

func TestLimitWithoutControllers(t *testing.T) {
	dir := t.TempDir()
	if Limit(dir, 1, 1) {
		t.Fatal("limits claimed without controllers")
	}
	for _, name := range []string{"memory.max", "cpu.max"} {
		if err := os.WriteFile(filepath.Join(dir, name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if !Limit(dir, 4096, 2) {
		t.Fatal("limits not set")
	}
	got, _ := os.ReadFile(filepath.Join(dir, "cpu.max"))
	if string(got) != "200000 100000" {
		t.Fatalf("cpu.max %q", got)
	}
}

// TestKillAndSweep needs a cgroup v2 that can be written; elsewhere it checks that the tree says so.
func TestKillAndSweep(t *testing.T) {
	tree := Discover("test-" + filepath.Base(t.TempDir()) + "-" + time.Now().Format("150405.000000"))
	if tree.Gap() != "" {
		t.Logf("no cgroups here: %s", tree.Gap())
		return
	}
	defer tree.Close()
	keep, err := tree.New("keep")
	if err != nil {
		t.Fatal(err)
	}
	group, err := tree.New("sweep")
	if err != nil {
		t.Fatal(err)
	}
	dir, err := os.Open(group)
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	cmd := exec.Command("sleep", "600")
	cmd.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(dir.Fd())}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- cmd.Wait() }()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	if err := tree.Sweep(ctx, func(name string) bool { return name == "keep" }); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err == nil {
		t.Fatal("process ended by itself")
	}
	if _, err := os.Stat(group); !os.IsNotExist(err) {
		t.Fatalf("group left: %v", err)
	}
	if _, err := os.Stat(keep); err != nil {
		t.Fatalf("kept group: %v", err)
	}
	if err := Remove(ctx, keep); err != nil {
		t.Fatal(err)
	}
}
