// Package vmmtest is the conformance suite of the VMM seam: every vmm.Driver passes Run. It also holds what a driver
// needs to be tested: a guest kernel from the distribution's package, an initramfs with a small test guest, and
// Client, which talks to that guest by raw Ethernet frames over a VM's links.
//
// The suite starts real VMs. Test binaries that run it call confine.Main first in TestMain if their driver needs it.
package vmmtest
