package sqlite

import (
	"context"
	"fmt"
	"time"

	"github.com/space-sandbox/space/internal/sandbox"
	"github.com/space-sandbox/space/internal/store"
)

// InsertOperation implements store.Tx.
func (t tx) InsertOperation(ctx context.Context, op *sandbox.Operation) error {
	doc, err := encode(op)
	if err != nil {
		return err
	}
	_, err = t.exec(ctx, `INSERT INTO operations (id, sandbox_id, ended, created_at, doc) VALUES (?, ?, ?, ?, ?)`,
		op.ID, op.SandboxID, ended(op), toNano(op.CreatedAt), doc)
	if err != nil {
		return fmt.Errorf("insert operation %s: %w", op.ID, err)
	}
	return nil
}

func ended(op *sandbox.Operation) int64 {
	if op.State.Ended() {
		return 1
	}
	return 0
}

// UpdateOperation implements store.Tx.
func (t tx) UpdateOperation(ctx context.Context, op *sandbox.Operation) error {
	doc, err := encode(op)
	if err != nil {
		return err
	}
	n, err := t.exec(ctx, `UPDATE operations SET ended = ?, doc = ? WHERE id = ? AND ended = 0`, ended(op), doc, op.ID)
	if err != nil {
		return fmt.Errorf("update operation %s: %w", op.ID, err)
	}
	if n == 1 {
		return nil
	}
	if _, err := t.GetOperation(ctx, op.ID); err != nil {
		return err
	}
	return fmt.Errorf("operation %s has ended: %w", op.ID, store.ErrVersion)
}

func scanOperation(scan func(...any) error) (*sandbox.Operation, error) {
	var doc string
	if err := scan(&doc); err != nil {
		return nil, err
	}
	return decode[sandbox.Operation](doc)
}

// GetOperation implements store.Tx.
func (t tx) GetOperation(ctx context.Context, id sandbox.OperationID) (*sandbox.Operation, error) {
	op, err := scanOperation(func(into ...any) error {
		return t.row(ctx, `SELECT doc FROM operations WHERE id = ?`, []any{id}, into...)
	})
	if err != nil {
		return nil, fmt.Errorf("operation %s: %w", id, err)
	}
	return op, nil
}

// OpenOperations implements store.Tx.
func (t tx) OpenOperations(ctx context.Context) ([]*sandbox.Operation, error) {
	ops, err := collect(ctx, t, scanOperation, `SELECT doc FROM operations WHERE ended = 0 ORDER BY created_at, id`)
	if err != nil {
		return nil, fmt.Errorf("open operations: %w", err)
	}
	return ops, nil
}

// InsertSession implements store.Tx.
func (t tx) InsertSession(ctx context.Context, s *sandbox.Session) error {
	_, err := t.exec(ctx, `INSERT INTO sessions (id, sandbox_id, process_id, token_hash, key_id, created_at, expires_at)
		VALUES (?, ?, ?, ?, ?, ?, ?)`, s.ID, s.SandboxID, s.ProcessID, hexHash(s.TokenHash), s.KeyID,
		toNano(s.CreatedAt), toNano(s.ExpiresAt))
	if err != nil {
		return fmt.Errorf("insert session %s: %w", s.ID, err)
	}
	return nil
}

// GetSession implements store.Tx.
func (t tx) GetSession(ctx context.Context, id sandbox.SessionID) (*sandbox.Session, error) {
	var (
		s                sandbox.Session
		hash             string
		created, expires int64
	)
	err := t.row(ctx, `SELECT id, sandbox_id, process_id, token_hash, key_id, created_at, expires_at
		FROM sessions WHERE id = ?`, []any{id}, &s.ID, &s.SandboxID, &s.ProcessID, &hash, &s.KeyID, &created, &expires)
	if err != nil {
		return nil, fmt.Errorf("session %s: %w", id, err)
	}
	s.CreatedAt, s.ExpiresAt = fromNano(created), fromNano(expires)
	s.TokenHash, err = parseHash(hash)
	return &s, err
}

// DeleteSession implements store.Tx.
func (t tx) DeleteSession(ctx context.Context, id sandbox.SessionID) error {
	_, err := t.exec(ctx, `DELETE FROM sessions WHERE id = ?`, id)
	return err
}

// DeleteSessions implements store.Tx.
func (t tx) DeleteSessions(ctx context.Context, expiredBefore time.Time) (int, error) {
	return t.exec(ctx, `DELETE FROM sessions WHERE expires_at < ?`, toNano(expiredBefore))
}

// InsertIdempotency implements store.Tx.
func (t tx) InsertIdempotency(ctx context.Context, e *store.Idempotency) error {
	_, err := t.exec(ctx, `DELETE FROM idempotency WHERE scope = ? AND name = ? AND expires_at <= ?`,
		e.Scope, e.Key, toNano(e.CreatedAt))
	if err != nil {
		return err
	}
	_, err = t.exec(ctx, `INSERT INTO idempotency (scope, name, body_hash, resource, created_at, expires_at)
		VALUES (?, ?, ?, ?, ?, ?)`, e.Scope, e.Key, hexHash(e.BodyHash), e.Resource, toNano(e.CreatedAt), toNano(e.ExpiresAt))
	if err != nil {
		return fmt.Errorf("insert idempotency key: %w", err)
	}
	return nil
}

