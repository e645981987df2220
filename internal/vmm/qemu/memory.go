package qemu

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/space-sandbox/space/internal/vmm"
	"golang.org/x/sys/unix"
)

const allSeals = unix.F_SEAL_WRITE | unix.F_SEAL_GROW | unix.F_SEAL_SHRINK | unix.F_SEAL_SEAL

// OpenMemory implements vmm.Driver.
func (d *Driver) OpenMemory(ctx context.Context, caps vmm.Capabilities, path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, fmt.Errorf("open memory: %w", err)
	}
	if caps.ReadOnlyMem {
		return f, nil
	}
	defer f.Close()
	sealed, err := sealedCopy(ctx, f)
	if err != nil {
		return nil, fmt.Errorf("open memory %s: %w", path, err)
	}
	return sealed, nil
}

// sealedCopy copies a file, without its holes, into a memory file that nobody can change any more.
func sealedCopy(ctx context.Context, src *os.File) (_ *os.File, err error) {
	info, err := src.Stat()
	if err != nil {
		return nil, err
	}
	fd, err := unix.MemfdCreate("guest-memory", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, fmt.Errorf("create memory file: %w", err)
	}
	dst := os.NewFile(uintptr(fd), "guest-memory")
	defer func() {
		if err != nil {
			dst.Close()
		}
	}()
	if err := dst.Truncate(info.Size()); err != nil {
		return nil, err
	}
	if err := copyData(ctx, dst, src, info.Size()); err != nil {
		return nil, err
	}
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, allSeals); err != nil {
		return nil, fmt.Errorf("seal: %w", err)
	}
	return dst, nil
}

// copyData copies the ranges of src that hold data, in steps short enough to heed ctx.
func copyData(ctx context.Context, dst, src *os.File, size int64) error {
	const step = 16 << 20
	for at := int64(0); at < size; {
		start, err := unix.Seek(int(src.Fd()), at, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) {
			return nil // only holes follow
		}
		if err != nil {
			return err
		}
		end, err := unix.Seek(int(src.Fd()), start, unix.SEEK_HOLE)
		if err != nil {
			return err
		}
		for at = start; at < end; {
			if err := ctx.Err(); err != nil {
				return err
			}
			n := min(step, end-at)
			if _, err := io.Copy(io.NewOffsetWriter(dst, at), io.NewSectionReader(src, at, n)); err != nil {
				return err
			}
			at += n
		}
	}
	return nil
}

// privateMode decides how a snapshot's memory is mapped, and refuses what a VMM could write.
func privateMode(f *os.File, mib uint32) (memoryMode, error) {
	if f == nil {
		return "", errors.New("snapshot: no memory file")
	}
	info, err := f.Stat()
	if err != nil {
		return "", fmt.Errorf("snapshot memory: %w", err)
	}
	if want := int64(mib) << 20; info.Size() != want {
		return "", fmt.Errorf("%w: memory has %d bytes, the machine %d", vmm.ErrState, info.Size(), want)
	}
	// Not Fd, which would change the mode of a file that is the caller's and shared with others.
	raw, err := f.SyscallConn()
	if err != nil {
		return "", fmt.Errorf("snapshot memory: %w", err)
	}
	var seals, flags int
	var sealErr, flagErr error
	err = raw.Control(func(fd uintptr) {
		seals, sealErr = unix.FcntlInt(fd, unix.F_GET_SEALS, 0)
		flags, flagErr = unix.FcntlInt(fd, unix.F_GETFL, 0)
	})
	if err = errors.Join(err, flagErr); err != nil {
		return "", fmt.Errorf("snapshot memory: %w", err)
	}
	switch {
	case sealErr == nil && seals&allSeals == allSeals:
		return privateSealed, nil
	case flags&unix.O_ACCMODE == unix.O_RDONLY:
		return privateReadMem, nil
	default:
		return "", fmt.Errorf("%w: memory that is neither sealed nor opened for reading only", vmm.ErrUnsupported)
	}
}
