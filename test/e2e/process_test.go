package e2e

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"
)

// event is one server-sent event of a command session.
type event struct {
	ID   uint64 // 0: it had none
	Name string
	Data json.RawMessage
}

type outputJSON struct {
	Data   []byte // base64 in JSON
	Offset uint64
}

type exitedJSON struct {
	exitJSON
	StdoutBytes  uint64 `json:"stdout_bytes"`
	StderrBytes  uint64 `json:"stderr_bytes"`
	DroppedBytes uint64 `json:"dropped_bytes"`
}

// stream opens a session's events after an ID (0: from the start) and calls each until it answers false, the stream
// ends or limit is over. A clean end gives nil.
func (s *server) stream(session sessionJSON, after uint64, limit time.Duration, each func(event) bool) error {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+s.data+"/v1/sessions/"+session.ID+"/events", nil)
	if err != nil {
		return err
	}
	req.Header.Set("Authorization", "Bearer "+session.Token)
	if after > 0 {
		req.Header.Set("Last-Event-ID", strconv.FormatUint(after, 10))
	}
	resp, err := httpClient.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		b, _ := io.ReadAll(io.LimitReader(resp.Body, 1000))
		return fmt.Errorf("events: %s: %s", resp.Status, b)
	}
	return readEvents(resp.Body, each)
}

func readEvents(r io.Reader, each func(event) bool) error {
	br := bufio.NewReaderSize(r, 1<<17)
	var e event
	for {
		line, err := br.ReadString('\n')
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		line = strings.TrimRight(line, "\r\n")
		name, value, _ := strings.Cut(line, ": ")
		switch {
		case line == "":
			if e.Name != "" && !each(e) {
				return nil
			}
			e = event{}
		case name == "id":
			if e.ID, err = strconv.ParseUint(value, 10, 64); err != nil {
				return fmt.Errorf("event id %q: %w", value, err)
			}
		case name == "event":
			e.Name = value
		case name == "data":
			e.Data = json.RawMessage(value)
		}
	}
}

// result is what a whole stream of one command amounts to.
type result struct {
	stdout, stderr, pty bytes.Buffer
	exit                *exitedJSON
	interrupted         string
	last                uint64
	names               []string // of the events that are not output
}

// add takes one event and checks order, offsets and that nothing follows the end.
func (r *result) add(e event) error {
	if r.exit != nil {
		return fmt.Errorf("event %s after process_exited", e.Name)
	}
	if e.ID != 0 {
		if e.ID <= r.last {
			return fmt.Errorf("event id %d after %d", e.ID, r.last)
		}
		r.last = e.ID
	}
	buf := map[string]*bytes.Buffer{"stdout": &r.stdout, "stderr": &r.stderr, "pty": &r.pty}[e.Name]
	if buf == nil {
		r.names = append(r.names, e.Name)
	}
	switch {
	case buf != nil:
		var o outputJSON
		if err := json.Unmarshal(e.Data, &o); err != nil {
			return err
		}
		if o.Offset != uint64(buf.Len()) {
			return fmt.Errorf("%s offset %d, want %d", e.Name, o.Offset, buf.Len())
		}
		if len(o.Data) > 32<<10 {
			return fmt.Errorf("%s frame of %d bytes", e.Name, len(o.Data))
		}
		buf.Write(o.Data)
	case e.Name == "process_exited":
		r.exit = &exitedJSON{}
		return json.Unmarshal(e.Data, r.exit)
	case e.Name == "interrupted":
		var i struct{ Reason string }
		err := json.Unmarshal(e.Data, &i)
		r.interrupted = i.Reason
		return err
	}
	return nil
}

// code is the exit code, or -1 for a signal.
func (r *result) code() int {
	if r.exit == nil || r.exit.Code == nil {
		return -1
	}
	return *r.exit.Code
}

func (r *result) signal() string {
	if r.exit == nil || r.exit.Signal == nil {
		return ""
	}
	return *r.exit.Signal
}

