package dataplane

import (
	"net/http"
	"time"

	"github.com/space-sandbox/space/internal/api/wire"
	nodev1 "github.com/space-sandbox/space/internal/gen/space/node/v1"
)

// sseWriter writes events to one client, each with a deadline and flushed. It belongs to one goroutine.
type sseWriter struct {
	w       *wire.Recorder
	rc      *http.ResponseController
	process string
	timeout time.Duration
	buf     []byte
	begun   bool
}

// begin sends the headers. Proxies are told not to buffer.
func (s *sseWriter) begin() error {
	if s.begun {
		return nil
	}
	s.begun = true
	h := s.w.Header()
	h.Set("Content-Type", "text/event-stream")
	h.Set("Cache-Control", "no-store, no-transform")
	h.Set("X-Accel-Buffering", "no")
	s.deadline()
	s.w.WriteHeader(http.StatusOK)
	return s.rc.Flush()
}

func (s *sseWriter) deadline() {
	// Servers without deadlines (tests) answer ErrNotSupported; the connection itself then bounds the write.
	_ = s.rc.SetWriteDeadline(time.Now().Add(s.timeout))
}

func (s *sseWriter) event(ev *nodev1.Event) error {
	s.buf = appendEvent(s.buf[:0], s.process, ev)
	return s.flush()
}

func (s *sseWriter) interrupted(reason string, retryable bool, retryAfterS uint32) error {
	return s.event(&nodev1.Event{Kind: &nodev1.Event_Interrupted{Interrupted: &nodev1.Interrupted{
		Reason: reason, Retryable: retryable, RetryAfterS: retryAfterS,
	}}})
}

func (s *sseWriter) ping() error {
	s.buf = append(s.buf[:0], ": ping\n\n"...)
	return s.flush()
}

func (s *sseWriter) flush() error {
	if len(s.buf) == 0 {
		return nil
	}
	if err := s.begin(); err != nil {
		return err
	}
	s.deadline()
	if _, err := s.w.Write(s.buf); err != nil {
		return err
	}
	return s.rc.Flush()
}
