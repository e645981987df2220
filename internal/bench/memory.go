package bench

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// ShimMemory returns a function that measures, in MiB, what each shim whose command line names dir costs together with
// its VMM: the PSS, in which a shared page counts by its share. Processes that may not be read are left out.
func ShimMemory(dir string) func() []float64 {
	return func() []float64 {
		children := map[string][]string{}
		var shims []string
		stats, _ := filepath.Glob("/proc/[0-9]*/stat")
		for _, path := range stats {
			pid := filepath.Base(filepath.Dir(path))
			data, err := os.ReadFile(path)
			if err != nil {
				continue // it has ended
			}
			if parent := parentOf(string(data)); parent != "" {
				children[parent] = append(children[parent], pid)
			}
			args, err := os.ReadFile("/proc/" + pid + "/cmdline")
			if first, _, _ := strings.Cut(string(args), "\x00"); err == nil && strings.HasSuffix(first, "space-shim") && strings.Contains(string(args), dir) {
				shims = append(shims, pid)
			}
		}
		var out []float64
		for _, pid := range shims {
			if kib := pss(pid, children); kib > 0 {
				out = append(out, float64(kib)/1024)
			}
		}
		return out
	}
}

// parentOf reads the parent's ID from /proc/PID/stat; the program's name before it may hold anything.
func parentOf(stat string) string {
	fields := strings.Fields(stat[strings.LastIndexByte(stat, ')')+1:])
	if len(fields) < 2 {
		return ""
	}
	if _, err := strconv.Atoi(fields[1]); err != nil {
		return ""
	}
	return fields[1]
}

// pss sums up a process and its descendants, in KiB.
func pss(pid string, children map[string][]string) uint64 {
	var total uint64
	data, err := os.ReadFile("/proc/" + pid + "/smaps_rollup")
	if err != nil {
		return 0
	}
	for line := range strings.Lines(string(data)) {
		var kib uint64
		if n, _ := fmt.Sscanf(line, "Pss: %d kB", &kib); n == 1 {
			total = kib
		}
	}
	for _, c := range children[pid] {
		total += pss(c, children)
	}
	return total
}
