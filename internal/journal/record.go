package journal

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"

	agentv1 "github.com/space-sandbox/space/internal/gen/space/agent/v1"
	nodev1 "github.com/space-sandbox/space/internal/gen/space/node/v1"
	"google.golang.org/protobuf/proto"
)

// kind says what a record's payload is.
type kind uint8

const (
	kindSegment kind = 1 + iota // first record of a segment: the stream offsets before its first event
	kindStarted
	kindOutput
	kindExited
)

const (
	headerSize    = 4 + 4 + 8 + 1
	outputHeader  = 1 + 8
	maxPayload    = 64 << 10
	segmentHeader = headerSize + 8*streams
	// MaxChunk is the most bytes that one output event carries.
	MaxChunk = 32 << 10
	// streams is the number of output streams; agentv1.Stream values run from 1 to it.
	streams = 3
)

var (
	errShort = errors.New("record is cut off")
	errBad   = errors.New("record is damaged")
	castag   = crc32.MakeTable(crc32.Castagnoli)
)

// record is one entry of a segment. The payload of a decoded record aliases the input.
type record struct {
	id      uint64
	kind    kind
	payload []byte
}

// appendRecord encodes r at the end of dst.
func appendRecord(dst []byte, r record) []byte {
	start := len(dst)
	dst = binary.LittleEndian.AppendUint32(dst, uint32(len(r.payload)))
	dst = append(dst, 0, 0, 0, 0)
	dst = binary.LittleEndian.AppendUint64(dst, r.id)
	dst = append(dst, byte(r.kind))
	dst = append(dst, r.payload...)
	binary.LittleEndian.PutUint32(dst[start+4:], recordSum(dst[start:]))
	return dst
}

// recordSum covers the whole record but the sum itself.
func recordSum(rec []byte) uint32 {
	sum := crc32.Update(0, castag, rec[:4])
	return crc32.Update(sum, castag, rec[8:])
}

// decodeRecord reads the record at the start of b and returns its encoded length. errShort means that b ends
// before the record does, errBad that no record is there.
func decodeRecord(b []byte) (record, int, error) {
	if len(b) < headerSize {
		return record{}, 0, errShort
	}
	n := binary.LittleEndian.Uint32(b)
	if n > maxPayload {
		return record{}, 0, errBad
	}
	end := headerSize + int(n)
	if len(b) < end {
		return record{}, 0, errShort
	}
	if binary.LittleEndian.Uint32(b[4:]) != recordSum(b[:end]) {
		return record{}, 0, errBad
	}
	r := record{id: binary.LittleEndian.Uint64(b[8:]), kind: kind(b[16]), payload: b[headerSize:end:end]}
	if r.id == 0 || r.kind < kindSegment || r.kind > kindExited {
		return record{}, 0, errBad
	}
	return r, end, nil
}

// position is a point between two events: the ID of the next one and how many bytes each stream had before it.
type position struct {
	next uint64
	off  [streams + 1]uint64 // by agentv1.Stream
}

// total is the number of output bytes before p.
func (p position) total() uint64 { return p.off[1] + p.off[2] + p.off[3] }

// segmentRecord is the first record of a segment that starts at p.
func segmentRecord(p position) record {
	var payload []byte
	for s := 1; s <= streams; s++ {
		payload = binary.LittleEndian.AppendUint64(payload, p.off[s])
	}
	return record{id: p.next, kind: kindSegment, payload: payload}
}

// parseSegment is the inverse of segmentRecord.
func parseSegment(r record) (position, error) {
	if r.kind != kindSegment || len(r.payload) != 8*streams {
		return position{}, errBad
	}
	p := position{next: r.id}
	for s := 1; s <= streams; s++ {
		p.off[s] = binary.LittleEndian.Uint64(r.payload[8*(s-1):])
	}
	return p, nil
}

// outputPayload is the payload of an output record.
func outputPayload(stream agentv1.Stream, offset uint64, data []byte) []byte {
	dst := append(make([]byte, 0, outputHeader+len(data)), byte(stream))
	dst = binary.LittleEndian.AppendUint64(dst, offset)
	return append(dst, data...)
}

// advance checks that r is the event due at p and moves p past it.
func (p *position) advance(r record) error {
	if r.id != p.next || r.kind == kindSegment {
		return fmt.Errorf("%w: event %d where %d is due", errBad, r.id, p.next)
	}
	if r.kind == kindOutput {
		if len(r.payload) <= outputHeader {
			return errBad
		}
		s := r.payload[0]
		if s < 1 || s > streams || binary.LittleEndian.Uint64(r.payload[1:]) != p.off[s] {
			return errBad
		}
		p.off[s] += uint64(len(r.payload) - outputHeader)
	}
	p.next++
	return nil
}

// event decodes a record's payload; the result shares no memory with it.
func (r record) event() (*nodev1.Event, error) {
	ev := &nodev1.Event{Id: r.id}
	switch r.kind {
	case kindStarted:
		m := new(nodev1.Started)
		if err := proto.Unmarshal(r.payload, m); err != nil {
			return nil, fmt.Errorf("%w: %w", errBad, err)
		}
		ev.Kind = &nodev1.Event_Started{Started: m}
	case kindOutput:
		if len(r.payload) <= outputHeader {
			return nil, errBad
		}
		ev.Kind = &nodev1.Event_Output{Output: &nodev1.OutputChunk{
			Stream: agentv1.Stream(r.payload[0]),
			Offset: binary.LittleEndian.Uint64(r.payload[1:]),
			Data:   append([]byte(nil), r.payload[outputHeader:]...),
		}}
	case kindExited:
		m := new(nodev1.ProcessExited)
		if err := proto.Unmarshal(r.payload, m); err != nil {
			return nil, fmt.Errorf("%w: %w", errBad, err)
		}
		ev.Kind = &nodev1.Event_Exited{Exited: m}
	default:
		return nil, errBad
	}
	return ev, nil
}
