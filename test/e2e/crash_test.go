package e2e

import (
	"encoding/json"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

func mustJSON(t *testing.T, raw []byte, out any) {
	t.Helper()
	if err := json.Unmarshal(raw, out); err != nil {
		t.Errorf("%v in %q", err, tail(string(raw), 200))
	}
}

// process is one host process that belongs to a server.
type process struct {
	pid, ppid int
	comm      string
	cmdline   string
}

// children returns the shims and the VMMs of a server: both name a folder below its data folder.
func (s *server) children(t *testing.T) (shims, vmms []process) {
	t.Helper()
	var all []process
	dirs, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		t.Fatal(err)
	}
	for _, dir := range dirs {
		stat, err := os.ReadFile(dir + "/stat")
		if err != nil {
			continue // ended meanwhile
		}
		cmdline, _ := os.ReadFile(dir + "/cmdline")
		open, end := strings.IndexByte(string(stat), '('), strings.LastIndexByte(string(stat), ')')
		fields := strings.Fields(string(stat)[end+1:])
		p := process{comm: string(stat)[open+1 : end], cmdline: strings.ReplaceAll(string(cmdline), "\x00", " ")}
		p.pid, _ = strconv.Atoi(filepath.Base(dir))
		p.ppid, _ = strconv.Atoi(fields[1])
		if fields[0] != "Z" {
			all = append(all, p)
		}
	}
	for _, p := range all {
		if strings.Contains(p.cmdline, s.dir) && !strings.Contains(p.cmdline, " up ") {
			if strings.HasPrefix(p.comm, "qemu") {
				vmms = append(vmms, p)
			} else {
				shims = append(shims, p)
			}
		}
	}
	return shims, vmms
}

// running finds the shim and the VMM of the only sandbox of a server without a pool.
func (s *server) running(t *testing.T) (shim, vmm process) {
	t.Helper()
	shims, vmms := s.children(t)
	for _, v := range vmms {
		for _, p := range shims {
			if p.pid == v.ppid {
				return p, v
			}
		}
	}
	t.Fatalf("no VMM among shims %+v and children %+v", shims, vmms)
	return shim, vmm
}

func TestServerKilledWhileStreaming(t *testing.T) {
	s := ownServer(t)
	sb := s.create(t, nil)
	const lines = 4000
	c := s.command(t, sb.ID, []string{"python3", "-uc",
		"import time\nfor i in range(" + strconv.Itoa(lines) + "):\n  print(i)\n  time.sleep(0.002)"}, nil)
	var r result
	var bad error
	if err := s.stream(c.Session, 0, time.Minute, func(e event) bool {
		bad = r.add(e)
		return bad == nil && r.stdout.Len() < 1000
	}); err != nil || bad != nil {
		t.Fatal(err, bad)
	}
	s.kill()
	if err := s.start(); err != nil {
		t.Fatal(err)
	}
	var after sandboxJSON
	s.call(t, "GET", "/v1/sandboxes/"+sb.ID, nil, &after)
	if after.State != "running" {
		t.Fatalf("after the restart the sandbox is %s (%s)", after.State, after.StateReason)
	}
	if err := s.stream(c.Session, r.last, 2*time.Minute, func(e event) bool {
		bad = r.add(e)
		return bad == nil
	}); err != nil || bad != nil {
		t.Fatal(err, bad)
	}
	want := strings.Builder{}
	for i := range lines {
		want.WriteString(strconv.Itoa(i) + "\n")
	}
	if r.code() != 0 || r.stdout.String() != want.String() {
		t.Errorf("code %d, %d bytes, want %d", r.code(), r.stdout.Len(), want.Len())
	}
	if out := s.sh(t, sb.ID, "echo new"); out != "new\n" {
		t.Errorf("new command: %q", out)
	}
}

func TestShimOrVMMKilled(t *testing.T) {
	for _, victim := range []string{"shim", "vmm"} {
		t.Run(victim, func(t *testing.T) {
			s := ownServer(t, "--pool-size", "0")
			sb := s.create(t, nil)
			c := s.command(t, sb.ID, []string{"sh", "-c", "echo up; sleep 300"}, nil)
			var r result
			var killed time.Time
			err := s.stream(c.Session, 0, time.Minute, func(e event) bool {
				if err := r.add(e); err != nil {
					t.Error(err)
				}
				if e.Name == "stdout" {
					shim, vmm := s.running(t)
					pid := map[string]int{"shim": shim.pid, "vmm": vmm.pid}[victim]
					if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
						t.Error(err)
					}
					killed = time.Now()
				}
				return true
			})
			if err != nil || r.interrupted != "sandbox_failed" || r.exit != nil {
				t.Errorf("stream ended with %v, interrupted %q, exit %+v", err, r.interrupted, r.exit)
			}
			var after sandboxJSON
			eventually(t, 5*time.Second-time.Since(killed), "sandbox becomes failed", func() bool {
				s.call(t, "GET", "/v1/sandboxes/"+sb.ID, nil, &after)
				return after.State == "failed" && after.StateReason != ""
			})
			// What was journalled can still be read.
			r = *s.follow(t, c.Session)
			if r.stdout.String() != "up\n" || r.interrupted != "sandbox_failed" {
				t.Errorf("read again: %q, %q", r.stdout.String(), r.interrupted)
			}
			e := s.refused(t, 409, "conflict", "POST", "/v1/sandboxes/"+sb.ID+"/commands", object{"argv": []string{"true"}})
			if e.Details.State != "failed" {
				t.Errorf("details %+v", e.Details)
			}
			s.call(t, "DELETE", "/v1/sandboxes/"+sb.ID, nil, nil, "Prefer", "wait=30")
			s.refused(t, 404, "not_found", "GET", "/v1/sandboxes/"+sb.ID, nil)
			eventually(t, 10*time.Second, "nothing is left", func() bool {
				shims, vmms := s.children(t)
				left, _ := filepath.Glob(s.dir + "/node/sandboxes/*")
				return len(shims)+len(vmms)+len(left) == 0
			})
		})
	}
}

