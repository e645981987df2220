package boot

import (
	"bufio"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// CgroupRoot is where Run mounts the cgroup2 hierarchy.
const CgroupRoot = "/sys/fs/cgroup"

// Guest is what a boot gives the agent.
type Guest struct {
	Token    string
	Listener net.Listener // in the control namespace
}

// Run boots. console gets a line about each thing that went wrong without ending the boot.
func Run(console io.Writer) (*Guest, error) {
	unix.Umask(0o022) // inherited by every process
	steps := []struct {
		name string
		do   func() error
	}{
		{"mount the initramfs", mountEarly},
		{"load modules", func() error { return loadModules(console) }},
		{"mount the disks", mountDisks},
		{"switch root", switchRoot},
		{"mount the system", mountLate},
		{"set up cgroups", setupCgroups},
		{"raise limits", raiseLimits},
		{"set up the workload network", setupWorkload},
	}
	token, err := "", error(nil)
	for i, s := range steps {
		if err := s.do(); err != nil {
			return nil, fmt.Errorf("%s: %w", s.name, err)
		}
		if i > 0 {
			continue
		}
		if token, err = readToken(); err != nil {
			return nil, err
		}
	}
	l, err := listenControl()
	if err != nil {
		return nil, fmt.Errorf("set up the control network: %w", err)
	}
	return &Guest{Token: token, Listener: l}, nil
}

// Fail ends the machine. A reset is used because every VMM is told not to reboot, and turns it into its exit; a
// power-off needs firmware that not every machine type has.
func Fail() {
	unix.Sync()
	_ = unix.Reboot(unix.LINUX_REBOOT_CMD_RESTART)
	os.Exit(1)
}

func readToken() (string, error) {
	data, err := os.ReadFile("/proc/cmdline")
	if err != nil {
		return "", err
	}
	return parseToken(string(data))
}

// parseToken finds space.token=<hex>. Any user can read the command line later: Resume replaces this token.
func parseToken(cmdline string) (string, error) {
	for _, arg := range strings.Fields(cmdline) {
		token, ok := strings.CutPrefix(arg, "space.token=")
		if !ok {
			continue
		}
		if _, err := hex.DecodeString(token); err != nil || len(token) < 32 {
			return "", errors.New("kernel command line: space.token is not 32 or more hex digits")
		}
		return token, nil
	}
	return "", errors.New("kernel command line: no space.token")
}

// loadModules loads what the boot needs, and then what workloads may want; only the former may not fail.
func loadModules(console io.Writer) error {
	if err := loadList("/modules.list"); err != nil {
		return err
	}
	if err := loadList("/modules.extra"); err != nil && !errors.Is(err, os.ErrNotExist) {
		fmt.Fprintf(console, "space-agent: extra modules: %v\n", err)
	}
	return nil
}

func loadList(list string) error {
	f, err := os.Open(list)
	if err != nil {
		return err
	}
	defer f.Close()
	var failed error
	s := bufio.NewScanner(f)
	for s.Scan() {
		if path := strings.TrimSpace(s.Text()); path != "" {
			failed = errors.Join(failed, loadModule(path))
		}
	}
	return errors.Join(failed, s.Err())
}

func loadModule(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	err = unix.FinitModule(int(f.Fd()), "", 0)
	if err != nil && !errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("load %s: %w", path, err)
	}
	return nil
}

// raiseLimits gives the agent descriptors for many processes. Children inherit it: as soft limit it is low enough
// for programs that close every possible descriptor.
func raiseLimits() error {
	return unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 65536, Max: 1 << 20})
}
