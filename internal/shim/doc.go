// Package shim is one sandbox: the program that owns its VMM, its control link and its journal.
//
// Run reads spec.json from the shim's folder, notes its own identity in pid.json, and then either captures a
// template (MODE_CAPTURE) or serves (MODE_RESTORE): it restores the snapshot, checks the agent, stops the VM again
// (ARMED) and waits for Bind, which gives the VM an identity exactly once. From then on it serves SandboxService
// and FileService, until Shutdown.
//
// Ownership: Run owns everything; nothing outlives it. `machine` owns the VM and the control link, `table` the
// goroutines that carry process output to the journal (one per started process), `server` the HTTP server and the
// order of life and death.
//
// Concurrency: no lock is held across a call into the guest, a VMM call or disk I/O of the journal, and each of
// these has a deadline. So a stopped or hostile guest delays only the calls that need it. Transitions (restore,
// bind, shutdown) are serialised by a one-slot semaphore that is waited for with a context; Shutdown cancels the
// transition under way first.
//
// Failure: fail closed. Any error before RUNNING destroys the VM, is reported as FAILED, and ends the shim. The
// death of the VM later makes the shim FAILED, with open streams ended by `interrupted`; its journal can be read
// until Shutdown. If the shim dies, its VMM dies with it and the node serves the journal from disk.
package shim
