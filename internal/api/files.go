package api

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"time"

	"connectrpc.com/connect"

	"github.com/space-sandbox/space/internal/api/guestio"
	"github.com/space-sandbox/space/internal/api/wire"
	"github.com/space-sandbox/space/internal/control"
	agentv1 "github.com/space-sandbox/space/internal/gen/space/agent/v1"
	"github.com/space-sandbox/space/internal/sandbox"
)

// fileChunk is how much of an upload one message carries: all the memory that an upload of any size takes.
const fileChunk = 256 << 10

// readTimeout is how long a client may take between two reads of an upload.
const readTimeout = 60 * time.Second

func encodeName(name []byte) string {
	return strings.ReplaceAll(wire.EncodePath(name), "/", "%2F")
}

// fileArgs returns path and user of the query. The path may hold any byte but NUL: the query is percent-decoded only.
func (c *call) fileArgs() (path []byte, user string, err error) {
	path, user = []byte(c.query.Get("path")), c.query.Get("user")
	if strings.IndexByte(user, 0) >= 0 {
		return nil, "", sandbox.Invalid("user", "no_nul", "must not contain a NUL byte")
	}
	return path, user, wire.CheckPath("path", path)
}

func parseMode(s string) *uint32 {
	n, err := strconv.ParseUint(s, 8, 12)
	if err != nil {
		return nil // absent: what is present was checked against the pattern
	}
	mode := uint32(n)
	return &mode
}

func (s *Server) putContent(c *call) error {
	path, user, err := c.fileArgs()
	if err != nil {
		return err
	}
	g, err := c.guest(sandbox.ScopeFilesWrite, control.GuestUse{Active: true})
	if err != nil {
		return err
	}
	header := &agentv1.WriteHeader{Path: path, User: user, Mode: parseMode(c.query.Get("mode")), Parents: c.query.Get("parents") == "true"}
	var entry *agentv1.Entry
	upload := func(ctx context.Context) (err error) {
		entry, err = c.upload(ctx, g, header)
		return err
	}
	replayed, err := c.once(upload)
	if err == nil && replayed {
		// The bytes were not kept, so whether they are the same cannot be told: writing them again is right either way.
		err = upload(c.ctx())
	}
	if err != nil {
		return err
	}
	return c.json(http.StatusOK, entryOf(entry))
}

// upload streams the body into a file. The commit is sent only after the whole body was read, so an upload that is
// cut changes nothing.
func (c *call) upload(ctx context.Context, g *control.Guest, header *agentv1.WriteHeader) (*agentv1.Entry, error) {
	ctx, dog, cancel := guestio.WithWatchdog(ctx, guestio.CallTimeout)
	defer cancel() // without a commit this is what tells the guest to forget the upload
	stream := g.Files.Write(ctx)
	err := stream.Send(&agentv1.WriteRequest{Kind: &agentv1.WriteRequest_Header{Header: header}})
	rc := http.NewResponseController(c)
	buf := make([]byte, fileChunk)
	for err == nil {
		dog.Pause()
		_ = rc.SetReadDeadline(time.Now().Add(readTimeout)) // not supported by test servers; the connection bounds it then
		n, rerr := c.r.Body.Read(buf)
		dog.Step()
		if n > 0 {
			err = stream.Send(&agentv1.WriteRequest{Kind: &agentv1.WriteRequest_Data{Data: buf[:n]}})
		}
		if err == nil && rerr != nil {
			if !errors.Is(rerr, io.EOF) {
				return nil, cutShort(rerr)
			}
			err = stream.Send(&agentv1.WriteRequest{Kind: &agentv1.WriteRequest_Commit{Commit: &agentv1.WriteCommit{}}})
			break
		}
	}
	_ = rc.SetReadDeadline(time.Time{})
	if c.ctx().Err() != nil { // the client went away, which ends the guest's stream before the body's read tells
		return nil, cutShort(c.ctx().Err())
	}
	if err != nil && !errors.Is(err, io.EOF) { // io.EOF: the guest has answered already, CloseAndReceive says what
		return nil, control.GuestError(err, "")
	}
	dog.Step()
	resp, err := stream.CloseAndReceive()
	if err != nil {
		return nil, control.GuestError(err, "")
	}
	return resp.Msg.GetEntry(), nil
}

func cutShort(cause error) error {
	return sandbox.Errorf(sandbox.CodeInvalidRequest, "the upload was cut short; nothing was changed").WithCause(cause)
}

