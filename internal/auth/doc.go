// Package auth decides who a request acts for and what it may do: API keys, scopes, limits, session tokens.
// Secrets are stored as SHA-256 hashes and compared in constant time; they are never logged. Values are immutable
// after they were made and safe for concurrent use.
package auth
