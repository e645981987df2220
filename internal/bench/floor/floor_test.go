package floor

import (
	"os"
	"path/filepath"
	"testing"
)

// TestOpenNeedsASnapshot checks that nothing is left of an Open that finds no snapshot, or a broken one.
func TestOpenNeedsASnapshot(t *testing.T) {
	write := func(dir, name, text string) {
		t.Helper()
		path := filepath.Join(dir, "node", name)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for name, files := range map[string]map[string]string{
		"nothing":       {},
		"no manifest":   {"probe.json": `{"Caps":{}}`},
		"no JSON":       {"probe.json": `{"Caps":{}}`, "warm/a/b/manifest.json": "x"},
		"two snapshots": {"probe.json": `{"Caps":{}}`, "warm/a/b/manifest.json": "{}", "warm/a/c/manifest.json": "{}"},
		"no memory":     {"probe.json": `{"Caps":{}}`, "warm/a/b/manifest.json": `{"vcpu":1}`},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			for file, text := range files {
				write(dir, file, text)
			}
			if _, err := Open(t.Context(), dir); err == nil {
				t.Fatal("no error")
			}
			if left, _ := filepath.Glob(filepath.Join(dir, "floor-*")); len(left) > 0 {
				t.Errorf("left behind: %v", left)
			}
		})
	}
}
