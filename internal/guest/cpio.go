package guest

import (
	"errors"
	"fmt"
	"io"
	"path"
	"strings"
)

// cpioWriter writes an initramfs archive in the "newc" format of cpio(5). Entries carry no time and belong to root,
// so equal content gives equal bytes.
type cpioWriter struct {
	w    io.Writer
	ino  uint32
	off  int64
	dirs map[string]bool
	err  error
}

const (
	modeDir  = 0o040000
	modeFile = 0o100000
	modeChar = 0o020000
)

// errName: a name that an archive cannot hold safely.
var errName = errors.New("bad name in archive")

func newCPIO(w io.Writer) *cpioWriter {
	return &cpioWriter{w: w, dirs: map[string]bool{".": true}}
}

// file adds a regular file and, before it, the folders it is in.
func (c *cpioWriter) file(name string, perm uint32, data []byte) error {
	if err := c.parents(name); err != nil {
		return err
	}
	return c.entry(name, modeFile|perm, 0, 0, data)
}

// dir adds a folder and the folders it is in.
func (c *cpioWriter) dir(name string) error {
	if err := c.parents(name); err != nil {
		return err
	}
	if c.dirs[name] {
		return c.err
	}
	c.dirs[name] = true
	return c.entry(name, modeDir|0o755, 0, 0, nil)
}

// char adds a character device.
func (c *cpioWriter) char(name string, perm, major, minor uint32) error {
	if err := c.parents(name); err != nil {
		return err
	}
	return c.entry(name, modeChar|perm, major, minor, nil)
}

func (c *cpioWriter) parents(name string) error {
	if name == "" || strings.HasPrefix(name, "/") || path.Clean(name) != name || strings.HasPrefix(name, "..") ||
		strings.ContainsRune(name, 0) {
		return fmt.Errorf("%w: %q", errName, name)
	}
	if parent := path.Dir(name); !c.dirs[parent] {
		return c.dir(parent)
	}
	return c.err
}

// close ends the archive.
func (c *cpioWriter) close() error {
	c.ino = ^uint32(0) // entry makes it 0
	return c.entry("TRAILER!!!", 0, 0, 0, nil)
}

func (c *cpioWriter) entry(name string, mode, major, minor uint32, data []byte) error {
	if int64(len(data)) > 0xffffffff {
		return fmt.Errorf("%w: %q is too large", errName, name)
	}
	c.ino++
	links := uint32(1)
	if mode&modeDir != 0 && mode&modeFile != modeFile {
		links = 2
	}
	fields := []uint32{c.ino, mode, 0, 0, links, 0, uint32(len(data)), 0, 0, major, minor, uint32(len(name) + 1), 0}
	var head strings.Builder
	head.WriteString("070701")
	for _, f := range fields {
		fmt.Fprintf(&head, "%08X", f)
	}
	head.WriteString(name)
	head.WriteByte(0)
	c.write([]byte(head.String()))
	c.pad()
	c.write(data)
	c.pad()
	return c.err
}

func (c *cpioWriter) write(p []byte) {
	if c.err != nil {
		return
	}
	n, err := c.w.Write(p)
	c.off += int64(n)
	c.err = err
}

// pad aligns to four bytes, which the format wants after a name and after content.
func (c *cpioWriter) pad() {
	if rest := c.off % 4; rest != 0 {
		c.write(make([]byte, 4-rest))
	}
}
