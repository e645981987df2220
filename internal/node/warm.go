package node

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"

	nodev1 "github.com/space-sandbox/space/internal/gen/space/node/v1"
	shimv1 "github.com/space-sandbox/space/internal/gen/space/shim/v1"
	"github.com/space-sandbox/space/internal/node/shims"
	"github.com/space-sandbox/space/internal/vmm"
)

// warmRetry is how long a failed capture is answered with its error before it is tried again.
const warmRetry = 5 * time.Second

// warm is the snapshot of a template booted in one shape: what every new sandbox of that shape starts from. Its
// files are never written again; memory is shared by all VMs.
type warm struct {
	key      string
	dir      string
	tmpl     *Template
	shape    *nodev1.Resources
	manifest warmManifest
	memory   *os.File
	copied   *reservation // of the memory's copy, where the VMM needs one
}

// warmManifest is written last: a folder without it is not a snapshot. It holds the captured guest's token and is
// therefore 0600.
type warmManifest struct {
	TemplateDigest string           `json:"template_digest"`
	Layers         []string         `json:"layers"`
	VCPU           uint32           `json:"vcpu"`
	MemoryMiB      uint32           `json:"memory_mib"`
	DiskMiB        uint32           `json:"disk_mib"`
	Acceleration   string           `json:"acceleration"`
	GuestDigest    string           `json:"guest_digest"`
	Kernel         string           `json:"kernel"`
	VMMVersion     string           `json:"vmm_version"`
	Clocksource    string           `json:"clocksource"`
	ControlToken   string           `json:"control_token"`
	Sizes          map[string]int64 `json:"sizes"`
	CreatedAt      time.Time        `json:"created_at"`
}

// warmFiles are the files of a snapshot; "base.raw" is made before the boot, the others by it.
var warmFiles = []string{"memory", "state", "agent.json", "writable.qcow2", "base.raw"}

func (w *warm) path(name string) string { return filepath.Join(w.dir, name) }

// backing are the immutable images below a new sandbox's disk, nearest first.
func (w *warm) backing() []string { return []string{w.path("writable.qcow2"), w.path("base.raw")} }

func warmKey(p *prepared, shape *nodev1.Resources) string {
	return filepath.Join(strings.TrimPrefix(p.tmpl.Digest, "sha256:"), fmt.Sprintf("%d-%d-%d-%s-%s",
		shape.Vcpu, shape.MemoryMib, shape.DiskMib, p.caps.Acceleration, shortDigest(p.guest.Digest)))
}

func shortDigest(s string) string {
	s = strings.TrimPrefix(s, "sha256:")
	return s[:min(12, len(s))]
}

// warmBuild is one attempt to have a snapshot, shared by all who need it.
type warmBuild struct {
	done chan struct{}
	w    *warm
	err  error
	at   time.Time // of the failure
}

