package shim

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"connectrpc.com/connect"
	agentv1 "github.com/space-sandbox/space/internal/gen/space/agent/v1"
	"github.com/space-sandbox/space/internal/vmm"
	"google.golang.org/protobuf/encoding/protojson"
)

const (
	bootTimeout    = 60 * time.Second
	bootAttempts   = 2
	warmUpTimeout  = 2 * time.Minute // of one command
	freezeTimeout  = 30 * time.Second
	forgetTimeout  = 10 * time.Second
	captureTimeout = 60 * time.Second
	maxWarmUpLog   = 2048
)

// capture boots a VM from its kernel, warms it up and leaves its memory, device state and the agent's answer in
// capture_dir, durable and read-only.
func (s *server) capture(ctx context.Context) error {
	memory, err := os.OpenFile(filepath.Join(s.spec.GetCaptureDir(), "memory"), os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o600)
	if err != nil {
		return fmt.Errorf("memory image: %w", err)
	}
	defer memory.Close()
	m, ping, err := s.boot(ctx, memory)
	if err != nil {
		return err
	}
	err = s.captureVM(ctx, m, ping)
	if cerr := m.close(); cerr != nil {
		return errors.Join(err, fmt.Errorf("end the VM: %w", cerr))
	}
	if err != nil {
		return err
	}
	return s.sealCapture(memory)
}

// boot starts the VM, a second time if the first did not come up, and waits for the agent.
func (s *server) boot(ctx context.Context, memory *os.File) (*machine, *agentv1.PingResponse, error) {
	var errs []error
	for n := range bootAttempts {
		m, ping, err := s.bootOnce(ctx, memory)
		if err == nil {
			return m, ping, nil
		}
		errs = append(errs, fmt.Errorf("boot %d: %w", n+1, err))
		if ctx.Err() != nil {
			break
		}
		s.log.Warn("boot failed", "attempt", n+1, "error", err)
	}
	return nil, nil, errors.Join(errs...)
}

func (s *server) bootOnce(ctx context.Context, memory *os.File) (*machine, *agentv1.PingResponse, error) {
	cfg, err := vmConfig(s.cfg.Dir, s.spec)
	if err != nil {
		return nil, nil, err
	}
	if cfg.CgroupFD != nil {
		defer cfg.CgroupFD.Close()
	}
	if err := memory.Truncate(0); err != nil { // nothing of an earlier attempt may stay
		return nil, nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, bootTimeout)
	defer cancel()
	s.log.Info("booting", "vcpu", cfg.VCPU, "memory_mib", cfg.MemoryMiB)
	vm, err := s.cfg.Driver.Boot(ctx, cfg, vmm.BootSource{
		Kernel: s.spec.GetKernel(), Initrd: s.spec.GetInitrd(),
		Cmdline: "space.token=" + s.spec.GetControlToken(), MemoryFile: memory,
	})
	if err != nil {
		return nil, nil, err
	}
	m, err := newMachine(vm, s.spec.GetControlToken())
	if err != nil {
		return nil, nil, err
	}
	ctx, stop := m.watchVM(ctx)
	defer stop()
	ping, err := m.guest.awaitPing(ctx)
	if err == nil {
		err = checkClock(s.spec.GetAcceleration(), ping.GetClocksource())
	}
	if err != nil {
		return nil, nil, errors.Join(withCause(ctx, err), m.close())
	}
	return m, ping, nil
}

