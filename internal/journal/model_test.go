package journal

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	agentv1 "github.com/space-sandbox/space/internal/gen/space/agent/v1"
	nodev1 "github.com/space-sandbox/space/internal/gen/space/node/v1"
	"github.com/space-sandbox/space/internal/sandbox"
)

// model is what a process's journal must hold, kept in memory.
type model struct {
	id     sandbox.ProcessID
	events uint64
	out    [streams + 1][]byte
	exited bool
}

// check compares a process with its model: every byte is delivered or announced as dropped.
func (m *model) check(t *testing.T, p *Process) {
	t.Helper()
	if p.LastID() != m.events {
		t.Fatalf("%s: last event is %d, expected %d", m.id, p.LastID(), m.events)
	}
	evs, err := drainNow(p)
	if err != nil {
		t.Fatal(err)
	}
	for s := 1; s <= streams; s++ {
		got, dropped := bytesOf(t, evs, agentv1.Stream(s))
		want := m.out[s]
		if len(got)+int(dropped) != len(want) || !bytes.Equal(got, want[dropped:]) {
			t.Fatalf("%s stream %d: %d bytes + %d dropped of %d", m.id, s, len(got), dropped, len(want))
		}
	}
	if last := evs[len(evs)-1]; (last.GetExited() != nil) != m.exited {
		t.Fatalf("%s: last event %v, exited %v", m.id, last, m.exited)
	}
}

// drainNow reads what is there without waiting.
func drainNow(p *Process) ([]*nodev1.Event, error) {
	r := p.NewReader(nil)
	defer r.Close()
	var evs []*nodev1.Event
	for {
		if r.pos.next > p.LastID() && len(r.pending) == 0 {
			return evs, nil
		}
		ev, err := r.Next(context.Background())
		if errors.Is(err, io.EOF) {
			return evs, nil
		}
		if err != nil {
			return evs, err
		}
		evs = append(evs, ev)
	}
}

// step does one random thing to one of the processes.
func step(t *testing.T, rnd *rand.Rand, j *Journal, models []*model) {
	t.Helper()
	m := models[rnd.IntN(len(models))]
	p, err := j.Process(m.id)
	must(t, err)
	switch n := rnd.IntN(100); {
	case m.exited:
	case m.events == 0:
		startT(t, p)
		m.events++
	case n < 97:
		s := agentv1.Stream(1 + rnd.IntN(streams))
		chunk := bytes.Repeat([]byte{byte(rnd.Uint32())}, 1+rnd.IntN(3000))
		must(t, p.AppendOutput(s, chunk))
		m.out[s] = append(m.out[s], chunk...)
		m.events++
	default:
		exitT(t, p)
		m.events++
		m.exited = true
	}
}

func TestAgainstModel(t *testing.T) {
	for seed := range uint64(4) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			rnd := rand.New(rand.NewPCG(seed, 1))
			dir := t.TempDir()
			j, err := Open(dir, Options{SandboxCap: 1 << 20})
			must(t, err)
			var models []*model
			for range 4 {
				models = append(models, &model{id: createT(t, j, uint64(1+rnd.IntN(256<<10))).ID()})
			}
			for i := range 1000 {
				step(t, rnd, j, models)
				if i%250 != 249 {
					continue
				}
				for _, m := range models {
					p, err := j.Process(m.id)
					must(t, err)
					if m.events > 0 {
						m.check(t, p)
					}
				}
				must(t, j.Close()) // every event survives a restart
				j, err = Open(dir, Options{SandboxCap: 1 << 20})
				must(t, err)
			}
			must(t, j.Close())
		})
	}
}

// TestCrashAgainstModel opens copies of a journal that is being written, as a killed shim leaves it: what was
// appended before the copy is there.
func TestCrashAgainstModel(t *testing.T) {
	j := openT(t, t.TempDir(), Options{})
	p := createT(t, j, 0)
	startT(t, p)
	stop := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		for i := range 100_000 {
			select {
			case <-stop:
				return
			default:
			}
			if err := p.AppendOutput(stdout, fmt.Appendf(nil, "%08d", i)); err != nil {
				t.Errorf("append: %v", err)
				return
			}
		}
	})
	for range 10 {
		before := p.LastID()
		dir := t.TempDir()
		sub := filepath.Join(dir, string(p.ID()))
		must(t, os.Mkdir(sub, 0o700))
		copyNow(t, p.dir, sub)
		again, err := OpenReadOnly(dir)
		must(t, err)
		q, err := again.Process(p.ID())
		must(t, err)
		if q.LastID() < before {
			t.Fatalf("event %d was there, after the crash the last is %d", before, q.LastID())
		}
		evs, err := drain(t, q, nil)
		must(t, err)
		data, dropped := bytesOf(t, evs, stdout)
		for i := 0; i+8 <= len(data); i += 8 {
			if want := fmt.Sprintf("%08d", (int(dropped)+i)/8); string(data[i:i+8]) != want {
				t.Fatalf("byte %d: %q, expected %s", int(dropped)+i, data[i:i+8], want)
			}
		}
	}
	close(stop)
	wg.Wait()
}

