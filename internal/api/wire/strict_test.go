package wire

import (
	"encoding/json"
	"errors"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"github.com/space-sandbox/space/internal/sandbox"
)

func TestParseJSONIsStrict(t *testing.T) {
	deep := func(n int) string { return strings.Repeat("[", n) + strings.Repeat("]", n) }
	mixed := func(n int) string { return strings.Repeat(`{"a":[`, n) + strings.Repeat(`]}`, n) }
	for name, c := range map[string]struct{ body, field, rule string }{
		"nothing":                {"", "body", "json"},
		"blank":                  {" \n", "body", "json"},
		"BOM":                    {"\ufeff{}", "body", "json"},
		"UTF-16":                 {"{\x00}\x00", "body", "json"},
		"invalid UTF-8 value":    {"{\"a\":\"\xc3\x28\"}", "body", "utf8"},
		"invalid UTF-8 key":      {"{\"\xff\":1}", "body", "utf8"},
		"encoded surrogate":      {"\"\xed\xa0\x80\"", "body", "utf8"},
		"overlong NUL":           {"\"\xc0\x80\"", "body", "utf8"},
		"two values":             {"{}{}", "body", "json"},
		"comma behind":           {"{},", "body", "json"},
		"bracket behind":         {"{}]", "body", "json"},
		"NUL behind":             {"{}\x00", "body", "json"},
		"trailing comma":         {`{"a":1,}`, "body", "json"},
		"trailing comma in list": {`[1,]`, "body", "json"},
		"missing comma":          {`{"a":1 "b":2}`, "body", "json"},
		"missing colon":          {`{"a" 1}`, "body", "json"},
		"bare key":               {`{a:1}`, "body", "json"},
		"number as key":          {`{1:1}`, "body", "json"},
		"single quotes":          {`{'a':1}`, "body", "json"},
		"comment":                {`{} // x`, "body", "json"},
		"NaN":                    {`NaN`, "body", "json"},
		"infinity":               {`-Infinity`, "body", "json"},
		"hex":                    {`0x10`, "body", "json"},
		"leading zero":           {`01`, "body", "json"},
		"plus":                   {`+1`, "body", "json"},
		"bare point":             {`1.`, "body", "json"},
		"out of range":           {`1e999`, "body", "json"},
		"control character":      {"\"a\nb\"", "body", "json"},
		"bad escape":             {`"\x41"`, "body", "json"},
		"open object":            {`{"a":{"b":1}`, "body", "json"},
		"open string":            {`{"a":"b`, "body", "json"},
		"wrong bracket":          {`{"a":1]`, "body", "json"},
		"duplicate":              {`{"a":1,"a":1}`, "a", "duplicate_key"},
		"duplicate by escape":    {`{"a":1,"\u0061":2}`, "a", "duplicate_key"},
		"duplicate in a list":    {`{"l":[{},{"k":1,"k":2}]}`, "l[1].k", "duplicate_key"},
		"duplicate deep down":    {`{"a":{"b":{"c":1,"c":2}}}`, "a.b.c", "duplicate_key"},
		"duplicate empty key":    {`{"":1,"":2}`, "…", "duplicate_key"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := ParseJSON([]byte(c.body))
			e := sandbox.AsError(err)
			if err == nil || e.Code != sandbox.CodeInvalidRequest || len(e.Details.Violations) != 1 {
				t.Fatalf("%q: %v", c.body, err)
			}
			if v := e.Details.Violations[0]; v.Field != c.field || v.Rule != c.rule {
				t.Errorf("%q: %+v, want %s %s", c.body, v, c.field, c.rule)
			}
		})
	}
	for _, good := range []string{"{}", " \t\r\n[ ] \n", "null", `""`, `{"a":1,"A":2}`, `{"a":{"a":{"a":1}}}`, `[{"a":1},{"a":1}]`, "-0", "1e5", deep(MaxDepth), mixed(MaxDepth / 2)} {
		if _, err := ParseJSON([]byte(good)); err != nil {
			t.Errorf("%q: %v", good, err)
		}
	}
	for _, tooDeep := range []string{deep(MaxDepth + 1), mixed(MaxDepth/2 + 1), strings.Repeat("[", MaxDepth+1), strings.Repeat(`{"a":`, 1<<16)} {
		if _, err := ParseJSON([]byte(tooDeep)); sandbox.CodeOf(err) != sandbox.CodePayloadTooLarge {
			t.Errorf("%.40q…: %v", tooDeep, err)
		}
	}
}

