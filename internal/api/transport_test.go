package api

import (
	"bytes"
	"context"
	"encoding/base64"
	"fmt"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/space-sandbox/space/internal/api/apitest"
	agentv1 "github.com/space-sandbox/space/internal/gen/space/agent/v1"
	nodev1 "github.com/space-sandbox/space/internal/gen/space/node/v1"
	"github.com/space-sandbox/space/internal/sandbox"
)

// TestLimiterIsFairToEveryClient: what one client has running never counts against another.
func TestLimiterIsFairToEveryClient(t *testing.T) {
	l := newLimiter(2, true)
	var releases []func()
	for range 2 {
		release, _, ok := l.enter("greedy")
		if !ok {
			t.Fatal("refused below the limit")
		}
		releases = append(releases, release)
	}
	for range 50 { // refusals are not counted
		if _, running, ok := l.enter("greedy"); ok || running != 3 {
			t.Fatalf("the third of two is let in (%v), running %d", ok, running)
		}
	}
	release, running, ok := l.enter("modest")
	if !ok || running != 1 {
		t.Fatalf("another client: %v, running %d", ok, running)
	}
	release()
	releases[0]()
	if release, running, ok = l.enter("greedy"); !ok || running != 2 {
		t.Fatalf("after one ended: %v, running %d", ok, running)
	}
	release()
	releases[1]()
	if len(l.running) != 0 {
		t.Errorf("clients without requests are kept: %v", l.running)
	}
}

func TestLimiterObservesWithoutRefusing(t *testing.T) {
	l := newLimiter(1, false)
	var releases []func()
	for want := 1; want <= 5; want++ {
		release, running, ok := l.enter("a")
		if !ok || running != want {
			t.Fatalf("number %d: %v, running %d", want, ok, running)
		}
		releases = append(releases, release)
	}
	for _, release := range releases {
		release()
	}
	if len(l.running) != 0 {
		t.Errorf("left: %v", l.running)
	}
}

// TestLimiterNeverLetsTooManyIn lets many goroutines of some clients meet; the count inside is the judge.
func TestLimiterNeverLetsTooManyIn(t *testing.T) {
	const limit = 3
	l := newLimiter(limit, true)
	var mu sync.Mutex
	inside := map[string]int{}
	var wg sync.WaitGroup
	for i := range 24 {
		client := strconv.Itoa(i % 3)
		wg.Go(func() {
			for range 200 {
				release, _, ok := l.enter(client)
				if !ok {
					continue
				}
				mu.Lock()
				if inside[client]++; inside[client] > limit {
					t.Errorf("%d of client %s are in", inside[client], client)
				}
				mu.Unlock()
				mu.Lock()
				inside[client]--
				mu.Unlock()
				release()
			}
		})
	}
	wg.Wait()
	if len(l.running) != 0 {
		t.Errorf("left: %v", l.running)
	}
}

// TestRefusedRequestsAreCountedOut: whatever a request ends with, its place is free afterwards.
func TestRefusedRequestsAreCountedOut(t *testing.T) {
	b := newBench(t, func(c *Config) { c.Concurrency = 1 })
	for range 3 {
		b.do(t, "GET", "/v1/sandboxes?typo=1", nil).refused(t, 400, "invalid_request")
		b.do(t, "POST", "/v1/sandboxes", "{").refused(t, 400, "invalid_request")
		b.do(t, "GET", "/v1/sandboxes", nil, "Accept", "text/html").refused(t, 406, "invalid_request")
		b.do(t, "GET", "/v1/sandboxes/nothing", nil).refused(t, 404, "not_found")
		b.Fail("GetSandbox", http.ErrBodyNotAllowed)
		b.do(t, "GET", b.fill("/sandboxes/{id}"), nil).refused(t, 500, "internal")
		b.Fail("GetSandbox", nil)
	}
	b.do(t, "GET", "/v1/sandboxes", nil).into(t, 200, nil)
}

