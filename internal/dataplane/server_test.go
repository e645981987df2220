package dataplane

import (
	"bytes"
	"context"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/space-sandbox/space/internal/api/apitest"
	"github.com/space-sandbox/space/internal/sandbox"
)

func TestSessionTokenIsNeeded(t *testing.T) {
	b := newBench(t)
	other := "/v1/sessions/" + string(sandbox.NewSessionID()) + "/"
	for verb, method := range map[string]string{"events": "GET", "stdin": "POST", "resize": "POST", "signal": "POST"} {
		for name, c := range map[string]struct{ path, credential string }{
			"no token":        {b.path(verb), ""},
			"another token":   {b.path(verb), "Bearer x" + apitest.Token},
			"an API key":      {b.path(verb), "Bearer " + apitest.AdminKey},
			"another scheme":  {b.path(verb), "Basic " + apitest.Token},
			"unknown session": {other + verb, "Bearer " + apitest.Token},
			"no session id":   {"/v1/sessions/x/" + verb, "Bearer " + apitest.Token},
		} {
			t.Run(verb+" "+name, func(t *testing.T) {
				b.refused(t, 401, "unauthorized", method, c.path, nil, "Authorization", c.credential)
			})
		}
		b.refused(t, 405, "invalid_request", "PUT", b.path(verb), nil)
		b.refused(t, 400, "invalid_request", method, b.path(verb)+"?typo=1", nil)
		b.refused(t, 400, "invalid_request", method, b.path(verb)+"?a=%zz", nil)
	}
	for _, path := range []string{"/", "/v1/sessions", "/v1/sessions/x", b.path("nothing"), b.path("events") + "/x", "/v1/sandboxes"} {
		b.refused(t, 404, "not_found", "GET", path, nil)
	}
	b.refused(t, 406, "invalid_request", "GET", b.path("events"), nil, "Accept", "application/json")
	b.refused(t, 400, "invalid_request", "GET", b.path("events"), nil, "Last-Event-ID", "-1")
	b.refused(t, 400, "invalid_request", "GET", b.path("events")+"?last_event_id=+1", nil)
	b.refused(t, 400, "invalid_request", "GET", b.path("events")+"?last_event_id=1&last_event_id=2", nil)
}

func TestCORS(t *testing.T) {
	b := newBench(t)
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	resp := b.request(ctx, t, http.MethodOptions, b.path("events"), nil, "Authorization", "", "Origin", "https://page.example")
	defer resp.Body.Close()
	h := resp.Header
	if resp.StatusCode != http.StatusNoContent || h.Get("Access-Control-Allow-Origin") != "*" || !strings.Contains(h.Get("Access-Control-Allow-Headers"), "Last-Event-ID") ||
		!strings.Contains(h.Get("Access-Control-Allow-Methods"), "GET") || h.Get("Access-Control-Allow-Credentials") != "" {
		t.Errorf("%d %v", resp.StatusCode, h)
	}
}

func (b *bench) post(t *testing.T, path, contentType string, body io.Reader) *http.Response {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	resp := b.request(ctx, t, "POST", path, body, "Content-Type", contentType)
	resp.Body.Close()
	return resp
}

func TestStdin(t *testing.T) {
	b := newBench(t)
	const binary = "application/octet-stream"
	big := bytes.Repeat([]byte("0123456789abcdef"), 40000)
	for _, c := range []struct {
		query  string
		body   io.Reader
		offset string
	}{
		{"", bytes.NewReader(big), "640000"},
		{"?offset=0", bytes.NewReader(big[:1000]), "640000"},         // a repeat is acknowledged
		{"?offset=639998", strings.NewReader("efend"), "640003"},     // overlaps
		{"", io.MultiReader(strings.NewReader("chunked")), "640010"}, // no length
		{"?close=false", strings.NewReader(""), ""},                  // nothing to write
		{"?close=true", strings.NewReader("last"), "640014"},         // data, then the end
		{"?close=true", http.NoBody, "640014"},                       // closing twice is fine
	} {
		resp := b.post(t, b.path("stdin")+c.query, binary, c.body)
		if resp.StatusCode != http.StatusNoContent || c.offset != "" && resp.Header.Get("Space-Stdin-Offset") != c.offset {
			t.Errorf("%q: %d, offset %q, want %q", c.query, resp.StatusCode, resp.Header.Get("Space-Stdin-Offset"), c.offset)
		}
	}
	got, closed := b.Guests.Stdin()
	if want := string(big) + "endchunkedlast"; string(got) != want || !closed {
		t.Errorf("the process got %d bytes, want %d, closed %v", len(got), len(want), closed)
	}
	b.refused(t, 409, "conflict", "POST", b.path("stdin"), strings.NewReader("more"), "Content-Type", binary)
	b.refused(t, 415, "invalid_request", "POST", b.path("stdin"), strings.NewReader("x"), "Content-Type", "text/csv")
	for _, q := range []string{"?offset=-1", "?offset=x", "?close=maybe", "?offset=99999999999999999999"} {
		b.refused(t, 400, "invalid_request", "POST", b.path("stdin")+q, strings.NewReader("x"), "Content-Type", binary)
	}
}

