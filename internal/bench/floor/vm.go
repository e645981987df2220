package floor

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/timestamppb"

	agentv1 "github.com/space-sandbox/space/internal/gen/space/agent/v1"
	"github.com/space-sandbox/space/internal/gen/space/agent/v1/agentv1connect"
	"github.com/space-sandbox/space/internal/link"
	"github.com/space-sandbox/space/internal/vmm"
)

const (
	generation = 2 // templates are captured at 1
	chunk      = 256 << 10
	maxMessage = 1 << 20
	ackBytes   = 512 << 10
	firstPing  = 15 * time.Second
)

// VM is one running VM.
type VM struct {
	vm      vmm.VM
	dir     string
	control *link.Control
	sink    *link.Sink
	http    *http.Transport
	agent   agentv1connect.AgentServiceClient
	procs   agentv1connect.ProcessServiceClient
	files   agentv1connect.FileServiceClient
	token   string
	next    int
}

// Start restores a VM, lets it run and returns when its agent has answered once. It lasts as long as no platform can
// do without.
func (f *Floor) Start(ctx context.Context) (*VM, error) {
	cfg, err := f.config(ctx)
	if err != nil {
		return nil, err
	}
	machine, err := f.driver.Restore(ctx, cfg, vmm.Snapshot{Memory: f.memory, State: filepath.Join(f.warm, "state")})
	if err != nil {
		return nil, err
	}
	control, err := link.NewControl(machine.ControlLink())
	if err != nil {
		return nil, errors.Join(err, machine.Close())
	}
	v := &VM{vm: machine, dir: filepath.Dir(cfg.Dir), control: control, sink: link.Discard(machine.WorkloadLink()), token: f.snap.ControlToken}
	v.dial()
	err = machine.Continue(ctx)
	if err == nil {
		err = v.awaitPing(ctx)
	}
	if err != nil {
		return nil, errors.Join(err, v.Close())
	}
	return v, nil
}

func (v *VM) dial() {
	v.http = &http.Transport{
		DialContext: v.control.DialContext, DisableCompression: true, MaxIdleConnsPerHost: 4,
		ReadBufferSize: 64 << 10, WriteBufferSize: 64 << 10,
	}
	client := &http.Client{Transport: v}
	url := "http://" + net.JoinHostPort(vmm.ControlGuest, strconv.Itoa(vmm.AgentPort))
	limit := connect.WithClientOptions(connect.WithReadMaxBytes(maxMessage), connect.WithAcceptCompression("gzip", nil, nil))
	v.agent = agentv1connect.NewAgentServiceClient(client, url, limit)
	v.procs = agentv1connect.NewProcessServiceClient(client, url, limit)
	v.files = agentv1connect.NewFileServiceClient(client, url, limit)
}

// RoundTrip adds the token.
func (v *VM) RoundTrip(req *http.Request) (*http.Response, error) {
	req = req.Clone(req.Context())
	req.Header.Set("Authorization", "Bearer "+v.token)
	return v.http.RoundTrip(req)
}

func (v *VM) awaitPing(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, firstPing)
	defer cancel()
	for {
		_, err := v.agent.Ping(ctx, connect.NewRequest(&agentv1.PingRequest{}))
		if err == nil {
			return nil
		}
		select {
		case <-time.After(5 * time.Millisecond):
		case <-v.vm.Done():
			return errors.Join(err, v.vm.Err())
		case <-ctx.Done():
			return fmt.Errorf("the agent did not answer: %w", err)
		}
	}
}

// Resume gives the guest an identity, without which it starts no process.
func (v *VM) Resume(ctx context.Context) error {
	entropy := make([]byte, 128)
	_, _ = rand.Read(entropy) // never fails
	token := rand.Text()
	_, err := v.agent.Resume(ctx, connect.NewRequest(&agentv1.ResumeRequest{
		Generation: generation, WallClock: timestamppb.Now(), Entropy: entropy, Hostname: "floor", Identity: "floor", ControlToken: token,
	}))
	if err == nil {
		v.token = token
	}
	return err
}

// Result is what came of a command.
type Result struct {
	Bytes int           // that it wrote
	Took  time.Duration // from the call until its exit was received
}

