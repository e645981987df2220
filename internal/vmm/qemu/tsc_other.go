//go:build !amd64

package qemu

import "context"

// hostTSC is 0, unknown: the guest measures for itself.
func hostTSC(context.Context) uint64 { return 0 }
