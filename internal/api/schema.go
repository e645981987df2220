package api

import (
	"fmt"
	"math"
	"reflect"
	"regexp"
	"slices"
	"sort"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/danielgtaylor/huma/v2"

	"github.com/space-sandbox/space/internal/api/wire"
	"github.com/space-sandbox/space/internal/sandbox"
)

const schemaPrefix = "#/components/schemas/"

// schemas knows the shape of every type of the API and checks values against it. It is filled by newSchemas and only
// read afterwards, which is what makes it safe for concurrent use.
type schemas struct {
	registry huma.Registry
	patterns map[string]*regexp.Regexp
}

// add registers the type of v with everything it refers to.
func (s *schemas) add(v any) *huma.Schema {
	return s.registry.Schema(reflect.TypeOf(v), true, "")
}

// schemaName names the types of other packages by what they are to a client.
func schemaName(t reflect.Type, hint string) string {
	switch name := huma.DefaultSchemaNamer(t, hint); name {
	case "Envelope":
		return "Error"
	case "Details":
		return "ErrorDetails"
	default:
		return name
	}
}

func newSchemas() *schemas {
	return &schemas{registry: huma.NewMapRegistry(schemaPrefix, schemaName), patterns: map[string]*regexp.Regexp{}}
}

// finish makes the schemas say what the API does: lists are never null, pointers without omitempty can be, structs
// included. It also compiles the patterns. Called once, after the last add.
func (s *schemas) finish() {
	for name, schema := range s.registry.Map() {
		s.finishType(schema, s.registry.TypeFromRef(schemaPrefix+name))
	}
}

func (s *schemas) finishType(schema *huma.Schema, t reflect.Type) {
	for _, f := range reflect.VisibleFields(t) {
		name, options, _ := strings.Cut(f.Tag.Get("json"), ",")
		property := schema.Properties[name]
		if property == nil {
			continue
		}
		s.compile(property)
		if property.Type == huma.TypeArray {
			property.Nullable = false
			s.compile(property.Items)
			continue
		}
		if property.Format == "int32" && property.Minimum != nil {
			property.Format = "int64" // unsigned 32-bit numbers do not fit int32
		}
		if f.Type.Kind() != reflect.Pointer || strings.Contains(options, "omitempty") || f.Tag.Get("nullable") == "false" {
			continue
		}
		property.Nullable = property.Ref == ""
		if property.Ref != "" {
			schema.Properties[name] = &huma.Schema{
				Description: property.Description,
				AnyOf:       []*huma.Schema{{Ref: property.Ref}, {Type: "null"}},
			}
		}
	}
}

func (s *schemas) compile(schema *huma.Schema) {
	if schema != nil && schema.Pattern != "" {
		s.patterns[schema.Pattern] = regexp.MustCompile(schema.Pattern)
	}
}

// maxViolations bounds the answer to a body that is wrong all over.
const maxViolations = 20

// checker collects what is wrong with one value.
type checker struct {
	*schemas
	found []sandbox.Violation
}

func (c *checker) add(path, rule, format string, args ...any) {
	if path == "" {
		path = "body"
	}
	if len(c.found) < maxViolations {
		c.found = append(c.found, sandbox.Violation{Field: path, Rule: rule, Message: fmt.Sprintf(format, args...)})
	}
}

func (c *checker) err() error {
	if len(c.found) == 0 {
		return nil
	}
	return sandbox.InvalidAll(c.found)
}

// check compares a parsed JSON value with its schema.
func (c *checker) check(schema *huma.Schema, path string, v any) {
	for schema.Ref != "" {
		schema = c.registry.SchemaFromRef(schema.Ref)
	}
	if len(schema.AnyOf) > 0 { // only made by finishType: a type, or null
		if v != nil {
			c.check(schema.AnyOf[0], path, v)
		}
		return
	}
	if v == nil && schema.Nullable {
		return
	}
	switch schema.Type {
	case huma.TypeObject:
		c.object(schema, path, v)
	case huma.TypeArray:
		c.array(schema, path, v)
	case huma.TypeString:
		c.text(schema, path, v)
	case huma.TypeInteger:
		c.integer(schema, path, v)
	case huma.TypeBoolean:
		if _, ok := v.(bool); !ok {
			c.add(path, "type", "must be a boolean")
		}
	}
}

