package nodeclient

import (
	"context"
	"errors"
	"net/http"
	"testing"
	"time"

	"connectrpc.com/connect"

	agentv1 "github.com/space-sandbox/space/internal/gen/space/agent/v1"
	"github.com/space-sandbox/space/internal/gen/space/agent/v1/agentv1connect"
	"github.com/space-sandbox/space/internal/sandbox"
)

// full refuses an upload after its first chunk, as a guest with a full disk does.
type full struct {
	agentv1connect.UnimplementedFileServiceHandler
}

func (full) Write(_ context.Context, in *connect.ClientStream[agentv1.WriteRequest]) (*connect.Response[agentv1.WriteResponse], error) {
	in.Receive()
	return nil, connect.NewError(connect.CodeResourceExhausted, errors.New("the disk is full"))
}

// An answer that comes while the caller is still sending reaches it at once.
func TestAnswerBeforeTheEndOfTheRequest(t *testing.T) {
	mux := http.NewServeMux()
	mux.Handle(agentv1connect.NewFileServiceHandler(full{}))
	m := InProcess(mux)
	defer func() { _ = m.Close() }()
	_, files := m.Client().Sandbox(sandbox.NewID())
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	stream := files.Write(ctx)
	chunk := &agentv1.WriteRequest{Kind: &agentv1.WriteRequest_Data{Data: make([]byte, 256<<10)}}
	for range 64 {
		if stream.Send(chunk) != nil {
			break // CloseAndReceive tells why
		}
	}
	if _, err := stream.CloseAndReceive(); connect.CodeOf(err) != connect.CodeResourceExhausted {
		t.Errorf("got %v", err)
	}
}
