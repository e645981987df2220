package guest

import (
	"bytes"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/ulikunitz/xz"

	"github.com/space-sandbox/space/internal/image"
	"github.com/space-sandbox/space/internal/image/apt"
	"github.com/space-sandbox/space/internal/image/cas"
)

const (
	kernelRecipe  = "1" // changes when what this file makes of a package changes
	kernelSuite   = "bookworm"
	kernelPackage = "linux-image-cloud-amd64"
	moduleLimit   = 64 << 20 // of one module, uncompressed
)

// kernel is the cached result of downloading a kernel package.
type kernel struct {
	Version string   `json:"version"` // as in uname -r
	Package string   `json:"package"` // version of the Debian package
	Image   cas.Blob `json:"image"`
	Modules cas.Blob `json:"modules"` // a cpio archive: modules and their lists
}

// BlobList implements cas.Record.
func (k kernel) BlobList() []cas.Blob { return []cas.Blob{k.Image, k.Modules} }

// kernelKey changes with everything that the cached kernel is made from except Debian's own updates.
func kernelKey() string {
	h := sha256.New()
	fmt.Fprintln(h, kernelRecipe, kernelSuite, kernelPackage, required, extra)
	return hex.EncodeToString(h.Sum(nil))[:32]
}

// fetchKernel downloads, unpacks and stores the kernel package.
func fetchKernel(ctx context.Context, s *cas.Store, t *cas.Temp, progress image.Progress) (kernel, error) {
	sources, err := apt.Discover("/", os.Getenv(apt.MirrorVariable), kernelSuite)
	if err != nil {
		return kernel{}, err
	}
	state, err := apt.NewState(ctx, t.Path("apt"), sources)
	if err != nil {
		return kernel{}, err
	}
	report(progress, "guest kernel: package lists", 0)
	if err := state.Update(ctx); err != nil {
		return kernel{}, err
	}
	p, err := kernelCandidate(ctx, state)
	if err != nil {
		return kernel{}, err
	}
	report(progress, "guest kernel: download", 1)
	deb, err := state.Download(ctx, p)
	if err != nil {
		return kernel{}, err
	}
	report(progress, "guest kernel: unpack", 2)
	root := t.Path("root")
	if err := apt.Unpack(ctx, deb, root); err != nil {
		return kernel{}, err
	}
	k := kernel{Package: p.Version, Version: strings.TrimPrefix(p.Name, "linux-image-")}
	return storeKernel(ctx, s, t, root, k)
}

// kernelCandidate follows the meta package to the package that holds the kernel.
func kernelCandidate(ctx context.Context, state *apt.State) (apt.Package, error) {
	meta, err := state.Candidate(ctx, kernelPackage)
	if err != nil {
		return apt.Package{}, err
	}
	for _, name := range meta.Depends {
		if strings.HasPrefix(name, "linux-image-") {
			return state.Candidate(ctx, name)
		}
	}
	return apt.Package{}, fmt.Errorf("%s depends on no kernel: %w", kernelPackage, apt.ErrNoPackage)
}

// storeKernel puts an unpacked kernel package into the cache.
func storeKernel(ctx context.Context, s *cas.Store, t *cas.Temp, root string, k kernel) (kernel, error) {
	set, err := findModules(root, k.Version)
	if err != nil {
		return kernel{}, fmt.Errorf("read the kernel's modules: %w", err)
	}
	archive, err := os.Create(t.Path("modules.cpio"))
	if err != nil {
		return kernel{}, err
	}
	err = writeModules(archive, set)
	if cerr := archive.Close(); err == nil {
		err = cerr
	}
	if err != nil {
		return kernel{}, err
	}
	if k.Modules, err = s.Ingest(ctx, archive.Name()); err != nil {
		return kernel{}, err
	}
	k.Image, err = s.Ingest(ctx, filepath.Join(root, "boot", "vmlinuz-"+k.Version))
	return k, err
}

// writeModules writes the part of the initramfs that depends on the kernel only.
func writeModules(w io.Writer, set *moduleSet) error {
	need, err := set.order(required, false)
	if err != nil {
		return err
	}
	want, err := set.order(extra, true)
	if err != nil {
		return err
	}
	c := newCPIO(w)
	have := map[string]bool{}
	lists := map[string]*strings.Builder{"modules.list": {}, "modules.extra": {}}
	add := func(list string, modules []module) error {
		for _, m := range modules {
			if have[m.Name] {
				continue
			}
			have[m.Name] = true
			lists[list].WriteString("/" + m.Path + "\n")
			if err := c.file(m.Path, 0o644, m.Data); err != nil {
				return err
			}
		}
		return c.file(list, 0o644, []byte(lists[list].String()))
	}
	if err := add("modules.list", need); err != nil {
		return err
	}
	if err := add("modules.extra", want); err != nil {
		return err
	}
	return c.close()
}

// decompress undoes what a module's file name says was done to it.
func decompress(name string, data []byte) ([]byte, error) {
	var r io.Reader
	var err error
	switch filepath.Ext(name) {
	case ".ko":
		return data, nil
	case ".xz":
		r, err = xz.NewReader(bytes.NewReader(data))
	case ".gz":
		r, err = gzip.NewReader(bytes.NewReader(data))
	default:
		return nil, fmt.Errorf("unknown compression %q", filepath.Ext(name))
	}
	if err != nil {
		return nil, err
	}
	out, err := io.ReadAll(io.LimitReader(r, moduleLimit+1))
	if err == nil && len(out) > moduleLimit {
		err = fmt.Errorf("more than %d bytes", moduleLimit)
	}
	return out, err
}