// warmFor returns the snapshot of a shape and captures it first if there is none. The capture belongs to the node
// and goes on when the caller leaves.
func (n *Node) warmFor(ctx context.Context, p *prepared, shape *nodev1.Resources, report ProgressFunc) (*warm, error) {
	key := warmKey(p, shape)
	n.mu.Lock()
	b := n.warms[key]
	if b == nil || b.failedBefore(time.Now().Add(-warmRetry)) {
		if n.closed {
			n.mu.Unlock()
			return nil, errClosed
		}
		b = &warmBuild{done: make(chan struct{})}
		n.warms[key] = b
		n.wg.Go(func() { //nolint:contextcheck // the capture belongs to the node
			ctx, cancel := context.WithTimeout(n.ctx, n.cfg.CaptureTimeout)
			defer cancel()
			b.w, b.err = n.openOrCapture(ctx, p, key, proto.CloneOf(shape))
			b.at = time.Now()
			if b.err != nil {
				n.log.Error("warm snapshot failed", "shape", key, "error", b.err)
			}
			close(b.done)
		})
	}
	n.mu.Unlock()
	select {
	case <-b.done:
		return b.w, b.err
	default:
	}
	report("warm", 0, 0)
	select {
	case <-b.done:
		return b.w, b.err
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (b *warmBuild) failedBefore(t time.Time) bool {
	select {
	case <-b.done:
		return b.err != nil && b.at.Before(t)
	default:
		return false
	}
}

func (n *Node) openOrCapture(ctx context.Context, p *prepared, key string, shape *nodev1.Resources) (*warm, error) {
	w := &warm{key: key, dir: filepath.Join(n.l.warm(), key), tmpl: p.tmpl, shape: shape}
	if err := w.load(); err != nil {
		n.log.Info("capturing a warm snapshot", "shape", key, "because", err)
		if err := os.RemoveAll(w.dir); err != nil {
			return nil, err
		}
		if err := n.capture(ctx, p, w); err != nil {
			return nil, fmt.Errorf("warm snapshot: %w", err)
		}
		if err := w.load(); err != nil {
			return nil, fmt.Errorf("warm snapshot: %w", err)
		}
	}
	if !p.caps.ReadOnlyMem {
		// The copy lives in memory. It is one per shape, so it is counted, but never refused for.
		w.copied = n.admission.force(uint64(shape.MemoryMib))
	}
	var err error
	if w.memory, err = n.deps.Machine.OpenMemory(ctx, p.caps, w.path("memory")); err != nil {
		w.copied.release()
		return nil, fmt.Errorf("warm snapshot: %w", err)
	}
	return w, nil
}

// load reads the manifest and checks that the files are those it speaks of.
func (w *warm) load() error {
	data, err := os.ReadFile(w.path("manifest.json"))
	if err != nil {
		return err
	}
	if err := json.Unmarshal(data, &w.manifest); err != nil {
		return fmt.Errorf("manifest: %w", err)
	}
	for _, name := range warmFiles {
		info, err := os.Stat(w.path(name))
		if err != nil {
			return err
		}
		if info.Size() != w.manifest.Sizes[name] {
			return fmt.Errorf("%s has %d bytes, manifest says %d", name, info.Size(), w.manifest.Sizes[name])
		}
	}
	return nil
}

// capture boots the template once and freezes it, in a temporary folder that takes its name when all is durable.
func (n *Node) capture(ctx context.Context, p *prepared, w *warm) (err error) {
	if err := n.diskRoom(); err != nil {
		return err // a guest whose memory file cannot grow dies of a bus error
	}
	memory, err := n.admit(ctx, n.vmMiB(p, w.shape))
	if err != nil {
		return err
	}
	defer memory.release()
	tmp := w.dir + ".tmp"
	if err := os.RemoveAll(tmp); err != nil {
		return err
	}
	if err := os.MkdirAll(tmp, 0o700); err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.RemoveAll(tmp))
		}
	}()
	spec := n.baseSpec(p, w.shape, p.tmpl.Layers)
	spec.Mode = shimv1.LaunchSpec_MODE_CAPTURE
	spec.ControlToken = shims.NewToken()
	spec.Kernel, spec.Initrd = p.guest.Kernel, p.guest.Initrd
	spec.WarmUp = p.tmpl.WarmUp
	spec.WritableBacking = []string{filepath.Join(tmp, "base.raw")}
	s, err := n.launch(ctx, spec, nil, func(ctx context.Context, spec *shimv1.LaunchSpec, dir string) error {
		spec.CaptureDir = filepath.Join(dir, "capture")
		if err := os.Mkdir(spec.CaptureDir, 0o700); err != nil {
			return err
		}
		if err := n.deps.Disks.Base(ctx, spec.WritableBacking[0], w.shape.DiskMib); err != nil {
			return err
		}
		return n.makeTop(ctx, spec, dir)
	})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, n.destroyShim(ctx, s)) }()
	if err := s.WaitExit(ctx); err != nil {
		return fmt.Errorf("capture: %w", err)
	}
	return n.publishWarm(p, w, s, tmp)
}

func (n *Node) publishWarm(p *prepared, w *warm, s *shims.Shim, tmp string) error {
	for _, name := range []string{"memory", "state", "agent.json"} {
		if err := os.Rename(filepath.Join(s.Spec.CaptureDir, name), filepath.Join(tmp, name)); err != nil {
			return fmt.Errorf("capture: %w", err)
		}
	}
	if err := os.Rename(s.Spec.WritableTop, filepath.Join(tmp, "writable.qcow2")); err != nil {
		return fmt.Errorf("capture: %w", err)
	}
	var agent struct{ Clocksource, Kernel string }
	data, err := os.ReadFile(filepath.Join(tmp, "agent.json"))
	if err == nil {
		err = json.Unmarshal(data, &agent)
	}
	if err != nil {
		return fmt.Errorf("capture: agent.json: %w", err)
	}
	if want := clocksource(p.caps.Acceleration); agent.Clocksource != want {
		return fmt.Errorf("capture: the guest's clock source is %q, must be %q", agent.Clocksource, want)
	}
	m := warmManifest{
		TemplateDigest: p.tmpl.Digest, Layers: p.tmpl.Layers,
		VCPU: w.shape.Vcpu, MemoryMiB: w.shape.MemoryMib, DiskMiB: w.shape.DiskMib,
		Acceleration: string(p.caps.Acceleration), GuestDigest: p.guest.Digest, Kernel: agent.Kernel,
		VMMVersion: p.caps.Version, Clocksource: agent.Clocksource, ControlToken: s.Spec.ControlToken,
		Sizes: map[string]int64{}, CreatedAt: time.Now().UTC(),
	}
	for _, name := range warmFiles {
		path := filepath.Join(tmp, name)
		if err := errors.Join(os.Chown(path, os.Getuid(), os.Getgid()), os.Chmod(path, 0o444), syncPath(path)); err != nil {
			return err
		}
		info, err := os.Stat(path)
		if err != nil {
			return err
		}
		m.Sizes[name] = info.Size()
	}
	if data, err = json.MarshalIndent(m, "", "  "); err != nil {
		return err
	}
	if err := writeDurably(filepath.Join(tmp, "manifest.json"), data, 0o600); err != nil {
		return err
	}
	if err := os.Rename(tmp, w.dir); err != nil {
		return err
	}
	return syncPath(filepath.Dir(w.dir))
}

