package control

import (
	"context"
	"crypto/sha256"
	"log/slog"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/space-sandbox/space/internal/auth"
	"github.com/space-sandbox/space/internal/gen/space/node/v1/nodev1connect"
	"github.com/space-sandbox/space/internal/sandbox"
	"github.com/space-sandbox/space/internal/store"
	"github.com/space-sandbox/space/internal/store/sqlite"
)

const patience = 20 * time.Second

// testClock runs with the real clock from an offset that tests move; long pauses become short, but for those listed.
type testClock struct {
	mu     sync.Mutex
	offset time.Duration
	exact  map[time.Duration]bool
}

func (c *testClock) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return time.Now().Add(c.offset)
}

func (c *testClock) add(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.offset += d
}

func (c *testClock) After(d time.Duration) <-chan time.Time {
	if d > 20*time.Millisecond && !c.exact[d] {
		d = 20 * time.Millisecond
	}
	return time.After(d)
}

// faultyStore fails updates on demand, before or after they were committed.
type faultyStore struct {
	store.Store
	mu   sync.Mutex
	fail func() error
}

func (f *faultyStore) setFail(fail func() error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.fail = fail
}

func (f *faultyStore) Update(ctx context.Context, fn func(store.Tx) error) error {
	f.mu.Lock()
	fail := f.fail
	f.mu.Unlock()
	if fail != nil {
		if err := fail(); err != nil {
			return err
		}
	}
	return f.Store.Update(ctx, fn)
}

// env is a Plane on a real store and a fake node.
type env struct {
	*Plane
	t     *testing.T
	st    *faultyStore
	node  *fakeNode
	clock *testClock
	cfg   Config
	admin *auth.Principal
	stop  func()
}

// Pauses that the test clock does not shorten.
const (
	admission = 3001 * time.Millisecond
	rounds    = 101 * time.Millisecond
)

func newEnv(t *testing.T, change ...func(*Config)) *env {
	t.Helper()
	db, err := sqlite.Open(t.Context(), filepath.Join(t.TempDir(), "space.db"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = db.Close() })
	e := &env{t: t, st: &faultyStore{Store: db}, node: newFakeNode(t), stop: func() {}}
	e.clock = &testClock{exact: map[time.Duration]bool{admission: true, rounds: true}}
	e.cfg = Config{Store: e.st, NodeName: "n1", Clock: e.clock, Logger: slog.New(slog.DiscardHandler), AdmissionWait: time.Millisecond, ReconcileEvery: rounds}
	e.cfg.Nodes = map[string]Node{"n1": client{nodev1connect.NewNodeServiceClient(e.node.http, e.node.url), e.node}}
	for _, c := range change {
		c(&e.cfg)
	}
	e.admin = e.principal(sandbox.AllScopes()...)
	e.start()
	t.Cleanup(func() { e.stop() })
	return e
}

// start makes a Plane and runs it.
func (e *env) start() {
	e.t.Helper()
	p, err := New(e.cfg)
	if err != nil {
		e.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		p.Run(ctx)
	}()
	e.Plane = p
	e.stop = func() {
		e.stop = func() {}
		cancel()
		<-done
		if err := p.Close(); err != nil {
			e.t.Errorf("close: %v", err)
		}
	}
}

// restart ends the Plane wherever it is and starts another on the same store.
func (e *env) restart() {
	e.t.Helper()
	e.stop()
	e.start()
}

// principal stores a key and returns who it stands for.
func (e *env) principal(scopes ...string) *auth.Principal {
	e.t.Helper()
	_, pr := e.key(func(k *sandbox.APIKey) { k.Scopes = scopes })
	return pr
}

func (e *env) key(change func(*sandbox.APIKey)) (string, *auth.Principal) {
	e.t.Helper()
	secret := auth.NewSecret()
	key := &sandbox.APIKey{ID: sandbox.NewKeyID(), ProjectID: auth.DefaultProject, Hash: auth.Hash(secret),
		Scopes: sandbox.AllScopes(), CreatedAt: e.clock.Now().UTC()}
	change(key)
	e.tx(func(ctx context.Context, tx store.Tx) error { return tx.InsertKey(ctx, key) })
	return secret, auth.PrincipalOf(key)
}

