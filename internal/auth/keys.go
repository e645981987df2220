package auth

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/space-sandbox/space/internal/sandbox"
	"github.com/space-sandbox/space/internal/store"
)

// How long a revocation that another process made can stay unseen.
const (
	// CacheTTL bounds how old the answer of a lookup may be.
	CacheTTL = 3 * time.Second
	// PollEvery is how often the owner of a Keys calls Poll, at the least.
	PollEvery = 3 * time.Second

	lastUsedStep = time.Minute
	maxCached    = 10000
)

// errUnauthorized is one answer for every reason, so that it tells an attacker nothing.
func errUnauthorized() *sandbox.Error {
	return sandbox.Errorf(sandbox.CodeUnauthorized, "the API key is unknown, expired or revoked").
		WithRemediation("send a valid key as Authorization: Bearer <key>, or as X-API-Key")
}

// ErrStore returns err as what a caller of the API sees when the store failed.
func ErrStore(err error) error {
	var e *sandbox.Error
	if errors.As(err, &e) {
		return err
	}
	if errors.Is(err, store.ErrUnavailable) || errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return sandbox.Errorf(sandbox.CodeServiceUnavailable, "the database cannot be used at the moment; nothing was changed").WithCause(err)
	}
	return sandbox.AsError(err)
}

// Keys resolves API keys against a store.
type Keys struct {
	st  store.Store
	now func() time.Time
	log *slog.Logger

	mu      sync.Mutex
	cache   map[[32]byte]cached
	watches map[sandbox.KeyID]map[*watch]struct{}
	used    map[sandbox.KeyID]time.Time // not written yet
	written map[sandbox.KeyID]time.Time // the last that was
	epoch   uint64                      // grows with Forget, so that a lookup begun before it is not cached after it
}

type cached struct {
	key *sandbox.APIKey // nil: unknown
	at  time.Time
}

type watch struct{ ended chan struct{} }

// NewKeys makes a Keys. now is the clock; it is asked for expiry and for the age of the cache.
func NewKeys(st store.Store, now func() time.Time, log *slog.Logger) *Keys {
	return &Keys{
		st: st, now: now, log: log,
		cache:   map[[32]byte]cached{},
		watches: map[sandbox.KeyID]map[*watch]struct{}{},
		used:    map[sandbox.KeyID]time.Time{},
		written: map[sandbox.KeyID]time.Time{},
	}
}

// Authenticate resolves a key as it was presented.
func (k *Keys) Authenticate(ctx context.Context, secret string) (*Principal, error) {
	if !ValidSecret(secret) {
		return nil, errUnauthorized()
	}
	hash := Hash(secret)
	key, err := k.lookup(ctx, hash)
	if err != nil {
		return nil, err
	}
	// The index found it by its hash; the comparison proves the match without a timing that depends on the key.
	if key == nil || !HashEqual(secret, key.Hash) || !Alive(key, k.now()) {
		return nil, errUnauthorized()
	}
	k.markUsed(key.ID)
	return PrincipalOf(key), nil
}

// PrincipalOf returns what key allows.
func PrincipalOf(key *sandbox.APIKey) *Principal {
	return &Principal{
		KeyID: key.ID, ProjectID: key.ProjectID, Scopes: slices.Clone(key.Scopes),
		SandboxIDs: slices.Clone(key.SandboxIDs), Metadata: maps.Clone(key.Metadata),
	}
}

// Alive reports whether key is neither revoked nor expired at now.
func Alive(key *sandbox.APIKey, now time.Time) bool {
	return key.RevokedAt.IsZero() && (key.ExpiresAt.IsZero() || now.Before(key.ExpiresAt))
}

