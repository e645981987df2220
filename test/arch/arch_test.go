package arch

import (
	"os/exec"
	"slices"
	"strings"
	"testing"
)

const module = "github.com/space-sandbox/space/"

// layers are the parts of the tree from the bottom up. A package may import packages of its own layer and of layers
// below; a prefix covers the packages beneath it, and the longest matching prefix decides.
var layers = [][]string{
	{"internal/sandbox", "internal/gen", "internal/embedded", "internal/buildtools"},
	{"internal/vmm", "internal/store", "internal/auth", "internal/journal", "internal/link", "internal/disk", "internal/image", "internal/guest"},
	{"internal/store/sqlite", "internal/vmm/qemu", "internal/agent"},
	{"internal/shim", "internal/control"},
	{"internal/node", "internal/api", "internal/dataplane", "internal/client", "internal/config"},
	{"internal/daemon", "internal/doctor", "internal/bench"},
	{"internal/cli"},
	{"cmd"},
	{"test"},
}

// forbidden are imports that the layers allow and the design does not: the left side must not reach the right.
var forbidden = map[string][]string{
	"cmd/space-shim":       {"internal/store", "internal/control", "internal/node", "internal/api", "internal/image", "internal/guest", "internal/agent", "internal/auth"},
	"cmd/space-agent":      {"internal/store", "internal/control", "internal/node", "internal/api", "internal/shim", "internal/image", "internal/auth", "internal/link"},
	"internal/api":         {"internal/node", "internal/shim", "internal/store", "internal/vmm"},
	"internal/dataplane":   {"internal/node", "internal/shim", "internal/store", "internal/vmm"},
	"internal/control":     {"internal/node", "internal/shim", "internal/store/sqlite", "internal/vmm", "internal/api"},
	"internal/client":      {"internal/api", "internal/control", "internal/node", "internal/store", "internal/shim"},
	"internal/node":        {"internal/control", "internal/store", "internal/api"},
	"internal/shim":        {"internal/control", "internal/store", "internal/node"},
	"internal/vmm/vmmtest": {"internal/shim", "internal/node"},
}

// heavy are libraries that must stay out of the binaries that run once per sandbox.
var heavy = []string{"modernc.org/sqlite", "github.com/danielgtaylor/huma", "k8s.io/", "github.com/aws/", "github.com/pressly/goose", "github.com/spf13/cobra", "github.com/Microsoft/hcsshim"}

// list runs `go list` and returns the fields of each line.
func list(t *testing.T, format string, patterns ...string) [][]string {
	t.Helper()
	cmd := exec.Command("go", append([]string{"list", "-f", format}, patterns...)...)
	cmd.Dir = "../.."
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list: %v", err)
	}
	var lines [][]string
	for line := range strings.Lines(string(out)) {
		lines = append(lines, strings.Fields(line))
	}
	return lines
}

// layer returns the index of the layer that pkg belongs to, or -1.
func layer(pkg string) int {
	best, found := "", -1
	for i, prefixes := range layers {
		for _, p := range prefixes {
			if within(pkg, p) && len(p) > len(best) {
				best, found = p, i
			}
		}
	}
	return found
}

func within(pkg, prefix string) bool { return pkg == prefix || strings.HasPrefix(pkg, prefix+"/") }

func TestImportsPointDown(t *testing.T) {
	for _, fields := range list(t, `{{.ImportPath}} {{join .Imports " "}}`, "./...") {
		from, ours := strings.CutPrefix(fields[0], module)
		if !ours {
			continue
		}
		if layer(from) < 0 {
			t.Errorf("%s belongs to no layer: give it a place in this test", from)
		}
		for _, imp := range fields[1:] {
			to, ours := strings.CutPrefix(imp, module)
			if ours && layer(to) > layer(from) {
				t.Errorf("%s imports %s, which stands above it", from, to)
			}
		}
	}
}

func TestForbiddenImports(t *testing.T) {
	for from, targets := range forbidden {
		for _, fields := range list(t, `{{.ImportPath}} {{join .Deps " "}}`, "./"+from) {
			for _, dep := range fields[1:] {
				to, ours := strings.CutPrefix(dep, module)
				if ours && slices.ContainsFunc(targets, func(p string) bool { return within(to, p) }) && !allowed(from, to) {
					t.Errorf("%s reaches %s", from, to)
				}
			}
		}
	}
}

// exceptions are the contracts that a forbidden prefix contains.
var exceptions = map[string][]string{
	"internal/control":   {},
	"internal/api":       {"internal/store"}, // by way of control's Config; only the interface
	"internal/dataplane": {"internal/store"},
	"internal/node":      {"internal/control", "internal/store", "internal/auth"}, // nodeclient implements control.Node
}

func allowed(from, to string) bool { return slices.Contains(exceptions[from], to) }

func TestSmallBinariesStaySmall(t *testing.T) {
	for _, cmd := range []string{"./cmd/space-shim", "./cmd/space-agent"} {
		for _, fields := range list(t, `{{join .Deps " "}}`, cmd) {
			for _, dep := range fields {
				if slices.ContainsFunc(heavy, func(p string) bool { return strings.HasPrefix(dep, p) }) {
					t.Errorf("%s links %s", cmd, dep)
				}
			}
		}
	}
}
