// Package nodeclient reaches one node: over a unix socket, a network transport, or, in one process, through memory.
// A Client holds no state beyond the http.Client it was given, which the caller owns and closes. Safe for
// concurrent use. Errors are *connect.Error, as the node answered them.
package nodeclient
