package confine

import "os"

// StageArg is the first argument that makes a binary a confinement stage.
const StageArg = "vmm-stage"

// spec is what the stage is told, one JSON line over its control descriptor: arguments can be seen by everyone.
type spec struct {
	Path       string
	Args       []string
	Dir        string
	ReadOnly   []string
	ReadWrite  []string
	Devices    []string
	Files      int // descriptors 3 to 2+Files are the program's
	UID, GID   uint32
	Namespaces bool
	Unconfined bool
	ParentPID  int
}

// report is what the stage answers before it becomes the program, or an Error. After a report without Error the
// connection ends by the exec, or with a second report if that failed.
type report struct {
	Gaps    []string `json:",omitempty"`
	Error   string   `json:",omitempty"`
	Refused bool     `json:",omitempty"` // the error only means that namespaces do not work here
}

func (c *Command) spec(isolate bool) spec {
	devices := append([]string{"/dev/null", "/dev/zero", "/dev/urandom"}, c.Devices...)
	uid, gid := c.UID, c.GID
	if os.Geteuid() != 0 {
		uid, gid = 0, 0 // only root can be someone else
	}
	return spec{
		Path: c.Path, Args: c.Args, Dir: c.Dir, ReadOnly: c.ReadOnly, ReadWrite: c.ReadWrite, Devices: devices,
		Files: len(c.Files), UID: uid, GID: gid, Namespaces: isolate, Unconfined: c.Unconfined, ParentPID: os.Getpid(),
	}
}
