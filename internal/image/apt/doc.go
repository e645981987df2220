// Package apt reads how this machine reaches the Debian archive, and downloads packages without touching the
// machine's own package state.
//
// Discover reads the configured sources (one-line and deb822) and keeps those of the Debian archive, moved to the
// wanted suite: their mirror, keyring and components. No host name is known to this package. Machines without a
// Debian source, such as Ubuntu, name a mirror in SPACE_DEBIAN_MIRROR.
//
// A State is a throw-away apt installation: own lists, cache and status, the machine's transport settings
// (proxies, certificates, retries) and credentials, none of its hooks. It needs no root.
//
// Concurrency: a State is for one goroutine; Discover and Settings are pure reads.
//
// Failures: a source that cannot be used is skipped with its reason; if none is left, the typed error says what is
// missing and how to add it.
package apt
