package journal

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

const segmentSuffix = ".seg"

// segment is one file of a process's journal. Its fields are guarded by Process.mu.
type segment struct {
	base position // before its first event
	size int64    // bytes that readers may see
}

func segmentPath(dir string, first uint64) string {
	return filepath.Join(dir, fmt.Sprintf("%020d%s", first, segmentSuffix))
}

// listSegments returns the first event IDs of the segments in dir, ascending.
func listSegments(dir string) ([]uint64, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	var firsts []uint64
	for _, e := range entries {
		digits, ok := strings.CutSuffix(e.Name(), segmentSuffix)
		if !ok || len(digits) != 20 {
			continue
		}
		if n, err := strconv.ParseUint(digits, 10, 64); err == nil && n > 0 {
			firsts = append(firsts, n)
		}
	}
	slices.Sort(firsts)
	return firsts, nil
}

// loadSegment reads the header of a segment that is not the last one: its size is taken from the file system and
// its records are checked when they are read.
func loadSegment(dir string, first uint64) (*segment, error) {
	f, err := os.Open(segmentPath(dir, first))
	if err != nil {
		return nil, err
	}
	defer f.Close()
	buf := make([]byte, segmentHeader)
	if _, err := io.ReadFull(f, buf); err != nil {
		return nil, fmt.Errorf("segment %d: %w", first, ErrCorrupt)
	}
	base, err := headerOf(buf, first)
	if err != nil {
		return nil, err
	}
	st, err := f.Stat()
	if err != nil {
		return nil, err
	}
	return &segment{base: base, size: st.Size()}, nil
}

func headerOf(buf []byte, first uint64) (position, error) {
	rec, _, err := decodeRecord(buf)
	if err != nil {
		return position{}, fmt.Errorf("segment %d: %w", first, ErrCorrupt)
	}
	base, err := parseSegment(rec)
	if err != nil || base.next != first {
		return position{}, fmt.Errorf("segment %d: %w", first, ErrCorrupt)
	}
	return base, nil
}

// scanned is what scanSegment found.
type scanned struct {
	seg  *segment
	end  position
	torn bool // bytes follow the last whole record
}

// scanSegment reads the last segment of a process from end to end. A damaged record with whole records after it is
// ErrCorrupt; one with nothing usable after it is a torn tail.
func scanSegment(dir string, first uint64, visit func(record) error) (scanned, error) {
	path := segmentPath(dir, first)
	data, err := os.ReadFile(path) // a segment is at most maxSegment plus one record
	if err != nil {
		return scanned{}, err
	}
	base, err := headerOf(data, first)
	if err != nil {
		if len(data) < segmentHeader || onlyZeros(data) {
			return scanned{torn: true}, nil // the crash came before the header was whole
		}
		return scanned{}, err
	}
	s := scanned{seg: &segment{base: base, size: segmentHeader}, end: base}
	for s.seg.size < int64(len(data)) {
		rest := data[s.seg.size:]
		rec, n, err := decodeRecord(rest)
		if err == nil {
			err = s.end.advance(rec)
		}
		if err == nil {
			err = visit(rec)
		}
		if err != nil {
			s.torn = true
			if eventFollows(rest, s.end.next) {
				return s, fmt.Errorf("segment %d at byte %d: %w", first, s.seg.size, ErrCorrupt)
			}
			return s, nil
		}
		s.seg.size += int64(n)
	}
	return s, nil
}

func onlyZeros(b []byte) bool {
	for _, c := range b {
		if c != 0 {
			return false
		}
	}
	return true
}

// eventFollows reports whether a whole record with an ID past next starts anywhere in b: then b is not the torn
// end of a write but damage in the middle of the file.
func eventFollows(b []byte, next uint64) bool {
	for i := 1; i+headerSize <= len(b); i++ {
		if rec, _, err := decodeRecord(b[i:]); err == nil && rec.id > next && rec.kind != kindSegment {
			return true
		}
	}
	return false
}

// dropSegment unlinks a segment; readers that have it open may finish it.
func dropSegment(dir string, first uint64) error {
	err := os.Remove(segmentPath(dir, first))
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	return err
}
