package guest

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"os"

	"github.com/space-sandbox/space/internal/image"
	"github.com/space-sandbox/space/internal/image/cas"
)

// initrdRecipe changes when the same agent and kernel should give another initramfs.
const initrdRecipe = "1"

// Guest is what a microVM boots. The files are immutable.
type Guest struct {
	Kernel, Initrd string // absolute paths
	KernelVersion  string // as in uname -r
	PackageVersion string // of the Debian package
	Digest         string // "sha256:..." of kernel and initramfs together
}

// initrd is the cached initramfs of one agent and one kernel.
type initrd struct {
	Kernel kernel   `json:"kernel"`
	Image  cas.Blob `json:"image"`
}

// BlobList implements cas.Record.
func (i initrd) BlobList() []cas.Blob { return append(i.Kernel.BlobList(), i.Image) }

// Build returns what to boot with the given agent binary as /init, from the cache if it is there.
func Build(ctx context.Context, cache *image.Cache, agent []byte, progress image.Progress) (*Guest, error) {
	return build(ctx, cache, agent, false, progress)
}

// Refresh is Build that first looks for a newer kernel package.
func Refresh(ctx context.Context, cache *image.Cache, agent []byte, progress image.Progress) (*Guest, error) {
	return build(ctx, cache, agent, true, progress)
}

func build(ctx context.Context, cache *image.Cache, agent []byte, refresh bool, progress image.Progress) (*Guest, error) {
	s := cache.Store()
	k, err := cas.Obtain(ctx, s, "kernel", kernelKey(), refresh, func(ctx context.Context, t *cas.Temp) (kernel, error) {
		return fetchKernel(ctx, s, t, progress)
	})
	if err != nil {
		return nil, fmt.Errorf("guest kernel: %w", err)
	}
	h := sha256.New()
	fmt.Fprintln(h, initrdRecipe, k.Image.Digest, k.Modules.Digest)
	h.Write(agent)
	key := hex.EncodeToString(h.Sum(nil))[:32]
	i, err := cas.Obtain(ctx, s, "initrd", key, false, func(ctx context.Context, t *cas.Temp) (initrd, error) {
		report(progress, "guest initramfs", 3)
		blob, err := makeInitrd(ctx, s, t, k, agent)
		return initrd{Kernel: k, Image: blob}, err
	})
	if err != nil {
		return nil, fmt.Errorf("guest initramfs: %w", err)
	}
	return i.guest(s)
}

func (i initrd) guest(s *cas.Store) (*Guest, error) {
	kernelPath, err := s.Path(i.Kernel.Image.Digest)
	if err != nil {
		return nil, err
	}
	initrdPath, err := s.Path(i.Image.Digest)
	if err != nil {
		return nil, err
	}
	sum := sha256.Sum256([]byte(i.Kernel.Image.Digest + "\n" + i.Image.Digest + "\n"))
	return &Guest{Kernel: kernelPath, Initrd: initrdPath, KernelVersion: i.Kernel.Version,
		PackageVersion: i.Kernel.Package, Digest: "sha256:" + hex.EncodeToString(sum[:])}, nil
}

// makeInitrd joins two archives, which the kernel unpacks one after the other: the modules, and the agent.
func makeInitrd(ctx context.Context, s *cas.Store, t *cas.Temp, k kernel, agent []byte) (cas.Blob, error) {
	modules, err := s.Path(k.Modules.Digest)
	if err != nil {
		return cas.Blob{}, err
	}
	in, err := os.Open(modules)
	if err != nil {
		return cas.Blob{}, err
	}
	defer in.Close()
	out, err := os.Create(t.Path("initrd"))
	if err != nil {
		return cas.Blob{}, err
	}
	defer out.Close()
	if _, err := io.Copy(out, in); err != nil {
		return cas.Blob{}, err
	}
	if err := writeAgent(out, agent); err != nil {
		return cas.Blob{}, err
	}
	if err := out.Close(); err != nil {
		return cas.Blob{}, err
	}
	return s.Ingest(ctx, out.Name())
}

// writeAgent writes the part of the initramfs that depends on the agent only, with the folders it mounts on.
func writeAgent(w io.Writer, agent []byte) error {
	c := newCPIO(w)
	for _, dir := range []string{"dev", "proc", "sys", "run", "tmp", "mnt"} {
		if err := c.dir(dir); err != nil {
			return err
		}
	}
	if err := c.char("dev/console", 0o600, 5, 1); err != nil {
		return err
	}
	if err := c.char("dev/null", 0o666, 1, 3); err != nil {
		return err
	}
	if err := c.file("init", 0o755, agent); err != nil {
		return err
	}
	return c.close()
}

// steps is how many steps Build has at most.
const steps = 4

func report(p image.Progress, phase string, step int64) {
	if p != nil {
		p(phase, step, steps)
	}
}
