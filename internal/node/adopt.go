package node

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"

	nodev1 "github.com/space-sandbox/space/internal/gen/space/node/v1"
	shimv1 "github.com/space-sandbox/space/internal/gen/space/shim/v1"
	"github.com/space-sandbox/space/internal/node/shims"
)

// found is a shim folder and what its process, if there is one, answered.
type found struct {
	shim   *shims.Shim
	alive  bool
	status *shimv1.StatusResponse // nil: dead, or no answer
	rec    *record                // the record that names it
}

// bound reports whether a living shim has, or may have, an identity.
func (f *found) bound() bool {
	if !f.alive {
		return false
	}
	if f.status == nil {
		return f.rec != nil // it does not answer; only its record says what it is
	}
	return f.status.SandboxId != "" || f.status.State == shimv1.ShimState_SHIM_STATE_BINDING
}

// adopt takes over what an earlier node service left and sweeps what has no record.
func (n *Node) adopt(ctx context.Context) error {
	records, remains, err := n.loadRecords()
	if err != nil {
		return err
	}
	all, err := n.findShims(ctx, records)
	if err != nil {
		return err
	}
	living, unknown := 0, 0
	for _, f := range all {
		if f.bound() {
			living++
			if f.rec == nil {
				unknown++
			}
		}
	}
	unsafe := tooManyUnknown(living, unknown)
	if unsafe {
		text := fmt.Sprintf("%d of %d living shims have no record: wrong data folder or a restored backup? "+
			"Nothing was swept. Restore %s, or end those shims", unknown, living, n.l.sandboxes())
		n.log.Error("not ready", "reason", text)
		n.mu.Lock()
		n.unsafe = text
		n.mu.Unlock()
	}
	keep := map[string]bool{}
	var sweep []*shims.Shim
	for i := range records {
		if s := n.adoptSandbox(&records[i], all[records[i].Shim]); s != nil {
			keep[s.ID] = true
		}
	}
	for id, f := range all {
		if keep[id] {
			continue
		}
		if unsafe {
			f.shim.Release()
			continue
		}
		sweep = append(sweep, f.shim)
	}
	if unsafe {
		return nil
	}
	return n.sweep(ctx, sweep, remains, keep)
}

// tooManyUnknown is the rule that keeps a node with the wrong records from killing sandboxes.
func tooManyUnknown(living, unknown int) bool {
	return unknown > 3 && unknown*5 > living
}

// findShims looks at all shim folders, at the same time: a shim that does not answer delays no other.
func (n *Node) findShims(ctx context.Context, records []record) (map[string]*found, error) {
	ids, err := n.shims.List()
	if err != nil {
		return nil, err
	}
	all := map[string]*found{}
	var wg sync.WaitGroup
	for _, id := range ids {
		s, err := n.shims.Adopt(id)
		if err != nil {
			return nil, err
		}
		f := &found{shim: s, alive: s.Alive()}
		all[id] = f
		if uid := s.Spec.VmmUid; uid >= n.cfg.VMMUIDBase {
			n.uids.mark(uid - n.cfg.VMMUIDBase)
			s.OnGone = func() { n.freeUID(s.Spec) }
		}
		if f.alive {
			wg.Go(func() {
				var err error
				if f.status, err = s.Status(ctx); err != nil {
					n.log.Warn("shim does not answer", "shim", id, "error", err)
				}
			})
		}
	}
	wg.Wait()
	for i := range records {
		if f := all[records[i].Shim]; f != nil {
			f.rec = &records[i]
		}
	}
	return all, nil
}

