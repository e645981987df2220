// Package node knows the sandboxes of one machine. It answers space.node.v1.NodeService, passes the calls that a
// sandbox answers itself on to that sandbox's shim, unread, and answers from the journal for sandboxes whose shim
// is gone.
//
// The node owns its folder below the data folder (locked by one process at a time), the runtime folder with the
// shims' sockets, and its cgroup subtree; it never touches anything else. Shims outlive it: Close leaves bound
// sandboxes running, and the next Start adopts every living shim by boot ID, PID, start time and an answer on its
// socket. What has no record is swept, except when so much has none that the records must be the ones at fault.
//
// Creating and deleting run in goroutines of the node, not of the caller: a caller that goes away cuts nothing in
// half, and a repeat joins. One mutex guards the table of sandboxes; it is never held across a call to a shim, a
// file or a process. A record is on disk before an identity is given to a VM, and a tombstone before a record goes,
// so that after a crash at any step no ID runs twice and no older generation starts again.
package node
