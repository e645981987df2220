package files

import (
	"time"

	"github.com/space-sandbox/space/internal/agent/users"
	agentv1 "github.com/space-sandbox/space/internal/gen/space/agent/v1"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// describe returns what is at path.
func describe(path string, follow bool, names *users.Names) (*agentv1.Entry, error) {
	return describeAt(unix.AT_FDCWD, path, path, follow, names)
}

// describeAt returns what is at name below a folder; path is what the entry is called.
func describeAt(dir int, name, path string, follow bool, names *users.Names) (*agentv1.Entry, error) {
	flags := unix.AT_SYMLINK_NOFOLLOW
	if follow {
		flags = 0
	}
	var st unix.Stat_t
	if err := unix.Fstatat(dir, name, &st, flags); err != nil {
		return nil, err
	}
	e := entryOf(&st, path, names)
	if e.Type == agentv1.FileType_FILE_TYPE_SYMLINK {
		buf := make([]byte, unix.PathMax)
		n, err := unix.Readlinkat(dir, name, buf)
		if err != nil {
			return nil, err
		}
		e.SymlinkTarget = append([]byte(nil), buf[:n]...)
	}
	return e, nil
}

func entryOf(st *unix.Stat_t, path string, names *users.Names) *agentv1.Entry {
	return &agentv1.Entry{Path: []byte(path), Type: typeOf(st.Mode), Size: uint64(st.Size), Mode: st.Mode & 0o7777,
		Uid: st.Uid, Gid: st.Gid, Owner: names.User(st.Uid), Group: names.Group(st.Gid),
		ModifiedAt: timestamppb.New(time.Unix(st.Mtim.Unix()))}
}

func typeOf(mode uint32) agentv1.FileType {
	switch mode & unix.S_IFMT {
	case unix.S_IFREG:
		return agentv1.FileType_FILE_TYPE_FILE
	case unix.S_IFDIR:
		return agentv1.FileType_FILE_TYPE_DIRECTORY
	case unix.S_IFLNK:
		return agentv1.FileType_FILE_TYPE_SYMLINK
	}
	return agentv1.FileType_FILE_TYPE_OTHER
}
