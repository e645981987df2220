package api

import (
	"bytes"
	"io"
	"strings"
	"testing"

	"github.com/space-sandbox/space/internal/api/apitest"
	agentv1 "github.com/space-sandbox/space/internal/gen/space/agent/v1"
	nodev1 "github.com/space-sandbox/space/internal/gen/space/node/v1"
	"github.com/space-sandbox/space/internal/sandbox"
)

func TestCommandLimits(t *testing.T) {
	b := newBench(t)
	path := b.fill("/sandboxes/{id}/commands")
	argv := func(n int) []string { return append([]string{"true"}, strings.Split(strings.Repeat("x", n-1), "")...) }
	size := func(n int) []string {
		rest := n - len("true\x00")
		return []string{"true", strings.Repeat("a", rest/2-1), strings.Repeat("b", rest-rest/2-1)}
	}
	for field, c := range map[string]struct{ good, bad object }{
		"argv":                 {object{"argv": argv(4096)}, object{"argv": argv(4097)}},
		"argv#bytes":           {object{"argv": size(262144)}, object{"argv": size(262145)}},
		"argv[1]":              {object{"argv": []string{"a", strings.Repeat("x", 131071)}}, object{"argv": []string{"a", strings.Repeat("x", 131072)}}},
		"argv[1]#NUL":          {object{"argv": []string{"a", ""}}, object{"argv": []string{"a", "a\x00b"}}},
		"argv[0]":              {object{"argv": []string{" "}}, object{"argv": []string{""}}},
		"argv#none":            {object{"argv": []string{"a"}}, object{"argv": []string{}}},
		"argv#missing":         {object{"argv": []string{"a"}}, object{}},
		"argv[0]#type":         {object{"argv": []string{"a"}}, object{"argv": []any{1}}},
		"timeout_s":            {object{"argv": []string{"a"}, "timeout_s": 1}, object{"argv": []string{"a"}, "timeout_s": 0}},
		"timeout_s#max":        {object{"argv": []string{"a"}, "timeout_s": nil}, object{"argv": []string{"a"}, "timeout_s": 315360001}},
		"pty.cols":             {object{"argv": []string{"a"}, "pty": object{"cols": 1, "rows": 65535}}, object{"argv": []string{"a"}, "pty": object{"cols": 0, "rows": 1}}},
		"pty.rows":             {object{"argv": []string{"a"}, "pty": nil}, object{"argv": []string{"a"}, "pty": object{"cols": 1, "rows": 65536}}},
		"pty.rows#missing":     {object{"argv": []string{"a"}}, object{"argv": []string{"a"}, "pty": object{"cols": 1}}},
		"output_cap_bytes":     {object{"argv": []string{"a"}, "output_cap_bytes": 65536}, object{"argv": []string{"a"}, "output_cap_bytes": 65535}},
		"output_cap_bytes#max": {object{"argv": []string{"a"}, "output_cap_bytes": 1 << 30}, object{"argv": []string{"a"}, "output_cap_bytes": 1<<30 + 1}},
		"start":                {object{"argv": []string{"a"}, "start": "now"}, object{"argv": []string{"a"}, "start": "later"}},
		"cwd":                  {object{"argv": []string{"a"}, "cwd": strings.Repeat("/", 4095)}, object{"argv": []string{"a"}, "cwd": strings.Repeat("é", 2048)}},
		"cwd#NUL":              {object{"argv": []string{"a"}, "cwd": "."}, object{"argv": []string{"a"}, "cwd": "\x00"}},
		"user":                 {object{"argv": []string{"a"}, "user": strings.Repeat("u", 256)}, object{"argv": []string{"a"}, "user": strings.Repeat("u", 257)}},
		"user#NUL":             {object{"argv": []string{"a"}, "user": "0"}, object{"argv": []string{"a"}, "user": "\x00"}},
		"stdin":                {object{"argv": []string{"a"}, "stdin": true}, object{"argv": []string{"a"}, "stdin": "yes"}},
		"argvv":                {object{"argv": []string{"a"}, "env": object{}}, object{"argv": []string{"a"}, "argvv": 1}},
	} {
		t.Run(field, func(t *testing.T) {
			want, _, _ := strings.Cut(field, "#")
			b.do(t, "POST", path, c.good).into(t, 201, nil)
			e := b.do(t, "POST", path, c.bad).refused(t, 400, "invalid_request")
			if e.Details.Violations[0].Field != want {
				t.Errorf("violations %+v, want field %s", e.Details.Violations, want)
			}
		})
	}
}

