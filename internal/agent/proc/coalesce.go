package proc

import (
	"context"
	"net/http"
)

// spillBytes is how much an answer collects at most before it is written.
const spillBytes = 128 << 10

type coalescerKey struct{}

// Coalesce lets the streams of a handler hold back a flush while they know what comes next: each flush of an answer is
// three system calls and at least as many packets.
func Coalesce(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		c := &coalescer{ResponseWriter: w}
		next.ServeHTTP(c, r.WithContext(context.WithValue(r.Context(), coalescerKey{}, c)))
		_ = c.spill() // an error shows at the connection
	})
}

// holder returns what makes the stream of ctx hold back flushes or stop to.
func holder(ctx context.Context) func(bool) {
	c, ok := ctx.Value(coalescerKey{}).(*coalescer)
	if !ok {
		return func(bool) {}
	}
	return func(hold bool) { c.hold = hold }
}

// coalescer is the answer to one request and belongs to its goroutine.
type coalescer struct {
	http.ResponseWriter
	buf  []byte
	hold bool
}

// Write implements http.ResponseWriter.
func (c *coalescer) Write(p []byte) (int, error) {
	if len(c.buf)+len(p) > spillBytes {
		if err := c.spill(); err != nil {
			return 0, err
		}
	}
	c.buf = append(c.buf, p...)
	return len(p), nil
}

func (c *coalescer) spill() error {
	if len(c.buf) == 0 {
		return nil
	}
	_, err := c.ResponseWriter.Write(c.buf)
	c.buf = c.buf[:0]
	return err
}

// Flush implements http.Flusher.
func (c *coalescer) Flush() { _ = c.FlushError() }

// FlushError is Flush with its error, for http.ResponseController.
func (c *coalescer) FlushError() error {
	if c.hold {
		return nil
	}
	if err := c.spill(); err != nil {
		return err
	}
	return http.NewResponseController(c.ResponseWriter).Flush()
}

// Unwrap is for http.ResponseController.
func (c *coalescer) Unwrap() http.ResponseWriter { return c.ResponseWriter }
