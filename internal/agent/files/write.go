package files

import (
	"context"
	"crypto/rand"
	"errors"
	"os"
	"strings"
	"time"

	"connectrpc.com/connect"
	"github.com/space-sandbox/space/internal/agent/creds"
	"github.com/space-sandbox/space/internal/agent/fault"
	agentv1 "github.com/space-sandbox/space/internal/gen/space/agent/v1"
	"golang.org/x/sys/unix"
)

const (
	maxChunk = 256 << 10
	maxLinks = 40
)

// Write implements FileService.
func (s *Service) Write(ctx context.Context, in *connect.ClientStream[agentv1.WriteRequest]) (*connect.Response[agentv1.WriteResponse], error) {
	if err := s.acquire(); err != nil {
		return nil, err
	}
	defer s.release()
	if !in.Receive() {
		return nil, errors.Join(in.Err(), errNoHeader)
	}
	h := in.Msg().GetHeader()
	if h == nil {
		return nil, errNoHeader
	}
	if err := checkMode(h.Mode); err != nil {
		return nil, err
	}
	t, err := s.target(h.GetUser(), h.GetPath(), "path")
	if err != nil {
		return nil, err
	}
	if strings.HasSuffix(string(h.GetPath()), "/") {
		return nil, fault.From(unix.EISDIR, "path")
	}
	w, err := newWriter(ctx, t, h)
	if err != nil {
		return nil, err
	}
	defer w.close()
	if err := w.receive(ctx, in); err != nil {
		return nil, err
	}
	e, err := s.stat(target{t.user, w.path, t.ops}, false)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&agentv1.WriteResponse{Entry: e}), nil
}

var (
	errNoHeader = connect.NewError(connect.CodeInvalidArgument, errors.New("the first message is not a header"))
	errNoCommit = connect.NewError(connect.CodeInvalidArgument, errors.New("the stream ended without a commit"))
)

// writer is one file being written. It owns file and dir, and the temporary file until its commit.
type writer struct {
	target
	mode   *uint32
	path   string   // where the content goes, links followed
	name   string   // last element of path
	dir    *os.File // its folder; nil when written directly
	temp   string   // name of the temporary file in dir; empty when committed or written directly
	file   *os.File
	direct bool
}

