package npm

import (
	"crypto/sha512"
	"encoding/base64"
	"encoding/json"
	"errors"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestReadConfig(t *testing.T) {
	env := func(m map[string]string) func(string) string { return func(k string) string { return m[k] } }
	user := "registry = https://user.test/npm/\n; comment\n# comment\n//user.test/npm/:_authToken=${TOKEN}\ncafile=\"/ca.pem\"\nbroken line\n"
	cases := map[string]struct {
		system, user string
		env          map[string]string
		want         Config
	}{
		"nothing":           {"", "", nil, Config{Registry: defaultRegistry}},
		"system":            {"registry=http://sys.test", "", nil, Config{Registry: "http://sys.test"}},
		"user over system":  {"registry=http://sys.test", user, map[string]string{"TOKEN": "secret"}, Config{"https://user.test/npm", "/ca.pem", "secret"}},
		"environment first": {"", user, map[string]string{"npm_config_registry": "http://env.test/"}, Config{"http://env.test", "/ca.pem", ""}},
		"upper case":        {"", "", map[string]string{"NPM_CONFIG_REGISTRY": "http://e.test", "NPM_CONFIG_CAFILE": "/c"}, Config{"http://e.test", "/c", ""}},
	}
	for name, c := range cases {
		root, home := t.TempDir(), t.TempDir()
		if err := errors.Join(os.Mkdir(filepath.Join(root, "etc"), 0o755),
			os.WriteFile(filepath.Join(root, "etc/npmrc"), []byte(c.system), 0o600),
			os.WriteFile(filepath.Join(home, ".npmrc"), []byte(c.user), 0o600)); err != nil {
			t.Fatal(err)
		}
		if got := ReadConfig(env(c.env), home, root); got != c.want {
			t.Errorf("%s: %+v", name, got)
		}
	}
}

// registry serves one package with the versions given; broken makes its archives differ from their digests.
func registry(t *testing.T, token string, broken bool, versions ...string) (*httptest.Server, *Client) {
	t.Helper()
	mux := http.NewServeMux()
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if token != "" && r.Header.Get("Authorization") != "Bearer "+token {
			http.Error(w, "no", http.StatusUnauthorized)
			return
		}
		mux.ServeHTTP(w, r)
	}))
	t.Cleanup(server.Close)
	doc := map[string]map[string]release{"versions": {}}
	for _, v := range versions {
		var rel release
		sum := sha512.Sum512([]byte("content of " + v))
		rel.Dist.Integrity = "sha512-" + base64.StdEncoding.EncodeToString(sum[:])
		rel.Dist.Tarball = server.URL + "/files/" + v
		doc["versions"][v] = rel
		mux.HandleFunc("/files/"+v, func(w http.ResponseWriter, _ *http.Request) {
			text := "content of " + v
			if broken {
				text = strings.ToUpper(text)
			}
			_, _ = w.Write([]byte(text))
		})
	}
	mux.HandleFunc("/thing", func(w http.ResponseWriter, _ *http.Request) { _ = json.NewEncoder(w).Encode(doc) })
	return server, NewClient(Config{Registry: server.URL, Token: token})
}

func TestClientPacksTheNewestOfAMajor(t *testing.T) {
	_, c := registry(t, "secret", false, "23.0.0", "24.9.0", "24.10.1", "24.10.0", "24.11.0-rc.1", "25.0.0", "garbage")
	dir := t.TempDir()
	a, err := c.Pack(t.Context(), dir, "thing", 24)
	if err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile(a.Path)
	if a.Version != "24.10.1" || string(data) != "content of 24.10.1" || err != nil {
		t.Errorf("%+v %q %v", a, data, err)
	}
	if _, err := c.Pack(t.Context(), dir, "thing", 26); !errors.Is(err, ErrNotFound) {
		t.Errorf("missing version: %v", err)
	}
	if _, err := c.Pack(t.Context(), dir, "other", 1); !errors.Is(err, ErrNotFound) {
		t.Errorf("missing package: %v", err)
	}
}

func TestClientRefusesOtherContent(t *testing.T) {
	_, c := registry(t, "", true, "1.0.0")
	dir := t.TempDir()
	if _, err := c.Pack(t.Context(), dir, "thing", 1); !errors.Is(err, ErrIntegrity) {
		t.Errorf("got %v", err)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) != 0 {
		t.Errorf("left: %v %v", left, err)
	}
}

func TestTokenGoesToTheRegistryOnly(t *testing.T) {
	var seen string
	elsewhere := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		seen = r.Header.Get("Authorization")
	}))
	defer elsewhere.Close()
	c := NewClient(Config{Registry: "http://registry.test", Token: "secret"})
	body, err := c.get(t.Context(), elsewhere.URL+"/file")
	if err != nil {
		t.Fatal(err)
	}
	body.Close()
	if seen != "" {
		t.Error("the token was sent to another host")
	}
}

func TestBadCAFileIsReported(t *testing.T) {
	c := NewClient(Config{Registry: "http://r.test", CAFile: filepath.Join(t.TempDir(), "no")})
	if _, err := c.Pack(t.Context(), t.TempDir(), "thing", 1); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("got %v", err)
	}
}

func TestParsePack(t *testing.T) {
	cases := map[string]struct {
		text string
		want string
	}{
		"list":        {`[{"filename":"npm-11.2.0.tgz","version":"11.2.0"}]`, "/d/npm-11.2.0.tgz"},
		"by name":     {`{"npm":{"filename":"npm-11.2.0.tgz","version":"11.2.0"}}`, "/d/npm-11.2.0.tgz"},
		"path":        {`[{"filename":"../../x.tgz","version":"11.2.0"}]`, "/d/x.tgz"},
		"other major": {`[{"filename":"npm-12.0.0.tgz","version":"12.0.0"}]`, ""},
		"two":         {`[{"filename":"a","version":"11.0.0"},{"filename":"b","version":"11.0.1"}]`, ""},
		"none":        {`[]`, ""},
		"no JSON":     {`npm ERR!`, ""},
	}
	for name, c := range cases {
		a, err := parsePack(c.text, "/d", 11)
		if a.Path != c.want || (err == nil) != (c.want != "") {
			t.Errorf("%s: %+v %v", name, a, err)
		}
	}
}
