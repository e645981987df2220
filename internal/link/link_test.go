package link

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/space-sandbox/space/internal/link/linktest"
	"github.com/space-sandbox/space/internal/vmm"
)

func newGuest(t *testing.T, conn net.Conn) *linktest.Guest {
	t.Helper()
	g, err := linktest.New(conn)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(g.Close)
	return g
}

func addressOf(t testing.TB) addresses {
	t.Helper()
	a, err := controlAddresses()
	if err != nil {
		t.Fatal(err)
	}
	return a
}

func newPair(t *testing.T) (*Control, *linktest.Guest) {
	t.Helper()
	host, far := net.Pipe()
	c, err := NewControl(host)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close(); host.Close() })
	return c, newGuest(t, far)
}

var agentAddr = net.JoinHostPort(vmm.ControlGuest, "1024")

func TestEcho(t *testing.T) {
	c, g := newPair(t)
	go func() {
		for {
			conn, err := g.Listener.Accept()
			if err != nil {
				return
			}
			go func() {
				defer conn.Close()
				_, _ = io.Copy(conn, conn)
			}()
		}
	}()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	for range 5 { // redial
		conn, err := c.DialContext(ctx, "tcp", agentAddr)
		if err != nil {
			t.Fatal(err)
		}
		want := bytes.Repeat([]byte("0123456789abcdef"), 64<<10)
		sent := make(chan error, 1)
		go func() {
			_, err := conn.Write(want)
			sent <- err
		}()
		got := make([]byte, len(want))
		if _, err := io.ReadFull(conn, got); err != nil || !bytes.Equal(got, want) {
			t.Fatalf("echo: %v", err)
		}
		if err := <-sent; err != nil {
			t.Fatal(err)
		}
		conn.Close()
	}
}

func TestGuestCannotConnect(t *testing.T) {
	c, g := newPair(t)
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	_, err := g.DialHost(ctx, 80)
	if err == nil {
		t.Fatal("the guest connected to the host")
	}
	if c.Dropped() == 0 {
		t.Fatal("the attempt was not dropped")
	}
}

func TestOnlyTheGuestCanBeDialled(t *testing.T) {
	c, _ := newPair(t)
	for _, tc := range [][2]string{
		{"tcp", "127.0.0.1:1024"}, {"tcp", "169.254.1.1:1024"}, {"udp", agentAddr}, {"tcp6", agentAddr},
		{"tcp", "169.254.1.2:0"}, {"tcp", "169.254.1.2:65536"}, {"tcp", "169.254.1.2"}, {"tcp", "localhost:1024"},
	} {
		if conn, err := c.DialContext(t.Context(), tc[0], tc[1]); err == nil {
			conn.Close()
			t.Errorf("dialled %v", tc)
		}
	}
}

func TestRefusedAndUnanswered(t *testing.T) {
	c, _ := newPair(t)
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	if _, err := c.DialContext(ctx, "tcp", net.JoinHostPort(vmm.ControlGuest, "9")); err == nil {
		t.Fatal("a closed port answered")
	}
	host, far := net.Pipe() // nobody reads: a stopped VM
	defer far.Close()
	silent, err := NewControl(host)
	if err != nil {
		t.Fatal(err)
	}
	short, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := silent.DialContext(short, "tcp", agentAddr); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("unanswered: %v", err)
	}
	silent.Close()
	if _, err := silent.DialContext(t.Context(), "tcp", agentAddr); !errors.Is(err, ErrClosed) {
		t.Fatalf("after Close: %v", err)
	}
}

func TestCloseEndsConnectionsAndGoroutines(t *testing.T) {
	before := runtime.NumGoroutine()
	for range 5 {
		host, far := net.Pipe()
		c, err := NewControl(host)
		if err != nil {
			t.Fatal(err)
		}
		t.Run("use", func(t *testing.T) {
			g := newGuest(t, far)
			conn, err := c.DialContext(t.Context(), "tcp", agentAddr)
			if err != nil {
				t.Fatal(err)
			}
			peer, err := g.Listener.Accept()
			if err != nil {
				t.Fatal(err)
			}
			defer peer.Close()
			ended := make(chan error, 1)
			go func() {
				_, err := conn.Read(make([]byte, 1))
				ended <- err
			}()
			c.Close()
			if err := <-ended; err == nil {
				t.Fatal("the connection outlived the link")
			}
			conn.Close()
		})
		host.Close()
		c.Close()
	}
	deadline := time.Now().Add(10 * time.Second)
	for runtime.NumGoroutine() > before && time.Now().Before(deadline) {
		runtime.Gosched()
	}
	if n := runtime.NumGoroutine(); n > before {
		buf := make([]byte, 64<<10)
		t.Fatalf("%d goroutines, %d before\n%s", n, before, buf[:runtime.Stack(buf, true)])
	}
}

func TestLinkEndIsSeen(t *testing.T) {
	host, far := net.Pipe()
	c, err := NewControl(host)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	far.Close()
	select {
	case <-c.Done():
	case <-time.After(10 * time.Second):
		t.Fatal("the end of the link went unseen")
	}
}

