package node

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	nodev1 "github.com/space-sandbox/space/internal/gen/space/node/v1"
	shimv1 "github.com/space-sandbox/space/internal/gen/space/shim/v1"
	"github.com/space-sandbox/space/internal/node/shims"
	"github.com/space-sandbox/space/internal/sandbox"
)

// Bounds of a shape; the front ends have narrower ones.
const (
	maxVCPU      = 64
	minMemoryMiB = 64
	maxMemoryMiB = 1 << 20
	minDiskMiB   = 64
	maxDiskMiB   = 1 << 20
)

func checkCreate(req *nodev1.CreateSandboxRequest) error {
	if _, err := sandbox.ParseID(req.SandboxId); err != nil {
		return connect.NewError(connect.CodeInvalidArgument, err)
	}
	hex, ok := strings.CutPrefix(req.TemplateDigest, "sha256:")
	r := req.GetResources()
	switch {
	case req.Generation == 0:
		return invalid("generation must be at least 1")
	case !ok || len(hex) != 64 || strings.Trim(hex, "0123456789abcdef") != "":
		return invalid("template_digest must be sha256: and 64 hex digits")
	case r.GetVcpu() < 1 || r.GetVcpu() > maxVCPU:
		return invalid("resources.vcpu must be 1 to %d", maxVCPU)
	case r.GetMemoryMib() < minMemoryMiB || r.GetMemoryMib() > maxMemoryMiB:
		return invalid("resources.memory_mib must be %d to %d", minMemoryMiB, maxMemoryMiB)
	case r.GetDiskMib() < minDiskMiB || r.GetDiskMib() > maxDiskMiB:
		return invalid("resources.disk_mib must be %d to %d", minDiskMiB, maxDiskMiB)
	}
	return nil
}

func invalid(format string, args ...any) error {
	return connect.NewError(connect.CodeInvalidArgument, fmt.Errorf(format, args...))
}

func precondition(format string, args ...any) error {
	return connect.NewError(connect.CodeFailedPrecondition, fmt.Errorf(format, args...))
}

