// Package cgroup owns one cgroup v2 subtree, space/<instance> below the cgroup this program runs in, with one group
// per shim. Groups serve to kill everything in them at once; memory and CPU limits are set only where the
// controllers exist. Where there is no usable cgroup v2 the tree is empty and says why: callers go on without.
//
// Nothing outside space/<instance> is ever written. Methods are safe for concurrent use on different groups.
package cgroup
