// Package apitest is a control plane and a guest in memory, for tests of the listeners. The guest is served over a
// real connection, so that streams, cuts and cancellations behave as with a node.
//
// A Service is safe for concurrent use. Close ends its guest's server.
package apitest
