package e2e

import (
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"
)

func TestOutOfMemoryKillsTheProcessNotTheAgent(t *testing.T) {
	t.Parallel()
	sb := shared.create(t, nil)
	r := shared.exec(t, sb.ID, "python3", "-c", "a = []\nwhile True: a.append(bytearray(8 << 20))")
	if r.signal() != "SIGKILL" || !r.exit.OOMKilled {
		t.Errorf("exit %+v, stderr %q", r.exit, tail(r.stderr.String(), 300))
	}
	if out := shared.sh(t, sb.ID, "echo alive"); out != "alive\n" {
		t.Errorf("afterwards: %q", out)
	}
}

func TestFullGuestDiskIsATypedError(t *testing.T) {
	t.Parallel()
	sb := shared.create(t, object{"resources": object{"disk_mib": 256}})
	shared.sh(t, sb.ID, "fallocate -l 100G big 2>/dev/null || dd if=/dev/zero of=big bs=1M 2>/dev/null || true; df --output=avail / | tail -1")
	resp, err := shared.request(t.Context(), "PUT", contentPath(sb.ID, "/home/user/more"), zeros(8<<20))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusPreconditionFailed {
		b, _ := io.ReadAll(resp.Body)
		t.Errorf("upload to a full disk: %s %s", resp.Status, b)
	}
	shared.sh(t, sb.ID, "rm big; echo ok > more; cat more")
}

func TestNoRoomIsSaidAtOnce(t *testing.T) {
	s := ownServer(t, "--pool-size", "0", "--memory-limit-mib", "1400")
	s.create(t, nil)
	began := time.Now()
	_, err := s.callErr("POST", "/v1/sandboxes", object{"template": "base", "resources": object{"memory_mib": 4096}}, nil)
	took := time.Since(began)
	e := asAPIError(err)
	if e == nil || e.Code != "capacity_unavailable" || e.Status != 503 || !e.Retryable {
		t.Fatalf("over the limit: %v", err)
	}
	if took > 500*time.Millisecond { // the promise is 100 ms; this machine may be busy
		t.Errorf("the refusal took %s", took)
	}
	var page struct{ Items []sandboxJSON }
	s.call(t, "GET", "/v1/sandboxes", nil, &page)
	if len(page.Items) != 1 {
		t.Errorf("%d sandboxes after the refusal, want 1", len(page.Items))
	}
}

// TestOnlyTheTwoListenersListen looks at every TCP socket in state LISTEN that the server or its children hold.
func TestOnlyTheTwoListenersListen(t *testing.T) {
	t.Parallel()
	shared.create(t, nil)
	shims, vmms := shared.children(t)
	pids := []int{shared.cmd.Process.Pid}
	for _, p := range append(shims, vmms...) {
		pids = append(pids, p.pid)
	}
	var open []string
	for _, pid := range pids {
		open = append(open, listeners(t, pid)...)
	}
	want := map[string]bool{hexAddr(shared.api): true, hexAddr(shared.data): true}
	for _, addr := range open {
		if !want[addr] {
			t.Errorf("listens on %s besides the API and the data plane", addr)
		}
		delete(want, addr)
	}
	if len(want) != 0 {
		t.Errorf("not found: %v among %v", want, open)
	}
}

// listeners returns the local addresses, as the kernel writes them, of the listening TCP sockets that a process holds.
func listeners(t *testing.T, pid int) []string {
	t.Helper()
	inodes := map[string]bool{}
	links, err := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", pid))
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range links {
		target, _ := os.Readlink(l)
		if inode, ok := strings.CutPrefix(target, "socket:["); ok {
			inodes[strings.TrimSuffix(inode, "]")] = true
		}
	}
	var found []string
	for _, table := range []string{"tcp", "tcp6"} {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/net/%s", pid, table))
		if err != nil {
			continue // ended meanwhile, or no IPv6
		}
		for _, line := range strings.Split(string(b), "\n")[1:] {
			f := strings.Fields(line)
			if len(f) > 9 && f[3] == "0A" && inodes[f[9]] {
				found = append(found, f[1])
			}
		}
	}
	return found
}

// hexAddr writes 127.0.0.1:port as /proc/net/tcp does.
func hexAddr(addr string) string {
	_, port, _ := strings.Cut(addr, ":")
	n, _ := strconv.Atoi(port)
	return fmt.Sprintf("0100007F:%04X", n)
}
