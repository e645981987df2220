package agent_test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"connectrpc.com/connect"
	agentv1 "github.com/space-sandbox/space/internal/gen/space/agent/v1"
)

const nobody = 65534

// userDir is a folder that `nobody` owns and can reach.
func userDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("/var/tmp", "space-agent-test-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	if err := os.Chown(dir, nobody, nobody); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	return dir
}

func (h *host) read(path, user string, offset, length uint64) ([]byte, *agentv1.Entry, error) {
	s, err := h.files.Read(h.t.Context(), connect.NewRequest(&agentv1.ReadRequest{Path: []byte(path), User: user, Offset: offset, Length: length}))
	if err != nil {
		return nil, nil, err
	}
	defer func() { _ = s.Close() }()
	var data []byte
	var e *agentv1.Entry
	for s.Receive() {
		if got := s.Msg().GetEntry(); got != nil {
			e = got
		}
		data = append(data, s.Msg().GetData()...)
	}
	return data, e, s.Err()
}

func (h *host) writeFile(ctx context.Context, header *agentv1.WriteHeader, data []byte, commit bool) (*agentv1.Entry, error) {
	s := h.files.Write(ctx)
	msgs := []*agentv1.WriteRequest{{Kind: &agentv1.WriteRequest_Header{Header: header}}}
	for chunk := range slices.Chunk(data, 100<<10) {
		msgs = append(msgs, &agentv1.WriteRequest{Kind: &agentv1.WriteRequest_Data{Data: chunk}})
	}
	if commit {
		msgs = append(msgs, &agentv1.WriteRequest{Kind: &agentv1.WriteRequest_Commit{Commit: &agentv1.WriteCommit{}}})
	}
	for _, m := range msgs {
		if err := s.Send(m); err != nil {
			if err == io.EOF { //nolint:errorlint // the client returns io.EOF itself
				break
			}
			return nil, err
		}
	}
	r, err := s.CloseAndReceive()
	if err != nil {
		return nil, err
	}
	return r.Msg.GetEntry(), nil
}

func TestWriteAndRead(t *testing.T) {
	h := newHost(t)
	dir := userDir(t)
	weird := filepath.Join(dir, "new\n\xff\xfe dir", "file")
	for name, data := range map[string][]byte{weird: bytes.Repeat([]byte("0123456789"), 60000), dir + "/empty": {}} {
		e, err := h.writeFile(t.Context(), &agentv1.WriteHeader{Path: []byte(name), User: "nobody", Parents: true}, data, true)
		if err != nil || e.GetMode() != 0o644 || e.GetUid() != nobody || e.GetSize() != uint64(len(data)) || string(e.GetPath()) != name {
			t.Fatalf("write: %v %v", e, err)
		}
		got, e, err := h.read(name, "nobody", 0, 0)
		if err != nil || !bytes.Equal(got, data) || e.GetOwner() != "nobody" {
			t.Errorf("read: %d bytes, %v %v", len(got), e, err)
		}
	}
	if got, _, err := h.read(weird, "", 599995, 3); err != nil || string(got) != "567" {
		t.Errorf("range: %q %v", got, err)
	}
	if got, _, err := h.read(weird, "", 700000, 0); err != nil || len(got) != 0 {
		t.Errorf("past the end: %q %v", got, err)
	}
	if got, _, err := h.read("/proc/cpuinfo", "nobody", 0, 0); err != nil || len(got) == 0 {
		t.Errorf("cpuinfo: %d bytes %v", len(got), err)
	}
}

