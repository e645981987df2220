package control

import (
	"context"
	"fmt"
	"maps"
	"slices"

	"connectrpc.com/connect"

	"github.com/space-sandbox/space/internal/auth"
	nodev1 "github.com/space-sandbox/space/internal/gen/space/node/v1"
	"github.com/space-sandbox/space/internal/sandbox"
	"github.com/space-sandbox/space/internal/store"
)

// CreateSandbox implements Service. It answers once the intent is stored; if the node refuses for lack of room within
// Config.AdmissionWait, the answer is capacity_unavailable and nothing is left of the call.
func (p *Plane) CreateSandbox(ctx context.Context, pr *auth.Principal, req CreateSandbox, idem *Idem) (Accepted, error) {
	if err := pr.Require(sandbox.ScopeSandboxesWrite); err != nil {
		return Accepted{}, err
	}
	// A replay needs no node, so it is looked for first; the transaction below decides.
	var acc Accepted
	if err := p.view(ctx, func(tx store.Tx) (err error) {
		acc, err = p.replay(ctx, tx, pr, idem)
		return err
	}); err != nil || acc.Replayed {
		return acc, err
	}
	draft, err := p.draft(ctx, pr, req)
	if err != nil {
		return Accepted{}, err
	}
	op := p.newOperation(sandbox.OpCreate, draft)
	draft.OperationID = op.ID
	first, ended, release := p.ops.watch(op.ID)
	defer release()
	err = p.update(ctx, func(tx store.Tx) (err error) {
		if acc, err = p.replay(ctx, tx, pr, idem); err != nil || acc.Replayed {
			return err
		}
		s := *draft
		if err := tx.InsertSandbox(ctx, &s); err != nil {
			return err
		}
		if err := tx.InsertOperation(ctx, op); err != nil {
			return err
		}
		acc = Accepted{Sandbox: &s, Operation: op}
		return p.putClaim(ctx, tx, pr, idem, claim{Sandbox: s.ID, Operation: op.ID})
	})
	if err != nil || acc.Replayed {
		return acc, err
	}
	p.timers.set(acc.Sandbox, p.clock.Now())
	p.poke(draft.ID)
	select {
	case <-first:
	case <-p.clock.After(p.cfg.AdmissionWait):
	case <-ctx.Done():
	}
	select {
	case <-ended:
		return p.admitted(ctx, pr, acc, idem)
	default:
		p.ops.overlay(acc.Operation)
		return acc, nil
	}
}

// admitted rereads a create that has ended already. If there was no room, it undoes the call.
func (p *Plane) admitted(ctx context.Context, pr *auth.Principal, acc Accepted, idem *Idem) (Accepted, error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), afterwards)
	defer cancel()
	var refused *sandbox.Error
	err := p.update(ctx, func(tx store.Tx) (err error) {
		refused = nil
		if acc.Operation, err = tx.GetOperation(ctx, acc.Operation.ID); err != nil {
			return err
		}
		if acc.Sandbox, err = tx.GetSandbox(ctx, acc.Sandbox.ID); err != nil {
			return err
		}
		if e := acc.Operation.Error; e == nil || e.Code != sandbox.CodeCapacityUnavailable || acc.Sandbox.State != sandbox.StateFailed {
			return nil
		}
		refused = sandbox.Errorf(sandbox.CodeCapacityUnavailable, "%s", acc.Operation.Error.Message)
		refused.Details = acc.Operation.Error.Details
		bury(acc.Sandbox, p.now())
		if err := tx.UpdateSandbox(ctx, acc.Sandbox); err != nil {
			return err
		}
		return p.dropClaim(ctx, tx, pr, idem)
	})
	if err != nil {
		return Accepted{}, err
	}
	if refused != nil {
		p.timers.drop(acc.Sandbox.ID)
		return Accepted{}, refused
	}
	return acc, nil
}

// replay answers from what the idempotency key stands for; Replayed is false if it is new. What the key's holder may
// no longer see is not found.
func (p *Plane) replay(ctx context.Context, tx store.Tx, pr *auth.Principal, idem *Idem) (Accepted, error) {
	c, err := p.findClaim(ctx, tx, pr, idem)
	if err != nil || c == nil {
		return Accepted{}, err
	}
	s, err := tx.GetSandbox(ctx, c.Sandbox)
	if err != nil {
		return Accepted{}, err
	}
	if !pr.MaySee(s) {
		return Accepted{}, errNoSandbox()
	}
	op, err := tx.GetOperation(ctx, c.Operation)
	if err != nil {
		return Accepted{}, err
	}
	p.ops.overlay(op)
	p.activity.overlay(s)
	return Accepted{Sandbox: s, Operation: op, Replayed: true}, nil
}

// draft checks what a request means and makes the record of it.
func (p *Plane) draft(ctx context.Context, pr *auth.Principal, req CreateSandbox) (*sandbox.Sandbox, error) {
	if len(pr.SandboxIDs) > 0 {
		return nil, sandbox.Errorf(sandbox.CodeForbidden, "this API key is limited to certain sandboxes and cannot create others").
			WithRemediation("use a key that is not limited to a list of sandboxes")
	}
	metadata, err := stamp(pr, req.Metadata)
	if err != nil {
		return nil, err
	}
	lifecycle, err := checkLifecycle(req.Lifecycle)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, askNode)
	defer cancel()
	template, err := p.resolveTemplate(ctx, req.Template)
	if err != nil {
		return nil, err
	}
	resources, err := checkResources(req.Resources, template.GetDefaults())
	if err != nil {
		return nil, err
	}
	environment, err := p.checkNode(ctx, req.Environment, resources)
	if err != nil {
		return nil, err
	}
	now := p.now()
	return &sandbox.Sandbox{
		ID: sandbox.NewID(), ProjectID: pr.ProjectID, Owner: pr.KeyID,
		Template:    sandbox.TemplateRef{Name: template.GetName(), Tag: template.GetTag(), Digest: template.GetDigest()},
		Environment: environment, State: sandbox.StateCreating, Generation: 1,
		Resources: resources, Lifecycle: lifecycle, Metadata: metadata, Env: maps.Clone(req.Env),
		Node: p.cfg.NodeName, CreatedAt: now, UpdatedAt: now, LastActive: now,
	}, nil
}

