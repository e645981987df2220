package link

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/space-sandbox/space/internal/vmm"
	"gvisor.dev/gvisor/pkg/buffer"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/link/channel"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv4"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
)

const (
	nicID = 1
	// queueLen bounds the packets between stack and link; the TCP send buffers bound their bytes.
	queueLen = 256
	// bufferDefault and bufferMax bound what one connection may hold in each direction.
	bufferDefault = 256 << 10
	bufferMax     = 1 << 20
)

// ErrClosed means that the link has ended.
var ErrClosed = errors.New("control link is closed")

// Control dials the guest over the control link.
type Control struct {
	conn  net.Conn
	addr  addresses
	stack *stack.Stack
	ep    *channel.Endpoint

	wmu     sync.Mutex // one frame at a time
	dropped atomic.Uint64
	life    context.Context // ends with the link
	cancel  context.CancelFunc
	end     sync.Once
	pumps   sync.WaitGroup
	closed  sync.Once
}

// NewControl starts a stack on conn. The caller closes the Control before or after the conn.
func NewControl(conn net.Conn) (*Control, error) {
	addr, err := controlAddresses()
	if err != nil {
		return nil, err
	}
	c := &Control{conn: conn, addr: addr, ep: channel.New(queueLen, vmm.LinkMTU, "")}
	c.life, c.cancel = context.WithCancel(context.Background())
	c.stack = stack.New(stack.Options{
		NetworkProtocols:   []stack.NetworkProtocolFactory{ipv4.NewProtocol},
		TransportProtocols: []stack.TransportProtocolFactory{tcp.NewProtocol},
	})
	if err := c.configure(); err != nil {
		c.cancel()
		c.stack.Destroy()
		return nil, err
	}
	c.pumps.Go(c.receive)
	c.pumps.Go(c.send)
	return c, nil
}

func (c *Control) configure() error {
	host := tcpip.AddrFrom4(c.addr.host)
	send := tcpip.TCPSendBufferSizeRangeOption{Min: 4 << 10, Default: bufferDefault, Max: bufferMax}
	receive := tcpip.TCPReceiveBufferSizeRangeOption{Min: 4 << 10, Default: bufferDefault, Max: bufferMax}
	sack := tcpip.TCPSACKEnabled(true)
	// A restored guest may still hold connections from before its snapshot: a window of ports that changes with
	// every start makes it unlikely to meet one.
	first := uint16(16384 + rand.IntN(32768))
	steps := []func() tcpip.Error{
		func() tcpip.Error { return c.stack.SetTransportProtocolOption(tcp.ProtocolNumber, &send) },
		func() tcpip.Error { return c.stack.SetTransportProtocolOption(tcp.ProtocolNumber, &receive) },
		func() tcpip.Error { return c.stack.SetTransportProtocolOption(tcp.ProtocolNumber, &sack) },
		func() tcpip.Error { return c.stack.SetPortRange(first, first+16383) },
		func() tcpip.Error { return c.stack.CreateNIC(nicID, c.ep) },
		func() tcpip.Error {
			return c.stack.AddProtocolAddress(nicID, tcpip.ProtocolAddress{
				Protocol:          ipv4.ProtocolNumber,
				AddressWithPrefix: tcpip.AddressWithPrefix{Address: host, PrefixLen: 30},
			}, stack.AddressProperties{})
		},
	}
	for i, step := range steps {
		if err := step(); err != nil {
			return fmt.Errorf("configure control link, step %d: %s", i, err)
		}
	}
	c.stack.SetRouteTable([]tcpip.Route{{Destination: header.IPv4EmptySubnet, NIC: nicID}})
	return nil
}

// DialContext connects to a TCP port of the guest's control address. Any other address is refused: whatever a
// client of this dialer is talked into, it reaches this one guest.
func (c *Control) DialContext(ctx context.Context, network, address string) (net.Conn, error) {
	host, portText, err := net.SplitHostPort(address)
	if err != nil {
		return nil, err
	}
	port, err := strconv.ParseUint(portText, 10, 16)
	if err != nil || port == 0 || host != vmm.ControlGuest || (network != "tcp" && network != "tcp4") {
		return nil, fmt.Errorf("dial %s %s: only TCP to %s is reachable", network, address, vmm.ControlGuest)
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer c.onEnd(cancel)()
	remote := tcpip.FullAddress{NIC: nicID, Addr: tcpip.AddrFrom4(c.addr.guest), Port: uint16(port)}
	conn, err := gonet.DialContextTCP(ctx, c.stack, remote, ipv4.ProtocolNumber)
	if err != nil {
		if c.life.Err() != nil {
			return nil, ErrClosed
		}
		return nil, err
	}
	return conn, nil
}

// onEnd calls f when the link ends, unless the returned function is called before.
func (c *Control) onEnd(f func()) (stop func() bool) { return context.AfterFunc(c.life, f) }

// Done is closed when the link has ended, by Close or by its other side.
func (c *Control) Done() <-chan struct{} { return c.life.Done() }

// Dropped counts the frames that were not let through.
func (c *Control) Dropped() uint64 { return c.dropped.Load() }

// Close ends all connections and waits for the goroutines. It unblocks them with a deadline on the conn, which is
// of no use afterwards.
func (c *Control) Close() {
	c.closed.Do(func() {
		c.finish()
		c.pumps.Wait()
		c.stack.Close()
		c.stack.Wait()
		c.ep.Close()
	})
}

// finish makes both pumps end.
func (c *Control) finish() {
	c.end.Do(func() {
		c.cancel()
		_ = c.conn.SetDeadline(time.Unix(1, 0)) // a closed conn is fine, too
	})
}

// receive hands the guest's frames to the stack.
func (c *Control) receive() {
	defer c.finish()
	buf := make([]byte, maxFrame)
	for {
		frame, err := readFrame(c.conn, buf)
		if err != nil {
			return
		}
		switch c.addr.judge(frame) {
		case deliver:
			pkt := stack.NewPacketBuffer(stack.PacketBufferOptions{Payload: buffer.MakeWithData(frame[etherSize:])})
			c.ep.InjectInbound(ipv4.ProtocolNumber, pkt)
			pkt.DecRef()
		case answerARP:
			if err := c.write(c.addr.arpAnswer()); err != nil {
				return
			}
		default:
			c.dropped.Add(1)
		}
	}
}

// send carries the stack's packets to the guest.
func (c *Control) send() {
	defer c.finish()
	buf := make([]byte, 0, lengthSize+maxFrame)
	for {
		pkt := c.ep.ReadContext(c.life)
		if pkt == nil {
			return
		}
		buf = c.addr.header(buf[:0], etherTypeIPv4, pkt.Size())
		for _, part := range pkt.AsSlices() {
			buf = append(buf, part...)
		}
		pkt.DecRef()
		if err := c.write(buf); err != nil {
			return
		}
	}
}

func (c *Control) write(frame []byte) error {
	c.wmu.Lock()
	defer c.wmu.Unlock()
	_, err := c.conn.Write(frame)
	return err
}
