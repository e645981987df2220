package dataplane

import (
	"context"
	"errors"
	"net/http"
	"time"

	"connectrpc.com/connect"

	"github.com/space-sandbox/space/internal/api/wire"
	"github.com/space-sandbox/space/internal/control"
	nodev1 "github.com/space-sandbox/space/internal/gen/space/node/v1"
	"github.com/space-sandbox/space/internal/sandbox"
)

// Reasons of `interrupted` that come from here; a guest's own are passed on.
const (
	reasonDraining  = "server_draining"
	reasonDeleted   = "sandbox_deleted"
	reasonFailed    = "sandbox_failed"
	reasonSuspended = "sandbox_suspended"
	reasonPaused    = "sandbox_paused"
	reasonLost      = "node_unreachable"
	reasonRevoked   = "session_revoked"
	reasonExpired   = "session_expired"
)

// errEnded ends a stream whose last event was written.
var errEnded = errors.New("stream ended")

// follower is one stream of one client. It belongs to the goroutine of its request.
type follower struct {
	s       *Server
	ctx     context.Context
	session *sandbox.Session
	out     *sseWriter
	last    uint64 // the last event written
	revoked <-chan struct{}
	expired *time.Timer // the session's end
	ping    *time.Ticker
}

// events answers GET /v1/sessions/{id}/events.
func (s *Server) events(w *wire.Recorder, r *http.Request, session *sandbox.Session) error {
	if !wire.Accepts(r.Header, "text/event-stream") {
		e := sandbox.Errorf(sandbox.CodeInvalidRequest, "the Accept header does not admit text/event-stream")
		e.Status = http.StatusNotAcceptable
		return e
	}
	last, err := wire.LastEventID(r)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(r.Context())
	defer cancel()
	f := &follower{
		s: s, ctx: ctx, session: session, last: last, revoked: s.cfg.Service.RevocationOf(ctx, session.KeyID),
		out:  &sseWriter{w: w, rc: http.NewResponseController(w), process: string(session.ProcessID), timeout: s.cfg.WriteTimeout},
		ping: time.NewTicker(s.cfg.PingInterval), expired: time.NewTimer(time.Until(session.ExpiresAt)),
	}
	defer f.ping.Stop()
	defer f.expired.Stop()
	err = f.run()
	if err != nil && !f.out.begun && r.Context().Err() == nil {
		return err
	}
	w.Err = err // for the log: a stream under way has said all it can in its events
	return nil
}

// run follows the guest until the stream has an end, over as many guest streams as it takes.
func (f *follower) run() error {
	var lostSince time.Time
	for wait := f.s.cfg.RetryMin; ; wait = min(2*wait, f.s.cfg.RetryMax) {
		before := f.last
		err := f.attempt()
		if errors.Is(err, errEnded) {
			return nil
		}
		if err != nil && f.final(err) {
			return f.giveUp(err)
		}
		if f.last != before {
			lostSince, wait = time.Time{}, f.s.cfg.RetryMin
		}
		if lostSince.IsZero() {
			lostSince = time.Now()
		} else if time.Since(lostSince) > f.patience() {
			return f.giveUp(err)
		}
		if err := f.pause(wait); err != nil {
			return err
		}
	}
}

// final tells errors that asking again cannot mend.
func (f *follower) final(err error) bool {
	if f.ctx.Err() != nil || errors.As(err, new(*writeError)) {
		return true
	}
	switch e := sandbox.AsError(err); e.Code {
	case sandbox.CodeNotFound, sandbox.CodeUnauthorized, sandbox.CodeForbidden, sandbox.CodeInvalidRequest:
		return true
	case sandbox.CodeConflict:
		return !e.Retryable
	}
	return false
}

// patience is how long a lost guest is asked for again. A client that has got nothing yet is better off with an error
// it can act on than with a long silence.
func (f *follower) patience() time.Duration {
	if !f.out.begun {
		return min(f.s.cfg.LostAfter, earlyPatience)
	}
	return f.s.cfg.LostAfter
}

const earlyPatience = 3 * time.Second

// giveUp says why the stream ends. Before its first byte that is the error's own answer.
func (f *follower) giveUp(err error) error {
	if err == nil {
		err = sandbox.Errorf(sandbox.CodeServiceUnavailable, "the sandbox's event stream is lost")
	}
	if !f.out.begun || f.ctx.Err() != nil || errors.As(err, new(*writeError)) {
		return err
	}
	reason, retryable := reasonLost, true
	switch e := sandbox.AsError(err); e.Code {
	case sandbox.CodeUnauthorized:
		reason, retryable = reasonRevoked, false
	case sandbox.CodeNotFound:
		reason, retryable = reasonDeleted, false
	case sandbox.CodeConflict:
		reason, retryable = reasonOf(sandbox.State(e.Details.State))
	}
	var after uint32
	if retryable {
		after = 1
	}
	if werr := f.out.interrupted(reason, retryable, after); werr != nil {
		return werr
	}
	return err
}

func reasonOf(state sandbox.State) (reason string, retryable bool) {
	switch state {
	case sandbox.StateDeleting, sandbox.StateDeleted:
		return reasonDeleted, false
	case sandbox.StateFailed:
		return reasonFailed, false
	case sandbox.StatePausing, sandbox.StatePaused:
		return reasonPaused, true
	case sandbox.StateSuspending, sandbox.StateSuspended, sandbox.StateWaking:
		return reasonSuspended, true
	}
	return reasonLost, true
}

