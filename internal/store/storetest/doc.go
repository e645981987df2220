// Package storetest is the conformance suite of store.Store: one test for each sentence of the contract. An
// implementation runs it with Run; what only one database can do (its locks, its full disk) it tests itself.
//
// The suite owns nothing: every test opens a fresh store through the function it is given.
package storetest
