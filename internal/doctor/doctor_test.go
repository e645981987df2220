package doctor

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/space-sandbox/space/internal/vmm"
)

// good is a machine on which everything works.
func good() *Facts {
	files := map[string]string{
		"/proc/self/mountinfo":              "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
		"/sys/fs/cgroup/cgroup.controllers": "cpuset cpu io memory pids\n",
		"/proc/meminfo":                     "MemTotal: 1 kB\nMemAvailable: 4194304 kB\n",
		"/sys/kernel/security/lsm":          "lockdown,capability,landlock\n",
		"/proc/self/status":                 "Seccomp:\t0\n",
		"/proc/self/uid_map":                "0 0 1\n",
	}
	return &Facts{
		LookPath: func(name string) (string, error) { return "/usr/bin/" + name, nil },
		ReadFile: func(p string) ([]byte, error) {
			if s, ok := files[p]; ok {
				return []byte(s), nil
			}
			return nil, fs.ErrNotExist
		},
		OpenKVM:   func() error { return nil },
		Probe:     func(context.Context) (vmm.Capabilities, error) { return vmm.Capabilities{Acceleration: vmm.KVM}, nil },
		Resolve:   func(context.Context, string) ([]string, error) { return []string{"::1"}, nil },
		Free:      func(string) (Space, error) { return Space{FreeMiB: 1 << 20}, nil },
		Writable:  func(string) error { return nil },
		Listening: func(context.Context, string) error { return errors.New("refused") },
		Healthy:   func(context.Context, string) bool { return false },
		FileClock: func(string) (time.Time, time.Time, error) { now := time.Now(); return now, now, nil },
		ClockSync: func() (bool, error) { return true, nil },
	}
}

func find(t *testing.T, r Report, name string) Check {
	t.Helper()
	for _, c := range r.Checks {
		if c.Name == name {
			return c
		}
	}
	t.Fatalf("no check %q in %+v", name, r)
	return Check{}
}

func TestAGoodMachine(t *testing.T) {
	r := Run(t.Context(), good(), Options{DataDir: "/d", CacheDir: "/c"})
	for _, c := range r.Checks {
		if c.Status != OK || c.Remedy != "" || c.Message == "" {
			t.Errorf("%+v", c)
		}
	}
	if r.Failed() || len(r.Checks) < 12 {
		t.Errorf("%+v", r)
	}
}

func reading(f *Facts, path, text string) {
	old := f.ReadFile
	f.ReadFile = func(p string) ([]byte, error) {
		if p == path {
			return []byte(text), nil
		}
		return old(p)
	}
}

