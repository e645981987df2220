// Package floor measures what a sandbox cannot be faster than on this machine: a VM that is restored from the same warm
// snapshot as a node's sandboxes by the same driver, confined in the same way, and spoken to over its control link by
// nothing but this package. There is no node, no shim, no journal, no store and no HTTP server of ours between them.
//
// A Floor owns a folder for its VMs and the snapshot's memory; it only reads the node's data folder, which must be kept
// while it is open. A VM owns its process, its links and its connections, and is used by one goroutine. Everything takes
// a context, and no call outlives it. A program that uses this package must call confine.Main first in its main.
package floor