// TestJSONErrorsQuoteNothing: keys name the field at fault, values never come back.
func TestJSONErrorsQuoteNothing(t *testing.T) {
	for _, body := range []string{`{"a":CANARY}`, `{"a":"CANARY`, `{"k":"CANARY","k":"CANARY"}`, `{} CANARY`, `{"a":"CANARY" "b":1}`} {
		_, err := ParseJSON([]byte(body))
		text, _ := json.Marshal(EnvelopeOf(sandbox.AsError(err), "id"))
		if err == nil || strings.Contains(string(text), "CANARY") {
			t.Errorf("%q: %s", body, text)
		}
	}
}

func TestJoinKeepsFieldsPlain(t *testing.T) {
	for _, c := range []struct{ path, key, want string }{
		{"", "a", "a"}, {"a", "b", "a.b"}, {"a[0]", "b", "a[0].b"}, {"a", "", "a.…"}, {"", "x\ny", "…"}, {"m", "\x7f", "m.…"}, {"m", "\x00", "m.…"},
		{"", strings.Repeat("k", 128), strings.Repeat("k", 128)}, {"m", strings.Repeat("k", 129), "m.…"},
	} {
		if got := Join(c.path, c.key); got != c.want {
			t.Errorf("Join(%q, %q) = %q, want %q", c.path, c.key, got, c.want)
		}
	}
}

func TestReadBodyCountsExactly(t *testing.T) {
	for _, n := range []int{0, 9, 10} {
		if got, err := ReadBody(strings.NewReader(strings.Repeat("x", n)), 10); err != nil || len(got) != n {
			t.Errorf("%d bytes: %d, %v", n, len(got), err)
		}
	}
	if _, err := ReadBody(strings.NewReader(strings.Repeat("x", 11)), 10); sandbox.CodeOf(err) != sandbox.CodePayloadTooLarge {
		t.Errorf("a byte too many: %v", err)
	}
	cause := errors.New("reset")
	if _, err := ReadBody(iotest.ErrReader(cause), 10); sandbox.CodeOf(err) != sandbox.CodeInvalidRequest || !errors.Is(err, cause) {
		t.Errorf("a cut body: %v", err)
	}
}

func TestIdempotencyKeyForms(t *testing.T) {
	for _, good := range []string{"a", " ", "~", strings.Repeat("k", 255), `"quoted", with; signs`} {
		if got, err := IdempotencyKey(http.Header{"Idempotency-Key": {good}}); got != good || err != nil {
			t.Errorf("%q: %q, %v", good, got, err)
		}
	}
	if got, err := IdempotencyKey(http.Header{}); got != "" || err != nil {
		t.Errorf("none: %q, %v", got, err)
	}
	for rule, bad := range map[string][][]string{
		"length":    {{""}, {strings.Repeat("k", 256)}, {"a", "a"}, {"a", ""}},
		"printable": {{"a\tb"}, {"a\x7f"}, {"é"}, {"\x00"}, {"a\n"}},
	} {
		for _, values := range bad {
			_, err := IdempotencyKey(http.Header{"Idempotency-Key": values})
			e := sandbox.AsError(err)
			if err == nil || e.Code != sandbox.CodeInvalidRequest || e.Details.Violations[0].Field != "Idempotency-Key" || e.Details.Violations[0].Rule != rule {
				t.Errorf("%q: %v, want rule %s", values, err, rule)
			}
		}
	}
}

func TestPreferTakesTheFirstWaitOfAllLines(t *testing.T) {
	for _, c := range []struct {
		lines []string
		want  time.Duration
		ok    bool
	}{
		{nil, 0, false},
		{[]string{"respond-async", "wait=4"}, 4 * time.Second, true},
		{[]string{"wait=4", "wait=9"}, 4 * time.Second, true},
		{[]string{"wait=4, wait=9"}, 4 * time.Second, true},
		{[]string{"return=minimal;wait=9"}, 0, false}, // a parameter of another preference
		{[]string{"wait=007"}, 7 * time.Second, true},
		{[]string{"wait=+7"}, 0, false},
		{[]string{"wait=7s"}, 0, false},
		{[]string{"wait=\u0667"}, 0, false}, // a digit, but no ASCII one
	} {
		if got, ok := PreferWait(http.Header{"Prefer": c.lines}); got != c.want || ok != c.ok {
			t.Errorf("%q: %v %v, want %v %v", c.lines, got, ok, c.want, c.ok)
		}
	}
}

