package shim

import (
	"context"
	"errors"
	"io"
	"time"

	"connectrpc.com/connect"
	agentv1 "github.com/space-sandbox/space/internal/gen/space/agent/v1"
	"github.com/space-sandbox/space/internal/gen/space/agent/v1/agentv1connect"
)

const (
	fileTimeout   = 30 * time.Second // of a call, and of each message of a stream
	treeTimeout   = 10 * time.Minute // of calls that walk a tree
	maxFileCalls  = 64               // at once
	fileChunk     = 256 << 10
	commitTimeout = 2 * time.Minute // fsync of a large file
)

// fileService relays space.agent.v1.FileService, message by message: nothing of the guest's answers is passed on
// unparsed.
type fileService struct {
	s     *server
	slots chan struct{}
}

var _ agentv1connect.FileServiceHandler = (*fileService)(nil)

func newFileService(s *server) *fileService {
	return &fileService{s: s, slots: make(chan struct{}, maxFileCalls)}
}

// enter admits a call; the caller calls leave.
func (f *fileService) enter() (*guest, error) {
	live, err := f.s.running()
	if err != nil {
		return nil, err
	}
	select {
	case f.slots <- struct{}{}:
	default:
		return nil, connectErr(connect.CodeResourceExhausted, "more than %d file calls at once", maxFileCalls)
	}
	f.s.status.touch()
	return live.m.guest, nil
}

func (f *fileService) leave() { <-f.slots }

// relay makes one unary call.
func relay[Req, Res any](ctx context.Context, f *fileService, req *connect.Request[Req], limit time.Duration,
	call func(agentv1connect.FileServiceClient) func(context.Context, *connect.Request[Req]) (*connect.Response[Res], error),
) (*connect.Response[Res], error) {
	g, err := f.enter()
	if err != nil {
		return nil, err
	}
	defer f.leave()
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	resp, err := call(g.files)(ctx, connect.NewRequest(req.Msg))
	if err != nil {
		return nil, guestError(err)
	}
	return connect.NewResponse(resp.Msg), nil
}

// Stat implements FileService.
func (f *fileService) Stat(ctx context.Context, req *connect.Request[agentv1.StatRequest]) (*connect.Response[agentv1.StatResponse], error) {
	return relay(ctx, f, req, fileTimeout, func(c agentv1connect.FileServiceClient) func(context.Context, *connect.Request[agentv1.StatRequest]) (*connect.Response[agentv1.StatResponse], error) {
		return c.Stat
	})
}

// ListDir implements FileService.
func (f *fileService) ListDir(ctx context.Context, req *connect.Request[agentv1.ListDirRequest]) (*connect.Response[agentv1.ListDirResponse], error) {
	return relay(ctx, f, req, fileTimeout, func(c agentv1connect.FileServiceClient) func(context.Context, *connect.Request[agentv1.ListDirRequest]) (*connect.Response[agentv1.ListDirResponse], error) {
		return c.ListDir
	})
}

// Mkdir implements FileService.
func (f *fileService) Mkdir(ctx context.Context, req *connect.Request[agentv1.MkdirRequest]) (*connect.Response[agentv1.MkdirResponse], error) {
	return relay(ctx, f, req, fileTimeout, func(c agentv1connect.FileServiceClient) func(context.Context, *connect.Request[agentv1.MkdirRequest]) (*connect.Response[agentv1.MkdirResponse], error) {
		return c.Mkdir
	})
}

// Move implements FileService.
func (f *fileService) Move(ctx context.Context, req *connect.Request[agentv1.MoveRequest]) (*connect.Response[agentv1.MoveResponse], error) {
	return relay(ctx, f, req, treeTimeout, func(c agentv1connect.FileServiceClient) func(context.Context, *connect.Request[agentv1.MoveRequest]) (*connect.Response[agentv1.MoveResponse], error) {
		return c.Move
	})
}

// Copy implements FileService.
func (f *fileService) Copy(ctx context.Context, req *connect.Request[agentv1.CopyRequest]) (*connect.Response[agentv1.CopyResponse], error) {
	return relay(ctx, f, req, treeTimeout, func(c agentv1connect.FileServiceClient) func(context.Context, *connect.Request[agentv1.CopyRequest]) (*connect.Response[agentv1.CopyResponse], error) {
		return c.Copy
	})
}

