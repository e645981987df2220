package auth

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/space-sandbox/space/internal/sandbox"
	"github.com/space-sandbox/space/internal/store"
	"github.com/space-sandbox/space/internal/store/sqlite"
)

// clock is a clock that stands until it is moved.
type clock struct {
	mu sync.Mutex
	t  time.Time
}

func (c *clock) now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.t
}

func (c *clock) add(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.t = c.t.Add(d)
}

// flaky is a store that can be made unavailable.
type flaky struct {
	store.Store
	mu    sync.Mutex
	down  bool
	views int
}

func (f *flaky) setDown(down bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.down = down
}

func (f *flaky) View(ctx context.Context, fn func(store.Tx) error) error {
	f.mu.Lock()
	down := f.down
	f.views++
	f.mu.Unlock()
	if down {
		return store.ErrUnavailable
	}
	return f.Store.View(ctx, fn)
}

func newStore(t *testing.T) *flaky {
	t.Helper()
	db, err := sqlite.Open(t.Context(), filepath.Join(t.TempDir(), "space.db"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = db.Close() })
	return &flaky{Store: db}
}

func newKeys(t *testing.T) (*Keys, *flaky, *clock) {
	t.Helper()
	st, c := newStore(t), &clock{t: time.Date(2026, 1, 1, 0, 0, 30, 0, time.UTC)}
	return NewKeys(st, c.now, slog.New(slog.DiscardHandler)), st, c
}

func addKey(t *testing.T, st store.Store, change ...func(*sandbox.APIKey)) (string, *sandbox.APIKey) {
	t.Helper()
	secret := NewSecret()
	key := &sandbox.APIKey{ID: sandbox.NewKeyID(), ProjectID: "p1", Hash: Hash(secret), Scopes: []string{"files:read"},
		Metadata: map[string]string{"team": "a"}, CreatedAt: time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)}
	for _, c := range change {
		c(key)
	}
	if err := st.Update(t.Context(), func(tx store.Tx) error { return tx.InsertKey(t.Context(), key) }); err != nil {
		t.Fatal(err)
	}
	return secret, key
}

func change(t *testing.T, st store.Store, id sandbox.KeyID, fn func(*sandbox.APIKey)) {
	t.Helper()
	err := st.Update(t.Context(), func(tx store.Tx) error {
		key, err := tx.GetKey(t.Context(), id)
		if err != nil {
			return err
		}
		fn(key)
		return tx.UpdateKey(t.Context(), key)
	})
	if err != nil {
		t.Fatal(err)
	}
}

