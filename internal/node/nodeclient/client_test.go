package nodeclient

import (
	"context"
	"errors"
	"net"
	"net/http"
	"path/filepath"
	"testing"

	"connectrpc.com/connect"

	nodev1 "github.com/space-sandbox/space/internal/gen/space/node/v1"
	"github.com/space-sandbox/space/internal/gen/space/node/v1/nodev1connect"
	"github.com/space-sandbox/space/internal/sandbox"
)

// echo answers with the header of each call.
type echo struct {
	nodev1connect.UnimplementedSandboxServiceHandler
	nodev1connect.UnimplementedNodeServiceHandler
}

func (echo) GetProcess(_ context.Context, req *connect.Request[nodev1.GetProcessRequest]) (*connect.Response[nodev1.GetProcessResponse], error) {
	return connect.NewResponse(&nodev1.GetProcessResponse{Process: &nodev1.Process{ProcessId: req.Header().Get(SandboxHeader)}}), nil
}

func (echo) StreamEvents(ctx context.Context, req *connect.Request[nodev1.StreamEventsRequest], out *connect.ServerStream[nodev1.Event]) error {
	if err := out.Send(&nodev1.Event{Id: uint64(len(req.Header().Get(SandboxHeader)))}); err != nil {
		return err
	}
	<-ctx.Done()
	return ctx.Err()
}

func (echo) GetNode(_ context.Context, req *connect.Request[nodev1.GetNodeRequest]) (*connect.Response[nodev1.GetNodeResponse], error) {
	return connect.NewResponse(&nodev1.GetNodeResponse{Name: "n" + req.Header().Get(SandboxHeader)}), nil
}

func handler() http.Handler {
	mux := http.NewServeMux()
	mux.Handle(nodev1connect.NewSandboxServiceHandler(echo{}))
	mux.Handle(nodev1connect.NewNodeServiceHandler(echo{}))
	return mux
}

func check(t *testing.T, c *Client) {
	t.Helper()
	for range 2 {
		id := sandbox.NewID()
		processes, _ := c.Sandbox(id)
		resp, err := processes.GetProcess(t.Context(), connect.NewRequest(&nodev1.GetProcessRequest{}))
		if err != nil || resp.Msg.Process.ProcessId != string(id) {
			t.Fatalf("%v, %v", resp, err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		stream, err := processes.StreamEvents(ctx, connect.NewRequest(&nodev1.StreamEventsRequest{}))
		if err != nil || !stream.Receive() || stream.Msg().Id != uint64(len(id)) {
			t.Fatalf("stream: %v", err)
		}
		cancel()
		_ = stream.Close()
	}
	node, err := c.GetNode(t.Context(), connect.NewRequest(&nodev1.GetNodeRequest{}))
	if err != nil || node.Msg.Name != "n" {
		t.Fatalf("%v, %v", node, err)
	}
}

func TestInProcess(t *testing.T) {
	m := InProcess(handler())
	check(t, m.Client())
	for range 2 {
		if err := m.Close(); err != nil {
			t.Fatal(err)
		}
	}
	_, err := m.Client().GetNode(t.Context(), connect.NewRequest(&nodev1.GetNodeRequest{}))
	if !errors.Is(err, errClosed) {
		t.Errorf("after close: %v", err)
	}
}

func TestUnix(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	server := &http.Server{Handler: handler()}
	done := make(chan struct{})
	go func() { defer close(done); _ = server.Serve(l) }()
	client, base := Unix(path)
	check(t, New(client, base))
	client.CloseIdleConnections()
	_ = server.Close()
	<-done
}
