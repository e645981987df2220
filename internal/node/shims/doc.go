// Package shims starts, adopts, talks to and ends shim processes. A shim is one VM: the process, its folder below
// the node's shims folder, its socket in the short runtime folder, and its cgroup belong together.
//
// A Shim owns the holds on its process and its VMM and the connections to its socket. Release gives these up and
// leaves the shim running, for the next node service to adopt; Destroy ends it and removes all that it had, and
// may be repeated until it succeeds. Every call to a shim has a deadline and holds no lock, so that a stopped shim
// blocks nothing but calls about itself. Shims are safe for concurrent use.
package shims
