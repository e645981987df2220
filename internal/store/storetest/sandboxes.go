package storetest

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/space-sandbox/space/internal/sandbox"
	"github.com/space-sandbox/space/internal/store"
)

var txTests = map[string]func(*testing.T, *fixture){
	"an error undoes everything": func(t *testing.T, f *fixture) {
		s, boom := newSandbox(), errors.New("boom")
		f.wantUpdate(boom, func(ctx context.Context, tx store.Tx) error {
			if err := tx.InsertSandbox(ctx, s); err != nil {
				return err
			}
			if err := tx.InsertOperation(ctx, newOperation(s.ID)); err != nil {
				return err
			}
			return boom
		})
		f.wantIDs(f.list(store.SandboxQuery{}))
		f.view(func(ctx context.Context, tx store.Tx) error {
			ops, err := tx.OpenOperations(ctx)
			wantEqual(t, 0, len(ops))
			return err
		})
	},
	"a transaction sees its own writes": func(_ *testing.T, f *fixture) {
		s := newSandbox()
		f.update(func(ctx context.Context, tx store.Tx) error {
			if err := tx.InsertSandbox(ctx, s); err != nil {
				return err
			}
			_, err := tx.GetSandbox(ctx, s.ID)
			return err
		})
	},
	"a view cannot write": func(t *testing.T, f *fixture) {
		err := f.st.View(f.ctx(), func(tx store.Tx) error { return tx.PutSetting(f.ctx(), "a", "b") })
		if err == nil {
			t.Fatal("a view wrote")
		}
		f.wantUpdate(store.ErrNotFound, func(ctx context.Context, tx store.Tx) error {
			_, err := tx.Setting(ctx, "a")
			return err
		})
	},
	"a view is a snapshot": func(t *testing.T, f *fixture) {
		f.view(func(ctx context.Context, tx store.Tx) error {
			before, err := tx.ListSandboxes(ctx, store.SandboxQuery{})
			if err != nil {
				return err
			}
			f.addSandbox()
			after, err := tx.ListSandboxes(ctx, store.SandboxQuery{})
			wantEqual(t, len(before), len(after))
			return err
		})
		wantEqual(t, 1, len(f.list(store.SandboxQuery{})))
	},
	"concurrent updates lose nothing": func(t *testing.T, f *fixture) {
		s := f.addSandbox()
		const workers, each = 8, 10
		var wg sync.WaitGroup
		for range workers {
			wg.Go(func() {
				for range each {
					if err := f.tryUpdate(func(ctx context.Context, tx store.Tx) error {
						got, err := tx.GetSandbox(ctx, s.ID)
						if err != nil {
							return err
						}
						got.Generation++
						return tx.UpdateSandbox(ctx, got)
					}); err != nil {
						t.Errorf("update: %v", err)
					}
				}
			})
		}
		wg.Wait()
		got := f.sandbox(s.ID)
		wantEqual(t, s.Generation+workers*each, got.Generation)
		wantEqual(t, s.Version+workers*each, got.Version)
	},
	"an ended context writes nothing": func(t *testing.T, f *fixture) {
		ctx, cancel := context.WithCancel(f.ctx())
		s := newSandbox()
		err := f.st.Update(ctx, func(tx store.Tx) error {
			err := tx.InsertSandbox(ctx, s)
			cancel()
			return err
		})
		if !errors.Is(err, context.Canceled) {
			t.Fatalf("update = %v, want canceled", err)
		}
		if err := f.st.View(ctx, func(store.Tx) error { return nil }); !errors.Is(err, context.Canceled) {
			t.Fatalf("view = %v, want canceled", err)
		}
		f.wantIDs(f.list(store.SandboxQuery{}))
		f.addSandbox() // and the store still works
	},
	"waiting past the deadline is unavailable": func(t *testing.T, f *fixture) {
		f.update(func(context.Context, store.Tx) error {
			ctx, cancel := context.WithTimeout(f.ctx(), 20*time.Millisecond)
			defer cancel()
			err := f.st.Update(ctx, func(store.Tx) error { return nil })
			if err != nil && !errors.Is(err, store.ErrUnavailable) {
				t.Errorf("update = %v, want unavailable", err)
			}
			return nil
		})
	},
}

