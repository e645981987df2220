// Package fault makes the agent's typed errors: Connect errors whose detail, a FileError, tells the reason and the
// request field at fault. It holds no state. Texts never hold a submitted value.
package fault
