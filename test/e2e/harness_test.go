package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// server is one `space up` with its own data folder.
type server struct {
	dir, api, data, key string
	args                []string
	cmd                 *exec.Cmd
	exited              chan struct{} // closed when cmd has ended
	log                 *lockedBuffer
}

// lockedBuffer collects a server's log while tests read it.
type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// shared is the server that tests use which do not harm it.
var shared *server

func TestMain(m *testing.M) {
	os.Exit(run(m))
}

func run(m *testing.M) int {
	s, err := newServer()
	if err == nil {
		err = s.start()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "e2e: cannot start the shared server:", err)
		return 1
	}
	shared = s
	code := m.Run()
	if err := s.end(); err != nil {
		fmt.Fprintln(os.Stderr, "e2e: shared server:", err)
		return 1
	}
	return code
}

func spaceBin() string {
	if b := os.Getenv("SPACE_BIN"); b != "" {
		return b
	}
	b, _ := filepath.Abs("../../bin/space")
	return b
}

func cacheDir() string {
	if d := os.Getenv("SPACE_TEST_CACHE"); d != "" {
		return d
	}
	d, err := os.UserCacheDir()
	if err != nil {
		d = "/var/cache"
	}
	return filepath.Join(d, "space")
}

func newServer(args ...string) (*server, error) {
	dir, err := os.MkdirTemp("", "space-e2e-")
	if err != nil {
		return nil, err
	}
	api, err := freeAddr()
	if err != nil {
		return nil, err
	}
	data, err := freeAddr()
	return &server{dir: dir, api: api, data: data, args: args, log: &lockedBuffer{}}, err
}

func freeAddr() (string, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	defer func() { _ = l.Close() }()
	return l.Addr().String(), nil
}

// ownServer starts a server for one test and ends it with the test.
func ownServer(t *testing.T, args ...string) *server {
	t.Helper()
	s, err := newServer(args...)
	if err == nil {
		err = s.start()
	}
	if err != nil {
		t.Fatalf("start server: %v\n%s", err, s.log)
	}
	t.Cleanup(func() {
		if err := s.end(); err != nil {
			t.Errorf("end server: %v", err)
		}
		if t.Failed() {
			t.Logf("server log:\n%s", tail(s.log.String(), 8000))
		}
	})
	return s
}

func tail(s string, n int) string {
	if len(s) > n {
		return "…" + s[len(s)-n:]
	}
	return s
}

// launch starts the process without waiting for it to be ready.
func (s *server) launch(extra ...string) error {
	args := append([]string{"up", "--data-dir", s.dir, "--cache-dir", cacheDir(), "--api-listen", s.api,
		"--data-listen", s.data}, s.args...)
	s.cmd = exec.Command(spaceBin(), append(args, extra...)...)
	s.cmd.Stdout, s.cmd.Stderr = s.log, s.log
	s.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGTERM}
	if err := s.cmd.Start(); err != nil {
		return err
	}
	s.exited = make(chan struct{})
	go func(cmd *exec.Cmd, done chan struct{}) {
		_ = cmd.Wait()
		close(done)
	}(s.cmd, s.exited)
	return nil
}

func (s *server) start(extra ...string) error {
	if err := s.launch(extra...); err != nil {
		return err
	}
	err := poll(5*time.Minute, func() (bool, error) {
		select {
		case <-s.exited:
			return false, fmt.Errorf("server ended early: %s", tail(s.log.String(), 4000))
		default:
		}
		resp, err := http.Get("http://" + s.api + "/readyz")
		if err != nil {
			return false, nil
		}
		defer resp.Body.Close()
		return resp.StatusCode == http.StatusOK, nil
	})
	if err != nil {
		return fmt.Errorf("not ready: %w\n%s", err, tail(s.log.String(), 4000))
	}
	key, err := os.ReadFile(filepath.Join(s.dir, "admin.key"))
	s.key = strings.TrimSpace(string(key))
	return err
}

