package dataplane

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/space-sandbox/space/internal/api/apitest"
	nodev1 "github.com/space-sandbox/space/internal/gen/space/node/v1"
	"github.com/space-sandbox/space/internal/sandbox"
)

// collector checks order and offsets of what a client sees over all its connections.
type collector struct {
	last  uint64
	bytes uint64
	names []string
	hash  interface {
		Write([]byte) (int, error)
		Sum([]byte) []byte
	}
}

func newCollector() *collector { return &collector{hash: sha256.New()} }

func (c *collector) add(e sse) error {
	if e.id != 0 {
		if e.id != c.last+1 {
			return fmt.Errorf("event %d after %d", e.id, c.last)
		}
		c.last = e.id
	}
	if e.name != "stdout" {
		c.names = append(c.names, e.name)
		return nil
	}
	// By hand, since a JSON decoder makes the race detector crawl; the shape has a test of its own.
	text, rest, ok := strings.Cut(strings.TrimPrefix(e.data, `{"data":"`), `","offset":`)
	if want := strconv.FormatUint(c.bytes, 10) + "}"; !ok || rest != want {
		return fmt.Errorf("offset %q, want %q", rest, want)
	}
	data, err := base64.StdEncoding.DecodeString(text)
	c.bytes += uint64(len(data))
	_, _ = c.hash.Write(data)
	return err
}

func TestEveryByteOnceThroughCutsOnBothSides(t *testing.T) {
	const total, frame = (64 << 20) / raceSlower, 32 << 10
	b := newBench(t)
	rng := rand.New(rand.NewPCG(1, 2))
	block := make([]byte, frame)
	for i := range block {
		block[i] = byte(rng.Uint32())
	}
	want := sha256.New()
	b.Guests.Emit(b.pid, started())
	for off := 0; off < total; off += frame {
		data := append([]byte{}, block[off/frame%100:]...)
		data = append(data, block[:off/frame%100]...)
		want.Write(data)
		b.Guests.Emit(b.pid, output(data, uint64(off)))
	}
	b.Guests.Emit(b.pid, exited(0))
	var cuts []int
	for range 30 { // the guest's side breaks as well, now and then before it sent anything
		cuts = append(cuts, rng.IntN(120))
	}
	b.Guests.Cut(cuts...)
	c := newCollector()
	for connection := 0; ; connection++ {
		if connection > 60 {
			t.Fatal("the stream comes to no end")
		}
		stopAt := uint64(connection+1) * total / 51
		err := b.follow(t, c.last, func(e sse) error {
			if err := c.add(e); err != nil {
				return err
			}
			if c.bytes >= stopAt && connection < 50 {
				return errStop
			}
			return nil
		})
		if err != nil && !errors.Is(err, errStop) {
			t.Fatalf("connection %d: %v", connection, err)
		}
		if err == nil {
			break
		}
	}
	if got := strings.Join(c.names, " "); got != "started process_exited" {
		t.Errorf("events %q", got)
	}
	if c.bytes != total || !bytes.Equal(c.hash.Sum(nil), want.Sum(nil)) {
		t.Errorf("%d bytes, equal: %v", c.bytes, bytes.Equal(c.hash.Sum(nil), want.Sum(nil)))
	}
}

// TestResumeIsExact cuts and resumes at random and asks that each event comes exactly once.
func TestResumeIsExact(t *testing.T) {
	for seed := range uint64(20) {
		rng := rand.New(rand.NewPCG(seed, 7))
		b := newBench(t)
		n := 1 + rng.IntN(60)
		b.Guests.Emit(b.pid, started())
		for i := range n {
			b.Guests.Emit(b.pid, output([]byte{byte(i)}, uint64(i)))
		}
		b.Guests.Emit(b.pid, exited(3))
		var cuts []int
		for range rng.IntN(10) {
			cuts = append(cuts, rng.IntN(n))
		}
		b.Guests.Cut(cuts...)
		c := newCollector()
		for c.names == nil || c.names[len(c.names)-1] != "process_exited" {
			left := 1 + rng.IntN(n+2)
			err := b.follow(t, c.last, func(e sse) error {
				if err := c.add(e); err != nil {
					return err
				}
				if left--; left == 0 {
					return errStop
				}
				return nil
			})
			if err != nil && !errors.Is(err, errStop) {
				t.Fatalf("seed %d: %v", seed, err)
			}
		}
		if c.bytes != uint64(n) || c.last != uint64(n+2) || len(c.names) != 2 {
			t.Fatalf("seed %d: %d of %d bytes, last %d, %v", seed, c.bytes, n, c.last, c.names)
		}
	}
}

