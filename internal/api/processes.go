package api

import (
	"bytes"
	"context"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"connectrpc.com/connect"

	"github.com/space-sandbox/space/internal/api/guestio"
	"github.com/space-sandbox/space/internal/control"
	agentv1 "github.com/space-sandbox/space/internal/gen/space/agent/v1"
	nodev1 "github.com/space-sandbox/space/internal/gen/space/node/v1"
	"github.com/space-sandbox/space/internal/sandbox"
)

func sortedKeys(m map[string]string) []string { return slices.Sorted(maps.Keys(m)) }

func (s *Server) createCommand(c *call) error {
	id, err := c.sandboxID()
	if err != nil {
		return err
	}
	in := CreateCommand{Start: "attach", OutputCapBytes: sandbox.DefaultOutputCap}
	if err := c.decode(&in); err != nil {
		return err
	}
	if err := s.checkCommand(&in); err != nil {
		return err
	}
	created, err := c.svc().CreateCommand(c.ctx(), c.p, id, control.CreateCommand{
		Spec: specOf(&in), OutputCap: in.OutputCapBytes, StartNow: in.Start == "now",
	}, c.idem)
	if err != nil {
		return control.GuestError(err, "")
	}
	c.replayed(created.Replayed)
	return c.json(http.StatusCreated, CommandCreated{Process: processOf(created.Process), Session: s.sessionOf(created.NewSession)})
}

// checkCommand checks the limits that a schema cannot express.
func (s *Server) checkCommand(in *CreateCommand) error {
	check := &checker{schemas: s.schemas}
	total := 0
	for i, arg := range in.Argv {
		total += len(arg) + 1
		field := "argv[" + strconv.Itoa(i) + "]"
		switch {
		case i == 0 && arg == "":
			check.add(field, "min_length", "must not be empty")
		case len(arg) > sandbox.MaxArg:
			check.add(field, "max_length", "must be at most %d bytes", sandbox.MaxArg)
		case strings.IndexByte(arg, 0) >= 0:
			check.add(field, "no_nul", "must not contain a NUL byte")
		}
	}
	if total > sandbox.MaxArgvBytes {
		check.add("argv", "max_bytes", "must be at most %d bytes in all, with a NUL after each", sandbox.MaxArgvBytes)
	}
	check.env("env", in.Env)
	check.path("cwd", in.Cwd)
	check.noNUL("user", in.User)
	return check.err()
}

func (c *checker) noNUL(field, value string) {
	if strings.IndexByte(value, 0) >= 0 {
		c.add(field, "no_nul", "must not contain a NUL byte")
	}
}

func (c *checker) path(field, value string) {
	c.noNUL(field, value)
	if len(value) > 4095 { // the schema counts characters, the kernel bytes
		c.add(field, "max_length", "must be at most 4095 bytes")
	}
}

func specOf(in *CreateCommand) *agentv1.ProcessSpec {
	spec := &agentv1.ProcessSpec{Env: in.Env, Cwd: []byte(in.Cwd), User: in.User, Stdin: in.Stdin}
	for _, arg := range in.Argv {
		spec.Argv = append(spec.Argv, []byte(arg))
	}
	if in.Pty != nil {
		spec.Pty = &agentv1.TerminalSize{Cols: in.Pty.Cols, Rows: in.Pty.Rows}
	}
	if in.TimeoutS != nil {
		spec.TimeoutMs = uint64(*in.TimeoutS) * 1000
	}
	return spec
}

func (s *Server) createSession(c *call) error {
	id, err := c.sandboxID()
	if err != nil {
		return err
	}
	pid, err := c.processID()
	if err != nil {
		return err
	}
	if err := c.noBody(); err != nil {
		return err
	}
	created, err := c.svc().CreateSession(c.ctx(), c.p, id, pid, c.idem)
	if err != nil {
		return control.GuestError(err, "")
	}
	c.replayed(created.Replayed)
	return c.json(http.StatusCreated, SessionCreated{Session: s.sessionOf(created)})
}

