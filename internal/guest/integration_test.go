package guest

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/space-sandbox/space/internal/image"
)

func sharedCache(t *testing.T) *image.Cache {
	t.Helper()
	dir := os.Getenv("SPACE_TEST_CACHE")
	if dir == "" {
		var err error
		if dir, err = image.DefaultDir(); err != nil {
			t.Fatal(err)
		}
	}
	c, err := image.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c
}

func TestBuildForReal(t *testing.T) {
	c := sharedCache(t)
	start := time.Now()
	g, err := Build(t.Context(), c, []byte("not an agent"), func(phase string, done, total int64) {
		t.Logf("%6.1fs %s %d/%d", time.Since(start).Seconds(), phase, done, total)
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%+v", g)
	if !strings.Contains(g.KernelVersion, "cloud-amd64") || !filepath.IsAbs(g.Kernel) || !filepath.IsAbs(g.Initrd) {
		t.Errorf("unexpected guest: %+v", g)
	}
}
