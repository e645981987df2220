package apt

import (
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/space-sandbox/space/internal/sandbox"
)

const deb = "/usr/share/keyrings/debian-archive-keyring.gpg"

func TestParseList(t *testing.T) {
	got := ParseList(`
# comment
deb http://mirror.test/debian bookworm main contrib # at the end
deb-src http://mirror.test/debian bookworm main
deb [arch=amd64 signed-by=/k.gpg trusted=yes] https://m.test/debian-security bookworm-security main
  deb	[ Signed-By=ABCD check-date=no ]	http://m.test/d	bookworm/updates	main
deb http://flat.test/repo ./
deb
deb http://only-uri
nonsense deb http://x y z
`)
	want := []Source{
		{URI: "http://mirror.test/debian", Suite: "bookworm", Components: []string{"main", "contrib"}},
		{URI: "https://m.test/debian-security", Suite: "bookworm-security", Components: []string{"main"}, SignedBy: "/k.gpg",
			Options: []string{"trusted=yes"}},
		{URI: "http://m.test/d", Suite: "bookworm/updates", Components: []string{"main"}, SignedBy: "ABCD",
			Options: []string{"check-date=no"}},
		{URI: "http://flat.test/repo", Suite: "./", Components: []string{}},
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}
}

func TestParseDeb822(t *testing.T) {
	got := ParseDeb822("# a comment\r\nTypes: deb deb-src\r\nURIs: http://a.test/debian http://b.test/debian\n" +
		"Suites: bookworm\n bookworm-updates\nComponents: main\n# inside\nSigned-By: " + deb + "\n\n" +
		"Enabled: no\nTypes: deb\nURIs: http://off.test\nSuites: bookworm\nComponents: main\n\n\n" +
		"Types: deb-src\nURIs: http://src.test\nSuites: bookworm\nComponents: main\n\n" +
		"types: deb\nuris: http://c.test/d\nsuites: bookworm\ncomponents: main\ncheck-valid-until: no\n" +
		"Trusted: yes\nDescription: a\n b\n\n" +
		"Types: deb\nURIs: http://inline.test\nSuites: bookworm\nComponents: main\nSigned-By:\n -----BEGIN PGP PUBLIC KEY BLOCK-----\n .\n abc\n")
	var lines []string
	for _, s := range got {
		lines = append(lines, s.Line())
	}
	want := []string{
		"deb [signed-by=" + deb + "] http://a.test/debian bookworm main",
		"deb [signed-by=" + deb + "] http://a.test/debian bookworm-updates main",
		"deb [signed-by=" + deb + "] http://b.test/debian bookworm main",
		"deb [signed-by=" + deb + "] http://b.test/debian bookworm-updates main",
		"deb [trusted=yes check-valid-until=no] http://c.test/d bookworm main",
	}
	if !reflect.DeepEqual(lines, want) {
		t.Errorf("got\n%s", strings.Join(lines, "\n"))
	}
}

func TestForSuite(t *testing.T) {
	in := func(suites ...string) (out []Source) {
		for _, s := range suites {
			out = append(out, Source{URI: "http://m.test/debian", Suite: s, Components: []string{"main", "contrib"}})
		}
		return out
	}
	cases := map[string]struct {
		host   string
		suites []string
		want   []string
	}{
		"same release":     {"bookworm", []string{"bookworm", "bookworm-updates", "bookworm-security"}, []string{"bookworm", "bookworm-updates", "bookworm-security"}},
		"newer host":       {"trixie", []string{"trixie", "trixie-updates"}, []string{"bookworm", "bookworm-updates"}},
		"alias":            {"trixie", []string{"stable", "stable-security"}, []string{"bookworm", "bookworm-security"}},
		"both named":       {"trixie", []string{"trixie", "bookworm"}, []string{"bookworm"}},
		"third parties":    {"bookworm", []string{"nodistro", "tool-bookworm", "bookworm-pgdg", "bookworm-backports"}, nil},
		"not Debian":       {"", []string{"noble", "noble-updates", "stable"}, nil},
		"named on another": {"", []string{"noble", "bookworm"}, []string{"bookworm"}},
	}
	for name, c := range cases {
		var got []string
		for _, s := range ForSuite(in(c.suites...), c.host, "bookworm") {
			got = append(got, s.Suite)
			if len(s.Components) != 1 || s.Components[0] != "main" {
				t.Errorf("%s: components %v", name, s.Components)
			}
		}
		if !reflect.DeepEqual(got, c.want) {
			t.Errorf("%s: %v", name, got)
		}
	}
	if got := ForSuite([]Source{{URI: "u", Suite: "bookworm", Components: []string{"contrib"}}}, "", "bookworm"); got != nil {
		t.Errorf("without main: %v", got)
	}
}

