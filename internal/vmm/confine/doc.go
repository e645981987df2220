// Package confine starts a program with as little of the host as it needs: the second half of the VMM seam's
// isolation, beside the hardware's (or the emulator's).
//
// The caller's own binary is run again as a stage in fresh mount, PID, network, IPC and UTS namespaces (and a user
// namespace when the caller is not root). The stage builds a root of read-only system folders, the given files and
// nothing else, drops every capability, takes the given user, sets no_new_privs and Landlock, closes every other
// descriptor and becomes the program. So a binary that calls Start must call Main first thing in main.
//
// Where the host refuses namespaces or lacks Landlock, the program still starts with what works, and Process.Gaps
// names what is missing: whether that is good enough is the caller's policy. Anything else that fails is an error;
// nothing is skipped silently.
//
// A Process owns one goroutine, locked to a thread, that starts the program and waits for it: the kernel ties the
// parent-death signal to that thread. The program therefore dies with its parent, whatever way that ends.
package confine
