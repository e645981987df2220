package node

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	nodev1 "github.com/space-sandbox/space/internal/gen/space/node/v1"
	"github.com/space-sandbox/space/internal/node/shimtest"
	"github.com/space-sandbox/space/internal/sandbox"
)

func (n *testNode) base() *nodev1.Template {
	n.t.Helper()
	resp, err := n.client.ListTemplates(n.t.Context(), connect.NewRequest(&nodev1.ListTemplatesRequest{}))
	if err != nil || len(resp.Msg.Templates) != 1 {
		n.t.Fatalf("%v, %v", resp, err)
	}
	return resp.Msg.Templates[0]
}

func TestTemplateWhileItIsBuilt(t *testing.T) {
	p := newPlace(t)
	p.fakes.baseGate = make(chan struct{})
	n := p.start()
	eventually(t, "progress", func() bool { return n.base().Progress.GetPhase() == "packages" })
	if b := n.base(); b.State != nodev1.TemplateState_TEMPLATE_STATE_BUILDING || b.Digest != "" || b.Name != "base" {
		t.Errorf("while it is built: %v", b)
	}
	resp, err := n.client.GetNode(t.Context(), connect.NewRequest(&nodev1.GetNodeRequest{}))
	if err != nil || resp.Msg.Ready || !strings.Contains(resp.Msg.NotReadyReason, "packages") {
		t.Errorf("node %v, %v", resp, err)
	}
	close(p.fakes.baseGate)
	n.waitReady()
	if b := n.base(); b.State != nodev1.TemplateState_TEMPLATE_STATE_READY || b.Digest != testDigest || b.Progress != nil || b.Defaults.MemoryMib != 128 {
		t.Errorf("ready: %v", b)
	}
}

func TestFailedTemplateIsRetriedOnDemand(t *testing.T) {
	p := newPlace(t)
	boom := errors.New("mirror is down")
	p.fakes.baseErr.Store(&boom)
	n := p.start()
	eventually(t, "failure", func() bool { return n.base().State == nodev1.TemplateState_TEMPLATE_STATE_FAILED })
	if b := n.base(); !strings.Contains(b.Reason, "mirror is down") {
		t.Errorf("reason %q", b.Reason)
	}
	_, err := n.create(request(sandbox.NewID(), 1))
	wantCode(t, err, connect.CodeUnavailable)
	if !strings.Contains(err.Error(), "mirror is down") {
		t.Errorf("%v does not say why", err)
	}
	p.fakes.baseErr.Store(new(error))
	n.waitReady()
	n.mustCreate()
}

func TestFailedCaptureIsTold(t *testing.T) {
	p := newPlace(t)
	p.fakes.warmUp = []string{shimtest.CaptureFails}
	n := p.start()
	_, err := n.create(request(sandbox.NewID(), 1))
	if err == nil || !strings.Contains(err.Error(), "told to fail") {
		t.Errorf("%v does not say why", err)
	}
	eventually(t, "reason", func() bool { return strings.Contains(n.notReady(), "told to fail") })
	p.nothingLeft()
}

func TestDamagedSnapshotIsCapturedAgain(t *testing.T) {
	for name, damage := range map[string]func(dir string) error{
		"no manifest":  func(dir string) error { return os.Remove(filepath.Join(dir, "manifest.json")) },
		"bad manifest": func(dir string) error { return os.WriteFile(filepath.Join(dir, "manifest.json"), []byte("{"), 0o600) },
		"short file":   func(dir string) error { return os.Truncate(filepath.Join(dir, "memory"), 1) },
		"no file":      func(dir string) error { return os.Remove(filepath.Join(dir, "state")) },
	} {
		t.Run(name, func(t *testing.T) {
			p := newPlace(t)
			n := p.start()
			n.waitReady()
			n.stop()
			dirs, err := filepath.Glob(filepath.Join(p.data, "node", "warm", "*", "*"))
			if err != nil || len(dirs) != 1 {
				t.Fatalf("%v, %v", dirs, err)
			}
			for _, file := range warmFiles {
				if info, err := os.Stat(filepath.Join(dirs[0], file)); err != nil || info.Mode().Perm() != 0o444 {
					t.Errorf("%s: %v, %v", file, info, err)
				}
			}
			if err := damage(dirs[0]); err != nil {
				t.Fatal(err)
			}
			n = p.start()
			n.mustCreate()
			if got := p.fakes.captures.Load(); got != 2 {
				t.Errorf("%d captures", got)
			}
		})
	}
}

func TestObsoleteSnapshotsAreSwept(t *testing.T) {
	p := newPlace(t)
	n := p.start()
	n.waitReady()
	n.stop()
	old := filepath.Join(p.data, "node", "warm", strings.Repeat("0", 64), "1-128-256-tcg-0123456789ab")
	if err := os.MkdirAll(old, 0o700); err != nil {
		t.Fatal(err)
	}
	n = p.start()
	n.waitReady()
	eventually(t, "swept", func() bool { _, err := os.Stat(filepath.Dir(old)); return os.IsNotExist(err) })
	n.mustCreate()
	if got := p.fakes.captures.Load(); got != 1 {
		t.Errorf("%d captures: a snapshot in use was swept", got)
	}
}

func TestTombstones(t *testing.T) {
	path := filepath.Join(t.TempDir(), "generations")
	now := time.Now()
	g, err := openGenerations(path, now)
	if err != nil {
		t.Fatal(err)
	}
	for _, generation := range []uint64{3, 5, 4} {
		if err := g.add("a", generation); err != nil {
			t.Fatal(err)
		}
	}
	if err := g.close(); err != nil {
		t.Fatal(err)
	}
	// A power loss cuts the last line.
	f, err := os.OpenFile(path, os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteString(`{"id":"b","gener`); err != nil {
		t.Fatal(err)
	}
	_ = f.Close()
	if g, err = openGenerations(path, now); err != nil {
		t.Fatal(err)
	}
	if last, ok := g.deleted("a"); !ok || last != 5 {
		t.Errorf("%d, %v", last, ok)
	}
	if _, ok := g.deleted("b"); ok {
		t.Error("half a line counts")
	}
	if err := g.add("c", 1); err != nil {
		t.Fatal(err)
	}
	_ = g.close()
	if g, err = openGenerations(path, now.Add(tombstoneTTL+time.Hour)); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = g.close() }()
	if len(g.last) != 0 {
		t.Errorf("kept for ever: %v", g.last)
	}
}

func FuzzParseTombstones(f *testing.F) {
	f.Add([]byte(`{"id":"a","generation":3,"at":"2026-01-01T00:00:00Z"}` + "\n"))
	f.Add([]byte("{}\nnull\n[]"))
	f.Fuzz(func(t *testing.T, data []byte) {
		for _, ts := range parseTombstones(data) {
			if ts.ID == "" {
				t.Error("a tombstone for nobody")
			}
		}
	})
}

func TestInstanceID(t *testing.T) {
	path := filepath.Join(t.TempDir(), "instance")
	first, err := instanceID(path)
	if err != nil || len(first) != 8 {
		t.Fatalf("%q, %v", first, err)
	}
	if again, err := instanceID(path); err != nil || again != first {
		t.Errorf("%q, %v", again, err)
	}
	for _, bad := range []string{"", "../x", "a b"} {
		if err := os.WriteFile(path, []byte(bad), 0o600); err != nil {
			t.Fatal(err)
		}
		if id, err := instanceID(path); err == nil {
			t.Errorf("%q accepted as %q", bad, id)
		}
	}
}
