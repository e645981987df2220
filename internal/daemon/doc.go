// Package daemon assembles `space up`: the native API and the data plane over the control plane, and a node, in one
// process. Shims are processes of their own and outlive it.
//
// Run owns everything it makes and ends it in the reverse order. The listeners come first, so that a port in use is
// an error at once and nothing else was touched; they are served last. Shutting down: streams are told that the server
// drains, running requests get Config.DrainTimeout, then control plane, node and store are closed. Sandboxes go on
// unless Config.StopSandboxes is set.
package daemon
