package files

import (
	"context"
	"errors"

	"connectrpc.com/connect"
	"github.com/space-sandbox/space/internal/agent/creds"
	"github.com/space-sandbox/space/internal/agent/fault"
	"github.com/space-sandbox/space/internal/agent/users"
	agentv1 "github.com/space-sandbox/space/internal/gen/space/agent/v1"
)

const (
	// maxStreams bounds the open Read and Write streams.
	maxStreams = 64
	// maxOps bounds the operations under way: each has a thread, and one on a guest's hung file system keeps it.
	maxOps = 128
)

// Service implements space.agent.v1.FileService.
type Service struct {
	users   *users.DB
	streams chan struct{} // has one element for each open stream
	ops     chan struct{} // has one element for each operation under way
}

// New returns the service for the users of db.
func New(db *users.DB) *Service {
	return &Service{users: db, streams: make(chan struct{}, maxStreams), ops: make(chan struct{}, maxOps)}
}

// acquire counts a stream; release undoes it.
func (s *Service) acquire() error {
	select {
	case s.streams <- struct{}{}:
		return nil
	default:
		return fault.New(connect.CodeResourceExhausted, agentv1.FileErrorReason_FILE_ERROR_REASON_TOO_MANY_OPEN,
			"path", "too many open file streams")
	}
}

func (s *Service) release() { <-s.streams }

// target is a path and the user who names it.
type target struct {
	user users.User
	path string
	ops  chan struct{}
}

func (s *Service) target(user string, path []byte, field string) (target, error) {
	u, err := s.users.Lookup(user)
	if err != nil {
		return target{}, fault.UnknownUser()
	}
	p, err := resolve(u.Home, path)
	if err != nil {
		return target{}, fault.From(err, field)
	}
	return target{u, p, s.ops}, nil
}

// with runs fn with the rights of the target's user and makes a typed error of its failure.
func (t target) with(field string, fn func() error) error {
	select {
	case t.ops <- struct{}{}:
		defer func() { <-t.ops }()
	default:
		return fault.New(connect.CodeResourceExhausted, agentv1.FileErrorReason_FILE_ERROR_REASON_TOO_MANY_OPEN,
			field, "too many file operations")
	}
	return fault.From(creds.Do(t.user, fn), field)
}

// Stat implements FileService.
func (s *Service) Stat(_ context.Context, req *connect.Request[agentv1.StatRequest]) (*connect.Response[agentv1.StatResponse], error) {
	t, err := s.target(req.Msg.GetUser(), req.Msg.GetPath(), "path")
	if err != nil {
		return nil, err
	}
	e, err := s.stat(t, req.Msg.GetFollow())
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&agentv1.StatResponse{Entry: e}), nil
}

func (s *Service) stat(t target, follow bool) (e *agentv1.Entry, err error) {
	err = t.with("path", func() error {
		e, err = describe(t.path, follow, s.users.Names())
		return err
	})
	return e, err
}

// Mkdir implements FileService.
func (s *Service) Mkdir(_ context.Context, req *connect.Request[agentv1.MkdirRequest]) (*connect.Response[agentv1.MkdirResponse], error) {
	m := req.Msg
	if err := checkMode(m.Mode); err != nil {
		return nil, err
	}
	t, err := s.target(m.GetUser(), m.GetPath(), "path")
	if err != nil {
		return nil, err
	}
	err = t.with("path", func() error { return mkdir(t.path, m.Mode, m.GetParents()) })
	if err != nil {
		return nil, err
	}
	e, err := s.stat(t, true)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&agentv1.MkdirResponse{Entry: e}), nil
}

// Remove implements FileService.
func (s *Service) Remove(_ context.Context, req *connect.Request[agentv1.RemoveRequest]) (*connect.Response[agentv1.RemoveResponse], error) {
	t, err := s.target(req.Msg.GetUser(), req.Msg.GetPath(), "path")
	if err != nil {
		return nil, err
	}
	if err := t.with("path", func() error { return remove(t.path, req.Msg.GetRecursive()) }); err != nil {
		return nil, err
	}
	return connect.NewResponse(&agentv1.RemoveResponse{}), nil
}

// Move implements FileService.
func (s *Service) Move(ctx context.Context, req *connect.Request[agentv1.MoveRequest]) (*connect.Response[agentv1.MoveResponse], error) {
	m := req.Msg
	e, err := s.transfer(m.GetUser(), m.GetFrom(), m.GetTo(), func(from, to string) error {
		return move(ctx, from, to, m.GetOverwrite())
	})
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&agentv1.MoveResponse{Entry: e}), nil
}

// Copy implements FileService.
func (s *Service) Copy(ctx context.Context, req *connect.Request[agentv1.CopyRequest]) (*connect.Response[agentv1.CopyResponse], error) {
	m := req.Msg
	e, err := s.transfer(m.GetUser(), m.GetFrom(), m.GetTo(), func(from, to string) error {
		return duplicate(ctx, from, to, m.GetOverwrite(), m.GetRecursive())
	})
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&agentv1.CopyResponse{Entry: e}), nil
}

// transfer resolves both paths and describes the second one after fn. Failures are about `from` unless fn says else.
func (s *Service) transfer(user string, from, to []byte, fn func(from, to string) error) (*agentv1.Entry, error) {
	src, err := s.target(user, from, "from")
	if err != nil {
		return nil, err
	}
	dst, err := s.target(user, to, "to")
	if err != nil {
		return nil, err
	}
	err = src.with("from", func() error {
		err := fn(src.path, dst.path)
		var at *atTarget
		if errors.As(err, &at) {
			return fault.From(at.err, "to")
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	return s.stat(dst, false)
}

// atTarget marks an error that is about the request's `to`.
type atTarget struct{ err error }

// Error implements error.
func (e *atTarget) Error() string { return e.err.Error() }

// Unwrap returns the cause.
func (e *atTarget) Unwrap() error { return e.err }

func checkMode(mode *uint32) error {
	if mode != nil && *mode > 0o7777 {
		return connect.NewError(connect.CodeInvalidArgument, errors.New("mode has more than permission bits"))
	}
	return nil
}