// root makes a machine's files.
func root(t *testing.T, files map[string]string) string {
	t.Helper()
	dir := t.TempDir()
	for name, text := range files {
		path := filepath.Join(dir, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(text), 0o644)); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func TestDiscover(t *testing.T) {
	debian := "ID=debian\nVERSION_CODENAME=bookworm\n"
	trixie := "ID=debian\nVERSION_CODENAME=\"trixie\"\n"
	ubuntu := "ID=ubuntu\nVERSION_CODENAME=noble\n"
	cases := map[string]struct {
		files  map[string]string
		mirror string
		want   string // first line, or part of the remedy
		ok     bool
	}{
		"one-line": {map[string]string{"etc/os-release": debian, "etc/apt/sources.list": "deb http://a.test/debian bookworm main"},
			"", "deb http://a.test/debian bookworm main", true},
		"deb822": {map[string]string{"etc/os-release": trixie, "etc/apt/sources.list.d/debian.sources": "Types: deb\nURIs: http://b.test/debian\nSuites: trixie\nComponents: main\nSigned-By: " + deb},
			"", "deb [signed-by=" + deb + "] http://b.test/debian bookworm main", true},
		"backup files do not count": {map[string]string{"etc/os-release": debian, "etc/apt/sources.list.d/x.list.save": "deb http://a.test/debian bookworm main"},
			"", MirrorVariable, false},
		"only updates": {map[string]string{"etc/os-release": debian, "etc/apt/sources.list": "deb http://a.test/debian bookworm-updates main"},
			"", MirrorVariable, false},
		"ubuntu": {map[string]string{"etc/os-release": ubuntu, "etc/apt/sources.list": "deb http://u.test/ubuntu noble main"},
			"", MirrorVariable, false},
		"nothing": {map[string]string{}, "", MirrorVariable, false},
		"mirror without keys": {map[string]string{"etc/os-release": ubuntu}, "http://m.test/debian",
			"debian-archive-keyring", false},
		"mirror": {map[string]string{"etc/os-release": ubuntu, debianKeyring: "keys"}, "http://m.test/debian",
			"http://m.test/debian bookworm main", true},
	}
	for name, c := range cases {
		got, err := Discover(root(t, c.files), c.mirror, "bookworm")
		if !c.ok {
			e := sandbox.AsError(err)
			if err == nil || e.Code != sandbox.CodeFailedPrecondition || !strings.Contains(e.Details.Remediation, c.want) {
				t.Errorf("%s: %v %+v", name, err, e)
			}
			continue
		}
		if err != nil || len(got) == 0 || !strings.Contains(got[0].Line(), c.want) {
			t.Errorf("%s: %v %v", name, got, err)
		}
	}
}

func TestFilterSettings(t *testing.T) {
	got := filterSettings(`APT "";
Acquire "";
Acquire::http "";
Acquire::http::Proxy "http://proxy.test:3128";
Acquire::https::CaInfo "/etc/ssl/ca.pem";
Acquire::http::Pipeline-Depth "0";
Acquire::Check-Valid-Until "false";
Acquire::Retries "3";
Acquire::Languages "none";
Acquire::AllowInsecureRepositories "true";
Acquire::IndexTargets::deb::Packages::MetaKey "x";
APT::Update::Post-Invoke:: "rm -rf /";
DPkg::Pre-Invoke:: "evil";
Acquire::http::Proxy "a"; DPkg::Post-Invoke:: "evil";
`)
	want := []string{`Acquire::http::Proxy "http://proxy.test:3128";`, `Acquire::https::CaInfo "/etc/ssl/ca.pem";`,
		`Acquire::http::Pipeline-Depth "0";`, `Acquire::Check-Valid-Until "false";`, `Acquire::Retries "3";`}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got\n%s", strings.Join(got, "\n"))
	}
}

