// Package npm downloads packages from the npm registry that this machine is configured for.
//
// Where an npm program is installed it does the work, with all its settings. Elsewhere a small client reads the same
// configuration (environment, then ~/.npmrc, then /etc/npmrc: registry, cafile, token) and does the three requests
// itself. Either way the archive must match the SHA-512 that the registry publishes.
//
// Concurrency: Pack calls are independent. Failures: a package or version that is not there is ErrNotFound; content
// with another digest is ErrIntegrity and nothing is left behind.
package npm
