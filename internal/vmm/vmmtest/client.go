package vmmtest

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/space-sandbox/space/internal/vmm"
)

const (
	etherType  = 0x88b5
	headerSize = 14
	resendTime = 300 * time.Millisecond
)

// Frames is one link of a VM, read by a goroutine that ends when the link is closed.
type Frames struct {
	conn net.Conn
	mac  net.HardwareAddr
	in   chan []byte
}

// NewFrames starts reading a link whose guest end has an address.
func NewFrames(conn net.Conn, mac string) (*Frames, error) {
	address, err := net.ParseMAC(mac)
	if err != nil {
		return nil, err
	}
	f := &Frames{conn: conn, mac: address, in: make(chan []byte, 64)}
	go f.read()
	return f, nil
}

// read delivers frames, and drops them when nobody takes them, like a network card.
func (f *Frames) read() {
	defer close(f.in)
	in := bufio.NewReaderSize(f.conn, 1<<17)
	for {
		var size [4]byte
		if _, err := io.ReadFull(in, size[:]); err != nil {
			return
		}
		n := binary.BigEndian.Uint32(size[:])
		if n > 1<<17 {
			return
		}
		frame := make([]byte, n)
		if _, err := io.ReadFull(in, frame); err != nil {
			return
		}
		if n < headerSize || binary.BigEndian.Uint16(frame[12:]) != etherType {
			continue
		}
		select {
		case f.in <- frame:
		default:
		}
	}
}

// Send sends one payload to the guest.
func (f *Frames) Send(payload []byte) error {
	host, err := net.ParseMAC(vmm.LinkHostMAC)
	if err != nil {
		return err
	}
	n := headerSize + len(payload)
	out := make([]byte, 4, 4+n)
	binary.BigEndian.PutUint32(out, uint32(n))
	out = append(append(out, f.mac...), host...)
	out = binary.BigEndian.AppendUint16(out, etherType)
	_ = f.conn.SetWriteDeadline(time.Now().Add(5 * time.Second))
	_, err = f.conn.Write(append(out, payload...))
	return err
}

// Receive returns the payload of the next frame.
func (f *Frames) Receive(ctx context.Context) ([]byte, error) {
	select {
	case frame, ok := <-f.in:
		if !ok {
			return nil, errors.New("link closed")
		}
		return frame[headerSize:], nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// Client talks to the test guest of one VM.
type Client struct {
	control  *Frames
	workload *Frames

	mu     sync.Mutex // one request at a time
	number int
}

// Connect starts reading both links of a VM. What it started ends with the VM.
func Connect(vm vmm.VM) (*Client, error) {
	control, err := NewFrames(vm.ControlLink(), vmm.ControlMAC)
	if err != nil {
		return nil, err
	}
	workload, err := NewFrames(vm.WorkloadLink(), vmm.WorkloadMAC)
	if err != nil {
		return nil, err
	}
	return &Client{control: control, workload: workload, number: int(time.Now().UnixNano() & 0xffffff)}, nil
}

// Ask sends a command to the guest, again and again until it answers: a guest that boots has no network yet.
// Commands can be repeated without harm.
func (c *Client) Ask(ctx context.Context, command ...string) (string, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.number++
	number := strconv.Itoa(c.number)
	text := number + " " + strings.Join(command, " ")
	payload := append(binary.BigEndian.AppendUint32(nil, uint32(len(text))), text...)
	for {
		if err := c.control.Send(payload); err != nil {
			return "", fmt.Errorf("ask %s: %w", command[0], err)
		}
		answer, err := c.await(ctx, number)
		if errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil {
			continue
		}
		if err != nil {
			return "", fmt.Errorf("ask %s: %w", command[0], err)
		}
		kind, result, _ := strings.Cut(answer, " ")
		if kind != "ok" {
			return "", fmt.Errorf("ask %s: the guest says: %s", command[0], result)
		}
		return result, nil
	}
}

// await returns the answer to one request if it comes before it is time to send that again.
func (c *Client) await(ctx context.Context, number string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, resendTime)
	defer cancel()
	for {
		payload, err := c.control.Receive(ctx)
		if err != nil {
			return "", err
		}
		if len(payload) < 4 {
			continue
		}
		size := int(binary.BigEndian.Uint32(payload))
		text := string(payload[4:min(4+size, len(payload))])
		if id, answer, _ := strings.Cut(text, " "); id == number {
			return answer, nil
		}
	}
}

// Echo sends a payload on the workload link and waits until it comes back.
func (c *Client) Echo(ctx context.Context, payload []byte) ([]byte, error) {
	for {
		if err := c.workload.Send(payload); err != nil {
			return nil, fmt.Errorf("echo: %w", err)
		}
		once, cancel := context.WithTimeout(ctx, resendTime)
		back, err := c.workload.Receive(once)
		cancel()
		if errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil {
			continue
		}
		return back, err
	}
}
