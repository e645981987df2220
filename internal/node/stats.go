package node

import (
	"github.com/space-sandbox/space/internal/node/proc"
)

// Usage is the memory that one VM costs the machine, in bytes, shared pages divided by their users.
type Usage struct {
	SandboxID    string // empty for an armed VM
	ShimPSS      uint64
	VMMPSS       uint64
	ShimPID      int
	VMMPID       int
	HostMemoryMB uint64 // what admission counts it for, in MiB
}

// Usages measures all bound VMs. Those that end meanwhile are left out. It reads /proc, which takes a few
// milliseconds per process: for benchmarks and diagnosis, not for every call.
func (n *Node) Usages() []Usage {
	n.mu.Lock()
	var bound []*entry
	for _, e := range n.sandboxes {
		if e.ended() && e.shim != nil {
			bound = append(bound, e)
		}
	}
	n.mu.Unlock()
	var out []Usage
	for _, e := range bound {
		u := Usage{SandboxID: e.id, HostMemoryMB: e.rec.MemoryMiB}
		u.ShimPID, u.VMMPID = e.shim.PIDs()
		var err1, err2 error
		u.ShimPSS, err1 = proc.PSS(u.ShimPID)
		u.VMMPSS, err2 = proc.PSS(u.VMMPID)
		if err1 == nil && err2 == nil {
			out = append(out, u)
		}
	}
	return out
}
