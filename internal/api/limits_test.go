package api

import (
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/danielgtaylor/huma/v2"

	"github.com/space-sandbox/space/internal/sandbox"
)

// bodies are the smallest good bodies of the routes that take one.
func (b *bench) bodies() map[string]object {
	b.Guests.PutFile("/a", []byte("a"), 0)
	return map[string]object{
		"createSandbox": {"template": "base"}, "updateSandbox": {}, "createCommand": {"argv": []any{"true"}},
		"signalProcess": {"signal": "SIGTERM"}, "resizeProcess": {"cols": 80, "rows": 24},
		"makeDirectory": {"path": "/d"}, "moveFile": {"from": "/a", "to": "/b"}, "copyFile": {"from": "/a", "to": "/b"},
		"createAPIKey": {"name": "ci", "scopes": []any{"files:read"}},
	}
}

// with returns a copy of body with one field set, or removed if v is absent.
func with(body object, field string, v any) object {
	out := maps.Clone(body)
	if out == nil {
		out = object{}
	}
	name, rest, nested := strings.Cut(field, ".")
	switch {
	case nested:
		inner, _ := out[name].(object)
		out[name] = with(inner, rest, v)
	case v == absent:
		delete(out, name)
	default:
		out[name] = v
	}
	return out
}

var absent = new(int)

func xs(n int) string { return strings.Repeat("x", n) }

// texts returns n different strings.
func texts(n int, format string) []any {
	out := make([]any, n)
	for i := range out {
		out[i] = fmt.Sprintf(format, i)
	}
	return out
}

func entries(n int) object {
	m := object{}
	for i := range n {
		m[fmt.Sprintf("K%d", i)] = "v"
	}
	return m
}

