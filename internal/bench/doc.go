// Package bench measures a running server through its API, as its clients see it. Run owns the sandboxes it makes and
// deletes them; it starts no server. A figure holds every sample, so that percentiles are exact. Samples are taken one
// after the other: what is measured is the time of one, not the throughput of many.
package bench
