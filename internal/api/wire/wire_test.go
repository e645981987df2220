package wire

import (
	"bytes"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/space-sandbox/space/internal/sandbox"
)

func TestPreferWait(t *testing.T) {
	for value, want := range map[string]int{
		"wait=0": 0, "wait=60": 60, "wait=61": 60, "wait=99999999999999999999": 60, `wait="7"`: 7, " WAIT = 5 ": 5, "respond-async, wait=3; x=y": 3,
		"": -1, "wait": -1, "wait=": -1, "wait=-1": -1, "wait=1.5": -1, "wait=x": -1, "waiting=3": -1, "wait=x, wait=3": -1,
	} {
		got, ok := PreferWait(http.Header{"Prefer": {value}})
		if ok != (want >= 0) || ok && got != time.Duration(want)*time.Second {
			t.Errorf("%q: %v %v, want %d", value, got, ok, want)
		}
	}
}

func TestAccepts(t *testing.T) {
	for value, want := range map[string]bool{
		"application/json": true, "*/*": true, "application/*": true, "text/html, */*;q=0.1": true, "APPLICATION/JSON; charset=utf-8": true,
		"application/json;q=0.5": true, "text/html": false, "application/json;q=0": false, "application/json; q=0.000": false, "*": false, "text/*": false,
	} {
		if got := Accepts(http.Header{"Accept": {value}}, "application/json"); got != want {
			t.Errorf("%q: %v", value, got)
		}
	}
	if !Accepts(http.Header{}, "application/json") {
		t.Error("no header admits nothing")
	}
}

func TestBearer(t *testing.T) {
	for value, want := range map[string]string{"Bearer a": "a", "bearer  b ": "b", "Basic c": "", "Bearer": "", "": "", "Bearer ": ""} {
		if got := Bearer(http.Header{"Authorization": {value}}); got != want {
			t.Errorf("%q: %q", value, got)
		}
	}
}

func TestRetryAfterRoundsUp(t *testing.T) {
	for d, want := range map[time.Duration]string{0: "1", time.Millisecond: "1", time.Second: "1", 1500 * time.Millisecond: "2"} {
		rec := httptest.NewRecorder()
		e := sandbox.Errorf(sandbox.CodeServiceUnavailable, "down")
		e.RetryAfter = d
		WriteError(rec, "id", e)
		if got := rec.Header().Get("Retry-After"); got != want {
			t.Errorf("%s: %s, want %s", d, got, want)
		}
	}
}

func TestFailCutsAnAnswerUnderWay(t *testing.T) {
	srv := httptest.NewServer(Guard(discard(), func(w *Recorder, r *http.Request) {
		w.Header().Set("Content-Length", "10")
		_, _ = w.Write([]byte("half"))
		w.Fail(r, sandbox.Errorf(sandbox.CodeInternal, "broken"))
	}))
	defer srv.Close()
	resp, err := http.Get(srv.URL)
	if err != nil {
		return // cut before the header came through: as good
	}
	defer resp.Body.Close()
	var buf bytes.Buffer
	if _, err := buf.ReadFrom(resp.Body); err == nil {
		t.Errorf("%q looks whole", buf.String())
	}
}

func FuzzPreferWait(f *testing.F) {
	for _, s := range []string{"wait=5", "respond-async, wait=\"9\"", "wait=99999999999999999999", ",,=,", "wait=;"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, value string) {
		if d, ok := PreferWait(http.Header{"Prefer": {value}}); d < 0 || d > sandbox.MaxWaitS*time.Second || !ok && d != 0 {
			t.Errorf("%q: %v %v", value, d, ok)
		}
	})
}

func FuzzLastEventID(f *testing.F) {
	for _, s := range []string{"0", "1", "18446744073709551615", "18446744073709551616", "-1", "+1", "0x1", "1_0", " 1", ""} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, value string) {
		n, err := LastEventID(&http.Request{Header: http.Header{"Last-Event-Id": {value}}, URL: mustURL})
		switch {
		case value == "":
			if n != 0 || err != nil {
				t.Errorf("empty: %d %v", n, err)
			}
		case err == nil && strings.Trim(value, "0123456789") != "":
			t.Errorf("%q is taken for %d", value, n)
		case err != nil && sandbox.CodeOf(err) != sandbox.CodeInvalidRequest:
			t.Errorf("%q: %v", value, err)
		}
	})
}

func FuzzPaths(f *testing.F) {
	for _, s := range [][]byte{[]byte("/a b"), {0xff, 0xfe, '/'}, []byte("%41"), []byte("é\n"), {}} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, path []byte) {
		encoded := EncodePath(path)
		back, err := DecodePath("path", encoded)
		if err != nil || !bytes.Equal(back, path) {
			t.Errorf("%q came back as %q: %v", path, back, err)
		}
		if strings.ContainsAny(encoded, " \"\n\r\x00\\") {
			t.Errorf("%q is not plain", encoded)
		}
		if _, err := DecodePath("path", string(path)); err != nil && sandbox.CodeOf(err) != sandbox.CodeInvalidRequest {
			t.Errorf("%q: %v", path, err)
		}
		if err := CheckPath("path", path); (err == nil) != (len(path) > 0 && len(path) <= MaxPath && bytes.IndexByte(path, 0) < 0) {
			t.Errorf("%q: %v", path, err)
		}
	})
}

// FuzzParseJSON holds the strict parser to the standard one: what it accepts, that one accepts with the same meaning.
func FuzzParseJSON(f *testing.F) {
	for _, s := range []string{`{}`, `{"a":[1,{"b":null}]}`, `{"a":1,"a":2}`, `[`, `{"a"}`, `1 2`, "\"\xff\"", `"\ud800"`, strings.Repeat("[", 40), `1e999`, `{"":{"":1}}`} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		v, err := ParseJSON(data)
		if err != nil {
			if code := sandbox.CodeOf(err); code != sandbox.CodeInvalidRequest && code != sandbox.CodePayloadTooLarge {
				t.Errorf("%q: %v", data, err)
			}
			return
		}
		var want any
		if err := json.Unmarshal(data, &want); err != nil {
			t.Fatalf("%q is accepted: %v", data, err)
		}
		a, _ := json.Marshal(v)
		b, _ := json.Marshal(want)
		if !bytes.Equal(a, b) {
			t.Errorf("%q: %s, want %s", data, a, b)
		}
	})
}
