// Package disk makes the files behind a sandbox's writable disk: a raw image that holds an empty ext4 file system,
// one per size, and for every generation of a sandbox an empty qcow2 image on top, which takes what is written.
//
// An image says nothing about what is below it: whoever opens it names the backing files. The header is written by
// this package, in well under a millisecond and without starting a program, because it is on the path of every
// create, wake and fork.
//
// Images are created and never written here again. Base images get mode 0444 and are only ever unlinked. The host
// does not mount, check or probe a file system that a guest could have written; of a qcow2 image only the first 32
// bytes are read, and treated as hostile.
//
// Concurrency: all functions may be called from several goroutines for different paths.
//
// Failures: nothing is left at the path of a call that failed. An existing path is an error, never overwritten.
package disk
