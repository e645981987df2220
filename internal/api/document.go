package api

import (
	"encoding/json"
	"fmt"
	"net/http"
	"reflect"
	"sort"
	"strconv"
	"strings"

	"github.com/danielgtaylor/huma/v2"

	"github.com/space-sandbox/space/internal/api/wire"
	"github.com/space-sandbox/space/internal/sandbox"
)

// document is the OpenAPI document, rendered once.
type document struct{ yaml, json []byte }

const documentText = `The native API of SPACE, which runs untrusted code in microVMs.

Every answer that is not 2xx is an Error object; its code tells the class, details what to do. Unknown fields and
unknown query parameters are refused. Asynchronous verbs answer 202 at once; with the header "Prefer: wait=N" (N up to
60) they answer when the operation has ended. "Idempotency-Key" (1 to 255 printable bytes) on any POST, PUT or DELETE
makes a repeat safe for 24 hours: the answer is rebuilt from the current state and marked "Idempotent-Replayed: true".
The same paths are also served below /api/v1.

Events of a command are streamed by the data plane, at the events_url of a session: server-sent events, resumed with
Last-Event-ID.`

// describe makes the OpenAPI document of the routes and completes the schemas they are checked with.
func (s *Server) describe(table []*route) (document, error) {
	api := &huma.OpenAPI{
		OpenAPI:    "3.1.0",
		Info:       &huma.Info{Title: "SPACE", Version: s.cfg.Version, Description: documentText, License: &huma.License{Name: "Apache-2.0", Identifier: "Apache-2.0"}},
		Servers:    []*huma.Server{{URL: "/v1", Description: "This server"}, {URL: "/api/v1", Description: "Alias"}},
		Components: &huma.Components{Schemas: s.schemas.registry, SecuritySchemes: securitySchemes()},
		Security:   []map[string][]string{{"bearer": {}}, {"apiKey": {}}},
		Tags: []*huma.Tag{
			{Name: "sandboxes", Description: "Create, list, change and delete microVMs."},
			{Name: "processes", Description: "Run commands and talk to them."},
			{Name: "files", Description: "Read and write files, streamed."},
			{Name: "templates", Description: "What sandboxes start from."},
			{Name: "api-keys", Description: "Who may do what."},
		},
	}
	envelope := s.schemas.add(wire.Envelope{})
	for _, r := range table {
		if r.request != nil {
			r.schema = s.schemas.add(r.request)
		}
		api.AddOperation(s.operation(r, envelope))
	}
	s.schemas.finish()
	s.documentDetails()
	var out document
	var err error
	if out.yaml, err = api.YAML(); err != nil {
		return out, fmt.Errorf("render OpenAPI as YAML: %w", err)
	}
	if out.json, err = json.MarshalIndent(api, "", "  "); err != nil {
		return out, fmt.Errorf("render OpenAPI as JSON: %w", err)
	}
	return out, nil
}

func securitySchemes() map[string]*huma.SecurityScheme {
	return map[string]*huma.SecurityScheme{
		"bearer":  {Type: "http", Scheme: "bearer", Description: "API key as bearer token."},
		"apiKey":  {Type: "apiKey", In: "header", Name: "X-API-Key", Description: "API key in a header of its own."},
		"session": {Type: "http", Scheme: "bearer", Description: "Session token as bearer token, with the session's ID in the header " + sessionHeader + "."},
	}
}

// documentDetails describes the types of other packages, which carry no documentation tags.
func (s *Server) documentDetails() {
	text := map[string]map[string]string{
		"ErrorDetails": {
			"cause": "What is behind the error, as one word.", "remediation": "What to do next.",
			"violations": "What is wrong with the request, field by field.", "required_scope": "Scope that the API key lacks.",
			"state": "State that the sandbox is in.", "allowed_from": "States that the call is allowed from.",
		},
		"Violation": {
			"field": "Dotted path of the field, or the name of a parameter or header.", "rule": "Rule that is broken, short and stable.",
			"message": "What is wrong, for people; never the submitted value.",
		},
	}
	example := map[string]any{
		"cause": "not_found", "remediation": "use another name", "required_scope": "sandboxes:write", "state": "suspending",
		"allowed_from": []string{"running"}, "field": "argv[3]", "rule": "max_length", "message": "must be at most 131071 bytes",
	}
	for name, fields := range text {
		for field, doc := range fields {
			p := s.schemas.registry.Map()[name].Properties[field]
			p.Description = doc
			if v, ok := example[field]; ok {
				p.Examples = []any{v}
			}
		}
	}
}

