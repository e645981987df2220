package shims

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"google.golang.org/protobuf/encoding/protojson"

	shimv1 "github.com/space-sandbox/space/internal/gen/space/shim/v1"
	"github.com/space-sandbox/space/internal/node/cgroup"
	"github.com/space-sandbox/space/internal/node/proc"
)

// maxSocketPath keeps clear of the kernel's limit of 107 bytes.
const maxSocketPath = 100

// Manager makes shims. Its fields are set before use and not changed.
type Manager struct {
	Dir     string       // one folder per shim
	Runtime string       // short folder for sockets
	Binary  string       // the shim program
	Cgroups *cgroup.Tree // may be empty
	Log     *slog.Logger
	// Limit, if set, limits what the new cgroup of a spec may use, as far as that can be done here.
	Limit func(spec *shimv1.LaunchSpec)
}

// pidFile is the content of pid.json: what an adopting node needs to find the processes again.
type pidFile struct {
	Shim proc.Identity  `json:"shim"`
	VMM  *proc.Identity `json:"vmm,omitempty"`
}

// NewID returns a fresh shim ID, short because it is part of a socket's path.
func NewID() string {
	var b [8]byte
	_, _ = rand.Read(b[:]) // never fails
	return "s" + hex.EncodeToString(b[:])
}

// NewToken returns a fresh secret of 256 bits.
func NewToken() string {
	var b [32]byte
	_, _ = rand.Read(b[:]) // never fails
	return hex.EncodeToString(b[:])
}

// Path returns the folder of a shim.
func (m *Manager) Path(id string) string { return filepath.Join(m.Dir, id) }

// SocketPath returns where a shim listens.
func (m *Manager) SocketPath(id string) string { return filepath.Join(m.Runtime, id) }

// PrepareFunc puts into a shim's folder what its spec names, and may complete the spec.
type PrepareFunc func(ctx context.Context, spec *shimv1.LaunchSpec, dir string) error

// Launch starts a shim. It fills in ID, token, socket and cgroup of spec, makes the folder, lets prepare put into it
// what spec names, and starts the program with memory, if any, as descriptor 3. On error nothing is left.
func (m *Manager) Launch(ctx context.Context, spec *shimv1.LaunchSpec, memory *os.File, prepare PrepareFunc) (_ *Shim, err error) {
	spec.ShimId, spec.Token = NewID(), NewToken()
	dir := m.Path(spec.ShimId)
	spec.Socket = m.SocketPath(spec.ShimId)
	if len(spec.Socket) > maxSocketPath {
		return nil, fmt.Errorf("socket path %s has %d bytes, limit %d: choose a shorter runtime folder", spec.Socket, len(spec.Socket), maxSocketPath)
	}
	if spec.Cgroup, err = m.Cgroups.New(spec.ShimId); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.RemoveAll(dir), cgroup.Remove(context.WithoutCancel(ctx), spec.Cgroup))
		}
	}()
	if err := os.MkdirAll(filepath.Join(dir, "vm"), 0o700); err != nil {
		return nil, err
	}
	if err := prepare(ctx, spec, dir); err != nil {
		return nil, err
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	data, err := protojson.Marshal(spec)
	if err != nil {
		return nil, err
	}
	if err := os.WriteFile(filepath.Join(dir, "spec.json"), data, 0o600); err != nil {
		return nil, err
	}
	return m.start(spec, dir, memory)
}

