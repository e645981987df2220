package sqlite

import (
	"context"
	"fmt"
	"maps"
	"strings"
	"time"

	"github.com/space-sandbox/space/internal/sandbox"
	"github.com/space-sandbox/space/internal/store"
)

// InsertSandbox implements store.Tx.
func (t tx) InsertSandbox(ctx context.Context, s *sandbox.Sandbox) error {
	c := *s
	c.Version = 1
	doc, err := encode(&c)
	if err != nil {
		return err
	}
	_, err = t.exec(ctx, `INSERT INTO sandboxes
		(id, project_id, state, template_name, node, version, created_at, last_active, deleted_at, doc)
		VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)`,
		c.ID, c.ProjectID, c.State, c.Template.Name, c.Node, c.Version,
		toNano(c.CreatedAt), toNano(c.LastActive), toNano(c.DeletedAt), doc)
	if err != nil {
		return fmt.Errorf("insert sandbox %s: %w", c.ID, err)
	}
	if err := t.putMetadata(ctx, c.ID, c.Metadata); err != nil {
		return err
	}
	s.Version = c.Version
	return nil
}

// UpdateSandbox implements store.Tx.
func (t tx) UpdateSandbox(ctx context.Context, s *sandbox.Sandbox) error {
	old, err := t.GetSandbox(ctx, s.ID)
	if err != nil {
		return err
	}
	if old.Version != s.Version {
		return fmt.Errorf("update sandbox %s: %w", s.ID, store.ErrVersion)
	}
	c := *s
	c.Version++
	doc, err := encode(&c)
	if err != nil {
		return err
	}
	err = t.execOne(ctx, store.ErrVersion, `UPDATE sandboxes
		SET project_id = ?, state = ?, template_name = ?, node = ?, version = ?, created_at = ?, last_active = ?,
		deleted_at = ?, doc = ? WHERE id = ? AND version = ?`,
		c.ProjectID, c.State, c.Template.Name, c.Node, c.Version, toNano(c.CreatedAt), toNano(c.LastActive),
		toNano(c.DeletedAt), doc, c.ID, s.Version)
	if err != nil {
		return fmt.Errorf("update sandbox %s: %w", s.ID, err)
	}
	if !maps.Equal(old.Metadata, c.Metadata) {
		if _, err := t.exec(ctx, `DELETE FROM sandbox_metadata WHERE sandbox_id = ?`, c.ID); err != nil {
			return err
		}
		if err := t.putMetadata(ctx, c.ID, c.Metadata); err != nil {
			return err
		}
	}
	s.Version = c.Version
	return nil
}

// putMetadata fills the side table that lists are filtered by.
func (t tx) putMetadata(ctx context.Context, id sandbox.ID, metadata map[string]string) error {
	for k, v := range metadata {
		_, err := t.exec(ctx, `INSERT INTO sandbox_metadata (sandbox_id, name, value) VALUES (?, ?, ?)`, id, k, v)
		if err != nil {
			return fmt.Errorf("metadata of sandbox %s: %w", id, err)
		}
	}
	return nil
}

// TouchSandbox implements store.Tx.
func (t tx) TouchSandbox(ctx context.Context, id sandbox.ID, lastActive time.Time) error {
	n := toNano(lastActive)
	return t.execOne(ctx, store.ErrNotFound, `UPDATE sandboxes
		SET last_active = CASE WHEN last_active < ? THEN ? ELSE last_active END WHERE id = ?`, n, n, id)
}

const sandboxColumns = `doc, version, last_active`

func scanSandbox(scan func(...any) error) (*sandbox.Sandbox, error) {
	var (
		doc                 string
		version, lastActive int64
	)
	if err := scan(&doc, &version, &lastActive); err != nil {
		return nil, err
	}
	s, err := decode[sandbox.Sandbox](doc)
	if err != nil {
		return nil, err
	}
	// TouchSandbox writes only the column.
	s.Version, s.LastActive = version, fromNano(lastActive)
	return s, nil
}

// GetSandbox implements store.Tx.
func (t tx) GetSandbox(ctx context.Context, id sandbox.ID) (*sandbox.Sandbox, error) {
	scan := func(into ...any) error {
		return t.row(ctx, `SELECT `+sandboxColumns+` FROM sandboxes WHERE id = ?`, []any{id}, into...)
	}
	s, err := scanSandbox(scan)
	if err != nil {
		return nil, fmt.Errorf("sandbox %s: %w", id, err)
	}
	return s, nil
}

// ListSandboxes implements store.Tx.
func (t tx) ListSandboxes(ctx context.Context, q store.SandboxQuery) ([]*sandbox.Sandbox, error) {
	where, args := sandboxConditions(q)
	query := `SELECT ` + sandboxColumns + ` FROM sandboxes s WHERE ` + strings.Join(where, " AND ")
	if q.Descending {
		query += ` ORDER BY created_at DESC, id DESC`
	} else {
		query += ` ORDER BY created_at, id`
	}
	if q.Limit > 0 {
		query += ` LIMIT ?`
		args = append(args, q.Limit)
	}
	list, err := collect(ctx, t, scanSandbox, query, args...)
	if err != nil {
		return nil, fmt.Errorf("list sandboxes: %w", err)
	}
	return list, nil
}

func sandboxConditions(q store.SandboxQuery) (where []string, args []any) {
	add := func(cond string, values ...any) {
		where = append(where, cond)
		args = append(args, values...)
	}
	if len(q.States) == 0 {
		add(`state <> ?`, sandbox.StateDeleted)
	} else {
		add(in(`state`, len(q.States)), anys(q.States)...)
	}
	if len(q.IDs) > 0 {
		add(in(`id`, len(q.IDs)), anys(q.IDs)...)
	}
	for _, f := range []struct{ column, value string }{
		{`project_id`, q.ProjectID}, {`template_name`, q.Template}, {`node`, q.Node},
	} {
		if f.value != "" {
			add(f.column+` = ?`, f.value)
		}
	}
	for k, v := range q.Metadata {
		add(`EXISTS (SELECT 1 FROM sandbox_metadata m WHERE m.sandbox_id = s.id AND m.name = ? AND m.value = ?)`, k, v)
	}
	if !q.After.IsZero() {
		op := `>`
		if q.Descending {
			op = `<`
		}
		add(`(created_at, id) `+op+` (?, ?)`, toNano(q.After.CreatedAt), q.After.ID)
	}
	return where, args
}

func in(column string, n int) string {
	return column + ` IN (?` + strings.Repeat(`, ?`, n-1) + `)`
}

func anys[T any](list []T) []any {
	out := make([]any, len(list))
	for i, v := range list {
		out[i] = v
	}
	return out
}

// PurgeSandboxes implements store.Tx. Operations, sessions and metadata go with their sandbox (ON DELETE CASCADE).
func (t tx) PurgeSandboxes(ctx context.Context, before time.Time) (int, error) {
	n, err := t.exec(ctx, `DELETE FROM sandboxes WHERE state = ? AND deleted_at < ?`, sandbox.StateDeleted, toNano(before))
	if err != nil {
		return 0, fmt.Errorf("purge sandboxes: %w", err)
	}
	return n, nil
}
