package control

import (
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/space-sandbox/space/internal/gen/space/agent/v1/agentv1connect"
	nodev1 "github.com/space-sandbox/space/internal/gen/space/node/v1"
	"github.com/space-sandbox/space/internal/gen/space/node/v1/nodev1connect"
	"github.com/space-sandbox/space/internal/sandbox"
)

// errAnswered tells that a hook has sent the whole answer.
var errAnswered = errors.New("answered")

// fakeNode is a node behind real Connect handlers. Its hooks run without its lock.
type fakeNode struct {
	nodev1connect.UnimplementedNodeServiceHandler
	url  string
	http *http.Client

	mu        sync.Mutex
	info      *nodev1.GetNodeResponse
	templates []*nodev1.Template
	sandboxes map[string]*nodev1.SandboxStatus
	watchers  map[chan *nodev1.SandboxStatus]struct{}
	down      bool
	cut       chan struct{} // closed to cut the watches
	creates   []*nodev1.CreateSandboxRequest
	deletes   []*nodev1.DeleteSandboxRequest
	onCreate  func(context.Context, *nodev1.CreateSandboxRequest, *connect.ServerStream[nodev1.CreateSandboxResponse]) error
	onDelete  func(context.Context, *nodev1.DeleteSandboxRequest) error
	processes fakeProcesses
}

func newFakeNode(t *testing.T) *fakeNode {
	t.Helper()
	n := &fakeNode{
		info: &nodev1.GetNodeResponse{Name: "n1", Environment: "E1", Vmm: "qemu", VmmVersion: "7.2", Acceleration: "tcg",
			AccelerationReason: "no /dev/kvm", MemoryTotalMib: 1 << 20, Ready: true},
		templates: []*nodev1.Template{{Name: "base", Tag: "1", Digest: "sha256:aa", State: nodev1.TemplateState_TEMPLATE_STATE_READY,
			Defaults: &nodev1.Resources{Vcpu: 1, MemoryMib: 512, DiskMib: 1024}}},
		sandboxes: map[string]*nodev1.SandboxStatus{},
		watchers:  map[chan *nodev1.SandboxStatus]struct{}{},
		cut:       make(chan struct{}),
	}
	n.processes.byID = map[string]*nodev1.Process{}
	mux := http.NewServeMux()
	mux.Handle(nodev1connect.NewNodeServiceHandler(n))
	mux.Handle(nodev1connect.NewSandboxServiceHandler(&n.processes))
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		n.mu.Lock()
		down := n.down
		n.mu.Unlock()
		if down {
			http.Error(w, "gone", http.StatusBadGateway)
			return
		}
		mux.ServeHTTP(w, r)
	}))
	t.Cleanup(func() {
		server.CloseClientConnections()
		server.Close()
	})
	n.url = server.URL
	transport := &http.Transport{MaxIdleConnsPerHost: 100}
	t.Cleanup(transport.CloseIdleConnections)
	n.http = &http.Client{Transport: transport}
	return n
}

func (n *fakeNode) with(fn func()) {
	n.mu.Lock()
	defer n.mu.Unlock()
	fn()
}

func (n *fakeNode) setDown(down bool) {
	n.with(func() {
		n.down = down
		if down {
			close(n.cut)
			n.cut = make(chan struct{})
		}
	})
}

// put changes a sandbox and tells the watchers.
func (n *fakeNode) put(st *nodev1.SandboxStatus) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if st.State == nodev1.SandboxState_SANDBOX_STATE_GONE {
		delete(n.sandboxes, st.SandboxId)
	} else {
		n.sandboxes[st.SandboxId] = st
	}
	for w := range n.watchers {
		select {
		case w <- proto.Clone(st).(*nodev1.SandboxStatus):
		default:
		}
	}
}

func (n *fakeNode) has(id sandbox.ID) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.sandboxes[string(id)] != nil
}

func (n *fakeNode) counts() (creates, deletes int) {
	n.mu.Lock()
	defer n.mu.Unlock()
	return len(n.creates), len(n.deletes)
}

func (n *fakeNode) GetNode(context.Context, *connect.Request[nodev1.GetNodeRequest]) (*connect.Response[nodev1.GetNodeResponse], error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	return connect.NewResponse(proto.Clone(n.info).(*nodev1.GetNodeResponse)), nil
}

func (n *fakeNode) ListTemplates(context.Context, *connect.Request[nodev1.ListTemplatesRequest]) (*connect.Response[nodev1.ListTemplatesResponse], error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	res := &nodev1.ListTemplatesResponse{Templates: n.templates}
	return connect.NewResponse(proto.Clone(res).(*nodev1.ListTemplatesResponse)), nil
}

func (n *fakeNode) ListSandboxes(context.Context, *connect.Request[nodev1.ListSandboxesRequest]) (*connect.Response[nodev1.ListSandboxesResponse], error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	res := &nodev1.ListSandboxesResponse{}
	for _, st := range n.sandboxes {
		res.Sandboxes = append(res.Sandboxes, proto.Clone(st).(*nodev1.SandboxStatus))
	}
	return connect.NewResponse(res), nil
}