// command makes a process and its session.
func (s *server) command(t *testing.T, id string, argv []string, fields object) commandJSON {
	t.Helper()
	body := object{"argv": argv}
	for k, v := range fields {
		body[k] = v
	}
	var out commandJSON
	s.call(t, "POST", "/v1/sandboxes/"+id+"/commands", body, &out)
	return out
}

// follow reads a session to its end.
func (s *server) follow(t *testing.T, session sessionJSON) *result {
	t.Helper()
	r := &result{}
	var bad error
	err := s.stream(session, 0, 3*time.Minute, func(e event) bool {
		bad = r.add(e)
		return bad == nil
	})
	if err != nil || bad != nil {
		t.Fatalf("stream: %v %v", err, bad)
	}
	return r
}

// exec runs a command to its end.
func (s *server) exec(t *testing.T, id string, argv ...string) *result {
	t.Helper()
	return s.follow(t, s.command(t, id, argv, nil).Session)
}

// sh runs a shell line that has to succeed and returns its output.
func (s *server) sh(t *testing.T, id, line string) string {
	t.Helper()
	r := s.exec(t, id, "sh", "-c", line)
	if r.code() != 0 {
		t.Fatalf("%q: exit %d %s\n%s%s", line, r.code(), r.signal(), r.stdout.String(), r.stderr.String())
	}
	return r.stdout.String()
}

func TestCommandRunsInAMicroVM(t *testing.T) {
	t.Parallel()
	sb := shared.create(t, nil)
	if sb.Environment.ID != "E1" || sb.Template.Name != "base" || !strings.HasPrefix(sb.Template.Digest, "sha256:") {
		t.Errorf("record: %+v", sb)
	}
	r := shared.exec(t, sb.ID, "python3", "-c", "import os,sys; print(6*7); print('oops', file=sys.stderr); sys.exit(3)")
	if r.stdout.String() != "42\n" || r.stderr.String() != "oops\n" || r.code() != 3 {
		t.Errorf("stdout %q stderr %q code %d", r.stdout.String(), r.stderr.String(), r.code())
	}
	if got := strings.Join(r.names, " "); got != "started process_exited" {
		t.Errorf("events %q", got)
	}
	if r.exit.StdoutBytes != 3 || r.exit.StderrBytes != 5 {
		t.Errorf("totals %+v", r.exit)
	}
	out := shared.sh(t, sb.ID, "id -un; pwd; sudo id -u; node -e 'console.log(process.versions.node.split(`.`)[0] >= 20)'; uname -s; for c in git curl npm python ip ps; do command -v $c; done")
	for _, want := range []string{"user\n/home/user\n0\ntrue\nLinux\n", "/git", "/curl", "/npm", "/python", "/ip", "/ps"} {
		if !strings.Contains(out, want) {
			t.Errorf("%q lacks %q", out, want)
		}
	}
}

func TestExitsAreToldApart(t *testing.T) {
	t.Parallel()
	sb := shared.create(t, nil)
	// One process per code, started at once and awaited: no stream is needed to learn how a process ended.
	for code := range 256 {
		c := shared.command(t, sb.ID, []string{"sh", "-c", "exit " + strconv.Itoa(code)}, object{"start": "now"})
		p := shared.await(t, sb.ID, c.Process.ID)
		if p.Exit == nil || p.Exit.Code == nil || *p.Exit.Code != code || p.Exit.Signal != nil {
			t.Fatalf("exit %d: got %+v", code, p.Exit)
		}
	}
	for _, c := range []struct {
		name, line, signal string
		code               int
	}{
		{"killed", "kill -KILL $$", "SIGKILL", -1},
		{"terminated", "kill -TERM $$", "SIGTERM", -1},
		{"aborted", "kill -ABRT $$", "SIGABRT", -1},
		{"shell not found", "exec nothing-of-this-name", "", 127},
	} {
		r := shared.exec(t, sb.ID, "sh", "-c", c.line)
		if r.signal() != c.signal || r.code() != c.code {
			t.Errorf("%s: code %d signal %q", c.name, r.code(), r.signal())
		}
	}
	for _, c := range []struct {
		argv string
		code int
	}{{"nothing-of-this-name", 127}, {"/nothing/of/this/name", 127}, {"/etc/passwd", 126}, {"/etc", 126}} {
		r := shared.exec(t, sb.ID, c.argv)
		if r.code() != c.code || r.stderr.Len() == 0 {
			t.Errorf("%s: code %d, stderr %q", c.argv, r.code(), r.stderr.String())
		}
	}
	e := shared.refused(t, 400, "invalid_request", "POST", "/v1/sandboxes/"+sb.ID+"/commands",
		object{"argv": []string{"true"}, "user": "nobody-of-this-name"})
	if len(e.Details.Violations) != 1 || e.Details.Violations[0].Field != "user" {
		t.Errorf("unknown user: %+v", e.Details)
	}
	e = shared.refused(t, 400, "invalid_request", "POST", "/v1/sandboxes/"+sb.ID+"/commands",
		object{"argv": []string{"true"}, "cwd": "/no/such/folder"})
	if len(e.Details.Violations) != 1 || e.Details.Violations[0].Field != "cwd" {
		t.Errorf("bad cwd: %+v", e.Details)
	}
}