// limits lists, for each field, the last values that are taken and the first ones that are not.
var limits = []struct {
	route, field string
	good         []any
	bad          []any
	rule         string
	at           string // field that is blamed, if it is another
}{
	{"createSandbox", "template", nil, []any{absent}, "required", ""},
	{"createSandbox", "template", []any{"a", xs(128), xs(127) + ":" + xs(128), "a@sha256:" + strings.Repeat("0", 64), "org/a.b_c-d:V1_2"},
		[]any{"", xs(129), xs(120) + ":" + xs(129), "a@sha256:" + strings.Repeat("0", 63), "a@sha256:" + strings.Repeat("A", 64), "A", "-a", "a:", "a b", "a\n", "a:b:c", "../x", "a:-b"}, "pattern", ""},
	{"createSandbox", "template", nil, []any{xs(257)}, "max_length", ""},
	{"createSandbox", "environment", []any{"auto", "E0", "E1"}, []any{"", "e1", "E2"}, "enum", ""},
	{"createSandbox", "metadata", []any{object{}, entries(64)}, []any{entries(65)}, "max_properties", ""},
	{"createSandbox", "metadata", []any{object{xs(128): ""}, object{strings.Repeat("é", 64): ""}}, []any{object{"": "x"}, object{xs(129): ""}, object{strings.Repeat("é", 65): ""}}, "key_length", ""},
	{"createSandbox", "metadata.k", []any{"", xs(1024), strings.Repeat("é", 512)}, []any{xs(1025), strings.Repeat("é", 513)}, "max_length", ""},
	{"createSandbox", "metadata.k", nil, []any{"a\x00"}, "no_nul", ""},
	{"createSandbox", "metadata.k", nil, []any{nil, 1, true, object{}, []any{}}, "type", ""},
	{"createSandbox", "metadata", nil, []any{nil, "x", []any{}, 1}, "type", ""},
	{"createSandbox", "env", []any{object{}, entries(256)}, []any{entries(257)}, "max_properties", ""},
	{"createSandbox", "env", nil, []any{object{"": "x"}, object{"A=B": "x"}, object{"A\x00": "x"}}, "name", ""},
	{"createSandbox", "env.A", []any{xs(131069)}, []any{xs(131070)}, "max_length", ""},
	{"createSandbox", "env.A", nil, []any{"\x00"}, "no_nul", ""},
	{"createSandbox", "resources", nil, []any{nil, 1, []any{}}, "type", ""},
	{"createSandbox", "resources.vcpu", []any{1, 4294967295}, []any{0, -1}, "minimum", ""},
	{"createSandbox", "resources.vcpu", nil, []any{4294967296}, "maximum", ""},
	{"createSandbox", "resources.memory_mib", []any{1, 4294967295}, []any{0}, "minimum", ""},
	{"createSandbox", "resources.memory_mib", nil, []any{4294967296}, "maximum", ""},
	{"createSandbox", "resources.disk_mib", []any{1, 4294967295}, []any{0}, "minimum", ""},
	{"createSandbox", "resources.disk_mib", nil, []any{4294967296}, "maximum", ""},
	{"createSandbox", "resources.vcpu", nil, []any{nil, "1", true, 1.5, 1e300, json.RawMessage("9007199254740993e3"), []any{1}}, "type", ""},
	{"createSandbox", "lifecycle.idle_suspend_after_s", []any{nil, 1, 315360000}, []any{0, -1}, "minimum", ""},
	{"createSandbox", "lifecycle.idle_suspend_after_s", nil, []any{315360001}, "maximum", ""},
	{"createSandbox", "lifecycle.max_lifetime_s", []any{nil, 1, 315360000}, []any{0}, "minimum", ""},
	{"createSandbox", "lifecycle.max_lifetime_s", nil, []any{315360001}, "maximum", ""},
	{"createSandbox", "lifecycle.on_max_lifetime", []any{"delete", "suspend"}, []any{"", "Delete", "stop"}, "enum", ""},
	{"createSandbox", "lifecycle.auto_wake", []any{true, false}, []any{nil, "true", 0, 1}, "type", ""},
	{"updateSandbox", "metadata", []any{entries(64)}, []any{entries(65)}, "max_properties", ""},
	{"updateSandbox", "metadata.k", []any{xs(1024)}, []any{xs(1025)}, "max_length", ""},
	{"updateSandbox", "lifecycle.max_lifetime_s", []any{nil, 1}, []any{0}, "minimum", ""},
	{"createCommand", "argv", nil, []any{absent}, "required", ""},
	{"createCommand", "argv", []any{texts(4096, "%d")}, []any{texts(4097, "%d")}, "max_items", ""},
	{"createCommand", "argv", nil, []any{[]any{}}, "min_items", ""},
	{"createCommand", "argv", []any{[]any{xs(131071), xs(131071)}}, []any{[]any{xs(131071), xs(131071), ""}}, "max_bytes", ""},
	{"createCommand", "argv", nil, []any{nil, "true", object{}}, "type", ""},
	{"createCommand", "argv", []any{[]any{"a", ""}}, []any{[]any{"", "a"}}, "min_length", "argv[0]"},
	{"createCommand", "argv", nil, []any{[]any{"a", "b", "c\x00"}}, "no_nul", "argv[2]"},
	{"createCommand", "argv", nil, []any{[]any{"a", xs(131072)}, []any{"a", strings.Repeat("é", 65536)}}, "max_length", "argv[1]"},
	{"createCommand", "argv", nil, []any{[]any{"a", nil}, []any{"a", 1}, []any{"a", []any{"b"}}}, "type", "argv[1]"},
	{"createCommand", "env", []any{entries(256)}, []any{entries(257)}, "max_properties", ""},
	{"createCommand", "env", nil, []any{object{"A=": ""}}, "name", ""},
	{"createCommand", "cwd", []any{"/", xs(4095)}, []any{xs(4096), strings.Repeat("é", 2048)}, "max_length", ""},
	{"createCommand", "cwd", nil, []any{""}, "min_length", ""},
	{"createCommand", "cwd", nil, []any{"/\x00"}, "no_nul", ""},
	{"createCommand", "user", []any{"u", xs(256)}, []any{xs(257)}, "max_length", ""},
	{"createCommand", "user", nil, []any{""}, "min_length", ""},
	{"createCommand", "user", nil, []any{"root\x00"}, "no_nul", ""},
	{"createCommand", "stdin", []any{true, false}, []any{nil, 1, "true"}, "type", ""},
	{"createCommand", "pty", []any{nil, object{"cols": 1, "rows": 1}, object{"cols": 65535, "rows": 65535}}, []any{true, []any{}, 80}, "type", ""},
	{"createCommand", "pty", nil, []any{object{"cols": 0, "rows": 1}}, "minimum", "pty.cols"},
	{"createCommand", "pty", nil, []any{object{"cols": 1, "rows": 65536}}, "maximum", "pty.rows"},
	{"createCommand", "pty", nil, []any{object{"cols": 1}}, "required", "pty.rows"},
	{"createCommand", "pty", nil, []any{object{"cols": 1, "rows": 1, "Rows": 1}}, "unknown_field", "pty.Rows"},
	{"createCommand", "timeout_s", []any{nil, 1, 315360000}, []any{0, -5}, "minimum", ""},
	{"createCommand", "timeout_s", nil, []any{315360001}, "maximum", ""},
	{"createCommand", "timeout_s", nil, []any{0.5, "5", json.RawMessage("1e30")}, "type", ""},
	{"createCommand", "start", []any{"attach", "now"}, []any{"", "Now"}, "enum", ""},
	{"createCommand", "output_cap_bytes", []any{65536, 1 << 30}, []any{65535}, "minimum", ""},
	{"createCommand", "output_cap_bytes", nil, []any{1<<30 + 1}, "maximum", ""},
	{"signalProcess", "signal", nil, []any{absent}, "required", ""},
	{"signalProcess", "signal", []any{"SIGKILL", "SIGRTMIN+30"}, []any{"", "15", "TERM", "sigterm", "SIGTERM\n", "SIGRTMIN++1", "SIGRTMIN-1"}, "pattern", ""},
	{"signalProcess", "signal", nil, []any{"SIGNOPE", "SIGRTMIN+31"}, "signal", ""},
	{"signalProcess", "signal", nil, []any{nil, 15}, "type", ""},
	{"signalProcess", "target", []any{"process", "group"}, []any{"", "tree"}, "enum", ""},
	{"resizeProcess", "cols", []any{1, 65535}, []any{0, -1}, "minimum", ""},
	{"resizeProcess", "cols", nil, []any{65536}, "maximum", ""},
	{"resizeProcess", "rows", []any{1, 65535}, []any{0}, "minimum", ""},
	{"resizeProcess", "rows", nil, []any{65536}, "maximum", ""},
	{"resizeProcess", "rows", nil, []any{absent}, "required", ""},
	{"resizeProcess", "rows", nil, []any{nil, 2.5, "24"}, "type", ""},
	{"makeDirectory", "path", []any{"a", xs(4095)}, []any{xs(4096), strings.Repeat("é", 2048)}, "max_length", ""},
	{"makeDirectory", "path", nil, []any{absent}, "required", ""},
	{"makeDirectory", "path", nil, []any{""}, "min_length", ""},
	{"makeDirectory", "path", nil, []any{"a\x00b"}, "no_nul", ""},
	{"makeDirectory", "path_encoded", nil, []any{"/d"}, "exclusive", "path"},
	{"makeDirectory", "mode", []any{"000", "755", "7777"}, []any{"", "77", "0o755", "07777", "888", "-755", "755 "}, "pattern", ""},
	{"makeDirectory", "user", []any{"1000", xs(256)}, []any{xs(257)}, "max_length", ""},
	{"makeDirectory", "user", nil, []any{"\x00"}, "no_nul", ""},
	{"makeDirectory", "parents", []any{true}, []any{nil, "yes"}, "type", ""},
	{"moveFile", "from", nil, []any{absent}, "required", ""},
	{"moveFile", "to", nil, []any{absent}, "required", ""},
	{"moveFile", "to", nil, []any{xs(4096)}, "max_length", ""},
	{"moveFile", "to", nil, []any{"\x00"}, "no_nul", ""},
	{"moveFile", "to_encoded", nil, []any{"/b"}, "exclusive", "to"},
	{"moveFile", "from_encoded", nil, []any{"/b"}, "exclusive", "from"},
	{"moveFile", "recursive", nil, []any{true}, "unknown_field", ""},
	{"copyFile", "from", nil, []any{absent}, "required", ""},
	{"copyFile", "to", nil, []any{xs(4096)}, "max_length", ""},
	{"copyFile", "recursive", []any{true, false}, []any{1}, "type", ""},
	{"createAPIKey", "name", []any{"x", xs(128)}, []any{xs(129)}, "max_length", ""},
	{"createAPIKey", "name", nil, []any{""}, "min_length", ""},
	{"createAPIKey", "name", nil, []any{"a\x00"}, "no_nul", ""},
	{"createAPIKey", "name", nil, []any{absent}, "required", ""},
	{"createAPIKey", "scopes", nil, []any{[]any{}}, "min_items", ""},
	{"createAPIKey", "scopes", nil, []any{slices.Repeat([]any{"files:read"}, 65)}, "max_items", ""},
	{"createAPIKey", "scopes", nil, []any{[]any{"files:read", "*"}, []any{"files:read", "Files:Read"}}, "enum", "scopes[1]"},
	{"createAPIKey", "expires_at", []any{nil, "2099-01-01T00:00:00Z", "2099-01-01T00:00:00.123456789+14:00"}, []any{"2099-01-01", "soon", "", "2099-13-01T00:00:00Z", "2099-01-01 00:00:00Z"}, "date_time", ""},
	{"createAPIKey", "expires_at", nil, []any{"2001-01-01T00:00:00Z"}, "future", ""},
	{"createAPIKey", "sandbox_ids", []any{[]any{}, []any{"i0123456789abcdefghij"}}, []any{[]any{"x"}, []any{"i0123456789abcdefghijk"}, []any{"I0123456789abcdefghij"}}, "id", "sandbox_ids[0]"},
	{"createAPIKey", "sandbox_ids", nil, []any{slices.Repeat([]any{"i0123456789abcdefghij"}, 1001)}, "max_items", ""},
	{"createAPIKey", "metadata", []any{entries(64)}, []any{entries(65)}, "max_properties", ""},
}

