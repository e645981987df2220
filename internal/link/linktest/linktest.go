// Package linktest is a guest's end of a control link, for tests: a whole TCP/IP stack with ARP, as a real guest has.
package linktest

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/space-sandbox/space/internal/vmm"
	"gvisor.dev/gvisor/pkg/buffer"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/link/channel"
	"gvisor.dev/gvisor/pkg/tcpip/link/ethernet"
	"gvisor.dev/gvisor/pkg/tcpip/network/arp"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv4"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
)

// Guest is the far end of a control link. Close ends it.
type Guest struct {
	// Listener accepts what the host dials on the agent's port.
	Listener net.Listener

	conn   net.Conn
	stack  *stack.Stack
	ch     *channel.Endpoint
	cancel context.CancelFunc
	pumps  sync.WaitGroup
}

// New starts a guest on its end of a link.
func New(conn net.Conn) (*Guest, error) {
	mac, err := tcpip.ParseMACAddress(vmm.ControlMAC)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(context.Background())
	g := &Guest{conn: conn, ch: channel.New(256, vmm.LinkMTU+header.EthernetMinimumSize, mac), cancel: cancel}
	g.stack = stack.New(stack.Options{
		NetworkProtocols:   []stack.NetworkProtocolFactory{ipv4.NewProtocol, arp.NewProtocol},
		TransportProtocols: []stack.TransportProtocolFactory{tcp.NewProtocol},
	})
	if err := g.configure(); err != nil {
		cancel()
		g.stack.Destroy()
		return nil, err
	}
	g.pumps.Go(func() { g.send(ctx) })
	g.pumps.Go(g.receive)
	return g, nil
}

func (g *Guest) configure() error {
	guest, err := netip.ParseAddr(vmm.ControlGuest)
	if err != nil {
		return err
	}
	if e := g.stack.CreateNIC(1, ethernet.New(g.ch)); e != nil {
		return errors.New(e.String())
	}
	if e := g.stack.AddProtocolAddress(1, tcpip.ProtocolAddress{
		Protocol:          ipv4.ProtocolNumber,
		AddressWithPrefix: tcpip.AddressWithPrefix{Address: tcpip.AddrFrom4(guest.As4()), PrefixLen: 30},
	}, stack.AddressProperties{}); e != nil {
		return errors.New(e.String())
	}
	g.stack.SetRouteTable([]tcpip.Route{{Destination: header.IPv4EmptySubnet, NIC: 1}})
	g.Listener, err = gonet.ListenTCP(g.stack, tcpip.FullAddress{NIC: 1, Port: vmm.AgentPort}, ipv4.ProtocolNumber)
	return err
}

// DialHost tries to connect to the host, which must not work.
func (g *Guest) DialHost(ctx context.Context, port uint16) (net.Conn, error) {
	host, err := netip.ParseAddr(vmm.ControlHost)
	if err != nil {
		return nil, err
	}
	conn, err := gonet.DialContextTCP(ctx, g.stack, tcpip.FullAddress{NIC: 1, Addr: tcpip.AddrFrom4(host.As4()), Port: port}, ipv4.ProtocolNumber)
	if err != nil {
		return nil, fmt.Errorf("dial host: %w", err)
	}
	return conn, nil
}

func (g *Guest) send(ctx context.Context) {
	for pkt := g.ch.ReadContext(ctx); pkt != nil; pkt = g.ch.ReadContext(ctx) {
		frame := make([]byte, 4, 4+pkt.Size())
		for _, part := range pkt.AsSlices() {
			frame = append(frame, part...)
		}
		pkt.DecRef()
		binary.BigEndian.PutUint32(frame, uint32(len(frame)-4))
		if _, err := g.conn.Write(frame); err != nil {
			return
		}
	}
}

func (g *Guest) receive() {
	for {
		var length [4]byte
		if _, err := io.ReadFull(g.conn, length[:]); err != nil {
			return
		}
		frame := make([]byte, binary.BigEndian.Uint32(length[:]))
		if _, err := io.ReadFull(g.conn, frame); err != nil {
			return
		}
		pkt := stack.NewPacketBuffer(stack.PacketBufferOptions{Payload: buffer.MakeWithData(frame)})
		g.ch.InjectInbound(0, pkt)
		pkt.DecRef()
	}
}

// Close ends the guest and closes its end of the link.
func (g *Guest) Close() {
	_ = g.Listener.Close()
	g.cancel()
	_ = g.conn.SetDeadline(time.Unix(1, 0))
	g.conn.Close()
	g.pumps.Wait()
	g.stack.Close()
	g.stack.Wait()
}
