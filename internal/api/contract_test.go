package api

import (
	"net/http"
	"strings"
	"testing"

	"github.com/space-sandbox/space/internal/api/apitest"
	"github.com/space-sandbox/space/internal/sandbox"
)

func each(t *testing.T, fn func(t *testing.T, b *bench, r *route, path string)) {
	t.Helper()
	b := newBench(t)
	for _, r := range b.server.table() {
		t.Run(r.id, func(t *testing.T) {
			path := b.fill(r.path)
			if r.param("path") != nil {
				path += "?path=/f"
			}
			fn(t, b, r, path)
		})
	}
}

func (r *route) sample() any {
	if r.body == bodyJSON {
		return map[string]any{}
	}
	return nil
}

func TestEveryRouteWantsACredential(t *testing.T) {
	each(t, func(t *testing.T, b *bench, r *route, path string) {
		e := b.do(t, r.method, path, r.sample(), "Authorization", "").refused(t, 401, "unauthorized")
		if e.Details.Remediation == "" {
			t.Error("no remediation")
		}
		b.do(t, r.method, path, r.sample(), "Authorization", "Bearer nonsense").refused(t, 401, "unauthorized")
		b.do(t, r.method, path, r.sample(), "Authorization", "Basic "+apitest.AdminKey).refused(t, 401, "unauthorized")
	})
}

func TestEveryRouteKnowsItsMethods(t *testing.T) {
	each(t, func(t *testing.T, b *bench, r *route, path string) {
		for _, method := range []string{"OPTIONS", "TRACE", "BREW"} {
			got := b.do(t, method, path, nil)
			got.refused(t, 405, "invalid_request")
			if !strings.Contains(got.header.Get("Allow"), r.method) {
				t.Errorf("Allow %q lacks %s", got.header.Get("Allow"), r.method)
			}
			if got.header.Get("Access-Control-Allow-Origin") != "" {
				t.Error("the API answers CORS")
			}
		}
	})
}

func TestEveryRouteNegotiates(t *testing.T) {
	each(t, func(t *testing.T, b *bench, r *route, path string) {
		b.do(t, r.method, path, r.sample(), "Accept", "text/html").refused(t, 406, "invalid_request")
		if r.body == bodyJSON || r.body == bodyInput {
			b.do(t, r.method, path, strings.NewReader("x"), "Content-Type", "text/csv").refused(t, 415, "invalid_request")
		}
	})
}

func TestEveryRouteRefusesUnknownParameters(t *testing.T) {
	each(t, func(t *testing.T, b *bench, r *route, path string) {
		sep := "?"
		if strings.Contains(path, "?") {
			sep = "&"
		}
		e := b.do(t, r.method, path+sep+"limt=CANARY", r.sample()).refused(t, 400, "invalid_request")
		if e.Details.Violations[0].Field != "limt" || e.Details.Violations[0].Rule != "unknown_parameter" {
			t.Errorf("violations %+v", e.Details.Violations)
		}
		b.do(t, r.method, path+sep+"a=%zz", r.sample()).refused(t, 400, "invalid_request")
	})
}

func TestEveryRouteOfASandboxTellsWhatIsNotThere(t *testing.T) {
	bodies := map[string]any{
		"updateSandbox": object{}, "createCommand": object{"argv": []string{"true"}}, "signalProcess": object{"signal": "SIGTERM"},
		"resizeProcess": object{"cols": 1, "rows": 1}, "makeDirectory": object{"path": "/a"},
		"moveFile": object{"from": "/a", "to": "/b"}, "copyFile": object{"from": "/a", "to": "/b"},
	}
	each(t, func(t *testing.T, b *bench, r *route, path string) {
		if !strings.Contains(r.path, "{") {
			return
		}
		for _, id := range []string{string(sandbox.NewID()), "no-id", "..%2f..%2fetc", "%00"} {
			wrong := strings.Replace(path, string(b.Sandbox.ID), id, 1)
			wrong = strings.Replace(wrong, "/base", "/none", 1)
			b.do(t, r.method, wrong, bodies[r.id]).refused(t, 404, "not_found")
		}
	})
}

