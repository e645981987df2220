package node

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	nodev1 "github.com/space-sandbox/space/internal/gen/space/node/v1"
	"github.com/space-sandbox/space/internal/node/shims"
	"github.com/space-sandbox/space/internal/sandbox"
)

// Reasons of failed sandboxes, besides those that shims report.
const (
	reasonHostLost   = "host_lost"
	reasonVMMExited  = "vmm_exited"
	reasonNotDeleted = "not_deleted"
)

// record is sandbox.json: written before the sandbox has a VM of its own, removed after everything else is.
type record struct {
	ID             string            `json:"id"`
	Generation     uint64            `json:"generation"`
	OperationID    string            `json:"operation_id,omitempty"`
	TemplateDigest string            `json:"template_digest"`
	Resources      sandbox.Resources `json:"resources"`
	Shim           string            `json:"shim"`
	MemoryMiB      uint64            `json:"host_memory_mib"`
	VMMVersion     string            `json:"vmm_version"`
	Kernel         string            `json:"kernel"`
	Acceleration   string            `json:"acceleration"`
	CreatedAt      time.Time         `json:"created_at"`
	Failed         string            `json:"failed,omitempty"` // why, once it has failed
}

// entry is one sandbox in the node's table. rec, shim and memory are set before done is closed and not changed
// after; everything below mu is guarded by Node.mu.
type entry struct {
	id         string
	generation uint64
	cancel     context.CancelFunc // ends the create
	done       chan struct{}      // closed when the create has ended; then the fields above the line hold
	createErr  error
	rec        record
	shim       *shims.Shim // nil: there is none
	memory     *reservation
	archive    archived

	// Guarded by Node.mu.
	state      nodev1.SandboxState
	reason     string
	timings    []*nodev1.Timing
	lastActive time.Time
	progress   *nodev1.Progress
	changed    chan struct{} // closed and replaced with every change
	deletion   *deletion
}

// deletion is one attempt to delete, shared by all who ask for it.
type deletion struct {
	done chan struct{}
	err  error
}

func newEntry(id string, generation uint64, cancel context.CancelFunc) *entry {
	return &entry{
		id: id, generation: generation, cancel: cancel,
		done: make(chan struct{}), changed: make(chan struct{}),
		state: nodev1.SandboxState_SANDBOX_STATE_CREATING,
	}
}

// status describes an entry. Node.mu is held.
func (e *entry) status() *nodev1.SandboxStatus {
	st := &nodev1.SandboxStatus{
		SandboxId: e.id, Generation: e.generation, State: e.state, Reason: e.reason,
		Timings: e.timings, Environment: "E1",
	}
	if e.ended() {
		st.VmmVersion, st.Kernel, st.Acceleration = e.rec.VMMVersion, e.rec.Kernel, e.rec.Acceleration
	}
	if !e.lastActive.IsZero() {
		st.LastActiveAt = timestamppb.New(e.lastActive)
	}
	return proto.CloneOf(st)
}

// ended reports whether the create has ended.
func (e *entry) ended() bool {
	select {
	case <-e.done:
		return true
	default:
		return false
	}
}

// change changes an entry and tells everybody who waits for that.
func (n *Node) change(e *entry, fn func()) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.changeLocked(e, fn)
}

func (n *Node) changeLocked(e *entry, fn func()) {
	before := e.status()
	fn()
	close(e.changed)
	e.changed = make(chan struct{})
	if after := e.status(); !proto.Equal(before, after) && n.sandboxes[e.id] == e {
		n.publish(after)
	}
}

// fail marks a sandbox as failed, unless it is being deleted, and keeps the reason for later node services. Its
// memory is free again as soon as no VM can be using it.
func (n *Node) fail(e *entry, reason string) {
	n.mu.Lock()
	if e.deletion != nil || e.state == nodev1.SandboxState_SANDBOX_STATE_FAILED {
		n.mu.Unlock()
		return
	}
	n.changeLocked(e, func() { e.state, e.reason = nodev1.SandboxState_SANDBOX_STATE_FAILED, reason })
	rec := e.rec
	n.mu.Unlock()
	var death error
	if !e.shim.Alive() {
		death = e.shim.Died()
	}
	n.log.Warn("sandbox failed", "sandbox", e.id, "reason", reason, "shim", death)
	rec.Failed = reason
	if err := n.saveRecord(rec); err != nil {
		n.log.Warn("failure not recorded", "sandbox", e.id, "error", err)
	}
	e.memory.release()
	n.pokeRefill()
}

// saveRecord makes a record durable. The folder must exist.
func (n *Node) saveRecord(rec record) error {
	data, err := json.MarshalIndent(rec, "", "  ")
	if err != nil {
		return err
	}
	return writeDurably(n.l.sandboxFile(rec.ID), data, 0o600)
}

// makeSandboxFolder makes the folder of a new sandbox, durably.
func (n *Node) makeSandboxFolder(rec record) error {
	if err := os.MkdirAll(n.l.journal(rec.ID), 0o700); err != nil {
		return fmt.Errorf("sandbox folder: %w", err)
	}
	if err := n.saveRecord(rec); err != nil {
		return fmt.Errorf("sandbox record: %w", err)
	}
	return syncPath(n.l.sandboxes())
}

// loadRecords reads all records. Folders without one are remains of a create or delete that was cut.
func (n *Node) loadRecords() (records []record, remains []string, err error) {
	entries, err := os.ReadDir(n.l.sandboxes())
	if err != nil {
		return nil, nil, fmt.Errorf("read sandboxes: %w", err)
	}
	for _, e := range entries {
		data, err := os.ReadFile(filepath.Join(n.l.sandboxes(), e.Name(), "sandbox.json"))
		if errors.Is(err, os.ErrNotExist) {
			remains = append(remains, e.Name())
			continue
		}
		if err != nil {
			return nil, nil, fmt.Errorf("read sandboxes: %w", err)
		}
		var rec record
		if err := json.Unmarshal(data, &rec); err != nil || rec.ID != e.Name() {
			return nil, nil, fmt.Errorf("%s is not the record of a sandbox: restore it, or remove its folder: %w",
				n.l.sandboxFile(e.Name()), err)
		}
		records = append(records, rec)
	}
	return records, remains, nil
}
