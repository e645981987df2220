package node

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	nodev1 "github.com/space-sandbox/space/internal/gen/space/node/v1"
	"github.com/space-sandbox/space/internal/node/proc"
	"github.com/space-sandbox/space/internal/vmm"
)

// Back-off between attempts to get ready.
const (
	prepareRetryMin = 2 * time.Second
	prepareRetryMax = time.Minute
)

// prepared is everything a VM can be started from. It does not change once it is there.
type prepared struct {
	tmpl  *Template
	guest *Guest
	caps  vmm.Capabilities
}

// preparing is how far that is. Guarded by Node.mu; changed is closed and replaced with every change.
type preparing struct {
	state    nodev1.TemplateState
	reason   string
	progress *nodev1.Progress
	done     *prepared
	warmDone bool // the default shape's snapshot exists
	changed  chan struct{}
}

// prepareLoop gets the node ready and ends then. A failure is tried again, later and later, or sooner on demand.
func (n *Node) prepareLoop() {
	wait := prepareRetryMin
	for {
		err := n.prepareOnce(n.ctx)
		if err == nil || n.ctx.Err() != nil {
			return
		}
		n.log.Error("not ready", "error", err)
		n.setPreparing(func(p *preparing) {
			p.state, p.reason, p.progress = nodev1.TemplateState_TEMPLATE_STATE_FAILED, err.Error(), nil
		})
		timer := time.NewTimer(wait)
		select {
		case <-timer.C:
		case <-n.kick:
			// Asked for, but never more often than this.
			timer.Reset(prepareRetryMin)
			select {
			case <-timer.C:
			case <-n.ctx.Done():
			}
		case <-n.ctx.Done():
		}
		timer.Stop()
		wait = min(2*wait, prepareRetryMax)
	}
}

func (n *Node) prepareOnce(ctx context.Context) error {
	n.setPreparing(func(p *preparing) {
		p.state, p.reason = nodev1.TemplateState_TEMPLATE_STATE_BUILDING, ""
	})
	n.mu.Lock()
	p := n.prep.done
	n.mu.Unlock()
	if p == nil {
		var err error
		if p, err = n.prepareParts(ctx); err != nil {
			return err
		}
		n.setPreparing(func(s *preparing) { s.done = p })
	}
	w, err := n.warmFor(ctx, p, n.defaultShape(p), n.reportPreparing)
	if err != nil {
		return err
	}
	n.usePool(ctx, w)
	n.sweepObsolete(p)
	n.setPreparing(func(s *preparing) {
		s.state, s.reason, s.progress, s.warmDone = nodev1.TemplateState_TEMPLATE_STATE_READY, "", nil, true
	})
	return nil
}

func (n *Node) prepareParts(ctx context.Context) (*prepared, error) {
	n.reportPreparing("guest", 0, 0)
	guest, err := n.deps.Guests.Guest(ctx, n.reportPreparing)
	if err != nil {
		return nil, fmt.Errorf("guest kernel: %w", err)
	}
	n.reportPreparing("probe", 0, 0)
	caps, err := n.probe(ctx, guest)
	if err != nil {
		return nil, fmt.Errorf("probe: %w", err)
	}
	n.reportPreparing("template", 0, 0)
	tmpl, err := n.deps.Images.Base(ctx, n.reportPreparing)
	if err != nil {
		return nil, fmt.Errorf("base template: %w", err)
	}
	return &prepared{tmpl: tmpl, guest: guest, caps: caps}, nil
}

func (n *Node) setPreparing(change func(*preparing)) {
	n.mu.Lock()
	defer n.mu.Unlock()
	change(&n.prep)
	close(n.prep.changed)
	n.prep.changed = make(chan struct{})
}

func (n *Node) reportPreparing(phase string, done, total uint64) {
	n.setPreparing(func(p *preparing) {
		p.progress = &nodev1.Progress{Phase: phase, DoneBytes: done, TotalBytes: total}
	})
}