// kill ends the server as a crash would.
func (s *server) kill() {
	_ = s.cmd.Process.Kill()
	<-s.exited
}

// end stops the server with all its sandboxes and removes its folder.
func (s *server) end() error {
	select {
	case <-s.exited: // killed by its test: start once more, so that its sandboxes are ended by their owner
		if err := s.start("--stop-sandboxes"); err != nil {
			return err
		}
	default:
		if err := s.stopAll(); err != nil {
			return err
		}
	}
	_ = s.cmd.Process.Signal(syscall.SIGTERM)
	select {
	case <-s.exited:
	case <-time.After(40 * time.Second):
		s.kill()
		return fmt.Errorf("server did not end in 40 s: %s", tail(s.log.String(), 4000))
	}
	return os.RemoveAll(s.dir)
}

// stopAll deletes every sandbox that is left.
func (s *server) stopAll() error {
	var page struct{ Items []sandboxJSON }
	if _, err := s.callErr("GET", "/v1/sandboxes", nil, &page); err != nil {
		return err
	}
	for _, sb := range page.Items {
		if _, err := s.callErr("DELETE", "/v1/sandboxes/"+sb.ID, nil, nil, "Prefer", "wait=60"); err != nil {
			return err
		}
	}
	return nil
}

// poll calls ok until it answers true, fails, or the time is over.
func poll(limit time.Duration, ok func() (bool, error)) error {
	deadline := time.Now().Add(limit)
	for wait := 5 * time.Millisecond; ; wait = min(2*wait, 200*time.Millisecond) {
		done, err := ok()
		if err != nil || done {
			return err
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("condition not met within %s", limit)
		}
		time.Sleep(wait)
	}
}

func eventually(t *testing.T, limit time.Duration, what string, ok func() bool) {
	t.Helper()
	if err := poll(limit, func() (bool, error) { return ok(), nil }); err != nil {
		t.Fatalf("%s: %v", what, err)
	}
}

type errorJSON struct {
	Code      string `json:"code"`
	Message   string `json:"message"`
	RequestID string `json:"request_id"`
	Retryable bool   `json:"retryable"`
	Details   struct {
		Violations []struct {
			Field, Rule, Message string
		} `json:"violations"`
		Remediation string `json:"remediation"`
		State       string `json:"state"`
	} `json:"details"`
}

type sandboxJSON struct {
	ID          string `json:"id"`
	State       string `json:"state"`
	StateReason string `json:"state_reason"`
	Etag        string `json:"etag"`
	Template    struct{ Name, Tag, Digest string }
	Resources   struct {
		VCPU      int `json:"vcpu"`
		MemoryMiB int `json:"memory_mib"`
		DiskMiB   int `json:"disk_mib"`
	}
	Environment struct{ ID, VMM, Acceleration string }
	Metadata    map[string]string
	Node        string
}

type operationJSON struct {
	ID, Kind, State string
	Error           *errorJSON
	Timings         []struct {
		Phase string
		MS    float64
	}
}

type acceptedJSON struct {
	Sandbox   sandboxJSON
	Operation operationJSON
}

type processJSON struct {
	ID    string
	OSPID int `json:"os_pid"`
	State string
	Exit  *exitJSON
}

type exitJSON struct {
	Code      *int
	Signal    *string
	TimedOut  bool `json:"timed_out"`
	OOMKilled bool `json:"oom_killed"`
}

type sessionJSON struct {
	ID, Token string
	EventsURL string `json:"events_url"`
}

type commandJSON struct {
	Process processJSON
	Session sessionJSON
}

// httpClient has no limit of idle connections per host, so that parallel tests do not wait for one another.
var httpClient = &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 64}}