func TestWriteKeepsModeAndOwnerAndFollowsLinks(t *testing.T) {
	h := newHost(t)
	dir := userDir(t)
	file, link := filepath.Join(dir, "file"), filepath.Join(dir, "link")
	if err := os.WriteFile(file, []byte("old"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Chown(file, nobody, 7); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(file, 0o750|os.ModeSetuid); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("file", link); err != nil {
		t.Fatal(err)
	}
	e, err := h.writeFile(t.Context(), &agentv1.WriteHeader{Path: []byte(link)}, []byte("new"), true)
	if err != nil || string(e.GetPath()) != file || e.GetMode() != 0o4750 || e.GetUid() != nobody || e.GetGid() != 7 {
		t.Errorf("%v %v", e, err)
	}
	if target, err := os.Readlink(link); err != nil || target != "file" {
		t.Errorf("the link: %q %v", target, err)
	}
	mode := uint32(0o2711)
	if e, err := h.writeFile(t.Context(), &agentv1.WriteHeader{Path: []byte(file), Mode: &mode}, nil, true); err != nil || e.GetMode() != mode {
		t.Errorf("%v %v", e, err)
	}
}

func TestWriteWithoutCommitChangesNothing(t *testing.T) {
	h := newHost(t)
	dir := userDir(t)
	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, []byte("old"), 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := h.writeFile(t.Context(), &agentv1.WriteHeader{Path: []byte(file)}, []byte("new"), false); connect.CodeOf(err) != connect.CodeInvalidArgument {
		t.Errorf("no commit: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	s := h.files.Write(ctx)
	if err := s.Send(&agentv1.WriteRequest{Kind: &agentv1.WriteRequest_Header{Header: &agentv1.WriteHeader{Path: []byte(file)}}}); err != nil {
		t.Fatal(err)
	}
	count := func() int { l, _ := os.ReadDir(dir); return len(l) }
	eventually(t, "the temporary file is there", func() bool { return count() == 2 })
	cancel()
	eventually(t, "the temporary file is gone", func() bool { return count() == 1 })
	if got, err := os.ReadFile(file); err != nil || string(got) != "old" {
		t.Errorf("%q %v", got, err)
	}
}

func TestPipesAndDevices(t *testing.T) {
	h := newHost(t)
	fifo := filepath.Join(userDir(t), "fifo")
	if err := syscall.Mkfifo(fifo, 0o666); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	began := time.Now()
	_, err := h.writeFile(ctx, &agentv1.WriteHeader{Path: []byte(fifo)}, []byte("x"), true)
	if err == nil || time.Since(began) > 5*time.Second {
		t.Errorf("no reader: %v after %v", err, time.Since(began))
	}
	if got, _, err := h.read(fifo, "", 0, 0); err != nil || len(got) != 0 {
		t.Errorf("no writer: %q %v", got, err)
	}
	read := make(chan string, 1)
	go func() { b, _ := os.ReadFile(fifo); read <- string(b) }()
	if _, err := h.writeFile(t.Context(), &agentv1.WriteHeader{Path: []byte(fifo)}, []byte("data"), true); err != nil || <-read != "data" {
		t.Errorf("with a reader: %v", err)
	}
	if _, err := h.writeFile(t.Context(), &agentv1.WriteHeader{Path: []byte("/dev/null"), User: "nobody"}, []byte("x"), true); err != nil {
		t.Errorf("device: %v", err)
	}
	if _, err := h.writeFile(t.Context(), &agentv1.WriteHeader{Path: []byte("/dev/full")}, []byte("x"), true); connect.CodeOf(err) != connect.CodeResourceExhausted {
		t.Errorf("full: %v", err)
	}
}

func TestFileErrors(t *testing.T) {
	h := newHost(t)
	dir := userDir(t)
	for _, d := range []string{"full/sub", "secret"} {
		if err := os.MkdirAll(filepath.Join(dir, d), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(dir+"/file", nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("loop", dir+"/loop"); err != nil {
		t.Fatal(err)
	}
	stat := func(path, user string) error {
		_, err := h.files.Stat(t.Context(), connect.NewRequest(&agentv1.StatRequest{Path: []byte(path), User: user, Follow: true}))
		return err
	}
	remove := func(path string) error {
		_, err := h.files.Remove(t.Context(), connect.NewRequest(&agentv1.RemoveRequest{Path: []byte(path)}))
		return err
	}
	write := func(path, user string) error {
		_, err := h.writeFile(t.Context(), &agentv1.WriteHeader{Path: []byte(path), User: user}, []byte("x"), true)
		return err
	}
	move := func(from, to string) error {
		_, err := h.files.Move(t.Context(), connect.NewRequest(&agentv1.MoveRequest{From: []byte(from), To: []byte(to)}))
		return err
	}
	_, _, readDir := h.read(dir, "", 0, 0)
	_, mkdirErr := h.files.Mkdir(t.Context(), connect.NewRequest(&agentv1.MkdirRequest{Path: []byte(dir + "/full")}))
	_, rootErr := h.files.Remove(t.Context(), connect.NewRequest(&agentv1.RemoveRequest{Path: []byte("/usr/.."), Recursive: true}))
	_, slashErr := h.files.Remove(t.Context(), connect.NewRequest(&agentv1.RemoveRequest{Path: []byte("/"), Recursive: true}))
	for name, c := range map[string]struct {
		err    error
		reason string
		field  string
	}{
		"missing":      {stat(dir+"/no", ""), "NOT_FOUND", "path"},
		"exists":       {mkdirErr, "EXISTS", "path"},
		"rights":       {stat(dir+"/secret/x", "nobody"), "PERMISSION", "path"},
		"proc rights":  {stat("/proc/1/cwd", "nobody"), "PERMISSION", "path"},
		"write file":   {write(dir+"/file", "nobody"), "PERMISSION", "path"},
		"write dir":    {write("/etc/space-test", "nobody"), "PERMISSION", "path"},
		"not dir":      {stat(dir+"/file/x", ""), "NOT_DIRECTORY", "path"},
		"is dir":       {readDir, "IS_DIRECTORY", "path"},
		"write on dir": {write(dir, ""), "IS_DIRECTORY", "path"},
		"slash":        {write(dir+"/a/", ""), "IS_DIRECTORY", "path"},
		"not empty":    {remove(dir + "/full"), "NOT_EMPTY", "path"},
		"empty":        {stat("", ""), "INVALID_PATH", "path"},
		"nul":          {stat("a\x00b", ""), "INVALID_PATH", "path"},
		"long name":    {stat(strings.Repeat("x", 256), ""), "INVALID_PATH", "path"},
		"long path":    {stat(strings.Repeat("x/", 2100), ""), "INVALID_PATH", "path"},
		"loop":         {stat(dir+"/loop", ""), "INVALID_PATH", "path"},
		"user":         {stat("/", "who"), "UNKNOWN_USER", "user"},
		"root":         {slashErr, "INVALID_PATH", "path"},
		"root by ..":   {rootErr, "INVALID_PATH", "path"},
		"move source":  {move(dir+"/no", dir+"/x"), "NOT_FOUND", "from"},
		"move target":  {move(dir+"/file", dir+"/full"), "EXISTS", "to"},
		"read-only":    {write("/sys/space-test", ""), "PERMISSION", "path"},
	} {
		reason, field := reasonOf(c.err)
		if got := strings.TrimPrefix(reason.String(), "FILE_ERROR_REASON_"); got != c.reason || field != c.field {
			t.Errorf("%s: %v: %s %s", name, c.err, got, field)
		}
	}
}

func (h *host) list(path string, depth, limit uint32, after []byte) (*agentv1.ListDirResponse, error) {
	r, err := h.files.ListDir(h.t.Context(), connect.NewRequest(&agentv1.ListDirRequest{Path: []byte(path), Depth: depth, Limit: limit, After: after}))
	if err != nil {
		return nil, err
	}
	return r.Msg, nil
}

func TestListDirPages(t *testing.T) {
	h := newHost(t)
	dir := userDir(t)
	want := []string{"a", "a/b", "a/b/c", "a/b/d", "a-b", "b", "z"}
	for _, d := range []string{"a/b/c", "a/b/d", "a-b", "b", "z"} {
		if err := os.MkdirAll(filepath.Join(dir, d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink("a", dir+"/z/link"); err != nil {
		t.Fatal(err)
	}
	want = append(want, "z/link")
	for limit := uint32(1); limit <= 9; limit++ {
		var got []string
		var after []byte
		for {
			r, err := h.list(dir, 10, limit, after)
			if err != nil || len(r.GetEntries()) > int(limit) {
				t.Fatalf("%v %v", r, err)
			}
			for _, e := range r.GetEntries() {
				got = append(got, strings.TrimPrefix(string(e.GetPath()), dir+"/"))
				after = e.GetPath()
			}
			if !r.GetMore() {
				break
			}
		}
		if !slices.Equal(got, want) {
			t.Errorf("limit %d: %q", limit, got)
		}
	}
	r, err := h.list(dir, 1, 100, nil)
	if err != nil || len(r.GetEntries()) != 4 {
		t.Errorf("depth 1: %v %v", r, err)
	}
	if _, err := h.list(dir, 1, 100, []byte("/elsewhere")); connect.CodeOf(err) != connect.CodeInvalidArgument {
		t.Errorf("foreign after: %v", err)
	}
}

func TestListDirHuge(t *testing.T) {
	h := newHost(t)
	dir := t.TempDir()
	const total = 20000
	for i := range total {
		if err := os.Symlink("x", fmt.Sprintf("%s/%d", dir, i)); err != nil {
			t.Fatal(err)
		}
	}
	n, last := 0, ""
	for more := true; more; {
		r, err := h.list(dir, 1, 1000, []byte(last))
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range r.GetEntries() {
			if string(e.GetPath()) <= last {
				t.Fatalf("%s after %s", e.GetPath(), last)
			}
			last = string(e.GetPath())
			n++
		}
		more = r.GetMore()
	}
	if n != total {
		t.Errorf("%d entries", n)
	}
}

func TestTrees(t *testing.T) {
	h := newHost(t)
	dir := userDir(t)
	if err := os.MkdirAll(dir+"/src/sub", 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(dir+"/src/sub/file", []byte("text"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(dir+"/src/sub", 0o711); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("/etc/passwd", dir+"/src/link"); err != nil {
		t.Fatal(err)
	}
	cp := func(from, to string, recursive, overwrite bool) error {
		_, err := h.files.Copy(t.Context(), connect.NewRequest(&agentv1.CopyRequest{From: []byte(from), To: []byte(to),
			Recursive: recursive, Overwrite: overwrite}))
		return err
	}
	if err := cp(dir+"/src", dir+"/dst", true, false); err != nil {
		t.Fatal(err)
	}
	if target, err := os.Readlink(dir + "/dst/link"); err != nil || target != "/etc/passwd" {
		t.Errorf("link: %q %v", target, err)
	}
	if info, err := os.Stat(dir + "/dst/sub"); err != nil || info.Mode().Perm() != 0o711 {
		t.Errorf("mode: %v %v", info, err)
	}
	for name, c := range map[string]struct {
		err    error
		reason agentv1.FileErrorReason
	}{
		"not recursive": {cp(dir+"/src", dir+"/x", false, false), agentv1.FileErrorReason_FILE_ERROR_REASON_IS_DIRECTORY},
		"into itself":   {cp(dir+"/src", dir+"/src/sub/x", true, false), agentv1.FileErrorReason_FILE_ERROR_REASON_INVALID_PATH},
		"exists":        {cp(dir+"/src/sub/file", dir+"/dst/sub/file", false, false), agentv1.FileErrorReason_FILE_ERROR_REASON_EXISTS},
	} {
		if reason, _ := reasonOf(c.err); reason != c.reason {
			t.Errorf("%s: %v", name, c.err)
		}
	}
	if err := cp(dir+"/src/link", dir+"/passwd", false, false); err != nil {
		t.Error(err)
	}
	if got, err := os.ReadFile(dir + "/passwd"); err != nil || !bytes.Contains(got, []byte("root")) {
		t.Errorf("followed: %v", err)
	}
	// /dev/shm is another file system.
	away := fmt.Sprintf("/dev/shm/space-agent-test-%d", os.Getpid())
	defer func() { _ = os.RemoveAll(away) }()
	if _, err := h.files.Move(t.Context(), connect.NewRequest(&agentv1.MoveRequest{From: []byte(dir + "/dst"), To: []byte(away)})); err != nil {
		t.Fatal(err)
	}
	if got, err := os.ReadFile(away + "/sub/file"); err != nil || string(got) != "text" {
		t.Errorf("moved: %q %v", got, err)
	}
	if _, err := os.Lstat(dir + "/dst"); !os.IsNotExist(err) {
		t.Errorf("source: %v", err)
	}
	if _, err := h.files.Remove(t.Context(), connect.NewRequest(&agentv1.RemoveRequest{Path: []byte(away), Recursive: true})); err != nil {
		t.Error(err)
	}
}

func TestMkdir(t *testing.T) {
	h := newHost(t)
	dir := userDir(t)
	mode := uint32(0o1777)
	for range 2 {
		r, err := h.files.Mkdir(t.Context(), connect.NewRequest(&agentv1.MkdirRequest{Path: []byte(dir + "/a/b/c"), User: "nobody", Mode: &mode, Parents: true}))
		if err != nil || r.Msg.GetEntry().GetMode() != mode || r.Msg.GetEntry().GetUid() != nobody {
			t.Fatalf("%v %v", r, err)
		}
	}
	if info, err := os.Stat(dir + "/a"); err != nil || info.Mode().Perm() != 0o755 {
		t.Errorf("parent: %v %v", info, err)
	}
}

func TestTooManyStreams(t *testing.T) {
	h := newHost(t)
	file := filepath.Join(t.TempDir(), "big")
	if err := os.WriteFile(file, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(file, 1<<30); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	for range 64 {
		s, err := h.files.Read(ctx, connect.NewRequest(&agentv1.ReadRequest{Path: []byte(file)}))
		if err != nil || !s.Receive() {
			t.Fatal(err)
		}
	}
	_, _, err := h.read(file, "", 0, 1)
	if reason, _ := reasonOf(err); reason != agentv1.FileErrorReason_FILE_ERROR_REASON_TOO_MANY_OPEN {
		t.Errorf("%v", err)
	}
	cancel()
	eventually(t, "streams are free again", func() bool { _, _, err := h.read(file, "", 0, 1); return err == nil })
}