func TestEveryLimitJustInsideAndOutside(t *testing.T) {
	b := newBench(t)
	bodies, routes := b.bodies(), map[string]*route{}
	for _, r := range b.server.table() {
		routes[r.id] = r
	}
	for i, c := range limits {
		t.Run(fmt.Sprintf("%d %s %s %s", i, c.route, c.field, c.rule), func(t *testing.T) {
			r := routes[c.route]
			send := func(v any) result {
				b.Guests.PutFile("/a", []byte("a"), 0) // moves take it away
				return b.do(t, r.method, b.fill(r.path), with(bodies[c.route], c.field, v))
			}
			for _, v := range c.good {
				if got := send(v); got.status >= 300 {
					t.Errorf("%.80v is refused: %d %s", v, got.status, got.body)
				}
			}
			at := c.at
			if at == "" {
				at = c.field
			}
			for _, v := range c.bad {
				e := send(v).refused(t, 400, "invalid_request")
				if len(e.Details.Violations) == 0 || e.Details.Violations[0].Field != at || e.Details.Violations[0].Rule != c.rule {
					t.Errorf("%.80v: %+v, want %s %s", v, e.Details.Violations, at, c.rule)
				}
			}
		})
	}
}

// TestEncodedPathsHaveTheSameLimits: what counts is the path, not how it is written.
func TestEncodedPathsHaveTheSameLimits(t *testing.T) {
	b := newBench(t)
	path := b.fill("/sandboxes/{id}/files/mkdir")
	b.do(t, "POST", path, object{"path_encoded": strings.Repeat("%ff", 4095)}).into(t, 200, nil)
	for rule, bad := range map[string]string{
		"max_length": strings.Repeat("x", 4096), "no_nul": "/a%00", "percent_encoding": "/a%f", "min_length": "",
	} {
		e := b.do(t, "POST", path, object{"path_encoded": bad}).refused(t, 400, "invalid_request")
		if v := e.Details.Violations[0]; v.Field != "path_encoded" || v.Rule != rule {
			t.Errorf("%s: %+v", rule, v)
		}
	}
	b.do(t, "POST", path, object{"path_encoded": strings.Repeat("%ff", 4095) + "x"}).refused(t, 400, "invalid_request")
}