func (s *Server) getContent(c *call) error {
	path, user, err := c.fileArgs()
	if err != nil {
		return err
	}
	g, err := c.guest(sandbox.ScopeFilesRead, control.GuestUse{Active: true})
	if err != nil {
		return err
	}
	part, err := c.part(g, path, user)
	if err != nil {
		return err
	}
	req := &agentv1.ReadRequest{Path: path, User: user}
	if part != nil {
		req.Offset, req.Length = part.first, part.length()
	}
	ctx, dog, cancel := guestio.WithWatchdog(c.ctx(), guestio.CallTimeout)
	defer cancel()
	stream, err := g.Files.Read(ctx, connect.NewRequest(req))
	if err != nil {
		return control.GuestError(err, "")
	}
	defer func() { _ = stream.Close() }()
	return c.download(&reading{stream: stream, dog: dog}, part, path)
}

// reading is a guest's file on its way.
type reading struct {
	stream *connect.ServerStreamForClient[agentv1.ReadResponse]
	dog    *guestio.Watchdog
}

// next returns the next bytes; nil at the end.
func (r *reading) next() ([]byte, error) {
	r.dog.Step()
	defer r.dog.Pause()
	for r.stream.Receive() {
		if data := r.stream.Msg().GetData(); len(data) > 0 {
			return data, nil
		}
	}
	return nil, control.GuestError(r.stream.Err(), "")
}

// download sends a file or a part of it. Files that fit two messages get their exact length, whatever size the guest
// reports: files in /proc report none and those in /sys too much. Longer ones get the size reported at the start, and
// a file that shrinks meanwhile ends in a cut connection instead of a short file that looks whole.
func (c *call) download(in *reading, part *byteRange, path []byte) error {
	if !in.stream.Receive() {
		if err := in.stream.Err(); err != nil {
			return control.GuestError(err, "")
		}
		return sandbox.Errorf(sandbox.CodeInternal, "the sandbox sent no file")
	}
	entry := in.stream.Msg().GetEntry()
	first, err := in.next()
	var second []byte
	if err == nil && first != nil {
		second, err = in.next()
	}
	if err != nil {
		return err
	}
	h := c.Header()
	attachment(h, path)
	h.Set("Accept-Ranges", "bytes")
	if modified := lastModified(entry); modified != "" {
		h.Set("Last-Modified", modified)
	}
	have := uint64(len(first) + len(second))
	limit := ^uint64(0)
	switch {
	case part != nil:
		limit = part.length()
		h.Set("Content-Range", fmt.Sprintf("bytes %d-%d/%d", part.first, part.last, part.size))
	case second == nil:
		limit = have
	case entry.GetType() == agentv1.FileType_FILE_TYPE_FILE && entry.GetSize() > have:
		limit = entry.GetSize()
	}
	if limit != ^uint64(0) {
		h.Set("Content-Length", strconv.FormatUint(limit, 10))
	}
	if part != nil {
		c.WriteHeader(http.StatusPartialContent)
	} else {
		c.WriteHeader(http.StatusOK)
	}
	if c.r.Method == http.MethodHead {
		return nil
	}
	return c.copyFile(in, first, second, limit)
}

func (c *call) copyFile(in *reading, first, second []byte, limit uint64) error {
	out := newSender(c)
	for data := first; data != nil; {
		if uint64(len(data)) > limit {
			data = data[:limit] // the file has grown since
		}
		limit -= uint64(len(data))
		if err := out.send(data); err != nil {
			return err
		}
		if limit == 0 {
			break
		}
		if second != nil {
			data, second = second, nil
			continue
		}
		var err error
		if data, err = in.next(); err != nil {
			return err
		}
	}
	return out.finish()
}

// byteRange is one part of a file, both ends included.
type byteRange struct{ first, last, size uint64 }

func (b *byteRange) length() uint64 { return b.last - b.first + 1 }

// part resolves a Range header against the file's size; nil means the whole file.
func (c *call) part(g *control.Guest, path []byte, user string) (*byteRange, error) {
	header := c.r.Header.Get("Range")
	if header == "" || !wellFormedRange(header) {
		return nil, nil
	}
	ctx, cancel := c.step()
	defer cancel()
	resp, err := g.Files.Stat(ctx, connect.NewRequest(&agentv1.StatRequest{Path: path, User: user, Follow: true}))
	if err != nil {
		return nil, control.GuestError(err, "")
	}
	entry := resp.Msg.GetEntry()
	if entry.GetType() != agentv1.FileType_FILE_TYPE_FILE || entry.GetSize() == 0 && strings.HasPrefix(string(entry.GetPath()), "/proc/") {
		return nil, nil // no size to speak of
	}
	if ifRange := c.r.Header.Get("If-Range"); ifRange != "" && ifRange != lastModified(entry) {
		return nil, nil
	}
	part, ok := parseRange(header, entry.GetSize())
	if !ok {
		c.Header().Set("Content-Range", fmt.Sprintf("bytes */%d", entry.GetSize()))
		e := sandbox.Invalid("Range", "range", "must overlap with the file")
		e.Status = http.StatusRequestedRangeNotSatisfiable
		return nil, e
	}
	return part, nil
}

