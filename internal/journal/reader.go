package journal

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"sort"

	agentv1 "github.com/space-sandbox/space/internal/gen/space/agent/v1"
	nodev1 "github.com/space-sandbox/space/internal/gen/space/node/v1"
	"google.golang.org/protobuf/proto"
)

// readChunk is how much a Reader reads at once; it holds the largest record of the writer.
const readChunk = 48 << 10

// Reader follows one process's events. One goroutine uses it and closes it.
type Reader struct {
	p       *Process
	pos     position // before the next event to deliver
	pending []*nodev1.Event

	f     *os.File
	first uint64   // of the segment that f is
	cur   position // before the record at `at`
	at    int64
	buf   []byte // unread bytes of f at `at`
	store []byte
}

// NewReader returns a reader of the events after the one with ID *after, or of all events when after is nil or 0.
// An ID that this process does not have, or no longer, makes its first event a resync_required.
func (p *Process) NewReader(after *uint64) *Reader {
	r := &Reader{p: p, pos: position{next: 1}}
	if after == nil || *after == 0 {
		return r
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	first := p.firstKeptLocked()
	switch {
	case *after >= p.pos.next:
		r.resync(first, 0)
	case *after+1 < first:
		r.resync(first, first-*after-1)
	default:
		r.pos.next = *after + 1
	}
	return r
}

// firstKeptLocked is the ID of the oldest event on disk; of an exited process at least the exit can be told.
func (p *Process) firstKeptLocked() uint64 {
	switch {
	case len(p.segs) > 0:
		return p.segs[0].base.next
	case p.exit != nil:
		return p.pos.next - 1
	}
	return p.pos.next
}

func (r *Reader) resync(first, dropped uint64) {
	r.pending = append(r.pending, &nodev1.Event{Kind: &nodev1.Event_Resync{
		Resync: &nodev1.ResyncRequired{FirstAvailableId: first, DroppedEvents: dropped},
	}})
	r.pos.next = first
}

// Close releases the reader's file.
func (r *Reader) Close() {
	if r.f != nil {
		r.f.Close()
		r.f = nil
	}
}

// Next returns the next event, waiting for it if need be. io.EOF follows the exit event, or the last event of a
// sealed journal; ErrNotFound the removal of the process, ErrCorrupt damage that cannot be passed.
func (r *Reader) Next(ctx context.Context) (*nodev1.Event, error) {
	for {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		if len(r.pending) > 0 {
			ev := r.pending[0]
			r.pending = r.pending[1:]
			return ev, nil
		}
		seg, size, wait, err := r.locate()
		switch {
		case err != nil:
			return nil, err
		case wait != nil:
			select {
			case <-wait:
			case <-ctx.Done():
				return nil, ctx.Err()
			}
		case seg != nil:
			if err := r.read(*seg, size); err != nil {
				return nil, err
			}
		}
	}
}

// locate decides under the lock where the next event comes from: a segment of a size, a channel to wait on, or
// neither when it has filled r.pending itself.
func (r *Reader) locate() (*position, int64, <-chan struct{}, error) {
	p := r.p
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.removed {
		return nil, 0, nil, fmt.Errorf("process %s: %w", p.id, ErrNotFound)
	}
	if r.pos.next >= p.pos.next {
		switch {
		case p.damaged != nil:
			return nil, 0, nil, p.damaged
		case p.exit != nil || p.sealed:
			return nil, 0, nil, io.EOF
		}
		return nil, 0, p.changed, nil
	}
	if len(p.segs) == 0 || r.pos.next < p.segs[0].base.next {
		r.skipDroppedLocked()
		return nil, 0, nil, nil
	}
	i := sort.Search(len(p.segs), func(i int) bool { return p.segs[i].base.next > r.pos.next }) - 1
	base := p.segs[i].base
	return &base, p.segs[i].size, nil, nil
}

// skipDroppedLocked moves the reader over events that the caps removed and says so. The start and the exit are
// told from the record.
func (r *Reader) skipDroppedLocked() {
	p := r.p
	if at := p.meta.proc.GetStartedAt(); r.pos.next == 1 && at != nil {
		r.pending = append(r.pending, &nodev1.Event{Id: 1, Kind: &nodev1.Event_Started{
			Started: &nodev1.Started{OsPid: p.meta.proc.GetOsPid(), At: proto.CloneOf(at)},
		}})
		r.pos.next = 2
		return
	}
	to := p.pos
	if len(p.segs) > 0 {
		to = p.segs[0].base
	} else if p.exit != nil {
		to.next--
	}
	for s := 1; s <= streams; s++ {
		if from := r.pos.off[s]; from < to.off[s] {
			r.pending = append(r.pending, &nodev1.Event{Kind: &nodev1.Event_Dropped{Dropped: &nodev1.OutputDropped{
				Stream: agentv1.Stream(s), FromOffset: from, ToOffset: to.off[s],
			}}})
		}
	}
	if n := len(r.pending); n > 0 {
		// Only the last one carries the ID: a client that is cut before it must be told again.
		r.pending[n-1].Id = to.next - 1
	}
	r.pos = to
	if len(p.segs) == 0 && p.exit != nil {
		r.pending = append(r.pending, &nodev1.Event{Id: to.next, Kind: &nodev1.Event_Exited{Exited: proto.CloneOf(p.exit)}})
		r.pos.next++
	}
}

// read delivers at least one event from the segment that starts at base, of which size bytes may be read.
func (r *Reader) read(base position, size int64) error {
	if r.f == nil || r.first != base.next {
		if err := r.open(base); err != nil {
			if errors.Is(err, os.ErrNotExist) && r.stillListed(base.next) {
				return r.pass(base.next)
			}
			return ignoreNotExist(err)
		}
	}
	for len(r.pending) == 0 {
		rec, err := r.record(size)
		if err == nil && rec.kind != kindSegment {
			err = r.cur.advance(rec)
		}
		if err != nil {
			return r.pass(base.next)
		}
		if rec.kind == kindSegment || rec.id < r.pos.next {
			continue
		}
		ev, err := rec.event()
		if err != nil {
			return r.pass(base.next)
		}
		r.pending = append(r.pending, ev)
		r.pos = r.cur
	}
	return nil
}

// ignoreNotExist: a segment that went between locate and open is found dropped in the next round.
func ignoreNotExist(err error) error {
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	return err
}

// stillListed reports whether the segment ought to be there: then its file was taken away behind our back.
func (r *Reader) stillListed(first uint64) bool {
	r.p.mu.Lock()
	defer r.p.mu.Unlock()
	for _, s := range r.p.segs {
		if s.base.next == first {
			return true
		}
	}
	return false
}

func (r *Reader) open(base position) error {
	f, err := os.Open(segmentPath(r.p.dir, base.next))
	if err != nil {
		return err
	}
	r.Close()
	r.f, r.first, r.cur, r.at, r.buf = f, base.next, base, 0, nil
	return nil
}

// record returns the next record of the open segment; it is valid until the next call.
func (r *Reader) record(size int64) (record, error) {
	rec, n, err := decodeRecord(r.buf)
	if errors.Is(err, errShort) {
		if r.store == nil {
			r.store = make([]byte, readChunk)
		}
		want := min(int64(len(r.store)), size-r.at)
		if want <= int64(len(r.buf)) {
			return record{}, errBad // the file is shorter than what was written
		}
		got, rerr := r.f.ReadAt(r.store[:want], r.at)
		if rerr != nil && !errors.Is(rerr, io.EOF) {
			return record{}, rerr
		}
		r.buf = r.store[:got]
		rec, n, err = decodeRecord(r.buf)
	}
	if err != nil {
		return record{}, err
	}
	r.buf = r.buf[n:]
	r.at += int64(n)
	return rec, nil
}

// pass goes from a damaged segment to the next one, or fails with ErrCorrupt when there is none.
func (r *Reader) pass(first uint64) error {
	r.Close()
	r.p.mu.Lock()
	defer r.p.mu.Unlock()
	for _, s := range r.p.segs {
		if s.base.next > first && s.base.next > r.pos.next {
			missing := s.base.next - r.pos.next
			r.resync(s.base.next, missing)
			r.pos = s.base
			return nil
		}
	}
	if exit := r.p.exit; exit != nil && r.pos.next < r.p.pos.next-1 {
		last := r.p.pos.next - 1 // the exit is in the record, too
		r.resync(last, last-r.pos.next)
		r.pending = append(r.pending, &nodev1.Event{Id: last, Kind: &nodev1.Event_Exited{Exited: proto.CloneOf(exit)}})
		r.pos = r.p.pos
		return nil
	}
	return fmt.Errorf("process %s after event %d: %w", r.p.id, r.pos.next-1, ErrCorrupt)
}
