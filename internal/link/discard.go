package link

import (
	"net"
	"sync"
	"sync/atomic"
	"time"
)

// Sink swallows a link.
type Sink struct {
	conn   net.Conn
	frames atomic.Uint64
	bytes  atomic.Uint64
	pump   sync.WaitGroup
}

// Discard reads and drops every frame of conn until Close or the end of the link: the guest sees a network on which
// nobody answers.
func Discard(conn net.Conn) *Sink {
	s := &Sink{conn: conn}
	s.pump.Go(func() {
		buf := make([]byte, maxFrame)
		for {
			frame, err := readFrame(conn, buf)
			if err != nil {
				return
			}
			s.frames.Add(1)
			s.bytes.Add(uint64(len(frame)))
		}
	})
	return s
}

// Frames and Bytes count what was dropped.
func (s *Sink) Frames() uint64 { return s.frames.Load() }

// Bytes counts the bytes of the dropped frames.
func (s *Sink) Bytes() uint64 { return s.bytes.Load() }

// Close ends the reading. The conn is of no use afterwards.
func (s *Sink) Close() {
	_ = s.conn.SetReadDeadline(time.Unix(1, 0))
	s.pump.Wait()
}