// wellFormedRange tells a single range of bytes from what RFC 9110 lets a server ignore: other units, several ranges,
// and what cannot be parsed.
func wellFormedRange(header string) bool {
	spec, ok := strings.CutPrefix(header, "bytes=")
	first, last, dash := strings.Cut(spec, "-")
	if !ok || !dash || first+last == "" || strings.Trim(first+last, "0123456789") != "" {
		return false
	}
	a, errA := strconv.ParseUint("0"+first, 10, 64)
	b, errB := strconv.ParseUint("0"+last, 10, 64)
	return errA == nil && errB == nil && (first == "" || last == "" || a <= b)
}

// parseRange resolves a well-formed range; ok is false if nothing of it lies in the file.
func parseRange(header string, size uint64) (part *byteRange, ok bool) {
	first, last, _ := strings.Cut(strings.TrimPrefix(header, "bytes="), "-")
	a, _ := strconv.ParseUint(first, 10, 64)
	b, _ := strconv.ParseUint(last, 10, 64)
	switch {
	case first == "": // the last b bytes
		if b == 0 || size == 0 {
			return nil, false
		}
		return &byteRange{first: size - min(b, size), last: size - 1, size: size}, true
	case a >= size:
		return nil, false
	case last == "" || b >= size:
		b = size - 1
	}
	return &byteRange{first: a, last: b, size: size}, true
}

func (s *Server) deleteContent(c *call) error {
	path, user, err := c.fileArgs()
	if err != nil {
		return err
	}
	if err := c.noBody(); err != nil {
		return err
	}
	g, err := c.guest(sandbox.ScopeFilesWrite, control.GuestUse{Active: true})
	if err != nil {
		return err
	}
	_, err = c.once(func(ctx context.Context) error {
		ctx, cancel := context.WithTimeout(ctx, guestio.CallTimeout)
		defer cancel()
		_, err := g.Files.Remove(ctx, connect.NewRequest(&agentv1.RemoveRequest{Path: path, User: user, Recursive: c.query.Get("recursive") == "true"}))
		return control.GuestError(err, "")
	})
	if err != nil {
		return err
	}
	c.WriteHeader(http.StatusNoContent)
	return nil
}

func (s *Server) statFile(c *call) error {
	path, user, err := c.fileArgs()
	if err != nil {
		return err
	}
	g, err := c.guest(sandbox.ScopeFilesRead, control.GuestUse{Active: true})
	if err != nil {
		return err
	}
	entry, err := c.stat(g, path, user, c.query.Get("follow") == "true")
	if err != nil {
		return err
	}
	return c.json(http.StatusOK, entryOf(entry))
}

func (c *call) stat(g *control.Guest, path []byte, user string, follow bool) (*agentv1.Entry, error) {
	ctx, cancel := c.step()
	defer cancel()
	resp, err := g.Files.Stat(ctx, connect.NewRequest(&agentv1.StatRequest{Path: path, User: user, Follow: follow}))
	if err != nil {
		return nil, control.GuestError(err, "")
	}
	return resp.Msg.GetEntry(), nil
}

func (s *Server) listFiles(c *call) error {
	path, user, err := c.fileArgs()
	if err != nil {
		return err
	}
	after, err := base64.RawURLEncoding.DecodeString(c.query.Get("cursor"))
	if err != nil || len(after) > 0 && wire.CheckPath("cursor", after) != nil {
		return sandbox.Invalid("cursor", "cursor", "must be the next_cursor of a page before")
	}
	g, err := c.guest(sandbox.ScopeFilesRead, control.GuestUse{Active: true})
	if err != nil {
		return err
	}
	ctx, cancel := c.step()
	defer cancel()
	resp, err := g.Files.ListDir(ctx, connect.NewRequest(&agentv1.ListDirRequest{
		Path: path, User: user, Depth: uint32(c.number("depth", 1)),
		Limit: uint32(c.number("limit", sandbox.DefaultPageLimit)), After: after,
	}))
	if err != nil {
		return control.GuestError(err, "")
	}
	entries := resp.Msg.GetEntries()
	out := EntryPage{Items: make([]*Entry, 0, len(entries))}
	for _, e := range entries {
		out.Items = append(out.Items, entryOf(e))
	}
	if n := len(entries); resp.Msg.GetMore() && n > 0 {
		out.NextCursor = textOrNull(base64.RawURLEncoding.EncodeToString(entries[n-1].GetPath()))
	}
	return c.json(http.StatusOK, out)
}

