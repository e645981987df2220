package guestio

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"connectrpc.com/connect"

	"github.com/space-sandbox/space/internal/control"
	agentv1 "github.com/space-sandbox/space/internal/gen/space/agent/v1"
	nodev1 "github.com/space-sandbox/space/internal/gen/space/node/v1"
	"github.com/space-sandbox/space/internal/gen/space/node/v1/nodev1connect"
	"github.com/space-sandbox/space/internal/sandbox"
)

// input is the guest's side of a process: it takes at most step bytes a call and room bytes in all.
type input struct {
	nodev1connect.SandboxServiceClient // the calls that are not overridden are not made
	taken                              []byte
	step, room                         int
	closes                             int
	calls                              []*nodev1.WriteStdinRequest
	err                                error
	failAt                             int // number of the call that answers err, from 1
	bounded                            bool
}

func (g *input) WriteStdin(ctx context.Context, r *connect.Request[nodev1.WriteStdinRequest]) (*connect.Response[nodev1.WriteStdinResponse], error) {
	_, g.bounded = ctx.Deadline()
	g.calls = append(g.calls, r.Msg)
	if g.err != nil && len(g.calls) >= g.failAt {
		return nil, g.err
	}
	data, at := r.Msg.GetData(), uint64(len(g.taken))
	if r.Msg.Offset != nil {
		if r.Msg.GetOffset() > at {
			return nil, connect.NewError(connect.CodeOutOfRange, errors.New("gap"))
		}
		data = data[min(at-r.Msg.GetOffset(), uint64(len(data))):]
	}
	data = data[:min(len(data), g.step, g.room-len(g.taken))]
	g.taken = append(g.taken, data...)
	if r.Msg.GetClose() {
		g.closes++
	}
	return connect.NewResponse(&nodev1.WriteStdinResponse{Offset: uint64(len(g.taken))}), nil
}

func newInput() *input { return &input{step: StdinChunk, room: 1 << 30} }

func (g *input) write(body io.Reader, length int64, in Stdin) (*httptest.ResponseRecorder, error) {
	rec, r := httptest.NewRecorder(), httptest.NewRequest(http.MethodPost, "/", body)
	r.ContentLength = length
	in.Process = "p1"
	return rec, WriteStdin(rec, r, &control.Guest{Processes: g}, in)
}

func pattern(n int) []byte {
	out := make([]byte, n)
	for i := range out {
		out[i] = byte(i ^ i>>8 ^ i>>16)
	}
	return out
}

func at(n uint64) *uint64 { return &n }

// TestStdinArrivesInOrderWhateverTheGuestTakes covers sizes around the chunk and guests that take less than they are
// offered: no byte may be lost, doubled or moved.
func TestStdinArrivesInOrderWhateverTheGuestTakes(t *testing.T) {
	for _, size := range []int{0, 1, StdinChunk - 1, StdinChunk, StdinChunk + 1, 2 * StdinChunk, 2*StdinChunk + 17} {
		for _, step := range []int{StdinChunk, StdinChunk/3 + 1} {
			for _, offset := range []*uint64{nil, at(0)} {
				for _, chunked := range []bool{false, true} {
					g, want := newInput(), pattern(size)
					g.step = step
					length := int64(size)
					var body io.Reader = bytes.NewReader(want)
					if chunked {
						length, body = -1, iotest.HalfReader(body)
					}
					rec, err := g.write(body, length, Stdin{Offset: offset, Close: true})
					if err != nil || rec.Code != http.StatusNoContent {
						t.Fatalf("%d bytes by %d: %d, %v", size, step, rec.Code, err)
					}
					if !bytes.Equal(g.taken, want) {
						t.Errorf("%d bytes by %d (offset %v, chunked %v): %d arrived, not the same", size, step, offset, chunked, len(g.taken))
					}
					if got := rec.Header().Get(StdinOffsetHeader); got != strconv.Itoa(size) {
						t.Errorf("%d bytes: the header says %q", size, got)
					}
					if last := g.calls[len(g.calls)-1]; g.closes == 0 || !last.GetClose() {
						t.Errorf("%d bytes: the input stays open", size)
					}
					if !g.bounded {
						t.Error("a call has no deadline")
					}
				}
			}
		}
	}
}

func TestStdinClosesOnlyWhenAsked(t *testing.T) {
	g := newInput()
	if _, err := g.write(strings.NewReader("x"), 1, Stdin{}); err != nil || g.closes != 0 {
		t.Errorf("%d closes, %v", g.closes, err)
	}
}