// waitPrepared waits while the node is getting ready. If that failed it asks for another attempt and says why.
func (n *Node) waitPrepared(ctx context.Context, report ProgressFunc) (*prepared, error) {
	for {
		n.mu.Lock()
		s := n.prep
		n.mu.Unlock()
		switch {
		case s.done != nil:
			return s.done, nil
		case s.state == nodev1.TemplateState_TEMPLATE_STATE_FAILED:
			select {
			case n.kick <- struct{}{}:
			default:
			}
			return nil, connect.NewError(connect.CodeUnavailable, errors.New(s.reason))
		case s.progress != nil:
			report(s.progress.Phase, s.progress.DoneBytes, s.progress.TotalBytes)
		}
		select {
		case <-s.changed:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

func (n *Node) defaultShape(p *prepared) *nodev1.Resources {
	if n.cfg.Defaults != nil {
		return n.cfg.Defaults
	}
	if p.tmpl.Defaults != nil {
		return p.tmpl.Defaults
	}
	return &nodev1.Resources{Vcpu: 1, MemoryMib: 512, DiskMib: 4096}
}

// probeCache is what a probe found, and where that holds.
type probeCache struct {
	BootID, Binary, Guest string
	BinaryTime            time.Time
	BinarySize            int64
	Caps                  vmm.Capabilities
}

// probe answers from the cache while kernel, VMM binary and this boot of the host are the same: proving that KVM
// works boots a kernel, which takes seconds.
func (n *Node) probe(ctx context.Context, guest *Guest) (vmm.Capabilities, error) {
	boot, err := proc.BootID()
	if err != nil {
		return vmm.Capabilities{}, err
	}
	var c probeCache
	if data, err := os.ReadFile(n.l.probe()); err == nil && json.Unmarshal(data, &c) == nil {
		info, err := os.Stat(c.Binary)
		if err == nil && c.BootID == boot && c.Guest == guest.Digest && info.Size() == c.BinarySize && info.ModTime().Equal(c.BinaryTime) {
			return c.Caps, nil
		}
	}
	caps, err := n.deps.Machine.Probe(ctx, guest.Kernel, guest.Initrd)
	if err != nil {
		return caps, err
	}
	c = probeCache{BootID: boot, Binary: caps.Binary, Guest: guest.Digest, Caps: caps}
	if info, err := os.Stat(caps.Binary); err == nil {
		c.BinaryTime, c.BinarySize = info.ModTime(), info.Size()
		if data, err := json.Marshal(c); err == nil {
			if err := writeDurably(n.l.probe(), data, 0o600); err != nil {
				n.log.Warn("probe not cached", "error", err)
			}
		}
	}
	return caps, nil
}

// template describes the base template as far as it is known.
func (n *Node) template() *nodev1.Template {
	n.mu.Lock()
	s := n.prep
	n.mu.Unlock()
	t := &nodev1.Template{Name: "base", Tag: "latest", State: s.state, Reason: s.reason, Defaults: n.cfg.Defaults}
	if s.progress != nil {
		t.Progress = proto.CloneOf(s.progress)
	}
	if s.done == nil {
		return t
	}
	tmpl := s.done.tmpl
	t.Name, t.Tag, t.SizeBytes = tmpl.Name, tmpl.Tag, tmpl.SizeBytes
	t.CreatedAt, t.DefaultUser, t.Description = timestamppb.New(tmpl.CreatedAt), tmpl.DefaultUser, tmpl.Description
	t.Defaults = proto.CloneOf(n.defaultShape(s.done))
	if s.state == nodev1.TemplateState_TEMPLATE_STATE_READY {
		t.Digest = tmpl.Digest
	}
	return t
}

// notReady returns why sandboxes cannot be created, or "".
func (n *Node) notReady() string {
	n.mu.Lock()
	defer n.mu.Unlock()
	switch {
	case n.unsafe != "":
		return n.unsafe
	case n.prep.warmDone:
		return ""
	case n.prep.reason != "":
		return n.prep.reason
	case n.prep.progress == nil:
		return "starting"
	}
	pr := n.prep.progress
	text := "preparing: " + pr.Phase
	if pr.TotalBytes > 0 {
		text += fmt.Sprintf(" (%d of %d bytes)", pr.DoneBytes, pr.TotalBytes)
	}
	return text
}