var sandboxTests = map[string]func(*testing.T, *fixture){
	"what goes in comes out": func(t *testing.T, f *fixture) {
		s := f.addSandbox()
		wantEqual(t, int64(1), s.Version)
		wantEqual(t, s, f.sandbox(s.ID))
		zero := f.addSandbox(func(s *sandbox.Sandbox) {
			*s = sandbox.Sandbox{ID: s.ID, State: sandbox.StateRunning, CreatedAt: epoch}
		})
		wantEqual(t, zero, f.sandbox(zero.ID))
	},
	"a used ID is refused, also of a tombstone": func(_ *testing.T, f *fixture) {
		for _, state := range []sandbox.State{sandbox.StateRunning, sandbox.StateDeleted} {
			s := f.addSandbox(func(s *sandbox.Sandbox) { s.State = state })
			f.wantUpdate(store.ErrExists, func(ctx context.Context, tx store.Tx) error { return tx.InsertSandbox(ctx, s) })
		}
	},
	"an unknown one is not found": func(_ *testing.T, f *fixture) {
		s := newSandbox()
		f.wantUpdate(store.ErrNotFound, func(ctx context.Context, tx store.Tx) error {
			_, err := tx.GetSandbox(ctx, s.ID)
			return err
		})
		f.wantUpdate(store.ErrNotFound, func(ctx context.Context, tx store.Tx) error { return tx.UpdateSandbox(ctx, s) })
		f.wantUpdate(store.ErrNotFound, func(ctx context.Context, tx store.Tx) error {
			return tx.TouchSandbox(ctx, s.ID, epoch)
		})
	},
	"an update writes everything and raises the version": func(t *testing.T, f *fixture) {
		s := f.addSandbox()
		s.State, s.StateReason, s.Metadata = sandbox.StateRunning, "", map[string]string{"other": "x"}
		s.OperationID, s.UpdatedAt, s.LastActive, s.Node = "", epoch.Add(time.Hour), epoch.Add(time.Hour), "n2"
		f.update(func(ctx context.Context, tx store.Tx) error { return tx.UpdateSandbox(ctx, s) })
		wantEqual(t, int64(2), s.Version)
		wantEqual(t, s, f.sandbox(s.ID))
		f.wantIDs(f.list(store.SandboxQuery{Metadata: map[string]string{"other": "x"}}), s.ID)
		f.wantIDs(f.list(store.SandboxQuery{Metadata: map[string]string{"empty": ""}}))
	},
	"an old version is refused and stays as it was": func(t *testing.T, f *fixture) {
		s := f.addSandbox()
		old := *s
		f.update(func(ctx context.Context, tx store.Tx) error { return tx.UpdateSandbox(ctx, s) })
		old.StateReason = "lost update"
		f.wantUpdate(store.ErrVersion, func(ctx context.Context, tx store.Tx) error { return tx.UpdateSandbox(ctx, &old) })
		wantEqual(t, int64(1), old.Version)
		wantEqual(t, s, f.sandbox(s.ID))
	},
	"a touch moves only the activity, and only forward": func(t *testing.T, f *fixture) {
		s := f.addSandbox()
		for _, d := range []time.Duration{time.Minute, -time.Minute} {
			f.update(func(ctx context.Context, tx store.Tx) error { return tx.TouchSandbox(ctx, s.ID, epoch.Add(d)) })
		}
		s.LastActive = epoch.Add(time.Minute)
		wantEqual(t, s, f.sandbox(s.ID))
	},
	"a purge takes old tombstones with what belongs to them": func(t *testing.T, f *fixture) {
		deleted := func(at time.Time) func(*sandbox.Sandbox) {
			return func(s *sandbox.Sandbox) { s.State, s.DeletedAt = sandbox.StateDeleted, at }
		}
		old, young, alive := f.addSandbox(deleted(epoch)), f.addSandbox(deleted(epoch.Add(time.Hour))), f.addSandbox()
		op, session := newOperation(old.ID), newSession(old.ID, epoch.Add(time.Hour))
		f.update(func(ctx context.Context, tx store.Tx) error {
			return errors.Join(tx.InsertOperation(ctx, op), tx.InsertSession(ctx, session))
		})
		f.update(func(ctx context.Context, tx store.Tx) error {
			n, err := tx.PurgeSandboxes(ctx, epoch.Add(time.Minute))
			wantEqual(t, 1, n)
			return err
		})
		f.wantUpdate(store.ErrNotFound, func(ctx context.Context, tx store.Tx) error {
			_, err := tx.GetOperation(ctx, op.ID)
			return err
		})
		f.wantUpdate(store.ErrNotFound, func(ctx context.Context, tx store.Tx) error {
			_, err := tx.GetSession(ctx, session.ID)
			return err
		})
		f.wantUpdate(store.ErrNotFound, func(ctx context.Context, tx store.Tx) error {
			_, err := tx.GetSandbox(ctx, old.ID)
			return err
		})
		f.sandbox(young.ID)
		f.sandbox(alive.ID)
	},
}