// TestStdinRepeatIsNotWrittenTwice sends a body again from an offset that the guest is past.
func TestStdinRepeatIsNotWrittenTwice(t *testing.T) {
	g := newInput()
	g.taken = []byte("hello ")
	for range 2 {
		rec, err := g.write(strings.NewReader("llo world"), 9, Stdin{Offset: at(2)})
		if err != nil || string(g.taken) != "hello world" || rec.Header().Get(StdinOffsetHeader) != "11" {
			t.Fatalf("%q, header %q, %v", g.taken, rec.Header().Get(StdinOffsetHeader), err)
		}
	}
	if _, err := g.write(strings.NewReader("!"), 1, Stdin{Offset: at(50)}); sandbox.CodeOf(err) != sandbox.CodeInvalidRequest {
		t.Errorf("a gap: %v", err)
	}
}

// TestFullStdinTellsWhereToGoOn: a client that goes on from the header's offset must end up with every byte once.
func TestFullStdinTellsWhereToGoOn(t *testing.T) {
	for _, offset := range []*uint64{nil, at(0)} {
		g, want := newInput(), pattern(StdinChunk+100)
		g.room = StdinChunk + 40
		rec, err := g.write(bytes.NewReader(want), int64(len(want)), Stdin{Offset: offset, Close: true})
		e := sandbox.AsError(err)
		if e.Code != sandbox.CodeConflict || !e.Retryable || e.Details.Cause != "stdin_full" || e.Details.Remediation == "" {
			t.Fatalf("%+v", e)
		}
		header := rec.Header().Get(StdinOffsetHeader)
		from, err := strconv.ParseUint(header, 10, 64)
		if err != nil || from != uint64(StdinChunk+40) {
			t.Fatalf("header %q", header)
		}
		g.room = 1 << 30
		rest := want[from:]
		if _, err := g.write(bytes.NewReader(rest), int64(len(rest)), Stdin{Offset: &from, Close: true}); err != nil || !bytes.Equal(g.taken, want) {
			t.Errorf("%d bytes after the repeat, %v", len(g.taken), err)
		}
	}
}

// TestCutStdinIsNotClosed: what a client sent before it broke off is passed on, the end of input is not.
func TestCutStdinIsNotClosed(t *testing.T) {
	broken := io.MultiReader(strings.NewReader("half"), iotest.ErrReader(io.ErrUnexpectedEOF))
	for name, c := range map[string]struct {
		body   io.Reader
		length int64
	}{
		"shorter than its length": {strings.NewReader("half"), 8},
		"broken chunks":           {broken, -1},
	} {
		g := newInput()
		rec, err := g.write(c.body, c.length, Stdin{Close: true})
		if sandbox.CodeOf(err) != sandbox.CodeInvalidRequest || g.closes != 0 {
			t.Errorf("%s: %v, %d closes", name, err, g.closes)
		}
		if string(g.taken) != "half" || rec.Header().Get(StdinOffsetHeader) != "4" {
			t.Errorf("%s: took %q, header %q", name, g.taken, rec.Header().Get(StdinOffsetHeader))
		}
	}
}

// TestStdinErrorAfterAPartKeepsTheOffset fails the third call: what the first ones took must still be told.
func TestStdinErrorAfterAPartKeepsTheOffset(t *testing.T) {
	g := newInput()
	g.err, g.failAt = connect.NewError(connect.CodeUnavailable, errors.New("gone")), 3
	rec, err := g.write(bytes.NewReader(pattern(3*StdinChunk)), 3*StdinChunk, Stdin{})
	if sandbox.CodeOf(err) != sandbox.CodeServiceUnavailable || rec.Header().Get(StdinOffsetHeader) != strconv.Itoa(StdinChunk) {
		t.Errorf("%v, header %q", err, rec.Header().Get(StdinOffsetHeader))
	}
	g = newInput()
	g.err, g.failAt = connect.NewError(connect.CodeUnavailable, errors.New("gone")), 1
	rec, err = g.write(strings.NewReader("x"), 1, Stdin{})
	if _, told := rec.Header()[StdinOffsetHeader]; err == nil || told {
		t.Errorf("%v: an offset nobody knows is told", err)
	}
}

// broken answers every call with one error.
type broken struct {
	nodev1connect.SandboxServiceClient
	err error
}