// await waits until a process has exited.
func (s *server) await(t *testing.T, id, pid string) processJSON {
	t.Helper()
	var p processJSON
	eventually(t, 2*time.Minute, "process exits", func() bool {
		s.call(t, "GET", "/v1/sandboxes/"+id+"/processes/"+pid+"?wait=30", nil, &p)
		return p.State == "exited"
	})
	return p
}

func TestThousandShortProcesses(t *testing.T) {
	t.Parallel()
	sb := shared.create(t, nil)
	const total, workers = 1000, 4
	jobs := make(chan int)
	errs := make(chan error, workers)
	for range workers {
		go func() {
			var failed error
			for n := range jobs {
				if failed == nil {
					failed = shared.shortProcess(sb.ID, n%7)
				}
			}
			errs <- failed
		}()
	}
	for n := range total {
		jobs <- n
	}
	close(jobs)
	for range workers {
		if err := <-errs; err != nil {
			t.Error(err)
		}
	}
}

// shortProcess runs `exit code` through its event stream.
func (s *server) shortProcess(id string, code int) error {
	var c commandJSON
	_, err := s.callErr("POST", "/v1/sandboxes/"+id+"/commands",
		object{"argv": []string{"sh", "-c", "exit " + strconv.Itoa(code)}}, &c)
	if err != nil {
		return err
	}
	var r result
	var bad error
	err = s.stream(c.Session, 0, time.Minute, func(e event) bool {
		bad = r.add(e)
		return bad == nil
	})
	if err := errors.Join(err, bad); err != nil {
		return fmt.Errorf("stream: %w", err)
	}
	if got := strings.Join(r.names, " "); got != "started process_exited" || r.code() != code {
		return fmt.Errorf("events %q, code %d, want %d", got, r.code(), code)
	}
	return nil
}

func TestTerminal(t *testing.T) {
	t.Parallel()
	sb := shared.create(t, nil)
	c := shared.command(t, sb.ID, []string{"bash", "--norc", "-i"}, object{"pty": object{"cols": 91, "rows": 33}, "stdin": true})
	var r result
	var bad error
	step := 0
	err := shared.stream(c.Session, 0, time.Minute, func(e event) bool {
		if bad = r.add(e); bad != nil {
			return false
		}
		text := r.pty.String()
		switch {
		case step == 0 && len(text) > 0:
			step++
			bad = shared.stdin(sb.ID, c.Process.ID, "stty size; echo first\n", false)
		case step == 1 && strings.Contains(text, "33 91") && strings.Contains(text, "\nfirst"):
			step++
			_, bad = shared.callErr("POST", "/v1/sandboxes/"+sb.ID+"/processes/"+c.Process.ID+"/resize", object{"cols": 120, "rows": 50}, nil)
			if bad == nil {
				bad = shared.stdin(sb.ID, c.Process.ID, "stty size; exit 7\n", false)
			}
		}
		return bad == nil
	})
	if err != nil || bad != nil {
		t.Fatalf("stream: %v %v after %q", err, bad, r.pty.String())
	}
	if !strings.Contains(r.pty.String(), "50 120") || r.code() != 7 {
		t.Errorf("code %d, terminal %q", r.code(), r.pty.String())
	}
}