func TestEveryRouteChecksScopes(t *testing.T) {
	allowed := map[string]bool{
		"listSandboxes": true, "getSandbox": true, "getOperation": true, "listProcesses": true, "getProcess": true, "readOutput": true,
	}
	bodies := map[string]any{
		"createSandbox": object{"template": "base"}, "updateSandbox": object{}, "createCommand": object{"argv": []string{"true"}},
		"signalProcess": object{"signal": "SIGTERM"}, "resizeProcess": object{"cols": 1, "rows": 1}, "makeDirectory": object{"path": "/a"},
		"moveFile": object{"from": "/a", "to": "/b"}, "copyFile": object{"from": "/a", "to": "/b"},
		"createAPIKey": object{"name": "n", "scopes": []string{"files:read"}},
	}
	each(t, func(t *testing.T, b *bench, r *route, path string) {
		if allowed[r.id] {
			return
		}
		got := b.do(t, r.method, path, bodies[r.id], "Authorization", "Bearer "+apitest.ReaderKey)
		if e := got.refused(t, 403, "forbidden"); e.Details.RequiredScope == "" {
			t.Error("the scope is not named")
		}
	})
}

func TestJSONBodiesAreStrict(t *testing.T) {
	b := newBench(t)
	for name, c := range map[string]struct {
		body, field, rule string
	}{
		"empty":           {"", "body", "required"},
		"no JSON":         {"{", "body", "json"},
		"not UTF-8":       {"{\"template\":\"\xff\"}", "body", "utf8"},
		"trailing":        {"{} {}", "body", "json"},
		"trailing junk":   {"{} x", "body", "json"},
		"no object":       {"[]", "body", "type"},
		"null":            {"null", "body", "type"},
		"unknown field":   {`{"template":"base","tmplate":"CANARY"}`, "tmplate", "unknown_field"},
		"other case":      {`{"Template":"CANARY"}`, "template", "required"},
		"duplicate":       {`{"template":"base","template":"CANARY"}`, "template", "duplicate_key"},
		"deep duplicate":  {`{"template":"base","env":{"A":"1","A":"CANARY"}}`, "env.A", "duplicate_key"},
		"wrong type":      {`{"template":7}`, "template", "type"},
		"null string":     {`{"template":null}`, "template", "type"},
		"wrong map type":  {`{"template":"base","env":{"A":1}}`, "env.A", "type"},
		"fraction":        {`{"template":"base","resources":{"vcpu":1.5}}`, "resources.vcpu", "type"},
		"huge number":     {`{"template":"base","resources":{"vcpu":1e300}}`, "resources.vcpu", "type"},
		"zero":            {`{"template":"base","resources":{"vcpu":0}}`, "resources.vcpu", "minimum"},
		"too many vcpu":   {`{"template":"base","resources":{"vcpu":4294967296}}`, "resources.vcpu", "maximum"},
		"enum":            {`{"template":"base","environment":"CANARY"}`, "environment", "enum"},
		"template form":   {`{"template":"CANARY!"}`, "template", "pattern"},
		"lifecycle enum":  {`{"template":"base","lifecycle":{"on_max_lifetime":"CANARY"}}`, "lifecycle.on_max_lifetime", "enum"},
		"lifecycle field": {`{"template":"base","lifecycle":{"idle":1}}`, "lifecycle.idle", "unknown_field"},
		"lifetime of 0":   {`{"template":"base","lifecycle":{"max_lifetime_s":0}}`, "lifecycle.max_lifetime_s", "minimum"},
	} {
		t.Run(name, func(t *testing.T) {
			got := b.do(t, "POST", "/v1/sandboxes", strings.NewReader(c.body), "Content-Type", "application/json")
			e := got.refused(t, 400, "invalid_request")
			if v := e.Details.Violations; len(v) == 0 || v[0].Field != c.field && v[len(v)-1].Field != c.field || v[0].Rule != c.rule && v[len(v)-1].Rule != c.rule {
				t.Errorf("violations %+v, want %s %s", v, c.field, c.rule)
			}
			if strings.Contains(string(got.body), "CANARY") {
				t.Errorf("a submitted value comes back: %s", got.body)
			}
		})
	}
}

