package api

import (
	"bytes"
	"fmt"
	"time"

	"github.com/space-sandbox/space/internal/api/wire"
	agentv1 "github.com/space-sandbox/space/internal/gen/space/agent/v1"
)

// Entry is a file, folder or link of a sandbox.
type Entry struct {
	Name                 string  `json:"name" doc:"Last element of the path; bytes that are not UTF-8 are replaced." example:"main.py"`
	Path                 string  `json:"path" doc:"Absolute path; bytes that are not UTF-8 are replaced." example:"/home/user/main.py"`
	PathEncoded          string  `json:"path_encoded" doc:"Exact absolute path, percent-encoded byte by byte." example:"/home/user/main.py"`
	Type                 string  `json:"type" enum:"file,directory,symlink,other" doc:"Kind of entry." example:"file"`
	Size                 uint64  `json:"size" doc:"Size in bytes." example:"1024"`
	Mode                 string  `json:"mode" doc:"Permission bits in octal." example:"0644"`
	UID                  uint32  `json:"uid" doc:"Owner's number." example:"1000"`
	GID                  uint32  `json:"gid" doc:"Group's number." example:"1000"`
	Owner                string  `json:"owner" doc:"Owner's name." example:"user"`
	Group                string  `json:"group" doc:"Group's name." example:"user"`
	ModifiedAt           *Time   `json:"modified_at" doc:"When it was last changed."`
	SymlinkTarget        *string `json:"symlink_target" doc:"Where a link points; bytes that are not UTF-8 are replaced." example:"/etc/hosts"`
	SymlinkTargetEncoded *string `json:"symlink_target_encoded" doc:"The exact target, percent-encoded." example:"/etc/hosts"`
}

func entryOf(e *agentv1.Entry) *Entry {
	path := e.GetPath()
	name := path[bytes.LastIndexByte(path, '/')+1:]
	if len(name) == 0 {
		name = path
	}
	out := &Entry{
		Name: wire.Lossy(name), Path: wire.Lossy(path), PathEncoded: wire.EncodePath(path), Type: "other",
		Size: e.GetSize(), Mode: fmt.Sprintf("%04o", e.GetMode()), UID: e.GetUid(), GID: e.GetGid(),
		Owner: e.GetOwner(), Group: e.GetGroup(), ModifiedAt: stamp(e.GetModifiedAt()),
	}
	switch e.GetType() {
	case agentv1.FileType_FILE_TYPE_FILE:
		out.Type = "file"
	case agentv1.FileType_FILE_TYPE_DIRECTORY:
		out.Type = "directory"
	case agentv1.FileType_FILE_TYPE_SYMLINK:
		out.Type = "symlink"
		target, exact := wire.Lossy(e.GetSymlinkTarget()), wire.EncodePath(e.GetSymlinkTarget())
		out.SymlinkTarget, out.SymlinkTargetEncoded = &target, &exact
	}
	return out
}

// lastModified is the time of an HTTP header: whole seconds.
func lastModified(e *agentv1.Entry) string {
	if e.GetModifiedAt() == nil {
		return ""
	}
	return e.GetModifiedAt().AsTime().UTC().Truncate(time.Second).Format("Mon, 02 Jan 2006 15:04:05 GMT")
}

// EntryPage is one page of a folder.
type EntryPage struct {
	Items      []*Entry `json:"items" doc:"Entries in byte order of their paths, depth first."`
	NextCursor *string  `json:"next_cursor" doc:"Cursor of the next page; null at the end." example:"L2hvbWUvdXNlci9tYWluLnB5"`
}

// MakeDirectory is the request to make a folder.
type MakeDirectory struct {
	Path        string `json:"path,omitempty" minLength:"1" maxLength:"4095" doc:"Path of the folder; relative to the user's home if it does not begin with a slash." example:"/home/user/src"`
	PathEncoded string `json:"path_encoded,omitempty" minLength:"1" maxLength:"12285" doc:"The path percent-encoded, instead of path: any byte can be written." example:"/home/user/src"`
	User        string `json:"user,omitempty" minLength:"1" maxLength:"256" doc:"Name or uid; default: the template's user." example:"user"`
	Mode        string `json:"mode,omitempty" pattern:"^[0-7]{3,4}$" patternDescription:"octal permission bits" default:"0755" doc:"Permission bits in octal." example:"0755"`
	Parents     bool   `json:"parents,omitempty" default:"false" doc:"Make missing parents and accept a folder that exists." example:"true"`
}

// MoveFile is the request to move or rename.
type MoveFile struct {
	From        string `json:"from,omitempty" minLength:"1" maxLength:"4095" doc:"What to move." example:"/home/user/a"`
	FromEncoded string `json:"from_encoded,omitempty" minLength:"1" maxLength:"12285" doc:"What to move, percent-encoded, instead of from." example:"/home/user/a"`
	To          string `json:"to,omitempty" minLength:"1" maxLength:"4095" doc:"Its new path." example:"/home/user/b"`
	ToEncoded   string `json:"to_encoded,omitempty" minLength:"1" maxLength:"12285" doc:"Its new path, percent-encoded, instead of to." example:"/home/user/b"`
	User        string `json:"user,omitempty" minLength:"1" maxLength:"256" doc:"Name or uid; default: the template's user." example:"user"`
	Overwrite   bool   `json:"overwrite,omitempty" default:"false" doc:"Replace what is at the new path." example:"false"`
}

// CopyFile is the request to copy.
type CopyFile struct {
	MoveFile
	Recursive bool `json:"recursive,omitempty" default:"false" doc:"Copy a folder with all it holds." example:"true"`
}
