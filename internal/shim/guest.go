package shim

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"connectrpc.com/connect"
	agentv1 "github.com/space-sandbox/space/internal/gen/space/agent/v1"
	"github.com/space-sandbox/space/internal/gen/space/agent/v1/agentv1connect"
	"github.com/space-sandbox/space/internal/vmm"
)

const (
	callTimeout  = 5 * time.Second // of a call that the agent answers without waiting for anything
	maxMessage   = 1 << 20         // of agent and process calls
	maxChunk     = 512 << 10       // of file contents
	maxListing   = 16 << 20        // of file entries
	maxErrorText = 512
)

// dialFunc connects to the guest's control address.
type dialFunc func(ctx context.Context, network, address string) (net.Conn, error)

// guest is the agent of one VM, as a client that trusts nothing it hears: it dials only this VM, follows no
// redirect, accepts no compression and bounds headers and messages. Deadlines are the callers'.
type guest struct {
	agent   agentv1connect.AgentServiceClient
	procs   agentv1connect.ProcessServiceClient
	files   agentv1connect.FileServiceClient // answers with entries
	content agentv1connect.FileServiceClient // answers with chunks

	transport *http.Transport
	token     atomic.Pointer[string]
	oneShot   atomic.Bool // no connection outlives its call
}

func newGuest(dial dialFunc, token string) *guest {
	g := &guest{transport: &http.Transport{
		DialContext:            dial,
		DisableCompression:     true,
		MaxResponseHeaderBytes: 64 << 10,
		MaxIdleConns:           4,
		MaxIdleConnsPerHost:    4,
		ReadBufferSize:         32 << 10,
		WriteBufferSize:        32 << 10,
	}}
	g.token.Store(&token)
	client := &http.Client{
		Transport: g,
		CheckRedirect: func(*http.Request, []*http.Request) error {
			return errors.New("the guest agent must not redirect")
		},
	}
	url := "http://" + net.JoinHostPort(vmm.ControlGuest, strconv.Itoa(vmm.AgentPort))
	limit := func(n int) connect.ClientOption {
		return connect.WithClientOptions(connect.WithReadMaxBytes(n), connect.WithAcceptCompression("gzip", nil, nil))
	}
	g.agent = agentv1connect.NewAgentServiceClient(client, url, limit(maxMessage))
	g.procs = agentv1connect.NewProcessServiceClient(client, url, limit(maxMessage))
	g.files = agentv1connect.NewFileServiceClient(client, url, limit(maxListing))
	g.content = agentv1connect.NewFileServiceClient(client, url, limit(maxChunk))
	return g
}

// RoundTrip adds the token.
func (g *guest) RoundTrip(req *http.Request) (*http.Response, error) {
	req = req.Clone(req.Context())
	req.Header.Set("Authorization", "Bearer "+*g.token.Load())
	req.Close = g.oneShot.Load()
	return g.transport.RoundTrip(req)
}

// setToken changes the token of later calls.
func (g *guest) setToken(token string) { g.token.Store(&token) }

// hangUp closes the connections that no call uses.
func (g *guest) hangUp() { g.transport.CloseIdleConnections() }

// ping asks for a no-op.
func (g *guest) ping(ctx context.Context, timeout time.Duration) (*agentv1.PingResponse, error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	resp, err := g.agent.Ping(ctx, connect.NewRequest(&agentv1.PingRequest{}))
	if err != nil {
		return nil, fmt.Errorf("agent: %w", err)
	}
	return resp.Msg, nil
}

// awaitPing pings until the agent answers or ctx ends. While nothing listens a dial fails at once, so the rounds
// are spaced.
func (g *guest) awaitPing(ctx context.Context) (*agentv1.PingResponse, error) {
	for {
		resp, err := g.ping(ctx, 2*time.Second)
		if err == nil {
			return resp, nil
		}
		if code := connect.CodeOf(err); code == connect.CodeUnauthenticated || code == connect.CodePermissionDenied {
			return nil, err
		}
		if !pause(ctx, 20*time.Millisecond) {
			return nil, fmt.Errorf("the agent did not answer in time: %w", err)
		}
	}
}

// pause waits, and reports false when ctx ended first.
func pause(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// checkClock refuses clock sources that lose time.
func checkClock(accel, source string) error {
	if source == "tsc" || (accel == string(vmm.KVM) && source == "kvm-clock") {
		return nil
	}
	return fmt.Errorf("the guest's clock source is %q, which does not keep time under %s", clean(source), accel)
}

// clean makes text from the guest fit for logs and error messages.
func clean(s string) string {
	if len(s) > maxErrorText {
		s = s[:maxErrorText]
	}
	return strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f || r == '\ufffd' {
			return '?'
		}
		return r
	}, strings.ToValidUTF8(s, "?"))
}

// guestError is what a caller gets to see of a failed call into the guest: a code the contract knows, bounded
// text, and the one detail that is defined, encoded anew.
func guestError(err error) error {
	var ce *connect.Error
	switch {
	case errors.Is(err, context.Canceled):
		return connect.NewError(connect.CodeCanceled, errors.New("the call was given up"))
	case errors.Is(err, context.DeadlineExceeded):
		return connect.NewError(connect.CodeDeadlineExceeded, errors.New("the guest did not answer in time"))
	case !errors.As(err, &ce) || !connect.IsWireError(err):
		if connect.CodeOf(err) == connect.CodeDeadlineExceeded {
			return connect.NewError(connect.CodeDeadlineExceeded, errors.New("the guest did not answer in time"))
		}
		return connect.NewError(connect.CodeUnavailable, errors.New("the guest agent cannot be reached or answers nonsense"))
	}
	code := ce.Code()
	switch code {
	case connect.CodeNotFound, connect.CodeAlreadyExists, connect.CodePermissionDenied, connect.CodeInvalidArgument,
		connect.CodeResourceExhausted, connect.CodeFailedPrecondition, connect.CodeOutOfRange,
		connect.CodeDeadlineExceeded, connect.CodeUnimplemented, connect.CodeAborted, connect.CodeUnavailable:
	default:
		code = connect.CodeUnavailable // unauthenticated, internal and the like say nothing about the caller
	}
	out := connect.NewError(code, errors.New(clean(ce.Message())))
	if fe := fileError(ce); fe != nil {
		if d, derr := connect.NewErrorDetail(fe); derr == nil {
			out.AddDetail(d)
		}
	}
	return out
}

// fileError finds the FileError detail of an error from the guest and keeps what is defined of it.
func fileError(ce *connect.Error) *agentv1.FileError {
	for i, d := range ce.Details() {
		if i == 8 {
			break
		}
		v, err := d.Value()
		if err != nil {
			continue
		}
		fe, ok := v.(*agentv1.FileError)
		if !ok {
			continue
		}
		out := new(agentv1.FileError)
		if _, known := agentv1.FileErrorReason_name[int32(fe.GetReason())]; known {
			out.Reason = fe.GetReason()
		}
		switch f := fe.GetField(); f {
		case "path", "from", "to", "user", "cwd", "argv", "mode", "after":
			out.Field = f
		}
		return out
	}
	return nil
}
