// Package proc identifies, watches and signals processes that this program may not have started.
//
// A process is named by boot ID, PID and start time, so that a PID used again is never taken for it, and signalled
// only through a pidfd that was checked against that name after it was opened. A Handle owns its pidfd and one
// goroutine; Close ends both, and so does the death of the process followed by Close. Handles are safe for
// concurrent use. No call here waits for another process, except receiving from Done.
package proc
