// Command space is the whole platform in one program: `space up` serves, the other commands are its clients.
package main

import (
	"os"

	"github.com/space-sandbox/space/internal/cli"
	"github.com/space-sandbox/space/internal/vmm/confine"
)

func main() {
	confine.Main() // never returns in a process that becomes a VMM
	os.Exit(cli.Main(os.Args[1:]))
}