func (s *Server) listProcesses(c *call) error {
	g, err := c.guest(sandbox.ScopeSandboxesRead, control.GuestUse{ReadOnly: true})
	if err != nil {
		return err
	}
	after := c.query.Get("cursor")
	if after != "" {
		if _, err := sandbox.ParseProcessID(after); err != nil {
			return sandbox.Invalid("cursor", "cursor", "must be the next_cursor of a page before")
		}
	}
	ctx, cancel := c.step()
	defer cancel()
	resp, err := g.Processes.ListProcesses(ctx, connect.NewRequest(&nodev1.ListProcessesRequest{
		After: after, Limit: uint32(c.number("limit", sandbox.DefaultPageLimit)),
	}))
	if err != nil {
		return control.GuestError(err, "")
	}
	out := ProcessPage{Items: []*Process{}}
	for _, p := range resp.Msg.GetProcesses() {
		out.Items = append(out.Items, processOf(p))
	}
	if n := len(out.Items); resp.Msg.GetMore() && n > 0 {
		out.NextCursor = &out.Items[n-1].ID
	}
	return c.json(http.StatusOK, out)
}

func (s *Server) getProcess(c *call) error {
	pid, err := c.processID()
	if err != nil {
		return err
	}
	g, err := c.guest(sandbox.ScopeSandboxesRead, control.GuestUse{ReadOnly: true})
	if err != nil {
		return err
	}
	p, err := c.process(g, pid, time.Duration(c.number("wait", 0))*time.Second)
	if err != nil {
		return err
	}
	return c.json(http.StatusOK, processOf(p))
}

// process asks for a process, waiting for its exit. A draining server answers with what there is.
func (c *call) process(g *control.Guest, pid sandbox.ProcessID, wait time.Duration) (*nodev1.Process, error) {
	ask := func(ctx context.Context, wait time.Duration) (*nodev1.Process, error) {
		ctx, cancel := context.WithTimeout(ctx, guestio.CallTimeout+wait)
		defer cancel()
		resp, err := g.Processes.GetProcess(ctx, connect.NewRequest(&nodev1.GetProcessRequest{
			ProcessId: string(pid), WaitMs: uint32(wait / time.Millisecond),
		}))
		if err != nil {
			return nil, err
		}
		return resp.Msg.GetProcess(), nil
	}
	ctx, cancel := c.draining()
	defer cancel()
	p, err := ask(ctx, wait)
	if err != nil && ctx.Err() != nil && c.ctx().Err() == nil {
		p, err = ask(c.ctx(), 0)
	}
	return p, control.GuestError(err, "")
}

// target resolves the process that a call is for, for a key or for the holder of a session.
func (c *call) target() (*control.Guest, sandbox.ProcessID, error) {
	id, err := c.sandboxID()
	if err != nil {
		return nil, "", err
	}
	pid, err := c.processID()
	if err != nil {
		return nil, "", err
	}
	if c.session == nil {
		g, err := c.svc().Guest(c.ctx(), c.p, id, sandbox.ScopeSandboxesExec, control.GuestUse{Active: true})
		return g, pid, err
	}
	if c.session.SandboxID != id || c.session.ProcessID != pid {
		return nil, "", sandbox.Errorf(sandbox.CodeNotFound, "no such process")
	}
	g, err := c.svc().SessionGuest(c.ctx(), c.session, control.GuestUse{Active: true})
	return g, pid, err
}

func (s *Server) killProcess(c *call) error {
	if err := c.noBody(); err != nil {
		return err
	}
	g, pid, err := c.target()
	if err != nil {
		return err
	}
	var resp *nodev1.SignalResponse
	replayed, err := c.once(func(ctx context.Context) (err error) {
		resp, err = guestio.Signal(ctx, g, pid, 9, agentv1.SignalTarget_SIGNAL_TARGET_TREE)
		return err
	})
	if err == nil && replayed {
		var p *nodev1.Process
		p, err = c.process(g, pid, 0)
		resp = &nodev1.SignalResponse{Process: p, Pending: p.GetState() != nodev1.ProcessState_PROCESS_STATE_EXITED}
	}
	if err != nil {
		return err
	}
	return c.json(http.StatusOK, KilledProcess{Process: *processOf(resp.GetProcess()), Pending: resp.GetPending()})
}

func (s *Server) signalProcess(c *call) error {
	var in SignalProcess
	if err := c.decode(&in); err != nil {
		return err
	}
	sig, err := guestio.ParseSignal(in.Signal)
	if err != nil {
		return err
	}
	target, err := guestio.ParseTarget(in.Target)
	if err != nil {
		return err
	}
	g, pid, err := c.target()
	if err != nil {
		return err
	}
	var p *nodev1.Process
	replayed, err := c.once(func(ctx context.Context) error {
		resp, err := guestio.Signal(ctx, g, pid, sig, target)
		p = resp.GetProcess()
		return err
	})
	if err == nil && replayed {
		p, err = c.process(g, pid, 0)
	}
	if err != nil {
		return err
	}
	return c.json(http.StatusOK, processOf(p))
}

