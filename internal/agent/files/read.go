package files

import (
	"context"
	"errors"
	"io"
	"os"
	"time"

	"connectrpc.com/connect"
	"github.com/space-sandbox/space/internal/agent/fault"
	agentv1 "github.com/space-sandbox/space/internal/gen/space/agent/v1"
	"golang.org/x/sys/unix"
)

const (
	chunkBytes = 128 << 10
	// idleWait bounds one wait for a pipe, terminal or device.
	idleWait = 10 * time.Second
)

// Read implements FileService.
func (s *Service) Read(ctx context.Context, req *connect.Request[agentv1.ReadRequest], out *connect.ServerStream[agentv1.ReadResponse]) error {
	m := req.Msg
	t, err := s.target(m.GetUser(), m.GetPath(), "path")
	if err != nil {
		return err
	}
	if err := s.acquire(); err != nil {
		return err
	}
	defer s.release()
	f, e, err := s.open(t, m.GetOffset())
	if err != nil {
		return err
	}
	defer f.Close()
	defer context.AfterFunc(ctx, func() { _ = f.SetReadDeadline(time.Unix(1, 0)) })()
	if err := out.Send(&agentv1.ReadResponse{Kind: &agentv1.ReadResponse_Entry{Entry: e}}); err != nil {
		return err
	}
	return fault.From(send(ctx, f, e.GetType(), m.GetLength(), out), "path")
}

// open opens a file for reading at an offset. Without waiting: a pipe whose other end is missing reads as empty.
func (s *Service) open(t target, offset uint64) (f *os.File, e *agentv1.Entry, err error) {
	err = t.with("path", func() error {
		fd, err := unix.Open(t.path, unix.O_RDONLY|unix.O_NONBLOCK|unix.O_NOCTTY|unix.O_CLOEXEC, 0)
		if err != nil {
			return err
		}
		f = os.NewFile(uintptr(fd), "file")
		return nil
	})
	if err != nil {
		return nil, nil, err
	}
	if e, err = describeOpen(f, t.path, s, offset); err != nil {
		f.Close()
		return nil, nil, fault.From(err, "path")
	}
	return f, e, nil
}

func describeOpen(f *os.File, path string, s *Service, offset uint64) (*agentv1.Entry, error) {
	conn, err := f.SyscallConn()
	if err != nil {
		return nil, err
	}
	var st unix.Stat_t
	if ctl := conn.Control(func(fd uintptr) { err = unix.Fstat(int(fd), &st) }); ctl != nil || err != nil {
		return nil, errors.Join(ctl, err)
	}
	if st.Mode&unix.S_IFMT == unix.S_IFDIR {
		return nil, unix.EISDIR
	}
	if offset > 1<<62 {
		return nil, unix.EINVAL
	}
	if offset > 0 {
		if _, err := f.Seek(int64(offset), io.SeekStart); err != nil {
			return nil, unix.EINVAL // a pipe has no offsets
		}
	}
	return entryOf(&st, path, s.users.Names()), nil
}

// send copies until the end, whatever size the file said it has: files in /proc say 0.
func send(ctx context.Context, f *os.File, kind agentv1.FileType, length uint64, out *connect.ServerStream[agentv1.ReadResponse]) error {
	buf := make([]byte, chunkBytes)
	for left := length; length == 0 || left > 0; {
		part := buf
		if length > 0 {
			part = buf[:min(uint64(len(buf)), left)]
		}
		if kind == agentv1.FileType_FILE_TYPE_OTHER {
			_ = f.SetReadDeadline(time.Now().Add(idleWait))
		}
		n, err := f.Read(part)
		if n > 0 {
			left -= uint64(n)
			if err := out.Send(&agentv1.ReadResponse{Kind: &agentv1.ReadResponse_Data{Data: part[:n]}}); err != nil {
				return err
			}
		}
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case errors.Is(err, io.EOF):
			return nil
		case errors.Is(err, os.ErrDeadlineExceeded):
			return context.DeadlineExceeded
		case err != nil:
			return err
		}
	}
	return nil
}
