// Package embedded carries the guest agent and the shim inside the space binary. `make build` puts them into bin/
// before it compiles cmd/space; a binary compiled without them says so when they are asked for. It holds no state.
package embedded

import (
	"embed"
	"errors"
	"fmt"
	"io/fs"
)

//go:embed all:bin
var files embed.FS

// ErrMissing means that this binary was compiled without its parts.
var ErrMissing = errors.New("this binary was built without the guest agent and shim: build it with make build")

// Agent returns the static Linux binary that runs as PID 1 in the guest.
func Agent() ([]byte, error) { return read("space-agent") }

// Shim returns the binary that owns one sandbox.
func Shim() ([]byte, error) { return read("space-shim") }

func read(name string) ([]byte, error) {
	data, err := files.ReadFile("bin/" + name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("%s: %w", name, ErrMissing)
	}
	return data, err
}
