package api

import (
	"bytes"
	"encoding/json"
	"flag"
	"os"
	"strings"
	"sync"
	"testing"

	"github.com/space-sandbox/space/internal/api/apitest"
)

var update = flag.Bool("update", false, "write api/openapi.yaml anew")

const golden = "../../api/openapi.yaml"

func TestOpenAPIIsCommitted(t *testing.T) {
	s, err := New(Config{Service: apitest.New(), Version: "1"})
	if err != nil {
		t.Fatal(err)
	}
	if *update {
		if err := os.WriteFile(golden, s.OpenAPI(), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(want, s.OpenAPI()) {
		t.Error("api/openapi.yaml differs from what the server serves: go test ./internal/api -run OpenAPI -update")
	}
}

// node is a part of the rendered document.
type object = map[string]any

// renderOnce makes the document once for all tests, which only read it.
var renderOnce = sync.OnceValues(func() (doc object, err error) {
	svc := apitest.New()
	defer svc.Close()
	s, err := New(Config{Service: svc, Version: "1"})
	if err == nil {
		err = json.Unmarshal(s.doc.json, &doc)
	}
	return doc, err
})

func rendered(t *testing.T) object {
	t.Helper()
	doc, err := renderOnce()
	if err != nil {
		t.Fatal(err)
	}
	return doc
}

// TestDocumentIsComplete holds every schema to the same bar: typed, described, with an example, no open objects but
// maps of strings, no $schema.
func TestDocumentIsComplete(t *testing.T) {
	doc := rendered(t)
	schemas := doc["components"].(object)["schemas"].(object)
	if len(schemas) < 25 {
		t.Errorf("only %d schemas", len(schemas))
	}
	for name, v := range schemas {
		schema := v.(object)
		if schema["type"] != "object" || schema["additionalProperties"] != false {
			t.Errorf("%s is no closed object", name)
		}
		for field, v := range schema["properties"].(object) {
			if field == "$schema" {
				t.Errorf("%s has $schema", name)
			}
			checkProperty(t, name+"."+field, v.(object))
		}
	}
	if bytes.Contains(mustMarshal(t, doc), []byte("$schema")) {
		t.Error("the document mentions $schema")
	}
}

func checkProperty(t *testing.T, name string, p object) {
	t.Helper()
	if p["description"] == nil && p["$ref"] == nil {
		t.Errorf("%s has no description", name)
	}
	switch {
	case p["$ref"] != nil, p["anyOf"] != nil:
	case p["type"] == nil:
		t.Errorf("%s has no type", name)
	case p["type"] == "object":
		if values, ok := p["additionalProperties"].(object); !ok || values["type"] != "string" {
			t.Errorf("%s is an open object", name)
		}
	case p["type"] == "array":
		if items := p["items"].(object); items["type"] == nil && items["$ref"] == nil {
			t.Errorf("%s has items without a type", name)
		}
	case p["examples"] == nil:
		t.Errorf("%s has no example", name)
	}
}

func TestOperationsAreDescribed(t *testing.T) {
	for path, item := range rendered(t)["paths"].(object) {
		for method, v := range item.(object) {
			op := v.(object)
			where := strings.ToUpper(method) + " " + path
			if op["summary"] == nil || op["operationId"] == nil || len(op["tags"].([]any)) != 1 {
				t.Errorf("%s lacks summary, operationId or tag", where)
			}
			answers := op["responses"].(object)
			for _, status := range []string{"400", "401", "403", "405", "406", "429", "500", "503"} {
				if answers[status] == nil {
					t.Errorf("%s does not document %s", where, status)
				}
			}
			params, _ := op["parameters"].([]any)
			for _, p := range params {
				if p.(object)["description"] == nil || p.(object)["schema"] == nil {
					t.Errorf("%s: parameter %v is not described", where, p.(object)["name"])
				}
			}
		}
	}
}

func mustMarshal(t *testing.T, v any) []byte {
	t.Helper()
	b, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return b
}
