// Package qemu is the VMM driver for QEMU's microvm machine, under KVM or TCG. It works with QEMU 7.2 and newer and
// asks what a build can do instead of comparing versions.
//
// A machine owns its process (through internal/vmm/confine), the host ends of its sockets and four goroutines: the
// reader of the QMP connection, one reader for each of the console and the VMM's messages, and one that waits for
// the death, after which it ends the others, closes everything and then Done. All descriptors QEMU has are given to
// it at birth: QMP, console, both network links and the guest's memory; there are no socket paths.
//
// Every call into QEMU has a deadline, so a VMM that hangs or is stopped blocks only calls about itself, and Close
// needs no answer from it. Nothing QEMU says is trusted beyond its own VM.
//
// Binaries that use this package must call confine.Main first in main.
package qemu
