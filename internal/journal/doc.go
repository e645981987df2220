// Package journal keeps the events of a sandbox's processes on disk, so that output outlives every connection,
// the node service and the VM itself.
//
// A Journal is a folder. Each process has a folder in it, named by its ID, with its record (`process`) and its
// segments (`<first event ID>.seg`). A segment is a run of records: length, CRC-32C, event ID, kind, payload. Event
// IDs of a process start at 1, grow by one and are never used twice.
//
// The contract:
//   - A record is in the file (write(2)) before any reader sees it and before Append… returns.
//   - It is fsynced within a second, and an exit record before AppendExited returns.
//   - A torn tail left by a crash is cut when the journal is opened. Damage elsewhere is found by its checksum and
//     becomes a resync_required event or ErrCorrupt, never wrong bytes.
//   - Each process keeps at most its cap of output, the sandbox at most Options.SandboxCap bytes on disk; beyond
//     that the oldest segments go and readers that needed them are told what is missing.
//
// Concurrency: a Journal and its Processes are safe for concurrent use. One goroutine uses a Reader. Readers wait
// on a channel that every append closes: they neither poll nor hold up the writer. The folder has one writing
// Journal, guarded by a lock file; any number of read-only ones may be open beside it.
//
// Locks are taken in this order: Journal.capMu, Process.wmu (held over write(2)), Process.mu (never held over I/O
// other than unlink), Journal.mu.
package journal
