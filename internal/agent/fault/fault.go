package fault

import (
	"context"
	"errors"
	"syscall"

	"connectrpc.com/connect"
	agentv1 "github.com/space-sandbox/space/internal/gen/space/agent/v1"
)

// New returns a Connect error with a FileError.
func New(code connect.Code, reason agentv1.FileErrorReason, field, text string) error {
	e := connect.NewError(code, errors.New(text))
	if d, err := connect.NewErrorDetail(&agentv1.FileError{Reason: reason, Field: field}); err == nil {
		e.AddDetail(d)
	}
	return e
}

// class is what an errno means to a caller.
type class struct {
	code   connect.Code
	reason agentv1.FileErrorReason
}

var classes = map[syscall.Errno]class{
	syscall.ENOENT:       {connect.CodeNotFound, agentv1.FileErrorReason_FILE_ERROR_REASON_NOT_FOUND},
	syscall.EEXIST:       {connect.CodeAlreadyExists, agentv1.FileErrorReason_FILE_ERROR_REASON_EXISTS},
	syscall.EACCES:       {connect.CodePermissionDenied, agentv1.FileErrorReason_FILE_ERROR_REASON_PERMISSION},
	syscall.EPERM:        {connect.CodePermissionDenied, agentv1.FileErrorReason_FILE_ERROR_REASON_PERMISSION},
	syscall.ENOTDIR:      {connect.CodeInvalidArgument, agentv1.FileErrorReason_FILE_ERROR_REASON_NOT_DIRECTORY},
	syscall.EISDIR:       {connect.CodeInvalidArgument, agentv1.FileErrorReason_FILE_ERROR_REASON_IS_DIRECTORY},
	syscall.ENOTEMPTY:    {connect.CodeInvalidArgument, agentv1.FileErrorReason_FILE_ERROR_REASON_NOT_EMPTY},
	syscall.EINVAL:       {connect.CodeInvalidArgument, agentv1.FileErrorReason_FILE_ERROR_REASON_INVALID_PATH},
	syscall.ENAMETOOLONG: {connect.CodeInvalidArgument, agentv1.FileErrorReason_FILE_ERROR_REASON_INVALID_PATH},
	syscall.ELOOP:        {connect.CodeInvalidArgument, agentv1.FileErrorReason_FILE_ERROR_REASON_INVALID_PATH},
	syscall.ENXIO:        {connect.CodeFailedPrecondition, agentv1.FileErrorReason_FILE_ERROR_REASON_INVALID_PATH},
	syscall.ENOSPC:       {connect.CodeResourceExhausted, agentv1.FileErrorReason_FILE_ERROR_REASON_NO_SPACE},
	syscall.EDQUOT:       {connect.CodeResourceExhausted, agentv1.FileErrorReason_FILE_ERROR_REASON_NO_SPACE},
	syscall.EFBIG:        {connect.CodeResourceExhausted, agentv1.FileErrorReason_FILE_ERROR_REASON_NO_SPACE},
	syscall.EROFS:        {connect.CodePermissionDenied, agentv1.FileErrorReason_FILE_ERROR_REASON_READ_ONLY},
	syscall.EMFILE:       {connect.CodeResourceExhausted, agentv1.FileErrorReason_FILE_ERROR_REASON_TOO_MANY_OPEN},
	syscall.ENFILE:       {connect.CodeResourceExhausted, agentv1.FileErrorReason_FILE_ERROR_REASON_TOO_MANY_OPEN},
	syscall.EBUSY:        {connect.CodeFailedPrecondition, agentv1.FileErrorReason_FILE_ERROR_REASON_UNSPECIFIED},
	syscall.ETXTBSY:      {connect.CodeFailedPrecondition, agentv1.FileErrorReason_FILE_ERROR_REASON_UNSPECIFIED},
}

// From turns a failure of a system call into a Connect error about a field. Connect errors pass through.
func From(err error, field string) error {
	if err == nil {
		return nil
	}
	var ce *connect.Error
	if errors.As(err, &ce) {
		return ce
	}
	var errno syscall.Errno
	if errors.As(err, &errno) {
		if c, ok := classes[errno]; ok {
			return New(c.code, c.reason, field, errno.Error())
		}
		return connect.NewError(connect.CodeInternal, errno)
	}
	switch {
	case errors.Is(err, context.Canceled):
		return connect.NewError(connect.CodeCanceled, err)
	case errors.Is(err, context.DeadlineExceeded):
		return connect.NewError(connect.CodeDeadlineExceeded, err)
	}
	return connect.NewError(connect.CodeInternal, err)
}

// UnknownUser is the error for a user that does not exist.
func UnknownUser() error {
	return New(connect.CodeInvalidArgument, agentv1.FileErrorReason_FILE_ERROR_REASON_UNKNOWN_USER, "user", "unknown user")
}