func (c *checker) object(schema *huma.Schema, path string, v any) {
	object, ok := v.(map[string]any)
	if !ok {
		c.add(path, "type", "must be an object")
		return
	}
	if schema.MaxProperties != nil && len(object) > *schema.MaxProperties {
		c.add(path, "max_properties", "must have at most %d entries", *schema.MaxProperties)
		return
	}
	for _, name := range schema.Required {
		if _, ok := object[name]; !ok {
			c.add(wire.Join(path, name), "required", "is required")
		}
	}
	values, _ := schema.AdditionalProperties.(*huma.Schema)
	names := make([]string, 0, len(object))
	for name := range object {
		names = append(names, name)
	}
	sort.Strings(names) // so that equal requests get equal answers
	for _, name := range names {
		property := schema.Properties[name]
		if property == nil {
			property = values
		}
		if property == nil {
			c.add(wire.Join(path, name), "unknown_field", "is no field of this object")
			continue
		}
		c.check(property, wire.Join(path, name), object[name])
	}
}

func (c *checker) array(schema *huma.Schema, path string, v any) {
	list, ok := v.([]any)
	if !ok {
		c.add(path, "type", "must be an array")
		return
	}
	if schema.MinItems != nil && len(list) < *schema.MinItems {
		c.add(path, "min_items", "must have at least %d item(s)", *schema.MinItems)
	}
	if schema.MaxItems != nil && len(list) > *schema.MaxItems {
		c.add(path, "max_items", "must have at most %d items", *schema.MaxItems)
		return
	}
	for i, item := range list {
		c.check(schema.Items, fmt.Sprintf("%s[%d]", path, i), item)
	}
}

func (c *checker) text(schema *huma.Schema, path string, v any) {
	s, ok := v.(string)
	switch {
	case !ok:
		c.add(path, "type", "must be a string")
	case schema.MinLength != nil && utf8.RuneCountInString(s) < *schema.MinLength:
		c.add(path, "min_length", "must have at least %d character(s)", *schema.MinLength)
	case schema.MaxLength != nil && utf8.RuneCountInString(s) > *schema.MaxLength:
		c.add(path, "max_length", "must have at most %d characters", *schema.MaxLength)
	case schema.Pattern != "" && !c.patterns[schema.Pattern].MatchString(s):
		c.add(path, "pattern", "must be %s", schema.PatternDescription)
	case schema.Format == "date-time" && !isTime(s):
		c.add(path, "date_time", "must be an RFC 3339 time")
	case len(schema.Enum) > 0 && !slices.Contains(schema.Enum, any(s)):
		c.add(path, "enum", "must be one of %s", words(schema.Enum))
	}
}

func isTime(s string) bool {
	_, err := time.Parse(time.RFC3339Nano, s)
	return err == nil
}

func words(list []any) string {
	out := make([]string, len(list))
	for i, v := range list {
		out[i] = fmt.Sprint(v)
	}
	return strings.Join(out, ", ")
}

// maxExact is the largest integer that a JSON number carries exactly everywhere.
const maxExact = 1 << 53

func (c *checker) integer(schema *huma.Schema, path string, v any) {
	n, ok := v.(float64)
	switch {
	case !ok || n != math.Trunc(n) || math.Abs(n) > maxExact:
		c.add(path, "type", "must be an integer")
	case schema.Minimum != nil && n < *schema.Minimum:
		c.add(path, "minimum", "must be at least %d", int64(*schema.Minimum))
	case schema.Maximum != nil && n > *schema.Maximum:
		c.add(path, "maximum", "must be at most %d", int64(*schema.Maximum))
	}
}
