// Package shimtest is a shim without a VM, for tests of what starts and talks to shims. It is the test's own binary
// started a second time: a real process with a real child in place of the VMM, so that signals, deaths, sockets and
// adoption are the real ones.
package shimtest
