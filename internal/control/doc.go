// Package control is the control plane: it records intents and their operations in one transaction, drives nodes
// towards them, and repairs by periodic reconciliation whatever a crash left between two steps. Service is what the
// API and other front ends call; Plane implements it.
//
// # How a change happens
//
// A call writes the sandbox, its operation and its idempotency entry in one transaction, then pokes the worker of
// that sandbox. The worker reads what is to be done, does it on the node, and records the outcome in a second
// transaction that takes effect only if the operation is still the sandbox's own. Every call to a node can be
// repeated, so a worker that dies anywhere is simply started again: by the next poke, by the reconciler's next round,
// or by the reconciler of the next process.
//
// # Concurrency
//
// One goroutine per sandbox with work to do, at most Config.MaxParallel creates and as many deletes at a time; one
// watch and one sweep per node; one loop each for reconciliation, timers, keys, activity and cleaning. All belong to the Plane and end in Close.
// No lock is held across a call to a node, a guest or the store; every such call has a deadline.
//
// # Failures
//
// A node that cannot be reached is asked again with growing pauses: deletes for ever, creates until
// Config.CreateTimeout. A sandbox that its node reports failed, or no longer knows, becomes failed with the reason.
// What a node has and the store does not is deleted there, unless it is so much that the store must be the wrong one
// (a restored backup): then nothing is deleted and Ready says so. Errors are *sandbox.Error; those of guests are
// mapped by GuestError. Timers run on the monotonic clock of this process, seeded from the record: a jump of the wall
// clock expires nothing. Suspending does not exist yet, so idle_suspend_after_s is recorded and has no effect, and
// on_max_lifetime=suspend is refused.
package control
