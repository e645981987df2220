package confine_test

import (
	"os"
	"os/exec"
	"testing"
)

// underChroot runs a command in a root that is a plain folder, not a mount: what `chroot` into an unpacked system gives.
const underChroot = `
set -e
mount -t tmpfs tmpfs "$1"
root=$1/root; shift
mkdir "$root"
for d in usr etc dev proc tmp; do mkdir "$root/$d"; mount --rbind "/$d" "$root/$d"; done
for d in bin sbin lib lib32 lib64 libx32; do
  [ -L "/$d" ] && cp -P "/$d" "$root/$d" || [ ! -d "/$d" ] || { mkdir "$root/$d"; mount --rbind "/$d" "$root/$d"; }
done
exec chroot "$root" "$@"
`

func TestConfinementHoldsUnderAChroot(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root can change the root")
	}
	cmd := exec.Command("unshare", "--mount", "sh", "-c", underChroot, "sh", t.TempDir(),
		program, "-test.run=^(TestConfinedProgramGetsAtNothing|TestGaps|TestDevices)$", "-test.v")
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
}
