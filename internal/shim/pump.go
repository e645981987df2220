package shim

import (
	"context"
	"errors"
	"fmt"
	"time"

	"connectrpc.com/connect"
	agentv1 "github.com/space-sandbox/space/internal/gen/space/agent/v1"
	nodev1 "github.com/space-sandbox/space/internal/gen/space/node/v1"
	"github.com/space-sandbox/space/internal/journal"
	"google.golang.org/protobuf/types/known/timestamppb"
)

const (
	startTimeout  = 10 * time.Second // until a caller is told that the start is pending
	minBackoff    = 10 * time.Millisecond
	maxBackoff    = time.Second
	closePatience = time.Second // for the end of a stream after its last frame
	maxNonsense   = 5           // broken streams in a row without a good frame between them
)

var (
	errNonsense = errors.New("the agent's frames make no sense")
	errLost     = errors.New("the agent has lost a process")
	errRefused  = errors.New("the agent refused the start")
)

// feed is one process's way from the agent to the journal. Only its pump uses it.
type feed struct {
	t    *table
	p    *process
	a    *attempt
	last uint64 // sequence number of the last frame that is journalled
	done bool
	pty  bool
}

// pump carries p's frames to the journal until the exit is journalled or the table stops. A stream that breaks is
// resumed after the last journalled frame.
func (t *table) pump(p *process, a *attempt) {
	f := &feed{t: t, p: p, a: a, pty: p.rec.Record().GetSpec().GetPty() != nil}
	late := time.AfterFunc(startTimeout, func() {
		a.report(connect.NewError(connect.CodeDeadlineExceeded, errors.New("the start is pending: the guest has not answered")))
	})
	defer late.Stop()
	backoff, nonsense := minBackoff, 0
	for {
		before := f.last
		err := f.attach(t.ctx)
		switch {
		case f.done:
			t.forget(p)
			return
		case t.ctx.Err() != nil:
			a.report(errNotRunning)
			return
		case errors.Is(err, journal.ErrSealed), errors.Is(err, journal.ErrNotFound): // removed, or about to stop
			t.forget(p)
			a.report(err)
			return
		case errors.Is(err, errRefused):
			t.refused(p, a, guestError(errors.Unwrap(err)))
			return
		}
		if f.last > before {
			backoff, nonsense = minBackoff, 0
		}
		if errors.Is(err, errNonsense) {
			nonsense++
		}
		if errors.Is(err, errLost) || nonsense >= maxNonsense {
			a.report(connect.NewError(connect.CodeUnavailable, err))
			t.lost(fmt.Errorf("process %s: %w", p.rec.ID(), err))
			return
		}
		t.log.Debug("process stream broke", "process", p.rec.ID(), "after", f.last, "error", err)
		pause(t.ctx, backoff)
		backoff = min(2*backoff, maxBackoff)
	}
}

// refusal wraps the agent's answer to Run that means: nothing was started.
type refusal struct{ cause error }

// Error implements error.
func (r *refusal) Error() string { return errRefused.Error() + ": " + r.cause.Error() }

// Is makes errors.Is recognise the class.
func (r *refusal) Is(target error) bool { return target == errRefused }

// Unwrap returns the cause.
func (r *refusal) Unwrap() error { return r.cause }

// attach opens a stream and journals its frames until it ends. Run is tried only while no frame was ever seen; the
// agent starts a process ID once, however often it is asked.
func (f *feed) attach(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	id := string(f.p.rec.ID())
	if f.last == 0 {
		err := f.consume(cancel)(f.t.guest.procs.Run(ctx, connect.NewRequest(&agentv1.RunRequest{ProcessId: id, Spec: f.p.rec.Record().GetSpec()})))
		if f.last > 0 || f.done || ctx.Err() != nil {
			return err
		}
		switch code := connect.CodeOf(err); {
		case !connect.IsWireError(err) || code == connect.CodeUnavailable:
			return err // it may run or not: asking again shows
		case code == connect.CodeInvalidArgument, code == connect.CodeResourceExhausted, code == connect.CodeFailedPrecondition,
			code == connect.CodePermissionDenied, code == connect.CodeUnauthenticated, code == connect.CodeUnimplemented:
			return &refusal{cause: err}
		case code != connect.CodeAlreadyExists:
			return err
		}
	}
	err := f.consume(cancel)(f.t.guest.procs.Follow(ctx, connect.NewRequest(&agentv1.FollowRequest{ProcessId: id, AfterSeq: f.last})))
	if f.last > 0 && !f.done && connect.IsWireError(err) && connect.CodeOf(err) == connect.CodeNotFound {
		return fmt.Errorf("%w: %w", errLost, err)
	}
	return err
}