func (s *Server) operation(r *route, envelope *huma.Schema) *huma.Operation {
	op := &huma.Operation{
		OperationID: r.id, Method: r.method, Path: r.path, Tags: []string{r.tag}, Summary: r.summary, Description: r.description,
		Responses: map[string]*huma.Response{},
	}
	op.Parameters = append(op.Parameters, pathParams(r.path)...)
	op.Parameters = append(op.Parameters, r.params...)
	op.Parameters = append(op.Parameters, headerParams(r)...)
	if r.session {
		op.Security = []map[string][]string{{"bearer": {}}, {"apiKey": {}}, {"session": {}}}
	}
	switch r.body {
	case bodyJSON:
		op.RequestBody = &huma.RequestBody{Required: true, Content: map[string]*huma.MediaType{"application/json": {Schema: r.schema}}}
	case bodyBytes, bodyInput:
		op.RequestBody = &huma.RequestBody{Description: "Any bytes, streamed.", Content: binaryContent()}
	}
	for _, a := range r.answers {
		resp := &huma.Response{Description: a.description, Headers: map[string]*huma.Param{"X-Request-Id": headerDoc("ID of the request.")}}
		switch {
		case a.body != nil:
			resp.Content = map[string]*huma.MediaType{"application/json": {Schema: s.schemas.registry.Schema(reflect.TypeOf(a.body), true, "")}}
		case r.binary && a.status != http.StatusNoContent:
			resp.Content = binaryContent()
		}
		op.Responses[strconv.Itoa(a.status)] = resp
	}
	for status, codes := range errorStatuses(r) {
		resp := &huma.Response{
			Description: strings.Join(codes, " or "),
			Headers:     map[string]*huma.Param{"X-Request-Id": headerDoc("ID of the request.")},
			Content:     map[string]*huma.MediaType{"application/json": {Schema: envelope}},
		}
		if status == http.StatusTooManyRequests || status == http.StatusServiceUnavailable || status == http.StatusConflict {
			resp.Headers["Retry-After"] = headerDoc("Seconds to wait, if the error is retryable.")
		}
		op.Responses[strconv.Itoa(status)] = resp
	}
	return op
}

func binaryContent() map[string]*huma.MediaType {
	return map[string]*huma.MediaType{"application/octet-stream": {Schema: &huma.Schema{Type: huma.TypeString, Format: "binary", Description: "Bytes as they are."}}}
}

func headerDoc(text string) *huma.Param {
	return &huma.Param{Description: text, Schema: &huma.Schema{Type: huma.TypeString}}
}

// errorStatuses groups the codes that a route can answer by status. Every route can answer the common ones.
func errorStatuses(r *route) map[int][]string {
	codes := append([]sandbox.Code{
		sandbox.CodeInvalidRequest, sandbox.CodeUnauthorized, sandbox.CodeForbidden, sandbox.CodeRateLimited,
		sandbox.CodeServiceUnavailable, sandbox.CodeInternal,
	}, r.errors...)
	if r.body == bodyJSON {
		codes = append(codes, sandbox.CodePayloadTooLarge)
	}
	out := map[int][]string{}
	for _, c := range codes {
		status := wire.Status(&sandbox.Error{Code: c})
		out[status] = append(out[status], string(c))
	}
	special := []int{http.StatusMethodNotAllowed, http.StatusNotAcceptable}
	if r.body == bodyJSON || r.body == bodyInput {
		special = append(special, http.StatusUnsupportedMediaType)
	}
	if r.id == "getFileContent" || r.id == "readOutput" {
		special = append(special, http.StatusRequestedRangeNotSatisfiable)
	}
	for _, status := range special {
		out[status] = []string{string(sandbox.CodeInvalidRequest)}
	}
	for _, list := range out {
		sort.Strings(list)
	}
	return out
}

func (s *Server) openapi(w *wire.Recorder, r *http.Request) {
	if !getOnly(w, r) {
		return
	}
	body, mediaType := s.doc.yaml, "application/yaml"
	if strings.HasSuffix(r.URL.Path, ".json") {
		body, mediaType = s.doc.json, "application/json"
	}
	w.Header().Set("Content-Type", mediaType)
	w.Header().Set("Content-Length", strconv.Itoa(len(body)))
	_, _ = w.Write(body) // the client may be gone
}

// OpenAPI returns the document as YAML.
func (s *Server) OpenAPI() []byte { return s.doc.yaml }
