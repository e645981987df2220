package agent

import (
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

func TestHosts(t *testing.T) {
	for old, want := range map[string]string{
		"":                                   "127.0.0.1 localhost\n::1 localhost ip6-localhost ip6-loopback\n127.0.1.1 box\n",
		"127.0.0.1 localhost\n127.0.1.1 old": "127.0.0.1 localhost\n127.0.1.1 box\n",
		"# mine\n127.0.0.1\tlocalhost\n1.2.3.4 x": "# mine\n127.0.0.1\tlocalhost\n1.2.3.4 x\n127.0.1.1 box\n",
	} {
		if got := string(hosts([]byte(old), "box")); got != want {
			t.Errorf("%q: %q", old, got)
		}
	}
}

// TestLinuxFiles checks that links and pipes in the place of the agent's files are replaced and not followed.
func TestLinuxFiles(t *testing.T) {
	root := t.TempDir()
	l := NewLinux(root)
	outside := filepath.Join(t.TempDir(), "outside")
	if err := os.MkdirAll(filepath.Join(root, "etc"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(filepath.Join(root, "var/lib/dbus"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(root, "var/lib/dbus/machine-id"), []byte("old"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(outside, filepath.Join(root, "etc/machine-id")); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Mkfifo(filepath.Join(root, "etc/hosts"), 0o644); err != nil {
		t.Fatal(err)
	}
	id := machineID("i1", 1)
	if err := l.SetMachineID(id); err != nil {
		t.Fatal(err)
	}
	if err := l.SetGeneration(3); err != nil {
		t.Fatal(err)
	}
	if err := l.SetCABundle([]byte("pem")); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{"etc/machine-id": id + "\n", "var/lib/dbus/machine-id": id + "\n",
		"run/space/generation": "3\n", "run/space/ca-bundle.pem": "pem"} {
		if got, err := os.ReadFile(filepath.Join(root, name)); err != nil || string(got) != want {
			t.Errorf("%s: %q %v", name, got, err)
		}
	}
	if _, err := os.Lstat(outside); !os.IsNotExist(err) {
		t.Error("a link was followed")
	}
	if got := l.readSmall("etc/hosts"); got != nil {
		t.Errorf("a pipe was read: %q", got)
	}
}

func TestMachineID(t *testing.T) {
	a, b, c := machineID("i1", 1), machineID("i1", 2), machineID("i2", 1)
	if a == b || a == c || a != machineID("i1", 1) || len(a) != 32 || strings.Trim(a, "0123456789abcdef") != "" {
		t.Errorf("%s %s %s", a, b, c)
	}
}

func TestUsage(t *testing.T) {
	u, err := NewLinux("/").Usage()
	if err != nil || u.MemoryTotal == 0 || u.MemoryAvailable == 0 || u.AgentRSS == 0 || u.DiskTotal == 0 || u.AgentFDs == 0 {
		t.Errorf("%+v %v", u, err)
	}
}

func FuzzHosts(f *testing.F) {
	f.Add([]byte("127.0.0.1 localhost\n127.0.1.1 x\n"))
	f.Add([]byte("\n\n"))
	f.Fuzz(func(t *testing.T, old []byte) {
		once := hosts(old, "box")
		if twice := hosts(once, "box"); string(twice) != string(once) {
			t.Fatalf("%q, then %q", once, twice)
		}
	})
}
