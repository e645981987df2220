package storetest

import (
	"context"
	"crypto/sha256"
	"errors"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/space-sandbox/space/internal/sandbox"
	"github.com/space-sandbox/space/internal/store"
)

// Open makes an empty store for one test and has it closed when the test ends.
type Open func(t *testing.T) store.Store

// Run runs the whole suite against what open makes.
func Run(t *testing.T, open Open) {
	t.Helper()
	groups := map[string]map[string]func(*testing.T, *fixture){
		"Tx":          txTests,
		"Sandbox":     sandboxTests,
		"List":        listTests,
		"Operation":   operationTests,
		"Session":     sessionTests,
		"Key":         keyTests,
		"Idempotency": idempotencyTests,
		"Setting":     settingTests,
	}
	for group, tests := range groups {
		t.Run(group, func(t *testing.T) {
			for name, test := range tests {
				t.Run(name, func(t *testing.T) {
					t.Parallel()
					test(t, &fixture{t: t, st: open(t)})
				})
			}
		})
	}
}

// epoch is the time of the suite; the nanoseconds show whether a store rounds.
var epoch = time.Date(2026, 3, 1, 12, 0, 0, 123456789, time.UTC)

// fixture is one test's store with shorthands that fail the test.
type fixture struct {
	t  *testing.T
	st store.Store
}

func (f *fixture) ctx() context.Context { return f.t.Context() }

func (f *fixture) update(fn func(context.Context, store.Tx) error) {
	f.t.Helper()
	if err := f.tryUpdate(fn); err != nil {
		f.t.Fatalf("update: %v", err)
	}
}

func (f *fixture) tryUpdate(fn func(context.Context, store.Tx) error) error {
	return f.st.Update(f.ctx(), func(tx store.Tx) error { return fn(f.ctx(), tx) })
}

func (f *fixture) view(fn func(context.Context, store.Tx) error) {
	f.t.Helper()
	if err := f.st.View(f.ctx(), func(tx store.Tx) error { return fn(f.ctx(), tx) }); err != nil {
		f.t.Fatalf("view: %v", err)
	}
}

// wantUpdate runs one update and checks which error of the contract it is.
func (f *fixture) wantUpdate(want error, fn func(context.Context, store.Tx) error) {
	f.t.Helper()
	if err := f.tryUpdate(fn); !errors.Is(err, want) {
		f.t.Fatalf("update = %v, want %v", err, want)
	}
}

func (f *fixture) addSandbox(change ...func(*sandbox.Sandbox)) *sandbox.Sandbox {
	f.t.Helper()
	s := newSandbox()
	for _, c := range change {
		c(s)
	}
	f.update(func(ctx context.Context, tx store.Tx) error { return tx.InsertSandbox(ctx, s) })
	return s
}

func (f *fixture) sandbox(id sandbox.ID) (s *sandbox.Sandbox) {
	f.t.Helper()
	f.view(func(ctx context.Context, tx store.Tx) (err error) {
		s, err = tx.GetSandbox(ctx, id)
		return err
	})
	return s
}

func (f *fixture) list(q store.SandboxQuery) (list []*sandbox.Sandbox) {
	f.t.Helper()
	f.view(func(ctx context.Context, tx store.Tx) (err error) {
		list, err = tx.ListSandboxes(ctx, q)
		return err
	})
	return list
}

func (f *fixture) wantIDs(got []*sandbox.Sandbox, want ...sandbox.ID) {
	f.t.Helper()
	ids := make([]sandbox.ID, len(got))
	for i, s := range got {
		ids[i] = s.ID
	}
	if diff := cmp.Diff(append([]sandbox.ID{}, want...), ids); diff != "" {
		f.t.Fatalf("sandboxes (-want +got):\n%s", diff)
	}
}

func wantEqual(t *testing.T, want, got any) {
	t.Helper()
	if diff := cmp.Diff(want, got); diff != "" {
		t.Fatalf("(-want +got):\n%s", diff)
	}
}

func newSandbox() *sandbox.Sandbox {
	idle := int64(sandbox.DefaultIdleSuspendS)
	return &sandbox.Sandbox{
		ID: sandbox.NewID(), ProjectID: "p1", Owner: sandbox.NewKeyID(),
		Template:    sandbox.TemplateRef{Name: "base", Tag: "1", Digest: "sha256:ab"},
		Environment: sandbox.Environment{ID: "E1", VMM: "qemu", Acceleration: "tcg"},
		State:       sandbox.StateCreating, StateReason: "why", Generation: 3,
		Resources: sandbox.Resources{VCPU: 1, MemoryMiB: 512, DiskMiB: 1024},
		Lifecycle: sandbox.Lifecycle{IdleSuspendAfterS: &idle, OnMaxLifetime: "delete", AutoWake: true},
		Metadata:  map[string]string{"team": "a'b\"c", "empty": ""}, Env: map[string]string{"K": "v\n☃"},
		Node: "n1", OperationID: sandbox.NewOperationID(),
		CreatedAt: epoch, UpdatedAt: epoch, LastActive: epoch,
	}
}

func newOperation(id sandbox.ID) *sandbox.Operation {
	return &sandbox.Operation{
		ID: sandbox.NewOperationID(), Kind: sandbox.OpCreate, SandboxID: id, ProjectID: "p1", Generation: 3,
		State: sandbox.OpRunning, Progress: sandbox.Progress{Phase: "boot", DoneBytes: 1, TotalBytes: 1 << 63},
		Timings:   []sandbox.Timing{{Phase: "disk", MS: 1.5}},
		CreatedAt: epoch, StartedAt: epoch.Add(time.Second),
	}
}

func newSession(id sandbox.ID, expires time.Time) *sandbox.Session {
	return &sandbox.Session{
		ID: sandbox.NewSessionID(), SandboxID: id, ProcessID: sandbox.NewProcessID(),
		TokenHash: sha256.Sum256([]byte("token")), KeyID: sandbox.NewKeyID(), CreatedAt: epoch, ExpiresAt: expires,
	}
}

func newKey(name string) *sandbox.APIKey {
	return &sandbox.APIKey{
		ID: sandbox.NewKeyID(), ProjectID: "p1", Name: name, Hash: sha256.Sum256([]byte(name)), Prefix: "e2b_0123",
		Scopes: []string{sandbox.ScopeFilesRead}, SandboxIDs: []sandbox.ID{sandbox.NewID()},
		Metadata: map[string]string{"team": "a"}, CreatedAt: epoch, ExpiresAt: epoch.Add(time.Hour),
		CreatedByID: sandbox.NewKeyID(),
	}
}