// adoptSandbox puts the sandbox of a record into the table. It returns the shim that stays with it.
func (n *Node) adoptSandbox(rec *record, f *found) *shims.Shim {
	e := newEntry(rec.ID, rec.Generation, func() {})
	e.rec, e.lastActive = *rec, rec.CreatedAt
	close(e.done)
	fail := func(reason string) {
		if rec.Failed != "" {
			reason = rec.Failed
		}
		e.state, e.reason = nodev1.SandboxState_SANDBOX_STATE_FAILED, reason
	}
	switch {
	case f == nil || f.rec != rec:
		fail(reasonHostLost)
	case !f.alive:
		fail(reasonHostLost)
		e.shim = f.shim
	case f.status == nil: // alive; watchShim finds out
		e.shim, e.memory = f.shim, n.admission.force(rec.MemoryMiB)
	case f.status.State == shimv1.ShimState_SHIM_STATE_FAILED:
		e.shim = f.shim
		fail(f.status.Reason)
	case f.status.SandboxId == rec.ID && f.status.Generation == rec.Generation:
		e.shim, e.memory = f.shim, n.admission.force(rec.MemoryMiB)
		if f.status.State == shimv1.ShimState_SHIM_STATE_RUNNING {
			e.state = nodev1.SandboxState_SANDBOX_STATE_RUNNING
		}
		if f.status.LastActiveAt != nil {
			e.lastActive = f.status.LastActiveAt.AsTime()
		}
	default:
		// It never got the identity that the record gives it: the create was cut before. The VM is swept.
		fail(reasonHostLost)
	}
	n.mu.Lock()
	n.sandboxes[e.id] = e // from here on those adopted before may look
	n.mu.Unlock()
	if e.shim != nil && e.state != nodev1.SandboxState_SANDBOX_STATE_FAILED {
		n.wg.Go(func() { n.watchShim(e) })
	}
	return e.shim
}

// sweep ends what has no record. What cannot be ended within the time is left for the next start.
func (n *Node) sweep(ctx context.Context, remains []*shims.Shim, folders []string, keep map[string]bool) error {
	var wg sync.WaitGroup
	for _, s := range remains {
		n.log.Info("sweeping a shim without a sandbox", "shim", s.ID, "alive", s.Alive())
		wg.Go(func() { _ = n.destroyShim(ctx, s) }) // logged there
	}
	wg.Wait()
	var errs []error
	for _, name := range folders {
		errs = append(errs, os.RemoveAll(filepath.Join(n.l.sandboxes(), name)))
	}
	errs = append(errs,
		n.cgroups.Sweep(ctx, func(name string) bool { return keep[name] }),
		n.sweepSockets(keep),
		n.sweepWarm(),
	)
	if err := errors.Join(errs...); err != nil {
		n.log.Warn("sweep", "error", err)
	}
	return ctx.Err()
}

func (n *Node) sweepSockets(keep map[string]bool) error {
	entries, err := os.ReadDir(n.l.run)
	if err != nil {
		return err
	}
	var errs []error
	for _, e := range entries {
		if !keep[e.Name()] && e.Type()&os.ModeSocket != 0 {
			errs = append(errs, os.Remove(filepath.Join(n.l.run, e.Name())))
		}
	}
	return errors.Join(errs...)
}

// sweepWarm removes snapshots that were not finished.
func (n *Node) sweepWarm() error {
	unfinished, err := filepath.Glob(filepath.Join(n.l.warm(), "*", "*.tmp"))
	if err != nil {
		return err
	}
	var errs []error
	for _, path := range unfinished {
		errs = append(errs, os.RemoveAll(path))
	}
	return errors.Join(errs...)
}

// sweepObsolete removes snapshots of other templates, guests or accelerations that no shim's disk is based on. A
// create can ask only for what p holds.
func (n *Node) sweepObsolete(p *prepared) {
	dirs, err := filepath.Glob(filepath.Join(n.l.warm(), "*", "*"))
	if err != nil {
		n.log.Warn("sweep", "error", err)
		return
	}
	suffix := fmt.Sprintf("-%s-%s", p.caps.Acceleration, shortDigest(p.guest.Digest))
	current := filepath.Join(n.l.warm(), strings.TrimPrefix(p.tmpl.Digest, "sha256:"))
	used := n.warmInUse()
	for _, dir := range dirs {
		name := strings.TrimSuffix(filepath.Base(dir), ".tmp")
		if filepath.Dir(dir) == current && strings.HasSuffix(name, suffix) || used[dir] {
			continue
		}
		n.log.Info("sweeping an obsolete snapshot", "folder", dir)
		if err := os.RemoveAll(dir); err != nil {
			n.log.Warn("sweep", "error", err)
			continue
		}
		_ = os.Remove(filepath.Dir(dir)) // if it was the last one of its template
	}
}

// warmInUse returns the snapshot folders that sandboxes' disks are based on.
func (n *Node) warmInUse() map[string]bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	used := map[string]bool{}
	for _, e := range n.sandboxes {
		if e.ended() && e.shim != nil {
			for _, path := range e.shim.Spec.WritableBacking {
				used[filepath.Dir(path)] = true
			}
		}
	}
	return used
}
