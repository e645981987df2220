package cli

import (
	"bytes"
	"encoding/base64"
	"flag"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spf13/cobra"

	"github.com/space-sandbox/space/internal/client"
)

var update = flag.Bool("update", false, "write the golden files")

func ptr[T any](v T) *T { return &v }

func TestExitCodes(t *testing.T) {
	a := &app{errOut: io.Discard}
	for _, test := range []struct {
		exit client.Exit
		want int
	}{
		{client.Exit{Code: ptr(0)}, 0}, {client.Exit{Code: ptr(42)}, 42}, {client.Exit{Signal: ptr("SIGTERM")}, 143},
		{client.Exit{Signal: ptr("SIGKILL"), TimedOut: true}, 137}, {client.Exit{Signal: ptr("SIGRTMIN+3")}, 128 + 37}, {client.Exit{}, 125},
	} {
		if got := a.exitCode(&test.exit); got != test.want {
			t.Errorf("%+v: %d, want %d", test.exit, got, test.want)
		}
	}
}

func TestEscape(t *testing.T) {
	for in, want := range map[string]string{
		"plain ü": "plain ü", "\x1b[31mred": `\x1b[31mred`, "a\nb\tc": `a\nb\tc`, "\xff": `\xff`, "\u202eabc": `\u202eabc`, "\x7f": `\x7f`, "\u009b": `\u009b`,
	} {
		if got := escape(in); got != want {
			t.Errorf("escape(%q) = %q, want %q", in, got, want)
		}
	}
}

func FuzzEscape(f *testing.F) {
	f.Add("\x1b]0;title\a")
	f.Fuzz(func(t *testing.T, s string) {
		for _, r := range escape(s) {
			if r < 0x20 || r == 0x7f || r >= 0x80 && r < 0xa0 {
				t.Errorf("control character %U in %q", r, escape(s))
			}
		}
	})
}

func TestTableIsAlignedAndEscaped(t *testing.T) {
	var b bytes.Buffer
	if err := table(&b, []string{"A", "B"}, [][]string{{"long cell", "x\x1b"}, {"y", ""}}); err != nil {
		t.Fatal(err)
	}
	if want := "A          B\nlong cell  x\\x1b\ny\n"; b.String() != want {
		t.Errorf("%q, want %q", b.String(), want)
	}
}

func TestRemotePaths(t *testing.T) {
	id := "i3k9x0a7c2m5q8w1z4b6n"
	for in, want := range map[string][2]string{
		id + ":/a:b": {id, "/a:b"}, id + ":": {id, "."}, "/local": {"", "/local"}, "c:/x": {"", "c:/x"}, id: {"", id},
	} {
		if gotID, p := remote(in); gotID != want[0] || p != want[1] {
			t.Errorf("remote(%q) = %q, %q", in, gotID, p)
		}
	}
}

// fakeServer answers as much of the API as run needs.
func fakeServer(t *testing.T, exit string) (*app, *[]string, *bytes.Buffer, *bytes.Buffer) {
	t.Helper()
	calls := &[]string{}
	mux := http.NewServeMux()
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		*calls = append(*calls, r.Method+" "+r.URL.Path)
		mux.ServeHTTP(w, r)
	}))
	t.Cleanup(srv.Close)
	say := func(pattern, body string) {
		mux.HandleFunc(pattern, func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, body) })
	}
	say("POST /v1/sandboxes", `{"sandbox":{"id":"i1"},"operation":{"id":"op1","state":"pending"}}`)
	say("GET /v1/operations/op1", `{"id":"op1","state":"succeeded"}`)
	say("POST /v1/sandboxes/i1/commands", `{"process":{"id":"p1"},"session":{"id":"cs1","token":"t","events_url":"`+srv.URL+`/v1/sessions/cs1/events"}}`)
	say("DELETE /v1/sandboxes/i1", `{"operation":{"id":"op2","state":"succeeded"}}`)
	b64 := base64.StdEncoding.EncodeToString
	say("GET /v1/sessions/cs1/events", fmt.Sprintf("id: 1\nevent: stdout\ndata: {\"data\":%q}\n\nid: 2\nevent: stderr\ndata: {\"data\":%q}\n\nid: 3\nevent: process_exited\ndata: %s\n\n",
		b64([]byte("out")), b64([]byte("err")), exit))
	var out, errOut bytes.Buffer
	a := &app{in: strings.NewReader(""), out: &out, errOut: &errOut, getenv: func(k string) string {
		return map[string]string{"SPACE_API_URL": srv.URL, "SPACE_API_TOKEN": "k"}[k]
	}}
	return a, calls, &out, &errOut
}