// stamp adds the metadata that a key is limited to. A request that wants another value is refused.
func stamp(pr *auth.Principal, metadata map[string]string) (map[string]string, error) {
	out := map[string]string{}
	maps.Copy(out, metadata)
	for _, k := range slices.Sorted(maps.Keys(pr.Metadata)) {
		if v, ok := out[k]; ok && v != pr.Metadata[k] {
			return nil, sandbox.Errorf(sandbox.CodeForbidden, "this API key is limited by metadata that the request would change").
				WithRemediation("leave out the metadata that the key is limited to: it is set for you")
		}
		out[k] = pr.Metadata[k]
	}
	return out, nil
}

func checkLifecycle(l sandbox.Lifecycle) (sandbox.Lifecycle, error) {
	if v := l.IdleSuspendAfterS; v != nil && *v < 1 {
		return l, sandbox.Invalid("lifecycle.idle_suspend_after_s", "minimum", "must be at least 1, or null for never")
	}
	if v := l.MaxLifetimeS; v != nil && *v < 1 {
		return l, sandbox.Invalid("lifecycle.max_lifetime_s", "minimum", "must be at least 1, or null for never")
	}
	switch l.OnMaxLifetime {
	case "":
		l.OnMaxLifetime = "delete"
	case "delete":
	case "suspend":
		return l, sandbox.Errorf(sandbox.CodeFailedPrecondition, "sandboxes cannot be suspended by this release").
			WithRemediation(`use "on_max_lifetime": "delete"`)
	default:
		return l, sandbox.Invalid("lifecycle.on_max_lifetime", "enum", "must be delete or suspend")
	}
	return l, nil
}

// checkResources fills in the template's defaults and checks the bounds of every field.
func checkResources(r sandbox.Resources, def *nodev1.Resources) (sandbox.Resources, error) {
	var wrong []sandbox.Violation
	for _, f := range []struct {
		field    string
		value    *uint32
		def      uint32
		min, max uint32
	}{
		{"resources.vcpu", &r.VCPU, def.GetVcpu(), 1, 8},
		{"resources.memory_mib", &r.MemoryMiB, def.GetMemoryMib(), 128, 16384},
		{"resources.disk_mib", &r.DiskMiB, def.GetDiskMib(), 256, 65536},
	} {
		if *f.value == 0 {
			*f.value = f.def
		}
		if *f.value < f.min || *f.value > f.max {
			wrong = append(wrong, sandbox.Violation{Field: f.field, Rule: "range",
				Message: fmt.Sprintf("must be from %d to %d", f.min, f.max)})
		}
	}
	if len(wrong) > 0 {
		return r, sandbox.InvalidAll(wrong)
	}
	return r, nil
}

// checkNode asks the node whether it can run the environment and has room. The node itself decides about the room
// when it gets the order; this is the quick answer for what is plain.
func (p *Plane) checkNode(ctx context.Context, want string, r sandbox.Resources) (sandbox.Environment, error) {
	var none sandbox.Environment
	res, err := p.cfg.Nodes[p.cfg.NodeName].GetNode(ctx, connect.NewRequest(&nodev1.GetNodeRequest{}))
	if err != nil {
		return none, nodeError(err)
	}
	n := res.Msg
	switch want {
	case "", "auto", n.GetEnvironment():
	case "E0", "E1":
		e := sandbox.Errorf(sandbox.CodeFailedPrecondition, "no node offers the environment %s", want)
		e.Details.Cause = n.GetAccelerationReason()
		return none, e.WithRemediation(fmt.Sprintf("use environment auto or %s; E0 needs a node with KVM and Firecracker", n.GetEnvironment()))
	default:
		return none, sandbox.Invalid("environment", "enum", "must be auto, E0 or E1")
	}
	if !n.GetReady() {
		return none, sandbox.Errorf(sandbox.CodeServiceUnavailable, "the node is not ready: %s", n.GetNotReadyReason())
	}
	total, used, need := n.GetMemoryTotalMib(), n.GetMemoryUsedMib(), uint64(r.MemoryMiB)
	// Memory of armed VMs counts as used but may be what this sandbox gets, so with such VMs only the node can tell.
	if total > 0 && (need > total || n.GetArmed() == 0 && used+need > total) {
		return none, sandbox.Errorf(sandbox.CodeCapacityUnavailable, "no node has %d MiB of memory free", need)
	}
	return sandbox.Environment{
		ID: n.GetEnvironment(), VMM: n.GetVmm(), VMMVersion: n.GetVmmVersion(), Kernel: n.GetKernel(),
		Acceleration: n.GetAcceleration(),
	}, nil
}

func (p *Plane) newOperation(kind sandbox.OperationKind, s *sandbox.Sandbox) *sandbox.Operation {
	return &sandbox.Operation{
		ID: sandbox.NewOperationID(), Kind: kind, SandboxID: s.ID, ProjectID: s.ProjectID,
		Generation: s.Generation, State: sandbox.OpPending, CreatedAt: p.now(),
	}
}
