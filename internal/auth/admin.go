package auth

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"github.com/space-sandbox/space/internal/sandbox"
	"github.com/space-sandbox/space/internal/store"
)

// DefaultProject is the project of a deployment that has made no other.
const DefaultProject = "default"

// adminKeySetting names the key that the admin file holds.
const adminKeySetting = "admin_key_id"

// EnsureAdminKey makes sure that the file at path holds a living API key with every scope, and nothing else, readable
// by its owner only. A file whose key the store knows and has not revoked stays. Otherwise (the file was lost or
// damaged, the store is a new one) a new key is made and the one it replaces is revoked: a file alone never grants
// anything. The key is in the store before it is in the file, so what the file holds always works.
func EnsureAdminKey(ctx context.Context, st store.Store, path string) (secret string, err error) {
	if secret, err = readSecret(path); err != nil {
		return "", fmt.Errorf("admin key: %w", err)
	}
	if secret != "" {
		ok, err := known(ctx, st, secret)
		if err != nil {
			return "", fmt.Errorf("admin key: %w", err)
		}
		if ok {
			return secret, nil
		}
	}
	secret = NewSecret()
	if err := register(ctx, st, secret); err != nil {
		return "", fmt.Errorf("admin key: %w", err)
	}
	if err := writeSecret(path, secret); err != nil {
		return "", fmt.Errorf("admin key: %w", err)
	}
	return secret, nil
}

// readSecret returns "" for a file that is not there or holds no key. It tightens the mode of one that does.
func readSecret(path string) (string, error) {
	f, err := os.Open(path)
	if errors.Is(err, os.ErrNotExist) {
		return "", nil
	}
	if err != nil {
		return "", err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, 256))
	if err != nil {
		return "", err
	}
	s := string(b)
	if n := len(s); n > 0 && s[n-1] == '\n' { // an editor's
		s = s[:n-1]
	}
	if !ValidSecret(s) {
		return "", nil
	}
	return s, f.Chmod(0o600)
}

func known(ctx context.Context, st store.Store, secret string) (bool, error) {
	alive := false
	err := st.View(ctx, func(tx store.Tx) error {
		key, err := tx.GetKeyByHash(ctx, Hash(secret))
		if err == nil {
			alive = Alive(key, time.Now())
		}
		return err
	})
	if errors.Is(err, store.ErrNotFound) {
		return false, nil
	}
	return alive, err
}

// register stores a new admin key and revokes the one it replaces.
func register(ctx context.Context, st store.Store, secret string) error {
	now := time.Now().UTC()
	key := &sandbox.APIKey{
		ID: sandbox.NewKeyID(), ProjectID: DefaultProject, Name: "admin", Hash: Hash(secret),
		Prefix: SecretPrefix(secret), Scopes: sandbox.AllScopes(), CreatedAt: now,
	}
	return st.Update(ctx, func(tx store.Tx) error {
		old, err := tx.Setting(ctx, adminKeySetting)
		if err != nil && !errors.Is(err, store.ErrNotFound) {
			return err
		}
		if old != "" {
			if err := revoke(ctx, tx, sandbox.KeyID(old), now); err != nil {
				return err
			}
		}
		if err := tx.InsertKey(ctx, key); err != nil {
			return err
		}
		return tx.PutSetting(ctx, adminKeySetting, string(key.ID))
	})
}

func revoke(ctx context.Context, tx store.Tx, id sandbox.KeyID, now time.Time) error {
	key, err := tx.GetKey(ctx, id)
	if errors.Is(err, store.ErrNotFound) {
		return nil
	}
	if err != nil || !key.RevokedAt.IsZero() {
		return err
	}
	key.RevokedAt = now
	return tx.UpdateKey(ctx, key)
}

// writeSecret replaces the file in one step: a reader sees the old key or the new one, whole.
func writeSecret(path, secret string) error {
	dir := filepath.Dir(path)
	f, err := os.CreateTemp(dir, ".admin-key-*") // mode 0600
	if err != nil {
		return err
	}
	defer os.Remove(f.Name()) //nolint:errcheck // gone after the rename
	defer f.Close()
	if _, err := f.WriteString(secret); err != nil {
		return err
	}
	if err := f.Sync(); err != nil {
		return err
	}
	if err := os.Rename(f.Name(), path); err != nil {
		return err
	}
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer d.Close()
	return d.Sync()
}
