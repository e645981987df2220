//go:build !race

package shim

// raceEnabled makes tests smaller under the race detector.
const raceEnabled = false
