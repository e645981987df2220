package image

import (
	"os"
	"testing"
	"time"
)

func sharedCache(t *testing.T) *Cache {
	t.Helper()
	dir := os.Getenv("SPACE_TEST_CACHE")
	if dir == "" {
		var err error
		if dir, err = DefaultDir(); err != nil {
			t.Fatal(err)
		}
	}
	c, err := Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c
}

func TestBaseForReal(t *testing.T) {
	c := sharedCache(t)
	start := time.Now()
	last := ""
	tmpl, err := c.Base(t.Context(), func(phase string, done, total int64) {
		if phase != last {
			t.Logf("%6.1fs %s %d/%d", time.Since(start).Seconds(), phase, done, total)
		}
		last = phase
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%6.1fs %+v", time.Since(start).Seconds(), tmpl)
}
