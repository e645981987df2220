package journal

import (
	"bytes"
	"errors"
	"testing"
)

func FuzzDecodeRecord(f *testing.F) {
	f.Add(appendRecord(nil, record{id: 1, kind: kindStarted}))
	f.Add(appendRecord(nil, record{id: 2, kind: kindOutput, payload: outputPayload(stdout, 0, []byte("hello"))}))
	f.Add(appendRecord(nil, segmentRecord(position{next: 9, off: [4]uint64{0, 1, 2, 3}})))
	f.Add([]byte{0xff, 0xff, 0xff, 0xff})
	f.Fuzz(func(t *testing.T, b []byte) {
		rec, n, err := decodeRecord(b)
		if err != nil {
			if !errors.Is(err, errShort) && !errors.Is(err, errBad) {
				t.Fatalf("untyped error %v", err)
			}
			return
		}
		if n < headerSize || n > len(b) || len(rec.payload) > maxPayload {
			t.Fatalf("length %d of %d", n, len(b))
		}
		if again := appendRecord(nil, rec); !bytes.Equal(again, b[:n]) {
			t.Fatal("does not encode to what it was decoded from")
		}
		_, _ = rec.event()
		_, _ = parseSegment(rec)
		pos := position{next: rec.id}
		_ = pos.advance(rec)
	})
}

func FuzzDecodeMeta(f *testing.F) {
	f.Add([]byte{})
	f.Add(make([]byte, metaHeader))
	f.Fuzz(func(t *testing.T, b []byte) {
		if _, err := decodeMeta(b); err != nil && !errors.Is(err, ErrCorrupt) {
			t.Fatalf("untyped error %v", err)
		}
	})
}

func TestDecodeRecordLimits(t *testing.T) {
	whole := appendRecord(nil, record{id: 5, kind: kindOutput, payload: make([]byte, maxPayload)})
	if _, n, err := decodeRecord(whole); err != nil || n != len(whole) {
		t.Fatalf("largest record: %d, %v", n, err)
	}
	for name, tc := range map[string]struct {
		b    []byte
		want error
	}{
		"empty":      {nil, errShort},
		"header cut": {whole[:headerSize-1], errShort},
		"body cut":   {whole[:len(whole)-1], errShort},
		"too long":   {appendRecord(nil, record{id: 5, kind: kindOutput, payload: make([]byte, maxPayload+1)}), errBad},
		"no ID":      {appendRecord(nil, record{kind: kindOutput}), errBad},
		"no kind":    {appendRecord(nil, record{id: 1}), errBad},
		"new kind":   {appendRecord(nil, record{id: 1, kind: 9}), errBad},
		"flipped":    {append([]byte{whole[0] ^ 1}, whole[1:]...), errBad},
	} {
		if _, _, err := decodeRecord(tc.b); !errors.Is(err, tc.want) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestAdvanceRefusesGaps(t *testing.T) {
	start := position{next: 4, off: [4]uint64{0, 10, 0, 0}}
	good := record{id: 4, kind: kindOutput, payload: outputPayload(stdout, 10, []byte("abc"))}
	pos := start
	if err := pos.advance(good); err != nil || pos.next != 5 || pos.off[1] != 13 {
		t.Fatalf("%v, %v", pos, err)
	}
	for name, rec := range map[string]record{
		"ID gap":       {id: 5, kind: kindStarted},
		"offset gap":   {id: 4, kind: kindOutput, payload: outputPayload(stdout, 11, []byte("x"))},
		"no data":      {id: 4, kind: kindOutput, payload: outputPayload(stdout, 10, nil)},
		"no stream":    {id: 4, kind: kindOutput, payload: outputPayload(0, 0, []byte("x"))},
		"other stream": {id: 4, kind: kindOutput, payload: outputPayload(4, 0, []byte("x"))},
		"header":       segmentRecord(start),
	} {
		pos := start
		if err := pos.advance(rec); !errors.Is(err, errBad) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