func TestEveryTroubleHasARemedy(t *testing.T) {
	no := func(string) (string, error) { return "", errors.New("not found") }
	for name, test := range map[string]struct {
		spoil  func(*Facts)
		check  string
		status Status
		want   string // in message or remedy
	}{
		"no qemu":        {func(f *Facts) { f.LookPath = no }, "qemu", Fail, "qemu-system-x86"},
		"no mmdebstrap":  {func(f *Facts) { f.LookPath = no }, "mmdebstrap", Fail, "apt-get install mmdebstrap"},
		"no mke2fs":      {func(f *Facts) { f.LookPath = no }, "mke2fs", Fail, "e2fsprogs"},
		"no kvm":         {func(f *Facts) { f.OpenKVM = func() error { return os.ErrNotExist } }, "kvm", Warn, "TCG"},
		"kvm forbidden":  {func(f *Facts) { f.OpenKVM = func() error { return os.ErrPermission } }, "kvm", Warn, "group kvm"},
		"kvm odd":        {func(f *Facts) { f.OpenKVM = func() error { return errors.New("EBUSY") } }, "kvm", Warn, "EBUSY"},
		"kvm not tried":  {func(f *Facts) { f.Probe = nil }, "kvm", Warn, "space up"},
		"kvm broken":     {probing(vmm.Capabilities{AccelReason: "internal error"}, nil), "kvm", Warn, "internal error"},
		"probe fails":    {probing(vmm.Capabilities{}, errors.New("boom")), "kvm", Warn, "boom"},
		"isolation gaps": {probing(vmm.Capabilities{IsolationGaps: []string{"no Landlock: newer kernel"}}, nil), "isolation", Warn, "no Landlock"},
		"probe fails 2":  {probing(vmm.Capabilities{}, errors.New("boom")), "isolation", Warn, "boom"},
		"no landlock": {func(f *Facts) {
			f.Probe = nil
			reading(f, "/sys/kernel/security/lsm", "capability")
		}, "isolation", Warn, "Landlock"},
		"no userns": {func(f *Facts) {
			f.Probe, f.Euid = nil, 1000
			reading(f, "/proc/sys/kernel/unprivileged_userns_clone", "0\n")
		}, "isolation", Warn, "sysctl"},
		"no names": {func(f *Facts) {
			f.Resolve = func(context.Context, string) ([]string, error) { return nil, errors.New("x") }
		}, "localhost names", Warn, "libnss-myhostname"},
		"foreign name": {func(f *Facts) {
			f.Resolve = func(context.Context, string) ([]string, error) { return []string{"203.0.113.1"}, nil }
		}, "localhost names", Warn, "libnss-myhostname"},
		"no cgroup2":     {func(f *Facts) { reading(f, "/proc/self/mountinfo", "1 2 0:1 / / rw - ext4 x rw\n") }, "cgroup2", Warn, "not mounted"},
		"no controller":  {func(f *Facts) { reading(f, "/sys/fs/cgroup/cgroup.controllers", "cpu pids\n") }, "cgroup2", Warn, "memory"},
		"little memory":  {func(f *Facts) { reading(f, "/proc/meminfo", "MemAvailable: 1024 kB\n") }, "memory", Warn, "1 MiB"},
		"odd meminfo":    {func(f *Facts) { reading(f, "/proc/meminfo", "") }, "memory", Warn, "does not tell"},
		"little disk":    {func(f *Facts) { f.Free = func(string) (Space, error) { return Space{10}, nil } }, "disk space", Warn, "10 MiB"},
		"no disk":        {func(f *Facts) { f.Free = func(string) (Space, error) { return Space{}, errors.New("gone") } }, "disk space", Fail, "gone"},
		"data read-only": {func(f *Facts) { f.Writable = func(string) error { return os.ErrPermission } }, "data folder", Fail, "--data-dir"},
		"port taken":     {func(f *Facts) { f.Listening = func(context.Context, string) error { return nil } }, "API port", Warn, "--api-listen"},
		"clock free":     {func(f *Facts) { f.ClockSync = func() (bool, error) { return false, nil } }, "clock", Warn, "timesyncd"},
		"file clock": {func(f *Facts) {
			f.FileClock = func(string) (time.Time, time.Time, error) { now := time.Now(); return now, now.Add(time.Hour), nil }
		}, "clock", Warn, "file system"},
	} {
		t.Run(name, func(t *testing.T) {
			f := good()
			test.spoil(f)
			r := Run(t.Context(), f, Options{DataDir: "/d", CacheDir: "/c"})
			c := find(t, r, test.check)
			if c.Status != test.status || c.Remedy == "" || !strings.Contains(c.Message+c.Remedy, test.want) {
				t.Errorf("%+v", c)
			}
			if r.Failed() != (test.status == Fail) {
				t.Errorf("failed: %v", r.Failed())
			}
		})
	}
}

func probing(caps vmm.Capabilities, err error) func(*Facts) {
	return func(f *Facts) { f.Probe = func(context.Context) (vmm.Capabilities, error) { return caps, err } }
}

func TestAServerThatAnswersIsFine(t *testing.T) {
	f := good()
	f.Listening = func(context.Context, string) error { return nil }
	f.Healthy = func(context.Context, string) bool { return true }
	if c := find(t, Run(t.Context(), f, Options{}), "data plane port"); c.Status != OK {
		t.Errorf("%+v", c)
	}
}

func TestThisMachine(t *testing.T) {
	dir := t.TempDir()
	f := System(Prober(dir)) // an empty cache: nothing to boot
	if f.Probe != nil {
		t.Fatal("a probe without a kernel")
	}
	r := Run(t.Context(), f, Options{DataDir: dir + "/not/there", CacheDir: dir, APIListen: "127.0.0.1:1", DataListen: "127.0.0.1:1"})
	for _, c := range r.Checks {
		if c.Status != OK && c.Remedy == "" {
			t.Errorf("no remedy: %+v", c)
		}
	}
	for _, name := range []string{"data folder", "API port"} {
		if c := find(t, r, name); c.Status != OK {
			t.Errorf("%+v", c)
		}
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) != 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
}
