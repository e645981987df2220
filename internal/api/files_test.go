package api

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"runtime"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	"github.com/space-sandbox/space/internal/api/apitest"
	agentv1 "github.com/space-sandbox/space/internal/gen/space/agent/v1"
)

func TestContentRoundTrip(t *testing.T) {
	b := newBench(t)
	all := make([]byte, 255)
	for i := range all {
		all[i] = byte(i + 1)
	}
	big := bytes.Repeat([]byte("0123456789"), 100000)
	for path, content := range map[string][]byte{"/zero": {}, "rel": []byte("r"), string(all): []byte("bytes"), "/big": big, "/a b+c%41&d": []byte("x")} {
		at := b.fill(contentPath) + "?path=" + url.QueryEscape(path)
		var e Entry2
		b.do(t, "PUT", at, bytes.NewReader(content)).into(t, 200, &e)
		if int(e.Size) != len(content) || e.Type != "file" || e.Mode != "0644" {
			t.Errorf("%q: entry %+v", path, e)
		}
		got := b.do(t, "GET", at, nil)
		if got.status != 200 || !bytes.Equal(got.body, content) || got.header.Get("Content-Length") != fmt.Sprint(len(content)) {
			t.Errorf("%q: %d, %d bytes, length %q", path, got.status, len(got.body), got.header.Get("Content-Length"))
		}
		h := got.header
		if !strings.HasPrefix(h.Get("Content-Disposition"), "attachment") || h.Get("X-Content-Type-Options") != "nosniff" ||
			!strings.HasPrefix(h.Get("Content-Security-Policy"), "sandbox") || h.Get("Content-Type") != "application/octet-stream" {
			t.Errorf("headers %v", h)
		}
		head := b.do(t, "HEAD", at, nil)
		if head.status != 200 || len(head.body) != 0 || head.header.Get("Content-Length") != fmt.Sprint(len(content)) {
			t.Errorf("HEAD %q: %d %v", path, head.status, head.header)
		}
		b.do(t, "DELETE", at, nil).into(t, 204, nil)
		b.do(t, "GET", at, nil).refused(t, 404, "not_found")
	}
}

// Entry2 is Entry as a client decodes it.
type Entry2 struct {
	Path        string
	PathEncoded string `json:"path_encoded"`
	Type, Mode  string
	Size        uint64
}

func TestFilesWithoutAHonestSize(t *testing.T) {
	b := newBench(t)
	long := strings.Repeat("x", 700000)
	b.Guests.PutFile("/proc/cpuinfo", []byte("processor: 0\n"), 0)
	b.Guests.PutFile("/proc/long", []byte(long), 0)
	b.Guests.PutFile("/sys/short", []byte("on\n"), 4096)
	b.Guests.PutFile("/grown", []byte(long), 600000)
	for path, want := range map[string]string{"/proc/cpuinfo": "processor: 0\n", "/proc/long": long, "/sys/short": "on\n", "/grown": long[:600000]} {
		for _, headers := range [][]string{nil, {"Range", "bytes=0-"}} {
			if len(headers) > 0 && !strings.HasPrefix(path, "/proc") {
				continue
			}
			if got := b.do(t, "GET", b.fill(contentPath)+"?path="+path, nil, headers...); got.status != 200 || string(got.body) != want {
				t.Errorf("%s: %d, %d bytes, want %d", path, got.status, len(got.body), len(want))
			}
		}
	}
	// A file that shrank must not look whole.
	b.Guests.PutFile("/shrunk", []byte(long), 800000)
	req, _ := http.NewRequest(http.MethodGet, b.http.URL+b.fill(contentPath)+"?path=/shrunk", nil)
	req.Header.Set("X-API-Key", apitest.AdminKey)
	resp, err := b.http.Client().Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if got, err := io.ReadAll(resp.Body); err == nil {
		t.Errorf("%d bytes of a file of 800000 look whole", len(got))
	}
}

