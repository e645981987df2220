package api

import (
	"fmt"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/space-sandbox/space/internal/sandbox"
)

// operations calls fn for each operation of the document.
func operations(t *testing.T, doc object, fn func(where string, op object)) {
	t.Helper()
	n := 0
	for path, item := range doc["paths"].(object) {
		for method, v := range item.(object) {
			fn(strings.ToUpper(method)+" "+path, v.(object))
			n++
		}
	}
	if n == 0 {
		t.Fatal("no operations")
	}
}

// TestDocumentAndRouterAgree: what is served is documented and the other way round.
func TestDocumentAndRouterAgree(t *testing.T) {
	b, doc := newBench(t), rendered(t)
	served := map[string]bool{}
	for _, r := range b.server.table() {
		served[r.method+" "+r.path] = true
	}
	operations(t, doc, func(where string, op object) {
		if !served[where] {
			t.Errorf("%s is documented and not served", where)
		}
		delete(served, where)
		if op["operationId"] == "" {
			t.Errorf("%s has no operationId", where)
		}
	})
	for where := range served {
		t.Errorf("%s is served and not documented", where)
	}
	for _, r := range upcoming() {
		item, _ := doc["paths"].(object)[r.path].(object)
		if item[strings.ToLower(r.method)] != nil {
			t.Errorf("%s %s is not there yet and documented", r.method, r.path)
		}
	}
}

func TestOperationIDsAreUniqueAndPlain(t *testing.T) {
	seen, plain := map[string]string{}, regexp.MustCompile(`^[a-z][A-Za-z]+$`)
	operations(t, rendered(t), func(where string, op object) {
		id := op["operationId"].(string)
		if other := seen[id]; other != "" {
			t.Errorf("%s and %s are both %s", other, where, id)
		}
		if !plain.MatchString(id) {
			t.Errorf("%s: %q makes no name in a generated client", where, id)
		}
		seen[id] = where
	})
}

// TestEveryErrorIsDocumented: each code that a route names appears under its status, as the one envelope.
func TestEveryErrorIsDocumented(t *testing.T) {
	b := newBench(t)
	ops := map[string]object{}
	operations(t, rendered(t), func(where string, op object) { ops[where] = op })
	for _, r := range b.server.table() {
		where := r.method + " " + r.path
		answers := ops[where]["responses"].(object)
		codes := append([]sandbox.Code{sandbox.CodeInvalidRequest, sandbox.CodeUnauthorized, sandbox.CodeForbidden, sandbox.CodeRateLimited,
			sandbox.CodeServiceUnavailable, sandbox.CodeInternal}, r.errors...)
		status := map[sandbox.Code]string{
			"invalid_request": "400", "unauthorized": "401", "forbidden": "403", "not_found": "404", "conflict": "409", "idempotency_conflict": "409",
			"failed_precondition": "412", "payload_too_large": "413", "rate_limited": "429", "capacity_unavailable": "503", "service_unavailable": "503", "internal": "500",
		}
		for _, code := range codes {
			answer, _ := answers[status[code]].(object)
			if answer == nil || !slices.Contains(strings.Split(answer["description"].(string), " or "), string(code)) {
				t.Errorf("%s does not document %s under %s", where, code, status[code])
			}
		}
		if strings.Contains(r.path, "{") && answers["404"] == nil {
			t.Errorf("%s has a variable and no 404", where)
		}
		for number, v := range answers {
			checkAnswer(t, where+" "+number, number, v.(object))
		}
	}
}

func checkAnswer(t *testing.T, where, number string, answer object) {
	t.Helper()
	headers, _ := answer["headers"].(object)
	if headers["X-Request-Id"] == nil {
		t.Errorf("%s does not name X-Request-Id", where)
	}
	n, err := strconv.Atoi(number)
	if err != nil {
		t.Errorf("%s: no status", where)
	}
	if n < 400 {
		return
	}
	content, _ := answer["content"].(object)
	media, _ := content["application/json"].(object)
	if schema, _ := media["schema"].(object); len(content) != 1 || schema["$ref"] != "#/components/schemas/Error" {
		t.Errorf("%s is not the Error object: %v", where, content)
	}
	if (headers["Retry-After"] != nil) != (n == 409 || n == 429 || n == 503) {
		t.Errorf("%s: Retry-After is documented: %v", where, headers["Retry-After"] != nil)
	}
}