func (s *server) captureVM(ctx context.Context, m *machine, ping *agentv1.PingResponse) error {
	ctx, cancel := m.watchVM(ctx)
	defer cancel()
	if len(s.spec.GetWarmUp()) > 0 { // before its first Resume the agent starts no process
		if err := s.sendResume(ctx, m, &agentv1.ResumeRequest{
			Generation: warmUpGeneration, Hostname: "template", Identity: "template", ControlToken: s.spec.GetControlToken(),
		}); err != nil {
			return withCause(ctx, fmt.Errorf("resume: %w", err))
		}
	}
	for i, line := range s.spec.GetWarmUp() {
		if err := warmUp(ctx, m.guest, "warm-up-"+strconv.Itoa(i), line); err != nil {
			return withCause(ctx, fmt.Errorf("warm-up command %d: %w", i+1, err))
		}
	}
	if err := awaitForgotten(ctx, m.guest); err != nil {
		return withCause(ctx, err)
	}
	// The snapshot must not hold connections: their other ends will not exist when it is restored.
	m.guest.oneShot.Store(true)
	m.guest.hangUp()
	freeze := func(ctx context.Context) error {
		_, err := m.guest.agent.Freeze(ctx, connect.NewRequest(&agentv1.FreezeRequest{}))
		return err
	}
	if err := bounded(ctx, "freeze", freezeTimeout, freeze); err != nil {
		return withCause(ctx, err)
	}
	if err := m.stop(ctx); err != nil {
		return err
	}
	dir := s.spec.GetCaptureDir()
	if err := bounded(ctx, "capture device state", captureTimeout, func(ctx context.Context) error {
		return m.vm.CaptureState(ctx, filepath.Join(dir, "state"))
	}); err != nil {
		return err
	}
	answer, err := protojson.MarshalOptions{UseProtoNames: true}.Marshal(&agentv1.PingResponse{
		AgentVersion: clean(ping.GetAgentVersion()), Kernel: clean(ping.GetKernel()), Clocksource: clean(ping.GetClocksource()),
	})
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, "agent.json"), answer, 0o600)
}

// warmUp runs one shell command line to its end.
func warmUp(ctx context.Context, g *guest, id, line string) error {
	ctx, cancel := context.WithTimeout(ctx, warmUpTimeout)
	defer cancel()
	stream, err := g.procs.Run(ctx, connect.NewRequest(&agentv1.RunRequest{
		ProcessId: id,
		Spec:      &agentv1.ProcessSpec{Argv: [][]byte{[]byte("/bin/sh"), []byte("-c"), []byte(line)}, User: "root"},
	}))
	if err != nil {
		return err
	}
	defer func() { _ = stream.Close() }() // the stream's own error was seen
	var tail []byte
	for stream.Receive() {
		frame := stream.Msg()
		if data := frame.GetOutput().GetData(); len(data) > 0 {
			tail = append(tail, data...)
			tail = tail[max(0, len(tail)-maxWarmUpLog):]
		}
		ack := &agentv1.AckRequest{Acks: []*agentv1.ProcessAck{{ProcessId: id, Seq: frame.GetSeq()}}}
		if _, err := g.procs.Ack(ctx, connect.NewRequest(ack)); err != nil {
			return err
		}
		if exit := frame.GetExited(); exit != nil {
			if exit.Code == nil || exit.GetCode() != 0 {
				return fmt.Errorf("exit %d %s: %s", exit.GetCode(), clean(exit.GetSignal()), clean(string(tail)))
			}
			return nil
		}
	}
	if err := stream.Err(); err != nil {
		return err
	}
	return io.ErrUnexpectedEOF
}

// awaitForgotten waits until the agent's process table is empty.
func awaitForgotten(ctx context.Context, g *guest) error {
	ctx, cancel := context.WithTimeout(ctx, forgetTimeout)
	defer cancel()
	for {
		resp, err := g.procs.List(ctx, connect.NewRequest(&agentv1.ListRequest{}))
		if err != nil {
			return fmt.Errorf("list processes: %w", err)
		}
		if len(resp.Msg.GetProcesses()) == 0 {
			return nil
		}
		if !pause(ctx, 20*time.Millisecond) {
			return fmt.Errorf("%d processes are left after the warm-up", len(resp.Msg.GetProcesses()))
		}
	}
}

// sealCapture makes the captured files read-only and durable.
func (s *server) sealCapture(memory *os.File) error {
	dir := s.spec.GetCaptureDir()
	for _, name := range []string{"state", "agent.json"} {
		f, err := os.Open(filepath.Join(dir, name))
		if err != nil {
			return err
		}
		err = errors.Join(f.Chmod(0o444), f.Sync(), f.Close())
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
	}
	if err := errors.Join(memory.Chmod(0o444), memory.Sync()); err != nil {
		return fmt.Errorf("memory: %w", err)
	}
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer d.Close()
	return d.Sync()
}