// copyNow copies the files of a process oldest first; a segment that is dropped meanwhile is left out.
func copyNow(t *testing.T, from, to string) {
	t.Helper()
	firsts, err := listSegments(from)
	must(t, err)
	paths := []string{filepath.Join(from, metaFile)}
	for _, f := range firsts {
		paths = append(paths, segmentPath(from, f))
	}
	for _, path := range paths {
		b, err := os.ReadFile(path)
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		must(t, err)
		must(t, os.WriteFile(filepath.Join(to, filepath.Base(path)), b, 0o600))
	}
}

func TestReadersOfARemovedProcessEnd(t *testing.T) {
	j := openT(t, t.TempDir(), Options{})
	p := createT(t, j, 0)
	r := p.NewReader(nil)
	defer r.Close()
	ended := make(chan error, 1)
	go func() {
		_, err := r.Next(context.Background())
		ended <- err
	}()
	must(t, j.Remove(p.ID()))
	if err := <-ended; !errors.Is(err, ErrNotFound) {
		t.Fatalf("waiting reader: %v", err)
	}
	if err := j.Remove(p.ID()); !errors.Is(err, ErrNotFound) {
		t.Fatalf("second remove: %v", err)
	}
	if err := p.AppendStarted(&nodev1.Started{}); !errors.Is(err, ErrNotFound) {
		t.Fatalf("append: %v", err)
	}
	if _, err := p.NewOutputReader(stdout, 0, false); !errors.Is(err, ErrNotFound) {
		t.Fatalf("output: %v", err)
	}
	if j.Bytes() != 0 {
		t.Fatalf("%d bytes are still counted", j.Bytes())
	}
}

// TestFailedWriteLosesNothing takes the process's folder away, so that no new segment can be made, and puts it back.
func TestFailedWriteLosesNothing(t *testing.T) {
	j := openT(t, t.TempDir(), Options{})
	p := createT(t, j, 64<<10)
	startT(t, p)
	chunk := bytes.Repeat([]byte("x"), minSegment)
	must(t, p.AppendOutput(stdout, chunk)) // the segment is full now
	away := p.dir + ".away"
	must(t, os.Rename(p.dir, away))
	before := p.LastID()
	if err := p.AppendOutput(stdout, chunk); err == nil {
		t.Fatal("an event was taken that cannot be written")
	}
	if p.LastID() != before {
		t.Fatal("an event was shown that was not written")
	}
	must(t, os.Rename(away, p.dir))
	must(t, p.AppendOutput(stdout, chunk))
	exitT(t, p)
	evs, err := drain(t, p, nil)
	must(t, err)
	if data, _ := bytesOf(t, evs, stdout); len(data) != 2*minSegment {
		t.Fatalf("%d bytes", len(data))
	}
}

func TestFollowingOutputIsToldOfDrops(t *testing.T) {
	j := openT(t, t.TempDir(), Options{})
	p := createT(t, j, 64<<10)
	startT(t, p)
	must(t, p.AppendOutput(stdout, []byte("first")))
	o, err := p.NewOutputReader(stdout, 0, true)
	must(t, err)
	defer o.Close()
	if data, at, err := o.Next(t.Context()); err != nil || at != 0 || string(data) != "first" {
		t.Fatalf("%q at %d, %v", data, at, err)
	}
	for range 100 {
		must(t, p.AppendOutput(stdout, make([]byte, 4096)))
	}
	for {
		_, _, err = o.Next(t.Context())
		if err != nil {
			break
		}
	}
	var de *DroppedError
	if !errors.As(err, &de) || de.To <= de.From || de.Stream != stdout || de.Error() == "" {
		t.Fatalf("follower that fell behind: %v", err)
	}
	for _, s := range []agentv1.Stream{0, 4} {
		if _, err := p.NewOutputReader(s, 0, false); !errors.Is(err, ErrTooLarge) {
			t.Errorf("stream %d: %v", s, err)
		}
	}
}

func TestFollowEndsAtExit(t *testing.T) {
	j := openT(t, t.TempDir(), Options{})
	p := createT(t, j, 0)
	startT(t, p)
	o, err := p.NewOutputReader(stderr, 0, true)
	must(t, err)
	defer o.Close()
	got := make(chan string, 1)
	go func() {
		var all []byte
		for {
			data, _, err := o.Next(context.Background())
			if err != nil {
				got <- fmt.Sprintf("%s %v", all, err)
				return
			}
			all = append(all, data...)
		}
	}()
	must(t, p.AppendOutput(stdout, []byte("no")))
	must(t, p.AppendOutput(stderr, []byte("yes")))
	exitT(t, p)
	if s := <-got; s != "yes EOF" {
		t.Fatalf("follower got %q", s)
	}
}

