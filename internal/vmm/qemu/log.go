package qemu

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"
	"sync"
)

const (
	maxLogFile = 1 << 20  // a log file starts afresh beyond this
	tailSize   = 16 << 10 // what is kept in memory
	errorTail  = 2 << 10  // what of it goes into an error
)

// boundedLog keeps the end of what was written in memory, and about the last MiB of it in a file. Guests and VMMs
// write as much as they like. Writing never fails: a full disk costs the log, not the VM.
type boundedLog struct {
	grown chan struct{} // receives after writes; has room for one

	mu   sync.Mutex
	file *os.File
	size int
	tail []byte
}

// newLog makes the log with a new file. An older one, which a VMM may have replaced by anything, is removed first.
func newLog(path string) (*boundedLog, error) {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("remove old log: %w", err)
	}
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, fmt.Errorf("log: %w", err)
	}
	return &boundedLog{file: f, grown: make(chan struct{}, 1)}, nil
}

// Write implements io.Writer.
func (l *boundedLog) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.size+len(p) > maxLogFile {
		_ = l.file.Truncate(0)
		_, _ = l.file.Seek(0, 0)
		l.size = 0
	}
	n, _ := l.file.Write(p)
	l.size += n
	l.tail = append(l.tail, p...)
	if over := len(l.tail) - tailSize; over > 0 {
		l.tail = append(l.tail[:0], l.tail[over:]...)
	}
	select {
	case l.grown <- struct{}{}:
	default:
	}
	return len(p), nil
}

// String is the end of the log.
func (l *boundedLog) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return string(l.tail)
}

// excerpt is the last part, fit for an error's text.
func (l *boundedLog) excerpt() string {
	text := l.String()
	if len(text) > errorTail {
		text = text[len(text)-errorTail:]
	}
	return strings.ToValidUTF8(strings.TrimSpace(text), "?")
}

// Close closes the file; the tail stays readable.
func (l *boundedLog) Close() error { return l.file.Close() }
