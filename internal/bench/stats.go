package bench

import (
	"math"
	"slices"
	"time"
)

// Figure is one thing that was measured. FloorP50 and Ratio are null where no floor was measured.
type Figure struct {
	Name     string   `json:"name"`
	Unit     string   `json:"unit"`
	N        int      `json:"n"`
	P50      float64  `json:"p50"`
	P95      float64  `json:"p95"`
	P99      float64  `json:"p99"`
	FloorP50 *float64 `json:"floor_p50"`
	Ratio    *float64 `json:"ratio"`

	samples, floor []float64
}

// Report is the result of a run.
type Report struct {
	Machine map[string]any `json:"machine"`
	Figures []*Figure      `json:"figures"`
}

func (f *Figure) add(v float64) { f.samples = append(f.samples, v) }

func (f *Figure) addMS(d time.Duration) { f.add(float64(d) / float64(time.Millisecond)) }

func (f *Figure) addFloorMS(d time.Duration) {
	f.floor = append(f.floor, float64(d)/float64(time.Millisecond))
}

// finish computes the percentiles.
func (f *Figure) finish() {
	f.N = len(f.samples)
	f.P50, f.P95, f.P99 = percentile(f.samples, 50), percentile(f.samples, 95), percentile(f.samples, 99)
	if len(f.floor) > 0 {
		floor := percentile(f.floor, 50)
		f.FloorP50 = &floor
		if floor > 0 {
			ratio := f.P50 / floor
			f.Ratio = &ratio
		}
	}
}

// percentile is the nearest-rank percentile: a value that was measured, never one in between.
func percentile(samples []float64, p float64) float64 {
	if len(samples) == 0 {
		return 0
	}
	s := slices.Sorted(slices.Values(samples))
	return s[max(0, int(math.Ceil(p/100*float64(len(s))))-1)]
}
