package apt

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/space-sandbox/space/internal/sandbox"
)

// MirrorVariable names a Debian mirror for machines that have none configured, such as Ubuntu.
const MirrorVariable = "SPACE_DEBIAN_MIRROR"

// debianKeyring is where Debian's package debian-archive-keyring puts its keys, also on Ubuntu.
const debianKeyring = "usr/share/keyrings/debian-archive-keyring.gpg"

// Discover finds out where this machine gets Debian packages of a release from. Root is "/" except in tests;
// mirror is the value of MirrorVariable or empty.
func Discover(root, mirror, release string) ([]Source, error) {
	keyring := filepath.Join(root, debianKeyring)
	if mirror != "" {
		if _, err := os.Stat(keyring); err != nil {
			return nil, sandbox.Errorf(sandbox.CodeFailedPrecondition, "Debian's archive keys are missing").
				WithCause(err).WithRemediation("apt-get install debian-archive-keyring")
		}
		s := Source{URI: mirror, Suite: release, Components: []string{"main"}, SignedBy: keyring}
		updates := s
		updates.Suite = release + "-updates"
		return []Source{s, updates}, nil
	}
	id, codename := osRelease(filepath.Join(root, "etc/os-release"))
	all, err := readSources(filepath.Join(root, "etc/apt"))
	if err != nil {
		return nil, err
	}
	host := codename
	if id != "debian" {
		host = "" // its suites are not Debian's: only sources that name the wanted release count
	}
	found := ForSuite(all, host, release)
	for _, s := range found {
		if s.Suite == release {
			return found, nil
		}
	}
	return nil, sandbox.Errorf(sandbox.CodeFailedPrecondition,
		"no package source for Debian %s among %d configured in %s/etc/apt", release, len(all), strings.TrimRight(root, "/")).
		WithRemediation("the base template and the guest kernel come from Debian packages: set " + MirrorVariable +
			" to the URL of a Debian mirror and install debian-archive-keyring, or add a Debian " + release +
			" entry to /etc/apt/sources.list.d")
}

// readSources reads every file that apt would.
func readSources(etc string) ([]Source, error) {
	var out []Source
	files, err := filepath.Glob(filepath.Join(etc, "sources.list.d", "*"))
	if err != nil {
		return nil, err
	}
	for _, file := range append([]string{filepath.Join(etc, "sources.list")}, files...) {
		data, err := os.ReadFile(file)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("read package sources: %w", err)
		}
		switch filepath.Ext(file) {
		case ".list":
			out = append(out, ParseList(string(data))...)
		case ".sources":
			out = append(out, ParseDeb822(string(data))...)
		}
	}
	return out, nil
}

func osRelease(path string) (id, codename string) {
	data, err := os.ReadFile(path)
	if err != nil {
		return "", ""
	}
	for _, line := range strings.Split(string(data), "\n") {
		key, value, _ := strings.Cut(line, "=")
		value = strings.Trim(value, `"'`)
		switch key {
		case "ID":
			id = value
		case "VERSION_CODENAME":
			codename = value
		}
	}
	return id, codename
}
