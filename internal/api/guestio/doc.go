// Package guestio is what both listeners do to a process of a guest: write its input, resize its terminal, send it
// a signal. It also gives long calls a deadline per step.
//
// It holds no state. Every call into a guest has a deadline and no lock is held across it. A failure leaves the guest
// as the error says: what was taken of an input is reported in the header Space-Stdin-Offset.
package guestio