// lookup returns nil for an unknown key.
func (k *Keys) lookup(ctx context.Context, hash [32]byte) (*sandbox.APIKey, error) {
	now := k.now()
	k.mu.Lock()
	c, ok := k.cache[hash]
	epoch := k.epoch
	k.mu.Unlock()
	if age := now.Sub(c.at); ok && age >= 0 && age < CacheTTL {
		return c.key, nil
	}
	var key *sandbox.APIKey
	err := k.st.View(ctx, func(tx store.Tx) (err error) {
		key, err = tx.GetKeyByHash(ctx, hash)
		return err
	})
	if errors.Is(err, store.ErrNotFound) {
		// Not cached: a key must work the moment it was made, and guesses must not fill the cache.
		return nil, nil //nolint:nilnil // unknown is no failure here
	}
	if err != nil {
		return nil, ErrStore(err)
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.epoch == epoch {
		if len(k.cache) >= maxCached {
			clear(k.cache)
		}
		k.cache[hash] = cached{key: key, at: now}
	}
	return key, nil
}

// Check returns an unauthorized error unless the key with this ID is alive. It always asks the store.
func (k *Keys) Check(ctx context.Context, id sandbox.KeyID) (*Principal, error) {
	key, err := k.load(ctx, id)
	if err != nil {
		return nil, err
	}
	if key == nil || !Alive(key, k.now()) {
		return nil, errUnauthorized()
	}
	return PrincipalOf(key), nil
}

func (k *Keys) load(ctx context.Context, id sandbox.KeyID) (*sandbox.APIKey, error) {
	var key *sandbox.APIKey
	err := k.st.View(ctx, func(tx store.Tx) (err error) {
		key, err = tx.GetKey(ctx, id)
		return err
	})
	if err != nil && !errors.Is(err, store.ErrNotFound) {
		return nil, ErrStore(err)
	}
	return key, nil
}

// Forget drops what is cached and ends the watches of a key: it was revoked by this process.
func (k *Keys) Forget(id sandbox.KeyID) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.epoch++
	for hash, c := range k.cache {
		if c.key.ID == id {
			delete(k.cache, hash)
		}
	}
	k.endWatches(id)
}

// endWatches is called with the mutex held.
func (k *Keys) endWatches(id sandbox.KeyID) {
	for w := range k.watches[id] {
		close(w.ended)
	}
	delete(k.watches, id)
}

// RevocationOf returns a channel that is closed once the key was revoked or has expired. Ending ctx gives the watch
// up; the channel then stays open for ever.
func (k *Keys) RevocationOf(ctx context.Context, id sandbox.KeyID) <-chan struct{} {
	w := &watch{ended: make(chan struct{})}
	k.mu.Lock()
	if k.watches[id] == nil {
		k.watches[id] = map[*watch]struct{}{}
	}
	k.watches[id][w] = struct{}{}
	k.mu.Unlock()
	context.AfterFunc(ctx, func() {
		k.mu.Lock()
		defer k.mu.Unlock()
		delete(k.watches[id], w)
		if len(k.watches[id]) == 0 {
			delete(k.watches, id)
		}
	})
	return w.ended
}

func (k *Keys) markUsed(id sandbox.KeyID) {
	now := k.now()
	k.mu.Lock()
	defer k.mu.Unlock()
	if now.Sub(k.written[id]) >= lastUsedStep {
		k.used[id] = now
	}
}

// Poll looks every watched key up, ends the watches of those that are no longer alive, and writes when keys were
// last used. If the store cannot be asked it changes nothing and says so.
func (k *Keys) Poll(ctx context.Context) error {
	k.mu.Lock()
	watched := slices.Collect(maps.Keys(k.watches))
	used := maps.Clone(k.used)
	clear(k.used)
	k.mu.Unlock()
	var errs []error
	for _, id := range watched {
		key, err := k.load(ctx, id)
		if err != nil {
			return err
		}
		if key == nil || !Alive(key, k.now()) {
			k.Forget(id)
		}
	}
	for id, at := range used {
		errs = append(errs, k.writeUsed(ctx, id, at))
	}
	return errors.Join(errs...)
}

func (k *Keys) writeUsed(ctx context.Context, id sandbox.KeyID, at time.Time) error {
	err := k.st.Update(ctx, func(tx store.Tx) error {
		key, err := tx.GetKey(ctx, id)
		if err != nil {
			return err
		}
		if at.Sub(key.LastUsedAt) < lastUsedStep {
			return nil
		}
		key.LastUsedAt = at.UTC().Truncate(lastUsedStep)
		return tx.UpdateKey(ctx, key)
	})
	if err != nil {
		return ErrStore(err)
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.written[id] = at
	return nil
}
