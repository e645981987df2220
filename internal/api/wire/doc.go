// Package wire is what the API listener and the data plane speak alike: the error envelope, request IDs, the guard
// around every handler, strict JSON, and the parsers of headers and paths that come from clients.
//
// Everything in it is stateless and safe for concurrent use. Nothing it writes to a client holds a submitted value or
// a secret; causes of errors go to the log only.
package wire
