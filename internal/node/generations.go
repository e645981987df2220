package node

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"sync"
	"time"
)

// tombstoneTTL is how long a deleted ID is remembered. IDs are never reused, so this need only outlast any call
// that could still be under way.
const tombstoneTTL = 30 * 24 * time.Hour

// tombstone says that an ID was deleted at a generation: nothing up to it may start again.
type tombstone struct {
	ID         string    `json:"id"`
	Generation uint64    `json:"generation"`
	At         time.Time `json:"at"`
}

// generations is the log of tombstones, one JSON line each. The generation of a sandbox that exists is in its own
// record. Safe for concurrent use; add returns after the line is durable.
type generations struct {
	mu   sync.Mutex
	file *os.File
	last map[string]tombstone
}

// openGenerations reads the log, leaves out what is too old and rewrites it. A last line that was cut by a power
// loss was never acknowledged and is dropped.
func openGenerations(path string, now time.Time) (*generations, error) {
	g := &generations{last: map[string]tombstone{}}
	data, err := os.ReadFile(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("generations: %w", err)
	}
	for _, t := range parseTombstones(data) {
		if now.Sub(t.At) < tombstoneTTL {
			g.note(t)
		}
	}
	var out bytes.Buffer
	enc := json.NewEncoder(&out)
	for _, t := range g.last {
		if err := enc.Encode(t); err != nil {
			return nil, err
		}
	}
	if err := writeDurably(path, out.Bytes(), 0o600); err != nil {
		return nil, fmt.Errorf("generations: %w", err)
	}
	g.file, err = os.OpenFile(path, os.O_WRONLY|os.O_APPEND, 0o600)
	return g, err
}

func parseTombstones(data []byte) []tombstone {
	var all []tombstone
	lines := bufio.NewScanner(bytes.NewReader(data))
	for lines.Scan() {
		var t tombstone
		if json.Unmarshal(lines.Bytes(), &t) == nil && t.ID != "" {
			all = append(all, t)
		}
	}
	return all
}

func (g *generations) note(t tombstone) {
	if old, ok := g.last[t.ID]; !ok || t.Generation >= old.Generation {
		g.last[t.ID] = t
	}
}

// deleted returns the generation at which an ID was deleted.
func (g *generations) deleted(id string) (uint64, bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	t, ok := g.last[id]
	return t.Generation, ok
}

// add records that an ID was deleted at a generation.
func (g *generations) add(id string, generation uint64) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if old, ok := g.last[id]; ok && old.Generation >= generation {
		return nil
	}
	t := tombstone{ID: id, Generation: generation, At: time.Now().UTC()}
	line, err := json.Marshal(t)
	if err != nil {
		return err
	}
	if _, err := g.file.Write(append(line, '\n')); err != nil {
		return fmt.Errorf("tombstone: %w", err)
	}
	if err := g.file.Sync(); err != nil {
		return fmt.Errorf("tombstone: %w", err)
	}
	g.note(t)
	return nil
}

func (g *generations) close() error { return g.file.Close() }
