package client

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/space-sandbox/space/internal/sandbox"
)

// script is a fake data plane with a fixed list of events that cuts its connections.
type script struct {
	events   []string // without ids; the first has ID 1
	cutAfter int      // events per connection; 0: never cut
	requests atomic.Int32
	before   func(w http.ResponseWriter, n int32) bool // true: answered
}

func (s *script) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	n := s.requests.Add(1)
	if s.before != nil && s.before(w, n) {
		return
	}
	from := 0
	if last := r.Header.Get("Last-Event-ID"); last != "" {
		from, _ = strconv.Atoi(last)
	}
	for i := from; i < len(s.events); i++ {
		if s.cutAfter > 0 && i-from == s.cutAfter {
			_, _ = io.WriteString(w, fmt.Sprintf("id: %d\nevent: stdout\nda", i+1)) // in the middle of an event
			w.(http.Flusher).Flush()
			panic(http.ErrAbortHandler)
		}
		_, _ = fmt.Fprintf(w, ": ping\n\nid: %d\n%s\n\n", i+1, s.events[i])
	}
}

func output(text string) string {
	return fmt.Sprintf("event: stdout\ndata: {\"data\":%q,\"offset\":0}", base64.StdEncoding.EncodeToString([]byte(text)))
}

const exited = "event: process_exited\ndata: {\"code\":3,\"signal\":null}"

func start(t *testing.T, h http.Handler) (*Client, Session) {
	t.Helper()
	srv := httptest.NewServer(h)
	t.Cleanup(srv.Close)
	c := New(Config{APIURL: srv.URL, RetryMin: time.Millisecond, RetryMax: 5 * time.Millisecond, GiveUp: 200 * time.Millisecond})
	return c, Session{ID: "cs1", Token: "t", EventsURL: srv.URL + "/v1/sessions/cs1/events"}
}

func collect(t *testing.T, c *Client, s Session) (string, *Event, error) {
	t.Helper()
	var b strings.Builder
	ev, err := c.Events(t.Context(), s, func(ev *Event) error { b.Write(ev.Data); return nil })
	return b.String(), ev, err
}

func TestStreamResumesWithoutLossOrRepeat(t *testing.T) {
	for _, cut := range []int{0, 1, 2, 7} {
		s := &script{cutAfter: cut}
		want := ""
		for i := range 20 {
			s.events = append(s.events, output(fmt.Sprintf("<%d>", i)))
			want += fmt.Sprintf("<%d>", i)
		}
		s.events = append(s.events, exited)
		c, session := start(t, s)
		got, ev, err := collect(t, c, session)
		if err != nil || got != want || ev.Code == nil || *ev.Code != 3 {
			t.Errorf("cut after %d: %q, %+v, %v", cut, got, ev, err)
		}
		if cut == 1 && s.requests.Load() < 20 {
			t.Errorf("only %d connections", s.requests.Load())
		}
	}
}

func TestRetryableTroubleIsWaitedOut(t *testing.T) {
	s := &script{events: []string{output("x"), exited}}
	s.before = func(w http.ResponseWriter, n int32) bool {
		switch n {
		case 1:
			_, _ = io.WriteString(w, "id: 1\n"+output("x")+"\n\nevent: interrupted\ndata: {\"reason\":\"server_draining\",\"retryable\":true,\"retry_after_s\":1}\n\n")
		case 2:
			w.WriteHeader(http.StatusServiceUnavailable)
			_, _ = io.WriteString(w, `{"code":"service_unavailable","message":"m","retryable":true}`)
		case 3:
			w.WriteHeader(http.StatusBadGateway) // a proxy's
		default:
			return false
		}
		return true
	}
	c, session := start(t, s)
	if got, _, err := collect(t, c, session); err != nil || got != "x" {
		t.Errorf("%q, %v", got, err)
	}
}

func TestStreamEndsForGood(t *testing.T) {
	answer := func(status int, body string) *script {
		return &script{before: func(w http.ResponseWriter, _ int32) bool {
			w.WriteHeader(status)
			_, _ = io.WriteString(w, body)
			return true
		}}
	}
	for name, test := range map[string]struct {
		script *script
		want   string
	}{
		"interrupted":  {answer(200, "event: interrupted\ndata: {\"reason\":\"sandbox_deleted\",\"retryable\":false}\n\n"), "sandbox_deleted"},
		"unauthorized": {answer(401, `{"code":"unauthorized","message":"no"}`), "unauthorized"},
		"always cut":   {answer(200, ""), "could not be followed"},
		"malformed":    {answer(200, "event: stdout\ndata: {\n\n"), "malformed"},
		"bad id":       {answer(200, "id: x\nevent: stdout\ndata: {}\n\n"), "malformed"},
		"too long":     {answer(200, "data: "+strings.Repeat("x", 2<<20)), "malformed"},
	} {
		t.Run(name, func(t *testing.T) {
			c, session := start(t, test.script)
			if _, _, err := collect(t, c, session); err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("%v lacks %q", err, test.want)
			}
			if name != "always cut" && test.script.requests.Load() != 1 {
				t.Errorf("%d requests", test.script.requests.Load())
			}
		})
	}
}