func TestCommandIsPassedOn(t *testing.T) {
	b := newBench(t)
	var out struct {
		Process struct{ State string }
		Session struct {
			Token     string
			EventsURL string `json:"events_url"`
		}
	}
	body := object{"argv": []string{"a", "é"}, "env": object{"A": "B"}, "cwd": "/", "user": "root", "stdin": true, "pty": object{"cols": 2, "rows": 3}, "timeout_s": 4, "start": "now", "output_cap_bytes": 70000}
	b.do(t, "POST", b.fill("/sandboxes/{id}/commands"), body).into(t, 201, &out)
	c := b.Commands[0]
	if s := c.Spec; string(s.GetArgv()[1]) != "é" || s.GetEnv()["A"] != "B" || string(s.GetCwd()) != "/" || s.GetUser() != "root" || !s.GetStdin() ||
		s.GetPty().GetRows() != 3 || s.GetTimeoutMs() != 4000 || !c.StartNow || c.OutputCap != 70000 {
		t.Errorf("%+v", c)
	}
	if out.Session.Token != apitest.Token || out.Session.EventsURL != "http://data.test/v1/sessions/"+string(b.Session.ID)+"/events" || out.Process.State != "created" {
		t.Errorf("%+v", out)
	}
	b.do(t, "POST", b.fill("/sandboxes/{id}/commands"), object{"argv": []string{"a"}}).into(t, 201, nil)
	if c := b.Commands[1]; c.StartNow || c.OutputCap != 64<<20 || c.Spec.GetPty() != nil {
		t.Errorf("defaults %+v", c)
	}
	b.do(t, "POST", b.fill(processPath+"/sessions"), nil).into(t, 201, &out)
	b.do(t, "POST", b.fill(processPath+"/sessions"), object{"x": 1}).refused(t, 400, "invalid_request")
}

func TestProcessesAreListedAndAwaited(t *testing.T) {
	b := newBench(t)
	for range 4 {
		b.Guests.AddProcess()
	}
	seen, cursor := 0, ""
	for {
		var page struct {
			Items      []struct{ ID string }
			NextCursor string `json:"next_cursor"`
		}
		b.do(t, "GET", b.fill("/sandboxes/{id}/processes")+"?limit=2&cursor="+cursor, nil).into(t, 200, &page)
		seen += len(page.Items)
		if cursor = page.NextCursor; cursor == "" {
			break
		}
	}
	if seen != 5 {
		t.Errorf("%d processes", seen)
	}
	b.do(t, "GET", b.fill("/sandboxes/{id}/processes")+"?cursor=x", nil).refused(t, 400, "invalid_request")
	got := make(chan result, 1)
	go func() { got <- b.do(t, "GET", b.fill(processPath)+"?wait=30", nil) }()
	b.Guests.Exit(b.Process.GetProcessId(), 7)
	var p struct {
		State string
		Exit  struct{ Code *int }
	}
	(<-got).into(t, 200, &p)
	if p.State != "exited" || *p.Exit.Code != 7 {
		t.Errorf("%+v", p)
	}
	for _, bad := range []string{"61", "-1", "x", "1.5"} {
		b.do(t, "GET", b.fill(processPath)+"?wait="+bad, nil).refused(t, 400, "invalid_request")
	}
}

func TestSignalsReachTheProcess(t *testing.T) {
	b := newBench(t)
	b.do(t, "POST", b.fill(processPath+"/signal"), object{"signal": "SIGUSR1", "target": "group"}).into(t, 200, nil)
	b.do(t, "POST", b.fill(processPath+"/signal"), object{"signal": "SIGRTMIN+30"}).into(t, 200, nil)
	b.do(t, "POST", b.fill(processPath+"/kill"), object{}).into(t, 200, nil)
	s := b.Guests.Signals
	if s[0].GetSignal() != 10 || s[0].GetTarget() != agentv1.SignalTarget_SIGNAL_TARGET_GROUP || s[1].GetSignal() != 64 ||
		s[2].GetSignal() != 9 || s[2].GetTarget() != agentv1.SignalTarget_SIGNAL_TARGET_TREE {
		t.Errorf("%v", s)
	}
	for _, bad := range []object{{"signal": "SIGNONE"}, {"signal": "sigterm"}, {"signal": "15"}, {"signal": "SIGTERM", "target": "tree"}, {}} {
		b.do(t, "POST", b.fill(processPath+"/signal"), bad).refused(t, 400, "invalid_request")
	}
}