func TestEventsHaveTheirShapes(t *testing.T) {
	b := newBench(t)
	b.Guests.Emit(b.pid, started(), output([]byte("a\n"), 0),
		&nodev1.Event{Kind: &nodev1.Event_Dropped{Dropped: &nodev1.OutputDropped{Stream: 2, FromOffset: 1, ToOffset: 9}}}, exited(5))
	var got []string
	if err := b.follow(t, 0, func(e sse) error { got = append(got, fmt.Sprintf("%d %s %s", e.id, e.name, e.data)); return nil }); err != nil {
		t.Fatal(err)
	}
	want := []string{
		`1 started {"process_id":"` + b.pid + `","os_pid":7,"started_at":"1970-01-01T00:00:00.000Z"}`,
		`2 stdout {"data":"YQo=","offset":0}`,
		`3 output_dropped {"stream":"stderr","from_offset":1,"to_offset":9}`,
		`4 process_exited {"code":5,"signal":null,"timed_out":false,"oom_killed":false,"core_dumped":false,"exited_at":"1970-01-01T00:00:00.000Z","stdout_bytes":0,"stderr_bytes":0,"dropped_bytes":0}`,
	}
	if strings.Join(got, "\n") != strings.Join(want, "\n") {
		t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	if b.Guests.Starts != 1 {
		t.Errorf("the process was asked to start %d times", b.Guests.Starts)
	}
}

func TestResyncBelowWhatIsKept(t *testing.T) {
	b := newBench(t)
	b.Guests.Emit(b.pid, started(), output([]byte("a"), 0), output([]byte("b"), 1), exited(0))
	b.Guests.DropBelow(3)
	for _, after := range []uint64{1, 99} {
		var names []string
		var ids []uint64
		err := b.follow(t, after, func(e sse) error { names, ids = append(names, e.name), append(ids, e.id); return nil })
		if err != nil || fmt.Sprint(names) != "[resync_required stdout process_exited]" || fmt.Sprint(ids) != "[0 3 4]" {
			t.Errorf("after %d: %v %v %v", after, names, ids, err)
		}
	}
}

func TestInterruptions(t *testing.T) {
	reason := func(t *testing.T, b *bench, then func()) (string, bool) {
		t.Helper()
		var last struct {
			Reason    string
			Retryable bool
		}
		err := b.follow(t, 0, func(e sse) error {
			if e.name == "stdout" {
				go then()
			}
			if e.name == "interrupted" {
				return json.Unmarshal([]byte(e.data), &last)
			}
			return nil
		})
		if err != nil {
			t.Fatalf("no clean end: %v", err)
		}
		return last.Reason, last.Retryable
	}
	for name, c := range map[string]struct {
		then      func(b *bench)
		reason    string
		retryable bool
	}{
		"the guest says so": {func(b *bench) { b.Guests.Emit(b.pid, interrupted("sandbox_suspended")) }, "sandbox_suspended", true},
		"deleted":           {func(b *bench) { b.gone(sandbox.StateDeleting) }, "sandbox_deleted", false},
		"suspended":         {func(b *bench) { b.gone(sandbox.StateSuspending) }, "sandbox_suspended", true},
		"paused":            {func(b *bench) { b.gone(sandbox.StatePaused) }, "sandbox_paused", true},
		"not found": {func(b *bench) {
			b.Fail("SessionGuest", sandbox.Errorf(sandbox.CodeNotFound, "no such sandbox"))
			b.Guests.Emit(b.pid, interrupted("server_draining"))
		}, "sandbox_deleted", false},
		"unreachable": {func(b *bench) {
			b.Fail("SessionGuest", sandbox.Errorf(sandbox.CodeServiceUnavailable, "node is down"))
			b.Guests.Emit(b.pid, interrupted("server_draining"))
		}, "node_unreachable", true},
		"revoked": {func(b *bench) { b.Revoke() }, "session_revoked", false},
		"expired": {func(*bench) {}, "session_expired", false},
		"drained": {func(b *bench) {
			if err := b.server.Drain(context.Background()); err != nil {
				t.Error(err)
			}
		}, "server_draining", true},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t, func(c *Config) { c.LostAfter = 50 * time.Millisecond })
			if name == "expired" {
				b.Session.ExpiresAt = time.Now().Add(300 * time.Millisecond)
			}
			b.Guests.Emit(b.pid, started(), output([]byte("a"), 0))
			if got, retryable := reason(t, b, func() { c.then(b) }); got != c.reason || retryable != c.retryable {
				t.Errorf("reason %q retryable %v, want %q %v", got, retryable, c.reason, c.retryable)
			}
			eventually(t, "the guest's stream is closed", func() bool { return b.Guests.Streams() == 0 })
		})
	}
}

