package control

import (
	"testing"
	"time"

	"github.com/space-sandbox/space/internal/sandbox"
)

// A key administers the keys that it could have made itself, and no others.
func TestKeysReachNoFurtherThanTheirMaker(t *testing.T) {
	e := newEnv(t)
	ctx := t.Context()
	teamA, teamB := map[string]string{"team": "a"}, map[string]string{"team": "b"}
	admins := []string{sandbox.ScopeKeysAdmin, sandbox.ScopeSandboxesRead}
	_, limited := e.key(func(k *sandbox.APIKey) { k.Scopes, k.Metadata = admins, teamA })
	_, narrow := e.key(func(k *sandbox.APIKey) { k.Scopes = []string{sandbox.ScopeSandboxesRead}; k.Metadata = teamA })
	_, other := e.key(func(k *sandbox.APIKey) { k.Scopes, k.Metadata = admins, teamB })
	_, stronger := e.key(func(k *sandbox.APIKey) { k.Scopes, k.Metadata = sandbox.AllScopes(), teamA })
	for _, out := range []sandbox.KeyID{e.admin.KeyID, other.KeyID, stronger.KeyID} {
		_, err := e.RevokeKey(ctx, limited, out)
		e.wantCode(err, sandbox.CodeNotFound)
	}
	page, err := e.ListKeys(ctx, limited, "", 1)
	if err != nil {
		t.Fatal(err)
	}
	seen := map[sandbox.KeyID]bool{}
	for {
		for _, k := range page.Items {
			seen[k.ID] = true
		}
		if page.NextCursor == "" {
			break
		}
		if page, err = e.ListKeys(ctx, limited, sandbox.KeyID(page.NextCursor), 1); err != nil {
			t.Fatal(err)
		}
	}
	if len(seen) != 2 || !seen[limited.KeyID] || !seen[narrow.KeyID] {
		t.Errorf("sees %v, want itself and the narrower key", seen)
	}
	if k, err := e.RevokeKey(ctx, limited, narrow.KeyID); err != nil || k.RevokedAt.IsZero() {
		t.Errorf("the narrower key: %+v, %v", k, err)
	}
}

func TestKeysDoNotOutliveTheirMaker(t *testing.T) {
	e := newEnv(t)
	end := time.Now().Add(time.Hour).Truncate(time.Second)
	_, maker := e.key(func(k *sandbox.APIKey) { k.Scopes, k.ExpiresAt = sandbox.AllScopes(), end })
	for until, ok := range map[time.Time]bool{{}: false, end.Add(time.Second): false, end: true, end.Add(-time.Minute): true} {
		_, err := e.CreateKey(t.Context(), maker, CreateKey{Name: "n", Scopes: []string{sandbox.ScopeSandboxesRead}, ExpiresAt: until}, nil)
		if (err == nil) != ok {
			t.Errorf("until %v: %v", until, err)
		}
		if !ok {
			e.wantCode(err, sandbox.CodeInvalidRequest)
		}
	}
}
