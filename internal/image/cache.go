package image

import (
	"context"

	"github.com/space-sandbox/space/internal/image/cas"
)

// Progress tells which phase a build has begun, after how many of how many steps. It must return quickly. A nil
// Progress is allowed everywhere.
type Progress func(phase string, done, total int64)

func (p Progress) report(phase string, done, total int64) {
	if p != nil {
		p(phase, done, total)
	}
}

// Cache is an open cache directory.
type Cache struct {
	store *cas.Store
}

// DefaultDir is the cache directory used when none is configured.
func DefaultDir() (string, error) { return cas.DefaultDir() }

// Open opens or makes a cache directory. Several processes may have it open.
func Open(dir string) (*Cache, error) {
	s, err := cas.Open(dir)
	if err != nil {
		return nil, err
	}
	return &Cache{store: s}, nil
}

// Close ends the use of the directory; layers stay usable by path.
func (c *Cache) Close() error { return nil }

// Store is the content-addressed store below, for others who cache here.
func (c *Cache) Store() *cas.Store { return c.store }

// Verify reads every layer of a template and compares it with its digest.
func (c *Cache) Verify(ctx context.Context, t *Template) error {
	for _, b := range t.blobs {
		if err := c.store.Verify(ctx, b); err != nil {
			return err
		}
	}
	return nil
}
