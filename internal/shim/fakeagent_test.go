package shim

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"strconv"
	"sync"
	"time"

	"connectrpc.com/connect"
	agentv1 "github.com/space-sandbox/space/internal/gen/space/agent/v1"
	"google.golang.org/protobuf/types/known/timestamppb"
)

const fakeRing = 1 << 20

// fakeAgent keeps the contract of space.agent.v1 with programs that are functions. Its fields before mu are set
// before use and make it misbehave.
type fakeAgent struct {
	clocksource string
	skew        time.Duration
	resumeErr   error
	hangResume  bool
	frame       func(*agentv1.ProcessFrame) *agentv1.ProcessFrame

	mu         sync.Mutex
	token      string
	generation uint64
	resume     *agentv1.ResumeRequest
	frozen     bool
	procs      map[string]*fakeProc
	runs       int
	files      map[string][]byte
	rehearsals []*agentv1.ResumeRequest
	clockSets  int
}

type fakeProc struct {
	mu      sync.Mutex
	changed chan struct{}
	frames  []*agentv1.ProcessFrame
	base    uint64 // frames up to here are acknowledged
	bytes   int
	stdin   []byte
	closed  bool
	signal  chan int32
	exited  bool
}

func newFakeAgent() *fakeAgent {
	return &fakeAgent{clocksource: "tsc", procs: make(map[string]*fakeProc), files: make(map[string][]byte)}
}

func (a *fakeAgent) setToken(t string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.token = t
}

func (a *fakeAgent) authenticate(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		a.mu.Lock()
		ok := r.Header.Get("Authorization") == "Bearer "+a.token
		a.mu.Unlock()
		if !ok {
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		next.ServeHTTP(w, r)
	})
}

func (a *fakeAgent) Ping(context.Context, *connect.Request[agentv1.PingRequest]) (*connect.Response[agentv1.PingResponse], error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return connect.NewResponse(&agentv1.PingResponse{
		AgentVersion: "fake", Kernel: "6.1\x1b[0m", Clocksource: a.clocksource, Generation: a.generation,
		WallClock: timestamppb.New(time.Now().Add(a.skew)),
	}), nil
}

func (a *fakeAgent) Freeze(context.Context, *connect.Request[agentv1.FreezeRequest]) (*connect.Response[agentv1.FreezeResponse], error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.frozen = true
	return connect.NewResponse(&agentv1.FreezeResponse{}), nil
}