func TestFrozenGuestBlocksNobody(t *testing.T) {
	s := ownServer(t, "--pool-size", "0")
	frozen := s.create(t, nil)
	_, vmm := s.running(t)
	if err := syscall.Kill(vmm.pid, syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	// Calls into the frozen guest are under way while others go on.
	stuck := make(chan error, 1)
	go func() {
		_, err := s.callErr("POST", "/v1/sandboxes/"+frozen.ID+"/commands", object{"argv": []string{"true"}, "start": "now"}, nil)
		stuck <- err
	}()
	other := s.create(t, nil)
	if out := s.sh(t, other.ID, "echo fine"); out != "fine\n" {
		t.Errorf("other sandbox: %q", out)
	}
	s.call(t, "GET", "/v1/sandboxes/"+frozen.ID, nil, nil)
	began := time.Now()
	s.call(t, "DELETE", "/v1/sandboxes/"+frozen.ID, nil, nil, "Prefer", "wait=30")
	s.refused(t, 404, "not_found", "GET", "/v1/sandboxes/"+frozen.ID, nil)
	if took := time.Since(began); took > 30*time.Second {
		t.Errorf("delete took %s", took)
	}
	if err := syscall.Kill(vmm.pid, 0); err == nil {
		t.Error("the frozen VMM still exists")
	}
	select {
	case err := <-stuck:
		if err != nil && asAPIError(err) == nil {
			t.Errorf("call into the frozen guest: %v", err)
		}
	case <-time.After(time.Minute):
		t.Error("the call into the frozen guest never ended")
	}
}

func TestIdempotencyAcrossRestart(t *testing.T) {
	s := ownServer(t)
	body := object{"template": "base", "metadata": object{"a": "b"}}
	var first, again acceptedJSON
	s.call(t, "POST", "/v1/sandboxes", body, &first, "Idempotency-Key", "one", "Prefer", "wait=60")
	resp := s.call(t, "POST", "/v1/sandboxes", body, &again, "Idempotency-Key", "one", "Prefer", "wait=60")
	if again.Sandbox.ID != first.Sandbox.ID || resp.Header.Get("Idempotent-Replayed") != "true" {
		t.Errorf("repeat made %s, first %s, replayed %q", again.Sandbox.ID, first.Sandbox.ID, resp.Header.Get("Idempotent-Replayed"))
	}
	s.refused(t, 409, "idempotency_conflict", "POST", "/v1/sandboxes", object{"template": "base"}, "Idempotency-Key", "one")
	s.kill()
	if err := s.start(); err != nil {
		t.Fatal(err)
	}
	s.call(t, "POST", "/v1/sandboxes", body, &again, "Idempotency-Key", "one", "Prefer", "wait=60")
	if again.Sandbox.ID != first.Sandbox.ID || again.Sandbox.State != "running" {
		t.Errorf("after the restart: %+v", again.Sandbox)
	}
	ids := make(chan string, 2)
	for range 2 {
		go func() {
			var a acceptedJSON
			_, err := s.callErr("POST", "/v1/sandboxes", body, &a, "Idempotency-Key", "two", "Prefer", "wait=60")
			if e := asAPIError(err); e != nil && e.Status == http.StatusConflict && e.Retryable {
				_, err = s.callErr("POST", "/v1/sandboxes", body, &a, "Idempotency-Key", "two", "Prefer", "wait=60")
			}
			if err != nil {
				t.Error(err)
			}
			ids <- a.Sandbox.ID
		}()
	}
	if a, b := <-ids, <-ids; a != b || a == "" {
		t.Errorf("two at once made %q and %q", a, b)
	}
	var page struct{ Items []sandboxJSON }
	s.call(t, "GET", "/v1/sandboxes", nil, &page)
	if len(page.Items) != 2 {
		t.Errorf("%d sandboxes, want 2", len(page.Items))
	}
}
