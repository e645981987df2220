package image

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"time"

	"github.com/space-sandbox/space/internal/image/cas"
	"github.com/space-sandbox/space/internal/sandbox"
)

// Template is something sandboxes can be made from. It does not change.
type Template struct {
	Name        string
	Tag         string
	Digest      string   // "sha256:..." of layers and configuration
	Layers      []string // absolute paths of read-only ext4 images, lowest first
	SizeBytes   int64    // of all layers
	DefaultUser string
	Env         []string // KEY=VALUE, in order
	Defaults    sandbox.Resources
	CreatedAt   time.Time
	Description string

	blobs []cas.Blob
}

// Ref is the template as a sandbox's record names it.
func (t *Template) Ref() sandbox.TemplateRef {
	return sandbox.TemplateRef{Name: t.Name, Tag: t.Tag, Digest: t.Digest}
}

// config is the part of a manifest that the digest covers, besides the layers.
type config struct {
	DefaultUser string            `json:"default_user"`
	Env         []string          `json:"env"`
	Defaults    sandbox.Resources `json:"defaults"`
}

// manifest is a template as the cache stores it.
type manifest struct {
	Name        string     `json:"name"`
	Tag         string     `json:"tag"`
	Layers      []cas.Blob `json:"layers"`
	Config      config     `json:"config"`
	CreatedAt   time.Time  `json:"created_at"`
	Description string     `json:"description"`
}

// BlobList implements cas.Record.
func (m manifest) BlobList() []cas.Blob { return m.Layers }

// digest names what a sandbox would see: equal layers and configuration give an equal digest, whoever built them.
func (m manifest) digest() (string, error) {
	canonical, err := json.Marshal(struct {
		Layers []cas.Blob `json:"layers"`
		Config config     `json:"config"`
	}{m.Layers, m.Config})
	if err != nil {
		return "", fmt.Errorf("digest of template %s: %w", m.Name, err)
	}
	sum := sha256.Sum256(canonical)
	return "sha256:" + hex.EncodeToString(sum[:]), nil
}

func (m manifest) template(s *cas.Store) (*Template, error) {
	d, err := m.digest()
	if err != nil {
		return nil, err
	}
	t := &Template{Name: m.Name, Tag: m.Tag, Digest: d, DefaultUser: m.Config.DefaultUser, Env: m.Config.Env,
		Defaults: m.Config.Defaults, CreatedAt: m.CreatedAt, Description: m.Description, blobs: m.Layers}
	for _, b := range m.Layers {
		path, err := s.Path(b.Digest)
		if err != nil {
			return nil, err
		}
		t.Layers = append(t.Layers, path)
		t.SizeBytes += b.Size
	}
	return t, nil
}