// TestRetryAfterComesFromTheError through the whole server.
func TestRetryAfterComesFromTheError(t *testing.T) {
	b := newBench(t)
	for want, after := range map[string]time.Duration{"1": 0, "2": 1001 * time.Millisecond, "30": 30 * time.Second} {
		e := sandbox.Errorf(sandbox.CodeCapacityUnavailable, "no node has room")
		e.RetryAfter = after
		b.Fail("CreateSandbox", e)
		got := b.do(t, "POST", "/v1/sandboxes", object{"template": "base"})
		if got.refused(t, 503, "capacity_unavailable"); got.header.Get("Retry-After") != want {
			t.Errorf("%s: Retry-After %q, want %s", after, got.header.Get("Retry-After"), want)
		}
	}
	b.SetState(sandbox.StateCreating)
	e := b.do(t, "GET", b.fill("/sandboxes/{id}/processes"), nil).refused(t, 409, "conflict")
	if !e.Retryable || e.Details.State != "creating" || len(e.Details.AllowedFrom) != 1 || e.Details.AllowedFrom[0] != "running" {
		t.Errorf("%+v", e)
	}
	b.SetState(sandbox.StateDeleted)
	if e := b.do(t, "GET", b.fill("/sandboxes/{id}/processes"), nil).refused(t, 409, "conflict"); e.Retryable {
		t.Error("a deleted sandbox is worth a repeat")
	}
}

// TestSecurityHeadersAreOnEveryAnswer, whatever it is: good, refused, outside of the API, from a page of another origin.
func TestSecurityHeadersAreOnEveryAnswer(t *testing.T) {
	b := newBench(t)
	b.Guests.PutFile("/f.html", []byte("<script>"), 0)
	for _, r := range []struct{ method, path string }{
		{"GET", "/v1/sandboxes"}, {"GET", "/v1/nothing"}, {"GET", "/"}, {"GET", "/healthz"}, {"GET", "/readyz"}, {"GET", "/openapi.yaml"}, {"OPTIONS", "/v1/sandboxes"},
		{"POST", "/v1/sandboxes"}, {"GET", b.fill(contentPath) + "?path=/f.html"}, {"HEAD", b.fill(contentPath) + "?path=/f.html"}, {"GET", b.fill(processPath + "/output")},
	} {
		got := b.do(t, r.method, r.path, nil, "Origin", "https://page.example", "Access-Control-Request-Method", "POST")
		h := got.header
		if h.Get("X-Content-Type-Options") != "nosniff" || h.Get("Cache-Control") != "no-store" || h.Get("X-Request-Id") == "" {
			t.Errorf("%s %s: %v", r.method, r.path, h)
		}
		for name := range h {
			if strings.HasPrefix(name, "Access-Control-") || name == "Set-Cookie" || name == "Server" {
				t.Errorf("%s %s: sends %s", r.method, r.path, name)
			}
		}
		if strings.Contains(r.path, "files/content") || strings.Contains(r.path, "/output") {
			if h.Get("Content-Type") != "application/octet-stream" || !strings.HasPrefix(h.Get("Content-Disposition"), "attachment;") || !strings.Contains(h.Get("Content-Security-Policy"), "sandbox") {
				t.Errorf("%s %s: a guest's bytes could be shown: %v", r.method, r.path, h)
			}
		}
	}
}

// TestFilesOfEveryByte writes and reads a file for each byte that a name can hold.
func TestFilesOfEveryByte(t *testing.T) {
	b := newBench(t)
	for i := 1; i < 256; i++ {
		name := "/d/a" + string([]byte{byte(i)}) + "z"
		escaped := fmt.Sprintf("/d/a%%%02Xz", i)
		var entry listed
		b.do(t, "PUT", b.fill(contentPath)+"?path="+escaped, bytes.NewReader([]byte{byte(i)})).into(t, 200, &entry)
		if back, err := url.PathUnescape(entry.PathEncoded); err != nil || back != name {
			t.Errorf("%#02x: path_encoded %q, %v", i, entry.PathEncoded, err)
		}
		if content, _, ok := b.Guests.File(name); !ok || len(content) != 1 || content[0] != byte(i) {
			t.Errorf("%#02x: the guest has %q, %v", i, content, ok)
		}
		got := b.do(t, "GET", b.fill(contentPath)+"?path="+escaped, nil)
		if got.status != 200 || len(got.body) != 1 || got.body[0] != byte(i) {
			t.Errorf("%#02x: %d %q", i, got.status, got.body)
		}
		_, file, _ := strings.Cut(got.header.Get("Content-Disposition"), "filename*=UTF-8''")
		if back, err := url.PathUnescape(file); err != nil || back != name[strings.LastIndexByte(name, '/')+1:] {
			t.Errorf("%#02x: Content-Disposition %q", i, got.header.Get("Content-Disposition"))
		}
	}
	seen, cursor := map[string]bool{}, ""
	for pages := 1; ; pages++ {
		var page struct {
			Items      []listed `json:"items"`
			NextCursor *string  `json:"next_cursor"`
		}
		b.do(t, "GET", b.fill("/sandboxes/{id}/files")+"?path=/d&limit=50&cursor="+cursor, nil).into(t, 200, &page)
		for _, e := range page.Items {
			seen[e.PathEncoded] = true
		}
		if page.NextCursor == nil || pages > 6 {
			break
		}
		cursor = *page.NextCursor
	}
	if len(seen) != 255 {
		t.Errorf("%d of 255 names are listed", len(seen))
	}
}

