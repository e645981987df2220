package archive

import (
	"context"
	"errors"

	"connectrpc.com/connect"
	nodev1 "github.com/space-sandbox/space/internal/gen/space/node/v1"
	"github.com/space-sandbox/space/internal/gen/space/node/v1/nodev1connect"
	"github.com/space-sandbox/space/internal/journal"
)

// Archive serves the journal of a sandbox that has no living shim. What needs the guest answers
// failed_precondition.
type Archive struct {
	*Reading
	journal *journal.Journal
}

var _ nodev1connect.SandboxServiceHandler = (*Archive)(nil)

// New opens the journal in dir. reason is what streams of processes that did not exit end with, such as
// "sandbox_failed".
func New(dir, reason string) (*Archive, error) {
	j, err := journal.OpenReadOnly(dir)
	if err != nil {
		return nil, err
	}
	return &Archive{journal: j, Reading: NewReading(j, func() string { return reason })}, nil
}

// Close ends the use of the journal.
func (a *Archive) Close() error { return a.journal.Close() }

func errGone() error {
	return connect.NewError(connect.CodeFailedPrecondition, errors.New("the sandbox does not run"))
}

// CreateProcess needs a running sandbox.
func (a *Archive) CreateProcess(context.Context, *connect.Request[nodev1.CreateProcessRequest]) (*connect.Response[nodev1.CreateProcessResponse], error) {
	return nil, errGone()
}

// Signal needs a running sandbox.
func (a *Archive) Signal(context.Context, *connect.Request[nodev1.SignalRequest]) (*connect.Response[nodev1.SignalResponse], error) {
	return nil, errGone()
}

// WriteStdin needs a running sandbox.
func (a *Archive) WriteStdin(context.Context, *connect.Request[nodev1.WriteStdinRequest]) (*connect.Response[nodev1.WriteStdinResponse], error) {
	return nil, errGone()
}

// Resize needs a running sandbox.
func (a *Archive) Resize(context.Context, *connect.Request[nodev1.ResizeRequest]) (*connect.Response[nodev1.ResizeResponse], error) {
	return nil, errGone()
}