func (s *Server) writeStdin(c *call) error {
	in := guestio.Stdin{Close: c.query.Get("close") == "true"}
	if value := c.query.Get("offset"); value != "" {
		offset, err := strconv.ParseUint(value, 10, 64)
		if err != nil {
			return sandbox.Invalid("offset", "type", "must be an integer")
		}
		in.Offset = &offset
	}
	g, pid, err := c.target()
	if err != nil {
		return err
	}
	in.Process = pid
	replayed, err := c.once(func(context.Context) error { return guestio.WriteStdin(c, c.r, g, in) })
	if err == nil && replayed {
		c.WriteHeader(http.StatusNoContent)
	}
	return err
}

func (s *Server) resizeProcess(c *call) error {
	var in TerminalSize
	if err := c.decode(&in); err != nil {
		return err
	}
	g, pid, err := c.target()
	if err != nil {
		return err
	}
	if err := guestio.Resize(c.ctx(), g, pid, in.Cols, in.Rows); err != nil {
		return err
	}
	c.WriteHeader(http.StatusNoContent)
	return nil
}

// readOutput streams journalled bytes. What the journal no longer or not yet has is answered 416.
func (s *Server) readOutput(c *call) error {
	pid, err := c.processID()
	if err != nil {
		return err
	}
	g, err := c.guest(sandbox.ScopeSandboxesRead, control.GuestUse{ReadOnly: true})
	if err != nil {
		return err
	}
	from, err := strconv.ParseUint("0"+c.query.Get("from"), 10, 64)
	if err != nil {
		return sandbox.Invalid("from", "type", "must be an integer")
	}
	ctx, dog, cancel := guestio.WithWatchdog(c.ctx(), guestio.CallTimeout)
	defer cancel()
	stream, err := g.Processes.ReadOutput(ctx, connect.NewRequest(&nodev1.ReadOutputRequest{
		ProcessId: string(pid), Stream: streamOf(c.query.Get("stream")), From: from,
	}))
	if err != nil {
		return outputError(err)
	}
	defer func() { _ = stream.Close() }()
	more := stream.Receive()
	if !more && stream.Err() != nil {
		return outputError(stream.Err())
	}
	attachment(c.Header(), []byte(string(pid)+"."+c.query.Get("stream")))
	out := newSender(c)
	for ; more; more = stream.Receive() {
		dog.Pause()
		if err := out.send(stream.Msg().GetData()); err != nil {
			return err
		}
		dog.Step()
	}
	if err := stream.Err(); err != nil {
		return control.GuestError(err, "")
	}
	return out.finish()
}

func outputError(err error) error {
	if connect.CodeOf(err) != connect.CodeOutOfRange {
		return control.GuestError(err, "")
	}
	e := sandbox.Invalid("from", "range", "is not kept any more, or was not written yet")
	e.Status = http.StatusRequestedRangeNotSatisfiable
	return e.WithCause(err).WithRemediation("ask from offset 0, or from the to_offset of the output_dropped event")
}

func streamOf(name string) agentv1.Stream {
	switch name {
	case "stderr":
		return agentv1.Stream_STREAM_STDERR
	case "pty":
		return agentv1.Stream_STREAM_PTY
	}
	return agentv1.Stream_STREAM_STDOUT
}

// writeTimeout is how long a client may take to accept one chunk before its connection is given up.
const writeTimeout = 60 * time.Second

// sender writes chunks of an answer with a deadline for each.
type sender struct {
	c  *call
	rc *http.ResponseController
}

func newSender(c *call) *sender { return &sender{c: c, rc: http.NewResponseController(c)} }

func (s *sender) send(p []byte) error {
	// Servers without deadlines (tests) answer ErrNotSupported; the connection itself then bounds the write.
	_ = s.rc.SetWriteDeadline(time.Now().Add(writeTimeout))
	_, err := s.c.Write(p)
	return err
}

// finish sends the header of an answer without a body and lifts the deadline.
func (s *sender) finish() error {
	if s.c.Status == 0 {
		s.c.WriteHeader(http.StatusOK)
	}
	_ = s.rc.SetWriteDeadline(time.Time{})
	return nil
}

// attachment marks bytes of a guest: never shown in place, never sniffed, never run.
func attachment(h http.Header, path []byte) {
	h.Set("Content-Type", "application/octet-stream")
	h.Set("Content-Security-Policy", "sandbox; default-src 'none'")
	h.Set("Content-Disposition", "attachment; filename*=UTF-8''"+encodeName(path[bytes.LastIndexByte(path, '/')+1:]))
}