func TestHugeAndDeepBodies(t *testing.T) {
	b := newBench(t)
	b.do(t, "POST", "/v1/sandboxes", `{"template":"`+strings.Repeat("a", 1<<20)+`"}`).refused(t, 413, "payload_too_large")
	b.do(t, "POST", "/v1/sandboxes", strings.Repeat("[", 33)+strings.Repeat("]", 33)).refused(t, 413, "payload_too_large")
	b.do(t, "POST", "/v1/sandboxes", strings.Repeat("[", 1<<20)).refused(t, 413, "payload_too_large")
	b.do(t, "POST", "/v1/sandboxes", strings.Repeat("[", 32)+strings.Repeat("]", 32)).refused(t, 400, "invalid_request")
	just := `{"template":"base","metadata":{}}`
	b.do(t, "POST", "/v1/sandboxes", just+strings.Repeat(" ", 1<<20-len(just))).into(t, 202, nil)
}

func TestRequestIDs(t *testing.T) {
	b := newBench(t)
	if got := b.do(t, "GET", "/v1/sandboxes", nil, "X-Request-Id", "mine-1").header.Get("X-Request-Id"); got != "mine-1" {
		t.Errorf("request id %q", got)
	}
	for _, bad := range []string{"with space", strings.Repeat("x", 129), "a\"b", "é"} {
		if got := b.do(t, "GET", "/v1/sandboxes", nil, "X-Request-Id", bad).header.Get("X-Request-Id"); got == bad || got == "" {
			t.Errorf("request id %q is echoed for %q", got, bad)
		}
	}
}

func TestRoutesOutside(t *testing.T) {
	b := newBench(t)
	for _, path := range []string{"/v1", "/v1/", "/v1/nothing", "/api/v1/nothing", "/v1/sandboxes/", "/v1//sandboxes", "/v1/sandboxes/../api-keys", "/v1/sandboxes//files"} {
		b.do(t, "GET", path, nil).refused(t, 404, "not_found")
	}
	for _, path := range []string{"/", "/sandboxes", "/v2/sandboxes", "/v10", "/api/v10", "/docs", "/schemas/Sandbox.json"} {
		got := b.do(t, "GET", path, nil)
		var e struct {
			Code    int
			Message string
		}
		got.into(t, 501, &e)
		if e.Code != 501 || e.Message == "" {
			t.Errorf("%s: %s", path, got.body)
		}
	}
	for _, path := range []string{"/openapi.yaml", "/openapi.json", "/healthz", "/readyz"} {
		b.do(t, "GET", path, nil, "Authorization", "").into(t, 200, nil)
		got := b.do(t, "POST", path, nil)
		if got.refused(t, 405, "invalid_request"); got.header.Get("Allow") != "GET, HEAD" {
			t.Errorf("%s: Allow %q", path, got.header.Get("Allow"))
		}
	}
	if got := b.do(t, "GET", "/openapi.yaml", nil); string(got.body) != string(b.server.OpenAPI()) {
		t.Error("another document is served")
	}
	b.do(t, "GET", "/api/v1/sandboxes", nil).into(t, 200, nil)
}

func TestUpcomingRoutes(t *testing.T) {
	b := newBench(t)
	for _, r := range upcoming() {
		path := b.fill(r.path)
		b.do(t, r.method, path, nil, "Authorization", "").refused(t, 401, "unauthorized")
		for _, q := range []string{"", "?any=1"} {
			if e := b.do(t, r.method, path+q, object{"any": 1}).refused(t, 412, "failed_precondition"); e.Details.Remediation == "" {
				t.Errorf("%s %s says nothing to do instead", r.method, path)
			}
		}
		if strings.Contains(string(b.server.OpenAPI()), "  "+r.path+":\n") && r.path != "/templates" {
			t.Errorf("%s is in the document", r.path)
		}
	}
	for _, field := range []string{"network", "network_credential_rules", "volumes"} {
		if e := b.do(t, "POST", "/v1/sandboxes", object{"template": "base", field: object{}}).refused(t, 412, "failed_precondition"); e.Details.Remediation == "" {
			t.Errorf("%s: no remediation", field)
		}
	}
}

