// Package image owns the images that sandboxes start from: the cache they live in and the builder of the template
// `base`.
//
// Base is Debian 12 with bash, Python, Node.js, git and the usual tools, made from packages by mmdebstrap and from
// the npm registry, through whatever mirrors this machine is configured with. mmdebstrap's tar is filtered, completed
// and turned into one read-only ext4 layer while it is written: no root file system is kept, and nothing that must
// differ between machines (machine-id, host keys) gets in. It works as root, and without root where user namespaces
// and subordinate IDs are there.
//
// Concurrency: a Cache is safe for concurrent use and may be shared by processes; of several callers of Base one
// builds. Progress is called from the goroutine of the call. A cancelled context ends every program that was started.
//
// Failures: what a person must fix (a missing program, no Debian source) is a failed_precondition with its remedy;
// the rest is wrapped. An interrupted build leaves nothing valid behind, and its remains go at the next Open.
package image
