// Package sqlite keeps the control plane's records in one SQLite database: the store.Store that needs nothing
// installed. It owns the database file, its schema (goose migrations, embedded) and the lock on its folder.
//
// Concurrency: one connection writes, every transaction on it is BEGIN IMMEDIATE, so writers queue in this process
// and never deadlock in SQLite; a pool of query-only connections reads snapshots beside it (WAL). Update must not be
// called from within Update: the inner one would wait for the outer one until its context ends.
//
// Failures: synchronous=FULL, so a committed transaction outlives a power cut. A full, broken or busy disk is
// store.ErrUnavailable and leaves nothing half written. A folder that another process has open is a *LockedError, a
// schema that a newer release wrote is a *SchemaError; both leave the database untouched.
package sqlite
