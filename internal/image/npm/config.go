package npm

import (
	"bufio"
	"net/url"
	"os"
	"path/filepath"
	"strings"
)

// Config is what a client needs of npm's configuration.
type Config struct {
	Registry string // URL without a slash at the end
	CAFile   string
	Token    string
}

// defaultRegistry is npm's own default, used where nothing is configured.
const defaultRegistry = "https://registry.npmjs.org"

// ReadConfig reads npm's configuration the way npm does: environment over user file over system file.
func ReadConfig(getenv func(string) string, home, root string) Config {
	files := []string{filepath.Join(root, "etc/npmrc"), filepath.Join(root, "usr/etc/npmrc"),
		filepath.Join(root, "usr/local/etc/npmrc")}
	if home != "" {
		files = append(files, filepath.Join(home, ".npmrc"))
	}
	if user := getenv("NPM_CONFIG_USERCONFIG"); user != "" {
		files = append(files, user)
	}
	values := map[string]string{}
	for _, file := range files {
		readRC(file, getenv, values)
	}
	for _, key := range []string{"registry", "cafile"} {
		for _, env := range []string{"npm_config_" + key, "NPM_CONFIG_" + strings.ToUpper(key)} {
			if v := getenv(env); v != "" {
				values[key] = v
			}
		}
	}
	c := Config{Registry: strings.TrimRight(values["registry"], "/"), CAFile: values["cafile"]}
	if c.Registry == "" {
		c.Registry = defaultRegistry
	}
	if u, err := url.Parse(c.Registry); err == nil {
		c.Token = values["//"+u.Host+strings.TrimRight(u.Path, "/")+"/:_authtoken"]
	}
	return c
}

// readRC adds the keys of one file. ${NAME} stands for an environment variable.
func readRC(file string, getenv func(string) string, values map[string]string) {
	f, err := os.Open(file)
	if err != nil {
		return // npm treats a missing or unreadable file as empty
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		line := strings.TrimSpace(lines.Text())
		if line == "" || line[0] == '#' || line[0] == ';' {
			continue
		}
		key, value, ok := strings.Cut(line, "=")
		if !ok {
			continue
		}
		value = strings.Trim(strings.TrimSpace(value), `"'`)
		values[strings.ToLower(strings.TrimSpace(key))] = os.Expand(value, func(name string) string {
			return getenv(strings.TrimSuffix(name, "?"))
		})
	}
}