func (b broken) WriteStdin(context.Context, *connect.Request[nodev1.WriteStdinRequest]) (*connect.Response[nodev1.WriteStdinResponse], error) {
	return nil, b.err
}

func (b broken) Resize(context.Context, *connect.Request[nodev1.ResizeRequest]) (*connect.Response[nodev1.ResizeResponse], error) {
	return nil, b.err
}

func (b broken) Signal(context.Context, *connect.Request[nodev1.SignalRequest]) (*connect.Response[nodev1.SignalResponse], error) {
	return nil, b.err
}

// TestGuestErrorsAreMapped holds each call to the same table. The guest's own text must never be in a message.
func TestGuestErrorsAreMapped(t *testing.T) {
	for code, c := range map[connect.Code]struct {
		want      sandbox.Code
		retryable bool
	}{
		connect.CodeNotFound:           {sandbox.CodeNotFound, false},
		connect.CodeAlreadyExists:      {sandbox.CodeConflict, false},
		connect.CodeInvalidArgument:    {sandbox.CodeInvalidRequest, false},
		connect.CodeOutOfRange:         {sandbox.CodeInvalidRequest, false},
		connect.CodePermissionDenied:   {sandbox.CodeForbidden, false},
		connect.CodeFailedPrecondition: {sandbox.CodeConflict, false},
		connect.CodeAborted:            {sandbox.CodeConflict, true},
		connect.CodeResourceExhausted:  {sandbox.CodeServiceUnavailable, true},
		connect.CodeUnimplemented:      {sandbox.CodeFailedPrecondition, false},
		connect.CodeUnavailable:        {sandbox.CodeServiceUnavailable, true},
		connect.CodeDeadlineExceeded:   {sandbox.CodeServiceUnavailable, true},
		connect.CodeCanceled:           {sandbox.CodeServiceUnavailable, true},
		connect.CodeInternal:           {sandbox.CodeInternal, false},
		connect.CodeUnknown:            {sandbox.CodeInternal, false},
		connect.CodeDataLoss:           {sandbox.CodeInternal, false},
	} {
		cause := connect.NewError(code, errors.New("guest-text"))
		g := &control.Guest{Processes: broken{err: cause}}
		rec, r := httptest.NewRecorder(), httptest.NewRequest(http.MethodPost, "/", strings.NewReader("x"))
		_, signal := Signal(t.Context(), g, "p1", 15, agentv1.SignalTarget_SIGNAL_TARGET_PROCESS)
		for call, err := range map[string]error{
			"stdin":  WriteStdin(rec, r, g, Stdin{Process: "p1"}),
			"resize": Resize(t.Context(), g, "p1", 80, 24),
			"signal": signal,
		} {
			var e *sandbox.Error
			if !errors.As(err, &e) {
				t.Errorf("%s, %s: %v is not typed", call, code, err)
				continue
			}
			if e.Code != c.want || e.Retryable != c.retryable {
				t.Errorf("%s, %s: %s retryable %v, want %s %v", call, code, e.Code, e.Retryable, c.want, c.retryable)
			}
			if strings.Contains(e.Message+e.Details.Remediation+e.Details.Cause, "guest-text") {
				t.Errorf("%s, %s: the guest's text is in %+v", call, code, e)
			}
			if !errors.Is(err, cause) {
				t.Errorf("%s, %s: the cause is lost for the log", call, code)
			}
		}
		if rec.Body.Len() > 0 {
			t.Errorf("%s: something was answered before the error", code)
		}
	}
}

// obeying records what it is told.
type obeying struct {
	nodev1connect.SandboxServiceClient
	resize *nodev1.ResizeRequest
	signal *nodev1.SignalRequest
	bounds int
}

func (o *obeying) Resize(ctx context.Context, r *connect.Request[nodev1.ResizeRequest]) (*connect.Response[nodev1.ResizeResponse], error) {
	if _, ok := ctx.Deadline(); ok {
		o.bounds++
	}
	o.resize = r.Msg
	return connect.NewResponse(&nodev1.ResizeResponse{}), nil
}

func (o *obeying) Signal(ctx context.Context, r *connect.Request[nodev1.SignalRequest]) (*connect.Response[nodev1.SignalResponse], error) {
	if _, ok := ctx.Deadline(); ok {
		o.bounds++
	}
	o.signal = r.Msg
	return connect.NewResponse(&nodev1.SignalResponse{Pending: true}), nil
}

