package cli

import (
	"fmt"
	"io"
	"os"
	"time"

	"golang.org/x/term"
)

// progress tells on standard error what takes longer than a second: one changing line on a terminal, else a line per
// change. It is used by one goroutine.
type progress struct {
	w     io.Writer
	tty   bool
	begin time.Time
	last  string
	shown bool
}

func (a *app) progress() *progress {
	f, ok := a.errOut.(*os.File)
	return &progress{w: a.errOut, tty: ok && term.IsTerminal(int(f.Fd())), begin: time.Now()}
}

func (p *progress) say(text string) {
	elapsed := time.Since(p.begin)
	if elapsed < time.Second {
		return
	}
	if p.tty {
		_, _ = fmt.Fprintf(p.w, "\r\x1b[K%s (%d s)", escape(text), int(elapsed.Seconds()))
		p.shown = true
	} else if text != p.last {
		_, _ = fmt.Fprintf(p.w, "%s (%d s)\n", escape(text), int(elapsed.Seconds()))
	}
	p.last = text
}

// done removes the line.
func (p *progress) done() {
	if p.shown {
		_, _ = fmt.Fprint(p.w, "\r\x1b[K")
	}
}
