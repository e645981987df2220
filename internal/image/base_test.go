package image

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/space-sandbox/space/internal/image/cas"
	"github.com/space-sandbox/space/internal/sandbox"
)

// fakeBase puts a tiny template where base would be.
func fakeBase(t *testing.T, c *Cache) manifest {
	t.Helper()
	m, err := cas.Obtain(t.Context(), c.store, templateKind, "base-"+baseKey(), true,
		func(ctx context.Context, _ *cas.Temp) (manifest, error) {
			b, err := c.store.IngestBytes(ctx, []byte("layer"))
			return manifest{Name: "base", Tag: "latest", Layers: []cas.Blob{b}, Config: baseConfig,
				CreatedAt: time.Now().UTC(), Description: "d"}, err
		})
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func openCache(t *testing.T) *Cache {
	t.Helper()
	c, err := Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func TestCachedBaseIsReturnedAtOnce(t *testing.T) {
	c := openCache(t)
	if got, err := c.Templates(); err != nil || got != nil {
		t.Errorf("an empty cache lists %v %v", got, err)
	}
	m := fakeBase(t, c)
	t.Setenv("PATH", "/nowhere") // nothing may be started
	b, err := c.Base(t.Context(), func(phase string, _, _ int64) { t.Errorf("phase %q of a cached template", phase) })
	if err != nil {
		t.Fatal(err)
	}
	if b.Name != "base" || b.DefaultUser != "user" || len(b.Layers) != 1 || !filepath.IsAbs(b.Layers[0]) || b.SizeBytes != 5 ||
		!b.CreatedAt.Equal(m.CreatedAt) || b.Defaults != baseConfig.Defaults || b.Ref().Digest != b.Digest {
		t.Errorf("%+v", b)
	}
	if data, err := os.ReadFile(b.Layers[0]); err != nil || string(data) != "layer" {
		t.Errorf("%q %v", data, err)
	}
	list, err := c.Templates()
	if err != nil || len(list) != 1 || list[0].Digest != b.Digest {
		t.Errorf("%v %v", list, err)
	}
	if err := c.Verify(t.Context(), b); err != nil {
		t.Error(err)
	}
	if err := errors.Join(os.Remove(b.Layers[0]), os.WriteFile(b.Layers[0], []byte("lie.."), 0o444)); err != nil {
		t.Fatal(err)
	}
	if err := c.Verify(t.Context(), b); !errors.Is(err, cas.ErrCorrupt) {
		t.Errorf("changed layer: %v", err)
	}
}

func TestDigestCoversWhatASandboxSees(t *testing.T) {
	m := manifest{Name: "a", Tag: "t", Layers: []cas.Blob{{Digest: "sha256:1", Size: 1}}, Config: baseConfig}
	digest := func(m manifest) string {
		d, err := m.digest()
		if err != nil || !strings.HasPrefix(d, "sha256:") || len(d) != 71 {
			t.Fatalf("%q %v", d, err)
		}
		return d
	}
	want := digest(m)
	same, layer, env, user := m, m, m, m
	same.Name, same.Description, same.CreatedAt = "b", "other", time.Now()
	layer.Layers = []cas.Blob{{Digest: "sha256:2", Size: 1}}
	env.Config.Env = []string{"A=b"}
	user.Config.DefaultUser = "root"
	if digest(same) != want {
		t.Error("name or time changed the digest")
	}
	for name, other := range map[string]manifest{"layer": layer, "env": env, "user": user} {
		if digest(other) == want {
			t.Errorf("%s does not change the digest", name)
		}
	}
}

func TestMissingProgramsAreNamedWithARemedy(t *testing.T) {
	t.Setenv("PATH", "/nowhere")
	err := checkTools()
	if e := sandbox.AsError(err); err == nil || e.Code != sandbox.CodeFailedPrecondition ||
		!strings.Contains(e.Details.Remediation, "mmdebstrap") || !strings.Contains(e.Message, "mmdebstrap") {
		t.Errorf("got %v", err)
	}
}

func TestMmdebstrapArguments(t *testing.T) {
	args := strings.Join(mmdebstrapArgs([]string{`Acquire::http::Proxy "http://p.test";`}, "/l"), "\n")
	for _, want := range []string{`--aptopt=Acquire::http::Proxy "http://p.test";`, "--variant=minbase", "--architectures=amd64",
		"--dpkgopt=path-exclude=/usr/share/man/*", "python3", "sudo", "bookworm\n-\n/l"} {
		if !strings.Contains(args, want) {
			t.Errorf("missing %q in\n%s", want, args)
		}
	}
}

func TestFollowReportsStepsInOrder(t *testing.T) {
	var got []int64
	b := baseBuild{progress: func(_ string, done, total int64) {
		if total != int64(len(baseSteps)) {
			t.Errorf("total %d", total)
		}
		got = append(got, done)
	}}
	for _, line := range []string{"I: running apt-get update...", "W: something", "I: downloading packages with apt...",
		"I: extracting archives...", "I: installing essential packages...", "I: installing remaining packages inside the chroot...",
		"I: running --customize-hook in shell: ...", "I: creating tarball...", "I: success"} {
		b.follow(line)
	}
	for i, done := range got {
		if int64(i) != done {
			t.Fatalf("steps %v", got)
		}
	}
	if len(got) != stepNode {
		t.Errorf("steps %v", got)
	}
}

// TestCancelledBuildEndsEverything cancels a real build while mmdebstrap works.
func TestCancelledBuildEndsEverything(t *testing.T) {
	c := openCache(t)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	_, err := c.Base(ctx, func(_ string, done, _ int64) {
		if done >= 1 {
			cancel()
		}
	})
	if !errors.Is(err, context.Canceled) {
		t.Fatalf("got %v", err)
	}
	root := c.store.Root()
	left, err := os.ReadDir(filepath.Join(root, "tmp"))
	if err != nil || len(left) != 0 {
		t.Errorf("left in tmp: %v %v", left, err)
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil || strings.Contains(string(mounts), root) {
		t.Errorf("left mounted below %s: %v", root, err)
	}
	links, _ := filepath.Glob("/proc/[0-9]*/root")
	for _, l := range links {
		if to, err := os.Readlink(l); err == nil && strings.HasPrefix(to, root) {
			t.Errorf("a process still works there: %s", l)
		}
	}
	if list, err := c.Templates(); err != nil || list != nil {
		t.Errorf("a template was committed: %v %v", list, err)
	}
}