// TestEveryBodyIsAsStrict sends the same malformed bodies to each route that takes JSON.
func TestEveryBodyIsAsStrict(t *testing.T) {
	b := newBench(t)
	bodies := b.bodies()
	for _, r := range b.server.table() {
		if r.body != bodyJSON {
			continue
		}
		good := string(mustMarshal(t, bodies[r.id]))
		for name, c := range map[string]struct{ body, field, rule string }{
			"empty":           {"", "body", "required"},
			"BOM":             {"\ufeff" + good, "body", "json"},
			"not UTF-8":       {strings.TrimSuffix(good, "}") + "\xff}", "body", "utf8"},
			"twice":           {good + good, "body", "json"},
			"null":            {"null", "body", "type"},
			"list":            {"[" + good + "]", "body", "type"},
			"text":            {`"x"`, "body", "type"},
			"unknown field":   {string(mustMarshal(t, with(bodies[r.id], "zzz", 1))), "zzz", "unknown_field"},
			"duplicate field": {`{"zzz":1,"zzz":1}`, "zzz", "duplicate_key"},
		} {
			e := b.do(t, r.method, b.fill(r.path), strings.NewReader(c.body), "Content-Type", "application/json").refused(t, 400, "invalid_request")
			if v := e.Details.Violations; len(v) == 0 || v[0].Field != c.field || v[0].Rule != c.rule {
				t.Errorf("%s, %s: %+v, want %s %s", r.id, name, v, c.field, c.rule)
			}
		}
		for field := range b.server.schemas.registry.Map()[reflect.TypeOf(r.request).Name()].Properties {
			for _, other := range []string{strings.ToUpper(field), strings.ToUpper(field[:1]) + field[1:]} {
				e := b.do(t, r.method, b.fill(r.path), with(bodies[r.id], other, "x")).refused(t, 400, "invalid_request")
				if v := e.Details.Violations[0]; v.Field != other || v.Rule != "unknown_field" {
					t.Errorf("%s takes %s for %s: %+v", r.id, other, field, v)
				}
			}
		}
		b.do(t, r.method, b.fill(r.path), strings.Repeat(`{"a":`, 33)+"1"+strings.Repeat("}", 33)).refused(t, 413, "payload_too_large")
	}
}