func TestLastEventIDHeaderWins(t *testing.T) {
	ask := func(header, query string) (uint64, error) {
		r := httptest.NewRequest(http.MethodGet, "/"+query, nil)
		if header != "" {
			r.Header.Set("Last-Event-ID", header)
		}
		return LastEventID(r)
	}
	if n, err := ask("9", "?last_event_id=4"); n != 9 || err != nil {
		t.Errorf("both: %d, %v", n, err)
	}
	if n, err := ask("", "?last_event_id=4"); n != 4 || err != nil {
		t.Errorf("query: %d, %v", n, err)
	}
	if n, err := ask("18446744073709551615", ""); n != 1<<64-1 || err != nil {
		t.Errorf("largest: %d, %v", n, err)
	}
	if _, err := ask("x", "?last_event_id=4"); sandbox.CodeOf(err) != sandbox.CodeInvalidRequest {
		t.Errorf("a bad header is passed over: %v", err)
	}
}

// TestEveryByteSurvivesAPath encodes each byte on its own and checks what stays readable.
func TestEveryByteSurvivesAPath(t *testing.T) {
	for i := range 256 {
		b := byte(i)
		encoded := EncodePath([]byte{b})
		plain := strings.IndexByte("/-_.~0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz", b) >= 0
		if (encoded == string([]byte{b})) != plain {
			t.Errorf("%#02x is written %q", b, encoded)
		}
		for _, form := range []string{encoded, "%" + strconv.FormatInt(0x100+int64(i), 16)[1:]} { // both cases of hex digits
			back, err := DecodePath("path", form)
			if err != nil || len(back) != 1 || back[0] != b {
				t.Errorf("%q: %q, %v", form, back, err)
			}
		}
	}
}

func TestDecodePathNamesItsField(t *testing.T) {
	for _, bad := range []string{"%", "a%", "a%4", "%zz", "%4g", "%+1", "% 1", "%%41", "%0x"} {
		_, err := DecodePath("from_encoded", bad)
		if e := sandbox.AsError(err); err == nil || e.Details.Violations[0].Field != "from_encoded" || e.Details.Violations[0].Rule != "percent_encoding" {
			t.Errorf("%q: %v", bad, err)
		}
	}
	if got, err := DecodePath("path", "a+b%2Bc"); string(got) != "a+b+c" || err != nil { // a plus is a plus, not a space
		t.Errorf("%q, %v", got, err)
	}
}

func TestCheckPathRules(t *testing.T) {
	for rule, path := range map[string]string{"min_length": "", "max_length": strings.Repeat("x", MaxPath+1), "no_nul": "a\x00"} {
		err := CheckPath("to", []byte(path))
		if e := sandbox.AsError(err); err == nil || e.Details.Violations[0].Field != "to" || e.Details.Violations[0].Rule != rule {
			t.Errorf("%s: %v", rule, err)
		}
	}
	if err := CheckPath("to", []byte(strings.Repeat("x", MaxPath))); err != nil {
		t.Error(err)
	}
}

func TestHostAllowed(t *testing.T) {
	allowed := []string{"Space.Example.com", "other.example.com:8443", ""}
	for host, want := range map[string]bool{
		"localhost": true, "LOCALHOST:80": true, "a.localhost": true, "localhost.": true, "127.0.0.1": true, "[::1]": true, "[fe80::1]:1": true, "::1": true,
		"space.example.com": true, "space.example.com:1": true, "space.example.com.": true, "other.example.com": true,
		"": false, ":80": false, "localhost.evil.example": false, "evillocalhost": false, "127.0.0.1.evil.example": false, "127.1.evil": false,
		"xspace.example.com": false, "space.example.com.evil.example": false, "space.example.com@evil.example": false, "example.com": false,
		"0x7f000001": false, "2130706433": false,
	} {
		if got := HostAllowed(host, allowed); got != want {
			t.Errorf("%q: %v", host, got)
		}
	}
}