func TestResizeAndSignalArePassedOnWithADeadline(t *testing.T) {
	o := &obeying{}
	g := &control.Guest{Processes: o}
	if err := Resize(t.Context(), g, "p1", 300, 7); err != nil {
		t.Fatal(err)
	}
	if r := o.resize; r.GetProcessId() != "p1" || r.GetSize().GetCols() != 300 || r.GetSize().GetRows() != 7 {
		t.Errorf("resize %v", r)
	}
	resp, err := Signal(t.Context(), g, "p2", 9, agentv1.SignalTarget_SIGNAL_TARGET_TREE)
	if err != nil || !resp.GetPending() {
		t.Fatalf("%v, %v", resp, err)
	}
	if s := o.signal; s.GetProcessId() != "p2" || s.GetSignal() != 9 || s.GetTarget() != agentv1.SignalTarget_SIGNAL_TARGET_TREE {
		t.Errorf("signal %v", s)
	}
	if o.bounds != 2 {
		t.Errorf("%d of 2 calls have a deadline", o.bounds)
	}
}

func TestParseSignal(t *testing.T) {
	for name, want := range map[string]int32{
		"SIGHUP": 1, "SIGINT": 2, "SIGKILL": 9, "SIGTERM": 15, "SIGUSR1": 10, "SIGWINCH": 28, "SIGRTMIN": 34, "SIGRTMIN+0": 34,
		"SIGRTMIN+3": 37, "SIGRTMIN+30": 64,
		"": 0, "TERM": 0, "sigterm": 0, "15": 0, "SIGNOPE": 0, "SIGRTMIN+31": 0, "SIGRTMIN-1": 0, "SIGRTMIN3": 0, "SIGRTMIN+": 0,
		"SIGRTMIN++1": 0, "SIGRTMIN+-1": 0, "SIGRTMIN+x": 0, "SIG": 0,
	} {
		got, err := ParseSignal(name)
		if got != want || (err == nil) != (want != 0) {
			t.Errorf("%q: %d, %v; want %d", name, got, err, want)
		}
		if err != nil && sandbox.AsError(err).Details.Violations[0].Field != "signal" {
			t.Errorf("%q blames %+v", name, sandbox.AsError(err).Details)
		}
	}
}

func TestParseTarget(t *testing.T) {
	for word, want := range map[string]agentv1.SignalTarget{
		"": agentv1.SignalTarget_SIGNAL_TARGET_PROCESS, "process": agentv1.SignalTarget_SIGNAL_TARGET_PROCESS,
		"group": agentv1.SignalTarget_SIGNAL_TARGET_GROUP, "tree": 0, "Process": 0, "all": 0,
	} {
		got, err := ParseTarget(word)
		if got != want || (err == nil) != (want != 0) {
			t.Errorf("%q: %v, %v", word, got, err)
		}
	}
}

func FuzzParseSignal(f *testing.F) {
	for _, s := range []string{"SIGTERM", "SIGRTMIN+3", "SIGRTMIN+99999999999999999999", "SIGRTMIN+\x00", ""} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, name string) {
		n, err := ParseSignal(name)
		if err == nil && (n < 1 || n > 64 || !strings.HasPrefix(name, "SIG")) {
			t.Errorf("%q is taken for %d", name, n)
		}
	})
}

// TestWatchdogEndsAContextWithoutSteps waits for the end only: how long it takes is not the test's business.
func TestWatchdogEndsAContextWithoutSteps(t *testing.T) {
	ctx, dog, cancel := WithWatchdog(t.Context(), time.Millisecond)
	defer cancel()
	dog.Step()
	<-ctx.Done()
	if !errors.Is(context.Cause(ctx), context.DeadlineExceeded) {
		t.Errorf("cause %v", context.Cause(ctx))
	}
}

func TestPausedWatchdogKeepsQuiet(t *testing.T) {
	ctx, dog, cancel := WithWatchdog(t.Context(), time.Hour)
	dog.Pause()
	if dog.timer.Stop() {
		t.Error("the time runs on")
	}
	dog.Step()
	if !dog.timer.Stop() {
		t.Error("a step does not start the time anew")
	}
	dog.Step()
	cancel()
	if dog.timer.Stop() || !errors.Is(ctx.Err(), context.Canceled) || errors.Is(context.Cause(ctx), context.DeadlineExceeded) {
		t.Errorf("cancel leaves the timer or names the wrong cause: %v", context.Cause(ctx))
	}
}
