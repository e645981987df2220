package cas

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"

	"golang.org/x/sys/unix"
)

// ErrNoRecord means that nothing was committed under that kind and key.
var ErrNoRecord = errors.New("not in the cache")

// Record is what a kind of cached thing stores: JSON that names blobs.
type Record interface {
	// BlobList names every blob the thing consists of.
	BlobList() []Blob
}

var nameForm = regexp.MustCompile(`^[a-z0-9][a-z0-9._-]{0,99}$`)

func (s *Store) recordPath(kind, key string) (string, error) {
	if !nameForm.MatchString(kind) || !nameForm.MatchString(key) {
		return "", fmt.Errorf("bad record name %q/%q", kind, key)
	}
	return filepath.Join(s.root, "records", kind, key), nil
}

// Load reads a record and checks that its blobs are there. It returns ErrNoRecord or ErrCorrupt, wrapped.
func Load[R Record](s *Store, kind, key string) (R, error) {
	var r R
	path, err := s.recordPath(kind, key)
	if err != nil {
		return r, err
	}
	data, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return r, fmt.Errorf("%s/%s: %w", kind, key, ErrNoRecord)
	}
	if err != nil {
		return r, err
	}
	dec := json.NewDecoder(bytes.NewReader(data))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&r); err != nil {
		var zero R
		return zero, fmt.Errorf("%w: record %s/%s: %w", ErrCorrupt, kind, key, err)
	}
	for _, b := range r.BlobList() {
		if err := s.Check(b); err != nil {
			var zero R
			return zero, fmt.Errorf("record %s/%s: %w", kind, key, err)
		}
	}
	return r, nil
}

// Maker builds a thing in a work folder: it ingests blobs and returns the record that names them.
type Maker[R Record] func(ctx context.Context, t *Temp) (R, error)

// Obtain returns a record, and builds it first if the cache has none that is valid, or if refresh is set. Of several
// callers one builds and the others wait.
func Obtain[R Record](ctx context.Context, s *Store, kind, key string, refresh bool, build Maker[R]) (R, error) {
	if !refresh {
		if r, err := Load[R](s, kind, key); !rebuildable(err) {
			return r, err
		}
	}
	var zero R
	lock, err := waitLock(ctx, filepath.Join(s.root, "locks", kind+"-"+key), unix.LOCK_EX)
	if err != nil {
		return zero, err
	}
	defer lock.Close()
	if !refresh {
		if r, err := Load[R](s, kind, key); !rebuildable(err) {
			return r, err // somebody else built it while we waited
		}
	}
	t, err := s.Temp()
	if err != nil {
		return zero, err
	}
	r, err := build(ctx, t)
	if err = errors.Join(err, t.Close()); err != nil {
		return zero, err
	}
	if err := ctx.Err(); err != nil {
		return zero, context.Cause(ctx)
	}
	return r, s.put(kind, key, r)
}

func rebuildable(err error) bool {
	return errors.Is(err, ErrNoRecord) || errors.Is(err, ErrCorrupt)
}

// put commits a record after its blobs.
func (s *Store) put(kind, key string, r Record) error {
	path, err := s.recordPath(kind, key)
	if err != nil {
		return err
	}
	for _, b := range r.BlobList() {
		if err := s.Check(b); err != nil {
			return err
		}
	}
	data, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	return s.commit(path, append(data, '\n'))
}