func TestRanges(t *testing.T) {
	b := newBench(t)
	b.Guests.PutFile("/f", []byte("0123456789"), 0)
	b.Guests.PutFile("/empty", nil, 0)
	for _, c := range []struct {
		path, header string
		status       int
		body, crange string
	}{
		{"/f", "bytes=0-3", 206, "0123", "bytes 0-3/10"},
		{"/f", "bytes=9-", 206, "9", "bytes 9-9/10"},
		{"/f", "bytes=-3", 206, "789", "bytes 7-9/10"},
		{"/f", "bytes=-99", 206, "0123456789", "bytes 0-9/10"},
		{"/f", "bytes=5-999", 206, "56789", "bytes 5-9/10"},
		{"/f", "bytes=10-", 416, "", "bytes */10"},
		{"/f", "bytes=-0", 416, "", "bytes */10"},
		{"/empty", "bytes=0-", 416, "", "bytes */0"},
		{"/f", "bytes=3-1", 200, "0123456789", ""},
		{"/f", "bytes=0-1,3-4", 200, "0123456789", ""},
		{"/f", "lines=0-1", 200, "0123456789", ""},
		{"/f", "bytes=99999999999999999999-", 200, "0123456789", ""},
	} {
		got := b.do(t, "GET", b.fill(contentPath)+"?path="+c.path, nil, "Range", c.header)
		if got.status != c.status || got.header.Get("Content-Range") != c.crange || c.status != 416 && string(got.body) != c.body {
			t.Errorf("%s: %d %q %q", c.header, got.status, got.body, got.header.Get("Content-Range"))
		}
	}
	full := b.do(t, "GET", b.fill(contentPath)+"?path=/f", nil)
	for ifRange, status := range map[string]int{full.header.Get("Last-Modified"): 206, `"other"`: 200} {
		if got := b.do(t, "GET", b.fill(contentPath)+"?path=/f", nil, "Range", "bytes=0-3", "If-Range", ifRange); got.status != status {
			t.Errorf("If-Range %q: %d", ifRange, got.status)
		}
	}
}

func TestBadPaths(t *testing.T) {
	b := newBench(t)
	for _, path := range []string{"", "a%00b", strings.Repeat("x", 4096)} {
		for _, r := range []struct{ method, path string }{{"GET", contentPath}, {"PUT", contentPath}, {"DELETE", contentPath}, {"GET", "/sandboxes/{id}/files"}, {"GET", "/sandboxes/{id}/files/stat"}} {
			if e := b.do(t, r.method, b.fill(r.path)+"?path="+path, nil).refused(t, 400, "invalid_request"); e.Details.Violations[0].Field != "path" {
				t.Errorf("%s %s: %+v", r.method, r.path, e.Details)
			}
		}
	}
	b.do(t, "PUT", b.fill(contentPath)+"?path="+strings.Repeat("x", 4095), nil).into(t, 200, nil)
	for _, bad := range []string{"path=/f&mode=888", "path=/f&mode=07777", "path=/f&parents=yes", "path=/f&user=%00", "path=/f&path=/g", "user=x"} {
		b.do(t, "PUT", b.fill(contentPath)+"?"+bad, nil).refused(t, 400, "invalid_request")
	}
}

func TestListingPages(t *testing.T) {
	b := newBench(t)
	for i := range 5 {
		b.Guests.PutFile(fmt.Sprintf("/d/%d\xff", i), nil, 0)
	}
	var got []string
	for cursor := ""; ; {
		var page struct {
			Items      []Entry2
			NextCursor *string `json:"next_cursor"`
		}
		b.do(t, "GET", b.fill("/sandboxes/{id}/files")+"?path=/d/&limit=2&depth=64&cursor="+cursor, nil).into(t, 200, &page)
		for _, e := range page.Items {
			got = append(got, e.PathEncoded)
			if !strings.HasSuffix(e.Path, "\uFFFD") {
				t.Errorf("path %q", e.Path)
			}
		}
		if page.NextCursor == nil {
			break
		}
		cursor = *page.NextCursor
	}
	if want := "[/d/0%FF /d/1%FF /d/2%FF /d/3%FF /d/4%FF]"; fmt.Sprint(got) != want {
		t.Errorf("%v", got)
	}
	for _, bad := range []string{"cursor=!", "depth=0", "depth=65", "limit=0", "limit=1001", "cursor=AA"} {
		b.do(t, "GET", b.fill("/sandboxes/{id}/files")+"?path=/d&"+bad, nil).refused(t, 400, "invalid_request")
	}
}

