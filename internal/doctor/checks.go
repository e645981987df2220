package doctor

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"strings"
	"time"
)

func result(name string, status Status, message, remedy string) Check {
	return Check{Name: name, Status: status, Message: message, Remedy: remedy}
}

func ok(name, format string, args ...any) Check {
	return Check{Name: name, Status: OK, Message: fmt.Sprintf(format, args...)}
}

func qemuProgram(_ context.Context, f *Facts, _ Options) Check {
	path, err := f.LookPath("qemu-system-x86_64")
	if err != nil {
		return result("qemu", Fail, "qemu-system-x86_64 is not installed", "apt-get install qemu-system-x86")
	}
	return ok("qemu", "%s", path)
}

const tcgRemedy = "use a machine whose KVM works to have a security boundary; emulation is for development"

// kvmDevice tells whether guests run on KVM. A device that opens proves nothing: only a guest that has run does.
func kvmDevice(ctx context.Context, f *Facts, _ Options) Check {
	switch err := f.OpenKVM(); {
	case errors.Is(err, fs.ErrNotExist):
		return result("kvm", Warn, "there is no /dev/kvm: sandboxes are emulated (TCG), which is slower and no security boundary", tcgRemedy)
	case errors.Is(err, fs.ErrPermission):
		return result("kvm", Warn, "/dev/kvm may not be opened by this user: sandboxes are emulated (TCG)", "add the user to the group kvm, or run as root")
	case err != nil:
		return result("kvm", Warn, fmt.Sprintf("/dev/kvm does not open (%v): sandboxes are emulated (TCG)", err), tcgRemedy)
	}
	if f.Probe == nil {
		return result("kvm", Warn, "/dev/kvm opens; whether guests run on it is not known, since the guest kernel is not in the cache yet", "run space up once, then space doctor again")
	}
	caps, err := f.Probe(ctx)
	if err != nil {
		return result("kvm", Warn, fmt.Sprintf("the trial run failed: %v", err), "see the check qemu, and run space doctor again")
	}
	if caps.AccelReason != "" {
		return result("kvm", Warn, "sandboxes are emulated (TCG): "+caps.AccelReason, tcgRemedy)
	}
	return ok("kvm", "a guest ran on it")
}

func isolation(ctx context.Context, f *Facts, _ Options) Check {
	if f.Probe == nil {
		return kernelIsolation(f)
	}
	caps, err := f.Probe(ctx)
	if err != nil {
		return result("isolation", Warn, fmt.Sprintf("could not be tried: %v", err), "see the check qemu, and run space doctor again")
	}
	if len(caps.IsolationGaps) > 0 {
		return result("isolation", Warn, "reduced: "+strings.Join(caps.IsolationGaps, "; "), "mend what is named, then run space doctor again")
	}
	return ok("isolation", "full: namespaces, Landlock, system call filter")
}

// kernelIsolation judges by what the kernel says it has, when no trial can be made.
func kernelIsolation(f *Facts) Check {
	var missing []string
	if lsm, err := f.ReadFile("/sys/kernel/security/lsm"); err == nil && !strings.Contains(string(lsm), "landlock") {
		missing = append(missing, "Landlock")
	}
	if status, err := f.ReadFile("/proc/self/status"); err == nil && !strings.Contains(string(status), "Seccomp:") {
		missing = append(missing, "seccomp")
	}
	if _, err := f.ReadFile("/proc/self/uid_map"); err != nil {
		missing = append(missing, "user namespaces")
	}
	if n, err := f.ReadFile("/proc/sys/kernel/unprivileged_userns_clone"); err == nil && strings.TrimSpace(string(n)) == "0" && f.Euid != 0 {
		missing = append(missing, "unprivileged user namespaces (sysctl kernel.unprivileged_userns_clone=1)")
	}
	if len(missing) > 0 {
		return result("isolation", Warn, "reduced: the kernel lacks "+strings.Join(missing, ", "), "use a kernel with these features, such as Debian's")
	}
	return ok("isolation", "the kernel has namespaces, Landlock and seccomp")
}

func localhost(ctx context.Context, f *Facts, _ Options) Check {
	addresses, err := f.Resolve(ctx, "space-doctor.localhost")
	for _, a := range addresses {
		if ip, perr := netip.ParseAddr(a); perr == nil && ip.IsLoopback() {
			return ok("localhost names", "*.localhost resolves to %s", a)
		}
	}
	message := "*.localhost resolves to no address of this machine"
	if err != nil {
		message = "*.localhost does not resolve"
	}
	return result("localhost names", Warn, message, "apt-get install libnss-myhostname, or send requests to 127.0.0.1 with the Host header set")
}

