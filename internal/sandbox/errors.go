package sandbox

import (
	"errors"
	"fmt"
	"time"
)

// Code is the class of an Error, the `code` of the API's error envelope.
type Code string

// The error codes of the native API. Retryability and HTTP status follow from the code except where noted.
const (
	CodeInvalidRequest      Code = "invalid_request"
	CodeUnauthorized        Code = "unauthorized"
	CodeForbidden           Code = "forbidden"
	CodeNotFound            Code = "not_found"
	CodeConflict            Code = "conflict" // retryable while a transition is under way
	CodeIdempotencyConflict Code = "idempotency_conflict"
	CodeFailedPrecondition  Code = "failed_precondition"
	CodePayloadTooLarge     Code = "payload_too_large"
	CodeRateLimited         Code = "rate_limited"
	CodeCapacityUnavailable Code = "capacity_unavailable"
	CodeServiceUnavailable  Code = "service_unavailable"
	CodeInternal            Code = "internal"
)

// Violation says what is wrong with one field of a request.
type Violation struct {
	Field   string `json:"field"`   // dotted path, such as "resources.memory_mib" or "argv[3]"
	Rule    string `json:"rule"`    // short and stable, such as "max_items"
	Message string `json:"message"` // for people; never holds the submitted value
}

// Details is what an Error can tell a machine. Only the fields that fit the code are set.
type Details struct {
	Cause         string      `json:"cause,omitempty"`
	Remediation   string      `json:"remediation,omitempty"`
	Violations    []Violation `json:"violations,omitempty"`
	RequiredScope string      `json:"required_scope,omitempty"`
	State         string      `json:"state,omitempty"`
	AllowedFrom   []string    `json:"allowed_from,omitempty"`
}

// Error is the one error type of the API's edge. Message never holds secrets or submitted values. Wrapped causes
// are for logs: they are reachable by errors.Is/As and never sent to a client.
type Error struct {
	Code       Code
	Message    string
	Details    Details
	Retryable  bool
	RetryAfter time.Duration // 0: no hint
	Status     int           // HTTP status when it differs from the code's own (405, 406, 415); else 0
	cause      error
}

// Error implements error.
func (e *Error) Error() string {
	if e.cause != nil {
		return fmt.Sprintf("%s: %s: %v", e.Code, e.Message, e.cause)
	}
	return fmt.Sprintf("%s: %s", e.Code, e.Message)
}

// Unwrap returns the cause, if any.
func (e *Error) Unwrap() error { return e.cause }

// WithCause returns a copy of e that wraps cause.
func (e *Error) WithCause(cause error) *Error {
	c := *e
	c.cause = cause
	return &c
}

// WithRemediation returns a copy of e that says what to do next.
func (e *Error) WithRemediation(text string) *Error {
	c := *e
	c.Details.Remediation = text
	return &c
}

// Errorf makes an Error of a code. Capacity, rate and service errors are retryable after a second.
func Errorf(code Code, format string, args ...any) *Error {
	e := &Error{Code: code, Message: fmt.Sprintf(format, args...)}
	switch code {
	case CodeRateLimited, CodeCapacityUnavailable, CodeServiceUnavailable:
		e.Retryable, e.RetryAfter = true, time.Second
	}
	return e
}

// Invalid is an invalid_request about one field.
func Invalid(field, rule, format string, args ...any) *Error {
	v := Violation{Field: field, Rule: rule, Message: fmt.Sprintf(format, args...)}
	return InvalidAll([]Violation{v})
}

// InvalidAll is an invalid_request about several fields; violations must not be empty.
func InvalidAll(violations []Violation) *Error {
	first := violations[0]
	e := Errorf(CodeInvalidRequest, "%s: %s", first.Field, first.Message)
	e.Details.Violations = violations
	return e
}

// ConflictState is a conflict that names the state a sandbox is in and the states the call is allowed from.
// retryable means that the state is transitional.
func ConflictState(verb string, state State, retryable bool, from ...State) *Error {
	e := Errorf(CodeConflict, "cannot %s a sandbox that is %s", verb, state)
	e.Retryable = retryable
	if retryable {
		e.RetryAfter = time.Second
	}
	e.Details.State = string(state)
	for _, s := range from {
		e.Details.AllowedFrom = append(e.Details.AllowedFrom, string(s))
	}
	return e
}

// AsError returns err as an *Error, or an internal error that wraps it.
func AsError(err error) *Error {
	var e *Error
	if errors.As(err, &e) {
		return e
	}
	return Errorf(CodeInternal, "internal error").WithCause(err)
}

// CodeOf returns the code of err, CodeInternal for foreign errors and "" for nil.
func CodeOf(err error) Code {
	if err == nil {
		return ""
	}
	return AsError(err).Code
}
