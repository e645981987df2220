package link

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"

	"github.com/space-sandbox/space/internal/vmm"
)

const (
	lengthSize = 4
	etherSize  = 14
	maxFrame   = etherSize + vmm.LinkMTU
	arpSize    = 28
	ipv4Size   = 20
	tcpSize    = 20

	etherTypeIPv4 = 0x0800
	etherTypeARP  = 0x0806
	protocolTCP   = 6
	arpRequest    = 1
	arpReply      = 2
	flagSYN       = 0x02
	flagACK       = 0x10
)

// errFrame means that the stream of frames cannot be followed any further.
var errFrame = errors.New("frame out of bounds")

// readFrame reads one frame into buf, which must hold maxFrame bytes.
func readFrame(r io.Reader, buf []byte) ([]byte, error) {
	var length [lengthSize]byte
	if _, err := io.ReadFull(r, length[:]); err != nil {
		return nil, err
	}
	n := binary.BigEndian.Uint32(length[:])
	if n > uint32(len(buf)) {
		return nil, fmt.Errorf("%w: %d bytes", errFrame, n)
	}
	if _, err := io.ReadFull(r, buf[:n]); err != nil {
		return nil, err
	}
	return buf[:n], nil
}

// addresses are the two ends of a link.
type addresses struct {
	hostMAC, guestMAC []byte
	host, guest       [4]byte
}

func controlAddresses() (addresses, error) {
	var a addresses
	hostMAC, err1 := net.ParseMAC(vmm.LinkHostMAC)
	guestMAC, err2 := net.ParseMAC(vmm.ControlMAC)
	host, err3 := netip.ParseAddr(vmm.ControlHost)
	guest, err4 := netip.ParseAddr(vmm.ControlGuest)
	if err := errors.Join(err1, err2, err3, err4); err != nil {
		return a, err
	}
	a.hostMAC, a.guestMAC, a.host, a.guest = hostMAC, guestMAC, host.As4(), guest.As4()
	return a, nil
}

// verdict is what becomes of a frame from the guest.
type verdict int

const (
	drop verdict = iota
	deliver
	answerARP
)

// judge decides about a frame from the guest. Only TCP from the guest's address to ours passes, and of that no
// attempt to open a connection.
func (a *addresses) judge(frame []byte) verdict {
	if len(frame) < etherSize || !bytes.Equal(frame[6:12], a.guestMAC) {
		return drop
	}
	body := frame[etherSize:]
	switch binary.BigEndian.Uint16(frame[12:]) {
	case etherTypeARP:
		if a.asksForHost(body) {
			return answerARP
		}
	case etherTypeIPv4:
		if bytes.Equal(frame[:6], a.hostMAC) && a.isReply(body) {
			return deliver
		}
	}
	return drop
}

// isReply reports whether an IPv4 packet can belong to a connection that the host made. Fragments never do: the
// MTU of both ends is the same.
func (a *addresses) isReply(b []byte) bool {
	if len(b) < ipv4Size || b[0]>>4 != 4 || b[9] != protocolTCP {
		return false
	}
	if !bytes.Equal(b[12:16], a.guest[:]) || !bytes.Equal(b[16:20], a.host[:]) {
		return false
	}
	if binary.BigEndian.Uint16(b[6:])&0x3fff != 0 { // more fragments, or an offset
		return false
	}
	header := int(b[0]&0xf) * 4
	if header < ipv4Size || len(b) < header+tcpSize {
		return false
	}
	flags := b[header+13]
	return flags&(flagSYN|flagACK) != flagSYN
}

func (a *addresses) asksForHost(b []byte) bool {
	return len(b) >= arpSize &&
		bytes.Equal(b[:8], []byte{0, 1, 8, 0, 6, 4, 0, arpRequest}) &&
		bytes.Equal(b[8:14], a.guestMAC) && bytes.Equal(b[14:18], a.guest[:]) && bytes.Equal(b[24:28], a.host[:])
}

// arpAnswer is the reply to the guest's question for the host's MAC address, with its length prefix.
func (a *addresses) arpAnswer() []byte {
	out := a.header(nil, etherTypeARP, arpSize)
	out = append(out, 0, 1, 8, 0, 6, 4, 0, arpReply)
	out = append(out, a.hostMAC...)
	out = append(out, a.host[:]...)
	out = append(out, a.guestMAC...)
	return append(out, a.guest[:]...)
}

// header appends the length prefix and the Ethernet header of a frame to the guest.
func (a *addresses) header(dst []byte, etherType uint16, body int) []byte {
	dst = binary.BigEndian.AppendUint32(dst, uint32(etherSize+body))
	dst = append(dst, a.guestMAC...)
	dst = append(dst, a.hostMAC...)
	return binary.BigEndian.AppendUint16(dst, etherType)
}
