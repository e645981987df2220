package image

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"strings"
	"time"

	"github.com/Microsoft/hcsshim/ext4/tar2ext4"
)

// layerLimit bounds an image and reserves the file system's tables; the default of the library is 16 GiB.
const layerLimit = 8 << 30

// layerWriter turns files, one after the other, into a read-only ext4 image. Close must be called once.
type layerWriter struct {
	tar  *tar.Writer
	pipe *io.PipeWriter
	done chan error
	time time.Time // of every file: images must not differ by when they were built
	seen map[string]bool
}

// newLayer starts a layer in an empty file.
func newLayer(out *os.File, stamp time.Time) *layerWriter {
	r, w := io.Pipe()
	l := &layerWriter{tar: tar.NewWriter(w), pipe: w, done: make(chan error, 1), time: stamp, seen: map[string]bool{}}
	go func() {
		err := tar2ext4.ConvertTarToExt4(r, out, tar2ext4.MaximumDiskSize(layerLimit))
		r.CloseWithError(errors.Join(err, io.ErrClosedPipe)) // a writer must not wait for a reader that is gone
		l.done <- err
	}()
	return l
}

// Close ends the layer. With an error it gives the image up.
func (l *layerWriter) Close(cause error) error {
	err := cause
	if err == nil {
		err = l.tar.Close()
	}
	l.pipe.CloseWithError(err) // nil: end of file
	conv := <-l.done
	if cause != nil {
		return cause
	}
	if conv != nil {
		return fmt.Errorf("write layer: %w", conv)
	}
	return err
}

// add copies one entry under a clean relative name. A path that is there already is not added twice.
func (l *layerWriter) add(h *tar.Header, content io.Reader) error {
	name, err := cleanName(h.Name)
	if err != nil || name == "." {
		return err
	}
	if l.seen[name] {
		if h.Typeflag == tar.TypeDir {
			return nil
		}
		return fmt.Errorf("%s is in the layer twice", name)
	}
	l.seen[name] = true
	c := *h
	c.Name, c.Uname, c.Gname, c.Format = name, "", "", tar.FormatPAX
	if h.Typeflag == tar.TypeLink {
		if c.Linkname, err = cleanName(h.Linkname); err != nil {
			return err
		}
		if !l.seen[c.Linkname] {
			return fmt.Errorf("%s is a hard link to %s, which is not in the layer", name, c.Linkname)
		}
	}
	if c.ModTime.After(l.time) {
		c.ModTime = l.time
	}
	c.AccessTime, c.ChangeTime = c.ModTime, c.ModTime
	if err := l.tar.WriteHeader(&c); err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	if h.Typeflag != tar.TypeReg {
		return nil
	}
	n, err := io.Copy(l.tar, content)
	if err == nil && n != h.Size {
		err = io.ErrUnexpectedEOF
	}
	if err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	return nil
}

// file adds a small file of root's.
func (l *layerWriter) file(name string, mode int64, text string) error {
	h := &tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: mode, Size: int64(len(text)), ModTime: l.time}
	return l.add(h, strings.NewReader(text))
}

// symlink adds a symbolic link.
func (l *layerWriter) symlink(name, target string) error {
	return l.add(&tar.Header{Name: name, Typeflag: tar.TypeSymlink, Linkname: target, Mode: 0o777, ModTime: l.time}, nil)
}

// addAll adds the entries of a tar stream. Rename maps names; "" leaves an entry out.
func (l *layerWriter) addAll(ctx context.Context, r io.Reader, rename func(h *tar.Header) string) error {
	t := tar.NewReader(r)
	for {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		h, err := t.Next()
		if errors.Is(err, io.EOF) {
			// What follows the end marker is padding; the writer must be able to write it.
			_, err := io.Copy(io.Discard, r)
			return err
		}
		if err != nil {
			return fmt.Errorf("read archive: %w", err)
		}
		if h.Name = rename(h); h.Name == "" {
			continue
		}
		if err := l.add(h, t); err != nil {
			return err
		}
	}
}

// cleanName makes "./a/b/" to "a/b" and refuses names that leave the root.
func cleanName(name string) (string, error) {
	clean := path.Clean(strings.TrimLeft(name, "/"))
	if name == "" || clean == ".." || strings.HasPrefix(clean, "../") || strings.ContainsRune(name, 0) {
		return "", fmt.Errorf("bad name in archive: %.200q", name)
	}
	return clean, nil
}