func TestFullStdinSaysHowFarItCame(t *testing.T) {
	b := newBench(t)
	b.Guests.Room(300000)
	body := bytes.Repeat([]byte("x"), 400000)
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	resp := b.request(ctx, t, "POST", b.path("stdin"), bytes.NewReader(body))
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusConflict || resp.Header.Get("Space-Stdin-Offset") != "300000" || resp.Header.Get("Retry-After") == "" {
		t.Fatalf("%d %v", resp.StatusCode, resp.Header)
	}
	b.Guests.Room(-1)
	if resp := b.post(t, b.path("stdin")+"?offset=300000&close=true", "", bytes.NewReader(body[300000:])); resp.StatusCode != http.StatusNoContent {
		t.Fatalf("the rest: %d", resp.StatusCode)
	}
	if got, closed := b.Guests.Stdin(); !bytes.Equal(got, body) || !closed {
		t.Errorf("%d bytes, closed %v", len(got), closed)
	}
}

func TestResizeAndSignal(t *testing.T) {
	b := newBench(t)
	const js = "application/json"
	for _, body := range []string{`{"cols":1,"rows":65535}`, ` {"rows":1,"cols":65535} `} {
		if resp := b.post(t, b.path("resize"), js, strings.NewReader(body)); resp.StatusCode != http.StatusNoContent {
			t.Errorf("%s: %d", body, resp.StatusCode)
		}
	}
	for _, body := range []string{``, `{}`, `{"cols":0,"rows":1}`, `{"cols":1,"rows":65536}`, `{"cols":1.5,"rows":1}`, `{"cols":"1","rows":1}`,
		`{"cols":1,"rows":1,"x":1}`, `{"cols":1,"cols":1,"rows":1}`, `{"Cols":1,"rows":1}`, `[]`} {
		b.refused(t, 400, "invalid_request", "POST", b.path("resize"), strings.NewReader(body), "Content-Type", js)
	}
	b.refused(t, 413, "payload_too_large", "POST", b.path("resize"), strings.NewReader(strings.Repeat(" ", 4097)), "Content-Type", js)
	b.refused(t, 415, "invalid_request", "POST", b.path("signal"), strings.NewReader("{}"), "Content-Type", "text/plain")
	for _, body := range []string{`{"signal":"SIGUSR1"}`, `{"signal":"SIGRTMIN+3","target":"group"}`} {
		if resp := b.post(t, b.path("signal"), js, strings.NewReader(body)); resp.StatusCode != http.StatusNoContent {
			t.Errorf("%s: %d", body, resp.StatusCode)
		}
	}
	for _, body := range []string{`{}`, `{"signal":"SIGNOPE"}`, `{"signal":"9"}`, `{"signal":"SIGTERM","target":"tree"}`, `{"signal":"SIGRTMIN+31"}`, `{"signal":"SIGRTMIN3"}`} {
		b.refused(t, 400, "invalid_request", "POST", b.path("signal"), strings.NewReader(body), "Content-Type", js)
	}
	if len(b.Guests.Resizes) != 2 || len(b.Guests.Signals) != 2 || b.Guests.Signals[0].GetSignal() != 10 || b.Guests.Signals[1].GetSignal() != 37 {
		t.Errorf("resizes %v, signals %v", b.Guests.Resizes, b.Guests.Signals)
	}
}
