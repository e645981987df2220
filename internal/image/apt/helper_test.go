package apt

import (
	"os/exec"
	"strconv"
	"testing"
)

func runTool(t *testing.T, name string, args ...string) string {
	t.Helper()
	out, err := exec.Command(name, args...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s: %v\n%s", name, err, out)
	}
	return string(out)
}

func itoa(n int64) string { return strconv.FormatInt(n, 10) }
