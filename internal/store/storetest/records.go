package storetest

import (
	"context"
	"crypto/sha256"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/space-sandbox/space/internal/sandbox"
	"github.com/space-sandbox/space/internal/store"
)

func (f *fixture) operation(id sandbox.OperationID) (op *sandbox.Operation) {
	f.t.Helper()
	f.view(func(ctx context.Context, tx store.Tx) (err error) {
		op, err = tx.GetOperation(ctx, id)
		return err
	})
	return op
}

func (f *fixture) addOperation(id sandbox.ID, created time.Time) *sandbox.Operation {
	f.t.Helper()
	op := newOperation(id)
	op.CreatedAt = created
	f.update(func(ctx context.Context, tx store.Tx) error { return tx.InsertOperation(ctx, op) })
	return op
}

var operationTests = map[string]func(*testing.T, *fixture){
	"what goes in comes out": func(t *testing.T, f *fixture) {
		op := f.addOperation(f.addSandbox().ID, epoch)
		wantEqual(t, op, f.operation(op.ID))
	},
	"a used ID and an unknown sandbox are refused": func(_ *testing.T, f *fixture) {
		op := f.addOperation(f.addSandbox().ID, epoch)
		f.wantUpdate(store.ErrExists, func(ctx context.Context, tx store.Tx) error { return tx.InsertOperation(ctx, op) })
		f.wantUpdate(store.ErrNotFound, func(ctx context.Context, tx store.Tx) error {
			return tx.InsertOperation(ctx, newOperation(sandbox.NewID()))
		})
	},
	"an unknown one is not found": func(_ *testing.T, f *fixture) {
		f.wantUpdate(store.ErrNotFound, func(ctx context.Context, tx store.Tx) error {
			_, err := tx.GetOperation(ctx, sandbox.NewOperationID())
			return err
		})
		f.wantUpdate(store.ErrNotFound, func(ctx context.Context, tx store.Tx) error {
			return tx.UpdateOperation(ctx, newOperation(sandbox.NewID()))
		})
	},
	"an ended one never changes": func(t *testing.T, f *fixture) {
		op := f.addOperation(f.addSandbox().ID, epoch)
		op.State, op.EndedAt = sandbox.OpFailed, epoch.Add(time.Minute)
		op.Error = sandbox.Invalid("a", "rule", "message").Record()
		f.update(func(ctx context.Context, tx store.Tx) error { return tx.UpdateOperation(ctx, op) })
		changed := *op
		changed.State = sandbox.OpSucceeded
		f.wantUpdate(store.ErrVersion, func(ctx context.Context, tx store.Tx) error { return tx.UpdateOperation(ctx, &changed) })
		wantEqual(t, op, f.operation(op.ID))
	},
	"open ones come oldest first": func(t *testing.T, f *fixture) {
		id := f.addSandbox().ID
		second, first := f.addOperation(id, epoch.Add(time.Second)), f.addOperation(id, epoch)
		done := f.addOperation(id, epoch.Add(-time.Second))
		done.State = sandbox.OpSucceeded
		f.update(func(ctx context.Context, tx store.Tx) error { return tx.UpdateOperation(ctx, done) })
		f.view(func(ctx context.Context, tx store.Tx) error {
			ops, err := tx.OpenOperations(ctx)
			wantEqual(t, []*sandbox.Operation{first, second}, ops)
			return err
		})
	},
}

var sessionTests = map[string]func(*testing.T, *fixture){
	"life of a session": func(t *testing.T, f *fixture) {
		s := newSession(f.addSandbox().ID, epoch.Add(time.Hour))
		f.update(func(ctx context.Context, tx store.Tx) error { return tx.InsertSession(ctx, s) })
		f.wantUpdate(store.ErrExists, func(ctx context.Context, tx store.Tx) error { return tx.InsertSession(ctx, s) })
		f.view(func(ctx context.Context, tx store.Tx) error {
			got, err := tx.GetSession(ctx, s.ID)
			wantEqual(t, s, got)
			return err
		})
		for range 2 { // the second time there is nothing to delete
			f.update(func(ctx context.Context, tx store.Tx) error { return tx.DeleteSession(ctx, s.ID) })
		}
		f.wantUpdate(store.ErrNotFound, func(ctx context.Context, tx store.Tx) error {
			_, err := tx.GetSession(ctx, s.ID)
			return err
		})
	},
	"an unknown sandbox is refused": func(_ *testing.T, f *fixture) {
		f.wantUpdate(store.ErrNotFound, func(ctx context.Context, tx store.Tx) error {
			return tx.InsertSession(ctx, newSession(sandbox.NewID(), epoch))
		})
	},
	"expired ones go": func(t *testing.T, f *fixture) {
		id := f.addSandbox().ID
		old, young := newSession(id, epoch), newSession(id, epoch.Add(time.Hour))
		f.update(func(ctx context.Context, tx store.Tx) error {
			return errors.Join(tx.InsertSession(ctx, old), tx.InsertSession(ctx, young))
		})
		f.update(func(ctx context.Context, tx store.Tx) error {
			n, err := tx.DeleteSessions(ctx, epoch.Add(time.Minute))
			wantEqual(t, 1, n)
			_, gone := tx.GetSession(ctx, old.ID)
			if !errors.Is(gone, store.ErrNotFound) {
				t.Errorf("expired session: %v", gone)
			}
			_, kept := tx.GetSession(ctx, young.ID)
			return errors.Join(err, kept)
		})
	},
}