var listTests = map[string]func(*testing.T, *fixture){
	"filters": func(t *testing.T, f *fixture) {
		a := f.addSandbox(func(s *sandbox.Sandbox) { s.Metadata = map[string]string{"k": "1", "l": "2"} })
		b := f.addSandbox(func(s *sandbox.Sandbox) {
			s.ProjectID, s.State, s.Node, s.Template.Name = "p2", sandbox.StateRunning, "n2", "other"
			s.CreatedAt, s.Metadata = epoch.Add(time.Second), map[string]string{"k": "1"}
		})
		c := f.addSandbox(func(s *sandbox.Sandbox) { s.State, s.CreatedAt = sandbox.StateDeleted, epoch.Add(time.Minute) })
		for name, test := range map[string]struct {
			q    store.SandboxQuery
			want []sandbox.ID
		}{
			"all but deleted": {store.SandboxQuery{}, []sandbox.ID{a.ID, b.ID}},
			"descending":      {store.SandboxQuery{Descending: true}, []sandbox.ID{b.ID, a.ID}},
			"project":         {store.SandboxQuery{ProjectID: "p2"}, []sandbox.ID{b.ID}},
			"node":            {store.SandboxQuery{Node: "n1"}, []sandbox.ID{a.ID}},
			"template":        {store.SandboxQuery{Template: "other"}, []sandbox.ID{b.ID}},
			"metadata":        {store.SandboxQuery{Metadata: map[string]string{"k": "1", "l": "2"}}, []sandbox.ID{a.ID}},
			"metadata value":  {store.SandboxQuery{Metadata: map[string]string{"k": "2"}}, nil},
			"IDs":             {store.SandboxQuery{IDs: []sandbox.ID{b.ID, sandbox.NewID()}}, []sandbox.ID{b.ID}},
			"IDs of deleted":  {store.SandboxQuery{IDs: []sandbox.ID{c.ID}}, nil},
			"states": {store.SandboxQuery{States: []sandbox.State{sandbox.StateRunning, sandbox.StateDeleted}},
				[]sandbox.ID{b.ID, c.ID}},
			"limit": {store.SandboxQuery{Limit: 1}, []sandbox.ID{a.ID}},
			"both":  {store.SandboxQuery{ProjectID: "p1", Node: "n2"}, nil},
		} {
			t.Run(name, func(t *testing.T) { (&fixture{t: t, st: f.st}).wantIDs(f.list(test.q), test.want...) })
		}
	},
	"pages neither repeat nor lose while others come and go": func(t *testing.T, f *fixture) {
		want := map[sandbox.ID]bool{}
		var doomed *sandbox.Sandbox
		for i := range 25 {
			// Groups of five share an instant, so that the ID decides.
			s := f.addSandbox(func(s *sandbox.Sandbox) { s.CreatedAt = epoch.Add(time.Duration(i/5) * time.Second) })
			want[s.ID], doomed = true, s
		}
		for _, descending := range []bool{false, true} {
			t.Run(fmt.Sprint(descending), func(t *testing.T) {
				f := &fixture{t: t, st: f.st}
				wantEqual(t, want, readPages(f, descending, doomed))
			})
		}
	},
}

// readPages reads all pages of three and, between pages, adds and updates sandboxes.
func readPages(f *fixture, descending bool, touched *sandbox.Sandbox) map[sandbox.ID]bool {
	f.t.Helper()
	got, extra := map[sandbox.ID]bool{}, map[sandbox.ID]bool{}
	var after store.Cursor
	for {
		page := f.list(store.SandboxQuery{Descending: descending, After: after, Limit: 3, Metadata: map[string]string{"empty": ""}})
		for _, s := range page {
			if got[s.ID] {
				f.t.Fatalf("sandbox %s came twice", s.ID)
			}
			if !extra[s.ID] {
				got[s.ID] = true
			}
			after = store.Cursor{CreatedAt: s.CreatedAt, ID: string(s.ID)}
		}
		if len(page) < 3 {
			return got
		}
		added := f.addSandbox(func(s *sandbox.Sandbox) { s.CreatedAt, s.Metadata = epoch.Add(-time.Hour), nil })
		extra[added.ID] = true
		f.update(func(ctx context.Context, tx store.Tx) error { return tx.UpdateSandbox(ctx, touched) })
	}
}
