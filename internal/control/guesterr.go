package control

import (
	"context"
	"errors"
	"strings"

	"connectrpc.com/connect"

	agentv1 "github.com/space-sandbox/space/internal/gen/space/agent/v1"
	"github.com/space-sandbox/space/internal/sandbox"
)

// GuestError turns the error of a call into a guest (SandboxService, FileService) into one for the API's client.
// fieldPrefix is put before the name of the request field that the guest blames, such as "" or "spec.". The guest's
// own text stays in the wrapped cause, for logs: a guest is not trusted to speak to clients.
//
// What a file call met: missing → not_found; in the way, or not empty → conflict; not allowed for the user →
// forbidden; wrong kind, unusable path, unknown user → invalid_request; disk full or read-only → failed_precondition;
// too many open files → service_unavailable. A missing cwd is invalid_request: it is a field of the command. Without
// such a detail the Connect code decides; a guest that cannot be reached or is too slow is service_unavailable.
func GuestError(err error, fieldPrefix string) error {
	if err == nil {
		return nil
	}
	var typed *sandbox.Error
	if errors.As(err, &typed) {
		return err
	}
	if d := fileDetail(err); d != nil {
		if e := fileError(d, fieldPrefix); e != nil {
			return e.WithCause(err)
		}
	}
	return guestCode(err).WithCause(err)
}

func fileDetail(err error) *agentv1.FileError {
	var ce *connect.Error
	if !errors.As(err, &ce) {
		return nil
	}
	for _, d := range ce.Details() {
		if v, err := d.Value(); err == nil {
			if fe, ok := v.(*agentv1.FileError); ok {
				return fe
			}
		}
	}
	return nil
}

// knownFields are the names a guest may blame; anything else it says is not passed on.
var knownFields = map[string]bool{"path": true, "from": true, "to": true, "user": true, "cwd": true, "mode": true}

func fileError(d *agentv1.FileError, prefix string) *sandbox.Error {
	field := d.GetField()
	if !knownFields[field] {
		field = "path"
	}
	full := prefix + field
	switch d.GetReason() {
	case agentv1.FileErrorReason_FILE_ERROR_REASON_NOT_FOUND:
		if field == "cwd" {
			return sandbox.Invalid(full, "exists", "no such folder in the sandbox")
		}
		return caused(sandbox.CodeNotFound, "no_such_file", "no such file or folder in the sandbox ("+full+")", "")
	case agentv1.FileErrorReason_FILE_ERROR_REASON_EXISTS:
		return caused(sandbox.CodeConflict, "file_exists", "a file or folder of this name exists ("+full+")", "choose another name, or overwrite where the call can")
	case agentv1.FileErrorReason_FILE_ERROR_REASON_NOT_EMPTY:
		return caused(sandbox.CodeConflict, "not_empty", "the folder is not empty ("+full+")", "delete recursively")
	case agentv1.FileErrorReason_FILE_ERROR_REASON_PERMISSION:
		return caused(sandbox.CodeForbidden, "permission_denied", "the sandbox's user has no permission ("+full+")", "act as another user, such as root")
	case agentv1.FileErrorReason_FILE_ERROR_REASON_NOT_DIRECTORY:
		return sandbox.Invalid(full, "directory", "is not a folder")
	case agentv1.FileErrorReason_FILE_ERROR_REASON_IS_DIRECTORY:
		return sandbox.Invalid(full, "file", "is a folder")
	case agentv1.FileErrorReason_FILE_ERROR_REASON_INVALID_PATH:
		return sandbox.Invalid(full, "path", "is not a usable path")
	case agentv1.FileErrorReason_FILE_ERROR_REASON_UNKNOWN_USER:
		return sandbox.Invalid(full, "exists", "no such user in the sandbox")
	case agentv1.FileErrorReason_FILE_ERROR_REASON_NO_SPACE:
		return caused(sandbox.CodeFailedPrecondition, "no_space", "the sandbox's disk is full", "delete files, or use a sandbox with more disk_mib")
	case agentv1.FileErrorReason_FILE_ERROR_REASON_READ_ONLY:
		return caused(sandbox.CodeFailedPrecondition, "read_only", "the file system is read-only ("+full+")", "")
	case agentv1.FileErrorReason_FILE_ERROR_REASON_TOO_MANY_OPEN:
		return caused(sandbox.CodeServiceUnavailable, "too_many_open_files", "too many files are open in the sandbox", "")
	}
	return nil
}

func caused(code sandbox.Code, cause, message, remediation string) *sandbox.Error {
	e := sandbox.Errorf(code, "%s", message)
	e.Details.Cause, e.Details.Remediation = cause, remediation
	return e
}

func guestCode(err error) *sandbox.Error {
	if errors.Is(err, context.DeadlineExceeded) || errors.Is(err, context.Canceled) {
		return caused(sandbox.CodeServiceUnavailable, "timeout", "the sandbox did not answer in time", "try again")
	}
	switch connect.CodeOf(err) {
	case connect.CodeNotFound:
		return sandbox.Errorf(sandbox.CodeNotFound, "not found in the sandbox")
	case connect.CodeAlreadyExists:
		return sandbox.Errorf(sandbox.CodeConflict, "it exists in the sandbox already")
	case connect.CodeInvalidArgument, connect.CodeOutOfRange:
		return sandbox.Errorf(sandbox.CodeInvalidRequest, "the sandbox refused the request as malformed or out of range")
	case connect.CodePermissionDenied:
		return caused(sandbox.CodeForbidden, "permission_denied", "the sandbox's user has no permission", "act as another user, such as root")
	case connect.CodeFailedPrecondition, connect.CodeAborted:
		e := sandbox.Errorf(sandbox.CodeConflict, "the state in the sandbox does not allow this now")
		e.Retryable = connect.CodeOf(err) == connect.CodeAborted
		return e
	case connect.CodeResourceExhausted:
		return caused(sandbox.CodeServiceUnavailable, "sandbox_exhausted", "the sandbox has no more room for this (processes, memory, open files)", "end processes in the sandbox and try again")
	case connect.CodeUnimplemented:
		return sandbox.Errorf(sandbox.CodeFailedPrecondition, "this sandbox cannot do that")
	case connect.CodeUnavailable, connect.CodeDeadlineExceeded, connect.CodeCanceled:
		return caused(sandbox.CodeServiceUnavailable, "guest_unreachable", "the sandbox cannot be reached at the moment", "try again")
	}
	return sandbox.Errorf(sandbox.CodeInternal, "internal error")
}

// nodeError is the error of a question to the node itself.
func nodeError(err error) error {
	var typed *sandbox.Error
	if errors.As(err, &typed) {
		return err
	}
	e := sandbox.Errorf(sandbox.CodeServiceUnavailable, "the node cannot be reached at the moment")
	e.Details.Cause = strings.ReplaceAll(connect.CodeOf(err).String(), " ", "_")
	return e.WithCause(err)
}
