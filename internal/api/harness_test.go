package api

import (
	"bytes"
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/space-sandbox/space/internal/api/apitest"
	"github.com/space-sandbox/space/internal/api/wire"
)

// bench is a server with its fake control plane.
type bench struct {
	*apitest.Service
	server *Server
	http   *httptest.Server
}

func newBench(t *testing.T, change ...func(*Config)) *bench {
	t.Helper()
	svc := apitest.New()
	t.Cleanup(svc.Close)
	cfg := Config{Service: svc, Version: "1", DataPlaneURL: "http://data.test/"}
	for _, fn := range change {
		fn(&cfg)
	}
	s, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	b := &bench{Service: svc, server: s, http: httptest.NewServer(s)}
	t.Cleanup(b.http.Close)
	return b
}

// answer is a response read to its end.
type result struct {
	status int
	header http.Header
	body   []byte
}

func (b *bench) do(t *testing.T, method, path string, body any, headers ...string) result {
	t.Helper()
	var r io.Reader
	switch v := body.(type) {
	case nil:
	case string:
		r = strings.NewReader(v)
	case io.Reader:
		r = v
	default:
		r = bytes.NewReader(mustMarshal(t, v))
	}
	req, err := http.NewRequest(method, b.http.URL+path, r)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+apitest.AdminKey)
	if _, raw := body.(io.Reader); r != nil && !raw {
		req.Header.Set("Content-Type", "application/json")
	}
	for i := 0; i+1 < len(headers); i += 2 {
		switch name, value := headers[i], headers[i+1]; {
		case value == "":
			req.Header.Del(name)
		case name == "Host":
			req.Host = value
		default:
			req.Header.Set(name, value)
		}
	}
	resp, err := b.http.Client().Do(req)
	if err != nil {
		t.Fatalf("%s %s: %v", method, path, err)
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatalf("%s %s: %v", method, path, err)
	}
	return result{resp.StatusCode, resp.Header, data}
}

// refused checks status, code and the whole form of an error envelope, and returns it.
func (r result) refused(t *testing.T, status int, code string) wire.Envelope {
	t.Helper()
	var e wire.Envelope
	dec := json.NewDecoder(bytes.NewReader(r.body))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&e); err != nil {
		t.Fatalf("status %d is no envelope: %v in %q", r.status, err, r.body)
	}
	if r.status != status || string(e.Code) != code {
		t.Fatalf("got %d %s (%s), want %d %s", r.status, e.Code, e.Message, status, code)
	}
	if e.RequestID == "" || e.RequestID != r.header.Get("X-Request-Id") || r.header.Get("Content-Type") != "application/json" {
		t.Errorf("request id %q, headers %v", e.RequestID, r.header)
	}
	if e.Retryable != (r.header.Get("Retry-After") != "") {
		t.Errorf("%s: retryable %v with Retry-After %q", e.Code, e.Retryable, r.header.Get("Retry-After"))
	}
	if !bytes.Contains(r.body, []byte(`"details":`)) || e.Message == "" {
		t.Errorf("incomplete envelope %s", r.body)
	}
	return e
}

func (r result) into(t *testing.T, status int, out any) {
	t.Helper()
	if r.status != status {
		t.Fatalf("status %d, want %d: %s", r.status, status, r.body)
	}
	if out != nil {
		if err := json.Unmarshal(r.body, out); err != nil {
			t.Fatalf("%v in %q", err, r.body)
		}
	}
}

// fill replaces the variables of a route's path by what the fake knows.
func (b *bench) fill(path string) string {
	id := string(b.Sandbox.ID)
	if strings.HasPrefix(path, "/operations") || strings.HasPrefix(path, "/api-keys") {
		id = "k3k9x0a7c2m5q8w1z4b6n"
	}
	return "/v1" + strings.NewReplacer("{id}", id, "{pid}", b.Process.GetProcessId(), "{name}", "base").Replace(path)
}