func (n *fakeNode) WatchSandboxes(ctx context.Context, _ *connect.Request[nodev1.WatchSandboxesRequest], out *connect.ServerStream[nodev1.WatchSandboxesResponse]) error {
	changes := make(chan *nodev1.SandboxStatus, 1000)
	var first []*nodev1.SandboxStatus
	var cut chan struct{}
	n.with(func() {
		for _, st := range n.sandboxes {
			first = append(first, proto.Clone(st).(*nodev1.SandboxStatus))
		}
		n.watchers[changes], cut = struct{}{}, n.cut
	})
	defer n.with(func() { delete(n.watchers, changes) })
	for _, st := range append(first, nil) {
		if err := out.Send(&nodev1.WatchSandboxesResponse{Sandbox: st}); err != nil {
			return err
		}
	}
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-cut:
			return connect.NewError(connect.CodeUnavailable, nil)
		case st := <-changes:
			if err := out.Send(&nodev1.WatchSandboxesResponse{Sandbox: st}); err != nil {
				return err
			}
		}
	}
}

func (n *fakeNode) CreateSandbox(ctx context.Context, req *connect.Request[nodev1.CreateSandboxRequest], out *connect.ServerStream[nodev1.CreateSandboxResponse]) error {
	var hook func(context.Context, *nodev1.CreateSandboxRequest, *connect.ServerStream[nodev1.CreateSandboxResponse]) error
	n.with(func() {
		n.creates = append(n.creates, req.Msg)
		hook = n.onCreate
	})
	if hook != nil {
		if err := hook(ctx, req.Msg, out); errors.Is(err, errAnswered) {
			return nil
		} else if err != nil {
			return err
		}
	}
	st := &nodev1.SandboxStatus{SandboxId: req.Msg.SandboxId, Generation: req.Msg.Generation,
		State: nodev1.SandboxState_SANDBOX_STATE_RUNNING, Environment: "E1", VmmVersion: "7.2.1", Kernel: "6.1", Acceleration: "tcg",
		Timings: []*nodev1.Timing{{Phase: "resume", Ms: 4.5}}}
	n.put(st)
	return out.Send(&nodev1.CreateSandboxResponse{Kind: &nodev1.CreateSandboxResponse_Status{Status: st}})
}

func (n *fakeNode) DeleteSandbox(ctx context.Context, req *connect.Request[nodev1.DeleteSandboxRequest]) (*connect.Response[nodev1.DeleteSandboxResponse], error) {
	var hook func(context.Context, *nodev1.DeleteSandboxRequest) error
	n.with(func() {
		n.deletes = append(n.deletes, req.Msg)
		hook = n.onDelete
	})
	if hook != nil {
		if err := hook(ctx, req.Msg); err != nil {
			return nil, err
		}
	}
	n.put(&nodev1.SandboxStatus{SandboxId: req.Msg.SandboxId, Generation: req.Msg.Generation, State: nodev1.SandboxState_SANDBOX_STATE_GONE})
	return connect.NewResponse(&nodev1.DeleteSandboxResponse{}), nil
}

// fakeProcesses are the processes of all sandboxes.
type fakeProcesses struct {
	nodev1connect.UnimplementedSandboxServiceHandler
	mu      sync.Mutex
	byID    map[string]*nodev1.Process // by sandbox and process
	calls   int
	onStart func(*nodev1.CreateProcessRequest) error
	after   func(*nodev1.CreateProcessRequest) error // the answer is lost
}

func (f *fakeProcesses) set(onStart, after func(*nodev1.CreateProcessRequest) error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.onStart, f.after = onStart, after
}

func (f *fakeProcesses) count() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.byID)
}

func (f *fakeProcesses) CreateProcess(_ context.Context, req *connect.Request[nodev1.CreateProcessRequest]) (*connect.Response[nodev1.CreateProcessResponse], error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.calls++
	if f.onStart != nil {
		if err := f.onStart(req.Msg); err != nil {
			return nil, err
		}
	}
	key := req.Header().Get("Space-Sandbox-Id") + "/" + req.Msg.ProcessId
	if f.byID[key] == nil {
		f.byID[key] = &nodev1.Process{ProcessId: req.Msg.ProcessId, Spec: req.Msg.Spec, CreatedAt: timestamppb.Now()}
	}
	if f.after != nil {
		if err := f.after(req.Msg); err != nil {
			return nil, err
		}
	}
	return connect.NewResponse(&nodev1.CreateProcessResponse{Process: f.byID[key]}), nil
}

func (f *fakeProcesses) GetProcess(_ context.Context, req *connect.Request[nodev1.GetProcessRequest]) (*connect.Response[nodev1.GetProcessResponse], error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	proc := f.byID[req.Header().Get("Space-Sandbox-Id")+"/"+req.Msg.ProcessId]
	if proc == nil {
		return nil, connect.NewError(connect.CodeNotFound, nil)
	}
	return connect.NewResponse(&nodev1.GetProcessResponse{Process: proc}), nil
}

// client is a Node that talks to a fakeNode.
type client struct {
	nodev1connect.NodeServiceClient
	node *fakeNode
}

func (c client) Sandbox(id sandbox.ID) (nodev1connect.SandboxServiceClient, agentv1connect.FileServiceClient) {
	header := connect.WithInterceptors(connect.UnaryInterceptorFunc(func(next connect.UnaryFunc) connect.UnaryFunc {
		return func(ctx context.Context, req connect.AnyRequest) (connect.AnyResponse, error) {
			req.Header().Set("Space-Sandbox-Id", string(id))
			return next(ctx, req)
		}
	}))
	return nodev1connect.NewSandboxServiceClient(c.node.http, c.node.url, header),
		agentv1connect.NewFileServiceClient(c.node.http, c.node.url, header)
}
