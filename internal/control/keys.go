package control

import (
	"context"
	"errors"
	"maps"
	"slices"

	"github.com/space-sandbox/space/internal/auth"
	"github.com/space-sandbox/space/internal/sandbox"
	"github.com/space-sandbox/space/internal/store"
)

// CreateKey implements Service. A key cannot make one that may do more than itself.
func (p *Plane) CreateKey(ctx context.Context, pr *auth.Principal, req CreateKey, idem *Idem) (NewKey, error) {
	if err := pr.Require(sandbox.ScopeKeysAdmin); err != nil {
		return NewKey{}, err
	}
	var out NewKey
	err := p.update(ctx, func(tx store.Tx) error {
		out = NewKey{}
		c, err := p.findClaim(ctx, tx, pr, idem)
		if err != nil {
			return err
		}
		if c != nil {
			out.Replayed = true
			out.Key, err = tx.GetKey(ctx, c.Key)
			return err
		}
		if err := p.checkKey(pr, req); err != nil {
			return err
		}
		if err := checkExpiry(ctx, tx, pr, req); err != nil {
			return err
		}
		out.Secret = auth.NewSecret()
		out.Key = &sandbox.APIKey{
			ID: sandbox.NewKeyID(), ProjectID: pr.ProjectID, Name: req.Name, Hash: auth.Hash(out.Secret),
			Prefix: auth.SecretPrefix(out.Secret), Scopes: slices.Clone(req.Scopes),
			SandboxIDs: slices.Clone(req.SandboxIDs), Metadata: maps.Clone(req.Metadata),
			CreatedAt: p.now(), ExpiresAt: req.ExpiresAt.UTC(), CreatedByID: pr.KeyID,
		}
		if req.ExpiresAt.IsZero() {
			out.Key.ExpiresAt = req.ExpiresAt
		}
		if err := tx.InsertKey(ctx, out.Key); err != nil {
			return err
		}
		return p.putClaim(ctx, tx, pr, idem, claim{Key: out.Key.ID})
	})
	if err != nil {
		return NewKey{}, err
	}
	return out, nil
}

func (p *Plane) checkKey(pr *auth.Principal, req CreateKey) error {
	if len(req.Scopes) == 0 {
		return sandbox.Invalid("scopes", "min_items", "a key needs at least one scope")
	}
	for _, scope := range req.Scopes {
		if !slices.Contains(sandbox.AllScopes(), scope) {
			return sandbox.Invalid("scopes", "enum", "holds an unknown scope")
		}
		if err := pr.Require(scope); err != nil {
			return err
		}
	}
	if !req.ExpiresAt.IsZero() && !p.clock.Now().Before(req.ExpiresAt) {
		return sandbox.Invalid("expires_at", "future", "must be in the future")
	}
	if !within(pr, req.SandboxIDs, req.Metadata) {
		return sandbox.Errorf(sandbox.CodeForbidden, "a limited key cannot make one with wider limits").
			WithRemediation("repeat the limits of your key, or narrow them")
	}
	return nil
}

// checkExpiry keeps a key from living on in one that it made.
func checkExpiry(ctx context.Context, tx store.Tx, pr *auth.Principal, req CreateKey) error {
	maker, err := tx.GetKey(ctx, pr.KeyID)
	if err != nil || maker.ExpiresAt.IsZero() {
		return err
	}
	if req.ExpiresAt.IsZero() || req.ExpiresAt.After(maker.ExpiresAt) {
		return sandbox.Invalid("expires_at", "maximum", "must not be later than the end of the key that makes it")
	}
	return nil
}

// within reports whether limits are no wider than those of pr.
func within(pr *auth.Principal, ids []sandbox.ID, metadata map[string]string) bool {
	if len(pr.SandboxIDs) > 0 && len(ids) == 0 {
		return false
	}
	for _, id := range ids {
		if len(pr.SandboxIDs) > 0 && !slices.Contains(pr.SandboxIDs, id) {
			return false
		}
	}
	for k, v := range pr.Metadata {
		if got, ok := metadata[k]; !ok || got != v {
			return false
		}
	}
	return true
}

// administers reports whether pr may see and revoke k: a key that it could have made itself.
func administers(pr *auth.Principal, k *sandbox.APIKey) bool {
	if k.ProjectID != pr.ProjectID || !within(pr, k.SandboxIDs, k.Metadata) {
		return false
	}
	return !slices.ContainsFunc(k.Scopes, func(scope string) bool { return pr.Require(scope) != nil })
}

// ListKeys implements Service. Keys that may do more than the caller's are left out. The cursor of a page is the ID of its last key.
func (p *Plane) ListKeys(ctx context.Context, pr *auth.Principal, after sandbox.KeyID, limit int) (Page[*sandbox.APIKey], error) {
	var page Page[*sandbox.APIKey]
	if err := pr.Require(sandbox.ScopeKeysAdmin); err != nil {
		return page, err
	}
	limit = pageLimit(limit)
	err := p.view(ctx, func(tx store.Tx) (err error) {
		page.Items, err = administered(ctx, tx, pr, after, limit+1)
		return err
	})
	if after != "" && sandbox.CodeOf(err) == sandbox.CodeNotFound {
		err = sandbox.Invalid("cursor", "format", "is not a cursor of this list")
	}
	if err != nil {
		return Page[*sandbox.APIKey]{}, err
	}
	if len(page.Items) > limit {
		page.Items = page.Items[:limit]
		page.NextCursor = string(page.Items[limit-1].ID)
	}
	return page, nil
}

// administered returns up to n keys after one that pr may see.
func administered(ctx context.Context, tx store.Tx, pr *auth.Principal, after sandbox.KeyID, n int) ([]*sandbox.APIKey, error) {
	var found []*sandbox.APIKey
	for {
		keys, err := tx.ListKeys(ctx, pr.ProjectID, after, n)
		if err != nil {
			return nil, err
		}
		for _, k := range keys {
			if administers(pr, k) && len(found) < n {
				found = append(found, k)
			}
		}
		if len(keys) < n || len(found) == n {
			return found, nil
		}
		after = keys[len(keys)-1].ID
	}
}

// RevokeKey implements Service. A key that may do more than the caller's is not found. It counts at once for this process; revoking again changes nothing.
func (p *Plane) RevokeKey(ctx context.Context, pr *auth.Principal, id sandbox.KeyID) (*sandbox.APIKey, error) {
	if err := pr.Require(sandbox.ScopeKeysAdmin); err != nil {
		return nil, err
	}
	var key *sandbox.APIKey
	err := p.update(ctx, func(tx store.Tx) (err error) {
		key, err = tx.GetKey(ctx, id)
		if errors.Is(err, store.ErrNotFound) || err == nil && !administers(pr, key) {
			return sandbox.Errorf(sandbox.CodeNotFound, "no API key has this ID")
		}
		if err != nil || !key.RevokedAt.IsZero() {
			return err
		}
		key.RevokedAt = p.now()
		return tx.UpdateKey(ctx, key)
	})
	if err != nil {
		return nil, err
	}
	p.keys.Forget(id)
	return key, nil
}
