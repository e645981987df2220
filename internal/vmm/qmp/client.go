package qmp

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

const (
	maxLine        = 1 << 20 // one message of QEMU
	defaultTimeout = 10 * time.Second
)

// ErrClosed is wrapped by the errors of calls on a connection that has ended.
var ErrClosed = errors.New("qmp connection closed")

// Error is QEMU's answer to a command it did not carry out.
type Error struct {
	Command string
	Class   string
	Desc    string
}

// Error implements error.
func (e *Error) Error() string { return fmt.Sprintf("qmp %s: %s", e.Command, e.Desc) }

// Event is something QEMU told on its own account.
type Event struct {
	Name string
	Data json.RawMessage
}

// Greeting is what QEMU says first.
type Greeting struct {
	Major, Minor, Micro int
	Package             string
}

// Client is one connection.
type Client struct {
	conn    *net.UnixConn
	onEvent func(Event)
	greeted chan struct{} // closed when greeting is set
	done    chan struct{} // closed when the reader has ended; err is set before

	writing chan struct{} // holds one token; whoever has it may write

	mu       sync.Mutex
	greeting Greeting
	nextID   uint64
	pending  map[uint64]chan message
	err      error
}

// New starts a client on conn, which it owns from then on. onEvent, if not nil, is called for every event from the
// reading goroutine and must not block.
func New(conn *net.UnixConn, onEvent func(Event)) *Client {
	c := &Client{
		conn: conn, onEvent: onEvent,
		greeted: make(chan struct{}), done: make(chan struct{}), writing: make(chan struct{}, 1),
		pending: make(map[uint64]chan message),
	}
	go c.read()
	return c
}

// Handshake waits for the greeting and leaves negotiation mode.
func (c *Client) Handshake(ctx context.Context) (Greeting, error) {
	ctx, cancel := context.WithTimeout(ctx, defaultTimeout)
	defer cancel()
	select {
	case <-c.greeted:
	case <-c.done:
		return Greeting{}, c.err
	case <-ctx.Done():
		return Greeting{}, fmt.Errorf("wait for the qmp greeting: %w", ctx.Err())
	}
	if err := c.Do(ctx, "qmp_capabilities", nil, nil); err != nil {
		return Greeting{}, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.greeting, nil
}

// Close ends the connection. It may be called repeatedly.
func (c *Client) Close() error {
	err := c.conn.Close()
	<-c.done
	if errors.Is(err, net.ErrClosed) {
		return nil
	}
	return err
}

// Done is closed when the connection has ended.
func (c *Client) Done() <-chan struct{} { return c.done }

// request is one command as sent.
type request struct {
	Execute   string `json:"execute"`
	Arguments any    `json:"arguments,omitempty"`
	ID        uint64 `json:"id"`
}

// Do carries out a command and decodes its result into result unless that is nil. Each of files is sent along with
// it and stays the caller's. Without a deadline in ctx there is one of ten seconds.
func (c *Client) Do(ctx context.Context, command string, args, result any, files ...*os.File) error {
	ctx, cancel := context.WithTimeout(ctx, defaultTimeout)
	defer cancel()
	id, answer, err := c.register()
	if err != nil {
		return fmt.Errorf("qmp %s: %w", command, err)
	}
	defer c.forget(id)
	line, err := json.Marshal(request{Execute: command, Arguments: args, ID: id})
	if err != nil {
		return fmt.Errorf("qmp %s: %w", command, err)
	}
	if err := c.write(ctx, append(line, '\n'), files); err != nil {
		return fmt.Errorf("qmp %s: %w", command, err)
	}
	select {
	case m := <-answer:
		return m.decode(command, result)
	case <-c.done:
		return fmt.Errorf("qmp %s: %w", command, c.err)
	case <-ctx.Done():
		return fmt.Errorf("qmp %s: no answer: %w", command, ctx.Err())
	}
}

func (c *Client) register() (uint64, chan message, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err != nil {
		return 0, nil, c.err
	}
	c.nextID++
	answer := make(chan message, 1)
	c.pending[c.nextID] = answer
	return c.nextID, answer, nil
}

func (c *Client) forget(id uint64) {
	c.mu.Lock()
	delete(c.pending, id)
	c.mu.Unlock()
}

// write sends one line, one caller at a time. A peer that does not read makes it fail by ctx's deadline; a line of
// which only a part got out ends the connection, as nothing after it would be understood.
func (c *Client) write(ctx context.Context, line []byte, files []*os.File) error {
	select {
	case c.writing <- struct{}{}:
		defer func() { <-c.writing }()
	case <-c.done:
		return c.err
	case <-ctx.Done():
		return ctx.Err()
	}
	deadline, _ := ctx.Deadline()
	_ = c.conn.SetWriteDeadline(deadline)
	var oob []byte
	if len(files) > 0 {
		fds := make([]int, len(files))
		for i, f := range files {
			fds[i] = int(f.Fd())
		}
		oob = unix.UnixRights(fds...)
	}
	n, _, err := c.conn.WriteMsgUnix(line, oob, nil)
	if err == nil && n < len(line) {
		_, err = c.conn.Write(line[n:])
	}
	if err != nil {
		_ = c.conn.Close()
		return fmt.Errorf("%w: %w", ErrClosed, err)
	}
	return nil
}

// read handles lines until the connection ends.
func (c *Client) read() {
	defer close(c.done)
	lines := bufio.NewScanner(c.conn)
	lines.Buffer(make([]byte, 4096), maxLine)
	var err error
	for err == nil && lines.Scan() {
		var m message
		if m, err = parse(lines.Bytes()); err == nil {
			c.handle(m)
		}
	}
	if err == nil {
		err = lines.Err()
	}
	_ = c.conn.Close()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.err = ErrClosed
	if err != nil && !errors.Is(err, net.ErrClosed) {
		c.err = fmt.Errorf("%w: %w", ErrClosed, err)
	}
}

func (c *Client) handle(m message) {
	switch {
	case m.Greeting != nil:
		c.greet(*m.Greeting)
	case m.Event != "":
		if c.onEvent != nil {
			c.onEvent(Event{Name: m.Event, Data: m.Data})
		}
	case m.ID != nil:
		c.mu.Lock()
		answer := c.pending[*m.ID]
		delete(c.pending, *m.ID)
		c.mu.Unlock()
		if answer != nil {
			answer <- m // has room for the one answer
		}
	}
}

func (c *Client) greet(g greeting) {
	c.mu.Lock()
	defer c.mu.Unlock()
	select {
	case <-c.greeted:
		return // a second greeting changes nothing
	default:
	}
	v := g.Version
	c.greeting = Greeting{Major: v.QEMU.Major, Minor: v.QEMU.Minor, Micro: v.QEMU.Micro, Package: v.Package}
	close(c.greeted)
}
