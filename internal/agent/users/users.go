package users

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

// ErrUnknown means that no user has this name.
var ErrUnknown = errors.New("unknown user")

// maxFile bounds what is read of either file.
const maxFile = 1 << 20

// User is whose rights a process or a file operation has.
type User struct {
	Name   string // the number when there is no name
	UID    uint32
	GID    uint32
	Groups []uint32 // supplementary
	Home   string
	Shell  string
}

// DB resolves users below a root folder.
type DB struct {
	root     string
	fallback string

	mu     sync.Mutex
	passwd stamp
	group  stamp
	names  *Names
}

// stamp tells whether a file is still the one that was read.
type stamp struct {
	mtime time.Time
	size  int64
	inode uint64
}

// New returns the DB of the files in root/etc. fallback is the user that an empty name means.
func New(root, fallback string) *DB {
	return &DB{root: root, fallback: fallback}
}

// Lookup resolves a name or a decimal uid. A uid needs no entry.
func (d *DB) Lookup(name string) (User, error) {
	if name == "" {
		name = d.fallback
	}
	n := d.Names()
	if u, ok := n.byName[name]; ok {
		return n.withGroups(u), nil
	}
	// 2^32-1 means "no change" to the kernel and can be nobody's.
	uid, err := strconv.ParseUint(name, 10, 32)
	if err != nil || uid == 1<<32-1 {
		return User{}, ErrUnknown
	}
	if u, ok := n.byUID[uint32(uid)]; ok {
		return n.withGroups(u), nil
	}
	return User{Name: name, UID: uint32(uid), GID: uint32(uid), Home: "/", Shell: "/bin/sh"}, nil
}

// Names returns an immutable snapshot of both files.
func (d *DB) Names() *Names {
	d.mu.Lock()
	defer d.mu.Unlock()
	pw, gr := filepath.Join(d.root, "etc/passwd"), filepath.Join(d.root, "etc/group")
	ps, gs := stampOf(pw), stampOf(gr)
	if d.names != nil && ps == d.passwd && gs == d.group {
		return d.names
	}
	d.passwd, d.group, d.names = ps, gs, parse(readFile(pw), readFile(gr))
	return d.names
}

func stampOf(path string) stamp {
	info, err := os.Stat(path)
	if err != nil {
		return stamp{}
	}
	s := stamp{mtime: info.ModTime(), size: info.Size()}
	if st, ok := info.Sys().(*syscall.Stat_t); ok {
		s.inode = st.Ino
	}
	return s
}

// readFile never blocks: a pipe in the place of the file reads as empty.
func readFile(path string) string {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return ""
	}
	defer f.Close()
	if info, err := f.Stat(); err != nil || !info.Mode().IsRegular() {
		return ""
	}
	data, err := io.ReadAll(io.LimitReader(f, maxFile))
	if err != nil {
		return ""
	}
	return string(data)
}

// Names is what the two files said at one time.
type Names struct {
	byName  map[string]User
	byUID   map[uint32]User
	groups  map[uint32]string
	members map[string][]uint32
}

func (n *Names) withGroups(u User) User {
	u.Groups = n.members[u.Name]
	return u
}

// User returns the name of a uid, or the number.
func (n *Names) User(uid uint32) string {
	if u, ok := n.byUID[uid]; ok {
		return u.Name
	}
	return fmt.Sprint(uid)
}

// Group returns the name of a gid, or the number.
func (n *Names) Group(gid uint32) string {
	if g, ok := n.groups[gid]; ok {
		return g
	}
	return fmt.Sprint(gid)
}

func parse(passwd, group string) *Names {
	n := &Names{byName: map[string]User{}, byUID: map[uint32]User{},
		groups: map[uint32]string{}, members: map[string][]uint32{}}
	for line := range strings.Lines(passwd) {
		if u, ok := parseUser(strings.TrimRight(line, "\n")); ok {
			if _, dup := n.byName[u.Name]; !dup {
				n.byName[u.Name] = u
			}
			if _, dup := n.byUID[u.UID]; !dup {
				n.byUID[u.UID] = u
			}
		}
	}
	for line := range strings.Lines(group) {
		n.addGroup(strings.TrimRight(line, "\n"))
	}
	return n
}

func parseUser(line string) (User, bool) {
	f := strings.Split(line, ":")
	if len(f) < 7 || f[0] == "" || strings.ContainsRune(line, 0) {
		return User{}, false
	}
	uid, err := parseID(f[2])
	if err != nil {
		return User{}, false
	}
	gid, err := parseID(f[3])
	if err != nil {
		return User{}, false
	}
	u := User{Name: f[0], UID: uid, GID: gid, Home: f[5], Shell: f[6]}
	if !strings.HasPrefix(u.Home, "/") {
		u.Home = "/"
	}
	if u.Shell == "" {
		u.Shell = "/bin/sh"
	}
	return u, true
}

func (n *Names) addGroup(line string) {
	f := strings.Split(line, ":")
	if len(f) < 4 || f[0] == "" {
		return
	}
	gid, err := parseID(f[2])
	if err != nil {
		return
	}
	if _, dup := n.groups[gid]; !dup {
		n.groups[gid] = f[0]
	}
	for _, member := range strings.Split(f[3], ",") {
		// The kernel refuses more than 65,536 groups; far fewer are plausible.
		if member != "" && len(n.members[member]) < 1024 {
			n.members[member] = append(n.members[member], gid)
		}
	}
}

func parseID(s string) (uint32, error) {
	id, err := strconv.ParseUint(s, 10, 32)
	if err == nil && id == 1<<32-1 {
		err = strconv.ErrRange
	}
	return uint32(id), err
}
