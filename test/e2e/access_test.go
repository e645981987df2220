package e2e

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

type keyJSON struct {
	ID, Key string
	Scopes  []string
}

// with returns the server as seen with another key.
func (s *server) with(key string) *server {
	c := *s
	c.key = key
	return &c
}

func (s *server) newKey(t *testing.T, fields object) keyJSON {
	t.Helper()
	body := object{"name": "test"}
	for k, v := range fields {
		body[k] = v
	}
	var k keyJSON
	s.call(t, "POST", "/v1/api-keys", body, &k)
	if !strings.HasPrefix(k.Key, "e2b_") || len(k.Key) != 44 {
		t.Fatalf("key of an odd form: %d characters", len(k.Key))
	}
	return k
}

func TestKeysCarryScopes(t *testing.T) {
	t.Parallel()
	sb := shared.create(t, object{"metadata": object{"team": "a"}})
	reader := shared.with(shared.newKey(t, object{"scopes": []string{"sandboxes:read"}}).Key)
	reader.call(t, "GET", "/v1/sandboxes/"+sb.ID, nil, nil)
	reader.refused(t, 403, "forbidden", "DELETE", "/v1/sandboxes/"+sb.ID, nil)
	reader.refused(t, 403, "forbidden", "POST", "/v1/sandboxes/"+sb.ID+"/commands", object{"argv": []string{"true"}})
	reader.refused(t, 403, "forbidden", "POST", "/v1/api-keys", object{"name": "x", "scopes": []string{"keys:admin"}})
	limited := shared.with(shared.newKey(t, object{"scopes": []string{"sandboxes:read", "sandboxes:write"}, "metadata": object{"team": "b"}}).Key)
	limited.refused(t, 404, "not_found", "GET", "/v1/sandboxes/"+sb.ID, nil)
	limited.refused(t, 404, "not_found", "DELETE", "/v1/sandboxes/"+sb.ID, nil)
	shared.with("e2b_"+strings.Repeat("0", 40)).refused(t, 401, "unauthorized", "GET", "/v1/sandboxes", nil)
	shared.with("").refused(t, 401, "unauthorized", "GET", "/v1/sandboxes", nil)
}

func TestRevokedKeyClosesItsStreams(t *testing.T) {
	t.Parallel()
	sb := shared.create(t, nil)
	k := shared.newKey(t, object{"scopes": []string{"sandboxes:read", "sandboxes:exec"}})
	c := shared.with(k.Key).command(t, sb.ID, []string{"sh", "-c", "echo up; sleep 120"}, nil)
	var revoked time.Time
	err := shared.stream(c.Session, 0, time.Minute, func(e event) bool {
		if e.Name == "stdout" {
			shared.call(t, "DELETE", "/v1/api-keys/"+k.ID, nil, nil)
			revoked = time.Now()
		}
		return true
	})
	if took := time.Since(revoked); err != nil || revoked.IsZero() || took > 6*time.Second {
		t.Errorf("the stream ended %s after the revocation: %v", took, err)
	}
	shared.with(k.Key).refused(t, 401, "unauthorized", "GET", "/v1/sandboxes", nil)
	if err := shared.stream(c.Session, 0, 10*time.Second, func(event) bool { return true }); err == nil {
		t.Error("the session outlives its key")
	}
}

func TestSecretsAreNotWrittenDown(t *testing.T) {
	t.Parallel()
	sb := shared.create(t, nil)
	c := shared.command(t, sb.ID, []string{"true"}, nil)
	shared.follow(t, c.Session)
	canaries := map[string]string{"API key": shared.key, "session token": c.Session.Token}
	for name, secret := range canaries {
		if strings.Contains(shared.log.String(), secret) {
			t.Errorf("the log holds the %s", name)
		}
		// The pattern travels as input: an argument would be journalled, as all arguments are.
		c := shared.command(t, sb.ID, []string{"sudo", "grep", "-rlsFf", "-", "/home", "/etc", "/run", "/var"}, object{"stdin": true, "start": "now"})
		if err := shared.stdin(sb.ID, c.Process.ID, secret+"\n", true); err != nil {
			t.Fatal(err)
		}
		if r := shared.follow(t, c.Session); r.stdout.Len() > 0 || r.code() == 0 {
			t.Errorf("the guest holds the %s (grep: %d): %s", name, r.code(), r.stdout.String())
		}
	}
	err := filepath.WalkDir(shared.dir, func(path string, d os.DirEntry, err error) error {
		if errors.Is(err, os.ErrNotExist) || err == nil && !d.Type().IsRegular() || filepath.Base(path) == "admin.key" {
			return nil
		}
		if err != nil {
			return err
		}
		b, err := readSmall(path, d)
		if errors.Is(err, os.ErrNotExist) { // a file of a sandbox that was deleted meanwhile
			return nil
		}
		if err != nil {
			return err
		}
		for name, secret := range canaries {
			if strings.Contains(string(b), secret) {
				return fmt.Errorf("%s holds the %s", path, name)
			}
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
	info, err := os.Stat(filepath.Join(shared.dir, "admin.key"))
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("admin.key: %v %v", info.Mode(), err)
	}
}

// readSmall reads a file unless it is larger than anything that would hold a secret of ours (memory images are).
func readSmall(path string, d os.DirEntry) ([]byte, error) {
	info, err := d.Info()
	if err != nil || info.Size() > 64<<20 {
		return nil, err
	}
	return os.ReadFile(path)
}
