// Package auth decides who a request acts for and what it may do: API keys, scopes, limits, session tokens, and the
// admin key of a new deployment. Secrets are stored as SHA-256 hashes and compared in constant time; they are never
// logged and no error holds one.
//
// Principals are immutable after they were made. Keys is the one mutable thing here: it caches lookups for at most
// CacheTTL and tells streams when their key ends; its mutex is never held while the store is called. Its owner calls
// Poll at least every PollEvery, which bounds how long a revocation made by another process stays unseen: CacheTTL
// and PollEvery are both below the promised five seconds.
//
// Failures: an unknown, expired or revoked key is unauthorized and the three cannot be told apart; a store that
// cannot be asked is service_unavailable, never "allowed".
package auth
