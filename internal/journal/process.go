package journal

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"

	agentv1 "github.com/space-sandbox/space/internal/gen/space/agent/v1"
	nodev1 "github.com/space-sandbox/space/internal/gen/space/node/v1"
	"github.com/space-sandbox/space/internal/sandbox"
	"google.golang.org/protobuf/proto"
)

const (
	minSegment = 4 << 10
	maxSegment = 1 << 20
	// maxUnsynced bounds the files of one process that wait for an fsync.
	maxUnsynced = 4
)

// Process is one process's record and events. It is safe for concurrent use; appends are serialised.
type Process struct {
	j   *Journal
	id  sandbox.ProcessID
	dir string

	wmu      sync.Mutex // held over writes; before mu
	f        *os.File   // the last segment, nil when there is none or it cannot grow
	unsynced []*os.File // full segments that were not fsynced yet
	buf      []byte

	mu      sync.Mutex
	meta    meta
	segs    []*segment
	pos     position
	kept    int64 // bytes on disk
	changed chan struct{}
	exit    *nodev1.ProcessExited
	sealed  bool  // no more events will come
	removed bool  // the folder is gone
	damaged error // the last segment is corrupt: no appends, readers end in this error
	dirty   bool
}

// ID returns the process's ID.
func (p *Process) ID() sandbox.ProcessID { return p.id }

// Record returns a copy of the process's record.
func (p *Process) Record() *nodev1.Process {
	p.mu.Lock()
	defer p.mu.Unlock()
	m := proto.CloneOf(p.meta.proc)
	p.countLocked(m)
	return m
}

// countLocked fills in the byte counts from the position.
func (p *Process) countLocked(m *nodev1.Process) {
	m.StdoutBytes = p.pos.off[agentv1.Stream_STREAM_STDOUT] + p.pos.off[agentv1.Stream_STREAM_PTY]
	m.StderrBytes = p.pos.off[agentv1.Stream_STREAM_STDERR]
	m.DroppedBytes = p.droppedLocked()
}

func (p *Process) droppedLocked() uint64 {
	if len(p.segs) == 0 {
		return p.pos.total()
	}
	return p.segs[0].base.total()
}

// LastID is the ID of the newest event, 0 if there is none.
func (p *Process) LastID() uint64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.pos.next - 1
}

// Changed returns a channel that is closed at the next event or change of state.
func (p *Process) Changed() <-chan struct{} {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.changed
}

// Exited reports whether the exit event is journalled.
func (p *Process) Exited() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.exit != nil
}

// Sealed reports whether no more events will come although the process may not have exited.
func (p *Process) Sealed() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.sealed
}

// AppendStarted journals the start. It must be the first event.
func (p *Process) AppendStarted(ev *nodev1.Started) error {
	payload, err := proto.Marshal(ev)
	if err != nil {
		return fmt.Errorf("encode event: %w", err)
	}
	p.wmu.Lock()
	defer p.wmu.Unlock()
	if p.LastID() != 0 {
		return fmt.Errorf("process %s: %w: it has started already", p.id, ErrOrder)
	}
	if err := p.appendLocked(kindStarted, payload); err != nil {
		return err
	}
	p.mu.Lock()
	p.meta.proc.State = nodev1.ProcessState_PROCESS_STATE_RUNNING
	p.meta.proc.OsPid = ev.GetOsPid()
	p.meta.proc.StartedAt = ev.GetAt()
	m := p.snapshotLocked()
	p.mu.Unlock()
	return m.write(p.dir)
}

// AppendOutput journals a chunk of 1 to MaxChunk bytes at the end of a stream.
func (p *Process) AppendOutput(stream agentv1.Stream, data []byte) error {
	if stream < 1 || stream > streams || len(data) == 0 || len(data) > MaxChunk {
		return fmt.Errorf("%d bytes for stream %d: %w", len(data), stream, ErrTooLarge)
	}
	p.wmu.Lock()
	defer p.wmu.Unlock()
	p.mu.Lock()
	off, started := p.pos.off[stream], p.pos.next > 1
	p.mu.Unlock()
	if !started {
		return fmt.Errorf("process %s: %w: output before the start", p.id, ErrOrder)
	}
	return p.appendLocked(kindOutput, outputPayload(stream, off, data))
}