// TestBodiesWhereNoneIsMeant: routes without a body take nothing or an empty object.
func TestBodiesWhereNoneIsMeant(t *testing.T) {
	b := newBench(t)
	for _, r := range []struct{ method, path string }{
		{"POST", processPath + "/kill"}, {"POST", processPath + "/sessions"}, {"DELETE", "/sandboxes/{id}"}, {"DELETE", contentPath + "?path=/nothing"},
	} {
		for _, bad := range []string{"{", `{"a":1}`, "[]", "null", "{} {}", "x"} {
			if e := b.do(t, r.method, b.fill(r.path), bad).refused(t, 400, "invalid_request"); e.Details.Violations[0].Field != "body" {
				t.Errorf("%s %s: %+v", r.method, r.path, e.Details)
			}
		}
		if got := b.do(t, r.method, b.fill(r.path), " {} "); got.status == 400 {
			t.Errorf("%s %s refuses an empty object: %s", r.method, r.path, got.body)
		}
	}
}

func TestViolationsAreAllNamedInAStableOrder(t *testing.T) {
	b := newBench(t)
	body := object{"template": 1, "environment": "x", "b_unknown": 1, "a_unknown": 1, "resources": object{"vcpu": 0, "disk_mib": "x"}}
	want := []string{"a_unknown", "b_unknown", "environment", "resources.disk_mib", "resources.vcpu", "template"}
	for range 5 {
		var got []string
		for _, v := range b.do(t, "POST", "/v1/sandboxes", body).refused(t, 400, "invalid_request").Details.Violations {
			got = append(got, v.Field)
		}
		if !slices.Equal(got, want) {
			t.Fatalf("%v, want %v", got, want)
		}
	}
	many := object{"template": "base"}
	for i := range 500 {
		many[fmt.Sprintf("field%d", i)] = 1
	}
	if n := len(b.do(t, "POST", "/v1/sandboxes", many).refused(t, 400, "invalid_request").Details.Violations); n != maxViolations {
		t.Errorf("%d violations", n)
	}
}

