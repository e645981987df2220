package wire

import (
	"net"
	"net/http"
	"net/netip"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/space-sandbox/space/internal/sandbox"
)

// PreferWait returns the wait preference of RFC 7240 in whole seconds, at most sandbox.MaxWaitS. A preference that is
// malformed is ignored, as the RFC asks for; the first one counts.
func PreferWait(h http.Header) (time.Duration, bool) {
	for _, line := range h.Values("Prefer") {
		for _, item := range strings.Split(line, ",") {
			name, value, _ := strings.Cut(item, "=")
			if !strings.EqualFold(strings.TrimSpace(name), "wait") {
				continue
			}
			value, _, _ = strings.Cut(value, ";")
			value = strings.Trim(strings.TrimSpace(value), `"`)
			if value == "" || strings.Trim(value, "0123456789") != "" {
				return 0, false
			}
			n, err := strconv.Atoi(value)
			if err != nil || n > sandbox.MaxWaitS { // Atoi fails here only for numbers that are too big
				n = sandbox.MaxWaitS
			}
			return time.Duration(n) * time.Second, true
		}
	}
	return 0, false
}

// IdempotencyKey returns the request's Idempotency-Key; empty if there is none.
func IdempotencyKey(h http.Header) (string, error) {
	values := h.Values("Idempotency-Key")
	if len(values) == 0 {
		return "", nil
	}
	key := values[0]
	if len(values) > 1 || key == "" || len(key) > sandbox.MaxIdempotencyKey {
		return "", sandbox.Invalid("Idempotency-Key", "length", "must be one value of 1 to %d bytes", sandbox.MaxIdempotencyKey)
	}
	for i := range len(key) {
		if key[i] < 0x20 || key[i] > 0x7e {
			return "", sandbox.Invalid("Idempotency-Key", "printable", "must be printable ASCII")
		}
	}
	return key, nil
}

// MaxPath is the kernel's PATH_MAX less its NUL.
const MaxPath = 4095

// CheckPath refuses what can never be a path in a guest.
func CheckPath(field string, path []byte) error {
	switch {
	case len(path) == 0:
		return sandbox.Invalid(field, "min_length", "must not be empty")
	case len(path) > MaxPath:
		return sandbox.Invalid(field, "max_length", "must be at most %d bytes", MaxPath)
	case strings.IndexByte(string(path), 0) >= 0:
		return sandbox.Invalid(field, "no_nul", "must not contain a NUL byte")
	}
	return nil
}

const hexDigits = "0123456789ABCDEF"

// EncodePath percent-encodes a path so that every byte survives; slashes and unreserved characters stay readable.
func EncodePath(path []byte) string {
	out := make([]byte, 0, len(path)+8)
	for _, b := range path {
		if b == '/' || b == '-' || b == '_' || b == '.' || b == '~' || b >= '0' && b <= '9' || b >= 'A' && b <= 'Z' || b >= 'a' && b <= 'z' {
			out = append(out, b)
		} else {
			out = append(out, '%', hexDigits[b>>4], hexDigits[b&15])
		}
	}
	return string(out)
}

// DecodePath undoes EncodePath. It accepts any byte unencoded but '%', which must start an escape.
func DecodePath(field, s string) ([]byte, error) {
	out := make([]byte, 0, len(s))
	for i := 0; i < len(s); i++ {
		if s[i] != '%' {
			out = append(out, s[i])
			continue
		}
		if i+2 >= len(s) {
			return nil, sandbox.Invalid(field, "percent_encoding", "ends within a percent escape")
		}
		n, err := strconv.ParseUint(s[i+1:i+3], 16, 8)
		if err != nil {
			return nil, sandbox.Invalid(field, "percent_encoding", "holds a percent sign that starts no escape")
		}
		out = append(out, byte(n))
		i += 2
	}
	return out, nil
}

// Lossy returns bytes as valid UTF-8; what is not becomes U+FFFD.
func Lossy(b []byte) string {
	if utf8.Valid(b) {
		return string(b)
	}
	return strings.ToValidUTF8(string(b), "\uFFFD")
}

// HostAllowed reports whether a Host header is one that this server is meant to be reached by. A name that an
// attacker controls and points at this server (DNS rebinding) is not. Addresses cannot be rebound, so they pass.
func HostAllowed(host string, allowed []string) bool {
	name := hostName(host)
	if name == "localhost" || strings.HasSuffix(name, ".localhost") {
		return true
	}
	if _, err := netip.ParseAddr(name); err == nil {
		return true
	}
	for _, a := range allowed {
		if name != "" && name == hostName(a) {
			return true
		}
	}
	return false
}

func hostName(host string) string {
	if name, _, err := net.SplitHostPort(host); err == nil {
		host = name
	}
	return strings.ToLower(strings.TrimSuffix(strings.Trim(host, "[]"), "."))
}

// LastEventID returns the event after which a stream is to go on; 0 is the beginning. The header wins over the query:
// a browser reconnects with the header to the URL it was first given.
func LastEventID(r *http.Request) (uint64, error) {
	value := r.Header.Get("Last-Event-ID")
	if value == "" {
		value = r.URL.Query().Get("last_event_id")
	}
	if value == "" {
		return 0, nil
	}
	n, err := strconv.ParseUint(value, 10, 64)
	if err != nil || strings.Trim(value, "0123456789") != "" {
		return 0, sandbox.Invalid("last_event_id", "integer", "must be the id of an event of this session")
	}
	return n, nil
}