// gone moves the sandbox out of running and breaks its stream the way a restarting node does.
func (b *bench) gone(state sandbox.State) {
	b.SetState(state)
	b.Guests.Emit(b.pid, interrupted("server_draining"))
}

func TestFailedSandboxGivesItsJournal(t *testing.T) {
	b := newBench(t)
	b.Guests.Emit(b.pid, started(), output([]byte("a"), 0), interrupted("sandbox_failed"))
	b.SetState(sandbox.StateFailed)
	var names []string
	err := b.follow(t, 0, func(e sse) error { names = append(names, e.name); return nil })
	if err != nil || fmt.Sprint(names) != "[started stdout interrupted]" || b.Guests.Starts != 0 {
		t.Errorf("%v %v, started %d times", names, err, b.Guests.Starts)
	}
}

func TestErrorsBeforeTheFirstByteAreAnswers(t *testing.T) {
	b := newBench(t, func(c *Config) { c.LostAfter = 20 * time.Millisecond })
	b.SetState(sandbox.StateSuspended)
	b.refused(t, 409, "conflict", "GET", b.path("events"), nil)
	b.SetState(sandbox.StateRunning)
	b.Fail("SessionGuest", sandbox.Errorf(sandbox.CodeServiceUnavailable, "down"))
	b.refused(t, 503, "service_unavailable", "GET", b.path("events"), nil)
	b.Fail("SessionGuest", nil)
	b.Session.ProcessID = sandbox.NewProcessID()
	b.refused(t, 404, "not_found", "GET", b.path("events"), nil)
}

func TestQuietStreamBeginsAndPings(t *testing.T) {
	b := newBench(t, func(c *Config) { c.PingInterval = 5 * time.Millisecond })
	pings := 0
	err := b.follow(t, 0, func(e sse) error {
		if e.name == ":ping" {
			if pings++; pings == 3 {
				return errStop
			}
		}
		return nil
	})
	if !errors.Is(err, errStop) {
		t.Fatal(err)
	}
	eventually(t, "a client that left frees the guest's stream", func() bool { return b.Guests.Streams() == 0 })
}

