// Package dataplane is the listener that browsers and programs reach commands by: it streams a session's events and
// takes its input, terminal size and signals. Its only credential is the token of the session.
//
// A stream belongs to the goroutine of its request. One more goroutine per stream reads the guest and ends before the
// request does. The stream never ends because a node or a shim went away for a while: it asks the control plane for
// the guest again and goes on after the last event that it wrote, so that a client sees every event once and in
// order. Every write has a deadline, so a client that is gone or does not read frees what its stream holds; other
// readers and the process never notice.
//
// What ends a stream: the process's exit, a sandbox that is gone, failed or not running, a revoked key, an expired session, Drain, or a
// client that left. Whatever is not an exit is said in an `interrupted` event.
package dataplane