// stdin writes to a process's input.
func (s *server) stdin(id, pid, text string, end bool) error {
	path := "/v1/sandboxes/" + id + "/processes/" + pid + "/stdin?close=" + strconv.FormatBool(end)
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	resp, err := s.request(ctx, "POST", path, strings.NewReader(text), "Content-Type", "application/octet-stream")
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusNoContent {
		b, _ := io.ReadAll(resp.Body)
		return fmt.Errorf("stdin: %s %s", resp.Status, b)
	}
	return nil
}

func TestStdin(t *testing.T) {
	t.Parallel()
	sb := shared.create(t, nil)
	c := shared.command(t, sb.ID, []string{"sha256sum"}, object{"stdin": true, "start": "now"})
	big := strings.Repeat("0123456789abcdef", 1<<16) // 1 MiB: more than any pipe
	if err := shared.stdin(sb.ID, c.Process.ID, big, false); err != nil {
		t.Fatal(err)
	}
	// A repeat at an old offset is acknowledged, not written twice.
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	resp, err := shared.request(ctx, "POST", "/v1/sandboxes/"+sb.ID+"/processes/"+c.Process.ID+"/stdin?offset=0",
		strings.NewReader(big[:1000]), "Content-Type", "application/octet-stream")
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if resp.StatusCode != http.StatusNoContent {
		t.Fatalf("repeat: %s", resp.Status)
	}
	if err := shared.stdin(sb.ID, c.Process.ID, "", true); err != nil {
		t.Fatal(err)
	}
	r := shared.follow(t, c.Session)
	if want := sha256Hex([]byte(big)) + "  -\n"; r.stdout.String() != want {
		t.Errorf("got %q, want %q", r.stdout.String(), want)
	}
	// Without stdin a process reads the end of file.
	if r := shared.exec(t, sb.ID, "cat"); r.code() != 0 || r.stdout.Len() != 0 {
		t.Errorf("cat without stdin: code %d, %q", r.code(), r.stdout.String())
	}
}

func TestTimeoutKillsTheTree(t *testing.T) {
	t.Parallel()
	sb := shared.create(t, nil)
	c := shared.command(t, sb.ID, []string{"sh", "-c", "setsid sleep 4321 & sleep 4321 & sleep 4321"}, object{"timeout_s": 1})
	r := shared.follow(t, c.Session)
	if !r.exit.TimedOut || r.signal() != "SIGKILL" {
		t.Errorf("exit %+v", r.exit)
	}
	eventually(t, 10*time.Second, "no child survives", func() bool {
		return strings.TrimSpace(shared.sh(t, sb.ID, "pgrep -fc '[s]leep 4321' || true")) == "0"
	})
}

func TestKillAndSignal(t *testing.T) {
	t.Parallel()
	sb := shared.create(t, nil)
	path := "/v1/sandboxes/" + sb.ID + "/processes/"
	c := shared.command(t, sb.ID, []string{"sh", "-c", "trap 'echo got; exit 9' USR1; echo up; while :; do sleep 0.05; done"}, nil)
	var r result
	err := shared.stream(c.Session, 0, time.Minute, func(e event) bool {
		if err := r.add(e); err != nil {
			t.Error(err)
			return false
		}
		if e.Name == "stdout" && r.stdout.String() == "up\n" {
			shared.call(t, "POST", path+c.Process.ID+"/signal", object{"signal": "SIGUSR1"}, nil)
		}
		return true
	})
	if err != nil || r.code() != 9 || r.stdout.String() != "up\ngot\n" {
		t.Errorf("signal: %v, code %d, %q", err, r.code(), r.stdout.String())
	}
	c = shared.command(t, sb.ID, []string{"sh", "-c", "sleep 999 & wait"}, object{"start": "now"})
	var p processJSON
	shared.call(t, "POST", path+c.Process.ID+"/kill", nil, &p)
	if p.State != "exited" || p.Exit.Signal == nil || *p.Exit.Signal != "SIGKILL" {
		t.Errorf("kill answered %+v", p)
	}
	var list struct{ Items []processJSON }
	shared.call(t, "GET", "/v1/sandboxes/"+sb.ID+"/processes", nil, &list)
	if len(list.Items) != 2 {
		t.Errorf("%d processes listed", len(list.Items))
	}
}