// Run runs a command to its end. What it wrote is acknowledged, and else thrown away.
func (v *VM) Run(ctx context.Context, argv ...string) (Result, error) {
	begin := time.Now()
	v.next++
	id := "floor-" + strconv.Itoa(v.next)
	spec := &agentv1.ProcessSpec{}
	for _, a := range argv {
		spec.Argv = append(spec.Argv, []byte(a))
	}
	stream, err := v.procs.Run(ctx, connect.NewRequest(&agentv1.RunRequest{ProcessId: id, Spec: spec}))
	if err != nil {
		return Result{}, err
	}
	acks := make(chan uint64, 1)
	var acker sync.WaitGroup
	var ackErr error
	acker.Go(func() {
		for seq := range acks {
			ackErr = cmp.Or(ackErr, v.ack(ctx, id, seq))
		}
	})
	total, exit, last := follow(stream, acks)
	res := Result{Bytes: total, Took: time.Since(begin)}
	err = errors.Join(stream.Err(), stream.Close())
	close(acks)
	acker.Wait()
	switch err = errors.Join(err, ackErr); {
	case err != nil:
		return res, err
	case exit == nil || exit.Code == nil || exit.GetCode() != 0:
		return res, fmt.Errorf("%q failed: %v", argv[0], exit)
	}
	return res, v.ack(ctx, id, last)
}

// follow receives until the exit. It never waits for an acknowledgement: while one is under way the next is left out.
func follow(stream *connect.ServerStreamForClient[agentv1.ProcessFrame], acks chan<- uint64) (total int, exit *agentv1.Exited, last uint64) {
	unacked := 0
	for exit == nil && stream.Receive() {
		frame := stream.Msg()
		n := len(frame.GetOutput().GetData())
		total, unacked, last = total+n, unacked+n, frame.GetSeq()
		exit = frame.GetExited()
		if unacked >= ackBytes {
			select {
			case acks <- last:
				unacked = 0
			default:
			}
		}
	}
	return total, exit, last
}

func (v *VM) ack(ctx context.Context, id string, seq uint64) error {
	_, err := v.procs.Ack(ctx, connect.NewRequest(&agentv1.AckRequest{Acks: []*agentv1.ProcessAck{{ProcessId: id, Seq: seq}}}))
	return err
}

// WriteFile writes size zero bytes to a file.
func (v *VM) WriteFile(ctx context.Context, path string, size int) error {
	stream := v.files.Write(ctx)
	err := stream.Send(&agentv1.WriteRequest{Kind: &agentv1.WriteRequest_Header{Header: &agentv1.WriteHeader{Path: []byte(path)}}})
	buf := make([]byte, chunk)
	for ; err == nil && size > 0; size -= chunk {
		err = stream.Send(&agentv1.WriteRequest{Kind: &agentv1.WriteRequest_Data{Data: buf[:min(size, chunk)]}})
	}
	if err == nil {
		err = stream.Send(&agentv1.WriteRequest{Kind: &agentv1.WriteRequest_Commit{Commit: &agentv1.WriteCommit{}}})
	}
	_, cerr := stream.CloseAndReceive()
	if errors.Is(err, io.EOF) {
		err = nil // the answer says what is wrong
	}
	return errors.Join(err, cerr)
}

// ReadFile reads a file and returns how many bytes it has.
func (v *VM) ReadFile(ctx context.Context, path string) (int, error) {
	stream, err := v.files.Read(ctx, connect.NewRequest(&agentv1.ReadRequest{Path: []byte(path)}))
	if err != nil {
		return 0, err
	}
	total := 0
	for stream.Receive() {
		total += len(stream.Msg().GetData())
	}
	return total, errors.Join(stream.Err(), stream.Close())
}

// PID is the VMM's process ID.
func (v *VM) PID() int { return v.vm.PID() }

// AgentRSS is the resident memory of the guest's agent in bytes.
func (v *VM) AgentRSS(ctx context.Context) (uint64, error) {
	resp, err := v.agent.Stats(ctx, connect.NewRequest(&agentv1.StatsRequest{}))
	if err != nil {
		return 0, err
	}
	return resp.Msg.GetAgentRssBytes(), nil
}

// Close ends the VM and removes its files.
func (v *VM) Close() error {
	err := v.vm.Close()
	v.control.Close()
	v.sink.Close()
	v.http.CloseIdleConnections()
	return errors.Join(err, os.RemoveAll(v.dir))
}
