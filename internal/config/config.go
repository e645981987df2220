package config

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"
)

// Config is what an operator can set. The tags are read by Settings.
type Config struct {
	DataDir        string        `flag:"data-dir" doc:"Folder of everything that must survive a restart; default: /var/lib/space for root, else $XDG_DATA_HOME/space or ~/.local/share/space."`
	CacheDir       string        `flag:"cache-dir" doc:"Folder of templates and kernels, shared by data folders; default: the user's cache folder with /space."`
	RuntimeDir     string        `flag:"runtime-dir" doc:"Folder of sockets; keep it short. Default: /run/space for root, else $XDG_RUNTIME_DIR/space or /tmp/space-<uid>."`
	APIListen      string        `flag:"api-listen" default:"127.0.0.1:8700" doc:"Address of the native API."`
	DataListen     string        `flag:"data-listen" default:"127.0.0.1:8701" doc:"Address of the data plane."`
	DataPlaneURL   string        `flag:"data-plane-url" doc:"Where clients reach the data plane, if that is not data-listen (behind a proxy)."`
	Domain         string        `flag:"domain" default:"localhost" doc:"Name that clients reach the API by, besides localhost and addresses."`
	AllowedHosts   []string      `flag:"allowed-hosts" doc:"Further Host header values that the API accepts, separated by commas."`
	Database       string        `flag:"database" doc:"Where records are kept, as sqlite:///absolute/path; default: space.db in the data folder."`
	NodeName       string        `flag:"node-name" doc:"Name of this machine in records; default: its host name."`
	PoolSize       int           `flag:"pool-size" default:"2" doc:"VMs of each shape that are kept ready; 0: none."`
	MemoryLimitMiB int           `flag:"memory-limit-mib" default:"0" doc:"Memory that all sandboxes together may use; 0: 90 % of what is available at start."`
	VMMUIDBase     int           `flag:"vmm-uid-base" default:"200000" doc:"For root: the first of the user IDs that VMs run as, one each; 0: all run as root."`
	Concurrency    int           `flag:"concurrency" default:"32" doc:"Requests that one API key may have running; long polls and streams do not count."`
	DrainTimeout   time.Duration `flag:"drain-timeout" default:"10s" doc:"How long running requests may take to end when the server stops."`
	StopSandboxes  bool          `flag:"stop-sandboxes" default:"false" doc:"End all sandboxes when the server stops; otherwise they go on and the next start takes them over."`
	LogFormat      string        `flag:"log-format" default:"text" doc:"Form of the log on standard error: text or json."`
	LogLevel       string        `flag:"log-level" default:"info" doc:"Least level that is logged: debug, info, warn or error."`
}

// FillDefaults sets the folders that depend on who runs the program. getenv is os.Getenv outside of tests.
func (c *Config) FillDefaults(euid int, getenv func(string) string) error {
	if c.DataDir == "" {
		c.DataDir = DefaultDataDir(euid, getenv)
	}
	if c.CacheDir == "" {
		dir, err := os.UserCacheDir()
		if err != nil {
			return fmt.Errorf("no cache folder is known: set --cache-dir: %w", err)
		}
		c.CacheDir = filepath.Join(dir, "space")
	}
	if c.RuntimeDir == "" {
		c.RuntimeDir = defaultRuntimeDir(euid, getenv)
	}
	for _, dir := range []*string{&c.DataDir, &c.CacheDir, &c.RuntimeDir} {
		abs, err := filepath.Abs(*dir)
		if err != nil {
			return err
		}
		*dir = abs
	}
	if c.Database == "" {
		c.Database = "sqlite://" + filepath.Join(c.DataDir, "space.db")
	}
	return c.check()
}

// DefaultDataDir is the data folder that is used when none is configured. "" if there is no home folder either.
func DefaultDataDir(euid int, getenv func(string) string) string {
	if euid == 0 {
		return "/var/lib/space"
	}
	if dir := getenv("XDG_DATA_HOME"); filepath.IsAbs(dir) {
		return filepath.Join(dir, "space")
	}
	return filepath.Join(getenv("HOME"), ".local", "share", "space")
}

func defaultRuntimeDir(euid int, getenv func(string) string) string {
	if euid == 0 {
		return "/run/space"
	}
	if dir := getenv("XDG_RUNTIME_DIR"); filepath.IsAbs(dir) && len(dir) < 48 { // socket paths have 100 bytes in all
		return filepath.Join(dir, "space")
	}
	return fmt.Sprintf("/tmp/space-%d", euid)
}

// check refuses values that would only fail later, or not at all.
func (c *Config) check() error {
	for _, e := range []struct{ flag, value, allowed string }{
		{"log-format", c.LogFormat, "text json"}, {"log-level", c.LogLevel, "debug info warn error"},
	} {
		if !strings.Contains(" "+e.allowed+" ", " "+e.value+" ") || e.value == "" {
			return fmt.Errorf("--%s: %q is not one of: %s", e.flag, e.value, strings.ReplaceAll(e.allowed, " ", ", "))
		}
	}
	for _, n := range []struct {
		flag  string
		value int
	}{{"pool-size", c.PoolSize}, {"memory-limit-mib", c.MemoryLimitMiB}, {"vmm-uid-base", c.VMMUIDBase}} {
		if n.value < 0 {
			return fmt.Errorf("--%s: must not be negative", n.flag)
		}
	}
	if c.Concurrency < 1 {
		return fmt.Errorf("--concurrency: must be at least 1")
	}
	return nil
}
