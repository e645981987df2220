// Package archive answers the reading half of space.node.v1.SandboxService from a journal: for the living shim
// (Reading) and, once the shim is dead, for the node (Archive).
//
// It owns no goroutine. Each call uses its own journal.Reader, so slow callers hold up nobody. An Archive owns the
// read-only journal it opened; Close it when the sandbox is deleted.
package archive
