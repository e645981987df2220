package daemon

import (
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/space-sandbox/space/internal/config"
)

func TestAPortInUseIsAnErrorAtOnce(t *testing.T) {
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = taken.Close() }()
	for flag, cfg := range map[string]config.Config{
		"--api-listen":  {APIListen: taken.Addr().String(), DataListen: "127.0.0.1:0"},
		"--data-listen": {APIListen: "127.0.0.1:0", DataListen: taken.Addr().String()},
	} {
		cfg.DataDir = filepath.Join(t.TempDir(), "data")
		err := Run(t.Context(), cfg, "v", slog.New(slog.DiscardHandler))
		if err == nil || !strings.Contains(err.Error(), flag) {
			t.Errorf("%v does not name %s", err, flag)
		}
		if _, err := os.Stat(cfg.DataDir); err == nil {
			t.Error("the data folder was made")
		}
	}
}

func TestPrivateFolder(t *testing.T) {
	dir := t.TempDir()
	open := filepath.Join(dir, "open")
	if err := os.Mkdir(open, 0o777); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(open, 0o777); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{open, filepath.Join(dir, "a", "b")} {
		if err := privateFolder(path); err != nil {
			t.Fatal(err)
		}
		if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o700 {
			t.Errorf("%s: %v, %v", path, info.Mode(), err)
		}
	}
	link := filepath.Join(dir, "link")
	if err := os.Symlink(open, link); err != nil {
		t.Fatal(err)
	}
	if err := privateFolder(link); err == nil {
		t.Error("a link was followed")
	}
}

func TestDataPlaneURL(t *testing.T) {
	for _, test := range []struct{ listen, url, want string }{
		{"127.0.0.1:0", "", "http://127.0.0.1:"}, {"0.0.0.0:0", "", "http://space.test:"}, {"127.0.0.1:0", "https://d.example", "https://d.example"},
	} {
		l, err := net.Listen("tcp4", test.listen)
		if err != nil {
			t.Fatal(err)
		}
		d := &daemon{cfg: config.Config{Domain: "space.test", DataPlaneURL: test.url}, dataListener: l}
		if got := d.dataPlaneURL(); !strings.HasPrefix(got, test.want) {
			t.Errorf("%s: %q", test.listen, got)
		}
		_ = l.Close()
	}
}
