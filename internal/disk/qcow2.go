package disk

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
)

// ErrFormat means that a file is not the image it should be.
var ErrFormat = errors.New("bad disk image")

const (
	clusterBits = 16
	clusterSize = 1 << clusterBits
	magic       = 0x514649fb // "QFI\xfb"
	version     = 3
	// refcountOrder 4 means 16-bit reference counts, 32768 of them in a cluster.
	refcountOrder = 4
	// maxSize keeps the first-level table in one cluster: 8192 entries of 512 MiB.
	maxSize = int64(clusterSize/8) * (clusterSize / 8) * clusterSize
)

// header is the beginning of a qcow2 file of version 3, big-endian.
type header struct {
	Magic, Version         uint32
	BackingOffset          uint64
	BackingSize            uint32
	ClusterBits            uint32
	Size                   uint64
	CryptMethod            uint32
	L1Size                 uint32
	L1Offset               uint64
	RefcountTableOffset    uint64
	RefcountTableClusters  uint32
	Snapshots              uint32
	SnapshotsOffset        uint64
	Incompatible           uint64
	Compatible, Autoclear  uint64
	RefcountOrder, HdrSize uint32
}

// The four clusters of an empty image.
const (
	atHeader = iota
	atRefcountTable
	atRefcountBlock
	atL1
	usedClusters
)

// CreateQCOW2 makes an empty image of a virtual size in bytes, a multiple of 512, with mode 0600.
func CreateQCOW2(path string, size int64) (err error) {
	if size <= 0 || size%512 != 0 || size > maxSize {
		return fmt.Errorf("%w: a size of %d bytes is not possible", ErrFormat, size)
	}
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer func() {
		if cerr := f.Close(); err == nil {
			err = cerr
		}
		if err != nil {
			err = errors.Join(err, os.Remove(path))
		}
	}()
	if err := f.Truncate(usedClusters * clusterSize); err != nil {
		return err
	}
	perL1 := int64(clusterSize/8) * clusterSize
	h := header{Magic: magic, Version: version, ClusterBits: clusterBits, Size: uint64(size),
		L1Size: uint32((size + perL1 - 1) / perL1), L1Offset: atL1 * clusterSize,
		RefcountTableOffset: atRefcountTable * clusterSize, RefcountTableClusters: 1, RefcountOrder: refcountOrder}
	h.HdrSize = uint32(binary.Size(h))
	if err := writeAt(f, atHeader, h); err != nil {
		return err
	}
	if err := writeAt(f, atRefcountTable, uint64(atRefcountBlock*clusterSize)); err != nil {
		return err
	}
	return writeAt(f, atRefcountBlock, [usedClusters]uint16{1, 1, 1, 1})
}

func writeAt(f *os.File, cluster int64, value any) error {
	var b bytes.Buffer
	if err := binary.Write(&b, binary.BigEndian, value); err != nil {
		return err
	}
	_, err := f.WriteAt(b.Bytes(), cluster*clusterSize)
	return err
}

// parseSize reads the virtual size from the beginning of a qcow2 image.
func parseSize(r io.Reader) (int64, error) {
	var head [32]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return 0, fmt.Errorf("%w: %w", ErrFormat, err)
	}
	if got := binary.BigEndian.Uint32(head[:]); got != magic {
		return 0, fmt.Errorf("%w: no qcow2 image", ErrFormat)
	}
	if v := binary.BigEndian.Uint32(head[4:]); v != version {
		return 0, fmt.Errorf("%w: qcow2 version %d", ErrFormat, v)
	}
	size := binary.BigEndian.Uint64(head[24:])
	if size == 0 || size > uint64(maxSize) {
		return 0, fmt.Errorf("%w: qcow2 size %d", ErrFormat, size)
	}
	return int64(size), nil
}