func TestDiscard(t *testing.T) {
	host, far := net.Pipe()
	s := Discard(host)
	for range 10 {
		frame := append(binary.BigEndian.AppendUint32(nil, 60), make([]byte, 60)...)
		if _, err := far.Write(frame); err != nil {
			t.Fatal(err)
		}
	}
	far.Close()
	s.pump.Wait()
	if s.Frames() != 10 || s.Bytes() != 600 {
		t.Fatalf("%d frames, %d bytes", s.Frames(), s.Bytes())
	}
	s.Close()
	idle, other := net.Pipe()
	defer other.Close()
	Discard(idle).Close() // ends although nothing comes
}

// tcpFrame is a plausible frame from the guest, changed by edit.
func tcpFrame(a addresses, edit func(b []byte)) []byte {
	b := make([]byte, etherSize+ipv4Size+tcpSize)
	copy(b, a.hostMAC)
	copy(b[6:], a.guestMAC)
	binary.BigEndian.PutUint16(b[12:], etherTypeIPv4)
	ip := b[etherSize:]
	ip[0], ip[9] = 0x45, protocolTCP
	copy(ip[12:], a.guest[:])
	copy(ip[16:], a.host[:])
	ip[ipv4Size+13] = flagACK
	edit(b)
	return b
}

func TestJudge(t *testing.T) {
	a := addressOf(t)
	ask := a.arpAnswer()[lengthSize:]
	copy(ask, bytes.Repeat([]byte{0xff}, 6))
	copy(ask[6:], a.guestMAC)
	ask[etherSize+7] = arpRequest
	copy(ask[etherSize+8:], a.guestMAC)
	copy(ask[etherSize+14:], a.guest[:])
	copy(ask[etherSize+24:], a.host[:])
	for name, tc := range map[string]struct {
		frame []byte
		want  verdict
	}{
		"reply":          {tcpFrame(a, func([]byte) {}), deliver},
		"syn-ack":        {tcpFrame(a, func(b []byte) { b[47] = flagSYN | flagACK }), deliver},
		"syn":            {tcpFrame(a, func(b []byte) { b[47] = flagSYN }), drop},
		"other source":   {tcpFrame(a, func(b []byte) { b[29]++ }), drop},
		"other dest":     {tcpFrame(a, func(b []byte) { b[33]++ }), drop},
		"other MAC":      {tcpFrame(a, func(b []byte) { b[11]++ }), drop},
		"broadcast":      {tcpFrame(a, func(b []byte) { copy(b, bytes.Repeat([]byte{0xff}, 6)) }), drop},
		"udp":            {tcpFrame(a, func(b []byte) { b[23] = 17 }), drop},
		"fragment":       {tcpFrame(a, func(b []byte) { b[20] = 0x20 }), drop},
		"late fragment":  {tcpFrame(a, func(b []byte) { b[21] = 1 }), drop},
		"version 6":      {tcpFrame(a, func(b []byte) { b[14] = 0x65 }), drop},
		"long options":   {tcpFrame(a, func(b []byte) { b[14] = 0x4f }), drop},
		"no header":      {tcpFrame(a, func(b []byte) { b[14] = 0x41 }), drop},
		"IPv6 ethertype": {tcpFrame(a, func(b []byte) { b[12], b[13] = 0x86, 0xdd }), drop},
		"short":          {tcpFrame(a, func([]byte) {})[:40], drop},
		"empty":          {nil, drop},
		"arp":            {ask, answerARP},
		"arp short":      {ask[:etherSize+arpSize-1], drop},
		"arp reply":      {a.arpAnswer()[lengthSize:], drop},
	} {
		if got := a.judge(tc.frame); got != tc.want {
			t.Errorf("%s: %v", name, got)
		}
	}
}

func TestFrameBounds(t *testing.T) {
	buf := make([]byte, maxFrame)
	whole := append(binary.BigEndian.AppendUint32(nil, maxFrame), make([]byte, maxFrame)...)
	if f, err := readFrame(bytes.NewReader(whole), buf); err != nil || len(f) != maxFrame {
		t.Fatalf("largest frame: %d, %v", len(f), err)
	}
	if _, err := readFrame(bytes.NewReader(binary.BigEndian.AppendUint32(nil, maxFrame+1)), buf); !errors.Is(err, errFrame) {
		t.Fatalf("too large: %v", err)
	}
	if _, err := readFrame(strings.NewReader("\x00\x00\x00\x05abc"), buf); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Fatalf("cut off: %v", err)
	}
}

// FuzzFrames throws bytes at a living stack.
func FuzzFrames(f *testing.F) {
	a := addressOf(f)
	good := tcpFrame(a, func([]byte) {})
	f.Add(good, true)
	f.Add(tcpFrame(a, func(b []byte) { b[14] = 0x4f }), true)
	f.Add(a.arpAnswer(), false)
	f.Add([]byte{0xff, 0xff, 0xff, 0xff}, false)
	f.Fuzz(func(t *testing.T, data []byte, framed bool) {
		host, far := net.Pipe()
		c, err := NewControl(host)
		if err != nil {
			t.Fatal(err)
		}
		drained := make(chan struct{})
		go func() {
			defer close(drained)
			_, _ = io.Copy(io.Discard, far)
		}()
		if framed { // past the header checks, so that the stack gets to see it
			data = append(append([]byte(nil), good[:34]...), data...)
			data = append(binary.BigEndian.AppendUint32(nil, uint32(len(data))), data...)
		}
		defer c.onEnd(func() { host.Close() })()
		_, _ = far.Write(data)
		far.Close()
		<-drained
		c.Close()
		host.Close()
	})
}
