package apitest

import (
	"context"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"sort"
	"strings"
	"sync"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/timestamppb"

	agentv1 "github.com/space-sandbox/space/internal/gen/space/agent/v1"
	"github.com/space-sandbox/space/internal/gen/space/agent/v1/agentv1connect"
	nodev1 "github.com/space-sandbox/space/internal/gen/space/node/v1"
	"github.com/space-sandbox/space/internal/gen/space/node/v1/nodev1connect"
	"github.com/space-sandbox/space/internal/sandbox"
)

// Guest is one sandbox's services in memory.
type Guest struct {
	nodev1connect.UnimplementedSandboxServiceHandler
	agentv1connect.UnimplementedFileServiceHandler
	server *httptest.Server

	mu      sync.Mutex
	changed chan struct{} // closed and replaced with every change
	procs   map[string]*nodev1.Process
	order   []string
	events  map[string][]*nodev1.Event
	first   uint64 // events below were dropped
	cutAt   []int  // how many events each next stream carries before it breaks
	stdin   []byte
	room    int // how much the input takes before it is full; < 0: all
	closed  bool
	files   map[string][]byte
	sizes   map[string]uint64
	streams int

	Signals []*nodev1.SignalRequest
	Resizes []*nodev1.ResizeRequest
	Starts  int // streams that asked to start the process
	FileErr *connect.Error
	Sparse  bool // uploads are counted, not kept
}

func newGuest() *Guest {
	g := &Guest{
		changed: make(chan struct{}), procs: map[string]*nodev1.Process{}, events: map[string][]*nodev1.Event{}, room: -1,
		files: map[string][]byte{}, sizes: map[string]uint64{},
	}
	mux := http.NewServeMux()
	mux.Handle(nodev1connect.NewSandboxServiceHandler(g))
	mux.Handle(agentv1connect.NewFileServiceHandler(g))
	g.server = httptest.NewServer(mux)
	return g
}

func (g *Guest) close() {
	g.server.CloseClientConnections()
	g.server.Close()
}

func (g *Guest) clients() (nodev1connect.SandboxServiceClient, agentv1connect.FileServiceClient) {
	c := g.server.Client()
	return nodev1connect.NewSandboxServiceClient(c, g.server.URL), agentv1connect.NewFileServiceClient(c, g.server.URL)
}

// change runs fn under the lock and wakes whoever waits.
func (g *Guest) change(fn func()) {
	g.mu.Lock()
	defer g.mu.Unlock()
	fn()
	close(g.changed)
	g.changed = make(chan struct{})
}

// AddProcess makes a process that has not been started.
func (g *Guest) AddProcess() *nodev1.Process {
	p := &nodev1.Process{
		ProcessId: string(sandbox.NewProcessID()), State: nodev1.ProcessState_PROCESS_STATE_CREATED,
		Spec: &agentv1.ProcessSpec{Argv: [][]byte{[]byte("true")}}, CreatedAt: timestamppb.Now(),
	}
	g.change(func() {
		g.procs[p.GetProcessId()] = p
		g.order = append(g.order, p.GetProcessId())
	})
	return p
}

// Emit appends events to a process's journal and numbers those that have no number and are journalled.
func (g *Guest) Emit(process string, events ...*nodev1.Event) {
	g.change(func() {
		for _, ev := range events {
			if ev.GetInterrupted() == nil && ev.GetResync() == nil {
				ev.Id = uint64(len(g.events[process]) + 1)
			}
			g.events[process] = append(g.events[process], ev)
		}
	})
}

// Cut makes the next streams break after these numbers of events.
func (g *Guest) Cut(after ...int) {
	g.change(func() { g.cutAt = after })
}

// DropBelow forgets the events below first.
func (g *Guest) DropBelow(first uint64) { g.change(func() { g.first = first }) }

// Room sets how many more bytes the input takes; < 0: all.
func (g *Guest) Room(n int) { g.change(func() { g.room = n }) }

// Stdin returns what the input has taken.
func (g *Guest) Stdin() (data []byte, closed bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	return append([]byte{}, g.stdin...), g.closed
}

// Streams returns how many event streams are open.
func (g *Guest) Streams() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.streams
}

// PutFile sets a file. size, if not 0, is what the guest reports instead of the real one.
func (g *Guest) PutFile(path string, content []byte, size uint64) {
	g.change(func() {
		g.files[path] = content
		g.sizes[path] = uint64(len(content))
		if size != 0 {
			g.sizes[path] = size
		}
		if strings.HasPrefix(path, "/proc/") {
			g.sizes[path] = 0
		}
	})
}

// File returns a file.
func (g *Guest) File(path string) (content []byte, size uint64, ok bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	content, ok = g.files[path]
	return content, g.sizes[path], ok
}

