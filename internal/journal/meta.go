package journal

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"os"
	"path/filepath"

	nodev1 "github.com/space-sandbox/space/internal/gen/space/node/v1"
	"google.golang.org/protobuf/proto"
)

const (
	metaFile   = "process"
	metaHeader = 4 + 8 + 8
	maxMeta    = 2 << 20 // argv and env are bounded far below
)

// meta is a process's record on disk: CRC-32C, order of creation, last event ID (set at exit), nodev1.Process.
type meta struct {
	order, lastID uint64
	proc          *nodev1.Process
}

// write replaces the record. The caller syncs.
func (m meta) write(dir string) error {
	body, err := proto.Marshal(m.proc)
	if err != nil {
		return fmt.Errorf("encode process record: %w", err)
	}
	if len(body) > maxMeta-metaHeader {
		return fmt.Errorf("process record of %d bytes: %w", len(body), ErrTooLarge)
	}
	b := make([]byte, 4, metaHeader+len(body))
	b = binary.LittleEndian.AppendUint64(b, m.order)
	b = binary.LittleEndian.AppendUint64(b, m.lastID)
	b = append(b, body...)
	binary.LittleEndian.PutUint32(b, crc32.Checksum(b[4:], castag))
	tmp := filepath.Join(dir, metaFile+".tmp")
	if err := os.WriteFile(tmp, b, 0o600); err != nil {
		return fmt.Errorf("write process record: %w", err)
	}
	return os.Rename(tmp, filepath.Join(dir, metaFile))
}

// readMeta reads the record in dir.
func readMeta(dir string) (meta, error) {
	path := filepath.Join(dir, metaFile)
	st, err := os.Stat(path)
	if err != nil {
		return meta{}, err
	}
	if st.Size() > maxMeta {
		return meta{}, fmt.Errorf("%s: %w", path, ErrCorrupt)
	}
	b, err := os.ReadFile(path)
	if err != nil {
		return meta{}, err
	}
	m, err := decodeMeta(b)
	if err != nil {
		return meta{}, fmt.Errorf("%s: %w", path, err)
	}
	return m, nil
}

// decodeMeta parses what write wrote.
func decodeMeta(b []byte) (meta, error) {
	if len(b) < metaHeader || binary.LittleEndian.Uint32(b) != crc32.Checksum(b[4:], castag) {
		return meta{}, ErrCorrupt
	}
	m := meta{order: binary.LittleEndian.Uint64(b[4:]), lastID: binary.LittleEndian.Uint64(b[12:])}
	m.proc = new(nodev1.Process)
	if err := proto.Unmarshal(b[metaHeader:], m.proc); err != nil {
		return meta{}, errors.Join(ErrCorrupt, err)
	}
	return m, nil
}
