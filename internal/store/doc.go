// Package store is the seam between the control plane and its database. Store is the contract;
// internal/store/sqlite implements it, internal/store/storetest is the suite that every implementation passes.
//
// A mutation of the API is one transaction: Tx groups the record, its operation and its idempotency entry, so a
// crash leaves all of them or none. Nothing outside an implementation knows SQL, and no method offers what only
// one database can do. All methods are safe for concurrent use.
package store
