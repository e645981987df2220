// Package users reads the guest's user and group files. The guest's root may write anything into them, so they are
// read with a size limit and never waited for; lines that do not parse are passed over.
//
// Concurrency: a DB may be used by any number of goroutines; it caches what it read until the files change.
//
// Failures: ErrUnknown for a user that is not there; a missing or unreadable file is like an empty one.
package users
