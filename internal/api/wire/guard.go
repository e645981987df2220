package wire

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"runtime/debug"
	"strings"
	"time"

	"crypto/rand"
	"encoding/hex"

	"github.com/space-sandbox/space/internal/sandbox"
)

// maxRequestID bounds the request IDs that clients choose.
const maxRequestID = 128

type requestIDKey struct{}

// RequestID returns the ID that Guard gave the request.
func RequestID(ctx context.Context) string {
	id, _ := ctx.Value(requestIDKey{}).(string)
	return id
}

// Recorder remembers what was sent. It unwraps for http.ResponseController.
type Recorder struct {
	http.ResponseWriter
	Status int   // 0: nothing sent yet
	Bytes  int64 // of the body
	Label  string
	Err    error // the error that was answered, for the log
}

// WriteHeader implements http.ResponseWriter.
func (r *Recorder) WriteHeader(status int) {
	if r.Status == 0 && status >= 200 {
		r.Status = status
	}
	r.ResponseWriter.WriteHeader(status)
}

// Write implements http.ResponseWriter.
func (r *Recorder) Write(p []byte) (int, error) {
	if r.Status == 0 {
		r.Status = http.StatusOK
	}
	n, err := r.ResponseWriter.Write(p)
	r.Bytes += int64(n)
	return n, err
}

// Unwrap implements what http.ResponseController looks for.
func (r *Recorder) Unwrap() http.ResponseWriter { return r.ResponseWriter }

// Fail answers err, or, when an answer is already under way, cuts the connection so that the client cannot take
// what it got for the whole.
func (r *Recorder) Fail(req *http.Request, err error) {
	r.Err = err
	if r.Status != 0 {
		// The documented way to end a response abnormally in net/http.
		panic(http.ErrAbortHandler)
	}
	WriteError(r, RequestID(req.Context()), err)
}

// Guard gives every request an ID, answers panics with an internal error, forbids content sniffing and logs one line
// per request. Neither query nor headers are logged: they can hold paths and tokens.
func Guard(log *slog.Logger, next func(*Recorder, *http.Request)) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		id := requestID(r.Header.Get("X-Request-Id"))
		r = r.WithContext(context.WithValue(r.Context(), requestIDKey{}, id))
		w.Header().Set("X-Request-Id", id)
		w.Header().Set("X-Content-Type-Options", "nosniff")
		w.Header().Set("Cache-Control", "no-store")
		rec, began := &Recorder{ResponseWriter: w}, time.Now()
		defer func() {
			cause := recover()
			if err, ok := cause.(error); cause != nil && (!ok || !errors.Is(err, http.ErrAbortHandler)) {
				log.ErrorContext(r.Context(), "handler panicked", "request_id", id, "panic", fmt.Sprint(cause), "stack", string(debug.Stack()))
				rec.Err = fmt.Errorf("panic: %v", cause)
				if rec.Status == 0 {
					WriteError(rec, id, sandbox.Errorf(sandbox.CodeInternal, "internal error"))
					cause = nil
				} else {
					cause = http.ErrAbortHandler
				}
			}
			logRequest(log, r, rec, id, time.Since(began))
			if cause != nil {
				panic(cause) // http.ErrAbortHandler: net/http cuts the connection
			}
		}()
		next(rec, r)
	})
}

func logRequest(log *slog.Logger, r *http.Request, rec *Recorder, id string, took time.Duration) {
	level := slog.LevelDebug
	if rec.Status >= 500 && r.URL.Path != "/readyz" { // "not ready" is news to whoever asks, not to the log
		level = slog.LevelWarn
	}
	if !log.Enabled(r.Context(), level) {
		return
	}
	attrs := []slog.Attr{
		slog.String("request_id", id), slog.String("method", r.Method), slog.String("route", rec.Label),
		slog.Int("status", rec.Status), slog.Int64("bytes", rec.Bytes), slog.Duration("took", took),
	}
	if rec.Err != nil {
		attrs = append(attrs, slog.String("error", rec.Err.Error()))
	}
	log.LogAttrs(r.Context(), level, "request", attrs...)
}

// requestID keeps a client's ID if it is short and plain, so that it can be logged and echoed as it is.
func requestID(given string) string {
	if given != "" && len(given) <= maxRequestID && strings.Trim(given, idRunes) == "" {
		return given
	}
	var b [12]byte
	_, _ = rand.Read(b[:]) // never fails: crypto/rand aborts the program instead
	return "req-" + hex.EncodeToString(b[:])
}

const idRunes = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.:/+="

// Bearer returns the token of an Authorization header; empty if there is none or it is of another scheme.
func Bearer(h http.Header) string {
	scheme, token, ok := strings.Cut(h.Get("Authorization"), " ")
	if !ok || !strings.EqualFold(scheme, "Bearer") {
		return ""
	}
	return strings.TrimSpace(token)
}

// Accepts reports whether an Accept header admits a media type. No header admits everything.
func Accepts(h http.Header, mediaType string) bool {
	values := h.Values("Accept")
	if len(values) == 0 {
		return true
	}
	family, _, _ := strings.Cut(mediaType, "/")
	for _, item := range strings.Split(strings.Join(values, ","), ",") {
		name, params, _ := strings.Cut(item, ";")
		name = strings.ToLower(strings.TrimSpace(name))
		if name != "*/*" && name != mediaType && name != family+"/*" {
			continue
		}
		q := strings.ReplaceAll(strings.ToLower(params), " ", "")
		if !strings.Contains(q, "q=0") || strings.Trim(q[strings.Index(q, "q=0")+3:], ".0") != "" {
			return true
		}
	}
	return false
}
