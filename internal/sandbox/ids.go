package sandbox

import (
	"crypto/rand"
	"fmt"
	"strings"
)

// Identifiers are parsed types: a value of one of these types that came from Parse… or New… is safe to use in a
// file name. Each is a fixed prefix followed by 20 characters of [a-z0-9], about 103 bits of randomness.
type (
	// ID names a sandbox: `i` + 20 characters. IDs are never reused.
	ID string
	// OperationID names an operation: `op` + 20 characters.
	OperationID string
	// ProcessID names a process for ever within its sandbox: `p` + 20 characters.
	ProcessID string
	// SessionID names a command session: `cs` + 20 characters.
	SessionID string
	// KeyID names an API key (not the key itself): `k` + 20 characters.
	KeyID string
)

const (
	idAlphabet = "abcdefghijklmnopqrstuvwxyz0123456789"
	idLength   = 20
)

// NewID returns a fresh random sandbox ID.
func NewID() ID { return ID("i" + randomID()) }

// NewOperationID returns a fresh random operation ID.
func NewOperationID() OperationID { return OperationID("op" + randomID()) }

// NewProcessID returns a fresh random process ID.
func NewProcessID() ProcessID { return ProcessID("p" + randomID()) }

// NewSessionID returns a fresh random session ID.
func NewSessionID() SessionID { return SessionID("cs" + randomID()) }

// NewKeyID returns a fresh random key ID.
func NewKeyID() KeyID { return KeyID("k" + randomID()) }

// ParseID accepts exactly the form that NewID makes.
func ParseID(s string) (ID, error) { return parseID[ID]("sandbox", "i", s) }

// ParseOperationID accepts exactly the form that NewOperationID makes.
func ParseOperationID(s string) (OperationID, error) {
	return parseID[OperationID]("operation", "op", s)
}

// ParseProcessID accepts exactly the form that NewProcessID makes.
func ParseProcessID(s string) (ProcessID, error) { return parseID[ProcessID]("process", "p", s) }

// ParseSessionID accepts exactly the form that NewSessionID makes.
func ParseSessionID(s string) (SessionID, error) { return parseID[SessionID]("session", "cs", s) }

// ParseKeyID accepts exactly the form that NewKeyID makes.
func ParseKeyID(s string) (KeyID, error) { return parseID[KeyID]("key", "k", s) }

func randomID() string {
	out := make([]byte, 0, idLength)
	var buf [2 * idLength]byte
	for len(out) < idLength {
		_, _ = rand.Read(buf[:]) // never fails: crypto/rand aborts the program instead
		for _, b := range buf {
			// 252 is the largest multiple of 36 in a byte: values past it would favour the first letters.
			if b < 252 && len(out) < idLength {
				out = append(out, idAlphabet[b%36])
			}
		}
	}
	return string(out)
}

func parseID[T ~string](noun, prefix, s string) (T, error) {
	rest, ok := strings.CutPrefix(s, prefix)
	if !ok || len(rest) != idLength || strings.Trim(rest, idAlphabet) != "" {
		return "", fmt.Errorf("not a %s ID: want %q and %d characters of [a-z0-9]", noun, prefix, idLength)
	}
	return T(s), nil
}
