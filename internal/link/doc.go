// Package link is the host end of a guest's network devices.
//
// A link is a net.Conn that carries Ethernet frames, each preceded by its length as 4 bytes big-endian. Control
// puts a small TCP/IP stack on the control link: it can dial the guest's control address and nothing else, accepts
// no connection, and sees no frame that does not come from there. Discard swallows the workload link.
//
// Everything that arrives is hostile. A frame is bounded before it is read, checked before the stack sees it, and
// costs no memory beyond the stack's own bounded buffers.
//
// Concurrency: all methods are safe for concurrent use. NewControl and Discard start goroutines that end when
// Close is called or the link fails; neither closes the net.Conn, which belongs to the VM.
package link
