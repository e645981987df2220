package image

import (
	"archive/tar"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"net/url"
	"path"
	"strings"

	"github.com/space-sandbox/space/internal/image/apt"
	"github.com/space-sandbox/space/internal/sandbox"
)

// baseRecipe changes when the same packages should give another base.
const baseRecipe = "1"

const (
	baseSuite = "bookworm"
	nodeMajor = 24
	npmMajor  = 11
)

// basePackages is what base holds beyond Debian's essential packages.
var basePackages = []string{"ca-certificates", "curl", "git", "iproute2", "less", "libnss-myhostname", "netbase", "openssh-client",
	"procps", "python-is-python3", "python3", "python3-pip", "python3-venv", "sudo", "tzdata", "unzip", "xz-utils"}

var baseConfig = config{
	DefaultUser: "user",
	Env: []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG=C.UTF-8",
		"PIP_ROOT_USER_ACTION=ignore", "NPM_CONFIG_UPDATE_NOTIFIER=false", "DEBIAN_FRONTEND=noninteractive"},
	Defaults: sandbox.Resources{VCPU: 2, MemoryMiB: 512, DiskMiB: 2048},
}

// baseKey changes with everything base is made from except updates in the archive: those come with a refresh.
func baseKey() string {
	h := sha256.New()
	fmt.Fprintln(h, baseRecipe, baseSuite, nodeMajor, npmMajor, basePackages, dpkgOptions, baseConfig, dropped, baseFiles)
	return hex.EncodeToString(h.Sum(nil))[:32]
}

// dpkgOptions keep documentation out, except licences, and skip syncing a folder that is thrown away.
var dpkgOptions = []string{"force-unsafe-io",
	"path-exclude=/usr/share/doc/*", "path-include=/usr/share/doc/*/copyright",
	"path-exclude=/usr/share/man/*", "path-exclude=/usr/share/info/*", "path-exclude=/usr/share/locale/*",
	"path-exclude=/usr/share/lintian/*", "path-exclude=/usr/share/zoneinfo/right/*",
	"path-exclude=/usr/share/zoneinfo/posix/*"}

// dropped are patterns of paths (as of path.Match; a folder goes with all that is in it) that must not get into the
// image: identity of the machine it was built on, caches, logs, and what baseFiles replaces.
var dropped = []string{
	"etc/machine-id", "var/lib/dbus/machine-id", "etc/hostname", "etc/resolv.conf", "etc/hosts", "etc/ssh/ssh_host_*",
	"etc/apt/apt.conf.d/99mmdebstrap", "etc/apt/sources.list", "etc/apt/sources.list.d/*", "etc/apt/auth.conf*", "etc/dpkg/dpkg.cfg.d/99mmdebstrap", "etc/passwd-", "etc/group-", "etc/shadow-",
	"etc/gshadow-", "etc/subuid-", "etc/subgid-", "etc/default/locale",
	"var/log/*", "var/cache/apt/*", "var/cache/debconf/*-old", "var/cache/ldconfig/*", "var/lib/apt/lists/*",
	"var/lib/dpkg/*-old", "tmp/*", "var/tmp/*", "run/*", "dev/*", "proc/*", "sys/*",
	"usr/lib/python3*/EXTERNALLY-MANAGED", // a sandbox is its own virtual environment: pip may install into it
}

type baseFile struct {
	Name string
	Mode int64
	Text string
}

// baseFiles are written last.
var baseFiles = []baseFile{
	{"etc/hostname", 0o644, "sandbox\n"},
	{"etc/hosts", 0o644, "127.0.0.1 localhost\n::1 localhost ip6-localhost ip6-loopback\n"},
	{"etc/resolv.conf", 0o644, ""},
	{"etc/default/locale", 0o644, "LANG=C.UTF-8\n"},
	{"etc/sudoers.d/user", 0o440, "user ALL=(ALL:ALL) NOPASSWD: ALL\n"},
	{"etc/dpkg/dpkg.cfg.d/space", 0o644, "force-unsafe-io\n" + strings.Join(dpkgOptions[1:], "\n") + "\n"},
	{"etc/apt/apt.conf.d/99space", 0o644, "Acquire::Languages \"none\";\nAPT::Install-Recommends \"false\";\n"},
}

// guestSources is what apt uses inside a sandbox: the sources base was made from, without anything that belongs to
// this machine: credentials in addresses, and places of keyrings.
func guestSources(sources []apt.Source) string {
	out := make([]apt.Source, 0, len(sources))
	for _, s := range sources {
		if u, err := url.Parse(s.URI); err == nil && u.User != nil {
			u.User = nil
			s.URI = u.String()
		}
		s.SignedBy = "/usr/share/keyrings/debian-archive-keyring.gpg"
		out = append(out, s)
	}
	return apt.List(out)
}

// keepBase is the rename function for mmdebstrap's archive.
func keepBase(h *tar.Header) string {
	name, err := cleanName(h.Name)
	if err != nil {
		return h.Name // add refuses it with a message
	}
	for p := name; p != "."; p = path.Dir(p) {
		for _, pattern := range dropped {
			if ok, _ := path.Match(pattern, p); ok {
				return ""
			}
		}
	}
	return name
}

// keepNode takes the program and the licence out of the npm package of Node.js.
func keepNode(h *tar.Header) string {
	switch h.Name {
	case "package/bin/node":
		return "usr/local/bin/node"
	case "package/LICENSE":
		return "usr/local/share/doc/nodejs/LICENSE"
	}
	return ""
}

// keepNPM takes npm without its manuals.
func keepNPM(h *tar.Header) string {
	rest, ok := strings.CutPrefix(h.Name, "package/")
	if !ok || strings.HasPrefix(rest, "man/") || strings.HasPrefix(rest, "docs/") {
		return ""
	}
	return "usr/local/lib/node_modules/npm/" + rest
}
