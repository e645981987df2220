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
	"google.golang.org/protobuf/types/known/timestamppb"
)

const (
	stdout = agentv1.Stream_STREAM_STDOUT
	stderr = agentv1.Stream_STREAM_STDERR
)

func openT(t *testing.T, dir string, o Options) *Journal {
	t.Helper()
	j, err := Open(dir, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := j.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
	})
	return j
}

func createT(t *testing.T, j *Journal, capBytes uint64) *Process {
	t.Helper()
	p, err := j.Create(&nodev1.Process{
		ProcessId: string(sandbox.NewProcessID()), OutputCapBytes: capBytes,
		Spec: &agentv1.ProcessSpec{Argv: [][]byte{[]byte("/bin/true")}},
	})
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func startT(t *testing.T, p *Process) {
	t.Helper()
	must(t, p.AppendStarted(&nodev1.Started{OsPid: 7, At: timestamppb.New(time.Unix(100, 0))}))
}

func exitT(t *testing.T, p *Process) {
	t.Helper()
	code := int32(3)
	must(t, p.AppendExited(&agentv1.Exited{Code: &code, At: timestamppb.New(time.Unix(200, 0))}))
}

// drain reads to the end of the journal.
func drain(t *testing.T, p *Process, after *uint64) ([]*nodev1.Event, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	r := p.NewReader(after)
	defer r.Close()
	var evs []*nodev1.Event
	for {
		ev, err := r.Next(ctx)
		if errors.Is(err, io.EOF) {
			return evs, nil
		}
		if err != nil {
			return evs, err
		}
		evs = append(evs, ev)
	}
}

// bytesOf joins the output of a stream and checks that offsets and IDs have no gaps other than the announced ones.
func bytesOf(t *testing.T, evs []*nodev1.Event, stream agentv1.Stream) (data []byte, dropped uint64) {
	t.Helper()
	var at, id uint64
	for _, ev := range evs {
		if ev.GetId() != 0 {
			if ev.GetId() <= id {
				t.Fatalf("event %d after %d", ev.GetId(), id)
			}
			id = ev.GetId()
		}
		if d := ev.GetDropped(); d != nil && d.GetStream() == stream {
			if d.GetFromOffset() != at {
				t.Fatalf("dropped from %d, expected %d", d.GetFromOffset(), at)
			}
			dropped += d.GetToOffset() - at
			at = d.GetToOffset()
		}
		if o := ev.GetOutput(); o != nil && o.GetStream() == stream {
			if o.GetOffset() != at {
				t.Fatalf("output at %d, expected %d", o.GetOffset(), at)
			}
			at += uint64(len(o.GetData()))
			data = append(data, o.GetData()...)
		}
	}
	return data, dropped
}

func TestLifeOfAProcess(t *testing.T) {
	dir := t.TempDir()
	j := openT(t, dir, Options{})
	p := createT(t, j, 0)
	if got := p.Record(); got.GetState() != nodev1.ProcessState_PROCESS_STATE_CREATED || got.GetOutputCapBytes() != sandbox.DefaultOutputCap {
		t.Fatalf("created: %v", got)
	}
	if err := p.AppendOutput(stdout, []byte("x")); !errors.Is(err, ErrOrder) {
		t.Fatalf("output before start: %v", err)
	}
	startT(t, p)
	must(t, p.AppendOutput(stdout, []byte("out")))
	must(t, p.AppendOutput(stderr, []byte("error")))
	must(t, p.AppendOutput(stdout, []byte("put")))
	exitT(t, p)
	for name, err := range map[string]error{
		"output after exit": p.AppendOutput(stdout, []byte("x")),
		"second start":      p.AppendStarted(&nodev1.Started{}),
		"second exit":       p.AppendExited(&agentv1.Exited{}),
	} {
		if !errors.Is(err, ErrOrder) {
			t.Errorf("%s: %v", name, err)
		}
	}
	check := func(p *Process) {
		t.Helper()
		evs, err := drain(t, p, nil)
		must(t, err)
		if len(evs) != 5 || evs[0].GetStarted().GetOsPid() != 7 || evs[4].GetExited().GetExit().GetCode() != 3 {
			t.Fatalf("events: %v", evs)
		}
		if ex := evs[4].GetExited(); ex.GetStdoutBytes() != 6 || ex.GetStderrBytes() != 5 {
			t.Fatalf("totals: %v", ex)
		}
		if data, _ := bytesOf(t, evs, stdout); string(data) != "output" {
			t.Fatalf("stdout %q", data)
		}
		rec := p.Record()
		if rec.GetState() != nodev1.ProcessState_PROCESS_STATE_EXITED || rec.GetStdoutBytes() != 6 || rec.GetExitedAt().GetSeconds() != 200 {
			t.Fatalf("record: %v", rec)
		}
	}
	check(p)
	must(t, j.Close())
	for _, open := range []func() (*Journal, error){
		func() (*Journal, error) { return OpenReadOnly(dir) },
		func() (*Journal, error) { return Open(dir, Options{}) },
	} {
		again, err := open()
		must(t, err)
		q, err := again.Process(p.ID())
		must(t, err)
		check(q)
		must(t, again.Close())
	}
}

func TestResume(t *testing.T) {
	j := openT(t, t.TempDir(), Options{})
	p := createT(t, j, 0)
	startT(t, p)
	for i := range 50 {
		must(t, p.AppendOutput(stdout, []byte{byte(i)}))
	}
	exitT(t, p)
	all, err := drain(t, p, nil)
	must(t, err)
	for after := uint64(0); after <= 52; after++ {
		evs, err := drain(t, p, &after)
		must(t, err)
		if len(evs) != len(all)-int(after) {
			t.Fatalf("after %d: %d events", after, len(evs))
		}
		if len(evs) > 0 && evs[0].GetId() != after+1 {
			t.Fatalf("after %d: first is %d", after, evs[0].GetId())
		}
	}
	beyond := uint64(53)
	evs, err := drain(t, p, &beyond)
	must(t, err)
	if r := evs[0].GetResync(); r.GetFirstAvailableId() != 1 || r.GetDroppedEvents() != 0 || len(evs) != 53 {
		t.Fatalf("beyond the end: %v, %d events", evs[0], len(evs))
	}
}

func TestOutputCap(t *testing.T) {
	const capBytes = 256 << 10
	j := openT(t, t.TempDir(), Options{})
	p := createT(t, j, capBytes)
	startT(t, p)
	rnd := rand.New(rand.NewPCG(1, 2))
	var want []byte
	for len(want) < 5*capBytes {
		chunk := make([]byte, 1+rnd.IntN(MaxChunk))
		for i := range chunk {
			chunk[i] = byte(rnd.Uint32())
		}
		must(t, p.AppendOutput(stdout, chunk))
		want = append(want, chunk...)
	}
	early := p.NewReader(nil)
	defer early.Close()
	exitT(t, p)
	evs, err := drain(t, p, nil)
	must(t, err)
	got, dropped := bytesOf(t, evs, stdout)
	if int(dropped)+len(got) != len(want) || !bytes.Equal(got, want[dropped:]) {
		t.Fatalf("%d bytes + %d dropped of %d", len(got), dropped, len(want))
	}
	if len(got) > capBytes || len(got) < capBytes/2 {
		t.Fatalf("kept %d bytes with a cap of %d", len(got), capBytes)
	}
	if evs[0].GetStarted() == nil || evs[1].GetDropped() == nil {
		t.Fatalf("a reader from the start sees %v, %v", evs[0], evs[1])
	}
	if rec := p.Record(); rec.GetDroppedBytes() != dropped || rec.GetStdoutBytes() != uint64(len(want)) {
		t.Fatalf("record: %v, dropped %d", rec, dropped)
	}
	two := uint64(2)
	evs, err = drain(t, p, &two)
	must(t, err)
	r := evs[0].GetResync()
	if r.GetFirstAvailableId() != evs[1].GetId() || r.GetDroppedEvents() != evs[1].GetId()-3 {
		t.Fatalf("resumed in the dropped part: %v then event %d", r, evs[1].GetId())
	}
	checkOutputReader(t, p, want, dropped)
}

func checkOutputReader(t *testing.T, p *Process, want []byte, dropped uint64) {
	t.Helper()
	read := func(from uint64, follow bool) ([]byte, error) {
		o, err := p.NewOutputReader(stdout, from, follow)
		if err != nil {
			return nil, err
		}
		defer o.Close()
		var got []byte
		for {
			data, at, err := o.Next(t.Context())
			if errors.Is(err, io.EOF) {
				return got, nil
			}
			if err != nil {
				return got, err
			}
			if at != from+uint64(len(got)) {
				t.Fatalf("bytes at %d, expected %d", at, from+uint64(len(got)))
			}
			got = append(got, data...)
		}
	}
	for _, from := range []uint64{dropped, dropped + 1, dropped + 40000, uint64(len(want)) - 1, uint64(len(want))} {
		for _, follow := range []bool{false, true} {
			got, err := read(from, follow)
			if err != nil || !bytes.Equal(got, want[from:]) {
				t.Fatalf("from %d: %d bytes, %v", from, len(got), err)
			}
		}
	}
	var de *DroppedError
	if _, err := read(dropped-1, false); !errors.As(err, &de) || de.To != dropped {
		t.Fatalf("dropped offset: %v", err)
	}
	if _, err := read(uint64(len(want))+1, false); !errors.Is(err, ErrOutOfRange) {
		t.Fatalf("offset past the end: %v", err)
	}
}

func TestExactlyTheCapIsKept(t *testing.T) {
	const capBytes = 1 << 20
	j := openT(t, t.TempDir(), Options{})
	p := createT(t, j, capBytes)
	startT(t, p)
	for range capBytes / 1024 {
		must(t, p.AppendOutput(stdout, make([]byte, 1024)))
	}
	exitT(t, p)
	if got := p.Record().GetDroppedBytes(); got != 0 {
		t.Fatalf("dropped %d bytes of exactly the cap", got)
	}
}

func TestSlowReaderFallsBehind(t *testing.T) {
	j := openT(t, t.TempDir(), Options{})
	p := createT(t, j, 64<<10)
	startT(t, p)
	must(t, p.AppendOutput(stdout, []byte("first")))
	r := p.NewReader(nil)
	defer r.Close()
	var evs []*nodev1.Event
	for range 2 {
		ev, err := r.Next(t.Context())
		must(t, err)
		evs = append(evs, ev)
	}
	for i := range 100 {
		must(t, p.AppendOutput(stdout, bytes.Repeat([]byte{byte(i)}, 4096)))
		must(t, p.AppendOutput(stderr, bytes.Repeat([]byte{byte(i)}, 100)))
	}
	exitT(t, p)
	for {
		ev, err := r.Next(t.Context())
		if errors.Is(err, io.EOF) {
			break
		}
		must(t, err)
		evs = append(evs, ev)
	}
	out, d1 := bytesOf(t, evs, stdout)
	errOut, d2 := bytesOf(t, evs, stderr)
	if len(out)+int(d1) != 5+100*4096 || len(errOut)+int(d2) != 100*100 || d1 == 0 || d2 == 0 {
		t.Fatalf("stdout %d+%d, stderr %d+%d", len(out), d1, len(errOut), d2)
	}
}

func TestManyReadersSeeEveryByte(t *testing.T) {
	j := openT(t, t.TempDir(), Options{})
	p := createT(t, j, 0)
	const readers, chunks = 16, 2000
	var wg sync.WaitGroup
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	var want []byte
	results := make([][]byte, readers)
	for i := range readers {
		wg.Go(func() {
			rnd := rand.New(rand.NewPCG(uint64(i), 9))
			after := uint64(0)
			for {
				r := p.NewReader(&after) // cut and resume over and over
				for range 1 + rnd.IntN(200) {
					ev, err := r.Next(ctx)
					if err != nil {
						r.Close()
						if !errors.Is(err, io.EOF) {
							t.Errorf("reader %d: %v", i, err)
						}
						return
					}
					after = ev.GetId()
					results[i] = append(results[i], ev.GetOutput().GetData()...)
				}
				r.Close()
			}
		})
	}
	startT(t, p)
	for i := range chunks {
		chunk := fmt.Appendf(nil, "%d,", i)
		want = append(want, chunk...)
		must(t, p.AppendOutput(stdout, chunk))
	}
	exitT(t, p)
	wg.Wait()
	for i, got := range results {
		if !bytes.Equal(got, want) {
			t.Errorf("reader %d: %d bytes of %d", i, len(got), len(want))
		}
	}
}

func TestReaderWaitsAndEnds(t *testing.T) {
	j := openT(t, t.TempDir(), Options{})
	p := createT(t, j, 0)
	r := p.NewReader(nil)
	defer r.Close()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := r.Next(ctx); !errors.Is(err, context.Canceled) {
		t.Fatalf("cancelled: %v", err)
	}
	done := make(chan error, 1)
	go func() {
		_, err := r.Next(t.Context())
		if err == nil {
			_, err = r.Next(t.Context())
		}
		done <- err
	}()
	startT(t, p)
	j.Seal()
	if err := <-done; !errors.Is(err, io.EOF) {
		t.Fatalf("sealed: %v", err)
	}
	if err := p.AppendOutput(stdout, []byte("x")); !errors.Is(err, ErrSealed) {
		t.Fatalf("append to a sealed journal: %v", err)
	}
}

func TestSandboxCap(t *testing.T) {
	j := openT(t, t.TempDir(), Options{SandboxCap: 1 << 20})
	var procs []*Process
	for range 6 {
		p := createT(t, j, 512<<10)
		startT(t, p)
		for range 100 {
			must(t, p.AppendOutput(stdout, make([]byte, 4096)))
		}
		exitT(t, p)
		procs = append(procs, p)
	}
	if j.Bytes() > 1<<20 {
		t.Fatalf("%d bytes kept", j.Bytes())
	}
	evs, err := drain(t, procs[0], nil)
	must(t, err)
	if len(evs) != 3 || evs[0].GetStarted() == nil || evs[1].GetDropped().GetToOffset() != 409600 || evs[2].GetExited() == nil {
		t.Fatalf("the oldest process: %v", evs)
	}
	if evs, _ := drain(t, procs[5], nil); len(evs) != 102 {
		t.Fatalf("the newest process: %d events", len(evs))
	}
	// All of it gone from disk, the exit still survives a restart.
	must(t, j.Close())
	ro, err := OpenReadOnly(j.dir)
	must(t, err)
	p, err := ro.Process(procs[0].ID())
	must(t, err)
	again, err := drain(t, p, nil)
	must(t, err)
	if len(again) != 3 || again[2].GetId() != 102 {
		t.Fatalf("after a restart: %v", again)
	}
}

func TestExitedRecordsAreBounded(t *testing.T) {
	j := openT(t, t.TempDir(), Options{ExitedKept: 3})
	alive := createT(t, j, 0)
	startT(t, alive)
	var last []*Process
	for range 8 {
		p := createT(t, j, 0)
		startT(t, p)
		exitT(t, p)
		last = append(last, p)
	}
	procs, more := j.List("", 100)
	if len(procs) != 4 || more || procs[0] != alive || procs[1] != last[5] {
		t.Fatalf("%d processes kept", len(procs))
	}
	if _, err := os.Stat(last[0].dir); !errors.Is(err, os.ErrNotExist) {
		t.Fatalf("folder of a forgotten process: %v", err)
	}
	if _, err := drain(t, last[0], nil); !errors.Is(err, ErrNotFound) {
		t.Fatalf("reading a forgotten process: %v", err)
	}
	page, more := j.List(alive.ID(), 2)
	if len(page) != 2 || !more || page[0] != last[5] {
		t.Fatalf("page: %d, more %v", len(page), more)
	}
}

func TestOneWriter(t *testing.T) {
	dir := t.TempDir()
	j := openT(t, dir, Options{})
	if _, err := Open(dir, Options{}); !errors.Is(err, ErrLocked) {
		t.Fatalf("second writer: %v", err)
	}
	p := createT(t, j, 0)
	if _, err := j.Create(&nodev1.Process{ProcessId: string(p.ID())}); !errors.Is(err, ErrExists) {
		t.Fatalf("second create: %v", err)
	}
	if _, err := j.Create(&nodev1.Process{ProcessId: "../x"}); err == nil {
		t.Fatal("a path was accepted as process ID")
	}
	ro, err := OpenReadOnly(dir)
	must(t, err)
	if _, err := ro.Create(&nodev1.Process{ProcessId: string(sandbox.NewProcessID())}); !errors.Is(err, ErrReadOnly) {
		t.Fatalf("create in a read-only journal: %v", err)
	}
	if err := ro.Remove(p.ID()); !errors.Is(err, ErrReadOnly) {
		t.Fatalf("remove in a read-only journal: %v", err)
	}
}

func TestSyncWithinTheInterval(t *testing.T) {
	j := openT(t, t.TempDir(), Options{SyncEvery: time.Millisecond})
	p := createT(t, j, 0)
	startT(t, p)
	deadline := time.After(10 * time.Second)
	for {
		p.mu.Lock()
		dirty := p.dirty
		p.mu.Unlock()
		if !dirty {
			break
		}
		select {
		case <-deadline:
			t.Fatal("still dirty")
		case <-time.After(time.Millisecond):
		}
	}
	must(t, j.SyncErr())
	if m, _ := filepath.Glob(filepath.Join(p.dir, "*.tmp")); len(m) != 0 {
		t.Fatalf("left behind: %v", m)
	}
}
