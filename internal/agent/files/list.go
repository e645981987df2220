package files

import (
	"container/heap"
	"context"
	"errors"
	"io"
	"os"
	"sort"
	"strings"

	"connectrpc.com/connect"
	"github.com/space-sandbox/space/internal/agent/users"
	agentv1 "github.com/space-sandbox/space/internal/gen/space/agent/v1"
	"golang.org/x/sys/unix"
)

const (
	maxDepth = 64
	maxLimit = 1000
)

// ListDir implements FileService.
func (s *Service) ListDir(ctx context.Context, req *connect.Request[agentv1.ListDirRequest]) (*connect.Response[agentv1.ListDirResponse], error) {
	m := req.Msg
	if m.GetDepth() < 1 || m.GetDepth() > maxDepth || m.GetLimit() < 1 || m.GetLimit() > maxLimit {
		return nil, connect.NewError(connect.CodeInvalidArgument, errors.New("depth is not 1 to 64, or limit not 1 to 1000"))
	}
	t, err := s.target(m.GetUser(), m.GetPath(), "path")
	if err != nil {
		return nil, err
	}
	l := &listing{ctx: ctx, names: s.users.Names(), limit: int(m.GetLimit())}
	after, err := afterElements(t.path, m.GetAfter())
	if err != nil {
		return nil, err
	}
	err = t.with("path", func() error { return l.folder(unix.AT_FDCWD, t.path, t.path, int(m.GetDepth()), after) })
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&agentv1.ListDirResponse{Entries: l.entries, More: l.more}), nil
}

// afterElements splits what comes after the listed folder in the last path of the page before.
func afterElements(folder string, after []byte) ([]string, error) {
	if len(after) == 0 {
		return nil, nil
	}
	rest, ok := strings.CutPrefix(string(after), strings.TrimSuffix(folder, "/")+"/")
	if !ok || rest == "" {
		return nil, connect.NewError(connect.CodeInvalidArgument, errors.New("after is not a path below the folder"))
	}
	return strings.Split(rest, "/"), nil
}

// listing collects one page.
type listing struct {
	ctx     context.Context
	names   *users.Names
	limit   int
	entries []*agentv1.Entry
	more    bool
}

// folder lists one folder depth first. after are the elements below it that the page before ended with: their own
// entries are left out. The top folder may be named by a link, the others not.
func (l *listing) folder(parent int, name, path string, depth int, after []string) error {
	flags := unix.O_RDONLY | unix.O_DIRECTORY | unix.O_CLOEXEC
	if parent != unix.AT_FDCWD {
		flags |= unix.O_NOFOLLOW
	}
	fd, err := unix.Openat(parent, name, flags, 0)
	if err != nil {
		return err
	}
	dir := os.NewFile(uintptr(fd), "folder")
	defer dir.Close()
	from, again := "", len(after) > 0
	if again {
		from = after[0]
	}
	for {
		// One more than fits tells whether there are more; one more is the entry left out.
		want := l.limit - len(l.entries) + 2
		batch, err := smallest(l.ctx, dir, from, again, want)
		if err != nil {
			return err
		}
		for _, n := range batch {
			seen, rest := again && n == from, []string(nil)
			if seen {
				rest = after[1:]
			}
			if err := l.visit(int(dir.Fd()), n, path, depth, seen, rest); err != nil || l.more {
				return err
			}
		}
		if len(batch) < want {
			return nil
		}
		from, again = batch[len(batch)-1], false // entries that vanished left room
	}
}

// visit adds an entry unless the page before had it, and what is below it.
func (l *listing) visit(dir int, name, parent string, depth int, seen bool, after []string) error {
	path := strings.TrimSuffix(parent, "/") + "/" + name
	e, err := describeAt(dir, name, path, false, l.names)
	if errors.Is(err, unix.ENOENT) {
		return nil // gone since the folder was read
	}
	if err != nil {
		return err
	}
	if !seen {
		if len(l.entries) == l.limit {
			l.more = true
			return nil
		}
		l.entries = append(l.entries, e)
	}
	if e.GetType() != agentv1.FileType_FILE_TYPE_DIRECTORY || depth <= 1 {
		return nil
	}
	err = l.folder(dir, name, path, depth-1, after)
	// A folder that may not be read, or that was replaced meanwhile, has no entries; the list goes on.
	if errors.Is(err, unix.EACCES) || errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.ELOOP) {
		return nil
	}
	return err
}

// smallest returns the first names of a folder in byte order that come after from, with from itself if again. It keeps
// no more than limit names: a page of a huge folder costs reading the folder, not sorting it.
func smallest(ctx context.Context, dir *os.File, from string, again bool, limit int) ([]string, error) {
	if _, err := dir.Seek(0, io.SeekStart); err != nil {
		return nil, err
	}
	var top names
	for {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		some, err := dir.Readdirnames(1024)
		for _, n := range some {
			switch {
			case n < from, n == from && !again:
			case len(top) < limit:
				heap.Push(&top, n)
			case n < top[0]:
				top[0] = n
				heap.Fix(&top, 0)
			}
		}
		if errors.Is(err, io.EOF) {
			sort.Strings(top)
			return top, nil
		}
		if err != nil {
			return nil, err
		}
	}
}

// names is a heap with the greatest name on top.
type names []string

// Len, Less, Swap, Push and Pop implement heap.Interface.
func (n names) Len() int { return len(n) }

// Less implements heap.Interface.
func (n names) Less(i, j int) bool { return n[i] > n[j] }

// Swap implements heap.Interface.
func (n names) Swap(i, j int) { n[i], n[j] = n[j], n[i] }

// Push implements heap.Interface.
func (n *names) Push(x any) { *n = append(*n, x.(string)) }

// Pop implements heap.Interface.
func (n *names) Pop() any {
	last := len(*n) - 1
	x := (*n)[last]
	*n = (*n)[:last]
	return x
}