func cgroups(_ context.Context, f *Facts, _ Options) Check {
	const remedy = "boot with systemd.unified_cgroup_hierarchy=1; under systemd, set Delegate=yes for the service"
	info, err := f.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return result("cgroup2", Warn, "cannot be seen: "+err.Error(), remedy)
	}
	mount := ""
	for line := range strings.Lines(string(info)) {
		fields := strings.Fields(line)
		for i, field := range fields {
			if field == "-" && i+1 < len(fields) && fields[i+1] == "cgroup2" && len(fields) > 4 {
				mount = fields[4]
			}
		}
	}
	if mount == "" {
		return result("cgroup2", Warn, "not mounted: VMs run without limits of their own", remedy)
	}
	have, err := f.ReadFile(mount + "/cgroup.controllers")
	if err != nil {
		return result("cgroup2", Warn, "controllers cannot be read: "+err.Error(), remedy)
	}
	var missing []string
	for _, c := range []string{"cpu", "memory", "pids"} {
		if !strings.Contains(" "+strings.TrimSpace(string(have))+" ", " "+c+" ") {
			missing = append(missing, c)
		}
	}
	if len(missing) > 0 {
		return result("cgroup2", Warn, fmt.Sprintf("%s lacks the controllers %s: VMs run without these limits", mount, strings.Join(missing, ", ")), remedy)
	}
	return ok("cgroup2", "%s with cpu, memory and pids", mount)
}

// program is a check that a program is installed.
func program(f *Facts, name, pkg, use string) Check {
	path, err := f.LookPath(name)
	if err != nil {
		for _, dir := range []string{"/usr/sbin/", "/sbin/"} { // not in the PATH of every user
			if path, err = f.LookPath(dir + name); err == nil {
				break
			}
		}
	}
	if err != nil {
		return result(name, Fail, "not installed; it is needed to "+use, "apt-get install "+pkg)
	}
	return ok(name, "%s", path)
}

func mmdebstrap(_ context.Context, f *Facts, _ Options) Check {
	return program(f, "mmdebstrap", "mmdebstrap", "make the base template")
}

func mke2fs(_ context.Context, f *Facts, _ Options) Check {
	return program(f, "mke2fs", "e2fsprogs", "make writable disks")
}

func dpkg(_ context.Context, f *Facts, _ Options) Check {
	return program(f, "dpkg-deb", "dpkg", "unpack the guest kernel")
}

func memory(_ context.Context, f *Facts, _ Options) Check {
	const need, remedy = 1024, "stop other programs, or use a machine with at least 2 GiB"
	data, err := f.ReadFile("/proc/meminfo")
	if err != nil {
		return result("memory", Warn, "cannot be seen: "+err.Error(), remedy)
	}
	for line := range strings.Lines(string(data)) {
		var kib uint64
		if n, _ := fmt.Sscanf(line, "MemAvailable: %d kB", &kib); n == 1 {
			if kib>>10 < need {
				return result("memory", Warn, fmt.Sprintf("only %d MiB are available", kib>>10), remedy)
			}
			return ok("memory", "%d MiB available", kib>>10)
		}
	}
	return result("memory", Warn, "/proc/meminfo does not tell", remedy)
}

func diskSpace(_ context.Context, f *Facts, o Options) Check {
	const need = 3072
	for _, dir := range []string{o.DataDir, o.CacheDir} {
		s, err := f.Free(dir)
		if err != nil {
			return result("disk space", Fail, fmt.Sprintf("%s: %v", dir, err), "choose other folders with --data-dir and --cache-dir")
		}
		if s.FreeMiB < need {
			return result("disk space", Warn, fmt.Sprintf("%s has %d MiB free", dir, s.FreeMiB), "free space, or choose another folder with --data-dir or --cache-dir")
		}
	}
	return ok("disk space", "enough")
}

func folder(f *Facts, name, dir, flag string) Check {
	if err := f.Writable(dir); err != nil {
		return result(name, Fail, "not writable: "+err.Error(), "choose another folder with --"+flag+", or run as its owner")
	}
	return ok(name, "%s", dir)
}

func dataDir(_ context.Context, f *Facts, o Options) Check {
	return folder(f, "data folder", o.DataDir, "data-dir")
}

func cacheDir(_ context.Context, f *Facts, o Options) Check {
	return folder(f, "cache folder", o.CacheDir, "cache-dir")
}

func port(ctx context.Context, f *Facts, name, address, flag string) Check {
	if f.Listening(ctx, address) != nil {
		return ok(name, "%s is free", address)
	}
	if f.Healthy(ctx, address) {
		return ok(name, "a server answers at %s", address)
	}
	return result(name, Warn, "another program listens on "+address, "stop it, or choose another address with --"+flag)
}

func apiPort(ctx context.Context, f *Facts, o Options) Check {
	return port(ctx, f, "API port", o.APIListen, "api-listen")
}

func dataPort(ctx context.Context, f *Facts, o Options) Check {
	return port(ctx, f, "data plane port", o.DataListen, "data-listen")
}

func clock(_ context.Context, f *Facts, o Options) Check {
	const remedy = "apt-get install systemd-timesyncd, or chrony"
	if now, file, err := f.FileClock(o.DataDir); err == nil && now.Sub(file).Abs() > time.Minute {
		return result("clock", Warn, fmt.Sprintf("the file system's clock differs by %v", now.Sub(file).Round(time.Second)), "keep the data folder on a local file system")
	}
	synced, err := f.ClockSync()
	if err != nil {
		return result("clock", Warn, "cannot be seen: "+err.Error(), remedy)
	}
	if !synced {
		return result("clock", Warn, "nothing keeps the clock right", remedy)
	}
	return ok("clock", "kept right")
}