func TestRunPassesThroughAndDeletes(t *testing.T) {
	a, calls, out, errOut := fakeServer(t, `{"code":7}`)
	if code := a.main(t.Context(), []string{"run", "--", "x"}); code != 7 || out.String() != "out" || errOut.String() != "err" {
		t.Errorf("code %d, %q, %q", code, out, errOut)
	}
	if last := (*calls)[len(*calls)-1]; last != "DELETE /v1/sandboxes/i1" {
		t.Errorf("%v", *calls)
	}
}

func TestOwnTroubleIs125(t *testing.T) {
	a, calls, _, errOut := fakeServer(t, `{"code":0}`)
	if code := a.main(t.Context(), []string{"run", "-e", "novalue", "--", "x"}); code != 125 || !strings.Contains(errOut.String(), "KEY=VALUE") {
		t.Errorf("code %d, %q", code, errOut)
	}
	if code := a.main(t.Context(), []string{"run", "-t", "--", "x"}); code != 125 || !strings.Contains(errOut.String(), "terminal") {
		t.Errorf("code %d, %q", code, errOut)
	}
	if last := (*calls)[len(*calls)-1]; last != "DELETE /v1/sandboxes/i1" {
		t.Errorf("the sandbox was left: %v", *calls)
	}
	if code := a.main(t.Context(), []string{"sandbox", "get", "nope"}); code != 1 {
		t.Errorf("code %d", code)
	}
	if code := a.main(t.Context(), []string{"ps", "i1", "-o", "xml"}); code != 1 || !strings.Contains(errOut.String(), "xml") {
		t.Errorf("code %d", code)
	}
}

func TestNoServerSaysWhatToDo(t *testing.T) {
	var errOut bytes.Buffer
	a := &app{in: strings.NewReader(""), out: io.Discard, errOut: &errOut, getenv: func(k string) string {
		return map[string]string{"SPACE_API_URL": "http://127.0.0.1:1", "SPACE_API_TOKEN": "k"}[k]
	}}
	if code := a.main(t.Context(), []string{"run", "--", "x"}); code != 125 || !strings.Contains(errOut.String(), "space up") {
		t.Errorf("code %d, %q", code, &errOut)
	}
	a.getenv = func(k string) string { return map[string]string{"SPACE_DATA_DIR": t.TempDir()}[k] }
	if code := a.main(t.Context(), []string{"sandbox", "list"}); code != 1 || !strings.Contains(errOut.String(), "SPACE_API_TOKEN") {
		t.Errorf("code %d, %q", code, &errOut)
	}
}

// TestHelp keeps the names of commands and flags, which are a contract, and asks every command for an example.
func TestHelp(t *testing.T) {
	var b strings.Builder
	var walk func(*cobra.Command)
	walk = func(c *cobra.Command) {
		if c.Name() == "help" || c.Name() == "completion" {
			return
		}
		if c.Example == "" || c.Short == "" {
			t.Errorf("%s has no example or no description", c.CommandPath())
		}
		fmt.Fprintf(&b, "## %s\n\n%s\n%s\n", c.CommandPath(), c.Long, c.UsageString())
		for _, child := range c.Commands() {
			walk(child)
		}
	}
	walk((&app{errOut: io.Discard, getenv: func(string) string { return "" }}).root())
	path := filepath.Join("testdata", "help.txt")
	if *update {
		if err := os.MkdirAll("testdata", 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(b.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil || string(want) != b.String() {
		t.Errorf("help texts differ from %s (%v): if that is meant, run go test ./internal/cli -update", path, err)
	}
}
