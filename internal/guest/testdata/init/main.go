// Command init is a PID 1 for tests: it loads the modules, joins layer and disk, runs commands in the result, prints
// what they say and powers off. The product's own agent is tested end to end.
package main

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

func main() {
	start := time.Now()
	if err := run(); err != nil {
		fmt.Println("FAILED", err)
	}
	uptime, _ := os.ReadFile("/proc/uptime")
	fmt.Printf("DONE %s in %s\n", strings.Fields(string(uptime))[0], time.Since(start))
	unix.Sync()
	_ = unix.Reboot(unix.LINUX_REBOOT_CMD_RESTART)
}

func run() error {
	for _, m := range [][2]string{{"proc", "/proc"}, {"sysfs", "/sys"}, {"devtmpfs", "/dev"}} {
		if err := os.MkdirAll(m[1], 0o755); err != nil {
			return err
		}
		if err := unix.Mount(m[0], m[1], m[0], 0, ""); err != nil {
			return fmt.Errorf("mount %s: %w", m[0], err)
		}
	}
	if err := unix.Sethostname([]byte("guest-under-test")); err != nil {
		return err
	}
	uptime, _ := os.ReadFile("/proc/uptime")
	fmt.Println("USER SPACE AT", strings.Fields(string(uptime))[0])
	if err := load("/modules.list"); err != nil {
		return err
	}
	if err := join(); err != nil {
		return err
	}
	if err := load("/modules.extra"); err != nil {
		return err
	}
	return commands()
}

func load(list string) error {
	names, err := os.ReadFile(list)
	if err != nil {
		return err
	}
	for _, name := range strings.Fields(string(names)) {
		f, err := os.Open(name)
		if err != nil {
			return err
		}
		err = unix.FinitModule(int(f.Fd()), "", 0)
		f.Close()
		if err != nil && err != unix.EEXIST {
			return fmt.Errorf("%s: %w", name, err)
		}
		fmt.Println("LOADED", name)
	}
	return nil
}

func join() error {
	for _, dir := range []string{"/l", "/w", "/new"} {
		if err := os.Mkdir(dir, 0o755); err != nil {
			return err
		}
	}
	deadline := time.Now().Add(20 * time.Second)
	for unix.Access("/dev/vdb", unix.R_OK) != nil && time.Now().Before(deadline) {
		time.Sleep(time.Millisecond)
	}
	if err := unix.Mount("/dev/vda", "/l", "ext4", unix.MS_RDONLY, ""); err != nil {
		return fmt.Errorf("mount layer: %w", err)
	}
	if err := unix.Mount("/dev/vdb", "/w", "ext4", 0, ""); err != nil {
		return fmt.Errorf("mount writable: %w", err)
	}
	for _, dir := range []string{"/w/up", "/w/work"} {
		if err := os.Mkdir(dir, 0o755); err != nil {
			return err
		}
	}
	options := "lowerdir=/l,upperdir=/w/up,workdir=/w/work,redirect_dir=on,metacopy=off,index=off"
	if err := unix.Mount("overlay", "/new", "overlay", 0, options); err != nil {
		return fmt.Errorf("mount overlay: %w", err)
	}
	for _, dir := range []string{"/dev", "/proc", "/sys"} {
		if err := unix.Mount(dir, "/new"+dir, "", unix.MS_BIND, ""); err != nil {
			return err
		}
	}
	return unix.Mount("tmpfs", "/new/run", "tmpfs", 0, "")
}

func commands() error {
	data, err := os.ReadFile("/commands")
	if err != nil {
		data = []byte(embedded)
	}
	for _, line := range strings.Split(strings.TrimSpace(string(data)), "\n") {
		cmd := exec.Command("/bin/sh", "-c", line)
		cmd.SysProcAttr = &syscall.SysProcAttr{Chroot: "/new"}
		cmd.Dir = "/"
		cmd.Env = []string{"PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG=C.UTF-8", "HOME=/root"}
		began := time.Now()
		out, err := cmd.CombinedOutput()
		fmt.Printf("RAN %s: %s: err=%v in %s\n", line, bytes.TrimSpace(out), err, time.Since(began).Round(time.Millisecond))
	}
	return nil
}

// embedded are the commands that show that base is what it promises to be.
const embedded = `python --version
python3 -c 'import ssl, sqlite3, venv, ctypes; print("ok")'
pip --version
node --version
node -e 'console.log("ok")'
npm --version
git --version
curl --version
ip -br link
ps -o pid= -p 1
su user -c 'id -un; sudo -n id -un; echo $HOME; pwd'
su - user -c 'pwd; touch x && ls x'
locale
test ! -e /etc/machine-id && ls /etc/ssh/ssh_host_* 2>&1 | grep -q 'No such' && echo clean
mv /usr/share/perl /usr/share/perl2 && echo renamed
cat /proc/sys/kernel/osrelease`