func TestSessionTokenIsGoodForItsProcessOnly(t *testing.T) {
	b := newBench(t)
	session := []string{"Authorization", "Bearer " + apitest.Token, sessionHeader, string(b.Session.ID)}
	b.do(t, "POST", b.fill(processPath+"/stdin"), strings.NewReader("x"), session...).into(t, 204, nil)
	b.do(t, "POST", b.fill(processPath+"/resize"), object{"cols": 1, "rows": 1}, session...).into(t, 204, nil)
	b.do(t, "POST", b.fill(processPath+"/signal"), object{"signal": "SIGTERM"}, session...).into(t, 200, nil)
	other := strings.Replace(b.fill(processPath+"/signal"), b.Process.GetProcessId(), b.Guests.AddProcess().GetProcessId(), 1)
	b.do(t, "POST", other, object{"signal": "SIGTERM"}, session...).refused(t, 404, "not_found")
	b.do(t, "POST", b.fill(processPath+"/kill"), nil, session...).refused(t, 401, "unauthorized")
	b.do(t, "GET", b.fill(processPath), nil, session...).refused(t, 401, "unauthorized")
	session[1] = "Bearer wrong"
	b.do(t, "POST", b.fill(processPath+"/signal"), object{"signal": "SIGTERM"}, session...).refused(t, 401, "unauthorized")
	session[1], session[3] = "Bearer "+apitest.Token, "x"
	b.do(t, "POST", b.fill(processPath+"/signal"), object{"signal": "SIGTERM"}, session...).refused(t, 401, "unauthorized")
}

func TestOutputIsBytes(t *testing.T) {
	b := newBench(t)
	chunk := func(s agentv1.Stream, data string, at uint64) *nodev1.Event {
		return &nodev1.Event{Kind: &nodev1.Event_Output{Output: &nodev1.OutputChunk{Stream: s, Data: []byte(data), Offset: at}}}
	}
	b.Guests.Emit(b.Process.GetProcessId(), chunk(1, "one\xff", 0), chunk(2, "err", 0), chunk(1, "two", 4))
	for query, want := range map[string]string{"": "one\xfftwo", "?stream=stderr": "err", "?from=3": "\xfftwo", "?stream=stdout&from=7": "", "?stream=pty": ""} {
		got := b.do(t, "GET", b.fill(processPath+"/output")+query, nil)
		if got.status != 200 || string(got.body) != want || !strings.HasPrefix(got.header.Get("Content-Disposition"), "attachment") {
			t.Errorf("%q: %d %q", query, got.status, got.body)
		}
	}
	if e := b.do(t, "GET", b.fill(processPath+"/output")+"?from=8", nil).refused(t, 416, "invalid_request"); e.Details.Violations[0].Field != "from" {
		t.Errorf("%+v", e.Details)
	}
	for _, bad := range []string{"?stream=other", "?from=-1", "?from=x", "?from=99999999999999999999"} {
		b.do(t, "GET", b.fill(processPath+"/output")+bad, nil).refused(t, 400, "invalid_request")
	}
}

func TestInputOfAnySize(t *testing.T) {
	b := newBench(t)
	big := bytes.Repeat([]byte("0123456789abcdef"), 1<<16)
	path := b.fill(processPath + "/stdin")
	b.do(t, "POST", path, io.MultiReader(bytes.NewReader(big)), "Content-Type", "application/octet-stream").into(t, 204, nil)
	b.do(t, "POST", path+"?offset=0", bytes.NewReader(big[:1000])).into(t, 204, nil)
	b.do(t, "POST", path+"?close=true", nil).into(t, 204, nil)
	if got, closed := b.Guests.Stdin(); !bytes.Equal(got, big) || !closed {
		t.Errorf("%d bytes, closed %v", len(got), closed)
	}
	b.SetState(sandbox.StateCreating)
	b.do(t, "POST", path, strings.NewReader("x")).refused(t, 409, "conflict")
}
