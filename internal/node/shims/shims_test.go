package shims

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	nodev1 "github.com/space-sandbox/space/internal/gen/space/node/v1"
	shimv1 "github.com/space-sandbox/space/internal/gen/space/shim/v1"
	"github.com/space-sandbox/space/internal/node/cgroup"
	"github.com/space-sandbox/space/internal/node/shimtest"
)

func TestMain(m *testing.M) {
	shimtest.Main()
	os.Exit(m.Run())
}

func manager(t *testing.T) *Manager {
	t.Helper()
	run, err := os.MkdirTemp("/tmp", "ss")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(run) })
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	return &Manager{Dir: t.TempDir(), Runtime: run, Binary: exe, Cgroups: &cgroup.Tree{}, Log: slog.New(slog.DiscardHandler)}
}

func nothing(context.Context, *shimv1.LaunchSpec, string) error { return nil }

func restoreSpec() *shimv1.LaunchSpec {
	return &shimv1.LaunchSpec{Mode: shimv1.LaunchSpec_MODE_RESTORE, Resources: &nodev1.Resources{Vcpu: 1, MemoryMib: 1}}
}

func launch(t *testing.T, m *Manager) *Shim {
	t.Helper()
	s := arm(t, m)
	t.Cleanup(func() {
		if err := s.Destroy(context.Background(), ""); err != nil {
			t.Error(err)
		}
	})
	return s
}

// arm leaves it to the caller to end the shim.
func arm(t *testing.T, m *Manager) *Shim {
	t.Helper()
	s, err := m.Launch(t.Context(), restoreSpec(), nil, nothing)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	if _, err := s.WaitState(ctx, shimv1.ShimState_SHIM_STATE_ARMED); err != nil {
		t.Fatal(err)
	}
	return s
}

func TestLaunchBindDestroy(t *testing.T) {
	m := manager(t)
	s := launch(t, m)
	shim, vmm := s.PIDs()
	if shim == 0 || vmm == 0 || !s.Alive() {
		t.Fatalf("pids %d, %d", shim, vmm)
	}
	env, err := os.ReadFile(filepath.Join("/proc", itoa(shim), "environ"))
	if err != nil || len(env) != 0 {
		t.Errorf("environment %q, %v", env, err)
	}
	st, err := s.Bind(t.Context(), &shimv1.BindRequest{SandboxId: "x", Generation: 2, JournalDir: t.TempDir()})
	if err != nil || st.Generation != 2 {
		t.Fatalf("%v, %v", st, err)
	}
	gone := 0
	s.OnGone = func() { gone++ }
	for range 2 {
		if err := s.Destroy(t.Context(), "sandbox_deleted"); err != nil {
			t.Fatal(err)
		}
	}
	if gone != 1 {
		t.Errorf("OnGone called %d times", gone)
	}
	for _, path := range []string{s.Dir, s.Spec.Socket} {
		if _, err := os.Stat(path); !os.IsNotExist(err) {
			t.Errorf("%s left: %v", path, err)
		}
	}
}

func itoa(n int) string {
	var b []byte
	for ; n > 0; n /= 10 {
		b = append([]byte{byte('0' + n%10)}, b...)
	}
	return string(b)
}

func TestFailedLaunchLeavesNothing(t *testing.T) {
	boom := errors.New("boom")
	for name, c := range map[string]struct {
		change  func(*Manager)
		prepare PrepareFunc
	}{
		"prepare":     {func(*Manager) {}, func(context.Context, *shimv1.LaunchSpec, string) error { return boom }},
		"no program":  {func(m *Manager) { m.Binary = "/nonexistent" }, nothing},
		"long socket": {func(m *Manager) { m.Runtime = "/" + strings.Repeat("x", 100) }, nothing},
	} {
		m := manager(t)
		c.change(m)
		if _, err := m.Launch(t.Context(), restoreSpec(), nil, c.prepare); err == nil {
			t.Errorf("%s: no error", name)
		}
		if ids, err := m.List(); err != nil || len(ids) != 0 {
			t.Errorf("%s: left %v, %v", name, ids, err)
		}
	}
}

func TestWaitStateTellsDeath(t *testing.T) {
	m := manager(t)
	m.Binary = "/bin/false"
	s, err := m.Launch(t.Context(), restoreSpec(), nil, nothing)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.WaitState(t.Context(), shimv1.ShimState_SHIM_STATE_ARMED); !errors.Is(err, ErrDied) {
		t.Errorf("%v", err)
	}
	if err := s.Destroy(t.Context(), ""); err != nil {
		t.Fatal(err)
	}
}

func TestWaitExit(t *testing.T) {
	for name, c := range map[string]struct {
		warmUp []string
		ok     bool
	}{"success": {nil, true}, "failure": {[]string{shimtest.CaptureFails}, false}} {
		m := manager(t)
		spec := restoreSpec()
		spec.Mode, spec.WarmUp = shimv1.LaunchSpec_MODE_CAPTURE, c.warmUp
		s, err := m.Launch(t.Context(), spec, nil, func(_ context.Context, spec *shimv1.LaunchSpec, dir string) error {
			spec.CaptureDir = dir
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		err = s.WaitExit(t.Context())
		if (err == nil) != c.ok || !c.ok && !strings.Contains(err.Error(), "told to fail") {
			t.Errorf("%s: %v", name, err)
		}
		if err := s.Destroy(t.Context(), ""); err != nil {
			t.Error(err)
		}
	}
}

func TestAdoptAfterRelease(t *testing.T) {
	m := manager(t)
	first := arm(t, m)
	shim, vmm := first.PIDs()
	first.Release()
	again, err := m.Adopt(first.ID)
	if err != nil {
		t.Fatal(err)
	}
	defer again.Release()
	if s, v := again.PIDs(); s != shim || v != vmm {
		t.Errorf("adopted %d, %d; want %d, %d", s, v, shim, vmm)
	}
	if st, err := again.Status(t.Context()); err != nil || st.State != shimv1.ShimState_SHIM_STATE_ARMED {
		t.Errorf("%v, %v", st, err)
	}
	// A VMM whose shim died is killed by what the shim's folder says of it.
	if err := unix.Kill(shim, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	<-again.Done()
	if err := again.Destroy(t.Context(), "x"); err != nil {
		t.Fatal(err)
	}
}

func TestAdoptRemains(t *testing.T) {
	m := manager(t)
	for name, files := range map[string]map[string]string{
		"empty":     {},
		"bad spec":  {"spec.json": "{"},
		"other id":  {"spec.json": `{"shimId":"other"}`},
		"bad pid":   {"pid.json": "x"},
		"zero pid":  {"pid.json": `{"shim":{"pid":0}}`},
		"other run": {"pid.json": `{"shim":{"boot_id":"b","pid":1,"start_time":1}}`},
	} {
		id := strings.ReplaceAll(name, " ", "")
		if err := os.MkdirAll(m.Path(id), 0o700); err != nil {
			t.Fatal(err)
		}
		for file, text := range files {
			if err := os.WriteFile(filepath.Join(m.Path(id), file), []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		s, err := m.Adopt(id)
		if err != nil || s.Alive() {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if err := s.Destroy(t.Context(), ""); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	if ids, _ := m.List(); len(ids) != 0 {
		t.Errorf("left %v", ids)
	}
}