func (g *Guest) process(id string) (*nodev1.Process, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if p := g.procs[id]; p != nil {
		return p, nil
	}
	return nil, connect.NewError(connect.CodeNotFound, errors.New("no such process"))
}

// Exit ends a process.
func (g *Guest) Exit(id string, code int32) {
	g.mu.Lock()
	p := &nodev1.Process{ProcessId: id, Spec: g.procs[id].GetSpec(), State: nodev1.ProcessState_PROCESS_STATE_EXITED, Exit: &agentv1.Exited{Code: &code}}
	g.mu.Unlock()
	g.change(func() { g.procs[id] = p })
}

// GetProcess implements the node's contract.
func (g *Guest) GetProcess(ctx context.Context, r *connect.Request[nodev1.GetProcessRequest]) (*connect.Response[nodev1.GetProcessResponse], error) {
	deadline := time.After(time.Duration(r.Msg.GetWaitMs()) * time.Millisecond)
	for {
		p, err := g.process(r.Msg.GetProcessId())
		if err != nil {
			return nil, err
		}
		g.mu.Lock()
		changed := g.changed
		g.mu.Unlock()
		if p.GetState() == nodev1.ProcessState_PROCESS_STATE_EXITED || r.Msg.GetWaitMs() == 0 {
			return connect.NewResponse(&nodev1.GetProcessResponse{Process: p}), nil
		}
		select {
		case <-changed:
		case <-deadline:
			return connect.NewResponse(&nodev1.GetProcessResponse{Process: p}), nil
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// ListProcesses implements the node's contract.
func (g *Guest) ListProcesses(_ context.Context, r *connect.Request[nodev1.ListProcessesRequest]) (*connect.Response[nodev1.ListProcessesResponse], error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	out, seen := &nodev1.ListProcessesResponse{}, r.Msg.GetAfter() == ""
	for _, id := range g.order {
		if seen && uint32(len(out.Processes)) == r.Msg.GetLimit() {
			out.More = true
			break
		}
		if seen {
			out.Processes = append(out.Processes, g.procs[id])
		}
		seen = seen || id == r.Msg.GetAfter()
	}
	return connect.NewResponse(out), nil
}

// Signal implements the node's contract.
func (g *Guest) Signal(_ context.Context, r *connect.Request[nodev1.SignalRequest]) (*connect.Response[nodev1.SignalResponse], error) {
	p, err := g.process(r.Msg.GetProcessId())
	if err != nil {
		return nil, err
	}
	g.change(func() { g.Signals = append(g.Signals, r.Msg) })
	return connect.NewResponse(&nodev1.SignalResponse{Process: p}), nil
}

// Resize implements the node's contract.
func (g *Guest) Resize(_ context.Context, r *connect.Request[nodev1.ResizeRequest]) (*connect.Response[nodev1.ResizeResponse], error) {
	if _, err := g.process(r.Msg.GetProcessId()); err != nil {
		return nil, err
	}
	g.change(func() { g.Resizes = append(g.Resizes, r.Msg) })
	return connect.NewResponse(&nodev1.ResizeResponse{}), nil
}

// WriteStdin implements the node's contract.
func (g *Guest) WriteStdin(_ context.Context, r *connect.Request[nodev1.WriteStdinRequest]) (*connect.Response[nodev1.WriteStdinResponse], error) {
	if len(r.Msg.GetData()) > 256<<10 {
		return nil, connect.NewError(connect.CodeInvalidArgument, errors.New("too much"))
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed && len(r.Msg.GetData()) > 0 {
		return nil, connect.NewError(connect.CodeFailedPrecondition, errors.New("closed"))
	}
	data, at := r.Msg.GetData(), uint64(len(g.stdin))
	if r.Msg.Offset != nil {
		if r.Msg.GetOffset() > at {
			return nil, connect.NewError(connect.CodeOutOfRange, errors.New("gap"))
		}
		data = data[min(at-r.Msg.GetOffset(), uint64(len(data))):]
	}
	if g.room >= 0 && len(data) > g.room {
		data = data[:g.room]
	}
	if g.room >= 0 {
		g.room -= len(data)
	}
	g.stdin = append(g.stdin, data...)
	g.closed = g.closed || r.Msg.GetClose()
	return connect.NewResponse(&nodev1.WriteStdinResponse{Offset: uint64(len(g.stdin)), Closed: g.closed}), nil
}

// StreamEvents implements the node's contract, with the cuts that were asked for.
func (g *Guest) StreamEvents(ctx context.Context, r *connect.Request[nodev1.StreamEventsRequest], out *connect.ServerStream[nodev1.Event]) error {
	id := r.Msg.GetProcessId()
	if _, err := g.process(id); err != nil {
		return err
	}
	next, cut := uint64(1), -1
	if r.Msg.AfterId != nil {
		next = r.Msg.GetAfterId() + 1
	}
	var resync *nodev1.Event
	g.change(func() {
		g.streams++
		if r.Msg.GetStart() {
			g.Starts++
		}
		if len(g.cutAt) > 0 {
			cut, g.cutAt = g.cutAt[0], g.cutAt[1:]
		}
		if first := max(g.first, 1); next < g.first || next > uint64(len(g.events[id]))+1 {
			resync = &nodev1.Event{Kind: &nodev1.Event_Resync{Resync: &nodev1.ResyncRequired{FirstAvailableId: first}}}
			next = first
		}
	})
	defer g.change(func() { g.streams-- })
	if resync != nil {
		if err := out.Send(resync); err != nil {
			return err
		}
	}
	for sent := 0; ; sent++ {
		if sent == cut {
			return connect.NewError(connect.CodeUnavailable, errors.New("the shim went away"))
		}
		ev, err := g.await(ctx, id, next)
		if err != nil {
			return err
		}
		if err := out.Send(ev); err != nil {
			return err
		}
		if ev.GetExited() != nil || ev.GetInterrupted() != nil {
			return nil
		}
		next++
	}
}

func (g *Guest) await(ctx context.Context, id string, n uint64) (*nodev1.Event, error) {
	for {
		g.mu.Lock()
		changed := g.changed
		if n <= uint64(len(g.events[id])) {
			ev := g.events[id][n-1]
			g.mu.Unlock()
			return ev, nil
		}
		g.mu.Unlock()
		select {
		case <-changed:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// ReadOutput implements the node's contract.
func (g *Guest) ReadOutput(_ context.Context, r *connect.Request[nodev1.ReadOutputRequest], out *connect.ServerStream[nodev1.ReadOutputResponse]) error {
	if _, err := g.process(r.Msg.GetProcessId()); err != nil {
		return err
	}
	g.mu.Lock()
	events := g.events[r.Msg.GetProcessId()]
	g.mu.Unlock()
	var end uint64
	for _, ev := range events {
		o := ev.GetOutput()
		if o == nil || o.GetStream() != r.Msg.GetStream() {
			continue
		}
		end = o.GetOffset() + uint64(len(o.GetData()))
		if end <= r.Msg.GetFrom() {
			continue
		}
		skip := max(r.Msg.GetFrom(), o.GetOffset()) - o.GetOffset()
		if err := out.Send(&nodev1.ReadOutputResponse{Data: o.GetData()[skip:], Offset: o.GetOffset() + skip}); err != nil {
			return err
		}
	}
	if r.Msg.GetFrom() > end {
		return connect.NewError(connect.CodeOutOfRange, errors.New("not written yet"))
	}
	return nil
}

// FileError makes a file service's error, with a text of the guest's that must not reach a client.
func FileError(code connect.Code, reason agentv1.FileErrorReason) *connect.Error {
	err := connect.NewError(code, errors.New("secret-path"))
	if d, derr := connect.NewErrorDetail(&agentv1.FileError{Reason: reason, Field: "path"}); derr == nil {
		err.AddDetail(d)
	}
	return err
}

func (g *Guest) entry(path []byte) (*agentv1.Entry, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.FileErr != nil {
		return nil, g.FileErr
	}
	if _, ok := g.files[string(path)]; !ok {
		return nil, FileError(connect.CodeNotFound, agentv1.FileErrorReason_FILE_ERROR_REASON_NOT_FOUND)
	}
	return &agentv1.Entry{
		Path: path, Type: agentv1.FileType_FILE_TYPE_FILE, Size: g.sizes[string(path)], Mode: 0o644,
		ModifiedAt: timestamppb.New(time.Date(2026, 1, 31, 12, 0, 0, 0, time.UTC)),
	}, nil
}

// Stat implements the agent's contract.
func (g *Guest) Stat(_ context.Context, r *connect.Request[agentv1.StatRequest]) (*connect.Response[agentv1.StatResponse], error) {
	e, err := g.entry(r.Msg.GetPath())
	return connect.NewResponse(&agentv1.StatResponse{Entry: e}), err
}

// ListDir implements the agent's contract for all files.
func (g *Guest) ListDir(_ context.Context, r *connect.Request[agentv1.ListDirRequest]) (*connect.Response[agentv1.ListDirResponse], error) {
	g.mu.Lock()
	var names []string
	for name := range g.files {
		if strings.HasPrefix(name, string(r.Msg.GetPath())) && name > string(r.Msg.GetAfter()) {
			names = append(names, name)
		}
	}
	g.mu.Unlock()
	sort.Strings(names)
	out := &agentv1.ListDirResponse{More: len(names) > int(r.Msg.GetLimit())}
	for _, name := range names[:min(len(names), int(r.Msg.GetLimit()))] {
		e, err := g.entry([]byte(name))
		if err != nil {
			return nil, err
		}
		out.Entries = append(out.Entries, e)
	}
	return connect.NewResponse(out), nil
}

// Read implements the agent's contract.
func (g *Guest) Read(_ context.Context, r *connect.Request[agentv1.ReadRequest], out *connect.ServerStream[agentv1.ReadResponse]) error {
	e, err := g.entry(r.Msg.GetPath())
	if err != nil {
		return err
	}
	if err := out.Send(&agentv1.ReadResponse{Kind: &agentv1.ReadResponse_Entry{Entry: e}}); err != nil {
		return err
	}
	content, _, _ := g.File(string(r.Msg.GetPath()))
	content = content[min(r.Msg.GetOffset(), uint64(len(content))):]
	if n := r.Msg.GetLength(); n > 0 && n < uint64(len(content)) {
		content = content[:n]
	}
	for len(content) > 0 {
		n := min(len(content), 256<<10)
		if err := out.Send(&agentv1.ReadResponse{Kind: &agentv1.ReadResponse_Data{Data: content[:n]}}); err != nil {
			return err
		}
		content = content[n:]
	}
	return nil
}

// Write implements the agent's contract: nothing changes without a commit.
func (g *Guest) Write(_ context.Context, in *connect.ClientStream[agentv1.WriteRequest]) (*connect.Response[agentv1.WriteResponse], error) {
	var path string
	var content []byte
	var size uint64
	for in.Receive() {
		switch kind := in.Msg().GetKind().(type) {
		case *agentv1.WriteRequest_Header:
			path = string(kind.Header.GetPath())
			g.mu.Lock()
			err := g.FileErr
			g.mu.Unlock()
			if err != nil {
				return nil, err
			}
		case *agentv1.WriteRequest_Data:
			size += uint64(len(kind.Data))
			if !g.Sparse {
				content = append(content, kind.Data...)
			}
		case *agentv1.WriteRequest_Commit:
			g.PutFile(path, content, size)
			e, err := g.entry([]byte(path))
			return connect.NewResponse(&agentv1.WriteResponse{Entry: e}), err
		}
	}
	if err := in.Err(); err != nil {
		return nil, err
	}
	return nil, connect.NewError(connect.CodeCanceled, io.ErrUnexpectedEOF)
}

// Mkdir implements the agent's contract.
func (g *Guest) Mkdir(_ context.Context, r *connect.Request[agentv1.MkdirRequest]) (*connect.Response[agentv1.MkdirResponse], error) {
	g.PutFile(string(r.Msg.GetPath()), nil, 0)
	e, err := g.entry(r.Msg.GetPath())
	return connect.NewResponse(&agentv1.MkdirResponse{Entry: e}), err
}

// Move implements the agent's contract.
func (g *Guest) Move(_ context.Context, r *connect.Request[agentv1.MoveRequest]) (*connect.Response[agentv1.MoveResponse], error) {
	content, _, ok := g.File(string(r.Msg.GetFrom()))
	if !ok {
		return nil, FileError(connect.CodeNotFound, agentv1.FileErrorReason_FILE_ERROR_REASON_NOT_FOUND)
	}
	g.PutFile(string(r.Msg.GetTo()), content, 0)
	g.change(func() { delete(g.files, string(r.Msg.GetFrom())) })
	e, err := g.entry(r.Msg.GetTo())
	return connect.NewResponse(&agentv1.MoveResponse{Entry: e}), err
}

// Copy implements the agent's contract.
func (g *Guest) Copy(_ context.Context, r *connect.Request[agentv1.CopyRequest]) (*connect.Response[agentv1.CopyResponse], error) {
	content, _, ok := g.File(string(r.Msg.GetFrom()))
	if !ok {
		return nil, FileError(connect.CodeNotFound, agentv1.FileErrorReason_FILE_ERROR_REASON_NOT_FOUND)
	}
	g.PutFile(string(r.Msg.GetTo()), content, 0)
	e, err := g.entry(r.Msg.GetTo())
	return connect.NewResponse(&agentv1.CopyResponse{Entry: e}), err
}

// Remove implements the agent's contract.
func (g *Guest) Remove(_ context.Context, r *connect.Request[agentv1.RemoveRequest]) (*connect.Response[agentv1.RemoveResponse], error) {
	if _, err := g.entry(r.Msg.GetPath()); err != nil {
		return nil, err
	}
	g.change(func() { delete(g.files, string(r.Msg.GetPath())) })
	return connect.NewResponse(&agentv1.RemoveResponse{}), nil
}