// listed is what the test reads of an entry.
type listed struct {
	PathEncoded string `json:"path_encoded"`
}

func TestCursorsAreCheckedByEveryList(t *testing.T) {
	b := newBench(t)
	b.Guests.PutFile("/d/f", nil, 0)
	enc := base64.RawURLEncoding.EncodeToString
	for path, bad := range map[string][]string{
		b.fill("/sandboxes/{id}/processes") + "?": {"x", "p", "k0123456789abcdefghij", "p0123456789abcdefghi", "P0123456789abcdefghij", "%00"},
		"/v1/api-keys?": {"x", "p0123456789abcdefghij", "k0123456789abcdefghijk", "%20"},
		b.fill("/sandboxes/{id}/files") + "?path=/d&": {"%2B%2F", "a", "=", enc([]byte("/a\x00")), enc(bytes.Repeat([]byte("x"), 4096))},
	} {
		for _, cursor := range bad {
			e := b.do(t, "GET", path+"cursor="+cursor, nil).refused(t, 400, "invalid_request")
			if v := e.Details.Violations[0]; v.Field != "cursor" || v.Rule != "cursor" {
				t.Errorf("%s %.20q: %+v", path, cursor, v)
			}
		}
		b.do(t, "GET", path+"cursor=", nil).into(t, 200, nil) // empty: the first page
	}
}

func TestIfMatchForms(t *testing.T) {
	b := newBench(t)
	for value, status := range map[string]int{
		`"3"`: 200, `3`: 200, `*`: 200, ` "3" `: 200, `"2"`: 412, `"4"`: 412, `"9223372036854775807"`: 412,
		`"9223372036854775808"`: 400, `W/"3"`: 400, `"3", "4"`: 400, `"x"`: 400, `"-1"`: 400, `""`: 400, `3.0`: 400, `0x3`: 400,
	} {
		got := b.do(t, "PATCH", b.fill("/sandboxes/{id}"), object{}, "If-Match", value)
		if got.status != status {
			t.Errorf("%q: %d, want %d: %s", value, got.status, status, got.body)
		}
		if status == 400 {
			if e := got.refused(t, 400, "invalid_request"); e.Details.Violations[0].Field != "If-Match" {
				t.Errorf("%q: %+v", value, e.Details)
			}
		}
	}
}

func TestRangeParsing(t *testing.T) {
	for header, want := range map[string]struct {
		wellFormed, ok bool
		first, last    uint64
	}{
		"bytes=0-0": {true, true, 0, 0}, "bytes=0-": {true, true, 0, 9}, "bytes=9-9": {true, true, 9, 9}, "bytes=9-10": {true, true, 9, 9}, "bytes=-1": {true, true, 9, 9},
		"bytes=-10": {true, true, 0, 9}, "bytes=-11": {true, true, 0, 9}, "bytes=0-18446744073709551615": {true, true, 0, 9}, "bytes=00-01": {true, true, 0, 1},
		"bytes=-18446744073709551615": {true, true, 0, 9},
		"bytes=10-":                   {true, false, 0, 0}, "bytes=10-10": {true, false, 0, 0}, "bytes=-0": {true, false, 0, 0}, "bytes=18446744073709551615-": {true, false, 0, 0},
		"": {}, "bytes": {}, "bytes=": {}, "bytes=-": {}, "bytes=1": {}, "bytes=2-1": {}, "bytes=a-b": {}, "bytes=1-2-3": {}, "bytes=+1-2": {}, "bytes=1-+2": {}, "bytes= 1-2": {},
		"bytes=1-2,3-4": {}, "bytes=18446744073709551616-": {}, "Bytes=0-1": {}, "items=0-1": {}, "bytes=--1": {}, "bytes=0x1-2": {},
	} {
		if got := wellFormedRange(header); got != want.wellFormed {
			t.Errorf("%q: well-formed %v", header, got)
			continue
		}
		if !want.wellFormed {
			continue
		}
		part, ok := parseRange(header, 10)
		if ok != want.ok || ok && (part.first != want.first || part.last != want.last || part.size != 10 || part.length() != want.last-want.first+1) {
			t.Errorf("%q: %+v %v", header, part, ok)
		}
		if _, ok := parseRange(header, 0); ok {
			t.Errorf("%q: a part of an empty file", header)
		}
	}
}