// tx changes the store behind the Plane's back; faults do not apply.
func (e *env) tx(fn func(context.Context, store.Tx) error) {
	e.t.Helper()
	ctx := e.t.Context()
	if err := e.st.Store.Update(ctx, func(tx store.Tx) error { return fn(ctx, tx) }); err != nil {
		e.t.Fatal(err)
	}
}

// record reads a sandbox as stored, tombstones included.
func (e *env) record(id sandbox.ID) (s *sandbox.Sandbox) {
	e.t.Helper()
	e.tx(func(ctx context.Context, tx store.Tx) (err error) {
		s, err = tx.GetSandbox(ctx, id)
		return err
	})
	return s
}

func (e *env) records() (list []*sandbox.Sandbox) {
	e.t.Helper()
	all := []sandbox.State{sandbox.StateCreating, sandbox.StateRunning, sandbox.StateFailed, sandbox.StateDeleting, sandbox.StateDeleted}
	e.tx(func(ctx context.Context, tx store.Tx) (err error) {
		list, err = tx.ListSandboxes(ctx, store.SandboxQuery{States: all})
		return err
	})
	return list
}

// eventually waits until ok holds.
func (e *env) eventually(what string, ok func() bool) {
	e.t.Helper()
	deadline := time.Now().Add(patience)
	for !ok() {
		if time.Now().After(deadline) {
			e.t.Fatalf("did not happen: %s", what)
		}
		time.Sleep(2 * time.Millisecond)
	}
}

func (e *env) waitState(id sandbox.ID, want sandbox.State) *sandbox.Sandbox {
	e.t.Helper()
	e.eventually("sandbox is "+string(want), func() bool { return e.record(id).State == want })
	return e.record(id)
}

// wait waits for an operation to end.
func (e *env) wait(id sandbox.OperationID) *sandbox.Operation {
	e.t.Helper()
	op, err := e.GetOperation(e.t.Context(), e.admin, id, patience)
	if err != nil {
		e.t.Fatal(err)
	}
	if !op.State.Ended() {
		e.t.Fatalf("operation did not end: %+v", op)
	}
	return op
}

func (e *env) create(change ...func(*CreateSandbox)) Accepted {
	e.t.Helper()
	req := CreateSandbox{Template: "base"}
	for _, c := range change {
		c(&req)
	}
	acc, err := e.CreateSandbox(e.t.Context(), e.admin, req, nil)
	if err != nil {
		e.t.Fatal(err)
	}
	return acc
}

// running creates a sandbox and waits until it runs.
func (e *env) running(change ...func(*CreateSandbox)) *sandbox.Sandbox {
	e.t.Helper()
	acc := e.create(change...)
	if op := e.wait(acc.Operation.ID); op.State != sandbox.OpSucceeded {
		e.t.Fatalf("create failed: %+v", op.Error)
	}
	return e.record(acc.Sandbox.ID)
}

func (e *env) delete(id sandbox.ID) Accepted {
	e.t.Helper()
	acc, err := e.DeleteSandbox(e.t.Context(), e.admin, id, nil)
	if err != nil {
		e.t.Fatal(err)
	}
	return acc
}

// wantCode checks the code of an error and returns the error for more checks.
func (e *env) wantCode(err error, want sandbox.Code) sandbox.Error {
	e.t.Helper()
	if got := sandbox.CodeOf(err); got != want {
		e.t.Fatalf("error = %v, want %q", err, want)
	}
	if err == nil {
		return sandbox.Error{}
	}
	return *sandbox.AsError(err)
}

func idem(key, body string) *Idem {
	return &Idem{Key: key, Scope: "POST /v1/x", BodyHash: sha256.Sum256([]byte(body))}
}

// blocked is a hook that waits for release, or for the caller to leave.
func blocked() (entered chan struct{}, release func(), hook func(context.Context) error) {
	entered, gate := make(chan struct{}, 100), make(chan struct{})
	return entered, sync.OnceFunc(func() { close(gate) }), func(ctx context.Context) error {
		entered <- struct{}{}
		select {
		case <-gate:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func (e *env) await(ch <-chan struct{}, what string) {
	e.t.Helper()
	select {
	case <-ch:
	case <-time.After(patience):
		e.t.Fatalf("did not happen: %s", what)
	}
}