func TestFileVerbs(t *testing.T) {
	b := newBench(t)
	base := b.fill("/sandboxes/{id}/files")
	b.Guests.PutFile("/a\xff", []byte("1"), 0)
	var e Entry2
	b.do(t, "POST", base+"/copy", object{"from_encoded": "/a%ff", "to": "/b", "recursive": true}).into(t, 200, &e)
	b.do(t, "POST", base+"/move", object{"from": "/b", "to_encoded": "/c%2D", "overwrite": true}).into(t, 200, nil)
	b.do(t, "POST", base+"/mkdir", object{"path_encoded": "%2fd", "mode": "0700", "parents": true}).into(t, 200, &e)
	b.do(t, "GET", base+"/stat?path=/d&follow=true", nil).into(t, 200, &e)
	if e.PathEncoded != "/d" {
		t.Errorf("entry %+v", e)
	}
	for field, body := range map[string]object{
		"from": {"to": "/b"}, "to": {"from": "/a"}, "from_encoded": {"from_encoded": "%zz", "to": "/b"}, "to_encoded": {"from": "/a", "to_encoded": "a%00"},
	} {
		if v := b.do(t, "POST", base+"/move", body).refused(t, 400, "invalid_request").Details.Violations; v[0].Field != field {
			t.Errorf("%s: %+v", field, v)
		}
	}
	b.do(t, "POST", base+"/mkdir", object{"path": "/a", "path_encoded": "/a"}).refused(t, 400, "invalid_request")
	b.do(t, "POST", base+"/mkdir", object{"path": "/a", "mode": "9"}).refused(t, 400, "invalid_request")
	b.do(t, "POST", base+"/mkdir", object{"path": "/a", "user": "a\x00"}).refused(t, 400, "invalid_request")
	b.do(t, "POST", base+"/copy", object{"from": "/none", "to": "/b"}).refused(t, 404, "not_found")
}

func TestGuestErrorsAreTyped(t *testing.T) {
	b := newBench(t)
	for _, c := range []struct {
		code   connect.Code
		reason agentv1.FileErrorReason
		status int
		want   string
	}{
		{connect.CodePermissionDenied, agentv1.FileErrorReason_FILE_ERROR_REASON_PERMISSION, 403, "forbidden"},
		{connect.CodeInvalidArgument, agentv1.FileErrorReason_FILE_ERROR_REASON_IS_DIRECTORY, 400, "invalid_request"},
		{connect.CodeResourceExhausted, agentv1.FileErrorReason_FILE_ERROR_REASON_NO_SPACE, 412, "failed_precondition"},
	} {
		b.Guests.FileErr = apitest.FileError(c.code, c.reason)
		for _, method := range []string{"GET", "PUT", "DELETE"} {
			got := b.do(t, method, b.fill(contentPath)+"?path=/f", nil)
			if got.refused(t, c.status, c.want); strings.Contains(string(got.body), "secret-path") {
				t.Errorf("the guest's text comes through: %s", got.body)
			}
		}
	}
}

// TestCutUploads cuts a body with a length and a chunked one; neither may change the file.
func TestCutUploads(t *testing.T) {
	b := newBench(t)
	b.Guests.PutFile("/f", []byte("before"), 0)
	for _, head := range []string{"Content-Length: 1000000\r\n\r\n", "Transfer-Encoding: chunked\r\n\r\n10000\r\n", "Transfer-Encoding: chunked\r\n\r\nzz\r\n"} {
		conn, err := net.Dial("tcp", b.http.Listener.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(conn, "PUT %s?path=/f HTTP/1.1\r\nHost: localhost\r\nX-API-Key: %s\r\n%s", b.fill(contentPath), apitest.AdminKey, head)
		_, _ = conn.Write(make([]byte, 30000))
		_ = conn.(*net.TCPConn).CloseWrite()
		_ = conn.SetReadDeadline(time.Now().Add(10 * time.Second))
		answer, _ := io.ReadAll(conn)
		if !strings.HasPrefix(string(answer), "HTTP/1.1 400") {
			t.Errorf("answer %q", answer[:min(len(answer), 60)])
		}
		conn.Close()
	}
	if got, _, _ := b.Guests.File("/f"); string(got) != "before" {
		t.Errorf("the file now holds %d bytes", len(got))
	}
}

type zero struct{}

func (zero) Read(p []byte) (int, error) {
	clear(p)
	return len(p), nil
}

func TestUploadKeepsMemoryFlat(t *testing.T) {
	b := newBench(t)
	b.Guests.Sparse = true
	const size = 256 << 20
	var before, now runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	done := make(chan result, 1)
	go func() { done <- b.do(t, "PUT", b.fill(contentPath)+"?path=/f", io.LimitReader(zero{}, size)) }()
	var most uint64
	for {
		select {
		case got := <-done:
			var e Entry2
			if got.into(t, 200, &e); e.Size != size {
				t.Errorf("size %d", e.Size)
			}
			if grown := int64(most) - int64(before.HeapInuse); grown > 64<<20 {
				t.Errorf("the heap grew by %d MiB", grown>>20)
			}
			return
		case <-time.After(5 * time.Millisecond):
			runtime.ReadMemStats(&now)
			most = max(most, now.HeapInuse)
		}
	}
}
