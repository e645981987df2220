package doctor

import (
	"context"
	"net"
	"os"
	"os/exec"
	"time"

	"golang.org/x/sys/unix"

	"github.com/space-sandbox/space/internal/vmm"
)

// Status is how a check ended.
type Status string

// A warning is something that works less well than it could; a failure keeps sandboxes from running.
const (
	OK   Status = "ok"
	Warn Status = "warn"
	Fail Status = "fail"
)

// Check is the result of one check. Remedy is set unless the status is OK.
type Check struct {
	Name    string `json:"name"`
	Status  Status `json:"status"`
	Message string `json:"message"`
	Remedy  string `json:"remedy,omitempty"`
}

// Report is the result of all checks.
type Report struct {
	Checks []Check `json:"checks"`
}

// Failed reports whether something keeps sandboxes from running.
func (r Report) Failed() bool {
	for _, c := range r.Checks {
		if c.Status == Fail {
			return true
		}
	}
	return false
}

// Options say where the platform would work.
type Options struct {
	DataDir, CacheDir     string
	APIListen, DataListen string
}

// Space is the room of a file system.
type Space struct{ FreeMiB uint64 }

// Facts is what checks ask of the machine.
type Facts struct {
	LookPath  func(name string) (string, error)
	ReadFile  func(path string) ([]byte, error)
	OpenKVM   func() error
	Probe     func(ctx context.Context) (vmm.Capabilities, error) // nil: nothing to boot is at hand
	Resolve   func(ctx context.Context, host string) ([]string, error)
	Free      func(dir string) (Space, error)                   // of the nearest folder that exists
	Writable  func(dir string) error                            // also if it would have to be made
	Listening func(ctx context.Context, address string) error   // nil: somebody listens
	Healthy   func(ctx context.Context, address string) bool    // whether that somebody is a SPACE server
	FileClock func(dir string) (now, file time.Time, err error) // our clock and the file system's
	ClockSync func() (synchronised bool, err error)
	Euid      int
}

// check is one check.
type check func(ctx context.Context, f *Facts, o Options) Check

// checks returns all checks in the order of the report.
func checks() []check {
	return []check{qemuProgram, kvmDevice, isolation, localhost, cgroups, mmdebstrap, mke2fs, dpkg, memory, diskSpace, dataDir, cacheDir, apiPort, dataPort, clock}
}

// Run makes every check.
func Run(ctx context.Context, f *Facts, o Options) Report {
	var r Report
	for _, c := range checks() {
		limited, cancel := context.WithTimeout(ctx, time.Minute)
		r.Checks = append(r.Checks, c(limited, f, o))
		cancel()
	}
	return r
}

// System returns the facts of this machine. probe may be nil.
func System(probe func(context.Context) (vmm.Capabilities, error)) *Facts {
	return &Facts{
		LookPath: exec.LookPath, ReadFile: os.ReadFile, OpenKVM: openKVM, Probe: probe,
		Resolve: net.DefaultResolver.LookupHost,
		Free:    freeSpace, Writable: writable, Listening: listening, Healthy: healthy, FileClock: fileClock,
		ClockSync: clockSync, Euid: os.Geteuid(),
	}
}

func openKVM() error {
	fd, err := unix.Open("/dev/kvm", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	return unix.Close(fd)
}