// GetIdempotency implements store.Tx.
func (t tx) GetIdempotency(ctx context.Context, scope, key string) (*store.Idempotency, error) {
	var (
		e                = store.Idempotency{Scope: scope, Key: key}
		hash             string
		created, expires int64
	)
	err := t.row(ctx, `SELECT body_hash, resource, created_at, expires_at FROM idempotency WHERE scope = ? AND name = ?`,
		[]any{scope, key}, &hash, &e.Resource, &created, &expires)
	if err != nil {
		return nil, fmt.Errorf("idempotency key: %w", err)
	}
	e.CreatedAt, e.ExpiresAt = fromNano(created), fromNano(expires)
	e.BodyHash, err = parseHash(hash)
	return &e, err
}

// RemoveIdempotency implements store.Tx.
func (t tx) RemoveIdempotency(ctx context.Context, scope, key string) error {
	_, err := t.exec(ctx, `DELETE FROM idempotency WHERE scope = ? AND name = ?`, scope, key)
	return err
}

// DeleteIdempotency implements store.Tx.
func (t tx) DeleteIdempotency(ctx context.Context, expiredBefore time.Time) (int, error) {
	return t.exec(ctx, `DELETE FROM idempotency WHERE expires_at < ?`, toNano(expiredBefore))
}

// Setting implements store.Tx.
func (t tx) Setting(ctx context.Context, name string) (string, error) {
	var value string
	if err := t.row(ctx, `SELECT value FROM settings WHERE name = ?`, []any{name}, &value); err != nil {
		return "", fmt.Errorf("setting %s: %w", name, err)
	}
	return value, nil
}

// PutSetting implements store.Tx.
func (t tx) PutSetting(ctx context.Context, name, value string) error {
	_, err := t.exec(ctx, `INSERT INTO settings (name, value) VALUES (?, ?)
		ON CONFLICT (name) DO UPDATE SET value = excluded.value`, name, value)
	return err
}

// InsertKey implements store.Tx.
func (t tx) InsertKey(ctx context.Context, k *sandbox.APIKey) error {
	doc, err := encode(k)
	if err != nil {
		return err
	}
	_, err = t.exec(ctx, `INSERT INTO api_keys (id, project_id, hash, created_at, doc) VALUES (?, ?, ?, ?, ?)`,
		k.ID, k.ProjectID, hexHash(k.Hash), toNano(k.CreatedAt), doc)
	if err != nil {
		return fmt.Errorf("insert key %s: %w", k.ID, err)
	}
	return nil
}

// UpdateKey implements store.Tx.
func (t tx) UpdateKey(ctx context.Context, k *sandbox.APIKey) error {
	doc, err := encode(k)
	if err != nil {
		return err
	}
	err = t.execOne(ctx, store.ErrNotFound, `UPDATE api_keys SET project_id = ?, hash = ?, created_at = ?, doc = ?
		WHERE id = ?`, k.ProjectID, hexHash(k.Hash), toNano(k.CreatedAt), doc, k.ID)
	if err != nil {
		return fmt.Errorf("update key %s: %w", k.ID, err)
	}
	return nil
}

func scanKey(scan func(...any) error) (*sandbox.APIKey, error) {
	var doc string
	if err := scan(&doc); err != nil {
		return nil, err
	}
	return decode[sandbox.APIKey](doc)
}

func (t tx) key(ctx context.Context, column, value string) (*sandbox.APIKey, error) {
	k, err := scanKey(func(into ...any) error {
		return t.row(ctx, `SELECT doc FROM api_keys WHERE `+column+` = ?`, []any{value}, into...)
	})
	if err != nil {
		return nil, fmt.Errorf("API key: %w", err)
	}
	return k, nil
}

// GetKey implements store.Tx.
func (t tx) GetKey(ctx context.Context, id sandbox.KeyID) (*sandbox.APIKey, error) {
	return t.key(ctx, `id`, string(id))
}

// GetKeyByHash implements store.Tx.
func (t tx) GetKeyByHash(ctx context.Context, hash [32]byte) (*sandbox.APIKey, error) {
	return t.key(ctx, `hash`, hexHash(hash))
}

// ListKeys implements store.Tx.
func (t tx) ListKeys(ctx context.Context, project string, after sandbox.KeyID, limit int) ([]*sandbox.APIKey, error) {
	query, args := `SELECT doc FROM api_keys WHERE project_id = ?`, []any{project}
	if after != "" {
		last, err := t.GetKey(ctx, after)
		if err != nil {
			return nil, err
		}
		if last.ProjectID != project {
			return nil, fmt.Errorf("API key of another project: %w", store.ErrNotFound)
		}
		query += ` AND (created_at, id) > (?, ?)`
		args = append(args, toNano(last.CreatedAt), last.ID)
	}
	query += ` ORDER BY created_at, id`
	if limit > 0 {
		query += ` LIMIT ?`
		args = append(args, limit)
	}
	return collect(ctx, t, scanKey, query, args...)
}
