package node

import (
	"bytes"
	"context"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

	agentv1 "github.com/space-sandbox/space/internal/gen/space/agent/v1"
	nodev1 "github.com/space-sandbox/space/internal/gen/space/node/v1"
	"github.com/space-sandbox/space/internal/gen/space/node/v1/nodev1connect"
	"github.com/space-sandbox/space/internal/sandbox"
)

func TestRouteReachesTheRightSandbox(t *testing.T) {
	n := newPlace(t).start()
	for range 2 {
		id := n.mustCreate()
		processes, _ := n.client.Sandbox(id)
		req := connect.NewRequest(&nodev1.GetProcessRequest{ProcessId: "p"})
		req.Header().Set("Authorization", "Bearer of-the-caller") // the fake accepts only its own token
		resp, err := processes.GetProcess(t.Context(), req)
		if err != nil || resp.Msg.Process.Spec.User != string(id) {
			t.Fatalf("%v, %v; want %s", resp, err, id)
		}
	}
}

func TestRouteStreamsDown(t *testing.T) {
	n := newPlace(t).start()
	id := n.mustCreate()
	processes, _ := n.client.Sandbox(id)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	stream, err := processes.StreamEvents(ctx, connect.NewRequest(&nodev1.StreamEventsRequest{}))
	if err != nil {
		t.Fatal(err)
	}
	if !stream.Receive() || stream.Msg().Id != 1 {
		t.Fatalf("the first event does not arrive while the stream is open: %v", stream.Err())
	}
	cancel()
	_ = stream.Close()
	// The shim has seen that the caller left.
	eventually(t, "cancellation at the shim", func() bool {
		return n.status(id).LastActiveAt.AsTime().Equal(time.Unix(4711, 0))
	})
}

func TestRouteStreamsUp(t *testing.T) {
	n := newPlace(t).start()
	id := n.mustCreate()
	_, files := n.client.Sandbox(id)
	stream := files.Write(t.Context())
	if err := stream.Send(&agentv1.WriteRequest{Kind: &agentv1.WriteRequest_Header{Header: &agentv1.WriteHeader{Path: []byte("/x")}}}); err != nil {
		t.Fatal(err)
	}
	// The first message arrives before the last one is sent.
	eventually(t, "first message at the shim", func() bool {
		return n.status(id).LastActiveAt.AsTime().Equal(time.Unix(815, 0))
	})
	chunk := bytes.Repeat([]byte{7}, 256<<10)
	for range 64 {
		if err := stream.Send(&agentv1.WriteRequest{Kind: &agentv1.WriteRequest_Data{Data: chunk}}); err != nil {
			t.Fatal(err)
		}
	}
	resp, err := stream.CloseAndReceive()
	if err != nil || resp.Msg.Entry.Size < 16<<20 {
		t.Fatalf("%v, %v", resp, err)
	}
}

func TestRouteErrors(t *testing.T) {
	p := newPlace(t)
	n := p.start()
	processes, _ := n.client.Sandbox(sandbox.NewID())
	_, err := processes.GetProcess(t.Context(), connect.NewRequest(&nodev1.GetProcessRequest{}))
	wantCode(t, err, connect.CodeNotFound)
	processes, _ = n.client.Sandbox("../../etc")
	_, err = processes.GetProcess(t.Context(), connect.NewRequest(&nodev1.GetProcessRequest{}))
	wantCode(t, err, connect.CodeInvalidArgument)
	server := httptest.NewServer(n.Handler())
	defer server.Close()
	bare := nodev1connect.NewSandboxServiceClient(server.Client(), server.URL)
	_, err = bare.GetProcess(t.Context(), connect.NewRequest(&nodev1.GetProcessRequest{}))
	wantCode(t, err, connect.CodeInvalidArgument)
	// The shim's own service is not reachable through the node.
	resp, err := server.Client().Post(server.URL+"/space.shim.v1.ShimService/Shutdown", "application/json", bytes.NewReader([]byte("{}")))
	if err != nil || resp.StatusCode != http.StatusNotFound {
		t.Errorf("%v, %v", resp, err)
	}
	_ = resp.Body.Close()
}

func TestRouteToArchive(t *testing.T) {
	n := newPlace(t).start()
	id := n.mustCreate()
	processes, _ := n.client.Sandbox(id)
	stream, err := processes.StreamEvents(t.Context(), connect.NewRequest(&nodev1.StreamEventsRequest{}))
	if err != nil || !stream.Receive() {
		t.Fatalf("%v", err)
	}
	shim, _ := n.pids(id)
	if err := unix.Kill(shim, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	for stream.Receive() { //nolint:revive // until it ends
	}
	if stream.Err() == nil {
		t.Error("a cut stream looks complete")
	}
	_ = stream.Close()
	n.waitState(id, nodev1.SandboxState_SANDBOX_STATE_FAILED)
	_, err = processes.GetProcess(t.Context(), connect.NewRequest(&nodev1.GetProcessRequest{ProcessId: string(sandbox.NewProcessID())}))
	wantCode(t, err, connect.CodeNotFound) // the journal is empty
	_, err = processes.CreateProcess(t.Context(), connect.NewRequest(&nodev1.CreateProcessRequest{}))
	wantCode(t, err, connect.CodeFailedPrecondition)
	_, files := n.client.Sandbox(id)
	_, err = files.Stat(t.Context(), connect.NewRequest(&agentv1.StatRequest{}))
	wantCode(t, err, connect.CodeFailedPrecondition)
	if err := n.deleteCall(id, 1); err != nil {
		t.Fatal(err)
	}
}

func TestUsages(t *testing.T) {
	n := newPlace(t).start()
	id := n.mustCreate()
	usages := n.Usages()
	if len(usages) != 1 || usages[0].SandboxID != string(id) || usages[0].ShimPSS == 0 || usages[0].VMMPSS == 0 {
		t.Errorf("%+v", usages)
	}
}
