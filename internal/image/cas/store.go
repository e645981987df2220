package cas

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
)

// ErrCorrupt means that the cache holds something other than what its records say.
var ErrCorrupt = errors.New("cache is corrupt")

// formatVersion is the layout that this package writes.
const formatVersion = "1"

// Blob names content.
type Blob struct {
	Digest string `json:"digest"` // "sha256:" + 64 hex
	Size   int64  `json:"size"`
}

// Store is an open cache directory. It holds nothing open between calls, so there is nothing to close.
type Store struct {
	root string
}

// DefaultDir is the cache directory of this user.
func DefaultDir() (string, error) {
	dir, err := os.UserCacheDir()
	if err != nil {
		return "", fmt.Errorf("find the user's cache directory (set HOME or XDG_CACHE_HOME): %w", err)
	}
	return filepath.Join(dir, "space"), nil
}

// Open opens or makes a cache directory and removes what died there half done.
func Open(dir string) (*Store, error) {
	root, err := filepath.Abs(dir)
	if err != nil {
		return nil, err
	}
	for _, sub := range []string{"blobs/sha256", "records", "locks", "tmp"} {
		if err := os.MkdirAll(filepath.Join(root, sub), 0o755); err != nil {
			return nil, fmt.Errorf("make the cache directory: %w", err)
		}
	}
	s := &Store{root: root}
	if err := s.checkFormat(); err != nil {
		return nil, err
	}
	// What cannot be removed (files of a killed build that belong to subordinate users) is in nobody's way.
	_, _ = s.Sweep()
	return s, nil
}

// Root is the cache directory's absolute path.
func (s *Store) Root() string { return s.root }

func (s *Store) checkFormat() error {
	path := filepath.Join(s.root, "format")
	data, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return s.commit(path, []byte(formatVersion+"\n"))
	}
	if err != nil {
		return err
	}
	if got := strings.TrimSpace(string(data)); got != formatVersion {
		return fmt.Errorf("%s has format %q and this version knows %q: use another --cache-dir", s.root, got, formatVersion)
	}
	return nil
}

// commit writes a small file so that it is there with all of data or not at all.
func (s *Store) commit(path string, data []byte) error {
	t, err := s.Temp()
	if err != nil {
		return err
	}
	defer func() { _ = t.Close() }() // what is left of it goes at the next Open
	tmp := t.Path("data")
	f, err := os.OpenFile(tmp, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o444)
	if err != nil {
		return err
	}
	defer f.Close()
	if _, err := f.Write(data); err != nil {
		return err
	}
	if err := f.Sync(); err != nil {
		return err
	}
	if err := os.Rename(tmp, path); err != nil {
		return err
	}
	return syncDir(filepath.Dir(path))
}

var digestForm = regexp.MustCompile(`^sha256:[0-9a-f]{64}$`)

// Path is where a blob of that digest is, or would be.
func (s *Store) Path(digest string) (string, error) {
	if !digestForm.MatchString(digest) {
		return "", fmt.Errorf("%w: %.80q is no digest", ErrCorrupt, digest)
	}
	return filepath.Join(s.root, "blobs", "sha256", strings.TrimPrefix(digest, "sha256:")), nil
}

// Ingest moves a file from a Temp of this store into the cache. The file is gone from there afterwards.
func (s *Store) Ingest(ctx context.Context, file string) (Blob, error) {
	f, err := os.OpenFile(file, os.O_RDWR, 0)
	if err != nil {
		return Blob{}, err
	}
	defer f.Close()
	b, err := digest(ctx, f)
	if err != nil {
		return Blob{}, err
	}
	path, err := s.Path(b.Digest)
	if err != nil {
		return Blob{}, err
	}
	if s.Check(b) == nil && s.Verify(ctx, b) == nil {
		return b, os.Remove(file) // keep the one whose pages may be in use
	}
	if err := f.Chmod(0o444); err != nil {
		return Blob{}, err
	}
	if err := f.Sync(); err != nil {
		return Blob{}, fmt.Errorf("sync blob: %w", err)
	}
	if err := os.Rename(file, path); err != nil {
		return Blob{}, err
	}
	return b, syncDir(filepath.Dir(path))
}

// IngestBytes puts a small content into the cache.
func (s *Store) IngestBytes(ctx context.Context, data []byte) (Blob, error) {
	t, err := s.Temp()
	if err != nil {
		return Blob{}, err
	}
	defer func() { _ = t.Close() }() // what is left of it goes at the next Open
	file := t.Path("data")
	if err := os.WriteFile(file, data, 0o600); err != nil {
		return Blob{}, err
	}
	return s.Ingest(ctx, file)
}

// Check says whether a blob is there with the right size, which catches truncation without reading it.
func (s *Store) Check(b Blob) error {
	path, err := s.Path(b.Digest)
	if err != nil {
		return err
	}
	fi, err := os.Lstat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("%w: blob %s is missing", ErrCorrupt, b.Digest)
	case err != nil:
		return err
	case !fi.Mode().IsRegular() || fi.Size() != b.Size:
		return fmt.Errorf("%w: blob %s has %d bytes, not %d", ErrCorrupt, b.Digest, fi.Size(), b.Size)
	}
	return nil
}

// Verify reads a whole blob and compares its digest.
func (s *Store) Verify(ctx context.Context, b Blob) error {
	if err := s.Check(b); err != nil {
		return err
	}
	path, err := s.Path(b.Digest)
	if err != nil {
		return err
	}
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	got, err := digest(ctx, f)
	if err != nil {
		return err
	}
	if got != b {
		return fmt.Errorf("%w: blob %s holds other content", ErrCorrupt, b.Digest)
	}
	return nil
}

// digest reads r to its end, or until ctx ends.
func digest(ctx context.Context, r io.Reader) (Blob, error) {
	h := sha256.New()
	n, err := io.Copy(h, ctxReader{ctx, r})
	if err != nil {
		return Blob{}, err
	}
	return Blob{Digest: "sha256:" + hex.EncodeToString(h.Sum(nil)), Size: n}, nil
}

type ctxReader struct {
	ctx context.Context
	r   io.Reader
}

// Read implements io.Reader.
func (c ctxReader) Read(p []byte) (int, error) {
	if err := c.ctx.Err(); err != nil {
		return 0, context.Cause(c.ctx)
	}
	return c.r.Read(p)
}