func newWriter(ctx context.Context, t target, h *agentv1.WriteHeader) (*writer, error) {
	w := &writer{target: t, mode: h.Mode}
	for {
		err := t.with("path", func() error { return w.open(h.GetParents()) })
		if err == nil {
			return w, nil
		}
		w.close()
		// A pipe that nobody reads yet: wait for a reader for a while.
		if !w.direct || connect.CodeOf(err) != connect.CodeFailedPrecondition {
			return nil, err
		}
		var cancel context.CancelFunc
		ctx, cancel = within(ctx, idleWait)
		defer cancel()
		select {
		case <-ctx.Done():
			return nil, err
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// within bounds ctx once: a context with a nearer deadline stays as it is.
func within(ctx context.Context, d time.Duration) (context.Context, context.CancelFunc) {
	if until, ok := ctx.Deadline(); ok && time.Until(until) <= d {
		return ctx, func() {}
	}
	return context.WithTimeout(ctx, d)
}

// open finds out what is there and opens what to write. It runs with the user's rights.
func (w *writer) open(parents bool) error {
	path, st, err := followLinks(w.target.path)
	if err != nil {
		return err
	}
	w.path = path
	if st != nil && (st.Mode&unix.S_IFMT != unix.S_IFREG || virtual(path)) {
		return w.openDirect(st)
	}
	dir, name, err := split(path)
	if err != nil {
		return err
	}
	if parents {
		if err := mkdir(dir, nil, true); err != nil {
			return err
		}
	}
	return w.openTemp(dir, name, st)
}

// openDirect opens a device, a pipe or a kernel file. Without waiting: a pipe that nobody reads answers ENXIO.
func (w *writer) openDirect(st *unix.Stat_t) error {
	if st.Mode&unix.S_IFMT == unix.S_IFDIR {
		return unix.EISDIR
	}
	w.direct = st.Mode&unix.S_IFMT == unix.S_IFIFO // only a pipe is worth a second try
	fd, err := unix.Open(w.path, unix.O_WRONLY|unix.O_NONBLOCK|unix.O_NOCTTY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	w.direct, w.file = true, os.NewFile(uintptr(fd), "file")
	return nil
}

// openTemp opens a temporary file with the mode and owner that the file will have.
func (w *writer) openTemp(dir, name string, old *unix.Stat_t) error {
	// Replacing needs rights to the folder only; writing needs them to the file.
	if old != nil {
		if err := unix.Faccessat2(unix.AT_FDCWD, w.path, unix.W_OK, unix.AT_EACCESS); err != nil {
			return err
		}
	}
	dirFD, err := unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if errors.Is(err, unix.EACCES) {
		// A folder that may be entered but not read is good enough, except for flushing it.
		dirFD, err = unix.Open(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	}
	if err != nil {
		return err
	}
	w.dir, w.name = os.NewFile(uintptr(dirFD), "folder"), name
	temp := tempName()
	fd, err := unix.Openat(dirFD, temp, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return err
	}
	w.temp, w.file = temp, os.NewFile(uintptr(fd), "file")
	mode := uint32(0o644)
	if old != nil {
		mode = old.Mode & 0o7777
		// Not allowed to give it away, a user who may write another's file becomes the owner of its next content.
		if err := unix.Fchown(fd, int(old.Uid), int(old.Gid)); err != nil && !errors.Is(err, unix.EPERM) {
			return err
		}
	}
	if w.mode != nil {
		mode = *w.mode
	}
	return unix.Fchmod(fd, mode)
}

// tempName is unguessable, so that nobody can be waiting at it.
func tempName() string { return ".space-" + rand.Text() + ".tmp" }

// followLinks resolves links in the last element. The state is nil when nothing is there.
func followLinks(path string) (string, *unix.Stat_t, error) {
	for range maxLinks {
		var st unix.Stat_t
		err := unix.Lstat(path, &st)
		if errors.Is(err, unix.ENOENT) {
			return path, nil, nil
		}
		if err != nil || st.Mode&unix.S_IFMT != unix.S_IFLNK {
			return path, &st, err
		}
		buf := make([]byte, unix.PathMax)
		n, err := unix.Readlink(path, buf)
		if err != nil {
			return "", nil, err
		}
		if path, err = resolve(path[:strings.LastIndexByte(path, '/')+1], buf[:n]); err != nil {
			return "", nil, err
		}
	}
	return "", nil, unix.ELOOP
}

// virtual reports whether a file is the kernel's: it looks regular and cannot be replaced.
func virtual(path string) bool {
	var fs unix.Statfs_t
	if unix.Statfs(path, &fs) != nil {
		return false
	}
	switch fs.Type {
	case unix.PROC_SUPER_MAGIC, unix.SYSFS_MAGIC, unix.CGROUP2_SUPER_MAGIC, unix.DEBUGFS_MAGIC, unix.TRACEFS_MAGIC:
		return true
	}
	return false
}

// receive writes the chunks and commits.
func (w *writer) receive(ctx context.Context, in *connect.ClientStream[agentv1.WriteRequest]) error {
	defer context.AfterFunc(ctx, func() { _ = w.file.SetWriteDeadline(time.Unix(1, 0)) })()
	for in.Receive() {
		switch k := in.Msg().GetKind().(type) {
		case *agentv1.WriteRequest_Data:
			if len(k.Data) > maxChunk {
				return connect.NewError(connect.CodeInvalidArgument, errors.New("data is longer than 256 KiB"))
			}
			if err := w.write(ctx, k.Data); err != nil {
				return fault.From(err, "path")
			}
		case *agentv1.WriteRequest_Commit:
			return w.commit()
		default:
			return connect.NewError(connect.CodeInvalidArgument, errors.New("neither data nor commit"))
		}
	}
	if err := in.Err(); err != nil {
		return err
	}
	return errNoCommit
}

func (w *writer) write(ctx context.Context, data []byte) error {
	if w.direct {
		_ = w.file.SetWriteDeadline(time.Now().Add(idleWait))
	}
	_, err := w.file.Write(data)
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return context.DeadlineExceeded
	}
	return err
}

// commit makes the content durable and then visible.
func (w *writer) commit() error {
	if w.direct {
		return nil
	}
	if err := w.file.Sync(); err != nil {
		return fault.From(err, "path")
	}
	return w.with("path", func() error {
		fd := int(w.dir.Fd())
		if err := unix.Renameat(fd, w.temp, fd, w.name); err != nil {
			return err
		}
		w.temp = ""
		err := unix.Fsync(fd)
		if errors.Is(err, unix.EBADF) || errors.Is(err, unix.EINVAL) {
			return nil // not readable, or a file system that has nothing to flush
		}
		return err
	})
}

// close removes what was not committed.
func (w *writer) close() {
	if w.file != nil {
		w.file.Close()
	}
	if w.dir == nil {
		return
	}
	if w.temp != "" {
		// It fails only if someone removed it already.
		_ = creds.Do(w.user, func() error { return unix.Unlinkat(int(w.dir.Fd()), w.temp, 0) })
	}
	w.dir.Close()
}
