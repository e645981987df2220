package doctor

import (
	"context"
	"sync"

	"github.com/space-sandbox/space/internal/embedded"
	"github.com/space-sandbox/space/internal/guest"
	"github.com/space-sandbox/space/internal/image"
	"github.com/space-sandbox/space/internal/vmm"
	"github.com/space-sandbox/space/internal/vmm/qemu"
)

// Prober returns a function that runs the real guest kernel under KVM, once, or nil if there is nothing to boot: the
// cache holds no template yet, so that a first start has never got that far, and doctor downloads nothing.
func Prober(cacheDir string) func(context.Context) (vmm.Capabilities, error) {
	if _, err := existingCache(cacheDir); err != nil {
		return nil
	}
	cache, err := image.Open(cacheDir)
	if err != nil {
		return nil
	}
	if list, err := cache.Templates(); err != nil || len(list) == 0 {
		return nil
	}
	agent, err := embedded.Agent()
	if err != nil {
		return nil
	}
	var once sync.Once
	var caps vmm.Capabilities
	return func(ctx context.Context) (vmm.Capabilities, error) {
		once.Do(func() {
			var g *guest.Guest
			if g, err = guest.Build(ctx, cache, agent, nil); err == nil {
				caps, err = qemu.New().Probe(ctx, g.Kernel, g.Initrd)
			}
		})
		return caps, err
	}
}
