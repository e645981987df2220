// Package agent is the guest's side of space.agent.v1: it serves the agent, process and file services over one
// listener and owns what the guest is as a whole: its token, generation, clock, identity, and whether it is frozen.
//
// A Server starts frozen: no process runs before the first successful Resume.
//
// Concurrency: all handlers may run at once. Freeze and Resume exclude each other; the process table holds the gate
// that keeps processes from starting while frozen.
//
// Failures: a failed Resume leaves user processes frozen and the old token valid; the caller destroys the VM.
package agent