func TestHandlerAndContextEndAStream(t *testing.T) {
	c, session := start(t, &script{events: []string{output("x"), exited}})
	stop := errors.New("enough")
	if _, err := c.Events(t.Context(), session, func(*Event) error { return stop }); !errors.Is(err, stop) {
		t.Errorf("%v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := c.Events(ctx, session, func(*Event) error { return nil }); !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
}

func TestErrorEnvelope(t *testing.T) {
	c, _ := start(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if strings.HasSuffix(r.URL.Path, "/i1") {
			w.Header().Set("Retry-After", "2")
			w.WriteHeader(http.StatusConflict)
			_, _ = io.WriteString(w, `{"code":"conflict","message":"m","request_id":"r1","retryable":true,"details":{"remediation":"wait"}}`)
			return
		}
		w.WriteHeader(http.StatusTeapot)
	}))
	var e *Error
	_, err := c.Sandbox(t.Context(), "i1")
	if !errors.As(err, &e) || e.Code != sandbox.CodeConflict || e.RequestID != "r1" || e.Details.Remediation != "wait" || e.RetryAfter != 2*time.Second || e.Status != 409 {
		t.Errorf("%+v", err)
	}
	if _, err := c.Sandbox(t.Context(), "other"); CodeOf(err) != sandbox.CodeInternal || !strings.Contains(err.Error(), "418") {
		t.Errorf("%v", err)
	}
}

func TestListsReadEveryPage(t *testing.T) {
	c, _ := start(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Query().Get("cursor") == "" {
			_, _ = io.WriteString(w, `{"items":[{"id":"a"}],"next_cursor":"n"}`)
			return
		}
		_, _ = io.WriteString(w, `{"items":[{"id":"b"}],"next_cursor":null}`)
	}))
	list, err := c.Sandboxes(t.Context(), nil)
	if err != nil || len(list) != 2 || list[1].ID != "b" {
		t.Errorf("%v, %v", list, err)
	}
}

func TestStdinIsSentAgainAtItsOffset(t *testing.T) {
	var n atomic.Int32
	var got atomic.Value
	c, s := start(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if n.Add(1) == 1 {
			panic(http.ErrAbortHandler)
		}
		body, _ := io.ReadAll(r.Body)
		got.Store(r.URL.Path + "?" + r.URL.RawQuery + " " + string(body) + " " + r.Header.Get("Authorization"))
		w.WriteHeader(http.StatusNoContent)
	}))
	if err := c.WriteStdin(t.Context(), s, 5, []byte("data"), true); err != nil {
		t.Fatal(err)
	}
	if want := "/v1/sessions/cs1/stdin?offset=5&close=true data Bearer t"; got.Load() != want {
		t.Errorf("%v, want %v", got.Load(), want)
	}
}

// FuzzOutput holds the quick parser to the slow one.
func FuzzOutput(f *testing.F) {
	for _, seed := range []string{
		`{"data":"eA==","offset":0}`, `{"data":"","offset":18446744073709551615}`, `{"data":"eA==","offset":01}`,
		`{"data":"eA==","offset":-1}`, `{"data":"e\/==","offset":1}`, `{"data":"eA=","offset":1}`, `{"data":"eA==","offset":1}}`,
		`{"data":"eA==","offset":1,"data":"eQ=="}`, `{"offset":1,"data":"eA=="}`,
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		var quick, slow Event
		if bytes.ContainsAny(data, "\r\n") || !quick.parseOutput(data) {
			return // a line holds neither
		}
		if err := json.Unmarshal(data, &slow); err != nil || !bytes.Equal(quick.Data, slow.Data) || quick.Offset != slow.Offset {
			t.Fatalf("%q: %q at %d, must be %q at %d, %v", data, quick.Data, quick.Offset, slow.Data, slow.Offset, err)
		}
	})
}

func FuzzEvents(f *testing.F) {
	f.Add([]byte("id: 1\nevent: stdout\ndata: {\"data\":\"eA==\",\"offset\":0}\n\n"))
	f.Add([]byte(": ping\n\nevent: process_exited\ndata: {\"code\":0}\n\n"))
	f.Add([]byte("id:\nevent\ndata:\n\n\r\n"))
	f.Fuzz(func(t *testing.T, data []byte) {
		r := newEventReader(bytes.NewReader(data))
		for range len(data) + 1 {
			ev, err := r.next()
			if err != nil {
				return
			}
			if ev.Kind == "" {
				t.Fatal("an event without a kind")
			}
		}
		t.Fatal("more events than bytes")
	})
}
