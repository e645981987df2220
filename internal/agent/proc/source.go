package proc

import (
	"errors"
	"os"
	"sync"
	"time"

	agentv1 "github.com/space-sandbox/space/internal/gen/space/agent/v1"
	"golang.org/x/sys/unix"
)

const (
	// frameBytes is the most output that one frame has.
	frameBytes = 32 << 10
	// readBytes is the most that is read at once: a system call and a wake-up cost more than the copy.
	readBytes = 8 * frameBytes
	// keepBytes is from where on a buffer is handed over to the ring instead of copied.
	keepBytes = readBytes / 2
)

// ptyGrace is how long the last output of a terminal may take through the kernel's line discipline when a background
// child holds the terminal open.
const ptyGrace = 20 * time.Millisecond

// newBuffer makes a buffer for the pool that all processes share: an idle process holds none.
func newBuffer() any { b := make([]byte, readBytes); return &b }

// source reads one pipe or terminal of a process into its ring. run owns file and closes it.
type source struct {
	file    *os.File
	stream  agentv1.Stream
	ring    *ring
	buffers *sync.Pool    // of *[]byte
	drained chan struct{} // closed when everything written before the exit was read
}

// exited tells the source that the main process is gone.
func (s *source) exited() { _ = s.file.SetReadDeadline(time.Unix(1, 0)) }

// run reads until the process has exited, then what it left, and then discards what background children write.
func (s *source) run(release func()) {
	defer release()
	if s.copy() {
		s.drain()
	}
	close(s.drained)
	_ = s.file.SetReadDeadline(time.Time{})
	s.discard()
}

// copy reports whether it stopped because the process has exited, and not at the end of the pipe.
func (s *source) copy() bool {
	conn, err := s.file.SyscallConn()
	if err != nil {
		return false
	}
	for {
		n, readErr := 0, error(nil)
		err := conn.Read(func(fd uintptr) bool {
			n, readErr = s.readOnce(int(fd))
			return !errors.Is(readErr, unix.EAGAIN)
		})
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded):
			return true
		case err != nil || readErr != nil || n == 0:
			return false
		}
	}
}

// readOnce reads once without waiting and moves what it got to the ring. A full ring makes it wait, which is what
// stops the process. The terminal's end is EIO.
func (s *source) readOnce(fd int) (int, error) {
	p := s.buffers.Get().(*[]byte)
	n, err := unix.Read(fd, *p)
	for errors.Is(err, unix.EINTR) {
		n, err = unix.Read(fd, *p)
	}
	if n <= 0 {
		s.buffers.Put(p)
		return 0, err
	}
	data := (*p)[:n]
	if n < keepBytes {
		data = append(make([]byte, 0, n), data...)
		s.buffers.Put(p)
	} // else handed over; the pool makes a new one
	s.ring.output(s.stream, data)
	return n, nil
}

// drain moves what is in the pipe now. It does not wait for the end, and what children keep writing does not keep it.
func (s *source) drain() {
	conn, err := s.file.SyscallConn()
	if err != nil {
		return
	}
	left := 1 << 20 // a pipe's largest capacity
	_ = conn.Control(func(fd uintptr) {
		for left > 0 {
			if s.stream == agentv1.Stream_STREAM_PTY {
				_, _ = unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, int(ptyGrace.Milliseconds()))
			} else if queued, err := unix.IoctlGetInt(int(fd), unix.TIOCINQ); err == nil {
				left = min(left, queued)
			}
			n, err := s.readOnce(int(fd))
			if err != nil || n == 0 {
				return
			}
			left -= n
		}
	})
}

func (s *source) discard() {
	p := s.buffers.Get().(*[]byte)
	defer s.buffers.Put(p)
	for {
		if _, err := s.file.Read(*p); err != nil {
			return // the end of the pipe, or EIO of a terminal
		}
	}
}