func TestBackgroundChildDoesNotHoldTheStream(t *testing.T) {
	t.Parallel()
	sb := shared.create(t, nil)
	began := time.Now()
	r := shared.exec(t, sb.ID, "sh", "-c", "sleep 300 & echo done")
	if r.code() != 0 || r.stdout.String() != "done\n" {
		t.Errorf("code %d, %q", r.code(), r.stdout.String())
	}
	if took := time.Since(began); took > time.Minute {
		t.Errorf("the stream ended after %s", took)
	}
	if n := strings.TrimSpace(shared.sh(t, sb.ID, "pgrep -fc '[s]leep 300'")); n != "1" {
		t.Errorf("background child: %s left, want 1", n)
	}
}

func TestCommandLimits(t *testing.T) {
	t.Parallel()
	sb := shared.create(t, nil)
	path := "/v1/sandboxes/" + sb.ID + "/commands"
	count := func(n int) []string { // n entries in all
		argv := make([]string, n)
		argv[0] = "true"
		for i := 1; i < n; i++ {
			argv[i] = "x"
		}
		return argv
	}
	// 262,144 bytes with the NULs: "true" and two arguments of the rest.
	size := func(bytes int) []string {
		rest := bytes - len("true\x00")
		return []string{"true", strings.Repeat("a", rest/2-1), strings.Repeat("b", rest-rest/2-1)}
	}
	env := func(n int) object {
		e := object{}
		for i := range n {
			e[fmt.Sprintf("NAME_%d", i)] = "v"
		}
		return e
	}
	for name, fields := range map[string]object{
		"4096 entries":  {"argv": count(4096)},
		"262144 bytes":  {"argv": size(262144)},
		"131071 in one": {"argv": []string{"true", strings.Repeat("a", 131071)}},
		"256 variables": {"argv": []string{"true"}, "env": env(256)},
	} {
		c := shared.command(t, sb.ID, nil, fields)
		if r := shared.follow(t, c.Session); r.code() != 0 {
			t.Errorf("%s: code %d, %q", name, r.code(), r.stderr.String())
		}
	}
	for name, c := range map[string]struct {
		field  string
		fields object
	}{
		"4097 entries":   {"argv", object{"argv": count(4097)}},
		"262145 bytes":   {"argv", object{"argv": size(262145)}},
		"131072 in one":  {"argv[1]", object{"argv": []string{"true", strings.Repeat("a", 131072)}}},
		"no argument":    {"argv", object{"argv": []string{}}},
		"NUL":            {"argv[1]", object{"argv": []string{"true", "a\x00b"}}},
		"257 variables":  {"env", object{"argv": []string{"true"}, "env": env(257)}},
		"a typo":         {"argvv", object{"argv": []string{"true"}, "argvv": 1}},
		"negative time":  {"timeout_s", object{"argv": []string{"true"}, "timeout_s": -1}},
		"no such start":  {"start", object{"argv": []string{"true"}, "start": "later"}},
		"terminal of 0":  {"pty.cols", object{"argv": []string{"true"}, "pty": object{"cols": 0, "rows": 1}}},
		"relative in a ": {"env", object{"argv": []string{"true"}, "env": object{"A=B": "c"}}},
	} {
		e := shared.refused(t, 400, "invalid_request", "POST", path, c.fields)
		if len(e.Details.Violations) == 0 || !strings.HasPrefix(e.Details.Violations[0].Field, c.field) {
			t.Errorf("%s: violations %+v, want field %s", name, e.Details.Violations, c.field)
		}
	}
}