// request sends one call with the admin key and returns the answer; the caller closes its body.
func (s *server) request(ctx context.Context, method, path string, body io.Reader, headers ...string) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, method, "http://"+s.api+path, body)
	if err != nil {
		return nil, err
	}
	req.Header.Set("Authorization", "Bearer "+s.key)
	for i := 0; i+1 < len(headers); i += 2 {
		req.Header.Set(headers[i], headers[i+1])
	}
	return httpClient.Do(req)
}

// callErr sends JSON and decodes the answer into out, or into an error for a status that is not 2xx.
func (s *server) callErr(method, path string, in, out any, headers ...string) (*http.Response, error) {
	var body io.Reader
	if in != nil {
		b, err := json.Marshal(in)
		if err != nil {
			return nil, err
		}
		body = bytes.NewReader(b)
		headers = append([]string{"Content-Type", "application/json"}, headers...)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
	defer cancel()
	resp, err := s.request(ctx, method, path, body, headers...)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	raw, err := io.ReadAll(resp.Body)
	if err != nil {
		return resp, err
	}
	if resp.StatusCode/100 != 2 {
		e := &apiError{Status: resp.StatusCode}
		if err := json.Unmarshal(raw, &e.errorJSON); err != nil {
			return resp, fmt.Errorf("%s %s: status %d is no error envelope: %q", method, path, resp.StatusCode, tail(string(raw), 300))
		}
		return resp, e
	}
	if out != nil {
		if err := json.Unmarshal(raw, out); err != nil {
			return resp, fmt.Errorf("%s %s: %w in %q", method, path, err, tail(string(raw), 300))
		}
	}
	return resp, nil
}

// apiError is an error envelope with its status.
type apiError struct {
	errorJSON
	Status int
}

// asAPIError returns the error envelope in err, or nil.
func asAPIError(err error) *apiError {
	var e *apiError
	if errors.As(err, &e) {
		return e
	}
	return nil
}

func (e *apiError) Error() string { return fmt.Sprintf("%d %s: %s", e.Status, e.Code, e.Message) }

func (s *server) call(t *testing.T, method, path string, in, out any, headers ...string) *http.Response {
	t.Helper()
	resp, err := s.callErr(method, path, in, out, headers...)
	if err != nil {
		t.Fatalf("%s %s: %v", method, path, err)
	}
	return resp
}

// refused makes a call that has to fail, and checks status and code.
func (s *server) refused(t *testing.T, status int, code, method, path string, in any, headers ...string) *errorJSON {
	t.Helper()
	_, err := s.callErr(method, path, in, nil, headers...)
	e := asAPIError(err)
	if e == nil {
		t.Fatalf("%s %s: want %d %s, got %v", method, path, status, code, err)
	}
	if e.Status != status || e.Code != code || e.RequestID == "" {
		t.Fatalf("%s %s: want %d %s, got %v (request_id %q)", method, path, status, code, e, e.RequestID)
	}
	return &e.errorJSON
}

type object = map[string]any

// create makes a running sandbox that is deleted with the test.
func (s *server) create(t *testing.T, fields object) sandboxJSON {
	t.Helper()
	body := object{"template": "base"}
	for k, v := range fields {
		body[k] = v
	}
	var out acceptedJSON
	s.call(t, "POST", "/v1/sandboxes", body, &out, "Prefer", "wait=60")
	if out.Sandbox.State != "running" {
		t.Fatalf("sandbox is %s (%s)", out.Sandbox.State, out.Sandbox.StateReason)
	}
	t.Cleanup(func() { s.remove(t, out.Sandbox.ID) })
	return out.Sandbox
}

// remove deletes a sandbox if it is still there.
func (s *server) remove(t *testing.T, id string) {
	t.Helper()
	select {
	case <-s.exited:
		return // end() removes it
	default:
	}
	_, err := s.callErr("DELETE", "/v1/sandboxes/"+id, nil, nil, "Prefer", "wait=60")
	if e := asAPIError(err); err != nil && (e == nil || e.Status != http.StatusNotFound) {
		t.Errorf("delete %s: %v", id, err)
	}
}
