package proc

import (
	"errors"
	"path"
	"strings"

	"connectrpc.com/connect"
	"github.com/space-sandbox/space/internal/agent/creds"
	"github.com/space-sandbox/space/internal/agent/fault"
	"github.com/space-sandbox/space/internal/agent/users"
	agentv1 "github.com/space-sandbox/space/internal/gen/space/agent/v1"
	"golang.org/x/sys/unix"
)

// where is a user and a working folder that exist.
type where struct {
	user users.User
	cwd  string
}

// resolve finds the user and checks the working folder with the user's rights; more, if not nil, is called with
// these rights too.
func resolve(db *users.DB, user string, cwd []byte, more func(w where)) (where, error) {
	u, err := db.Lookup(user)
	if err != nil {
		return where{}, fault.UnknownUser()
	}
	w := where{user: u, cwd: string(cwd)}
	if w.cwd == "" {
		w.cwd = u.Home
	} else if !strings.HasPrefix(w.cwd, "/") {
		w.cwd = u.Home + "/" + w.cwd
	}
	if strings.IndexByte(w.cwd, 0) >= 0 || len(w.cwd) >= unix.PathMax {
		return where{}, badCwd(unix.EINVAL)
	}
	err = creds.Do(u, func() error {
		if err := enterable(w.cwd); err != nil {
			return badCwd(err)
		}
		if more != nil {
			more(w)
		}
		return nil
	})
	if err != nil {
		return where{}, fault.From(err, "cwd")
	}
	return w, nil
}

// badCwd is invalid_argument whatever is wrong: the detail's reason tells.
func badCwd(err error) error {
	e := fault.From(err, "cwd")
	var ce *connect.Error
	if !errors.As(e, &ce) || ce.Code() == connect.CodeInternal {
		return e
	}
	out := connect.NewError(connect.CodeInvalidArgument, errors.New("cwd: "+err.Error()))
	for _, d := range ce.Details() {
		out.AddDetail(d)
	}
	return out
}

func enterable(dir string) error {
	fd, err := unix.Open(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(fd) }()
	return unix.Faccessat2(fd, ".", unix.X_OK, unix.AT_EACCESS)
}

// lookPath finds argv[0] as a shell would, with the rights of the calling thread. An error has the exit code.
func lookPath(name, cwd, pathVar string) (string, *execError) {
	if strings.Contains(name, "/") {
		if err := executable(at(cwd, name)); err != nil {
			return "", toExecError(err)
		}
		return at(cwd, name), nil
	}
	worst := &execError{code: 127, text: "command not found"}
	if name == "" {
		return "", worst
	}
	for _, dir := range strings.Split(pathVar, ":") {
		full := at(cwd, path.Join(dir, name))
		err := executable(full)
		if err == nil {
			return full, nil
		}
		if errors.Is(err, unix.EACCES) && exists(full) {
			worst = toExecError(err)
		}
	}
	return "", worst
}

// at makes name absolute without resolving anything in it.
func at(cwd, name string) string {
	if strings.HasPrefix(name, "/") {
		return name
	}
	return strings.TrimSuffix(cwd, "/") + "/" + name
}

func exists(file string) bool {
	var st unix.Stat_t
	return unix.Stat(file, &st) == nil
}

func executable(file string) error {
	var st unix.Stat_t
	if err := unix.Stat(file, &st); err != nil {
		return err
	}
	if st.Mode&unix.S_IFMT == unix.S_IFDIR {
		return unix.EISDIR
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG {
		return unix.EACCES
	}
	return unix.Faccessat2(unix.AT_FDCWD, file, unix.X_OK, unix.AT_EACCESS)
}

// execError is why a program could not be executed.
type execError struct {
	code int32
	text string
}

func toExecError(err error) *execError {
	switch {
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENOTDIR):
		return &execError{127, "No such file or directory"}
	case errors.Is(err, unix.EACCES), errors.Is(err, unix.EPERM):
		return &execError{126, "Permission denied"}
	case errors.Is(err, unix.ENOEXEC):
		return &execError{126, "Exec format error"}
	case errors.Is(err, unix.EISDIR):
		return &execError{126, "Is a directory"}
	}
	return &execError{126, err.Error()}
}

func execFrame(argv0 string, e *execError) []byte {
	text := argv0 + ": " + e.text + "\n"
	return []byte(text[max(0, len(text)-frameBytes):])
}

// errorStream is where the message of a failed exec goes.
func errorStream(pty bool) agentv1.Stream {
	if pty {
		return agentv1.Stream_STREAM_PTY
	}
	return agentv1.Stream_STREAM_STDERR
}
