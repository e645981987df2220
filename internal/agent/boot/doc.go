// Package boot takes a guest from the initramfs to a running root: modules, disks, overlay, mounts, cgroups, network.
// It runs once, in PID 1, before anything else does.
//
// Concurrency: none; Run is called once. The control listener lives in a network namespace that only it holds open.
//
// Failures: any error is final. The caller prints it and resets the machine.
package boot
