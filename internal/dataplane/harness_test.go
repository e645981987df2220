package dataplane

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/space-sandbox/space/internal/api/apitest"
	"github.com/space-sandbox/space/internal/api/wire"
	agentv1 "github.com/space-sandbox/space/internal/gen/space/agent/v1"
	nodev1 "github.com/space-sandbox/space/internal/gen/space/node/v1"
)

type bench struct {
	*apitest.Service
	server *Server
	http   *httptest.Server
	pid    string
}

func newBench(t testing.TB, change ...func(*Config)) *bench {
	t.Helper()
	svc := apitest.New()
	t.Cleanup(svc.Close)
	cfg := Config{Service: svc, RetryMin: time.Millisecond, RetryMax: 5 * time.Millisecond, LostAfter: 2 * time.Second}
	for _, fn := range change {
		fn(&cfg)
	}
	s := New(cfg)
	b := &bench{Service: svc, server: s, http: httptest.NewServer(s), pid: svc.Process.GetProcessId()}
	t.Cleanup(func() {
		b.http.CloseClientConnections()
		b.http.Close()
	})
	return b
}

func (b *bench) path(verb string) string { return "/v1/sessions/" + string(b.Session.ID) + "/" + verb }

func (b *bench) request(ctx context.Context, t testing.TB, method, path string, body io.Reader, headers ...string) *http.Response {
	t.Helper()
	req, err := http.NewRequestWithContext(ctx, method, b.http.URL+path, body)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+apitest.Token)
	for i := 0; i+1 < len(headers); i += 2 {
		if headers[i+1] == "" {
			req.Header.Del(headers[i])
		} else {
			req.Header.Set(headers[i], headers[i+1])
		}
	}
	resp, err := b.http.Client().Do(req)
	if err != nil {
		t.Fatalf("%s %s: %v", method, path, err)
	}
	return resp
}

// refused makes a call that has to fail and checks the envelope.
func (b *bench) refused(t testing.TB, status int, code, method, path string, body io.Reader, headers ...string) wire.Envelope {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	resp := b.request(ctx, t, method, path, body, headers...)
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	var e wire.Envelope
	if err := json.Unmarshal(data, &e); err != nil || resp.StatusCode != status || string(e.Code) != code {
		t.Fatalf("%s %s: got %d %q, want %d %s", method, path, resp.StatusCode, data, status, code)
	}
	if e.RequestID == "" || e.Retryable != (resp.Header.Get("Retry-After") != "") || resp.Header.Get("Access-Control-Allow-Origin") != "*" {
		t.Errorf("envelope %+v with headers %v", e, resp.Header)
	}
	return e
}

// sse is one event as a client sees it.
type sse struct {
	id   uint64
	name string
	data string
}

var errStop = errors.New("stop")

// follow reads events after an id until fn answers an error or the stream ends. A clean end gives nil.
func (b *bench) follow(t testing.TB, after uint64, fn func(sse) error) error {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	var headers []string
	if after > 0 {
		headers = []string{"Last-Event-ID", strconv.FormatUint(after, 10)}
	}
	resp := b.request(ctx, t, "GET", b.path("events"), nil, headers...)
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK || resp.Header.Get("Content-Type") != "text/event-stream" {
		return fmt.Errorf("status %d, type %q", resp.StatusCode, resp.Header.Get("Content-Type"))
	}
	return parse(resp.Body, fn)
}

func parse(r io.Reader, fn func(sse) error) error {
	br := bufio.NewReaderSize(r, 1<<16)
	var e sse
	for {
		line, err := br.ReadString('\n')
		if errors.Is(err, io.EOF) && line == "" {
			return nil
		}
		if err != nil {
			return err
		}
		name, value, _ := strings.Cut(strings.TrimSuffix(line, "\n"), ": ")
		switch name {
		case "":
			if value == "" && e.name != "" {
				if err := fn(e); err != nil {
					return err
				}
			}
			if value != "" { // ": ping"
				if err := fn(sse{name: ":" + value}); err != nil {
					return err
				}
			}
			e = sse{}
		case "id":
			if e.id, err = strconv.ParseUint(value, 10, 64); err != nil {
				return err
			}
		case "event":
			e.name = value
		case "data":
			e.data = value
		}
	}
}

func started() *nodev1.Event {
	return &nodev1.Event{Kind: &nodev1.Event_Started{Started: &nodev1.Started{OsPid: 7}}}
}

func output(data []byte, offset uint64) *nodev1.Event {
	return &nodev1.Event{Kind: &nodev1.Event_Output{Output: &nodev1.OutputChunk{Stream: agentv1.Stream_STREAM_STDOUT, Data: data, Offset: offset}}}
}

func exited(code int32) *nodev1.Event {
	return &nodev1.Event{Kind: &nodev1.Event_Exited{Exited: &nodev1.ProcessExited{Exit: &agentv1.Exited{Code: &code}}}}
}

func interrupted(reason string) *nodev1.Event {
	return &nodev1.Event{Kind: &nodev1.Event_Interrupted{Interrupted: &nodev1.Interrupted{Reason: reason, Retryable: true, RetryAfterS: 1}}}
}

// eventually waits for a condition.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(10 * time.Second); !ok(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("not within 10 s: " + what)
		}
	}
}