func TestHosts(t *testing.T) {
	b := newBench(t, func(c *Config) { c.AllowedHosts = []string{"space.example.com:8443"} })
	for _, host := range []string{"localhost", "localhost:1", "127.0.0.1", "[::1]:80", "10.1.2.3:8080", "space.example.com", "SPACE.example.com:8443"} {
		b.do(t, "GET", "/v1/sandboxes", nil, "Host", host).into(t, 200, nil)
	}
	for _, host := range []string{"evil.example", "space.example.com.evil.example", "xspace.example.com", "127.0.0.1.evil.example"} {
		for _, path := range []string{"/v1/sandboxes", "/openapi.yaml", "/", "/v1/nothing"} {
			b.do(t, "GET", path, nil, "Host", host).refused(t, 403, "forbidden")
		}
	}
}

func TestPanicsAreAnswered(t *testing.T) {
	b := newBench(t)
	guests := b.Guests
	b.Guests = nil // the next use of a guest is a nil dereference
	defer func() { b.Guests = guests }()
	got := b.do(t, "GET", b.fill("/sandboxes/{id}/processes"), nil)
	if e := got.refused(t, 500, "internal"); strings.Contains(e.Message, "nil") {
		t.Errorf("the panic's text comes through: %s", e.Message)
	}
}

func TestErrorsOfTheControlPlane(t *testing.T) {
	b := newBench(t)
	conflict := sandbox.ConflictState("use", sandbox.StateCreating, true, sandbox.StateRunning)
	for _, c := range []struct {
		err    error
		status int
		code   string
	}{
		{sandbox.Errorf(sandbox.CodeConflict, "no"), 409, "conflict"},
		{conflict, 409, "conflict"},
		{sandbox.Errorf(sandbox.CodeIdempotencyConflict, "no"), 409, "idempotency_conflict"},
		{sandbox.Errorf(sandbox.CodeFailedPrecondition, "no"), 412, "failed_precondition"},
		{sandbox.Errorf(sandbox.CodePayloadTooLarge, "no"), 413, "payload_too_large"},
		{sandbox.Errorf(sandbox.CodeRateLimited, "no"), 429, "rate_limited"},
		{sandbox.Errorf(sandbox.CodeCapacityUnavailable, "no"), 503, "capacity_unavailable"},
		{sandbox.Errorf(sandbox.CodeServiceUnavailable, "no"), 503, "service_unavailable"},
		{http.ErrBodyNotAllowed, 500, "internal"},
	} {
		b.Fail("CreateSandbox", c.err)
		e := b.do(t, "POST", "/v1/sandboxes", object{"template": "base"}).refused(t, c.status, c.code)
		if c.code == "internal" && strings.Contains(e.Message, c.err.Error()) {
			t.Errorf("a foreign error's text comes through: %s", e.Message)
		}
	}
}

func TestReadiness(t *testing.T) {
	b := newBench(t)
	b.Fail("Ready", sandbox.Errorf(sandbox.CodeServiceUnavailable, "template base is being built (40 %%)"))
	if e := b.do(t, "GET", "/readyz", nil).refused(t, 503, "service_unavailable"); !strings.Contains(e.Message, "40 %") {
		t.Errorf("no progress in %q", e.Message)
	}
	b.Fail("Ready", http.ErrBodyNotAllowed)
	b.do(t, "GET", "/readyz", nil).refused(t, 503, "service_unavailable")
	b.do(t, "GET", "/healthz", nil).into(t, 200, nil)
}
