// Package creds runs functions with one user's rights to files, on one OS thread.
//
// The kernel keeps credentials per thread. Do pins a thread, gives it the user's groups, fsgid and fsuid and takes
// its capabilities away, calls the function and undoes it all. A thread that cannot be restored is ended with its
// goroutine rather than given back to the scheduler, so no other goroutine ever runs with foreign rights.
//
// Concurrency: Do may be called by any number of goroutines. The function must not start goroutines that use files.
//
// Failures: Do fails without calling the function when the rights cannot be taken on. A process that is not root runs
// the function with its own rights if they are the user's, and fails otherwise.
package creds
