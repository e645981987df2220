package boot

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

const minReserve = 48 << 20

// setupCgroups makes the `user` cgroup. The agent stays in the root cgroup, outside the user's memory limit; as PID 1
// it is exempt from the kernel's OOM killer, so its oom_score_adj stays 0 and children inherit 0 without a race.
func setupCgroups() error {
	var info unix.Sysinfo_t
	if err := unix.Sysinfo(&info); err != nil {
		return err
	}
	return makeUserCgroup(CgroupRoot, info.Totalram*uint64(info.Unit))
}

func makeUserCgroup(root string, memory uint64) error {
	user := filepath.Join(root, "user")
	if err := os.Mkdir(user, 0o755); err != nil && !errors.Is(err, os.ErrExist) {
		return err
	}
	data, err := os.ReadFile(filepath.Join(root, "cgroup.controllers"))
	if err != nil {
		return err
	}
	limited := false
	for _, c := range strings.Fields(string(data)) {
		if c != "memory" && c != "pids" {
			continue
		}
		for _, dir := range []string{root, user} {
			if err := os.WriteFile(filepath.Join(dir, "cgroup.subtree_control"), []byte("+"+c), 0); err != nil {
				return fmt.Errorf("enable %s: %w", c, err)
			}
		}
		limited = limited || c == "memory"
	}
	if !limited {
		return nil
	}
	limit := fmt.Sprint(memory - reserve(memory))
	return os.WriteFile(filepath.Join(user, "memory.max"), []byte(limit), 0)
}

// reserve is what the kernel and the agent keep for themselves.
func reserve(memory uint64) uint64 {
	return min(max(memory/10, minReserve), memory/2)
}