// TestEveryParameterOfEveryRoute derives bad values of each query parameter from its schema.
func TestEveryParameterOfEveryRoute(t *testing.T) {
	each(t, func(t *testing.T, b *bench, r *route, path string) {
		base, required, _ := strings.Cut(path, "?")
		for _, p := range r.params {
			rest := required
			if p.Name == "path" {
				rest = ""
			}
			try := func(query, rule string) {
				t.Helper()
				e := b.do(t, r.method, base+"?"+strings.Trim(rest+"&"+query, "&"), r.sample()).refused(t, http.StatusBadRequest, "invalid_request")
				for _, v := range e.Details.Violations {
					if v.Field == p.Name && v.Rule == rule {
						return
					}
				}
				t.Errorf("%s: %+v, want %s %s", query, e.Details.Violations, p.Name, rule)
			}
			if p.Schema.Type == huma.TypeObject {
				continue // metadata[key], whose names differ
			}
			if p.Schema.Type != huma.TypeArray {
				try(p.Name+"=1&"+p.Name+"=1", "repeated")
			} else {
				try(p.Name+"=CANARY", "enum")
			}
			if p.Required {
				e := b.do(t, r.method, base, r.sample()).refused(t, 400, "invalid_request")
				if v := e.Details.Violations[0]; v.Field != p.Name || v.Rule != "required" {
					t.Errorf("%s is missing: %+v", p.Name, v)
				}
			}
			badValues(p, try)
		}
	})
}

func badValues(p *huma.Param, try func(query, rule string)) {
	switch p.Schema.Type {
	case huma.TypeInteger:
		for _, bad := range []string{"", "x", "-1", "%2B1", "1.0", "1e3", "0x1", "1_0", "%201", "99999999999999999999", "%D9%A7", "1%00"} {
			try(p.Name+"="+bad, "type")
		}
		if *p.Schema.Minimum > 0 {
			try(fmt.Sprintf("%s=%d", p.Name, int64(*p.Schema.Minimum)-1), "minimum")
		}
		if p.Schema.Maximum != nil && *p.Schema.Maximum < maxExact {
			try(fmt.Sprintf("%s=%d", p.Name, int64(*p.Schema.Maximum)+1), "maximum")
		}
	case huma.TypeBoolean:
		for _, bad := range []string{"", "1", "0", "True", "TRUE", "yes", "true%20"} {
			try(p.Name+"="+bad, "type")
		}
	case huma.TypeString:
		switch {
		case len(p.Schema.Enum) > 0:
			try(p.Name+"="+strings.ToUpper(fmt.Sprint(p.Schema.Enum[0])), "enum")
			try(p.Name+"=", "enum")
		case p.Schema.Pattern != "":
			try(p.Name+"=%20", "pattern")
		}
		if p.Schema.MinLength != nil && p.Schema.Pattern == "" {
			try(p.Name+"=", "min_length")
		}
		if p.Schema.MaxLength != nil {
			try(p.Name+"="+xs(*p.Schema.MaxLength+1), "max_length")
		}
	}
}

func TestMetadataFilters(t *testing.T) {
	b := newBench(t)
	for query, want := range map[string]map[string]string{
		"metadata[a]=": {"a": ""}, "metadata%5Ba%5D=b%26c": {"a": "b&c"}, "metadata[a[0]]=x": {"a[0]": "x"}, "metadata[a]=1&metadata[A]=2": {"a": "1", "A": "2"},
		"metadata[" + xs(128) + "]=" + xs(1024): {xs(128): xs(1024)},
	} {
		b.do(t, "GET", "/v1/sandboxes?"+query, nil).into(t, 200, nil)
		if got := b.Lists[len(b.Lists)-1].Metadata; !maps.Equal(got, want) {
			t.Errorf("%.60s: %.100v", query, got)
		}
	}
	many := make([]string, sandbox.MaxMetadata+1)
	for i := range many {
		many[i] = fmt.Sprintf("metadata[k%d]=v", i)
	}
	for query, field := range map[string]string{
		"metadata[]=x": "metadata", "metadata=x": "metadata", "metadata[a=x": "metadata[a", "metadata[a]=1&metadata[a]=2": "metadata[a]", "Metadata[a]=1": "Metadata[a]",
		"metadata[" + xs(129) + "]=x": "metadata", "metadata[a]=" + xs(1025): "metadata.a", "metadata[a]=%00": "metadata.a", strings.Join(many, "&"): "metadata",
	} {
		e := b.do(t, "GET", "/v1/sandboxes?"+query, nil).refused(t, 400, "invalid_request")
		if got := e.Details.Violations[0].Field; got != field {
			t.Errorf("%.60s: blames %q, want %q", query, got, field)
		}
	}
}