// localArchive is a repository of one package on disk, unsigned, so that the real apt can be tried without a network.
func localArchive(t *testing.T, version string) Source {
	t.Helper()
	pool := t.TempDir()
	control := "Package: little\nVersion: " + version + "\nArchitecture: amd64\nMaintainer: t <t@t.test>\nDescription: d\n" +
		"Depends: first (>= 1), second | third, fourth\n"
	tree := root(t, map[string]string{"DEBIAN/control": control, "usr/share/little/hello": "hello " + version})
	debFile := filepath.Join(pool, "little.deb")
	runTool(t, "dpkg-deb", "--root-owner-group", "-b", tree, debFile)
	fi, err := os.Stat(debFile)
	if err != nil {
		t.Fatal(err)
	}
	sum := strings.Fields(runTool(t, "sha256sum", debFile))[0]
	index := control + "Filename: ./little.deb\nSize: " + itoa(fi.Size()) + "\nSHA256: " + sum + "\n"
	if err := os.WriteFile(filepath.Join(pool, "Packages"), []byte(index), 0o644); err != nil {
		t.Fatal(err)
	}
	return Source{URI: "file:" + pool, Suite: "./", Options: []string{"trusted=yes"}}
}

func TestStateDownloadsWithoutTouchingTheMachine(t *testing.T) {
	source := localArchive(t, "1.2-3")
	dir := t.TempDir()
	s, err := NewState(t.Context(), dir, []Source{source})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Update(t.Context()); err != nil {
		t.Fatal(err)
	}
	p, err := s.Candidate(t.Context(), "little")
	if err != nil || p.Version != "1.2-3" || !reflect.DeepEqual(p.Depends, []string{"first", "second", "fourth"}) {
		t.Fatalf("%+v %v", p, err)
	}
	file, err := s.Download(t.Context(), p)
	if err != nil {
		t.Fatal(err)
	}
	if !strings.HasPrefix(file, dir) {
		t.Errorf("downloaded to %s", file)
	}
	out := t.TempDir()
	if err := Unpack(t.Context(), file, out); err != nil {
		t.Fatal(err)
	}
	if data, err := os.ReadFile(filepath.Join(out, "usr/share/little/hello")); string(data) != "hello 1.2-3" {
		t.Errorf("%q %v", data, err)
	}
	if _, err := s.Candidate(t.Context(), "no-such-package"); !errors.Is(err, ErrNoPackage) {
		t.Errorf("got %v", err)
	}
	if _, err := os.Stat("/var/lib/dpkg/info/little.list"); err == nil {
		t.Error("the package was installed on this machine")
	}
}

func TestStateRefusesOtherContent(t *testing.T) {
	source := localArchive(t, "1.0")
	s, err := NewState(t.Context(), t.TempDir(), []Source{source})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Update(t.Context()); err != nil {
		t.Fatal(err)
	}
	p, err := s.Candidate(t.Context(), "little")
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(strings.TrimPrefix(source.URI, "file:"), "little.deb")
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	data[len(data)-20] ^= 1
	if err := os.WriteFile(path, data, 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Download(t.Context(), p); err == nil {
		t.Error("a package with a flipped bit was accepted")
	}
}

func TestStateRefusesUnsignedSources(t *testing.T) {
	source := localArchive(t, "1.0")
	source.Options = nil
	s, err := NewState(t.Context(), t.TempDir(), []Source{source})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Update(t.Context()); err == nil {
		t.Error("an unsigned source was accepted")
	}
}

func FuzzParseSources(f *testing.F) {
	f.Add("deb [arch=amd64] http://m.test/debian bookworm main\n")
	f.Add("Types: deb\nURIs: http://m.test\nSuites: bookworm\nComponents: main\nSigned-By:\n -----BEGIN\n\n")
	f.Add(": :\n \n\tx\nTypes")
	f.Fuzz(func(t *testing.T, text string) {
		for _, s := range append(ParseList(text), ParseDeb822(text)...) {
			if strings.ContainsAny(s.Line(), "\n") {
				t.Errorf("a source of more than one line: %q", s.Line())
			}
			again := ParseList(s.Line())
			if strings.ContainsAny(s.URI+s.Suite+s.SignedBy+strings.Join(append(s.Options, s.Components...), ""), "#[]") || s.Components == nil {
				continue
			}
			if len(again) != 1 || again[0].URI != s.URI || again[0].Suite != s.Suite {
				t.Errorf("%q reads back as %+v", s.Line(), again)
			}
		}
	})
}