// TestEveryCodeHasItsEnvelope checks status, headers and the exact fields for each error code.
func TestEveryCodeHasItsEnvelope(t *testing.T) {
	for code, c := range map[sandbox.Code]struct {
		status int
		retry  string
	}{
		sandbox.CodeInvalidRequest: {400, ""}, sandbox.CodeUnauthorized: {401, ""}, sandbox.CodeForbidden: {403, ""}, sandbox.CodeNotFound: {404, ""},
		sandbox.CodeConflict: {409, ""}, sandbox.CodeIdempotencyConflict: {409, ""}, sandbox.CodeFailedPrecondition: {412, ""},
		sandbox.CodePayloadTooLarge: {413, ""}, sandbox.CodeRateLimited: {429, "1"}, sandbox.CodeCapacityUnavailable: {503, "1"},
		sandbox.CodeServiceUnavailable: {503, "1"}, sandbox.CodeInternal: {500, ""}, "made_up": {500, ""},
	} {
		rec := httptest.NewRecorder()
		for _, stale := range []string{"Content-Length", "Content-Disposition", "Content-Security-Policy", "Accept-Ranges", "Etag", "Last-Modified"} {
			rec.Header().Set(stale, "7")
		}
		WriteError(rec, "req-1", sandbox.Errorf(code, "no <b>").WithCause(errors.New("SECRET")))
		h := rec.Header()
		if rec.Code != c.status || h.Get("Retry-After") != c.retry || h.Get("Content-Type") != "application/json" {
			t.Errorf("%s: %d, %v", code, rec.Code, h)
		}
		if h.Get("Content-Length") != strconv.Itoa(rec.Body.Len()) || h.Get("Etag")+h.Get("Content-Disposition")+h.Get("Accept-Ranges")+h.Get("Last-Modified")+h.Get("Content-Security-Policy") != "" {
			t.Errorf("%s: headers of the body that is not sent are left: %v", code, h)
		}
		if (h.Get("WWW-Authenticate") == "Bearer") != (c.status == 401) {
			t.Errorf("%s: WWW-Authenticate %q", code, h.Get("WWW-Authenticate"))
		}
		want := `{"code":"` + string(code) + `","message":"no <b>","request_id":"req-1","details":{},"retryable":` + strconv.FormatBool(c.retry != "") + "}\n"
		if rec.Body.String() != want {
			t.Errorf("%s: %s, want %s", code, rec.Body, want)
		}
	}
}

func TestForeignErrorsAreHidden(t *testing.T) {
	rec := httptest.NewRecorder()
	WriteError(rec, "id", errors.New("open /var/lib/SECRET: denied"))
	if rec.Code != 500 || strings.Contains(rec.Body.String(), "SECRET") {
		t.Errorf("%d %s", rec.Code, rec.Body)
	}
}

func TestStatusOfAnErrorWins(t *testing.T) {
	e := sandbox.Errorf(sandbox.CodeInvalidRequest, "no")
	e.Status = http.StatusMethodNotAllowed
	if got := Status(e); got != http.StatusMethodNotAllowed {
		t.Errorf("%d", got)
	}
}

func TestGuardMarksEveryAnswer(t *testing.T) {
	ask := func(id string, fn func(*Recorder, *http.Request)) *httptest.ResponseRecorder {
		rec, r := httptest.NewRecorder(), httptest.NewRequest(http.MethodGet, "/", nil)
		if id != "" {
			r.Header.Set("X-Request-Id", id)
		}
		Guard(discard(), fn).ServeHTTP(rec, r)
		return rec
	}
	var inside string
	rec := ask("mine:1/2+3=4", func(w *Recorder, r *http.Request) {
		inside = RequestID(r.Context())
		w.WriteHeader(http.StatusNoContent)
	})
	if h := rec.Header(); h.Get("X-Request-Id") != "mine:1/2+3=4" || inside != "mine:1/2+3=4" || h.Get("X-Content-Type-Options") != "nosniff" || h.Get("Cache-Control") != "no-store" {
		t.Errorf("%q inside, %v", inside, h)
	}
	made := map[string]bool{}
	for _, bad := range []string{"", "a b", "a\tb", "<x>", "a,b", strings.Repeat("x", 129)} {
		got := ask(bad, func(w *Recorder, _ *http.Request) { w.WriteHeader(http.StatusOK) }).Header().Get("X-Request-Id")
		if !strings.HasPrefix(got, "req-") || len(got) != 28 || made[got] {
			t.Errorf("for %q: %q", bad, got)
		}
		made[got] = true
	}
	rec = ask("p", func(*Recorder, *http.Request) { panic("SECRET") })
	var e Envelope
	if err := json.Unmarshal(rec.Body.Bytes(), &e); err != nil || rec.Code != 500 || e.Code != sandbox.CodeInternal || e.RequestID != "p" || strings.Contains(rec.Body.String(), "SECRET") {
		t.Errorf("panic: %d %s, %v", rec.Code, rec.Body, err)
	}
}

func TestRecorderCountsTheFinalAnswerOnly(t *testing.T) {
	rec := &Recorder{ResponseWriter: httptest.NewRecorder()}
	rec.WriteHeader(http.StatusContinue)
	if rec.Status != 0 {
		t.Errorf("an interim answer counts: %d", rec.Status)
	}
	rec = &Recorder{ResponseWriter: httptest.NewRecorder()}
	_, _ = rec.Write([]byte("abc"))
	_, _ = rec.Write([]byte("de"))
	if rec.Status != http.StatusOK || rec.Bytes != 5 {
		t.Errorf("%d, %d bytes", rec.Status, rec.Bytes)
	}
}