func (a *fakeAgent) Resume(ctx context.Context, req *connect.Request[agentv1.ResumeRequest]) (*connect.Response[agentv1.ResumeResponse], error) {
	if a.hangResume {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	if a.resumeErr != nil {
		return nil, a.resumeErr
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if req.Msg.GetRehearsal() {
		a.rehearsals = append(a.rehearsals, req.Msg)
		return connect.NewResponse(&agentv1.ResumeResponse{WallClock: timestamppb.New(time.Now().Add(a.skew)), Clocksource: a.clocksource}), nil
	}
	a.resume, a.token, a.generation, a.frozen = req.Msg, req.Msg.GetControlToken(), req.Msg.GetGeneration(), false
	return connect.NewResponse(&agentv1.ResumeResponse{WallClock: timestamppb.New(time.Now().Add(a.skew)), Clocksource: a.clocksource}), nil
}

func (a *fakeAgent) SetClock(context.Context, *connect.Request[agentv1.SetClockRequest]) (*connect.Response[agentv1.SetClockResponse], error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.clockSets++
	return connect.NewResponse(&agentv1.SetClockResponse{}), nil
}

func (a *fakeAgent) Stats(context.Context, *connect.Request[agentv1.StatsRequest]) (*connect.Response[agentv1.StatsResponse], error) {
	return connect.NewResponse(&agentv1.StatsResponse{}), nil
}

func (a *fakeAgent) find(id string) (*fakeProc, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if p := a.procs[id]; p != nil {
		return p, nil
	}
	return nil, connect.NewError(connect.CodeNotFound, errors.New("no such process"))
}

func userError(user string) error {
	if user != "nobody-here" {
		return nil
	}
	err := connect.NewError(connect.CodeInvalidArgument, errors.New("unknown user\x00"))
	if d, derr := connect.NewErrorDetail(&agentv1.FileError{Reason: agentv1.FileErrorReason_FILE_ERROR_REASON_UNKNOWN_USER, Field: "user"}); derr == nil {
		err.AddDetail(d)
	}
	return err
}

func (a *fakeAgent) Run(ctx context.Context, req *connect.Request[agentv1.RunRequest], stream *connect.ServerStream[agentv1.ProcessFrame]) error {
	argv := req.Msg.GetSpec().GetArgv()
	a.mu.Lock()
	cold := a.generation == 0 || a.frozen
	a.mu.Unlock()
	if cold {
		return connect.NewError(connect.CodeFailedPrecondition, errors.New("frozen"))
	}
	if string(argv[0]) == "refuse" {
		return connect.NewError(connect.CodeResourceExhausted, errors.New("no more processes"))
	}
	a.mu.Lock()
	if a.procs[req.Msg.GetProcessId()] != nil {
		a.mu.Unlock()
		return connect.NewError(connect.CodeAlreadyExists, errors.New("exists"))
	}
	p := &fakeProc{changed: make(chan struct{}), signal: make(chan int32, 1)}
	a.procs[req.Msg.GetProcessId()] = p
	a.runs++
	a.mu.Unlock()
	go p.run(argv)
	return a.follow(ctx, p, 0, stream)
}

func (a *fakeAgent) Follow(ctx context.Context, req *connect.Request[agentv1.FollowRequest], stream *connect.ServerStream[agentv1.ProcessFrame]) error {
	p, err := a.find(req.Msg.GetProcessId())
	if err != nil {
		return err
	}
	return a.follow(ctx, p, req.Msg.GetAfterSeq(), stream)
}

func (a *fakeAgent) follow(ctx context.Context, p *fakeProc, after uint64, stream *connect.ServerStream[agentv1.ProcessFrame]) error {
	for {
		p.mu.Lock()
		if after < p.base {
			p.mu.Unlock()
			return connect.NewError(connect.CodeOutOfRange, errors.New("acknowledged already"))
		}
		frames, changed := p.frames[after-p.base:], p.changed
		p.mu.Unlock()
		for _, f := range frames {
			after = f.GetSeq()
			if a.frame != nil {
				f = a.frame(f)
			}
			if err := stream.Send(f); err != nil {
				return err
			}
			if f.GetExited() != nil {
				return nil
			}
		}
		if len(frames) > 0 {
			continue
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// emit adds a frame, waiting while the ring is full.
func (p *fakeProc) emit(f *agentv1.ProcessFrame) {
	p.mu.Lock()
	for p.bytes > fakeRing {
		changed := p.changed
		p.mu.Unlock()
		<-changed
		p.mu.Lock()
	}
	f.Seq = p.base + uint64(len(p.frames)) + 1
	p.frames = append(p.frames, f)
	p.bytes += len(f.GetOutput().GetData())
	p.exited = f.GetExited() != nil
	p.wakeLocked()
	p.mu.Unlock()
}

func (p *fakeProc) wakeLocked() {
	close(p.changed)
	p.changed = make(chan struct{})
}

func (p *fakeProc) output(s agentv1.Stream, data []byte) {
	p.emit(&agentv1.ProcessFrame{Kind: &agentv1.ProcessFrame_Output{Output: &agentv1.Output{Stream: s, Data: data}}})
}

// pattern is the output of the program "print": the same for every run.
func pattern(n int) []byte {
	rnd := rand.NewChaCha8([32]byte{1})
	b := make([]byte, n)
	_, _ = rnd.Read(b)
	return b
}

func (p *fakeProc) run(argv [][]byte) {
	p.emit(&agentv1.ProcessFrame{Kind: &agentv1.ProcessFrame_Started{Started: &agentv1.Started{OsPid: 42, At: timestamppb.Now()}}})
	exit := &agentv1.Exited{At: timestamppb.Now()}
	code := int32(0)
	exit.Code = &code
	switch string(argv[0]) {
	case "print":
		n, _ := strconv.Atoi(string(argv[1]))
		for data := pattern(n); len(data) > 0; {
			k := min(len(data), 32<<10)
			p.output(agentv1.Stream_STREAM_STDOUT, data[:k])
			data = data[k:]
		}
	case "cat":
		p.cat()
	case "sleep":
		sig := <-p.signal
		exit.Code, exit.Signal = nil, fmt.Sprintf("SIG%d", sig)
	}
	p.emit(&agentv1.ProcessFrame{Kind: &agentv1.ProcessFrame_Exited{Exited: exit}})
}

func (p *fakeProc) cat() {
	for {
		p.mu.Lock()
		data, closed, changed := p.stdin, p.closed, p.changed
		p.stdin = nil
		p.mu.Unlock()
		for len(data) > 0 {
			k := min(len(data), 32<<10)
			p.output(agentv1.Stream_STREAM_STDOUT, data[:k])
			data = data[k:]
		}
		if closed {
			return
		}
		<-changed
	}
}

func (a *fakeAgent) Ack(_ context.Context, req *connect.Request[agentv1.AckRequest]) (*connect.Response[agentv1.AckResponse], error) {
	for _, ack := range req.Msg.GetAcks() {
		p, err := a.find(ack.GetProcessId())
		if err != nil {
			continue
		}
		p.mu.Lock()
		for len(p.frames) > 0 && p.frames[0].GetSeq() <= ack.GetSeq() {
			p.bytes -= len(p.frames[0].GetOutput().GetData())
			p.frames = p.frames[1:]
			p.base++
		}
		gone := p.exited && len(p.frames) == 0
		p.wakeLocked()
		p.mu.Unlock()
		if gone {
			a.mu.Lock()
			delete(a.procs, ack.GetProcessId())
			a.mu.Unlock()
		}
	}
	return connect.NewResponse(&agentv1.AckResponse{}), nil
}

func (a *fakeAgent) Check(_ context.Context, req *connect.Request[agentv1.CheckRequest]) (*connect.Response[agentv1.CheckResponse], error) {
	if err := userError(req.Msg.GetUser()); err != nil {
		return nil, err
	}
	return connect.NewResponse(&agentv1.CheckResponse{}), nil
}

func (a *fakeAgent) Signal(_ context.Context, req *connect.Request[agentv1.SignalRequest]) (*connect.Response[agentv1.SignalResponse], error) {
	p, err := a.find(req.Msg.GetProcessId())
	if err != nil {
		return nil, err
	}
	select {
	case p.signal <- req.Msg.GetSignal():
	default:
	}
	return connect.NewResponse(&agentv1.SignalResponse{}), nil
}

func (a *fakeAgent) WriteStdin(_ context.Context, req *connect.Request[agentv1.WriteStdinRequest]) (*connect.Response[agentv1.WriteStdinResponse], error) {
	p, err := a.find(req.Msg.GetProcessId())
	if err != nil {
		return nil, err
	}
	if len(req.Msg.GetData()) > 256<<10 {
		return nil, connect.NewError(connect.CodeInvalidArgument, errors.New("too much"))
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.stdin = append(p.stdin, req.Msg.GetData()...)
	p.closed = req.Msg.GetClose()
	p.wakeLocked()
	return connect.NewResponse(&agentv1.WriteStdinResponse{
		Offset: req.Msg.GetOffset() + uint64(len(req.Msg.GetData())), Closed: p.closed,
	}), nil
}

func (a *fakeAgent) Resize(_ context.Context, req *connect.Request[agentv1.ResizeRequest]) (*connect.Response[agentv1.ResizeResponse], error) {
	_, err := a.find(req.Msg.GetProcessId())
	return connect.NewResponse(&agentv1.ResizeResponse{}), err
}

func (a *fakeAgent) List(context.Context, *connect.Request[agentv1.ListRequest]) (*connect.Response[agentv1.ListResponse], error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	resp := new(agentv1.ListResponse)
	for id := range a.procs {
		resp.Processes = append(resp.Processes, &agentv1.ProcessInfo{ProcessId: id})
	}
	return connect.NewResponse(resp), nil
}

func fileErr() error {
	err := connect.NewError(connect.CodeNotFound, errors.New("no such file"))
	if d, derr := connect.NewErrorDetail(&agentv1.FileError{Reason: agentv1.FileErrorReason_FILE_ERROR_REASON_NOT_FOUND, Field: "path"}); derr == nil {
		err.AddDetail(d)
	}
	return err
}

func (a *fakeAgent) file(path []byte) ([]byte, bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	b, ok := a.files[string(path)]
	return b, ok
}

func (a *fakeAgent) Stat(_ context.Context, req *connect.Request[agentv1.StatRequest]) (*connect.Response[agentv1.StatResponse], error) {
	b, ok := a.file(req.Msg.GetPath())
	if !ok {
		return nil, fileErr()
	}
	return connect.NewResponse(&agentv1.StatResponse{Entry: &agentv1.Entry{Path: req.Msg.GetPath(), Size: uint64(len(b))}}), nil
}

func (a *fakeAgent) ListDir(context.Context, *connect.Request[agentv1.ListDirRequest]) (*connect.Response[agentv1.ListDirResponse], error) {
	return connect.NewResponse(&agentv1.ListDirResponse{}), nil
}

func (a *fakeAgent) Read(_ context.Context, req *connect.Request[agentv1.ReadRequest], stream *connect.ServerStream[agentv1.ReadResponse]) error {
	if string(req.Msg.GetPath()) == "/huge-chunk" {
		_ = stream.Send(&agentv1.ReadResponse{Kind: &agentv1.ReadResponse_Entry{Entry: &agentv1.Entry{}}})
		return stream.Send(&agentv1.ReadResponse{Kind: &agentv1.ReadResponse_Data{Data: make([]byte, 300<<10)}})
	}
	b, ok := a.file(req.Msg.GetPath())
	if !ok {
		return fileErr()
	}
	if err := stream.Send(&agentv1.ReadResponse{Kind: &agentv1.ReadResponse_Entry{Entry: &agentv1.Entry{Size: uint64(len(b))}}}); err != nil {
		return err
	}
	for len(b) > 0 {
		k := min(len(b), 256<<10)
		if err := stream.Send(&agentv1.ReadResponse{Kind: &agentv1.ReadResponse_Data{Data: b[:k]}}); err != nil {
			return err
		}
		b = b[k:]
	}
	return nil
}

func (a *fakeAgent) Write(_ context.Context, stream *connect.ClientStream[agentv1.WriteRequest]) (*connect.Response[agentv1.WriteResponse], error) {
	var path string
	var buf bytes.Buffer
	commit := false
	for stream.Receive() {
		switch k := stream.Msg().GetKind().(type) {
		case *agentv1.WriteRequest_Header:
			path = string(k.Header.GetPath())
			if path == "/full" {
				return nil, connect.NewError(connect.CodeResourceExhausted, errors.New("disk full"))
			}
		case *agentv1.WriteRequest_Data:
			buf.Write(k.Data)
		case *agentv1.WriteRequest_Commit:
			commit = true
		}
	}
	if err := stream.Err(); err != nil || !commit {
		return nil, connect.NewError(connect.CodeAborted, errors.New("no commit"))
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.files[path] = buf.Bytes()
	return connect.NewResponse(&agentv1.WriteResponse{Entry: &agentv1.Entry{Size: uint64(buf.Len())}}), nil
}

func (a *fakeAgent) Mkdir(context.Context, *connect.Request[agentv1.MkdirRequest]) (*connect.Response[agentv1.MkdirResponse], error) {
	return connect.NewResponse(&agentv1.MkdirResponse{}), nil
}

func (a *fakeAgent) Move(context.Context, *connect.Request[agentv1.MoveRequest]) (*connect.Response[agentv1.MoveResponse], error) {
	return connect.NewResponse(&agentv1.MoveResponse{}), nil
}

func (a *fakeAgent) Copy(context.Context, *connect.Request[agentv1.CopyRequest]) (*connect.Response[agentv1.CopyResponse], error) {
	return connect.NewResponse(&agentv1.CopyResponse{}), nil
}

func (a *fakeAgent) Remove(context.Context, *connect.Request[agentv1.RemoveRequest]) (*connect.Response[agentv1.RemoveResponse], error) {
	return connect.NewResponse(&agentv1.RemoveResponse{}), nil
}
