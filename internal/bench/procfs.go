package bench

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// Cost is the memory of one sandbox in MiB: PSS, in which a shared page counts by its share.
type Cost struct{ Shim, VMM float64 }

// Memory measures each shim whose command line names dir, and its VMM. Processes that may not be read are left out.
func Memory(dir string) []Cost {
	tree := processes()
	var out []Cost
	for pid := range tree.ticks {
		args, err := os.ReadFile("/proc/" + pid + "/cmdline")
		if first, _, _ := strings.Cut(string(args), "\x00"); err != nil || filepath.Base(first) != "space-shim" || !strings.Contains(string(args), dir) {
			continue
		}
		if own := pss(pid, nil); own > 0 {
			out = append(out, Cost{Shim: float64(own) / 1024, VMM: float64(pss(pid, tree.children)-own) / 1024})
		}
	}
	return out
}

// tree is a look at all processes.
type tree struct {
	children map[string][]string
	ticks    map[string]uint64 // of CPU time
}

func processes() tree {
	t := tree{map[string][]string{}, map[string]uint64{}}
	stats, _ := filepath.Glob("/proc/[0-9]*/stat")
	for _, path := range stats {
		data, err := os.ReadFile(path)
		if err != nil {
			continue // it has ended
		}
		if parent, ticks, ok := parseStat(string(data)); ok {
			pid := filepath.Base(filepath.Dir(path))
			t.children[parent] = append(t.children[parent], pid)
			t.ticks[pid] = ticks
		}
	}
	return t
}

// busy sums up the CPU time of a process and its descendants.
func (t tree) busy(pid string) uint64 {
	total := t.ticks[pid]
	for _, c := range t.children[pid] {
		total += t.busy(c)
	}
	return total
}

// parseStat reads the parent's ID and the CPU time from /proc/PID/stat; the program's name in it may hold anything.
func parseStat(stat string) (parent string, ticks uint64, ok bool) {
	fields := strings.Fields(stat[strings.LastIndexByte(stat, ')')+1:])
	const state, ppid, utime, stime = 0, 1, 11, 12
	if len(fields) <= stime || fields[state] == "" {
		return "", 0, false
	}
	if _, err := strconv.Atoi(fields[ppid]); err != nil {
		return "", 0, false
	}
	for _, field := range fields[utime : stime+1] {
		n, err := strconv.ParseUint(field, 10, 64)
		if err != nil {
			return "", 0, false
		}
		ticks += n
	}
	return fields[ppid], ticks, true
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

const (
	quietRound = 100 * time.Millisecond
	quietTicks = 2 // of 10 ms in a round: less than this is idling
	patience   = 10 * time.Second
)

// Quiet returns a Config.Settle that waits until the given processes and all below them do nothing, for a while at
// most: a machine that has no rest is measured as it is.
func Quiet(pids ...int) func(context.Context) error {
	return func(ctx context.Context) error {
		return awaitQuiet(ctx, quietRound, patience, func() (sum uint64) {
			t := processes()
			for _, pid := range pids {
				sum += t.busy(strconv.Itoa(pid))
			}
			return sum
		})
	}
}

// awaitQuiet looks at the CPU time that was used until there is a round without any to speak of.
func awaitQuiet(ctx context.Context, round, patience time.Duration, look func() uint64) error {
	tick := time.NewTicker(round)
	defer tick.Stop()
	end := time.Now().Add(patience)
	for before := look(); ; {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return ctx.Err()
		}
		now := look()
		// It falls when one of the processes ends: that is something, too.
		if now >= before && now < before+quietTicks || time.Now().After(end) {
			return nil
		}
		before = now
	}
}
