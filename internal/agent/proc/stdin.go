package proc

import (
	"context"
	"errors"
	"os"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"
)

const (
	stdinWait = 10 * time.Second // for callers without a deadline
	eot       = 4                // what a terminal takes as the end of input
)

// stdin is the input of one process, written at offsets so that a call can be repeated.
type stdin struct {
	file *os.File
	tty  bool // then file is the source's, and never closed here

	turn   chan struct{} // holds one token: one writer at a time, waited for with a deadline
	offset uint64
	closed bool
}

func newStdin(file *os.File, tty bool) *stdin {
	s := &stdin{file: file, tty: tty, turn: make(chan struct{}, 1)}
	s.turn <- struct{}{}
	return s
}

// write takes data at offset and returns how far the input is. It answers before ctx ends.
func (s *stdin) write(ctx context.Context, offset uint64, data []byte, end bool) (uint64, bool, error) {
	deadline := time.Now().Add(stdinWait)
	if d, ok := ctx.Deadline(); ok && d.Before(deadline) {
		left := time.Until(d)
		// The answer needs a part of the time: it is worth nothing after the deadline.
		deadline = d.Add(-min(left/4, 250*time.Millisecond))
	}
	wait, cancel := context.WithDeadline(ctx, deadline)
	defer cancel()
	select {
	case <-s.turn:
		defer func() { s.turn <- struct{}{} }()
	case <-wait.Done():
		return 0, false, connect.NewError(connect.CodeDeadlineExceeded, errors.New("another write has the pipe"))
	}
	if offset > s.offset {
		return 0, false, connect.NewError(connect.CodeOutOfRange, errors.New("offset is past the bytes taken so far"))
	}
	data = data[min(uint64(len(data)), s.offset-offset):]
	if s.closed {
		if len(data) > 0 {
			return 0, false, errStdinClosed
		}
		return s.offset, true, nil
	}
	return s.put(wait, data, end)
}

var errStdinClosed = connect.NewError(connect.CodeFailedPrecondition, errors.New("standard input is closed"))

// put writes what is new. The caller has the turn.
func (s *stdin) put(wait context.Context, data []byte, end bool) (uint64, bool, error) {
	_ = s.file.SetWriteDeadline(time.Time{})
	stop := context.AfterFunc(wait, func() { _ = s.file.SetWriteDeadline(time.Unix(1, 0)) })
	defer stop()
	if end && s.tty {
		data = append(append(make([]byte, 0, len(data)+1), data...), eot)
	}
	n, err := s.file.Write(data)
	if end && s.tty && n == len(data) && n > 0 {
		s.offset--
		s.closed = true
	}
	s.offset += uint64(n)
	switch {
	case errors.Is(err, os.ErrDeadlineExceeded):
		return s.offset, s.closed, nil
	case errors.Is(err, unix.EPIPE), errors.Is(err, unix.EIO), errors.Is(err, os.ErrClosed):
		return 0, false, errStdinClosed
	case err != nil:
		return 0, false, connect.NewError(connect.CodeInternal, err)
	}
	if end && !s.tty {
		s.closed = true
		s.file.Close()
	}
	return s.offset, s.closed, nil
}

// shut ends the input after the exit. A writer that waits for room is woken first.
func (s *stdin) shut() {
	if s.tty {
		return // the source closes it
	}
	s.file.Close()
	<-s.turn
	s.closed = true
	s.turn <- struct{}{}
}
