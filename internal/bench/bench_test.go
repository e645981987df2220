package bench

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/space-sandbox/space/internal/bench/floor"
)

func TestPercentile(t *testing.T) {
	hundred := []float64{}
	for i := 100; i > 0; i-- {
		hundred = append(hundred, float64(i))
	}
	for _, test := range []struct {
		in      []float64
		p, want float64
	}{{nil, 50, 0}, {[]float64{7}, 50, 7}, {[]float64{7}, 99, 7}, {hundred, 50, 50}, {hundred, 95, 95}, {hundred, 99, 99}, {[]float64{3, 1, 2}, 50, 2}, {[]float64{1, 2}, 50, 1}, {[]float64{1, 2}, 95, 2}} {
		if got := percentile(test.in, test.p); got != test.want {
			t.Errorf("percentile(%d values, %v) = %v, want %v", len(test.in), test.p, got, test.want)
		}
	}
	if hundred[0] != 100 {
		t.Error("the samples were sorted in place")
	}
}

func TestFigure(t *testing.T) {
	f := &Figure{Name: "x", Unit: "ms", samples: []float64{4, 6, 5}, floor: []float64{2, 2.5, 3}}
	f.finish()
	if f.N != 3 || f.P50 != 5 || *f.FloorP50 != 2.5 || *f.Ratio != 2 {
		t.Errorf("%+v", f)
	}
	bare := &Figure{samples: []float64{1}}
	bare.finish()
	if data, err := json.Marshal(bare); err != nil || bare.Ratio != nil || string(data) != `{"name":"","unit":"","n":1,"p50":1,"p95":1,"p99":1,"floor_p50":null,"ratio":null}` {
		t.Errorf("%s, %v", data, err)
	}
}

func TestParseStat(t *testing.T) {
	const tail = " 0 0 0 0 0 0 0 0 0 40 2 0 0"
	for in, want := range map[string]string{
		"7 (a) S 3" + tail: "3", "7 (a) b) (c) R 12" + tail: "12", "": "", "7 (a)": "", "7 (a) S x" + tail: "",
		"7 (a) S 3 0 0 0 0 0 0 0 0 0 -1 2": "", "7 (a) S 3 0": "",
	} {
		got, ticks, ok := parseStat(in)
		if got != want || ok != (want != "") || (ok && ticks != 42) {
			t.Errorf("parseStat(%q) = %q, %d, %v, want %q", in, got, ticks, ok, want)
		}
	}
}

func TestPSSOfThisProcess(t *testing.T) {
	self := strconv.Itoa(os.Getpid())
	if pss(self, nil) == 0 {
		t.Fatal("no PSS")
	}
	if both := pss(self, map[string][]string{self: {"1000000000"}}); both == 0 {
		t.Error("a child that has ended hides its parent")
	}
	if got := Memory("/nonexistent"); len(got) != 0 {
		t.Errorf("%v", got)
	}
	if all := processes(); !slices.Contains(all.children[strconv.Itoa(os.Getppid())], self) {
		t.Error("this process is not among its parent's children")
	}
}

func TestAwaitQuiet(t *testing.T) {
	for name, c := range map[string]struct {
		seen  []uint64
		looks int
	}{
		"idle": {[]uint64{0, 0}, 2}, "nearly": {[]uint64{7, 8}, 2}, "busy first": {[]uint64{0, 9, 20, 21}, 4},
		"one ends": {[]uint64{50, 10, 10}, 3},
	} {
		n := 0
		err := awaitQuiet(t.Context(), time.Millisecond, time.Minute, func() uint64 { n++; return c.seen[n-1] })
		if err != nil || n != c.looks {
			t.Errorf("%s: %v after %d looks, want %d", name, err, n, c.looks)
		}
	}
	var used uint64
	busy := func() uint64 { used += 10; return used }
	if err := awaitQuiet(t.Context(), time.Millisecond, 20*time.Millisecond, busy); err != nil {
		t.Errorf("no rest: %v", err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if err := awaitQuiet(ctx, time.Millisecond, time.Minute, busy); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("cancelled: %v", err)
	}
}

func TestMeasureAlternates(t *testing.T) {
	var order string
	note := func(c string) func(context.Context) error {
		return func(context.Context) error { order += c; return nil }
	}
	b := &bench{Config: Config{Say: func(string) {}}, raw: new(floor.VM)}
	if err := b.measure(t.Context(), step{"x", 3, 0, note("a"), note("b")}); err != nil || order != "ababab" {
		t.Errorf("%q, %v", order, err)
	}
	f := b.report.Figures[0]
	if f.finish(); f.N != 3 || f.FloorP50 == nil || f.Ratio == nil {
		t.Errorf("%+v", f)
	}
	b.raw = nil
	if err := b.measure(t.Context(), step{"y", 1, 1, note("c"), note("d")}); err != nil || order != "abababcc" {
		t.Errorf("without a floor: %q, %v", order, err)
	}
	broken := errors.New("broken")
	if err := b.measure(t.Context(), step{"z", 1, 0, func(context.Context) error { return broken }, nil}); !errors.Is(err, broken) {
		t.Errorf("an error: %v", err)
	}
	if short(1, 2) == nil || short(2, 2) != nil {
		t.Error("short")
	}
}
