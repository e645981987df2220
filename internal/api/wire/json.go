package wire

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"strconv"
	"unicode/utf8"

	"github.com/space-sandbox/space/internal/sandbox"
)

// MaxJSON is the largest JSON body that is read.
const MaxJSON = 1 << 20

// MaxDepth is how deep objects and arrays may nest. No request of the API needs more than four levels.
const MaxDepth = 32

// ReadBody reads a body of at most limit bytes.
func ReadBody(r io.Reader, limit int64) ([]byte, error) {
	data, err := io.ReadAll(io.LimitReader(r, limit+1))
	if err != nil {
		return nil, sandbox.Errorf(sandbox.CodeInvalidRequest, "the request body was cut short").WithCause(err)
	}
	if int64(len(data)) > limit {
		return nil, tooLarge("the request body is larger than " + strconv.FormatInt(limit, 10) + " bytes")
	}
	return data, nil
}

func tooLarge(message string) *sandbox.Error {
	return sandbox.Errorf(sandbox.CodePayloadTooLarge, "%s", message)
}

// ParseJSON parses one JSON value the strict way: valid UTF-8, no duplicate keys, bounded depth, nothing behind it.
// Numbers become float64 as with encoding/json.
func ParseJSON(data []byte) (any, error) {
	if !utf8.Valid(data) {
		return nil, sandbox.Invalid("body", "utf8", "must be valid UTF-8")
	}
	p := parser{dec: json.NewDecoder(bytes.NewReader(data))}
	v, err := p.value("", 0)
	if err == nil {
		if _, more := p.dec.Token(); !errors.Is(more, io.EOF) {
			err = sandbox.Invalid("body", "json", "must be one JSON value with nothing behind it")
		}
	}
	return v, err
}

type parser struct{ dec *json.Decoder }

func (p parser) value(path string, depth int) (any, error) {
	token, err := p.dec.Token()
	if err != nil {
		return nil, malformed(err)
	}
	delim, ok := token.(json.Delim)
	if !ok {
		return token, nil
	}
	if depth >= MaxDepth {
		return nil, tooLarge("the JSON nests deeper than " + strconv.Itoa(MaxDepth) + " levels")
	}
	if delim == '{' {
		return p.object(path, depth+1)
	}
	list := []any{}
	for p.dec.More() {
		v, err := p.value(path+"["+strconv.Itoa(len(list))+"]", depth+1)
		if err != nil {
			return nil, err
		}
		list = append(list, v)
	}
	_, err = p.dec.Token()
	return list, malformed(err)
}

func (p parser) object(path string, depth int) (any, error) {
	object := map[string]any{}
	for p.dec.More() {
		token, err := p.dec.Token()
		if err != nil {
			return nil, malformed(err)
		}
		key, _ := token.(string) // the decoder accepts nothing else here
		at := Join(path, key)
		if _, ok := object[key]; ok {
			return nil, sandbox.Invalid(at, "duplicate_key", "is given twice")
		}
		if object[key], err = p.value(at, depth); err != nil {
			return nil, err
		}
	}
	_, err := p.dec.Token()
	return object, malformed(err)
}

// malformed hides the decoder's message: it can quote the input.
func malformed(err error) error {
	if err == nil {
		return nil
	}
	return sandbox.Invalid("body", "json", "must be well-formed JSON").WithCause(err)
}

// maxFieldName bounds what of a client's key is repeated in the path of a violation.
const maxFieldName = 128

// Join appends a key to the dotted path of a field. Keys that are long or hold control characters are left out.
func Join(path, key string) string {
	if len(key) > maxFieldName || key == "" {
		key = "…"
	}
	for _, r := range key {
		if r < 0x20 || r == 0x7f {
			key = "…"
			break
		}
	}
	if path == "" {
		return key
	}
	return path + "." + key
}
