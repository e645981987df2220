package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// gauges are what must not grow with the number of sandboxes that were.
type gauges struct {
	fds, threads, rssMiB, shims, files, sockets int
}

func (s *server) gauges(t *testing.T) gauges {
	t.Helper()
	httpClient.CloseIdleConnections()
	pid := s.cmd.Process.Pid
	count := func(pattern string) int {
		found, err := filepath.Glob(pattern)
		if err != nil {
			t.Fatal(err)
		}
		return len(found)
	}
	f := s.footprint(t)
	return gauges{
		fds: atoi(f["fds"]), threads: count(fmt.Sprintf("/proc/%d/task/*", pid)), rssMiB: rss(t, pid) >> 20,
		shims: atoi(f["processes"]), files: strings.Count(f["files"], "\n"), sockets: atoi(f["sockets"]),
	}
}

// grown says what is more than before by more than chance allows: a few idle connections and threads come and go.
func (g gauges) grown(before gauges) string {
	var out []string
	for _, c := range []struct {
		name             string
		was, is, allowed int
	}{
		{"descriptors", before.fds, g.fds, 8}, {"threads", before.threads, g.threads, 8},
		{"MiB of memory", before.rssMiB, g.rssMiB, 24}, {"processes", before.shims, g.shims, 0},
		{"files", before.files, g.files, 2}, {"sockets", before.sockets, g.sockets, 0},
	} {
		if c.is > c.was+c.allowed {
			out = append(out, fmt.Sprintf("%s: %d → %d", c.name, c.was, c.is))
		}
	}
	return strings.Join(out, ", ")
}

// churn makes, uses and deletes sandboxes, 4 at a time, until more answers false.
func (s *server) churn(t *testing.T, more func(round int) bool) int {
	t.Helper()
	jobs, errs := make(chan struct{}), make(chan error, 4)
	for range 4 {
		go func() {
			var failed error
			for range jobs {
				if failed == nil {
					failed = s.shortLife()
				}
			}
			errs <- failed
		}()
	}
	round := 0
	for ; more(round); round++ {
		jobs <- struct{}{}
	}
	close(jobs)
	for range 4 {
		if err := <-errs; err != nil {
			t.Error(err)
		}
	}
	return round
}

// shortLife is one sandbox with one command.
func (s *server) shortLife() error {
	var a acceptedJSON
	if _, err := s.callErr("POST", "/v1/sandboxes", object{"template": "base"}, &a, "Prefer", "wait=60"); err != nil {
		return err
	}
	if err := s.shortProcess(a.Sandbox.ID, 3); err != nil {
		return err
	}
	_, err := s.callErr("DELETE", "/v1/sandboxes/"+a.Sandbox.ID, nil, nil, "Prefer", "wait=60")
	return err
}

// staysFlat churns once to fill every cache, then again, and compares.
func staysFlat(t *testing.T, more func(round int) bool) {
	s := ownServer(t, "--pool-size", "2")
	s.churn(t, func(round int) bool { return round < 12 })
	var before gauges
	settled := func() bool { before = s.gauges(t); return before.shims == 4 } // 2 armed shims with their VMMs
	eventually(t, 30*time.Second, "the pool is full", settled)
	rounds := s.churn(t, more)
	grown := ""
	err := poll(30*time.Second, func() (bool, error) {
		grown = s.gauges(t).grown(before)
		return grown == "", nil
	})
	if err != nil {
		t.Errorf("after %d rounds: %s", rounds, grown)
	}
	t.Logf("%d rounds: %+v before, %+v after", rounds, before, s.gauges(t))
}

func TestChurnStaysFlat(t *testing.T) {
	staysFlat(t, func(round int) bool { return round < 30 })
}

// TestSoak is TestChurnStaysFlat for the time that SPACE_SOAK says; `make soak` runs it.
func TestSoak(t *testing.T) {
	limit, err := time.ParseDuration(os.Getenv("SPACE_SOAK"))
	if err != nil {
		t.Skip("runs for the time in SPACE_SOAK: make soak")
	}
	end := time.Now().Add(limit)
	staysFlat(t, func(int) bool { return time.Now().Before(end) })
}
