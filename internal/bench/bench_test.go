package bench

import (
	"encoding/json"
	"testing"
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

func TestParentOf(t *testing.T) {
	for in, want := range map[string]string{"7 (a) S 3 1": "3", "7 (a) b) (c) R 12 1": "12", "": "", "7 (a)": "", "7 (a) S x": ""} {
		if got := parentOf(in); got != want {
			t.Errorf("parentOf(%q) = %q, want %q", in, got, want)
		}
	}
}

func TestPSSOfThisProcess(t *testing.T) {
	self := "self"
	alone := pss(self, nil)
	if alone == 0 {
		t.Fatal("no PSS")
	}
	if both := pss(self, map[string][]string{self: {"1000000000"}}); both == 0 {
		t.Error("a child that has ended hides its parent")
	}
	if got := ShimMemory("/nonexistent")(); len(got) != 0 {
		t.Errorf("%v", got)
	}
}
