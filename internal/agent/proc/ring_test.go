package proc

import (
	"bytes"
	"context"
	"errors"
	"testing"
	"time"

	agentv1 "github.com/space-sandbox/space/internal/gen/space/agent/v1"
)

func TestRingNumbersAndFrees(t *testing.T) {
	r := newRing()
	r.started(5, time.Now())
	r.output(agentv1.Stream_STREAM_STDOUT, []byte("ab"))
	r.output(agentv1.Stream_STREAM_STDERR, []byte("c"))
	frames, end, err := r.after(t.Context(), 0)
	if err != nil || end || len(frames) != 3 || frames[2].GetSeq() != 3 {
		t.Fatalf("%v %v %v", frames, end, err)
	}
	if r.ack(2) || r.bytes != 1+frameCost || len(r.frames) != 1 {
		t.Errorf("%d bytes, %d frames", r.bytes, len(r.frames))
	}
	if r.ack(99) {
		t.Error("forgotten before the exit")
	}
	r.exit(&agentv1.Exited{})
	if seq, exited := r.last(); seq != 4 || !exited {
		t.Errorf("last %d %v", seq, exited)
	}
	if r.ack(3) || !r.ack(4) || !r.ack(4) {
		t.Error("the exit is not what is acknowledged")
	}
	if _, end, err := r.after(t.Context(), 0); !end || err != nil {
		t.Errorf("%v %v", end, err)
	}
}

func TestRingWaits(t *testing.T) {
	r := newRing()
	block := make([]byte, frameBytes)
	for r.bytes+frameBytes+frameCost <= ringBytes {
		r.output(agentv1.Stream_STREAM_STDOUT, block)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		r.output(agentv1.Stream_STREAM_STDOUT, block)
	}()
	select {
	case <-done:
		t.Fatal("the ring took more than it holds")
	case <-time.After(20 * time.Millisecond):
	}
	r.ack(1)
	<-done
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	last, _ := r.last()
	if _, _, err := r.after(ctx, last); !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
	r.close()
	r.output(agentv1.Stream_STREAM_STDOUT, append(block, block...)) // does not wait
	if _, end, err := r.after(t.Context(), 0); !end || err != nil || r.bytes != 0 {
		t.Errorf("closed: %v %v %d", end, err, r.bytes)
	}
}

// TestRingSplits sends more than the ring holds in one piece.
func TestRingSplits(t *testing.T) {
	r := newRing()
	data := make([]byte, 2*ringBytes+frameBytes/2)
	for i := range data {
		data[i] = byte(i >> 8)
	}
	go func() {
		r.output(agentv1.Stream_STREAM_STDOUT, data)
		r.exit(&agentv1.Exited{})
	}()
	var got []byte
	for seq := uint64(0); ; {
		frames, end, err := r.after(t.Context(), seq)
		if err != nil {
			t.Fatal(err)
		}
		if end {
			break
		}
		for _, f := range frames {
			if seq++; f.GetSeq() != seq || len(f.GetOutput().GetData()) > frameBytes {
				t.Fatalf("frame %d of %d bytes where %d is due", f.GetSeq(), len(f.GetOutput().GetData()), seq)
			}
			got = append(got, f.GetOutput().GetData()...)
		}
		r.ack(seq)
	}
	if !bytes.Equal(got, data) {
		t.Errorf("%d of %d bytes, or others", len(got), len(data))
	}
}

func TestValidID(t *testing.T) {
	for id, want := range map[string]bool{"p1": true, "A-b_9": true, "": false, ".": false, "a/b": false, "cgroup.kill": false, "é": false} {
		if validID(id) != want {
			t.Errorf("%q", id)
		}
	}
}

func FuzzField(f *testing.F) {
	f.Add("populated 1\nfrozen 0\n", "frozen")
	f.Add("", "")
	f.Fuzz(func(t *testing.T, data, key string) {
		if v, ok := field(data, key); ok && len(v) > len(data) {
			t.Fatal(v)
		}
	})
}
