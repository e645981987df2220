package guestio

import (
	"context"
	"errors"
	"io"
	"net/http"
	"strconv"
	"strings"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

	"github.com/space-sandbox/space/internal/control"
	agentv1 "github.com/space-sandbox/space/internal/gen/space/agent/v1"
	nodev1 "github.com/space-sandbox/space/internal/gen/space/node/v1"
	"github.com/space-sandbox/space/internal/sandbox"
)

// StdinChunk is how much input one call to the guest carries.
const StdinChunk = 256 << 10

// StdinOffsetHeader tells how many bytes of input the process has taken in all.
const StdinOffsetHeader = "Space-Stdin-Offset"

// bodyReadTimeout is how long a client may take between two reads of its body.
const bodyReadTimeout = 60 * time.Second

// Stdin is one write to a process's input.
type Stdin struct {
	Process sandbox.ProcessID
	Offset  *uint64 // nil: at the end of what was written before
	Close   bool    // after the body
}

// WriteStdin streams the body of r to a process. It answers 204, or returns the error; both ways the header
// Space-Stdin-Offset says how far the process's input came, so that a caller can go on from there.
func WriteStdin(w http.ResponseWriter, r *http.Request, g *control.Guest, in Stdin) error {
	s := &stdinWriter{ctx: r.Context(), guest: g, id: string(in.Process), offset: in.Offset}
	rc := http.NewResponseController(w)
	buf := make([]byte, StdinChunk)
	var err error
	for err == nil {
		// Servers without deadlines (tests) answer ErrNotSupported; the body is then bounded by its connection.
		_ = rc.SetReadDeadline(time.Now().Add(bodyReadTimeout))
		n, rerr := io.ReadFull(r.Body, buf)
		last := errors.Is(rerr, io.EOF) || errors.Is(rerr, io.ErrUnexpectedEOF) && cleanEnd(r, s.read+int64(n))
		if rerr != nil && !last {
			err = sandbox.Errorf(sandbox.CodeInvalidRequest, "the request body was cut short").WithCause(rerr)
		}
		s.read += int64(n)
		if werr := s.write(buf[:n], last && in.Close); werr != nil {
			err = werr
		}
		if last {
			break
		}
	}
	_ = rc.SetReadDeadline(time.Time{})
	if s.known {
		w.Header().Set(StdinOffsetHeader, strconv.FormatUint(s.end, 10))
	}
	if err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

// cleanEnd tells the end of a body from a cut one: io.ReadFull reports both as io.ErrUnexpectedEOF.
func cleanEnd(r *http.Request, read int64) bool {
	if r.ContentLength >= 0 {
		return read == r.ContentLength
	}
	var one [1]byte
	_, err := r.Body.Read(one[:]) // a cut chunked body stays in error, one that ended answers EOF again
	return errors.Is(err, io.EOF)
}

// stdinWriter writes chunks in order. end is the guest's count of bytes taken, valid once known.
type stdinWriter struct {
	ctx    context.Context
	guest  *control.Guest
	id     string
	offset *uint64 // explicit position, or nil to append
	end    uint64
	known  bool
	read   int64
}

func (s *stdinWriter) write(data []byte, end bool) error {
	if len(data) == 0 && !end && s.known {
		return nil
	}
	if s.offset == nil && !s.known && len(data) > 0 {
		// Where the input stands now, so that a partial answer can be told from a whole one.
		if err := s.call(nil, nil, false); err != nil {
			return err
		}
	}
	for {
		want, before := s.end+uint64(len(data)), s.end
		if s.offset != nil {
			want, before = *s.offset+uint64(len(data)), *s.offset
		}
		if err := s.call(s.offset, data, end); err != nil {
			return err
		}
		if s.end >= want {
			if s.offset != nil {
				s.offset = &want
			}
			return nil
		}
		if s.end <= before {
			e := sandbox.Errorf(sandbox.CodeConflict, "the process does not read its input")
			e.Retryable, e.RetryAfter = true, time.Second
			e.Details.Cause = "stdin_full"
			return e.WithRemediation("send the rest from ?offset= with the value of the header " + StdinOffsetHeader)
		}
		data = data[s.end-before:]
		at := s.end
		s.offset = &at
	}
}

func (s *stdinWriter) call(offset *uint64, data []byte, end bool) error {
	ctx, cancel := context.WithTimeout(s.ctx, CallTimeout)
	defer cancel()
	resp, err := s.guest.Processes.WriteStdin(ctx, connect.NewRequest(&nodev1.WriteStdinRequest{
		ProcessId: s.id, Offset: offset, Data: data, Close: end,
	}))
	if err != nil {
		if connect.CodeOf(err) == connect.CodeFailedPrecondition {
			return sandbox.Errorf(sandbox.CodeConflict, "the process has no open input").WithCause(err).
				WithRemediation("create the command with \"stdin\": true or a pty, and write before it is closed")
		}
		return control.GuestError(err, "")
	}
	s.end, s.known = resp.Msg.GetOffset(), true
	return nil
}

// Resize sets a process's terminal size.
func Resize(ctx context.Context, g *control.Guest, id sandbox.ProcessID, cols, rows uint32) error {
	ctx, cancel := context.WithTimeout(ctx, CallTimeout)
	defer cancel()
	_, err := g.Processes.Resize(ctx, connect.NewRequest(&nodev1.ResizeRequest{
		ProcessId: string(id), Size: &agentv1.TerminalSize{Cols: cols, Rows: rows},
	}))
	if connect.CodeOf(err) == connect.CodeFailedPrecondition {
		return sandbox.Errorf(sandbox.CodeConflict, "the process has no terminal, or has ended").WithCause(err)
	}
	return control.GuestError(err, "")
}

// Signal sends a signal. The answer holds the process as it is afterwards.
func Signal(ctx context.Context, g *control.Guest, id sandbox.ProcessID, sig int32, target agentv1.SignalTarget) (*nodev1.SignalResponse, error) {
	ctx, cancel := context.WithTimeout(ctx, CallTimeout)
	defer cancel()
	resp, err := g.Processes.Signal(ctx, connect.NewRequest(&nodev1.SignalRequest{
		ProcessId: string(id), Signal: sig, Target: target,
	}))
	if err != nil {
		if connect.CodeOf(err) == connect.CodeFailedPrecondition {
			return nil, sandbox.Errorf(sandbox.CodeConflict, "the process is not running").WithCause(err)
		}
		return nil, control.GuestError(err, "")
	}
	return resp.Msg, nil
}

// ParseSignal accepts a signal's name as in "SIGTERM", and "SIGRTMIN+n".
func ParseSignal(name string) (int32, error) {
	if n := unix.SignalNum(name); n != 0 {
		return int32(n), nil
	}
	if rest, ok := strings.CutPrefix(name, "SIGRTMIN"); ok {
		if rest == "" {
			rest = "+0"
		}
		digits, plus := strings.CutPrefix(rest, "+")
		// ParseUint takes no sign of its own, so "++1" is no number.
		if n, err := strconv.ParseUint(digits, 10, 8); plus && err == nil && n <= 30 {
			return int32(34 + n), nil
		}
	}
	return 0, sandbox.Invalid("signal", "signal", `must be the name of a signal, such as "SIGTERM"`)
}

// ParseTarget maps the API's words for whom a signal is for; empty is the process itself.
func ParseTarget(word string) (agentv1.SignalTarget, error) {
	switch word {
	case "", "process":
		return agentv1.SignalTarget_SIGNAL_TARGET_PROCESS, nil
	case "group":
		return agentv1.SignalTarget_SIGNAL_TARGET_GROUP, nil
	}
	return 0, sandbox.Invalid("target", "enum", "must be process or group")
}