// clocksource is the one a guest must have chosen: with any other its clock drifts by seconds.
func clocksource(a vmm.Acceleration) string {
	if a == vmm.KVM {
		return "kvm-clock"
	}
	return "tsc"
}

// baseSpec is what restoring and capturing have in common.
func (n *Node) baseSpec(p *prepared, shape *nodev1.Resources, layers []string) *shimv1.LaunchSpec {
	spec := &shimv1.LaunchSpec{
		Resources:    proto.CloneOf(shape),
		Driver:       n.deps.Machine.Name(),
		Acceleration: string(p.caps.Acceleration),
		Layers:       layers,
		QemuBinary:   p.caps.Binary,
	}
	if os.Getuid() == 0 {
		spec.VmmUid = n.cfg.VMMUIDBase + n.uids.take()
	}
	return spec
}

// launch starts a shim whose uid is free again once the shim is gone.
func (n *Node) launch(ctx context.Context, spec *shimv1.LaunchSpec, memory *os.File, prepare shims.PrepareFunc) (*shims.Shim, error) {
	s, err := n.shims.Launch(ctx, spec, memory, prepare)
	if err != nil {
		n.freeUID(spec)
		return nil, err
	}
	s.OnGone = func() { n.freeUID(spec) }
	return s, nil
}

func (n *Node) freeUID(spec *shimv1.LaunchSpec) {
	if spec.VmmUid >= n.cfg.VMMUIDBase {
		n.uids.free(spec.VmmUid - n.cfg.VMMUIDBase)
	}
}

// makeTop makes the writable disk of a shim that is about to start.
func (n *Node) makeTop(ctx context.Context, spec *shimv1.LaunchSpec, dir string) error {
	spec.WritableTop = filepath.Join(dir, "top.qcow2")
	if err := n.deps.Disks.Top(ctx, spec.WritableTop, spec.WritableBacking, spec.Resources.DiskMib); err != nil {
		return err
	}
	if spec.VmmUid == 0 {
		return nil
	}
	return os.Chown(spec.WritableTop, int(spec.VmmUid), int(spec.VmmUid))
}

// arm starts a shim that restores a snapshot and waits until it is armed; one that is to wait rehearses. On error
// nothing is left of it.
func (n *Node) arm(ctx context.Context, p *prepared, w *warm, rehearse bool) (*shims.Shim, error) {
	ctx, cancel := context.WithTimeout(ctx, n.cfg.ArmTimeout)
	defer cancel()
	spec := n.baseSpec(p, w.shape, w.manifest.Layers)
	spec.Mode = shimv1.LaunchSpec_MODE_RESTORE
	spec.Rehearse = rehearse
	spec.ControlToken = w.manifest.ControlToken
	spec.DeviceState = w.path("state")
	spec.WritableBacking = w.backing()
	s, err := n.launch(ctx, spec, w.memory, n.makeTop)
	if err != nil {
		return nil, err
	}
	if _, err := s.WaitState(ctx, shimv1.ShimState_SHIM_STATE_ARMED); err != nil {
		return nil, errors.Join(err, n.destroyShim(ctx, s))
	}
	return s, nil
}

// destroyShim ends a shim with a deadline of its own, so that the end of the caller's context leaves nothing behind.
func (n *Node) destroyShim(ctx context.Context, s *shims.Shim) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), n.cfg.DeleteTimeout)
	defer cancel()
	if err := s.Destroy(ctx, ""); err != nil {
		n.log.Error("shim not destroyed", "shim", s.ID, "error", err)
		return err
	}
	return nil
}

// vmMiB is the host memory that a VM of a shape counts for.
func (n *Node) vmMiB(p *prepared, shape *nodev1.Resources) uint64 {
	return uint64(shape.MemoryMib) + uint64(p.caps.OverheadMiB)
}