// start runs the program in its own session, so that signals to the node's terminal or group do not reach it.
func (m *Manager) start(spec *shimv1.LaunchSpec, dir string, memory *os.File) (*Shim, error) {
	logFile, err := os.OpenFile(filepath.Join(dir, "log"), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return nil, err
	}
	defer logFile.Close()
	pidfd := -1
	// Not CommandContext: a shim outlives the request, and the service, that started it.
	cmd := exec.Command(m.Binary, dir) //nolint:noctx // see above
	cmd.Env = []string{}
	cmd.Dir = dir
	cmd.Stdout, cmd.Stderr = logFile, logFile
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, PidFD: &pidfd}
	if spec.Cgroup != "" && m.Limit != nil {
		m.Limit(spec)
	}
	if memory != nil {
		cmd.ExtraFiles = []*os.File{memory}
	}
	if spec.Cgroup != "" {
		group, err := os.Open(spec.Cgroup)
		if err != nil {
			return nil, fmt.Errorf("cgroup: %w", err)
		}
		defer group.Close()
		cmd.SysProcAttr.UseCgroupFD, cmd.SysProcAttr.CgroupFD = true, int(group.Fd())
	}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start shim: %w", err)
	}
	s := newShim(m, spec, dir)
	s.proc, err = proc.Child(cmd.Process.Pid, pidfd, func() {
		_ = cmd.Wait()
		s.exit.Store(int64(cmd.ProcessState.ExitCode()))
	})
	if err == nil {
		err = s.savePIDs()
	}
	if err != nil {
		_ = cmd.Process.Kill()
		if s.proc == nil {
			_ = cmd.Wait()
		}
		s.Release()
		return nil, fmt.Errorf("start shim: %w", err)
	}
	return s, nil
}

// List returns the IDs of all shim folders.
func (m *Manager) List() ([]string, error) {
	entries, err := os.ReadDir(m.Dir)
	if err != nil {
		return nil, fmt.Errorf("list shims: %w", err)
	}
	var ids []string
	for _, e := range entries {
		if e.IsDir() {
			ids = append(ids, e.Name())
		}
	}
	return ids, nil
}

// Adopt takes hold of what a folder describes: a living shim, or, with Alive false, the remains of a dead one. It
// reads files and /proc only. Folders that hold no readable spec are remains too.
func (m *Manager) Adopt(id string) (*Shim, error) {
	dir := m.Path(id)
	spec := &shimv1.LaunchSpec{}
	data, err := os.ReadFile(filepath.Join(dir, "spec.json"))
	if err == nil {
		err = protojson.UnmarshalOptions{DiscardUnknown: true}.Unmarshal(data, spec)
	}
	if err != nil || spec.ShimId != id {
		m.Log.Warn("shim folder without a usable spec", "shim", id, "error", err)
		spec = &shimv1.LaunchSpec{}
	}
	// Never trusted from the file: Destroy removes these.
	spec.ShimId, spec.Socket = id, m.SocketPath(id)
	if filepath.Base(spec.Cgroup) != id {
		spec.Cgroup = ""
	}
	s := newShim(m, spec, dir)
	pids, err := m.findPIDs(dir)
	if err != nil {
		return nil, err
	}
	if pids.Shim.PID != 0 {
		s.proc, err = proc.Open(pids.Shim)
		if err != nil && !errors.Is(err, proc.ErrGone) {
			return nil, fmt.Errorf("adopt shim %s: %w", id, err)
		}
	}
	if pids.VMM != nil {
		if h, err := proc.Open(*pids.VMM); err == nil {
			s.vmm = h
		}
	}
	return s, nil
}

// findPIDs reads pid.json. A node that died between starting a shim and writing the file left none: the shim is
// then found by its only argument, the folder.
func (m *Manager) findPIDs(dir string) (pidFile, error) {
	var pids pidFile
	data, err := os.ReadFile(filepath.Join(dir, "pid.json"))
	if err == nil && json.Unmarshal(data, &pids) == nil {
		return pids, nil
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return pids, err
	}
	found, err := proc.FindByArg(dir)
	if err != nil || len(found) == 0 {
		return pidFile{}, err
	}
	return pidFile{Shim: found[0]}, nil
}

// logTail returns the end of a shim's log, for error texts.
func logTail(dir string) string { return tail(filepath.Join(dir, "log"), 2048) }

// consoleTail returns the end of what a guest wrote to its console. The guest wrote it: it is for the errors of
// captures, whose guests run nothing of a tenant.
func consoleTail(dir string) string {
	text := tail(filepath.Join(dir, "vm", "console.log"), 1024)
	if text == "" {
		return ""
	}
	return "; console: " + strconv.QuoteToASCII(text)
}

func tail(path string, limit int64) string {
	f, err := os.Open(path)
	if err != nil {
		return ""
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return ""
	}
	buf := make([]byte, limit)
	n, _ := f.ReadAt(buf, max(0, info.Size()-limit))
	return strings.TrimSpace(string(buf[:n]))
}