func getKey(t *testing.T, st store.Store, id sandbox.KeyID) (key *sandbox.APIKey) {
	t.Helper()
	err := st.View(t.Context(), func(tx store.Tx) (err error) {
		key, err = tx.GetKey(t.Context(), id)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return key
}

func wantCode(t *testing.T, err error, want sandbox.Code) {
	t.Helper()
	if got := sandbox.CodeOf(err); got != want {
		t.Fatalf("error = %v, want %q", err, want)
	}
}

func TestSecrets(t *testing.T) {
	seen := map[string]bool{}
	for range 100 {
		s := NewSecret()
		if !ValidSecret(s) || len(s) != 44 || seen[s] || SecretPrefix(s) != s[:8] {
			t.Fatalf("secret %q", s)
		}
		seen[s] = true
		token := NewToken()
		if !strings.HasPrefix(token, "st_") || len(token) != 3+43 || seen[token] {
			t.Fatalf("token %q", token)
		}
		seen[token] = true
	}
	if !HashEqual("a", Hash("a")) || HashEqual("a", Hash("b")) || HashEqual("", [32]byte{}) {
		t.Error("HashEqual is wrong")
	}
}

func TestValidSecret(t *testing.T) {
	good := "e2b_" + strings.Repeat("0f", 20)
	for s, want := range map[string]bool{
		good: true, good + "0": false, good[:43]: false, strings.ToUpper(good): false, "": false,
		"e2a_" + good[4:]: false, "e2b_" + strings.Repeat("g0", 20): false, " " + good: false, good + "\n": false,
	} {
		if ValidSecret(s) != want {
			t.Errorf("ValidSecret(%q) = %v", s, !want)
		}
	}
}

func FuzzValidSecret(f *testing.F) {
	for _, s := range []string{"e2b_" + strings.Repeat("0f", 20), "e2b_", "", "e2b_\x00"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		if ValidSecret(s) && (len(s) != 44 || strings.ToLower(s) != s) {
			t.Fatalf("%q is valid", s)
		}
	})
}

func TestAuthenticate(t *testing.T) {
	k, st, c := newKeys(t)
	secret, key := addKey(t, st)
	p, err := k.Authenticate(t.Context(), secret)
	if err != nil {
		t.Fatal(err)
	}
	if p.KeyID != key.ID || p.ProjectID != "p1" || p.Metadata["team"] != "a" || p.Require("files:read") != nil {
		t.Errorf("principal %+v", p)
	}
	wantCode(t, p.Require("files:write"), sandbox.CodeForbidden)

	revoked, _ := addKey(t, st, func(k *sandbox.APIKey) { k.RevokedAt = c.now() })
	expired, _ := addKey(t, st, func(k *sandbox.APIKey) { k.ExpiresAt = c.now() })
	for name, secret := range map[string]string{"unknown": NewSecret(), "revoked": revoked, "expired": expired, "none": "", "junk": "x"} {
		t.Run(name, func(t *testing.T) {
			_, err := k.Authenticate(t.Context(), secret)
			wantCode(t, err, sandbox.CodeUnauthorized)
			if secret != "" && strings.Contains(err.Error(), secret) && len(secret) > 1 {
				t.Errorf("the error holds the key: %v", err)
			}
		})
	}
}

func TestKeyExpiresWhileCached(t *testing.T) {
	k, st, c := newKeys(t)
	secret, _ := addKey(t, st, func(k *sandbox.APIKey) { k.ExpiresAt = c.now().Add(time.Second) })
	if _, err := k.Authenticate(t.Context(), secret); err != nil {
		t.Fatal(err)
	}
	c.add(time.Second)
	_, err := k.Authenticate(t.Context(), secret)
	wantCode(t, err, sandbox.CodeUnauthorized)
}

func TestCacheEndsInTime(t *testing.T) {
	k, st, c := newKeys(t)
	secret, key := addKey(t, st)
	for range 3 {
		if _, err := k.Authenticate(t.Context(), secret); err != nil {
			t.Fatal(err)
		}
	}
	if st.views != 1 {
		t.Errorf("%d lookups, want 1", st.views)
	}
	// Another process revokes it: unseen at first, seen when the cache is too old, well within 5 s.
	change(t, st, key.ID, func(k *sandbox.APIKey) { k.RevokedAt = c.now() })
	if _, err := k.Authenticate(t.Context(), secret); err != nil {
		t.Fatal(err)
	}
	c.add(CacheTTL)
	_, err := k.Authenticate(t.Context(), secret)
	wantCode(t, err, sandbox.CodeUnauthorized)
	if CacheTTL >= 5*time.Second || PollEvery >= 5*time.Second {
		t.Error("a revocation can stay unseen for longer than promised")
	}
}

func TestForgetIsImmediate(t *testing.T) {
	k, st, c := newKeys(t)
	secret, key := addKey(t, st)
	if _, err := k.Authenticate(t.Context(), secret); err != nil {
		t.Fatal(err)
	}
	change(t, st, key.ID, func(k *sandbox.APIKey) { k.RevokedAt = c.now() })
	k.Forget(key.ID)
	_, err := k.Authenticate(t.Context(), secret)
	wantCode(t, err, sandbox.CodeUnauthorized)
}

func TestStoreDown(t *testing.T) {
	k, st, _ := newKeys(t)
	secret, key := addKey(t, st)
	st.setDown(true)
	_, err := k.Authenticate(t.Context(), secret)
	wantCode(t, err, sandbox.CodeServiceUnavailable)
	_, err = k.Check(t.Context(), key.ID)
	wantCode(t, err, sandbox.CodeServiceUnavailable)
	ended := k.RevocationOf(t.Context(), key.ID)
	if err := k.Poll(t.Context()); err == nil {
		t.Error("poll hides that the store is down")
	}
	select {
	case <-ended:
		t.Error("a store that is down ended a stream")
	default:
	}
	st.setDown(false)
	if _, err := k.Authenticate(t.Context(), secret); err != nil {
		t.Errorf("after the store came back: %v", err)
	}
}

func TestCheck(t *testing.T) {
	k, st, c := newKeys(t)
	_, key := addKey(t, st)
	if p, err := k.Check(t.Context(), key.ID); err != nil || p.KeyID != key.ID {
		t.Fatalf("%v, %v", p, err)
	}
	change(t, st, key.ID, func(k *sandbox.APIKey) { k.RevokedAt = c.now() })
	for _, id := range []sandbox.KeyID{key.ID, sandbox.NewKeyID()} {
		_, err := k.Check(t.Context(), id)
		wantCode(t, err, sandbox.CodeUnauthorized)
	}
}

func isClosed(ch <-chan struct{}) bool {
	select {
	case <-ch:
		return true
	default:
		return false
	}
}

func TestRevocationOf(t *testing.T) {
	k, st, c := newKeys(t)
	_, revoked := addKey(t, st)
	_, expiring := addKey(t, st, func(k *sandbox.APIKey) { k.ExpiresAt = c.now().Add(time.Minute) })
	_, kept := addKey(t, st)
	a, b := k.RevocationOf(t.Context(), revoked.ID), k.RevocationOf(t.Context(), revoked.ID)
	e, live := k.RevocationOf(t.Context(), expiring.ID), k.RevocationOf(t.Context(), kept.ID)
	gone := k.RevocationOf(t.Context(), sandbox.NewKeyID())
	change(t, st, revoked.ID, func(k *sandbox.APIKey) { k.RevokedAt = c.now() })
	if err := k.Poll(t.Context()); err != nil {
		t.Fatal(err)
	}
	if !isClosed(a) || !isClosed(b) || !isClosed(gone) || isClosed(e) || isClosed(live) {
		t.Errorf("closed: %v %v %v, open: %v %v", isClosed(a), isClosed(b), isClosed(gone), isClosed(e), isClosed(live))
	}
	c.add(time.Minute)
	if err := k.Poll(t.Context()); err != nil {
		t.Fatal(err)
	}
	if !isClosed(e) || isClosed(live) {
		t.Error("expiry was not seen, or the wrong one ended")
	}
}

func TestRevocationWatchGoesWithItsContext(t *testing.T) {
	k, st, _ := newKeys(t)
	_, key := addKey(t, st)
	ctx, cancel := context.WithCancel(t.Context())
	ended := k.RevocationOf(ctx, key.ID)
	cancel()
	deadline := time.After(10 * time.Second)
	for {
		k.mu.Lock()
		n := len(k.watches)
		k.mu.Unlock()
		if n == 0 {
			break
		}
		select {
		case <-deadline:
			t.Fatal("the watch stayed")
		case <-time.After(time.Millisecond):
		}
	}
	k.Forget(key.ID)
	if isClosed(ended) {
		t.Error("a watch given up was closed")
	}
}

func TestLastUsedIsKeptToTheMinute(t *testing.T) {
	k, st, c := newKeys(t)
	secret, key := addKey(t, st)
	use := func() {
		t.Helper()
		if _, err := k.Authenticate(t.Context(), secret); err != nil {
			t.Fatal(err)
		}
		if err := k.Poll(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	use()
	first := getKey(t, st, key.ID).LastUsedAt
	if !first.Equal(c.now().Truncate(time.Minute)) {
		t.Fatalf("last used %v at %v", first, c.now())
	}
	c.add(10 * time.Second)
	use()
	if got := getKey(t, st, key.ID).LastUsedAt; !got.Equal(first) {
		t.Errorf("written again after 10 s: %v", got)
	}
	c.add(2 * time.Minute)
	use()
	if got := getKey(t, st, key.ID).LastUsedAt; !got.After(first) {
		t.Errorf("not written after 2 min: %v", got)
	}
}

// TestLastUsedKeepsARevocation: the write of "last used" must not bring a key back to life.
func TestLastUsedKeepsARevocation(t *testing.T) {
	k, st, c := newKeys(t)
	secret, key := addKey(t, st)
	if _, err := k.Authenticate(t.Context(), secret); err != nil {
		t.Fatal(err)
	}
	change(t, st, key.ID, func(k *sandbox.APIKey) { k.RevokedAt = c.now() })
	if err := k.Poll(t.Context()); err != nil {
		t.Fatal(err)
	}
	if getKey(t, st, key.ID).RevokedAt.IsZero() {
		t.Error("the key is alive again")
	}
}

func TestParallelUse(t *testing.T) {
	k, st, _ := newKeys(t)
	secret, key := addKey(t, st)
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 20 {
				if _, err := k.Authenticate(t.Context(), secret); err != nil {
					t.Error(err)
				}
				k.RevocationOf(t.Context(), key.ID)
				k.Forget(sandbox.NewKeyID())
				if err := k.Poll(t.Context()); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
}

func TestErrStore(t *testing.T) {
	for _, test := range []struct {
		err  error
		want sandbox.Code
	}{
		{store.ErrUnavailable, sandbox.CodeServiceUnavailable},
		{context.Canceled, sandbox.CodeServiceUnavailable},
		{errors.New("x"), sandbox.CodeInternal},
		{sandbox.Errorf(sandbox.CodeConflict, "x"), sandbox.CodeConflict},
	} {
		wantCode(t, ErrStore(test.err), test.want)
		if !errors.Is(ErrStore(test.err), test.err) {
			t.Errorf("%v lost its cause", test.err)
		}
	}
}

func TestEnsureAdminKey(t *testing.T) {
	ctx := t.Context()
	st, path := newStore(t), filepath.Join(t.TempDir(), "admin.key")
	k := NewKeys(st, time.Now, slog.New(slog.DiscardHandler))
	ensure := func() string {
		t.Helper()
		secret, err := EnsureAdminKey(ctx, st, path)
		if err != nil {
			t.Fatal(err)
		}
		b, err := os.ReadFile(path)
		if err != nil || string(b) != secret {
			t.Fatalf("file holds %d bytes, %v", len(b), err)
		}
		info, err := os.Stat(path)
		if err != nil || info.Mode().Perm() != 0o600 {
			t.Fatalf("mode %v, %v", info.Mode(), err)
		}
		p, err := k.Authenticate(ctx, secret)
		if err != nil || len(p.Scopes) != len(sandbox.AllScopes()) || p.ProjectID != DefaultProject {
			t.Fatalf("principal %+v, %v", p, err)
		}
		return secret
	}
	first := ensure()
	if again := ensure(); again != first {
		t.Fatal("a good file was replaced")
	}
	if err := os.Chmod(path, 0o644); err != nil {
		t.Fatal(err)
	}
	ensure()

	spoil := map[string]func() error{
		"lost":    func() error { return os.Remove(path) },
		"damaged": func() error { return os.WriteFile(path, []byte("e2b_short"), 0o600) },
		"foreign": func() error { return os.WriteFile(path, []byte(NewSecret()), 0o600) },
	}
	for name, fn := range spoil {
		before := ensure()
		if err := fn(); err != nil {
			t.Fatal(err)
		}
		if ensure() == before {
			t.Fatalf("%s: the same key", name)
		}
		k.Forget(sandbox.NewKeyID())
		if revoked := getKeyByHash(t, st, Hash(before)).RevokedAt; revoked.IsZero() {
			t.Errorf("%s: the old key is alive", name)
		}
	}

	current := ensure()
	change(t, st, getKeyByHash(t, st, Hash(current)).ID, func(k *sandbox.APIKey) { k.RevokedAt = time.Now() })
	k2 := NewKeys(st, time.Now, slog.New(slog.DiscardHandler))
	next, err := EnsureAdminKey(ctx, st, path)
	if err != nil || next == current {
		t.Fatalf("a revoked key was kept: %v", err)
	}
	if _, err := k2.Authenticate(ctx, next); err != nil {
		t.Fatal(err)
	}
	left, err := filepath.Glob(filepath.Join(filepath.Dir(path), ".admin-key-*"))
	if err != nil || len(left) != 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
}

func getKeyByHash(t *testing.T, st store.Store, hash [32]byte) (key *sandbox.APIKey) {
	t.Helper()
	err := st.View(t.Context(), func(tx store.Tx) (err error) {
		key, err = tx.GetKeyByHash(t.Context(), hash)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return key
}

func TestEnsureAdminKeyFails(t *testing.T) {
	st := newStore(t)
	if _, err := EnsureAdminKey(t.Context(), st, filepath.Join(t.TempDir(), "missing", "admin.key")); err == nil {
		t.Error("a folder that is not there was no error")
	}
	if _, err := EnsureAdminKey(t.Context(), st, t.TempDir()); err == nil {
		t.Error("a folder was no error")
	}
	path := filepath.Join(t.TempDir(), "admin.key")
	if _, err := EnsureAdminKey(t.Context(), st, path); err != nil {
		t.Fatal(err)
	}
	st.setDown(true)
	if _, err := EnsureAdminKey(t.Context(), st, path); !errors.Is(err, store.ErrUnavailable) {
		t.Errorf("with the store down: %v", err)
	}
}

func TestMaySee(t *testing.T) {
	id := sandbox.NewID()
	s := &sandbox.Sandbox{ID: id, ProjectID: "p1", Metadata: map[string]string{"team": "a", "x": ""}}
	for name, test := range map[string]struct {
		p    Principal
		want bool
	}{
		"own project":      {Principal{ProjectID: "p1"}, true},
		"other project":    {Principal{ProjectID: "p2"}, false},
		"listed":           {Principal{ProjectID: "p1", SandboxIDs: []sandbox.ID{id}}, true},
		"not listed":       {Principal{ProjectID: "p1", SandboxIDs: []sandbox.ID{sandbox.NewID()}}, false},
		"metadata":         {Principal{ProjectID: "p1", Metadata: map[string]string{"team": "a"}}, true},
		"other metadata":   {Principal{ProjectID: "p1", Metadata: map[string]string{"team": "b"}}, false},
		"missing metadata": {Principal{ProjectID: "p1", Metadata: map[string]string{"y": ""}}, false},
	} {
		if got := test.p.MaySee(s); got != test.want {
			t.Errorf("%s: %v", name, got)
		}
	}
}
