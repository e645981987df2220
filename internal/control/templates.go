package control

import (
	"context"
	"fmt"
	"strings"
	"time"

	"connectrpc.com/connect"

	"github.com/space-sandbox/space/internal/auth"
	nodev1 "github.com/space-sandbox/space/internal/gen/space/node/v1"
	"github.com/space-sandbox/space/internal/sandbox"
	"github.com/space-sandbox/space/internal/store"
)

// ListTemplates implements Service.
func (p *Plane) ListTemplates(ctx context.Context, pr *auth.Principal) ([]*nodev1.Template, error) {
	if err := pr.Require(sandbox.ScopeTemplatesRead); err != nil {
		return nil, err
	}
	return p.templates(ctx)
}

func (p *Plane) templates(ctx context.Context) ([]*nodev1.Template, error) {
	ctx, cancel := context.WithTimeout(ctx, askNode)
	defer cancel()
	res, err := p.cfg.Nodes[p.cfg.NodeName].ListTemplates(ctx, connect.NewRequest(&nodev1.ListTemplatesRequest{}))
	if err != nil {
		return nil, nodeError(err)
	}
	return res.Msg.GetTemplates(), nil
}

// GetTemplate implements Service. name is what CreateSandbox takes; the template need not be ready.
func (p *Plane) GetTemplate(ctx context.Context, pr *auth.Principal, name string) (*nodev1.Template, error) {
	if err := pr.Require(sandbox.ScopeTemplatesRead); err != nil {
		return nil, err
	}
	return p.findTemplate(ctx, name)
}

func (p *Plane) findTemplate(ctx context.Context, ref string) (*nodev1.Template, error) {
	list, err := p.templates(ctx)
	if err != nil {
		return nil, err
	}
	if t := pick(list, ref); t != nil {
		return t, nil
	}
	return nil, sandbox.Errorf(sandbox.CodeNotFound, "no such template").WithRemediation("list the templates: space template list, or GET /v1/templates")
}

// pick finds name, name:tag or name@digest. A bare name means the tag latest, or else the newest release of the name.
func pick(list []*nodev1.Template, ref string) *nodev1.Template {
	name, digest, pinned := strings.Cut(ref, "@")
	tag, tagged := "", false
	if !pinned {
		name, tag, tagged = strings.Cut(ref, ":")
	}
	var best *nodev1.Template
	for _, t := range list {
		switch {
		case t.GetName() != name:
		case pinned:
			if digest != "" && t.GetDigest() == digest {
				return t
			}
		case tagged:
			if t.GetTag() == tag {
				return t
			}
		case t.GetTag() == "latest":
			return t
		case best == nil || t.GetCreatedAt().AsTime().After(best.GetCreatedAt().AsTime()):
			best = t
		}
	}
	return best
}

// resolveTemplate finds a template that sandboxes can be made from.
func (p *Plane) resolveTemplate(ctx context.Context, ref string) (*nodev1.Template, error) {
	t, err := p.findTemplate(ctx, ref)
	if err != nil {
		return nil, err
	}
	switch t.GetState() {
	case nodev1.TemplateState_TEMPLATE_STATE_READY:
		return t, nil
	case nodev1.TemplateState_TEMPLATE_STATE_FAILED:
		e := sandbox.Errorf(sandbox.CodeFailedPrecondition, "the template %s could not be built", t.GetName())
		e.Details.Cause = t.GetReason()
		return nil, e.WithRemediation("see the node's log for the build; it is tried again when the node starts")
	}
	e := sandbox.Errorf(sandbox.CodeServiceUnavailable, "the template %s is being built%s", t.GetName(), progressText(t.GetProgress()))
	e.RetryAfter = 5 * time.Second
	return nil, e.WithRemediation("try again when it is ready")
}

func progressText(g *nodev1.Progress) string {
	switch {
	case g.GetPhase() == "":
		return ""
	case g.GetTotalBytes() == 0:
		return ": " + g.GetPhase()
	}
	return fmt.Sprintf(": %s, %d %%", g.GetPhase(), min(100, uint64(float64(g.GetDoneBytes())/float64(g.GetTotalBytes())*100)))
}

// Ready implements Service.
func (p *Plane) Ready(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, askNode)
	defer cancel()
	if err := p.view(ctx, func(tx store.Tx) error { _, err := tx.OpenOperations(ctx); return err }); err != nil {
		return err
	}
	if reason := p.guard.any(); reason != "" {
		return sandbox.Errorf(sandbox.CodeServiceUnavailable, "%s", reason)
	}
	list, err := p.templates(ctx)
	if err != nil {
		return err
	}
	var waiting []string
	for _, t := range list {
		switch t.GetState() {
		case nodev1.TemplateState_TEMPLATE_STATE_READY:
			return p.nodeReady(ctx)
		case nodev1.TemplateState_TEMPLATE_STATE_FAILED:
			waiting = append(waiting, fmt.Sprintf("template %s failed: %s", t.GetName(), t.GetReason()))
		default:
			waiting = append(waiting, fmt.Sprintf("template %s is being built%s", t.GetName(), progressText(t.GetProgress())))
		}
	}
	if len(waiting) == 0 {
		waiting = []string{"the node has no template"}
	}
	return sandbox.Errorf(sandbox.CodeServiceUnavailable, "%s", strings.Join(waiting, "; "))
}

func (p *Plane) nodeReady(ctx context.Context) error {
	res, err := p.cfg.Nodes[p.cfg.NodeName].GetNode(ctx, connect.NewRequest(&nodev1.GetNodeRequest{}))
	if err != nil {
		return nodeError(err)
	}
	if !res.Msg.GetReady() {
		return sandbox.Errorf(sandbox.CodeServiceUnavailable, "the node is not ready: %s", res.Msg.GetNotReadyReason())
	}
	return nil
}
