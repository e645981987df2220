package qemu

import (
	"encoding/json"
	"fmt"
	"strconv"

	"github.com/space-sandbox/space/internal/vmm"
)

// Descriptors QEMU is born with.
const (
	qmpFD = 3 + iota
	workloadFD
	controlFD
	consoleFD
	memoryFD
)

const filterOptions = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"

// arguments is the machine: all that must be equal between capture and restore. memory is its memory object.
func arguments(cfg vmm.Config, memory string) []string {
	accel, cpu := "tcg,thread=multi,tb-size=64", "max,-erms,-fsrm" // unbounded, the translation cache grows to 200 MiB
	if cfg.Acceleration == vmm.KVM {
		accel, cpu = "kvm", "host"
	}
	args := []string{
		"-M", "microvm,memory-backend=m", "-accel", accel, "-cpu", cpu,
		"-smp", strconv.FormatUint(uint64(cfg.VCPU), 10),
		"-m", strconv.FormatUint(uint64(cfg.MemoryMiB), 10) + "M", "-object", memory,
		"-chardev", "socket,id=console,fd=" + strconv.Itoa(consoleFD), "-serial", "chardev:console",
		"-no-reboot",
		// The state then holds no names of the machine type, which differ between versions without a reason.
		"-global", "migration.send-configuration=off",
	}
	for i, d := range cfg.Disks {
		args = append(args, diskArguments(i, d)...)
	}
	args = append(args, linkArguments("workload", workloadFD, vmm.WorkloadMAC)...)
	args = append(args, linkArguments("control", controlFD, vmm.ControlMAC)...)
	return append(args, "-object", "rng-random,id=rng,filename=/dev/urandom", "-device", "virtio-rng-device,rng=rng")
}

// commonArguments are those of every QEMU we start, whatever its machine.
func commonArguments(filter bool) []string {
	args := []string{
		"-nodefaults", "-no-user-config", "-display", "none",
		"-chardev", "socket,id=qmp,fd=" + strconv.Itoa(qmpFD), "-mon", "chardev=qmp,mode=control",
	}
	if filter {
		args = append(args, "-sandbox", filterOptions)
	}
	return args
}

// bootArguments are those of a cold boot. tscKHz is the rate of the host's time-stamp counter, 0 if unknown.
func bootArguments(cfg vmm.Config, src vmm.BootSource, tscKHz uint64) []string {
	cmdline := "console=ttyS0 reboot=t panic=-1"
	if cfg.Acceleration == vmm.TCG {
		cmdline += " tsc=reliable" // else two or more emulated CPUs make the kernel lose seconds
		if tscKHz != 0 {
			cmdline += " tsc_early_khz=" + strconv.FormatUint(tscKHz, 10) // else a busy host makes it hang
		}
	}
	if src.Cmdline != "" {
		cmdline += " " + src.Cmdline
	}
	return []string{"-kernel", src.Kernel, "-initrd", src.Initrd, "-append", cmdline}
}

// memoryMode is how the guest's memory relates to the file behind it.
type memoryMode string

const (
	sharedMemory   memoryMode = "share=on"                      // boot: the file is the RAM image
	privateSealed  memoryMode = "share=off"                     // opened for writing, which the seals prevent
	privateReadMem memoryMode = "share=off,readonly=on,rom=off" // opened for reading only
)

// memoryObject keeps guest pages out of core dumps and out of same-page merging, a side channel between tenants.
func memoryObject(mib uint32, mode memoryMode) string {
	return fmt.Sprintf("memory-backend-file,id=m,size=%dM,mem-path=/proc/self/fd/%d,%s,merge=off,dump=off", mib, memoryFD, mode)
}

func linkArguments(name string, fd int, mac string) []string {
	return []string{
		"-netdev", fmt.Sprintf("stream,id=%s,server=off,addr.type=fd,addr.str=%d", name, fd),
		"-device", fmt.Sprintf("virtio-net-device,netdev=%s,mac=%s", name, mac),
	}
}

// blockNode is a -blockdev option. Driver and backing are always given: what an image's header says is the guest's
// word.
type blockNode struct {
	Driver   string     `json:"driver"`
	Name     string     `json:"node-name,omitempty"`
	ReadOnly bool       `json:"read-only"`
	Discard  string     `json:"discard,omitempty"`
	Filename string     `json:"filename,omitempty"`
	Locking  string     `json:"locking,omitempty"`
	File     *blockNode `json:"file,omitempty"`
	Backing  any        `json:"backing,omitempty"` // *blockNode, or noBacking
}

// noBacking is the JSON null that tells QEMU to open no backing file even if the header names one.
var noBacking = json.RawMessage("null")

func diskArguments(i int, d vmm.Disk) []string {
	name := "disk" + strconv.Itoa(i)
	node := layerNode("raw", d.Path)
	if !d.ReadOnly {
		node = topNode(d)
	}
	node.Name = name
	option, err := json.Marshal(node)
	if err != nil { // strings and booleans only
		option = nil
	}
	return []string{
		"-blockdev", string(option),
		// An error of the host's disk is the guest's to handle; stopping the VM for it would hang the sandbox.
		"-device", "virtio-blk-device,drive=" + name + ",serial=" + d.Serial + ",werror=report,rerror=report",
	}
}

// layerNode is an immutable image, shared between VMs and therefore not locked.
func layerNode(driver, path string) *blockNode {
	file := &blockNode{Driver: "file", Filename: path, ReadOnly: true, Locking: "off"}
	return &blockNode{Driver: driver, ReadOnly: true, File: file}
}

// topNode is the writable qcow2 over its backing chain.
func topNode(d vmm.Disk) *blockNode {
	top := &blockNode{
		Driver: "qcow2", Discard: "unmap", Backing: noBacking,
		File: &blockNode{Driver: "file", Filename: d.Path, Discard: "unmap"},
	}
	above := top
	for i, path := range d.Backing {
		driver := "qcow2"
		if i == len(d.Backing)-1 {
			driver = "raw"
		}
		node := layerNode(driver, path)
		if driver == "qcow2" {
			node.Backing = noBacking
		}
		above.Backing, above = node, node
	}
	return top
}