var keyTests = map[string]func(*testing.T, *fixture){
	"life of a key": func(t *testing.T, f *fixture) {
		k := newKey("a")
		f.update(func(ctx context.Context, tx store.Tx) error { return tx.InsertKey(ctx, k) })
		k.RevokedAt, k.LastUsedAt = epoch.Add(time.Hour), epoch.Add(time.Minute)
		f.update(func(ctx context.Context, tx store.Tx) error { return tx.UpdateKey(ctx, k) })
		f.view(func(ctx context.Context, tx store.Tx) error {
			byID, err1 := tx.GetKey(ctx, k.ID)
			byHash, err2 := tx.GetKeyByHash(ctx, k.Hash)
			wantEqual(t, k, byID)
			wantEqual(t, k, byHash)
			return errors.Join(err1, err2)
		})
	},
	"a used ID and a used hash are refused": func(_ *testing.T, f *fixture) {
		a, b, c := newKey("a"), newKey("b"), newKey("a")
		b.ID = a.ID
		f.update(func(ctx context.Context, tx store.Tx) error { return tx.InsertKey(ctx, a) })
		for _, k := range []*sandbox.APIKey{b, c} {
			f.wantUpdate(store.ErrExists, func(ctx context.Context, tx store.Tx) error { return tx.InsertKey(ctx, k) })
		}
	},
	"an unknown one is not found": func(_ *testing.T, f *fixture) {
		k := newKey("a")
		for _, fn := range []func(context.Context, store.Tx) error{
			func(ctx context.Context, tx store.Tx) error { _, err := tx.GetKey(ctx, k.ID); return err },
			func(ctx context.Context, tx store.Tx) error { _, err := tx.GetKeyByHash(ctx, k.Hash); return err },
			func(ctx context.Context, tx store.Tx) error { return tx.UpdateKey(ctx, k) },
			func(ctx context.Context, tx store.Tx) error { _, err := tx.ListKeys(ctx, "p1", k.ID, 1); return err },
		} {
			f.wantUpdate(store.ErrNotFound, fn)
		}
	},
	"pages in the order of age, of one project": func(t *testing.T, f *fixture) {
		var want []*sandbox.APIKey
		for i, name := range []string{"a", "b", "c"} {
			k := newKey(name)
			k.CreatedAt = epoch.Add(time.Duration(i) * time.Second)
			want = append(want, k)
		}
		other := newKey("d")
		other.ProjectID = "p2"
		want[1].RevokedAt = epoch
		f.update(func(ctx context.Context, tx store.Tx) error {
			return errors.Join(tx.InsertKey(ctx, want[2]), tx.InsertKey(ctx, want[0]), tx.InsertKey(ctx, other), tx.InsertKey(ctx, want[1]))
		})
		f.view(func(ctx context.Context, tx store.Tx) error {
			first, err1 := tx.ListKeys(ctx, "p1", "", 2)
			rest, err2 := tx.ListKeys(ctx, "p1", want[1].ID, 0)
			wantEqual(t, want[:2], first)
			wantEqual(t, want[2:], rest)
			return errors.Join(err1, err2)
		})
		f.wantUpdate(store.ErrNotFound, func(ctx context.Context, tx store.Tx) error {
			_, err := tx.ListKeys(ctx, "p1", other.ID, 0)
			return err
		})
	},
}

func newIdempotency() *store.Idempotency {
	return &store.Idempotency{
		Scope: "k1 POST /v1/sandboxes", Key: "key", BodyHash: sha256.Sum256(nil), Resource: `{"sandbox":"i1"}`,
		CreatedAt: epoch, ExpiresAt: epoch.Add(time.Hour),
	}
}

