// Package qmp is a small client of QEMU's machine protocol over a connected unix socket: commands with deadlines,
// descriptors sent along with them, and events.
//
// A Client owns its connection and one goroutine that reads it; Close ends both, and so does the peer's end. A
// Client is safe for concurrent use: commands carry identifiers, so a caller that gave up does not confuse the next
// one. What QEMU sends is not trusted: a line has a size limit, unknown identifiers are dropped, and a line that is
// no JSON object ends the connection, after which every call fails with an error that wraps ErrClosed.
package qmp