// TestSlowReaderHoldsNobodyUp lets one client not read at all, and expects it to be given up while others go on.
func TestSlowReaderHoldsNobodyUp(t *testing.T) {
	b := newBench(t, func(c *Config) { c.WriteTimeout = 200 * time.Millisecond })
	b.Guests.Emit(b.pid, started())
	chunk := bytes.Repeat([]byte("x"), 32<<10)
	for i := range 512 { // far more than the sockets between hold
		b.Guests.Emit(b.pid, output(chunk, uint64(i*len(chunk))))
	}
	b.Guests.Emit(b.pid, exited(0))
	conn, err := net.Dial("tcp", b.http.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if err := conn.(*net.TCPConn).SetReadBuffer(4096); err != nil {
		t.Fatal(err)
	}
	fmt.Fprintf(conn, "GET %s HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer %s\r\n\r\n", b.path("events"), apitest.Token)
	eventually(t, "the slow reader's stream is open", func() bool { return b.Guests.Streams() == 1 })
	c := newCollector()
	if err := b.follow(t, 0, c.add); err != nil || c.bytes != 16<<20 {
		t.Errorf("the other reader: %v, %d bytes", err, c.bytes)
	}
	eventually(t, "the slow reader is given up", func() bool { return b.Guests.Streams() == 0 })
}

func TestNodeRestartIsNotSeen(t *testing.T) {
	b := newBench(t)
	b.Guests.Emit(b.pid, started(), output([]byte("a"), 0))
	b.Guests.Cut(2, 0, 0, 0)
	c := newCollector()
	err := b.follow(t, 0, func(e sse) error {
		if e.name == "stdout" && c.bytes == 0 {
			b.Guests.Emit(b.pid, output([]byte("b"), 1), exited(0))
		}
		return c.add(e)
	})
	if err != nil || c.bytes != 2 || c.last != 4 {
		t.Errorf("%v, %d bytes, last %d", err, c.bytes, c.last)
	}
	if b.Resolved < 5 {
		t.Errorf("the guest was resolved %d times", b.Resolved)
	}
}

func TestDrainRefusesWhatComesLater(t *testing.T) {
	b := newBench(t)
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	if err := b.server.Drain(ctx); err != nil {
		t.Fatal(err)
	}
	b.refused(t, 503, "service_unavailable", "GET", b.path("events"), nil)
	resp := b.request(ctx, t, "GET", "/healthz", nil, "Authorization", "")
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		t.Errorf("healthz %d", resp.StatusCode)
	}
}

func BenchmarkAppendOutput(b *testing.B) {
	ev := output(bytes.Repeat([]byte("x"), 32<<10), 1<<40)
	ev.Id = 12345
	var buf []byte
	b.SetBytes(32 << 10)
	b.ReportAllocs()
	for b.Loop() {
		buf = appendEvent(buf[:0], "p", ev)
	}
}

func TestOutputIsEncodedWithoutGarbage(t *testing.T) {
	ev := output(bytes.Repeat([]byte{0xff, 0}, 16<<10), 1<<40)
	ev.Id = 12345
	buf := appendEvent(nil, "p", ev)
	if n := testing.AllocsPerRun(100, func() { buf = appendEvent(buf[:0], "p", ev) }); n > 0 {
		t.Errorf("%v allocations for each event", n)
	}
	ev.GetOutput().Stream = 99
	if got := appendEvent(nil, "p", ev); len(got) != 0 {
		t.Errorf("an unknown stream makes %q", got)
	}
}

func FuzzAppendOutput(f *testing.F) {
	f.Add(uint64(0), []byte{}, uint64(0))
	f.Add(uint64(1), []byte("data: x\n\nevent: exit"), uint64(1)<<63)
	f.Fuzz(func(t *testing.T, id uint64, data []byte, offset uint64) {
		ev := output(data, offset)
		ev.Id = id
		seen := 0
		err := parse(bytes.NewReader(appendEvent(nil, "p", ev)), func(e sse) error {
			seen++
			var o struct {
				Data   []byte
				Offset json.Number
			}
			if err := json.Unmarshal([]byte(e.data), &o); err != nil {
				return err
			}
			if e.id != id || !bytes.Equal(o.Data, data) || o.Offset.String() != strconv.FormatUint(offset, 10) {
				return fmt.Errorf("got %+v", e)
			}
			return nil
		})
		if err != nil || seen != 1 {
			t.Fatalf("%v, %d events", err, seen)
		}
	})
}
