//go:build race

package dataplane

// raceSlower divides what the heavy tests move: the race detector makes them many times slower.
const raceSlower = 8
