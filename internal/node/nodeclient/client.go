package nodeclient

import (
	"context"
	"net"
	"net/http"
	"time"

	"connectrpc.com/connect"

	"github.com/space-sandbox/space/internal/gen/space/agent/v1/agentv1connect"
	"github.com/space-sandbox/space/internal/gen/space/node/v1/nodev1connect"
	"github.com/space-sandbox/space/internal/sandbox"
)

// SandboxHeader says which sandbox a SandboxService or FileService call is for.
const SandboxHeader = "Space-Sandbox-Id"

// maxMessage bounds what is read of one answer. File chunks are 256 KiB; lists of processes are the largest.
const maxMessage = 32 << 20

// Client is a node as the control plane reaches it.
type Client struct {
	nodev1connect.NodeServiceClient
	http    connect.HTTPClient
	baseURL string
}

// New returns a client of the node at baseURL.
func New(httpClient connect.HTTPClient, baseURL string) *Client {
	return &Client{
		NodeServiceClient: nodev1connect.NewNodeServiceClient(httpClient, baseURL, connect.WithReadMaxBytes(maxMessage)),
		http:              httpClient,
		baseURL:           baseURL,
	}
}

// Sandbox returns clients whose calls carry the sandbox's ID.
func (c *Client) Sandbox(id sandbox.ID) (nodev1connect.SandboxServiceClient, agentv1connect.FileServiceClient) {
	opts := []connect.ClientOption{connect.WithInterceptors(header(id)), connect.WithReadMaxBytes(maxMessage)}
	return nodev1connect.NewSandboxServiceClient(c.http, c.baseURL, opts...),
		agentv1connect.NewFileServiceClient(c.http, c.baseURL, opts...)
}

// Unix returns an http.Client for a node that listens on a unix socket, and the base URL to use with it.
func Unix(path string) (*http.Client, string) {
	return &http.Client{Transport: transport(func(ctx context.Context) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "unix", path)
	})}, "http://node"
}

func transport(dial func(context.Context) (net.Conn, error)) *http.Transport {
	return &http.Transport{
		DialContext:         func(ctx context.Context, _, _ string) (net.Conn, error) { return dial(ctx) },
		DisableCompression:  true,
		MaxIdleConns:        256,
		MaxIdleConnsPerHost: 256,
		IdleConnTimeout:     time.Minute,
	}
}

// header sets the sandbox's ID on every call.
type header sandbox.ID

// WrapUnary implements connect.Interceptor.
func (h header) WrapUnary(next connect.UnaryFunc) connect.UnaryFunc {
	return func(ctx context.Context, req connect.AnyRequest) (connect.AnyResponse, error) {
		req.Header().Set(SandboxHeader, string(h))
		return next(ctx, req)
	}
}

// WrapStreamingClient implements connect.Interceptor.
func (h header) WrapStreamingClient(next connect.StreamingClientFunc) connect.StreamingClientFunc {
	return func(ctx context.Context, spec connect.Spec) connect.StreamingClientConn {
		conn := next(ctx, spec)
		conn.RequestHeader().Set(SandboxHeader, string(h))
		return conn
	}
}

// WrapStreamingHandler implements connect.Interceptor: a client has no handlers to wrap.
func (h header) WrapStreamingHandler(next connect.StreamingHandlerFunc) connect.StreamingHandlerFunc {
	return next
}
