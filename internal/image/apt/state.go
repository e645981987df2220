package apt

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/space-sandbox/space/internal/buildtools"
)

// ErrNoPackage means that the sources do not carry a package.
var ErrNoPackage = errors.New("package not found")

// Settings returns the machine's transport settings as apt configuration lines: how to reach sources, never which
// hooks to run or what to trust.
func Settings(ctx context.Context) ([]string, error) {
	var out bytes.Buffer
	if err := (buildtools.Command{Name: "apt-config", Args: []string{"dump"}, Stdout: &out}).Run(ctx); err != nil {
		return nil, err
	}
	lines := filterSettings(out.String())
	for key, path := range map[string]string{"Dir::Etc::netrc": "/etc/apt/auth.conf", "Dir::Etc::netrcparts": "/etc/apt/auth.conf.d"} {
		if _, err := os.Stat(path); err == nil {
			lines = append(lines, fmt.Sprintf("%s %q;", key, path))
		}
	}
	return lines, nil
}

var transport = regexp.MustCompile(`(?i)^Acquire::(https?|ftp|Check-Valid-Until|Check-Date|Retries|ForceIPv[46]|Queue-Mode|Max-ValidTime|Min-ValidTime|AllowReleaseInfoChange)(::\S*)? "[^"]*";$`)

func filterSettings(dump string) []string {
	var out []string
	for _, line := range strings.Split(dump, "\n") {
		line = strings.TrimSpace(line)
		if transport.MatchString(line) && !strings.HasSuffix(line, ` "";`) {
			out = append(out, line)
		}
	}
	return out
}

// State is a private apt installation in a folder.
type State struct {
	dir     string
	sources []Source
	config  string
}

// NewState prepares a State in an empty folder that belongs to the caller.
func NewState(ctx context.Context, dir string, sources []Source) (*State, error) {
	settings, err := Settings(ctx)
	if err != nil {
		return nil, err
	}
	for _, sub := range []string{"lists/partial", "cache/archives/partial", "out"} {
		if err := os.MkdirAll(filepath.Join(dir, sub), 0o755); err != nil {
			return nil, err
		}
	}
	s := &State{dir: dir, sources: sources, config: filepath.Join(dir, "apt.conf")}
	config := slices.Concat(settings, []string{
		fmt.Sprintf("Dir::State %q;", dir), fmt.Sprintf("Dir::State::Lists %q;", filepath.Join(dir, "lists")),
		fmt.Sprintf("Dir::State::Status %q;", filepath.Join(dir, "status")),
		fmt.Sprintf("Dir::Cache %q;", filepath.Join(dir, "cache")),
		fmt.Sprintf("Dir::Etc::SourceList %q;", filepath.Join(dir, "sources.list")),
		`Dir::Etc::SourceParts "/dev/null";`, `Dir::Etc::Parts "/dev/null";`, `Dir::Etc::Main "/dev/null";`,
		`Dir::Etc::Preferences "/dev/null";`, `Dir::Etc::PreferencesParts "/dev/null";`,
		`APT::Architecture "amd64";`, `APT::Architectures "amd64";`, `Acquire::Languages "none";`,
		`APT::Sandbox::User "root";`, `APT::Get::AllowUnauthenticated "false";`})
	files := map[string]string{"apt.conf": strings.Join(config, "\n") + "\n", "status": "", "sources.list": List(sources)}
	for name, text := range files {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			return nil, err
		}
	}
	return s, nil
}

func (s *State) run(ctx context.Context, dir, name string, args ...string) (string, error) {
	var out bytes.Buffer
	err := buildtools.Command{Name: name, Args: args, Dir: dir, Env: []string{"APT_CONFIG=" + s.config}, Stdout: &out}.Run(ctx)
	return out.String(), err
}

// Update fetches the package lists.
func (s *State) Update(ctx context.Context) error {
	if _, err := s.run(ctx, s.dir, "apt-get", "update", "-qq", "-o", "APT::Update::Error-Mode=any"); err != nil {
		return fmt.Errorf("fetch package lists: %w", err)
	}
	return nil
}

// Package is one version of a package.
type Package struct {
	Name, Version string
	Depends       []string // names of what it depends on, without versions and alternatives
}

// Candidate finds the newest version of a package.
func (s *State) Candidate(ctx context.Context, name string) (Package, error) {
	out, err := s.run(ctx, s.dir, "apt-cache", "show", "--no-all-versions", name)
	if err != nil || strings.TrimSpace(out) == "" {
		return Package{}, errors.Join(fmt.Errorf("%s: %w", name, ErrNoPackage), err)
	}
	fields := parseStanza(splitStanzas(out)[0])
	p := Package{Name: fields["package"], Version: fields["version"]}
	for _, d := range strings.Split(fields["depends"], ",") {
		d, _, _ = strings.Cut(d, "|")
		if words := strings.Fields(d); len(words) > 0 {
			p.Depends = append(p.Depends, words[0])
		}
	}
	if p.Name == "" || p.Version == "" {
		return Package{}, fmt.Errorf("%s: %w: apt-cache shows no version", name, ErrNoPackage)
	}
	return p, nil
}

// Download fetches a package, checks it against the signed lists and returns its path.
func (s *State) Download(ctx context.Context, p Package) (string, error) {
	dir, err := os.MkdirTemp(filepath.Join(s.dir, "out"), "p")
	if err != nil {
		return "", err
	}
	if _, err := s.run(ctx, dir, "apt-get", "download", "-qq", p.Name+"="+p.Version); err != nil {
		return "", fmt.Errorf("download %s: %w", p.Name, err)
	}
	files, err := filepath.Glob(filepath.Join(dir, "*.deb"))
	if err != nil || len(files) != 1 {
		return "", errors.Join(fmt.Errorf("download %s left %d files", p.Name, len(files)), err)
	}
	return files[0], nil
}

// Unpack extracts a package's files into a folder; its scripts are not run.
func Unpack(ctx context.Context, deb, dir string) error {
	return buildtools.Command{Name: "dpkg-deb", Args: []string{"-x", deb, dir}}.Run(ctx)
}