// begin finds the entry that a request joins, or makes one and starts the create.
func (n *Node) begin(req *nodev1.CreateSandboxRequest) (*entry, error) {
	if err := checkCreate(req); err != nil {
		return nil, err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	switch {
	case n.closed || !n.started:
		return nil, errClosed
	case n.unsafe != "":
		return nil, connect.NewError(connect.CodeUnavailable, errors.New(n.unsafe))
	}
	if e := n.sandboxes[req.SandboxId]; e != nil {
		switch {
		case req.Generation < e.generation:
			return nil, precondition("generation %d is older than %d, which is here", req.Generation, e.generation)
		case req.Generation > e.generation:
			return nil, precondition("generation %d is still here: delete it first", e.generation)
		case e.deletion != nil:
			return nil, precondition("generation %d is being deleted", e.generation)
		}
		return e, nil
	}
	if last, ok := n.gens.deleted(req.SandboxId); ok && req.Generation <= last {
		return nil, precondition("generation %d has ended here", last)
	}
	ctx, cancel := context.WithTimeout(n.ctx, n.cfg.CreateTimeout)
	e := newEntry(req.SandboxId, req.Generation, cancel)
	n.sandboxes[e.id] = e
	n.publish(e.status())
	n.creating.Add(1)
	req = proto.CloneOf(req)
	n.wg.Go(func() {
		defer cancel()
		defer n.creating.Add(-1)
		n.runCreate(ctx, e, req)
	})
	return e, nil
}

// runCreate brings a sandbox to running, or undoes everything.
func (n *Node) runCreate(ctx context.Context, e *entry, req *nodev1.CreateSandboxRequest) {
	c := &creation{n: n, e: e, req: req, at: time.Now()}
	err := c.run(ctx)
	if err == nil {
		n.change(e, func() {
			close(e.done)
			e.state, e.timings, e.lastActive = nodev1.SandboxState_SANDBOX_STATE_RUNNING, c.timings, time.Now()
		})
		n.wg.Go(func() { n.watchShim(e) })
		n.pokeRefill()
		return
	}
	n.log.Warn("create failed", "sandbox", e.id, "error", err)
	left := c.undo(ctx)
	n.mu.Lock()
	defer n.mu.Unlock()
	e.createErr = err
	if left != nil {
		// Something would not go: the entry stays, so that a delete can try again.
		e.shim, e.memory = c.shim, c.memory
		n.changeLocked(e, func() {
			close(e.done)
			e.state, e.reason = nodev1.SandboxState_SANDBOX_STATE_FAILED, reasonNotDeleted
		})
		return
	}
	n.changeLocked(e, func() { close(e.done) })
	if e.deletion == nil { // else the deletion goes on, and forgets it when its tombstone is on disk
		n.forget(e)
	}
}

// forget removes an entry and tells the watchers. Node.mu is held.
func (n *Node) forget(e *entry) {
	if n.sandboxes[e.id] != e {
		return
	}
	delete(n.sandboxes, e.id)
	n.publish(&nodev1.SandboxStatus{
		SandboxId: e.id, Generation: e.generation, State: nodev1.SandboxState_SANDBOX_STATE_GONE,
	})
}

// creation is the work of one create and what it holds so far.
type creation struct {
	n       *Node
	e       *entry
	req     *nodev1.CreateSandboxRequest
	at      time.Time
	timings []*nodev1.Timing

	shim    *shims.Shim
	memory  *reservation
	pooled  bool // the VM came from the pool
	offered bool // the identity was given to a VM
}

func (c *creation) mark(phase string) {
	now := time.Now()
	c.timings = append(c.timings, &nodev1.Timing{Phase: phase, Ms: float64(now.Sub(c.at).Microseconds()) / 1000})
	c.at = now
}

func (c *creation) report(phase string, done, total uint64) {
	c.n.change(c.e, func() {
		c.e.progress = &nodev1.Progress{Phase: phase, DoneBytes: done, TotalBytes: total}
	})
}

func (c *creation) run(ctx context.Context) error {
	p, err := c.n.waitPrepared(ctx, c.report)
	if err != nil {
		return err
	}
	if p.tmpl.Digest != c.req.TemplateDigest {
		return connect.NewError(connect.CodeNotFound, fmt.Errorf("template %s is not on this node", c.req.TemplateDigest))
	}
	for {
		if err := c.getVM(ctx, p); err != nil {
			return err
		}
		if err = c.bind(ctx, p); err == nil {
			return nil
		}
		if !c.pooled || ctx.Err() != nil {
			return err
		}
		// An armed VM may have died unseen. It never ran as this sandbox, or is dead now: another one may.
		c.n.log.Warn("an armed VM could not be bound, restoring one", "sandbox", c.e.id, "error", err)
		if err := c.undo(ctx); err != nil {
			return err
		}
	}
}

// getVM takes an armed VM or restores one.
func (c *creation) getVM(ctx context.Context, p *prepared) error {
	n := c.n
	if err := n.diskRoom(); err != nil {
		return err
	}
	key := warmKey(p, c.req.Resources)
	if a := n.pool.take(key); a != nil && !c.pooled {
		c.shim, c.memory, c.pooled = a.shim, a.memory, true
		c.mark("take")
		n.pokeRefill()
		return nil
	}
	c.pooled = false
	var err error
	if c.memory, err = n.admit(ctx, n.vmMiB(p, c.req.Resources)); err != nil {
		return err
	}
	c.mark("admit")
	w, err := n.warmFor(ctx, p, c.req.Resources, c.report)
	if err != nil {
		return err
	}
	n.usePool(ctx, w)
	c.mark("warm")
	c.report("restore", 0, 0)
	if c.shim, err = n.arm(ctx, p, w, false); err != nil {
		return connect.NewError(connect.CodeUnavailable, err)
	}
	c.mark("restore")
	return nil
}

// bind writes the record, then gives the VM its identity.
func (c *creation) bind(ctx context.Context, p *prepared) error {
	r := c.req.Resources
	rec := record{
		ID: c.e.id, Generation: c.e.generation, OperationID: c.req.OperationId, TemplateDigest: c.req.TemplateDigest,
		Resources: sandbox.Resources{VCPU: r.Vcpu, MemoryMiB: r.MemoryMib, DiskMiB: r.DiskMib},
		Shim:      c.shim.ID, MemoryMiB: c.memory.mib, CreatedAt: time.Now().UTC(),
		VMMVersion: p.caps.Version, Kernel: p.guest.Version, Acceleration: string(p.caps.Acceleration),
	}
	if err := c.n.makeSandboxFolder(rec); err != nil {
		return err
	}
	c.mark("record")
	ctx, cancel := context.WithTimeout(ctx, c.n.cfg.BindTimeout)
	defer cancel()
	c.offered = true
	st, err := c.shim.Bind(ctx, &shimv1.BindRequest{
		SandboxId: c.e.id, Generation: c.e.generation, Hostname: c.e.id, Env: c.req.Env,
		JournalDir: c.n.l.journal(c.e.id),
	})
	if err != nil {
		return connect.NewError(connect.CodeUnavailable, err)
	}
	if st.State != shimv1.ShimState_SHIM_STATE_RUNNING || st.SandboxId != c.e.id {
		return connect.NewError(connect.CodeUnavailable, fmt.Errorf("shim is %v after bind: %s", st.State, st.Reason))
	}
	c.mark("bind")
	for _, t := range st.Timings { // what the shim measured of the phases above
		c.timings = append(c.timings, &nodev1.Timing{Phase: "shim_" + t.Phase, Ms: t.Ms})
	}
	if st.Kernel != "" {
		rec.Kernel = st.Kernel
	}
	if st.VmmVersion != "" {
		rec.VMMVersion = st.VmmVersion
	}
	c.e.rec, c.e.shim, c.e.memory = rec, c.shim, c.memory
	return nil
}

// undo removes everything the creation made. On error it can be repeated, by a delete.
func (c *creation) undo(ctx context.Context) error {
	if c.shim != nil {
		if err := c.n.destroyShim(ctx, c.shim); err != nil {
			return err
		}
		c.shim = nil
	}
	c.memory.release()
	c.memory = nil
	if err := os.RemoveAll(c.n.l.sandbox(c.e.id)); err != nil {
		return fmt.Errorf("undo create: %w", err)
	}
	return nil
}
