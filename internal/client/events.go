package client

import (
	"bufio"
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"time"

	"github.com/space-sandbox/space/internal/sandbox"
)

// Kinds of events.
const (
	EventStarted     = "started"
	EventStdout      = "stdout"
	EventStderr      = "stderr"
	EventPty         = "pty"
	EventExited      = "process_exited"
	EventDropped     = "output_dropped"
	EventInterrupted = "interrupted"
	EventResync      = "resync_required"
)

// Event is one event of a command. Which fields are set depends on its kind.
type Event struct {
	ID   uint64 `json:"-"`
	Kind string `json:"-"`

	Data   []byte `json:"data"` // output
	Offset uint64 `json:"offset"`
	Exit
	Stream     string `json:"stream"` // output_dropped
	FromOffset uint64 `json:"from_offset"`
	ToOffset   uint64 `json:"to_offset"`
	Reason     string `json:"reason"` // interrupted
	Retryable  bool   `json:"retryable"`
	RetryAfter uint32 `json:"retry_after_s"`
	FirstID    uint64 `json:"first_available_id"` // resync_required
}

// InterruptedError says that a stream ended for good before its process did.
type InterruptedError struct{ Reason string }

// Error implements error.
func (e *InterruptedError) Error() string {
	return "the stream was interrupted: " + e.Reason + "; how the process ended is not known"
}

// errCut: the connection ended where no stream ends.
var errCut = errors.New("the event stream was cut")

// maxEvent bounds one event on the wire: 32 KiB of output in base64, and room to spare.
const maxEvent = 1 << 20

// Events follows a command from the first event to process_exited and returns that event. Reading starts the process
// if it waits for that. handle sees every event once; an error of it ends the stream and is returned.
func (c *Client) Events(ctx context.Context, s Session, handle func(*Event) error) (*Event, error) {
	f := follower{client: c, session: s, handle: handle}
	return f.run(ctx)
}

// follower is one reader of one stream.
type follower struct {
	client  *Client
	session Session
	handle  func(*Event) error
	last    uint64 // the ID up to which events were handled
	seen    bool   // whether there was any
}

// handlerError keeps the handler's failures apart from the connection's.
type handlerError struct{ error }

func (f *follower) run(ctx context.Context) (*Event, error) {
	cfg := &f.client.cfg
	pause, alive := cfg.RetryMin, time.Now()
	for {
		last, seen := f.last, f.seen
		ev, err := f.once(ctx)
		var own handlerError
		switch {
		case errors.As(err, &own):
			return nil, own.error
		case err != nil && final(err):
			return nil, err
		case err == nil && ev.Kind == EventExited:
			return ev, nil
		case err == nil && !ev.Retryable:
			return nil, &InterruptedError{ev.Reason}
		}
		if f.last != last || f.seen != seen {
			pause, alive = cfg.RetryMin, time.Now()
		}
		if err != nil && time.Since(alive) > cfg.GiveUp {
			return nil, fmt.Errorf("the command's output could not be followed for %v: %w", cfg.GiveUp, err)
		}
		if err == nil {
			err = &InterruptedError{ev.Reason}
			if time.Since(alive) > cfg.GiveUp {
				return nil, err
			}
		}
		select {
		case <-ctx.Done():
			return nil, errors.Join(ctx.Err(), err)
		case <-time.After(pause):
		}
		pause = min(2*pause, cfg.RetryMax)
	}
}

// final tells whether trying again is of no use.
func final(err error) bool {
	var e *Error
	if errors.As(err, &e) {
		return !e.Retryable && e.Status < 500
	}
	return errors.Is(err, context.Canceled) || errors.Is(err, errMalformed)
}

// url is where one thing of the session is.
func (c *Client) sessionURL(s Session, verb string) string {
	if c.cfg.DataURL != "" {
		return c.cfg.DataURL + "/v1/sessions/" + s.ID + "/" + verb
	}
	return s.EventsURL[:max(0, len(s.EventsURL)-len("events"))] + verb
}

// once reads one connection to its end. It returns the event that ends the stream.
func (f *follower) once(ctx context.Context) (*Event, error) {
	r := request{method: http.MethodGet, url: f.client.sessionURL(f.session, "events"), token: f.session.Token, header: http.Header{}}
	r.header.Set("Accept", "text/event-stream")
	if f.seen {
		r.header.Set("Last-Event-Id", strconv.FormatUint(f.last, 10))
	}
	resp, err := f.client.send(ctx, r)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	events := newEventReader(resp.Body)
	for {
		ev, err := events.next()
		if err != nil {
			return nil, err
		}
		if ev.ID != 0 {
			if f.seen && ev.ID <= f.last {
				continue // sent again
			}
			f.last, f.seen = ev.ID, true
		}
		if err := f.handle(ev); err != nil {
			return nil, handlerError{err}
		}
		if ev.Kind == EventExited || ev.Kind == EventInterrupted {
			return ev, nil
		}
	}
}