// bodyPath returns the path of a body that gives it plain or percent-encoded, but not both.
func bodyPath(field, plain, encoded string) ([]byte, error) {
	switch {
	case plain != "" && encoded != "":
		return nil, sandbox.Invalid(field, "exclusive", "must be given as %s or as %s_encoded, not both", field, field)
	case encoded != "":
		path, err := wire.DecodePath(field+"_encoded", encoded)
		if err != nil {
			return nil, err
		}
		return path, wire.CheckPath(field+"_encoded", path)
	case plain == "":
		return nil, sandbox.Invalid(field, "required", "is required, as %s or as %s_encoded", field, field)
	}
	return []byte(plain), wire.CheckPath(field, []byte(plain))
}

// changeFile runs a change under the request's Idempotency-Key and answers with what is at target afterwards.
func (c *call) changeFile(target []byte, user string, change func(context.Context, *control.Guest) (*agentv1.Entry, error)) error {
	if strings.IndexByte(user, 0) >= 0 {
		return sandbox.Invalid("user", "no_nul", "must not contain a NUL byte")
	}
	g, err := c.guest(sandbox.ScopeFilesWrite, control.GuestUse{Active: true})
	if err != nil {
		return err
	}
	var entry *agentv1.Entry
	replayed, err := c.once(func(ctx context.Context) (err error) {
		ctx, cancel := context.WithTimeout(ctx, guestio.CallTimeout)
		defer cancel()
		entry, err = change(ctx, g)
		return err
	})
	if err == nil && replayed {
		entry, err = c.stat(g, target, user, false)
	}
	if err != nil {
		return err
	}
	return c.json(http.StatusOK, entryOf(entry))
}

func (s *Server) makeDirectory(c *call) error {
	var in MakeDirectory
	if err := c.decode(&in); err != nil {
		return err
	}
	path, err := bodyPath("path", in.Path, in.PathEncoded)
	if err != nil {
		return err
	}
	return c.changeFile(path, in.User, func(ctx context.Context, g *control.Guest) (*agentv1.Entry, error) {
		resp, err := g.Files.Mkdir(ctx, connect.NewRequest(&agentv1.MkdirRequest{Path: path, User: in.User, Mode: parseMode(in.Mode), Parents: in.Parents}))
		if err != nil {
			return nil, control.GuestError(err, "")
		}
		return resp.Msg.GetEntry(), nil
	})
}

func (in *MoveFile) paths() (from, to []byte, err error) {
	if from, err = bodyPath("from", in.From, in.FromEncoded); err == nil {
		to, err = bodyPath("to", in.To, in.ToEncoded)
	}
	return from, to, err
}

func (s *Server) moveFile(c *call) error {
	var in MoveFile
	if err := c.decode(&in); err != nil {
		return err
	}
	from, to, err := in.paths()
	if err != nil {
		return err
	}
	return c.changeFile(to, in.User, func(ctx context.Context, g *control.Guest) (*agentv1.Entry, error) {
		resp, err := g.Files.Move(ctx, connect.NewRequest(&agentv1.MoveRequest{From: from, To: to, User: in.User, Overwrite: in.Overwrite}))
		if err != nil {
			return nil, control.GuestError(err, "")
		}
		return resp.Msg.GetEntry(), nil
	})
}

func (s *Server) copyFile(c *call) error {
	var in CopyFile
	if err := c.decode(&in); err != nil {
		return err
	}
	from, to, err := in.paths()
	if err != nil {
		return err
	}
	return c.changeFile(to, in.User, func(ctx context.Context, g *control.Guest) (*agentv1.Entry, error) {
		resp, err := g.Files.Copy(ctx, connect.NewRequest(&agentv1.CopyRequest{From: from, To: to, User: in.User, Overwrite: in.Overwrite, Recursive: in.Recursive}))
		if err != nil {
			return nil, control.GuestError(err, "")
		}
		return resp.Msg.GetEntry(), nil
	})
}