// AppendExited journals the exit, the last event, and returns when it is on stable storage; readers see it before.
func (p *Process) AppendExited(exit *agentv1.Exited) error {
	err := p.appendExited(exit)
	if p.Exited() {
		p.j.exited(p) // not under wmu: it takes the wmu of others
	}
	return err
}

func (p *Process) appendExited(exit *agentv1.Exited) error {
	p.wmu.Lock()
	defer p.wmu.Unlock()
	p.mu.Lock()
	ev := &nodev1.ProcessExited{Exit: exit, DroppedBytes: p.droppedLocked()}
	ev.StdoutBytes = p.pos.off[agentv1.Stream_STREAM_STDOUT] + p.pos.off[agentv1.Stream_STREAM_PTY]
	ev.StderrBytes = p.pos.off[agentv1.Stream_STREAM_STDERR]
	started := p.pos.next > 1
	p.mu.Unlock()
	if !started {
		return fmt.Errorf("process %s: %w: exit before the start", p.id, ErrOrder)
	}
	payload, err := proto.Marshal(ev)
	if err != nil {
		return fmt.Errorf("encode event: %w", err)
	}
	if err := p.appendLocked(kindExited, payload); err != nil {
		return err
	}
	p.mu.Lock()
	m := p.snapshotLocked()
	p.mu.Unlock()
	if err := m.write(p.dir); err != nil {
		return err
	}
	p.retireLocked()
	return p.syncLocked()
}

// applyExitLocked notes an exit event. p.mu is held.
func (p *Process) applyExitLocked(ev *nodev1.ProcessExited) {
	p.exit = ev
	p.meta.proc.State = nodev1.ProcessState_PROCESS_STATE_EXITED
	p.meta.proc.Exit = ev.GetExit()
	p.meta.proc.ExitedAt = ev.GetExit().GetAt()
	p.meta.lastID = p.pos.next - 1
}

func (p *Process) snapshotLocked() meta {
	m := p.meta
	m.proc = proto.CloneOf(m.proc)
	p.countLocked(m.proc)
	return m
}

// appendLocked writes one event and then lets readers see it. p.wmu is held.
func (p *Process) appendLocked(k kind, payload []byte) error {
	if err := p.writable(); err != nil {
		return err
	}
	if err := p.roll(); err != nil {
		return err
	}
	p.mu.Lock()
	seg, rec := p.segs[len(p.segs)-1], record{id: p.pos.next, kind: k, payload: payload}
	p.mu.Unlock()
	p.buf = appendRecord(p.buf[:0], rec)
	if _, err := p.f.WriteAt(p.buf, seg.size); err != nil {
		_ = p.f.Truncate(seg.size) // best effort: the next append writes at the same place
		return fmt.Errorf("write journal of %s: %w", p.id, err)
	}
	p.mu.Lock()
	seg.size += int64(len(p.buf))
	p.kept += int64(len(p.buf))
	_ = p.pos.advance(rec) // built from pos: it fits
	if k == kindExited {
		ev := new(nodev1.ProcessExited)
		if proto.Unmarshal(payload, ev) == nil {
			p.applyExitLocked(ev)
		}
	}
	victims := p.overCapLocked()
	p.wakeLocked()
	first := !p.dirty
	p.dirty = true
	p.mu.Unlock()
	p.drop(victims)
	if first {
		p.j.scheduleSync(p)
	}
	p.j.grew(int64(len(p.buf)))
	return nil
}

func (p *Process) writable() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case p.damaged != nil:
		return p.damaged
	case p.removed:
		return fmt.Errorf("process %s: %w", p.id, ErrNotFound)
	case p.exit != nil:
		return fmt.Errorf("process %s: %w: it has exited", p.id, ErrOrder)
	case p.sealed:
		return fmt.Errorf("process %s: %w", p.id, ErrSealed)
	}
	return nil
}

// segmentBytes is how large a segment may grow: small enough that dropping one keeps most of the cap.
func (p *Process) segmentBytes() int64 {
	return min(max(int64(p.meta.proc.GetOutputCapBytes()/16), minSegment), maxSegment)
}

