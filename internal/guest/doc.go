// Package guest makes what a microVM boots: Debian's cloud kernel and an initramfs of the guest agent and the kernel
// modules it loads.
//
// The kernel package is downloaded through a throw-away apt state and unpacked, never installed, and kept in the
// image cache; with the cache filled nothing here uses the network. The initramfs is written by this package (newc),
// bit for bit the same for the same agent and kernel:
//
//	/init            the agent
//	/modules.list    absolute paths of the modules every guest needs, in load order, one a line
//	/modules.extra   the same for what workloads may want (nfs, fuse, tun, nf_tables, inet_diag), dependencies first
//	/lib/modules/<version>/kernel/...  the modules, uncompressed
//
// Concurrency: Build may be called from several goroutines and processes; one of them builds.
//
// Failures: a kernel package without a needed module fails the build by name. Nothing is cached unless it is whole.
package guest