func FuzzRange(f *testing.F) {
	for _, s := range []string{"bytes=0-1", "bytes=-5", "bytes=5-", "bytes=18446744073709551615-18446744073709551615", "bytes=,"} {
		f.Add(s, uint64(10))
	}
	f.Fuzz(func(t *testing.T, header string, size uint64) {
		if !wellFormedRange(header) {
			return
		}
		if part, ok := parseRange(header, size); ok && (part.first > part.last || part.last >= size || part.size != size) {
			t.Errorf("%q of %d: %+v", header, size, part)
		}
	})
}

// TestOutputFromEveryOffset reads output from each position; a chunk's inside is no boundary.
func TestOutputFromEveryOffset(t *testing.T) {
	b := newBench(t)
	const whole = "0123456789"
	for _, part := range [][2]int{{0, 1}, {1, 6}, {6, 10}} {
		b.Guests.Emit(b.Process.GetProcessId(), &nodev1.Event{Kind: &nodev1.Event_Output{Output: &nodev1.OutputChunk{
			Stream: agentv1.Stream_STREAM_STDOUT, Data: []byte(whole[part[0]:part[1]]), Offset: uint64(part[0]),
		}}})
	}
	for from := 0; from <= len(whole); from++ {
		got := b.do(t, "GET", b.fill(processPath+"/output")+"?from="+strconv.Itoa(from), nil)
		if got.status != 200 || string(got.body) != whole[from:] {
			t.Errorf("from %d: %d %q", from, got.status, got.body)
		}
	}
	got := b.do(t, "GET", b.fill(processPath+"/output")+"?from=11", nil)
	if e := got.refused(t, 416, "invalid_request"); e.Details.Remediation == "" || got.header.Get("Content-Disposition") != "" {
		t.Errorf("%+v with %v", e, got.header)
	}
	b.do(t, "GET", b.fill(processPath+"/output")+"?stream=stderr&from=1", nil).refused(t, 416, "invalid_request")
	b.do(t, "GET", b.fill(processPath+"/output")+"?from=9007199254740992", nil).refused(t, 416, "invalid_request")
	b.do(t, "GET", b.fill(processPath+"/output")+"?from=9007199254740994", nil).refused(t, 400, "invalid_request")
}

// TestOnlyOneCredentialCounts: a bearer token wins over the other header, and a bad one is not passed over.
func TestOnlyOneCredentialCounts(t *testing.T) {
	b := newBench(t)
	b.do(t, "GET", "/v1/sandboxes", nil, "Authorization", "", "X-API-Key", apitest.ReaderKey).into(t, 200, nil)
	b.do(t, "GET", "/v1/sandboxes", nil, "Authorization", "Bearer x", "X-API-Key", apitest.AdminKey).refused(t, 401, "unauthorized")
	got := b.do(t, "GET", "/v1/sandboxes?api_key="+apitest.AdminKey, nil, "Authorization", "")
	if got.refused(t, 401, "unauthorized"); got.header.Get("WWW-Authenticate") != "Bearer" {
		t.Errorf("WWW-Authenticate %q", got.header.Get("WWW-Authenticate"))
	}
}

// TestHeadersOfHeadAreThoseOfGet for a file and a record.
func TestHeadersOfHeadAreThoseOfGet(t *testing.T) {
	b := newBench(t)
	b.Guests.PutFile("/f", []byte("0123456789"), 0)
	for _, path := range []string{b.fill(contentPath) + "?path=/f", b.fill("/sandboxes/{id}"), "/healthz"} {
		get, head := b.do(t, "GET", path, nil), b.do(t, "HEAD", path, nil)
		if head.status != get.status || len(head.body) != 0 {
			t.Errorf("%s: %d with %d bytes", path, head.status, len(head.body))
		}
		for _, name := range []string{"Content-Type", "Content-Length", "Etag", "Last-Modified", "Accept-Ranges", "Content-Disposition"} {
			if head.header.Get(name) != get.header.Get(name) {
				t.Errorf("%s: %s %q, with GET %q", path, name, head.header.Get(name), get.header.Get(name))
			}
		}
	}
}

func TestDrainWithoutRequestsReturnsAndRepeats(t *testing.T) {
	b := newBench(t)
	for range 2 {
		if err := b.server.Drain(context.Background()); err != nil {
			t.Fatal(err)
		}
	}
	for _, path := range []string{"/v1/sandboxes", "/readyz", "/openapi.yaml", "/"} {
		b.do(t, "GET", path, nil).refused(t, 503, "service_unavailable")
	}
}