// roll makes sure that there is a last segment with room. p.wmu is held.
func (p *Process) roll() error {
	p.mu.Lock()
	full := len(p.segs) > 0 && p.segs[len(p.segs)-1].size >= p.segmentBytes()
	base := p.pos
	p.mu.Unlock()
	if p.f != nil && !full {
		return nil
	}
	f, err := os.OpenFile(segmentPath(p.dir, base.next), os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
	if err != nil {
		return fmt.Errorf("new segment for %s: %w", p.id, err)
	}
	header := appendRecord(nil, segmentRecord(base))
	if _, err := f.Write(header); err != nil {
		f.Close()
		return errors.Join(fmt.Errorf("new segment for %s: %w", p.id, err), dropSegment(p.dir, base.next))
	}
	p.retireLocked()
	if len(p.unsynced) > maxUnsynced {
		if err := p.syncLocked(); err != nil {
			f.Close()
			return errors.Join(err, dropSegment(p.dir, base.next))
		}
	}
	p.f = f
	p.mu.Lock()
	p.segs = append(p.segs, &segment{base: base, size: int64(len(header))})
	p.kept += int64(len(header))
	p.mu.Unlock()
	p.j.grew(int64(len(header)))
	return nil
}

// retireLocked takes the last segment out of use; the next sync closes it. p.wmu is held.
func (p *Process) retireLocked() {
	if p.f != nil {
		p.unsynced = append(p.unsynced, p.f)
		p.f = nil
	}
}

// overCapLocked takes the oldest segments off the list while the process keeps more than its cap. What counts is
// output; a second bound stops records of a byte each from filling the disk with their headers.
func (p *Process) overCapLocked() []*segment {
	outputCap := p.meta.proc.GetOutputCapBytes()
	var victims []*segment
	for len(p.segs) > 1 {
		output := p.pos.total() - p.segs[0].base.total()
		if output <= outputCap && p.kept <= 2*int64(outputCap)+maxSegment {
			break
		}
		victims = append(victims, p.shiftLocked())
	}
	return victims
}

func (p *Process) shiftLocked() *segment {
	s := p.segs[0]
	p.segs = p.segs[1:]
	p.kept -= s.size
	return s
}

// drop unlinks segments that were taken off the list. A file that stays behind is unlinked with the folder.
func (p *Process) drop(victims []*segment) {
	for _, s := range victims {
		_ = dropSegment(p.dir, s.base.next)
		p.j.grew(-s.size)
	}
}

// shed drops the oldest segment, of an exited process even the last one. It reports whether it dropped any.
func (p *Process) shed() bool {
	p.mu.Lock()
	var victims []*segment
	if !p.removed && (len(p.segs) > 1 || (len(p.segs) == 1 && p.exit != nil)) {
		victims = append(victims, p.shiftLocked())
		p.wakeLocked()
	}
	p.mu.Unlock()
	p.drop(victims)
	return len(victims) > 0
}

func (p *Process) wakeLocked() {
	close(p.changed)
	p.changed = make(chan struct{})
}

// seal ends the journal as it is: readers get to its end.
func (p *Process) seal() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.sealed {
		p.sealed = true
		p.wakeLocked()
	}
}

// sync makes what was appended durable.
func (p *Process) sync() error {
	p.wmu.Lock()
	defer p.wmu.Unlock()
	return p.syncLocked()
}

// syncLocked holds p.wmu: appends to this process wait, readers do not.
func (p *Process) syncLocked() error {
	p.mu.Lock()
	removed := p.removed
	p.dirty = false
	p.mu.Unlock()
	var errs []error
	for _, f := range p.unsynced {
		errs = append(errs, f.Sync(), f.Close())
	}
	p.unsynced = p.unsynced[:0]
	if removed {
		return nil
	}
	if p.f != nil {
		errs = append(errs, p.f.Sync())
	}
	errs = append(errs, syncPath(filepath.Join(p.dir, metaFile)), syncPath(p.dir))
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("sync journal of %s: %w", p.id, err)
	}
	return nil
}

func syncPath(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	return f.Sync()
}

// close releases the files. The Process can still be read.
func (p *Process) close() error {
	p.seal()
	p.wmu.Lock()
	defer p.wmu.Unlock()
	p.retireLocked()
	return p.syncLocked()
}

// remove deletes the folder. Readers end.
func (p *Process) remove() error {
	p.wmu.Lock()
	defer p.wmu.Unlock()
	p.mu.Lock()
	p.removed, p.sealed = true, true
	kept := p.kept
	p.kept, p.segs = 0, nil
	p.wakeLocked()
	p.mu.Unlock()
	p.j.grew(-kept)
	p.retireLocked()
	for _, f := range p.unsynced {
		f.Close()
	}
	p.unsynced = nil
	return os.RemoveAll(p.dir)
}
