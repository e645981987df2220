// Package files is the agent's file service: it works on the guest's files with one user's rights.
//
// Concurrency: calls are independent. Each runs the parts that name files under creds.Do; a file that is open is read
// and written with the agent's own thread, as the kernel checked the rights when it was opened. Read and Write streams
// are counted, and too many open ones are refused.
//
// Failures: Connect errors with a FileError. A Write that ends before its commit leaves nothing behind. Nothing here
// waits for a pipe's other end longer than a few seconds.
package files