// TestEnvelopeEnumHasEveryCode compares the document with the codes of the contract.
func TestEnvelopeEnumHasEveryCode(t *testing.T) {
	schema := rendered(t)["components"].(object)["schemas"].(object)["Error"].(object)
	var got []string
	for _, v := range schema["properties"].(object)["code"].(object)["enum"].([]any) {
		got = append(got, v.(string))
	}
	var want []string
	for _, c := range []sandbox.Code{
		sandbox.CodeInvalidRequest, sandbox.CodeUnauthorized, sandbox.CodeForbidden, sandbox.CodeNotFound, sandbox.CodeConflict, sandbox.CodeIdempotencyConflict,
		sandbox.CodeFailedPrecondition, sandbox.CodePayloadTooLarge, sandbox.CodeRateLimited, sandbox.CodeCapacityUnavailable, sandbox.CodeServiceUnavailable, sandbox.CodeInternal,
	} {
		want = append(want, string(c))
	}
	slices.Sort(got)
	slices.Sort(want)
	if !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
	required := fmt.Sprint(schema["required"])
	for _, field := range []string{"code", "message", "request_id", "details", "retryable"} {
		if !strings.Contains(required, field) {
			t.Errorf("%s is not required: %s", field, required)
		}
	}
}

// TestOnlyTheAllowedMapsAreOpen: everything else is a closed object.
func TestOnlyTheAllowedMapsAreOpen(t *testing.T) {
	allowed := map[string]bool{"metadata": true, "env": true}
	var walk func(at string, v any)
	walk = func(at string, v any) {
		switch v := v.(type) {
		case object:
			if v["type"] == "object" && v["additionalProperties"] != false {
				name := at[strings.LastIndexByte(at, '/')+1:]
				if values, _ := v["additionalProperties"].(object); !allowed[name] || values["type"] != "string" {
					t.Errorf("%s is open", at)
				}
			}
			for k, inner := range v {
				walk(at+"/"+k, inner)
			}
		case []any:
			for i, inner := range v {
				walk(at+"/"+strconv.Itoa(i), inner)
			}
		}
	}
	walk("", rendered(t)["components"].(object)["schemas"])
}

// TestReferencesLeadSomewhere follows each $ref, and asks that each schema is used.
func TestReferencesLeadSomewhere(t *testing.T) {
	doc := rendered(t)
	schemas := doc["components"].(object)["schemas"].(object)
	used := map[string]bool{}
	for _, m := range regexp.MustCompile(`"\$ref":"#/components/schemas/([^"]+)"`).FindAllStringSubmatch(string(mustMarshal(t, doc)), -1) {
		used[m[1]] = true
		if schemas[m[1]] == nil {
			t.Errorf("%s is referred to and not there", m[1])
		}
	}
	for name := range schemas {
		if !used[name] {
			t.Errorf("%s is not used", name)
		}
	}
}

// TestExamplesFitTheirSchemas checks every example and default with the checker that refuses requests.
func TestExamplesFitTheirSchemas(t *testing.T) {
	b, doc := newBench(t), rendered(t)
	n := 0
	for name, v := range doc["components"].(object)["schemas"].(object) {
		schema := b.server.schemas.registry.Map()[name]
		for field, p := range v.(object)["properties"].(object) {
			values, _ := p.(object)["examples"].([]any)
			if def, ok := p.(object)["default"]; ok {
				values = append(values, def)
			}
			for _, value := range values {
				n++
				check := &checker{schemas: b.server.schemas}
				check.check(schema.Properties[field], field, value)
				if err := check.err(); err != nil {
					t.Errorf("%s.%s: %v does not fit: %v", name, field, value, err)
				}
			}
		}
	}
	if n < 100 {
		t.Errorf("only %d examples", n)
	}
}

// TestParameterExamplesAreTaken sends the example of each query parameter to its route.
func TestParameterExamplesAreTaken(t *testing.T) {
	each(t, func(t *testing.T, b *bench, r *route, _ string) {
		for _, p := range r.params {
			check := &checker{schemas: b.server.schemas}
			for _, value := range []any{p.Example, p.Schema.Default} {
				switch v := value.(type) {
				case nil:
				case []string:
					for _, s := range v {
						check.parameter(p.Schema, p.Name, s)
					}
				case map[string]string:
					for k := range v {
						if r.param(p.Name+"["+k+"]") != p {
							t.Errorf("%s[%s] is not known", p.Name, k)
						}
					}
				default:
					check.parameter(p.Schema, p.Name, fmt.Sprint(v))
				}
			}
			if err := check.err(); err != nil {
				t.Errorf("%s: %v", p.Name, err)
			}
		}
	})
}

// TestPathVariablesAreParameters: each {variable} is documented once, required, and nothing else claims to be one.
func TestPathVariablesAreParameters(t *testing.T) {
	variable := regexp.MustCompile(`\{([a-z]+)\}`)
	operations(t, rendered(t), func(where string, op object) {
		var want, got []string
		for _, m := range variable.FindAllStringSubmatch(where, -1) {
			want = append(want, m[1])
		}
		seen := map[string]bool{}
		params, _ := op["parameters"].([]any)
		for _, v := range params {
			p := v.(object)
			key := fmt.Sprint(p["in"], " ", p["name"])
			if seen[key] {
				t.Errorf("%s: %s is there twice", where, key)
			}
			seen[key] = true
			if p["in"] == "path" {
				got = append(got, p["name"].(string))
				if p["required"] != true {
					t.Errorf("%s: %s is not required", where, p["name"])
				}
			}
		}
		if !slices.Equal(got, want) {
			t.Errorf("%s: variables %v", where, got)
		}
	})
}