var idempotencyTests = map[string]func(*testing.T, *fixture){
	"what goes in comes out, expired or not": func(t *testing.T, f *fixture) {
		e := newIdempotency()
		e.ExpiresAt = epoch.Add(-time.Hour)
		f.update(func(ctx context.Context, tx store.Tx) error { return tx.InsertIdempotency(ctx, e) })
		f.view(func(ctx context.Context, tx store.Tx) error {
			got, err := tx.GetIdempotency(ctx, e.Scope, e.Key)
			wantEqual(t, e, got)
			return err
		})
	},
	"a live one is refused, an expired one replaced": func(t *testing.T, f *fixture) {
		e := newIdempotency()
		f.update(func(ctx context.Context, tx store.Tx) error { return tx.InsertIdempotency(ctx, e) })
		again := *e
		again.CreatedAt, again.Resource = e.ExpiresAt.Add(-1), "second"
		f.wantUpdate(store.ErrExists, func(ctx context.Context, tx store.Tx) error { return tx.InsertIdempotency(ctx, &again) })
		again.CreatedAt = e.ExpiresAt
		f.update(func(ctx context.Context, tx store.Tx) error { return tx.InsertIdempotency(ctx, &again) })
		f.view(func(ctx context.Context, tx store.Tx) error {
			got, err := tx.GetIdempotency(ctx, e.Scope, e.Key)
			wantEqual(t, &again, got)
			return err
		})
	},
	"scope and key are one name": func(_ *testing.T, f *fixture) {
		a, b, c := newIdempotency(), newIdempotency(), newIdempotency()
		b.Scope, c.Key = "k2 POST /v1/sandboxes", "other"
		f.update(func(ctx context.Context, tx store.Tx) error {
			return errors.Join(tx.InsertIdempotency(ctx, a), tx.InsertIdempotency(ctx, b), tx.InsertIdempotency(ctx, c))
		})
		f.update(func(ctx context.Context, tx store.Tx) error { return tx.RemoveIdempotency(ctx, a.Scope, a.Key) })
		f.wantUpdate(store.ErrNotFound, func(ctx context.Context, tx store.Tx) error {
			_, err := tx.GetIdempotency(ctx, a.Scope, a.Key)
			return err
		})
		f.view(func(ctx context.Context, tx store.Tx) error {
			_, err := tx.GetIdempotency(ctx, b.Scope, b.Key)
			return err
		})
	},
	"one of many racing inserts wins": func(t *testing.T, f *fixture) {
		var (
			wg  sync.WaitGroup
			won atomic.Int32
		)
		for range 16 {
			wg.Go(func() {
				err := f.tryUpdate(func(ctx context.Context, tx store.Tx) error { return tx.InsertIdempotency(ctx, newIdempotency()) })
				switch {
				case err == nil:
					won.Add(1)
				case !errors.Is(err, store.ErrExists):
					t.Errorf("insert: %v", err)
				}
			})
		}
		wg.Wait()
		wantEqual(t, int32(1), won.Load())
	},
	"expired ones go": func(t *testing.T, f *fixture) {
		old, young := newIdempotency(), newIdempotency()
		young.Key, young.ExpiresAt = "young", epoch.Add(48*time.Hour)
		f.update(func(ctx context.Context, tx store.Tx) error {
			return errors.Join(tx.InsertIdempotency(ctx, old), tx.InsertIdempotency(ctx, young))
		})
		f.update(func(ctx context.Context, tx store.Tx) error {
			n, err := tx.DeleteIdempotency(ctx, epoch.Add(2*time.Hour))
			wantEqual(t, 1, n)
			_, kept := tx.GetIdempotency(ctx, young.Scope, young.Key)
			return errors.Join(err, kept)
		})
	},
}

var settingTests = map[string]func(*testing.T, *fixture){
	"put, replace, get": func(t *testing.T, f *fixture) {
		for _, value := range []string{"one", "", "two"} {
			f.update(func(ctx context.Context, tx store.Tx) error { return tx.PutSetting(ctx, "name", value) })
			f.view(func(ctx context.Context, tx store.Tx) error {
				got, err := tx.Setting(ctx, "name")
				wantEqual(t, value, got)
				return err
			})
		}
	},
	"one never put is not found": func(_ *testing.T, f *fixture) {
		f.wantUpdate(store.ErrNotFound, func(ctx context.Context, tx store.Tx) error {
			_, err := tx.Setting(ctx, "name")
			return err
		})
	},
}
