// Package api is the native HTTP API, version 1: it turns requests into calls of control.Service and of a sandbox's
// guest, and answers in the shapes of the committed OpenAPI document (api/openapi.yaml).
//
// It owns the routes, the shapes of requests and answers with their limits, and the document. Huma's schema and
// document types describe each shape once, from the Go types; the same schemas refuse what does not fit. The
// transport is the package's own, because requests are taken more strictly than Huma's handlers do: exact letter
// case, no duplicate keys, no unknown fields or query parameters, one error envelope on every answer, no submitted
// value in any error, and bodies of files that are streamed and never held.
//
// A Server keeps no state but counters of running requests, so any number of them can serve one control plane. It is
// safe for concurrent use. Streams and long waits end when the client leaves and when Drain is called. A failure in
// the middle of a streamed answer cuts the connection, so that a part is never taken for the whole.
package api
