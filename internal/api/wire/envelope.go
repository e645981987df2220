package wire

import (
	"bytes"
	"encoding/json"
	"net/http"
	"strconv"
	"time"

	"github.com/space-sandbox/space/internal/sandbox"
)

// Envelope is the body of every answer that is not 2xx.
type Envelope struct {
	Code      sandbox.Code    `json:"code" enum:"invalid_request,unauthorized,forbidden,not_found,conflict,idempotency_conflict,failed_precondition,payload_too_large,rate_limited,capacity_unavailable,service_unavailable,internal" doc:"Class of the error; programs decide by it." example:"invalid_request"`
	Message   string          `json:"message" doc:"What went wrong, for people." example:"argv: must have at least 1 item"`
	RequestID string          `json:"request_id" doc:"The X-Request-Id of the request, to be found in the server's log." example:"req-4b1f9a0c6e2d"`
	Details   sandbox.Details `json:"details" doc:"What a program can use; only the fields that fit the code are present."`
	Retryable bool            `json:"retryable" doc:"Whether the same request can succeed later; Retry-After says when." example:"false"`
}

// EnvelopeOf returns the envelope of e.
func EnvelopeOf(e *sandbox.Error, requestID string) Envelope {
	return Envelope{Code: e.Code, Message: e.Message, RequestID: requestID, Details: e.Details, Retryable: e.Retryable}
}

// Status returns the HTTP status of e.
func Status(e *sandbox.Error) int {
	if e.Status != 0 {
		return e.Status
	}
	switch e.Code {
	case sandbox.CodeInvalidRequest:
		return http.StatusBadRequest
	case sandbox.CodeUnauthorized:
		return http.StatusUnauthorized
	case sandbox.CodeForbidden:
		return http.StatusForbidden
	case sandbox.CodeNotFound:
		return http.StatusNotFound
	case sandbox.CodeConflict, sandbox.CodeIdempotencyConflict:
		return http.StatusConflict
	case sandbox.CodeFailedPrecondition:
		return http.StatusPreconditionFailed
	case sandbox.CodePayloadTooLarge:
		return http.StatusRequestEntityTooLarge
	case sandbox.CodeRateLimited:
		return http.StatusTooManyRequests
	case sandbox.CodeCapacityUnavailable, sandbox.CodeServiceUnavailable:
		return http.StatusServiceUnavailable
	}
	return http.StatusInternalServerError
}

// WriteError answers with the envelope of err. Headers that describe a body that is not sent are removed.
func WriteError(w http.ResponseWriter, requestID string, err error) {
	e := sandbox.AsError(err)
	h := w.Header()
	for _, name := range []string{"Content-Length", "Content-Disposition", "Content-Security-Policy", "Accept-Ranges", "Etag", "Last-Modified"} {
		h.Del(name)
	}
	status := Status(e)
	if e.Retryable {
		h.Set("Retry-After", strconv.Itoa(retryAfter(e.RetryAfter)))
	}
	if status == http.StatusUnauthorized {
		h.Set("WWW-Authenticate", "Bearer")
	}
	WriteJSON(w, status, EnvelopeOf(e, requestID))
}

// retryAfter rounds up to whole seconds and is at least one: "at once" would make clients spin.
func retryAfter(d time.Duration) int {
	return max(1, int((d+time.Second-1)/time.Second))
}

// WriteJSON answers with v as JSON.
func WriteJSON(w http.ResponseWriter, status int, v any) {
	var buf bytes.Buffer
	enc := json.NewEncoder(&buf)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil { // our own types always encode
		http.Error(w, `{"code":"internal","message":"the answer cannot be encoded","request_id":"","details":{},"retryable":false}`, http.StatusInternalServerError)
		return
	}
	h := w.Header()
	h.Set("Content-Type", "application/json")
	h.Set("Content-Length", strconv.Itoa(buf.Len()))
	w.WriteHeader(status)
	_, _ = w.Write(buf.Bytes()) // the client may be gone
}
