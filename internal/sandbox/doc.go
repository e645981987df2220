// Package sandbox holds the nouns of SPACE: identifiers, states and their transitions, records, limits, and the
// typed error that every layer returns at its edge. It is pure: no I/O, no goroutines, no other package of ours.
//
// All values are plain data and safe to copy; nothing here is guarded by a lock.
package sandbox
