package archive

import (
	"context"
	"errors"
	"io"
	"time"

	"connectrpc.com/connect"
	nodev1 "github.com/space-sandbox/space/internal/gen/space/node/v1"
	"github.com/space-sandbox/space/internal/journal"
	"github.com/space-sandbox/space/internal/sandbox"
	"google.golang.org/protobuf/proto"
)

const (
	maxStreams   = 1024
	maxPageBytes = 4 << 20 // a page of processes ends early rather than grow past this
)

// Reading answers from a journal, dead or alive.
type Reading struct {
	journal *journal.Journal
	reason  func() string
	slots   chan struct{} // one per open stream
}

// NewReading returns the reading half of SandboxService over j. reason is asked when a stream comes to the end of a
// sealed journal.
func NewReading(j *journal.Journal, reason func() string) *Reading {
	return &Reading{journal: j, reason: reason, slots: make(chan struct{}, maxStreams)}
}

// Streams is the number of open streams.
func (r *Reading) Streams() int { return len(r.slots) }

// acquire takes a stream's slot; the caller gives it back with release.
func (r *Reading) acquire() error {
	select {
	case r.slots <- struct{}{}:
		return nil
	default:
		return connect.NewError(connect.CodeResourceExhausted, errors.New("too many streams are open on this sandbox"))
	}
}

func (r *Reading) release() { <-r.slots }

// Find returns a process by the ID a client sent, or a Connect error.
func (r *Reading) Find(text string) (*journal.Process, error) {
	id, err := sandbox.ParseProcessID(text)
	if err != nil {
		return nil, connect.NewError(connect.CodeInvalidArgument, err)
	}
	p, err := r.journal.Process(id)
	if err != nil {
		return nil, Error(err)
	}
	return p, nil
}

// Error turns an error of the journal into a Connect error.
func Error(err error) error {
	var dropped *journal.DroppedError
	switch {
	case errors.As(err, &dropped):
		out := connect.NewError(connect.CodeOutOfRange, dropped)
		if d, derr := connect.NewErrorDetail(&nodev1.OutputDropped{
			Stream: dropped.Stream, FromOffset: dropped.From, ToOffset: dropped.To,
		}); derr == nil {
			out.AddDetail(d)
		}
		return out
	case errors.Is(err, journal.ErrOutOfRange):
		return connect.NewError(connect.CodeOutOfRange, err)
	case errors.Is(err, journal.ErrTooLarge):
		return connect.NewError(connect.CodeInvalidArgument, err)
	case errors.Is(err, journal.ErrNotFound):
		return connect.NewError(connect.CodeNotFound, journal.ErrNotFound)
	case errors.Is(err, journal.ErrCorrupt):
		return connect.NewError(connect.CodeDataLoss, err)
	case errors.Is(err, context.Canceled):
		return connect.NewError(connect.CodeCanceled, err)
	case errors.Is(err, context.DeadlineExceeded):
		return connect.NewError(connect.CodeDeadlineExceeded, err)
	}
	return connect.NewError(connect.CodeInternal, err)
}

// GetProcess answers at once, or with wait_ms after the exit, at the latest after that time.
func (r *Reading) GetProcess(ctx context.Context, req *connect.Request[nodev1.GetProcessRequest]) (*connect.Response[nodev1.GetProcessResponse], error) {
	p, err := r.Find(req.Msg.GetProcessId())
	if err != nil {
		return nil, err
	}
	wait := min(time.Duration(req.Msg.GetWaitMs())*time.Millisecond, sandbox.MaxWaitS*time.Second)
	if wait > 0 {
		ctx, cancel := context.WithTimeout(ctx, wait)
		defer cancel()
		AwaitExit(ctx, p)
	}
	return connect.NewResponse(&nodev1.GetProcessResponse{Process: p.Record()}), nil
}

// AwaitExit waits until p has exited, cannot any more, or ctx ends; it reports whether it has exited.
func AwaitExit(ctx context.Context, p *journal.Process) bool {
	for {
		changed := p.Changed()
		if p.Exited() {
			return true
		}
		if p.Sealed() {
			return false
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return false
		}
	}
}

// ListProcesses answers a page.
func (r *Reading) ListProcesses(_ context.Context, req *connect.Request[nodev1.ListProcessesRequest]) (*connect.Response[nodev1.ListProcessesResponse], error) {
	var after sandbox.ProcessID
	if text := req.Msg.GetAfter(); text != "" {
		var err error
		if after, err = sandbox.ParseProcessID(text); err != nil {
			return nil, connect.NewError(connect.CodeInvalidArgument, err)
		}
	}
	limit := int(req.Msg.GetLimit())
	if limit == 0 {
		limit = sandbox.DefaultPageLimit
	}
	procs, more := r.journal.List(after, min(limit, sandbox.MaxPageLimit))
	resp := &nodev1.ListProcessesResponse{More: more}
	size := 0
	for i, p := range procs {
		rec := p.Record()
		if size += proto.Size(rec); i > 0 && size > maxPageBytes {
			resp.More = true
			break
		}
		resp.Processes = append(resp.Processes, rec)
	}
	return connect.NewResponse(resp), nil
}

// StreamEvents sends a process's events until its exit, or until the journal ends, which becomes `interrupted`.
func (r *Reading) StreamEvents(ctx context.Context, req *connect.Request[nodev1.StreamEventsRequest], stream *connect.ServerStream[nodev1.Event]) error {
	p, err := r.Find(req.Msg.GetProcessId())
	if err != nil {
		return err
	}
	return r.Stream(ctx, p, req.Msg.AfterId, stream.Send)
}

// Stream is StreamEvents for a process that was found already.
func (r *Reading) Stream(ctx context.Context, p *journal.Process, after *uint64, send func(*nodev1.Event) error) error {
	if err := r.acquire(); err != nil {
		return err
	}
	defer r.release()
	reader := p.NewReader(after)
	defer reader.Close()
	for {
		ev, err := reader.Next(ctx)
		if errors.Is(err, io.EOF) {
			if p.Exited() {
				return nil
			}
			return send(Interrupted(r.reason()))
		}
		if err != nil {
			return Error(err)
		}
		if err := send(ev); err != nil {
			return err
		}
	}
}

// Interrupted is the event that ends a stream for a reason.
func Interrupted(reason string) *nodev1.Event {
	in := &nodev1.Interrupted{Reason: reason}
	switch reason {
	case "sandbox_suspended", "sandbox_paused", "server_draining":
		in.Retryable, in.RetryAfterS = true, 1
	}
	return &nodev1.Event{Kind: &nodev1.Event_Interrupted{Interrupted: in}}
}

// ReadOutput sends a stream's bytes.
func (r *Reading) ReadOutput(ctx context.Context, req *connect.Request[nodev1.ReadOutputRequest], stream *connect.ServerStream[nodev1.ReadOutputResponse]) error {
	p, err := r.Find(req.Msg.GetProcessId())
	if err != nil {
		return err
	}
	if err := r.acquire(); err != nil {
		return err
	}
	defer r.release()
	reader, err := p.NewOutputReader(req.Msg.GetStream(), req.Msg.GetFrom(), req.Msg.GetFollow())
	if err != nil {
		return Error(err)
	}
	defer reader.Close()
	for {
		data, at, err := reader.Next(ctx)
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return Error(err)
		}
		if err := stream.Send(&nodev1.ReadOutputResponse{Data: data, Offset: at}); err != nil {
			return err
		}
	}
}