func TestChunkLimits(t *testing.T) {
	j := openT(t, t.TempDir(), Options{})
	p := createT(t, j, 0)
	startT(t, p)
	must(t, p.AppendOutput(stdout, make([]byte, MaxChunk)))
	must(t, p.AppendOutput(3, []byte("x")))
	for name, err := range map[string]error{
		"empty":     p.AppendOutput(stdout, nil),
		"too large": p.AppendOutput(stdout, make([]byte, MaxChunk+1)),
		"stream 0":  p.AppendOutput(0, []byte("x")),
		"stream 4":  p.AppendOutput(4, []byte("x")),
	} {
		if !errors.Is(err, ErrTooLarge) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if p.LastID() != 3 {
		t.Fatalf("last event is %d", p.LastID())
	}
}

func TestManyWritersUnderTheSandboxCap(t *testing.T) {
	j := openT(t, t.TempDir(), Options{SandboxCap: 2 << 20, ExitedKept: 2, SyncEvery: 5 * time.Millisecond})
	var wg sync.WaitGroup
	for range 8 {
		p := createT(t, j, 1<<20)
		wg.Go(func() {
			err := p.AppendStarted(&nodev1.Started{})
			for i := 0; err == nil && i < 200; i++ {
				err = p.AppendOutput(stdout, make([]byte, 8192))
			}
			if err == nil {
				err = p.AppendExited(&agentv1.Exited{})
			}
			if err != nil {
				t.Errorf("%s: %v", p.ID(), err)
			}
		})
	}
	wg.Wait()
	procs, _ := j.List("", 100)
	if len(procs) != 2 || j.Bytes() > 2<<20 {
		t.Fatalf("%d processes, %d bytes", len(procs), j.Bytes())
	}
	must(t, j.SyncErr())
}

func TestRecordSurvivesAndIsBounded(t *testing.T) {
	dir := t.TempDir()
	j := openT(t, dir, Options{})
	id := string(sandbox.NewProcessID())
	spec := &agentv1.ProcessSpec{Argv: [][]byte{{0xff, 0xfe}, bytes.Repeat([]byte("a"), sandbox.MaxArg)}, Env: map[string]string{"K": "v"}, Cwd: []byte("/x")}
	_, err := j.Create(&nodev1.Process{ProcessId: id, Spec: spec})
	must(t, err)
	huge := &agentv1.ProcessSpec{Argv: [][]byte{make([]byte, maxMeta)}}
	other := string(sandbox.NewProcessID())
	if _, err := j.Create(&nodev1.Process{ProcessId: other, Spec: huge}); !errors.Is(err, ErrTooLarge) {
		t.Fatalf("huge record: %v", err)
	}
	if _, err := os.Stat(filepath.Join(dir, other)); !errors.Is(err, os.ErrNotExist) {
		t.Fatalf("something is left of a refused record: %v", err)
	}
	must(t, j.Close())
	if _, err := j.Create(&nodev1.Process{ProcessId: other}); !errors.Is(err, ErrSealed) {
		t.Fatalf("create after Close: %v", err)
	}
	ro := must2(OpenReadOnly(dir))
	p, err := ro.Process(sandbox.ProcessID(id))
	must(t, err)
	got := p.Record()
	if got.GetSpec().GetEnv()["K"] != "v" || len(got.GetSpec().GetArgv()[1]) != sandbox.MaxArg || !bytes.Equal(got.GetSpec().GetArgv()[0], []byte{0xff, 0xfe}) {
		t.Fatalf("record: %v", got)
	}
	evs, err := drain(t, p, nil)
	if err != nil || len(evs) != 0 {
		t.Fatalf("events of a process that did not start: %v, %v", evs, err)
	}
}

func TestSegmentHeader(t *testing.T) {
	want := position{next: 77, off: [streams + 1]uint64{0, 5, 6, 7}}
	b := appendRecord(nil, segmentRecord(want))
	if len(b) != segmentHeader {
		t.Fatalf("%d bytes, expected %d", len(b), segmentHeader)
	}
	if got, err := headerOf(b, 77); err != nil || got != want {
		t.Fatalf("%v, %v", got, err)
	}
	if _, err := headerOf(b, 78); !errors.Is(err, ErrCorrupt) {
		t.Fatalf("a header under another name: %v", err)
	}
	if _, err := headerOf(b[:len(b)-1], 77); !errors.Is(err, ErrCorrupt) {
		t.Fatalf("a short header: %v", err)
	}
	if eventFollows(make([]byte, 100), 1) || !onlyZeros(make([]byte, 9)) || onlyZeros([]byte{0, 1}) {
		t.Fatal("zeros are no event")
	}
}

func TestSegmentNames(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"00000000000000000007.seg", "00000000000000000002.seg", "7.seg", "0000000000000000000x.seg", "00000000000000000000.seg", "process"} {
		must(t, os.WriteFile(filepath.Join(dir, name), nil, 0o600))
	}
	got, err := listSegments(dir)
	if err != nil || len(got) != 2 || got[0] != 2 || got[1] != 7 {
		t.Fatalf("%v, %v", got, err)
	}
}
