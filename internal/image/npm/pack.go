package npm

import (
	"context"
	"crypto/sha512"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/space-sandbox/space/internal/buildtools"
)

// ErrNotFound means that the registry has no such package or version.
var ErrNotFound = errors.New("not in the npm registry")

// ErrIntegrity means that what came is not what the registry describes.
var ErrIntegrity = errors.New("npm package does not match its digest")

const (
	metadataLimit = 64 << 20
	archiveLimit  = 256 << 20
	headerTimeout = time.Minute
)

// Archive is a downloaded package.
type Archive struct {
	Path    string // a gzip tar whose entries are below "package/"
	Version string
}

// Pack downloads the newest version of a package with the given major version into dir.
func Pack(ctx context.Context, dir, name string, major int) (Archive, error) {
	if _, err := buildtools.Look("npm"); err == nil {
		return packWithNPM(ctx, dir, name, major)
	}
	home, err := os.UserHomeDir()
	if err != nil {
		home = ""
	}
	return NewClient(ReadConfig(os.Getenv, home, "/")).Pack(ctx, dir, name, major)
}

// packWithNPM lets npm itself do it; npm checks the digest.
func packWithNPM(ctx context.Context, dir, name string, major int) (Archive, error) {
	var out strings.Builder
	err := buildtools.Command{Name: "npm", Dir: dir, Stdout: &out,
		Args: []string{"pack", "--json", "--loglevel=error", "--pack-destination=" + dir, fmt.Sprintf("%s@%d", name, major)}}.Run(ctx)
	if err != nil {
		return Archive{}, err
	}
	return parsePack(out.String(), dir, major)
}

// parsePack reads the answer of npm pack: a list of packages, or an object of them by name in newer versions.
func parsePack(text, dir string, major int) (Archive, error) {
	type packed struct{ Filename, Version string }
	var list []packed
	if err := json.Unmarshal([]byte(text), &list); err != nil {
		byName := map[string]packed{}
		if json.Unmarshal([]byte(text), &byName) != nil {
			return Archive{}, fmt.Errorf("npm pack: %w", err)
		}
		for _, p := range byName {
			list = append(list, p)
		}
	}
	if len(list) != 1 || list[0].Filename == "" || !hasMajor(list[0].Version, major) {
		return Archive{}, fmt.Errorf("npm pack named %d packages: %w", len(list), ErrNotFound)
	}
	file := filepath.Base(list[0].Filename)
	return Archive{Path: filepath.Join(dir, file), Version: list[0].Version}, nil
}

// Client talks to a registry.
type Client struct {
	config Config
	http   *http.Client
	err    error
}

// NewClient makes a client; what is wrong with the configuration is reported by Pack.
func NewClient(c Config) *Client {
	transport := &http.Transport{Proxy: http.ProxyFromEnvironment, ResponseHeaderTimeout: headerTimeout,
		DisableKeepAlives: true}
	client := &Client{config: c, http: &http.Client{Transport: transport}}
	if c.CAFile != "" {
		pem, err := os.ReadFile(c.CAFile)
		pool, perr := x509.SystemCertPool()
		if err = errors.Join(err, perr); err != nil {
			client.err = fmt.Errorf("npm cafile: %w", err)
			return client
		}
		pool.AppendCertsFromPEM(pem)
		transport.TLSClientConfig = &tls.Config{RootCAs: pool, MinVersion: tls.VersionTLS12}
	}
	return client
}

type release struct {
	Dist struct {
		Integrity string `json:"integrity"`
		Tarball   string `json:"tarball"`
	} `json:"dist"`
}

// Pack is the package function over this client.
func (c *Client) Pack(ctx context.Context, dir, name string, major int) (Archive, error) {
	if c.err != nil {
		return Archive{}, c.err
	}
	var doc struct {
		Versions map[string]release `json:"versions"`
	}
	body, err := c.get(ctx, c.config.Registry+"/"+url.PathEscape(name))
	if err != nil {
		return Archive{}, fmt.Errorf("npm package %s: %w", name, err)
	}
	err = json.NewDecoder(io.LimitReader(body, metadataLimit)).Decode(&doc)
	body.Close()
	if err != nil {
		return Archive{}, fmt.Errorf("npm package %s: %w", name, err)
	}
	version := newest(doc.Versions, major)
	if version == "" {
		return Archive{}, fmt.Errorf("%s@%d: %w", name, major, ErrNotFound)
	}
	a := Archive{Path: filepath.Join(dir, fmt.Sprintf("%s-%s.tgz", name, version)), Version: version}
	if err := c.download(ctx, doc.Versions[version], a.Path); err != nil {
		if rerr := os.Remove(a.Path); rerr != nil && !errors.Is(rerr, os.ErrNotExist) {
			err = errors.Join(err, rerr)
		}
		return Archive{}, fmt.Errorf("npm package %s: %w", name, err)
	}
	return a, nil
}

func (c *Client) get(ctx context.Context, address string) (io.ReadCloser, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, address, nil)
	if err != nil {
		return nil, err
	}
	req.Header.Set("Accept", "application/vnd.npm.install-v1+json, application/octet-stream;q=0.9, */*;q=0.1")
	if base, err := url.Parse(c.config.Registry); err == nil && c.config.Token != "" && base.Host == req.URL.Host {
		req.Header.Set("Authorization", "Bearer "+c.config.Token)
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return nil, err
	}
	if resp.StatusCode != http.StatusOK {
		resp.Body.Close()
		if resp.StatusCode == http.StatusNotFound {
			return nil, ErrNotFound
		}
		return nil, fmt.Errorf("the registry answered %s", resp.Status)
	}
	return resp.Body, nil
}

func (c *Client) download(ctx context.Context, r release, path string) error {
	want, ok := strings.CutPrefix(r.Dist.Integrity, "sha512-")
	if !ok {
		return fmt.Errorf("%w: no SHA-512 published", ErrIntegrity)
	}
	body, err := c.get(ctx, r.Dist.Tarball)
	if err != nil {
		return err
	}
	defer body.Close()
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	defer f.Close()
	h := sha512.New()
	if _, err := io.Copy(io.MultiWriter(f, h), io.LimitReader(body, archiveLimit)); err != nil {
		return err
	}
	if base64.StdEncoding.EncodeToString(h.Sum(nil)) != want {
		return ErrIntegrity
	}
	return f.Close()
}

// newest is the highest stable version with that major number, "" if there is none.
func newest(versions map[string]release, major int) string {
	best, bestParts := "", [3]int{-1}
	for v := range versions {
		parts, ok := parseVersion(v)
		if !ok || parts[0] != major {
			continue
		}
		if best == "" || parts[1] > bestParts[1] || parts[1] == bestParts[1] && parts[2] > bestParts[2] {
			best, bestParts = v, parts
		}
	}
	return best
}

// parseVersion reads "1.2.3"; pre-releases are no versions to it.
func parseVersion(v string) ([3]int, bool) {
	var out [3]int
	parts := strings.Split(v, ".")
	if len(parts) != 3 {
		return out, false
	}
	for i, p := range parts {
		n, err := strconv.Atoi(p)
		if err != nil || n < 0 {
			return out, false
		}
		out[i] = n
	}
	return out, true
}

func hasMajor(v string, major int) bool {
	parts, ok := parseVersion(v)
	return ok && parts[0] == major
}
