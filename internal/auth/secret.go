package auth

import (
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/base64"
	"encoding/hex"
	"strings"
)

// The forms of secrets. API keys look the way E2B's SDKs demand.
const (
	keyPrefix     = "e2b_"
	keyBytes      = 20
	tokenPrefix   = "st_"
	tokenBytes    = 32
	visiblePrefix = 8 // characters of a key that its record shows
)

// NewSecret returns a fresh API key: e2b_ and 40 hex digits.
func NewSecret() string {
	var b [keyBytes]byte
	_, _ = rand.Read(b[:]) // never fails: crypto/rand aborts the program instead
	return keyPrefix + hex.EncodeToString(b[:])
}

// ValidSecret reports whether s has the form of an API key.
func ValidSecret(s string) bool {
	digits, ok := strings.CutPrefix(s, keyPrefix)
	return ok && len(digits) == 2*keyBytes && strings.Trim(digits, "0123456789abcdef") == ""
}

// SecretPrefix returns the part of a key that may be shown.
func SecretPrefix(secret string) string {
	return secret[:min(len(secret), visiblePrefix)]
}

// NewToken returns a fresh session token.
func NewToken() string {
	var b [tokenBytes]byte
	_, _ = rand.Read(b[:])
	return tokenPrefix + base64.RawURLEncoding.EncodeToString(b[:])
}

// Hash is what is stored of a key or token. They are random and long, so a plain hash is enough.
func Hash(secret string) [32]byte { return sha256.Sum256([]byte(secret)) }

// HashEqual compares the hash of secret with want in constant time.
func HashEqual(secret string, want [32]byte) bool {
	got := Hash(secret)
	return subtle.ConstantTimeCompare(got[:], want[:]) == 1
}