// consume returns what journals the frames of a stream. Closing a stream waits for its end, so one that may go on is
// cancelled first.
func (f *feed) consume(cancel func()) func(*connect.ServerStreamForClient[agentv1.ProcessFrame], error) error {
	return func(stream *connect.ServerStreamForClient[agentv1.ProcessFrame], err error) error {
		if err != nil {
			return err
		}
		for err == nil && !f.done && stream.Receive() {
			err = f.take(stream.Msg())
		}
		if err == nil && !f.done {
			err = stream.Err()
		}
		patience := closePatience
		if !f.done {
			patience = 0
		}
		defer time.AfterFunc(patience, cancel).Stop()
		_ = stream.Close() // its error was seen
		return err
	}
}

// take journals one frame and asks for its acknowledgement. Frames that were journalled before are skipped; a gap is
// an error, so that the stream is opened again where the journal ends.
func (f *feed) take(frame *agentv1.ProcessFrame) error {
	switch seq := frame.GetSeq(); {
	case seq != 0 && seq <= f.last:
		return nil
	case seq != f.last+1:
		return fmt.Errorf("%w: frame %d where %d is due", errNonsense, seq, f.last+1)
	}
	if err := f.write(frame); err != nil {
		return err
	}
	f.last = frame.GetSeq()
	f.done = frame.GetExited() != nil
	f.t.acks.note(f.p.rec.ID(), f.last, uint64(len(frame.GetOutput().GetData())), f.done)
	return nil
}

// write journals one frame. A journal that cannot be written (a full disk) stops the process's output, it loses none:
// what is not acknowledged stays in the guest.
func (f *feed) write(frame *agentv1.ProcessFrame) error {
	put, err := f.entry(frame)
	if err != nil {
		return err
	}
	for backoff := minBackoff; ; backoff = min(2*backoff, maxBackoff) {
		err := put()
		switch {
		case err == nil:
			return nil
		case errors.Is(err, journal.ErrOrder), errors.Is(err, journal.ErrTooLarge):
			return fmt.Errorf("%w: %w", errNonsense, err)
		case errors.Is(err, journal.ErrSealed), errors.Is(err, journal.ErrNotFound):
			return err
		}
		f.t.log.Error("cannot journal output", "process", f.p.rec.ID(), "error", err)
		if !pause(f.t.ctx, backoff) {
			return f.t.ctx.Err()
		}
	}
}

// entry checks a frame and returns what journals it.
func (f *feed) entry(frame *agentv1.ProcessFrame) (func() error, error) {
	rec := f.p.rec
	switch k := frame.GetKind().(type) {
	case *agentv1.ProcessFrame_Started:
		ev := &nodev1.Started{OsPid: k.Started.GetOsPid(), At: sane(k.Started.GetAt())}
		return func() error {
			if rec.LastID() > 0 {
				return journal.ErrOrder
			}
			err := rec.AppendStarted(ev)
			if err == nil {
				f.t.touch()
				f.a.report(nil)
			}
			return err
		}, nil
	case *agentv1.ProcessFrame_Output:
		stream := k.Output.GetStream()
		if f.pty != (stream == agentv1.Stream_STREAM_PTY) {
			return nil, fmt.Errorf("%w: output on %v", errNonsense, stream)
		}
		return func() error {
			f.t.touch()
			return rec.AppendOutput(stream, k.Output.GetData())
		}, nil
	case *agentv1.ProcessFrame_Exited:
		ev := saneExit(k.Exited)
		return func() error {
			f.t.touch()
			err := rec.AppendExited(ev)
			if err != nil && rec.Exited() { // journalled, but not yet on stable storage
				f.t.log.Error("cannot sync the journal", "process", rec.ID(), "error", err)
				return nil
			}
			return err
		}, nil
	}
	return nil, fmt.Errorf("%w: a frame without content", errNonsense)
}

// sane replaces a time that the guest cannot mean.
func sane(at *timestamppb.Timestamp) *timestamppb.Timestamp {
	if at.CheckValid() != nil {
		return timestamppb.Now()
	}
	return at
}

// saneExit copies the defined part of an exit, bounded.
func saneExit(in *agentv1.Exited) *agentv1.Exited {
	signal := clean(in.GetSignal())
	return &agentv1.Exited{
		Code: in.Code, Signal: signal[:min(len(signal), 32)], TimedOut: in.GetTimedOut(),
		OomKilled: in.GetOomKilled(), CoreDumped: in.GetCoreDumped(), At: sane(in.GetAt()),
	}
}