// pause waits before the next attempt, and keeps the client's connection alive meanwhile.
func (f *follower) pause(d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	for {
		select {
		case <-timer.C:
			return nil
		case <-f.ping.C:
			if err := f.out.ping(); err != nil {
				return &writeError{err}
			}
		case <-f.ctx.Done():
			return f.ctx.Err()
		case <-f.revoked:
			return f.stop(reasonRevoked, false)
		case <-f.expired.C:
			return f.stop(reasonExpired, false)
		case <-f.s.drain:
			return f.stop(reasonDraining, true)
		}
	}
}

// stop writes the last event of a stream that ends from this side.
func (f *follower) stop(reason string, retryable bool) error {
	var after uint32
	if retryable {
		after = 1
	}
	if err := f.out.interrupted(reason, retryable, after); err != nil {
		return &writeError{err}
	}
	return errEnded
}

// guest resolves the sandbox. One that runs gets its process started; of one that failed the journal is read.
func (f *follower) guest(ctx context.Context) (g *control.Guest, start bool, err error) {
	g, err = f.s.cfg.Service.SessionGuest(ctx, f.session, control.GuestUse{})
	if err == nil || sandbox.CodeOf(err) != sandbox.CodeConflict {
		return g, true, err
	}
	g, err = f.s.cfg.Service.SessionGuest(ctx, f.session, control.GuestUse{ReadOnly: true})
	return g, false, err
}

// received is what the reading goroutine hands over: an event, or the stream's end with its error.
type received struct {
	event *nodev1.Event
	err   error
	end   bool
}

// attempt follows one guest stream. errEnded: the client has had its last event. nil or another error: the guest
// stream is lost.
func (f *follower) attempt() error {
	ctx, cancel := context.WithCancel(f.ctx)
	g, start, err := f.guest(ctx)
	if err != nil {
		cancel()
		return err
	}
	feed := make(chan received)
	done := make(chan struct{})
	go func() {
		defer close(done)
		f.read(ctx, g, start, feed)
	}()
	defer func() { <-done }()
	defer cancel()
	return f.forward(feed)
}

// read receives until the stream ends or ctx does. It owns the guest stream.
func (f *follower) read(ctx context.Context, g *control.Guest, start bool, feed chan<- received) {
	send := func(r received) bool {
		select {
		case feed <- r:
			return true
		case <-ctx.Done():
			return false
		}
	}
	req := &nodev1.StreamEventsRequest{ProcessId: string(f.session.ProcessID), Start: start}
	if last := f.last; last > 0 {
		req.AfterId = &last
	}
	stream, err := g.Processes.StreamEvents(ctx, connect.NewRequest(req))
	if err != nil {
		send(received{err: err, end: true})
		return
	}
	defer func() { _ = stream.Close() }()
	for stream.Receive() {
		if !send(received{event: stream.Msg()}) {
			return
		}
	}
	send(received{err: stream.Err(), end: true})
}

// headersAfter is how long the headers wait for a first event or an error of the guest.
const headersAfter = 300 * time.Millisecond

// forward writes what comes from the guest until it ends.
func (f *follower) forward(feed <-chan received) error {
	quiet := time.NewTimer(headersAfter)
	defer quiet.Stop()
	for {
		select {
		case r := <-feed:
			if r.end {
				return lost(r.err)
			}
			if err := f.event(r.event); err != nil {
				return err
			}
		case <-quiet.C:
			if err := f.out.begin(); err != nil {
				return &writeError{err}
			}
		case <-f.ping.C:
			if err := f.out.ping(); err != nil {
				return &writeError{err}
			}
		case <-f.ctx.Done():
			return f.ctx.Err()
		case <-f.revoked:
			return f.stop(reasonRevoked, false)
		case <-f.expired.C:
			return f.stop(reasonExpired, false)
		case <-f.s.drain:
			return f.stop(reasonDraining, true)
		}
	}
}

// lost maps the end of a guest stream. A refusal because of the sandbox's state means that it has changed since the
// record was read: reading the record again will tell.
func lost(err error) error {
	if connect.CodeOf(err) == connect.CodeFailedPrecondition {
		return sandbox.Errorf(sandbox.CodeServiceUnavailable, "the sandbox is changing its state").WithCause(err)
	}
	return control.GuestError(err, "")
}

// event writes one event and tells whether it was the last. What was written before is not written again, and a node
// that drains is only a lost stream: the sandbox goes on and can be asked again.
func (f *follower) event(ev *nodev1.Event) error {
	if id := ev.GetId(); id != 0 {
		if id <= f.last {
			return nil
		}
		f.last = id
	}
	interrupted := ev.GetInterrupted()
	if interrupted.GetReason() == reasonDraining {
		return sandbox.Errorf(sandbox.CodeServiceUnavailable, "the node is restarting")
	}
	if resync := ev.GetResync(); resync != nil && resync.GetFirstAvailableId() > 0 {
		f.last = resync.GetFirstAvailableId() - 1
	}
	if err := f.out.event(ev); err != nil {
		return &writeError{err}
	}
	if interrupted != nil || ev.GetExited() != nil {
		return errEnded
	}
	return nil
}

// writeError marks errors of the client's connection, after which there is nobody to tell anything.
type writeError struct{ err error }

// Error implements error.
func (e *writeError) Error() string { return "write to the client: " + e.err.Error() }

// Unwrap returns the cause.
func (e *writeError) Unwrap() error { return e.err }
