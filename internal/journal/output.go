package journal

import (
	"context"
	"errors"
	"fmt"
	"io"

	agentv1 "github.com/space-sandbox/space/internal/gen/space/agent/v1"
)

// ErrOutOfRange means that the stream has not come to this offset.
var ErrOutOfRange = errors.New("offset is past the end of the output")

// DroppedError says that bytes of a stream are no longer kept.
type DroppedError struct {
	Stream   agentv1.Stream
	From, To uint64
}

// Error implements error.
func (e *DroppedError) Error() string {
	return fmt.Sprintf("output bytes %d to %d are no longer kept", e.From, e.To)
}

// OutputReader reads one stream's bytes. One goroutine uses it and closes it.
type OutputReader struct {
	r      *Reader
	stream agentv1.Stream
	at     uint64
	end    uint64 // when not following
	follow bool
}

// NewOutputReader reads a stream from a byte offset to its current end, or with follow until the exit or the end of
// a sealed journal. It fails with *DroppedError or ErrOutOfRange when the offset cannot be had.
func (p *Process) NewOutputReader(stream agentv1.Stream, from uint64, follow bool) (*OutputReader, error) {
	if stream < 1 || stream > streams {
		return nil, fmt.Errorf("stream %d: %w", stream, ErrTooLarge)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.removed {
		return nil, fmt.Errorf("process %s: %w", p.id, ErrNotFound)
	}
	end := p.pos.off[stream]
	if from > end {
		return nil, fmt.Errorf("offset %d of %d: %w", from, end, ErrOutOfRange)
	}
	o := &OutputReader{r: &Reader{p: p, pos: p.pos}, stream: stream, at: from, end: end, follow: follow}
	if from == end {
		return o, nil
	}
	if len(p.segs) == 0 || from < p.segs[0].base.off[stream] {
		kept := end
		if len(p.segs) > 0 {
			kept = p.segs[0].base.off[stream]
		}
		return nil, &DroppedError{Stream: stream, From: from, To: kept}
	}
	for _, s := range p.segs {
		if s.base.off[stream] <= from {
			o.r.pos = s.base
		}
	}
	return o, nil
}

// Next returns the next bytes and the offset of the first. io.EOF is the end.
func (o *OutputReader) Next(ctx context.Context) ([]byte, uint64, error) {
	for o.follow || o.at < o.end {
		ev, err := o.r.Next(ctx)
		if err != nil {
			return nil, 0, err
		}
		if d := ev.GetDropped(); d.GetStream() == o.stream {
			return nil, 0, &DroppedError{Stream: o.stream, From: o.at, To: d.GetToOffset()}
		}
		if ev.GetResync() != nil {
			return nil, 0, fmt.Errorf("output at %d: %w", o.at, ErrCorrupt)
		}
		out := ev.GetOutput()
		data := out.GetData()
		if out.GetStream() != o.stream || out.GetOffset()+uint64(len(data)) <= o.at {
			continue
		}
		if out.GetOffset() < o.at {
			data = data[o.at-out.GetOffset():]
		}
		if !o.follow && o.at+uint64(len(data)) > o.end {
			data = data[:o.end-o.at]
		}
		at := o.at
		o.at += uint64(len(data))
		return data, at, nil
	}
	return nil, 0, io.EOF
}

// Close releases the reader's file.
func (o *OutputReader) Close() { o.r.Close() }
