// Package vmm is the seam between a shim and the program that runs its virtual machine. Driver and VM are the
// contract; internal/vmm/qemu implements it, internal/vmm/vmmtest is the suite that every implementation passes.
//
// A VM belongs to the process that started it: it dies with that process, whatever way that process ends. Methods
// of one VM may be called from several goroutines; calls that change its run state are serialised by the driver.
// Nothing here talks to the guest's agent: a driver hands out the guest's two network links as framed byte streams
// and knows nothing of what they carry.
package vmm
