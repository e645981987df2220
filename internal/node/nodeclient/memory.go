package nodeclient

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Memory serves a node's handler inside this process. Its connections are socket pairs with real HTTP on them:
// streams, cancellation and back-pressure behave as they do between machines. A pipe without a buffer would not do: an
// answer that comes before the request has ended would wait for a reader that is still writing.
type Memory struct {
	server *http.Server
	client *http.Client
	conns  chan net.Conn
	done   chan struct{}
	once   sync.Once
	served chan struct{}
}

// InProcess starts to serve handler. The caller closes it.
func InProcess(handler http.Handler) *Memory {
	m := &Memory{
		server: &http.Server{Handler: handler, ReadHeaderTimeout: 10 * time.Second},
		conns:  make(chan net.Conn),
		done:   make(chan struct{}),
		served: make(chan struct{}),
	}
	m.client = &http.Client{Transport: transport(m.dial)}
	go func() {
		defer close(m.served)
		_ = m.server.Serve(listener{m}) // always an error; Close is the only reason
	}()
	return m
}

// Client returns a client of the node that is served.
func (m *Memory) Client() *Client { return New(m.client, "http://node") }

// Close cuts all calls and ends the server.
func (m *Memory) Close() error {
	m.once.Do(func() { close(m.done) })
	err := m.server.Close()
	<-m.served
	m.client.CloseIdleConnections()
	return err
}

func (m *Memory) dial(ctx context.Context) (net.Conn, error) {
	near, far, err := socketPair()
	if err != nil {
		return nil, err
	}
	select {
	case m.conns <- far:
		return near, nil
	case <-m.done:
		return nil, errors.Join(errClosed, near.Close(), far.Close())
	case <-ctx.Done():
		return nil, errors.Join(ctx.Err(), near.Close(), far.Close())
	}
}

// socketPair returns the two ends of a connection that the kernel buffers.
func socketPair() (near, far net.Conn, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("connect to the node: %w", err)
	}
	if near, err = fileConn(fds[0]); err != nil {
		return nil, nil, errors.Join(err, unix.Close(fds[1]))
	}
	if far, err = fileConn(fds[1]); err != nil {
		return nil, nil, errors.Join(err, near.Close())
	}
	return near, far, nil
}

// fileConn takes over fd.
func fileConn(fd int) (net.Conn, error) {
	f := os.NewFile(uintptr(fd), "node")
	c, err := net.FileConn(f) // holds a copy
	return c, errors.Join(err, f.Close())
}

var errClosed = errors.New("the node is not served any more")

// listener hands dialled connections to the server.
type listener struct{ m *Memory }

// Accept implements net.Listener.
func (l listener) Accept() (net.Conn, error) {
	select {
	case c := <-l.m.conns:
		return c, nil
	case <-l.m.done:
		return nil, net.ErrClosed
	}
}

// Close implements net.Listener; the Memory ends what it served.
func (l listener) Close() error { return nil }

// Addr implements net.Listener.
func (l listener) Addr() net.Addr { return &net.UnixAddr{Name: "node", Net: "memory"} }
