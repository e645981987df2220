// Package cas is the content-addressed cache that data directories of one machine share: immutable blobs named by
// their SHA-256, and small records that say which blobs make up a thing (a template, a guest kernel, a disk image).
//
// Layout of a cache directory:
//
//	format               version of this layout; a newer one is refused
//	blobs/sha256/<hex>   content, mode 0444; only ever created by rename and removed by unlink, never written
//	records/<kind>/<key> JSON, committed after every blob it names
//	locks/<kind>-<key>   held exclusively by whoever builds that record
//	tmp/<name>           work of a build, tmp/<name>.lock is held while its owner lives
//
// Whatever is on its way to the cache is written below tmp, synced, renamed, and its folder synced, so that a crash
// leaves either all of it or nothing valid. Open removes the work of owners that have died.
//
// Concurrency: a Store is safe for concurrent use, and any number of processes may open one directory. Two callers
// of Obtain for one key, in one process or in two, build once. All locks are flock(2): the kernel ends them with
// their owner.
//
// Failures: a blob that is missing or has the wrong size makes its record invalid, which Obtain repairs by building
// again; the old content stays where it is until then. Verify compares whole contents. Nothing is removed that was
// ever valid, because sandboxes use layers by path: a cache is emptied by removing the directory while nothing runs.
// Callers cancel by context; nothing is committed after that.
package cas
