package e2e

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"
)

func contentPath(id, path string) string {
	return "/v1/sandboxes/" + id + "/files/content?path=" + url.QueryEscape(path)
}

func (s *server) put(t *testing.T, id, path string, body io.Reader) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 15*time.Minute)
	defer cancel()
	resp, err := s.request(ctx, "PUT", contentPath(id, path), body, "Content-Type", "application/octet-stream")
	if err != nil {
		t.Fatalf("put %q: %v", path, err)
	}
	defer resp.Body.Close()
	if resp.StatusCode/100 != 2 {
		b, _ := io.ReadAll(resp.Body)
		t.Fatalf("put %q: %s %s", path, resp.Status, b)
	}
}

func (s *server) get(t *testing.T, id, path string) []byte {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	resp, err := s.request(ctx, "GET", contentPath(id, path), nil)
	if err != nil {
		t.Fatalf("get %q: %v", path, err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != http.StatusOK {
		t.Fatalf("get %q: %s %v %s", path, resp.Status, err, tail(string(b), 300))
	}
	return b
}

func TestFilesRoundTrip(t *testing.T) {
	t.Parallel()
	sb := shared.create(t, nil)
	big := bytes.Repeat([]byte("\x00\x01\xfe\xffspace"), 1<<20)
	for name, content := range map[string][]byte{
		"/home/user/zero":           {},
		"/home/user/with space":     []byte("a"),
		"/home/user/with\nnewline":  []byte("b"),
		"/home/user/bytes-\xff\xfe": []byte("c"),
		"/home/user/\u00e9\u4e16":   []byte("d"),
		"relative-to-home":          []byte("e"),
		"/tmp/big":                  big,
	} {
		shared.put(t, sb.ID, name, bytes.NewReader(content))
		if got := shared.get(t, sb.ID, name); !bytes.Equal(got, content) {
			t.Errorf("%q: got %d bytes, want %d", name, len(got), len(content))
		}
	}
	if got := strings.Fields(shared.sh(t, sb.ID, "sha256sum /tmp/big"))[0]; got != sha256Hex(big) {
		t.Errorf("the guest sees %s", got)
	}
	if got := shared.sh(t, sb.ID, "stat -c '%U %a' relative-to-home"); got != "user 644\n" {
		t.Errorf("owner and mode %q", got)
	}
	if got := string(shared.get(t, sb.ID, "/proc/cpuinfo")); !strings.Contains(got, "processor") {
		t.Errorf("/proc/cpuinfo: %q", tail(got, 100))
	}
	var list struct {
		Items []struct {
			Name        string
			PathEncoded string `json:"path_encoded"`
			Type        string
		}
	}
	shared.call(t, "GET", "/v1/sandboxes/"+sb.ID+"/files?path=/home/user", nil, &list)
	found := false
	for _, e := range list.Items {
		found = found || strings.Contains(e.PathEncoded, "bytes-%FF%FE")
	}
	if !found {
		t.Errorf("no exact path of the name that is not UTF-8 in %+v", list.Items)
	}
}

func TestFileVerbs(t *testing.T) {
	t.Parallel()
	sb := shared.create(t, nil)
	base := "/v1/sandboxes/" + sb.ID + "/files"
	shared.call(t, "POST", base+"/mkdir", object{"path": "/home/user/a/b", "parents": true}, nil)
	shared.put(t, sb.ID, "/home/user/a/b/one", strings.NewReader("1"))
	shared.call(t, "POST", base+"/copy", object{"from": "/home/user/a", "to": "/home/user/c", "recursive": true}, nil)
	shared.call(t, "POST", base+"/move", object{"from": "/home/user/c/b/one", "to": "/home/user/two"}, nil)
	if got := string(shared.get(t, sb.ID, "/home/user/two")); got != "1" {
		t.Errorf("moved: %q", got)
	}
	var stat struct {
		Type string
		Size int
	}
	shared.call(t, "GET", base+"/stat?path=/home/user/two", nil, &stat)
	if stat.Type != "file" || stat.Size != 1 {
		t.Errorf("stat %+v", stat)
	}
	shared.refused(t, 404, "not_found", "GET", base+"/stat?path=/home/user/c/b/one", nil)
	shared.refused(t, 404, "not_found", "GET", contentPath(sb.ID, "/nope"), nil)
	shared.call(t, "DELETE", contentPath(sb.ID, "/home/user/two"), nil, nil)
	shared.refused(t, 404, "not_found", "GET", contentPath(sb.ID, "/home/user/two"), nil)
	// Rights are the user's, not the agent's.
	if _, err := shared.callErr("GET", contentPath(sb.ID, "/etc/shadow"), nil, nil); err == nil {
		t.Error("user reads /etc/shadow")
	}
	shared.call(t, "GET", base+"/stat?path=/etc/shadow&user=root", nil, nil)
	for _, bad := range []string{"", "a\x00b", "/" + strings.Repeat("x", 5000)} {
		e := shared.refused(t, 400, "invalid_request", "GET", contentPath(sb.ID, bad), nil)
		if len(e.Details.Violations) == 0 || e.Details.Violations[0].Field != "path" {
			t.Errorf("path of %d bytes: %+v", len(bad), e.Details)
		}
	}
}

func TestPathsStayInTheSandbox(t *testing.T) {
	t.Parallel()
	sb := shared.create(t, nil)
	canary := filepath.Join(shared.dir, "canary")
	if err := os.WriteFile(canary, []byte("host"), 0o600); err != nil {
		t.Fatal(err)
	}
	dots := strings.Repeat("../", 20)
	shared.put(t, sb.ID, dots+"tmp/escaped", strings.NewReader("guest"))
	if got := shared.sh(t, sb.ID, "cat /tmp/escaped"); got != "guest" {
		t.Errorf("the file is not where the guest's root is: %q", got)
	}
	shared.sh(t, sb.ID, "ln -s / /home/user/root; ln -s "+canary+" /home/user/link; ln -s /home/user/loop /home/user/loop")
	for _, p := range []string{canary, dots + canary, "/home/user/link", "/home/user/root" + canary, "/proc/1/root" + canary, "/home/user/loop"} {
		if _, err := shared.callErr("GET", contentPath(sb.ID, p), nil, nil); err == nil {
			t.Errorf("%q reaches the host", p)
		}
	}
	if _, err := os.Stat("/tmp/escaped"); err == nil {
		t.Error("the upload landed on the host")
	}
}

func TestCutUploadChangesNothing(t *testing.T) {
	t.Parallel()
	sb := shared.create(t, nil)
	shared.put(t, sb.ID, "/home/user/f", strings.NewReader("before"))
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	r, w := io.Pipe()
	go func() {
		_, _ = w.Write(make([]byte, 1<<20))
		_ = w.CloseWithError(io.ErrUnexpectedEOF) // the client gives up and cuts the connection
	}()
	resp, err := shared.request(ctx, "PUT", contentPath(sb.ID, "/home/user/f"), r)
	if err == nil {
		resp.Body.Close()
		t.Fatalf("cut upload answered %s", resp.Status)
	}
	if got := string(shared.get(t, sb.ID, "/home/user/f")); got != "before" {
		t.Errorf("the file now holds %d bytes", len(got))
	}
	eventually(t, 10*time.Second, "no temporary file is left", func() bool {
		return strings.TrimSpace(shared.sh(t, sb.ID, "ls -A /home/user | grep -v '^\\.\\(bash\\|profile\\)' | wc -l")) == "1"
	})
}

// rss returns the resident set of a process in bytes.
func rss(t *testing.T, pid int) int {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/statm", pid))
	if err != nil {
		t.Fatal(err)
	}
	n, err := strconv.Atoi(strings.Fields(string(b))[1])
	if err != nil {
		t.Fatal(err)
	}
	return n * os.Getpagesize()
}

// zeros is a reader of n zero bytes: what a sparse file looks like to its reader.
func zeros(n int64) io.Reader { return io.LimitReader(zero{}, n) }

type zero struct{}

func (zero) Read(p []byte) (int, error) {
	clear(p)
	return len(p), nil
}

func TestHugeSparseUploadKeepsMemoryFlat(t *testing.T) {
	s := ownServer(t)
	sb := s.create(t, object{"resources": object{"disk_mib": 8192}})
	s.put(t, sb.ID, "/home/user/warm", zeros(64<<20))
	before, most := rss(t, s.cmd.Process.Pid), 0
	done := make(chan struct{})
	go func() {
		defer close(done)
		s.put(t, sb.ID, "/home/user/huge", zeros(5<<30))
	}()
	for {
		select {
		case <-done:
			if grown := most - before; grown > 64<<20 {
				t.Errorf("the server grew by %d MiB", grown>>20)
			}
			if got := strings.TrimSpace(s.sh(t, sb.ID, "stat -c %s huge")); got != strconv.Itoa(5<<30) {
				t.Errorf("size in the guest %s", got)
			}
			return
		case <-time.After(50 * time.Millisecond):
			most = max(most, rss(t, s.cmd.Process.Pid))
		}
	}
}