// errMalformed: what arrives is no event stream.
var errMalformed = errors.New("malformed event")

// eventReader parses server-sent events.
type eventReader struct {
	scan *bufio.Scanner
	data []byte // of the event that is being read
}

func newEventReader(r io.Reader) *eventReader {
	scan := bufio.NewScanner(r)
	scan.Buffer(make([]byte, 0, 64<<10), maxEvent)
	return &eventReader{scan: scan}
}

// next returns the next event. An event that was cut is not returned.
func (r *eventReader) next() (*Event, error) {
	ev := &Event{}
	data := r.data[:0]
	defer func() { r.data = data }()
	for r.scan.Scan() {
		line := r.scan.Bytes()
		if len(line) == 0 {
			if ev.Kind == "" {
				ev, data = &Event{}, data[:0] // a comment, or nothing
				continue
			}
			if ev.parseOutput(data) {
				return ev, nil
			}
			if err := json.Unmarshal(data, ev); err != nil {
				return nil, fmt.Errorf("%w: %s: %w", errMalformed, ev.Kind, err)
			}
			return ev, nil
		}
		name, value, _ := bytes.Cut(line, []byte(":"))
		value = bytes.TrimPrefix(value, []byte(" "))
		switch string(name) {
		case "id":
			id, err := strconv.ParseUint(string(value), 10, 64)
			if err != nil {
				return nil, fmt.Errorf("%w: id is no number", errMalformed)
			}
			ev.ID = id
		case "event":
			ev.Kind = string(value)
		case "data":
			if len(data) > 0 {
				data = append(data, '\n')
			}
			data = append(data, value...)
			if len(data) > maxEvent {
				return nil, fmt.Errorf("%w: too long", errMalformed)
			}
		}
	}
	if err := r.scan.Err(); errors.Is(err, bufio.ErrTooLong) {
		return nil, fmt.Errorf("%w: too long", errMalformed)
	} else if err != nil {
		return nil, err
	}
	return nil, errCut
}

// parseOutput reads output in the very form that the server writes it in, which is nearly all of a stream; anything
// else is left to the JSON parser.
func (ev *Event) parseOutput(data []byte) bool {
	rest, ok := bytes.CutPrefix(data, []byte(`{"data":"`))
	if !ok {
		return false
	}
	text, rest, ok := bytes.Cut(rest, []byte(`","offset":`))
	digits, closed := bytes.CutSuffix(rest, []byte("}"))
	if !ok || !closed || (len(digits) > 1 && digits[0] == '0') || bytes.ContainsAny(digits, "+-_") {
		return false
	}
	offset, err := strconv.ParseUint(string(digits), 10, 64)
	if err != nil {
		return false
	}
	out := make([]byte, base64.StdEncoding.DecodedLen(len(text)))
	n, err := base64.StdEncoding.Decode(out, text)
	if err != nil {
		return false
	}
	ev.Data, ev.Offset = out[:n], offset
	return true
}

// WriteStdin writes data at an offset of the process's input; what was taken before is not written twice, so the call
// is repeated until it succeeds or cannot. closing ends the input after data.
func (c *Client) WriteStdin(ctx context.Context, s Session, offset int64, data []byte, closing bool) error {
	u := c.sessionURL(s, "stdin") + "?offset=" + strconv.FormatInt(offset, 10)
	if closing {
		u += "&close=true"
	}
	return c.persist(ctx, func() error {
		r := request{method: http.MethodPost, url: u, token: s.Token, body: bytes.NewReader(data), header: http.Header{}}
		r.header.Set("Content-Type", "application/octet-stream")
		return c.call(ctx, r, nil, nil)
	})
}

// Resize sets the size of the command's terminal.
func (c *Client) Resize(ctx context.Context, s Session, size Terminal) error {
	r := request{method: http.MethodPost, url: c.sessionURL(s, "resize"), token: s.Token, header: http.Header{}}
	return c.call(ctx, r, size, nil)
}

// Signal sends a signal, such as SIGINT, to the command's process group.
func (c *Client) Signal(ctx context.Context, s Session, signal string) error {
	r := request{method: http.MethodPost, url: c.sessionURL(s, "signal"), token: s.Token, header: http.Header{}}
	return c.call(ctx, r, map[string]string{"signal": signal, "target": "group"}, nil)
}

// persist repeats a call that may be repeated while its failure may pass.
func (c *Client) persist(ctx context.Context, call func() error) error {
	pause, begin := c.cfg.RetryMin, time.Now()
	for {
		err := call()
		if err == nil || final(err) || CodeOf(err) == sandbox.CodeInternal || time.Since(begin) > c.cfg.GiveUp {
			return err
		}
		select {
		case <-ctx.Done():
			return errors.Join(ctx.Err(), err)
		case <-time.After(pause):
		}
		pause = min(2*pause, c.cfg.RetryMax)
	}
}
