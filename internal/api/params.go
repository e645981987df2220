package api

import (
	"net/http"
	"strconv"
	"strings"

	"github.com/danielgtaylor/huma/v2"

	"github.com/space-sandbox/space/internal/sandbox"
)

func ptr[T any](v T) *T { return &v }

func indexed(field string, i int) string { return field + "[" + strconv.Itoa(i) + "]" }

func query(name, doc string, schema *huma.Schema, example any) *huma.Param {
	return &huma.Param{Name: name, In: "query", Description: doc, Schema: schema, Example: example}
}

func textParam(name, doc string, maxLength int, example string) *huma.Param {
	return query(name, doc, &huma.Schema{Type: huma.TypeString, MinLength: ptr(1), MaxLength: ptr(maxLength)}, example)
}

func intParam(name, doc string, low, high float64, def any) *huma.Param {
	p := query(name, doc, &huma.Schema{Type: huma.TypeInteger, Format: "int64", Minimum: &low, Default: def}, int64(low))
	if high > 0 {
		p.Schema.Maximum = &high
	}
	return p
}

func boolParam(name, doc string) *huma.Param {
	return query(name, doc, &huma.Schema{Type: huma.TypeBoolean, Default: false}, true)
}

func enumParam(name, doc string, values ...string) *huma.Param {
	schema := &huma.Schema{Type: huma.TypeString, Default: values[0]}
	for _, v := range values {
		schema.Enum = append(schema.Enum, v)
	}
	return query(name, doc, schema, values[0])
}

func required(p *huma.Param) *huma.Param {
	p.Required = true
	return p
}

func pathParam() *huma.Param {
	// Emptiness, length in bytes and NUL are checked by hand, since a path is bytes and need not be UTF-8.
	p := query("path", "Path in the sandbox; percent-encode any byte. Relative paths begin at the user's home.",
		&huma.Schema{Type: huma.TypeString}, "/home/user/main.py")
	return required(p)
}

func userParam() *huma.Param {
	return textParam("user", "Name or uid whose rights are used; default: the template's user.", 256, "user")
}

func modeParam() *huma.Param {
	p := textParam("mode", "Permission bits in octal; default: those of the file replaced, else 0644.", 4, "0644")
	p.Schema = &huma.Schema{Type: huma.TypeString, Pattern: modePattern, PatternDescription: "octal permission bits"}
	return p
}

const modePattern = "^[0-7]{3,4}$"

func limitParam() *huma.Param {
	return intParam("limit", "How many items to answer at most.", 1, sandbox.MaxPageLimit, sandbox.DefaultPageLimit)
}

func cursorParam() *huma.Param {
	return query("cursor", "next_cursor of the page before; empty: the first page.",
		&huma.Schema{Type: huma.TypeString, MaxLength: ptr(8192)}, "")
}

func waitParam(what string) *huma.Param {
	return intParam("wait", "Seconds to wait for "+what+" before answering.", 0, sandbox.MaxWaitS, 0)
}

func stateParam() *huma.Param {
	items := &huma.Schema{Type: huma.TypeString}
	for _, s := range []sandbox.State{
		sandbox.StateCreating, sandbox.StateRunning, sandbox.StatePausing, sandbox.StatePaused, sandbox.StateSuspending,
		sandbox.StateSuspended, sandbox.StateWaking, sandbox.StateDeleting, sandbox.StateDeleted, sandbox.StateFailed,
	} {
		items.Enum = append(items.Enum, string(s))
	}
	p := query("state", "Only sandboxes in one of these states (repeat the parameter); default: all but deleted.",
		&huma.Schema{Type: huma.TypeArray, Items: items}, []string{"running"})
	p.Style, p.Explode = "form", ptr(true)
	return p
}

func metadataParam() *huma.Param {
	p := query("metadata", "Only sandboxes with this metadata: metadata[key]=value.",
		&huma.Schema{Type: huma.TypeObject, AdditionalProperties: &huma.Schema{Type: huma.TypeString}}, map[string]string{"team": "research"})
	p.Style, p.Explode = "deepObject", ptr(true)
	return p
}

// pathParams describes the variables of a path.
func pathParams(path string) []*huma.Param {
	var out []*huma.Param
	for _, segment := range strings.Split(path, "/") {
		name, ok := strings.CutPrefix(segment, "{")
		if !ok {
			continue
		}
		name = strings.TrimSuffix(name, "}")
		doc, example := "ID of the sandbox.", "i3k9x0a7c2m5q8w1z4b6n"
		switch {
		case name == "pid":
			doc, example = "ID of the process.", "p3k9x0a7c2m5q8w1z4b6n"
		case name == "name":
			doc, example = "Name of the template, with :tag unless it is latest.", "base"
		case strings.HasPrefix(path, "/operations"):
			doc, example = "ID of the operation.", "op3k9x0a7c2m5q8w1z4b6n"
		case strings.HasPrefix(path, "/api-keys"):
			doc, example = "ID of the key's record.", "k3k9x0a7c2m5q8w1z4b6n"
		}
		out = append(out, &huma.Param{Name: name, In: "path", Required: true, Description: doc, Example: example, Schema: &huma.Schema{Type: huma.TypeString}})
	}
	return out
}

// headerParams describes the headers that a route takes.
func headerParams(r *route) []*huma.Param {
	header := func(name, doc, example string) *huma.Param {
		return &huma.Param{Name: name, In: "header", Description: doc, Example: example, Schema: &huma.Schema{Type: huma.TypeString}}
	}
	out := []*huma.Param{header("X-Request-Id", "ID of the request, echoed; one is made if there is none.", "req-4b1f9a0c6e2d")}
	if r.method != http.MethodGet && r.method != http.MethodPatch {
		out = append(out, header("Idempotency-Key", "Makes a repeat safe for 24 hours.", "3f0c7c1e-8f0a-4d0a-9c55-5b8f6d7b1a11"))
	}
	if r.waits && r.method != http.MethodGet {
		out = append(out, header("Prefer", "wait=N: answer when the operation has ended, or after N seconds (at most 60).", "wait=30"))
	}
	if r.method == http.MethodPatch {
		out = append(out, header("If-Match", "etag of the version to change; another version answers failed_precondition.", `"3"`))
	}
	if r.id == "getFileContent" {
		out = append(out, header("Range", "One range of bytes.", "bytes=0-1023"))
	}
	if r.session {
		out = append(out, header(sessionHeader, "ID of the session, if its token is sent instead of an API key.", "cs3k9x0a7c2m5q8w1z4b6n"))
	}
	return out
}