// Remove implements FileService.
func (f *fileService) Remove(ctx context.Context, req *connect.Request[agentv1.RemoveRequest]) (*connect.Response[agentv1.RemoveResponse], error) {
	return relay(ctx, f, req, treeTimeout, func(c agentv1connect.FileServiceClient) func(context.Context, *connect.Request[agentv1.RemoveRequest]) (*connect.Response[agentv1.RemoveResponse], error) {
		return c.Remove
	})
}

// idle ends a context when one step of a stream takes too long. Time between steps, which is the caller's, does not
// count.
type idle struct {
	cancel context.CancelCauseFunc
	timer  *time.Timer
}

func withIdle(ctx context.Context) (context.Context, *idle) {
	ctx, cancel := context.WithCancelCause(ctx)
	i := &idle{cancel: cancel}
	i.timer = time.AfterFunc(fileTimeout, func() { cancel(context.DeadlineExceeded) })
	return ctx, i
}

func (i *idle) begin() { i.timer.Reset(fileTimeout) }
func (i *idle) pause() { i.timer.Stop() }
func (i *idle) end()   { i.timer.Stop(); i.cancel(nil) }

// streamErr prefers the reason why the stream was given up.
func streamErr(ctx context.Context, err error) error {
	if errors.Is(context.Cause(ctx), context.DeadlineExceeded) {
		return guestError(context.DeadlineExceeded)
	}
	return guestError(err)
}

// Read implements FileService.
func (f *fileService) Read(ctx context.Context, req *connect.Request[agentv1.ReadRequest], out *connect.ServerStream[agentv1.ReadResponse]) error {
	g, err := f.enter()
	if err != nil {
		return err
	}
	defer f.leave()
	ctx, idle := withIdle(ctx)
	in, err := g.content.Read(ctx, connect.NewRequest(req.Msg))
	if err != nil {
		idle.end()
		return streamErr(ctx, err)
	}
	defer func() { _ = in.Close() }() // the stream's own error was seen
	defer idle.end()                  // before: closing waits for the end of a stream
	for first := true; in.Receive(); first = false {
		idle.pause()
		msg := in.Msg()
		if err := checkRead(msg, first); err != nil {
			return err
		}
		if err := out.Send(msg); err != nil {
			return err
		}
		f.s.status.touch()
		idle.begin()
	}
	if err := in.Err(); err != nil {
		return streamErr(ctx, err)
	}
	_ = in.Close() // at its end: the connection can be used again
	return nil
}

// checkRead holds the guest to the contract: an entry, then chunks of bounded size.
func checkRead(msg *agentv1.ReadResponse, first bool) error {
	_, entry := msg.GetKind().(*agentv1.ReadResponse_Entry)
	data := msg.GetData()
	if entry != first || (!first && (len(data) == 0 || len(data) > fileChunk)) {
		return connectErr(connect.CodeUnavailable, "the guest agent answers nonsense")
	}
	return nil
}

// Write implements FileService. The file appears only if the caller's stream came to its commit and its end.
func (f *fileService) Write(ctx context.Context, in *connect.ClientStream[agentv1.WriteRequest]) (*connect.Response[agentv1.WriteResponse], error) {
	g, err := f.enter()
	if err != nil {
		return nil, err
	}
	defer f.leave()
	ctx, idle := withIdle(ctx)
	defer idle.end()
	out := g.files.Write(ctx)
	idle.pause()
	for in.Receive() {
		msg := in.Msg()
		if len(msg.GetData()) > fileChunk {
			return nil, connectErr(connect.CodeInvalidArgument, "a chunk is larger than %d bytes", fileChunk)
		}
		idle.begin()
		err := out.Send(msg)
		idle.pause()
		if errors.Is(err, io.EOF) {
			break // the agent has answered: CloseAndReceive tells what
		}
		if err != nil {
			return nil, streamErr(ctx, err)
		}
		f.s.status.touch()
	}
	if err := in.Err(); err != nil {
		return nil, err // ending ctx takes the agent's stream down before its commit is complete
	}
	idle.timer.Reset(commitTimeout)
	resp, err := out.CloseAndReceive()
	if err != nil {
		return nil, streamErr(ctx, err)
	}
	return connect.NewResponse(resp.Msg), nil
}
