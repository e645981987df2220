package proc

import (
	"context"
	"sync"
	"time"

	agentv1 "github.com/space-sandbox/space/internal/gen/space/agent/v1"
	"google.golang.org/protobuf/types/known/timestamppb"
)

const (
	// ringBytes bounds the output that one process has unacknowledged.
	ringBytes = 2 << 20
	// frameCost is what a frame counts beside its data: a process that writes single bytes costs what it uses.
	frameCost = 192
)

// ring holds the frames of one process that are not acknowledged.
type ring struct {
	mu      sync.Mutex
	frames  []*agentv1.ProcessFrame // seq is consecutive
	next    uint64                  // seq of the next frame
	bytes   int
	exited  bool
	closed  bool          // nobody will acknowledge any more: output is thrown away
	changed chan struct{} // closed and replaced whenever something above changes
}

func newRing() *ring {
	return &ring{next: 1, changed: make(chan struct{})}
}

// wake tells all waiters to look again. The caller holds mu.
func (r *ring) wake() {
	close(r.changed)
	r.changed = make(chan struct{})
}

func (r *ring) append(f *agentv1.ProcessFrame, size int) {
	r.add(f, size)
	r.wake()
}

// add is append without telling the waiters.
func (r *ring) add(f *agentv1.ProcessFrame, size int) {
	f.Seq = r.next
	r.next++
	r.bytes += size
	r.frames = append(r.frames, f)
}

// output adds data in frames, waiting while the ring is full. It keeps data. Readers are woken once for all that
// fits.
func (r *ring) output(stream agentv1.Stream, data []byte) {
	r.mu.Lock()
	defer r.mu.Unlock()
	added := false
	for len(data) > 0 && !r.closed {
		n := min(len(data), frameBytes)
		if r.bytes > 0 && r.bytes+n+frameCost > ringBytes {
			if added {
				r.wake()
				added = false
			}
			changed := r.changed
			r.mu.Unlock()
			<-changed // closed by ack, or by close at the latest
			r.mu.Lock()
			continue
		}
		r.add(&agentv1.ProcessFrame{Kind: &agentv1.ProcessFrame_Output{
			Output: &agentv1.Output{Stream: stream, Data: data[:n:n]}}}, n+frameCost)
		added, data = true, data[n:]
	}
	if added {
		r.wake()
	}
}

func (r *ring) started(pid int, at time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.append(&agentv1.ProcessFrame{Kind: &agentv1.ProcessFrame_Started{
		Started: &agentv1.Started{OsPid: int32(pid), At: timestamppb.New(at)}}}, 0)
}

func (r *ring) exit(e *agentv1.Exited) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.exited = true
	r.append(&agentv1.ProcessFrame{Kind: &agentv1.ProcessFrame_Exited{Exited: e}}, 0)
}

// close frees everything and lets readers of pipes go on.
func (r *ring) close() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.closed, r.frames, r.bytes = true, nil, 0
	r.wake()
}

// ack frees the frames up to seq and reports whether `exited` was among them.
func (r *ring) ack(seq uint64) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	seq = min(seq, r.next-1)
	n := 0
	for n < len(r.frames) && r.frames[n].GetSeq() <= seq {
		if out := r.frames[n].GetOutput(); out != nil {
			r.bytes -= len(out.GetData()) + frameCost
		}
		r.frames[n] = nil
		n++
	}
	if n > 0 {
		r.frames = r.frames[n:]
		if len(r.frames) == 0 {
			r.frames = nil
		}
		r.wake()
	}
	return r.exited && seq == r.next-1
}

// after waits for frames past seq. It returns none, and true, when `exited` is past or the ring was closed.
func (r *ring) after(ctx context.Context, seq uint64) ([]*agentv1.ProcessFrame, bool, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for {
		if n := len(r.frames); n > 0 && r.frames[n-1].GetSeq() > seq {
			first := r.frames[0].GetSeq()
			skip := 0
			if seq >= first {
				skip = int(seq - first + 1)
			}
			return append([]*agentv1.ProcessFrame(nil), r.frames[skip:]...), false, nil
		}
		if r.exited || r.closed {
			return nil, true, nil
		}
		changed := r.changed
		r.mu.Unlock()
		var err error
		select {
		case <-changed:
		case <-ctx.Done():
			err = ctx.Err()
		}
		r.mu.Lock()
		if err != nil {
			return nil, false, err
		}
	}
}

// last returns the newest seq and whether `exited` is in.
func (r *ring) last() (uint64, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.next - 1, r.exited
}
