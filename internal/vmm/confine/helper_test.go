package confine_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/space-sandbox/space/internal/vmm/confine"
	"golang.org/x/sys/unix"
)

// helper is what runs confined. It prints one JSON value.
func helper(args []string) {
	var result any
	switch args[0] {
	case "attempt":
		result = attemptAll(args[1:])
	case "device":
		result = map[string]string{"open device": tryDevice(args[1])}
	case "identity":
		result = whoAmI()
	case "parent":
		result = beParent(args[1], args[2])
	case "fork":
		exe := "/proc/self/exe"
		child := exec.Command(exe, "helper", "sleep")
		child.Stdout = os.Stdout
		if err := child.Start(); err != nil {
			fmt.Println(err)
			return
		}
		fmt.Println("forked")
		_ = child.Wait()
		return
	case "sleep":
		time.Sleep(time.Hour)
		return
	}
	if err := json.NewEncoder(os.Stdout).Encode(result); err != nil {
		os.Exit(1)
	}
}

type identity struct {
	PID, Session, UID, GID int
	Groups                 []int
	Environ                []string
	FDs                    []int
	CoreLimit              uint64
	NoNewPrivs             bool
}

func whoAmI() identity {
	id := identity{PID: os.Getpid(), UID: os.Getuid(), GID: os.Getgid(), Environ: os.Environ()}
	id.Session, _ = unix.Getsid(0)
	id.Groups, _ = os.Getgroups()
	for fd := range 64 {
		var st unix.Stat_t
		if unix.Fstat(fd, &st) != nil {
			continue
		}
		// The runtime of this helper opens files of its own: the poller's, and the CPU limits of its cgroup.
		target, _ := os.Readlink("/proc/self/fd/" + strconv.Itoa(fd))
		if strings.HasPrefix(target, "anon_inode:") || strings.HasPrefix(target, "/sys/fs/cgroup/") {
			continue
		}
		id.FDs = append(id.FDs, fd)
	}
	var limit unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_CORE, &limit) == nil {
		id.CoreLimit = limit.Max
	}
	nnp, _ := unix.PrctlRetInt(unix.PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0)
	id.NoNewPrivs = nnp == 1
	return id
}

// beParent starts a confined child, prints its ID and waits to be killed.
func beParent(level, dir string) any {
	exe, err := os.Readlink("/proc/self/exe")
	if err != nil {
		return err.Error()
	}
	c := confine.Command{Path: exe, Args: []string{"helper", "sleep"}, Dir: dir, UID: testUID,
		Unconfined: level == "unconfined", NoNamespaces: level == "reduced"}
	p, err := confine.Start(context.Background(), c)
	if err != nil {
		return err.Error()
	}
	fmt.Println(p.PID())
	<-p.Done()
	return "child ended first"
}

func attemptAll(args []string) map[string]string {
	memory, layer, database, key, foreign, socket, port := args[0], args[1], args[2], args[3], args[4], args[5], args[6]
	host, _ := strconv.Atoi(args[7])
	own, _ := os.Getwd()
	results := map[string]string{}
	try := func(name string, f func() error) {
		results[name] = "ok"
		if err := f(); err != nil {
			results[name] = err.Error()
		}
	}
	try("write memory by path", func() error { return write(memory) })
	try("write memory by descriptor", func() error { return write("/proc/self/fd/3") })
	try("read memory by descriptor", func() error { return read("/proc/self/fd/3") })
	try("read sealed memory", func() error { return read("/proc/self/fd/4") })
	try("write sealed memory", func() error { return write("/proc/self/fd/4") })
	try("read layer", func() error { return read(layer) })
	try("write layer", func() error { return write(layer) })
	try("read database", func() error { return read(database) })
	try("write key", func() error { return write(key) })
	try("write foreign folder", func() error { return os.WriteFile(filepath.Join(foreign, "f"), nil, 0o600) })
	try("write own folder", func() error { return os.WriteFile(filepath.Join(own, "f"), nil, 0o600) })
	try("list host root", func() error { _, err := os.ReadDir("/etc"); return err })
	try("read environ of host process", func() error { return read(fmt.Sprintf("/proc/%d/status", host)) })
	try("connect unix socket", func() error { return dial("unix", socket) })
	try("connect tcp", func() error { return dial("tcp", "127.0.0.1:"+port) })
	try("signal host process", func() error { return syscall.Kill(host, 0) })
	try("see host processes", seeOthers)
	try("have capabilities", capabilities)
	try("become root", func() error { return errors.Join(unix.Setresuid(0, 0, 0), isRoot()) })
	try("mount", func() error { return mountOwn(own) })
	try("dump core", func() error { return unix.Setrlimit(unix.RLIMIT_CORE, &unix.Rlimit{Cur: 1, Max: 1}) })
	return results
}

// mountOwn mounts something on a folder of this test, in a mount namespace of its own when it can have one, so that
// even the unconfined helper leaves nothing behind.
func mountOwn(dir string) error {
	runtime.LockOSThread() // stays: the thread is not to be used for anything else
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return err
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return err
	}
	return unix.Mount("tmpfs", dir, "tmpfs", 0, "")
}

func tryDevice(path string) string {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return err.Error()
	}
	defer f.Close()
	if _, err := f.Read(make([]byte, 8)); err != nil {
		return err.Error()
	}
	return "ok"
}

func write(path string) error {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	_, err = f.WriteAt([]byte("X"), 0)
	return err
}

func read(path string) error {
	content, err := os.ReadFile(path)
	if err == nil && len(content) == 0 {
		return errors.New("empty")
	}
	return err
}

func dial(network, address string) error {
	conn, err := net.DialTimeout(network, address, time.Second)
	if err == nil {
		conn.Close()
	}
	return err
}

func seeOthers() error {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return err
	}
	for _, e := range entries {
		if pid, err := strconv.Atoi(e.Name()); err == nil && pid != os.Getpid() {
			return nil
		}
	}
	return errors.New("none")
}

func capabilities() error {
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return err
	}
	for _, set := range []string{"CapPrm", "CapEff", "CapBnd", "CapAmb"} {
		if !bytes.Contains(status, []byte(set+":\t0000000000000000\n")) {
			return nil
		}
	}
	return errors.New("none")
}

// isRoot fails for anyone but a root that counts: one with capabilities.
func isRoot() error {
	if os.Geteuid() != 0 {
		return errors.New("not root")
	}
	return capabilities()
}