// TestHeadersAreDocumentedWhereTheyWork ties the documented headers to what the routes do with them.
func TestHeadersAreDocumentedWhereTheyWork(t *testing.T) {
	b := newBench(t)
	ops := map[string]object{}
	operations(t, rendered(t), func(where string, op object) { ops[where] = op })
	for _, r := range b.server.table() {
		has := map[string]bool{}
		for _, v := range ops[r.method+" "+r.path]["parameters"].([]any) {
			if p := v.(object); p["in"] == "header" {
				has[p["name"].(string)] = true
			}
		}
		for name, want := range map[string]bool{
			"X-Request-Id": true, "Idempotency-Key": r.method == "POST" || r.method == "PUT" || r.method == "DELETE", "If-Match": r.method == "PATCH",
			"Prefer": r.id == "createSandbox" || r.id == "deleteSandbox", "Range": r.id == "getFileContent", sessionHeader: r.session,
		} {
			if has[name] != want {
				t.Errorf("%s: %s documented: %v", r.id, name, has[name])
			}
		}
	}
}

// TestSecurityOfTheDocument: only the routes that take a session's token say so.
func TestSecurityOfTheDocument(t *testing.T) {
	doc := rendered(t)
	schemes := doc["components"].(object)["securitySchemes"].(object)
	if schemes["bearer"].(object)["scheme"] != "bearer" || schemes["apiKey"].(object)["name"] != "X-API-Key" {
		t.Errorf("schemes %v", schemes)
	}
	if got := string(mustMarshal(t, doc["security"])); got != `[{"bearer":[]},{"apiKey":[]}]` {
		t.Errorf("default security %s", got)
	}
	var session []string
	operations(t, doc, func(_ string, op object) {
		if op["security"] == nil {
			return
		}
		if !strings.Contains(string(mustMarshal(t, op["security"])), `"session"`) {
			t.Errorf("%v weakens the security", op["operationId"])
		}
		session = append(session, op["operationId"].(string))
	})
	slices.Sort(session)
	if want := []string{"resizeProcess", "signalProcess", "writeStdin"}; !slices.Equal(session, want) {
		t.Errorf("session tokens at %v, want %v", session, want)
	}
}

// TestAnswersFitTheDocument holds real answers to the schemas they are documented with.
func TestAnswersFitTheDocument(t *testing.T) {
	b := newBench(t)
	b.Guests.PutFile("/f", []byte("x"), 0)
	bodies := b.bodies()
	checked := 0
	for _, r := range b.server.table() {
		if r.method == "DELETE" || r.binary || r.id == "getOperation" {
			continue
		}
		b.Guests.PutFile("/a", []byte("a"), 0) // moves take it away
		path := b.fill(r.path)
		if r.param("path") != nil {
			path += "?path=/f"
		}
		var body any
		if r.body == bodyJSON {
			body = bodies[r.id]
		}
		got := b.do(t, r.method, path, body)
		if got.status >= 300 {
			t.Errorf("%s: %d %s", r.id, got.status, got.body)
			continue
		}
		if checkDocumented(t, b, r, got) {
			checked++
		}
	}
	if checked < 15 {
		t.Errorf("only %d answers were checked", checked)
	}
}

// checkDocumented reports whether the answer had a body to check.
func checkDocumented(t *testing.T, b *bench, r *route, got result) bool {
	t.Helper()
	i := slices.IndexFunc(r.answers, func(a answer) bool { return a.status == got.status })
	if i < 0 {
		t.Errorf("%s answers %d, which is not documented", r.id, got.status)
		return false
	}
	if r.answers[i].body == nil {
		if len(got.body) > 0 {
			t.Errorf("%s answers %q where nothing is documented", r.id, got.body)
		}
		return false
	}
	var v any
	got.into(t, got.status, &v)
	check := &checker{schemas: b.server.schemas}
	check.check(b.server.schemas.registry.Map()[reflect.TypeOf(r.answers[i].body).Name()], "", v)
	if err := check.err(); err != nil {
		// What the fake leaves empty fits no enum; every other rule holds.
		for _, violation := range sandbox.AsError(err).Details.Violations {
			if violation.Rule != "enum" {
				t.Errorf("%s: %+v in %s", r.id, violation, got.body)
			}
		}
	}
	return true
}
