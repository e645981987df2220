package config

import (
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spf13/pflag"
)

var update = flag.Bool("update", false, "write the golden files")

func env(pairs ...string) func(string) (string, bool) {
	m := map[string]string{}
	for i := 0; i < len(pairs); i += 2 {
		m[pairs[i]] = pairs[i+1]
	}
	return func(k string) (string, bool) { v, ok := m[k]; return v, ok }
}

func load(t *testing.T, args []string, lookup func(string) (string, bool), file string) (*Config, error) {
	t.Helper()
	c := &Config{}
	settings, err := Settings(c)
	if err != nil {
		t.Fatal(err)
	}
	flags := pflag.NewFlagSet("x", pflag.ContinueOnError)
	AddFlags(flags, settings)
	if err := flags.Parse(args); err != nil {
		return nil, err
	}
	return c, Apply(settings, lookup, file)
}

func write(t *testing.T, name, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestPrecedence(t *testing.T) {
	file := write(t, "c.yaml", "pool_size: 7\nnode_name: file\ndomain: file.example\nallowed_hosts: [a, b]\ndrain_timeout: 3s\n")
	c, err := load(t, []string{"--node-name", "flag", "--stop-sandboxes"}, env("SPACE_NODE_NAME", "env", "SPACE_DOMAIN", "env.example"), file)
	if err != nil {
		t.Fatal(err)
	}
	if c.NodeName != "flag" || c.Domain != "env.example" || c.PoolSize != 7 || c.APIListen != "127.0.0.1:8700" || !c.StopSandboxes ||
		strings.Join(c.AllowedHosts, "|") != "a|b" || c.DrainTimeout.Seconds() != 3 {
		t.Errorf("%+v", c)
	}
}

func TestTOML(t *testing.T) {
	c, err := load(t, nil, env(), write(t, "c.toml", "pool_size = 0\nlog_level = \"debug\"\n"))
	if err != nil || c.PoolSize != 0 || c.LogLevel != "debug" {
		t.Errorf("%+v, %v", c, err)
	}
}

func TestErrorsNameTheirPlace(t *testing.T) {
	for name, test := range map[string]struct {
		args []string
		env  func(string) (string, bool)
		file string
		want string
	}{
		"unknown key":  {nil, env(), write(t, "a.yaml", "pool_sise: 1\n"), "pool_sise"},
		"bad type":     {nil, env(), write(t, "b.yaml", "pool_size: many\n"), "pool_size"},
		"nested":       {nil, env(), write(t, "c.yaml", "domain: {a: 1}\n"), "domain"},
		"bad list":     {nil, env(), write(t, "d.yaml", "allowed_hosts: [1]\n"), "allowed_hosts"},
		"bad env":      {nil, env("SPACE_POOL_SIZE", "x"), "", "SPACE_POOL_SIZE"},
		"bad flag":     {[]string{"--pool-size", "x"}, env(), "", "pool-size"},
		"extension":    {nil, env(), write(t, "e.json", "{}"), ".toml"},
		"missing file": {nil, env(), "/nonexistent/x.yaml", "nonexistent"},
		"syntax":       {nil, env(), write(t, "f.toml", "a = = 1"), "f.toml"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := load(t, test.args, test.env, test.file)
			if err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("%v lacks %q", err, test.want)
			}
		})
	}
}

func TestFillDefaults(t *testing.T) {
	get := func(pairs ...string) func(string) string {
		l := env(pairs...)
		return func(k string) string { v, _ := l(k); return v }
	}
	for _, test := range []struct {
		euid          int
		env           func(string) string
		data, runtime string
	}{
		{0, get(), "/var/lib/space", "/run/space"},
		{1000, get("HOME", "/home/u"), "/home/u/.local/share/space", "/tmp/space-1000"},
		{1000, get("HOME", "/home/u", "XDG_DATA_HOME", "/d", "XDG_RUNTIME_DIR", "/run/user/1000"), "/d/space", "/run/user/1000/space"},
		{1000, get("HOME", "/h", "XDG_RUNTIME_DIR", "/"+strings.Repeat("x", 60)), "/h/.local/share/space", "/tmp/space-1000"},
	} {
		c, err := load(t, nil, env(), "")
		if err != nil {
			t.Fatal(err)
		}
		if err := c.FillDefaults(test.euid, test.env); err != nil {
			t.Fatal(err)
		}
		if c.DataDir != test.data || c.RuntimeDir != test.runtime || c.Database != "sqlite://"+test.data+"/space.db" {
			t.Errorf("%+v", c)
		}
	}
}

func TestValuesAreChecked(t *testing.T) {
	for _, args := range [][]string{{"--log-format", "xml"}, {"--log-level", "loud"}, {"--log-level", ""}, {"--pool-size", "-1"}, {"--concurrency", "0"}, {"--vmm-uid-base", "-5"}} {
		c, err := load(t, args, env(), "")
		if err != nil {
			t.Fatal(err)
		}
		if err := c.FillDefaults(0, func(string) string { return "" }); err == nil || !strings.Contains(err.Error(), args[0]) {
			t.Errorf("%v: %v", args, err)
		}
	}
}

func TestReferenceIsUpToDate(t *testing.T) {
	text, err := Markdown()
	if err != nil {
		t.Fatal(err)
	}
	path := "../../docs/configuration.md"
	if *update {
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	have, err := os.ReadFile(path)
	if err != nil || string(have) != text {
		t.Errorf("%s is out of date (%v): run go test ./internal/config -update", path, err)
	}
}

func FuzzParse(f *testing.F) {
	f.Add([]byte("pool_size: 1\n"), true)
	f.Add([]byte("a: &a [*a]\n"), true)
	f.Add([]byte("pool_size = 1\n"), false)
	f.Fuzz(func(t *testing.T, data []byte, y bool) {
		settings, err := Settings(&Config{})
		if err != nil {
			t.Fatal(err)
		}
		ext := ".toml"
		if y {
			ext = ".yaml"
		}
		values, err := parse(data, ext, settings)
		for key := range values {
			if err == nil && strings.ContainsAny(key, "- ") {
				t.Errorf("odd key %q", key)
			}
		}
	})
}
