// Package local joins a node with the parts that make sandboxes on this machine: the template cache, the guest
// kernel, disk images and a VMM driver. It is apart from package node so that the node's tests need none of them.
// It holds no state of its own; the cache stays its opener's to close.
package local
