package disk

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"

	"github.com/space-sandbox/space/internal/buildtools"
	"github.com/space-sandbox/space/internal/sandbox"
)

const mib = 1 << 20

// Limits of a writable disk in MiB. Below the least size the journal leaves no room.
const (
	MinMiB = 64
	MaxMiB = 4 << 20
)

// Base images are equal on all machines, so their identifiers are constants; a guest never has two of them.
const (
	fsUUID   = "53504143-4500-4000-8000-000000000000"
	hashSeed = "53504143-4500-4000-8000-000000000001"
)

// Images makes disk images. The zero value is ready.
type Images struct{}

// Base makes a raw image of that size with an empty ext4 file system, sparse and read-only. Equal sizes give equal
// bytes with one version of mke2fs.
func (Images) Base(ctx context.Context, path string, sizeMiB uint32) (err error) {
	if err := checkSize(sizeMiB); err != nil {
		return err
	}
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer func() {
		f.Close()
		if err != nil {
			err = errors.Join(err, os.Remove(path))
		}
	}()
	if err := f.Truncate(int64(sizeMiB) * mib); err != nil {
		return err
	}
	err = buildtools.Command{Name: "mke2fs", Env: []string{"E2FSPROGS_FAKE_TIME=1"},
		Args: []string{"-q", "-F", "-t", "ext4", "-m", "0", "-J", "size=4", "-U", fsUUID,
			"-E", "lazy_itable_init=1,root_owner=0:0,hash_seed=" + hashSeed, path, strconv.Itoa(int(sizeMiB)) + "M"}}.Run(ctx)
	if errors.Is(err, buildtools.ErrMissing) {
		return sandbox.Errorf(sandbox.CodeFailedPrecondition, "mke2fs is not installed").WithCause(err).
			WithRemediation("apt-get install e2fsprogs")
	}
	if err != nil {
		return fmt.Errorf("make file system: %w", err)
	}
	if err := f.Chmod(0o444); err != nil {
		return err
	}
	return f.Sync()
}

// Top makes an empty qcow2 image to be used over the backing images, nearest first, of which the last is raw and
// the others are qcow2. All must have the size, so that a mistake shows here and not as a broken file system.
func (Images) Top(_ context.Context, path string, backing []string, sizeMiB uint32) error {
	if err := checkSize(sizeMiB); err != nil {
		return err
	}
	want := int64(sizeMiB) * mib
	for i, b := range backing {
		size, err := imageSize(b, i == len(backing)-1)
		if err != nil {
			return fmt.Errorf("backing image %d: %w", i, err)
		}
		if size != want {
			return fmt.Errorf("backing image %d: %w: it has %d bytes, not %d", i, ErrFormat, size, want)
		}
	}
	return CreateQCOW2(path, want)
}

func checkSize(sizeMiB uint32) error {
	if sizeMiB < MinMiB || sizeMiB > MaxMiB {
		return sandbox.Invalid("resources.disk_mib", "range", "must be between %d and %d", MinMiB, MaxMiB)
	}
	return nil
}

func imageSize(path string, raw bool) (int64, error) {
	f, err := os.Open(path)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	fi, err := f.Stat()
	if err != nil {
		return 0, err
	}
	if !fi.Mode().IsRegular() {
		return 0, &fs.PathError{Op: "open", Path: path, Err: ErrFormat}
	}
	if raw {
		return fi.Size(), nil
	}
	return parseSize(f)
}
